"""Exact attention, softmax(q kᵀ · scale + mask) v, as PyTorch ops with gradients.

The kernels are written by hand in CUDA C++: a ladder from a naive kernel on CUDA cores through WMMA and mma.sync to
Hopper's wgmma, and the same for backward. CPU tensors have a kernel of their own, and run any CUDA kernel that is named
in the emulator.

- :func:`forward`, :func:`forward_varlen`, :class:`MultiheadAttention`: attention; :func:`document_ranges`.
- :func:`forward_cached`, :func:`append_kv`: attention with a key/value cache, paged or not.
- :func:`scaled_dot_product_attention`, :func:`flash_attn_func` and its relatives: in place of torch's and flash-attn's.
- :func:`explain`, :func:`kernels`, :func:`build_info`: which kernel runs, and what was built.
- :func:`profile`, :mod:`emulator`: a profiler and a test bench for kernels, without a GPU.
- :mod:`reductions`: maxima, sums and softmax.
- :mod:`distributed`: attention over sequences that several GPUs hold.

What attention does not need is imported when it is first used: profiles, reductions, the ranks.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import (
    _hook,  # noqa: F401  (registers the kernels with torch.nn.attention)
    emulator,
)
from ._build import BuildInfo, CompiledKernel, build_info, compiled_kernels
from ._cached import append_kv, forward_cached
from ._device import DeviceFacts, device_facts
from ._documents import document_ranges
from ._dropout import dropout_mask
from ._explain import Explanation, explain
from ._flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from ._forward import forward, forward_varlen
from ._module import MultiheadAttention
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
    "append_kv",
    "build_info",
    "compiled_kernels",
    "device_facts",
    "distributed",
    "document_ranges",
    "dropout_mask",
    "emulator",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "forward",
    "forward_cached",
    "forward_varlen",
    "function_facts",
    "kernel_occupancy",
    "kernels",
    "profile",
    "reductions",
    "scaled_dot_product_attention",
    "theoretical_occupancy",
]


def __dir__() -> list[str]:
    return sorted(__all__)


if _TYPE_CHECKING:
    from . import distributed, reductions
    from ._occupancy import Occupancy, kernel_occupancy, theoretical_occupancy
    from ._profile import Profile
    from ._profiler import profile
else:
    _LATER = {
        "Occupancy": "_occupancy",
        "Profile": "_profile",
        "kernel_occupancy": "_occupancy",
        "profile": "_profiler",
        "theoretical_occupancy": "_occupancy",
    }
    """The module of each name that is imported when it is first used."""

    def __getattr__(name: str) -> object:
        if name in ("distributed", "reductions"):
            return _import_module(f".{name}", __name__)
        if name not in _LATER:
            raise AttributeError(f"module 'flash_wmma' has no attribute {name!r}")
        value = getattr(_import_module(f".{_LATER[name]}", __name__), name)
        globals()[name] = value
        return value
