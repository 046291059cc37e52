"""Attention under the transforms of ``torch.func``.

Plain calls do not come here: a ``Function`` with ``setup_context`` costs the host more than one without
(``_autograd.Attention``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from . import _autocast, _autograd, _ops, _slopes, _tangent
from ._blocks import Blocks
from ._call import Call, Lengths
from ._errors import refuse
from ._fold import ONE_STATE, fold_of


def _floats(call: Call) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The tensors of floats, which transforms must see."""
    return call.attn_bias, call.alibi_slopes, call.sinks


class _Rest:
    """A call without its tensors, as an argument of a Function. torch takes tuples apart, at some 5 µs an element and
    transform; this it takes as it is."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call = call


def _with(attn_bias: Any, alibi_slopes: Any, sinks: Any, *others: Any) -> Call:
    """The call of the arguments that :func:`_without` gives, or with what vmap says of its tensors."""
    *rest, call = others
    if not rest:
        return call.call  # type: ignore[no-any-return]
    key_ranges, *rest = rest
    return call.call.joined([attn_bias, alibi_slopes, key_ranges, sinks, *rest])  # type: ignore[no-any-return]


def _without(call: Call) -> tuple[Any, ...]:
    """A Function's arguments: the tensors of floats, the other tensors if there are any at all, and the rest."""
    bare, tensors = call.split()
    if not tensors:
        return None, None, None, _Rest(call)
    attn_bias, alibi_slopes, key_ranges, sinks, *others = tensors
    return attn_bias, alibi_slopes, sinks, key_ranges, *others, _Rest(bare)


def _seen_from_outside(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """A Function's jvp, of its context, the saved tensors and the tangents, which an outer forward-mode transform sees:
    torch calls jvp with forward mode switched off, for all transforms."""

    def seen(ctx: Any, *moved: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            saved = [t if t is None else forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors]  # type: ignore[no-untyped-call]
            return jvp(ctx, saved, *moved)

    return seen


class Attention(torch.autograd.Function):
    """:class:`flash_wmma._autograd.Attention`, for transforms. Its arguments are q, k, v and :func:`_without`'s."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *masks: Any) -> tuple[Tensor, Tensor]:
        return _ops.forward(q, k, v, _with(*masks))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, results: tuple[Tensor, Tensor]) -> None:
        q, k, v, *masks = inputs
        ctx.call, tensors = _with(*masks).split()
        ctx.others = len(masks) - 3
        ctx.save_for_backward(q, k, v, *results, *tensors)
        ctx.save_for_forward(q, k, v, *results, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        call = ctx.call.joined(tensors)
        if dout is None:
            dout = torch.zeros_like(out)
        bias_grad, slopes_grad, sinks_grad = ctx.needs_input_grad[3:6]
        *made, dsinks = _gradients(dout, dlse, q, k, v, out, lse, bias_grad, call, sinks_grad)
        dslopes = None
        if slopes_grad:
            arguments = q, k, v, *_floats(call)
            blocks = Blocks(arguments, call)
            given = dout, torch.zeros_like(lse) if dlse is None else dlse
            (dslopes,) = blocks.vjp(blocks.attend, arguments, [4], given, blocks.dims, (2, 2))
        return *made, dslopes, dsinks, *(None,) * ctx.others

    @staticmethod
    @_seen_from_outside
    def jvp(ctx: Any, saved: list[Any], *moved: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, out, lse, *tensors = saved
        call = ctx.call.joined(tensors)
        dq, dk, dv, _, _, dsinks = moved[:6]
        if (made := _in_one_pass((q, k, v, call.sinks), (dq, dk, dv, dsinks), call)) is not None:
            return made[1]  # type: ignore[no-any-return]
        if _tangent.has_kernels(q, v, moved, call):
            return _tangent.tangents(q, k, v, out, lse, dq, dk, dv, dsinks, call, _attend, _gradients)
        arguments = q, k, v, *_floats(call)
        blocks = Blocks(arguments, call)
        dout, dlse = blocks.jvp(blocks.attend, arguments, moved[:6], blocks.dims, (2, 2))
        return dout.to(out.dtype), dlse

    @staticmethod
    def vmap(info: Any, mapped: Any, *arguments: Any) -> Any:
        return _folded(info.batch_size, mapped, arguments)


def _folded(size: int, mapped: Any, arguments: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """One call of ``size`` mapped ones, of :class:`Attention`'s arguments and where they are mapped."""
    call, dims = _with(*arguments[3:]), _with(*mapped[3:-1], arguments[-1])
    fold = fold_of(size, arguments[0], mapped[0], call, dims)
    q, k, v = (fold.tensor(t, dim, fold.rows) for t, dim in zip(arguments[:3], mapped, strict=False))
    out, lse = _attend(q, k, v, fold.call(call, dims))
    out, lse = fold.unfolded(out, fold.rows, fold.full), fold.unfolded(lse, fold.lse, fold.full)
    return (out, lse), (fold.rows, fold.lse)


class Gradients(torch.autograd.Function):
    """The gradients of q, k, v and attn_bias, given dout, dlse and :class:`Attention`'s arguments and results. Its own
    derivatives take out and lse for what the arguments make them."""

    @staticmethod
    def forward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> _autograd.Gradients:
        *masks, out, lse, bias_grad = rest
        return _autograd.gradients(dout, dlse, q, k, v, out, lse, bias_grad, _with(*masks))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, results: _autograd.Gradients) -> None:
        dout, dlse, q, k, v, *masks, _, lse, ctx.bias_grad = inputs
        ctx.call, tensors = _with(*masks).split()
        ctx.save_for_backward(dout, dlse, q, k, v, lse, *tensors)
        ctx.save_for_forward(dout, dlse, q, k, v, lse, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def _tensors(ctx: Any, saved: Any) -> tuple[Blocks, tuple[Any, ...], Any, Any]:
        """Those that it is differentiated in, and in which dimension they and the results have queries."""
        dout, dlse, q, k, v, lse, *tensors = saved
        call = ctx.call.joined(tensors)
        arguments = q, k, v, *_floats(call)
        blocks = Blocks(arguments, call)
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        results = (2, None, None, blocks.bias_dim)[: 4 if blocks.added else 3]
        return blocks, (dout, dlse, *arguments), (2, 2, *blocks.dims), results

    @staticmethod
    @_seen_from_outside
    def jvp(ctx: Any, saved: list[Any], *moved: Any) -> Any:
        blocks, tensors, dims, results = Gradients._tensors(ctx, saved)
        tangents = blocks.jvp(blocks.gradients, tensors, moved[:8], dims, results)
        made = [t.to(like.dtype) for t, like in zip(tangents, tensors[2:6], strict=False)]
        return (*made[:3], made[3] if ctx.bias_grad else tensors[2].new_zeros(0))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        blocks, tensors, dims, results = Gradients._tensors(ctx, ctx.saved_tensors)
        given = [
            torch.zeros_like(t) if c is None or (i == 3 and not ctx.bias_grad) else c
            for i, (c, t) in enumerate(zip(cotangents, tensors[2 : 2 + len(results)], strict=False))
        ]
        wanted = [i for i, t in enumerate(tensors) if t is not None and ctx.needs_input_grad[i]]
        made: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for i, t in zip(wanted, blocks.vjp(blocks.gradients, tensors, wanted, given, dims, results), strict=True):
            made[i] = t.to(tensors[i].dtype)
        return tuple(made)

    @staticmethod
    def vmap(info: Any, mapped: Sequence[Any], *arguments: Any) -> Any:
        dout, dlse, q, k, v, *masks, out, lse, bias_grad = arguments
        call, m = _with(*masks), _with(*mapped[5:-4], masks[-1])
        fold = fold_of(info.batch_size, q, mapped[2], call, m)
        heads_k = fold.full if not fold.into_heads else fold.first(k, mapped[3]).shape[2]
        dq, dk, dv, dbias = Gradients.apply(
            fold.tensor(dout, mapped[0], fold.rows),
            None if dlse is None else fold.tensor(dlse, mapped[1], fold.lse),
            *(fold.tensor(t, dim, fold.rows) for t, dim in zip((q, k, v), mapped[2:5], strict=True)),
            *_without(fold.call(call, m, own_bias=bias_grad)),
            fold.tensor(out, mapped[-3], fold.rows),
            fold.tensor(lse, mapped[-2], fold.lse),
            bias_grad,
        )
        dq = fold.unfolded(dq, fold.rows, fold.full)
        dk, dv = (fold.unfolded(t, fold.rows, heads_k) for t in (dk, dv))
        at_bias = None
        if bias_grad:
            assert call.attn_bias is not None
            dbias, at_bias = fold.bias_gradient(dbias, fold.first(call.attn_bias, mapped[5]).shape[1:]), 0
        return (dq, dk, dv, dbias), (fold.rows, fold.rows, fold.rows, at_bias)


def _gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias_grad: bool,
    call: Call,
    sinks_grad: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, attn_bias and sinks, which can be differentiated again."""
    dq, dk, dv, dbias = Gradients.apply(dout, dlse, q, k, v, *_without(call), out, lse, bias_grad)
    dsinks = _autograd.sinks_gradient(dout, dlse, out, lse, call) if sinks_grad else None
    return dq, dk, dv, dbias if bias_grad else None, dsinks


_autograd.Attention.recorded = staticmethod(_gradients)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, drawn: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) under transforms. ``drawn``: rng_state is no argument of the caller's.

    Raises:
        ValueError: what is mapped does not become one call.
    """
    if call.dropout_p and not drawn and _is_mapped(call.rng_state):
        refuse("rng_state", "a tensor over which vmap maps", ONE_STATE)
    q, k, v, call = _autocast.cast(q, k, v, call)
    if torch.compiler.is_compiling():
        if forward_ad._current_level >= 0:
            torch._dynamo.graph_break(msg="flash_wmma: forward-mode differentiation is not traced")
        _taken_as_it_is()
        lengths = None if call.lengths is None else tuple(call.lengths)
        return _traced(q, k, v, lengths, *call._replace(lengths=None))
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
    """By what is active now: what no derivative is asked of goes past a Function, which would only cost the host."""
    functorch = torch._C._functorch
    transformed = torch._C._are_functorch_transforms_active()
    innermost = functorch.peek_interpreter_stack().key() if transformed else None
    if innermost == functorch.TransformType.Vmap:
        return _vmapped(q, k, v, call)
    forward_mode = innermost == functorch.TransformType.Jvp if transformed else forward_ad._current_level >= 0
    if forward_mode and (made := _moved(q, k, v, call)) is not None:
        return made
    if transformed or forward_ad._current_level >= 0:
        return Attention.apply(q, k, v, *_without(call))  # type: ignore[no-any-return]
    recorded = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (q, k, v, *_floats(call))]
    if recorded[4]:  # the slopes
        if call.lengths is not None:
            return _slopes.attend(q, k, v, call)
        return Attention.apply(q, k, v, *_without(call))  # type: ignore[no-any-return]
    return _autograd.attend(q, k, v, call) if any(recorded) else _ops.forward(q, k, v, call)


def _vmapped(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The innermost transform is vmap: as torch maps a Function, in a third of its time."""
    functorch, interpreter = torch._C._functorch, retrieve_current_functorch_interpreter()
    level = interpreter.level()
    arguments = (
        functorch._unwrap_batched(t, level) if isinstance(t, Tensor) else (t, None) for t in (q, k, v, *_without(call))
    )
    values, mapped = zip(*arguments, strict=True)
    with interpreter.lower():
        if all(dim is None for dim in mapped):
            return _attend(q, k, v, call)
        results, dims = _folded(interpreter.batch_size(), mapped, values)  # type: ignore[attr-defined]
    out, lse = (functorch._add_batch_dim(t, dim, level) for t, dim in zip(results, dims, strict=True))
    return out, lse


def _moved(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor] | None:
    """The innermost transform is forward mode: results with their tangents, if :func:`_in_one_pass` has them."""
    duals = [(None, None) if t is None else forward_ad.unpack_dual(t) for t in (q, k, v, call.sinks)]  # type: ignore[no-untyped-call]
    primals, tangents = zip(*duals, strict=True)
    made = _in_one_pass(primals, tangents, call)
    return None if made is None else tuple(map(forward_ad.make_dual, *made))


def _in_one_pass(primals: Sequence[Any], tangents: Sequence[Any], call: Call) -> Any:
    """((out, lse), (out', lse')), given q, k, v and the sinks, and their tangents at the innermost transform, which is
    forward mode. None: no kernel computes them together, or an outer transform or a gradient asks for more."""
    if not _tangent.is_plain(call) or all(t is None for t in tangents[:3]):
        return None
    if not torch._C._are_functorch_transforms_active():
        return _computed(primals, tangents, call)
    functorch, interpreter = torch._C._functorch, retrieve_current_functorch_interpreter()
    level = interpreter.level()
    own, moved = (
        [None if t is None else functorch._unwrap_for_grad(t, level) for t in of] for of in (primals, tangents)
    )
    with interpreter.lower():
        made = None if torch._C._are_functorch_transforms_active() else _computed(own, moved, call)
    return made and tuple(tuple(functorch._wrap_for_grad(t, level) for t in of) for of in made)


def _computed(primals: Sequence[Any], tangents: Sequence[Any], call: Call) -> Any:
    """The same without transforms."""
    tangents = [None if t is None or torch._is_zerotensor(t) else t for t in tangents]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*primals, *tangents)):
        return None
    q, k, v, sinks = primals
    dq, dk, dv, dsinks = tangents
    return _tangent.in_one_pass(q, k, v, dq, dk, dv, dsinks, call._replace(sinks=sinks))


def _traced(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Any, ...] | None, *fields: Any) -> tuple[Tensor, Tensor]:
    """:func:`_attend`, of arguments that a graph can hold."""
    return _attend(q, k, v, Call(*fields)._replace(lengths=None if lengths is None else Lengths(*lengths)))


def _taken_as_it_is() -> None:
    """Has torch.compile take ``_traced`` into its graph untraced: it does not know a Function's rules for vmap."""
    torch.compiler.allow_in_graph(_traced)  # type: ignore[no-untyped-call]


# As torch.compiler.assume_constant_result does, which would import torch._dynamo: called while torch.compile traces.
_taken_as_it_is._dynamo_marked_constant = True  # type: ignore[attr-defined]
