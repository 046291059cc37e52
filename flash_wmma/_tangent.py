"""Forward-mode differentiation by kernels, in memory that grows with N: in one pass (:func:`in_one_pass`) where a
kernel has one, and otherwise by the kernels of forward and backward (:func:`tangents`).

With the tangents q', k', v' the scores' tangents are S' = scale (q' kᵀ + q k'ᵀ), and (P: the weights)

    lse' = rowsum(P * S')        out' = P v' + (P * (S' - lse')) v

P v' is attention with other values. The rest is what backward computes for dQ: dS K with dS = P * (dP - delta),
dP = dO Vᵀ and delta = rowsum(O * dO). The stand-ins

    V = [k, k']        dO = [q', q]        K = [k, v]        Q = [q, 0]

make dP = S' / scale and delta = lse' / scale, leave the scores and so P as they are, and the last columns of
dQ = scale dS K are (P * (S' - lse')) v.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._call import Call

_FORWARD = ("auto", "cpu", "simt", "mma_sm75", "mma_sm80", "wgmma_sm90")
"""Kernels with head dims to 512 and d_v of its own."""


def has_kernels(q: Tensor, v: Tensor, moved: Any, call: Call) -> bool:
    """Whether :func:`tangents` applies: masks do not move, weights are those of the scores, the stand-ins' head dims
    have kernels, and these convert nothing, since a conversion would give the columns of k and of v one scale."""
    names = call.kernel_name, call.backward_kernel
    turing = any("sm75" in name for name in names)
    if q.is_cuda:
        turing = turing or torch.cuda.get_device_capability(q.device) < (8, 0)
    if q.dtype == torch.float32:
        exact = names[0] in ("cpu", "simt") or (names[0] == "auto" and not q.is_cuda)
        converts = not exact or names[1] not in ("auto", "bwd_cpu", "bwd_simt")
    else:
        converts = q.dtype == torch.bfloat16 and turing
    attn_bias, alibi_slopes = moved[3:5]
    d, d_v = q.shape[-1], v.shape[-1]
    return (
        not converts
        and names[0] in _FORWARD
        and max(2 * d, d + d_v) <= (256 if turing or names[1] == "bwd_sm90" else 512)
        and not (call.softcap or call.dropout_p)
        and attn_bias is None
        and alibi_slopes is None
    )


def tangents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dsinks: Tensor | None,
    call: Call,
    attend: Callable[..., tuple[Tensor, Tensor]],
    gradients: Callable[..., Any],
) -> tuple[Tensor, Tensor]:
    """(out', lse'), given the tangents of q, k, v and sinks; None: 0. ``attend`` and ``gradients`` are the functions of
    ``_func``."""
    d = q.shape[-1]
    scale = 1 / math.sqrt(max(d, 1)) if call.scale is None else call.scale
    call = call._replace(scale=scale)
    dout, dlse = torch.zeros_like(out), torch.zeros_like(lse)
    if dv is not None:
        dout = attend(q, k, dv, call)[0]
    if dq is not None or dk is not None:
        dq, dk = (torch.zeros_like(t) if moved is None else moved for t, moved in ((q, dq), (k, dk)))
        values, cotangents = torch.cat((k, dk), -1), torch.cat((dq, q), -1)
        mean = attend(q, k, values, call)[0]
        wide_q, wide_k = torch.cat((q, q.new_zeros(*q.shape[:-1], v.shape[-1])), -1), torch.cat((k, v), -1)
        made = gradients(cotangents, None, wide_q, wide_k, values, mean, lse, False, call, False)[0]
        dout = dout + made[..., d:]
        moved_lse = scale * (mean.float() * cotangents).sum(-1)
        dlse = moved_lse.transpose(0, 1) if call.lengths is not None else moved_lse
    return _with_sinks(out, lse, dout, dlse, dsinks, call)


def _with_sinks(
    out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor, dsinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    """(out', lse'), given those of sinks that do not move, and the sinks' tangents."""
    if dsinks is None:
        return dout, dlse
    assert call.sinks is not None
    share = (call.sinks[:, None] - lse).exp().masked_fill(lse.isneginf(), 0) * dsinks[:, None]
    of_rows = share.transpose(0, 1) if call.lengths is not None else share
    return dout - (of_rows[..., None] * out).to(out.dtype), dlse + share


def is_plain(call: Call) -> bool:
    """Whether a call may be one for :func:`in_one_pass`: dense, without changes of the scores and dropout, and with no
    named kernel of backward."""
    return (
        call.lengths is None
        and call.attn_bias is None
        and call.alibi_slopes is None
        and call.key_ranges is None
        and not (call.softcap or call.dropout_p)
        and call.num_splits == 1
        and call.backward_kernel == "auto"
    )


def in_one_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dsinks: Tensor | None,
    call: Call,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """((out, lse), (out', lse')) by a kernel that computes them together, without derivatives of their own; ``None`` if
    there is none for the call. ``call``: :func:`is_plain`. If v alone moves, out' is attention with other values: a
    second call takes less."""
    if dq is dk is dv is None or not _ops.takes_tangents(q, k, v, call):
        return None
    if dq is dk is None:
        assert dv is not None
        out, lse = _ops.forward(q, k, v, call)
        dout, dlse = _ops.forward(q, k, dv, call)[0], torch.zeros_like(lse)
    else:
        out, lse, dout, dlse = _ops.forward_with_tangents(q, k, v, dq, dk, dv, call)
    return (out, lse), _with_sinks(out, lse, dout, dlse, dsinks, call)
