"""Reductions: the maximum and the sum of an array, and of the rows of a matrix; softmax along rows.

On CUDA tensors they run kernels of this library (csrc/reductions), built on the shuffles that the softmax of an
attention kernel is made of. On CPU tensors they are torch's own; ``kernel="shuffle"`` runs the CUDA sources there, in
:mod:`flash_wmma.emulator`.

Results are those of torch in dtype and for NaN: a maximum, sum or softmax over NaN is NaN; the sum of int32 is int64;
float16 and bfloat16 are summed in float32 and rounded once. Results are bitwise the same from run to run on a device.

All but those of int32 are differentiable, any number of times. Elements that share a maximum share its gradient in
equal parts, as in torch's ``max()`` and ``amax``. In forward mode and under the transforms of ``torch.func`` other than
``grad``, ``vjp`` and ``jacrev``, torch's ops compute the results, on any device, and ``kernel="shuffle"`` is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._errors import refuse
from ._library import NAMESPACE, ops
from ._sources import CSRC
from .emulator import Mode, Program, current

__all__ = ["max", "row_max", "row_softmax", "row_sum", "sum"]


def __dir__() -> list[str]:
    return __all__


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32)
"""dtypes of the arrays, in the order of ``Type`` in csrc/reductions/reductions.h."""


def _check(x: Tensor, kernel: str, *, matrix: bool, maximum: bool = False, softmax: bool = False) -> None:
    """Checks x and kernel."""
    if not isinstance(x, Tensor):
        refuse("x", type(x).__name__, "torch.Tensor", TypeError)
    if x.is_nested or x.layout is not torch.strided:
        refuse("x.layout", "nested" if x.is_nested else x.layout, "torch.strided")
    dtypes = DTYPES[:3] if softmax else DTYPES
    if x.dtype not in dtypes:
        refuse("x.dtype", x.dtype, ", ".join(map(str, dtypes)))
    if x.device.type not in ("cpu", "cuda", "meta"):
        refuse("x.device", x.device, "cpu, cuda")
    if matrix and x.dim() != 2:
        refuse("x.shape", tuple(x.shape), "(N, C)")
    if maximum and (x.shape[1] == 0 if matrix else x.numel() == 0):
        refuse("x.shape", tuple(x.shape), "at least one element to take the maximum of")
    if not isinstance(kernel, str):
        refuse("kernel", repr(kernel), "'auto', 'shuffle'", TypeError)
    if kernel not in ("auto", "shuffle"):
        refuse("kernel", repr(kernel), "'auto', 'shuffle'")


def max(x: Tensor, *, kernel: str = "auto") -> Tensor:
    """The largest element of an array.

    Args:
        x: any shape with at least one element, float32, float16, bfloat16 or int32, on a CPU or a CUDA device. It is
            copied if it is not contiguous.
        kernel: ``"auto"``: CUDA kernels on CUDA tensors, torch on CPU tensors. ``"shuffle"``: the CUDA kernels, for CPU
            tensors in the emulator. In forward mode and under the transforms of ``torch.func`` other than ``grad``,
            ``vjp`` and ``jacrev``, and under these in ``torch.compile``, ``"auto"`` is torch everywhere.

    Returns:
        () in x's dtype; NaN if x holds one.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: x has another dtype, layout or device, or no element; the kernel is unknown.
        NotImplementedError: ``"shuffle"`` where ``"auto"`` is torch everywhere.
        RuntimeError: CUDA tensors but no CUDA kernels in this build, or CUDA reports an error.
        flash_wmma.emulator.EmulatorError: ``"shuffle"`` on CPU tensors: it could not be compiled, or a check failed.
    """
    _check(x, kernel, matrix=False, maximum=True)
    return _reduced("array_max", x, kernel)


def sum(x: Tensor, *, kernel: str = "auto") -> Tensor:
    """The sum of an array: 0 if it is empty. Arguments and errors as for :func:`max`.

    Returns:
        () in x's dtype; int64 for int32.
    """
    _check(x, kernel, matrix=False)
    return _reduced("array_sum", x, kernel)


def row_max(x: Tensor, *, kernel: str = "auto") -> Tensor:
    """The largest element of each row.

    Args:
        x: (N, C) with C at least 1, else as for :func:`max`. Rows may lie anywhere; x is copied if a row's elements
            are not adjacent.
        kernel: as for :func:`max`.

    Returns:
        (N) in x's dtype; NaN for a row that holds one.

    Raises:
        As :func:`max`.
    """
    _check(x, kernel, matrix=True, maximum=True)
    return _reduced("row_max", x, kernel)


def row_sum(x: Tensor, *, kernel: str = "auto") -> Tensor:
    """The sum of each row: 0 if C is 0. Arguments and errors as for :func:`row_max`.

    Returns:
        (N) in x's dtype; int64 for int32.
    """
    _check(x, kernel, matrix=True)
    return _reduced("row_sum", x, kernel)


def row_softmax(x: Tensor, *, kernel: str = "auto") -> Tensor:
    """exp(x) of each row, divided by its sum; computed in float32. Arguments and errors as for :func:`row_max`, but x
    is not int32, and C may be 0.

    Returns:
        (N, C), contiguous, in x's dtype. NaN throughout a row that holds NaN or +inf, or nothing but -inf, as in torch.
    """
    _check(x, kernel, matrix=True, softmax=True)
    return _reduced("row_softmax", x, kernel)


# ---------------------------------------------------------------------------------------------------------- derivatives


def _reduced(name: str, x: Tensor, kernel: str) -> Tensor:
    """The reduction of that op, recorded if x requires a gradient."""
    if _beyond_reverse_mode():
        if kernel == "shuffle":
            raise NotImplementedError(_BEYOND)
        return _BY_TORCH[name](x)
    if x.requires_grad and torch.is_grad_enabled():
        return _Reduction.apply(x, name, kernel)  # type: ignore[no-any-return]
    return _computed(name, x, kernel)


_BEYOND = (
    'kernel="shuffle": of torch.func there are grad, vjp and jacrev alone, outside of torch.compile, and no forward '
    'mode; kernel="auto" takes torch\'s ops there, which have every transform'
)


def _beyond_reverse_mode() -> bool:
    """Whether forward mode is on, or a transform other than those of reverse mode is active.

    While torch.compile traces, any transform counts: which one it is cannot be asked.
    """
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    if torch.compiler.is_compiling():
        return True
    functorch = torch._C._functorch
    return any(level.key() != functorch.TransformType.Grad for level in functorch.get_interpreter_stack() or ())


def _row_max_by_torch(x: Tensor) -> Tensor:
    """``amax`` of rows, but with derivatives where a row holds NaN, too: its NaN elements share them."""
    if not x.is_floating_point():
        return x.amax(1)
    nan = x.isnan()
    in_row = nan.any(1, keepdim=True)
    of_numbers = torch.where(in_row, 0, x).amax(1)
    of_nan = torch.where(nan, x, 0).sum(1, dtype=x.dtype) / nan.sum(1).clamp(min=1)
    return torch.where(in_row[:, 0], of_nan, of_numbers)


_BY_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "array_max": lambda x: _row_max_by_torch(x.reshape(1, -1)).reshape(()),
    "array_sum": lambda x: x.sum(dtype=_sum_dtype(x)),
    "row_max": _row_max_by_torch,
    "row_sum": lambda x: x.sum(1, dtype=_sum_dtype(x)),
    "row_softmax": lambda x: x.float().softmax(1).to(x.dtype).contiguous(),
}
"""The reductions by ops that have every derivative and transform. autocast does not change a sum whose dtype is set."""


def _computed(name: str, x: Tensor, kernel: str) -> Tensor:
    if not _emulate(x, kernel):
        return getattr(ops, name)(x)  # type: ignore[no-any-return]
    if name == "row_softmax":
        return _emulated(x, None)
    reduction = _MAX if name.endswith("max") else _SUM
    return _emulated(x, reduction) if name.startswith("row") else _emulated(x.reshape(1, -1), reduction).reshape(())


class _Reduction(torch.autograd.Function):
    """Gradients in torch's ops, which have gradients themselves."""

    @staticmethod
    def forward(x: Tensor, name: str, kernel: str) -> Tensor:
        return _computed(name, x, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str, str], output: Tensor) -> None:
        x, ctx.name, _ = inputs
        ctx.shape = x.shape
        ctx.save_for_backward(*{"sum": (), "max": (x, output), "softmax": (output,)}[ctx.name.rpartition("_")[2]])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.name == "row_softmax":
            (weights,) = ctx.saved_tensors
            y, dy = weights.float(), gradient.float()
            return (y * (dy - (y * dy).sum(1, keepdim=True))).to(weights.dtype), None, None
        of_each = gradient[:, None] if ctx.name.startswith("row") else gradient
        if ctx.name.endswith("sum"):
            return of_each.expand(ctx.shape), None, None
        x, largest = ctx.saved_tensors
        largest = largest[:, None] if ctx.name.startswith("row") else largest
        shares = (x == largest) | (x.isnan() & largest.isnan())
        count = shares.sum(1, keepdim=True) if ctx.name.startswith("row") else shares.sum()
        return torch.where(shares, of_each / count, 0), None, None


# ----------------------------------------------------------------------------------------------- the ops beside the GPU


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.int64 if x.dtype == torch.int32 else x.dtype


_ON_CPU: dict[str, Callable[[Tensor], Tensor]] = {
    "array_max": torch.amax,
    "array_sum": torch.sum,
    "row_max": lambda x: torch.amax(x, 1),
    "row_sum": lambda x: torch.sum(x, 1),
    "row_softmax": lambda x: torch.softmax(x.contiguous(), 1),
}
_FAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "array_max": lambda x: x.new_empty(()),
    "array_sum": lambda x: x.new_empty((), dtype=_sum_dtype(x)),
    "row_max": lambda x: x.new_empty(x.shape[0]),
    "row_sum": lambda x: x.new_empty(x.shape[0], dtype=_sum_dtype(x)),
    "row_softmax": lambda x: x.new_empty(x.shape),
}
for _name in _FAKES:
    torch.library.impl(f"{NAMESPACE}::{_name}", "CPU", _ON_CPU[_name])
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _FAKES[_name])

# --------------------------------------------------------------------------------------------------------- the emulator

_MAX, _SUM = 0, 1
"""``Reduction`` of csrc/reductions/reductions.h."""
_WORKSPACE = 1 << 20


def _emulate(x: Tensor, kernel: str) -> bool:
    return kernel == "shuffle" and x.device.type == "cpu"


@functools.cache
def _program(mode: Mode) -> Program:
    return Program(CSRC / "reductions" / "reductions_emulated.cpp", mode=mode)


def _emulated(x: Tensor, reduction: int | None) -> Tensor:
    """Maxima or sums of the rows of x (N, C), or its softmax, by the CUDA sources."""
    settings = current()
    program = _program(settings.mode)
    x = x.detach().resolve_neg()
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    rows, columns = x.shape
    array = (x, DTYPES.index(x.dtype), rows, columns, x.stride(0))
    device = (settings.sm_count, settings.warp_size)
    if reduction is None:
        out = x.new_empty(x.shape)
        if out.numel():
            program.call("softmax", *array, *device, out)
        return out
    out = x.new_zeros(rows, dtype=_sum_dtype(x) if reduction == _SUM else x.dtype)
    if x.numel():
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8)
        program.call("reduce", *array, reduction, *device, out, workspace, workspace.numel())
    return out
