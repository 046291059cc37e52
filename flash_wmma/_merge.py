"""The op that merges attention over a part of the keys into attention over others, in place.

On CUDA tensors it is a launch of csrc/merge/merge.cu. On CPU tensors it is made of torch's ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import NAMESPACE, ops


def merge_parts(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, rows: Tensor | None = None) -> None:
    """``lse' = log(exp(lse) + exp(part_lse))``, ``out' = out exp(lse - lse') + part_out exp(part_lse - lse')``, in
    float32.

    Args:
        out: (B, H, N, d_v), or packed (N, H, d_v), in float32 or the part's dtype; written.
        lse: (B, H, N), or packed (H, N), float32; written.
        part_out, part_lse: the same of the part, whose rows are all of out's, or
        rows: (n), int64: these, each at most once.
    """
    ops.merge_parts.default(out, lse, part_out, part_lse, rows)


def share(lse: Tensor, of_all: Tensor) -> Tensor:
    """The weight of a part; of one that sees no key 0, even if no part sees any."""
    return (lse - of_all.clamp_min(torch.finfo(torch.float32).min)).exp_()


def _merge_parts_cpu(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, rows: Tensor | None = None) -> None:
    packed = out.dim() == 3
    dim = 0 if packed else 2

    def weight(w: Tensor) -> Tensor:
        return (w.t() if packed else w)[..., None]

    old_out, old_lse = (out, lse) if rows is None else (out.index_select(dim, rows), lse.index_select(-1, rows))
    new_lse = torch.logaddexp(old_lse, part_lse)
    new_out = old_out * weight(share(old_lse, new_lse)) + part_out * weight(share(part_lse, new_lse))
    if rows is None:
        out.copy_(new_out)
        lse.copy_(new_lse)
    else:
        out.index_copy_(dim, rows, new_out.to(out.dtype))
        lse.index_copy_(lse.dim() - 1, rows, new_lse)


torch.library.impl(f"{NAMESPACE}::merge_parts", "CPU", _merge_parts_cpu)
torch.library.register_fake(f"{NAMESPACE}::merge_parts", lambda *_, **__: None)
