"""CUDA kernels on CPU tensors, as the library offers them: by name, with errors of their own, compiled when asked."""

from __future__ import annotations

import functools
import itertools
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import emulated_kernel, name, on_gpu
from reference import PLAIN, Mask, Modification, check, normal, poisoned_memory, reference, run
from torch import Tensor

import flash_wmma
from flash_wmma import _registry
from flash_wmma.emulator import (
    EmulatorError,
    Program,
    Settings,
    _compile,
    _runtime,
    current,
    kernel_library,
    kernel_sources,
    settings,
)
from flash_wmma.emulator.__main__ import main

CUDA_KERNELS = [kernel for kernel in flash_wmma.kernels() if kernel.min_arch]
SMOKE = [kernel for kernel in CUDA_KERNELS if not on_gpu() or kernel.name == "wmma_v2"]
ARCHITECTURES = (75, 80, 86, 90)


@pytest.fixture(autouse=True)
def compiler() -> None:
    try:
        _compile.compiler()
    except EmulatorError as error:
        pytest.skip(str(error))


def inputs(n: int = 50, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (normal((1, 2, n, 64), dtype=dtype, seed=s) for s in (1, 2, 3))
    return q, k, v


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=env
    )


@pytest.mark.parametrize("mode", ["fast", "checked"])
@pytest.mark.parametrize("cuda_kernel", SMOKE, ids=lambda kernel: kernel.name)
def test_by_name(cuda_kernel: flash_wmma.Kernel, mode: str, modes: tuple[str, ...]) -> None:
    """On any machine, whatever the build; in both builds of the kernel, to the same bit."""
    q, k, v = inputs(dtype=cuda_kernel.dtypes[0])
    with settings(mode=mode):
        out, lse = run(cuda_kernel, q, k, v, Mask("top_left"))
    check(out, lse, reference(emulated_kernel(cuda_kernel), q, k, v, Mask("top_left")))
    with settings(mode=modes[-1]):
        again = run(cuda_kernel, q, k, v, Mask("top_left"))
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])


def devices(instance: flash_wmma.Instance) -> list[flash_wmma.DeviceFacts]:
    """Those of the emulator that have the instance, of all sizes: the number of blocks per SM decides between tiles.
    Those with wavefronts of 64 come last; a build without CUDA has tiles for them."""
    return [
        flash_wmma.DeviceFacts(arch, sm_count, shared_memory(arch), warp_size)
        for warp_size in (32, 64)
        for arch in ARCHITECTURES
        if arch >= instance.min_arch
        for sm_count in (1, 2, 8, 1000)
    ]


def shared_memory(arch: int) -> int:
    with settings(arch=arch) as now:
        return now.shared_memory


CHANGES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "softcap": ("softcap",),
    "bias": ("attn_bias",),
    "mask": ("attn_bias",),
    "bias, softcap": ("attn_bias", "softcap"),
    "slopes": ("alibi_slopes",),
    "ranges": ("key_ranges",),
    "dropout": ("dropout",),
    "maxima": (),
    "entropies": (),
}
"""What an instance may be for, and the features of it."""

STATISTICS = {"maxima": ("max",), "entropies": ("entropy",)}
"""What test_row_statistics.py compares; here out and lse are."""


def modification_of(change: str, q: torch.Tensor, keys: int) -> Modification:
    bias = normal((1, 1, 1, keys), dtype=q.dtype, seed=4)
    ranges = torch.tensor([2, keys - 1], dtype=torch.int32).expand(1, 1, q.size(2), 2)
    return {
        "softcap": Modification(softcap=5.0),
        "bias": Modification(attn_bias=bias),
        "mask": Modification(attn_bias=bias > -1),
        "bias, softcap": Modification(attn_bias=bias, softcap=5.0),
        "slopes": Modification(alibi_slopes=torch.full((q.size(1),), 0.1)),
        "ranges": Modification(key_ranges=ranges),
    }.get(change, PLAIN)


@pytest.mark.skipif(on_gpu(), reason="the GPU runs them")
@pytest.mark.parametrize(
    ("cuda_kernel", "instance"),
    [
        pytest.param(k, i, id=f"{k.name}-{name(i.dtype)}-{i.br}x{i.bc}x{i.head_dim}-sm{i.min_arch}")
        for k in CUDA_KERNELS
        for i in k.instances
    ],
)
def test_every_instance(cuda_kernel: flash_wmma.Kernel, instance: flash_wmma.Instance) -> None:
    """Each tile of each kernel runs, on a device and with a number of heads for which it is chosen: several tiles of
    keys, free, masked and partial."""
    mask = Mask("bottom_right") if "causal" in cuda_kernel.features else Mask()
    dtypes = [dtype for dtype in (instance.dtype, torch.float32) if dtype in cuda_kernel.dtypes]
    widths = (instance.head_dim, 128) if "d_v != d" in cuda_kernel.features else (instance.head_dim,)
    sizes = list(itertools.product(devices(instance), widths, (instance.br + 5, instance.br), (1, 2, 4, 8)))
    nk = 3 * instance.bc + 5

    @functools.cache  # all devices are asked for the same
    def arguments(
        dtype: torch.dtype, change: str, dv: int, rows: int, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Modification]:
        q = normal((1, heads, rows, instance.head_dim), dtype=dtype, seed=1)
        k = normal((1, 1, nk, instance.head_dim), dtype=dtype, seed=2)
        return q, k, normal((1, 1, nk, dv), dtype=dtype, seed=3), modification_of(change, q, nk)

    for dtype, change in itertools.product(dict.fromkeys(dtypes), CHANGES):
        if not set(CHANGES[change]) <= cuda_kernel.features:
            continue
        for device, dv, rows, heads in sizes:
            q, k, v, modification = arguments(dtype, change, dv, rows, heads)
            options = {"causal": mask.causal, "kernel": cuda_kernel.name, **modification._asdict()}
            if change == "dropout":
                options |= {"dropout_p": 0.5, "rng_state": torch.tensor([3, 0])}
            if change in STATISTICS:
                options["return_aux"] = STATISTICS[change]
            explained = {name: option for name, option in options.items() if name != "rng_state"}
            if flash_wmma.explain(q, k, v, device_facts=device, **explained).instance != instance:
                continue
            emulated = {"arch": device.arch, "sm_count": device.sm_count, "warp_size": device.warp_size}
            with settings(mode="checked", **emulated):
                assert flash_wmma.explain(q, k, v, **explained).instance == instance
                if change == "dropout":
                    expected = flash_wmma.forward(q.double(), k.double(), v.double(), **options | {"kernel": "math"})
                    out = flash_wmma.forward(q, k, v, **options)
                    assert (out - expected).abs().max() <= 1e-2 * expected.abs().max()
                else:
                    expected = reference(emulated_kernel(cuda_kernel), q, k, v, mask, None, modification)
                    if change in STATISTICS:
                        out, lse, _ = flash_wmma.forward(q, k, v, return_lse=True, **options)
                    else:
                        out, lse = run(cuda_kernel, q, k, v, mask, None, modification)
                    check(out, lse, expected)
            return
    if "a key/value cache" in cuda_kernel.features and instance.dtype != torch.float32:
        run_on_cache(cuda_kernel, instance)
        return
    pytest.fail(f"{instance} is chosen on no device")


def run_on_cache(kernel: flash_wmma.Kernel, instance: flash_wmma.Instance) -> None:
    """A call whose heads of a group fill a tile of that many rows: explain knows no caches."""
    d, length = instance.head_dim, 3 * instance.bc + 5
    q = normal((1, instance.br, 1, d), dtype=instance.dtype, seed=1)
    k, v = (normal((1, 1, length, d), dtype=instance.dtype, seed=s) for s in (2, 3))
    lengths = torch.tensor([length - 2], dtype=torch.int32)
    with settings(mode="checked", arch=max(instance.min_arch, 75)):
        out, lse = flash_wmma.forward_cached(q, k, v, lengths, kernel=kernel.name, return_lse=True)
    check(out, lse, reference(emulated_kernel(kernel), q, k[:, :, :-2], v[:, :, :-2]))


def test_explain() -> None:
    for kernel in CUDA_KERNELS:
        q, k, v = inputs(dtype=kernel.instances[0].dtype)
        arch = max(86, kernel.min_arch)
        with settings(arch=arch, sm_count=5):
            answer = flash_wmma.explain(q, k, v, kernel=kernel.name)
        assert answer.kernel == kernel.name
        assert answer.emulated
        assert answer.device == flash_wmma.DeviceFacts(arch, 5, shared_memory(arch))
        assert answer.instance in kernel.instances
        assert f"CPU, in the emulator: sm_{arch}, 5 multiprocessors" in str(answer)
    assert shared_memory(86) == 99 * 1024
    q, k, v = inputs()
    assert not flash_wmma.explain(q, k, v).emulated
    assert not flash_wmma.explain(q, k, v, kernel="cpu").emulated


def test_device_is_respected() -> None:
    q, k, v = inputs(dtype=torch.bfloat16)
    with (
        settings(arch=75),
        pytest.raises(ValueError, match="kernel 'wmma_v3' cannot run this: dtype: bfloat16 needs sm_80 or later"),
    ):
        flash_wmma.forward(q, k, v, kernel="wmma_v3")
    with pytest.raises(ValueError, match="arch: got 76, allowed: 70, 75"), settings(arch=76):
        pass


def test_every_kernel_is_listed() -> None:
    listed = {kernel.name for kernel in (*CUDA_KERNELS, *flash_wmma.kernels("backward"))}
    assert listed >= set(kernel_sources())


def test_unknown_kernel() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError) as caught:
        flash_wmma.forward(q, k, v, kernel="wmma_v0")
    names = sorted({"cpu", *(kernel.name for kernel in CUDA_KERNELS)})
    assert str(caught.value) == "kernel: got 'wmma_v0', allowed: " + ", ".join(map(repr, ("auto", *names, "math")))


def broken(monkeypatch: pytest.MonkeyPatch, source: Path, changes: dict[str, str]) -> str:
    """wmma_v2 with other text in it, as a kernel of another name."""
    original = _compile.CSRC / "forward" / "wmma" / "wmma_v2.cu"
    text = original.read_text().replace('"wmma_v2"', '"broken"')
    for old, new in changes.items():
        assert text.count(old) >= 1, old
        text = text.replace(old, new, 1)
    source.write_text(text)
    for module in (_compile, _runtime, _registry):
        monkeypatch.setattr(module, "kernel_sources", lambda direction="forward": {"broken": (source,)})
    return "broken"


@pytest.mark.parametrize("asked", [{"mode": "checked"}, {}], ids=["asked", "default"])
def test_finding(asked: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the checks find is an EmulatorError, which says where, without a setting too; and the next run is clean."""
    monkeypatch.delenv("FLASH_WMMA_EMULATOR", raising=False)
    kernel = broken(
        monkeypatch, tmp_path / "broken.cu", {"p.seqlen_q) - tile.first_row": "p.seqlen_q) + 1 - tile.first_row"}
    )
    q, k, v = (t[:, :1] for t in inputs())  # one head: what lies beyond its rows is nothing
    with (
        settings(**asked),
        pytest.raises(EmulatorError, match=r"^emulator: .*wmma_v2<__half>: out of bounds .* of q: ") as caught,
    ):
        flash_wmma.forward(q, k, v, kernel=kernel)
    assert isinstance(caught.value, RuntimeError)
    assert "at csrc/device/half_tile.cuh:" in str(caught.value)
    monkeypatch.undo()
    with settings(mode="checked"):
        check(*run(emulated_kernel(CUDA_KERNELS[0]), q, k, v), reference(emulated_kernel(CUDA_KERNELS[0]), q, k, v))


def test_source_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = broken(monkeypatch, tmp_path / "broken.cu", {"__global__": "__global__ no_such_type"})
    q, k, v = inputs()
    with pytest.raises(EmulatorError, match=r"^emulator: compiling for the emulator failed:(.|\n)*no_such_type"):
        flash_wmma.forward(q, k, v, kernel=kernel)


WITHOUT_COMPILER = """
import torch, flash_wmma
q = torch.randn(1, 2, 10, 64)
flash_wmma.forward(q, q, q)
try:
    flash_wmma.forward(q, q, q, kernel="wmma_v2")
except flash_wmma.emulator.EmulatorError as error:
    print(error)
print(*(kernel.name for kernel in flash_wmma.kernels()))
"""


def test_without_compiler(tmp_path: Path) -> None:
    done = python(WITHOUT_COMPILER, FLASH_WMMA_GXX="no-such-compiler", FLASH_WMMA_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    error, names = done.stdout.splitlines()
    assert error.startswith("emulator: running a CUDA kernel on the CPU needs no-such-compiler, which was not found")
    built = flash_wmma.build_info().cuda is not None
    assert names == (" ".join(kernel.name for kernel in flash_wmma.kernels()) if built else "cpu")
    if not built:
        code = "from flash_wmma.__main__ import main; main(['info'])"
        done = python(code, FLASH_WMMA_GXX="no-such-compiler", FLASH_WMMA_CACHE=str(tmp_path))
        assert f"not compiled: {', '.join(kernel_sources())}: running a CUDA kernel on the CPU needs" in done.stdout


AUTO = """
import torch, flash_wmma
q = torch.randn(1, 2, 10, 64)
flash_wmma.forward(q, q, q)
flash_wmma.forward(q, q, q, causal=True, kernel="cpu")
try:
    flash_wmma.forward(q, q, q, kernel="unknown")
except ValueError:
    pass
"""


def test_auto_compiles_nothing(tmp_path: Path) -> None:
    done = python(AUTO, FLASH_WMMA_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "compiling" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_mode_from_the_environment() -> None:
    code = "from flash_wmma.emulator import current; print(current().mode)"
    assert python(code, FLASH_WMMA_EMULATOR="fast").stdout == "fast\n"
    assert python(code, FLASH_WMMA_EMULATOR="").stdout == "checked\n"
    assert (
        "FLASH_WMMA_EMULATOR: got 'slow', allowed: 'fast', 'checked'" in python(code, FLASH_WMMA_EMULATOR="slow").stderr
    )


@pytest.mark.skipif(on_gpu(), reason="takes a minute if nothing is compiled yet")
def test_command_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--mode", "checked"]) == 0
    out = capsys.readouterr().out
    assert all(f"{kernel} " in out for kernel in kernel_sources())


def test_threads_have_settings_of_their_own() -> None:
    """Several at a time, with other settings: no finding, no wrong result, nothing left behind."""
    before, kernel = current(), CUDA_KERNELS[0].name

    def work(number: int) -> bool:
        q, k, v = inputs()
        expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
        for _ in range(3):
            with settings(mode=("fast", "checked")[number % 2], seed=number):
                out = flash_wmma.forward(q, k, v, kernel=kernel)
                if current().seed != number or (out.double() - expected).abs().max() > 5e-3:
                    return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
    assert current() == before


def test_threads(tmp_path: Path) -> None:
    """Threads run kernels, programs and profiles at the same time, each with settings of its own."""
    source = tmp_path / "program.cu"
    body = "for (int i = 0; i < 200; ++i) x[threadIdx.x] += 1"  # long enough for others to come in between
    source.write_text(PROGRAM.replace('#include "step\'s.h"', "").replace("x[threadIdx.x + OFFSET] += STEP", body))
    program = Program(source)
    with settings(mode="checked", arch=75, seed=1):
        compiled = [kernel_library("wmma_v1", mode) for mode in ("fast", "checked")]
    assert all(path.exists() for path in compiled)

    def forwards(number: int) -> None:
        q, k, v = inputs(20 + 10 * number)
        kernel = next(kernel for kernel in CUDA_KERNELS if kernel.name == "wmma_v1")
        for seed in range(50):
            with settings(mode="checked" if number % 2 else "fast", seed=seed):
                check(*run(emulated_kernel(kernel), q, k, v), reference(emulated_kernel(kernel), q, k, v))
                assert current().seed == seed

    def calls(number: int) -> None:
        x = torch.zeros(32 + number)
        for _ in range(1000):
            program.call("add", x)
        assert x.tolist() == [200_000.0] * 32 + [0.0] * number
        with pytest.raises(EmulatorError, match="out of bounds"):
            program.call("add", torch.zeros(31))

    def profiles(number: int) -> None:
        for _ in range(3):
            (launch,) = program.profile("add", torch.zeros(32)).launches
            assert (launch.launches, launch.counts.global_memory["load"].requests) == (1, 200)
        q, k, v = inputs(20)
        (launch,) = flash_wmma.profile(q, k, v, kernel="wmma_v1").launches
        assert (launch.launches, launch.name) == (1, "wmma_v1")

    with settings(seed=7), ThreadPoolExecutor(6) as pool:
        for task in [pool.submit(work, i) for i in (0, 1) for work in (forwards, calls, profiles)]:
            task.result(timeout=300)
        assert current().seed == 7


def test_interleaved_settings() -> None:
    first, second = settings(seed=1), settings(arch=75)
    before = current()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (current().seed, current().arch) == (0, 75)
    second.__exit__(None, None, None)
    assert current() == before


def test_interleaved_poison() -> None:
    """Threads that run kernels at the same time leave torch's flag as it was."""
    first, second = poisoned_memory(), poisoned_memory()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.are_deterministic_algorithms_enabled()
    second.__exit__(None, None, None)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"sm_count": 2.5}, TypeError),
        ({"sm_count": 0}, ValueError),
        ({"smem_optin": -1}, ValueError),
        ({"seed": -1}, ValueError),
        ({"seed": 2**64}, ValueError),
        ({"threads": True}, TypeError),
        ({"arch": 75.0}, TypeError),
        ({"warp_size": 16}, ValueError),
        ({"counters": 1}, TypeError),
    ],
)
def test_wrong_settings(changes: dict[str, object], error: type[Exception]) -> None:
    (field,) = changes
    with pytest.raises(error, match=f"^{field}: got "), settings(**changes):
        pass
    assert current() == Settings(mode=current().mode)


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), MemoryError("no room"), SystemExit(3)])
def test_whatever_is_raised_while_compiling(monkeypatch: pytest.MonkeyPatch, raised: BaseException) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(_runtime, "kernel_library", fail)
    wanted = KeyboardInterrupt if isinstance(raised, KeyboardInterrupt) else EmulatorError
    with pytest.raises(wanted) as caught:
        flash_wmma.forward(*inputs(), kernel="wmma_v2")
    if wanted is EmulatorError:
        assert str(caught.value) == f"emulator: {type(raised).__name__}: {raised}"


def test_cpu_without_avx2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx bmi2 f16c fma\n")
    monkeypatch.setattr(_compile, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(_compile.platform, "machine", lambda: "x86_64")
    with pytest.raises(EmulatorError, match="lacks avx2"):
        _compile.compiler.__wrapped__()


PROGRAM = """
#include <entry.h>
#include <launch.h>
#include "step's.h"

__global__ void add(float* x) { x[threadIdx.x + OFFSET] += STEP; }
void run(float* x) { flash_wmma::launch(add, {dim3(1), dim3(32)}, nullptr, x); }
const flash_wmma::Entry kAdd("add", run);
"""
CALL = """
import sys, torch, flash_wmma
x = torch.zeros(32)
try:
    flash_wmma.emulator.Program(sys.argv[1]).call("add", x)
    print(x[0].item())
except flash_wmma.emulator.EmulatorError as error:
    print(error)
"""


def test_paths(tmp_path: Path) -> None:
    """Sources that the compiler calls /usr/..., and folders with characters that shells and make take apart."""
    folder = tmp_path / "it's $a #folder"
    folder.mkdir()
    source, header, gxx = folder / "a program.cu", folder / "step's.h", folder / "g++"
    source.write_text(PROGRAM)
    gxx.write_text(f'#!/bin/sh\nexec g++ {shlex.quote(f"-ffile-prefix-map={folder}=/usr/src/project")} "$@"\n')
    gxx.chmod(0o755)

    def call(step: int, offset: int) -> str:
        header.write_text(f"#define STEP {step}\n#define OFFSET {offset}\n")
        done = python(CALL, str(source), FLASH_WMMA_GXX=str(gxx), FLASH_WMMA_CACHE=str(folder / "cache"))
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert call(1, 0) == "1.0\n"
    assert call(2, 0) == "2.0\n"
    assert "\n  at /usr/src/project/a program.cu:6\n" in call(2, 1)
