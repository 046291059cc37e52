"""Shapes, dtypes and devices of the ops' results, for ``torch.compile``, ``meta`` tensors and ``FakeTensorMode``."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, _library  # noqa: F401  (the ops must exist before their fakes)


def _forward(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    _checks.inputs(q, k, v)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


def _forward_varlen(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    # q (total_q, Hq, d), v (total_k, Hk, d_v) -> out (total_q, Hq, d_v), lse (Hq, total_q)
    return (
        q.new_empty((q.shape[0], q.shape[1], v.shape[-1])),
        q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32),
    )


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
