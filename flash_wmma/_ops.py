"""The ops, given a call.

The records have the order of the ops' schemas (csrc/torch/ops.cpp), so that parts of them are the ops' arguments. Every
argument that is passed to an op costs host time: arguments at the end that have their defaults are left out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._call import PLAIN, Cache, Call
from ._library import ops

_forward = ops.forward.default
_forward_varlen = ops.forward_varlen.default
_forward_cached = ops.forward_cached.default

_LAYOUT, _END = Call._fields.index("out_bnhd"), Call._fields.index("kernel_name") + 1
_BAND, _UP_TO_LAYOUT = slice(_LAYOUT), slice(_LAYOUT + 1)
_AFTER_LAYOUT, _ALL = slice(_LAYOUT + 1, _END), slice(_END)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse), not recorded for gradients."""
    if call is PLAIN:
        return _forward(q, k, v)  # type: ignore[no-any-return]
    asked: tuple[Any, ...] = call
    if call.only_band:
        return _forward(q, k, v, *asked[_UP_TO_LAYOUT])  # type: ignore[no-any-return]
    lengths = call.lengths
    if lengths is None:
        return _forward(q, k, v, *asked[_ALL])  # type: ignore[no-any-return]
    return _forward_varlen(q, k, v, *lengths, *asked[_BAND], *asked[_AFTER_LAYOUT])  # type: ignore[no-any-return]


def forward_cached(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: Cache, call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse) with a key/value cache. It has no gradients."""
    rest = (call.attn_bias, call.alibi_slopes, call.softcap, call.sinks, call.batch_invariant, call.kernel_name)
    asked: tuple[Any, ...] = call
    return _forward_cached(q, k_cache, v_cache, *cache, *asked[_UP_TO_LAYOUT], *rest)  # type: ignore[no-any-return]


def backward_arguments(call: Call, bias_grad: bool, deterministic: bool) -> tuple[Any, ...]:
    """The arguments of ``backward``, or of ``backward_varlen``, after lse."""
    asked: tuple[Any, ...] = call
    if call.only_band and not deterministic:
        return () if call is PLAIN else asked[_BAND]
    lengths = call.lengths
    tables: tuple[Any, ...] = ()
    if lengths is not None:
        tables = (lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_k)
        tables = (*tables, lengths.max_seqlen_q, lengths.max_seqlen_k)
    return (
        *tables,
        *asked[_BAND],
        call.attn_bias,
        call.alibi_slopes,
        call.key_ranges,
        call.softcap,
        call.sinks,
        call.rng_state,
        call.dropout_p,
        bias_grad,
        deterministic,
        call.backward_kernel,
        call.kernel_name,
    )
