"""The benchmark: its clock, its judge, its tables, and what it does when something is missing or wrong."""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flash_wmma

FOLDER = Path(__file__).resolve().parents[1] / "benchmark"
sys.path.insert(0, str(FOLDER))
accuracy = importlib.import_module("harness.accuracy")
backward = importlib.import_module("backward")
backward_features = importlib.import_module("backward_features")
benchmark = importlib.import_module("benchmark")
builds = importlib.import_module("builds")
calibrate = importlib.import_module("calibrate")
contenders = importlib.import_module("harness.contenders")
costs = importlib.import_module("costs")
decode = importlib.import_module("decode")
forward = importlib.import_module("forward")
ladder = importlib.import_module("ladder")
report = importlib.import_module("harness.report")
sweep = importlib.import_module("harness.sweep")
timing = importlib.import_module("harness.timing")

CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "benchmark.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


# ------------------------------------------------------------------------------------------------------------ timing


def test_timing_statistics():
    t = timing.Timing(tuple(float(x) for x in range(1, 12)))
    assert (t.median, t.p10, t.p90) == (6, 2, 10)
    assert t.spread == pytest.approx(8 / 2 / 6)


def test_ratio_is_taken_round_by_round():
    slow, fast = timing.Timing((4.0, 2.0, 9.0)), timing.Timing((1.0, 2.0, 3.0))
    assert fast.speedup_over(slow) == 3  # the median of 4, 1 and 3; the ratio of the medians is 2


def test_rounds_rotate_and_time_every_contender():
    calls: list[str] = []

    def contender(name: str):
        def call() -> torch.Tensor:
            calls.append(name)
            return torch.tensor(float(len(calls)))

        return timing.Contender(call)

    ticks: list[int] = []
    method = timing.Method(warmup=2, repeats=5)
    result = timing.measure({n: contender(n) for n in "abc"}, CPU, method, lambda: ticks.append(1))
    assert calls[:6] == list("aabbcc")  # warm-up
    # Untimed, timed; the order moves by one every other round, and is turned around in between
    assert calls[6:] == list("aabbcc" + "ccbbaa" + "bbccaa" + "aaccbb" + "ccaabb")
    assert result.clock == "wall"
    assert len(ticks) == 5
    assert all(len(result.timings[n].samples) == 5 for n in "abc")
    assert result.outputs["b"].item() == len(calls)  # what the last timed call returned


def test_a_contender_that_fails_is_left_out():
    turns = {"late": 0}

    def never() -> torch.Tensor:
        raise ValueError("no")

    def late() -> torch.Tensor:
        turns["late"] += 1
        if turns["late"] > 4:
            raise torch.cuda.OutOfMemoryError("full")
        return torch.zeros(1)

    calls = {"never": never, "late": late, "good": lambda: torch.zeros(1)}
    result = timing.measure(
        {name: timing.Contender(call) for name, call in calls.items()}, CPU, timing.Method(warmup=2, repeats=4)
    )
    assert set(result.timings) == {"good"}
    assert {name: type(error) for name, error in result.failures.items()} == {
        "never": ValueError,
        "late": torch.cuda.OutOfMemoryError,
    }


def test_nothing_is_collected_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier graph that ends during a capture would end the capture too."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch, "Event", lambda *_, **__: None)
    collects = []

    def call() -> torch.Tensor:
        collects.append(gc.isenabled())
        return torch.zeros(1)

    timing._GraphRunner(call, 2)
    assert collects == [False, False]
    assert gc.isenabled()


@pytest.mark.gpu
@without_gpu
def test_short_rows_are_timed_in_graphs():
    x = torch.ones(1024, device="cuda")
    calls = {"short": lambda: x * 2, "shorter": lambda: x + 1}
    measure = {name: timing.Contender(call) for name, call in calls.items()}
    result = timing.measure(measure, torch.device("cuda"), timing.Method(repeats=4))
    assert result.clock == "graph"
    assert result.timings["short"].calls_per_sample > 1
    assert torch.equal(result.outputs["short"], x * 2)
    off = timing.measure(measure, torch.device("cuda"), timing.Method(repeats=4, graph="off"))
    assert off.clock == "events"
    assert off.timings["short"].median > result.timings["short"].median
    long = timing.measure(measure, torch.device("cuda"), timing.Method(repeats=4, graph="off", sample_ms=1.0))
    assert long.timings["short"].calls_per_sample > 1
    assert torch.equal(long.outputs["short"], x * 2)


# ---------------------------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("causal", [False, True])
def test_reference_in_chunks_is_attention(monkeypatch, causal):
    q, k, v = (torch.randn(2, 3, 50, 16, dtype=torch.float64) for _ in range(3))
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal)
    for size in (50 * 8, 7 * 50 * 8, 2 * 50 * 50 * 8, 2**30):  # a row, 7 rows, 2 heads, all at once
        monkeypatch.setattr(accuracy, "CHUNK_BYTES", size)
        torch.testing.assert_close(accuracy.attention(q, k, v, causal, 16**-0.5), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_judge_accepts_sdpa_and_refuses_mistakes(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 64, 64, dtype=dtype) for _ in range(3))
    judge = accuracy.Judge(q, k, v, causal=False)
    good = scaled_dot_product_attention(q, k, v)
    assert judge.judge(good, dtype).right
    last_key_lost = scaled_dot_product_attention(q, k[:, :, :-1], v[:, :, :-1])
    assert not judge.judge(last_key_lost, dtype).right
    one_nan = good.clone()
    one_nan[0, 0, 0, 0] = torch.nan
    assert not judge.judge(one_nan, dtype).right
    assert not judge.judge(good[:, :1], dtype).right


def test_error_is_normalised_per_head():
    reference = torch.tensor([1e-3, 1e3], dtype=torch.float64).reshape(1, 2, 1, 1)
    result = reference.clone()
    result[0, 0] += 1e-4  # a tenth of the small head, nothing beside the large one
    assert accuracy.normalized_error(result, reference) == pytest.approx(0.1)


def test_half_operand_kernels_are_judged_on_rounded_inputs():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 64, 64) for _ in range(3))
    rounded = scaled_dot_product_attention(q.half().float(), k.half().float(), v.half().float())
    judge = accuracy.Judge(q, k, v, causal=False)
    assert judge.judge(rounded, torch.float16).right
    assert not judge.judge(rounded, torch.float32).right


# ------------------------------------------------------------------------------------------------------------ tables


def test_milliseconds_have_three_digits():
    assert [report.milliseconds(x) for x in (0.0361, 0.1604, 1.553, 22.41, 304.2)] == [
        "0.0361",
        "0.160",
        "1.55",
        "22.4",
        "304",
    ]


def test_piped_table_is_aligned_markdown(capsys):
    report.Table("title", ["N", "a"], [["64", "1.00"], ["128", report.ABSENT]]).print()
    title, empty, *lines = capsys.readouterr().out.rstrip().splitlines()
    assert (title, empty) == ("title", "")
    assert lines == ["|   N |    a |", "|----:|-----:|", "|  64 | 1.00 |", f"| 128 |    {report.ABSENT} |"]


def test_text_table_is_aligned_and_never_too_wide():
    table = report.Table("title", ["N", "64", "128"], [["sdpa", "1.00", report.ABSENT], ["a", "12.50", "3"]])
    title, empty, *lines = table.text().splitlines()
    assert (title, empty) == ("title", "")
    assert lines == ["N        64  128", "----------------", f"sdpa   1.00    {report.ABSENT}", "a     12.50    3"]
    narrow = table.text(width=12).split("\n\n")
    assert [part.splitlines()[0] for part in narrow] == ["title", "N        64", "N     128"]
    assert narrow[2].splitlines()[3] == "a       3"


def test_microseconds_have_three_digits():
    assert [report.microseconds(x) for x in (0.00401, 0.0375, 0.587, 4.678)] == ["4.01", "37.5", "587", "4678"]


def test_labels_stay_apart_and_near_their_lines():
    assert report.apart([0.5, 0.1, 0.9], 0.1) == [0.5, 0.1, 0.9]
    assert report.apart([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    places = [0.30, 0.32, 0.31, 0.9, 0.42]
    found = report.apart(places, 0.1)
    assert sorted(range(5), key=found.__getitem__) == sorted(range(5), key=places.__getitem__)
    assert all(b - a > 0.0999 for a, b in zip(sorted(found), sorted(found)[1:], strict=False))
    assert found[3] == 0.9


# --------------------------------------------------------------------------------------------------- with a stand-in


@pytest.fixture
def stand_in(monkeypatch):
    """A library whose kernels are SDPA, SDPA with a lost key, a refusal and a defect."""

    def forward(q, k, v, *, causal=False, kernel="auto"):
        if kernel == "refuses":
            raise ValueError("head dim: got 64, allowed: 32")
        if kernel == "breaks":
            raise RuntimeError("launch failed")
        if kernel == "full":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        lost = 1 if kernel == "wrong" else 0
        end = k.shape[2] - lost
        return scaled_dot_product_attention(q, k[:, :, :end], v[:, :, :end], is_causal=causal)

    library = SimpleNamespace(
        __version__="0",
        forward=forward,
        build_info=lambda: SimpleNamespace(cuda="13.0", architectures=("9.0",)),
        device_facts=lambda device: None,
        explain=lambda q, k, v, *, kernel, device_facts: SimpleNamespace(
            kernel=kernel, instance="64 x 32 rows" if q.shape[2] > 16 else "16 x 32 rows"
        ),
        function_facts=lambda kernel, instance: SimpleNamespace(
            binary_version=90, ptx_version=80, registers=128, local_bytes=0
        ),
    )
    monkeypatch.setattr(contenders, "CPU_KERNELS", ("right", "wrong", "refuses", "breaks", "full"))
    monkeypatch.setattr(benchmark, "load_library", lambda: library)
    return library


ARGUMENTS = ("--device", "cpu", "--lengths", "16,33", "--warmup", "1", "--repeats", "2", "--heads", "1")


@pytest.mark.parametrize(
    ("kernels", "status"),
    [("right", 0), ("right refuses full", 0), ("right wrong", 1), ("breaks", 1), ("unheard_of", 2)],
)
def test_exit_status(stand_in, capsys, kernels, status):
    assert benchmark.main([*ARGUMENTS, "--kernels", *kernels.split()]) == status
    out, err = capsys.readouterr()
    if "refuses" in kernels:
        unwrapped = " ".join(out.split())
        assert "refuses (head dim: got 64, allowed: 32)" in unwrapped
        assert "full (out of memory)" in unwrapped
        assert not re.search("^(refuses|full) ", out, re.MULTILINE), "what cannot run is no line of the table"
    if "wrong" in kernels:
        assert re.search("^wrong .* WRONG$", out, re.MULTILINE)
        assert "wrong: wrong at N = 16, fp32; wrong at N = 33, fp32" in err
    if kernels == "breaks":
        assert re.search("^breaks .* WRONG$", out, re.MULTILINE)
        assert "breaks (launch failed)" in " ".join(out.split())
    if status == 2:
        assert "'right', 'wrong', 'refuses'" in err


@pytest.mark.parametrize("causal", [False, True])
def test_json(stand_in, tmp_path, causal):
    path = tmp_path / "result.json"
    flags = ["--causal"] if causal else []
    status = benchmark.main([*ARGUMENTS, *flags, "--kernels", "right", "--peers", "sdpa_math", "--json", str(path)])
    assert status == 0
    document = json.loads(path.read_text())
    assert [row["problem"]["length"] for row in document["rows"]] == [16, 33]
    cell = document["rows"][1]["cells"]["right"]
    assert cell["right"] and cell["allclose"]
    assert len(cell["samples_ms"]) == 2
    flops = 4 * 2 * 1 * 33 * 33 * 64 / (2 if causal else 1)
    assert cell["tflops"] == pytest.approx(flops / cell["median_ms"] / 1e9)
    assert set(document["rows"][0]["cells"]) == {"sdpa", "sdpa_math", "right"}
    assert document["complete"]
    assert [(c["kernel"], c["tile"], c["lengths"]) for c in document["compiled_kernels"]] == [
        ("right", "16 x 32 rows", [16]),
        ("right", "64 x 32 rows", [33]),
    ]


def test_header_tells_load_time_compilation(stand_in, capsys):
    benchmark.main([*ARGUMENTS, "--kernels", "right"])
    assert "kernels   sm_90 code compiled at load from PTX for compute_80: right\n" in capsys.readouterr().out


def test_gpu_without_cuda_kernels_is_an_error(stand_in, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "choose_device", lambda _: torch.device("cuda"))
    stand_in.build_info = lambda: SimpleNamespace(cuda=None)
    assert benchmark.main([]) == 2
    assert "built without CUDA kernels" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(), ("--kernels", "all"), ("--tflops", "--errors")])
def test_tables_are_for_reading(stand_in, capsys, flags):
    """flash_wmma as it is called leads, SDPA follows; one line a contender, one verdict a line; 100 characters."""
    many = [str(n) for n in range(100, 170, 10)]
    assert benchmark.main([*ARGUMENTS[:2], "--lengths", *many, *ARGUMENTS[4:], "--dtype", "fp32", "bf16", *flags]) in (
        0,
        1,
    )
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= report.WIDTH
    for dtype in ("fp32", "bf16"):
        table = out.split(f"{dtype} inputs: latency in ")[1].split("\n\n")[1].splitlines()
        assert table[0].split()[:2] == ["N", "100"]
        assert [line.split()[0] for line in table[2:6]] == ["flash_wmma", "auto:", "sdpa", "default:"]
        assert table[3].split()[1] == "right"
        assert table[4].split()[2] == "1.00x"
    assert ("wrong   " in out) == (flags == ("--kernels", "all"))
    assert out.count("TFLOP/s") == out.count("largest error") == (2 if "--errors" in flags else 0)
    assert out.count("not here:") == 2


@pytest.mark.parametrize(("suffix", "unit"), [(9.99, "µs"), (10.0, "ms")])
def test_unit_of_latency(capsys, suffix, unit):
    sdpa = contenders.Implementation("sdpa", "sdpa", scaled_dot_product_attention)
    row = benchmark.Row(
        benchmark.Problem(1, 1, 8, 8, "fp16", False),
        "graph",
        {"sdpa": benchmark.Cell(median_ms=suffix, speedup_over_sdpa=1.0, spread=1.3)},
    )
    benchmark.print_tables([row], [sdpa], SimpleNamespace(tflops=False, errors=False))
    out = capsys.readouterr().out
    assert f"fp16 inputs: latency in {unit}," in out
    assert {"µs": "9990 1.00x", "ms": "10.0 1.00x"}[unit] in out


def test_default_table_of_a_gpu_is_one_block(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")  # a terminal's, which a file is not
    peers = ("sdpa", *contenders.SDPA_BACKENDS)
    kernels = ("auto", *filter(contenders.on_tensor_cores, contenders.UNITS))
    compared = [contenders.Implementation(name, "sdpa", print) for name in peers]
    compared += [contenders.Implementation(name, "flash_wmma", print) for name in kernels]
    rows = []
    for length in benchmark.DEFAULT_LENGTHS:
        cells = {i.name: benchmark.Cell(median_ms=9.876, speedup_over_sdpa=12.3, spread=0.1) for i in compared}
        cells["auto"].choice, cells["sdpa"].choice = "wgmma_sm90", "sdpa_efficient"
        rows.append(benchmark.Row(benchmark.Problem(2, 4, length, 64, "fp16", False), "graph", cells))
    benchmark.print_tables(rows, compared, SimpleNamespace(tflops=False, errors=False))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= report.WIDTH
    assert len([line for line in lines if line.startswith("N ")]) == 1
    assert [line.split()[0] for line in lines if "9876 12.3x" in line] == [
        "flash_wmma" if i.name == "auto" else i.name for i in compared
    ]


@pytest.mark.parametrize("spread", [0.9, 1.1])
def test_a_busy_machine_is_named(spread):
    problem = benchmark.Problem(1, 1, 64, 8, "fp16", False)
    row = benchmark.Row(problem, "wall", {"cpu": benchmark.Cell(spread=0.1), "sdpa": benchmark.Cell(spread=spread)})
    line, *hint = benchmark.spread_lines([row])
    assert line.endswith(f"at most ±{100 * spread:.0f} % (sdpa, N = 64)")
    assert [("too busy" in text) for text in hint] == [True] * (spread > 1)


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("name", ["no-such-folder/result.png", "folder.png"])
def test_a_file_that_cannot_be_written_is_said_before_measuring(stand_in, monkeypatch, tmp_path, capsys, option, name):
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(benchmark, "measure_row", None)
    assert benchmark.main([*ARGUMENTS, option, str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"{option} {tmp_path / name}: cannot be written (")
    assert err.count("\n") == 1


def test_a_plot_of_an_unknown_format_is_refused(stand_in, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert benchmark.main([*ARGUMENTS, "--plot", str(tmp_path / "latency.txt")]) == 2
    assert "latency.txt: the name's end says the format; allowed are" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_that_exists_is_kept_until_there_is_a_result(stand_in, tmp_path):
    (tmp_path / "result.json").write_text("old")
    assert benchmark.main([*ARGUMENTS, "--kernels", "unheard_of", "--json", str(tmp_path / "result.json")]) == 2
    assert (tmp_path / "result.json").read_text() == "old"


@pytest.mark.parametrize("error", [KeyboardInterrupt, timing.DeviceLost("the CUDA device is unusable")])
def test_what_was_measured_is_kept(stand_in, monkeypatch, tmp_path, capsys, error):
    """After Ctrl-C in the second row, or a broken device."""
    pytest.importorskip("matplotlib")

    def measure_row(problem, *arguments):
        if problem.length == 33:
            raise error
        return measured(problem, *arguments)

    measured = benchmark.measure_row
    monkeypatch.setattr(benchmark, "measure_row", measure_row)
    numbers, plot = tmp_path / "result.json", tmp_path / "latency.svg"
    outputs = ["--json", str(numbers), "--plot", str(plot)]
    status = benchmark.main([*ARGUMENTS, "--kernels", "auto,right", *outputs])
    assert status == (130 if error is KeyboardInterrupt else 1)
    out, err = capsys.readouterr()
    assert "right" in out
    assert ("interrupted" if error is KeyboardInterrupt else "unusable") in err
    document = json.loads(numbers.read_text())
    assert not document["complete"]
    assert [row["problem"]["length"] for row in document["rows"]] == [16]
    assert "</svg>" in plot.read_text()


def test_lines_of_the_plot():
    """What a default always calls is no line of its own; of the peers, those that lead somewhere."""
    ms = {
        "auto": (1, 2),
        "sdpa": (3, 3),
        "sdpa_flash": (3, 3),
        "sdpa_math": (9, 9),
        "flash_attn": (4, 1),
        "wmma_v1": (5, 5),
    }
    implementations = [
        contenders.Implementation(
            name, "sdpa" if "sdpa" in name else "other" if "attn" in name else "flash_wmma", print
        )
        for name in ms
    ]
    rows = []
    for at, length in enumerate((64, 128)):
        cells = {name: benchmark.Cell(median_ms=values[at], speedup_over_sdpa=1.0) for name, values in ms.items()}
        cells["sdpa"].choice = "sdpa_flash"
        cells["auto"].choice = ("wmma_v1", "wmma_v2")[at]
        rows.append(benchmark.Row(benchmark.Problem(1, 1, length, 8, "fp16", False), "wall", cells))
    found = {curve.name: curve.look for curve in benchmark.curves(implementations, rows)}
    assert found == {
        "flash_wmma (auto)": "auto",
        "SDPA (default: sdpa_flash)": "baseline",
        "flash_attn": "peer",
        "wmma_v1": "kernel",
    }
    rows[1].cells["auto"].choice = "wmma_v1"
    always = [curve.name for curve in benchmark.curves(implementations, rows)]
    assert always == ["flash_wmma (auto: wmma_v1)", "SDPA (default: sdpa_flash)", "flash_attn"]


# --------------------------------------------------------------------------------------------------------- contenders


def test_default_contenders(monkeypatch):
    kernels = ["wgmma_sm90", "simt", "wmma_v2", "unfused", "wmma_v1", "new", "cpu"]
    library = SimpleNamespace(
        kernels=lambda: [SimpleNamespace(name=name, device="cpu" if name == "cpu" else "cuda") for name in kernels]
    )

    def chosen(names, device="cuda"):
        return [i.name for i in contenders.flash_wmma_kernels(library, torch.device(device), names)]

    assert chosen(None) == ["auto", "wmma_v1", "wmma_v2", "wgmma_sm90", "new"]
    assert chosen(["all"]) == ["auto", "simt", "unfused", "wmma_v1", "wmma_v2", "wgmma_sm90", "new"]
    assert chosen(["simt", "auto"]) == ["simt", "auto"]
    monkeypatch.setattr(library, "kernels", lambda: pytest.fail("a list of kernels compiles them for the emulator"))
    assert chosen(None, "cpu") == ["auto"]
    assert chosen(["all"], "cpu") == ["auto", "cpu"]


# ---------------------------------------------------------------------------------------------------- as it is called


def test_uninstalled_clone_names_the_one_command(tmp_path):
    (tmp_path / "flash_wmma").mkdir()
    (tmp_path / "flash_wmma" / "__init__.py").write_text("raise ImportError('not built')")
    result = run_script(PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    assert "./dev bench" in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


def test_cpu_table(tmp_path):
    pytest.importorskip("matplotlib")
    plot, numbers = tmp_path / "latency.png", tmp_path / "result.json"
    result = run_script(
        *("--device", "cpu", "--lengths", "17", "64", "--repeats", "3", "--json", str(numbers), "--plot", str(plot))
    )
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    assert "N  " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= report.WIDTH
    assert plot.read_bytes().startswith(b"\x89PNG")
    for row in json.loads(numbers.read_text())["rows"]:
        assert row["cells"]["auto"]["right"]
        assert row["cells"]["auto"]["choice"] == "cpu"
        assert row["cells"]["sdpa"]["speedup_over_sdpa"] == 1
    if shutil.which("g++") is None:
        return
    assert "CUDA kernels in the emulator, as on sm_90: B=1 H=1 N=64 d=64, fp16 inputs" in result.stdout
    emulated = {row["kernel"]: row for row in json.loads(numbers.read_text())["emulated"]}
    assert {"wmma_v1", "wmma_v2", "wmma_v3"} <= emulated.keys()
    assert all(row["right"] and row["mma"] == 256 for row in emulated.values() if row["kernel"].startswith("wmma_"))
    assert emulated["wmma_v2"]["bank_conflicts"] > emulated["wmma_v3"]["bank_conflicts"]


def test_without_a_compiler_there_is_no_emulation(tmp_path):
    numbers = tmp_path / "result.json"
    result = run_script(
        *("--device", "cpu", "--lengths", "17", "--repeats", "2", "--json", str(numbers)), FLASH_WMMA_GXX="no-such-g++"
    )
    assert result.returncode == 0, result.stderr
    assert "The CUDA kernels were not emulated: running a CUDA kernel on the CPU needs no-such-g++" in " ".join(
        result.stdout.split()
    )
    assert json.loads(numbers.read_text())["emulated"] == []


def test_named_cuda_kernels_are_emulated_not_timed(capsys):
    pytest.importorskip("flash_wmma")
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    assert benchmark.main([*ARGUMENTS, "--kernels", "wmma_v2", "--dtype", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "wmma_v2: kernel 'wmma_v2' cannot run this: dtype: got bfloat16" in " ".join(out.split())
    latency, emulated = out.split("CUDA kernels in the emulator")
    assert "wmma_v2" not in latency
    assert f"\nwmma_v2    {report.ABSENT}" in emulated


def test_traffic_of_products_by_cublas_is_unknown(capsys, tmp_path):
    pytest.importorskip("flash_wmma")
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    numbers = tmp_path / "numbers.json"
    assert benchmark.main([*ARGUMENTS, "--kernels", "unfused", "--dtype", "fp16", "--json", str(numbers)]) == 0
    out = capsys.readouterr().out
    assert f"{report.ABSENT} unfused: cuBLAS's products are not counted" in out
    (row,) = json.loads(numbers.read_text())["emulated"]
    assert row["right"] and row["traffic"] is None and row["mma"] is None and row["wavefronts"] > 0


def test_a_kernel_that_the_emulator_faults_is_wrong(monkeypatch, capsys):
    library = benchmark.load_library()

    def faulty(*arguments, **options):
        raise library.emulator.EmulatorError("race in shared memory\nsomewhere")

    if shutil.which("g++") is None:
        pytest.skip("no g++")
    monkeypatch.setattr(library, "profile", faulty)
    assert benchmark.main([*ARGUMENTS, "--kernels", "wmma_v2"]) == 1
    out, err = capsys.readouterr()
    assert "wmma_v2: race in shared memory" in out
    assert "wrong: wmma_v2 in the emulator" in err


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_half_inputs_on_the_cpu(capsys, dtype, causal):
    flags = ["--causal"] if causal else []
    assert benchmark.main([*ARGUMENTS, "--dtype", dtype, "--head-dim", "40", "--kernels", "auto", *flags]) == 0
    assert f"{dtype} inputs: latency in" in capsys.readouterr().out


@pytest.mark.gpu
@without_gpu
def test_cuda_table(tmp_path):
    numbers = tmp_path / "result.json"
    result = run_script("--lengths", "64", "256", "--repeats", "5", "--graph", "on", "--json", str(numbers))
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    rows = json.loads(numbers.read_text())["rows"]
    assert [(row["problem"]["dtype"], row["problem"]["length"]) for row in rows] == [
        *(("fp32", 64), ("fp32", 256), ("fp16", 64), ("fp16", 256))
    ]
    assert max(map(len, result.stdout.splitlines())) <= report.WIDTH
    assert result.stdout.index("\nflash_wmma ") < result.stdout.index("\nsdpa ") < result.stdout.index("\nwmma_v1 ")
    for row in rows:
        assert row["clock"] == "graph"
        assert all(row["cells"][name]["right"] for name in ("auto", "wmma_v1", "wmma_v2", "wmma_v3"))
        assert row["cells"]["auto"]["choice"] in row["cells"]


def test_programs_import_from_the_harness_and_from_no_other_program():
    programs = {path.stem for path in FOLDER.glob("*.py")}
    for path in FOLDER.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
        assert not names & programs, path


def test_notebook_is_committed_with_the_outputs_of_one_run():
    """So that a page that shows it has tables and plots; nothing of them tells where it ran."""
    notebook = json.loads((FOLDER / "flash_wmma_colab.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    assert not re.search(r"(?<![\w.])/(home|tmp|root|content)/", "".join(map("".join, shown)))


# ------------------------------------------------------------------------------------------------------------ ladder


def test_the_ladder_has_every_kernel():
    emulator = importlib.import_module("flash_wmma").emulator
    assert {"cpu", *emulator.kernel_sources("forward")} == set(ladder.UNITS)
    for ceilings in ladder.CEILINGS.values():
        assert {unit for unit in ladder.UNITS.values() if unit} == set(ceilings)


def test_ladder_gives_each_kernel_its_dtype():
    kernels = [SimpleNamespace(name=name, device="cuda") for name in (*reversed(ladder.UNITS), "new")]
    library = SimpleNamespace(kernels=lambda: kernels, forward=None)
    entries = ladder.entries(library, torch.device("cuda"))
    labels = [entry.label for entry in entries if entry.implementation.ours]
    assert labels[1] == "simt_naive fp32"
    assert labels[-8:-2] == [
        "unfused fp16",
        "wmma_v1 fp16",
        "wmma_v2 fp16",
        "wmma_v3 fp16",
        "mma_sm75 fp16",
        "mma_sm80 fp16",
    ]
    assert labels[-2:] == ["wgmma_sm90 fp16", "new fp16"]
    assert "unfused fp32" in labels
    assert {entry.label for entry in entries} >= {"sdpa_flash fp16", "sdpa_efficient fp32"}


def test_ladder_ceiling_is_what_binds():
    card = "NVIDIA H200"
    assert ladder.ceiling(card, "wgmma_sm90", 64) == (pytest.approx(914, abs=0.2), "ex2")
    assert ladder.ceiling(card, "wgmma_sm90", 128) == (926, "wgmma")
    assert ladder.ceiling(card, "simt", 64) == (50.8, "FFMA")
    assert ladder.ceiling("another card", "simt", 64) is None
    assert ladder.ceiling(card, "sdpa_flash", 64) is None


def test_ladder_rounds_fit_the_budget():
    method = timing.Method()
    once = timing.Measurement("events", {"slow": timing.Timing((1000.0,)), "fast": timing.Timing((1.0,))})
    assert ladder.rounds(15, once, method) == 12  # two rounds' warm-up; a round is 1.002 s
    assert ladder.rounds(1, once, method) == 3
    assert ladder.rounds(1e6, once, method) == 42
    assert ladder.rounds(1, timing.Measurement("events"), method) == 3


def test_ladder_compares_rung_by_rung():
    """With the one before, with SDPA's flash backend, and with what is right."""

    def attend(wait: float, wrong: float = 0.0):
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
            if wait < 0:
                raise ValueError("kernel 'x' cannot run this: a reason")
            time.sleep(wait)
            return scaled_dot_product_attention(q, k, v, is_causal=causal) + wrong

        return call

    made = [
        ladder.Entry(contenders.Implementation(name, family, attend(*how)), dtype)
        for name, family, dtype, how in (
            ("simt", "flash_wmma", "fp32", (0.04,)),
            ("refuses", "flash_wmma", "fp16", (-1,)),
            ("unfused", "flash_wmma", "fp16", (0.001,)),
            ("wmma_v1", "flash_wmma", "fp16", (0.01, 1.0)),
            ("sdpa_flash", "sdpa", "fp16", (0.02,)),
        )
    ]
    problem = benchmark.Problem(1, 1, 16, 64, "", False)
    rungs, method = ladder.climb(problem, made, CPU, "NVIDIA H200", 0.5, 0)
    assert method.repeats >= 3
    slow, absent, aside, fast, flash = rungs
    assert (slow.over_previous, slow.cell.right, fast.cell.right, flash.cell.right) == (None, True, False, True)
    assert absent.cell.reason == "kernel 'x' cannot run this: a reason"
    assert absent.cell.right is None

    def ratio(one: object, other: object) -> float:
        pairs = zip(one.cell.samples_ms, other.cell.samples_ms, strict=True)
        return pytest.approx(statistics.median(b / a for a, b in pairs), rel=1e-3)

    assert fast.over_previous == ratio(fast, slow), "the rung before it that ran"
    assert aside.over_previous is None
    assert fast.over_flash == ratio(fast, flash)
    assert flash.over_flash == 1
    assert slow.of_ceiling == pytest.approx(slow.cell.tflops / 50.8)
    assert flash.of_ceiling is None
    lines = ladder.table(rungs, "title").markdown().splitlines()
    assert len(lines) == 9
    assert "FFMA" in lines[4]
    assert lines[5].count(report.ABSENT) == 5


def test_ladder_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {suffix: tmp_path / f"ladder.{suffix}" for suffix in ("json", "md", "png")}
    shape = ["--batch", "1", "--heads", "2", "--length", "32", "--device", "cpu", "--budget", "0.1"]
    outputs = ["--json", str(files["json"]), "--markdown", str(files["md"]), "--plot", str(files["png"])]
    assert ladder.main([*shape, *outputs]) == 0
    printed = capsys.readouterr().out
    assert "The CUDA kernels need a GPU" in printed
    assert files["md"].read_text() in printed
    document = json.loads(files["json"].read_text())
    assert [(rung["name"], rung["cell"]["right"]) for rung in document["rungs"]] == [("cpu", True), ("sdpa", True)]
    assert files["png"].stat().st_size > 0


# ----------------------------------------------------------------------------------------------------------- forward


def test_forward_ratios_are_taken_round_by_round():
    # 4, 1 and 3 times as fast; the ratio of the medians is 2
    cells = {"fast": benchmark.Cell(samples_ms=[1.0, 2.0, 3.0]), "slow": benchmark.Cell(samples_ms=[4.0, 2.0, 9.0])}
    assert sweep.ratio(cells["fast"], cells["slow"]) == 3
    assert sweep.ratio(cells["fast"], benchmark.Cell(reason="out of memory")) is None


def test_forward_tables_have_both_masks_in_a_cell():
    def row(causal: bool) -> benchmark.Row:
        samples = {"sdpa_flash": [3.0], "sdpa_cudnn": [2.0], "mma_sm80": [2.0 if causal else 1.0]}
        cells = {name: benchmark.Cell(tflops=100 / ms[0], samples_ms=ms) for name, ms in samples.items()}
        return benchmark.Row(benchmark.Problem(1, 32, 16384, 64, "fp16", causal), "events", cells)

    speeds, ratios = sweep.tables([(row(False), row(True))], ["mma_sm80"], "card")
    assert speeds.rows == [["64", "16384", "33 / 33", "50 / 50", "100 / 50"]]
    assert ratios.rows == [["64", "16384", "3.00 / 1.50", "2.00 / 1.00"]]


def test_forward_refuses_sizes_that_do_not_divide(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sweep, "choose_device", lambda name: torch.device("cuda"))
    assert forward.main(["--lengths", "1000"]) == 2
    assert "--lengths: got 1000, allowed are divisors of 16384" in capsys.readouterr().err


@pytest.mark.parametrize("row", costs.ROWS)
def test_costs(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both calls of a pair give the same, but for what sinks and tangents are there to change."""
    for name, value in {"TOKENS": 64, "LENGTH": 8, "LONG": 16}.items():
        monkeypatch.setattr(costs, name, value)
    calls = costs.Calls(flash_wmma, torch.device("cpu"), torch.float32, 512)
    with_it, without = (call() for call in costs.ROWS[row](calls))
    assert with_it.shape == without.shape
    if row != "sinks" and not row.startswith("jvp"):
        torch.testing.assert_close(with_it, without)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_forward_needs_a_gpu(capsys: pytest.CaptureFixture[str]):
    assert forward.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_backward_compares_gradients_of_what_it_times():
    problem = benchmark.Problem(1, 2, 40, 16, "fp16", True)
    names = ("sdpa_math", "bwd_cpu", "bwd_cpu deterministic", "no_such_kernel")
    method = timing.Method(warmup=1, repeats=2)
    compared = [peer for peer in contenders.peers(CPU, names[:1]) if peer.name in names]
    compared += [backward.backward_kernel(flash_wmma, name) for name in names[1:]]
    row = backward.measure_row(problem, compared, CPU, method, 0, lambda: None)
    assert all(row.cells[name].right and len(row.cells[name].samples_ms) == 2 for name in names[:3])
    assert row.cells["bwd_cpu"].error > 0
    assert "no_such_kernel" in (row.cells["no_such_kernel"].reason or "")
    assert row.cells["no_such_kernel"].right is False
    assert row.cells["bwd_cpu"].tflops == pytest.approx(2.5 * problem.flops / (1e9 * row.cells["bwd_cpu"].median_ms))


def test_backward_sees_a_nan_in_any_gradient():
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, factor: float = 1.0) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v * factor)

    right = contenders.Implementation("right", "other", attend)
    wrong = contenders.Implementation("nan", "flash_wmma", partial(attend, factor=math.nan))
    problem = benchmark.Problem(1, 1, 8, 8, "fp16", False)
    method = timing.Method(warmup=1, repeats=1)
    row = backward.measure_row(problem, [right, wrong], CPU, method, 0, lambda: None)
    assert row.cells["right"].right
    assert not row.cells["nan"].right


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_backward_needs_a_gpu(capsys: pytest.CaptureFixture[str]):
    assert backward.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


SMALL_FEATURES = (
    *("--device", "cpu", "--dtype", "fp32", "--hidden", "128", "--head-dims", "16", "--lengths", "16", "1", "8", "7"),
    *("--repeats", "2"),
)


def test_backward_features_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "backward_features.json"
    assert backward_features.main([*SMALL_FEATURES, "--kernels", "auto", "none", "--json", str(numbers)]) == 1
    out, err = capsys.readouterr()
    lines = (
        "deterministic over not, N = 32",
        "GQA 8:1 over 8 times the K and V heads, N = 16",
        "packed over padded, 4 x 16",
        "packed over as many tokens, 2 x 16",
    )
    assert all(out.count(line) == 1 for line in lines)
    assert err.count("backward_kernel: got 'none'") == 3 * 2
    rows = json.loads(numbers.read_text())["rows"]
    assert {(f"{row['name']} over {row['over']}", row["causal"]) for row in rows} == {
        (line, causal) for line in lines for causal in (False, True)
    }
    for row in rows:
        samples = zip(row["samples_ms"], row["over_samples_ms"], strict=True)
        assert (row["kernel"], row["head_dim"], row["right"]) == ("auto", 16, True)
        assert row["speed"] == pytest.approx(statistics.median(over / ms for ms, over in samples))


def test_backward_features_see_wrong_gradients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backward_features.Setting, "attend_packed", lambda self, q, k, v: q + k + v)
    assert backward_features.main([*SMALL_FEATURES]) == 1
    wrong = [line.partition(": off by ")[0] for line in capsys.readouterr().err.splitlines() if "off by" in line]
    assert wrong == ["auto, d = 16, packed, causal: False", "auto, d = 16, packed, causal: True"]


def test_backward_features_refuse_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert backward_features.main([*SMALL_FEATURES, "--lengths", "5", "4"]) == 2
    assert "--lengths: got a sum of 9, allowed are multiples of twice the longest" in capsys.readouterr().err
    assert backward_features.main([*SMALL_FEATURES, "--head-dims", "32"]) == 2
    assert "--head-dims: got 32, allowed are at most --hidden / 8, 16" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- calibrate


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_calibration_calls_every_micro_kernel():
    program = flash_wmma.emulator.Program(calibrate.MICRO)
    entries = calibrate.micro_entries()
    assert entries
    for entry in entries:
        (counts,) = calibrate.emulated(program.counts(entry, *calibrate.micro_arguments(entry, "cpu")))
        assert any(counts.values())


def test_calibration_takes_a_conversion_and_its_kernel_as_one_call(monkeypatch: pytest.MonkeyPatch):
    metric, absent = list(calibrate.METRICS.values())[:2]
    rows = ['"ID","Kernel Name","Metric Name","Metric Value"']
    for i, kernel in enumerate(("convert", "forward", "forward")):
        rows += [f'"{i}","{kernel}","{metric.ncu}","1,10{i}"', f'"{i}","{kernel}","{absent.ncu}","n/a"']
    done = SimpleNamespace(stdout="\n".join(["==PROF==", *rows]))
    monkeypatch.setattr(calibrate.subprocess, "run", lambda *_, **__: done)
    calls = calibrate.ncu(["run"])
    assert [[counts["shared load requests"] for counts in call] for call in calls] == [[1100, 1101], [1102]]
    assert math.isnan(calls[0][0]["shared load wavefronts"])


# ------------------------------------------------------------------------------------------------------------ builds

ROOT = FOLDER.parent
SMALL = ("--device", "cpu", "--dtype", "fp32", "--tokens", "64", "--hidden", "32", "--head-dims", "16", "--rounds", "2")
STUB = """\
import torch
from torch.nn.functional import scaled_dot_product_attention

torch.library.define("flash_wmma::forward", "() -> ()")
print("not an answer")
factors = {}

def forward(q, k, v, *, causal, kernel):
    if kernel not in factors:
        raise ValueError(f"no kernel {kernel!r}")
    return scaled_dot_product_attention(q, k, v, is_causal=causal) * float(factors[kernel])
"""


def test_a_build_is_compared_with_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    numbers = tmp_path / "builds.json"
    kernels = ["--forward", "cpu", "--backward", "bwd_cpu", "bwd_cpu deterministic"]
    features = ["--features", *builds.FEATURES]
    arguments = [str(ROOT), *kernels, *features, *SMALL, "--lengths", "32", "64", "--json", str(numbers)]
    assert builds.main(arguments) == 0
    out = capfd.readouterr().out
    assert out.count("speed of after relative to before") == 8
    assert "results of 48 of 48 rows agree to the bit" in out
    document = json.loads(numbers.read_text())
    assert document["builds"]["before"]["package"] == document["builds"]["after"]["package"] == str(ROOT / "flash_wmma")
    rows = document["rows"]
    assert len(rows) == 4 * 3 * 2 * 2
    assert all(row["right"] and len(row["before_ms"]) == len(row["after_ms"]) == 2 for row in rows)
    ratios = [before / after for before, after in zip(rows[0]["before_ms"], rows[0]["after_ms"], strict=True)]
    assert rows[0]["speed"] == pytest.approx(statistics.median(ratios))


def test_builds_that_differ(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    before = {"right": 1, "close": 1, "wrong": 1, "nan": 1, "gone": 1}
    after = {"right": 1, "close": 1.001, "wrong": 1.1, "nan": "nan"}
    for name, factors in (("before", before), ("after", after)):
        (tmp_path / name / "flash_wmma").mkdir(parents=True)
        (tmp_path / name / "flash_wmma" / "__init__.py").write_text(STUB.replace("{}", repr(factors)))
    folders = [str(tmp_path / name) for name in ("before", "after")]
    assert builds.main([*folders, "--forward", *before, "in_none", "--backward", *SMALL, "--lengths", "32"]) == 1
    out, err = capfd.readouterr()
    summary = {line.split(":")[0]: line for line in out.splitlines()}
    assert summary["right"].endswith("results of 2 of 2 rows agree to the bit")
    assert summary["close"].endswith(
        "results of 0 of 2 rows agree to the bit, in the others out differ by up to 1.0e-03"
    )
    assert summary["in_none"] == "in_none: in no row"
    assert "in_none, dense, 2 rows: before: no kernel 'in_none'" in out
    wrong = {line.split(",")[0]: line for line in err.splitlines() if "N = 32, causal: " in line}
    assert wrong.keys() == {"wrong", "nan", "gone"}
    assert "results differ: {'out': 0.1" in wrong["wrong"]
    assert "results differ: {'out': nan" in wrong["nan"]
    assert wrong["gone"].endswith("after: no kernel 'gone'")


def test_builds_needs_two_packages(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert builds.main([str(tmp_path)]) == 2
    assert f"before: there is no flash_wmma package in {tmp_path}" in capfd.readouterr().err
    (tmp_path / "flash_wmma").mkdir()
    (tmp_path / "flash_wmma" / "__init__.py").write_text("raise ImportError('not built')")
    assert builds.main([str(tmp_path), str(tmp_path)]) == 2
    assert f"before: the process of the build in {tmp_path} ended" in capfd.readouterr().err


def test_decode_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each contender computes the same; pages need not divide the keys."""
    numbers = tmp_path / "decode.json"
    rows = ["--rows", "2,4/2,64,50", "1,3/3,32,33,2"]
    arguments = ["--device", "cpu", "--dtype", "bf16", "--repeats", "2", "--append", "--json", str(numbers)]
    monkeypatch.setattr(sys, "argv", ["decode.py", *rows, *arguments])
    decode.main()
    results = json.loads(numbers.read_text())
    assert [result["contender"] for result in results] == 2 * [
        "auto",
        "auto, pages of 16",
        "auto, pages of 256",
        "append",
        "SDPA",
    ]
    assert all(
        result["us"] > 0 and set(result["over"]) >= {"auto", "SDPA"} - {result["contender"]} for result in results
    )
    assert "B 1, 3/3, d 32, 33 keys, 2 q" in capsys.readouterr().out


@pytest.mark.parametrize("row", ["1,4/3,64,10", "1,4,64,10", "1,4/2,64", "0,4/2,64,10"])
def test_decode_refuses_rows(row: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"got '{row}', allowed: "):
        decode.Row.parse(row)
