"""Exact attention whose kernels are written by hand in CUDA C++, from the first WMMA kernel on."""

from . import (
    _hook,  # noqa: F401  (registers the kernels with torch.nn.attention)
    emulator,
    reductions,
)
from ._build import BuildInfo, CompiledKernel, build_info, compiled_kernels
from ._device import DeviceFacts, device_facts
from ._explain import Explanation, explain
from ._flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ._forward import forward, forward_varlen
from ._module import MultiheadAttention
from ._occupancy import Occupancy, kernel_occupancy, theoretical_occupancy
from ._profile import Profile
from ._profiler import profile
from ._sdpa import scaled_dot_product_attention
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
    "MultiheadAttention",
    "Occupancy",
    "Profile",
    "__version__",
    "build_info",
    "compiled_kernels",
    "device_facts",
    "emulator",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "forward",
    "forward_varlen",
    "function_facts",
    "kernel_occupancy",
    "kernels",
    "profile",
    "reductions",
    "scaled_dot_product_attention",
    "theoretical_occupancy",
]
