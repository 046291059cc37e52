"""Attention over sequences that several ranks of a torch.distributed process group hold together.

- :func:`shard_sequence`, :func:`unshard_sequence`, :func:`position_ids`: which rows a rank holds.
- :func:`ring_attention`: keys and values travel from rank to rank.
- :func:`ulysses_attention`: ranks exchange rows for heads.

Keys and values go from GPU to GPU within a host by the copy engines, over groups with NCCL. All else goes through
torch.distributed: NCCL for CUDA tensors, gloo for CPU tensors.
"""

from __future__ import annotations

import atexit
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _autocast, _autograd, _checks, _dropout, _ops
from .._attention import attend
from .._call import PLAIN, Causal, Lengths, Window, call_of
from .._call import Call as KernelCall
from .._errors import raise_library_error, refuse
from ._agree import Call, Place, agree, describe, is_alive, of_the_first, place_of
from ._layout import LAYOUTS, Cut, Layout, held, positions, rows
from ._plan import Band
from ._ring import Ring, RingAttention
from ._rows import index
from ._ulysses import Exchange, GatherRows, ScatterResults, ScatterRows, Unshard, split_heads

__all__ = ["position_ids", "ring_attention", "shard_sequence", "ulysses_attention", "unshard_sequence"]


def __dir__() -> list[str]:
    return __all__


Group = dist.ProcessGroup
CuSeqlens = Tensor | Sequence[int]

MANY = 8
"""A message shows so many lengths of packed sequences."""

# ---------------------------------------------------------------------------------------------------- rows of the ranks


def _length(n: object, name: str = "seq_len") -> int:
    if not isinstance(n, int) or isinstance(n, bool):
        refuse(name, repr(n), "an int", TypeError)
    if not 0 <= n <= _checks.MAX_SEQLEN:
        refuse(name, n, "0 to 2**30")
    return n


def _lengths(cu_seqlens: Any, name: str = "cu_seqlens") -> tuple[int, ...]:
    """The length of each packed sequence. Waits for the device if it is given a CUDA tensor."""
    if isinstance(cu_seqlens, Tensor):
        _device(name, cu_seqlens)
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            refuse(name, f"{tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}", "(B + 1), torch.int32 or torch.int64")
        ends: list[Any] = cu_seqlens.tolist()
    elif isinstance(cu_seqlens, Sequence) and not isinstance(cu_seqlens, str | bytes):
        ends = list(cu_seqlens)
    else:
        refuse(name, type(cu_seqlens).__name__, "a tensor or a sequence of int", TypeError)
    for end in ends:
        _length(end, name)
    if not ends or ends[0] != 0 or any(b < a for a, b in itertools.pairwise(ends)):
        refuse(name, ends, "numbers from 0 on, none below the one before")
    return tuple(b - a for a, b in itertools.pairwise(ends))


def _dimension(x: Tensor, dim: object, packed: bool) -> int:
    if dim is None:
        dim = 0 if packed else 1
    if not isinstance(dim, int) or isinstance(dim, bool):
        refuse("dim", repr(dim), "None or an int", TypeError)
    if not -x.dim() <= dim < x.dim():
        refuse("dim", dim, f"a dimension of x, {tuple(x.shape)}")
    return dim % x.dim()


def _cut(place: Place, layout: object) -> Cut:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        refuse("layout", repr(layout), " or ".join(map(repr, LAYOUTS)))
    return Cut(place.world, layout)


def shard_sequence(
    x: Tensor,
    group: Group | None = None,
    *,
    dim: int | None = None,
    cu_seqlens: CuSeqlens | None = None,
    layout: Layout = "zigzag",
) -> Tensor:
    """This rank's rows of a whole sequence. Nothing is communicated.

    "zigzag": the sequence is cut into 2R chunks for R ranks; rank r holds chunks r and 2R - 1 - r, so that all have the
    same work under a causal mask. "contiguous": it is cut into R chunks, and rank r holds chunk r: for windows no wider
    than a chunk, with which all have about the same work and each needs keys of its neighbours alone. Of C chunks,
    chunk c begins at row c * N // C: N may be any number.

    Args:
        x: the same on every rank, with rows of the sequence along ``dim``.
        group: the ranks that hold the sequence together; ``None``: all.
        dim: by default 1, as in (B, N) or (B, N, width), and 0 for packed sequences. 2 for heads (B, H, N, d).
        cu_seqlens: (B + 1), a tensor or a sequence of int: packed sequences, of which each is cut by itself.
        layout: "zigzag" or "contiguous"; the same in all calls about the sequence.

    Returns:
        A copy of the rows, contiguous; differentiable.

    Raises:
        TypeError, ValueError: an argument; RuntimeError: torch.distributed is not initialised.
    """
    _checks.tensors(x=x)
    place = place_of(group)
    cut = _cut(place, layout)
    at = _dimension(x, dim, cu_seqlens is not None)
    lengths = (x.shape[at],) if cu_seqlens is None else _lengths(cu_seqlens)
    if sum(lengths) != x.shape[at]:
        refuse("cu_seqlens", f"{sum(lengths)} last", f"the rows of x, {x.shape[at]}")
    return x.index_select(at, index(rows(lengths, cut, place.rank), x.device))


def unshard_sequence(
    x: Tensor,
    group: Group | None = None,
    *,
    dim: int | None = None,
    cu_seqlens: CuSeqlens | None = None,
    seq_len: int | None = None,
    layout: Layout = "zigzag",
) -> Tensor:
    """The whole sequence on every rank, of the rows that :func:`shard_sequence` gave each.

    Differentiable: as for ring_attention, the gradient is that of the sum of all ranks' losses. If every rank computes
    the same loss from the whole sequence, divide it by the number of ranks.

    Args:
        x: this rank's rows. All ranks' x require grad, or none does.
        group, dim, cu_seqlens, layout: as for :func:`shard_sequence`.
        seq_len: rows of the whole sequence; by default the ranks exchange how many each has. Not with ``cu_seqlens``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`ring_attention`.
    """
    place = place_of(group)

    def make() -> tuple[Call, tuple[int, tuple[int, ...] | None, Cut]]:
        _checks.tensors(x=x)
        _device("x", x)
        if x.dtype.is_floating_point and x.dtype.itemsize == 1:
            refuse("x.dtype", x.dtype, "a dtype of 16 bits or more, or an integer one, as of x.view(torch.uint8)")
        cut = _cut(place, layout)
        at = _dimension(x, dim, cu_seqlens is not None)
        lengths = None if cu_seqlens is None else _lengths(cu_seqlens)
        shape = ", ".join("N" if i == at else str(n) for i, n in enumerate(x.shape))
        if lengths is not None and seq_len is not None:
            refuse("seq_len", seq_len, "None with cu_seqlens")
        recorded = torch.is_grad_enabled() and x.requires_grad
        told = f"seq_len={seq_len}, lengths={lengths}, layout={layout}, gradient={recorded}"
        text = f"unshard_sequence(({shape}), {x.dtype}, {x.device.type}, {told})"
        total = None if seq_len is None else _length(seq_len)
        if lengths is not None:
            _packed_rows("x", x.shape[at], lengths, place, cut)
            total = sum(lengths)
        of_all = None if total is None else (total, 0)
        asked = Call(text, (x.shape[at], 0), of_all, lengths is not None, layout, names=("x", "x"))
        return asked, (at, lengths, cut)

    (total, _), (at, lengths, cut) = agree(place, make)
    whole: Tensor = Unshard.apply(x, at, lengths or (total,), cut, place)
    return whole


def position_ids(
    seq_len: int | None = None,
    group: Group | None = None,
    *,
    cu_seqlens: CuSeqlens | None = None,
    device: torch.device | str | None = None,
    layout: Layout = "zigzag",
) -> Tensor:
    """The place of each of this rank's rows within its sequence, for rotary and other embeddings.

    Args:
        seq_len: rows of the whole sequence, or
        cu_seqlens: of packed sequences, as for :func:`shard_sequence`.
        group, layout: as for :func:`shard_sequence`.
        device: of the result; ``None``: torch's default.

    Returns:
        (rows of this rank), int64.

    Raises:
        TypeError, ValueError: an argument; RuntimeError: torch.distributed is not initialised.
    """
    if (seq_len is None) == (cu_seqlens is None):
        refuse("seq_len", repr(seq_len), "either seq_len or cu_seqlens")
    place = place_of(group)
    lengths = _lengths(cu_seqlens) if seq_len is None else (_length(seq_len),)
    return positions(lengths, _cut(place, layout), place.rank).to(
        torch.get_default_device() if device is None else device
    )


# ------------------------------------------------------------------------------------------------------------ attention


class _Given:
    """The arguments of an attention, checked, and the call in words."""

    def __init__(
        self,
        name: str,
        place: Place,
        tensors: tuple[Tensor, Tensor, Tensor],
        call: KernelCall,
        seq_len: Any,
        cu_seqlens: Any,
        cu_seqlens_k: Any,
        layout: Layout,
        **options: object,
    ) -> None:
        _checks.tensors(q=tensors[0], k=tensors[1], v=tensors[2])
        for tensor, of in zip(tensors, "qkv", strict=True):
            _device(of, tensor)
        q, k, v, call = _autocast.cast(*tensors, call)
        self.tensors, self.call = (q, k, v), call
        self.packed = cu_seqlens is not None
        _checks.inputs(q, k, v, "(total, H, d)" if self.packed else "(B, H, N, d)")
        _checks.options(call)
        self.cut = _cut(place, layout)
        dim = 0 if self.packed else 2
        self.lengths: tuple[tuple[int, int], ...] | None = None
        total = None
        if self.packed:
            if seq_len is not None:
                refuse("seq_len", seq_len, "None with cu_seqlens")
            of_q = _lengths(cu_seqlens)
            of_k = of_q if cu_seqlens_k is None else _lengths(cu_seqlens_k, "cu_seqlens_k")
            if len(of_k) != len(of_q):
                refuse("cu_seqlens_k", f"{len(of_k)} sequences", f"as many as in cu_seqlens, {len(of_q)}")
            _packed_rows("q", q.shape[0], of_q, place, self.cut)
            _packed_rows("k", k.shape[0], of_k, place, self.cut)
            self.lengths, total = tuple(zip(of_q, of_k, strict=True)), (sum(of_q), sum(of_k))
        elif cu_seqlens_k is not None:
            refuse("cu_seqlens_k", type(cu_seqlens_k).__name__, "None without cu_seqlens")
        elif seq_len is not None:
            both = tuple(seq_len) if isinstance(seq_len, tuple | list) else (seq_len, seq_len)
            if len(both) != 2:
                refuse("seq_len", repr(seq_len), "None, an int or a pair (of queries, of keys)")
            total = _length(both[0]), _length(both[1])
        slopes, sinks = call.alibi_slopes, call.sinks
        _checks.slopes(slopes, q, len(self.lengths) if self.lengths is not None else q.shape[0])
        _checks.sink_logits(sinks, q)
        _dropout.probability(dropout_p=call.dropout_p)
        _dropout.check_state(call.rng_state, q.device)
        if torch.is_grad_enabled():
            _checks.no_gradient("ranks do not compute together", "", alibi_slopes=slopes)
        shape = None if slopes is None else tuple(slopes.shape)
        given = {"q": q, "k": k, "v": v, "sinks": sinks}
        recorded = [of for of, t in given.items() if torch.is_grad_enabled() and t is not None and t.requires_grad]
        options |= {"scale": call.scale, "band": call.band, "softcap": call.softcap, "alibi_slopes": shape}
        options |= {"sinks": sinks is not None, "dropout_p": call.dropout_p, "deterministic": call.deterministic}
        # Ulysses exchanges each gradient by itself; the ring those of keys and values if there is any
        gradients = ", ".join(recorded) if name == "ulysses_attention" else bool(recorded)
        options |= {"gradients": gradients, "seq_len": total, "layout": layout}
        if self.lengths is not None:
            options["lengths"] = _summary(self.lengths)
        _refuse_unbuilt(q.device, q.dtype, q.shape[-1], v.shape[-1], bool(recorded))
        self.text = describe(name, q, k, v, dim, **options)
        self.asked = Call(self.text, (q.shape[dim], k.shape[dim]), total, self.packed, layout)


def _device(name: str, t: Tensor) -> None:
    if hasattr(t, "to_local"):
        refuse(name, type(t).__name__, "a tensor of this rank's rows: to_local()", TypeError)
    if t.device.type not in ("cpu", "cuda"):
        refuse(f"{name}.device", t.device, "cpu, cuda")


@functools.lru_cache(64)
def _refuse_unbuilt(device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int, gradients: bool) -> None:
    """Has the library refuse what no kernel of the device runs, as it does for tensors without rows too: behind the
    first message it would be too late."""
    q, v = (torch.empty(1, 1, 0, d, dtype=dtype, device=device) for d in (head_dim, head_dim_v))

    def compute() -> tuple[Tensor, Tensor]:
        out, lse = _ops.forward(q, q, v, PLAIN)
        if gradients:
            _autograd.gradients(out, None, q, q, v, out, lse, False, PLAIN)
        return out, lse

    _library_errors(compute)


def _summary(lengths: tuple[Any, ...]) -> str:
    """A few lengths as they are, and many so that two lists hardly ever have the same one."""
    many = len(lengths) > MANY
    return f"{lengths[:MANY]}, {len(lengths)} in all, hash {hash(lengths):x}" if many else str(lengths)


def _packed_rows(name: str, n: int, lengths: tuple[int, ...], place: Place, cut: Cut) -> None:
    expected = sum(held(length, cut, place.rank) for length in lengths)
    if n != expected:
        refuse(f"{name}.shape", f"{n} rows", f"the {expected} rows that shard_sequence gives rank {place.rank}")


def _band(call: KernelCall) -> Band:
    left, right, bottom_right = call.band
    alibi, dropout = call.alibi_slopes is not None, call.dropout_p > 0
    return Band(None if left < 0 else left, None if right < 0 else right, bottom_right, alibi, dropout)


def _with_state(given: _Given, place: Place) -> KernelCall:
    """The call with the state of dropout's generator that all ranks use. Every rank draws one, so that generators that
    went together still do."""
    call, q = given.call, given.tensors[0]
    if call.dropout_p == 0:
        return call._replace(rng_state=None)
    mine = _dropout.draw(q.device) if call.rng_state is None else call.rng_state
    return call._replace(rng_state=of_the_first(place, mine))


_Asked = tuple[Hashable, ...]
_known: dict[_Asked, Ring] = {}
"""Calls that all ranks were found to agree on. Their checks, which look at no values, are not repeated: they would take
the host as long as all the rest."""
atexit.register(_known.clear)  # it keeps groups, whose threads must end before the interpreter does
MANY_CALLS = 256


def _asked(place: Place, tensors: tuple[Tensor, Tensor, Tensor], options: tuple[Any, ...]) -> _Asked | None:
    """All that the checks and the plan of a call depend on; ``None`` where that is more than can be compared."""
    if any(type(t) is not Tensor and type(t) is not torch.nn.Parameter for t in tensors):
        return None
    if any(isinstance(option, list | Tensor) for option in options) or _autocast.enabled(tensors[0].device):
        return None
    facts = ((t.shape, t.dtype, t.device, t.layout, t.requires_grad) for t in tensors)
    types = tuple(tuple(map(type, each)) if isinstance(each, tuple) else type(each) for each in options)
    asked = (place, *facts, options, types, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    try:
        hash(asked)
    except TypeError:  # the checks will name what it is
        return None
    return asked


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group | None = None,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    seq_len: int | tuple[int, int] | None = None,
    cu_seqlens: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    layout: Layout = "zigzag",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_wmma.forward` over a sequence whose rows the ranks hold as :func:`shard_sequence` gives them.

    Keys and values travel between the ranks while a rank computes; only rows that a rank's queries see are sent. The
    parts are merged in float32. out and lse are differentiable in q, k, v and sinks, once, in reverse mode: the
    gradients are those of the sum of all ranks' losses. The gradient of sinks on a rank is the share of the rank's
    queries, to be summed over the ranks as that of any parameter that each rank holds. Every rank must make the call,
    and run its backward, in the same order as the others.

    Args:
        q: (B, Hq, n, d), this rank's rows, or packed (n, Hq, d). As for :func:`flash_wmma.forward` otherwise.
        k: (B, Hk, n_k, d) or (n_k, Hk, d), likewise.
        v: (B, Hk, n_k, d_v) or (n_k, Hk, d_v), likewise.
        group: the ranks that hold the sequence together; ``None``: all.
        causal, scale, window, softcap: as for :func:`flash_wmma.forward`, of places in the whole sequence.
        alibi_slopes: (Hq) or (B, Hq), float32, the same on every rank.
        sinks: (Hq), as for :func:`flash_wmma.forward`, the same on every rank.
        dropout_p: as for :func:`flash_wmma.forward`. Which weights are dropped is what one process would drop with the
            same state, whatever the number of ranks.
        rng_state: (2,), int64, on q's device, of which that of the first rank counts; default: drawn from torch's
            generator there. The first rank sends the state to the others in every call.
        return_lse: also return the logarithm of the softmax's denominator.
        deterministic: compute gradients that are bitwise the same from run to run, as for :func:`flash_wmma.forward`.
        seq_len: rows of the whole sequence, or (queries, keys). By default the ranks exchange how many rows each holds,
            in every call, which on a group without gloo waits for the GPU.
        cu_seqlens: (B + 1), a tensor (best on the CPU) or a sequence of int, the same on every rank: packed sequences,
            of which each is cut by itself.
        cu_seqlens_k: of the keys, where they differ.
        layout: as for :func:`shard_sequence`, by which the rows were taken.

    Returns:
        out (B, Hq, n, d_v) or (n, Hq, d_v), contiguous, in q's dtype; with ``return_lse`` also lse (B, Hq, n) or
        (Hq, n), float32.

    Raises:
        TypeError, ValueError: an argument, or the ranks' calls do not go together. Every rank raises if one does: at
            every call that gives neither seq_len nor cu_seqlens, else at the first call of its kind.
        RuntimeError: torch.distributed is not initialised, or another rank does not answer within the group's timeout.
        NotImplementedError: alibi_slopes requires grad.

    Ring attention: https://arxiv.org/abs/2310.01889.
    """
    place = place_of(group)
    _no_transforms()
    asked: _Asked | None = None
    if alibi_slopes is None and sinks is None and rng_state is None and cu_seqlens is None and cu_seqlens_k is None:
        options = causal, scale, window, softcap, dropout_p, return_lse, deterministic, seq_len, layout
        asked = _asked(place, (q, k, v), options)
        if asked is not None and asked in _known:
            ring = _known[asked]
            out, lse = _library_errors(lambda: RingAttention.apply(q, k, v, None, None, ring))
            return (out, lse) if return_lse else out

    def make() -> tuple[Call, _Given]:
        _checks.flag(return_lse=return_lse)
        call = call_of(
            causal,
            scale,
            window,
            alibi_slopes=alibi_slopes,
            softcap=softcap,
            deterministic=deterministic,
            sinks=sinks,
            dropout_p=dropout_p,
            rng_state=rng_state,
        )
        given = _Given("ring_attention", place, (q, k, v), call, seq_len, cu_seqlens, cu_seqlens_k, layout)
        return given.asked, given

    total, given = agree(place, make)
    lengths = given.lengths if given.lengths is not None else (total,)
    call = _with_state(given, place)
    ring = Ring(place, lengths, _band(call), given.packed, given.cut, call._replace(alibi_slopes=None, sinks=None))
    if asked is not None and call.dropout_p == 0 and seq_len is not None:
        if len(_known) >= MANY_CALLS or any(not is_alive(ring.place.group) for ring in _known.values()):
            _known.clear()
        _known[asked] = ring
    tensors = *given.tensors, call.alibi_slopes, call.sinks
    out, lse = _library_errors(lambda: RingAttention.apply(*tensors, ring))
    return (out, lse) if return_lse else out


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group | None = None,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    seq_len: int | tuple[int, int] | None = None,
    cu_seqlens: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    layout: Layout = "zigzag",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`ring_attention`'s result by other means: the ranks exchange rows for heads (all-to-all), each computes all
    rows of its share of the heads with one call of a kernel, and out is exchanged back.

    Args:
        q, k, v: as for :func:`ring_attention`, with at least as many query heads as ranks; the heads need not divide
            evenly. Heads of k and v that several ranks need are sent to each.

    All else is as for :func:`ring_attention`, but that the gradient of sinks on a rank is that of its heads and 0 for
    the others: the sum over the ranks is the same.

    Returns, raises:
        As :func:`ring_attention`.

    DeepSpeed-Ulysses: https://arxiv.org/abs/2309.14509.
    """
    place = place_of(group)
    _no_transforms()

    def make() -> tuple[Call, _Given]:
        _checks.flag(return_lse=return_lse)
        call = call_of(
            causal,
            scale,
            window,
            alibi_slopes=alibi_slopes,
            softcap=softcap,
            deterministic=deterministic,
            sinks=sinks,
            dropout_p=dropout_p,
            rng_state=rng_state,
        )
        told = seq_len, cu_seqlens, cu_seqlens_k, layout
        given = _Given("ulysses_attention", place, (q, k, v), call, *told, return_lse=return_lse)
        heads = given.tensors[0].shape[1]
        if heads < place.world:
            refuse("q.shape", f"{heads} heads", f"at least one for each of the {place.world} ranks")
        return given.asked, given

    total, given = agree(place, make)
    lengths = given.lengths if given.lengths is not None else (total,)
    of_q, of_k = (tuple(each[i] for each in lengths) for i in range(2))
    hq, hk = given.tensors[0].shape[1], given.tensors[1].shape[1]
    q_heads, k_heads, reads = split_heads(hq, hk, place.world)
    here = q_heads[place.rank]
    queries = Exchange(place, q_heads, hq, of_q, given.packed, given.cut)
    keys = Exchange(place, k_heads, hk, of_k, given.packed, given.cut)
    whole_q: Tensor = GatherRows.apply(given.tensors[0], queries)
    whole_k, whole_v = (GatherRows.apply(t, keys) for t in given.tensors[1:])
    read = reads[place.rank]
    if read is not None:
        each = torch.tensor(read, device=whole_k.device)
        whole_k, whole_v = whole_k.index_select(1, each), whole_v.index_select(1, each)
    slopes, sinks = (
        None if t is None else t[..., here[0] : here[-1] + 1].contiguous()
        for t in (given.call.alibi_slopes, given.call.sinks)
    )
    call = _with_state(given, place)._replace(alibi_slopes=slopes, sinks=sinks)
    if call.dropout_p > 0:
        call = call._replace(dropout_origin=torch.tensor([0, here[0], 0, 0], device="cpu"))
    if given.packed:
        cu_q, cu_k = (
            torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=whole_q.device)
            for each in (of_q, of_k)
        )
        longest_q, longest_k = max(of_q, default=0), max(of_k, default=0)
        call = call._replace(lengths=Lengths(cu_q, cu_k, None, longest_q, longest_k), only_band=False)
    out, lse = attend(whole_q, whole_k, whole_v, call)
    if given.packed:
        lse = lse.t()
    if not return_lse:
        return ScatterRows.apply(out, queries)  # type: ignore[no-any-return]
    mine, rows_of_lse = ScatterResults.apply(out, lse, queries)
    return mine, (rows_of_lse.t() if given.packed else rows_of_lse).contiguous()


def _no_transforms() -> None:
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("torch.func is not supported across ranks")


def _library_errors(compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    try:
        return compute()
    except RuntimeError as error:
        raise_library_error(error)
        raise
