"""flash-attn's functions: its signatures, layouts, defaults and semantics (version 2.8).

Source of the semantics: ``flash_attn/flash_attn_interface.py`` of https://github.com/Dao-AILab/flash-attention. Causal
masks and windows are aligned to the last key; ALiBi is -slope * |i + Nk - Nq - j|.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _checks
from ._append import Rotation
from ._attention import attend
from ._cached import append, attend_cached, cache_of, check_splits, lengths_of, table_of
from ._call import Lengths, call_of
from ._dropout import probability
from ._errors import refuse

Result = Tensor | tuple[Tensor, Tensor, Tensor]
WindowSize = Sequence[int] | Tensor
"""Two integers, (left, right). Those of a tensor on a GPU are read back, which waits for the device."""


def _no_dropout(dropout_p: float, why: str) -> None:
    probability(dropout_p=dropout_p)
    if dropout_p != 0:
        raise NotImplementedError(f"dropout_p: got {dropout_p}, {why}")


def _window(window_size: WindowSize) -> tuple[int, int] | None:
    allowed = "a pair (left, right) of int, -1 for no bound"
    bounds: object = window_size.tolist() if hasattr(window_size, "tolist") else window_size
    if not isinstance(bounds, Sequence) or isinstance(bounds, str):
        refuse("window_size", repr(window_size), allowed, TypeError)
    if len(bounds) != 2:
        refuse("window_size", repr(window_size), allowed)
    left, right = bounds
    if isinstance(left, int) and isinstance(right, int) and left < 0 and right < 0:
        return None
    return left, right


def _flag(name: str, value: object) -> bool:
    """An argument that flash-attn's own functions take as a bool: whatever has a truth value of its own."""
    if value is None or not hasattr(type(value), "__bool__"):
        refuse(name, repr(value), "a bool", TypeError)
    return bool(value)


def _result(out: Tensor, lse: Tensor, return_attn_probs: bool) -> Result:
    """flash-attn's third result encodes which weights were dropped. Here it is empty (:func:`dropout_mask`)."""
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def _sinks(learnable_sink: Tensor | None, s_aux: Tensor | None) -> Tensor | None:
    """The sinks under either name."""
    if learnable_sink is not None and s_aux is not None:
        refuse("s_aux", "a tensor", "None if there is a learnable_sink")
    return s_aux if learnable_sink is None else learnable_sink


def _unpacked(name: str, t: Tensor, dim: int, n: int, layout: str) -> tuple[Tensor, ...]:
    """The views of a tensor that holds ``n`` of q, k, v at dimension ``dim``."""
    _checks.tensors(**{name: t})
    if t.dim() != dim + 3 or t.shape[dim] != n:
        refuse(f"{name}.shape", tuple(t.shape), layout)
    return t.unbind(dim)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
) -> Result:
    """flash-attn's ``flash_attn_func``.

    Args:
        q: (B, Nq, Hq, d), float32, float16 or bfloat16.
        k: (B, Nk, Hk, d); Hq is a multiple of Hk.
        v: (B, Nk, Hk, d_v).
        dropout_p: as for :func:`flash_wmma.forward`. 1 is not allowed.
        softmax_scale: factor on the scores; default 1 / sqrt(d).
        causal: query i sees the keys j <= i + Nk - Nq.
        window_size: (left, right), any sequence of two integers, a tensor included: query i sees the keys from
            i + Nk - Nq - left to i + Nk - Nq + right; -1: no bound.
        softcap: if not 0, scaled scores x become softcap * tanh(x / softcap).
        alibi_slopes: (Hq) or (B, Hq), float32: -slope * |i + Nk - Nq - j| is added to the scores.
        deterministic: compute gradients that are bitwise the same from run to run. The forward pass always is.
        return_attn_probs: also return lse and an empty tensor, which stands where flash-attn puts dropout's pattern
            (:func:`flash_wmma.dropout_mask` has it).
        learnable_sink: FlashAttention-4's; the ``sinks`` of :func:`flash_wmma.forward`.

    Returns:
        out (B, Nq, Hq, d_v), contiguous; with ``return_attn_probs`` (out, lse (B, Hq, Nq) float32, empty tensor).

    Raises:
        TypeError, ValueError: as :func:`flash_wmma.forward`; messages use that function's argument names.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor) or t.dim() != 4:
            _checks.tensors(**{name: t})
            refuse(f"{name}.shape", tuple(t.shape), "(B, N, H, d)")
    call = call_of(
        causal=_flag("causal", causal),
        scale=softmax_scale,
        window=_window(window_size),
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        deterministic=_flag("deterministic", deterministic) or None,
        sinks=learnable_sink,
        dropout_p=dropout_p,
        bottom_right=True,
        out_bnhd=True,
    )
    return_attn_probs = _flag("return_attn_probs", return_attn_probs)
    out, lse = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), call)
    return _result(out.transpose(1, 2), lse, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` with k and v in one tensor kv (B, Nk, 2, Hk, d), of which views are read."""
    k, v = _unpacked("kv", kv, 2, 2, "(B, N, 2, H, d)")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` with q, k and v in one tensor qkv (B, N, 3, H, d), of which views are read."""
    q, k, v = _unpacked("qkv", qkv, 2, 3, "(B, N, 3, H, d)")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    out: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    validate: bool = False,
) -> Result:
    """flash-attn's ``flash_attn_varlen_func``: sequences of different lengths, packed.

    Args:
        q: (total_q, Hq, d), float32, float16 or bfloat16.
        k: (total_k, Hk, d); Hq is a multiple of Hk. With block_table (pages, page_size, Hk, d).
        v: (total_k, Hk, d_v), or (pages, page_size, Hk, d_v).
        cu_seqlens_q: (B + 1), int32: sequence b is the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        cu_seqlens_k: (B + 1), int32, the same for k and v; with block_table sequence b has so many keys, and ``None``
            is allowed if seqused_k says how many.
        max_seqlen_q: at least the number of queries of every sequence.
        max_seqlen_k: the same for keys; with block_table it is not used.
        block_table: (B, n), int32: k and v are pages of a cache, of any size, as for :func:`forward_cached`. The result
            then has no gradients.
        seqused_k: (B), int32: the keys of each sequence that are used. vLLM passes it.
        out: where the result is written; it is returned too. vLLM passes it.
        learnable_sink: FlashAttention-4's; the ``sinks`` of :func:`flash_wmma.forward`.
        s_aux: vLLM's name of it.
        validate: check the lengths and raise if they are wrong, which waits for the device; flash-attn has no such
            argument. Without it the lengths are clamped, and nothing outside the tensors is read.

    The other arguments are those of :func:`flash_attn_func`, with Nq and Nk of each sequence.

    Returns:
        out (total_q, Hq, d_v), contiguous, 0 in the rows after the last sequence; with ``return_attn_probs`` (out, lse
        (Hq, total_q) float32, empty tensor).

    Raises:
        NotImplementedError: dropout with block_table, or with block_table or out a tensor that requires grad.
        TypeError, ValueError: as :func:`flash_wmma.forward_varlen`.
    """
    if block_table is not None:
        _no_dropout(dropout_p, "no kernel drops weights with a block_table")
    if (block_table is not None or out is not None) and torch.is_grad_enabled():
        _checks.no_gradient(q=q, k=k, v=v, learnable_sink=learnable_sink, s_aux=s_aux)
    if block_table is None and cu_seqlens_k is None:
        refuse("cu_seqlens_k", "None", "a tensor (B + 1), or None with block_table and seqused_k", TypeError)
    call = call_of(
        causal=_flag("causal", causal),
        scale=softmax_scale,
        window=_window(window_size),
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        deterministic=_flag("deterministic", deterministic) or None,
        sinks=_sinks(learnable_sink, s_aux),
        dropout_p=dropout_p,
        bottom_right=True,
        lengths=None
        if block_table is not None or cu_seqlens_k is None
        else Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k),
        validate=_flag("validate", validate),
    )
    return_attn_probs = _flag("return_attn_probs", return_attn_probs)
    if block_table is None:
        result, lse = attend(q, k, v, call)
    else:
        k_pages, v_pages = _pages("k", k), _pages("v", v)
        used = seqused_k if seqused_k is not None else _differences(cu_seqlens_k)
        cache = cache_of(q, k_pages, used, block_table, None, None, cu_seqlens_q, max_seqlen_q)
        result, lse = attend_cached(q, k_pages, v_pages, cache, call)
    return _result(_written(result, out), lse, return_attn_probs)


def _pages(name: str, t: Tensor) -> Tensor:
    """Pages (pages, page_size, H, d) as this library has them, (pages, H, page_size, d)."""
    _checks.tensors(**{name: t})
    if t.dim() != 4:
        refuse(f"{name}.shape", tuple(t.shape), "(pages, page_size, H, d)")
    return t.transpose(1, 2)


def _differences(cu_seqlens_k: Tensor | None) -> Tensor:
    """The lengths of sequences."""
    if not isinstance(cu_seqlens_k, Tensor) or cu_seqlens_k.dim() != 1:
        refuse("cu_seqlens_k", repr(cu_seqlens_k), "a tensor (B + 1), unless seqused_k is given")
    return cu_seqlens_k[1:] - cu_seqlens_k[:-1]


def _written(result: Tensor, out: Tensor | None) -> Tensor:
    """The result, in ``out`` if the caller gave one."""
    if out is None:
        return result
    _checks.tensors(out=out)
    if out.shape != result.shape or out.dtype != result.dtype or out.device != result.device:
        got = f"{tuple(out.shape)}, {out.dtype}, {out.device}"
        refuse("out", got, f"{tuple(result.shape)}, {result.dtype}, {result.device}")
    return out.copy_(result)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    validate: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` with k and v in one tensor kv (total_k, 2, Hk, d), of which views are read."""
    k, v = _unpacked("kv", kv, 1, 2, "(total_k, 2, H, d)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        validate=validate,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    validate: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` with q, k and v in one tensor qkv (total, 3, H, d), of which views are read."""
    q, k, v = _unpacked("qkv", qkv, 1, 3, "(total, 3, H, d)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        validate=validate,
    )


def _rotary_tables(cos: Tensor, sin: Tensor, q: Tensor, held: int) -> None:
    """Checks rotary_cos and rotary_sin, for a cache that holds ``held`` rows a sequence."""
    _checks.tensors(rotary_cos=cos, rotary_sin=sin)
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        if t.dim() != 2 or t.shape != cos.shape or 2 * t.shape[1] > q.shape[-1]:
            allowed = f"(rows, r / 2), r at most the head dim {q.shape[-1]}, the same for cos and sin"
            refuse(f"{name}.shape", tuple(t.shape), allowed)
        if t.shape[0] < max(held, 1):
            refuse(
                f"{name}.shape",
                tuple(t.shape),
                f"at least {max(held, 1)} rows, as many as the cache holds of a sequence",
            )
        if t.dtype != q.dtype:
            refuse(f"{name}.dtype", t.dtype, f"q's, {q.dtype}")
        if t.device != q.device:
            refuse(f"{name}.device", t.device, f"q's, {q.device}")


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash-attn's ``flash_attn_with_kvcache``: attention of new queries with a cache, which may grow first, in place.

    If k and v are given, they are written to the cache behind the rows that it holds, and the queries see them. With
    rotary_cos and rotary_sin the new k and q are rotated before. The result has no gradients, whatever requires grad.
    The names behind return_softmax_lse are FlashAttention-3's, FlashAttention-4's (learnable_sink), vLLM's (out,
    s_aux), and this library's (validate).

    Args:
        q: (B, Nq, Hq, d), or with cu_seqlens_q (total_q, Hq, d); float32, float16 or bfloat16.
        k_cache: (B, N, Hk, d), or with block_table (pages, page_size, Hk, d), any strides and any page size.
        v_cache: (B, N, Hk, d_v) or (pages, page_size, Hk, d_v).
        k: (B, n, Hk, d), or with cu_seqlens_k_new (total, Hk, d): new keys.
        v: (B, n, Hk, d_v) or (total, Hk, d_v).
        rotary_cos: (rows, r / 2), q's dtype, r <= d; at least as many rows as the cache holds of a sequence. New key i
            is rotated by row cache_seqlens[b] + i, query i too if ``causal`` or a window is given, and otherwise all
            queries by row cache_seqlens[b].
        rotary_sin: (rows, r / 2), likewise.
        cache_seqlens: an int, or (B), int32: the rows that the cache holds, k and v not counted; default: all of them.
        cache_batch_idx: (B), int32: the entry of the cache that sequence b has.
        cache_leftpad: (B), int32: where each sequence begins in the cache.
        block_table: (B, n), int32: the pages of each sequence.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as for :func:`flash_attn_func`; the last query is at
            the last key.
        rotary_interleaved: dimensions 2 i and 2 i + 1 are rotated as a pair, instead of i and i + r / 2.
        num_splits: into about how many parts a GPU kernel splits a sequence's keys; 1: none, 0: the kernel decides.
        return_softmax_lse: also return lse.
        page_table: another name of block_table.
        cu_seqlens_q: (B + 1), int32: where the queries of each sequence lie in a packed q.
        cu_seqlens_k_new: (B + 1), int32: the same for packed k and v.
        max_seqlen_q: with cu_seqlens_q, at least the number of queries of every sequence.
        rotary_seqlens: (B), int32: the row of the tables for each sequence's first new key and query, in place of
            cache_seqlens.
        out: where the result is written; it is returned too.
        learnable_sink: the ``sinks`` of :func:`flash_wmma.forward`.
        s_aux: another name of learnable_sink.
        validate: check lengths and page numbers, and raise if they are wrong, which waits for the device.

    Returns:
        out (B, Nq, Hq, d_v) or (total_q, Hq, d_v); with ``return_softmax_lse`` (out, lse (B, Hq, Nq) or (Hq, total_q)).

    Raises:
        TypeError, ValueError: with the argument's name.
    """
    _checks.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if page_table is not None:
        if block_table is not None:
            refuse("page_table", "a tensor", "None if there is a block_table")
        block_table = page_table
    check_splits(num_splits)
    if (k is None) != (v is None):
        refuse("v" if v is None else "k", "None", "both k and v, or neither", TypeError)
    if (rotary_cos is None) != (rotary_sin is None):
        refuse("rotary_sin" if rotary_sin is None else "rotary_cos", "None", "both tables, or neither", TypeError)
    if rotary_cos is not None and k is None:
        refuse("rotary_cos", "a tensor", "None unless k and v are given")
    if k is not None and cache_seqlens is None:
        refuse("cache_seqlens", "None", "an int or a tensor (B), since k and v are given", TypeError)
    if q.dim() != (4 if cu_seqlens_q is None else 3):
        refuse("q.shape", tuple(q.shape), "(B, N, H, d)" if cu_seqlens_q is None else "(total, H, d)")
    sinks = _sinks(learnable_sink, s_aux)
    if sinks is not None:
        _checks.tensors(sinks=sinks)
    causal, with_lse = _flag("causal", causal), _flag("return_softmax_lse", return_softmax_lse)
    window = _window(window_size)
    q, k_pages, v_pages = q.detach(), _pages("k_cache", k_cache.detach()), _pages("v_cache", v_cache.detach())
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    table = table_of(block_table, cache_batch_idx, q, batch)
    held = _checks.capacity(k_pages, table, batch)
    packed, n = cu_seqlens_k_new is not None, 0
    if k is not None and v is not None:
        _checks.tensors(k=k, v=v)
        for name, t, kept in (("k", k, k_cache), ("v", v, v_cache)):
            if t.dim() != (3 if packed else 4):
                refuse(f"{name}.shape", tuple(t.shape), "(total, H, d)" if packed else "(B, N, H, d)")
            if t.shape[-2:] != kept.shape[-2:]:
                refuse(f"{name}.shape", tuple(t.shape), f"heads and head dim of {name}_cache, {tuple(kept.shape)}")
        n = 0 if packed else k.shape[1]
    seqlens = lengths_of(held if cache_seqlens is None else cache_seqlens, k_pages, table, batch, n)
    _checks.int32(q, batch=batch, cache_seqlens=seqlens, rotary_seqlens=rotary_seqlens, cache_leftpad=cache_leftpad)
    call = call_of(
        causal=causal,
        scale=softmax_scale,
        window=window,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sinks=None if sinks is None else sinks.detach(),
        bottom_right=True,
        out_bnhd=cu_seqlens_q is None,
        validate=_flag("validate", validate),
    )
    dense = cu_seqlens_q is None
    if dense:
        q = q.transpose(1, 2)
    if k is not None and v is not None:
        if not packed:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        rotation = None
        if rotary_cos is not None and rotary_sin is not None:
            _rotary_tables(rotary_cos, rotary_sin, q, held)
            interleaved, advance = _flag("rotary_interleaved", rotary_interleaved), causal or window is not None
            rotation = Rotation(q, cu_seqlens_q, rotary_cos, rotary_sin, rotary_seqlens, advance, interleaved)
        turned, seqlens = append(
            k_pages,
            v_pages,
            k,
            v,
            seqlens,
            table,
            None,
            cu_seqlens_k_new,
            _flag("validate", validate),
            rotation,
            "cu_seqlens_k_new",
        )
        q = q if rotation is None else turned
    cache = cache_of(q, k_pages, seqlens, table, None, cache_leftpad, cu_seqlens_q, max_seqlen_q, num_splits)
    result, lse = attend_cached(q, k_pages, v_pages, cache, call)
    result = _written(result.transpose(1, 2) if dense else result, out)
    return (result, lse) if with_lse else result
