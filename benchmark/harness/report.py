"""How results are shown: tables, a progress display, a plot."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO

ABSENT = "\N{EN DASH}"
WIDTH = 100
"""Characters of a line."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self, width: int = WIDTH) -> str:
        """Columns two spaces apart, the first flush left, in lines of at most ``width`` characters: a table that is
        wider becomes several, each with the first column."""
        first, *others = ([head, *cells] for head, *cells in zip(self.columns, *self.rows, strict=True))
        labels = _padded(first, str.ljust)
        parts: list[list[list[str]]] = []
        used = width
        for column in (_padded(cells, str.rjust) for cells in others):
            if used + 2 + len(column[0]) > width:
                parts.append([labels])
                used = len(labels[0])
            parts[-1].append(column)
            used += 2 + len(column[0])
        blocks = []
        for part in parts:
            lines = ["  ".join(cells).rstrip() for cells in zip(*part, strict=True)]
            lines.insert(1, "-" * max(map(len, lines)))
            blocks.append("\n".join(lines))
        return "\n\n".join([self.title, *blocks])

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
        """Prints as Markdown, or to a terminal by rich, if rich is installed."""
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


def _padded(cells: Sequence[str], pad: Callable[[str, int], str]) -> list[str]:
    """To the width of the longest."""
    width = max(map(len, cells))
    return [pad(cell, width) for cell in cells]


def wrapped(line: str, indent: int = 2) -> str:
    """A line as lines of at most WIDTH characters; all but the first are indented."""
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def milliseconds(value: float) -> str:
    """Three significant digits, never in exponent form."""
    decimals = 4 if value < 0.1 else 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


def microseconds(value_ms: float) -> str:
    """The same of so many milliseconds, in microseconds."""
    value = 1e3 * value_ms
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


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
    look: Literal["auto", "kernel", "baseline", "peer"]
    lengths: Sequence[int]
    median_ms: Sequence[float]
    speedup: Sequence[float | None]  #: over the baseline, where the baseline ran


COLORS = {
    "auto": ["#d55e00"],
    "kernel": ["#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"],
    "baseline": ["#000000"],
    "peer": ["#666666", "#999999", "#bbbbbb"],
}
STYLES: dict[str, dict[str, Any]] = {
    "auto": {"linewidth": 4, "zorder": 4, "marker": "o"},
    "kernel": {"linewidth": 1.5, "zorder": 3},
    "baseline": {"linewidth": 2, "zorder": 2},
    "peer": {"linewidth": 1.2, "linestyle": "--", "zorder": 1},
}


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Places for labels, in order and at least ``gap`` apart, near those given."""
    order = sorted(range(len(places)), key=places.__getitem__)
    groups: list[list[int]] = []

    def at(group: list[int]) -> list[float]:
        middle = sum(places[i] for i in group) / len(group)
        return [middle + gap * (k - (len(group) - 1) / 2) for k in range(len(group))]

    for i in order:
        groups.append([i])
        while len(groups) > 1 and at(groups[-2])[-1] + gap > at(groups[-1])[0]:
            groups[-2:] = [groups[-2] + groups[-1]]
    found = {i: place for group in groups for i, place in zip(group, at(group), strict=True)}
    return [found[i] for i in range(len(places))]


def plot_latency(panels: Mapping[str, Sequence[Curve]], path: Path, title: str, baseline: str) -> None:
    """Latency over N, and the speed relative to `baseline`, side by side, a row for each entry of `panels`, as a PNG
    (or what the suffix says). Each line is labelled at its end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(
        len(panels), 2, figsize=(12, 4.5 * len(panels)), layout="constrained", squeeze=False, sharex=True
    )
    for (latency, relative), (name, curves) in zip(rows, panels.items(), strict=True):
        seen = dict.fromkeys(COLORS, 0)
        ends: dict[Any, list[tuple[float, str, str]]] = {latency: [], relative: []}
        for curve in curves:
            color = COLORS[curve.look][seen[curve.look] % len(COLORS[curve.look])]
            seen[curve.look] += 1
            for axes, values in ((latency, curve.median_ms), (relative, curve.speedup)):
                points = [(n, y) for n, y in zip(curve.lengths, values, strict=True) if y is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), color=color, **STYLES[curve.look])
                    ends[axes].append((points[-1][1], curve.name, color))
        lengths = sorted({n for curve in curves for n in curve.lengths})
        for axes in (latency, relative):
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [str(n) for n in lengths])
            axes.set_xlabel("sequence length N")
            axes.grid(True, which="major", alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        latency.set_yscale("log")
        latency.set_ylabel(f"{name}: latency, ms")
        latency.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        relative.set_ylabel(f"speed relative to {baseline}")
        relative.set_ylim(bottom=0)
        for axes, found in ends.items():
            _label_ends(axes, found)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Writes each line's name beside its last point: (value, name, color)."""
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [to_axes.transform((axes.get_xlim()[0], value))[1] for value, _, _ in ends]
    for height, (_, name, color) in zip(apart(heights, gap=0.055), ends, strict=True):
        axes.text(1.01, height, name, color=color, transform=axes.transAxes, va="center", fontsize=9)


def plot_formats() -> list[str]:
    """The suffixes that a plot's file may have; ImportError without matplotlib."""
    from matplotlib.figure import Figure

    return sorted(Figure().canvas.get_supported_filetypes())


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
