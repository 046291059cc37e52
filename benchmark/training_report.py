"""Runs training.py over a grid of configurations, each in a process of its own, and draws what it measured.

    python benchmark/training_report.py --json training.json --plots .              # on a GPU, some minutes
    python benchmark/training_report.py --memory --json training_memory.json --plots .
    python benchmark/training_report.py --tiny --json training.json                 # sizes for a CPU
    python benchmark/training_report.py --from docs/data/training.json --plots docs/images

The grid is a centre and variations of it in one parameter: seq_len, batch_size, num_heads, emb_dim or causal; then one
sequence that grows until memory ends. The implementations of a configuration run one after the other, in an order that
rotates. The centre is run ``--rounds`` times; tables and plots show the median, and ratios are within a round. The
processes are forked from one that has imported torch and has not yet touched the device.

Two figures are written, ``training_speed.png`` (time, TFLOP/s and peak memory over each parameter) and
``training_memory.png``; ``--memory`` measures and draws the second alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import runpy
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness import report
from harness.program import positive

CONTENDERS: dict[str, list[str]] = {
    "Pytorch": ["--impl=Pytorch"],
    "SDPA": ["--impl=SDPA"],
    "SDPA flash": ["--impl=SDPA", "--sdpa_backend=flash"],
    "Flash2": ["--impl=Flash2"],
}
BASELINE = "SDPA flash"
TIMEOUT_S = 300


@dataclass(frozen=True)
class Configuration:
    """The arguments of training.py, except the implementation."""

    batch_size: int
    seq_len: int
    num_heads: int
    emb_dim: int
    causal: bool
    repeats: int

    def arguments(self) -> list[str]:
        options = asdict(self)
        flags = ["--causal"] if options.pop("causal") else []
        return [f"--{name}={value}" for name, value in options.items()] + flags


@dataclass(frozen=True)
class Grid:
    """The configurations of a report."""

    centre: Configuration
    axes: Mapping[str, Sequence[int | bool]]
    growing: Sequence[Configuration]  #: growing in seq_len, for memory only

    def along(self, axis: str) -> list[Configuration]:
        return [replace(self.centre, **{axis: value}) for value in self.axes[axis]]

    def configurations(self) -> list[Configuration]:
        every = [self.centre, *(c for axis in self.axes for c in self.along(axis)), *self.growing]
        return list(dict.fromkeys(every))


FULL = Grid(
    Configuration(batch_size=32, seq_len=1024, num_heads=32, emb_dim=2048, causal=True, repeats=10),
    {
        "seq_len": (512, 1024, 2048, 4096),
        "batch_size": (8, 32, 128),
        "num_heads": (8, 16, 32),
        "emb_dim": (1024, 2048, 4096),
        "causal": (False, True),
    },
    [Configuration(1, n, 8, 512, True, 3) for n in (2048, 8192, 32768, 65536, 131072)],
)
TINY = Grid(
    Configuration(batch_size=2, seq_len=64, num_heads=2, emb_dim=32, causal=True, repeats=3),
    {
        "seq_len": (32, 64),
        "batch_size": (1, 2),
        "num_heads": (1, 2),
        "emb_dim": (32, 64),
        "causal": (False, True),
    },
    [Configuration(1, n, 1, 32, True, 1) for n in (64, 128)],
)

Result = dict[str, Any]
Results = dict[Configuration, dict[str, list[Result]]]
"""The output of training.py by configuration and contender, one entry per round."""


def child(arguments: list[str], notes: str) -> None:
    """The work of one process: one configuration."""
    with Path(notes).open("w") as stream, contextlib.redirect_stderr(stream):
        sys.argv[1:] = arguments
        runpy.run_path(str(Path(__file__).with_name("training.py")), run_name="__main__")


def measured(context: Any, arguments: list[str], folder: Path) -> Result:
    """The output of training.py in a process of its own; a process that ends without a result is an ``"error"``."""
    output, notes = folder / "output.json", folder / "notes.txt"
    for file in (output, notes):
        file.unlink(missing_ok=True)
    process = context.Process(target=child, args=([*arguments, f"--output={output}"], str(notes)))
    process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    said = notes.read_text().splitlines() if notes.exists() else []
    try:
        result: Result = json.loads(output.read_text())
    except (OSError, ValueError):
        result = {"error": " ".join([f"exit status {process.exitcode}", *said[-1:]])}
    if ours := [line for line in said if line.startswith("training: ")]:
        result["said"] = "; ".join(ours)
    return result


def rounds(grid: Grid, names: Sequence[str], centre_rounds: int) -> Iterator[tuple[Configuration, list[str]]]:
    """The rounds in order: a configuration, and the contenders as they take their turns."""
    turn = 0
    for configuration in grid.configurations():
        for _ in range(centre_rounds if configuration == grid.centre else 1):
            shift = turn % len(names)
            yield configuration, [*names[shift:], *names[:shift]]
            turn += 1


def run(
    grid: Grid,
    names: Sequence[str],
    dtype: str,
    centre_rounds: int,
    results: Results,
    keep: Callable[[Results], None],
) -> None:
    """Measures the part of the grid that ``results`` lacks, with a progress bar; calls ``keep`` after each round."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.contenders", "flash_wmma"])
    plan = [(c, order) for c, order in rounds(grid, names, centre_rounds) if c not in results]
    with tempfile.TemporaryDirectory() as folder, report.progress() as progress:
        progress.start("configurations", sum(len(order) for _, order in plan))
        for configuration, order in plan:
            for name in order:
                arguments = [*configuration.arguments(), f"--dtype={dtype}", *CONTENDERS[name]]
                result = measured(context, arguments, Path(folder))
                results.setdefault(configuration, {each: [] for each in names})[name].append(result)
                progress.advance()
            keep(results)


def median(results: Sequence[Result], read: Callable[[Result], float | None]) -> float | None:
    """The median over the rounds that have a result."""
    values = [value for result in results if "error" not in result and (value := read(result)) is not None]
    return statistics.median(values) if values else None


def time_of(name: str) -> Callable[[Result], float | None]:
    """Reads a pass's milliseconds."""
    return lambda result: 1e3 * result[name]["time(s)"]


def speed_of(name: str) -> Callable[[Result], float | None]:
    """Reads a pass's TFLOP/s."""
    return lambda result: result[name]["FLOPS(TFLOPs/s)"]  # type: ignore[no-any-return]


def memory_of(result: Result) -> float | None:
    """Reads the peak, in MB."""
    return result["peak_memory_usage(MB)"]  # type: ignore[no-any-return]


PANELS: list[tuple[str, Callable[[Result], float | None]]] = [
    ("forward + backward, ms", time_of("forward_backward")),
    ("forward, TFLOP/s", speed_of("forward")),
    ("backward, TFLOP/s", speed_of("backward")),
    ("peak memory, MB", memory_of),
]


def ratio(ours: Sequence[Result], theirs: Sequence[Result], name: str) -> float | None:
    """How many times faster `ours` is than `theirs` in a pass: the median over the rounds."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if "error" not in a and "error" not in b]
    return statistics.median(b[name]["time(s)"] / a[name]["time(s)"] for a, b in pairs) if pairs else None


def cell(value: float | None, decimals: int) -> str:
    return report.ABSENT if value is None else f"{value:,.{decimals}f}"


def tables(grid: Grid, results: Results) -> list[report.Table]:
    """Every configuration: forward and backward in ms, ratios and memory."""
    found = []
    for title, configurations in (
        ("Centre and axes", [c for c in grid.configurations() if c not in grid.growing]),
        ("A growing sequence", list(grid.growing)),
    ):
        names = list(next(iter(results.values())))
        columns = ["B", "N", "heads", "emb", "causal", *(f"{name}, ms" for name in names)]
        others = [name for name in names if name != "Flash2"]
        columns += [f"Flash2 : {name}" for name in others] + [f"{name}, MB" for name in names]
        rows = []
        for c in configurations:
            if c not in results:
                continue
            each = results[c]
            row = [str(n) for n in (c.batch_size, c.seq_len, c.num_heads, c.emb_dim)] + ["yes" if c.causal else "no"]
            row += [cell(median(each[name], time_of("forward_backward")), 2) for name in names]
            row += [cell(ratio(each["Flash2"], each[name], "forward_backward"), 2) for name in others]
            row += [cell(median(each[name], memory_of), 0) for name in names]
            rows.append(row)
        if not rows:
            continue
        found.append(report.Table(f"{title}: forward + backward, speed of Flash2 over the others, peak", columns, rows))
    return found


COLORS = {"Pytorch": "#555555", "SDPA": "#d55e00", "SDPA flash": "#e69f00", "Flash2": "#0072b2"}
STYLES = {"Pytorch": ":", "SDPA": "--", "SDPA flash": "-.", "Flash2": "-"}


def looks(results: Results) -> dict[str, dict[str, Any]]:
    """How each contender is drawn."""
    return {
        name: {"color": COLORS[name], "linestyle": STYLES[name], "marker": "o", "label": name}
        for name in next(iter(results.values()))
    }


def plot_axes(grid: Grid, results: Results, title: str, folder: Path) -> None:
    """training_speed.png."""
    from matplotlib import pyplot as plt

    look = looks(results)
    size = (3.4 * len(grid.axes), 2.7 * len(PANELS))
    figure, panels = plt.subplots(
        len(PANELS), len(grid.axes), figsize=size, layout="constrained", sharey="row", squeeze=False
    )
    for row, (label, read) in zip(panels, PANELS, strict=True):
        for axes, axis in zip(row, grid.axes, strict=True):
            configurations = [c for c in grid.along(axis) if c in results]
            ticks = [str(getattr(c, axis)) for c in configurations]
            for name in look:
                values = [median(results[c][name], read) for c in configurations]
                there = [(tick, value) for tick, value in zip(ticks, values, strict=True) if value is not None]
                if there:
                    axes.plot(*zip(*there, strict=True), **look[name])
            axes.grid(True, alpha=0.3)
            if "TFLOP/s" not in label:
                axes.set_yscale("log")
            if axes in panels[-1]:
                axes.set_xlabel(axis)
        row[0].set_ylabel(label)
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.savefig(folder / "training_speed.png", dpi=110)
    plt.close(figure)


def plot_memory(grid: Grid, results: Results, title: str, folder: Path) -> None:
    """training_memory.png."""
    from matplotlib import pyplot as plt

    look = looks(results)
    growing = [c for c in grid.growing if c in results]
    figure, (linear, log) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for axes in (linear, log):
        for name in look:
            points = [(c.seq_len, median(results[c][name], memory_of)) for c in growing]
            there = [(n, value) for n, value in points if value is not None]
            if there:
                axes.plot(*zip(*there, strict=True), **look[name])
        axes.grid(True, alpha=0.3)
        axes.set_xlabel("sequence length N")
        axes.set_ylabel("peak memory of forward + backward, MB")
    linear.set_ylim(0, 1.1 * max(median(results[c]["Flash2"], memory_of) or 0 for c in growing))
    linear.set_title("linear axes")
    log.set_xscale("log", base=2)
    log.set_yscale("log", base=2)
    log.set_title("logarithmic axes")
    linear.legend(frameon=False)
    c = grid.growing[0]
    figure.suptitle(f"B = {c.batch_size}, {c.num_heads} heads, emb_dim {c.emb_dim}, causal; {title}")
    figure.savefig(folder / "training_memory.png", dpi=110)
    plt.close(figure)


def to_json(results: Results) -> list[dict[str, Any]]:
    return [{"configuration": asdict(c), "results": each} for c, each in results.items()]


def from_json(entries: Sequence[dict[str, Any]]) -> Results:
    return {Configuration(**entry["configuration"]): entry["results"] for entry in entries}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a grid for the CPU")
    parser.add_argument("--memory", action="store_true", help="the growing sequence alone")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), default="fp16")
    parser.add_argument("--rounds", type=positive, default=3, help="of the centre")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes every result")
    parser.add_argument("--resume", action="store_true", help="measures what --json's FILE lacks, and adds it")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measures nothing: results from there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="writes both figures there")
    arguments = parser.parse_args(argv)
    if "Flash2" not in arguments.contenders:
        parser.error("--contenders: Flash2 must be among them")
    if arguments.resume and not (arguments.json and arguments.json.exists()):
        parser.error("--resume: --json must name a file that is there")
    grid = TINY if arguments.tiny else FULL
    if arguments.memory:
        grid = Grid(grid.growing[0], {}, grid.growing)
    if arguments.source:
        written = json.loads(arguments.source.read_text())
    else:
        written = {"dtype": arguments.dtype, **described()}
        before: Results = {}
        if arguments.resume:
            earlier = json.loads(arguments.json.read_text())
            if any(earlier[name] != fact for name, fact in written.items()):
                parser.error(f"--resume: {arguments.json} was measured elsewhere: {earlier['environment']}")
            before = from_json(earlier["entries"])

        def keep(results: Results) -> None:
            written["entries"] = to_json(results)
            if arguments.json:
                arguments.json.write_text(json.dumps(written, indent=1) + "\n")

        run(grid, arguments.contenders, arguments.dtype, arguments.rounds, before, keep)
    results = from_json(written["entries"])
    for line in written["environment"]:
        print(line)
    said = [e["said"] for each in results.values() for es in each.values() for e in es if "said" in e]
    for note, times in Counter(said).items():
        print(f"{note} ({times} times)")
    for table in tables(grid, results):
        table.print()
    if arguments.plots:
        import matplotlib

        matplotlib.use("Agg")
        title = f"{written['dtype']}, {written['device']}"
        if grid.axes:
            plot_axes(grid, results, title, arguments.plots)
        if any(c in results for c in grid.growing):
            plot_memory(grid, results, title, arguments.plots)
    failed = [e["error"] for each in results.values() for es in each.values() for e in es if "error" in e]
    unexpected = [error for error in failed if not error.startswith("out of memory")]
    for error in unexpected:
        print(f"training_report: {error}", file=sys.stderr)
    return int(bool(unexpected))


def described() -> dict[str, Any]:
    """The machine and the software of the measurement."""
    import torch

    import flash_wmma
    from harness import environment

    found = environment.describe(flash_wmma, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return {"device": found.device, "environment": found.lines()}


if __name__ == "__main__":
    sys.exit(main())
