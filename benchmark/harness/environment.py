"""The machine and the software that a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True)
class Environment:
    device: str
    capability: str  #: sm_90, or the CPU's vector instructions
    driver: str | None
    power_limit: str | None
    torch: str
    torch_cuda: str | None
    flash_wmma: str
    python: str
    float32_matmul_precision: str

    def lines(self) -> list[str]:
        driver = f", driver {self.driver}" if self.driver else ""
        power = f", power limit {self.power_limit}" if self.power_limit else ""
        cuda = f" (CUDA {self.torch_cuda})" if self.torch_cuda else " (no CUDA)"
        return [
            f"device    {self.device}, {self.capability}{driver}{power}",
            f"versions  flash_wmma {self.flash_wmma}, torch {self.torch}{cuda}, Python {self.python}; "
            f"float32 matmul precision of torch: {self.float32_matmul_precision}",
        ]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(library: ModuleType, device: torch.device) -> Environment:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        driver, power = _nvidia_smi(device, "driver_version", "power.limit")
        name, capability = torch.cuda.get_device_name(device), f"sm_{major}{minor}"
    else:
        driver = power = None
        name = f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads"
        capability = torch.backends.cpu.get_cpu_capability()
    return Environment(
        device=name,
        capability=capability,
        driver=driver,
        power_limit=power,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        flash_wmma=_build(library),
        python=platform.python_version(),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
    )


@dataclass(frozen=True)
class CompiledKernel:
    """The tile that a kernel takes at some lengths, and the driver's facts about its function."""

    kernel: str
    dtype: str
    tile: str | None
    lengths: list[int]
    binary_version: int | None = None
    ptx_version: int | None = None
    registers: int | None = None
    local_bytes: int | None = None

    def line(self) -> str:
        """Everything, for one length."""
        parts = [self.tile] if self.tile else []
        if self.binary_version:
            parts += [self.code, f"{self.registers} registers, {self.local_bytes} bytes of local memory a thread"]
        return f"kernel    {self.kernel}: {'; '.join(parts)}"

    @property
    def code(self) -> str:
        """Which machine code runs, and whether the driver made it from PTX."""
        jit = f" compiled at load from PTX for compute_{self.ptx_version}"
        return f"sm_{self.binary_version} code" + (jit if self.binary_version != self.ptx_version else "")


def code_lines(kernels: Sequence[CompiledKernel]) -> list[str]:
    """The kernels by their machine code, a line for each."""
    names: dict[str, dict[str, None]] = {}
    for kernel in kernels:
        if kernel.binary_version:
            names.setdefault(kernel.code, {})[kernel.kernel] = None
    return [f"kernels   {code}: {', '.join(whose)}" for code, whose in names.items()]


def compiled_kernels(
    library: ModuleType,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[CompiledKernel]:
    """What runs these (B, H, N, d) shapes: nothing for a kernel that cannot, or if this build has no CUDA kernels or
    cannot tell."""
    if _cuda_version(library) is None:
        return []  # explain() would compile every kernel for the emulator
    found: dict[tuple[str, Any], dict[int, None]] = {}
    for name in names:
        for shape in shapes:
            try:
                q = torch.empty(shape, dtype=dtype, device="meta")
                answer = library.explain(q, q, q, kernel=name, device_facts=library.device_facts(device))
            except Exception:
                continue
            if answer.kernel:
                found.setdefault((answer.kernel, answer.instance), {})[shape[2]] = None
    result = []
    for (name, instance), lengths in found.items():
        try:
            facts = library.function_facts(name, instance) if instance is not None else None
        except Exception:
            facts = None
        known = (
            {}
            if facts is None
            else {
                field: getattr(facts, field) for field in ("binary_version", "ptx_version", "registers", "local_bytes")
            }
        )
        tile = None if instance is None else str(instance)
        result.append(CompiledKernel(name, str(dtype).removeprefix("torch."), tile, list(lengths), **known))
    return [kernel for kernel in result if kernel.tile or kernel.binary_version]


def _cuda_version(library: ModuleType) -> str | None:
    try:
        version: str | None = library.build_info().cuda
    except Exception:
        return None
    return version


def _build(library: ModuleType) -> str:
    """The version, and what CUDA code was built."""
    version = getattr(library, "__version__", "of unknown version")
    try:
        build = library.build_info()
    except Exception:
        return f"{version} (build unknown)"
    return f"{version} (CUDA {build.cuda}: {' '.join(build.architectures)})" if build.cuda else f"{version} (no CUDA)"


def _nvidia_smi(device: torch.device, *fields: str) -> list[str | None]:
    """The driver's own words about one device; None if nvidia-smi is missing or silent."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    if uuid:
        command.append(f"--id=GPU-{uuid.removeprefix('GPU-')}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return [None] * len(fields)
    values = [value.strip() for value in answer.split(",")]
    return [value if value and "N/A" not in value else None for value in values]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
