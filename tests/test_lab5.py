"""The training benchmark: its file, and what it says to wrong arguments."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmark"))
lab5 = importlib.import_module("lab5")

SMALL = ["--batch_size=1", "--seq_len=32", "--num_heads=2", "--emb_dim=32", "--repeats=2", "--dtype=fp32"]
KEYS = ["forward", "backward", "forward_backward", "peak_memory_usage(MB)"]


@pytest.mark.parametrize("implementation", ["Pytorch", "Flash2", "SDPA"])
def test_file(tmp_path: Path, implementation: str) -> None:
    file = tmp_path / "result.json"
    assert lab5.main([*SMALL, "--impl", implementation, "--causal", "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    assert list(result) == KEYS
    times = {name: result[name]["time(s)"] for name in KEYS[:3]}
    assert times["forward_backward"] == times["forward"] + times["backward"]
    for name, share in (("forward", 1), ("backward", 2.5), ("forward_backward", 3.5)):
        assert list(result[name]) == ["time(s)", "FLOPS(TFLOPs/s)"]
        flops = 4 * 32**2 * 32 / 2 * share
        assert result[name]["FLOPS(TFLOPs/s)"] == pytest.approx(flops / times[name] / 1e12)
    assert result["peak_memory_usage(MB)"] > 0


def test_implementations_agree() -> None:
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in "qkv")
    plain, *others = (attend(q, k, v, True) for attend in lab5.IMPLEMENTATIONS.values())
    for other in others:
        torch.testing.assert_close(other, plain)


def test_out_of_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 1 PiB")

    monkeypatch.setitem(lab5.IMPLEMENTATIONS, "SDPA", fail)
    assert lab5.main([*SMALL, "--impl=SDPA"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert list(result) == [*KEYS, "error"]
    assert result["backward"] == {"time(s)": None, "FLOPS(TFLOPs/s)": None}
    assert "1 PiB" in result["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--emb_dim=33"], "--emb_dim: got 33, allowed: a multiple of --num_heads, 2"),
        (["--seq_len=0"], "--seq_len: got 0, allowed: 1 and more"),
        (["--output=/nowhere/file"], "--output: /nowhere/file cannot be written: No such file"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lab5.main([*SMALL, *arguments])
    assert message in capsys.readouterr().err
