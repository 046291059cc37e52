"""Hopper's units in the emulator: the layouts of wgmma and of tensor copies, as on a GPU where there is one; deliberate
bugs with them, each of which is found or gives a wrong result; counters.

tests/emulator/sm90.cu has the kernels. On a machine with a GPU and no nvcc, FLASH_WMMA_TEST_PROGRAMS names a folder
with sm90.so, made by
nvcc -std=c++20 -Icsrc -Icsrc/device -shared -Xcompiler -fPIC -gencode arch=compute_90a,code=sm_90a \
    tests/emulator/sm90.cu -o sm90.so
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import operator
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from needs import needs
from programs import FOLDER, GpuProgram, gpu_program, marked_lines

import flash_wmma
from flash_wmma.emulator import EmulatorError, Program, _runtime, settings
from flash_wmma.emulator._program import Argument

SOURCE = FOLDER / "sm90.cu"
SEEDS = range(1, 9)
SIDE, LANES, TILES, STORED_ROWS, ROUNDS = 64, 128, 9, 32 * 5 - 7, 25
WARPS = r"wgmma of warps 0-3, block \(0, 0, 0\)"
PRODUCER = r"lane 0 of warp 4, block \(0, 0, 0\)"
BLOCK_0 = r"warp 0, block \(0, 0, 0\)"


# --- layouts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    program: Program | GpuProgram
    device: str

    def call(self, name: str, *arguments: torch.Tensor | int) -> None:
        self.program.call(name, *(x.to(self.device) if isinstance(x, torch.Tensor) else x for x in arguments))


@pytest.fixture(scope="module", params=["checked", "fast", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if request.param != "cuda":
        return Machine(Program(SOURCE, mode=request.param), "cpu")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these instructions are of sm_90a alone")
    return Machine(gpu_program("sm90", tmp_path_factory.mktemp("programs")), "cuda")


def integers(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    """Small enough that every sum of products here is exact."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def registers_of_a(a: torch.Tensor) -> torch.Tensor:
    """What each thread holds of a 64 x 64 matrix: (thread, step along k, register, half of it)."""
    thread, step, i, pair = torch.meshgrid(*map(torch.arange, (LANES, 4, 4, 2)), indexing="ij")
    lane = thread % 32
    return a[thread // 32 * 16 + lane // 4 + 8 * (i % 2), 16 * step + 8 * (i // 2) + 2 * (lane % 4) + pair].contiguous()


def registers_of_d(d: torch.Tensor) -> torch.Tensor:
    """What each thread holds of a 64 x N product: (thread, register)."""
    thread, i = torch.meshgrid(torch.arange(LANES), torch.arange(d.shape[1] // 2), indexing="ij")
    lane = thread % 32
    return d[thread // 32 * 16 + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2].contiguous()


@pytest.mark.parametrize(
    "name",
    [
        "product_half_64_memory_k",
        "product_half_256_memory_k",
        "product_bf16_176_memory_k",
        "product_bf16_128_memory_n",
        "product_half_64_transposed_n",
        "product_bf16_128_transposed_k",
        "product_half_64_registers_n",
        "product_half_96_registers_n",
        "product_bf16_256_registers_n",
        "product_bf16_128_registers_k",
    ],
)
def test_products(machine: Machine, name: str) -> None:
    """The comment of wgmma says where elements are, in registers and in shared memory: of A along k and along m, of B
    along k and along n."""
    _, kind, columns, where, major = name.split("_")
    dtype = torch.float16 if kind == "half" else torch.bfloat16
    n = int(columns)
    a, b, c = (
        integers(SIDE, SIDE, dtype=dtype),
        integers(SIDE, n, dtype=dtype, seed=1),
        integers(SIDE, n, seed=2).float(),
    )
    out = torch.zeros(LANES, n // 2, device=machine.device)
    machine.call(
        name,
        out,
        {"memory": a, "transposed": a.T.contiguous(), "registers": registers_of_a(a)}[where],
        b if major == "n" else b.T.contiguous(),
        registers_of_d(c),
    )
    assert torch.equal(out.cpu(), registers_of_d(a.float() @ b.float() + c))


@pytest.mark.parametrize("name", ["short_rows_half_64", "short_rows_bf16_128"])
def test_products_of_short_rows(machine: Machine, name: str) -> None:
    """B whose rows have 8 elements along k, which a product reads twice; between the groups of rows there is NaN."""
    kind, columns = name.split("_")[2:]
    dtype = torch.float16 if kind == "half" else torch.bfloat16
    n = int(columns)
    a, b = integers(SIDE, 16, dtype=dtype), integers(n, 8, dtype=dtype, seed=1)
    out = torch.zeros(LANES, n // 2, device=machine.device)
    machine.call(name, out, registers_of_a(a.repeat(1, 4))[:, 0].contiguous(), b)
    assert torch.equal(out.cpu(), registers_of_d(a.float() @ torch.cat((b, b), 1).float().T))


BOX = ("columns", "rows", "column", "row")
STORED_BOXES = [
    (64, 40, 0, 0),
    (128, 100, 64, 37),
    (72, 50, 64, 20),  # 8 columns and 30 rows are inside
    (40, 33, 0, 0),  # narrower than the box
    (64, 40, 64, 0),  # wholly outside
    (64, 40, 0, 1000),
]
BEFORE_THE_FIRST = [
    (64, 40, -24, -7),  # columns and rows
    (8, 1, -56, -39),  # the corner
]


@pytest.mark.parametrize(BOX, STORED_BOXES + BEFORE_THE_FIRST)
def test_boxes(machine: Machine, columns: int, rows: int, column: int, row: int) -> None:
    """A box lies by rows of 128 bytes, of which 16-byte units change places: unit u of row r is at u ^ (r % 8). What is
    outside the tensor is zero, also where there is another matrix."""
    matrices = torch.arange(1, 1 + 2 * rows * columns).reshape(2, rows, columns).to(torch.int16)
    out = torch.full((40, SIDE), -1, dtype=torch.int16, device=machine.device)
    machine.call("box", out, matrices, columns, rows, column, row)
    expected = torch.zeros(40, SIDE, dtype=torch.int16)
    for r in range(40):
        for c in range(SIDE):
            if 0 <= row + r < rows and 0 <= column + c < columns:
                expected[r, (c // 8 ^ r % 8) * 8 + c % 8] = matrices[1, row + r, column + c]
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize(BOX, STORED_BOXES)
def test_stored_boxes(machine: Machine, columns: int, rows: int, column: int, row: int) -> None:
    """A store reads such a box, and writes what is inside the tensor: nothing else, also where there is another
    matrix."""
    box = torch.arange(1, 1 + 40 * SIDE).reshape(40, SIDE).to(torch.int16)
    out = torch.full((2, rows, columns), -1, dtype=torch.int16, device=machine.device)
    machine.call("stored", out, box, columns, rows, column, row)
    expected = torch.full((2, rows, columns), -1, dtype=torch.int16)
    for r in range(40):
        for c in range(SIDE):
            if 0 <= row + r < rows and 0 <= column + c < columns:
                expected[1, row + r, column + c] = box[r, c]
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize(("column", "row"), [(-8, 0), (0, -1)])
def test_store_before_the_first(checked: Program, column: int, row: int) -> None:
    """An illegal instruction on an H100."""
    out, box = torch.zeros(2, 40, SIDE, dtype=torch.int16), torch.zeros(40, SIDE, dtype=torch.int16)
    with pytest.raises(EmulatorError, match="a tensor store from negative coordinates: lane 0"):
        checked.call("stored", out, box, SIDE, 40, column, row)


def test_reduction(machine: Machine) -> None:
    """__reduce_or_sync of a warp, and of each half of it."""
    words = torch.randint(-(2**31), 2**31, (32,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    words &= 0x11111111 << torch.arange(32, dtype=torch.int32) % 4
    words[:16] &= 0x7FFF
    out = torch.zeros(2, 32, dtype=torch.int32, device=machine.device)
    machine.call("reduced", out, words)

    def reduced(some: torch.Tensor) -> torch.Tensor:
        return torch.tensor(functools.reduce(operator.or_, some.tolist()), dtype=torch.int32).expand(len(some))

    assert torch.equal(out[0].cpu(), reduced(words))
    assert torch.equal(out[1].cpu(), torch.cat([reduced(words[:16]), reduced(words[16:])]))


# --- bugs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    kernel: str
    name: str
    found: str | None = None
    """Begins the finding, a regular expression. ``None``: the result is wrong."""
    at: str = ""
    """The mark of its line; ``also`` is that of the other side's."""
    also: str | None = None


def deadlock(barrier: int, parity: int, phase: int, arrivals: str, lacking: int) -> str:
    return (
        r"deadlock: nothing can run\n(?s:.*)in barrier_wait at \S+, for parity "
        rf"{parity} of the barrier at byte {barrier}: its phase {phase} lacks {arrivals} arrivals and {lacking} bytes\n"
    )


PENDING = rf"read of an asynchronous copy's target before its wait: {WARPS} reads 16 bytes of shared memory at byte "
OVERRUN = (
    rf"write after read, shared memory: {PRODUCER}, in tensor_load, writes 8192 bytes of shared memory at byte 8192"
)
UNFENCED = rf"missing fence.proxy.async: {WARPS} reads 16 bytes of shared memory at byte "
UNFENCED_STORE = (
    rf"missing fence.proxy.async: lane 0 of {BLOCK_0}, in tensor_store, reads 16 bytes of shared memory at byte "
)
A_FULL, FULL, EMPTY = 24576, 24584, 24600  # barriers in the map
FAULTS = [
    Fault(
        "pipeline",
        "NotInitialised",
        rf"a barrier that is not initialised: lane 0 of {BLOCK_0} in barrier_wait",
        "wait a",
    ),
    Fault(
        "pipeline",
        "InitialisedTwice",
        rf"a barrier is initialised twice: {PRODUCER} in barrier_init",
        "second init",
        "init",
    ),
    Fault(
        "pipeline",
        "NoInitFence",
        rf"a tensor copy may not see that its barrier is initialised: {PRODUCER} in tensor_load",
        "copy a",
        "init a",
    ),
    Fault(
        "pipeline",
        "NoInitBarrier",
        rf"a barrier that is not initialised: lane 0 of {BLOCK_0} in barrier_wait",
        "wait a",
    ),
    Fault(
        "pipeline",
        "BarrierOverwritten",
        rf"access to a barrier as to ordinary memory: lane 0 of {BLOCK_0} writes 8 bytes of .* at byte {FULL}",
        "overwrite",
        "init",
    ),
    Fault("pipeline", "NoExpect", PENDING + "8192", "product", "copy"),
    Fault("pipeline", "FewBytes", deadlock(FULL, 0, 0, "0 of 1", -2048)),
    Fault("pipeline", "ManyBytes", deadlock(FULL, 0, 0, "0 of 1", 16)),
    Fault("pipeline", "WrongParity", deadlock(EMPTY, 0, 0, "4 of 4", 0)),
    Fault("pipeline", "StuckParity", PENDING + "8192", "product", "copy"),
    Fault("pipeline", "FewArrivals", rf"write after write, shared memory: {PRODUCER}, in tensor_load", "copy", "copy"),
    Fault("pipeline", "ManyArrivals", deadlock(EMPTY, 0, 0, "1 of 5", 0)),
    Fault("pipeline", "NoWait", PENDING + "8192", "product", "copy"),
    Fault("pipeline", "OneWarpWaits", rf"read after write, shared memory: {WARPS} reads 16", "product", "copy"),
    Fault(
        "pipeline", "NoRelease", rf"more arrivals than a barrier's phase has: {PRODUCER} in barrier_arrive", "arrival"
    ),
    Fault("pipeline", "EarlyRelease", PENDING + "8192", "product", "copy"),
    Fault("pipeline", "ReleaseOfPending", OVERRUN, "copy", "product"),
    Fault("pipeline", "NoProductWait", OVERRUN, "copy", "product"),
    Fault("pipeline", "NoFence", rf"no wgmma.fence before the first product: lane 0 of {BLOCK_0}", "product"),
    Fault(
        "pipeline",
        "Misplaced",
        rf"a tensor copy to a place that is not 1024-byte aligned: {PRODUCER} in tensor_load",
        "copy",
    ),
    Fault("pipeline", "SmallBox", deadlock(FULL, 0, 0, "0 of 1", 4096)),
    Fault("pipeline", "WrongTile"),
    Fault("pipeline", "OldStage", OVERRUN, "copy", "product"),
    Fault(
        "pipeline", "TooFar", rf"access to a barrier as to ordinary memory: {WARPS} reads 16 bytes", "product", "init a"
    ),
    Fault("pipeline", "Unused", r"tensor copy under way at exit: block \(0, 0, 0\)", "copy"),
    Fault("handover", "NoProxyFence", UNFENCED + "0", "product", "writes"),
    Fault("handover", "EarlyProxyFence", UNFENCED + "0", "product", "writes"),
    Fault("handover", "ProxyFenceOfOneLane", UNFENCED + "16", "product", "writes"),
    Fault("handover", "NoBarrier", rf"read after write, shared memory: {WARPS} reads 16 bytes", "product", "writes"),
    Fault("handover", "NoSwizzle"),
    Fault("handover", "WrongSwizzle"),
    Fault(
        "handover", "Uninitialised", rf"read of uninitialised shared memory: {WARPS} reads 16 .* byte 8176", "product"
    ),
    Fault(
        "handover",
        "Overwritten",
        r"write after read, shared memory: lane 31 of warp 3, .* writes 2 bytes of shared memory at byte 0",
        "overwrites",
        "product",
    ),
    Fault(
        "handover",
        "CopiedOver",
        rf"missing fence.proxy.async: lane 0 of {BLOCK_0}, in tensor_load, writes 8192 bytes",
        "copy",
        "b",
    ),
    Fault("patch", "WaitOfOneLane", r"write after write, shared memory: lane \d+ of warp 4, block", "zeros", "copy"),
    Fault("patch", "NoFence", UNFENCED + "12288", "product", "zeros"),
    Fault("patch", "LateFence", UNFENCED + "12304", "product", "zeros"),
    Fault("patch", "NoSync", rf"read after write, shared memory: {WARPS} reads 16 .* byte 12304", "product", "zeros"),
    Fault("relay", "NoSyncBehindEmpty", rf"write after read, shared memory: lane \d+ of {BLOCK_0}", "writes", "reads"),
    Fault("relay", "NoSyncBeforeFull", r"read after write, shared memory: lane \d+ of warp 1", "reads", "writes"),
    Fault("relay", "NoSyncBehindFull", r"read after write, shared memory: lane \d+ of warp 1", "reads", "writes"),
    Fault("relay", "HalfKnows", r"read after write, shared memory: lane \d+ of warp 1", "reads", "writes"),
    Fault("relay", "NoSyncBeforeEmpty", rf"write after read, shared memory: lane \d+ of {BLOCK_0}", "writes", "reads"),
    Fault("relay", "HalfSync", rf"write after read, shared memory: lane \d+ of {BLOCK_0}", "writes", "reads"),
    Fault("relay", "MatrixReleased", rf"write after read, shared memory: lane \d+ of {BLOCK_0}", "writes", "matrices"),
    Fault(
        "bulk",
        "NoWait",
        rf"read of an asynchronous copy's target before its wait: lane \d+ of {BLOCK_0} reads 4",
        "reads",
        "copy",
    ),
    Fault(
        "bulk",
        "NoProxyFence",
        rf"missing fence.proxy.async: lane 0 of {BLOCK_0}, in bulk_load, writes 512 bytes of shared memory at byte 0",
        "copy",
        "writes",
    ),
    Fault("bulk", "FewBytes", deadlock(1024, 0, 0, "0 of 1", -16).removesuffix(r"\n")),
    Fault(
        "bulk",
        "OddBytes",
        rf"a bulk copy of bytes or from an address that is no multiple of 16: lane 0 of {BLOCK_0}",
        "copy",
    ),
    Fault(
        "bulk",
        "MisalignedSource",
        rf"a bulk copy of bytes or from an address that is no multiple of 16: lane 0 of {BLOCK_0}",
        "copy",
    ),
    Fault(
        "bulk",
        "Misplaced",
        rf"a tensor copy to a place that is not 16-byte aligned: lane 0 of {BLOCK_0} in bulk_load",
        "copy",
    ),
    Fault(
        "bulk",
        "TooLong",
        rf"out of bounds of global memory, across the end of argument 1: lane 0 of {BLOCK_0} in bulk_load",
        "copy",
    ),
    Fault("stores", "NoProxyFence", UNFENCED_STORE + "0\n", "store", "writes"),
    Fault("stores", "ProxyFenceOfOneLane", UNFENCED_STORE + "144\n", "store", "writes"),
    Fault("stores", "LateProxyFence", UNFENCED_STORE + "144\n", "store", "writes"),
    Fault(
        "stores",
        "NoSync",
        rf"read after write, shared memory: lane 0 of {BLOCK_0}, in tensor_store, reads 16 bytes",
        "store",
        "writes",
    ),
    *(
        Fault("stores", name, rf"write after read, shared memory: lane \d+ of {BLOCK_0} writes 16", "writes", "store")
        for name in ("NoWait", "OlderGroup", "NoCommit", "NoSyncBehindWait")
    ),
    Fault(
        "stores",
        "Overwritten",
        rf"write after read, shared memory: lane 0 of {BLOCK_0} writes 4 bytes of shared memory at byte 276\n"
        r"(?s:.*)and tensor_store of lane 0 of warp 0, at",
        "overwrites",
        "store",
    ),
    *(
        Fault("stores", name, rf"a lane ends while its stores still read shared memory: lane 0 of {BLOCK_0}", "store")
        for name in ("AtExit", "NoCommitAtExit")
    ),
    Fault("stores", "NoSwizzle"),
    Fault(
        "stores",
        "Uninitialised",
        rf"read of uninitialised shared memory: lane 0 of {BLOCK_0}, in tensor_store, reads 16 .* byte 432\n",
        "store",
    ),
    Fault(
        "stores",
        "Misplaced",
        rf"a tensor store from a place that is not 1024-byte aligned: lane 0 of {BLOCK_0} in tensor_store",
        "store",
    ),
    Fault(
        "stores",
        "PastTheEnd",
        rf"out of bounds of shared memory \(8192 bytes\): lane 0 of {BLOCK_0} in tensor_store",
        "store",
    ),
    Fault(
        "stores",
        "ManyRows",
        rf"out of bounds of global memory, 0 bytes past .* argument 0: lane 0 of {BLOCK_0} in tensor_store writes 128",
        "store",
    ),
    Fault(
        "stores",
        "Twice",
        rf"write after write, global memory: lane \d of {BLOCK_0}, in tensor_store, writes 128 bytes of argument 0",
        "store",
        "store",
    ),
    Fault(
        "moves",
        "NoWait",
        rf"read of an asynchronous copy's target before its wait: lane 0 of {BLOCK_0}, in tensor_store, reads 16 bytes",
        "store",
        "copy",
    ),
    Fault(
        "moves",
        "NoStoreWait",
        rf"write after read, shared memory: lane 0 of {BLOCK_0}, in tensor_load, writes 8192 bytes of shared memory",
        "copy",
        "store",
    ),
    Fault("matrices", "NoSync", rf"read after write, shared memory: lane \d+ of {BLOCK_0} reads 2", "reads", "store"),
    Fault(
        "matrices",
        "Misaligned",
        rf"the address of a row is not 16-byte aligned: lane 3 of {BLOCK_0} in stmatrix",
        "store",
    ),
    Fault("matrices", "Outside", rf"stmatrix of an address outside shared memory: lane 7 of {BLOCK_0}", "store"),
    Fault("matrices", "PastTheEnd", rf"out of bounds of shared memory \(512 bytes\): lane 31 of {BLOCK_0}", "store"),
    Fault("registers", "AccumulatorRead", "the accumulator of a product under way read: lane", "read", "product"),
    Fault(
        "registers", "AccumulatorWritten", "the accumulator of a product under way written: lane", "written", "product"
    ),
    Fault("registers", "OperandWritten", "A's registers of a product under way written: lane", "operand", "product"),
    Fault(
        "registers",
        "OperandAfterFence",
        rf"missing wgmma.fence: A's registers were used since the last: lane 0 of {BLOCK_0} in wgmma, register 1",
        "product",
    ),
    Fault(
        "registers",
        "AccumulatorAfterFence",
        rf"missing wgmma.fence: D's registers were used since the last: lane 0 of {BLOCK_0} in wgmma, register 0",
        "product",
    ),
    Fault("registers", "OlderGroup", "the accumulator of a product under way read: lane", "out", "product"),
    Fault("registers", "NoCommit", "the accumulator of a product under way read: lane", "out", "product"),
    Fault("registers", "AtExit", "wgmma under way at exit: lane", "product"),
    Fault(
        "registers",
        "OtherShape",
        "the accumulator overlaps one of another shape under way: warps 0-3, block",
        "other shape",
        "product",
    ),
    Fault("registers", "WrongPanels"),
    Fault("registers", "WrongMajor"),
    Fault("registers", "WrongStep"),
    Fault("registers", "LanesDiffer", "lanes of a warpgroup differ in a matrix", "product"),
    Fault("registers", "ThreeWarps", r"deadlock: nothing can run\n(?s:.*)lanes 0-31 of warp 2, .*: in wgmma_fence at "),
    Fault(
        "budget", "TooMany", "setmaxnreg of 66560 registers in the block, which has at most 64512: warps 8-11", "inc"
    ),
    Fault("budget", "OneWarp", r"deadlock: nothing can run\n(?s:.*)lanes 0-31 of warp 4, .*: in setmaxnreg at "),
]
SENDS = rf"lane \d of {BLOCK_0} in bulk_send to block \(0, 0, 0\)"
OWN = r"block \(0, 0, 0\)"
OTHER = r"block \(1, 0, 0\)"
SOURCE_REUSED = rf"write after read, shared memory: lane \d+ of {BLOCK_0} writes 4 bytes of shared memory at byte \d+\n"
TARGET_REUSED = rf"write after read, shared memory: lane 0 of warp 0, {OTHER}, in bulk_send to {OWN}, writes 128 bytes"
UNREAD = r"read of uninitialised shared memory: lane \d+ of warp 1, block \(\d, 0, 0\) reads 4 bytes"
SENT_FULL, SENT_EMPTY = 768, 784  # barriers in the map
FAULTS += [
    Fault(
        "exchange",
        "BlockSync",
        rf"a barrier that may not be initialised yet: lane 1 of {BLOCK_0} in bulk_send to {OTHER}\n",
        "send",
        "init",
    ),
    Fault(
        "exchange",
        "NoInitFence",
        rf"a tensor copy may not see that its barrier is initialised: lane 1 of {BLOCK_0} in bulk_send to {OTHER}",
        "send",
        "init",
    ),
    Fault(
        "exchange",
        "TargetNotFenced",
        rf"missing fence.proxy.async: lane 1 of {BLOCK_0}, in bulk_send to {OTHER}, writes 128 .* at byte 256\n"
        rf"(?s:.*)and lane 0 of warp 0, {OTHER}, at",
        "send",
        "target",
    ),
    *(
        Fault("exchange", name, SOURCE_REUSED, "writes", "send")
        for name in ("NoEmptyWait", "LateEmptyWait", "NoSyncBehindWait", "EarlyRelease", "ManyReleases")
    ),
    Fault(
        "exchange",
        "Cleared",
        rf"write after write, shared memory: lane 0 of warp 0, {OTHER}, in bulk_send to {OWN}, writes 128 bytes",
        "send",
        "clears tile",
    ),
    Fault(
        "exchange",
        "NoProxyFence",
        rf"missing fence.proxy.async: lane 0 of {BLOCK_0}, in bulk_send to {OWN}, reads 128 bytes of .* at byte 0\n",
        "send",
        "writes",
    ),
    Fault(
        "exchange",
        "NoSync",
        rf"read of uninitialised shared memory: lane 0 of {BLOCK_0}, in bulk_send to {OWN}, reads 128 bytes",
        "send",
    ),
    Fault("exchange", "Overwritten", SOURCE_REUSED, "overwrites", "send"),
    Fault(
        "exchange",
        "OutOfTheCluster",
        rf"a cluster of 2 blocks has no rank 2: lane 0 of {BLOCK_0} in bulk_send\n",
        "send",
    ),
    Fault(
        "exchange",
        "ArrivalOutOfTheCluster",
        rf"a cluster of 2 blocks has no rank 2: lane 0 of warp 1, {OTHER} in barrier_arrive_at\n",
        "release",
    ),
    Fault("exchange", "NotInitialised", f"a barrier that is not initialised: {SENDS}", "send"),
    Fault("exchange", "OneBarrier", UNREAD, "reads"),
    Fault(
        "exchange",
        "Unordered",
        rf"a copy whose bytes may count for an earlier phase of its barrier: lane 0 of warp 0, {OTHER} in bulk_send to "
        rf"{OWN}, for phase 1",
        "send",
    ),
    *(
        Fault("exchange", name, f"a bulk copy of bytes or from an address that is no multiple of 16: {SENDS}", "send")
        for name in ("OddBytes", "NoBytes", "MisalignedSource")
    ),
    Fault("exchange", "Misplaced", f"a copy to a place that is not 16-byte aligned: {SENDS}", "send"),
    Fault("exchange", "PastTheEnd", rf"out of bounds of shared memory \(816 bytes\): {SENDS}\n", "send"),
    Fault(
        "exchange",
        "SourcePastTheEnd",
        rf"out of bounds of shared memory \(816 bytes\): {SENDS} reads 128 bytes",
        "send",
    ),
    *(
        Fault("exchange", name, f"an address outside the block's shared memory: {SENDS}", "send")
        for name in ("FromGlobal", "ToGlobal", "GlobalBarrier")
    ),
    Fault("exchange", "FewBytes", deadlock(SENT_FULL, 0, 0, "0 of 1", -16)),
    Fault("exchange", "ManyBytes", deadlock(SENT_FULL, 0, 0, "0 of 1", 16)),
    Fault("exchange", "NoExpect", UNREAD, "reads"),
    Fault("exchange", "OneTileExpected", UNREAD, "reads"),
    Fault(
        "exchange",
        "NoWait",
        rf"read of an asynchronous copy's target before its wait: lane \d+ of warp 1, {OTHER} reads 4 bytes",
        "reads",
        "send",
    ),
    Fault(
        "exchange",
        "TargetWritten",
        rf"write after write, shared memory: lane 1 of {BLOCK_0}, in bulk_send to {OTHER}, writes 128 bytes",
        "send",
        "clears",
    ),
    Fault("exchange", "NoRelease", deadlock(SENT_EMPTY, 0, 0, "2 of 2", 0)),
    Fault("exchange", "ReleaseOfUnread", TARGET_REUSED, "send", "reads"),
    Fault("exchange", "NoSyncBeforeRelease", TARGET_REUSED, "send", "reads"),
    Fault(
        "exchange",
        "NoLastSync",
        rf"a block may end while its shared memory is in use: {OTHER}; lane \d of warp \d, .* in bulk_send",
        "send",
    ),
    Fault(
        "exchange",
        "Ended",
        rf"a block may end while its shared memory is in use: {OTHER}; lane 1 of {BLOCK_0} in bulk_send to {OTHER}",
        "send",
    ),
    Fault("rendezvous", "NoSync", rf"write after read, global memory: lane \d+ of warp 0, {OTHER}", "first", "reads"),
    Fault("rendezvous", "BlockSync", rf"read after write, global memory: lane \d+ of {BLOCK_0}", "reads", "first"),
    Fault("rendezvous", "NoSecondSync", r"read after write, global memory: lane \d+ of warp \d", "reads", "writes"),
    *(
        Fault("rendezvous", name, r"read after write, global memory: lane \d+ of warp \d, block", "adds", "writes")
        for name in ("NoThirdSync", "NoRelease", "NoLastSync")
    ),
    Fault(
        "rendezvous",
        "HalfWarp",
        rf"barrier divergence: lane 16 of {BLOCK_0} in cluster_sync\n(?s:.*)and lanes 0-15 in cluster_sync, at",
        "sync",
        "half",
    ),
    Fault(
        "rendezvous",
        "Missing",
        rf"deadlock: nothing can run\n(?s:.*)lanes 0-31 of warp 0, {OTHER}: in __syncthreads at (?s:.*)"
        rf"lanes 0-31 of warp 1, {OTHER}: in cluster_sync at (?s:.*)64 threads have exited",
    ),
]
FAULTS += [
    Fault("chain", name, r"read after write, global memory: lane \d+ of warp 0, .*", "read", "write")
    for name in ("NoWait", "NoRelease", "NoSyncwarp")
]
FOUND = [fault for fault in FAULTS if fault.found is not None]
KERNELS = (
    "pipeline",
    "handover",
    "patch",
    "relay",
    "bulk",
    "chain",
    "exchange",
    "rendezvous",
    "stores",
    "moves",
    "matrices",
    "registers",
    "budget",
)


def variants(kernel: str) -> list[str]:
    """The enumerators of the kernel's bugs, the first of which is none."""
    source = re.search(rf"enum class {kernel.capitalize()} {{(.*?)}};", SOURCE.read_text(), re.DOTALL)
    assert source
    return re.findall(r"^ +k(\w+)", source[1], re.MULTILINE)


def inputs(kernel: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """And the right result."""
    a = integers(SIDE, SIDE)
    if kernel == "registers":
        b = integers(SIDE, 2 * SIDE, seed=1)
        return [registers_of_a(a), b], registers_of_d(2 * a.float() @ b.float())
    tiles = integers(TILES + 1, SIDE, SIDE, seed=1)
    if kernel == "pipeline":
        return [a, tiles], a.float() @ tiles[:TILES].float().sum(0).T
    if kernel == "handover":
        return [a, tiles[0].clone()], a.float() @ tiles[0].float().T
    if kernel == "patch":
        b = tiles[0].clone()
        b[SIDE // 2 :] = 0
        return [a, tiles[0].clone()], a.float() @ b.float().T
    if kernel == "relay":
        return [], relayed("rows")
    if kernel == "bulk":
        values = torch.rand(LANES, generator=torch.Generator().manual_seed(0))
        return [values], values
    if kernel == "chain":
        values = integers(LANES).float()
        return [values, torch.zeros(2, dtype=torch.int32)], values + torch.arange(1.0, 5.0)[:, None]
    if kernel == "exchange":
        return [], exchanged(2)
    if kernel == "rendezvous":
        sums = 2.0 * torch.arange(64) + torch.tensor([64, 64, 5 * 64, 5 * 64])[:, None]
        sums[2:] += sums[:2].clone()
        return [torch.zeros(1, dtype=torch.int32)], sums
    if kernel == "stores":
        return [], torch.arange(32.0 * STORED_ROWS)
    if kernel == "moves":
        values = torch.rand(TILES * SIDE * SIDE // 2, generator=torch.Generator().manual_seed(0))
        return [values], values
    if kernel == "matrices":
        return [], torch.arange(256.0).reshape(32, 8)[torch.arange(32) ^ 5].flatten()
    return [], torch.ones(3 * LANES)


def relayed(what: str) -> torch.Tensor:
    """The sums over all tiles of what the lanes of the reading warp get."""
    lanes = torch.arange(32)
    words = lanes[:, None] ^ 1 if what == "rows" else (lanes[:, None] // 4 + 8 * torch.arange(4)) ^ 1
    return sum((32.0 * tile + words).sum(1) for tile in range(TILES))


def exchanged(blocks: int) -> torch.Tensor:
    """By two clusters of so many blocks."""
    rounds, ranks = torch.arange(ROUNDS)[:, None, None], torch.arange(blocks)[:, None]
    tiles = 1000.0 * rounds + 100 * ranks + (torch.arange(32) ^ 1)
    return tiles.sum((0, 1)).expand(2 * blocks, 32)


def run(machine: Program | Machine, kernel: str, variant: str = "None") -> bool:
    """Whether the result is right."""
    tensors, right = inputs(kernel)
    out = torch.zeros(right.shape, device=machine.device if isinstance(machine, Machine) else "cpu")
    machine.call(kernel, out, *tensors, variants(kernel).index(variant))
    return torch.equal(out.cpu(), right)


@pytest.fixture(scope="module")
def checked() -> Program:
    return Program(SOURCE)


@pytest.fixture(scope="module")
def fast() -> Program:
    return Program(SOURCE, mode="fast")


@pytest.fixture(scope="module")
def lines() -> dict[str, int]:
    return marked_lines(SOURCE, "fault")


def test_all_are_tested(lines: dict[str, int]) -> None:
    named = sorted((kernel, name) for kernel in KERNELS for name in variants(kernel) if name != "None")
    assert sorted((fault.kernel, fault.name) for fault in FAULTS) == named
    assert len(named) >= 40
    used = {f"{f.kernel} {mark}" for f in FOUND for mark in (f.at, f.also) if mark}
    assert set(lines) == used


@needs(lambda machine, right: machine != "cuda" or right != "budget")  # what a launch reserves decides on a GPU
@pytest.mark.parametrize("right", KERNELS)
def test_without_a_bug(machine: Machine, right: str) -> None:
    assert run(machine, right)


@pytest.mark.parametrize("right", KERNELS)
def test_without_a_bug_under_every_schedule(checked: Program, right: str) -> None:
    for seed in SEEDS:
        with settings(seed=seed):
            assert run(checked, right)


@pytest.mark.parametrize("what", ["rows", "matrices"])
@pytest.mark.parametrize("lanes", [32, 16, 1])
def test_lanes_that_speak_for_others(machine: Machine, lanes: int, what: str) -> None:
    """A lane that has synchronised with some waits and arrives at barriers for them; or each does, and none has."""
    out = torch.zeros(32, device=machine.device)
    machine.call(f"relay_{lanes}_{what}", out)
    assert torch.equal(out.cpu(), relayed(what))


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_clusters(machine: Machine, blocks: int) -> None:
    """Each block sends to all, itself among them, and reuses what it sends from."""
    out = torch.zeros(2 * blocks, 32, device=machine.device)
    machine.call(*(("exchange", out, 0) if blocks == 2 else (f"exchange_{blocks}", out)))
    assert torch.equal(out.cpu(), exchanged(blocks))


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.kernel}-{fault.name}" for fault in FAULTS])
def test_found(checked: Program, lines: dict[str, int], fault: Fault) -> None:
    if fault.found is None:
        assert not run(checked, fault.kernel, fault.name)
        return
    with settings(threads=1), pytest.raises(EmulatorError) as caught:  # the first block that has a finding
        run(checked, fault.kernel, fault.name)
    text = str(caught.value)
    where = rf"emulator: sm90::{fault.kernel}<\(sm90::{fault.kernel.capitalize()}\)\d+(, \w+)*>: "
    assert re.match(where + fault.found, text), text
    if fault.at:
        expected = [f"{SOURCE}:{lines[f'{fault.kernel} {mark}']}" for mark in (fault.at, fault.also) if mark]
        assert re.findall(r"at (\S+:\d+)", text) == expected, text


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.kernel}-{fault.name}" for fault in FAULTS])
def test_found_under_every_schedule(checked: Program, fault: Fault) -> None:
    for seed in SEEDS:
        with settings(seed=seed):
            try:
                right = run(checked, fault.kernel, fault.name)
            except EmulatorError:
                right = False
        assert not right, f"seed {seed}"


@pytest.mark.parametrize(
    ("variant", "finding"),
    [
        (
            "OneBarrier",
            r"more bytes than a barrier's phase waits for: bulk_send to block \(\d, 0, 0\), of warp 0, block",
        ),
        (
            "Ended",
            r"a block that has ended: lane 1 of warp 0, block \(\d, 0, 0\) in bulk_send, at block \(\d, 0, 0\)\n",
        ),
    ],
)
def test_found_under_some_schedule(checked: Program, variant: str, finding: str) -> None:
    def found(seed: int) -> bool:
        with settings(seed=seed), pytest.raises(EmulatorError) as caught:
            run(checked, "exchange", variant)
        return re.search(finding, str(caught.value)) is not None

    assert any(map(found, range(1, 100)))


def test_fast_mode_gives_wrong_results(fast: Program) -> None:
    """Without checks, what is read too early is NaN, and operands are read as late as may be."""
    tensors, right = inputs("registers")
    out = torch.zeros(right.shape)
    with pytest.raises(EmulatorError, match="wgmma under way at exit"):
        fast.call("registers", out, *tensors, variants("registers").index("OlderGroup"))
    written = out[(out != 0).any(1)]  # of the lanes that have come so far
    assert len(written)
    assert written.isnan().all()
    early = [("pipeline", "NoExpect"), ("pipeline", "StuckParity"), ("handover", "Overwritten")]
    early += [("stores", name) for name in ("NoWait", "OlderGroup", "Overwritten")]
    early += [("moves", "NoWait"), ("moves", "NoStoreWait")]
    early += [("exchange", name) for name in ("LateEmptyWait", "NoSyncBehindWait", "Overwritten")]
    for kernel, name in early:
        try:
            assert not run(fast, kernel, name), name
        except EmulatorError:  # copies under way at exit
            assert name != "Overwritten"
    for name in ("AccumulatorWritten", "OperandWritten"):
        with pytest.raises(EmulatorError, match="of a product under way written: lane 0 of warp 0"):
            run(fast, "registers", name)


def test_tensor_maps_are_refused(checked: Program) -> None:
    out, matrices = torch.zeros(40, SIDE, dtype=torch.int16), torch.zeros(2 * 40 * 64 + 8, dtype=torch.int16)

    def refusal(columns: int, rows: int, start: int = 0) -> str:
        with pytest.raises(EmulatorError, match="flash_wmma: the driver refuses a tensor map: ") as caught:
            checked.call("box", out, matrices[start:], columns, rows, 0, 0)
        return str(caught.value).rsplit(": ", 1)[1]

    assert refusal(60, 40) == "a stride is no multiple of 16 bytes below 2^40"
    assert refusal(64, 0) == "a size is not in 1 to 2^32"
    assert refusal(64, 40, start=4) == "the data are not 16-byte aligned"


def test_copy_from_outside_the_tensor(checked: Program) -> None:
    """The map says more rows than there are."""
    out, matrices = torch.zeros(40, SIDE, dtype=torch.int16), torch.zeros(2 * 40 * 64, dtype=torch.int16)
    with pytest.raises(EmulatorError, match=r"out of bounds of global memory, .* in tensor_load reads 128 bytes"):
        checked.call("box", out, matrices, 64, 41, 0, 30)


def test_store_to_an_input(checked: Program, lines: dict[str, int]) -> None:
    out = torch.zeros(32 * STORED_ROWS)
    call = ctypes.CDLL(str(checked.library)).flash_wmma_call
    call.restype = ctypes.c_char_p
    with settings(mode="checked", threads=1):
        _runtime.configure([("q", out, False)])
    rows = [Argument(pointer=out.data_ptr()), Argument(integer=0)]
    text: bytes | None = call(b"stores", (Argument * 2)(*rows), ctypes.c_size_t(2))
    _runtime.configure([])
    assert text is not None
    assert text.decode() == (
        "emulator: sm90::stores<(sm90::Stores)0>: write to an input: lane 0 of warp 0, block (0, 0, 0) in tensor_store "
        f"writes 128 bytes\n  at {SOURCE}:{lines['stores store']}"
    )


# --- counters ---------------------------------------------------------------------------------------------------------


def counted(program: Program, name: str, *arguments: torch.Tensor | int) -> dict[tuple[str, str], dict[str, Any]]:
    """By mark and class of instruction."""
    (launch,) = json.loads(program.counts(name, *arguments))
    marks = {f"{SOURCE}:{line}": mark for mark, line in marked_lines(SOURCE, "count").items()}
    rows = (row for row in launch["counts"] if row["line"] in marks and row["what"] != "basic_block")
    return {(marks[row["line"]], row["what"]): row for row in rows}


def test_counts_of_copies(checked: Program) -> None:
    out, matrices = torch.zeros(40, SIDE, dtype=torch.int16), torch.zeros(2, 50, 72, dtype=torch.int16)
    rows = counted(checked, "box", out, matrices, 72, 50, 0, 20)
    copy = rows["box copy", "tensor_copy"]
    # Of 40 rows 30 are in the tensor, 128 of 144 bytes each: 4 sectors from one's start, 5 from its middle
    begins = [matrices.data_ptr() + 144 * (50 + 20 + row) for row in range(30)]
    sectors = sum((begin + 127) // 32 - begin // 32 + 1 for begin in begins)
    assert (copy["instructions"], copy["bytes"]) == (1, 40 * 128)
    assert (copy["sectors"], copy["ideal_sectors"]) == (sectors, 30 * 4)
    assert rows["box arrive", "transaction_barrier"]["instructions"] == 1
    assert rows["box wait", "transaction_barrier"]["instructions"] == 1


def test_counts_of_stores(checked: Program) -> None:
    out, box = torch.zeros(2, 50, 72, dtype=torch.int16), torch.zeros(40, SIDE, dtype=torch.int16)
    store = counted(checked, "stored", out, box, 72, 50, 0, 20)["stored store", "tensor_store"]
    begins = [out.data_ptr() + 144 * (50 + 20 + row) for row in range(30)]
    sectors = sum((begin + 127) // 32 - begin // 32 + 1 for begin in begins)
    assert (store["instructions"], store["bytes"]) == (1, 40 * 128)
    assert (store["sectors"], store["ideal_sectors"]) == (sectors, 30 * 4)
    counts = checked.profile("stored", out, box, 72, 50, 0, 20).counts
    assert counts.instructions["tensor_store"] == 1
    assert counts.written_bytes == 32 * sectors


@pytest.mark.parametrize(("name", "mark"), [("half_64_memory_k", "memory"), ("half_96_registers_n", "registers")])
def test_counts_of_products(checked: Program, name: str, mark: str) -> None:
    n = int(name.split("_")[1])
    tensors = torch.zeros(LANES, n // 2), integers(SIDE, SIDE), integers(SIDE, n), torch.zeros(LANES, n // 2)
    rows = counted(checked, f"product_{name}", *tensors)
    # Four steps along k, four warps
    assert {key: row["instructions"] for key, row in rows.items()} == {(f"product {mark}", "wgmma"): 16}


def test_copies_between_blocks_need_a_cluster(checked: Program) -> None:
    """Also a block's to itself."""
    with pytest.raises(
        EmulatorError, match=r"a copy between blocks in a launch without clusters: lane 0 .* in bulk_send"
    ):
        checked.call("exchange_1", torch.zeros(2, 32))


def test_counts_of_clusters(checked: Program) -> None:
    """Two clusters of four blocks: copies between them read no global memory."""
    counts = checked.profile("exchange_4", torch.zeros(8, 32)).counts
    assert counts.instructions["tensor_copy"] == 8 * ROUNDS * 4
    # In a round a wait of each warp, an arrival with bytes, and the releases, which a warp's lanes make together
    assert counts.instructions["transaction_barrier"] == 8 * ROUNDS * 4
    assert counts.instructions["barrier"] == 8 * 2 * 2
    assert (counts.read_bytes, counts.written_bytes) == (0, 8 * 32 * 4)


def test_profile(checked: Program) -> None:
    tensors, right = inputs("pipeline")
    counts = checked.profile("pipeline", torch.zeros(right.shape), *tensors, 0).counts
    assert counts.mma == counts.instructions["wgmma"] == 4 * 4 * TILES
    assert counts.instructions["tensor_copy"] == 1 + TILES
    assert counts.read_bytes == (1 + TILES) * SIDE * SIDE * 2


def test_wgmma_sm90_takes_items_one_at_a_time() -> None:
    """What a block of wgmma_sm90 takes early, it keeps from the others: each time, its planner waits until the producer
    has nearly come to the end of the item before. No result says so, and the emulator's blocks run one after the other:
    the first takes all that the others do not begin with, which in their turn wait once each."""
    path = "csrc/forward/wgmma/plan.cuh"
    source = (FOLDER.parents[1] / path).read_text().splitlines()
    (line,) = (i for i, text in enumerate(source, 1) if "barrier_wait(&ring_.near_end" in text)
    place, heads, sm_count = f"{path}:{line}", 2, 2
    q, k, v = torch.randn(3, 1, heads, 520, 64).half()
    with settings(threads=1, sm_count=sm_count):
        launch = flash_wmma.profile(q, k, v, kernel="wgmma_sm90", causal=True).launches[-1]
    (waits,) = (x.counts.instructions["transaction_barrier"] for x in launch.lines if x.source == place)
    lasting = [event for event in launch.timeline if event.source == place]
    assert launch.grid == (sm_count, 1, 1)
    assert len(lasting) == waits - (sm_count - 1) >= heads * math.ceil(520 / 256) - sm_count + 1
