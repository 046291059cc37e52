"""Attention forward."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _checks, _fake  # noqa: F401  (registers the fake kernels)
from ._checks import Causal, Window
from ._library import ops

_op = ops.forward.default

_BOTTOM_RIGHT: dict[Causal, bool] = {False: False, True: False, "top_left": False, "bottom_right": True}


def band(causal: Causal, window: Window | None) -> tuple[int, int, bool]:
    """The op's (window_left, window_right, bottom_right); a negative bound excludes nothing."""
    left, right = (None, None) if window is None else window
    bottom_right = _BOTTOM_RIGHT[causal]
    return -1 if left is None else left, 0 if causal else -1 if right is None else right, bottom_right


@overload
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    window: Window | None = ...,
    attn_bias: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    kernel: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    window: Window | None = ...,
    attn_bias: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    kernel: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    kernel: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(q kᵀ · scale + mask) v``, by the tiled online softmax of FlashAttention-2.

    The score matrix is never stored: memory grows with N, not with N². Scores, softmax and accumulation are float32.
    No gradient: inputs that require one are refused until backward is built.

    Args:
        q: (B, Hq, Nq, d), float32, float16 or bfloat16, on a CPU or a CUDA device, any strides.
        k: (B, Hk, Nk, d), q's dtype and device. Hq is a multiple of Hk: query head h reads head h // (Hq // Hk).
        v: (B, Hk, Nk, d_v), likewise. ``wmma_v1`` and ``wmma_v2`` want d_v = d.
        causal: ``True`` or ``"top_left"``: query i sees keys j <= i. ``"bottom_right"``: j <= i + Nk - Nq, so that the
            last query sees every key.
        scale: factor on the scores; default 1 / sqrt(d).
        window: (left, right): query i, shifted as ``causal`` says, sees that many keys before and after its own place.
            ``None`` or a negative number bounds nothing. With ``causal`` the right bound is 0.
        attn_bias: not yet.
        alibi_slopes: not yet.
        softcap: not yet.
        kernel: ``"auto"``, or the name of one of :func:`flash_wmma.kernels`, which then runs or raises: nothing falls
            back. :func:`flash_wmma.explain` says what ``"auto"`` takes. A CUDA kernel takes CPU tensors too:
            :mod:`flash_wmma.emulator` then runs its source.
        return_lse: also return the logarithm of the softmax's denominator.

    Returns:
        out (B, Hq, Nq, d_v), contiguous, in q's dtype; with ``return_lse`` also lse (B, Hq, Nq), float32, natural
        logarithm. A query that sees no key has out 0 and lse -inf.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: shapes, dtypes or devices do not go together, the kernel is unknown, or it cannot run this.
        NotImplementedError: an input requires grad or is a dual tensor, or no kernel has the feature yet.
        RuntimeError: CUDA tensors but no CUDA kernels in this build, or CUDA reports an error.
        flash_wmma.emulator.EmulatorError: a CUDA kernel on CPU tensors: it could not be compiled, or a check failed.

    FlashAttention: https://arxiv.org/abs/2205.14135. FlashAttention-2: https://arxiv.org/abs/2307.08691. Online
    softmax: https://arxiv.org/abs/1805.02867.
    """
    if attn_bias is not None or alibi_slopes is not None or softcap != 0:
        _checks.not_yet(attn_bias, alibi_slopes, softcap)
    try:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            _checks.no_gradient(q, k, v)
        if forward_ad._current_level >= 0:
            _checks.no_tangent(q, k, v)
        if causal is False and window is None:
            out, lse = _op(q, k, v, scale=scale, kernel_name=kernel)
        else:
            left, right, bottom_right = band(causal, window)
            out, lse = _op(
                q,
                k,
                v,
                scale=scale,
                window_left=left,
                window_right=right,
                bottom_right=bottom_right,
                kernel_name=kernel,
            )
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        _checks.forward(q, k, v, causal, scale, window, kernel)
        _checks.library(error)
        raise
    return (out, lse) if return_lse else out
