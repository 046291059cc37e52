"""A profile as text: tables by rich if it is installed, else in plain columns."""

from __future__ import annotations

import importlib
import io
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from ._figures import Counts, Launch

_WIDTH = 160
"""Columns of text, unless a terminal has another width."""
_SHOWN = ("mma", "wgmma", "barrier")
"""Classes that are shown line by line, beside accesses to memory."""


class _Table(NamedTuple):
    title: str
    left: int
    """How many columns, from the left, hold words. They are aligned to the left, and so is ``source``."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def is_left(self, column: int) -> bool:
        return column < self.left or self.columns[column] == "source"


_FIGURES = ("requests", "wavefronts", "conflicts", "sectors", "sectors/request", "coalescing")


def _accesses(counts: Counts) -> Iterator[tuple[str, list[str]]]:
    """Name and figures of each kind of access that occurred."""
    for kind, shared in counts.shared_memory.items():
        if shared.requests:
            name = kind if kind == "ldmatrix" else f"shared {kind.replace('_', ' ')}"
            yield name, [f"{n:,}" for n in (shared.requests, shared.wavefronts, shared.bank_conflicts)] + [""] * 3
    for kind, device in counts.global_memory.items():
        if device.requests:
            ratios = [f"{device.sectors_per_request:.4g}", f"{device.coalescing:.0%}"]
            yield f"global {kind.replace('_', ' ')}", [f"{device.requests:,}", "", "", f"{device.sectors:,}", *ratios]


def _total(launches: Sequence[Launch]) -> Counts:
    return sum((launch.counts for launch in launches), Counts.of(()))


def _memory_table(launches: Sequence[Launch]) -> _Table:
    parts = [(launch.name, launch.counts) for launch in launches]
    if len(parts) > 1:
        parts.append(("total", _total(launches)))
    rows = [
        ["" if i else name, access, *figures]
        for name, counts in parts
        for i, (access, figures) in enumerate(_accesses(counts))
    ]
    return _Table("memory", 2, ("function", "access", *_FIGURES), rows)


def _line_table(launch: Launch) -> _Table:
    rows = []
    for line in launch.lines:
        parts = list(_accesses(line.counts))
        parts += [(what, [f"{n:,}", *[""] * 5]) for what, n in line.counts.instructions.items() if what in _SHOWN]
        if line.counts.divergent_branches:
            parts.append(("divergent branch", [f"{line.counts.divergent_branches:,}", *[""] * 5]))
        for i, (what, figures) in enumerate(parts):
            name, text = PurePath(line.source).name, line.text
            rows.append(["" if i else name, what, *figures, "" if i else text])
    return _Table(f"{launch.name}, by source line", 2, ("line", "what", *_FIGURES, "source"), rows)


def _by(sizes: Sequence[int]) -> str:
    sizes = sizes[: max((i + 1 for i, n in enumerate(sizes) if n > 1), default=1)]
    return " x ".join(map(str, sizes))


def _facts(launch: Launch) -> list[str]:
    counts = launch.counts
    times = f"{launch.launches:,} x " if launch.launches > 1 else ""
    instructions = ", ".join(f"{what} {n:,}" for what, n in counts.instructions.items())
    blocks = "1 block" if launch.grid == (1, 1, 1) else f"{_by(launch.grid)} blocks"
    return [
        launch.function,
        f"  launch        {times}{blocks} of {_by(launch.block)} threads, {launch.smem_bytes:,} bytes of shared memory",
        f"  occupancy     {launch.occupancy or 'unknown'}",
        textwrap.fill(instructions, _WIDTH, initial_indent="  instructions  ", subsequent_indent=" " * 16),
        f"  divergent     {counts.divergent_branches:,} branches",
    ]


def _traffic(counts: Counts, products: int, ideal_read: int | None, ideal_written: int | None) -> list[str]:
    def beside(moved: int, ideal: int | None) -> str:
        if products:
            whose = "one product" if products == 1 else f"{products:,} products"
            return f"unknown: {moved:,} bytes and what {whose} by cuBLAS move, of which nothing is counted"
        if ideal is None:
            return f"{moved:,} bytes"
        return f"{moved:,} bytes ({moved / ideal:.3g} x the ideal {ideal:,})" if ideal else f"{moved:,} bytes (ideal 0)"

    return [
        "global memory, as the multiprocessors access it, without caches",
        f"  read          {beside(counts.read_bytes, ideal_read)}",
        f"  written       {beside(counts.written_bytes, ideal_written)}",
    ]


class Report(NamedTuple):
    """The content of a report."""

    title: str
    launches: Sequence[Launch]
    products: int
    """By cuBLAS, of which nothing is counted."""
    ideal_read_bytes: int | None
    """``None``: unknown."""
    ideal_written_bytes: int | None

    def parts(self) -> Iterator[str | _Table]:
        """Its parts, from top to bottom."""
        yield self.title
        if not self.launches:
            yield "nothing was launched"
            return
        for launch in self.launches:
            yield "\n".join(_facts(launch))
        traffic = _traffic(_total(self.launches), self.products, self.ideal_read_bytes, self.ideal_written_bytes)
        yield "\n".join(traffic)
        yield _memory_table(self.launches)
        for launch in self.launches:
            yield _line_table(launch)


def _plain(table: _Table) -> str:
    widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    lines = []
    for row in (table.columns, ["-" * width for width in widths], *table.rows):
        cells = zip(row, widths, strict=True)
        line = "  ".join(c.ljust(w) if table.is_left(i) else c.rjust(w) for i, (c, w) in enumerate(cells)).rstrip()
        lines.append(line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…")
    return "\n".join([f"{table.title}:", *lines])


def _rich(module: str) -> Any:
    """``rich.<module>``, or ``None``."""
    try:
        return importlib.import_module(f"rich.{module}")
    except ImportError:
        return None


def renderable(report: Report) -> Any:
    """For rich, which must be installed: tables, with the highest costs in colour."""
    parts = []
    for part in report.parts():
        if isinstance(part, str):
            parts.append(_rich("text").Text(part + "\n"))
            continue
        box = _rich("box").SIMPLE_HEAD
        style = {"title_justify": "left", "title_style": "bold", "box": box, "pad_edge": False}
        table = _rich("table").Table(title=part.title, **style)
        for i, column in enumerate(part.columns):
            color = {"conflicts": "red", "source": "dim"}.get(column)
            justify = "left" if part.is_left(i) else "right"
            table.add_column(column, justify=justify, style=color, no_wrap=column != "source")
        for row in part.rows:
            table.add_row(*(_rich("text").Text(cell, no_wrap=True, overflow="ellipsis") for cell in row))
        parts.append(table)
    return _rich("console").Group(*parts)


def text(report: Report) -> str:
    """The report without colours, so that it can be written to a file."""
    console = _rich("console")
    if console is None:
        return "\n\n".join(part if isinstance(part, str) else _plain(part) for part in report.parts())
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if sys.stdout.isatty() else _WIDTH
    out = io.StringIO()
    console.Console(file=out, width=width, color_system=None, legacy_windows=False).print(renderable(report))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()
