"""Attention whose ALiBi slopes have a gradient: minus the sum of dS times the distance of query and key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _autocast, _ops
from ._autograd import once_differentiable, sinks_gradient
from ._call import Call
from ._statistics import widened

_DOUBLE = 'the gradient of a gradient is not built: kernel="math" is plain torch ops, which have every derivative'


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse), recorded for the gradients of q, k, v, an additive attn_bias, alibi_slopes and sinks."""
    q, k, v, call = _autocast.cast(q, k, v, call)
    # torch.compile takes no tensor twice
    k = k.view_as(k) if k is q else k
    v = v.view_as(v) if v is q or v is k else v
    tensors = (call.attn_bias, call.alibi_slopes, call.sinks)
    without = call._replace(attn_bias=None, alibi_slopes=None, sinks=None)
    return _Attention.apply(q, k, v, *tensors, without)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    """As ``_autograd.Attention``, by an op that gives the gradient of the slopes as well."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_bias: Tensor | None,
        alibi_slopes: Tensor,
        sinks: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        call = call._replace(attn_bias=attn_bias, alibi_slopes=alibi_slopes, sinks=sinks)
        out, lse = _ops.forward(q, k, v, call)
        ctx.call, tensors = call.split()
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        needed = ctx.needs_input_grad
        arguments = dout, dlse, q, k, v, out, lse, ctx.call.joined(tensors), needed[3], needed[5]
        found = once_differentiable(_DOUBLE, _gradients, *arguments)
        return *(t if wanted else None for t, wanted in zip(found, needed, strict=False)), None


def _gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    bias_grad: bool,
    sinks_grad: bool,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, attn_bias, alibi_slopes and sinks."""
    dsinks = lse.new_empty(0)
    if sinks_grad:
        dsinks = sinks_gradient(dout, dlse, out, lse, call)
    *wide, attn_bias = widened(call, q, k, v, out, dout, call.attn_bias)
    wide_q, wide_k, wide_v, wide_out, wide_dout = (t for t in wide if t is not None)
    call_of_kernel = call._replace(attn_bias=attn_bias)
    dq, dk, dv, dbias, dslopes = _ops.backward_with_statistics(
        wide_dout, dlse, wide_q, wide_k, wide_v, wide_out, lse, None, None, call_of_kernel, bias_grad, True
    )
    dbias = dbias if call.attn_bias is None or not bias_grad else dbias.to(call.attn_bias.dtype)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dbias, dslopes, dsinks
