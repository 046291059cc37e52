"""How results are shown: tables (rich in a terminal, Markdown when piped), a progress display, a plot."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

ABSENT = "\N{EN DASH}"


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Aligned Markdown: readable as it stands, and ready to be pasted into a page."""
        widths = [max(len(cell) for cell in column) for column in zip(self.columns, *self.rows, strict=True)]
        lines = [
            "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
            for row in (self.columns, *self.rows)
        ]
        lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
        return "\n".join([self.title, "", *lines])

    def print(self, stream: TextIO | None = None) -> None:
        """Prints to a terminal by rich, if rich is installed; otherwise as Markdown."""
        stream = stream or sys.stdout
        rich_table = _import("rich.table") if stream.isatty() else None
        if rich_table is None:
            print(self.markdown(), end="\n\n", file=stream)
            return
        table = rich_table.Table(title=self.title, title_justify="left", title_style="bold", box=_box(), padding=(0, 1))
        for column in self.columns:
            table.add_column(column, justify="right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console = _import("rich.console").Console(file=stream, highlight=False, markup=False)
        console.print(table)


def milliseconds(value: float) -> str:
    """Three significant digits, never in exponent form."""
    decimals = 4 if value < 0.1 else 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


class Progress(AbstractContextManager["Progress"], Protocol):
    def start(self, label: str, total: int) -> None:
        """A new row begins, with `total` steps."""

    def advance(self) -> None:
        """One step of the row is done."""


def progress() -> Progress:
    """A bar by rich, or text if rich is not installed or stderr is not a terminal."""
    rich_progress = _import("rich.progress") if sys.stderr.isatty() else None
    return _RichProgress(rich_progress) if rich_progress else _TextProgress()


class _RichProgress:
    def __init__(self, rich_progress: Any) -> None:
        console = _import("rich.console").Console(stderr=True)
        self._progress = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: Any = None

    def __enter__(self) -> _RichProgress:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

    def start(self, label: str, total: int) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(label, total=total)

    def advance(self) -> None:
        self._progress.advance(self._task)


class _TextProgress:
    """In a terminal one line that is rewritten; otherwise one line per row."""

    def __init__(self) -> None:
        self._label, self._done, self._total = "", 0, 0

    def __enter__(self) -> _TextProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if sys.stderr.isatty():
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)

    def start(self, label: str, total: int) -> None:
        self._label, self._done, self._total = label, 0, total
        if sys.stderr.isatty():
            self._show()
        else:
            print(label, file=sys.stderr, flush=True)

    def advance(self) -> None:
        self._done += 1
        if sys.stderr.isatty():
            self._show()

    def _show(self) -> None:
        print(f"\r{self._label}: {self._done}/{self._total}".ljust(60), end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Curve:
    """One contender's latency over the lengths at which it ran."""

    name: str
    ours: bool
    lengths: Sequence[int]
    median_ms: Sequence[float]
    p10_ms: Sequence[float]
    p90_ms: Sequence[float]
    speedup: Sequence[float | None]  #: over the baseline, where the baseline ran


def plot_latency(curves: Sequence[Curve], path: Path, title: str, baseline: str) -> None:
    """Latency over N, and the speed relative to `baseline`, side by side, as a PNG (or what the suffix says)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
    shades = ["#000000", "#555555", "#777777", "#999999", "#bbbbbb", "#333333", "#8c8c8c", "#a6a6a6"]
    styles = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 3))]
    figure, (latency, relative) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    seen = {True: 0, False: 0}
    for curve in sorted(curves, key=lambda c: c.ours):
        index = seen[curve.ours]
        seen[curve.ours] += 1
        look: dict[str, Any] = (
            {"color": colors[index % len(colors)], "marker": "o", "linewidth": 2.2, "zorder": 3}
            if curve.ours
            else {"color": shades[index % len(shades)], "linestyle": styles[index % len(styles)], "linewidth": 1.4}
        )
        latency.plot(curve.lengths, curve.median_ms, label=curve.name, **look)
        latency.fill_between(curve.lengths, curve.p10_ms, curve.p90_ms, color=look["color"], alpha=0.15, linewidth=0)
        points = [(n, s) for n, s in zip(curve.lengths, curve.speedup, strict=True) if s is not None]
        relative.plot([n for n, _ in points], [s for _, s in points], label=curve.name, **look)

    lengths = sorted({n for curve in curves for n in curve.lengths})
    for axes in (latency, relative):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set_xlabel("sequence length N")
        axes.grid(True, which="major", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    latency.set_yscale("log")
    latency.set_ylabel("latency, ms (median; band: 10th to 90th percentile)")
    latency.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    latency.legend(frameon=False)
    relative.set_ylabel(f"speed relative to {baseline} (higher is faster)")
    relative.set_ylim(bottom=0)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def with_lengths(texts: Mapping[str, Sequence[int]], lengths: Sequence[int]) -> list[str]:
    """Each text, with the lengths that it holds for, unless it holds for all."""
    return [
        text + ("" if list(ns) == list(lengths) else f" (N = {', '.join(map(str, ns))})") for text, ns in texts.items()
    ]


def _box() -> Any:
    return _import("rich.box").SIMPLE_HEAD


def _import(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        return None
