"""Tile shapes that do not ship: P of wmma_v3 handed over through shared memory, as on hardware whose fragments are
laid out otherwise, and other paddings and warps."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch
from programs import FOLDER
from reference import Mask, Modification, attention

import flash_wmma
from flash_wmma.emulator import Program

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))
import tiles
from harness import rungs

SHAPES = [
    tiles.WmmaShape(32, 4, 1, True, 2, handover="Shared"),
    tiles.WmmaShape(64, 2, 2, False, 1, handover="Shared"),
    tiles.WmmaShape(16, 1, 1, True, 1, pad=0),
    tiles.WmmaShape(64, 8, 1, False, 1, pad=24),
    tiles.MmaShape(32, 2, 2, 1, 2, 1, 2),
    tiles.MmaShape(16, 4, 1, 2, 3, 0, 1),
    tiles.MmaShape(32, 2, 2, 1, 2, 2, 2, "Sm75"),
    tiles.MmaShape(64, 1, 1, 1, 1, 4, 1, "Sm75"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tiles.Library:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if tiles.find_nvcc() is None:
        pytest.skip("no nvcc")
    path = tmp_path_factory.mktemp("tiles") / "tiles.so"
    major, minor = torch.cuda.get_device_capability()
    tiles.build(path, 64, SHAPES, f"sm_{major}{minor}")
    return tiles.Library(path)


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(SHAPES)), ids=[str(shape) for shape in SHAPES])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("nq", "nk", "head_dim"), [(1, 1, 64), (100, 255, 64), (257, 100, 40), (300, 300, 64)])
def test_shape(library: tiles.Library, index: int, causal: bool, nq: int, nk: int, head_dim: int) -> None:
    q = torch.randn(2, 4, nq, head_dim, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(2, 2, nk, head_dim, device="cuda", dtype=torch.float16) for _ in range(2))
    k *= torch.linspace(0.5, 20, nk, device="cuda")[:, None].half()  # defeats the lagged maximum
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device="cuda")
    library.forward(index, q, k, v, out, lse, causal)

    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / head_dim**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(nq, nk, device="cuda").triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ v.double().repeat_interleave(2, 1)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=4e-3)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-3)


def opaque(entry: str, nq: int, nk: int, *more: torch.Tensor | int | float) -> list[torch.Tensor]:
    """q, k, v, o and lse of wmma_v3 through shared memory, emulated."""
    generator = torch.Generator().manual_seed(nq)
    q, k, v = (torch.randn(1, h, n, 64, generator=generator).half() for h, n in ((2, nq), (1, nk), (1, nk)))
    k *= torch.linspace(0.5, 3, nk)[:, None].half()
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
    Program(FOLDER / "wmma_v3_opaque.cu").call(entry, q, k, v, out, lse, 2, 1, nq, nk, *more)
    return [q, k, v, out, lse]


def close(out: torch.Tensor, lse: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(out.double(), expected[0], rtol=2e-3, atol=4e-3)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (70, 100)])
def test_opaque_route_of_wmma_v3(nq: int, nk: int) -> None:
    q, k, v, out, lse = opaque("causal", nq, nk)
    close(out, lse, attention(q.double(), k.double(), v.double(), Mask("bottom_right")))


def test_opaque_route_of_wmma_v3_with_everything() -> None:
    """Packed sequences, bias, ALiBi and softcap at once."""
    lengths = ((5, 0, 70, 1), (9, 4, 100, 0))
    cu = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in lengths]
    longest = [max(n) for n in lengths]
    bias = torch.randn(2, *longest, generator=torch.Generator().manual_seed(0)).half()
    slopes = torch.tensor([0.5, 0.125])
    q, k, v, out, lse = opaque("general", sum(lengths[0]), sum(lengths[1]), *cu, 4, *longest, bias, slopes, 3.0)
    for b, (nq, nk) in enumerate(zip(*lengths, strict=True)):
        rows, keys = (slice(int(c[b]), int(c[b + 1])) for c in cu)
        one = [t[:, :, s].double() for t, s in ((q, rows), (k, keys), (v, keys))]
        modification = Modification(bias[None, :, :nq, :nk].double(), slopes, softcap=3.0)
        close(out[:, :, rows], lse[:, :, rows], attention(*one, Mask("bottom_right"), None, modification))


def test_opaque_route_of_wmma_v3_with_dropout() -> None:
    state, p = torch.tensor([5, 7]), 0.3
    q, k, v, out, lse = opaque("dropped", 70, 100, state, p)
    rows = [t.double() for t in (q, k, v)]
    options = {"causal": "bottom_right", "dropout_p": p, "rng_state": state, "return_lse": True, "kernel": "math"}
    close(out, lse, flash_wmma.forward(*rows, **options))


@pytest.mark.parametrize("swept", tiles.SWEEPS)
def test_every_sweep_has_shapes(swept: str) -> None:
    for head_dim in (64, 128, 256) if swept == "simt" else (32, 64, 96, 128, 192, 256):
        found = list(tiles.SWEEPS[swept](head_dim))
        assert len(found) == len(set(found)) > 4


def test_rungs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU: counters of the emulator; 16 keys are two rows a warp, whose words of Q lie in one bank."""
    monkeypatch.setattr(rungs, "FOLDER", tmp_path)
    monkeypatch.setattr(rungs, "pairs", lambda warp_size: [(4, 16), (4, 32)])
    parser = argparse.ArgumentParser()
    rungs.add_arguments(parser)
    args = parser.parse_args(["--seq-len", "40", "--plot", f"{tmp_path}/rungs.png", "--json", f"{tmp_path}/rungs.json"])
    narrow, wide = rows = rungs.emulated(args)
    assert narrow.bank_conflicts > wide.bank_conflicts == 0
    assert (narrow.br, narrow.bc, narrow.us) == (4, 16, None)
    assert wide.limiter == "shared memory, registers unknown"
    assert "| Br | Bc | occupancy % |" in rungs.table(rows)
    rungs.report(rows, {}, "here", args)
    assert (tmp_path / "rungs.png").stat().st_size > 10_000
    assert [row["bc"] for row in json.loads((tmp_path / "rungs.json").read_text())["rows"]] == [16, 32]


def test_rungs_as_ncu_saw_them() -> None:
    lines = ['"ID","Kernel Name","Metric Name","Metric Value"']
    for launch in range(len(rungs.pairs(32))):
        lines += [f'"{launch}","shared","{metric}","1,000"' for metric in rungs.METRICS.values()]
    args = argparse.Namespace(arch=90, registers=48, head_dim=64)
    row = rungs.rows_of("\n".join(lines), args)[-1]
    assert (row.br, row.bc, row.us, row.flops, row.global_bytes) == (32, 32, 1.0, 4000, 64_000)
    assert row.per_second(row.global_bytes) == 64_000 * 1e6
    assert rungs.suggested_keys(64, 256 * 64) == 64
