"""The example programs run and say what the documentation shows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_train_tiny_gpt() -> None:
    """A few steps with these kernels and with torch's: the loss falls, and both agree."""
    command = [sys.executable, EXAMPLES / "train_tiny_gpt.py", "--device", "cpu", "--steps", "30", "--batch", "8"]
    done = subprocess.run([*command, "--width", "32"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    ours, torchs, _ = done.stdout.splitlines()
    for line in (ours, torchs):
        first, last = (float(word.strip(",")) for word in (line.split()[3], line.split()[-1]))
        assert last < first - 0.3
