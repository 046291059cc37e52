"""CUDA kernels on the CPU: their own source, compiled by g++, run lane by lane.

``flash_wmma.forward(q, k, v, kernel="wmma_v2")`` with CPU tensors runs here. ``FLASH_WMMA_EMULATOR=fast`` (the default)
only runs; ``checked`` also raises :class:`EmulatorError` at races, accesses out of bounds, deadlocks and the like.
"""

from ._compile import EmulatorError, kernel_sources
from ._program import Program
from ._settings import Settings, current, settings

__all__ = ["EmulatorError", "Program", "Settings", "current", "kernel_sources", "settings"]
