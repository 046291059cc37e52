"""Which rows of a sequence each rank holds.

Zigzag: a sequence of n rows is cut into 2R chunks for R ranks, and rank r holds chunks r and 2R - 1 - r, in this order.
Under a causal mask every rank then has the same work to a chunk's share. Contiguous: it is cut into R chunks, and rank
r holds chunk r. With a narrow window every rank then has the same work, and needs keys of its neighbours alone. Of C
chunks, chunk c is the rows from c * n // C on, so that n may be any number. Of packed sequences each is cut by itself.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
"""Rows from the first number to before the second, of each pair."""


Layout = Literal["zigzag", "contiguous"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


class Cut(NamedTuple):
    """Among how many ranks sequences are cut, and how."""

    world: int
    layout: Layout = "zigzag"

    @property
    def chunks(self) -> int:
        """Of a sequence."""
        return self.world if self.layout == "contiguous" else 2 * self.world

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The numbers of a rank's chunks."""
        return (rank,) if self.layout == "contiguous" else (rank, 2 * self.world - 1 - rank)


def pieces(n: int, cut: Cut, rank: int) -> Ranges:
    """The chunks of a rank; any may be empty."""
    return tuple((c * n // cut.chunks, (c + 1) * n // cut.chunks) for c in cut.of_rank(rank))


def held(n: int, cut: Cut, rank: int) -> int:
    """How many of n rows a rank holds."""
    return sum(end - begin for begin, end in pieces(n, cut, rank))


def coalesced(ranges: list[tuple[int, int]]) -> Ranges:
    """The same rows in the same order: no empty range, and none that begins where the one before ends."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if end <= begin:
            continue
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


def count(ranges: Ranges) -> int:
    """How many rows these are."""
    return sum(end - begin for begin, end in ranges)


# Sets of rows, as ranges in the rows' order that do not overlap


@functools.lru_cache(256)
def minus(a: Ranges, b: Ranges) -> Ranges:
    """The rows of a that are not in b."""
    left = []
    others = iter((*b, (sys.maxsize, sys.maxsize)))
    other = next(others)
    for begin, end in a:
        while begin < end:
            while other[1] <= begin:
                other = next(others)
            cut = min(end, max(begin, other[0]))
            left.append((begin, cut))
            begin = end if cut == end else min(end, other[1])
    return coalesced(left)


@functools.lru_cache(256)
def plus(a: Ranges, b: Ranges) -> Ranges:
    """The rows of both."""
    return coalesced(sorted((*a, *minus(b, a))))


@functools.lru_cache(256)
def within(outer: Ranges, inner: Ranges) -> Ranges:
    """The rows of ``outer`` whose numbers among these rows are in ``inner``."""
    found, start = [], 0
    numbered = []
    for begin, end in outer:
        numbered.append((start, start + end - begin, begin - start))
        start += end - begin
    for first, last in inner:
        found += [(max(first, b) + shift, min(last, e) + shift) for b, e, shift in numbered if b < last and first < e]
    return coalesced(found)


def most(sets: Iterable[Ranges]) -> int:
    """In how many of the sets a row is, at most."""
    steps = sorted(step for ranges in sets for begin, end in ranges for step in ((begin, 1), (end, -1)))
    return max(itertools.accumulate(change for _, change in steps), default=0)


@functools.lru_cache(256)
def rows(lengths: tuple[int, ...], cut: Cut, rank: int) -> Ranges:
    """The rows of a rank among the rows of sequences of these lengths, one after the other."""
    mine, start = [], 0
    for n in lengths:
        mine += [(start + begin, start + end) for begin, end in pieces(n, cut, rank)]
        start += n
    return coalesced(mine)


def numbers(ranges: Ranges) -> Tensor:
    """Every row of the ranges, on the CPU."""
    each = [torch.arange(begin, end, device="cpu") for begin, end in ranges or ((0, 0),)]
    return torch.cat(each)


def positions(lengths: tuple[int, ...], cut: Cut, rank: int) -> Tensor:
    """The place of each of a rank's rows within its sequence."""
    return numbers(tuple(piece for n in lengths for piece in pieces(n, cut, rank)))


def order(lengths: tuple[int, ...], cut: Cut) -> Tensor:
    """Of each row of the whole: its number among the rows of rank 0, then of rank 1, and so on."""
    by_rank = torch.cat([numbers(rows(lengths, cut, rank)) for rank in range(cut.world)])
    return torch.empty_like(by_rank).index_copy_(0, by_rank, torch.arange(len(by_rank), device="cpu"))
