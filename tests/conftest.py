"""Which kernels the tests run: every kernel, on every dtype it lists; a new kernel needs no edit here.

CUDA kernels run on the GPU if there is one. Without one, the same tests run their source on CPU tensors, in the
emulator.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from needs import met
from reference import early_rung, emulated, operand_dtype

import flash_wmma
from flash_wmma._library import PATH as LIBRARY
from flash_wmma._table import not_built

ROOT = Path(__file__).resolve().parent.parent
KERNEL_FIXTURES = ("target", "backward_target", "kernel", "case")
"""By which tests are given a kernel."""
SPARE_MEMORY = 8 * 2**30
"""Bytes of the GPU that a large test leaves to others."""
EMULATED_CASES = 24
"""Of a test, for an emulated kernel and dtype."""
EMULATED_SIMT_CASES = 6
"""The same for the kernels on CUDA cores, whose work the emulator does multiplication by multiplication."""
EMULATED_CONVERTED_CASES = 8
"""The same for gradients of inputs that the kernel converts: what is special about them has tests of its own."""
EMULATED_RUNG_CASES = 1
"""The same for each of the early rungs of the ladder on CUDA cores, which have little to go wrong."""


class Part(NamedTuple):
    """Of a test's cases every ``of``-th, beginning with one of the first ``of``; at least one case."""

    number: int
    of: int


QUICK = Part(1, 16)


def part_of(text: str) -> Part:
    """What --part names: K/N, 1 <= K <= N."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    part = Part(*map(int, match.groups())) if match else Part(0, 0)
    if not 1 <= part.number <= part.of:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: K/N with 1 <= K <= N")
    return part


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-combination", action="store_true", help="of parameters, instead of every pair")
    parser.addoption(
        "--part",
        type=part_of,
        default=Part(1, 1),
        metavar="K/N",
        help="of each test's cases every N-th; K, from 1 to N, says which",
    )
    parser.addoption(
        "--quick", action="store_const", dest="part", const=QUICK, help=f"--part={QUICK.number}/{QUICK.of}"
    )
    parser.addoption("--kernel", action="append", default=[], help="test that kernel alone; may be repeated")
    parser.addoption("--first", metavar="TEST", help="that test before all others, if it is among them")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; of the kernels, it is given CUDA's")
    config.addinivalue_line("markers", "needs(*what): what a case needs of the kernel to be made (tests/needs.py)")
    config.addinivalue_line("markers", "long: takes too long in the emulator")
    try:
        flash_wmma.build_info()
    except ImportError:
        build_native(config)
    if not hasattr(config, "workerinput"):
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            flash_wmma.kernels()  # a build without CUDA compiles them for the emulator, and says which


def build_native(config: pytest.Config) -> None:
    """Compiles flash_wmma._C for a Python that the package was not built for; libflash_wmma.so serves every Python."""
    folder = ROOT / "build" / f"tests-{sysconfig.get_config_var('SOABI')}"
    module = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = [ROOT / "csrc" / name for name in ("torch/module.cpp", "torch/emulation.h", "registry.h", "attention.h")]
    if not module.exists() or module.stat().st_mtime < max(path.stat().st_mtime for path in [*sources, LIBRARY]):
        folder.mkdir(parents=True, exist_ok=True)
        includes = [Path(torch.__file__).parent / "include", sysconfig.get_path("include")]
        command = ["c++", "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
        command += [f"-I{ROOT / 'csrc'}", *(f"-isystem{path}" for path in includes)]
        command += [str(sources[0]), "-o", str(module), str(LIBRARY), f"-Wl,-rpath,{LIBRARY.parent}"]
        subprocess.run(command, check=True)
    spec = importlib.util.spec_from_file_location("flash_wmma._C", module)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["flash_wmma._C"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["flash_wmma._C"])


def pytest_report_header(config: pytest.Config) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    kernels = [*kernels_under_test(config), *kernels_under_test(config, "backward")]
    names = ", ".join(kernel.name + " (emulated)" * emulated(kernel) for kernel in kernels)
    lines = [f"flash_wmma {flash_wmma.__version__}, torch {torch.__version__}, {device}; kernels: {names}"]
    return lines + [f"flash_wmma: {name} is not tested: {why}" for name, why in not_built().items()]


def on_gpu() -> bool:
    """Whether this machine runs CUDA kernels."""
    return torch.cuda.is_available() and flash_wmma.build_info().cuda is not None


def emulated_kernel(kernel: flash_wmma.Kernel) -> flash_wmma.Kernel:
    """The kernel as the tests run it in the emulator: its device is the tensors', the CPU."""
    return dataclasses.replace(kernel, device="cpu")


@pytest.fixture(autouse=True)
def checked(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels that the tests are given are checked where they are emulated, unless the test says otherwise."""
    given = set(KERNEL_FIXTURES) & set(request.fixturenames)
    with flash_wmma.emulator.settings(**{"mode": "checked"} if given else {}):
        yield


@pytest.fixture
def modes(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """The emulator's modes in which a test of both runs: the checked one in a part as small as --quick's, so that few
    kernels have to be compiled twice."""
    return ("checked",) if pytestconfig.getoption("part").of >= QUICK.of else ("checked", "fast")


def kernel_on_gpu(kernel: flash_wmma.Kernel) -> flash_wmma.Kernel:
    """The kernel with the head dims for which this GPU has the shared memory."""
    device = flash_wmma.device_facts()
    fitting = [i.head_dim for i in kernel.instances if i.min_arch <= device.arch and i.smem_bytes <= device.smem_optin]
    low, high = kernel.head_dims
    return dataclasses.replace(kernel, head_dims=(low, min([high, *([max(fitting)] if fitting else [])])))


def obstacle(kernel: flash_wmma.Kernel, dtype: torch.dtype | None = None) -> str:
    """Why this machine cannot run the kernel; empty if it can."""
    if kernel.device == "cpu":
        return ""
    arch = flash_wmma.device_facts().arch
    least = kernel.bf16_min_arch if dtype == torch.bfloat16 else kernel.min_arch
    return f"needs sm_{least}, the device is sm_{arch}" if arch < least else ""


def kernels_under_test(
    config: pytest.Config, direction: flash_wmma.emulator.Direction = "forward"
) -> list[flash_wmma.Kernel]:
    only = config.getoption("--kernel")
    kernels = [kernel for kernel in flash_wmma.kernels(direction) if not only or kernel.name in only]
    on_its_device = kernel_on_gpu if on_gpu() else emulated_kernel
    return [kernel if kernel.device == "cpu" else on_its_device(kernel) for kernel in kernels]


def targets(
    config: pytest.Config, direction: flash_wmma.emulator.Direction = "forward"
) -> list[tuple[flash_wmma.Kernel, torch.dtype]]:
    """Each kernel of a direction with each of its dtypes."""
    return [(kernel, dtype) for kernel in kernels_under_test(config, direction) for dtype in kernel.dtypes]


def marks(kernel: flash_wmma.Kernel, dtype: torch.dtype | None = None) -> list[pytest.MarkDecorator]:
    why_not = obstacle(kernel, dtype)
    gpu = [pytest.mark.gpu] if kernel.device == "cuda" else []
    return [*gpu, pytest.mark.skip(reason=f"{kernel.name}: {why_not}")] if why_not else gpu


def label(kernel: flash_wmma.Kernel) -> str:
    return f"{kernel.name}.emulated" if emulated(kernel) else kernel.name


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


NO_CUDA_KERNEL = pytest.param(
    None, id="cuda", marks=pytest.mark.skip(reason="no CUDA kernel: built without, and no g++ for the emulator")
)
NO_KERNEL = object()
"""In place of a kernel, where --kernel names none that the test is for."""


def parametrize(metafunc: pytest.Metafunc, fixture: str, rows: list[Any]) -> None:
    """With rows of kernels; where there are none for CUDA, one visible skip says it."""
    absent = [] if any(kernel.min_arch for kernel in flash_wmma.kernels()) else [NO_CUDA_KERNEL]
    metafunc.parametrize(fixture, rows + absent or [NO_KERNEL])


def no_gpu() -> str:
    """Why this machine does not run CUDA kernels."""
    return "built without CUDA kernels" if torch.cuda.is_available() else "no CUDA device"


def pytest_runtest_setup() -> None:
    """The same random numbers whichever tests ran before in this process."""
    torch.manual_seed(0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`kernel`: every kernel. `target`: every (kernel, dtype). `backward_target`: those of backward. A test that is
    marked `gpu` is given CUDA's alone; without a GPU, one visible skip."""
    directions: dict[str, flash_wmma.emulator.Direction] = {
        "kernel": "forward",
        "target": "forward",
        "backward_target": "backward",
    }
    for fixture, direction in directions.items():
        if fixture not in metafunc.fixturenames:
            continue
        kernels = kernels_under_test(metafunc.config, direction)
        absent = []
        if metafunc.definition.get_closest_marker("gpu"):
            if any(map(emulated, kernels)):
                absent = [pytest.param(None, id="cuda", marks=pytest.mark.skip(reason=no_gpu()))]
            kernels = [kernel for kernel in kernels if kernel.device == "cuda"]
        if fixture == "kernel":
            rows = [pytest.param(k, id=label(k), marks=marks(k)) for k in kernels]
        else:
            rows = [
                pytest.param((k, dtype), id=f"{label(k)}-{name(dtype)}", marks=marks(k, dtype))
                for k in kernels
                for dtype in k.dtypes
            ]
        parametrize(metafunc, fixture, rows + absent)


def case_of(item: pytest.Item) -> dict[str, Any]:
    """The parameters of a test's case, by name."""
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def target_of(case: dict[str, Any]) -> tuple[Any, torch.dtype | None]:
    """The kernel that a test is given, if any, and the dtype beside it."""
    given = next((case[name] for name in KERNEL_FIXTURES if name in case), None)
    return given[:2] if isinstance(given, tuple) else (given, None)


def claimed(item: pytest.Item) -> bool:
    """Whether the kernel claims what the case needs."""
    case = case_of(item)
    kernel, dtype = target_of(case)
    if kernel is NO_KERNEL:
        return False
    if kernel is None and not case.keys().isdisjoint(KERNEL_FIXTURES):
        return True  # a skip, which says why
    case = {"kernel": kernel, "dtype": dtype, **case}
    return all(met(need, case) for mark in item.iter_markers("needs") for need in mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> Generator[None, Any, Any]:
    """Of a test's cases, those are made that the kernel claims."""
    made = yield
    if not isinstance(made, list):
        return made
    kept = [item for item in made if claimed(item)]
    if made and not kept and not collector.config.getoption("--kernel"):
        raise collector.CollectError(f"{name}: no kernel claims what a case of it needs")
    return kept


def emulated_cases(kernel: flash_wmma.Kernel, dtype: torch.dtype | None) -> int:
    """Of a test, at most."""
    if early_rung(kernel.name):
        return EMULATED_RUNG_CASES
    if dtype is not None and kernel.name.startswith("bwd_") and operand_dtype(kernel, dtype) != dtype:
        return EMULATED_CONVERTED_CASES
    return EMULATED_SIMT_CASES if "simt" in kernel.name else EMULATED_CASES


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each test's cases, a few spread over the list are run for an emulated kernel and dtype;
    ``--every-combination``: all. None of them is one that is marked `long`. ``--part``: some of these. ``--first``: the
    test that comes first."""
    cases: dict[tuple[Path, str, str, torch.dtype | None, int], list[pytest.Item]] = {}
    for item in items:
        kernel, dtype = target_of(case_of(item))
        if isinstance(kernel, flash_wmma.Kernel) and emulated(kernel):
            at_most = emulated_cases(kernel, dtype)
            cases.setdefault((item.path, item.originalname, kernel.name, dtype, at_most), []).append(item)
    left_out = set()
    for (*_, at_most), same in cases.items():
        count = len(same) if config.getoption("--every-combination") else min(len(same), at_most)
        chosen = {same[i * len(same) // count] for i in range(count)}
        left_out |= {item for item in same if item not in chosen or item.get_closest_marker("long")}
    left_out.update(other_parts([item for item in items if item not in left_out], config.getoption("--part")))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    first = config.getoption("--first")
    items[:] = sorted((item for item in items if item not in left_out), key=lambda item: item.nodeid != first)


def other_parts(items: list[pytest.Item], part: Part) -> Iterator[pytest.Item]:
    """The cases of each test that are not in the part. Which one comes first depends on the test's name, so that tests
    with a case for each kernel do not all take the same kernels."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        first = (zlib.crc32(name.encode()) + part.number - 1) % min(part.of, len(cases))
        yield from (case for i, case in enumerate(cases) if i % part.of != first)


@pytest.fixture
def gpu_memory() -> Iterator[Callable[[int], None]]:
    """Takes how many bytes a test is about to allocate, and skips the test if the GPU has not so many left.

    One test of all processes has this at a time, and its memory is given back."""

    with (Path(tempfile.gettempdir()) / f"flash_wmma_gpu_memory_{os.getuid()}.lock").open("w") as lock:

        def ask(size: int) -> None:
            fcntl.flock(lock, fcntl.LOCK_EX)
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info()[0] < size + SPARE_MEMORY:
                pytest.skip("not enough memory")

        yield ask
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@pytest.fixture
def cuda() -> torch.device:
    """A CUDA device with kernels for it."""
    if not on_gpu():
        pytest.skip(no_gpu())
    return torch.device("cuda")
