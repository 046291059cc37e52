"""Shapes, dtypes and devices of the ops' results, for ``torch.compile``, ``meta`` tensors and ``FakeTensorMode``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks
from ._call import Cache, Call, Lengths
from ._library import NAMESPACE


def _dense(q: Tensor, d_v: int, out_bnhd: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) for q (B, H, N, d)."""
    batch, heads, n = q.shape[:3]
    bnhd = batch, n, heads, d_v
    out = q.new_empty(bnhd).transpose(1, 2) if out_bnhd else q.new_empty((batch, heads, n, d_v))
    return out, q.new_empty((batch, heads, n), dtype=torch.float32)


def _packed(q: Tensor, d_v: int) -> tuple[Tensor, Tensor]:
    """The same for q (total, H, d)."""
    total, heads = q.shape[:2]
    return q.new_empty((total, heads, d_v)), q.new_empty((heads, total), dtype=torch.float32)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    out_bnhd: bool = False,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    rng_state: Tensor | None = None,
    dropout_p: float = 0.0,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor]:
    call = Call(
        attn_bias=attn_bias,
        alibi_slopes=alibi_slopes,
        key_ranges=key_ranges,
        sinks=sinks,
        rng_state=rng_state,
        dropout_p=dropout_p,
    )
    _checks.call_tensors(q, k, v, call)
    return _dense(q, v.shape[3], out_bnhd)


def _forward_with_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    wanted: str,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    sinks: Tensor | None = None,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse = _forward(q, k, v, sinks=sinks)
    row_max, entropy = (_of_queries(q) if name in wanted else _nothing(q) for name in ("max", "entropy"))
    return out, lse, row_max, entropy


def _takes_tangents(*_: object, **__: object) -> bool:
    """What the ops do that tangents are made of otherwise has fake kernels too."""
    return False


def _forward_with_tangents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    out_bnhd: bool = False,
    sinks: Tensor | None = None,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_forward(q, k, v, out_bnhd=out_bnhd, sinks=sinks), *_dense(q, v.shape[3], out_bnhd)


def _forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    rng_state: Tensor | None = None,
    dropout_p: float = 0.0,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor]:
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k)
    call = Call(
        attn_bias=attn_bias,
        alibi_slopes=alibi_slopes,
        key_ranges=key_ranges,
        sinks=sinks,
        rng_state=rng_state,
        dropout_p=dropout_p,
        lengths=lengths,
    )
    _checks.call_tensors(q, k, v, call)
    return _packed(q, v.shape[2])


def _forward_cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    cache_leftpad: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    num_splits: int = 0,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    out_bnhd: bool = False,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor]:
    cache = Cache(cache_seqlens, page_table, cache_leftpad, cu_seqlens_q, max_seqlen_q)
    call = Call(attn_bias=attn_bias, alibi_slopes=alibi_slopes, sinks=sinks, out_bnhd=out_bnhd)
    _checks.cached_tensors(q, k_cache, v_cache, cache, call)
    d_v = v_cache.shape[3]
    return _packed(q, d_v) if q.dim() == 3 else _dense(q, d_v, out_bnhd)


def _like(t: Tensor) -> Tensor:
    """A gradient: dense, with heads and rows in the argument's order."""
    if t.dim() == 4 and t.stride(1) < t.stride(2):
        return torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    rng_state: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_origin: Tensor | None = None,
    bias_grad: bool = False,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dbias = q.new_empty(0) if attn_bias is None or not bias_grad else attn_bias.new_empty(attn_bias.shape)
    return _like(q), _like(k), _like(v), dbias


def _backward_varlen(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _backward(dout, dlse, q, k, v, out, lse, *options, **named)


def _backward_begin(dout: Tensor, dlse: Tensor | None, q: Tensor, *_: object, **__: object) -> Tensor:
    return q.new_empty(torch.library.get_ctx().new_dynamic_size(min=0), dtype=torch.uint8)


def _backward_add(
    memory: Tensor, first: int, rows: int, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    return _like(k), _like(v)


def _backward_with_statistics(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dentropy: Tensor | None,
    dcolumn_sum: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None,
    softcap: float = 0.0,
    rng_state: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_origin: Tensor | None = None,
    bias_grad: bool = False,
    slopes_grad: bool = False,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients = _backward(dout, dlse, q, k, v, out, lse, attn_bias=attn_bias, bias_grad=bias_grad)
    return *gradients, _of_keys(q, k) if slopes_grad else _nothing(q)


def _nothing(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=torch.float32)


def _of_queries(q: Tensor) -> Tensor:
    """A number for each query, as lse."""
    return q.new_empty(q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0]), dtype=torch.float32)


def _of_keys(q: Tensor, k: Tensor) -> Tensor:
    """A number for each key."""
    return q.new_empty((*q.shape[:2], k.shape[2]) if q.dim() == 4 else (q.shape[1], k.shape[0]), dtype=torch.float32)


def _statistics(
    q: Tensor, k: Tensor, lse: Tensor, wanted: str, key_weights: Tensor | None, *_: object, **__: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        _of_queries(q) if "max" in wanted else _nothing(q),
        _of_queries(q) if "entropy" in wanted else _nothing(q),
        _of_keys(q, k) if "column_sum" in wanted else _nothing(q),
        _nothing(q) if key_weights is None else _of_queries(q),
    )


for _op, _fake in (
    ("backward_with_statistics", _backward_with_statistics),
    ("statistics", _statistics),
    ("forward", _forward),
    ("forward_into", lambda out, q, *_, **__: _of_queries(q)),
    ("forward_merged", lambda *_, **__: True),
    ("forward_with_statistics", _forward_with_statistics),
    ("takes_tangents", _takes_tangents),
    ("forward_with_tangents", _forward_with_tangents),
    ("forward_varlen", _forward_varlen),
    ("forward_cached", _forward_cached),
    ("backward", _backward),
    ("backward_varlen", _backward_varlen),
    ("backward_begin", _backward_begin),
    ("backward_add", _backward_add),
    ("backward_end", lambda memory, q, *_, **__: _like(q)),
):
    torch.library.register_fake(f"{NAMESPACE}::{_op}", _fake)
