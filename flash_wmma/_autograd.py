"""Gradients of the ops: what eager code and ``torch.compile`` record for inputs that require one.

A ``torch.autograd.Function`` and not ``torch.library.register_autograd``: that one costs every call a trip through
Python, 45 µs with gradients against 9 µs here, and ``torch.compile`` traces this one as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks
from ._library import ops

_forward = ops.forward.default
_forward_varlen = ops.forward_varlen.default
_backward = ops.backward.default
_backward_varlen = ops.backward_varlen.default

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]

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
    lengths: tuple[Any, ...] | None,
    options: tuple[Any, ...],
) -> Gradients:
    try:
        if lengths is None:
            return _backward(dout, dlse, q, k, v, out, lse, *options)  # type: ignore[no-any-return]
        return _backward_varlen(dout, dlse, q, k, v, out, lse, *lengths, *options)  # type: ignore[no-any-return]
    except (RuntimeError, ValueError) as error:
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
        scale: float | None,
        left: int,
        right: int,
        bottom_right: bool,
        out_bnhd: bool,
        softcap: float,
        batch_invariant: bool,
        kernel: str,
        backward_kernel: str,
        deterministic: bool | None,
    ) -> tuple[Tensor, Tensor]:
        band = (scale, left, right, bottom_right)
        rest = (attn_bias, alibi_slopes, softcap, None, None, 0.0, 1, batch_invariant, kernel)
        if lengths is None:
            out, lse = _forward(q, k, v, *band, out_bnhd, *rest)
        else:
            cu_seqlens_q, cu_seqlens_k, seqused_k, *longest = lengths
            out, lse = _forward_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, None, *longest, *band, *rest)
        ctx.save_for_backward(q, k, v, out, lse, attn_bias, alibi_slopes)
        ctx.lengths, ctx.band, ctx.softcap = lengths, band, softcap
        ctx.kernel, ctx.deterministic = backward_kernel, deterministic
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse, attn_bias, alibi_slopes = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        deterministic = ctx.deterministic
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        options = (
            *ctx.band,
            attn_bias,
            alibi_slopes,
            ctx.softcap,
            None,
            None,
            0.0,
            ctx.needs_input_grad[3],
            deterministic,
            ctx.kernel,
        )
        compute = _OnceDifferentiable.apply if torch.is_grad_enabled() else _gradients
        dq, dk, dv, dbias = compute(dout, dlse, q, k, v, out, lse, ctx.lengths, options)
        return dq, dk, dv, dbias if ctx.needs_input_grad[3] else None, *(None,) * 12


def attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of :class:`Attention`, recorded."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(_TRANSFORMS)
    return Attention.apply(*arguments)  # type: ignore[no-any-return]
