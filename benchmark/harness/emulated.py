"""The CUDA kernels in the emulator, at a small N: are they right, and how do they treat memory? For machines without a
GPU; flash_wmma.profile has these figures, and more, by source line. Time in the emulator says nothing about a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from .accuracy import Judge
from .contenders import emulated_kernels, flash_wmma_kernel
from .problems import mark
from .report import ABSENT, Table, wrapped

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
    mma: int | None = None  #: tensor-core instructions; None: unknown, since cuBLAS multiplies
    wavefronts: int = 0  #: of shared memory
    bank_conflicts: int = 0
    load_sectors_per_request: float = 0.0  #: of global memory, asynchronous copies included
    store_sectors_per_request: float = 0.0
    traffic: float | None = None  #: bytes moved over those of q, k, v, out and lse moved once; None: unknown
    reason: str | None = None

    @property
    def uncounted(self) -> bool:
        """Whether it left products to cuBLAS, so that its counts are those of the rest."""
        return self.error is not None and self.traffic is None

    @property
    def cells(self) -> list[str]:
        """The cells of its row."""
        if self.error is None:
            return [self.kernel, *[ABSENT] * 6, mark(self)]
        share = self.bank_conflicts / self.wavefronts if self.wavefronts else 0.0
        return [
            self.kernel,
            ABSENT if self.mma is None else f"{self.mma:,}",
            f"{self.bank_conflicts:,}",
            f"{share:.0%}",
            f"{self.load_sectors_per_request:.1f}",
            f"{self.store_sectors_per_request:.1f}",
            ABSENT if self.traffic is None else f"{self.traffic:.1f}x",
            mark(self),
        ]


def obstacle(library: ModuleType) -> str | None:
    """Why nothing can be emulated here, in one line."""
    if not emulated_kernels(library, CPU):
        return "this installation has no kernel sources"
    try:
        library.emulator.compiler()
    except library.emulator.EmulatorError as error:
        return str(error)
    return None


def emulate(
    library: ModuleType,
    names: Sequence[str],
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    seed: int,
    on_kernel: Callable[[str], None] = lambda name: None,
) -> Iterator[Emulated]:
    """Runs these kernels, checked, on the same inputs. `on_kernel` is called before each."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, LENGTH, head_dim, generator=generator).to(dtype) for _ in "qkv")
    judge = Judge(q, k, v, causal)
    for kernel in (flash_wmma_kernel(library, name, CPU) for name in names):
        on_kernel(kernel.name)
        try:
            with library.emulator.settings(mode="checked"):
                out = kernel.attend(q, k, v, causal)
            profile = library.profile(q, k, v, kernel=kernel.name, causal=causal)
        except Exception as error:
            refused = isinstance(error, ValueError | TypeError | NotImplementedError)
            yield Emulated(kernel.name, right=None if refused else False, reason=str(error).splitlines()[0])
            continue
        found = judge.judge(out, kernel.multiplied(dtype))
        counts = profile.counts
        loads = counts.global_memory["load"] + counts.global_memory["async_copy"]
        moved = profile.read_bytes, profile.written_bytes
        ideal = profile.ideal_read_bytes + profile.ideal_written_bytes
        yield Emulated(
            kernel=kernel.name,
            error=found.error,
            plain_error=found.plain_error,
            allclose=found.allclose,
            right=found.right,
            mma=None if profile.products else counts.mma,
            wavefronts=counts.shared.wavefronts,
            bank_conflicts=counts.bank_conflicts,
            load_sectors_per_request=loads.sectors_per_request,
            store_sectors_per_request=counts.global_memory["store"].sectors_per_request,
            traffic=None if None in moved else sum(moved) / ideal,
        )


def print_emulated(rows: Sequence[Emulated], head_dim: int, dtype: str, causal: bool, arch: int) -> None:
    """The table, what its columns mean, and why kernels did not run."""
    table = Table(
        f"CUDA kernels in the emulator, as on sm_{arch}: B=1 H=1 N={LENGTH} d={head_dim}, {dtype} inputs"
        f"{', causal' if causal else ''}",
        ["kernel", "mma", "bank conflicts", "of wavefronts", "sectors/load", "sectors/store", "traffic", "check"],
        [row.cells for row in rows],
    )
    lines = [
        "bank conflicts: wavefronts (passes over shared memory) beyond the least",
        "sectors: of 32 bytes, per request; traffic: bytes to and from global memory, without caches,",
        "over those of q, k, v, out and lse moved once; check: as above, no race, no access out of bounds",
        *(f"{ABSENT} {row.kernel}: {row.reason}" for row in rows if row.reason),
        *(f"{ABSENT} {row.kernel}: cuBLAS's products are not counted" for row in rows if row.uncounted),
        "python -m flash_wmma profile --kernel NAME shows a kernel line by line",
    ]
    print(table.text(), "", *map(wrapped, lines), sep="\n", flush=True)
