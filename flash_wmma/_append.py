"""The op that appends keys and values to a cache, in place, and rotary embedding.

Both are plain torch ops that wait for nothing, so that a CUDA graph holds them.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


def _place(
    cache: Tensor, page_table: Tensor | None, batch: int, sequence: Tensor, at: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(page, row, valid) of the rows ``at`` of the sequences, of which there are ``batch``. What is not in the cache is
    not valid."""
    pages, _, rows = cache.shape[:3]
    held = rows if page_table is None else rows * page_table.shape[1]
    valid = (at >= 0) & (at < held) & (sequence < batch)
    sequence, at = sequence.clamp_max(batch - 1), at.clamp(0, held - 1)
    page = sequence if page_table is None else page_table[sequence, at // rows].long()
    valid = valid & (page >= 0) & (page < pages)
    return page.clamp(0, pages - 1), at % rows, valid


@torch.library.custom_op("flash_wmma::append_kv", mutates_args=("k_cache", "v_cache"))
def _append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    page_table: Optional[Tensor],  # noqa: UP045 (torch.library reads the annotation)
    cu_seqlens_k: Optional[Tensor],  # noqa: UP045
) -> None:
    """k, v (B, Hk, n, d), or packed (total, Hk, d) with cu_seqlens_k; caches (pages, Hk, page_size, d)."""
    if cu_seqlens_k is None:
        batch, n = k.shape[0], k.shape[2]
        sequence = torch.arange(batch, device=k.device).repeat_interleave(n, output_size=batch * n)
        offset = torch.arange(n, device=k.device).repeat(batch)
        k, v = (t.transpose(1, 2).flatten(0, 1) for t in (k, v))
    else:
        batch = cu_seqlens_k.shape[0] - 1
        row = torch.arange(k.shape[0], device=k.device)
        sequence = torch.searchsorted(cu_seqlens_k[1:].contiguous(), row, right=True)
        offset = row - cu_seqlens_k[sequence.clamp_max(max(batch - 1, 0))]
    held = k_cache.shape[2] if page_table is None else k_cache.shape[2] * page_table.shape[1]
    if k.shape[0] == 0 or batch == 0 or held == 0 or k_cache.shape[0] == 0:
        return
    at = cache_seqlens[sequence.clamp_max(batch - 1)] + offset
    page, row, valid = _place(k_cache, page_table, batch, sequence, at)
    # A row that has no place is replaced by the first one that has: the same value twice in the same place. If none
    # has, the cache's own value is written. So no mask has to come to the host.
    first, some = valid.int().argmax(), valid.any()
    source = torch.where(valid, torch.arange(k.shape[0], device=k.device), first)
    page, row = page[source], row[source]
    for cache, new in ((k_cache, k), (v_cache, v)):
        values = torch.where(some, new[source], cache[page, :, row])
        cache.index_put_((page[:, None], torch.arange(new.shape[1], device=k.device), row[:, None]), values)


append_kv = torch.ops.flash_wmma.append_kv.default
"""The op."""


def rotated(x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, interleaved: bool) -> Tensor:
    """x (..., N, H, d) with its first dimensions rotated (https://arxiv.org/abs/2104.09864), in float32.

    Args:
        cos, sin: (rows, r / 2): the angles of each place.
        places: (..., N), clamped to the rows.
        interleaved: dimensions 2 i and 2 i + 1 are a pair, instead of i and i + r / 2.
    """
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
