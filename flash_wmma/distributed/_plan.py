"""What one rank's queries need of one rank's keys, as calls of a kernel.

A chunk of queries and a chunk of keys form a rectangle of scores, of which the mask leaves a band. Rows and columns
that the band leaves empty are cut off; then both bounds of the band are numbers from 0 on, as a kernel takes them,
whatever the distance of the chunks. Rectangles that can be one call become one: under a causal mask a rank's own keys
are one causal call, and those of another rank one call without a mask.

ALiBi's -slope * |distance| is a kernel's own where queries and keys end at the same place. Where all keys lie on one
side of all queries it is a term for each key, which is a bias with one row, and a term for each query, which shifts
only lse.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ._layout import Cut, Ranges, coalesced, held, most, pieces


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
    """A rectangle of scores: queries are rows of their rank, keys rows of the message with the keys."""

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

    @property
    def keys(self) -> int:
        """How many there are."""
        return self.k1 - self.k0

    @property
    def plain(self) -> bool:
        """Every query sees every key, and the tile may be joined to others."""
        return self.left < 0 and self.right < 0 and self.side != ALIGNED


class Job(NamedTuple):
    """Tiles of different sequences that one call computes; with dropout one tile."""

    tiles: tuple[Tile, ...]
    q: Ranges
    k: Ranges
    """Rows of the message."""
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
        return most(job.k for job in self.jobs) <= 1


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


def _tile(number: int, area: _Area, side: int, q0: int, k0: int, band: Band, shift: int) -> Tile:
    """An area as a tile, whose first query is row q0 and whose first key of the message is row k0."""
    i0, i1, j0, j1 = area
    distance = i0 + shift - j0
    left = -1 if band.left is None else band.left - distance
    right = -1 if band.right is None else band.right + distance
    left = left if left < i1 - i0 - 1 else -1
    right = right if right < j1 - j0 - 1 else -1
    return Tile(number, q0, q0 + i1 - i0, k0, k0 + j1 - j0, left, right, side, i0, j0)


def _sequence(
    number: int, length: tuple[int, int], cut: Cut, ranks: tuple[int, int], band: Band, firsts: tuple[int, int]
) -> tuple[list[Tile], list[tuple[int, int]]]:
    """The tiles of one sequence, and the keys that they need. The tiles' keys are numbered as if the message of this
    sequence began at row 0.

    ``firsts``: rows at which the sequence begins, of the queries and of the keys."""
    nq, nk = length
    first_q, first_k = firsts
    apart = nk - nq
    shift = apart if band.bottom_right else 0
    tiles, needed, sent = [], [], 0
    row_k = first_k
    for j0, j1 in pieces(nk, cut, ranks[1]):
        found, row_q = [], first_q
        for i0, i1 in pieces(nq, cut, ranks[0]):
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
def distances(lengths: Lengths, cut: Cut, band: Band) -> tuple[int, ...]:
    """Numbers n, 0 first: no rank's queries see keys of the rank n before it, around the ring, with any other n."""
    everyone = tuple(range(cut.world))
    shortest = min((nk // cut.chunks for _, nk in lengths if nk > 0), default=0)  # chunk
    if shortest == 0 or any(nq != nk for nq, nk in lengths):
        return everyone

    def reach(bound: int | None) -> int:
        """How many chunks away a key is at most."""
        return cut.chunks if bound is None else -(-bound // shortest)

    before, behind = reach(band.left), reach(band.right)
    if cut.layout == "zigzag":  # chunks go up from rank to rank, and down again
        before = behind = max(before, behind)
    return tuple(n for n in everyone if n <= before or cut.world - n <= behind)


@functools.lru_cache(256)
def most_rows(lengths: Lengths, cut: Cut, band: Band) -> tuple[int, int]:
    """No :func:`pair` of two ranks has more rows: of keys, and of their gradients, where a row counts twice if its pair
    may not be ``once``. Without the pairs, of which there are many."""
    of_chunk = [-(-nk // cut.chunks) for _, nk in lengths]
    in_place = all(nq == nk for nq, nk in lengths)
    narrow = False
    if in_place and band.left is not None and band.right is not None:
        width = max(band.left, band.right)
        of_chunk = [min(n, width) for n in of_chunk]  # its queries need one end of it, or the window is as wide
        narrow = all(width <= nk // cut.chunks for _, nk in lengths)
    plain = band.left is None and band.right in (None, 0) and not band.dropout and len(lengths) == 1 and in_place
    once = not band.alibi and (plain or narrow or cut.layout == "contiguous")
    rows = len(cut.of_rank(0)) * sum(of_chunk)
    return rows, rows if once else 2 * rows


@functools.lru_cache(256)
def pair(lengths: Lengths, cut: Cut, q_rank: int, k_rank: int, band: Band) -> Pair:
    """What the queries of one rank need of the keys of another, or of its own."""
    message: list[tuple[int, int]] = []
    jobs: dict[tuple[int, ...], list[Tile]] = {}
    first_q = first_k = sent = 0
    for number, length in enumerate(lengths):
        tiles, needed = _sequence(number, length, cut, (q_rank, k_rank), band, (first_q, first_k))
        seen: dict[tuple[int, int, int], int] = {}
        for tile in tiles:
            kind = tile.left, tile.right, tile.side
            nth = seen[kind] = seen.get(kind, -1) + 1
            own = (number,) if band.dropout else ()
            jobs.setdefault((*kind, nth, *own), []).append(tile._replace(k0=tile.k0 + sent, k1=tile.k1 + sent))
        message += needed
        sent += sum(end - begin for begin, end in needed)
        first_q += held(length[0], cut, q_rank)
        first_k += held(length[1], cut, k_rank)

    made = tuple(
        Job(
            tuple(each),
            coalesced([(t.q0, t.q1) for t in each]),
            coalesced([(t.k0, t.k1) for t in each]),
            *kind[:3],
        )
        for kind, each in jobs.items()
    )
    return Pair(coalesced(message), sent, made)
