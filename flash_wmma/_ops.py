"""The ops, given a call.

The records have the order of the ops' schemas (csrc/torch/ops.cpp), so that parts of them are the ops' arguments. Every
argument that is passed to an op costs host time: arguments at the end that have their defaults are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _autocast
from ._call import PLAIN, Cache, Call
from ._errors import raise_library_error
from ._library import ops

_forward = ops.forward.default
_forward_into = ops.forward_into.default
_forward_merged = ops.forward_merged.default
_forward_with_statistics = ops.forward_with_statistics.default
_takes_tangents = ops.takes_tangents.default
_forward_with_tangents = ops.forward_with_tangents.default
_forward_varlen = ops.forward_varlen.default
_forward_cached = ops.forward_cached.default
_backward_with_statistics = ops.backward_with_statistics.default
_statistics = ops.statistics.default

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


def forward_into(out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """lse of a dense call, whose out is written to that tensor, which may be some rows of another."""
    asked: tuple[Any, ...] = call
    rest = () if call.only_band else (*asked[_AFTER_LAYOUT][:-3], call.batch_invariant, call.kernel_name)
    return _forward_into(out, q, k, v, *asked[_BAND], *rest)  # type: ignore[no-any-return]


def forward_merged(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, merges: bool, call: Call) -> bool:
    """Has the kernel of a dense call, with a scale and a band alone, write ``out``, float32, and ``lse``.

    Args:
        merges: they hold attention over other keys, and become that over all; ``out`` may then be of q's type.

    Returns:
        Whether the kernel can do that. If not, they are as they were.
    """
    asked: tuple[Any, ...] = call
    return _forward_merged(out, lse, q, k, v, merges, *asked[_BAND], call.kernel_name)  # type: ignore[no-any-return]


def forward_with_statistics(
    q: Tensor, k: Tensor, v: Tensor, call: Call, wanted: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, row_max, entropy) of a dense call without changes of the scores or dropout; what is not in ``wanted``
    is empty. Not recorded for gradients."""
    rest = (call.scale, *call.band, call.sinks, call.batch_invariant, call.kernel_name)
    return _forward_with_statistics(q, k, v, wanted, *rest)  # type: ignore[no-any-return]


def takes_tangents(q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    """Whether the kernel of forward computes tangents in its pass. The call is dense, without changes of the scores and
    dropout."""
    rest = (call.scale, *call.band, call.sinks, call.batch_invariant, call.kernel_name)
    return _takes_tangents(q, k, v, *rest)  # type: ignore[no-any-return]


def forward_with_tangents(
    q: Tensor, k: Tensor, v: Tensor, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, dout, dlse) of a call that :func:`takes_tangents` is true of; sinks do not move. Not recorded."""
    rest = (call.scale, *call.band, call.out_bnhd, call.sinks, call.batch_invariant, call.kernel_name)
    return _forward_with_tangents(q, k, v, dq, dk, dv, *rest)  # type: ignore[no-any-return]


def forward_cached(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: Cache, call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse) with a key/value cache. It has no gradients."""
    rest = (call.attn_bias, call.alibi_slopes, call.softcap, call.sinks, call.batch_invariant, call.kernel_name)
    asked: tuple[Any, ...] = call
    return _forward_cached(q, k_cache, v_cache, *cache, *asked[_UP_TO_LAYOUT], *rest)  # type: ignore[no-any-return]


def _tables(call: Call) -> tuple[Any, ...]:
    """The lengths of packed sequences for an op that takes dense tensors too."""
    if call.lengths is None:
        return None, None, None, 0, 0
    return call.lengths


def statistics(
    q: Tensor, k: Tensor, lse: Tensor, call: Call, names: tuple[str, ...], key_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row_max, entropy, column_sum, row_sum), of which those that are not asked for are empty."""
    changes = (call.attn_bias, call.alibi_slopes, call.key_ranges, call.softcap)
    rest = (*_tables(call), call.scale, *call.band, *changes, call.backward_kernel, call.kernel_name)
    try:
        return _statistics(q, k, lse, " ".join(names), key_weights, *rest)  # type: ignore[no-any-return]
    except (RuntimeError, ValueError) as error:
        raise_library_error(error)
        raise


def backward_with_statistics(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dentropy: Tensor | None,
    dcolumn_sum: Tensor | None,
    call: Call,
    bias_grad: bool,
    slopes_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, attn_bias and alibi_slopes; the last two are empty if not asked for."""
    deterministic = is_deterministic(call)
    changes = (call.attn_bias, call.alibi_slopes, call.key_ranges, call.softcap, call.rng_state, call.dropout_p)
    rest = (call.scale, *call.band, *changes, call.dropout_origin, bias_grad, slopes_grad, deterministic)
    given = (dout, dlse, q, k, v, out, lse, dentropy, dcolumn_sum, *_tables(call))
    try:
        found = _backward_with_statistics(*given, *rest, call.backward_kernel, call.kernel_name)
    except (RuntimeError, ValueError) as error:
        raise_library_error(error)
        raise
    dq, dk, dv, dbias, dslopes = found
    return dq, dk, dv, dbias, _slopes_of(dslopes, call) if slopes_grad else dslopes


def _slopes_of(of_keys: Tensor, call: Call) -> Tensor:
    """The gradient of alibi_slopes, from that of each key: (B, Hq, Nk), or packed (Hq, total_k)."""
    assert call.alibi_slopes is not None
    per_entry = call.alibi_slopes.dim() == 2
    if call.lengths is None:
        return of_keys.sum(2) if per_entry else of_keys.sum((0, 2))
    if not per_entry:
        return of_keys.sum(1)
    row, first = torch.arange(of_keys.shape[1], device=of_keys.device), call.lengths.cu_seqlens_k
    of_sequence = (row >= first[:-1, None]) & (row < first[1:, None])
    with _autocast.suspended(of_keys.device):
        return of_sequence.to(of_keys.dtype) @ of_keys.transpose(0, 1)


def is_deterministic(call: Call) -> bool:
    """Whether its gradients have to be the same from run to run."""
    asked = call.deterministic
    return torch.are_deterministic_algorithms_enabled() if asked is None else asked


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
        call.dropout_origin,
        bias_grad,
        deterministic,
        call.backward_kernel,
        call.kernel_name,
    )
