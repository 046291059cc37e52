"""Programs of small kernels in tests/emulator: on a GPU as nvcc makes them, and the lines of their source."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flash_wmma.emulator._program import Argument, call_entry

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(__file__).resolve().parent / "emulator"


def marked_lines(source: Path, word: str) -> dict[str, int]:
    """Line numbers of comments ``// word: label``, by their label."""
    found: dict[str, int] = {}
    for number, line in enumerate(source.read_text().splitlines(), 1):
        if match := re.search(rf"// {word}: (.+)$", line):
            assert match[1] not in found, f"{source.name}: two lines are marked {match[1]}"
            found[match[1]] = number
    return found


class GpuProgram:
    """A program of kernels that nvcc has compiled into a shared library; as ``flash_wmma.emulator.Program``."""

    def __init__(self, library: Path) -> None:
        self._entries = ctypes.CDLL(str(library))

    def call(self, name: str, *arguments: torch.Tensor | int) -> None:
        torch.cuda.synchronize()
        rows = [Argument(integer=x) if isinstance(x, int) else Argument(pointer=x.data_ptr()) for x in arguments]
        error = call_entry(self._entries, name, rows)
        assert error is None, error
        torch.cuda.synchronize()


def gpu_program(name: str, folder: Path) -> GpuProgram:
    """tests/emulator/NAME.cu for this machine's GPU: from the folder that FLASH_WMMA_TEST_PROGRAMS names, for machines
    without nvcc, or compiled into ``folder``. Skips the test without a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    prebuilt = os.environ.get("FLASH_WMMA_TEST_PROGRAMS")
    if prebuilt:
        return GpuProgram(Path(prebuilt) / f"{name}.so")
    nvcc = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if nvcc is None:
        pytest.skip("no nvcc, and FLASH_WMMA_TEST_PROGRAMS is not set")
    arch = "".join(map(str, torch.cuda.get_device_capability()))
    arch += "a" if name == f"sm{arch}" else ""  # of instructions that later cards do not have
    library = folder / f"{name}.so"
    includes = [f"-I{ROOT / folder}" for folder in ("csrc", "csrc/device")]
    command = [nvcc, "-std=c++20", *includes, "-shared", "-Xcompiler", "-fPIC", "-lineinfo"]
    command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}", str(FOLDER / f"{name}.cu"), "-o", str(library)]
    subprocess.run(command, check=True)
    return GpuProgram(library)
