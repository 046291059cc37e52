"""What one rank's queries need of one rank's keys, as calls of a kernel.

A chunk of queries and a chunk of keys form a rectangle of scores, of which the mask leaves a band. Rows and columns
that the band leaves empty are cut off; then both bounds of the band are numbers from 0 on, as a kernel takes them,
whatever the distance of the chunks. Rectangles that can be one call become one: under a causal mask a rank's own keys
are one causal call, and those of another rank one call without a mask.

ALiBi's -slope * |distance| is a kernel's own where queries and keys end at the same place. Where all keys lie on one
side of all queries it is a term for each key, which is a bias with one row, and a term for each query, which shifts
only lse.

A window that is bounded on both sides and no wider than a chunk reaches into the next chunk alone. Then the queries
near a border with another rank's chunk see its keys and their own rank's in one call, and all others see their own
rank's keys alone: each query is in one call, so that nothing is merged.
"""

from __future__ import annotations

import functools
import itertools
import sys
from typing import NamedTuple

from ._layout import Ranges, coalesced, held, most, pieces


class Band(NamedTuple):
    """Which keys a query sees: from ``left`` before its own place to ``right`` behind; ``None`` bounds nothing."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    """The last query's place is the last key's, else the first query's is the first key's."""
    alibi: bool = False
    dropout: bool = False
    """Which weights are dropped depends on places: the rows of a tile follow each other in the sequence."""


Lengths = tuple[tuple[int, int], ...]
"""(queries, keys) of every sequence."""

PLAIN, ALIGNED = 0, 2


class Tile(NamedTuple):
    """A rectangle of scores: queries are rows of their rank, keys rows of the message with the keys. Keys of the
    queries' own rank may be before and behind them."""

    sequence: int
    q0: int
    q1: int
    k0: int
    k1: int
    left: int
    right: int
    """As the ops take them: -1 bounds nothing."""
    side: int
    """0 without ALiBi; 1 or -1: no query lies before, or behind, a key that it sees; 2: the kernel's own ALiBi."""
    i0: int
    j0: int
    """The places in the sequence of the first query and the first key."""
    before: tuple[int, int] = (0, 0)
    behind: tuple[int, int] = (0, 0)
    """Keys as rows of the queries' own rank."""

    @property
    def keys(self) -> int:
        """How many there are."""
        return sum(end - begin for begin, end in (self.before, (self.k0, self.k1), self.behind))

    @property
    def plain(self) -> bool:
        """Every query sees every key, and the tile may be joined to others."""
        return self.left < 0 and self.right < 0 and self.side != ALIGNED


class Job(NamedTuple):
    """Tiles of different sequences that one call computes; with dropout one tile."""

    tiles: tuple[Tile, ...]
    q: Ranges
    k: Ranges
    """Rows of the message; behind its last row those of the queries' own rank."""
    left: int
    right: int
    side: int


class Pair(NamedTuple):
    """What a rank's queries need of a rank's keys."""

    message: Ranges
    """Rows of the keys' rank."""
    rows: int
    """How many these are."""
    jobs: tuple[Job, ...]

    @property
    def once(self) -> bool:
        """No two jobs have a key of the message, so that the keys' gradients need not be added up."""
        return most(keys_of(job, self).message for job in self.jobs) <= 1


class Keys(NamedTuple):
    """The keys of a job by where they are, with their places among the job's keys."""

    message: Ranges
    places_in_message: Ranges
    own: Ranges
    places_in_own: Ranges


@functools.lru_cache(256)
def _keys(keys: Ranges, rows: int) -> Keys:
    starts = itertools.accumulate((end - begin for begin, end in keys), initial=0)
    places = [(begin, end, start) for (begin, end), start in zip(keys, starts, strict=False)]

    def of(least: int, limit: int) -> tuple[Ranges, Ranges]:
        parts = [(max(b, least), min(e, limit), at - b) for b, e, at in places if b < limit and least < e]
        rows = coalesced([(b - least, e - least) for b, e, _ in parts])
        return rows, coalesced([(b + shift, e + shift) for b, e, shift in parts])

    return Keys(*of(0, rows), *of(rows, sys.maxsize))


def keys_of(job: Job, needed: Pair) -> Keys:
    """Whose the keys of a job of ``needed`` are."""
    return _keys(job.k, needed.rows)


class _Area(NamedTuple):
    """Queries and keys by their places in the sequence."""

    i0: int
    i1: int
    j0: int
    j1: int


def _trimmed(area: _Area, band: Band, shift: int) -> _Area | None:
    """Without the queries that see none of the keys and the keys that no query sees."""
    i0, i1, j0, j1 = area
    while i0 < i1 and j0 < j1:
        before = i0, i1, j0, j1
        if band.left is not None:
            j0 = max(j0, i0 + shift - band.left)
            i1 = min(i1, j1 - shift + band.left)
        if band.right is not None:
            j1 = min(j1, i1 + shift + band.right)
            i0 = max(i0, j0 - shift - band.right)
        if before == (i0, i1, j0, j1):
            return _Area(*before)
    return None


def _split(whole: _Area, band: Band, shift: int, apart: int) -> list[tuple[_Area, int]]:
    """Areas with their sides; to ALiBi a query's place is ``apart`` more than its number."""
    area = _trimmed(whole, band, shift)
    if area is None:
        return []
    if not band.alibi:
        return [(area, PLAIN)]
    i0, i1, j0, j1 = area
    if j1 - i1 == apart:
        return [(area, ALIGNED)]
    nearest, farthest = i0 + apart - (j1 - 1), i1 - 1 + apart - j0
    if band.right is not None:
        nearest = max(nearest, apart - shift - band.right)
    if band.left is not None:
        farthest = min(farthest, apart - shift + band.left)
    if nearest >= 0:
        return [(area, 1)]
    if farthest <= 0:
        return [(area, -1)]
    if j1 - apart > i1:
        cut = i1 + apart
        parts = _Area(i0, i1, j0, cut), _Area(i0, i1, cut, j1)
    else:
        cut = j1 - apart
        parts = _Area(i0, cut, j0, j1), _Area(cut, i1, j0, j1)
    return [found for part in parts for found in _split(part, band, shift, apart)]


def _tile(
    number: int,
    area: _Area,
    side: int,
    q0: int,
    k0: int,
    band: Band,
    shift: int,
    before: tuple[int, int] = (0, 0),
    behind: tuple[int, int] = (0, 0),
) -> Tile:
    """An area as a tile, whose first query is row q0 and whose first key of the message is row k0."""
    i0, i1, j0, j1 = area
    distance = i0 + shift - j0
    left = -1 if band.left is None else band.left - distance
    right = -1 if band.right is None else band.right + distance
    own = before[1] - before[0] + behind[1] - behind[0]
    return Tile(
        number,
        q0,
        q0 + i1 - i0,
        k0,
        k0 + j1 - j0 - own,
        left if left < i1 - i0 - 1 else -1,
        right if right < j1 - j0 - 1 else -1,
        side,
        i0,
        j0,
        before,
        behind,
    )


def _reaches_next_chunk(length: tuple[int, int], world: int, band: Band) -> bool:
    """Whether the window reaches no farther, and no query sees the chunks on both sides of its own."""
    nq, nk = length
    if band.left is None or band.right is None or nq != nk or (band.alibi and band.right != 0):
        return False
    return band.left + band.right <= nq // (2 * world)


def _near(
    number: int, n: int, world: int, ranks: tuple[int, int], band: Band, firsts: tuple[int, int, int]
) -> tuple[list[Tile], list[tuple[int, int]]]:
    """As :func:`_sequence`, if the window of a sequence of n queries and keys :func:`_reaches_next_chunk`."""
    left, right = band.left, band.right
    assert left is not None
    assert right is not None
    first_q, first_k, first_own = firsts
    side = ALIGNED if band.alibi else PLAIN
    make = functools.partial(_tile, number, side=side, band=band, shift=0)
    tiles, needed = [], []
    chunks, rows = [], 0  # of the queries, with the row of each among the sequence's; those that are neighbours as one
    for begin, end in coalesced(list(pieces(n, world, ranks[0]))):
        chunks.append((begin, end, rows))
        rows += end - begin
    if ranks[0] == ranks[1]:
        for begin, end, row in chunks:
            first, last = begin + (left if begin > 0 else 0), end - (right if end < n else 0)
            if first < last:
                tiles.append(make(area=_Area(first, last, begin, end), q0=first_q + row + first - begin, k0=row))
        return tiles, [(first_k, first_k + held(n, world, ranks[1]))]
    row_k = sent = 0
    for j0, j1 in pieces(n, world, ranks[1]):
        for begin, end, row in chunks:
            if left > 0 and j1 == begin:
                area, own = _Area(begin, begin + left, begin - left, begin + left + right), first_own + row
                keys = own, own + left + right
                tiles.append(make(area=area, q0=first_q + row, k0=sent, behind=keys))
                needed.append((first_k + row_k + j1 - j0 - left, first_k + row_k + j1 - j0))
                sent += left
            if right > 0 and j0 == end:
                area, own = _Area(end - right, end, end - right - left, end + right), first_own + row + end - begin
                keys = own - left - right, own
                tiles.append(make(area=area, q0=first_q + row + end - begin - right, k0=sent, before=keys))
                needed.append((first_k + row_k, first_k + row_k + right))
                sent += right
        row_k += j1 - j0
    return tiles, needed


def _sequence(
    number: int, length: tuple[int, int], world: int, ranks: tuple[int, int], band: Band, firsts: tuple[int, int, int]
) -> tuple[list[Tile], list[tuple[int, int]]]:
    """The tiles of one sequence, and the keys that they need. The tiles' keys are numbered as if the message of this
    sequence began at row 0.

    ``firsts``: rows at which the sequence begins: of the queries, of the keys, and of the queries' rank's own keys."""
    nq, nk = length
    if _reaches_next_chunk(length, world, band):
        return _near(number, nq, world, ranks, band, firsts)
    first_q, first_k, _ = firsts
    apart = nk - nq
    shift = apart if band.bottom_right else 0
    tiles, needed, sent = [], [], 0
    row_k = first_k
    for j0, j1 in pieces(nk, world, ranks[1]):
        found, row_q = [], first_q
        for i0, i1 in pieces(nq, world, ranks[0]):
            found += [(area, side, row_q - i0) for area, side in _split(_Area(i0, i1, j0, j1), band, shift, apart)]
            row_q += i1 - i0
        if found:
            begin, end = min(area.j0 for area, *_ in found), max(area.j1 for area, *_ in found)
            for area, side, row in found:
                tiles.append(_tile(number, area, side, row + area.i0, sent + area.j0 - begin, band, shift))
            needed.append((row_k + begin - j0, row_k + end - j0))
            sent += end - begin
        row_k += j1 - j0
    return _joined(sorted(tiles), band.dropout), needed


def _causal(a: Tile, b: Tile, c: Tile) -> Tile | None:
    """One tile for a rank's own keys under a causal mask: the diagonals a and c, and b below a, or nothing."""
    if a.side != PLAIN or a.left >= 0 or c.left >= 0 or a.right < 0 or c.right < 0 or not b.plain:
        return None
    corners = (a.q1, a.q1, c.q1, a.k0, a.k1, a.k1) == (b.q0, c.q0, b.q1, b.k0, b.k1, c.k0)
    more = (a.k1 - a.k0) - (a.q1 - a.q0)
    if not corners or c.right + more != a.right or not more - 1 <= a.right <= more:
        return None
    return a._replace(q1=c.q1, k1=c.k1)


def _pair_joined(a: Tile, b: Tile) -> Tile | None:
    """Both as one tile, or nothing."""
    if not (a.plain and b.plain and a.side == b.side):
        return None
    if (a.q0, a.q1, a.k1) == (b.q0, b.q1, b.k0):
        return a._replace(k1=b.k1)
    if (a.k0, a.k1, a.q1) == (b.k0, b.k1, b.q0):
        return a._replace(q1=b.q1)
    return None


def _in_place(whole: Tile, *parts: Tile) -> bool:
    """Whether rows that follow each other in the whole do so in the sequence."""
    moved = {(tile.i0 - tile.q0, tile.j0 - tile.k0) for tile in (whole, *parts)}
    return len(moved) == 1


def _joined(tiles: list[Tile], in_place: bool) -> list[Tile]:
    """The same scores in fewer tiles, in the order of their queries and keys."""
    if len(tiles) == 3 and (whole := _causal(*tiles)) and (not in_place or _in_place(whole, *tiles)):
        return [whole]
    for a in tiles:
        for b in tiles:
            if a is not b and (both := _pair_joined(a, b)) and (not in_place or _in_place(both, a, b)):
                rest = [tile for tile in tiles if tile is not a and tile is not b]
                return _joined(sorted([both, *rest]), in_place)
    return tiles


@functools.lru_cache(256)
def most_rows(lengths: Lengths, world: int, band: Band) -> tuple[int, int]:
    """No :func:`pair` of two ranks has more rows: of keys, and of their gradients, where a row counts twice if its pair
    may not be ``once``. Without the pairs, of which there are many."""
    if all(_reaches_next_chunk(length, world, band) for length in lengths):
        assert band.left is not None
        assert band.right is not None
        rows = 2 * max(band.left, band.right) * len(lengths)
        return rows, rows
    rows = sum(2 * -(-nk // (2 * world)) for _, nk in lengths)
    plain = band.left is None and band.right in (None, 0) and not band.alibi and not band.dropout
    once = plain and len(lengths) == 1 and lengths[0][0] == lengths[0][1]
    return rows, rows if once else 2 * rows


@functools.lru_cache(256)
def pair(lengths: Lengths, world: int, q_rank: int, k_rank: int, band: Band) -> Pair:
    """What the queries of one rank need of the keys of another, or of its own."""
    message: list[tuple[int, int]] = []
    jobs: dict[tuple[int, ...], list[Tile]] = {}
    first_q = first_k = first_own = sent = 0
    for number, length in enumerate(lengths):
        firsts = first_q, first_k, first_own
        tiles, needed = _sequence(number, length, world, (q_rank, k_rank), band, firsts)
        seen: dict[tuple[int, int, int], int] = {}
        for tile in tiles:
            kind = tile.left, tile.right, tile.side
            nth = seen[kind] = seen.get(kind, -1) + 1
            own = (number,) if band.dropout else ()
            jobs.setdefault((*kind, nth, *own), []).append(tile._replace(k0=tile.k0 + sent, k1=tile.k1 + sent))
        message += needed
        sent += sum(end - begin for begin, end in needed)
        first_q += held(length[0], world, q_rank)
        first_k += held(length[1], world, k_rank)
        first_own += held(length[1], world, q_rank)

    def keys(tile: Tile) -> tuple[tuple[int, int], ...]:
        before, behind = ((begin + sent, end + sent) for begin, end in (tile.before, tile.behind))
        return before, (tile.k0, tile.k1), behind

    made = tuple(
        Job(
            tuple(each),
            coalesced([(t.q0, t.q1) for t in each]),
            coalesced([part for t in each for part in keys(t)]),
            *kind[:3],
        )
        for kind, each in jobs.items()
    )
    return Pair(coalesced(message), sent, made)
