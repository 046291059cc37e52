"""Ring attention: keys and values travel between the ranks while tiles are computed.

In step t rank r computes with the keys of rank r - t, which it receives from that rank itself while it computes the
step before. So only the rows that the queries see are sent, under a causal mask with zigzag rows three quarters of what
would go round a ring from neighbour to neighbour. Steps in which no rank has anything to do are left out. In backward
keys and values travel once more, and their gradients go home from each rank that computed with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _autograd, _ops
from .._call import Call
from .._call import Lengths as Tables
from .._shared_queries import UNIT, SharedQueries
from ._agree import Place
from ._layout import Cut, Ranges, count, held, most, positions, within
from ._messages import Direct, Post, Shape, Travel
from ._peer import peer_of
from ._plan import ALIGNED, PLAIN, Band, Job, Lengths, Pair, distances, most_rows, pair
from ._rows import NO_DOUBLE, Merged, Sum, behind, padded, take

MANY = 3
"""Parts that add up in fp32."""
MULTIPLE = 16
"""Of the places where dropout's mask of a call can begin."""


class Step(NamedTuple):
    """What a rank does with the keys of one rank."""

    source: int
    """Whose keys these are."""
    to: int
    """The rank that computes with this rank's keys meanwhile."""
    needed: Pair
    asked: Pair
    """What ``to`` needs of this rank's keys."""


def _shared_rows(job: Job, n: int) -> tuple[int, int] | None:
    """The rows of queries, of n, with which a job can be one of several calls that share them: up to where a kernel's
    group of rows ends, if those behind the job's own see nothing. None: it cannot."""
    if len(job.q) != 1:
        return None
    ((first, end),) = job.q
    up = min(-(-end // UNIT) * UNIT, n)
    alone = up == end or (job.left >= 0 and end - first - job.left >= count(job.k))
    return (first, up) if first % UNIT == 0 and alone else None


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """A call of ring attention without its tensors."""

    place: Place
    lengths: Lengths
    band: Band
    packed: bool
    cut: Cut
    call: Call
    """scale, softcap, dropout and deterministic of every call of a kernel."""

    @property
    def dim(self) -> int:
        """Where the rows are."""
        return 0 if self.packed else 2

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """This rank's own keys first."""
        _, world, rank = self.place

        def step(n: int) -> Step:
            source, to = (rank - n) % world, (rank + n) % world
            return Step(source, to, self._pair(rank, source), self._pair(to, rank))

        return tuple(step(n) for n in distances(self.lengths, self.cut, self.band))

    def _pair(self, q_rank: int, k_rank: int) -> Pair:
        """What one rank's queries need of another's keys."""
        return pair(self.lengths, self.cut, q_rank, k_rank, self.band)

    @functools.cached_property
    def parts_of_a_query(self) -> int:
        """Calls of a kernel that have a query, at most."""
        return most(job.q for step in self.steps for job in step.needed.jobs)

    @functools.cached_property
    def parts_of_a_key(self) -> int:
        """Gradients that are added up for one of this rank's keys, at most: of its calls, and of the others' sums."""
        own = self.steps[0].needed
        parts = [within(own.message, job.k) for job in own.jobs]
        parts += [step.asked.message for step in self.steps[1:]]
        return most(parts)

    @functools.cached_property
    def most_rows(self) -> tuple[int, int]:
        """No message between two ranks has more rows: of keys, and of their gradients, where fp32 counts twice. The
        same on every rank."""
        return most_rows(self.lengths, self.cut, self.band)

    @functools.cached_property
    def calls(self) -> tuple[tuple[int, Job], ...]:
        """Of a kernel: whose keys, and what with them."""
        return tuple((step.source, job) for step in self.steps for job in step.needed.jobs)

    @functools.cached_property
    def may_share(self) -> bool:
        """Whether the calls of a backward pass may share their queries: several dense ones, each with a band alone."""
        if self.packed or self.band.alibi or self.band.dropout or self.call.softcap != 0:
            return False
        n = held(self.lengths[0][0], self.cut, self.place.rank)
        return len(self.calls) > 1 and all(_shared_rows(job, n) for _, job in self.calls)

    @functools.cached_property
    def plain_parts(self) -> dict[tuple[int, Job], _Part]:
        """Calls of a kernel for jobs without slopes and dropout, once they are known."""
        return {}


# --------------------------------------------------------------------------------------------- a job as a kernel's call


@functools.lru_cache(256)
@torch.inference_mode(False)  # serves calls outside of it too
def _tables(job: Job, padding: _Padding, device: torch.device) -> Tables:
    """The lengths of a job of packed sequences."""
    of_q = [padding.queries + tile.q1 - tile.q0 for tile in job.tiles]
    of_k = [padding.keys + tile.keys for tile in job.tiles]
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=device) for each in (of_q, of_k)
    )
    return Tables(cu_q, cu_k, None, max(of_q), max(of_k))


class _Distances(NamedTuple):
    """ALiBi's distance as a number for each key and one for each query, in units of the slope: both are 0 at the key
    that is nearest to the queries, so that fp32 holds what counts."""

    keys: Tensor
    """(tiles, keys), not positive; 0 behind a tile's keys."""
    queries: Tensor
    """(queries)."""
    tiles: Tensor
    """(queries): the tile of each."""
    sequences: Tensor
    """(tiles)."""


@functools.lru_cache(64)
@torch.inference_mode(False)  # serves calls outside of it too
def _distances(ring_key: tuple[Lengths, Cut, int, int, Band], job: Job, device: torch.device) -> _Distances:
    lengths, cut, q_rank, k_rank, _ = ring_key
    places_q = positions(tuple(nq for nq, _ in lengths), cut, q_rank)
    held_k = positions(tuple(nk for _, nk in lengths), cut, k_rank)
    places_k = take(held_k, pair(*ring_key).message, 0).double()
    keys = torch.zeros(len(job.tiles), max(t.keys for t in job.tiles), dtype=torch.float64, device="cpu")
    queries, tiles = [], []
    for number, tile in enumerate(job.tiles):
        nq, nk = lengths[tile.sequence]
        columns = places_k[tile.k0 : tile.k1]
        nearest = columns[-1] if job.side == 1 else columns[0]
        keys[number, : len(columns)] = job.side * (columns - nearest)
        rows = places_q[tile.q0 : tile.q1].double() + (nk - nq)
        queries.append(-job.side * (rows - nearest))
        tiles.append(torch.full((len(rows),), number, device="cpu"))
    sequences = torch.tensor([t.sequence for t in job.tiles], device="cpu")
    return _Distances(*(t.to(device) for t in (keys, torch.cat(queries), torch.cat(tiles), sequences)))


class _Padding(NamedTuple):
    """How many rows before its own a call has. The added queries see nothing, and the added keys are seen by none: with
    them the places of the first query and key are multiples of 16, where dropout's mask can begin."""

    queries: int = 0
    keys: int = 0


NOTHING = _Padding()


@functools.lru_cache(64)
@torch.inference_mode(False)  # serves calls outside of it too
def _ranges(job: Job, padding: _Padding, packed: bool, device: torch.device) -> Tensor:
    """The keys that each query of a job sees, as key_ranges of a padded call."""
    nq, nk, left, right = count(job.q), count(job.k), job.left, job.right
    query = torch.arange(nq, device="cpu")
    first = (query - left).clamp(0, nk) if left >= 0 else torch.zeros_like(query)
    end = (query + right + 1).clamp(0, nk) if right >= 0 else torch.full_like(query, nk)
    ranges = torch.stack((first, end), -1) + padding.keys
    ranges = torch.nn.functional.pad(ranges, (0, 0, padding.queries, 0)).to(device, torch.int32)
    return ranges[None] if packed else ranges[None, None]


class _Part(NamedTuple):
    """A job as a call of a kernel."""

    call: Call
    padding: _Padding = NOTHING
    shift: Tensor | None = None
    """What has to be added to its lse."""


def _part(ring: Ring, k_rank: int, job: Job, slopes: Tensor | None, device: torch.device) -> _Part:
    if slopes is not None or ring.band.dropout:
        return _made_part(ring, k_rank, job, slopes, device)
    if (k_rank, job) not in ring.plain_parts:
        ring.plain_parts[k_rank, job] = _made_part(ring, k_rank, job, slopes, device)
    return ring.plain_parts[k_rank, job]


def _made_part(ring: Ring, k_rank: int, job: Job, slopes: Tensor | None, device: torch.device) -> _Part:
    call, padding = ring.call._replace(window_left=job.left, window_right=job.right, bottom_right=False), NOTHING
    if ring.band.dropout:
        (tile,) = job.tiles
        padding = _Padding(tile.i0 % MULTIPLE, tile.j0 % MULTIPLE)
        entry = tile.sequence if ring.packed else 0
        origin = torch.tensor([entry, 0, tile.i0 - padding.queries, tile.j0 - padding.keys], device="cpu")
        call = call._replace(dropout_origin=origin)
        if padding != NOTHING:
            ranges = _ranges(job, padding, ring.packed, device)
            call = call._replace(window_left=-1, window_right=-1, key_ranges=ranges)
    tables = _tables(job, padding, device) if ring.packed else None
    call = call._replace(lengths=tables, only_band=False)
    if slopes is None or job.side == PLAIN:
        plain = tables is None and call.softcap == 0 and not ring.band.dropout
        return _Part(call._replace(only_band=plain), padding)
    per_entry = slopes.dim() == 2
    if job.side == ALIGNED:
        if per_entry and ring.packed:
            slopes = slopes[torch.tensor([t.sequence for t in job.tiles], device=device)]
        return _Part(call._replace(alibi_slopes=slopes), padding)
    key = ring.lengths, ring.cut, ring.place.rank, k_rank, ring.band
    far = _distances(key, job, device)
    exact = slopes.double()
    if not ring.packed:
        bias = (exact[..., None] * far.keys[0]).float()[..., None, :]
        bias = padded(bias, padding.keys, bias.dim() - 1)
        return _Part(call._replace(attn_bias=bias), padding, (exact[..., None] * far.queries).float())
    of_tiles = exact[far.sequences] if per_entry else exact.expand(len(job.tiles), -1)
    bias = padded((of_tiles[:, :, None] * far.keys[:, None]).float()[:, :, None], padding.keys, 3)
    return _Part(call._replace(attn_bias=bias), padding, (of_tiles[far.tiles] * far.queries[:, None]).float().t())


# ------------------------------------------------------------------------------------------------------------- messages


@contextlib.contextmanager
def _posted(ring: Ring, k: Tensor, v: Tensor, backward: bool) -> Iterator[Post]:
    """What sends the messages of a pass."""
    peer = peer_of(ring.place, k.device)
    if peer is None:
        yield Direct(ring.place)
        return
    keys, gradients = ring.most_rows
    row = sum(math.prod(n for i, n in enumerate(t.shape) if i != ring.dim) for t in (k, v)) * k.element_size()
    with peer.call(max(keys, gradients if backward else 0) * row):
        yield peer


class _Keys:
    """This rank's own keys and values, and those that come."""

    def __init__(self, ring: Ring, post: Post, k: Tensor, v: Tensor) -> None:
        self._ring, self._post, self._k, self._v = ring, post, k, v
        self._travels: dict[int, Travel] = {}
        """By the rank whose keys come."""

    def _travel(self, step: Step) -> Travel:
        """Sends and receives for a step."""
        if step.source not in self._travels:
            dim, (source, to, needed, asked) = self._ring.dim, step
            sent = (take(self._k, asked.message, dim), take(self._v, asked.message, dim)) if asked.rows else None
            coming = Shape(self._k, self._v, needed.rows, dim, self._k.dtype) if needed.rows else None
            self._travels[source] = self._post.travel(to, sent, source, coming, lasting=True)
        return self._travels[step.source]

    def start(self) -> None:
        """Has the first messages begin, which else begin beside the first step."""
        for step in self._ring.steps[1:2]:
            self._travel(step).start()

    def steps(self, own_last: bool = False) -> Iterator[tuple[Step, Tensor, Tensor]]:
        """Each step with its keys and values. The next ones are on their way while these are used. The rank's own are
        those of the first step, or of the last."""
        dim, (own, *others) = self._ring.dim, self._ring.steps
        steps = [*others, own] if own_last else [own, *others]
        for n, step in enumerate(steps):
            if step is own:
                k, v = (take(t, step.needed.message, dim) for t in (self._k, self._v))
            else:
                arrived = self._travel(step).arrive()
                k, v = (self._k[:0], self._v[:0]) if arrived is None else (arrived.k, arrived.v)
            coming = [self._travel(following) for following in steps[n + 1 : n + 2] if following is not own]
            yield step, k, v
            for travel in coming:
                travel.start()
        for travel in self._travels.values():
            travel.finish()


# ------------------------------------------------------------------------------------------------- forward and backward


def _wide(ring: Ring, *tensors: Tensor) -> tuple[Tensor, ...]:
    """In float32 on the CPU, whose kernels compute so whatever their inputs are: then parts are not rounded before they
    are merged or added up."""
    on_cpu = ring.place.world > 1 and tensors[0].device.type == "cpu"
    return tuple(t.float() for t in tensors) if on_cpu else tensors


def _forward(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    dim, dtype = ring.dim, q.dtype
    (q,) = _wide(ring, q)
    out_shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    lse_shape = torch.Size((q.shape[1], q.shape[0]) if ring.packed else q.shape[:3])
    merged = Merged(out_shape, lse_shape, dim, q, ring.parts_of_a_query)
    with _posted(ring, k, v, backward=False) as post:
        for (source, _, needed, _), *arrived in _Keys(ring, post, k, v).steps():
            keys, values = _wide(ring, *arrived)
            for job in needed.jobs:
                call, (more_q, more_k), shift = _part(ring, source, job, slopes, q.device)
                of_q = padded(take(q, job.q, dim), more_q, dim)
                of_k, of_v = (padded(take(t, job.k, dim), more_k, dim) for t in (keys, values))
                alone = shift is None and more_q == 0 and call.lengths is None
                if alone and merged.attend(job.q, of_q, of_k, of_v, call):
                    continue
                out, lse = _ops.forward(of_q, of_k, of_v, call)
                out, lse = behind(out, more_q, dim), behind(lse, more_q, lse.dim() - 1)
                merged.add(job.q, out, lse if shift is None else lse + shift)
    return merged.take(dtype, sinks)


def _gradients(
    part: _Part,
    job: Job,
    dim: int,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v of a job."""
    call, (more_q, more_k), shift = part
    of_queries = [padded(take(t, job.q, dim), more_q, dim) for t in (dout, q, out)]
    of_k, of_v = (padded(take(t, job.k, dim), more_k, dim) for t in (k, v))
    of_lse, of_dlse = (None if t is None else take(t, job.q, t.dim() - 1) for t in (lse, dlse))
    assert of_lse is not None
    of_lse = padded(of_lse if shift is None else of_lse - shift, more_q, of_lse.dim() - 1)
    if of_dlse is not None:
        of_dlse = padded(of_dlse, more_q, of_dlse.dim() - 1)
    of_dout, of_q, of_out = of_queries
    dq, dk, dv, _ = _autograd.gradients(of_dout, of_dlse, of_q, of_k, of_v, of_out, of_lse, False, call)
    return behind(dq, more_q, dim), behind(dk, more_k, dim), behind(dv, more_k, dim)


def _backward(
    ring: Ring,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    place, dim = ring.place, ring.dim
    dq = Sum(q, dim, ring.parts_of_a_query)
    dk, dv = (Sum(t, dim, ring.parts_of_a_key) for t in (k, v))
    going_home: list[tuple[Travel, Pair]] = []
    arrived: list[Travel] = []
    wide_dout, wide_q, wide_out = _wide(ring, dout, q, out)

    def absorb(left: int) -> None:
        """Adds what came home, but for the last ``left`` messages."""
        while len(going_home) > left:
            travel, asked = going_home.pop(0)
            message = travel.arrive()
            if message is not None:
                dk.add(asked.message, message.k)
                dv.add(asked.message, message.v)
            arrived.append(travel)

    with _posted(ring, k, v, backward=True) as post:
        coming_keys = _Keys(ring, post, k, v)
        coming_keys.start()
        shared = None
        if ring.may_share and not _ops.is_deterministic(ring.call):
            made = SharedQueries(dout, dlse, q, k, v, out, lse, _part(ring, *ring.calls[0], slopes, q.device).call)
            shared = made if made.offered else None
        # The first keys come beside the beginning of the shared sum, and the last gradients go home beside the own keys
        for (source, to, needed, asked), keys, values in coming_keys.steps(own_last=shared is not None):
            own = source == place.rank
            of_message = [Sum(t, dim, 1 if needed.once else MANY) for t in (keys, values)]
            of_queries: list[tuple[Ranges, Tensor]] = []
            wide_k, wide_v = _wide(ring, keys, values)
            for job in needed.jobs:
                part = _part(ring, source, job, slopes, q.device)
                if shared is not None:
                    queries = _shared_rows(job, q.shape[dim])
                    assert queries is not None
                    of_dout, of_q = (take(t, (queries,), dim) for t in (dout, q))
                    of_k, of_v = (take(t, job.k, dim) for t in (keys, values))
                    of_k, of_v = shared.add(queries[0], of_dout, of_q, of_k, of_v, part.call)
                else:
                    of_q, of_k, of_v = _gradients(
                        part, job, dim, wide_dout, dlse, wide_q, wide_k, wide_v, wide_out, lse
                    )
                    of_queries.append((job.q, of_q))
                if own:
                    rows = within(needed.message, job.k)
                    dk.add(rows, of_k)
                    dv.add(rows, of_v)
                else:
                    for of_keys, value in zip(of_message, (of_k, of_v), strict=True):
                        of_keys.add(job.k, value)
            if not own:
                dtype = k.dtype if needed.once else torch.float32
                computed = (of_message[0].take(dtype), of_message[1].take(dtype)) if needed.rows else None
                coming = Shape(k, v, asked.rows, dim, k.dtype if asked.once else torch.float32) if asked.rows else None
                going_home.append((post.travel(source, computed, to, coming), asked))
                going_home[-1][0].start()
            for rows, of_q in of_queries:  # beside the messages
                dq.add(rows, of_q)
            absorb(1)
        if shared is not None:
            dq.add(((0, q.shape[dim]),), shared.end(ring.call))
        absorb(0)
    for travel in arrived:
        travel.finish()
    dsinks = lse.new_empty(0)
    if sinks is not None:
        dsinks = _autograd.sinks_gradient(dout, dlse, out, lse, ring.call._replace(sinks=sinks))
    return dq.take(q.dtype), dk.take(k.dtype), dv.take(v.dtype), dsinks


class RingAttention(torch.autograd.Function):
    """(out, lse) of this rank's queries, both differentiable in q, k, v and sinks.

    Backward needs no merging: each call of a kernel is given the LSE over all keys and the final out, so that its
    weights are those of the whole (FlashAttention-2, algorithm 2), and the gradients of the calls add up. Sinks are in
    LSE and out, so that the calls need not know of them.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None, ring: Ring
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(ring, q, k, v, slopes, sinks)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse, slopes, sinks)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse, slopes, sinks = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        tensors = dout, dlse, q, k, v, out, lse, slopes, sinks
        dq, dk, dv, dsinks = _autograd.once_differentiable(NO_DOUBLE, _backward, ctx.ring, *tensors)
        return dq, dk, dv, None, dsinks if ctx.needs_input_grad[4] else None, None
