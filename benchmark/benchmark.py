#!/usr/bin/env python3
"""Latency of flash_wmma's kernels beside PyTorch's scaled_dot_product_attention and other libraries.

    python benchmark/benchmark.py                                   the default table: B=2 H=4 d=64, fp32
    python benchmark/benchmark.py --dtype fp16 --batch 8 --heads 32 --lengths 2048 --tflops
    python benchmark/benchmark.py --json result.json --plot latency.png

`harness/timing.py` says how time is taken, `harness/accuracy.py` how the timed results are checked. On a CPU the CUDA
kernels are not timed, but run in the emulator at a small N (`harness/emulated.py`). Exit status: 0; 1 if a result of
flash_wmma is wrong or a kernel fails; 2 if the benchmark cannot run as asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.program import HINT, CannotRun, choose_device, integers, load_library, names, positive

try:
    import torch

    from harness.accuracy import ALLCLOSE_ATOL
    from harness.contenders import SDPA, Implementation, UnknownName, flash_wmma_kernels, peers
    from harness.emulated import Emulated, emulate, kernel_names, obstacle, print_emulated
    from harness.environment import CompiledKernel, compiled_kernels, describe
    from harness.problems import DTYPES, Cell, Problem, Row, measure_row
    from harness.report import ABSENT, Curve, Table, milliseconds, plot_latency, progress, with_lengths
    from harness.timing import DeviceLost, Method
except ImportError as missing:
    print(HINT.format(python=sys.executable, why=missing), file=sys.stderr)
    sys.exit(2)

DEFAULT_LENGTHS = (64, 128, 256, 512, 1024, 2048)
CLOCKS = {"wall": "wall clock", "events": "events", "graph": "CUDA graph"}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--lengths", nargs="+", type=integers, default=[list(DEFAULT_LENGTHS)], metavar="N", help="64 ... 2048")
    add("--batch", type=positive, default=2, metavar="B")
    add("--heads", type=positive, default=4, metavar="H")
    add("--head-dim", type=positive, default=64, metavar="D")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="of the inputs (default: fp32)")
    add("--causal", action="store_true")
    add("--kernels", nargs="+", type=names, metavar="NAME", help="kernels of flash_wmma (default: the device's)")
    add("--peers", nargs="+", type=names, metavar="NAME", help="others; SDPA's default choice is always in")
    add("--device", help="cuda, cuda:1, cpu, ... (default: cuda if there is a GPU)")
    add("--warmup", type=positive, default=10, metavar="CALLS")
    add("--repeats", type=positive, default=42, metavar="ROUNDS")
    add("--graph", choices=("auto", "on", "off"), default="auto", help="CUDA graphs: in rows below 100 us, all, none")
    add("--seed", type=int, default=0, help="of the normally distributed inputs")
    add("--tflops", action="store_true", help="print a table of TFLOP/s too")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--plot", type=Path, metavar="FILE.png", help="draw latency over N (needs matplotlib)")
    options = parser.parse_args(arguments)
    options.lengths = sorted({n for part in options.lengths for n in part})
    for name in ("kernels", "peers"):
        given = getattr(options, name)
        setattr(options, name, [n for part in given for n in part] if given else None)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        library = load_library()
        return run(library, options)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2


def run(library: ModuleType, options: argparse.Namespace) -> int:
    device = choose_device(options.device)
    timed, emulated = emulated_apart(library, device, options.kernels)
    try:
        implementations = peers(device, options.peers) + flash_wmma_kernels(library, device, timed)
    except UnknownName as error:
        raise CannotRun(str(error)) from error
    if not any(i.ours for i in implementations) and not emulated:
        raise CannotRun(
            "flash_wmma was built without CUDA kernels, but there is a GPU.\nInstall nvcc (./dev bench does it) and "
            "build again, or ask for a table of the CPU kernel with --device cpu."
        )
    method = Method(warmup=options.warmup, repeats=options.repeats, graph=options.graph)
    problems = [
        Problem(options.batch, options.heads, n, options.head_dim, options.dtype, options.causal)
        for n in options.lengths
    ]

    environment = describe(library, device)
    compiled = compiled_kernels(
        library,
        [i.name for i in implementations if i.ours],
        [(p.batch, p.heads, p.length, p.head_dim) for p in problems],
        DTYPES[options.dtype],
        device,
    )
    facts = [*environment.lines(), *(kernel.line(options.lengths) for kernel in compiled)]
    print_header(facts, problems[0], method, device)

    rows = []
    try:
        with progress() as bar, torch.inference_mode():
            for problem in problems:
                bar.start(f"N = {problem.length}", options.repeats)
                rows.append(measure_row(problem, implementations, device, method, options.seed, bar.advance))
    except DeviceLost as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if rows:
            print_tables(rows, implementations, options.tflops)

    found = run_emulator(library, emulated, options) if emulated else []
    if options.json:
        write_json(options.json, options, environment.to_json(), method, compiled, implementations, rows, found)
    if options.plot:
        draw(options.plot, environment.device, implementations, rows)
    return verdict(rows, implementations, found)


def emulated_apart(
    library: ModuleType, device: torch.device, names: Sequence[str] | None
) -> tuple[Sequence[str] | None, list[str]]:
    """The kernels to time, as `flash_wmma_kernels` takes them; on the CPU also the CUDA kernels, which are emulated."""
    if device.type != "cpu":
        return names, []
    cuda = kernel_names(library)
    if names is None:
        return None, cuda
    return [n for n in names if n not in cuda], [n for n in names if n in cuda]


def run_emulator(library: ModuleType, names: Sequence[str], options: argparse.Namespace) -> list[Emulated]:
    """Prints the table of the emulated kernels, or the line that says why there is none."""
    print()
    why_not = obstacle(library)
    if why_not:
        print(f"The CUDA kernels were not emulated: {why_not}", flush=True)
        return []
    rows = emulate(library, names, options.head_dim, DTYPES[options.dtype], options.causal, options.seed)
    print_emulated(rows, options.head_dim, options.dtype, options.causal, library.emulator.current().arch)
    return rows


def print_header(facts: Sequence[str], problem: Problem, method: Method, device: torch.device) -> None:
    p = problem
    lines = [
        *facts,
        f"inputs    (B, H, N, d) = ({p.batch}, {p.heads}, N, {p.head_dim}), {p.dtype}, standard normal, "
        f"{'causal' if p.causal else 'not causal'}",
        f"method    {method.describe(device)}",
        "check     float64 reference on the numbers a kernel multiplies, error normalised per head; right: at most 2x",
        "          the error of plain PyTorch attention in the multiplied type + 1e-5",
    ]
    print("\n".join(lines), end="\n\n", flush=True)


def print_tables(rows: Sequence[Row], implementations: Sequence[Implementation], tflops: bool) -> None:
    ours = [i.name for i in implementations if i.ours]
    names = [i.name for i in implementations]

    def table(
        title: str, show: Callable[[Cell], str], column: str = "", last: Callable[[Row], str] | None = None
    ) -> None:
        lines = [
            [str(row.problem.length), *(show(row.cells[n]) for n in names), *([last(row)] if last else [])]
            for row in rows
        ]
        Table(title, ["N", *names, *([column] if last else [])], lines).print()

    table("Latency in ms: median, spread", show_latency, "timed by", lambda row: CLOCKS.get(row.clock, ABSENT))
    table("Speed relative to SDPA's default choice", show_speedup, "sanity", lambda row: show_sanity(row, ours))
    if tflops:
        table("TFLOP/s", lambda cell: ABSENT if cell.tflops is None else f"{cell.tflops:.3g}")
    table("Largest error, its ratio to plain PyTorch's", show_error)
    print("\n".join(notes(rows, names)), flush=True)


def show_latency(cell: Cell) -> str:
    if cell.median_ms is None or cell.spread is None:
        return ABSENT
    return f"{milliseconds(cell.median_ms)} ±{100 * cell.spread:.0f}%"


def show_speedup(cell: Cell) -> str:
    return ABSENT if cell.speedup_over_sdpa is None else f"{cell.speedup_over_sdpa:.2f}x"


def show_error(cell: Cell) -> str:
    if cell.error is None or cell.plain_error is None:
        return ABSENT
    mark = "WRONG" if not cell.right else "ok" if cell.allclose else "right"
    return f"{cell.error:.1e} {cell.error / max(cell.plain_error, 1e-30):.1f}x {mark}"


def show_sanity(row: Row, names: Sequence[str]) -> str:
    """The worst result of the library's own kernels in this row."""
    cells = {name: row.cells[name] for name in names}
    wrong = [name for name, cell in cells.items() if cell.right is False]
    if wrong:
        return f"WRONG: {', '.join(wrong)}"
    if not any(cell.right for cell in cells.values()):
        return ABSENT
    return "ok" if all(cell.allclose for cell in cells.values() if cell.right) else "right"


def notes(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """The legend, what SDPA's default choice was, and why contenders are absent."""
    lengths = [row.problem.length for row in rows]
    choices: dict[str, list[int]] = {}
    reasons: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row.sdpa_choice:
            choices.setdefault(f"{SDPA}: the default choice, here {row.sdpa_choice}", []).append(row.problem.length)
        for name in names:
            reason = row.cells[name].reason
            if reason:
                reasons.setdefault((name, reason), []).append(row.problem.length)
    return [
        "spread: half the distance from the 10th to the 90th percentile",
        "speed: the median of the ratios round by round",
        f"ok: right by the 2x rule, and allclose(atol={ALLCLOSE_ATOL:g}) too; right: by the 2x rule alone",
        *with_lengths(choices, lengths),
        *with_lengths({f"{ABSENT} {name}: {reason}": ns for (name, reason), ns in reasons.items()}, lengths),
    ]


def verdict(rows: Sequence[Row], implementations: Sequence[Implementation], emulated: Sequence[Emulated]) -> int:
    """1 if a kernel of flash_wmma was wrong or failed in any row. Peers are shown, not judged."""
    wrong = [
        f"{i.name} at N = {row.problem.length}"
        for row in rows
        for i in implementations
        if i.ours and row.cells[i.name].right is False
    ] + [f"{row.kernel} in the emulator" for row in emulated if row.right is False]
    if wrong:
        print(f"wrong: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def write_json(
    path: Path,
    options: argparse.Namespace,
    environment: dict[str, Any],
    method: Method,
    compiled: Sequence[CompiledKernel],
    implementations: Sequence[Implementation],
    rows: Sequence[Row],
    emulated: Sequence[Emulated],
) -> None:
    document = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "options": {k: v for k, v in vars(options).items() if k not in ("json", "plot")},
        "environment": environment,
        "method": asdict(method),
        "contenders": [{"name": i.name, "family": i.family} for i in implementations],
        "compiled_kernels": [asdict(kernel) for kernel in compiled],
        "rows": [asdict(row) for row in rows],
        "emulated": [asdict(row) for row in emulated],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def draw(path: Path, device: str, implementations: Sequence[Implementation], rows: Sequence[Row]) -> None:
    curves = []
    for i in implementations:
        ran = [(row.problem.length, row.cells[i.name]) for row in rows if row.cells[i.name].median_ms is not None]
        if ran:
            curves.append(
                Curve(
                    name=i.name,
                    ours=i.ours,
                    lengths=[n for n, _ in ran],
                    median_ms=[c.median_ms or 0.0 for _, c in ran],
                    p10_ms=[c.p10_ms or 0.0 for _, c in ran],
                    p90_ms=[c.p90_ms or 0.0 for _, c in ran],
                    speedup=[c.speedup_over_sdpa for _, c in ran],
                )
            )
    p = rows[0].problem
    mask = ", causal" if p.causal else ""
    title = f"{device}: attention forward, {p.dtype} inputs, B={p.batch} H={p.heads} d={p.head_dim}{mask}"
    try:
        plot_latency(curves, path, title, baseline="SDPA's default choice")
    except ImportError as error:
        raise CannotRun(f"--plot: {error} (pip install matplotlib)") from error


if __name__ == "__main__":
    sys.exit(main())
