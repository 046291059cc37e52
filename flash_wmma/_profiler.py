"""Profiles of the library's own kernels."""

from __future__ import annotations

from torch import Tensor

from . import _checks
from ._attention import attend
from ._call import Causal, Window, call_of
from ._errors import EmulatorError, refuse
from ._figures import launches_of
from ._library import library
from ._profile import Profile
from ._sources import CSRC, kernel_sources
from .emulator import settings
from .emulator._runtime import alone, take_profile


def profile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel: str,
    arch: int | None = None,
    seed: int | None = None,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Profile:
    """Runs a CUDA kernel's own source on the CPU, checked, and counts what a profiler would: requests, bank conflicts,
    sectors, tensor-core instructions, divergence, in total and by source line.

    Needs g++, no GPU and no CUDA toolkit. The first call compiles the kernel, which takes seconds. Work grows with
    B H N², so small inputs are the thing to profile: B = H = 1 and N = 1024 take about a second.

    >>> q, k, v = torch.randn(3, 1, 1, 64, 64).half()
    >>> result = flash_wmma.profile(q, k, v, kernel="wmma_v2")
    >>> print(result)
    >>> result.counts.shared_memory["ldmatrix"].bank_conflicts
    4224
    >>> result.plot_banks(line="wmma_v2.cu:116", path="banks.png")

    Args:
        q, k, v, causal, scale, window, attn_bias, alibi_slopes, key_ranges, softcap, sinks: as
            :func:`flash_wmma.forward` takes them. Tensors on a GPU are copied to the CPU; nothing runs on the GPU.
        kernel: the name of a CUDA kernel.
        arch: architecture that the kernel chooses its tile for, and that the occupancy is of, 10 * major + minor: 75
            for 7.5. ``None``: that of :func:`flash_wmma.emulator.settings`, 90 unless they say otherwise.
        seed: of the order in which warps run; ``None``: that of :func:`flash_wmma.emulator.settings`.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flash_wmma.forward`; or no CUDA kernel has that name.
        EmulatorError: there is no g++, or the emulator found the kernel at fault.
    """
    call = call_of(causal, scale, window, attn_bias, alibi_slopes, softcap, kernel, key_ranges=key_ranges, sinks=sinks)
    _checks.tensors(q=q, k=k, v=v)
    _checks.call_tensors(q, k, v, call)
    if q.device.type not in ("cpu", "cuda"):
        refuse("q.device", q.device, "cpu, cuda")
    if not kernel_sources("forward"):
        raise EmulatorError(f"no CUDA kernel can run on the CPU: this installation has no kernel sources in {CSRC}")
    if isinstance(kernel, str) and kernel not in kernel_sources("forward"):
        refuse("kernel", repr(kernel), ", ".join(map(repr, kernel_sources("forward"))))
    _checks.options(call)
    q, k, v = tensors = [t.cpu() if t.device.type == "cuda" else t for t in (q, k, v)]
    changes = {name: value for name, value in (("arch", arch), ("seed", seed)) if value is not None}
    with alone(), settings(mode="checked", counters=True, **changes) as now:
        take_profile()  # of whatever ran before
        before = library.flash_wmma_emulated_products()
        out, lse = attend(q, k, v, call)
        text, products = take_profile(), library.flash_wmma_emulated_products() - before
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip("qkv", tensors, strict=True))
    return Profile(
        kernel=kernel,
        inputs=f"{shapes}, {str(q.dtype).removeprefix('torch.')}",
        arch=now.arch,
        launches=launches_of(text, now.arch, CSRC.parent),
        ideal_read_bytes=sum(t.nbytes for t in tensors),
        ideal_written_bytes=out.nbytes + lse.nbytes,
        products=products,
    )
