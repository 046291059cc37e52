"""The kernels of this build, as their own files state them, and how the compiler and the driver see them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from ._errors import EmulatorError, refuse
from ._native import native
from ._sources import Direction, kernel_sources
from .emulator import current, kernel_library


@dataclass(frozen=True)
class Instance:
    """One compiled tile of a kernel."""

    dtype: torch.dtype
    """Of q, k and v as it reads them: a kernel that converts float32 inputs beforehand reads float16."""
    min_arch: int
    """Least architecture it is compiled for, 10 * major + minor."""
    head_dim: int
    """The largest d it takes."""
    br: int
    """Rows of the Q tile."""
    bc: int
    """Rows of the K and V tile."""
    warps: int
    """Warps per block."""
    stages: int
    """K/V tiles in flight."""
    smem_bytes: int
    """Dynamic shared memory per block, in bytes."""

    def __str__(self) -> str:
        tile = f"{self.br} x {self.bc} rows, d <= {self.head_dim}"
        if self.warps:
            tile += f", {self.warps} warps, {self.stages} stages, {self.smem_bytes} bytes of shared memory"
        return tile


@dataclass(frozen=True)
class Kernel:
    """What one kernel can do."""

    name: str
    """Unique among all kernels, forward and backward."""
    device: str
    """``"cpu"`` or ``"cuda"``."""
    summary: str
    min_arch: int
    """The least architecture, 10 * major + minor; 0 on the CPU."""
    max_arch: int | None
    """The last architecture, where later ones cannot run its code (``wgmma_sm90``: 90); else ``None``."""
    dtypes: tuple[torch.dtype, ...]
    """Of q, k and v."""
    bf16_min_arch: int
    """The least architecture with bfloat16 inputs; 0: none, 1: every one."""
    head_dims: tuple[int, int]
    """The least and the largest d."""
    features: frozenset[str]
    """Beyond dense attention with any Nq, Nk and grouped heads: ``"causal"``, ``"window"``, ``"d_v != d"``, …"""
    auto_rank: int
    """``kernel="auto"`` takes the highest that fits; 0: by name only."""
    instances: tuple[Instance, ...] = field(repr=False)


@dataclass(frozen=True)
class FunctionFacts:
    """The driver's facts about one compiled CUDA function on the current device."""

    binary_version: int
    """Architecture of the machine code that runs, 10 * major + minor."""
    ptx_version: int
    """Architecture of its PTX. Below ``binary_version`` if the driver compiled it from PTX when it was loaded."""
    registers: int
    """A thread."""
    local_bytes: int
    """Local memory per thread: spilled registers and indexed arrays."""
    static_smem_bytes: int
    max_threads: int
    """A block."""


def instance_of(facts: dict[str, Any]) -> Instance:
    """From the facts as ``_C`` gives them."""
    return Instance(**{**facts, "dtype": getattr(torch, facts["dtype"])})


@functools.cache
def not_built() -> dict[str, str]:
    """The CUDA kernels that are not in :func:`kernels`, each with the reason. A build without CUDA kernels takes
    their facts from their sources, which it first compiles for the emulator if needed."""
    if native().cuda_build() is not None:
        return {}
    missing, mode = {}, current().mode  # that in which a kernel will run, if one does
    for name in kernel_sources():
        try:
            native().add_library(str(kernel_library(name, mode)))
        except (EmulatorError, OSError, RuntimeError) as error:
            missing[name] = str(error)
    return missing


@functools.cache
def _kernels(direction: Direction) -> tuple[Kernel, ...]:
    not_built()
    return tuple(
        Kernel(
            **{
                **facts,
                "dtypes": tuple(getattr(torch, name) for name in facts["dtypes"]),
                "features": frozenset(facts["features"]),
                "instances": tuple(map(instance_of, facts["instances"])),
            }
        )
        for facts in native().kernels(direction)
    )


def kernels(direction: Direction = "forward") -> list[Kernel]:
    """All kernels of a direction, ``"forward"`` or ``"backward"``, by name.

    In a build without CUDA, CUDA kernels run only on CPU tensors, in the emulator. The first call compiles them if
    needed, with g++; without g++ they are not listed.

    Raises:
        ImportError: ``flash_wmma._C`` was not built for this Python.
        ValueError: no such direction.
    """
    if direction not in get_args(Direction):
        refuse("direction", repr(direction), ", ".join(map(repr, get_args(Direction))))
    return list(_kernels(direction))


def kernel_named(name: str, *directions: Direction) -> Kernel:
    """The kernel of that name, of these directions (default: any).

    Raises:
        ValueError: there is none; the message lists the names.
    """
    table = {kernel.name: kernel for direction in directions or get_args(Direction) for kernel in _kernels(direction)}
    if name not in table:
        refuse("kernel", repr(name), ", ".join(map(repr, ("auto", *table))))
    return table[name]


def function_facts(kernel: str, instance: Instance) -> FunctionFacts | None:
    """Registers and code version of an instance of that kernel on the current CUDA device; ``None`` on the CPU.

    Raises:
        ValueError: no such kernel, or the instance is not one of its.
        RuntimeError: CUDA reports an error, for instance that no code was built for the device.
    """
    instances = kernel_named(kernel).instances
    if instance not in instances:
        refuse("instance", instance, f"one of {kernel}'s")
    facts = native().function_facts(kernel, instances.index(instance))
    return None if facts is None else FunctionFacts(**facts)
