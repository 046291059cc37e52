"""The floors of the house: which folder may include which. Those of the Python package are in test_floors_python.py.

In csrc, from the ground up: the contract (attention.h), the registry's headers, the device folder, families of kernels.
Beside the kernels, which do not see them: csrc/cache, csrc/merge, csrc/cpu, csrc/reductions, csrc/emulator. Above
all: csrc/torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = (".cu", ".cuh", ".h", ".cpp", ".inl")
REGISTRY = (
    "attention.h",
    "cached_rows.h",
    "dropout.h",
    "problems.h",
    "registry.h",
    "shape_table.h",
    "forward_shapes.h",
    "backward_shapes.h",
)
"""The contract, where the rows of a cache lie, what a kernel says of itself, and the tables of tiles that several
families use."""
APPENDING = ("cache/append.h", "cache/places.h")
"""The contract of what appends to a cache, and where its tokens are: the CPU's code shares both with the kernel."""
BELOW_TORCH = (
    *("cache/append.h", "merge/merge.h", "reductions/reductions.h"),
    *("cpu/threads.h", "device/product.h", "emulator/api.h"),
)
"""What csrc/torch implements for a folder, or calls of it."""
TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h$")

pytestmark = pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="no sources here")


def includes(path: Path) -> Iterator[tuple[str, bool]]:
    """What a source includes, and whether in quotes."""
    for bracket, name in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), re.M):
        yield name, bracket == '"'


def allowed(source: str) -> tuple[str, ...]:
    """How the project's headers begin that a source of csrc may include."""
    folders = source.split("/")[:-1]
    match folders:
        case ["forward" | "backward", family, *_]:
            return (*REGISTRY, "device/", f"{folders[0]}/{family}/")
        case ["cache" | "merge" | "reductions" as beside]:
            return (*REGISTRY, "device/", f"{beside}/")
        case ["device", *_]:
            return (*REGISTRY, "device/")
        case ["cpu"]:
            return (*REGISTRY, *APPENDING, "cpu/")
        case ["emulator", *_]:
            return (*REGISTRY, "emulator/", "device/product.h")
        case ["torch"]:
            return (*REGISTRY, "torch/", *BELOW_TORCH)
        case []:
            return REGISTRY
    raise ValueError(f"{source}: no floor has this folder")


def upward(csrc: Path) -> list[str]:
    """What is included that should not be: each source, and the name in its include."""
    wrong = []
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in SUFFIXES):
        source = path.relative_to(csrc).as_posix()
        for name, quoted in includes(path):
            if quoted:
                fine = name.startswith(allowed(source)) and ".." not in name and (csrc / name).is_file()
            elif TORCH.match(name):
                fine = source.startswith("torch/")
            else:
                fine = "/" not in name or not (csrc / name).exists()  # the system's, CUDA's, or one of <launch.h> ...
            if not fine:
                wrong.append(f"{source}: {name}")
    return wrong


def test_nothing_is_included_upwards() -> None:
    assert upward(ROOT / "csrc") == []


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("forward/simt/simt_naive.cu", "#include <torch/csrc/stable/tensor.h>"),
        ("device/tile.cuh", "#  include <ATen/ATen.h>"),
        ("cpu/tasks.h", "#include <torch/csrc/stable/ops.h>"),
        ("registry.cpp", "#include <Python.h>"),
        ("registry.h", '#include "torch/stable.h"'),
        ("forward/mma/kernel.cuh", '#include "torch/arguments.h"'),
        ("backward/mma/kernel.cuh", '#include "forward/mma/block.cuh"'),
        ("backward/mma/instances/bwd_sm80_half.cu", '#include "backward/simt/bwd_simt.cuh"'),
        ("forward/wgmma/plan.cuh", '#include "cpu/isa.h"'),
        ("forward/wgmma/plan.cuh", '#include "../mma/block.cuh"'),
        ("forward/wgmma/plan.cuh", "#include <forward/mma/block.cuh>"),
        ("device/sm80.cuh", '#include "forward/mma/kernel.cuh"'),
        ("device/sm80.cuh", '#include "copy_map.cuh"'),
        ("emulator/machine.h", '#include "forward_kernels.h"'),
    ],
)
def test_a_seeded_include_is_found(tmp_path: Path, source: str, line: str) -> None:
    """A line put into a source, beside what the source has."""
    for path in (p for p in (ROOT / "csrc").rglob("*") if p.suffix in SUFFIXES):
        copy = tmp_path / path.relative_to(ROOT / "csrc")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text() + (f"\n{line}\n" if copy == tmp_path / source else ""))
    (found,) = upward(tmp_path)
    assert found.startswith(f"{source}: ")
