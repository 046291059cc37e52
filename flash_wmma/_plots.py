"""Draws profiles, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from ._figures import Event, Launch, Line, Request

_BANKS = 32
_SECTOR = 32
_WAITS = "waits at barriers"
_FUNCTIONS = {  # what kernels' functions ask for
    "load_q": "copies of Q",
    "load_k": "copies of K",
    "load_v": "copies of V",
    "multiply_qk": "S = Q Kᵀ",
    "multiply_pv": "O += P V",
    "stage_output": "stores of O",
}
_COLORS = ["#e69f00", "#d55e00", "#cc79a7", "#0072b2", "#009e73", "#56b4e9"]


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(f"plots need matplotlib ({error}): pip install 'flash_wmma[profile]'") from error
    return pyplot


def _done(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        figure.savefig(path, dpi=150)
        _pyplot().close(figure)
    return figure


def banks(lines: Sequence[Line], kernel: str, path: str | Path | None) -> Any:
    """A panel for each class of access at one line of source."""
    plt = _pyplot()
    worst: dict[tuple[str, str], Request] = {}
    for request in (request for line in lines for request in line.requests):
        key = request.instruction, request.space
        if key not in worst or request.cost > worst[key].cost:
            worst[key] = request
    figure, panels = plt.subplots(1, len(worst), figsize=(8.5 * len(worst), 7.6), layout="constrained", squeeze=False)
    for axes, request in zip(panels[0], worst.values(), strict=True):
        (_draw_shared if request.space == "shared" else _draw_global)(figure, axes, request)
    figure.suptitle(f"{kernel}, {lines[0].source}\n{lines[0].text}", fontsize=11)
    return _done(figure, path)


def _title(axes: Any, request: Request, unit: str, ideal: int) -> None:
    cost = request.cost
    beside = "the fewest possible" if cost == ideal else f"{ideal} would do"
    what = request.instruction.replace("_", " ")
    units = f"{cost} {unit}{'s' * (cost != 1)}"
    axes.set_title(f"{what}: {request.lanes} lanes x {request.bytes} bytes, {units} ({beside})", fontsize=11)
    axes.set_ylabel("lane")
    axes.set_ylim(len(request.addresses) - 0.5, -0.5)
    axes.set_yticks(range(0, len(request.addresses), 4))


def _grid(axes: Any, columns: int, rows: int) -> None:
    axes.set_xticks([c - 0.5 for c in range(columns + 1)], minor=True)
    axes.set_yticks([r - 0.5 for r in range(rows + 1)], minor=True)
    axes.grid(which="minor", color="#e4e4e4", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    axes.set_axisbelow(True)


def _squares(axes: Any, cells: Sequence[tuple[int, int]], colors: Sequence[Any]) -> None:
    import matplotlib.collections
    import matplotlib.patches

    squares = [matplotlib.patches.Rectangle((x - 0.46, y - 0.46), 0.92, 0.92) for x, y in cells]
    axes.add_collection(matplotlib.collections.PatchCollection(squares, facecolors=list(colors), edgecolors="none"))


def _draw_shared(figure: Any, axes: Any, request: Request) -> None:
    import matplotlib.cm
    import matplotlib.colors

    touched = request.touched
    turns = max(touch.turn for touch in touched) + 1
    lanes_at_once = request.lanes_at_once
    active = [lane for lane, address in enumerate(request.addresses) if address is not None]
    parts = len({request.part(lane) for lane in active})
    palette = matplotlib.colormaps["viridis"].resampled(turns)
    norm = matplotlib.colors.BoundaryNorm([i + 0.5 for i in range(turns + 1)], turns) if turns > 1 else None
    _grid(axes, _BANKS, len(request.addresses))
    _squares(axes, [(t.unit, t.lane) for t in touched], [palette(t.turn) for t in touched])
    _title(axes, request, "wavefront", parts)
    for lane in range(1, len(request.addresses)):
        if request.part(lane) != request.part(lane - 1):
            axes.axhline(lane - 0.5, color="black", linewidth=1, linestyle="--")
    axes.set_xlim(-0.5, _BANKS - 0.5)
    axes.set_xticks(range(0, _BANKS, 4))
    apart = f"; lanes between dashed lines go together, {lanes_at_once} at a time" if parts > 1 else ""
    axes.set_xlabel(f"bank of shared memory, 4 bytes wide{apart}")
    if norm is not None:
        scale = figure.colorbar(matplotlib.cm.ScalarMappable(norm, palette), ax=axes, shrink=0.6, pad=0.02)
        step = -(-turns // 8)
        scale.set_ticks([i for i in range(1, turns + 1) if (i - 1) % step == 0 or i == turns])
        scale.set_label("wavefront in which the lane is served")


def _draw_global(figure: Any, axes: Any, request: Request) -> None:
    sectors = sorted({touch.unit for touch in request.touched})
    column = {sector: i for i, sector in enumerate(sectors)}
    cells = [(column[t.unit], t.lane) for t in request.touched]
    _grid(axes, len(sectors), len(request.addresses))
    _squares(axes, cells, ["#0072b2"] * len(cells))
    distinct = {address for address in request.addresses if address is not None}
    _title(axes, request, "sector", -(-len(distinct) * request.bytes // _SECTOR))
    axes.set_xlim(-0.5, max(len(sectors), 8) - 0.5)
    step = -(-len(sectors) // 8)
    shown = range(0, len(sectors), step)
    axes.set_xticks(list(shown), [f"+{_SECTOR * (sectors[i] - sectors[0]):,}" for i in shown])
    axes.set_xlabel("sector of 32 bytes, by its distance in bytes from the first")


def _what(event: Event) -> str:
    if event.kind in ("barrier", "transaction_barrier"):
        return _WAITS
    return next((_FUNCTIONS[name] for name in event.calls if name in _FUNCTIONS), event.calls[0])


def _lanes(launch: Launch) -> dict[int, list[list[Event]]]:
    """The warps that ask for copies or products, each with rows of events of one sort, in which none overlap. The first
    warp of those that ask for products together stands for all four."""
    groups = {event.warp for event in launch.timeline if event.kind == "product"}
    others = {warp + i for warp in groups for i in range(1, 4)}
    asking = groups | {event.warp for event in launch.timeline if event.kind == "tensor_copy"}
    lanes: dict[int, list[list[Event]]] = {warp: [] for warp in sorted(asking - others)}
    sorts = list(dict.fromkeys([_WAITS, *_FUNCTIONS.values(), *map(_what, launch.timeline)]))
    for event in sorted(launch.timeline, key=lambda e: (sorts.index(_what(e)), e.arrived)):
        rows = lanes.get(event.warp, [])
        free = (row for row in rows if _what(row[0]) == _what(event) and row[-1].released <= event.arrived)
        if (row := next(free, None)) is None:
            rows.append([event])
        else:
            row.append(event)
    return lanes


def _draw_asked(axes: Any, launch: Launch) -> None:
    """Copies and products, from the request to the first wait; their numbers count each sort."""
    y = 0.0
    places: dict[str, float] = {}
    colors = dict(zip((_WAITS, *_FUNCTIONS.values()), ("#999999", *_COLORS), strict=False))
    for warp, rows in _lanes(launch).items():
        group = any(event.kind == "product" for row in rows for event in row)
        places[f"warps {warp} to {warp + 3}" if group else f"warp {warp}"] = y + (len(rows) - 1) / 2
        for row in rows:
            what = _what(row[0])
            starts = sorted(event.arrived for other in rows for event in other if _what(event) == what)
            if what not in colors:
                colors[what] = _COLORS[len(colors) % len(_COLORS)]
            for event in row:
                bar = [(event.arrived, event.released - event.arrived)]
                axes.broken_barh(bar, (y - 0.4, 0.8), color=colors[what], alpha=0.6)
                axes.vlines(event.arrived, y - 0.4, y + 0.4, color=colors[what], linewidth=1.5)
                if what != _WAITS:
                    at, number = (event.arrived, y), str(starts.index(event.arrived))
                    axes.annotate(number, at, (2, 0), textcoords="offset points", va="center", size=7)
            y += 1
        axes.axhline(y, color="#e4e4e4", linewidth=0.8)
        y += 1
    shown = set(map(_what, launch.timeline))
    for what in (what for what in colors if what in shown):
        axes.plot([], [], color=colors[what], alpha=0.6, linewidth=6, label=what)
    axes.set_title(f"{launch.name}: copies and products of block 0, from asking to waiting for them", fontsize=11)
    axes.set_ylim(y - 1, -0.6)
    axes.set_yticks(list(places.values()), list(places))


def _draw_barriers(axes: Any, launch: Launch) -> None:
    """When warps run and when they wait."""
    sources = list(dict.fromkeys(wait.source for wait in launch.timeline))
    last: dict[int, int] = {}
    for wait in launch.timeline:
        start = last.get(wait.warp, 0)
        color = _COLORS[sources.index(wait.source) % len(_COLORS)]
        axes.broken_barh([(start, wait.arrived - start)], (wait.warp - 0.35, 0.7), color="#0072b2", alpha=0.75)
        axes.broken_barh(
            [(wait.arrived, wait.released - wait.arrived)], (wait.warp - 0.35, 0.7), color=color, alpha=0.45
        )
        axes.vlines(wait.arrived, wait.warp - 0.42, wait.warp + 0.42, color=color, linewidth=2)
        last[wait.warp] = wait.released
    axes.plot([], [], color="#0072b2", alpha=0.75, linewidth=6, label="runs")
    for i, source in enumerate(sources):
        color = _COLORS[i % len(_COLORS)]
        axes.plot([], [], color=color, linewidth=2, label=f"barrier at {PurePath(source).name}")
    axes.set_title(f"{launch.name}: block 0 up to its last barrier", fontsize=11)
    axes.set_ylabel("warp")
    axes.set_ylim(max(last) + 0.6, -0.6)
    axes.set_yticks(sorted(last) if len(last) <= 16 else sorted(last)[::4])


def timeline(launches: Sequence[Launch], kernel: str, path: str | Path | None) -> Any:
    """A panel for each function with events: the warps of block 0 over logical time."""
    plt = _pyplot()
    shown = [launch for launch in launches if launch.timeline]
    if not shown:
        raise ValueError(f"{kernel}: no warp arrives at a barrier of its block, so there is nothing to draw")
    rows = [sum(1 + len(lane) for lane in _lanes(launch).values()) for launch in shown]
    heights = [
        1.2 + (0.2 * count or 0.3 * len({wait.warp for wait in launch.timeline}))
        for count, launch in zip(rows, shown, strict=True)
    ]
    figure, panels = plt.subplots(
        *(len(shown), 1),
        figsize=(11, 1 + sum(heights)),
        layout="constrained",
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for axes, launch, count in zip(panels[:, 0], shown, rows, strict=True):
        (_draw_asked if count else _draw_barriers)(axes, launch)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    panels[-1, 0].set_xlabel("logical time: instructions (for shared memory: wavefronts) and basic blocks")
    figure.suptitle(kernel, fontsize=11)
    return _done(figure, path)
