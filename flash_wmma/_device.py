"""The facts of a device that the choice of a kernel depends on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._errors import refuse
from ._native import native


@dataclass(frozen=True)
class DeviceFacts:
    """What the choice of a kernel may depend on."""

    arch: int
    """Compute capability, 10 * major + minor: 90 for 9.0. 0 stands for the CPU."""
    sm_count: int = 0
    """Multiprocessors."""
    smem_optin: int = 0
    """Bytes of shared memory that a block may opt in to."""
    warp_size: int = 32
    memory_bus: int = 0
    """Bits of the bus to memory, by which cards of one architecture differ: 5120 on an H100, 6016 on an H200. 0: not
    known."""

    def __str__(self) -> str:
        if not self.arch:
            return "CPU"
        return f"sm_{self.arch}, {self.sm_count} multiprocessors, {self.smem_optin} bytes of shared memory a block"


def device_facts(device: torch.device | str | int = "cuda") -> DeviceFacts:
    """The facts of a CUDA device, or of the CPU.

    Raises:
        ValueError: the device is neither.
        RuntimeError: no CUDA kernels in this build, or CUDA reports an error.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return DeviceFacts(arch=0, warp_size=0)
    if device.type != "cuda":
        refuse("device", device, "cpu, cuda")
    index = torch.cuda.current_device() if device.index is None else device.index
    return DeviceFacts(*native().device_facts(index))
