"""Gradients of the ops: what eager code and ``torch.compile`` record for inputs that require one.

This is a ``torch.autograd.Function``, not ``torch.library.register_autograd``: the latter costs every call a trip
through Python, and ``torch.compile`` traces a ``Function`` as well. Each argument of ``apply`` costs host time, so that
it takes only tensors and the call (benchmark/host_cost.py measures a call).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _autocast, _ops
from ._call import Call
from ._errors import raise_library_error
from ._library import ops

_backward = ops.backward.default
_backward_varlen = ops.backward_varlen.default

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of q, k, v and attn_bias."""


def gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias_grad: bool,
    call: Call,
) -> Gradients:
    deterministic = _ops.is_deterministic(call)
    op = _backward if call.lengths is None else _backward_varlen
    try:
        return op(dout, dlse, q, k, v, out, lse, *_ops.backward_arguments(call, bias_grad, deterministic))  # type: ignore[no-any-return]
    except (RuntimeError, ValueError) as error:
        only_warn = (
            call.deterministic is None and deterministic and torch.is_deterministic_algorithms_warn_only_enabled()
        )
        if only_warn and str(error).startswith("kernel"):
            warnings.warn(f"flash_wmma: gradients that may differ from run to run, since {error}", stacklevel=2)
            return gradients(dout, dlse, q, k, v, out, lse, bias_grad, call._replace(deterministic=False))
        raise_library_error(error)
        raise


def sinks_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, call: Call) -> Tensor:
    """The gradient of sinks: minus the sum over a head's rows of the sink's weight, ``exp(sink - lse)``, times delta,
    ``rowsum(out * dout) - dlse``. The same from run to run."""
    delta = (out * dout.float()).sum(-1)
    if out.dim() == 3:  # packed
        delta = delta.transpose(0, 1)
    if dlse is not None:
        delta = delta - dlse
    assert call.sinks is not None
    weights = (call.sinks[:, None] - lse).exp().masked_fill(lse.isneginf(), 0)
    return -(weights * delta).transpose(0, -2).flatten(1).sum(1)


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, refusal: str, compute: Callable[..., Any], *arguments: Any) -> Any:
        ctx.refusal = refusal
        return compute(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise NotImplementedError(ctx.refusal)


def once_differentiable(refusal: str, compute: Callable[..., Any], *arguments: Any) -> Any:
    """``compute(*arguments)``, which are gradients. If they are recorded themselves (``create_graph=True``),
    differentiating them again is refused, and ``refusal`` says why."""
    if torch.is_grad_enabled():
        return _OnceDifferentiable.apply(refusal, compute, *arguments)
    return compute(*arguments)


class Attention(torch.autograd.Function):
    """(out, lse) of the ops, both differentiable in q, k, v, an additive attn_bias and sinks.

    FlashAttention-2, algorithm 2 (https://arxiv.org/abs/2307.08691): the weights are recomputed from lse, whose own
    gradient enters as ``rowsum(out * dout) - dlse``. Sinks are in lse, so the kernels need not know of them.
    """

    recorded: Callable[..., tuple[Tensor | None, ...]]
    """The gradients of q, k, v, attn_bias and sinks where they are recorded themselves (``create_graph=True``). Set by
    ``_func``, which has their derivatives."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, sinks: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        """``call`` comes without its attn_bias and sinks, which autograd has to see."""
        if attn_bias is not None or sinks is not None:
            call = call._replace(attn_bias=attn_bias, sinks=sinks)
        out, lse = _ops.forward(q, k, v, call)
        # The lengths' tensors too, so that torch notices when one is overwritten before backward reads it
        ctx.call, tensors = call.split()
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        bias_grad, sinks_grad = ctx.needs_input_grad[3:5]
        arguments = dout, dlse, q, k, v, out, lse, bias_grad, ctx.call.joined(tensors)
        if torch.is_grad_enabled():
            return *Attention.recorded(*arguments, sinks_grad), None
        dq, dk, dv, dbias = gradients(*arguments)
        dsinks = sinks_gradient(dout, dlse, out, lse, arguments[-1]) if sinks_grad else None
        return dq, dk, dv, dbias if bias_grad else None, dsinks, None


class AttentionWithStatistics(Attention):
    """(out, lse, row_max, entropy); the last two without a gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call, wanted: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``call`` comes without its sinks."""
        call = call._replace(sinks=sinks)
        out, lse, row_max, entropy = _ops.forward_with_statistics(q, k, v, call, wanted)
        ctx.call, tensors = call.split()
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row_max, entropy)
        return out, lse, row_max, entropy

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *none: Any) -> Any:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        sinks_grad = ctx.needs_input_grad[3]
        arguments = dout, dlse, q, k, v, out, lse, False, ctx.call.joined(tensors)
        if torch.is_grad_enabled():
            dq, dk, dv, _, dsinks = Attention.recorded(*arguments, sinks_grad)
        else:
            dq, dk, dv, _ = gradients(*arguments)
            dsinks = sinks_gradient(dout, dlse, out, lse, arguments[-1]) if sinks_grad else None
        return dq, dk, dv, dsinks, None, None


def _prepared(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Call]:
    """Cast for autocast. torch.compile takes no tensor twice."""
    if torch._C._is_any_autocast_enabled():
        q, k, v, call = _autocast.cast(q, k, v, call)
    k = k.view_as(k) if k is q else k
    v = v.view_as(v) if v is q or v is k else v
    return q, k, v, call


def attend_with_statistics(
    q: Tensor, k: Tensor, v: Tensor, call: Call, wanted: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of :class:`AttentionWithStatistics`, recorded."""
    q, k, v, call = _prepared(q, k, v, call)
    sinks, call = call.sinks, call if call.sinks is None else call._replace(sinks=None)
    return AttentionWithStatistics.apply(q, k, v, sinks, call, wanted)  # type: ignore[no-any-return]


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse) of :class:`Attention`, recorded."""
    q, k, v, call = _prepared(q, k, v, call)
    attn_bias, sinks = call.attn_bias, call.sinks
    if attn_bias is not None or sinks is not None:
        call = call._replace(attn_bias=None, sinks=None)
    return Attention.apply(q, k, v, attn_bias, sinks, call)  # type: ignore[no-any-return]
