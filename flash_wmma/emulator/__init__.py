"""CUDA kernels on the CPU: their own source, compiled by g++, run lane by lane.

``flash_wmma.forward(q, k, v, kernel="wmma_v2")`` with CPU tensors runs here. ``FLASH_WMMA_EMULATOR=fast`` (the default)
only runs; ``checked`` also raises :class:`EmulatorError` at races, accesses out of bounds, deadlocks and the like.
"""

from ._compile import Direction, EmulatorError, Mode, compiler, kernel_library, kernel_sources
from ._program import Program
from ._settings import Settings, current, settings

EmulatorError.__module__ = __name__  # as it is caught, and as tracebacks call it

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
