"""Tensors whose offsets do not fit 32 bits, in memory that costs nothing where nobody touches it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

BEYOND = 2**31


def far_apart(t: Tensor, dim: int) -> Tensor:
    """The same numbers, dimension ``dim`` (1 or 2) of (1, H, N, d) with a stride that puts its last entry beyond 2^31
    elements."""
    batch, heads, _, d = t.shape
    step = -(-BEYOND // (t.shape[dim] - 1) // 64) * 64 + 64
    strides = (heads * step, step, d, 1) if dim == 1 else (heads * d, d, step, 1)
    assert batch == 1
    try:
        view = torch.empty_strided(t.shape, strides, dtype=t.dtype)
    except RuntimeError as error:
        pytest.skip(f"no address space: {error}")
    assert view[0, -1, -1].storage_offset() > BEYOND
    return view.copy_(t)
