"""The CUDA kernels in the emulator, at a small N: are they right, and how do they treat memory? For machines without a
GPU; flash_wmma.profile has these figures, and more, by source line. Time in the emulator says nothing about a GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from .accuracy import ALLCLOSE_ATOL, Judge
from .contenders import flash_wmma_kernel
from .report import ABSENT, Table

LENGTH = 64
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Emulated:
    """One kernel. If `error` is None, the kernel did not run, and `reason` says why."""

    kernel: str
    error: float | None = None  #: against float64 attention, normalised per head
    plain_error: float | None = None  #: the same of plain PyTorch attention in the multiplied type
    allclose: bool | None = None
    right: bool | None = None
    mma: int = 0  #: tensor-core instructions
    wavefronts: int = 0  #: of shared memory
    bank_conflicts: int = 0
    load_sectors_per_request: float = 0.0  #: of global memory, asynchronous copies included
    store_sectors_per_request: float = 0.0
    traffic: float = 0.0  #: bytes read and written over those of q, k, v, out and lse, each moved once
    reason: str | None = None

    @property
    def cells(self) -> list[str]:
        """The cells of its row."""
        if self.error is None or self.plain_error is None:
            return [self.kernel, "WRONG" if self.right is False else ABSENT, *[ABSENT] * 6]
        mark = "WRONG" if not self.right else "ok" if self.allclose else "right"
        share = self.bank_conflicts / self.wavefronts if self.wavefronts else 0.0
        return [
            self.kernel,
            f"{self.error:.1e} {self.error / max(self.plain_error, 1e-30):.1f}x {mark}",
            f"{self.mma:,}",
            f"{self.bank_conflicts:,}",
            f"{share:.0%}",
            f"{self.load_sectors_per_request:.1f}",
            f"{self.store_sectors_per_request:.1f}",
            f"{self.traffic:.1f}x",
        ]


def kernel_names(library: ModuleType) -> list[str]:
    """The kernels whose sources the emulator has."""
    emulator = getattr(library, "emulator", None)
    return list(emulator.kernel_sources("forward")) if emulator else []


def obstacle(library: ModuleType) -> str | None:
    """Why nothing can be emulated here, in one line."""
    if not kernel_names(library):
        return "this installation has no kernel sources"
    try:
        library.emulator.compiler()
    except library.emulator.EmulatorError as error:
        return str(error)
    return None


def emulate(
    library: ModuleType, names: Sequence[str], head_dim: int, dtype: torch.dtype, causal: bool, seed: int
) -> list[Emulated]:
    """Runs these kernels, checked, on the same inputs."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, LENGTH, head_dim, generator=generator).to(dtype) for _ in "qkv")
    judge = Judge(q, k, v, causal)
    rows = []
    for kernel in (flash_wmma_kernel(library, name, CPU) for name in names):
        try:
            with library.emulator.settings(mode="checked"):
                out = kernel.attend(q, k, v, causal)
            profile = library.profile(q, k, v, kernel=kernel.name, causal=causal)
        except Exception as error:
            refused = isinstance(error, ValueError | TypeError | NotImplementedError)
            rows.append(Emulated(kernel.name, right=None if refused else False, reason=str(error).splitlines()[0]))
            continue
        found = judge.judge(out, kernel.multiplied(dtype))
        counts = profile.counts
        loads = counts.global_memory["load"] + counts.global_memory["async_copy"]
        moved = counts.read_bytes + counts.written_bytes
        rows.append(
            Emulated(
                kernel=kernel.name,
                error=found.error,
                plain_error=found.plain_error,
                allclose=found.allclose,
                right=found.right,
                mma=counts.mma,
                wavefronts=counts.shared.wavefronts,
                bank_conflicts=counts.bank_conflicts,
                load_sectors_per_request=loads.sectors_per_request,
                store_sectors_per_request=counts.global_memory["store"].sectors_per_request,
                traffic=moved / (profile.ideal_read_bytes + profile.ideal_written_bytes),
            )
        )
    return rows


def print_emulated(rows: Sequence[Emulated], head_dim: int, dtype: str, causal: bool, arch: int) -> None:
    """The table, what its columns mean, and why kernels did not run."""
    Table(
        f"CUDA kernels in the emulator, as on sm_{arch}: B=1 H=1 N={LENGTH} d={head_dim}, {dtype} inputs"
        f"{', causal' if causal else ''}",
        ["kernel", "error", "mma", "bank conflicts", "of wavefronts", "sectors/load", "sectors/store", "traffic"],
        [row.cells for row in rows],
    ).print()
    lines = [
        f"error: as the check above says; ok: allclose(atol={ALLCLOSE_ATOL:g}) too; no race, no access out of bounds",
        "bank conflicts: wavefronts (passes over shared memory) beyond the least; sectors: of 32 bytes, a request",
        "traffic: bytes to and from global memory, without caches, over those of q, k, v, out and lse moved once",
        *(f"{ABSENT} {row.kernel}: {row.reason}" for row in rows if row.reason),
        "python -m flash_wmma profile --kernel NAME shows a kernel line by line",
    ]
    print("\n".join(lines), flush=True)
