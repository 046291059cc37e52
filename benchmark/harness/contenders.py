"""What the benchmark compares: the kernels of flash_wmma, the backends of SDPA, and other libraries if installed."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]

SDPA = "sdpa"
SDPA_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
UNITS = {  # each kernel in the order of the course, and the instruction that multiplies in it
    "cpu": None,
    "simt_naive": "FFMA",
    "simt_coalesced": "FFMA",
    "simt_block": "FFMA",
    "simt_shared": "FFMA",
    "simt_padded": "FFMA",
    "simt_occupancy": "FFMA",
    "simt_registers": "FFMA",
    "simt_fa1": "FFMA",
    "simt": "FFMA",
    "unfused": None,
    "wmma_v1": "mma m16n8k16",
    "wmma_v2": "mma m16n8k16",
    "wmma_v3": "mma m16n8k16",
    "mma_sm75": "mma m16n8k8",
    "mma_sm80": "mma m16n8k16",
    "wgmma_sm90": "wgmma",
}
CPU_KERNELS = ("cpu",)
#: Tried without the compiled module `_C`, since the library then cannot list its kernels.
USUAL_KERNELS = ("wmma_v1", "wmma_v2", "wmma_v3")
AUTO = "auto"


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention on (B, H, N, d) tensors. `attend` and `choice` take q, k, v and causal."""

    name: str
    family: Literal["flash_wmma", "sdpa", "other"]
    attend: Attention
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    half_operands: bool = False  #: whether it multiplies fp16 numbers even if its inputs are fp32
    choice: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], str | None] | None = None
    """What it calls, if that depends on the inputs: a kernel, or a backend of SDPA."""

    @property
    def ours(self) -> bool:
        return self.family == "flash_wmma"

    def multiplied(self, dtype: torch.dtype) -> torch.dtype:
        """The type of the numbers that this implementation multiplies, for inputs of type `dtype`."""
        return torch.float16 if self.half_operands and dtype == torch.float32 else dtype


class UnknownName(ValueError):
    """The name of a contender that does not exist."""


def flash_wmma_kernels(library: ModuleType, device: torch.device, names: Sequence[str] | None) -> list[Implementation]:
    """The kernels named: of the device's kernels, or ``"auto"``, or ``"all"`` for both. Default: ``"auto"`` and the
    kernels on tensor cores; on the CPU ``"auto"`` alone. A CUDA kernel may be named on the CPU. Nothing is compiled for
    the emulator."""
    known = list(CPU_KERNELS) if device.type == "cpu" else in_order(_cuda_kernels(library))
    if names is None:
        names = [AUTO, *(name for name in known if device.type == "cuda" and on_tensor_cores(name))]
    elif "all" in names:
        names = [AUTO, *known]
    allowed = [AUTO, *known, *emulated_kernels(library, device)]
    for name in names:
        if name not in allowed:
            raise UnknownName(f"kernel {name!r}: allowed are 'all', {', '.join(map(repr, allowed))}")
    return [flash_wmma_kernel(library, name, device) for name in names]


def emulated_kernels(library: ModuleType, device: torch.device) -> list[str]:
    """The CUDA kernels that such a device runs in the emulator, in the order of the ladder."""
    emulator = getattr(library, "emulator", None)
    return in_order(emulator.kernel_sources("forward")) if emulator and device.type == "cpu" else []


def on_tensor_cores(name: str) -> bool:
    """Whether a kernel multiplies fp16 or bf16 numbers alone. CUDA cores, the CPU and cuBLAS multiply fp32 too."""
    return not name.startswith(("cpu", "simt", "unfused"))


def in_order(names: Iterable[str]) -> list[str]:
    """Names of kernels in the order of the ladder, then those that are no rungs yet."""
    listed = list(names)
    return [name for name in UNITS if name in listed] + [name for name in listed if name not in UNITS]


def peers(device: torch.device, names: Sequence[str] | None) -> list[Implementation]:
    """SDPA's default choice, each of its backends, and other libraries that can be imported. SDPA always leads."""
    found = [*_sdpa(), *(_other_libraries() if device.type == "cuda" else ())]
    if names is None:
        return found
    allowed = [p.name for p in found]
    for name in names:
        if name not in allowed:
            raise UnknownName(f"peer {name!r}: allowed are {', '.join(map(repr, allowed))}")
    return [p for p in found if p.name == SDPA or p.name in names]


def listed_kernels(library: ModuleType) -> list[Any]:
    """flash_wmma.kernels(), or nothing if this build cannot tell."""
    try:
        return list(library.kernels())
    except Exception:
        return []


def sdpa_choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> str | None:
    """The backend that SDPA's default takes, if this torch says so."""
    try:
        number = torch._fused_sdp_choice(q, k, v, None, 0.0, causal)
        return next(name for name, backend in SDPA_BACKENDS.items() if backend.value == number)
    except Exception:
        return None


def why_not(implementation: Implementation, error: Exception, inputs: Sequence[torch.Tensor], causal: bool) -> str:
    """Why `implementation` does not run, in one line. SDPA gives its reasons as warnings, so it is called again."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    if implementation.family == "sdpa":
        return "; ".join(_sdpa_reasons(implementation, inputs, causal)) or "not available here for such inputs"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def flash_wmma_kernel(library: ModuleType, name: str, device: torch.device) -> Implementation:
    """The kernel of that name, whether or not it is listed."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        out: torch.Tensor = library.forward(q, k, v, causal=causal, kernel=name)
        return out

    def choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> str | None:
        if device.type == "cpu":
            return CPU_KERNELS[0]  # explain() could compile every kernel for the emulator to say so
        try:
            chosen: str | None = library.explain(q, k, v, causal=causal).kernel
        except Exception:  # without `_C` nobody can tell
            return None
        return chosen

    if name == AUTO:
        return Implementation(name, "flash_wmma", attend, half_operands=device.type == "cuda", choice=choice)
    return Implementation(name, "flash_wmma", attend, half_operands=on_tensor_cores(name))


def _cuda_kernels(library: ModuleType) -> Sequence[str]:
    listed = listed_kernels(library)
    return [kernel.name for kernel in listed if kernel.device == "cuda"] if listed else USUAL_KERNELS


def _sdpa() -> Iterator[Implementation]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    yield Implementation(SDPA, "sdpa", attend, choice=sdpa_choice)
    for name, backend in SDPA_BACKENDS.items():
        yield Implementation(name, "sdpa", attend, context=partial(sdpa_kernel, backend))


def _sdpa_reasons(implementation: Implementation, inputs: Sequence[torch.Tensor], causal: bool) -> list[str]:
    q, k, v = inputs
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with implementation.context():
                implementation.attend(q, k, v, causal)
        except Exception:
            pass
    texts = [str(w.message).split(" (Triggered internally")[0].strip() for w in caught]
    # "X not used because:" introduces the reasons; "... has been runtime disabled" only repeats the choice by name.
    return [t for t in dict.fromkeys(texts) if not t.endswith("because:") and "runtime disabled" not in t]


def _other_libraries() -> Iterator[Implementation]:
    """flash-attn 2, 3 and 4 and xformers: (B, N, H, d) layout, so they are given transposed views."""
    for name, module, function in (
        ("flash_attn", "flash_attn", "flash_attn_func"),
        ("flash_attn_3", "flash_attn_interface", "flash_attn_func"),
        ("flash_attn_4", "flash_attn.cute", "flash_attn_func"),
    ):
        call = _imported(module, function)
        if call:
            yield Implementation(name, "other", _transposed(_with_causal(call)))
    ops = _imported("xformers", "ops")
    if ops:

        def xformers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
            return ops.memory_efficient_attention(q, k, v, attn_bias=ops.LowerTriangularMask() if causal else None)

        yield Implementation("xformers", "other", _transposed(xformers))


def _imported(module: str, attribute: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception:  # a broken installation is the same as none
        try:
            return importlib.import_module(f"{module}.{attribute}")
        except Exception:
            return None


def _with_causal(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, causal: call(q, k, v, causal=causal)


def _transposed(call: Callable[..., Any]) -> Attention:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        out = call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal)
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first.transpose(1, 2)

    return attend
