"""``torch.func.vmap`` of a call of attention, as one call.

The mapped calls become more batch entries, or more heads where batch entries cannot hold what is mapped: sinks, which
are the heads' own, and packed sequences, whose batch entries lie in the lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ._call import Call
from ._errors import refuse

Dim = int | None
"""The dimension of a tensor over which vmap maps; None: the mapped calls share the tensor."""

ONE_STATE = '0, or rng_state=None and vmap(..., randomness="different"): one call has one state'
"""What dropout may be under vmap."""


class Fold(NamedTuple):
    """``size`` mapped calls as one."""

    size: int
    packed: bool
    """Packed sequences: q (total, H, d), lse (H, total)."""
    into_heads: bool
    full: int
    """Batch entries of one of the mapped calls; into heads: its query heads."""

    @property
    def rows(self) -> int:
        """The dimension of q, k, v and their like that becomes longer."""
        return 1 if self.into_heads else 0

    @property
    def lse(self) -> int:
        """That of lse and its gradient."""
        return self.rows - self.packed

    def first(self, t: Tensor, mapped: Dim) -> Tensor:
        """``t`` with the mapped dimension first."""
        return t.expand(self.size, *t.shape) if mapped is None else t.movedim(mapped, 0)

    def tensor(self, t: Tensor, mapped: Dim, at: int) -> Tensor:
        """``t`` with the mapped dimension as part of its dimension ``at``. A shared tensor is read in place if that
        dimension is 1, and copied for each call otherwise."""
        return self.first(t, mapped).movedim(0, at).flatten(at, at + 1)

    def mask(self, t: Tensor, mapped: Dim, dims: int, own: bool = False) -> Tensor:
        """The same of a tensor of up to ``dims`` dimensions that broadcasts over batch entries and heads. What one call
        broadcasts, all calls share, unless each must have its ``own``."""
        at = self.rows - dims
        each = self.first(t, mapped)
        each = each.reshape(self.size, *(1,) * (1 - at - each.dim()), *each.shape[1:])
        if mapped is None and each.shape[at] == 1 and not own:
            return t
        at += each.dim()
        each = each.expand(*each.shape[:at], self.full, *each.shape[at + 1 :])
        return each.movedim(0, at - 1).flatten(at - 1, at)

    def call(self, call: Call, mapped: Any, own_bias: bool = False) -> Call:
        """The call with the tensors of all."""
        bias, slopes, ranges, sinks = call.attn_bias, call.alibi_slopes, call.key_ranges, call.sinks
        if bias is not None:
            bias = self.mask(bias, mapped.attn_bias, 4, own_bias)
        if slopes is not None:
            of_entries = slopes.dim() - (mapped.alibi_slopes is not None) == 2
            slopes = self.mask(slopes, mapped.alibi_slopes, 2, own=of_entries or self.into_heads)
        if ranges is not None:
            ranges = self.mask(ranges, mapped.key_ranges, 4)
        if sinks is not None and self.into_heads:
            sinks = self.tensor(sinks, mapped.sinks, 0)
        call = call._replace(attn_bias=bias, alibi_slopes=slopes, key_ranges=ranges, sinks=sinks)
        if call.dropout_p == 0 or self.size == 0:
            return call._replace(rng_state=None, dropout_p=0.0)
        assert call.rng_state is not None
        if mapped.rng_state is None:
            refuse("dropout_p", f"{call.dropout_p} with a state that mapped calls share", ONE_STATE)
        return call._replace(rng_state=call.rng_state.select(mapped.rng_state, 0))

    def unfolded(self, t: Tensor, at: int, length: int) -> Tensor:
        """``t`` with the mapped dimension at ``at``, before that of the mapped calls, which has this length."""
        at %= t.dim()
        return t.reshape(*t.shape[:at], self.size, length, *t.shape[at + 1 :])

    def bias_gradient(self, dbias: Tensor, each: tuple[int, ...]) -> Tensor:
        """That of the mapped calls' biases, of the shape ``each``, with the mapped dimension first."""
        at = self.rows - 4
        dbias = self.unfolded(dbias, at, self.full).movedim(at - 1, 0)
        return dbias.sum_to_size(self.size, *(1,) * (dbias.dim() - 1 - len(each)), *each).reshape(self.size, *each)


def fold_of(size: int, q: Tensor, mapped_q: Dim, call: Call, mapped: Any) -> Fold:
    """``mapped`` has the dimensions of the call's tensors."""
    packed = call.lengths is not None
    if packed and any(dim is not None for dim in mapped.lengths[:3]):
        refuse("cu_seqlens_q, cu_seqlens_k, seqused_k", "lengths over which vmap maps", "one for all mapped calls")
    into_heads = packed or mapped.sinks is not None
    shape = list(q.shape)
    if mapped_q is not None:
        del shape[mapped_q]
    return Fold(size, packed, into_heads, shape[1 if into_heads else 0])
