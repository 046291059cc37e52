"""Head dims and lengths at a fixed amount of data: the parts that forward.py and backward.py share.

For every d and N the batch is 16,384 / N and the heads are 2048 / d, not causal and causal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch

from .environment import describe
from .problems import Cell, Problem, Row
from .program import CannotRun, choose_device, positive
from .report import ABSENT, Table, progress
from .timing import Method, Timing

TOKENS, HIDDEN = 16384, 2048
PACKED_LENGTHS = (4096, 1, 2048, 17, 1024, 3000, 512, 255, 1500, 3835, 96)
"""Lengths of packed sequences; their sum is TOKENS."""
PEERS = ("sdpa_flash", "sdpa_cudnn")
FORWARD_KERNELS = ("wgmma_sm90", "mma_sm80", "mma_sm75", "wmma_v3")
BACKWARD_KERNELS = ("bwd_sm90", "bwd_sm90 deterministic", "bwd_sm80", "bwd_sm80 deterministic", "bwd_sm75")
"""A name that ends in " deterministic" is the kernel with deterministic=True."""
SAMPLE_HELP = "time calls in a row that take so long together, near the card's power limit (default: one call)"

MeasureRow = Callable[[Problem, torch.device, Method, Callable[[], None]], Row]
"""Measures the row of a problem; the last argument is called once per round."""


def ratio(cell: Cell, other: Cell) -> float | None:
    """How many times as fast `cell` is as `other`; None if one of them did not run."""
    mine, theirs = (Timing(tuple(x.samples_ms)) for x in (cell, other))
    return mine.speedup_over(theirs) if mine.samples and theirs.samples else None


def both(values: Sequence[float | None], form: str) -> str:
    """The values not causal and causal in a cell."""
    return " / ".join(ABSENT if value is None else form.format(value) for value in values)


def tables(found: Sequence[tuple[Row, Row]], names: Sequence[str], title: str) -> list[Table]:
    """The tables of each problem's rows, not causal and causal."""
    speeds, ratios = [], []
    for pair in found:
        shape = [str(pair[0].problem.head_dim), str(pair[0].problem.length)]
        speeds.append(shape + [both([row.cells[name].tflops for row in pair], "{:.0f}") for name in (*PEERS, *names)])
        ratios.append(
            shape
            + [
                both([ratio(row.cells[name], row.cells[peer]) for row in pair], "{:.2f}")
                for peer in PEERS
                for name in names
            ]
        )
    over = [f"{name} x {peer.removeprefix('sdpa_')}" for peer in PEERS for name in names]
    return [
        Table(f"{title}: TFLOP/s", ["d", "N", *PEERS, *names], speeds),
        Table(f"{title}: speed relative to SDPA's backends", ["d", "N", *over], ratios),
    ]


def parse_arguments(
    description: str, kernels: Sequence[str], arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--head-dims", nargs="+", type=positive, default=[64, 128, 256], metavar="D")
    parser.add_argument("--lengths", nargs="+", type=positive, default=[512, 2048, 16384], metavar="N")
    parser.add_argument("--kernels", nargs="+", default=list(kernels), metavar="NAME")
    parser.add_argument("--repeats", type=positive, default=7, metavar="ROUNDS")
    parser.add_argument("--sample-ms", type=float, default=0.0, metavar="MS", help=SAMPLE_HELP)
    parser.add_argument("--seed", type=int, default=0, help="of the normally distributed inputs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    return parser.parse_args(arguments)


def run(library: ModuleType, options: argparse.Namespace, measured: MeasureRow) -> int:
    """Measures every problem by ``measured``, and prints and writes the results."""
    device = choose_device(None)
    if device.type != "cuda":
        raise CannotRun("no CUDA device")
    if wrong := [size for size in options.lengths if TOKENS % size]:
        raise CannotRun(f"--lengths: got {wrong[0]}, allowed are divisors of {TOKENS}")
    if wrong := [size for size in options.head_dims if size > HIDDEN]:
        raise CannotRun(f"--head-dims: got {wrong[0]}, allowed are at most {HIDDEN}")
    environment = describe(library, device)
    method = Method(warmup=3, repeats=options.repeats, sample_ms=options.sample_ms)
    print("\n".join(environment.lines()), f"method    {method.describe(device)}", sep="\n", end="\n\n", flush=True)

    found: list[tuple[Row, Row]] = []
    with progress() as bar:
        for d, n in itertools.product(options.head_dims, options.lengths):
            problems = [Problem(TOKENS // n, HIDDEN // d, n, d, options.dtype, causal) for causal in (False, True)]
            bar.start(f"d = {d}, N = {n}", len(problems) * options.repeats)
            rows = [measured(problem, device, method, bar.advance) for problem in problems]
            found.append((rows[0], rows[1]))
    for table in tables(found, options.kernels, f"{torch.cuda.get_device_name(device)}, {options.dtype}"):
        table.print()
    if options.json:
        document = {
            "environment": environment.to_json(),
            "method": asdict(method),
            "rows": [asdict(row) for pair in found for row in pair],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    cells = [(row, name, row.cells[name]) for pair in found for row in pair for name in options.kernels]
    for row, name, cell in cells:
        if not cell.right:
            where = f"{name} d={row.problem.head_dim} N={row.problem.length}"
            print(f"{where}: {cell.reason or 'wrong'}", file=sys.stderr)
    return int(any(cell.right is False for _, _, cell in cells))
