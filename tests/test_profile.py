"""flash_wmma.profile: its figures against the emulator's raw ones and against those that follow from the algorithm, its
text, its plots, the command."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_wmma
from flash_wmma import CompiledKernel, Profile, _build, _figures
from flash_wmma.__main__ import main
from flash_wmma._figures import Request
from flash_wmma.emulator import _runtime

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

N, D = 64, 64
V2 = "flash_wmma::(anonymous namespace)::wmma_v2<__half>"
PNG = b"\x89PNG"

MICRO = """
#include <entry.h>
#include <launch.h>
#include <shared_memory.cuh>

using namespace flash_wmma;

struct SharedMemory {
    float x[32 * 64];
};

template <class T>
__global__ void spread(float* out, int stride, int divisor) {
    auto& smem = shared_memory<SharedMemory>();
    for (int i = static_cast<int>(threadIdx.x); i < 32 * 64; i += 32) smem.x[i] = 0.f;
    __syncwarp();
    const auto* from = reinterpret_cast<const T*>(&smem.x[static_cast<int>(threadIdx.x) / divisor * stride]);
    const T piece = *from;  // the load
    *reinterpret_cast<T*>(&out[static_cast<int>(threadIdx.x) * stride]) = piece;  // the store
}
template <class T>
void run_spread(float* out, int stride, int divisor) {
    launch(spread<T>, {dim3(1), dim3(32), sizeof(SharedMemory)}, nullptr, out, stride, divisor);
}
const Entry kSpread4("spread4", run_spread<float>);
const Entry kSpread8("spread8", run_spread<float2>);
const Entry kSpread16("spread16", run_spread<float4>);

__global__ void uneven(float* out, int rounds) {
    auto& smem = shared_memory<SharedMemory>();
    for (int i = 0; i < rounds * static_cast<int>(threadIdx.x / 32); ++i) smem.x[threadIdx.x] = 1.f;
    __syncthreads();
    if (threadIdx.x % 2 == 0) atomicAdd(out, 1.f);
}
void run_uneven(float* out, int rounds) {
    for (int i = 0; i < 3; ++i)
        launch(uneven, {dim3(2), dim3(128), sizeof(SharedMemory)}, nullptr, out, rounds);
}
const Entry kUneven("uneven", run_uneven);
"""


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> flash_wmma.emulator.Program:
    source = tmp_path_factory.mktemp("micro") / "micro.cu"
    source.write_text(MICRO)
    return flash_wmma.emulator.Program(source)


def inputs(dtype: torch.dtype = torch.float16, length: int = N) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, length, D, generator=generator).to(dtype) for _ in "qkv"]


@pytest.fixture(scope="module")
def v2() -> Profile:
    return flash_wmma.profile(*inputs(), kernel="wmma_v2")


@pytest.fixture(scope="module")
def v3_float32() -> Profile:
    return flash_wmma.profile(*inputs(torch.float32), kernel="wmma_v3")


def line_of(program: flash_wmma.emulator.Program, text: str) -> int:
    return next(i for i, line in enumerate(program.source.read_text().splitlines(), 1) if text in line)


# ------------------------------------------------------------------------------------- figures, from the algorithm


def test_wmma_v2_by_hand(v2: Profile) -> None:
    tiles, half = N // 16, 2
    assert [launch.name for launch in v2.launches] == ["wmma_v2"]
    assert (v2.launches[0].grid, v2.launches[0].block, v2.launches[0].warps) == ((tiles, 1, 1), (32, 1, 1), tiles)
    # Q K^T and P V: 64 x 64 x 64 each, two instructions a product of 16 x 16 x 16
    assert v2.counts.mma == 2 * 2 * tiles**3
    # A fragment of 16 x 16 is one ldmatrix.x4: of Q once, of K, V and P once a Q tile
    assert v2.counts.shared_memory["ldmatrix"].requests == tiles * (tiles + tiles**2 + tiles**2 + tiles)
    # Each Q tile of 16 rows reads all of K and V
    read = N * D * half + 2 * tiles * N * D * half
    loads = v2.counts.global_memory["load"]
    assert (v2.counts.read_bytes, loads.bytes) == (read, read)
    assert loads.requests == read // (32 * 16)  # 16 bytes a lane
    assert (loads.sectors_per_request, loads.coalescing) == (16, 1)
    assert v2.counts.written_bytes == N * D * half + N * 4
    assert v2.ideal_read_bytes == 3 * N * D * half
    assert v2.ideal_written_bytes == v2.counts.written_bytes
    assert v2.counts.barriers == 0


def test_figures_are_the_emulators() -> None:
    q, k, v = inputs(torch.float32)
    with flash_wmma.emulator.settings(mode="checked", counters=True, arch=75):
        _runtime.take_profile()
        flash_wmma.forward(q, k, v, kernel="wmma_v1", causal=True)
        (raw,) = json.loads(_runtime.take_profile())
    profile = flash_wmma.profile(q, k, v, kernel="wmma_v1", causal=True, arch=75)
    (launch,) = profile.launches
    assert profile.arch == 75

    def total(field: str, *classes: str) -> int:
        return sum(row[field] for row in raw["counts"] if row["what"] in classes)

    for what in ("mma", "ldmatrix", "shared_load", "global_store", "shuffle", "exp2"):
        assert launch.counts.instructions[what] == total("instructions", what) > 0
    for kind, what in (("load", "shared_load"), ("store", "shared_store"), ("ldmatrix", "ldmatrix")):
        found = launch.counts.shared_memory[kind]
        assert found.wavefronts == total("wavefronts", what)
        assert found.bank_conflicts == total("wavefronts", what) - total("ideal_wavefronts", what) > 0
    for kind in ("load", "store"):
        assert launch.counts.global_memory[kind].sectors == total("sectors", f"global_{kind}")
    assert launch.counts.divergent_branches == total("divergent", "basic_block") > 0
    assert "basic_block" not in launch.counts.instructions


@pytest.mark.parametrize("name", ["v2", "v3_float32"])
def test_lines_add_up(name: str, request: pytest.FixtureRequest) -> None:
    profile: Profile = request.getfixturevalue(name)
    for launch in profile.launches:
        summed = sum((line.counts for line in launch.lines), _figures.Counts.of(()))
        assert summed == launch.counts
        for line in launch.lines:
            if line.source.startswith("csrc"):
                assert line.text
    assert sum((launch.counts for launch in profile.launches), _figures.Counts.of(())) == profile.counts


def test_functions_apart(v3_float32: Profile) -> None:
    convert, forward = v3_float32.launches
    assert convert.function == "flash_wmma::conversion::convert<float, false, false, flash_wmma::conversion::Alone>"
    assert (convert.name, forward.name) == ("convert", "forward")
    assert convert.counts.mma == 0
    assert v3_float32.counts.mma == forward.counts.mma == 2 * 2 * (N // 16) ** 3
    assert v3_float32.counts.barriers == convert.counts.barriers + forward.counts.barriers
    assert v3_float32.ideal_read_bytes == 3 * N * D * 4


def test_asynchronous_copies_are_one_instruction_with_two_sides(v3_float32: Profile) -> None:
    counts = v3_float32.launches[1].counts
    copies = counts.instructions["async_copy"]
    assert "async_load" not in counts.instructions
    # Q, K and V as fp16, 16 bytes a lane: no row is read twice, because there is one Q tile
    assert copies == 3 * N * D * 2 // (32 * 16)
    assert counts.shared_memory["async_copy"].requests == copies
    assert counts.global_memory["async_copy"].bytes == 3 * N * D * 2


def test_options_reach_the_kernel() -> None:
    dense = flash_wmma.profile(*inputs(), kernel="wmma_v2")
    masked = flash_wmma.profile(*inputs(), kernel="wmma_v2", causal=True, seed=7)
    assert 0 < masked.counts.mma < dense.counts.mma


def test_without_requests_ratios_are_nan(v2: Profile) -> None:
    nothing = v2.counts.global_memory["atomic"]
    assert math.isnan(nothing.sectors_per_request)
    assert math.isnan(nothing.coalescing)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_are_copied(v2: Profile) -> None:
    q, k, v = (t.cuda() for t in inputs())
    assert flash_wmma.profile(q, k, v, kernel="wmma_v2").counts == v2.counts


# ------------------------------------------------------------------------------------------------- single requests


@pytest.mark.parametrize(
    ("width", "stride", "wavefronts", "sectors"),
    [
        (4, 1, 1, 4),
        (4, 2, 2, 8),
        (4, 8, 8, 32),  # as many sectors as lanes
        (4, 16, 16, 32),  # banks 0 and 16 only
        (4, 33, 1, 32),
        (8, 2, 2, 8),
        (8, 32, 32, 32),
        (16, 4, 4, 16),
        (16, 8, 8, 32),
        (16, 32, 32, 32),
    ],
)
def test_cost_of_a_request(
    micro: flash_wmma.emulator.Program, width: int, stride: int, wavefronts: int, sectors: int
) -> None:
    out = torch.zeros(32 * stride)
    profile = micro.profile(f"spread{width}", out, stride, 1)
    (load,), (store,) = (profile.at(line_of(micro, text)) for text in ("// the load", "// the store"))
    assert load.counts.shared_memory["load"].requests == 1
    (request,) = load.requests
    assert (request.space, request.bytes, request.lanes) == ("shared", width, 32)
    assert request.cost == load.counts.shared_memory["load"].wavefronts == wavefronts
    assert load.counts.bank_conflicts == wavefronts - width // 4
    (request,) = store.requests
    assert request.space == "global"
    assert request.cost == store.counts.global_memory["store"].sectors == sectors
    assert store.counts.global_memory["store"].sectors_per_request == sectors


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("divisor", [2, 4])
def test_cost_where_lanes_want_the_same(micro: flash_wmma.emulator.Program, width: int, divisor: int) -> None:
    stride = width // 4
    profile = micro.profile(f"spread{width}", torch.zeros(32 * stride), stride, divisor)
    (load,) = profile.at(line_of(micro, "// the load"))
    assert load.requests[0].cost == load.counts.shared_memory["load"].wavefronts


def test_banks_of_a_stride_of_16(micro: flash_wmma.emulator.Program) -> None:
    profile = micro.profile("spread4", torch.zeros(32 * 16), 16, 1)
    (line,) = profile.at(line_of(micro, "// the load"))
    touched = line.requests[0].touched
    assert {touch.unit for touch in touched} == {0, 16}
    assert [(touch.lane, touch.unit, touch.turn) for touch in touched[:3]] == [(0, 0, 0), (1, 16, 0), (2, 0, 1)]
    assert max(touch.turn for touch in touched) == 15


def test_sectors_of_a_stride(micro: flash_wmma.emulator.Program) -> None:
    profile = micro.profile("spread4", torch.zeros(32 * 16), 16, 1)
    (line,) = profile.at(line_of(micro, "// the store"))
    assert len({touch.unit for touch in line.requests[0].touched}) == 32
    assert line.counts.global_memory["store"].coalescing == 4 / 32


def test_lanes_that_take_no_part() -> None:
    request = Request("shared_store", "shared", 4, (0, None, 128, *[None] * 29))
    assert (request.lanes, request.cost) == (2, 2)


# ------------------------------------------------------------------------------------------------------- programs


def test_program(micro: flash_wmma.emulator.Program) -> None:
    out = torch.zeros(1)
    profile = micro.profile("uneven", out, 5)
    assert out.item() == 3 * 2 * 64
    (launch,) = profile.launches  # three alike
    assert (launch.launches, launch.grid, launch.block, launch.warps) == (3, (2, 1, 1), (128, 1, 1), 3 * 2 * 4)
    assert launch.counts.barriers == 3 * 2 * 4
    assert launch.counts.shared_memory["store"].requests == 3 * 2 * 5 * (0 + 1 + 2 + 3)
    assert launch.counts.global_memory["atomic"].requests == 3 * 2 * 4
    assert launch.counts.divergent_branches == 3 * 2 * 4
    assert (profile.ideal_read_bytes, profile.ideal_written_bytes) == (None, None)
    assert launch.occupancy is not None
    assert launch.occupancy.registers is None
    # Of block 0 of the first launch: the last warp has most to do, the others wait for it
    assert sorted(wait.warp for wait in launch.timeline) == [0, 1, 2, 3]
    arrived = {wait.warp: wait.arrived for wait in launch.timeline}
    assert arrived[0] < arrived[1] < arrived[2] < arrived[3]
    assert {wait.released for wait in launch.timeline} == {arrived[3]}
    assert "3 x 2 blocks of 128 threads" in str(profile)


def test_program_needs_the_checked_build(micro: flash_wmma.emulator.Program) -> None:
    fast = flash_wmma.emulator.Program(micro.source, mode="fast")
    with pytest.raises(ValueError, match="mode: got 'fast'"):
        fast.profile("uneven", torch.zeros(1), 5)


# ------------------------------------------------------------------------------------------------------- timeline


@pytest.mark.parametrize(("head_dim", "seed"), [(64, 0), (64, 3), (128, 1)])
def test_timeline_of_a_pipeline(head_dim: int, seed: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 256, head_dim, generator=generator).half()
    k, v = torch.randn(2, 1, 1, 768, head_dim, generator=generator).half()
    profile = flash_wmma.profile(q, k, v, kernel="wgmma_sm90", arch=90, seed=seed)
    (launch,) = profile.launches
    shape = re.search(r"TileShape\{\d+, \d+, \d+, (\d+), \w+, (\d+), (\d+)", launch.function)
    assert shape is not None
    consumers, key_tile, stages = map(int, shape.groups())
    tiles, panels, groups = 768 // key_tile, head_dim // 64, [4 * (i + 1) for i in range(consumers)]
    assert 2 * 64 * consumers == 256, "two blocks, without rows beyond the end"
    assert tiles > stages
    events = sorted(launch.timeline, key=lambda event: event.arrived)
    assert all(event.arrived <= event.released for event in events)

    def asked(function: str) -> list[_figures.Event]:
        return [e for e in events if e.kind in ("tensor_copy", "product") and function in e.calls]

    # Each warp of a consumer asks for the stores of its rows, a panel at a time
    stores = asked("stage_output")
    assert sorted(event.warp for event in stores) == [4 + i // panels for i in range(4 * consumers * panels)]
    assert 2 * len(stores) == launch.counts.instructions["tensor_store"]
    # One warp asks for the copies of each panel, of each tile once
    copies = [event for event in events if event.kind == "tensor_copy" and event not in stores]
    assert {event.warp for event in copies} == {0}
    keys, values = asked("load_k"), asked("load_v")
    assert (len(keys), len(values), len(asked("load_q"))) == (tiles * panels, tiles * panels, consumers * panels)
    assert len(copies) == len(keys) + len(values) + consumers * panels
    assert 2 * len(copies) == launch.counts.instructions["tensor_copy"]

    assert {event.warp for event in events if event.kind == "product"} == set(groups)
    for warp in groups:
        products = [e for e in events if e.kind == "product" and e.warp == warp]
        order = [next(name for name in e.calls if name.startswith("multiply")) for e in products]
        steady = ["multiply_qk", "multiply_pv"] * (tiles - 1)
        assert order == ["multiply_qk", *steady, "multiply_pv", "multiply_qk"]
        scores, outputs = ([e for e in asked(name) if e.warp == warp] for name in ("multiply_qk", "multiply_pv"))
        for tile in range(tiles - 1):
            assert scores[tile + 1].arrived < outputs[tile].released, "S of the next tile does not wait for P V"
        for tile in range(tiles):
            assert keys[tile * panels].arrived < scores[tile].arrived
            assert values[tile * panels].arrived < outputs[tile].arrived
        for tile in range(tiles - stages):  # their place in shared memory is free
            assert keys[(tile + stages) * panels].arrived > scores[tile].released
            assert values[(tile + stages) * panels].arrived > outputs[tile].released
    assert any(e.kind == "transaction_barrier" and e.warp == 0 and "load" in e.calls for e in events), "a full ring"
    document = json.loads(profile.to_json())["launches"][0]["timeline"]
    assert {"kind", "warp", "arrived", "released", "source", "calls"} == set(document[0])

    pytest.importorskip("matplotlib")
    figure = profile.plot_timeline(tmp_path / "pipeline.png")
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["warp 0", *(f"warps {warp} to {warp + 3}" for warp in groups)]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("void n::f<n::Tile<__half, 64>, (n::E)0>(n::P<int>*, int)", "f"),
        ("n::Producer<n::Tile<__half, 64>, false>::load_k(n::Work<int> const&, int)", "load_k"),
        ("n::(anonymous namespace)::wmma_v2<__half>", "wmma_v2"),
        ("main", "main"),
    ],
)
def test_plain_names(function: str, name: str) -> None:
    assert _figures._plain_name(function) == name


# ------------------------------------------------------------------------------------------------------ occupancy


def test_occupancy_takes_the_registers_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {V2: {"sm_75": CompiledKernel(128, 0, 0, 0, static_smem_bytes=0)}}
    monkeypatch.setattr(_build, "compiled_kernels", lambda: table)
    (launch,) = flash_wmma.profile(*inputs(), kernel="wmma_v2", arch=75).launches
    assert launch.occupancy == flash_wmma.theoretical_occupancy(75, 32, 128, launch.smem_bytes)
    (launch,) = flash_wmma.profile(*inputs(), kernel="wmma_v2", arch=90).launches
    assert launch.occupancy == flash_wmma.theoretical_occupancy(90, 32, None, launch.smem_bytes)


def test_occupancy_of_this_build(v2: Profile, v3_float32: Profile) -> None:
    table = flash_wmma.compiled_kernels()
    for launch in (*v2.launches, *v3_float32.launches):
        assert launch.occupancy is not None
        assert (launch.occupancy.registers is not None) == bool(table), launch.function


def test_occupancy_of_an_architecture_without_known_limits() -> None:
    profile = flash_wmma.profile(*inputs(), kernel="wmma_v2", arch=87)
    assert profile.launches[0].occupancy is None
    assert "occupancy     unknown" in str(profile)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        (V2, V2),
        ("n::(anonymous namespace)::convert(n::", "n::(anonymous namespace)::convert"),
        ("n::f<(n::E)0, 8> >", "n::f<(n::E)0, 8> >"),
    ],
)
def test_function_names(name: str, function: str) -> None:
    assert _figures._function(name) == function


# ----------------------------------------------------------------------------------------------------------- text


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """As if they were not installed."""
    for name in [*sys.modules, *modules]:
        if name.split(".")[0] in modules:
            monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("rich", [False, True])
def test_text(v3_float32: Profile, monkeypatch: pytest.MonkeyPatch, rich: bool) -> None:
    if rich:
        pytest.importorskip("rich")
    else:
        without(monkeypatch, "rich")
    text = str(v3_float32)
    assert ("─" in text) == rich
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 200  # a kernel's name among them, with its template arguments
    for part in ("convert", "forward", "total", "ldmatrix", "barrier", "divergent branch", "occupancy", "x the ideal"):
        assert part in text
    store = v3_float32.counts.global_memory["store"]
    assert f"{store.sectors:,}" in text
    forward = text[text.index("forward, by source line") :]
    shown = sum(int(line.split()[2]) for line in forward.splitlines() if line.split()[1:2] == ["mma"])
    assert shown == v3_float32.counts.mma


def test_rich_prints_it(v2: Profile) -> None:
    console = pytest.importorskip("rich.console").Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(v2)
    assert "by source line" in console.export_text()


def test_json(v3_float32: Profile) -> None:
    document = json.loads(v3_float32.to_json())
    assert document["kernel"] == "wmma_v3"
    assert document["counts"]["instructions"]["mma"] == v3_float32.counts.mma
    shared = v3_float32.counts.shared_memory["store"]
    assert document["counts"]["shared_memory"]["store"] == {
        "requests": shared.requests,
        "wavefronts": shared.wavefronts,
        "ideal_wavefronts": shared.ideal_wavefronts,
        "bank_conflicts": shared.bank_conflicts,
    }
    assert [launch["function"] for launch in document["launches"]] == [x.function for x in v3_float32.launches]
    lines = document["launches"][1]["lines"]
    assert sum(line["counts"]["bank_conflicts"] for line in lines) == v3_float32.launches[1].counts.bank_conflicts
    assert document["launches"][1]["occupancy"]["arch"] == 90
    assert document["launches"][0]["timeline"][0]["source"].startswith("csrc/device/convert.cuh:")


# ---------------------------------------------------------------------------------------------------------- plots


def test_plot_banks(v2: Profile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    worst = v2.at(None)[0]
    assert worst.counts.bank_conflicts == max(line.counts.bank_conflicts for line in v2.lines)
    path = tmp_path / "banks.png"
    figure = v2.plot_banks(path=path)
    assert path.read_bytes().startswith(PNG)
    title = figure.axes[0].get_title()
    assert f"{worst.requests[0].cost} wavefronts" in title
    squares = figure.axes[0].collections[0].get_paths()
    assert len(squares) == len(worst.requests[0].touched)


def test_plot_of_a_store(v2: Profile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stores = next(line for line in v2.lines if line.counts.global_memory["store"].requests)
    figure = v2.plot_banks(stores.source, tmp_path / "sectors.svg")
    assert (tmp_path / "sectors.svg").stat().st_size > 0
    assert "global store" in figure.axes[0].get_title()
    assert "sector" in figure.axes[0].get_xlabel()


def test_both_sides_of_an_asynchronous_copy(v3_float32: Profile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    copies = next(line for line in v3_float32.lines if line.counts.instructions.get("async_copy"))
    v3_float32.plot_banks(copies.source, tmp_path / "copy.png")
    assert {request.space for request in copies.requests} == {"shared", "global"}


def test_plot_timeline(v3_float32: Profile, micro: flash_wmma.emulator.Program, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    v3_float32.plot_timeline(tmp_path / "two.png")
    figure = micro.profile("uneven", torch.zeros(1), 5).plot_timeline(tmp_path / "one.png")
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("two.png", "one.png"))
    assert "uneven" in figure.axes[0].get_title()


def test_figures_for_show(v2: Profile) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = pyplot.get_fignums()
    figure = v2.plot_banks()
    assert figure.number not in before
    pyplot.close(figure)


def test_no_matplotlib(v2: Profile, v3_float32: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "matplotlib")
    for draw in (v2.plot_banks, v3_float32.plot_timeline):
        with pytest.raises(ImportError, match=r"pip install 'flash_wmma\[profile\]'"):
            draw()


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kernel": "wmma_v9"}, ValueError, "kernel: got 'wmma_v9', allowed: 'mma_sm75'"),
        ({"kernel": "cpu"}, ValueError, "kernel: got 'cpu', allowed: 'mma_sm75'"),
        ({"kernel": "auto"}, ValueError, "kernel: got 'auto'"),
        ({"kernel": 2}, TypeError, "kernel: got 2"),
        ({"arch": 76}, ValueError, "arch: got 76"),
        ({"causal": "left"}, ValueError, "causal: got 'left'"),
        ({"softcap": 2.0}, ValueError, "softcap"),
        ({"q": torch.empty(1, 1, N, D, dtype=torch.bfloat16)}, ValueError, "k.dtype"),
        ({name: torch.empty(1, 1, N, 32).half() for name in "qkv"}, ValueError, "head dim"),
        ({name: torch.empty(1, 1, N, D, device="meta") for name in "qkv"}, ValueError, "q.device: got meta"),
    ],
)
def test_errors(changes: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {**dict(zip("qkv", inputs(), strict=True)), "kernel": "wmma_v2", **changes}
    with pytest.raises(error, match=message):
        flash_wmma.profile(**arguments)


def test_lines_that_there_are_not(v2: Profile) -> None:
    with pytest.raises(ValueError, match=r"line: got 1, allowed: csrc/"):
        v2.at(1)
    source = v2.at(None)[0].source
    assert v2.at(source) == v2.at(source.rpartition("/")[2]) == v2.at(None)
    with pytest.raises(ValueError, match="no warp arrives at a barrier"):
        v2.plot_timeline()


def test_a_number_in_two_files() -> None:
    request = Request("shared_load", "shared", 4, (0,) * 32)
    lines = tuple(_figures.Line(f"csrc/{f}.cu:7", "", _figures.Counts.of(()), (request,)) for f in "ab")
    launch = _figures.Launch(
        "f", 1, (1, 1, 1), (32, 1, 1), 0, 1, None, _figures.Counts.of(()), lines=lines, timeline=()
    )
    profile = Profile("k", "", 90, (launch,), None, None)
    with pytest.raises(ValueError, match=r"line: got 7, allowed: csrc/a\.cu:7, csrc/b\.cu:7"):
        profile.at(7)
    assert profile.at("b.cu:7") == (lines[1],)


def test_without_launches() -> None:
    q, k, v = (t[:, :0] for t in inputs())
    profile = flash_wmma.profile(q, k, v, kernel="wmma_v2")
    assert profile.launches == ()
    assert "nothing was launched" in str(profile)
    json.loads(profile.to_json())
    with pytest.raises(ValueError, match="accesses no memory"):
        profile.at(None)


@pytest.mark.parametrize("batch_in_one_product", [True, False])
def test_products_by_cublas_are_unknown(batch_in_one_product: bool) -> None:
    """What they read and write is missing in the sum, so that there is none."""
    q, k, v = (torch.randn(2, 2, 32, 64).half() for _ in "qkv")
    if not batch_in_one_product:
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    profile = flash_wmma.profile(q, k, v, kernel="unfused")
    assert profile.products == (2 if batch_in_one_product else 3)
    assert (profile.read_bytes, profile.written_bytes) == (None, None)
    figures = json.loads(profile.to_json())
    assert (figures["products"], figures["read_bytes"], figures["written_bytes"]) == (profile.products, None, None)
    text = str(profile)
    assert "x the ideal" not in text
    assert text.count("unknown: ") == 2
    assert text.count(f"{profile.products} products by cuBLAS move, of which nothing is counted") == 2
    other = flash_wmma.profile(q, k, v, kernel="wmma_v2")
    assert other.products == 0
    assert (other.read_bytes, other.written_bytes) == (other.counts.read_bytes, other.counts.written_bytes)


# -------------------------------------------------------------------------------------------------------- command


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    numbers, plot = tmp_path / "figures.json", tmp_path / "banks.png"
    arguments = ["profile", "--kernel", "wmma_v1", "--seq-len", "32", "--kv-length", "48", "--heads", "2", "--causal"]
    assert main([*arguments, "--arch", "75", "--json", str(numbers), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "wmma_v1 in the emulator, as on sm_75: q (1, 2, 32, 64), k (1, 2, 48, 64)" in out
    assert json.loads(numbers.read_text())["arch"] == 75
    assert plot.read_bytes().startswith(PNG)
    line = json.loads(numbers.read_text())["launches"][0]["lines"]
    source = next(x["source"] for x in line if x["worst_requests"])
    assert main([*arguments, "--banks", source, "--plot", str(tmp_path / "line.png")]) == 0
    timeline = str(tmp_path / "timeline.png")
    assert main(["profile", "--kernel", "wmma_v3", "--timeline", "--plot", timeline]) == 0


def test_command_takes_a_dtype_that_the_kernel_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--kernel", "simt_naive", "--seq-len", "8"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("float32")
    assert main(["profile", "--kernel", "simt_naive", "--seq-len", "8", "--dtype", "float16"]) == 1
    assert "dtype: got float16, allowed: float32" in capsys.readouterr().err


def test_command_whose_reader_stops() -> None:
    """`... | head`."""
    command = [sys.executable, "-m", "flash_wmma", "profile", "--kernel", "simt_naive", "--seq-len", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == ""
    assert run.returncode == -signal.SIGPIPE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "wmma_v9"], "error: kernel: got 'wmma_v9'"),
        (["--kernel", "wmma_v2", "--head-dim", "32"], "head dim: got 32"),
        (["--kernel", "wmma_v2", "--banks", "1", "--plot", "x.png"], "error: line: got '1'"),
        (["--kernel", "wmma_v2", "--json", "no/such/folder/x.json"], "error: [Errno 2]"),
    ],
)
def test_command_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["profile", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_command_says_what_to_draw_but_not_where(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "--kernel", "wmma_v2", "--timeline"])
    assert "--plot FILE is needed" in capsys.readouterr().err


def test_no_compiler() -> None:
    command = [sys.executable, "-m", "flash_wmma", "profile", "--kernel", "wmma_v2"]
    run = subprocess.run(
        command, env={**os.environ, "FLASH_WMMA_GXX": "no-such-g++"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "error: running a CUDA kernel on the CPU needs no-such-g++" in run.stderr
    assert "Traceback" not in run.stderr
