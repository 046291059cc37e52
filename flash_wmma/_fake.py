"""Shapes, dtypes and devices of the ops' results, for ``torch.compile``, ``meta`` tensors and ``FakeTensorMode``."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _library  # noqa: F401  (the ops must exist before their fakes)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    out_bnhd: bool = False,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor]:
    _checks.dense(q, k, v, attn_bias, alibi_slopes)
    batch, heads, n = q.shape[:3]
    if out_bnhd:
        out = q.new_empty((batch, n, heads, v.shape[3])).transpose(1, 2)
    else:
        out = q.new_empty((batch, heads, n, v.shape[3]))
    return out, q.new_empty((batch, heads, n), dtype=torch.float32)


def _forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    page_table: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor]:
    _checks.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, attn_bias, alibi_slopes)
    total, heads = q.shape[:2]
    return q.new_empty((total, heads, v.shape[2])), q.new_empty((heads, total), dtype=torch.float32)


def _gradients(q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dbias = q.new_empty((0,)) if attn_bias is None else attn_bias.new_empty(attn_bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_bias: Tensor | None = None,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(q, k, v, attn_bias)


def _backward_varlen(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_bias: Tensor | None = None,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(q, k, v, attn_bias)


for _op, _fake in (
    ("forward", _forward),
    ("forward_varlen", _forward_varlen),
    ("backward", _backward),
    ("backward_varlen", _backward_varlen),
):
    torch.library.register_fake(f"flash_wmma::{_op}", _fake)
