"""How many blocks of a kernel a multiprocessor (SM) holds at a time, and what limits their number. No GPU is asked.

The limits are those of the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (for 7.0, an
edition for CUDA 12). Registers and shared memory are allocated as in the toolkit's ``cuda_occupancy.h``: registers to
whole warps, 256 at a time, from the 16 K of a quarter of the SM; shared memory to whole blocks, 128 bytes at a time
(256 before 8.0), with 1 KiB per block for the system from 8.0 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ._build import compiled_kernel
from ._errors import refuse


class _Multiprocessor(NamedTuple):
    warps: int
    blocks: int
    smem_kib: int


_MULTIPROCESSORS = {
    70: _Multiprocessor(64, 32, 96),
    75: _Multiprocessor(32, 16, 64),
    80: _Multiprocessor(64, 32, 164),
    86: _Multiprocessor(48, 16, 100),
    89: _Multiprocessor(48, 24, 100),
    90: _Multiprocessor(64, 32, 228),
    100: _Multiprocessor(64, 32, 228),
    120: _Multiprocessor(48, 24, 100),
}
_WARP = 32
_QUARTERS = 4
_REGISTERS = 64 * 1024
_REGISTER_UNIT = 256
_MAX_REGISTERS = 255  # per thread
_MAX_THREADS = 1024  # per block


@dataclass(frozen=True)
class Occupancy:
    """What one multiprocessor holds at a time, at most: the answer of :func:`theoretical_occupancy`."""

    arch: int
    """Compute capability, 10 * major + minor."""
    threads: int
    """Per block."""
    registers: int | None
    """Per thread; ``None``: unknown."""
    smem_bytes: int
    """Shared memory per block, static and dynamic."""
    blocks: int
    """Resident blocks; 0: such a block cannot be launched."""
    warps: int
    """Resident warps."""
    max_warps: int
    """The most warps that a multiprocessor of this architecture holds."""
    limiters: tuple[str, ...]
    """What allows no more blocks: one or more of ``"registers"``, ``"shared memory"``, ``"threads"`` and ``"blocks"``.
    With ``"registers unknown"``, ``blocks`` and ``warps`` are an upper bound, by the other limits."""

    @property
    def percent(self) -> float:
        """Resident warps, in percent of :attr:`max_warps`."""
        return 100 * self.warps / self.max_warps

    def __str__(self) -> str:
        bound = "at most " if self.registers is None else ""
        blocks = f"{self.blocks} block{'s' * (self.blocks != 1)}"
        return (
            f"sm_{self.arch}: {bound}{self.percent:.3g} % ({blocks}, {self.warps} of {self.max_warps} warps), "
            f"limited by {', '.join(self.limiters)}"
        )


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def theoretical_occupancy(arch: int, threads: int, registers: int | None, smem_bytes: int) -> Occupancy:
    """The blocks and warps that a multiprocessor holds at a time if there are enough of them.

    Args:
        arch: compute capability, 10 * major + minor: 75 for 7.5.
        threads: per block.
        registers: per thread; ``None`` if unknown: the other limits then give an upper bound.
        smem_bytes: shared memory per block, static and dynamic. The SM's L1 cache is taken to be as small as possible.

    Raises:
        ValueError: no limits are known for ``arch``, or a number is out of range.
    """
    if arch not in _MULTIPROCESSORS:
        refuse("arch", arch, ", ".join(map(str, _MULTIPROCESSORS)))
    for name, number, least in (("threads", threads, 1), ("registers", registers, 1), ("smem_bytes", smem_bytes, 0)):
        if number is not None and number < least:
            refuse(name, number, f"{least} or more")
    sm = _MULTIPROCESSORS[arch]
    warps = -(-threads // _WARP)
    reserved, unit = (1024, 128) if arch >= 80 else (0, 256)
    smem = _round_up(smem_bytes + reserved, unit)
    room = {
        "shared memory": sm.smem_kib * 1024 // max(smem, 1),
        "threads": sm.warps // warps if threads <= _MAX_THREADS else 0,
        "blocks": sm.blocks,
    }
    if registers is not None:
        warps_a_quarter = _REGISTERS // _QUARTERS // _round_up(registers * _WARP, _REGISTER_UNIT)
        room["registers"] = _QUARTERS * warps_a_quarter // warps if registers <= _MAX_REGISTERS else 0
    blocks = min(room.values())
    limiters = [name for name, most in room.items() if most == blocks]
    return Occupancy(
        arch=arch,
        threads=threads,
        registers=registers,
        smem_bytes=smem_bytes,
        blocks=blocks,
        warps=blocks * warps,
        max_warps=sm.warps,
        limiters=(*limiters, "registers unknown") if registers is None else tuple(limiters),
    )


def kernel_occupancy(function: str, arch: int, threads: int, smem_bytes: int) -> Occupancy:
    """:func:`theoretical_occupancy` of a kernel of this build, with the registers of its machine code for ``arch``.

    The registers are unknown if there is no such code: the driver then compiles PTX of an earlier architecture, or the
    kernel does not run.

    Args:
        function: the kernel's demangled name without parameters, a key of :func:`flash_wmma.compiled_kernels`.
        arch: compute capability, 10 * major + minor: 75 for 7.5.
        threads: per block.
        smem_bytes: dynamic shared memory per block.

    Raises:
        ValueError: as :func:`theoretical_occupancy`.
    """
    code = compiled_kernel(function, arch)
    if code is None:
        return theoretical_occupancy(arch, threads, None, smem_bytes)
    return theoretical_occupancy(arch, threads, code.registers, code.static_smem_bytes + smem_bytes)
