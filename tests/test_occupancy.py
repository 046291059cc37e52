"""Occupancy against figures derived by hand from the limits of the CUDA C++ Programming Guide."""

from __future__ import annotations

import pytest

import flash_wmma
from flash_wmma import CompiledKernel, _build

KIB = 1024


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "smem_bytes", "blocks", "percent", "limiters"),
    [
        # V100, 96 KiB: 2 x 48 KiB fill it. 128 registers a thread are 4096 a warp, 16 warps, 4 blocks.
        (70, 128, 128, 48 * KIB, 2, 12.5, {"shared memory"}),
        (70, 128, 128, 16 * KIB, 4, 25, {"registers"}),
        # T4, 64 KiB, all of it for one block; 256 bytes more than half do not fit twice.
        (75, 128, 64, 64 * KIB, 1, 12.5, {"shared memory"}),
        (75, 128, 64, 32 * KIB, 2, 25, {"shared memory"}),
        (75, 128, 64, 32 * KIB + 1, 1, 12.5, {"shared memory"}),
        (75, 128, 64, 64 * KIB + 1, 0, 0, {"shared memory"}),
        # T4, 1024 threads: 8 x 128, which 64 registers (2048 a warp, 32 warps) and 8 KiB allow as well.
        (75, 128, 64, 8 * KIB, 8, 100, {"threads", "registers", "shared memory"}),
        (75, 32, 32, 0, 16, 50, {"blocks"}),
        # 255 registers: 8160 a warp become 8192, two warps a quarter. 9 warps would need a third in one of them.
        (75, 256, 255, 0, 1, 25, {"registers"}),
        (75, 288, 255, 0, 0, 0, {"registers"}),
        # 200 registers: 6400 a warp, two in a quarter of 16384, not 65536 // 6400 = 10 warps.
        (75, 160, 200, 0, 1, 15.625, {"registers"}),
        (75, 32, 200, 0, 8, 25, {"registers"}),
        # A100, 164 KiB with 1 KiB a block for the system: 163 KiB at most, and 2 x (81 + 1) KiB.
        (80, 128, 64, 163 * KIB, 1, 6.25, {"shared memory"}),
        (80, 128, 64, 163 * KIB + 1, 0, 0, {"shared memory"}),
        (80, 128, 64, 81 * KIB, 2, 12.5, {"shared memory"}),
        (80, 128, 64, 82 * KIB, 1, 6.25, {"shared memory"}),
        # A100, granularity: 128 bytes. 164 KiB // 17 = 9878 bytes, 9856 = 77 x 128 of them; less the reserve 8832.
        (80, 32, 32, 8832, 17, 26.5625, {"shared memory"}),
        (80, 32, 32, 8833, 16, 25, {"shared memory"}),
        # A100, 2048 threads: 2 x 1024 at 32 registers, which are all there are.
        (80, 1024, 32, 0, 2, 100, {"threads", "registers"}),
        (80, 1024, 33, 0, 1, 50, {"registers"}),
        # GA102, 1536 threads, 100 KiB, 16 blocks: one block of 1024 leaves a third idle; 99 KiB is the most.
        (86, 1024, 40, 0, 1, 100 * 32 / 48, {"threads", "registers"}),
        (86, 768, 40, 0, 2, 100, {"threads", "registers"}),
        (86, 128, 40, 0, 12, 100, {"threads", "registers"}),
        (86, 64, 40, 0, 16, 100 * 32 / 48, {"blocks"}),
        (86, 64, 40, 99 * KIB, 1, 100 * 2 / 48, {"shared memory"}),
        # AD102: as GA102 with 24 blocks.
        (89, 64, 40, 0, 24, 100, {"threads", "blocks", "registers"}),
        # H100, 228 KiB: 227 for one block, 75 KiB for three. 384 threads at 168 registers: 5376 a warp, 12 warps.
        (90, 384, 168, 227 * KIB, 1, 18.75, {"registers", "shared memory"}),
        (90, 128, 128, 75 * KIB, 3, 18.75, {"shared memory"}),
        (100, 128, 128, 75 * KIB, 3, 18.75, {"shared memory"}),
        (120, 128, 128, 49 * KIB, 2, 100 * 8 / 48, {"shared memory"}),
        (120, 1025, 32, 0, 0, 0, {"threads"}),
        (120, 32, 256, 0, 0, 0, {"registers"}),
    ],
)
def test_theoretical_occupancy(
    arch: int, threads: int, registers: int, smem_bytes: int, blocks: int, percent: float, limiters: set[str]
) -> None:
    found = flash_wmma.theoretical_occupancy(arch, threads, registers, smem_bytes)
    assert (found.blocks, found.percent, set(found.limiters)) == (blocks, pytest.approx(percent), limiters)
    assert found.warps == blocks * -(-threads // 32)


def test_text() -> None:
    assert str(flash_wmma.theoretical_occupancy(75, 128, 200, 40 * KIB)) == (
        "sm_75: 12.5 % (1 block, 4 of 32 warps), limited by shared memory"
    )
    assert str(flash_wmma.theoretical_occupancy(120, 128, None, 49 * KIB)) == (
        "sm_120: at most 16.7 % (2 blocks, 8 of 48 warps), limited by shared memory, registers unknown"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((76, 128, 64, 0), "arch: got 76, allowed: 70, 75, 80"),
        ((75, 0, 64, 0), "threads: got 0, allowed: 1 or more"),
        ((75, 128, 0, 0), "registers: got 0, allowed: 1 or more"),
        ((75, 128, 64, -1), "smem_bytes: got -1, allowed: 0 or more"),
    ],
)
def test_refusals(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_wmma.theoretical_occupancy(*arguments)


@pytest.mark.parametrize(
    ("function", "arch", "registers", "blocks"),
    [
        ("wmma", 75, 200, 2),
        ("wmma", 80, 100, 4),  # 3200 registers a warp, 5 a quarter, 20; 32 KiB + 1 KiB fit 4 times
        ("wmma", 86, 100, 3),  # sm_80's code, less shared memory
        ("wmma", 90, None, 6),  # runs from PTX
        ("wgmma", 90, 168, 3),
        ("wgmma", 100, None, 6),  # does not run at all
        ("none", 75, None, 2),
    ],
)
def test_kernel_occupancy(
    monkeypatch: pytest.MonkeyPatch, function: str, arch: int, registers: int | None, blocks: int
) -> None:
    def compiled(registers: int) -> CompiledKernel:
        return CompiledKernel(registers, 0, 0, 0, static_smem_bytes=16 * KIB)

    table = {"wmma": {"sm_75": compiled(200), "sm_80": compiled(100)}, "wgmma": {"sm_90a": compiled(168)}}
    monkeypatch.setattr(_build, "compiled_kernels", lambda: table)
    found = flash_wmma.kernel_occupancy(function, arch, 128, 16 * KIB if registers else 32 * KIB)
    assert (found.registers, found.smem_bytes, found.blocks) == (registers, 32 * KIB, blocks)
    assert ("registers unknown" in found.limiters) == (registers is None)


def test_kernels_of_this_build() -> None:
    table = flash_wmma.compiled_kernels()
    assert bool(table) == (flash_wmma.build_info().cuda is not None)
    for name, codes in table.items():
        for code, kernel in codes.items():
            arch = int(code.removeprefix("sm_").removesuffix("a"))
            found = flash_wmma.kernel_occupancy(name, arch, 32, 0)
            assert found.registers == kernel.registers
            assert found.blocks > 0
