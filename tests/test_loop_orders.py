"""The traffic of backward's loop orders: what the emulator counts is what the documentation derives."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))
loop_orders = importlib.import_module("loop_orders")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_counts() -> None:
    n, d = 256, 64
    fused, split = (
        {
            loop_orders.row("", launch, n, d)[1]: launch
            for launch in loop_orders.launches("bwd_sm80", n, d, 90, deterministic)
        }
        for deterministic in (False, True)
    )
    assert list(fused) == ["prepare", "fused", "finish"]
    assert list(split) == ["prepare", "keys", "queries"]
    for name, launch in {**fused, **split}.items():
        counts, rows = launch.counts, n // launch.grid[0]
        added = 4 * n * n * d // rows if name == "fused" else 0
        assert 128 * counts.instructions.get("atomic", 0) == added
        if name in ("fused", "keys", "queries"):
            read = counts.global_memory["load"].bytes + counts.global_memory["async_copy"].bytes
            least = 4 * n * d + 4 * n * n * d // rows
            assert least < read < 1.06 * least, name
            assert counts.mma == {"fused": 5, "keys": 4, "queries": 3}[name] * n * n * d // (16 * 8 * 16)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_documented_table(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/training.md shows what the program prints for the kernel as it is."""

    def rows(text: str) -> list[list[str]]:
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        kept = [row for row in cells if row[0] in ("fused", "split") and len(row) == 7]
        return [[re.sub(r" \([a-zA-Z].*", "", cell) for cell in row] for row in kept]  # but for words in brackets

    assert loop_orders.main([]) == 0
    printed = rows(capsys.readouterr().out)
    assert len(printed) == 6
    assert rows((ROOT / "docs" / "training.md").read_text()) == printed
