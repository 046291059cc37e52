"""Exact attention whose kernels are written by hand in CUDA C++, from the first WMMA kernel on."""

from . import emulator
from ._build import BuildInfo, CompiledKernel, build_info, compiled_kernels
from ._explain import DeviceFacts, Explanation, device_facts, explain
from ._forward import forward
from ._occupancy import Occupancy, kernel_occupancy, theoretical_occupancy
from ._profile import Profile, profile
from ._table import FunctionFacts, Instance, Kernel, function_facts, kernels
from ._version import __version__

__all__ = [
    "BuildInfo",
    "CompiledKernel",
    "DeviceFacts",
    "Explanation",
    "FunctionFacts",
    "Instance",
    "Kernel",
    "Occupancy",
    "Profile",
    "__version__",
    "build_info",
    "compiled_kernels",
    "device_facts",
    "emulator",
    "explain",
    "forward",
    "function_facts",
    "kernel_occupancy",
    "kernels",
    "profile",
    "theoretical_occupancy",
]
