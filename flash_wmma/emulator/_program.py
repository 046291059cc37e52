"""Stand-alone programs of kernels: a .cu file whose host functions Python calls by name."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from .._errors import INTERRUPTED, EmulatorError, refuse
from ._compile import Mode, build
from ._runtime import alone, configure, take_profile
from ._settings import current, settings

if TYPE_CHECKING:
    from .._profile import Profile


class Argument(ctypes.Union):
    """``Argument`` (csrc/device/entry.h)."""

    _fields_ = (("pointer", ctypes.c_void_p), ("integer", ctypes.c_int64), ("real", ctypes.c_double))


def argument_of(name: str, value: object) -> Argument:
    """A tensor's address, an integer or a floating number."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            refuse(f"{name}.device", value.device, "cpu")
        return Argument(pointer=value.data_ptr())
    if isinstance(value, int):
        return Argument(integer=value)
    if isinstance(value, float):
        return Argument(real=value)
    return refuse(name, type(value).__name__, "torch.Tensor, int, float", TypeError)


def call_entry(library: ctypes.CDLL, name: str, arguments: Sequence[Argument]) -> str | None:
    """Calls an entry of a compiled program, for the emulator or for a GPU. Returns what went wrong, if anything."""
    library.flash_wmma_call.restype = ctypes.c_char_p
    rows = (Argument * len(arguments))(*arguments)
    error: bytes | None = library.flash_wmma_call(name.encode(), rows, ctypes.c_size_t(len(arguments)))
    return None if error is None else error.decode()


_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "__half": torch.float16,
    "__nv_bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "signed char": torch.int8,
    "short": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
    "long long": torch.int64,
}
_UNSIGNED = {"unsigned char": 1, "unsigned short": 2, "unsigned int": 4, "unsigned long": 8, "unsigned long long": 8}
"""Sizes in bytes of the types that may also hold the bits of another type: every dtype of that size will do."""


def _check(name: str, i: int, value: Tensor | int | float, parameter: str) -> None:
    """Refuses an argument that an entry's parameter, as C++ names its type, would read as something else. ``void*`` and
    pointers to types that torch does not have take every tensor."""
    element = parameter.removesuffix("*").removesuffix(" const")
    shown = f"const {element}*" if parameter.endswith(" const*") else parameter

    def mismatch(got: object, error: type[Exception] = TypeError) -> NoReturn:
        raise error(f"argument {i}: got {got}, {name} takes {shown}")

    if not isinstance(value, Tensor):
        kind = float if parameter in ("float", "double") else int
        if parameter.endswith("*") or not isinstance(value, kind):
            mismatch(type(value).__name__)
    elif not parameter.endswith("*"):
        mismatch("Tensor")
    elif value.dtype != _DTYPES.get(element, value.dtype) or value.itemsize != _UNSIGNED.get(element, value.itemsize):
        mismatch(str(value.dtype).removeprefix("torch."))
    elif element != "void" and not value.is_contiguous():
        mismatch(f"strides {value.stride()}, not contiguous", ValueError)


class Program:
    """A .cu file, compiled for the emulator.

    The file registers host functions with ``Entry`` (csrc/device/entry.h), which launch its kernels with ``launch`` of
    ``<launch.h>``. It needs no GPU, no CUDA toolkit and no torch::

        #include <entry.h>
        #include <launch.h>

        __global__ void scale(float* x, float factor, int n) {
            const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
            if (i < n) x[i] *= factor;
        }
        void run(float* x, float factor, int n) {
            flash_wmma::launch(scale, {dim3((n + 127) / 128), dim3(128)}, nullptr, x, factor, n);
        }
        const flash_wmma::Entry kScale("scale", run);

    >>> program = flash_wmma.emulator.Program("scale.cu")
    >>> program.call("scale", x, 2.0, x.numel())
    """

    def __init__(self, source: str | Path, *, mode: Mode = "checked") -> None:
        """Compiles ``source``, unless the cache has it.

        Raises:
            EmulatorError: there is no g++, or the compiler's messages.
        """
        path = Path(source).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"source: got {source}, which is no file")
        self.source = path
        self.mode: Mode = mode
        self.library = build(path.stem, [path], mode)
        self._entries = ctypes.CDLL(str(self.library))
        if not hasattr(self._entries, "flash_wmma_parameters"):
            raise EmulatorError(f"{path.name}: no Entry; #include <entry.h> and name the functions to call")
        self._entries.flash_wmma_parameters.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Tensor | int | float) -> None:
        """Calls an entry. Tensors, on the CPU, are passed as the address of their first element; kernels may touch them
        from there to the end of their storage and no other memory.

        Raises:
            TypeError: an argument's type is not that of the entry's parameter, such as float64 for ``const float*`` or
                an integer for ``float``.
            ValueError: a tensor is not contiguous, and the parameter is no ``void*``.
            EmulatorError: what the emulator found, or what the entry threw.
        """
        rows = [argument_of(f"arguments[{i}]", value) for i, value in enumerate(arguments)]
        parameters: bytes = self._entries.flash_wmma_parameters(name.encode()) or b""
        types = parameters.decode().splitlines()
        if len(types) == len(arguments):  # else the call below says what is wrong
            for i, value in enumerate(arguments):
                _check(name, i, value, types[i])
        tensors = [(f"argument {i}", t, True) for i, t in enumerate(arguments) if isinstance(t, Tensor)]
        with alone(), settings(mode=self.mode):
            configure(tensors)
            try:
                error = call_entry(self._entries, name, rows)
            finally:
                configure([])
        if error == INTERRUPTED:
            raise KeyboardInterrupt
        if error is not None:
            raise EmulatorError(error)

    def counts(self, name: str, *arguments: Tensor | int | float) -> str:
        """As :meth:`call`, and returns the counters of its launches as JSON, from which :meth:`profile` is made."""
        with alone(), settings(counters=True):
            take_profile()
            self.call(name, *arguments)
            return take_profile()

    def profile(self, name: str, *arguments: Tensor | int | float) -> Profile:
        """As :meth:`call`, and returns the figures of its launches: see :func:`flash_wmma.profile`. What the ideal
        traffic of global memory is, is unknown here.

        Raises:
            ValueError: the program was compiled with ``mode="fast"``, which counts nothing.
            EmulatorError: as :meth:`call`.
        """
        if self.mode != "checked":
            refuse("mode", repr(self.mode), "'checked' in a program that is profiled")
        from .._figures import launches_of  # here, since few programs are profiled
        from .._profile import Profile

        arch = current().arch
        return Profile(
            kernel=name,
            inputs="",
            arch=arch,
            launches=launches_of(self.counts(name, *arguments), arch, self.source.parent),
            ideal_read_bytes=None,
            ideal_written_bytes=None,
        )
