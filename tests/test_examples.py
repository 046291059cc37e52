"""The example programs run and say what the documentation shows."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_first_kernel() -> None:
    """docs/emulator.md, "Ten minutes"."""
    script = EXAMPLES / "first_kernel" / "first_kernel.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    caught, right, profiles = done.stdout.split("\n\n", 2)
    source = (EXAMPLES / "first_kernel" / "first_kernel.cu").read_text().splitlines()
    write, read = (
        1 + next(i for i, line in enumerate(source) if text in line) for text in ("smem.k[row]", "score += smem")
    )
    assert "attend<0, false>: write after read, shared memory" in caught
    assert f"first_kernel.cu:{write}\n" in caught
    assert f"first_kernel.cu:{read}:" in caught
    assert "right: error" in right
    assert "793,600" in profiles, "conflicts of the column reads: 31 of 32 in each of 25,600"


def test_train_tiny_gpt(tmp_path: Path) -> None:
    """A few steps with these kernels and with torch's: the loss falls, and all agree."""
    command = [sys.executable, EXAMPLES / "train_tiny_gpt.py", "--device", "cpu", "--steps", "30", "--batch", "8"]
    files = ["--plot", tmp_path / "losses.png", "--json", tmp_path / "losses.json"]
    done = subprocess.run([*command, "--width", "32", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    runs = json.loads((tmp_path / "losses.json").read_text())["losses"]
    assert list(runs) == ["flash_wmma", "torch", "torch_plain"]
    for losses in runs.values():
        assert len(losses) == 30
        assert losses[-1] < losses[0] - 0.3
        assert max(abs(a - b) for a, b in zip(losses, runs["torch"], strict=True)) < 1e-3
    assert runs["flash_wmma"] != runs["torch"], "the same attention, twice"
    assert (tmp_path / "losses.png").stat().st_size > 0
    assert "flash_wmma and torch differ by" in done.stdout


def test_train_tiny_gpt_fails_where_losses_differ() -> None:
    command = [sys.executable, EXAMPLES / "train_tiny_gpt.py", "--device", "cpu", "--steps", "1", "--batch", "2"]
    done = subprocess.run([*command, "--width", "32", "--tolerance", "-1"], capture_output=True, check=False)
    assert done.returncode == 1


@pytest.mark.parametrize("model", ["gpt-oss", "gemma"])
def test_train_tiny_blocks(model: str) -> None:
    """A few steps, of texts longer than the window."""
    command = [sys.executable, EXAMPLES / "train_tiny_blocks.py", "--device", "cpu", "--steps", "22", "--batch", "2"]
    done = subprocess.run([*command, "--model", model], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    head, *speeds, names, first, later, last, end = done.stdout.splitlines()
    assert head.startswith(f"{model}: Heads(")
    assert [line.split()[0] for line in speeds] == names.split()[1:] == ["flash_wmma", "eager", "float64"]
    rows = [[float(x) for x in line.split()] for line in (first, later, last)]
    assert [row[0] for row in rows] == [0, 20, 21]
    for losses in zip(*(row[1:] for row in rows), strict=True):
        assert losses[-1] < losses[0] - 0.2
    assert end.startswith("largest difference ")
    assert end.endswith("allowed 1.0e-04")


@pytest.mark.parametrize("fault", ["window", "softcap", "sinks"])
def test_train_tiny_blocks_fails_where_losses_differ(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One key fewer, no softcap, no sinks."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_tiny_blocks as example

    def wrong(*qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        changed = {"window": (126, 0), "softcap": 0.0, "sinks": None}[fault]
        return example.eager(*qkv, **{**options, fault: changed})

    monkeypatch.setitem(example.RUNS, "flash_wmma", wrong)
    model = "gemma" if fault == "softcap" else "gpt-oss"
    command = ["train_tiny_blocks.py", "--device", "cpu", "--steps", "12", "--batch", "2", "--model", model]
    monkeypatch.setattr(sys, "argv", command)
    assert example.main() == 1
    assert "largest difference" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["1", "5", "64"])
def test_generate_tiny_gpt(size: str) -> None:
    """With a paged cache it says what it says without one, and something."""
    command = [sys.executable, EXAMPLES / "generate_tiny_gpt.py", "--device", "cpu", "--steps", "20", "--tokens", "12"]
    done = subprocess.run([*command, "--width", "32", "--page-size", size], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    cached, anew, *texts = done.stdout.splitlines()
    assert cached.startswith("with a paged cache: ")
    assert anew.startswith("without a cache: ")
    assert texts[0].startswith(";27+58=")
    assert [len(text) for text in texts] == [19, 14, 17, 29, 13]


def test_train_long_context() -> None:
    """Two processes have the losses of one; the odd length cuts uneven chunks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [EXAMPLES / "train_long_context.py", "--device", "cpu", "--length", "101", "--steps", "8", "--compare"]
    done = subprocess.run(
        [*command, "--width", "32", "--tolerance", "1e-3"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "last loss" in done.stdout


@pytest.mark.parametrize("argument", ["--steps", "--batch", "--length", "--width", "--heads", "--layers"])
@pytest.mark.parametrize("value", ["0", "-3", "1.5", "many"])
def test_train_tiny_gpt_refuses_sizes(argument: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With a word on the argument, before anything runs."""
    monkeypatch.setattr(sys, "argv", ["train_tiny_gpt.py", f"{argument}={value}"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / "train_tiny_gpt.py"), run_name="__main__")
    assert stop.value.code == 2
    assert f"argument {argument}: got {value}, allowed: a whole number from 1 on" in capsys.readouterr().err
