"""./dev: what it compiles on which machine, and what it hands to pytest. A stand-in takes Python's place in .venv."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest

import flash_wmma

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "dev").exists():
    pytest.skip("no checkout", allow_module_level=True)
GPU = Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists()
without_gpu = pytest.mark.skipif(GPU or Path("/dev/kfd").exists(), reason="there is a GPU")

PYTHON = """#!/bin/sh
echo "$* | ${FLASH_WMMA_CUDA-} | ${TORCH_CUDA_ARCH_LIST-}" >>"$CALLS"
case $* in *install*) echo Successfully installed ;; esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("dev", "pyproject.toml", "setup.py", "flash_wmma/_version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    write_program(tmp_path / ".venv/bin/python", PYTHON)
    write_program(tmp_path / "bin/nvcc", "#!/bin/sh\n")
    write_program(tmp_path / "bin/apt-get", "#!/bin/sh\nexit 1\n")  # a test installs nothing
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def give_gpus(checkout: Path, *architectures: str) -> None:
    lines = "\n".join(["#!/bin/sh", *(f"echo {arch}" for arch in architectures), ""])
    write_program(checkout / "bin/nvidia-smi", lines)


def dev(checkout: Path, *arguments: str, **environment: str) -> tuple[list[str], str]:
    """What Python was called with, and what was said."""
    calls = checkout / "calls"
    calls.unlink(missing_ok=True)
    kept = {k: v for k, v in os.environ.items() if k not in ("FLASH_WMMA_CUDA", "TORCH_CUDA_ARCH_LIST")}
    path = f"{checkout / 'bin'}:{kept['PATH']}"
    done = subprocess.run(
        [checkout / "dev", *arguments],
        env={**kept, "PATH": path, "CALLS": str(calls), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return calls.read_text().splitlines(), done.stderr


def compiled(calls: list[str]) -> list[str]:
    """FLASH_WMMA_CUDA and TORCH_CUDA_ARCH_LIST as the compilation sees them."""
    build = next(call for call in calls if "install -v" in call or "build_ext" in call)
    return [part.strip() for part in build.split("|")[1:]]


@without_gpu
def test_without_a_gpu_the_cpu_kernel_alone(checkout: Path) -> None:
    calls, said = dev(checkout, "build")
    assert compiled(calls) == ["0", ""]
    (line,) = (line for line in said.splitlines() if "no GPU here" in line)
    assert "./dev build --all" in line


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (["9.0"], ["", "9.0"]),
        (["9.0", "9.0", "7.5"], ["", "7.5;9.0"]),
        (["12.0", "6.1"], ["", "12.0"]),
        (["6.1"], ["0", ""]),
        (["[N/A]"], ["", ""]),
    ],
)
def test_every_gpu_of_the_machine(checkout: Path, gpus: list[str], expected: list[str]) -> None:
    give_gpus(checkout, *gpus)
    calls, said = dev(checkout, "build")
    assert compiled(calls) == expected
    assert (expected[1] or gpus[0] if gpus != ["[N/A]"] else "for every GPU") in said


@without_gpu
def test_all_stays_until_the_next_build(checkout: Path) -> None:
    calls, _ = dev(checkout, "build", "--all", FLASH_WMMA_CUDA="0", TORCH_CUDA_ARCH_LIST="7.5")
    assert compiled(calls) == ["1", ""]
    calls, said = dev(checkout, "bench")
    assert compiled(calls) == ["1", ""]
    assert "no GPU here" not in said
    calls, _ = dev(checkout, "build")
    assert compiled(calls) == ["0", ""]


@pytest.mark.parametrize("variables", [{"FLASH_WMMA_CUDA": "0"}, {"TORCH_CUDA_ARCH_LIST": "8.9"}])
def test_variables_come_first(checkout: Path, variables: dict[str, str]) -> None:
    give_gpus(checkout, "9.0")
    calls, _ = dev(checkout, "build", **variables)
    assert compiled(calls) == [variables.get("FLASH_WMMA_CUDA", ""), variables.get("TORCH_CUDA_ARCH_LIST", "")]


@pytest.mark.parametrize(
    ("variables", "cuda", "folder"), [({}, "1", "dist"), ({"FLASH_WMMA_CUDA": "0"}, "0", "dist/cpu")]
)
def test_wheel_is_for_every_gpu(checkout: Path, variables: dict[str, str], cuda: str, folder: str) -> None:
    """Whatever GPU is here, and linked with libraries of manylinux_2_28."""
    give_gpus(checkout, "9.0")
    calls, _ = dev(checkout, "wheel", TORCH_CUDA_ARCH_LIST="9.0", **variables)
    old, build, repair = calls[-3:]
    assert old.startswith("packages/old_libraries.py ")
    assert "pip --disable-pip-version-check wheel" in build
    assert [part.strip() for part in build.split("|")[1:]] == [cuda, ""]
    assert "auditwheel repair --plat manylinux_2_28_" in repair
    assert f" -w {folder} build/wheel/" in repair


def test_hub(checkout: Path) -> None:
    calls, _ = dev(checkout, "hub", TORCH_CUDA_ARCH_LIST="9.0")
    assert calls[-1].split(" | ") == ["packages/hub.py", "1", ""]
    assert calls[-2].startswith("packages/old_libraries.py ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "--quick"),
        ("-x --color=no", "--quick -x --color=no"),
        ("--full", ""),
        ("-x --full --color=no", "-x --color=no"),
        ("--part=2/3", "--part=2/3"),
        ("-k simt", "-k simt"),
        ("--kernel cpu", "--kernel cpu"),
        ("flash_wmma/_version.py::test_it", "flash_wmma/_version.py::test_it"),
    ],
)
def test_pytest_is_given_a_selection(checkout: Path, arguments: str, expected: str) -> None:
    calls, _ = dev(checkout, "test", *arguments.split())
    given = calls[-1].split(" | ")[0].split()
    assert given == ["-m", "pytest", "-n", "logical", "--maxprocesses", "16", *expected.split()]


@without_gpu
@pytest.mark.parametrize(
    ("arguments", "first", "mode"),
    [
        ("", True, " --mode checked"),
        ("--part=3/16", True, " --mode checked"),
        ("--part=3/15", True, ""),
        ("--full", True, ""),
        ("-k simt", False, ""),
    ],
)
def test_the_emulator_is_compiled_first(checkout: Path, arguments: str, first: bool, mode: str) -> None:
    calls, said = dev(checkout, "test", *arguments.split())
    compiled = [call.split(" | ")[0] for call in calls if "flash_wmma.emulator build" in call]
    assert compiled == [f"-m flash_wmma.emulator build{mode}"] * first
    assert ("compiling the CUDA kernels for the emulator" in said) == first


def collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_parts_hold_every_case() -> None:
    """Each part has cases of every test, other parts others where there are enough; --quick is the first sixteenth. Of
    tests with a case for each kernel, a part takes others in each test."""
    files = "tests/test_errors.py", "tests/test_torch.py"
    whole, of = collected(*files), conftest.QUICK.of

    def part_of(number: int) -> list[str]:
        items: Any = [SimpleNamespace(nodeid=node) for node in whole]
        others = {item.nodeid for item in conftest.other_parts(items, conftest.Part(number, of))}
        return [node for node in whole if node not in others]

    parts = [part_of(number) for number in range(1, of + 1)]

    def cases(nodes: list[str]) -> Counter[str]:
        return Counter(node.partition("[")[0] for node in nodes)

    assert collected(*files, "--quick") == parts[0]
    assert set().union(*parts) == set(whole)
    for part in parts:
        assert cases(part).keys() == cases(whole).keys()
        for test, count in cases(whole).items():
            assert max(1, count // of) <= cases(part)[test] <= -(-count // of)
    kernels = {node.partition("[")[2].split("-")[0].split(".")[0] for node in parts[0]}
    known = {kernel.name for kernel in flash_wmma.kernels()}
    assert len(kernels & known) > len(known) / 2, "not the same part of the kernels in each test"


@pytest.mark.parametrize("part", ["3", "0/2", "3/2", "1/0"])
def test_wrong_part(part: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=rf"got {part}, allowed: K/N with 1 <= K <= N"):
        conftest.part_of(part)
