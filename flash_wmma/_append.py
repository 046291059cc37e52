"""The op that appends keys and values to a cache, in place, with the rotation of what is new.

On CUDA tensors it is a launch of csrc/cache/append.cu, which waits for nothing, so that a CUDA graph holds it. On CPU
tensors it is csrc/cpu/append.cpp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._errors import raise_library_error
from ._library import NAMESPACE, ops


class Rotation(NamedTuple):
    """Rotary embedding (https://arxiv.org/abs/2104.09864) of new keys and their queries, as the op takes it."""

    q: Tensor
    """(B, Hq, N, d), or packed (total, Hq, d)."""
    cu_seqlens_q: Tensor | None
    cos: Tensor
    """(rows, r / 2): the angles of each place; places are clamped to the rows."""
    sin: Tensor
    seqlens: Tensor | None
    """(B): the place of each sequence's first new key and query, if not cache_seqlens."""
    queries_advance: bool
    """Query i is i places behind the first; otherwise all are at the first."""
    interleaved: bool
    """Dimensions 2 i and 2 i + 1 are a pair, instead of i and i + r / 2."""


def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rotation: Rotation | None = None,
) -> tuple[Tensor, Tensor]:
    """(q rotated, the new lengths). k, v (B, Hk, n, d), or packed (total, Hk, d) with cu_seqlens_k; caches (pages, Hk,
    page_size, d)."""
    try:
        found = ops.append_kv.default(
            k_cache, v_cache, k, v, cache_seqlens, page_table, cu_seqlens_k, *(rotation or ())
        )
    except (RuntimeError, ValueError) as error:
        raise_library_error(error)
        raise
    if not torch.compiler.is_compiling():
        # The op writes what autograd may have saved: torch counts writes by its own ops alone
        for cache in (k_cache, v_cache):
            if not cache.is_inference():
                torch.autograd.graph.increment_version(cache)
    return found  # type: ignore[no-any-return]


def _append_kv_fake(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor]:
    if q is None or rotary_cos is None:
        turned = k.new_empty(0)
    else:
        turned = torch.empty_like(q.transpose(1, 2) if q.dim() == 4 else q, memory_format=torch.contiguous_format)
    return turned.transpose(1, 2) if turned.dim() == 4 else turned, torch.empty_like(cache_seqlens)


torch.library.register_fake(f"{NAMESPACE}::append_kv", _append_kv_fake)
