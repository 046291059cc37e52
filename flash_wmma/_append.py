"""The op that appends keys and values to a cache, in place, with the rotation of what is new.

On CUDA tensors it is a launch of csrc/cache/append.cu, which waits for nothing, so that a CUDA graph holds it. On CPU
tensors it is made of torch's ops.
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
    if k.device.type == "cuda" and not torch.compiler.is_compiling():
        # The kernel writes what autograd may have saved: torch counts writes by its own ops alone
        for cache in (k_cache, v_cache):
            if not cache.is_inference():
                torch.autograd.graph.increment_version(cache)
    return found  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------- on CPU tensors


def _token(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of x (B, H, n, d), or packed, as (tokens, H, d); the sequence of each and its place in it. What lies
    behind the last packed sequence counts as the last one's."""
    if cu_seqlens is None:
        batch, n = x.shape[0], x.shape[2]
        sequence = torch.arange(batch, device=x.device).repeat_interleave(n, output_size=batch * n)
        return x.transpose(1, 2).flatten(0, 1), sequence, torch.arange(n, device=x.device).repeat(batch)
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    sequence = sequence.clamp_max(max(cu_seqlens.shape[0] - 2, 0))
    return x, sequence, row - cu_seqlens[sequence]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, interleaved: bool) -> Tensor:
    """x (tokens, H, d) with its first dimensions rotated, in float32."""
    half = cos.shape[1]
    places = places.clamp(0, cos.shape[0] - 1)
    c, s = (t[places].float().unsqueeze(-2) for t in (cos, sin))
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def _append_kv_cpu(
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
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    queries_advance: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    new = k.shape[2] if cu_seqlens_k is None else cu_seqlens_k.diff()
    seqlens = (cache_seqlens.long() + new).clamp_max(2**31 - 1).int()
    turned = k.new_empty(0)
    batch = cache_seqlens.shape[0]
    if batch == 0:
        return turned if q is None or rotary_cos is None else q.clone(), seqlens
    k, sequence, offset = _token(k, cu_seqlens_k)
    v, _, _ = _token(v, cu_seqlens_k)
    if rotary_cos is not None and rotary_sin is not None:
        start = cache_seqlens if rotary_seqlens is None else rotary_seqlens
        k = _rotated(k, rotary_cos, rotary_sin, start[sequence] + offset, interleaved)
        if q is not None:
            rows, of, ahead = _token(q, cu_seqlens_q)
            places = start[of] + (ahead if queries_advance else 0)
            turned = _rotated(rows, rotary_cos, rotary_sin, places, interleaved)
            if cu_seqlens_q is None:
                turned = turned.view(batch, q.shape[2], *turned.shape[1:]).transpose(1, 2)

    # A row has a place in the cache if its sequence has room for it and its page exists
    pages, _, rows_of_page = k_cache.shape[:3]
    held = rows_of_page if page_table is None else rows_of_page * page_table.shape[1]
    at = cache_seqlens.long()[sequence] + offset
    end = None if cu_seqlens_k is None else cu_seqlens_k[sequence + 1] - cu_seqlens_k[sequence]
    has_place = (at >= 0) & (at < held) & (offset >= 0) & (True if end is None else offset < end)
    sequence, at, k, v = sequence[has_place], at[has_place], k[has_place], v[has_place]
    page = sequence if page_table is None else page_table[sequence, at // rows_of_page].long()
    exists = (page >= 0) & (page < pages)
    page, row = page[exists], at[exists] % rows_of_page
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache.transpose(1, 2)[page, row] = rows[exists]
    return turned, seqlens


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


torch.library.impl(f"{NAMESPACE}::append_kv", "CPU", _append_kv_cpu)
torch.library.register_fake(f"{NAMESPACE}::append_kv", _append_kv_fake)
