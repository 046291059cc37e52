"""The shapes of torch's attention, (..., N, d) with batch dimensions that broadcast, as the kernels' (B, H, N, d).

The last batch dimension becomes the heads, those before it the batch. Dimensions that are broadcast stay views, except
where a tensor repeats along some of the dimensions that become one and not along others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

Shape = Sequence[int]


def is_plain(q: Shape, k: Shape, v: Shape, enable_gqa: bool) -> bool:
    """Whether the kernels take these shapes as they are."""
    return (
        len(q) == len(k) == len(v) == 4
        and q[0] == k[0] == v[0]
        and k[1] == v[1]
        and (q[1] == k[1] or (enable_gqa and k[1] != 0 and q[1] % k[1] == 0))
        and k[2] == v[2]
        and q[3] == k[3]
    )


def _joint(a: Shape, b: Shape) -> tuple[int, ...] | None:
    """What the two broadcast to, if they do."""
    rank = max(len(a), len(b))
    pairs = list(zip((1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b), strict=True))
    if any(m != n and m != 1 and n != 1 for m, n in pairs):
        return None
    return tuple(n if m == 1 else m for m, n in pairs)


def _batches(q: Shape, k: Shape, v: Shape, enable_gqa: bool) -> tuple[Shape, Shape, Shape]:
    """The batch dimensions, as they broadcast: those of grouped keys and values with q's heads."""
    if enable_gqa:
        return q[:-2], (*k[:-3], q[-3]), (*v[:-3], q[-3])
    return q[:-2], k[:-2], v[:-2]


def refusal(q: Shape, k: Shape, v: Shape, mask: Shape | None, enable_gqa: bool) -> str:
    """Why torch's attention refuses these shapes, or the kernels do; empty if they go together."""
    if min(len(q), len(k), len(v)) < (3 if enable_gqa else 2):
        return f"an input has fewer than {3 if enable_gqa else 2} dimensions"
    if k[-1] != q[-1] or v[-2] != k[-2]:
        return "the shapes are not (..., Nq, d), (..., Nk, d) and (..., Nk, d_v)"
    if enable_gqa and (k[-3] != v[-3] or k[-3] == 0 or q[-3] % k[-3] != 0):
        return "the heads of key and value are not the same divisor of query's"
    of_q, of_k, of_v = _batches(q, k, v, enable_gqa)
    scores = _joint(of_q, of_k)
    if scores is None or _joint(scores, of_v) is None:
        return "the batch dimensions and heads do not broadcast"
    if mask is not None:
        full = (*scores, q[-2], k[-2])
        if len(mask) > len(full) or any(n not in (1, m) for n, m in zip(reversed(mask), reversed(full), strict=False)):
            return "attn_mask does not broadcast to (..., Nq, Nk)"
    return ""


def folded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    """q, k and v as (B, H, N, d), the mask as what broadcasts to (B, Hq, Nq, Nk), and the batch dimensions of the
    result. The shapes must go together (:func:`refusal`)."""
    of_q, of_k, of_v = _batches(q.shape, k.shape, v.shape, enable_gqa)
    batch = _joint(_joint(of_q, of_k) or (), of_v) or ()
    before, heads = (batch or (1,))[:-1], (batch or (1,))[-1]
    entries = math.prod(before)

    def fold(t: Tensor, heads: int) -> Tensor:
        return t.expand(*before, heads, *t.shape[-2:]).reshape(entries, heads, *t.shape[-2:])

    def heads_of(t: Tensor) -> int:
        return t.shape[-3] if t.dim() > 2 else 1

    of_keys = heads_of(k) if enable_gqa or heads_of(k) == heads_of(v) == 1 else heads
    if mask is not None and mask.dim() > 3:
        if all(n == 1 for n in mask.shape[:-3]):
            mask = mask.reshape(mask.shape[-3:])
        else:
            mask = mask.expand(*before, *mask.shape[-3:]).reshape(entries, *mask.shape[-3:])
    return fold(q, heads), fold(k, of_keys), fold(v, of_keys), mask, batch
