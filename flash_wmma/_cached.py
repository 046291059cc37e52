"""``forward_cached`` and ``append_kv``: attention with a key/value cache."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _append, _checks, _ops
from ._call import Cache, Causal, Window, call_of
from ._call import Call as _Call
from ._errors import raise_library_error, refuse


def lengths_of(cache_seqlens: int | Tensor, k_cache: Tensor, table: Tensor | None, batch: int, new: int = 0) -> Tensor:
    """cache_seqlens as the ops take them. The host knows whether an int, and ``new`` rows behind it, fit the cache."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int | torch.SymInt):
        refuse("cache_seqlens", repr(cache_seqlens), "an int or a tensor (B)", TypeError)
    held = _checks.capacity(k_cache, table, batch)
    if new > held:
        refuse("k", f"{new} new keys", f"at most {held}, which the cache holds of a sequence")
    if not 0 <= cache_seqlens <= held - new:
        refuse("cache_seqlens", cache_seqlens, f"0 to {held - new}: the cache has room for {held} keys a sequence")
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device)


def table_of(block_table: Tensor | None, cache_batch_idx: Tensor | None, q: Tensor, batch: int) -> Tensor | None:
    """The table of pages: a cache entry is a page as long as the cache."""
    if cache_batch_idx is None:
        return block_table
    if block_table is not None:
        refuse("cache_batch_idx", "a tensor", "None if there is a block_table")
    _checks.tensors(cache_batch_idx=cache_batch_idx)
    if cache_batch_idx.dtype not in (torch.int32, torch.int64):
        refuse("cache_batch_idx.dtype", cache_batch_idx.dtype, "torch.int32")
    if cache_batch_idx.dim() != 1 or cache_batch_idx.shape[0] != batch:
        refuse("cache_batch_idx.shape", tuple(cache_batch_idx.shape), f"(B,) with B = {batch}")
    if cache_batch_idx.device != q.device:
        refuse("cache_batch_idx.device", cache_batch_idx.device, f"q's, {q.device}")
    return cache_batch_idx.to(torch.int32).unsqueeze(1)


def check_splits(num_splits: int) -> None:
    """Before anything is written to a cache."""
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        refuse("num_splits", repr(num_splits), "an int", TypeError)
    if num_splits < 0:
        refuse("num_splits", num_splits, "0 or more")


def attend_cached(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: Cache, call: _Call) -> tuple[Tensor, Tensor]:
    """(out, lse), not recorded for gradients. As attend: the op first, the checks if it fails."""
    try:
        if call.validate:
            _check(q, k_cache, v_cache, cache, call)
            _checks.cached_values(k_cache, cache, q.shape[0])
        if call.kernel_name == "math":
            refuse("kernel", "'math'", "'auto' or a name of flash_wmma.kernels()")
        if forward_ad._current_level >= 0:
            _checks.no_tangent(q=q, k_cache=k_cache, v_cache=v_cache)
        return _ops.forward_cached(q, k_cache, v_cache, cache, call)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        _check(q, k_cache, v_cache, cache, call)
        raise_library_error(error)
        raise


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: Cache, call: _Call) -> None:
    _checks.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    _checks.device(q)
    _checks.cached_tensors(q, k_cache, v_cache, cache, call)
    _checks.options(call)


def _refuse_top_left(causal: object) -> NoReturn:
    refuse("causal", repr(causal), "False, True, 'bottom_right': the last query is at the last key")


def forward_cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor,
    *,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    num_splits: int = 0,
    batch_invariant: bool = False,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`forward` of new queries against a key/value cache, for generation. It has no gradients.

    Sequence b has the rows cache_leftpad[b] to cache_seqlens[b] of the cache, and its queries are at the last ones:
    query i of Nq is at key n - Nq + i, n = cache_seqlens[b] - cache_leftpad[b]. The keys of the queries themselves are
    in the cache before the call (:func:`append_kv`). No other row of the cache and no other entry of block_table has
    any influence, whatever it holds, and the call does not wait for the device.

    Args:
        q: (B, Hq, Nq, d), or with cu_seqlens_q packed, (total_q, Hq, d); float32, float16 or bfloat16, any strides.
        k_cache: (B, Hk, N, d), or with block_table (pages, Hk, page_size, d), any strides: pages that lie in memory as
            (pages, page_size, Hk, d) are passed as ``k_cache.transpose(1, 2)``. Any page size. Hq is a multiple of Hk.
        v_cache: (B, Hk, N, d_v) or (pages, Hk, page_size, d_v), likewise.
        cache_seqlens: an int, or (B), int32: the rows of each sequence that are filled, the new keys included. They are
            clamped to what the cache holds.
        block_table: (B, n), int32: row i of sequence b is row i % page_size of page block_table[b, i // page_size]. A
            page may be in several sequences. Page numbers in use are clamped to the cache.
        cache_batch_idx: (B), int32: sequence b is in entry cache_batch_idx[b] of a cache without block_table.
        cache_leftpad: (B), int32: where each sequence begins in the cache; default 0.
        cu_seqlens_q: (B + 1), int32: the queries of sequence b are the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        max_seqlen_q: with cu_seqlens_q, at least the number of queries of every sequence; default: all of them.
        causal: ``True`` or ``"bottom_right"``: a query sees the keys up to its own.
        window: (left, right): a query sees that many keys before and after its own.
        attn_bias: broadcastable to (B, Hq, Nq, capacity), the rows that a sequence may have; indexed by a sequence's
            own queries and keys.
        scale, alibi_slopes, softcap, sinks, kernel: as for :func:`forward`, but for ``kernel="math"``.
        batch_invariant: no bit of a sequence's result depends on the other sequences. GPU kernels then split the keys
            into parts of 512, and num_splits only counts if it is 1.
        return_lse: also return the logarithm of the softmax's denominator.
        num_splits: into about how many parts a GPU kernel splits the keys of a sequence for each key/value head: 1 is
            none, 0 leaves it to the kernel, which fills the device.
        validate: check lengths and page numbers, and raise if they are wrong, which waits for the device.

    Returns:
        out (B, Hq, Nq, d_v) or (total_q, Hq, d_v), contiguous; with ``return_lse`` also lse (B, Hq, Nq) or (Hq,
        total_q), float32. A query that sees no key has out 0 and lse -inf, or its head's sink.

    Raises:
        NotImplementedError: a tensor requires grad, and gradients are recorded.
        TypeError, ValueError, RuntimeError: as :func:`forward`.
    """
    _checks.flag(return_lse=return_lse, validate=validate)
    check_splits(num_splits)
    _checks.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if causal == "top_left":
        _refuse_top_left(causal)
    if torch.is_grad_enabled():
        _checks.no_gradient(
            q=q, k_cache=k_cache, v_cache=v_cache, attn_bias=attn_bias, alibi_slopes=alibi_slopes, sinks=sinks
        )
    call = call_of(
        causal,
        scale,
        window,
        attn_bias,
        alibi_slopes,
        softcap,
        kernel,
        batch_invariant,
        sinks=sinks,
        bottom_right=True,
        validate=validate,
    )
    where = cache_of(
        q,
        k_cache,
        cache_seqlens,
        block_table,
        cache_batch_idx,
        cache_leftpad,
        cu_seqlens_q,
        max_seqlen_q,
        num_splits,
    )
    out, lse = attend_cached(q, k_cache, v_cache, where, call)
    return (out, lse) if return_lse else out


def cache_of(
    q: Tensor,
    k_cache: Tensor,
    cache_seqlens: int | Tensor,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    num_splits: int = 0,
) -> Cache:
    """The record of these arguments of :func:`forward_cached`."""
    batch = q.shape[0] if q.dim() else 0
    if k_cache.dim() != 4:
        refuse("k_cache.shape", tuple(k_cache.shape), "(pages, H, page_size, d)")
    if cu_seqlens_q is not None:
        _checks.tensors(cu_seqlens_q=cu_seqlens_q)
        batch = cu_seqlens_q.numel() - 1
    elif max_seqlen_q is not None:
        refuse("max_seqlen_q", repr(max_seqlen_q), "None without cu_seqlens_q")
    table = table_of(block_table, cache_batch_idx, q, batch)
    seqlens = lengths_of(cache_seqlens, k_cache, table, batch)
    longest = min(q.shape[0], _checks.MAX_SEQLEN) if max_seqlen_q is None and q.dim() else max_seqlen_q
    longest = 0 if cu_seqlens_q is None else longest
    return Cache(seqlens, table, cache_leftpad, cu_seqlens_q, longest, num_splits)  # type: ignore[arg-type]


def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: int | Tensor,
    *,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    validate: bool = False,
) -> None:
    """Writes new keys and values behind those that a cache holds, in place.

    Key i of sequence b becomes row cache_seqlens[b] + i of the sequence. Rows that the cache has no place for, behind
    its capacity or on a page that does not exist, are not written. The call does not wait for the device, and records
    no gradients, whatever requires one.

    Args:
        k_cache: (B, Hk, N, d), or with block_table (pages, Hk, page_size, d), as for :func:`forward_cached`.
        v_cache: (B, Hk, N, d_v) or (pages, Hk, page_size, d_v), likewise.
        k: (B, Hk, n, d), or with cu_seqlens_k packed, (total, Hk, d); k_cache's dtype and device.
        v: (B, Hk, n, d_v) or (total, Hk, d_v), likewise.
        cache_seqlens: an int, or (B), int32: the rows of each sequence that are filled so far.
        block_table: (B, n), int32: which pages a sequence has. No page that is written is in two sequences.
        cache_batch_idx: (B), int32: which entry of a cache without block_table a sequence has; no entry twice.
        cu_seqlens_k: (B + 1), int32: where the new keys of each sequence lie in packed k and v.
        validate: raise if a row has no place or cu_seqlens_k is wrong, which waits for the device.

    Raises:
        TypeError, ValueError: with the argument's name.
    """
    _checks.flag(validate=validate)
    append(k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx, cu_seqlens_k, validate)


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: int | Tensor,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    cu_seqlens_k: Tensor | None,
    validate: bool,
    rotation: _append.Rotation | None = None,
    cu_seqlens_name: str = "cu_seqlens_k",
) -> tuple[Tensor, Tensor]:
    """append_kv, rotated; checks all but the rotation's tables. Returns the rotated queries, (0) without any, and the
    lengths with the new keys, at most 2^31 - 1. No gradients are recorded."""
    _checks.tensors(k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        if t.dim() != 4:
            refuse(f"{name}.shape", tuple(t.shape), "(pages, H, page_size, d)")
    dim = 4 if cu_seqlens_k is None else 3
    heads = 1
    for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if t.dim() != dim:
            refuse(f"{name}.shape", tuple(t.shape), "(B, H, N, d)" if dim == 4 else "(total, H, d)")
        if t.dtype not in _checks.DTYPES:
            refuse(f"{name}.dtype", t.dtype, ", ".join(map(str, _checks.DTYPES)))
        if t.dtype != cache.dtype:
            refuse(f"{name}.dtype", t.dtype, f"the cache's, {cache.dtype}")
        if t.device != cache.device or cache.device != k_cache.device:
            refuse(f"{name}.device", t.device, f"k_cache's, {k_cache.device}")
        if t.shape[heads] != cache.shape[1] or t.shape[-1] != cache.shape[3]:
            refuse(f"{name}.shape", tuple(t.shape), f"heads and head dim of the cache, {tuple(cache.shape)}")
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        refuse("v_cache.shape", tuple(v_cache.shape), f"k_cache's but for the last, {tuple(k_cache.shape)}")
    if v.shape[:-1] != k.shape[:-1]:
        refuse("v.shape", tuple(v.shape), f"k's but for the last, {tuple(k.shape)}")
    batch = k.shape[0]
    if cu_seqlens_k is not None:
        _checks.int32(k, cu_seqlens_k=cu_seqlens_k)
        batch = cu_seqlens_k.shape[0] - 1
    table = table_of(block_table, cache_batch_idx, k, batch)
    held = _checks.capacity(k_cache, table, batch)
    seqlens = lengths_of(cache_seqlens, k_cache, table, batch, k.shape[2] if cu_seqlens_k is None else 0)
    _checks.int32(k, batch=batch, cache_seqlens=seqlens)
    if table is not None and table.device != k.device:
        refuse("block_table.device", table.device, f"k's, {k.device}")
    if rotation is not None:
        _check_rotated(rotation, k, batch)
    if validate:
        if cu_seqlens_k is None:
            new = [k.shape[2]] * batch
        else:
            new = _checks.cumulative("k", cu_seqlens_k, k.shape[0], argument=cu_seqlens_name)
        _check_room(new, k_cache, seqlens, table, held)
        if rotation is not None:
            _check_places(rotation, new, seqlens)
    caches, appended = (k_cache.detach(), v_cache.detach()), (k.detach(), v.detach())
    return _append.append_kv(*caches, *appended, seqlens, table, cu_seqlens_k, rotation)


def _check_rotated(rotation: _append.Rotation, k: Tensor, batch: int) -> None:
    """The queries that are rotated beside k."""
    q, cu_seqlens_q = rotation.q, rotation.cu_seqlens_q
    if q.dtype != k.dtype:
        refuse("q.dtype", q.dtype, f"k's, {k.dtype}")
    if q.device != k.device:
        refuse("q.device", q.device, f"k's, {k.device}")
    if q.shape[-1] != k.shape[-1]:
        refuse("q.shape", tuple(q.shape), f"k's head dim, {k.shape[-1]}")
    if cu_seqlens_q is None:
        if q.shape[0] != batch:
            refuse("q.shape", tuple(q.shape), f"k's batch, {batch}")
        return
    _checks.int32(k, cu_seqlens_q=cu_seqlens_q)
    if cu_seqlens_q.shape[0] != batch + 1:
        refuse("cu_seqlens_q.shape", tuple(cu_seqlens_q.shape), f"({batch + 1},), since k has {batch} sequences")


def _check_places(rotation: _append.Rotation, new: list[int], seqlens: Tensor) -> None:
    """The tables must have a row for the place of each new key and of each query. Waits for the device."""
    rows, cu_seqlens_q = rotation.cos.shape[0], rotation.cu_seqlens_q
    queries = [rotation.q.shape[2]] * len(new) if cu_seqlens_q is None else cu_seqlens_q.diff().tolist()
    begins = (seqlens if rotation.seqlens is None else rotation.seqlens).tolist()
    for b, (begin, keys, asked) in enumerate(zip(begins, new, queries, strict=True)):
        end = begin + max(keys, asked if rotation.queries_advance else 1)
        if begin >= 0 and end <= rows:
            continue
        if rotation.seqlens is not None:
            refuse("rotary_seqlens", f"{begin} at {b}", f"0 to {rows - end + begin}, since rotary_cos has {rows} rows")
        refuse("rotary_cos.shape", tuple(rotation.cos.shape), f"at least {end} rows, for the last query at {b}")


def _check_room(new: list[int], k_cache: Tensor, seqlens: Tensor, table: Tensor | None, held: int) -> None:
    """Each of ``new`` rows of a sequence must have a place. Waits for the device."""
    rows: list[list[int]] = [] if table is None else table.tolist()
    size, pages = k_cache.shape[2], k_cache.shape[0]
    for b, (begin, n) in enumerate(zip(seqlens.tolist(), new, strict=True)):
        if not 0 <= begin <= begin + n <= held:
            refuse("cache_seqlens", f"{begin} at {b} and {n} new keys", f"at most the capacity, {held}, in all")
        for run in range(begin // size, (begin + n - 1) // size + 1) if rows and n > 0 else ():
            if not 0 <= rows[b][run] < pages:
                refuse("block_table", f"{rows[b][run]} at ({b}, {run})", f"0 to {pages - 1}, since it is written")
