"""Ulysses: each rank exchanges its rows of all heads for all rows of its heads, attends, and exchanges back.

https://arxiv.org/abs/2309.14509
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._autograd import once_differentiable
from ._agree import Place
from ._layout import Cut, held, order, rows
from ._rows import NO_DOUBLE, index, take

Heads = tuple[tuple[int, ...], ...]
"""The heads of each rank."""


class Exchange(NamedTuple):
    """How rows of all heads become all rows of some heads."""

    place: Place
    heads: Heads
    """Of each rank; several ranks may have the same one."""
    all_heads: int
    """How many there are."""
    lengths: tuple[int, ...]
    packed: bool
    cut: Cut

    @property
    def dim(self) -> int:
        """Where the rows are."""
        return 0 if self.packed else 2

    def rows(self, rank: int) -> int:
        """How many rows a rank holds."""
        return sum(held(n, self.cut, rank) for n in self.lengths)


def split_heads(hq: int, hk: int, world: int) -> tuple[Heads, Heads, list[tuple[int, ...] | None]]:
    """The query heads of each rank, the heads of k and v that they read, and, where grouped heads do not line up, which
    of these each query head reads."""
    group = hq // hk
    queries, keys, reads = [], [], []
    for rank in range(world):
        begin, end = rank * hq // world, (rank + 1) * hq // world
        first, last = begin // group, (end - 1) // group
        read = tuple(h // group - first for h in range(begin, end))
        queries.append(tuple(range(begin, end)))
        keys.append(tuple(range(first, last + 1)))
        n, shared = end - begin, last + 1 - first
        in_line = n % shared == 0 and read == tuple(h // (n // shared) for h in range(n))
        reads.append(None if in_line else read)
    return tuple(queries), tuple(keys), reads


@functools.lru_cache(16)
def _order(lengths: tuple[int, ...], cut: Cut, device: torch.device) -> Tensor:
    return order(lengths, cut).to(device)


def _all_to_all(place: Place, parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Sends part i to rank i; what each rank sent, flat."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [part.numel() for part in parts], group=place.group)
    return list(torch.split(received, sizes))


def _gather(x: Tensor, exchange: Exchange) -> Tensor:
    """All rows of this rank's heads, in the order of the sequences, of its rows of all heads."""
    place, dim = exchange.place, exchange.dim
    mine = len(exchange.heads[place.rank])

    def shape(rank: int) -> list[int]:
        n = exchange.rows(rank)
        return [n, mine, x.shape[2]] if exchange.packed else [x.shape[0], mine, n, x.shape[3]]

    parts = [x.narrow(1, heads[0], len(heads)) for heads in exchange.heads]
    shapes = [shape(rank) for rank in range(place.world)]
    arrived = _all_to_all(place, parts, [torch.Size(each).numel() for each in shapes])
    whole = torch.cat([part.view(each) for part, each in zip(arrived, shapes, strict=True)], dim)
    return whole.index_select(dim, _order(exchange.lengths, exchange.cut, x.device))


def _scatter(x: Tensor, exchange: Exchange) -> Tensor:
    """The reverse; what several ranks have of a head is added in fp32."""
    place, dim = exchange.place, exchange.dim
    parts = []
    for rank in range(place.world):
        ranges = rows(exchange.lengths, exchange.cut, rank)
        parts.append(x.index_select(dim, index(ranges, x.device)) if len(ranges) > 2 else take(x, ranges, dim))
    n = exchange.rows(place.rank)

    def shape(heads: int) -> list[int]:
        return [n, heads, x.shape[2]] if exchange.packed else [x.shape[0], heads, n, x.shape[3]]

    shapes = [shape(len(heads)) for heads in exchange.heads]
    arrived = _all_to_all(place, parts, [torch.Size(each).numel() for each in shapes])
    pieces = [part.view(each) for part, each in zip(arrived, shapes, strict=True)]
    if sum(map(len, exchange.heads)) == exchange.all_heads:
        return torch.cat(pieces, 1)
    total = torch.zeros(shape(exchange.all_heads), dtype=torch.float32, device=x.device)
    for heads, piece in zip(exchange.heads, pieces, strict=True):
        total.narrow(1, heads[0], len(heads)).add_(piece)
    return total.to(x.dtype)


class GatherRows(torch.autograd.Function):
    """Rows of all heads to all rows of this rank's heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return _gather(x, exchange)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ScatterRows.apply(gradient, ctx.exchange), None


class ScatterRows(torch.autograd.Function):
    """All rows of this rank's heads to its rows of all heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return _scatter(x, exchange)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return GatherRows.apply(gradient, ctx.exchange), None


class ScatterResults(torch.autograd.Function):
    """:class:`ScatterRows` of out and lse. The gradients of both are exchanged, whichever of them a rank's loss has."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """``lse``: with out's dimensions but for the last."""
        ctx.exchange = exchange
        return _scatter(out, exchange), _scatter(lse[..., None], exchange)[..., 0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        of_lse = GatherRows.apply(dlse[..., None], ctx.exchange)[..., 0]
        return GatherRows.apply(dout, ctx.exchange), of_lse, None


class Unshard(torch.autograd.Function):
    """All rows, on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, lengths: tuple[int, ...], cut: Cut, place: Place) -> Tensor:
        ctx.of = dim, lengths, cut, place
        counts = [sum(held(n, cut, rank) for n in lengths) for rank in range(place.world)]
        rows_first = x.movedim(dim, 0)
        padded = x.new_zeros((max(counts), *rows_first.shape[1:]))
        padded[: counts[place.rank]] = rows_first
        everyone = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everyone, padded, group=place.group)
        whole = torch.cat([part[:n] for part, n in zip(everyone, counts, strict=True)])
        return whole.index_select(0, _order(lengths, cut, x.device)).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return once_differentiable(NO_DOUBLE, _sum_of_all, ctx.of, gradient), None, None, None, None


def _sum_of_all(of: tuple[int, tuple[int, ...], Cut, Place], gradient: Tensor) -> Tensor:
    """This rank's rows of the sum of all ranks' gradients."""
    dim, lengths, cut, place = of
    total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
    dist.all_reduce(total, group=place.group)
    mine = index(rows(lengths, cut, place.rank), gradient.device)
    return total.index_select(dim, mine).to(gradient.dtype)
