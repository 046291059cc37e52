#!/usr/bin/env python3
"""The ladder in one table: every forward kernel from the naive one on, timed together at one shape, in one process.

    python benchmark/ladder.py                                          B=8 H=32 N=2048 d=64
    python benchmark/ladder.py --json ladder.json --markdown ladder.md --plot ladder.png

Kernels on CUDA cores are given fp32, those on tensor cores fp16, `unfused` both, SDPA's backends likewise.
`harness/timing.py` says how time is taken: all contenders in rotating order, as many rounds as the budget allows, so
that slow rungs are timed a few times and no more. Every output is checked (`harness/accuracy.py`). Without a GPU the
CPU kernel is timed beside SDPA; what the emulator counts of the CUDA kernels, `benchmark.py --device cpu` prints. Exit
status: 0; 1 if a kernel is wrong or fails; 2 if the benchmark cannot run as asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from harness.accuracy import Judge
from harness.contenders import (
    SDPA,
    UNITS,
    Implementation,
    flash_wmma_kernel,
    in_order,
    listed_kernels,
    peers,
    why_not,
)
from harness.environment import compiled_kernels, describe
from harness.problems import DTYPES, Cell, Problem, check, is_refusal, make_inputs, timed_cell
from harness.program import CannotRun, choose_device, load_library, positive
from harness.report import ABSENT, Table, milliseconds, progress
from harness.timing import Contender, DeviceLost, Measurement, Method, measure

ASIDE = ("simt_fa1", "unfused")
"""Kernels beside the ladder: they have no rung before them and are no rung before another kernel."""
PEERS = {"fp32": ("sdpa_math", "sdpa_efficient"), "fp16": ("sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn")}
BASELINE = ("sdpa_flash", "fp16")

CEILINGS = {  # TFLOP/s of each instruction alone, as measured on that card (docs/tuning, docs/simt.md)
    "NVIDIA H200": {"FFMA": 50.8, "mma m16n8k8": 464.0, "mma m16n8k16": 642.0, "wgmma": 926.0}
}
EXPONENTIALS = {"NVIDIA H200": 3.57}
"""10^12 per second, of ex2.f32 alone. Attention has one per 4 d operations."""

MOST_ROUNDS, FEWEST_ROUNDS = 42, 3


@dataclass(frozen=True)
class Entry:
    """A contender: a kernel or a peer, and the dtype that it is given."""

    implementation: Implementation
    dtype: str

    @property
    def label(self) -> str:
        return f"{self.implementation.name} {self.dtype}"


@dataclass
class Rung:
    """A row of the table."""

    name: str
    dtype: str
    ours: bool
    cell: Cell
    over_previous: float | None = None
    """Times as fast as the kernel before it."""
    over_flash: float | None = None
    ceiling: float | None = None
    """TFLOP/s that the binding unit allows."""
    binds: str | None = None

    @property
    def of_ceiling(self) -> float | None:
        return self.cell.tflops / self.ceiling if self.cell.tflops and self.ceiling else None


def ceiling(card: str, name: str, head_dim: int) -> tuple[float, str] | None:
    """The limit of a kernel on that card, in TFLOP/s and in a word: its products or the exponentials."""
    unit = UNITS.get(name)
    if unit is None or card not in CEILINGS:
        return None
    return min((CEILINGS[card][unit], unit), (4 * head_dim * EXPONENTIALS[card], "ex2"))


def entries(library: ModuleType, device: torch.device) -> list[Entry]:
    """The device's kernels in the order of the ladder, then kernels that are no rungs yet, then the peers."""
    found = []
    for name in in_order(kernel.name for kernel in listed_kernels(library) if kernel.device == device.type):
        implementation = flash_wmma_kernel(library, name, device)
        own = ("fp16",) if implementation.half_operands else ("fp32",)
        found += [Entry(implementation, dtype) for dtype in (("fp32", "fp16") if name == "unfused" else own)]
    beside = {"fp32": (SDPA,)} if device.type == "cpu" else PEERS
    for dtype, wanted in beside.items():
        others = {peer.name: peer for peer in peers(device, wanted)}
        found += [Entry(others[name], dtype) for name in wanted]
    return found


def rounds(budget_s: float, once: Measurement, method: Method) -> int:
    """How many rounds fit the budget, estimated from one round; the warm-up and the untimed calls count too."""
    times = [timing.median for timing in once.timings.values()]
    a_round = sum(t * (2 if t < method.untimed_call_below_ms else 1) for t in times)
    left = 1e3 * budget_s - 2 * sum(times)
    return max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(left / a_round))) if a_round > 0 else FEWEST_ROUNDS


def climb(
    problem: Problem, contestants: Sequence[Entry], device: torch.device, card: str, budget_s: float, seed: int
) -> tuple[list[Rung], Method]:
    """Times all contestants together and checks them. Returns the rows in the order given."""
    inputs = {
        dtype: make_inputs(problem, DTYPES[dtype], device, seed) for dtype in {entry.dtype for entry in contestants}
    }
    calls = {
        entry.label: Contender(
            partial(entry.implementation.attend, *inputs[entry.dtype], problem.causal), entry.implementation.context
        )
        for entry in contestants
    }
    method = Method(warmup=1, repeats=1, graph="off")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SDPA's reasons for not running: why_not asks for them again
        once = measure(calls, device, method)
        method = replace(method, warmup=2, repeats=rounds(budget_s, once, method), graph="auto")
        able = {label: call for label, call in calls.items() if label in once.timings}
        del once.outputs
        with progress() as bar:
            bar.start(f"{len(able)} contenders", method.repeats)
            measured = measure(able, device, method, bar.advance)
    failures = once.failures | measured.failures
    judges = {dtype: Judge(*tensors, problem.causal) for dtype, tensors in inputs.items()}
    flash = measured.timings.get(" ".join(BASELINE))
    previous = None
    result = []
    for entry in contestants:
        kind, timing = entry.implementation, measured.timings.get(entry.label)
        rung = Rung(kind.name, entry.dtype, kind.ours, Cell())
        result.append(rung)
        if timing is None:
            error = failures[entry.label]
            rung.cell.reason = why_not(kind, error, inputs[entry.dtype], problem.causal)
            rung.cell.right = False if kind.ours and not is_refusal(error) else None
            continue
        rung.cell = timed_cell(problem, measured, entry.label, flash)
        check(rung.cell, judges[entry.dtype], measured.outputs.pop(entry.label), kind.multiplied(DTYPES[entry.dtype]))
        rung.over_flash = timing.speedup_over(flash) if flash else None
        if bound := ceiling(card, kind.name, problem.head_dim):
            rung.ceiling, rung.binds = bound
        if kind.ours and kind.name not in ASIDE:
            rung.over_previous = timing.speedup_over(previous) if previous else None
            previous = timing
    return result, method


def table(rungs: Sequence[Rung], title: str) -> Table:
    """Peers below the kernels; what did not run has dashes."""

    def number(value: float | None, form: str) -> str:
        return ABSENT if value is None else form.format(value)

    rows = []
    for rung in rungs:
        cell = rung.cell
        ms = ABSENT if cell.median_ms is None else milliseconds(cell.median_ms)
        share = number(None if rung.of_ceiling is None else 100 * rung.of_ceiling, "{:.0f} %")
        rows.append(
            [
                *(rung.name, rung.dtype, ms),
                number(cell.tflops, "{:.3g}"),
                number(rung.over_previous, "{:.2f}"),
                number(rung.over_flash, "{:.3g}"),
                share if rung.binds is None else f"{share} {rung.binds}",
            ]
        )
    return Table(title, ["kernel", "dtype", "ms", "TFLOP/s", "x before", "x SDPA flash", "% of what binds"], rows)


def draw(rungs: Sequence[Rung], title: str, path: Path) -> None:
    """A bar of TFLOP/s per rung, and a mark at its ceiling."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ran = [rung for rung in rungs if rung.cell.tflops][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.6 + 0.34 * len(ran)), layout="constrained")
    places = range(len(ran))
    speeds = [rung.cell.tflops or 0.0 for rung in ran]
    bars = axes.barh(places, speeds, color=["#0072b2" if rung.ours else "#999999" for rung in ran])
    axes.bar_label(bars, [f"{speed:.3g}" for speed in speeds], padding=3)
    marks = [(rung.ceiling, place) for place, rung in zip(places, ran, strict=True) if rung.ceiling]
    if marks:
        axes.plot([x for x, _ in marks], [y for _, y in marks], "k|", markersize=14, label="what binds")
        axes.legend(frameon=False, loc="lower right")
    axes.set_yticks(places, [f"{rung.name}, {rung.dtype}" for rung in ran])
    axes.set_xscale("log")
    axes.set_xlabel("TFLOP/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name, default in (("batch", 8), ("heads", 32), ("length", 2048), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--device", help="cuda, cuda:1, cpu, ... (default: cuda if there is a GPU)")
    parser.add_argument("--budget", type=float, default=15.0, metavar="S", help="seconds for the timed rounds")
    parser.add_argument("--seed", type=int, default=0, help="of the normally distributed inputs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw bars (needs matplotlib)")
    return parser.parse_args(arguments)


def run(library: ModuleType, options: argparse.Namespace) -> int:
    device = choose_device(options.device)
    contestants = entries(library, device)
    if not any(entry.implementation.ours for entry in contestants):
        raise CannotRun("flash_wmma was built without CUDA kernels, but there is a GPU: build again with nvcc")
    problem = Problem(options.batch, options.heads, options.length, options.head_dim, "", options.causal)
    environment = describe(library, device)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    shape = (problem.batch, problem.heads, problem.length, problem.head_dim)
    facts = environment.lines()
    for dtype in ("fp32", "fp16"):
        names = [e.implementation.name for e in contestants if e.implementation.ours and e.dtype == dtype]
        compiled = compiled_kernels(library, names, [shape], DTYPES[dtype], device)
        facts += [kernel.line() for kernel in compiled]
    print("\n".join(facts), end="\n\n", flush=True)
    try:
        with torch.inference_mode():
            rungs, method = climb(problem, contestants, device, card, options.budget, options.seed)
    except DeviceLost as error:
        print(error, file=sys.stderr)
        return 1
    title = f"{card}: forward, B={shape[0]} H={shape[1]} N={shape[2]} d={shape[3]}{', causal' * problem.causal}"
    result = table(rungs, title)
    result.print()
    print(f"{method.describe(device)}; x: the median of the ratios round by round")
    for rung in rungs:
        if rung.cell.reason:
            print(f"{ABSENT} {rung.name} {rung.dtype}: {rung.cell.reason}")
    if device.type == "cpu":
        print(
            "The CUDA kernels need a GPU; benchmark/benchmark.py --device cpu prints what the emulator counts of them."
        )
    if options.markdown:
        options.markdown.write_text(result.markdown() + "\n", encoding="utf-8")
    if options.json:
        write_json(options, environment.to_json(), method, rungs)
    if options.plot:
        try:
            draw(rungs, title, options.plot)
        except ImportError as error:
            raise CannotRun(f"--plot: {error} (pip install matplotlib)") from error
    wrong = [f"{rung.name} {rung.dtype}" for rung in rungs if rung.ours and rung.cell.right is False]
    if wrong:
        print(f"wrong: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def write_json(options: argparse.Namespace, environment: dict[str, Any], method: Method, rungs: Sequence[Rung]) -> None:
    document = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "options": {k: v for k, v in vars(options).items() if k not in ("json", "markdown", "plot")},
        "environment": environment,
        "method": asdict(method),
        "rungs": [asdict(rung) | {"of_ceiling": rung.of_ceiling} for rung in rungs],
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        return run(load_library(), options)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
