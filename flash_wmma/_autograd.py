"""Gradients of the ops: what eager code and ``torch.compile`` record for inputs that require one.

A ``torch.autograd.Function`` and not ``torch.library.register_autograd``: that one costs every call a trip through
Python, and ``torch.compile`` traces this one as well. Each argument of its ``apply`` costs host time, so that all but
the tensors comes in one tuple (benchmark/host_cost.py measures a call).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from . import _autocast, _checks
from ._library import ops

_forward = ops.forward.default
_forward_varlen = ops.forward_varlen.default
_backward = ops.backward.default
_backward_varlen = ops.backward_varlen.default

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
Options = tuple[tuple[Any, ...], tuple[Any, ...], str, bool | None]
"""The op's arguments before and after (attn_bias, alibi_slopes), empty for its defaults; backward_kernel and
deterministic as the caller gave them."""

_NO_BAND = (None, -1, -1, False)

_DOUBLE = 'the gradient of a gradient is not built: kernel="math" is plain torch ops, which have every derivative'
_TRANSFORMS = 'torch.func is not supported: kernel="math" is plain torch ops, which have every derivative'


def wanted(q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None) -> bool:
    """Whether a gradient may be asked for."""
    return torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (attn_bias is not None and attn_bias.requires_grad)
    )


def _gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    bias_grad: bool,
    lengths: tuple[Any, ...] | None,
    options: Options,
) -> Gradients:
    before, after, kernel, asked = options
    deterministic = torch.are_deterministic_algorithms_enabled() if asked is None else asked
    arguments = before[:4]
    if after or bias_grad or deterministic or kernel != "auto":
        forward_kernel = after[-1] if after else "auto"
        rest = (after[0] if after else 0.0, None, None, 0.0, bias_grad, deterministic, kernel, forward_kernel)
        arguments = (*(arguments or _NO_BAND), attn_bias, alibi_slopes, *rest)
    try:
        if lengths is None:
            return _backward(dout, dlse, q, k, v, out, lse, *arguments)  # type: ignore[no-any-return]
        return _backward_varlen(dout, dlse, q, k, v, out, lse, *lengths, *arguments)  # type: ignore[no-any-return]
    except (RuntimeError, ValueError) as error:
        only_warn = asked is None and deterministic and torch.is_deterministic_algorithms_warn_only_enabled()
        if only_warn and str(error).startswith("kernel"):
            warnings.warn(f"flash_wmma: gradients that may differ from run to run, since {error}", stacklevel=2)
            options = (before, after, kernel, False)
            return _gradients(dout, dlse, q, k, v, out, lse, attn_bias, alibi_slopes, bias_grad, lengths, options)
        _checks.library(error)
        raise


class _OnceDifferentiable(torch.autograd.Function):
    """The gradients where they are recorded themselves (``create_graph=True``): to go on from them is refused."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Gradients:
        return _gradients(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise NotImplementedError(_DOUBLE)


class Attention(torch.autograd.Function):
    """(out, lse) of the ops, both differentiable in q, k, v and an additive attn_bias.

    FlashAttention-2, algorithm 2 (https://arxiv.org/abs/2307.08691): the weights are recomputed from lse, whose own
    gradient enters as ``rowsum(out * dout) - dlse``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_bias: Tensor | None,
        alibi_slopes: Tensor | None,
        lengths: tuple[Any, ...] | None,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        before, after, _, _ = options
        if lengths is not None:
            cu_seqlens_q, cu_seqlens_k, seqused_k, *longest = lengths
            packed = (cu_seqlens_q, cu_seqlens_k, seqused_k, None, *longest)
            out, lse = _forward_varlen(q, k, v, *packed, *before, attn_bias, alibi_slopes, *after)
        elif after:
            out, lse = _forward(q, k, v, *before, attn_bias, alibi_slopes, *after)
        else:
            out, lse = _forward(q, k, v, *before)
        # The lengths' tensors too, so that torch notices when one is overwritten before backward reads it
        ctx.save_for_backward(q, k, v, out, lse, attn_bias, alibi_slopes, *(() if lengths is None else lengths[:3]))
        ctx.longest, ctx.options = None if lengths is None else lengths[3:], options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse, attn_bias, alibi_slopes, *lengths = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        bias_grad = ctx.needs_input_grad[3]
        compute = _OnceDifferentiable.apply if torch.is_grad_enabled() else _gradients
        packed = None if ctx.longest is None else (*lengths, *ctx.longest)
        dq, dk, dv, dbias = compute(
            dout, dlse, q, k, v, out, lse, attn_bias, alibi_slopes, bias_grad, packed, ctx.options
        )
        return dq, dk, dv, dbias if bias_grad else None, None, None, None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    lengths: tuple[Any, ...] | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of :class:`Attention`, recorded."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(_TRANSFORMS)
    if torch._C._is_any_autocast_enabled():
        q, k, v, attn_bias = _autocast.cast(q, k, v, attn_bias)
    # torch.compile takes no tensor twice
    k = k.view_as(k) if k is q else k
    v = v.view_as(v) if v is q or v is k else v
    return Attention.apply(q, k, v, attn_bias, alibi_slopes, lengths, options)  # type: ignore[no-any-return]
