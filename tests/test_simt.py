"""The ladder on CUDA cores: what each rung is there to show, as the emulator counts it; wavefronts of 64 lanes."""

from __future__ import annotations

import pytest
import torch
from conftest import emulated_kernel, on_gpu
from reference import Mask, check, normal, reference, run

import flash_wmma
from flash_wmma import _sdpa
from flash_wmma._figures import Counts
from flash_wmma.emulator import settings

pytestmark = pytest.mark.skipif(on_gpu(), reason="the emulator counts them")


def counts(kernel: str, n: int = 64) -> Counts:
    q, k, v = (normal((1, 1, n, 64), seed=s) for s in (1, 2, 3))
    return flash_wmma.profile(q, k, v, kernel=kernel).counts


def test_coalescing() -> None:
    naive, coalesced = (counts(f"simt_{name}", 33).global_memory["load"] for name in ("naive", "coalesced"))
    assert coalesced.coalescing > 0.95
    assert naive.coalescing < 0.25


def test_padding_ends_bank_conflicts() -> None:
    shared, padded, simt = (counts(f"simt{name}") for name in ("_shared", "_padded", ""))
    assert shared.shared_memory["load"].bank_conflicts == 31 * 64 * 64 * 64 // 32  # 32 rows of K in one bank
    assert padded.bank_conflicts == 0
    assert simt.bank_conflicts == 0
    assert simt.shared.requests < padded.shared.requests / 10


def test_output_in_registers_is_written_once() -> None:
    once, each_tile, outer = (counts(f"simt_{name}") for name in ("registers", "occupancy", "fa1"))
    assert once.written_bytes == 4 * 64 * (64 + 8)  # O, and a sector for every row's lse
    assert each_tile.written_bytes > 2 * once.written_bytes
    assert outer.written_bytes > each_tile.written_bytes


RUNGS = ("naive", "coalesced", "block", "shared", "padded", "occupancy", "registers", "fa1")


@pytest.mark.parametrize("name", [*(f"simt_{rung}" for rung in RUNGS), "simt"])
def test_wavefront_of_64(name: str) -> None:
    """Lanes of an AMD GPU: rows of 64 keys, and narrower ones whose shuffles stay within them."""
    q, k, v = (normal((1, h, n, 64), seed=n) for h, n in ((2, 50), (1, 70), (1, 71)))
    v = v[:, :, :70]
    kernel = next(emulated_kernel(kernel) for kernel in flash_wmma.kernels() if kernel.name == name)
    mask = Mask("bottom_right")
    with settings(mode="checked", warp_size=64):
        check(*run(kernel, q, k, v, mask), reference(kernel, q, k, v, mask))


def test_the_drop_in_multiplies_float32_as_such() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert _sdpa.kernel_for("cuda", torch.float32) == "simt"
        assert _sdpa.kernel_for("cuda", torch.float16) == _sdpa.kernel_for("cpu", torch.float32) == "auto"
        torch.set_float32_matmul_precision("high")
        assert _sdpa.kernel_for("cuda", torch.float32) == "auto"
    finally:
        torch.set_float32_matmul_precision(before)
