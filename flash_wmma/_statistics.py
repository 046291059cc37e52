"""What ``return_aux`` asks for: numbers about the attention weights, computed from q, k and lse, and their gradients.

Maxima and entropies of plain dense calls come with out and lse (the op ``forward_with_statistics``), from the kernel of
forward itself if it tells them. Otherwise the weights are recomputed from lse, ``P = exp(x - lse)``, as in the
gradients of attention, and by the same kernels. So they follow any forward kernel, and memory stays linear in the
lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _autocast, _math, _ops
from ._autograd import once_differentiable
from ._call import Call
from ._errors import refuse
from ._fold import fold_of
from ._math import NAMES

Aux = Sequence[Literal["max", "entropy", "column_sum"]]
"""What :func:`flash_wmma.forward` may be asked for besides."""

_DOUBLE = 'the gradient of a gradient is not built: kernel="math" is plain torch ops, which have every derivative'
_MAXIMUM = 'return_aux: "max" has no gradient; kernel="math" is plain torch ops, which have it, or detach the maximum'
_TRANSFORMS = (
    "return_aux: of torch.func there is vmap alone, outside of torch.compile, and no forward mode; "
    'kernel="math" is plain torch ops, which have every transform'
)


def checked_names(return_aux: Any) -> tuple[str, ...]:
    """The names as a tuple.

    Raises:
        TypeError, ValueError: they are no sequence of names, or one of them is unknown.
    """
    allowed = f"a tuple of some of {', '.join(map(repr, NAMES))}"
    if isinstance(return_aux, str) or not isinstance(return_aux, Sequence):
        refuse("return_aux", repr(return_aux), allowed, TypeError)
    for name in return_aux:
        if name not in NAMES:
            refuse("return_aux", repr(name), allowed, ValueError if isinstance(name, str) else TypeError)
    return tuple(return_aux)


def widened(call: Call, q: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """q and the others as the call's kernel of backward reads them: ``bwd_simt`` takes float32 alone."""
    narrow = call.backward_kernel == "bwd_simt" and q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    return [t.float() if narrow and t is not None and t.dtype == q.dtype else t for t in (q, *others)]


Told = tuple[Tensor, Tensor] | None
"""Maxima and entropies that forward has told, empty if not named."""


def told_by_forward(call: Call, names: tuple[str, ...]) -> str:
    """Which of these names are asked of forward's op, as it takes them. A named kernel of backward computes all."""
    plain = (
        call.backward_kernel == "auto"
        and call.kernel_name != "math"
        and call.lengths is None
        and call.attn_bias is None
        and call.alibi_slopes is None
        and call.key_ranges is None
        and isinstance(call.softcap, int | float)
        and isinstance(call.dropout_p, int | float)
        and call.softcap == call.dropout_p == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )
    return " ".join(name for name in ("max", "entropy") if plain and name in names)


def statistics(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, call: Call, names: tuple[str, ...], told: Told = None
) -> dict[str, Tensor]:
    """The statistics of these names of a call, whose arguments are good, and whose result was lse."""
    if call.kernel_name == "math":
        with _autocast.suspended(q.device):
            return _math.statistics(*_autocast.cast(q, k, v, call), names)
    mapped = torch._C._are_functorch_transforms_active()
    if forward_ad._current_level >= 0 or (mapped and not _vmap_alone()):
        raise NotImplementedError(_TRANSFORMS)
    k = k.view_as(k) if k is q else k  # torch.compile takes no tensor twice
    q, k, v, call = _autocast.cast(q, k, v, call)
    differentiable = (q, k, call.attn_bias, call.alibi_slopes, call.sinks)
    without = call._replace(attn_bias=None, alibi_slopes=None, sinks=None, rng_state=None, dropout_p=0.0)
    if mapped:
        found = Mapped.apply(*differentiable, lse.detach(), without, names)
    elif torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable):
        found = Statistics.apply(*differentiable, lse.detach(), without, names, *(told or (None, None)))
    else:
        found = _completed(told, *differentiable, lse, without, names)
    return {name: found[NAMES.index(name)] for name in names}


def _vmap_alone() -> bool:
    """Whether all active transforms are vmap. torch.compile, which traces them otherwise, has none of them here."""
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    return all(level.key() == functorch.TransformType.Vmap for level in functorch.get_interpreter_stack() or ())


def _count(
    q: Tensor,
    k: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    lse: Tensor,
    call: Call,
    names: tuple[str, ...],
    key_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maxima, entropies, column sums, and the sums over keys of weights times ``key_weights``; empty if not named."""
    q, k, attn_bias = widened(call, q, k, attn_bias)  # type: ignore[assignment]
    call = call._replace(attn_bias=attn_bias, alibi_slopes=alibi_slopes, sinks=sinks)
    return _ops.statistics(q, k, lse, call, names, key_weights)


def _completed(
    told: Told,
    q: Tensor,
    k: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    lse: Tensor,
    call: Call,
    names: tuple[str, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Maxima, entropies and column sums: what is told, and the rest by :func:`_count`."""
    if told is None:
        return _count(q, k, attn_bias, alibi_slopes, sinks, lse, call, names)[:3]
    row_max, entropy = told
    if "column_sum" not in names:
        return row_max, entropy, row_max.new_empty(0)
    return row_max, entropy, _count(q, k, attn_bias, alibi_slopes, sinks, lse, call, ("column_sum",))[2]


class Statistics(torch.autograd.Function):
    """Maxima, entropies and column sums. With w the derivative of the loss by a weight,

        w_ij = -dentropy_i (ln P_ij + 1) + dcolumn_sum_j,      delta_i = sum_j P_ij w_ij,

    the derivative by a score is P (w - delta) (lse is a function of the scores), and that by a sink -sum_i exp(sink -
    lse_i) delta_i.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        attn_bias: Tensor | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        lse: Tensor,
        call: Call,
        names: tuple[str, ...],
        row_max: Tensor | None,
        entropy: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """``call`` comes without the tensors before it. row_max and entropy: told by forward, or None."""
        told = None if row_max is None or entropy is None else (row_max, entropy)
        found = _completed(told, q, k, attn_bias, alibi_slopes, sinks, lse, call, names)
        row_max, entropy, column_sum = found if told is None else (t.view_as(t) for t in found)
        Statistics._save(ctx, (q, k, attn_bias, alibi_slopes, sinks, lse), entropy, call)
        if torch.compiler.is_compiling():  # whose backward is given zeros where there is no gradient
            ctx.mark_non_differentiable(row_max)
        return row_max, entropy, column_sum

    @staticmethod
    def _save(ctx: Any, arguments: Sequence[Tensor | None], entropy: Tensor, call: Call) -> None:
        ctx.call, tensors = call.split()
        ctx.save_for_backward(*arguments, entropy, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dmax: Tensor | None, dentropy: Tensor | None, dcolumn_sum: Tensor | None) -> Any:
        if dmax is not None and not torch.compiler.is_compiling():
            raise NotImplementedError(_MAXIMUM)
        # torch.compile gives zeros where there is no gradient, also of what is not asked for, which is empty
        dentropy, dcolumn_sum = (None if t is None or t.dim() == 1 else t for t in (dentropy, dcolumn_sum))
        saved = ctx.saved_tensors  # once: each look unpacks them
        *tensors, lse, entropy = saved[:7]
        if dentropy is None and dcolumn_sum is None:
            return (None,) * len(ctx.needs_input_grad)
        call = ctx.call.joined(saved[7:])
        wanted = tuple(ctx.needs_input_grad[2:5])
        found = once_differentiable(_DOUBLE, _gradients, dentropy, dcolumn_sum, *tensors, lse, entropy, call, wanted)
        return (
            *(t if needed else None for t, needed in zip(found, ctx.needs_input_grad, strict=False)),
            *(None,) * (len(ctx.needs_input_grad) - len(found)),
        )


class Mapped(Statistics):
    """The same under vmap, which makes one call of the mapped ones."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _count(*arguments)[:3]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, results: tuple[Tensor, ...]) -> None:
        *arguments, call, _ = inputs
        Statistics._save(ctx, arguments, results[1], call)

    @staticmethod
    def vmap(info: Any, dims: Any, *arguments: Any) -> Any:
        q, k, attn_bias, alibi_slopes, sinks, lse, call, names = arguments
        call = call._replace(attn_bias=attn_bias, alibi_slopes=alibi_slopes, sinks=sinks)
        mapped = dims[6]._replace(attn_bias=dims[2], alibi_slopes=dims[3], sinks=dims[4])
        fold = fold_of(info.batch_size, q, dims[0], call, mapped)
        call = fold.call(call, mapped)
        found = Mapped.apply(
            *(fold.tensor(t, dim, fold.rows) for t, dim in zip((q, k), dims, strict=False)),
            call.attn_bias,
            call.alibi_slopes,
            call.sinks,
            fold.tensor(lse, dims[5], fold.lse),
            call._replace(attn_bias=None, alibi_slopes=None, sinks=None),
            names,
        )
        wanted = [name in names for name in NAMES]
        each = (fold.unfolded(t, fold.lse, fold.full) if there else t for t, there in zip(found, wanted, strict=True))
        return tuple(each), tuple(fold.lse if there else None for there in wanted)


def _unit(*numbers: Tensor | None) -> Tensor:
    """The power of two that is next above the largest of them, which gradients are linear in; 1 if that is 0 or not
    finite."""
    each = [t.abs().amax() for t in numbers if t is not None and t.numel() > 0]
    if not each:
        return torch.ones(())
    largest = torch.stack(each).amax()
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
    return unit.where((largest > 0) & unit.isfinite(), 1.0)


def _gradients(
    dentropy: Tensor | None,
    dcolumn_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    call: Call,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """The gradients of q, k, attn_bias, alibi_slopes and sinks; ``wanted``: of the last three which. Empty if not."""
    delta = torch.zeros_like(lse)
    of_sinks = torch.zeros_like(lse)
    if sinks is not None:
        of_sinks = (sinks[:, None] - lse).exp().masked_fill(lse.isneginf(), 0)
    if dentropy is not None:
        delta = delta + dentropy * (entropy - (1 - of_sinks).masked_fill(lse.isneginf(), 0))
    if dcolumn_sum is not None:
        delta = delta + _count(q, k, attn_bias, alibi_slopes, sinks, lse, call, (), dcolumn_sum)[3]
    subtrahend = delta if dentropy is None else delta + dentropy
    wide_q, wide_k, wide_bias = widened(call, q, k, attn_bias)
    assert wide_q is not None
    assert wide_k is not None
    zeros = wide_q.new_zeros(8)  # stand for v, out and its gradient
    call = call._replace(attn_bias=wide_bias, alibi_slopes=alibi_slopes)
    dout, values = zeros.expand(*q.shape[:-1], 8), zeros.expand(*k.shape[:-1], 8)
    bias_grad, slopes_grad, sinks_grad = wanted
    unit = None
    if wide_q.dtype == torch.float16:  # in which kernels round dS
        unit = _unit(dentropy, dcolumn_sum, subtrahend)
        subtrahend = subtrahend / unit
        dentropy, dcolumn_sum = (None if t is None else t / unit for t in (dentropy, dcolumn_sum))
    terms = (-subtrahend, wide_q, wide_k, values, dout, lse, dentropy, dcolumn_sum)
    dq, dk, _, dbias, dslopes = _ops.backward_with_statistics(dout, *terms, call, bias_grad, slopes_grad)
    if unit is not None:
        dq, dk, dbias, dslopes = (t.float() * unit for t in (dq, dk, dbias, dslopes))
    dsinks = -(of_sinks * delta).transpose(0, -2).flatten(1).sum(1) if sinks_grad else zeros
    dbias = dbias if attn_bias is None or not bias_grad else dbias.to(attn_bias.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dbias, dslopes, dsinks
