"""The traffic of backward's loop orders: what the emulator counts is what the documentation derives."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmark"))
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
