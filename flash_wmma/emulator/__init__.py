"""CUDA kernels on the CPU: their own source, compiled by g++, run lane by lane.

``flash_wmma.forward(q, k, v, kernel="wmma_v2")`` with CPU tensors runs here. It raises :class:`EmulatorError` at races,
accesses out of bounds, deadlocks and the like. ``FLASH_WMMA_EMULATOR=fast`` runs kernels faster and checks little.
"""

from .._errors import EmulatorError
from .._sources import Direction, kernel_sources
from ._compile import Mode, compiler, kernel_library
from ._program import Program
from ._settings import Settings, current, settings

__all__ = [
    "Direction",
    "EmulatorError",
    "Mode",
    "Program",
    "Settings",
    "compiler",
    "current",
    "kernel_library",
    "kernel_sources",
    "settings",
]
