"""What was built."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ._library import PATH
from ._native import native
from ._version import __version__


@dataclass(frozen=True)
class BuildInfo:
    """Facts of the build, not of the machine it runs on."""

    version: str
    library: Path
    """``libflash_wmma.so``."""
    cuda: str | None
    """Version of the CUDA toolkit (under a torch for ROCm: of HIP) that compiled the kernels, such as ``"13.0"``;
    ``None``: CPU kernels alone."""
    architectures: tuple[str, ...]
    """Machine code and PTX in the library, such as ``("7.5", "8.0", "8.0+PTX")``."""


def build_info() -> BuildInfo:
    """The version, the library, and what CUDA code is in it.

    Raises:
        ImportError: ``flash_wmma._C`` was not built for this Python.
    """
    cuda, architectures = native().cuda_build() or (None, "")
    return BuildInfo(
        version=__version__,
        library=PATH,
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        architectures=tuple(filter(None, architectures.split(";"))),
    )


@dataclass(frozen=True)
class CompiledKernel:
    """ptxas's figures of one CUDA kernel for one architecture; no GPU is asked. The registers suffice for the functions
    that the kernel calls; the stack and spills of these functions are not included."""

    registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread: indexed arrays, and registers that a call saves."""
    spill_store_bytes: int
    """Per thread: written to local memory for lack of registers."""
    spill_load_bytes: int
    """Per thread: read back."""
    static_smem_bytes: int
    """Per block, in addition to the dynamic shared memory of the launch."""


@functools.cache
def compiled_kernels() -> Mapping[str, Mapping[str, CompiledKernel]]:
    """Every CUDA kernel of this build, by its demangled name without parameters, such as
    ``"flash_wmma::(anonymous namespace)::wmma_v2<__half>"``, and by the architecture of its machine code, such as
    ``"sm_80"`` or ``"sm_90a"``. Empty in a build without CUDA kernels.
    """
    table = Path(__file__).with_name("kernels.json")  # setup.py writes it from the compiler's log
    kernels = json.loads(table.read_text()) if table.exists() else {}
    return {name: {code: CompiledKernel(**facts) for code, facts in by.items()} for name, by in kernels.items()}


def compiled_kernel(function: str, arch: int) -> CompiledKernel | None:
    """The machine code of that kernel that runs on ``arch`` (10 * major + minor). ``None``: there is none; the kernel
    runs there from PTX, which the driver compiles, or not at all."""
    codes = compiled_kernels().get(function, {})
    earlier = range(arch, arch // 10 * 10 - 1, -1)  # machine code also runs on later minors of its major
    return next((codes[code] for code in (f"sm_{arch}a", *(f"sm_{a}" for a in earlier)) if code in codes), None)
