"""Attention under the transforms of ``torch.func``.

Plain calls do not come here: a ``Function`` with ``setup_context`` costs the host more than one without
(``_autograd.Attention``).

``vmap`` becomes one call with more batch entries, or with more heads where batch entries cannot hold what is mapped:
sinks, which are the heads' own, and packed sequences, whose batch entries lie in the lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _autocast, _autograd, _checks, _ops
from ._call import Call
from ._errors import refuse

Dim = int | None
"""The dimension of a tensor over which vmap maps; None: the mapped calls share the tensor."""

_DROPOUT = '0, or rng_state=None and vmap(..., randomness="different"): one call has one state'


class _Fold(NamedTuple):
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
        each = each[(slice(None), *(None,) * (1 - at - each.dim()))]
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
            refuse("dropout_p", f"{call.dropout_p} with a state that mapped calls share", _DROPOUT)
        return call._replace(rng_state=call.rng_state.select(mapped.rng_state, 0))

    def unfolded(self, t: Tensor, at: int, length: int) -> Tensor:
        """``t`` with the mapped dimension at ``at``, before that of the mapped calls, which has this length."""
        return t.unflatten(at, (self.size, length))

    def bias_gradient(self, dbias: Tensor, each: tuple[int, ...]) -> Tensor:
        """That of the mapped calls' biases, of the shape ``each``, with the mapped dimension first."""
        at = self.rows - 4
        dbias = self.unfolded(dbias, at, self.full).movedim(at - 1, 0)
        return dbias.sum_to_size(self.size, *(1,) * (dbias.dim() - 1 - len(each)), *each).reshape(self.size, *each)


def _fold(info: Any, q: Tensor, mapped_q: Dim, call: Call, mapped: Any) -> _Fold:
    """``mapped`` has the dimensions of the call's tensors."""
    packed = call.lengths is not None
    if packed and any(dim is not None for dim in mapped.lengths):
        refuse("cu_seqlens_q, cu_seqlens_k, seqused_k", "lengths over which vmap maps", "one for all mapped calls")
    into_heads = packed or mapped.sinks is not None
    shape = list(q.shape)
    if mapped_q is not None:
        del shape[mapped_q]
    return _Fold(info.batch_size, packed, into_heads, shape[1 if into_heads else 0])


def _with(call: Call, attn_bias: Any, alibi_slopes: Any, sinks: Any) -> Call:
    """The call with the tensors of floats, as which :func:`_without` gives them."""
    return call._replace(attn_bias=attn_bias, alibi_slopes=alibi_slopes, sinks=sinks)


def _without(call: Call) -> tuple[Tensor | None, Tensor | None, Tensor | None, Call]:
    """The tensors of floats, which transforms must see, and the call without them."""
    return call.attn_bias, call.alibi_slopes, call.sinks, _with(call, None, None, None)


class Attention(torch.autograd.Function):
    """:class:`flash_wmma._autograd.Attention`, for transforms."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_bias: Tensor | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        """``call`` comes without the tensors before it."""
        return _ops.forward(q, k, v, _with(call, attn_bias, alibi_slopes, sinks))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, results: tuple[Tensor, Tensor]) -> None:
        q, k, v, *masks, call = inputs
        ctx.call, tensors = _with(call, *masks).split()
        ctx.save_for_backward(q, k, v, *results, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        call = ctx.call.joined(tensors)
        if dout is None:
            dout = torch.zeros_like(out)
        bias_grad, slopes_grad, sinks_grad = ctx.needs_input_grad[3:6]
        if slopes_grad:
            raise NotImplementedError(_checks.NO_GRADIENT.format("alibi_slopes"))
        dq, dk, dv, dbias = Gradients.apply(dout, dlse, q, k, v, out, lse, bias_grad, call)
        dsinks = None
        if sinks_grad:
            dsinks = _autograd.sinks_gradient(dout, dlse, out, lse, call.sinks, call.lengths is not None)
        return dq, dk, dv, dbias if bias_grad else None, None, dsinks, None

    @staticmethod
    def vmap(info: Any, mapped: Any, *arguments: Any) -> Any:
        *qkv, call = (*arguments[:3], _with(arguments[6], *arguments[3:6]))
        dims = _with(mapped[6], *mapped[3:6])
        fold = _fold(info, qkv[0], mapped[0], call, dims)
        q, k, v = (fold.tensor(t, dim, fold.rows) for t, dim in zip(qkv, mapped, strict=False))
        out, lse = Attention.apply(q, k, v, *_without(fold.call(call, dims)))
        out, lse = fold.unfolded(out, fold.rows, fold.full), fold.unfolded(lse, fold.lse, fold.full)
        return (out, lse), (fold.rows, fold.lse)


class Gradients(torch.autograd.Function):
    """The gradients of q, k, v and attn_bias."""

    @staticmethod
    def forward(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias_grad: bool,
        call: Call,
    ) -> _autograd.Gradients:
        return _autograd.gradients(dout, dlse, q, k, v, out, lse, bias_grad, call)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, results: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise NotImplementedError(_autograd.DOUBLE)

    @staticmethod
    def vmap(info: Any, mapped: Any, *arguments: Any) -> Any:
        *tensors, bias_grad, call = arguments
        *dims, _, m = mapped
        dout, dlse, q, k, v, out, lse = zip(tensors, dims, strict=True)
        fold = _fold(info, *q, call, m)
        heads_k = fold.full if not fold.into_heads else fold.first(*k).shape[2]
        dq, dk, dv, dbias = Gradients.apply(
            fold.tensor(*dout, fold.rows),
            None if dlse[0] is None else fold.tensor(*dlse, fold.lse),
            *(fold.tensor(*t, fold.rows) for t in (q, k, v, out)),
            fold.tensor(*lse, fold.lse),
            bias_grad,
            fold.call(call, m, own_bias=bias_grad),
        )
        dq = fold.unfolded(dq, fold.rows, fold.full)
        dk, dv = (fold.unfolded(t, fold.rows, heads_k) for t in (dk, dv))
        at_bias = None
        if bias_grad:
            assert call.attn_bias is not None
            dbias, at_bias = fold.bias_gradient(dbias, fold.first(call.attn_bias, m.attn_bias).shape[1:]), 0
        return (dq, dk, dv, dbias), (fold.rows, fold.rows, fold.rows, at_bias)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, drawn: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) under transforms. ``drawn``: rng_state is no argument of the caller's.

    Raises:
        ValueError: what is mapped does not become one call.
    """
    if call.dropout_p and not drawn and _is_mapped(call.rng_state):
        refuse("rng_state", "a tensor over which vmap maps", _DROPOUT)
    q, k, v, call = _autocast.cast(q, k, v, call)
    if torch.compiler.is_compiling():
        _taken_as_it_is()
    return _attend(q, k, v, call)


def _is_mapped(t: Any) -> bool:
    """Whether some vmap maps over ``t``."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(t):
        if functorch.is_batchedtensor(t):
            return True
        t = functorch.get_unwrapped(t)
    return False


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    return Attention.apply(q, k, v, *_without(call))  # type: ignore[no-any-return]


def _taken_as_it_is() -> None:
    """Has torch.compile take ``_attend`` into its graph untraced: it does not know a Function's rules for vmap."""
    torch.compiler.allow_in_graph(_attend)  # type: ignore[no-untyped-call]


# As torch.compiler.assume_constant_result does, which would import torch._dynamo: called while torch.compile traces.
_taken_as_it_is._dynamo_marked_constant = True  # type: ignore[attr-defined]
