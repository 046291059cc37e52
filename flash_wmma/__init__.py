"""Exact attention whose kernels are written by hand in CUDA C++, from the first WMMA kernel on."""

from . import _hook  # noqa: F401  (registers the kernels with torch.nn.attention)
from ._build import BuildInfo, build_info
from ._explain import DeviceFacts, Explanation, device_facts, explain
from ._flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ._forward import forward, forward_varlen
from ._sdpa import scaled_dot_product_attention
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
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "forward",
    "forward_varlen",
    "function_facts",
    "kernels",
    "scaled_dot_product_attention",
]
