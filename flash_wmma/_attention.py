"""A call of attention, from its arguments to its results, with or without gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _autocast, _autograd, _checks, _dropout, _func, _math, _ops, _slopes
from . import _fake as _fake  # registers the fake kernels
from ._call import Call
from ._errors import raise_library_error


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse). The op is called first, and the arguments are checked after it failed: a good call pays nothing."""
    drawn = False
    try:
        if not call.only_band:
            if call.backward_kernel != "auto":
                _checks.backward_kernel(call.backward_kernel)
            if call.rng_state is None and 0 < call.dropout_p < 1:
                call, drawn = call._replace(rng_state=_dropout.draw(q.device)), True
            if call.kernel_name == "math":
                q, k, v, call = _checked(q, k, v, call)
                with _autocast.suspended(q.device):
                    return _math.attend(q, k, v, call)
            transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
            slopes = call.alibi_slopes
            if slopes is not None and slopes.requires_grad and torch.is_grad_enabled() and not transformed:
                return _slopes.attend(q, k, v, call)
            if call.validate:
                q, k, v, call = _checked(q, k, v, call)
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return _func.attend(q, k, v, call, drawn)
        if torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (call.attn_bias is not None and call.attn_bias.requires_grad)
            or (call.sinks is not None and call.sinks.requires_grad)
        ):
            return _autograd.attend(q, k, v, call)
        return _ops.forward(q, k, v, call)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        _check_after(error, q, k, v, call)
        raise


def attend_with_statistics(
    q: Tensor, k: Tensor, v: Tensor, call: Call, wanted: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, row_max, entropy) of a call that :func:`flash_wmma._ops.forward_with_statistics` takes, without
    transforms. The last two have no gradient."""
    try:
        sinks = call.sinks
        differentiable = q.requires_grad or k.requires_grad or v.requires_grad
        if torch.is_grad_enabled() and (differentiable or (sinks is not None and sinks.requires_grad)):
            return _autograd.attend_with_statistics(q, k, v, call, wanted)
        return _ops.forward_with_statistics(q, k, v, call, wanted)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        _check_after(error, q, k, v, call)
        raise


def _check_after(error: Exception, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
    """Raises what is wrong with the arguments of a call that failed, if something is."""
    _checks.tensors(q=q, k=k, v=v)
    _checks.device(q)
    q, k, v, call = _autocast.cast(q, k, v, call)
    _checks.call_tensors(q, k, v, call)
    _checks.options(call)
    raise_library_error(error)


def _checked(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Call]:
    """The arguments, cast for autocast and checked. With packed sequences it waits for the device."""
    q, k, v, call = _autocast.cast(q, k, v, call)
    _checks.call_tensors(q, k, v, call)
    _checks.options(call)
    if call.lengths is not None:
        _checks.sequences(call.lengths, q.shape[0], k.shape[0])
    return q, k, v, call
