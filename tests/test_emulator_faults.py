"""Deliberate bugs are caught, with what, who and where; their right twins and the kernels of the library are not.

tests/emulator/faults.cu has the kernels, each with the bug and without."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from programs import FOLDER, marked_lines

import flash_wmma
from flash_wmma.emulator import EmulatorError, Program, _runtime, settings
from flash_wmma.emulator._program import Argument

SOURCE = FOLDER / "faults.cu"
SIZE = 1028
SEEDS = range(1, 21)
BLOCK_0 = r"warp 0, block \(0, 0, 0\)"


@dataclass(frozen=True)
class Fault:
    name: str
    kind: str
    """Begins the finding; regular expressions, as ``who`` is."""
    who: str
    at: str = ""
    """What follows the name in the mark of the line; ``also`` is the line of the other side."""
    also: str | None = None


RACES = (
    Fault(
        "dropped_syncthreads", "read after write", r"lane \d+ of warp 1, block \(0, 0, 0\) reads 4", "reads", "writes"
    ),
    Fault("dropped_syncwarp", "read after write", rf"lane 1 of {BLOCK_0} reads 4 bytes of shared", "reads", "writes"),
    Fault("shuffle_as_barrier", "read after write", rf"lane \d+ of {BLOCK_0} reads 4", "reads", "writes"),
    Fault("half_a_syncwarp", "read after write", rf"lane \d+ of {BLOCK_0} reads 4", "reads", "writes"),
    Fault("same_word", "write after write", rf"lane 1 of {BLOCK_0} writes 4", "", ""),
    Fault("wrong_double_buffer", "read after write", rf"lane 0 of {BLOCK_0} reads 4", "reads", "writes"),
    Fault("async_without_barrier", "read after write", rf"lane 1 of {BLOCK_0} reads 4", "reads", "copies"),
    Fault("async_too_early", "read after write", rf"lane 1 of {BLOCK_0} reads 4", "reads", "copies"),
    Fault("written_after_arrival", "read after write", r"lane 31 of warp 1, block .* reads 4", "reads", "writes"),
    Fault("overlapping_arrays", "write after write", r"lane 0 of warp 1, block .* writes 4", "second", "first"),
    Fault("atomic_and_plain", "write after read", rf"lane 0 of {BLOCK_0} updates 4", "adds", "reads"),
    Fault(
        "blocks_accumulate",
        "read after write",
        r"lane 0 of warp 0, block \(1, 0, 0\) reads 4 bytes of argument 0",
        "",
        "",
    ),
    Fault("racing_maximum", "read after write", rf"lane 1 of {BLOCK_0} reads 4 bytes of argument 0 at byte 0", "", ""),
    Fault(
        "global_handover", "write after read", r"lane 0 of warp 1, block .* writes 4 bytes of arg", "writes", "reads"
    ),
    Fault("racing_memset", "write after write", rf"lane 1 of {BLOCK_0} writes 4", "", ""),
    Fault("two_warps_read", "write after read", r"lane 0 of warp 1, block .* writes 4 bytes of arg", "writes", "reads"),
    Fault("own_atomic_last", "write after read", rf"lane 0 of {BLOCK_0} updates 4 bytes of shared", "adds", "reads"),
    Fault("own_lane_last", "read after write", rf"lane 1 of {BLOCK_0} reads 4 bytes of shared", "reads", "adds"),
    Fault(
        "own_global_atomic_last", "write after write", r"lane 0 of warp 1, block .* writes 4 bytes", "writes", "adds"
    ),
    Fault("blocks_in_place", "write after read", r"lane 0 of warp 0, block \(1, .* writes 4 bytes", "writes", "reads"),
)
OUTSIDE_SHARED = r"out of bounds of shared memory \(256 bytes\)"
PAST = "out of bounds of global memory, 0 bytes past the end of argument"
OTHERS = (
    Fault(
        "missing_async_wait",
        "read of an asynchronous copy's target before its wait",
        rf"lane 31 of {BLOCK_0} reads 4 bytes of shared memory at byte 636",
        "reads",
        "copies",
    ),
    Fault(
        "async_target_written",
        "write to an asynchronous copy's target before its wait",
        rf"lane 31 of {BLOCK_0} writes 4 bytes of shared memory at byte 508",
        "writes",
        "copies",
    ),
    Fault("async_at_exit", "asynchronous copy under way at exit", rf"lane 0 of {BLOCK_0}", "copies"),
    Fault(
        "skipped_shuffle",
        "lanes of a warp disagree on a collective",
        rf"lane 3 of {BLOCK_0} in __syncwarp\n[^\n]*\n  and lanes 0-2 in __shfl_sync, at",
        "skips",
        "shuffles",
    ),
    Fault(
        "exited_lane",
        "a collective of lanes that have exited or do not exist",
        rf"lane 24 of {BLOCK_0}, which exits, in __shfl_sync",
    ),
    Fault(
        "own_lane_left_out",
        "a mask leaves out its own lane",
        rf"lane 31 of {BLOCK_0} in __shfl_sync with mask 0x7fffffff",
    ),
    Fault(
        "masks_differ",
        "lanes of a warp disagree on a mask",
        rf"lane 16 of {BLOCK_0} in __shfl_sync with mask 0xffffff00\n[^\n]*\n  and lanes 0-15 in __shfl_sync with",
        "",
        "",
    ),
    Fault(
        "divergent_barrier",
        "barrier divergence",
        r"lane 8 of warp 1, block \(0, 0, 0\) in __syncthreads\n[^\n]*\n  and lanes 0-7 in __syncthreads, at",
        "others",
        "some",
    ),
    Fault(
        "two_barriers",
        "barrier divergence",
        r"warp 1, block \(0, 0, 0\) in __syncthreads\n[^\n]*\n  and other warps in __syncthreads, at",
        "others",
        "some",
    ),
    Fault(
        "named_barrier_counts",
        "warps disagree on a barrier's threads",
        r"warp 1, block \(0, 0, 0\) in bar.sync of barrier 2 for 96\n[^\n]*\n  and others for 64, at",
        "consumer",
        "producer",
    ),
    Fault(
        "named_barrier_of_lanes", "barriers 0 to 15 exist, for whole warps", r"lane 0 of .* of barrier 5 for 48 threads"
    ),
    Fault(
        "off_by_one_row", "read of uninitialised shared memory", rf"lane \d+ of {BLOCK_0} reads 4 .* at byte 2\d\d\d\n"
    ),
    Fault(
        "uninitialised_tile", "read of uninitialised shared memory", rf"lane \d+ of {BLOCK_0} reads 4 bytes of shared"
    ),
    Fault("uninitialised_counter", "read of uninitialised shared memory", rf"lane \d+ of {BLOCK_0} updates 4 bytes"),
    Fault("shared_out_of_bounds", OUTSIDE_SHARED, rf"lane 31 of {BLOCK_0} writes 4 bytes of shared memory at byte 256"),
    Fault(
        "map_too_large",
        "a map of shared memory of 4096 bytes, but the launch asked for 256",
        rf"lane 0 of {BLOCK_0}",
    ),
    Fault("misaligned_ldmatrix", "the address of a row is not 16-byte aligned", rf"lane 1 of {BLOCK_0} in ldmatrix"),
    Fault("misaligned_vector_shared", "misaligned access", rf"lane \d+ of {BLOCK_0} reads 16 bytes of shared memory"),
    Fault(
        "misaligned_vector_global", "misaligned access", rf"lane 0 of {BLOCK_0} reads 8 bytes of argument 1 at byte 4"
    ),
    Fault("misaligned_wmma", "the address is not 32-byte aligned", rf"{BLOCK_0} in wmma::load_matrix_sync"),
    Fault("wmma_pitch", "the pitch is no multiple of 16 bytes", rf"{BLOCK_0} in wmma::store_matrix_sync"),
    Fault(
        "wmma_lanes_differ",
        "lanes differ in the address, the pitch or the layout",
        rf"{BLOCK_0} in wmma::load_matrix_sync",
    ),
    Fault("unmasked_tail_read", f"{PAST} 1", rf"lane 28 of {BLOCK_0} reads 4 bytes of global memory"),
    Fault("unmasked_tail_write", f"{PAST} 0", r"lane 4 of warp 0, block \(32, 0, 0\) writes 4 bytes"),
    Fault("memcpy_past_the_end", f"{PAST} 0", rf"lane 0 of {BLOCK_0} writes 4 bytes of global memory"),
    Fault("ldmatrix_of_global", "ldmatrix of an address outside shared memory", rf"lane 0 of {BLOCK_0}"),
    Fault("async_from_shared", "asynchronous copy from an address outside global memory", rf"lane 0 of {BLOCK_0}"),
    Fault("flag_never_set", "no progress: a lane waits for what no other does", rf"lane 0 of {BLOCK_0}"),
    Fault("line_in_vain", "line fetched and not read", rf"lane 0 of {BLOCK_0}"),
    Fault(
        "line_outside",
        "line fetched out of bounds of global memory, 128 bytes past the end of argument 1",
        rf"lane 0 of {BLOCK_0}",
    ),
    Fault("async_tail", f"{PAST} 1", rf"lane 31 of {BLOCK_0} reads 16 bytes of global memory"),
)
WRONG_RESULTS = ("shuffle_from_outside", "wrong_lane_map")
DEADLOCKS = ("deadlock", "named_barrier_too_few", "named_barrier_too_many")
NAMES = [fault.name for fault in RACES + OTHERS] + [*WRONG_RESULTS, *DEADLOCKS, "written_input"]


@pytest.fixture(scope="module")
def faults() -> Program:
    return Program(SOURCE)


@pytest.fixture(scope="module")
def lines() -> dict[str, int]:
    return marked_lines(SOURCE, "fault")


def run(program: Program, name: str, right: bool, seed: int = 0, threads: int = 1) -> torch.Tensor:
    out = torch.zeros(SIZE)
    values = torch.rand(SIZE, generator=torch.Generator().manual_seed(0)) + 1
    with settings(seed=seed, threads=threads):
        program.call(name, out, values, SIZE, int(right))
    return out


def message(program: Program, name: str, seed: int = 0, threads: int = 1) -> str:
    with pytest.raises(EmulatorError) as caught:
        run(program, name, False, seed, threads)
    return str(caught.value)


def place(lines: dict[str, int], name: str, mark: str) -> str:
    return f"{SOURCE}:{lines[f'{name} {mark}'.strip()]}"


def test_all_are_tested() -> None:
    registered = re.findall(r'const Entry \w+\(\s*"(\w+)"', SOURCE.read_text())
    assert sorted(NAMES) == sorted(registered)
    assert len(NAMES) >= 18


@pytest.mark.parametrize("fault", RACES + OTHERS, ids=[fault.name for fault in RACES + OTHERS])
def test_caught(faults: Program, lines: dict[str, int], fault: Fault) -> None:
    text = message(faults, fault.name)
    memory = ", (shared|global) memory" if fault in RACES else ""
    assert re.match(rf"emulator: faults::{fault.name}<false>: {fault.kind}{memory}: {fault.who}", text), text
    places = re.findall(r"at (\S+:\d+)", text)
    expected = [place(lines, fault.name, fault.at)]
    if fault.also is not None:
        expected.append(place(lines, fault.name, fault.also))
    assert places == expected, text
    if fault in RACES:
        assert text.endswith(": nothing orders the two")
        assert re.search(r"\n  and lanes?( \d+)? of warp \d+( of block \d+)?, at ", text), text


@pytest.mark.parametrize("fault", RACES, ids=[fault.name for fault in RACES])
def test_races_are_caught_under_every_schedule(faults: Program, lines: dict[str, int], fault: Fault) -> None:
    """Which access comes first, and so what the finding is called, differs; that there is one does not."""
    assert fault.also is not None
    either = {place(lines, fault.name, mark) for mark in (fault.at, fault.also)}
    for seed in SEEDS:
        text = message(faults, fault.name, seed, threads=2)
        assert re.search(r"<false>: (read after write|write after (read|write)|read of uninitialised)", text), text
        assert set(re.findall(r"at (\S+:\d+)", text)) <= either, text


def test_deadlock(faults: Program, lines: dict[str, int]) -> None:
    others, one = (place(lines, "deadlock", mark) for mark in ("others", "one"))
    assert message(faults, "deadlock") == (
        "emulator: faults::deadlock<false>: deadlock: nothing can run\n"
        f"  lanes 0-2 4-31 of warp 0, block (1, 0, 0): in __syncthreads at {others}\n"
        f"  lane 3 of warp 0, block (1, 0, 0): in __syncwarp at {one}\n"
        f"  lanes 0-31 of warp 1, block (1, 0, 0): in __syncthreads at {others}"
    )


def test_deadlock_at_named_barriers(faults: Program, lines: dict[str, int]) -> None:
    assert message(faults, "named_barrier_too_few") == (
        "emulator: faults::named_barrier_too_few<false>: deadlock: nothing can run\n"
        f"  lanes 0-31 of warp 2, block (0, 0, 0): in bar.sync at {place(lines, 'named_barrier_too_few', '')}\n"
        "  64 threads have exited"
    )
    text = message(faults, "named_barrier_too_many")
    assert text.count(f"in bar.sync at {place(lines, 'named_barrier_too_many', '')}") == 2


def test_wrong_results_show(faults: Program) -> None:
    """What the hardware leaves undefined is NaN here; a wrong lane map touches nothing that it should not."""
    assert run(faults, "shuffle_from_outside", False)[:16].isnan().all()
    values = torch.rand(SIZE, generator=torch.Generator().manual_seed(0)) + 1
    assert torch.equal(run(faults, "wrong_lane_map", True)[:256], values[:256])
    assert not torch.equal(run(faults, "wrong_lane_map", False)[:256], values[:256])


def test_result_may_be_right_where_a_barrier_is_missing(faults: Program) -> None:
    """The finding is of what could go wrong, not of what did: the fast build runs the same kernels unchecked."""
    unchecked = Program(SOURCE, mode="fast")
    for name in ("dropped_syncthreads", "dropped_syncwarp"):
        assert torch.equal(run(unchecked, name, False), run(faults, name, True))


def test_input_may_not_be_written(faults: Program, lines: dict[str, int]) -> None:
    out, values = torch.zeros(SIZE), torch.ones(SIZE)
    call = ctypes.CDLL(str(faults.library)).flash_wmma_call
    call.restype = ctypes.c_char_p

    def error(right: int) -> str:
        with settings(mode="checked", threads=1):
            _runtime.configure([("o", out, True), ("q", values, False)])
        rows = [Argument(pointer=out.data_ptr()), Argument(pointer=values.data_ptr())]
        rows += [Argument(integer=SIZE), Argument(integer=right)]
        text: bytes | None = call(b"written_input", (Argument * 4)(*rows), ctypes.c_size_t(4))
        _runtime.configure([])
        return "" if text is None else text.decode()

    assert error(1) == ""
    assert error(0) == (
        "emulator: faults::written_input<false>: write to an input: lane 0 of warp 0, block (0, 0, 0) writes 4 bytes "
        f"of q at byte 0\n  at {place(lines, 'written_input', '')}"
    )


REFUSED = """
#include <cuda_fp16.h>
#include <entry.h>
#include <launch.h>

__global__ void nothing(float*) {}
void launched(float* x, int threads, int bytes) {
    flash_wmma::launch(nothing, {dim3(1), dim3(static_cast<unsigned>(threads)), bytes}, nullptr, x);
}
const flash_wmma::Entry kLaunched("launched", launched);

void typed(const float*, __half*, unsigned*, const void*, int, float) {}
const flash_wmma::Entry kTyped("typed", typed);
void none() {}
const flash_wmma::Entry kNone("none", none);
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Program:
    source = tmp_path_factory.mktemp("refused") / "refused.cu"
    source.write_text(REFUSED)
    return Program(source)


@pytest.mark.parametrize(
    ("threads", "smem_bytes", "end"),
    [
        (1025, 0, r"blocks of \(1025, 1, 1\) threads; a grid has 1 block or more, a block 1 to 1024 threads"),
        (0, 0, "a block 1 to 1024 threads"),
        (32, 232449, "232449 bytes of shared memory; at most 232448 bytes a block"),
    ],
)
def test_refused_launches_name_the_limit(refused: Program, threads: int, smem_bytes: int, end: str) -> None:
    with pytest.raises(EmulatorError, match=rf"emulator: nothing: launch: .*{end}$"):
        refused.call("launched", torch.empty(1), threads, smem_bytes)
    refused.call("launched", torch.empty(1), 1024, 232448)


SQUARE = torch.zeros(4, 4)
TYPED = (SQUARE, SQUARE.half(), SQUARE.int(), SQUARE.t(), 1, 2.0)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, SQUARE.double(), "argument 0: got float64, typed takes const float*"),
        (0, SQUARE.t(), "argument 0: got strides (1, 4), not contiguous, typed takes const float*"),
        (0, 4096, "argument 0: got int, typed takes const float*"),
        (1, SQUARE, "argument 1: got float32, typed takes __half*"),
        (2, SQUARE.long(), "argument 2: got int64, typed takes unsigned int*"),
        (4, 1.0, "argument 4: got float, typed takes int"),
        (4, SQUARE, "argument 4: got Tensor, typed takes int"),
        (5, 2, "argument 5: got int, typed takes float"),
    ],
)
def test_arguments_of_other_types(refused: Program, place: int, value: torch.Tensor | float, message: str) -> None:
    """What an entry would read as something else."""
    refused.call("typed", *TYPED)
    arguments = [*TYPED[:place], value, *TYPED[place + 1 :]]
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        refused.call("typed", *arguments)


def test_arguments_of_another_number(refused: Program) -> None:
    refused.call("none")
    with pytest.raises(EmulatorError, match="typed takes 6 arguments, not 1"):
        refused.call("typed", SQUARE)
    with pytest.raises(EmulatorError, match="no entry is called absent"):
        refused.call("absent", SQUARE)


def test_shared_variables_are_refused_with_the_remedy(tmp_path: Path) -> None:
    source = tmp_path / "shared.cu"
    source.write_text("__global__ void f() { __shared__ float x[32]; x[threadIdx.x] = 0.f; }\n")
    with pytest.raises(EmulatorError, match=r"shared\.cu:1:.*take shared_memory<Struct>\(\) instead"):
        Program(source)


ENDLESS = """
#include <entry.h>
#include <launch.h>

__global__ void barriers(float*) { for (;;) __syncthreads(); }
__global__ void additions(float* x) { for (;;) x[blockIdx.x * 64 + threadIdx.x] += 1.f; }
template <void (*Kernel)(float*)>
void run(float* x) { flash_wmma::launch(Kernel, {dim3(4), dim3(64)}, nullptr, x); }
const flash_wmma::Entry kBarriers("barriers", run<barriers>), kAdditions("additions", run<additions>);
"""
INTERRUPTED = """
import signal, sys, threading, torch
from flash_wmma import emulator
source, mode, name, threads = sys.argv[1:]
program = emulator.Program(source, mode=mode)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
try:
    with emulator.settings(threads=int(threads)):
        program.call(name, torch.zeros(256))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(("mode", "name"), [("checked", "barriers"), ("checked", "additions"), ("fast", "barriers")])
@pytest.mark.parametrize("threads", [1, 2])
def test_interrupt(tmp_path: Path, mode: str, name: str, threads: int) -> None:
    """Ctrl-C ends a kernel that does not end."""
    source = tmp_path / "endless.cu"
    source.write_text(ENDLESS)
    command = [sys.executable, "-c", INTERRUPTED, str(source), mode, name, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "interrupted\n", done.stderr


def test_a_finding_leaves_nothing_behind(faults: Program) -> None:
    """The next launch is checked as if it were the first."""
    first = message(faults, "uninitialised_tile")
    for name in ("dropped_syncthreads", "missing_async_wait", "deadlock", "exited_lane"):
        message(faults, name)
        run(faults, name, True)
    assert message(faults, "uninitialised_tile") == first


@pytest.mark.parametrize("name", NAMES)
def test_right_twins_under_20_schedules(faults: Program, name: str) -> None:
    first = run(faults, name, True)
    assert not first.isnan().any()
    for seed in SEEDS:
        out = run(faults, name, True, seed, threads=2)
        if name == "blocks_accumulate":  # in the order of the atomics
            torch.testing.assert_close(out, first, rtol=1e-6, atol=0)
        else:
            assert torch.equal(out, first)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("wmma_v1", torch.float16),
        ("wmma_v2", torch.float16),
        ("wmma_v3", torch.float16),
        ("wmma_v3", torch.float32),
        ("wmma_v3", torch.bfloat16),
    ],
)
def test_kernels_under_20_schedules(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 100, 64, generator=generator).to(dtype) for _ in range(3))
    with settings(mode="checked"):
        first = flash_wmma.forward(q, k, v, kernel=name, causal=True)
    for seed in SEEDS:
        with settings(mode="checked", seed=seed):
            assert torch.equal(flash_wmma.forward(q, k, v, kernel=name, causal=True), first)
