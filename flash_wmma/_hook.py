"""These kernels behind torch's own attention: ``torch.nn.attention.activate_flash_attention_impl("flash_wmma")``.

The registry, where torch has one, only keeps the name; activating puts these kernels in place of torch's for its
flash-attention operators, restoring takes them out again. What no kernel here covers still runs torch's. Gradients stay
torch's: its backward kernels take out and lse from whoever computed them, so inputs may require grad.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from ._library import ops
from ._sdpa import kernel_for, left_to_torch

NAME = "flash_wmma"


class _Handle:
    """Keeps the kernels in torch's dispatcher until ``remove`` is called."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def remove(self) -> None:
        self._library._destroy()  # type: ignore[no-untyped-call]


def _laid_out(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with those strides, which torch's shape functions promise."""
    return t if t.stride() == strides else t.new_empty_strided(t.shape, strides).copy_(t)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    bottom_right: bool,
) -> tuple[Tensor, Tensor]:
    bnhd = not query.is_contiguous()
    kernel = kernel_for(query.device.type, query.dtype)
    band = (-1, 0 if is_causal else -1, bottom_right)
    out, lse = ops.forward(query, key, value, scale, *band, bnhd, attn_mask, kernel_name=kernel)
    if out.shape == query.shape:
        out = _laid_out(out, torch.empty_like(query, device="meta").stride())
    return out, lse


def _unused(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug_attn_mask of a call without dropout."""
    numbers = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return numbers, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _cpu(original: Any) -> Any:
    """``_scaled_dot_product_flash_attention_for_cpu``."""

    def forward(
        keyset: torch._C.DispatchKeySet,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        if left_to_torch(query, key, value, attn_mask, dropout_p, is_causal, True, differentiable=False):
            return original.call_boxed(  # type: ignore[no-any-return]
                keyset, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        out, lse = _attend(query, key, value, is_causal, attn_mask, scale, bottom_right=False)
        if attn_mask is not None:
            lse.masked_fill_(
                lse == -math.inf, 0
            )  # torch's lse of a query that sees no key, which its backward relies on
        return out, lse.transpose(1, 2).contiguous().transpose(1, 2)

    return forward


def _cuda(original: Any) -> Any:
    """``_scaled_dot_product_flash_attention``."""

    def forward(
        keyset: torch._C.DispatchKeySet,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        why = left_to_torch(query, key, value, None, dropout_p, is_causal, True, differentiable=False)
        if why or return_debug_mask:
            return original.call_boxed(keyset, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale)
        # torch aligns it to the last key where it calls this operator itself (nn/attention/bias.py)
        out, lse = _attend(query, key, value, is_causal, None, scale, bottom_right=True)
        return out, lse, None, None, query.shape[2], key.shape[2], *_unused(query)

    return forward


def _cuda_packed(original: Any) -> Any:
    """``_flash_attention_forward``, of which ``torch.nn.attention.varlen`` takes the form with packed sequences."""

    def forward(
        keyset: torch._C.DispatchKeySet,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        **others: Any,
    ) -> Any:
        left = -1 if window_size_left is None else window_size_left
        right = 0 if is_causal else -1 if window_size_right is None else window_size_right
        if (
            cum_seq_q is None
            or cum_seq_k is None
            or dropout_p != 0
            or return_debug_mask
            or any(option is not None for option in others.values())
        ):
            return original.call_boxed(
                keyset,
                query,
                key,
                value,
                cum_seq_q,
                cum_seq_k,
                max_q,
                max_k,
                dropout_p,
                is_causal,
                return_debug_mask,
                scale=scale,
                window_size_left=window_size_left,
                window_size_right=window_size_right,
                seqused_k=seqused_k,
                alibi_slopes=alibi_slopes,
                **others,
            )
        lengths = (cum_seq_q, cum_seq_k, seqused_k, None, max_q, max_k)
        out, lse = ops.forward_varlen(query, key, value, *lengths, scale, left, right, True, None, alibi_slopes)
        return out, lse, *_unused(query)

    return forward


def _activate() -> _Handle:
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    overrides = [("_scaled_dot_product_flash_attention_for_cpu", "CPU", _cpu)]
    if torch.cuda.is_available():
        overrides.append(("_scaled_dot_product_flash_attention", "CUDA", _cuda))
        overrides.append(("_flash_attention_forward", "CUDA", _cuda_packed))
    for op, key, make in overrides:
        original = torch.library.get_kernel(f"aten::{op}", key)
        library.impl(op, make(original), key, with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
    return _Handle(library)


if hasattr(torch.nn.attention, "register_flash_attention_impl") and hasattr(torch.library, "get_kernel"):
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)
