#!/usr/bin/env python3
"""Latency of flash_wmma's kernels beside PyTorch's scaled_dot_product_attention and other libraries.

    python benchmark/benchmark.py                                   the default tables: B=2 H=4 d=64
    python benchmark/benchmark.py --dtype bf16 --batch 8 --heads 32 --lengths 2048 --tflops
    python benchmark/benchmark.py --kernels all --errors            CUDA cores too; errors in numbers
    python benchmark/benchmark.py --json result.json --plot latency.png

One table for fp32 inputs, on a GPU one for fp16 too. First comes `flash_wmma.forward` as it is called without the name
of a kernel, then SDPA, then the kernels on tensor cores. `harness/timing.py` says how time is taken,
`harness/accuracy.py` how the timed results are checked. On a CPU the CUDA kernels are not timed, but run in the
emulator at a small N (`harness/emulated.py`). Ctrl-C ends the measurement; tables, JSON and plot then have what was
measured. Exit status: 0; 1 if a result of flash_wmma is wrong or a kernel fails; 2 if the benchmark cannot run as
asked; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from harness.program import HINT, CannotRun, choose_device, integers, load_library, names, positive

try:
    import torch

    from harness.accuracy import ALLCLOSE_ATOL
    from harness.contenders import (
        AUTO,
        SDPA,
        Implementation,
        UnknownName,
        emulated_kernels,
        flash_wmma_kernels,
        on_tensor_cores,
        peers,
    )
    from harness.emulated import Emulated, emulate, obstacle, print_emulated
    from harness.environment import code_lines, compiled_kernels, describe
    from harness.problems import DTYPES, Cell, Problem, Row, mark, measure_row
    from harness.report import (
        ABSENT,
        WIDTH,
        Curve,
        Table,
        microseconds,
        milliseconds,
        plot_formats,
        plot_latency,
        progress,
        with_lengths,
        wrapped,
    )
    from harness.timing import DeviceLost, Method
except ImportError as missing:
    print(HINT.format(python=sys.executable, why=missing), file=sys.stderr)
    sys.exit(2)

DEFAULT_LENGTHS = (64, 128, 256, 512, 1024, 2048)
DEFAULT_DTYPES = {"cpu": ("fp32",), "cuda": ("fp32", "fp16")}
EMULATED_DTYPE = "fp16"
"""Of the emulated kernels, if none is asked for: every kernel takes it."""
CLOCKS = {"wall": "wall clock", "events": "events", "graph": "CUDA graph"}
LABELS = {AUTO: "flash_wmma"}
CHOICES = {AUTO: "  auto:", SDPA: "  default:"}
"""How the line under a contender begins that says what it called."""
BUSY = 1.0
"""A spread above which a machine has too much else to do for its figures to count."""
INTERRUPTED = 130


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--lengths", nargs="+", type=integers, default=[list(DEFAULT_LENGTHS)], metavar="N", help="64 ... 2048")
    add("--batch", type=positive, default=2, metavar="B")
    add("--heads", type=positive, default=4, metavar="H")
    add("--head-dim", type=positive, default=64, metavar="D")
    add("--dtype", nargs="+", choices=tuple(DTYPES), help="of the inputs (default: fp32; on a GPU fp32 and fp16)")
    add("--causal", action="store_true")
    add(
        *("--kernels",),
        nargs="+",
        type=names,
        metavar="NAME",
        help="of flash_wmma (default: auto and the kernels on tensor cores); all: those on CUDA cores and unfused too",
    )
    add("--peers", nargs="+", type=names, metavar="NAME", help="others; SDPA's default choice is always in")
    add("--device", help="cuda, cuda:1, cpu, ... (default: cuda if there is a GPU)")
    add("--warmup", type=positive, default=10, metavar="CALLS")
    add("--repeats", type=positive, default=42, metavar="ROUNDS")
    add("--graph", choices=("auto", "on", "off"), default="auto", help="CUDA graphs: below 100 us, always, never")
    add("--seed", type=int, default=0, help="of the normally distributed inputs")
    add("--tflops", action="store_true", help="print a table of TFLOP/s too")
    add("--errors", action="store_true", help="print the errors too, and why contenders did not run in full")
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
        check_outputs(options)
        library = load_library()
        return run(library, options)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2


def check_outputs(options: argparse.Namespace) -> None:
    """CannotRun if a file that is asked for cannot be written."""
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is None:
            continue
        existed = path.exists()
        try:
            path.open("ab").close()
        except OSError as error:
            raise CannotRun(f"{option} {path}: cannot be written ({error.strerror})") from error
        if not existed:
            path.unlink()
    if options.plot is None:
        return
    try:
        formats = plot_formats()
    except ImportError as error:
        raise CannotRun(f"--plot: {error} (pip install matplotlib)") from error
    if options.plot.suffix.removeprefix(".") not in formats:
        raise CannotRun(f"--plot {options.plot}: the name's end says the format; allowed are .{', .'.join(formats)}")


def run(library: ModuleType, options: argparse.Namespace) -> int:
    device = choose_device(options.device)
    if device.type == "cuda" and not has_cuda_kernels(library):
        raise CannotRun(
            "flash_wmma was built without CUDA kernels, but there is a GPU.\nInstall nvcc (./dev bench does it) and "
            "build again, or ask for a table of the CPU kernel with --device cpu."
        )
    timed, emulated = emulated_apart(library, device, options.kernels)
    try:
        ours = flash_wmma_kernels(library, device, timed)
        auto = [i for i in ours if i.name == AUTO]
        implementations = auto + peers(device, options.peers) + [i for i in ours if i.name != AUTO]
    except UnknownName as error:
        raise CannotRun(str(error)) from error
    method = Method(warmup=options.warmup, repeats=options.repeats, graph=options.graph)
    emulated_dtype = options.dtype[0] if options.dtype else EMULATED_DTYPE
    options.dtype = list(options.dtype or DEFAULT_DTYPES[device.type])
    problems = {
        dtype: [
            Problem(options.batch, options.heads, n, options.head_dim, dtype, options.causal) for n in options.lengths
        ]
        for dtype in options.dtype
    }

    environment = describe(library, device)
    compiled = [
        kernel
        for dtype in options.dtype
        for kernel in compiled_kernels(
            library,
            [i.name for i in implementations if i.ours],
            [(options.batch, options.heads, n, options.head_dim) for n in options.lengths],
            DTYPES[dtype],
            device,
        )
    ]
    print_header([*environment.lines(), *code_lines(compiled)], options, method, device)

    rows: dict[str, list[Row]] = {dtype: [] for dtype in options.dtype}
    found: list[Emulated] = []
    ended = 0
    try:
        for dtype in options.dtype:
            try:
                measure(problems[dtype], implementations, device, method, options.seed, rows[dtype])
            finally:
                if rows[dtype]:
                    print_tables(rows[dtype], implementations, options)
        if emulated:
            run_emulator(library, emulated, emulated_dtype, options, found)
    except DeviceLost as error:
        print(error, file=sys.stderr)
        ended = 1
    except KeyboardInterrupt:
        print("interrupted: what was measured until now is kept", file=sys.stderr)
        ended = INTERRUPTED

    measured = [row for part in rows.values() for row in part]
    if options.json:
        document = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "options": {k: v for k, v in vars(options).items() if k not in ("json", "plot")},
            "environment": environment.to_json(),
            "method": asdict(method),
            "contenders": [{"name": i.name, "family": i.family} for i in implementations],
            "compiled_kernels": [asdict(kernel) for kernel in compiled],
            "complete": not ended,
            "rows": [asdict(row) for row in measured],
            "emulated": [asdict(row) for row in found],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.plot and measured:
        draw(options.plot, environment.device, implementations, {d: part for d, part in rows.items() if part})
    return ended or verdict(measured, implementations, found)


def has_cuda_kernels(library: ModuleType) -> bool:
    """As far as the build can tell."""
    try:
        return library.build_info().cuda is not None
    except ImportError:
        return True


def emulated_apart(
    library: ModuleType, device: torch.device, names: Sequence[str] | None
) -> tuple[Sequence[str] | None, list[str]]:
    """The kernels to time, as `flash_wmma_kernels` takes them; on the CPU also the CUDA kernels, which are emulated."""
    cuda = emulated_kernels(library, device)
    if names is None:
        return None, [name for name in cuda if on_tensor_cores(name)]
    timed = [name for name in names if name not in cuda]
    return timed, cuda if "all" in names else [name for name in names if name in cuda]


def measure(
    problems: Sequence[Problem],
    implementations: Sequence[Implementation],
    device: torch.device,
    method: Method,
    seed: int,
    rows: list[Row],
) -> None:
    """Appends a row for each problem."""
    with progress() as bar, torch.inference_mode():
        for problem in problems:
            bar.start(f"{problem.dtype}, N = {problem.length}", method.repeats)
            rows.append(measure_row(problem, implementations, device, method, seed, bar.advance))


def run_emulator(
    library: ModuleType, kernels: Sequence[str], dtype: str, options: argparse.Namespace, found: list[Emulated]
) -> None:
    """Appends the emulated kernels, and prints their table, or the line that says why there is none."""
    why_not = obstacle(library)
    if why_not:
        print(wrapped(f"The CUDA kernels were not emulated: {why_not}"), flush=True)
        return
    shape = (options.head_dim, DTYPES[dtype], options.causal, options.seed)
    try:
        with progress() as bar:
            found.extend(emulate(library, kernels, *shape, lambda name: bar.start(f"{name} in the emulator", 1)))
    finally:
        if found:
            print_emulated(found, options.head_dim, dtype, options.causal, library.emulator.current().arch)


def print_header(facts: Sequence[str], options: argparse.Namespace, method: Method, device: torch.device) -> None:
    lines = [
        *facts,
        f"inputs    (B, H, N, d) = ({options.batch}, {options.heads}, N, {options.head_dim}), "
        f"{', '.join(options.dtype)}, standard normal, {'causal' if options.causal else 'not causal'}",
        f"method    {method.describe(device)}",
        "check     float64 reference on the numbers a kernel multiplies, error normalised per head; right: at most 2x "
        "the error of plain PyTorch attention in the multiplied type + 1e-5",
    ]
    print("\n".join(wrapped(line, 10) for line in lines), end="\n\n", flush=True)


def print_tables(rows: Sequence[Row], implementations: Sequence[Implementation], options: argparse.Namespace) -> None:
    """One table of latency and speed; what else the options ask for; what the tables do not show, in lines beneath."""
    dtype = rows[0].problem.dtype
    largest = max((cell.median_ms or 0.0 for row in rows for cell in row.cells.values()), default=0.0)
    unit, number = ("µs", microseconds) if largest < 10 else ("ms", milliseconds)

    def show_latency(cell: Cell) -> str:
        if cell.median_ms is None:
            return ABSENT
        speed = "" if cell.speedup_over_sdpa is None else f" {factor(cell.speedup_over_sdpa)}"
        return number(cell.median_ms) + speed

    tables = [
        table(
            f"{dtype} inputs: latency in {unit}, and speed relative to SDPA's default choice",
            rows,
            implementations,
            show_latency,
            of_latency=True,
        )
    ]
    if options.tflops:
        tables.append(table(f"{dtype} inputs: TFLOP/s", rows, implementations, show_tflops))
    if options.errors:
        tables.append(
            table(f"{dtype} inputs: largest error, and its ratio to plain PyTorch's", rows, implementations, show_error)
        )
    width = min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
    for printed in tables:
        print(printed.text(width), end="\n\n")
    print("\n".join(map(wrapped, notes(rows, implementations, whole=options.errors))), end="\n\n", flush=True)


def table(
    title: str,
    rows: Sequence[Row],
    implementations: Sequence[Implementation],
    show: Callable[[Cell], str],
    of_latency: bool = False,
) -> Table:
    """A line for each contender that ran at any length, or that is wrong; a column for each length. The table
    `of_latency` also says what a contender called, and whether it is right."""
    lines = []
    for name in (i.name for i in implementations):
        cells = [row.cells[name] for row in rows]
        if all(cell.median_ms is None and cell.right is None for cell in cells):
            continue
        verdicts = [mark(*cells)] if of_latency else []
        lines.append([LABELS.get(name, name), *map(show, cells), *verdicts])
        if of_latency and any(cell.choice for cell in cells):
            called = [(cell.choice or ABSENT).removeprefix("sdpa_") for cell in cells]
            lines.append([CHOICES[name], *called, ""])
    lengths = [str(row.problem.length) for row in rows]
    return Table(title, ["N", *lengths, *(["check"] if of_latency else [])], lines)


def factor(value: float) -> str:
    """Three significant digits, and at most two decimals."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}x"


def show_tflops(cell: Cell) -> str:
    return ABSENT if cell.tflops is None else f"{cell.tflops:.3g}"


def show_error(cell: Cell) -> str:
    if cell.error is None or cell.plain_error is None:
        return ABSENT
    return f"{cell.error:.1e} {cell.error / max(cell.plain_error, 1e-30):.1f}x"


def notes(rows: Sequence[Row], implementations: Sequence[Implementation], whole: bool = False) -> list[str]:
    """The legend, the spread, the clock, and why contenders are absent: the first sentence, or the `whole` reason."""
    lengths = [row.problem.length for row in rows]
    clocks: dict[str, list[int]] = {}
    reasons: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        clocks.setdefault(f"timed by {CLOCKS.get(row.clock, ABSENT)}", []).append(row.problem.length)
        for i in implementations:
            if reason := row.cells[i.name].reason:
                reason = reason if whole else reason.split(". ")[0].rstrip(".:")
                reasons.setdefault(reason, {}).setdefault(i.name, []).append(row.problem.length)
    absent = [f"{', '.join(with_lengths(names, lengths))} ({reason})" for reason, names in reasons.items()]
    return [
        f"medians; speed: the median of the ratios round by round; {'; '.join(with_lengths(clocks, lengths))}",
        *spread_lines(rows),
        f"check: ok: right, and allclose(atol={ALLCLOSE_ATOL:g}) too; right: by the rule above alone",
        *([f"not here: {'; '.join(absent)}"] if absent else []),
    ]


def spread_lines(rows: Sequence[Row]) -> list[str]:
    """The largest spread, and a hint if it is beyond use."""
    spreads = [
        (cell.spread, f"{LABELS.get(name, name)}, N = {row.problem.length}")
        for row in rows
        for name, cell in row.cells.items()
        if cell.spread is not None
    ]
    if not spreads:
        return []
    largest, where = max(spreads)
    lines = [
        f"spread, half the distance from the 10th to the 90th percentile: at most ±{100 * largest:.0f} % ({where})"
    ]
    if largest > BUSY:
        lines.append("This machine is too busy for these figures to count: run the benchmark again when it is idle.")
    return lines


def verdict(rows: Sequence[Row], implementations: Sequence[Implementation], emulated: Sequence[Emulated]) -> int:
    """1 if a kernel of flash_wmma was wrong or failed in any row. Peers are shown, not judged."""
    wrong = [
        f"{i.name} at N = {row.problem.length}, {row.problem.dtype}"
        for row in rows
        for i in implementations
        if i.ours and row.cells[i.name].right is False
    ] + [f"{row.kernel} in the emulator" for row in emulated if row.right is False]
    if wrong:
        print(f"wrong: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def draw(path: Path, device: str, implementations: Sequence[Implementation], rows: dict[str, list[Row]]) -> None:
    """A panel for each dtype."""
    p = next(iter(rows.values()))[0].problem
    mask = ", causal" if p.causal else ""
    title = f"{device}: attention forward, B={p.batch} H={p.heads} d={p.head_dim}{mask}"
    panels = {f"{dtype} inputs": curves(implementations, part) for dtype, part in rows.items()}
    plot_latency(panels, path, title, baseline="SDPA's default choice")


def curves(implementations: Sequence[Implementation], rows: Sequence[Row]) -> list[Curve]:
    """The kernels, SDPA's default choice, and the peers that are the fastest of the peers at some length. A contender
    that another one calls at every length is drawn as that one."""
    drawn = {i.name for i in implementations if i.ours} | {SDPA}
    for row in rows:
        drawn.add(min((row.cells[i.name].median_ms or math.inf, i.name) for i in implementations if not i.ours)[1])
    called = {name: {row.cells[name].choice for row in rows} for name in (AUTO, SDPA) if name in rows[0].cells}
    always = {name: choices.pop() for name, choices in called.items() if len(choices) == 1}
    found = []
    for i in implementations:
        if i.name not in drawn or i.name in always.values():
            continue
        ran = [(row.problem.length, row.cells[i.name]) for row in rows if row.cells[i.name].median_ms is not None]
        own = "auto" if i.name == AUTO else "kernel"
        choice = f": {always[i.name]}" if always.get(i.name) else ""
        label = {AUTO: f"flash_wmma (auto{choice})", SDPA: f"SDPA (default{choice})"}.get(i.name, i.name)
        found.append(
            Curve(
                name=label,
                look=own if i.ours else "baseline" if i.name == SDPA else "peer",
                lengths=[n for n, _ in ran],
                median_ms=[cell.median_ms or 0.0 for _, cell in ran],
                speedup=[cell.speedup_over_sdpa for _, cell in ran],
            )
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
