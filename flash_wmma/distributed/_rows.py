"""Rows of tensors, by ranges: taken, added to, merged."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import _ops
from .._call import Call
from .._merge import merge_parts, share
from ._layout import Ranges, minus, numbers, plus

FEW = 4
"""Up to so many ranges are handled one by one, more through an index."""


@functools.lru_cache(128)
@torch.inference_mode(False)  # serves calls outside of it too
def index(ranges: Ranges, device: torch.device) -> Tensor:
    """The rows' numbers."""
    return numbers(ranges).to(device)


def covers(ranges: Ranges, n: int) -> bool:
    """Whether these are all n rows."""
    return ranges == ((0, n),) or (n == 0 and not ranges)


def take(x: Tensor, ranges: Ranges, dim: int) -> Tensor:
    """Those rows; x itself if it has no others, a view if they lie together."""
    if not ranges:
        return x.narrow(dim, 0, 0)
    if len(ranges) == 1:
        ((begin, end),) = ranges
        return x if end - begin == x.shape[dim] else x.narrow(dim, begin, end - begin)
    if len(ranges) <= FEW:
        return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in ranges], dim)
    return x.index_select(dim, index(ranges, x.device))


def padded(x: Tensor, n: int, dim: int) -> Tensor:
    """x with n rows of zeros before it."""
    return torch.nn.functional.pad(x, (*(0, 0) * (x.dim() - 1 - dim), n, 0)) if n else x


def behind(x: Tensor, n: int, dim: int) -> Tensor:
    """x without its first n rows."""
    return x.narrow(dim, n, x.shape[dim] - n) if n else x


def put(to: Tensor, ranges: Ranges, value: Tensor | float, dim: int) -> None:
    """Writes a tensor, or one number, to those rows."""
    if isinstance(value, float):
        if len(ranges) <= FEW:
            for begin, end in ranges:
                to.narrow(dim, begin, end - begin).fill_(value)
        else:
            to.index_fill_(dim, index(ranges, to.device), value)
    elif len(ranges) == 1:
        ((begin, end),) = ranges
        to.narrow(dim, begin, end - begin).copy_(value)
    elif len(ranges) <= FEW:
        at = 0
        for begin, end in ranges:
            to.narrow(dim, begin, end - begin).copy_(value.narrow(dim, at, end - begin))
            at += end - begin
    else:
        to.index_copy_(dim, index(ranges, to.device), value.to(to.dtype))


def add(total: Tensor, ranges: Ranges, value: Tensor, dim: int) -> None:
    """Adds to those rows of ``total``."""
    if len(ranges) <= FEW:
        at = 0
        for begin, end in ranges:
            total.narrow(dim, begin, end - begin).add_(value.narrow(dim, at, end - begin))
            at += end - begin
    else:
        total.index_add_(dim, index(ranges, total.device), value.to(total.dtype))


NO_DOUBLE = "the gradient of a gradient is not built for sequences that several ranks hold"


class Sum:
    """A sum of gradients, each of some rows. In their own type where a row has two at most, whose sum is rounded once;
    more add up in fp32."""

    def __init__(self, like: Tensor, dim: int, most: int) -> None:
        """``most``: how many gradients a row has at most."""
        self._like, self._dim, self._most = like, dim, most
        self._sum: Tensor | None = None
        self._there: Ranges = ()
        """The rows that have a value."""

    def add(self, ranges: Ranges, value: Tensor) -> None:
        """Adds to those rows. ``value`` may be kept, and written."""
        if self._sum is None and covers(ranges, self._like.shape[self._dim]):
            self._sum, self._there = value, ranges
            return
        if self._sum is None:
            dtype = value.dtype if self._most <= 2 else torch.float32
            self._sum = torch.empty(self._like.shape, dtype=dtype, device=self._like.device)
        new = minus(ranges, self._there)
        if new == ranges:
            put(self._sum, ranges, value, self._dim)
        else:
            put(self._sum, new, 0.0, self._dim)
            if self._most > 2 or value.dtype != self._sum.dtype:
                self._sum = self._sum.float()
            add(self._sum, ranges, value, self._dim)
        self._there = plus(self._there, ranges)

    def take(self, dtype: torch.dtype) -> Tensor:
        """The sum, 0 where nothing was added."""
        if self._sum is None:
            return torch.zeros_like(self._like, dtype=dtype)
        put(self._sum, minus(((0, self._like.shape[self._dim]),), self._there), 0.0, self._dim)
        return self._sum.to(dtype)


class Merged:
    """Attention over several parts of the keys, merged in fp32. Between merges out is kept in fp32: where a row has two
    parts at most it is rounded once, as it is anyway.

    Rows are dimension ``dim`` of out: 2 of (B, H, N, d_v), where lse is (B, H, N), or 0 of (N, H, d_v), where it is
    (H, N).
    """

    def __init__(self, out_shape: torch.Size, lse_shape: torch.Size, dim: int, like: Tensor, most: int) -> None:
        """``most``: how many parts a row has at most."""
        self._dim, self._most = dim, most
        dtype = like.dtype if most <= 2 else torch.float32
        self._new = functools.partial(torch.empty, out_shape, dtype=dtype, device=like.device)
        self._new_lse = functools.partial(torch.empty, lse_shape, dtype=torch.float32, device=like.device)
        self._rows = out_shape[dim]
        self._out: Tensor | None = None
        self._lse = torch.empty(0, device=like.device)
        self._there: Ranges = ()
        """The rows that have a value."""
        self._merges = like.device.type == "cuda"
        """No kernel has refused to."""

    def attend(self, ranges: Ranges, q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
        """Has the kernel of a dense call write those rows where they go, or merge them into what is there, by itself.

        Returns:
            False if the part has to be computed and given to :meth:`add`. Nothing is done then. The reasons are:

            - the rows lie apart;
            - only some of them have a part already;
            - they are all rows, and this is the first of two parts at most, whose out is kept as it is;
            - the call has more than a scale and a band;
            - its kernel cannot merge.
        """
        if len(ranges) != 1:
            return False
        ((begin, end),) = ranges
        first = minus(ranges, self._there) == ranges
        if first and self._most <= 2:
            if covers(ranges, self._rows):
                return False
            self._make()
            assert self._out is not None
            lse = _ops.forward_into(self._out.narrow(self._dim, begin, end - begin), q, k, v, call)
            put(self._lse, ranges, lse, self._lse.dim() - 1)
            self._there = plus(self._there, ranges)
            return True
        if not (self._merges and call.only_band) or (not first and minus(ranges, self._there)):
            return False
        before = self._out, self._lse
        self._make()
        assert self._out is not None
        rows = self._out.narrow(self._dim, begin, end - begin), self._lse.narrow(-1, begin, end - begin)
        self._merges = _ops.forward_merged(*rows, q, k, v, not first, call)
        if self._merges:
            self._there = plus(self._there, ranges)
        else:
            self._out, self._lse = before
        return self._merges

    def _make(self) -> None:
        """Memory for all rows. With more than two parts they are kept in fp32."""
        if self._out is None:
            self._out, self._lse = self._new(), self._new_lse()
        if self._most > 2:
            self._out = self._out.float()

    def add(self, ranges: Ranges, out: Tensor, lse: Tensor) -> None:
        """Merges a part into those rows; it may be kept, and written. What a part holds that sees no key (lse -inf)
        does not count, unless it is NaN."""
        if self._out is None and covers(ranges, self._rows):
            self._out, self._lse, self._there = out, lse, ranges
            return
        if self._out is None:
            self._out, self._lse = self._new(), self._new_lse()
        new = minus(ranges, self._there)
        if new == ranges:
            put(self._out, ranges, out, self._dim)
            put(self._lse, ranges, lse, self._lse.dim() - 1)
        else:
            self._clear(new)
            self._make()
            if len(ranges) == 1:
                ((begin, end),) = ranges
                rows = self._out.narrow(self._dim, begin, end - begin), self._lse.narrow(-1, begin, end - begin)
                merge_parts(*rows, out, lse)
            else:
                merge_parts(self._out, self._lse, out, lse, index(ranges, out.device))
        self._there = plus(self._there, ranges)

    def _clear(self, ranges: Ranges) -> None:
        """What rows without a part have."""
        assert self._out is not None
        put(self._out, ranges, 0.0, self._dim)
        put(self._lse, ranges, -torch.inf, self._lse.dim() - 1)

    def take(self, dtype: torch.dtype, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(out, lse); 0 and -inf where no part was. ``sinks``: (H), the logit of a key without value that every row
        sees, which no part has. One of +inf makes its head's rows NaN."""
        if self._out is None:
            self._out, self._lse = self._new(), self._new_lse()
        self._clear(minus(((0, self._rows),), self._there))
        out, lse = self._out, self._lse
        if sinks is not None:
            with_sinks = torch.logaddexp(lse, sinks.masked_fill(sinks == torch.inf, torch.nan)[:, None])
            weight = share(lse, with_sinks)
            out, lse = out * (weight if self._dim == 2 else weight.t())[..., None], with_sinks
        return out.to(dtype).contiguous(), lse.contiguous()
