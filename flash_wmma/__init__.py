"""Exact attention whose kernels are written by hand in CUDA C++, from the first WMMA kernel on."""

from ._build import BuildInfo, build_info
from ._explain import DeviceFacts, Explanation, device_facts, explain
from ._forward import forward
from ._table import FunctionFacts, Instance, Kernel, function_facts, kernels
from ._version import __version__

__all__ = [
    "BuildInfo",
    "DeviceFacts",
    "Explanation",
    "FunctionFacts",
    "Instance",
    "Kernel",
    "__version__",
    "build_info",
    "device_facts",
    "explain",
    "forward",
    "function_facts",
    "kernels",
]
