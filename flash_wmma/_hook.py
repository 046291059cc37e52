"""These kernels behind torch's own attention: ``torch.nn.attention.activate_flash_attention_impl("flash_wmma")``.

The registry, if torch has one, only keeps the name. Activating puts these kernels in place of torch's in its
flash-attention operators, forward and backward; restoring takes them out again. Calls that no kernel here covers still
run torch's. The backward of either takes out and lse from the forward of either, but for dropout: each has its own
mask, so a backward with dropout is the one of its forward. The dtype of the generator's state says whose it is: int64
here, uint64 in torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from . import _dropout, _ops
from ._call import Call, Lengths, call_of
from ._library import NAMESPACE, ops
from ._sdpa import backward_kernel_for, kernel_for, largest_head_dim, left_to_torch

NAME = NAMESPACE
"""``"flash_wmma"``, in the installed package."""


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
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    call = call_of(
        causal=is_causal,
        scale=scale,
        attn_bias=attn_mask,
        kernel=kernel_for(query.device.type, query.dtype),
        bottom_right=bottom_right,
        out_bnhd=not query.is_contiguous(),
        dropout_p=dropout_p,
        rng_state=rng_state,
    )
    out, lse = _ops.forward(query, key, value, call)
    if out.shape == query.shape:
        out = _laid_out(out, torch.empty_like(query, device="meta").stride())
    return out, lse


def _state(query: Tensor, dropout_p: float) -> Tensor | None:
    """The state of dropout's generator, if there is dropout."""
    return _dropout.draw(query.device) if dropout_p != 0 else None


def _rest(query: Tensor, rng_state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug_attn_mask of torch's operators."""
    numbers = torch.zeros(2, dtype=torch.uint64, device=query.device) if rng_state is None else rng_state
    return numbers, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _has_gradient(query: Tensor, value: Tensor, dropout_p: float = 0.0) -> bool:
    """Whether a kernel here computes the gradient of such a call."""
    if not 0 <= dropout_p < 1:
        return False
    deterministic = torch.are_deterministic_algorithms_enabled()
    device = query.device
    kernel = kernel_for(device.type, query.dtype)
    what = (device.type, device.index, query.dtype, kernel)
    largest = largest_head_dim(*what, gradient=True, deterministic=deterministic, dropout=dropout_p != 0)
    return 0 < max(query.shape[-1], value.shape[-1]) <= largest


def _of(dropout_p: float, rng_state: Tensor) -> Tensor | None:
    """The state of dropout's generator that forward gave, if there is dropout."""
    return rng_state if dropout_p != 0 else None


def _others_dropout(dropout_p: float, rng_state: Tensor) -> str:
    """Why torch's backward computes this: its forward dropped the weights; empty if it did not."""
    return "torch's forward dropped the weights" if dropout_p != 0 and rng_state.dtype != torch.int64 else ""


def _gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    call: Call,
    strides: list[tuple[int, ...]],
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, with those strides."""
    kernel = backward_kernel_for(kernel_for(query.device.type, query.dtype))
    call = call._replace(backward_kernel=kernel)
    arguments = _ops.backward_arguments(
        call, bias_grad=False, deterministic=torch.are_deterministic_algorithms_enabled()
    )
    op = ops.backward if call.lengths is None else ops.backward_varlen
    gradients = op(grad_out, None, query, key, value, out, logsumexp, *arguments)
    return tuple(_laid_out(t, stride) for t, stride in zip(gradients, strides, strict=False))


def _like(*tensors: Tensor) -> list[tuple[int, ...]]:
    """The strides that ``torch.empty_like`` gives."""
    return [torch.empty_like(t, device="meta").stride() for t in tensors]


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
        why = left_to_torch(query, key, value, attn_mask, 0.0, is_causal, True, differentiable=False)
        if why or dropout_p != 0:  # this operator has no place for the state of dropout's generator
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


def _cpu_backward(original: Any) -> Any:
    """``_scaled_dot_product_flash_attention_for_cpu_backward``."""

    def backward(
        keyset: torch._C.DispatchKeySet,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        tensors = (grad_out, query, key, value, out, logsumexp)
        why = left_to_torch(query, key, value, attn_mask, 0.0, is_causal, True, differentiable=False)
        if why or dropout_p != 0 or not _has_gradient(query, value):
            return original.call_boxed(keyset, *tensors, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
        call = call_of(causal=is_causal, scale=scale, attn_bias=attn_mask)
        strides = [torch.empty_permuted(t.shape, (0, 2, 1, 3), device="meta").stride() for t in (query, key, value)]
        return _gradients(*tensors, call, strides)

    return backward


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
        keeps = dropout_p == 0 or _has_gradient(query, value, dropout_p)  # the mask for backward
        if why or return_debug_mask or not keeps:
            return original.call_boxed(keyset, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale)
        # torch aligns the causal mask to the last key where it calls this operator itself (nn/attention/bias.py)
        state = _state(query, dropout_p)
        out, lse = _attend(query, key, value, is_causal, None, scale, True, dropout_p, state)
        return out, lse, None, None, query.shape[2], key.shape[2], *_rest(query, state)

    return forward


def _cuda_backward(original: Any) -> Any:
    """``_scaled_dot_product_flash_attention_backward``."""

    def backward(
        keyset: torch._C.DispatchKeySet,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> Any:
        tensors = (grad_out, query, key, value, out, logsumexp)
        why = left_to_torch(query, key, value, None, dropout_p, is_causal, True, differentiable=False)
        why = why or _others_dropout(dropout_p, philox_seed)
        if why or logsumexp.shape != query.shape[:3] or not _has_gradient(query, value, dropout_p):
            lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
            options = (dropout_p, is_causal, philox_seed, philox_offset)
            return original.call_boxed(keyset, *tensors, *lengths, *options, scale=scale)
        call = call_of(
            causal=is_causal, scale=scale, bottom_right=True, dropout_p=dropout_p, rng_state=_of(dropout_p, philox_seed)
        )
        return _gradients(*tensors, call, _like(query, key, value))

    return backward


def _cuda_packed(original: Any) -> Any:
    """``_flash_attention_forward`` with packed sequences, as ``torch.nn.attention.varlen`` calls it."""

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
        if (
            cum_seq_q is None
            or cum_seq_k is None
            or (dropout_p != 0 and not _has_gradient(query, value, dropout_p))
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
        state = _state(query, dropout_p)
        call = call_of(
            causal=is_causal,
            scale=scale,
            window=(window_size_left, window_size_right),
            alibi_slopes=alibi_slopes,
            bottom_right=True,
            dropout_p=dropout_p,
            rng_state=state,
            lengths=Lengths(cum_seq_q, cum_seq_k, seqused_k, max_q, max_k),
        )
        out, lse = _ops.forward(query, key, value, call)
        return out, lse, *_rest(query, state)

    return forward


def _cuda_packed_backward(original: Any) -> Any:
    """``_flash_attention_backward``, with packed sequences."""

    def backward(
        keyset: torch._C.DispatchKeySet,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> Any:
        tensors = (grad_out, query, key, value, out, logsumexp)
        lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
        windows = {"window_size_left": window_size_left, "window_size_right": window_size_right}
        others = _others_dropout(dropout_p, rng_state)
        if cum_seq_q is None or cum_seq_k is None or others or not _has_gradient(query, value, dropout_p):
            options = (dropout_p, is_causal, rng_state, unused)
            return original.call_boxed(keyset, *tensors, *lengths, *options, scale=scale, **windows)
        call = call_of(
            causal=is_causal,
            scale=scale,
            window=(window_size_left, window_size_right),
            bottom_right=True,
            dropout_p=dropout_p,
            rng_state=_of(dropout_p, rng_state),
            lengths=Lengths(cum_seq_q, cum_seq_k, None, max_q, max_k),
        )
        return _gradients(*tensors, call, _like(query, key, value))

    return backward


def _activate() -> _Handle:
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    overrides = [
        ("_scaled_dot_product_flash_attention_for_cpu", "CPU", _cpu),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "CPU", _cpu_backward),
    ]
    if torch.cuda.is_available():
        overrides += [
            ("_scaled_dot_product_flash_attention", "CUDA", _cuda),
            ("_scaled_dot_product_flash_attention_backward", "CUDA", _cuda_backward),
            ("_flash_attention_forward", "CUDA", _cuda_packed),
            ("_flash_attention_backward", "CUDA", _cuda_packed_backward),
        ]
    for op, key, make in overrides:
        original = torch.library.get_kernel(f"aten::{op}", key)
        library.impl(op, make(original), key, with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
    return _Handle(library)


if hasattr(torch.nn.attention, "register_flash_attention_impl") and hasattr(torch.library, "get_kernel"):
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)
