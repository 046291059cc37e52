"""Figures that the emulator counted while it ran a kernel's source: in total, by launch and by source line.

Counts are those of hardware events, not of time: see docs/emulator.md for what is modelled and how the figures compare
with Nsight Compute's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ._occupancy import _MULTIPROCESSORS, Occupancy, kernel_occupancy

SECTOR = 32
"""Bytes of global memory that move together."""
BANKS = 32
"""Banks of shared memory, each 4 bytes wide."""
SHARED_KINDS = ("load", "store", "ldmatrix", "async_copy", "atomic")
GLOBAL_KINDS = ("load", "store", "async_copy", "atomic")

# The emulator's classes of instruction
_KINDS = {
    "shared_load": "load",
    "shared_store": "store",
    "global_load": "load",
    "global_store": "store",
    "async_load": "async_copy",
    "tensor_copy": "async_copy",
    "tensor_store": "store",
}
_NO_INSTRUCTIONS = ("basic_block", "async_load")  # the latter is the read of an "async_copy"


@dataclass(frozen=True)
class SharedRequests:
    """Accesses to shared memory."""

    requests: int = 0
    """Warp instructions."""
    wavefronts: int = 0
    """Passes over the memory that they take. A pass gives one 4-byte word of each of the 32 banks, to every lane that
    wants it."""
    ideal_wavefronts: int = 0
    """The passes without bank conflicts: one per request, two if lanes access 8 bytes, four if they access 16; twice as
    many for wavefronts of 64 lanes."""

    @property
    def bank_conflicts(self) -> int:
        """Passes beyond the ideal ones, because lanes wanted different words of a bank at the same time."""
        return self.wavefronts - self.ideal_wavefronts

    def __add__(self, other: SharedRequests) -> SharedRequests:
        return SharedRequests(
            self.requests + other.requests,
            self.wavefronts + other.wavefronts,
            self.ideal_wavefronts + other.ideal_wavefronts,
        )


@dataclass(frozen=True)
class GlobalRequests:
    """Accesses to global memory, as they leave the multiprocessors; caches are not modelled."""

    requests: int = 0
    """Warp instructions."""
    sectors: int = 0
    """Aligned pieces of 32 bytes that they touch, each counted once per request."""
    ideal_sectors: int = 0
    """The fewest sectors that could hold the bytes of each request."""

    @property
    def sectors_per_request(self) -> float:
        """4 for a warp that accesses 4 consecutive bytes per lane, 16 for 16 bytes. NaN without requests."""
        return self.sectors / self.requests if self.requests else math.nan

    @property
    def coalescing(self) -> float:
        """Ideal sectors over touched ones: 1 if no byte moves in vain. NaN without requests."""
        return self.ideal_sectors / self.sectors if self.sectors else math.nan

    @property
    def bytes(self) -> int:
        """Bytes moved: 32 per sector."""
        return SECTOR * self.sectors

    def __add__(self, other: GlobalRequests) -> GlobalRequests:
        return GlobalRequests(
            self.requests + other.requests, self.sectors + other.sectors, self.ideal_sectors + other.ideal_sectors
        )


@dataclass(frozen=True)
class Counts:
    """The counts of a source line, of a launch, or of a whole profile."""

    instructions: Mapping[str, int]
    """Warp instructions by class: ``"mma"`` (two for a WMMA product of 16 x 16 x 16), ``"wgmma"`` (four for a
    warpgroup's product), ``"ldmatrix"``, ``"shared_load"``, ``"shared_store"``, ``"global_load"``, ``"global_store"``,
    ``"atomic"``, ``"async_copy"``, ``"tensor_copy"``, ``"tensor_store"``, ``"shuffle"``, ``"vote"``, ``"syncwarp"``,
    ``"barrier"``, ``"transaction_barrier"`` (arrivals and waits), ``"exp2"``. Arithmetic and branches are not
    counted."""
    shared_memory: Mapping[str, SharedRequests]
    """By kind: ``"load"``, ``"store"``, ``"ldmatrix"``, ``"async_copy"`` (its writes), ``"atomic"``."""
    global_memory: Mapping[str, GlobalRequests]
    """By kind: ``"load"``, ``"store"`` (tensor stores too), ``"async_copy"`` (its reads, and tensor copies'),
    ``"atomic"``."""
    divergent_branches: int
    """How often a warp's lanes parted at a branch."""

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Counts:
        """From rows of the emulator's JSON, one for each class of instruction at a place."""
        instructions: dict[str, int] = {}
        shared = dict.fromkeys(SHARED_KINDS, SharedRequests())
        device = dict.fromkeys(GLOBAL_KINDS, GlobalRequests())
        divergent = 0
        for row in rows:
            what, number = row["what"], row["instructions"]
            divergent += row["divergent"]
            if what not in _NO_INSTRUCTIONS:
                instructions[what] = instructions.get(what, 0) + number
            kind = _KINDS.get(what, what)
            if row["wavefronts"]:
                shared[kind] += SharedRequests(number, row["wavefronts"], row["ideal_wavefronts"])
            if row["sectors"]:
                device[kind] += GlobalRequests(number, row["sectors"], row["ideal_sectors"])
        return cls(instructions, shared, device, divergent)

    @property
    def mma(self) -> int:
        """Tensor-core instructions."""
        return self.instructions.get("mma", 0) + self.instructions.get("wgmma", 0)

    @property
    def barriers(self) -> int:
        """Warps' arrivals at barriers of their block."""
        return self.instructions.get("barrier", 0)

    @property
    def shared(self) -> SharedRequests:
        """All kinds together."""
        return sum(self.shared_memory.values(), SharedRequests())

    @property
    def bank_conflicts(self) -> int:
        """All kinds together."""
        return self.shared.bank_conflicts

    @property
    def global_(self) -> GlobalRequests:
        """All kinds together."""
        return sum(self.global_memory.values(), GlobalRequests())

    @property
    def read_bytes(self) -> int:
        """From global memory: loads, asynchronous copies and atomics, 32 per sector."""
        return sum(self.global_memory[kind].bytes for kind in ("load", "async_copy", "atomic"))

    @property
    def written_bytes(self) -> int:
        """To global memory: stores and atomics, 32 per sector."""
        return sum(self.global_memory[kind].bytes for kind in ("store", "atomic"))

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            {
                key: self.instructions.get(key, 0) + other.instructions.get(key, 0)
                for key in (*self.instructions, *(k for k in other.instructions if k not in self.instructions))
            },
            {kind: self.shared_memory[kind] + other.shared_memory[kind] for kind in SHARED_KINDS},
            {kind: self.global_memory[kind] + other.global_memory[kind] for kind in GLOBAL_KINDS},
            self.divergent_branches + other.divergent_branches,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: with the derived figures, without kinds that did not occur."""
        return {
            "instructions": dict(self.instructions),
            "shared_memory": {
                kind: {**asdict(r), "bank_conflicts": r.bank_conflicts}
                for kind, r in self.shared_memory.items()
                if r.requests
            },
            "global_memory": {
                kind: {**asdict(r), "sectors_per_request": r.sectors_per_request, "coalescing": r.coalescing}
                for kind, r in self.global_memory.items()
                if r.requests
            },
            "bank_conflicts": self.bank_conflicts,
            "divergent_branches": self.divergent_branches,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
        }


@dataclass(frozen=True)
class Request:
    """One warp-wide access to memory."""

    instruction: str
    """Its class, as in :attr:`Counts.instructions`."""
    space: Literal["shared", "global"]
    bytes: int
    """Bytes that each lane accesses."""
    addresses: tuple[int | None, ...]
    """Each lane's address in bytes, from the start of the block's shared memory or of the emulated run's global memory.
    ``None``: the lane takes no part."""

    @property
    def lanes(self) -> int:
        """Lanes that take part."""
        return sum(address is not None for address in self.addresses)

    @property
    def lanes_at_once(self) -> int:
        """Lanes that shared memory serves together: fewer if they access 8 or 16 bytes, except in loads in which lanes
        of a warp of 32 read the same addresses in pairs."""
        lanes = {8: 16, 16: 8}.get(self.bytes, 32)
        if len(self.addresses) > 32:
            return lanes
        paired = any(
            all(
                a == b or a is None or b is None for a, b in zip(self.addresses, self._exchanged(distance), strict=True)
            )
            for distance in (1, 2)
        )
        return 2 * lanes if self.instruction == "shared_load" and lanes < 32 and paired else lanes

    def part(self, lane: int) -> int:
        """Which part of the request serves the lane: neighbours share one, except in 16-byte loads of 64 lanes, whose
        parts are lanes 0-3 and 20-23, 4-7 and 16-19, 8-11 and 28-31, 12-15 and 24-27, and so on."""
        if len(self.addresses) > 32 and self.instruction == "shared_load" and self.bytes == 16:
            quad = lane % 32 // 4
            return lane // 32 * 4 + (quad if quad < 4 else (quad - 4) ^ 1)
        return lane // self.lanes_at_once

    def _exchanged(self, distance: int) -> list[int | None]:
        """The address of each lane's partner in a butterfly."""
        return [self.addresses[lane ^ distance] for lane in range(len(self.addresses))]

    @property
    def touched(self) -> tuple[Touch, ...]:
        """Each lane's banks, or sectors, and in which pass it is served: see :class:`Touch`."""
        unit = 4 if self.space == "shared" else SECTOR
        served: dict[tuple[int, int], list[int]] = {}  # the words of a bank, in the order that lanes ask for them
        found = []
        for lane, address in enumerate(self.addresses):
            if address is None:
                continue
            for number in range(address // unit, (address + self.bytes - 1) // unit + 1):
                if self.space == "global":
                    found.append(Touch(lane, number, 0))
                    continue
                words = served.setdefault((self.part(lane), number % BANKS), [])
                if number not in words:
                    words.append(number)
                found.append(Touch(lane, number % BANKS, words.index(number)))
        return tuple(found)

    @property
    def cost(self) -> int:
        """Wavefronts of a request to shared memory, sectors of one to global memory."""
        if self.space == "global":
            return len({touch.unit for touch in self.touched})
        passes: dict[int, int] = {}
        for lane, _, turn in self.touched:
            part = self.part(lane)
            passes[part] = max(passes.get(part, 0), turn + 1)
        return sum(passes.values())


class Touch(NamedTuple):
    """A lane's access to one bank of shared memory, or to one sector of global memory."""

    lane: int
    unit: int
    """The bank; or the address in global memory divided by 32."""
    turn: int
    """0 if the bank gives this word in its first pass over these lanes, 1 in its second, …"""


@dataclass(frozen=True)
class Line:
    """A line of the kernel's source."""

    source: str
    """``"csrc/forward/wmma/wmma_v2.cu:116"``."""
    text: str
    """The line, without indentation; empty if its file is not there."""
    counts: Counts
    requests: tuple[Request, ...] = field(repr=False)
    """The request with most wavefronts, or sectors, of each class that occurs in this line."""


@dataclass(frozen=True)
class Event:
    """What a warp waited for, or what ran beside the warp at its request, in logical time. A counted instruction and a
    basic block take 1, an instruction to shared memory as much as it has wavefronts. A warp that waits for others goes
    on at the latest of their times."""

    kind: Literal["barrier", "transaction_barrier", "tensor_copy", "product"]
    """Waits at barriers of the block, waits at transaction barriers that last, tensor copies, and groups of a
    warpgroup's products."""
    warp: int
    """The warp that waits or asks; for a product, the first of its warpgroup."""
    arrived: int
    """When the warp came to the wait, or asked for the copy or the product."""
    released: int
    """When the wait was over, or when a warp first waited for the copy's barrier, or the warpgroup for the product."""
    source: str
    """``"csrc/forward/wgmma/wgmma_sm90.cuh:211"``; for a product, that of its first instruction."""
    calls: tuple[str, ...]
    """The function there, and those that it is inlined into, outwards: ``("load", "load_k", "run", "forward")``."""


@dataclass(frozen=True)
class Launch:
    """A launch of one function with one grid; :attr:`launches` counts equal ones."""

    function: str
    """Demangled, without parameters: ``"flash_wmma::(anonymous namespace)::wmma_v2<__half>"``."""
    launches: int
    grid: tuple[int, int, int]
    """Blocks."""
    block: tuple[int, int, int]
    """Threads."""
    smem_bytes: int
    """Dynamic shared memory per block."""
    warps: int
    """Warps that ran, of all blocks and launches."""
    occupancy: Occupancy | None
    """Theoretical, with the registers of this build's machine code; ``None``: the architecture's limits are unknown."""
    counts: Counts = field(repr=False)
    """The sum over all lines."""
    lines: tuple[Line, ...] = field(repr=False)
    """By file and number."""
    timeline: tuple[Event, ...] = field(repr=False)
    """Events of the first launch's block 0, in the order in which the emulator ended them."""

    @property
    def name(self) -> str:
        """The function's name alone: ``"wmma_v2"``."""
        return _plain_name(self.function)


# --- from the emulator's JSON -----------------------------------------------------------------------------------------


def _request(row: Mapping[str, Any]) -> Request:
    worst = row["worst"]
    addresses = worst["addresses"]
    # The atomics of a line may be to both; offsets in shared memory are far below any address.
    shared = row["wavefronts"] and max(a for a in addresses if a is not None) < 2**20
    return Request(row["what"], "shared" if shared else "global", worst["bytes"], tuple(addresses))


def _place(source: str) -> tuple[str, int]:
    path, _, number = source.rpartition(":")
    return path, int(number) if number.isdecimal() else 0


def _lines(rows: Sequence[Mapping[str, Any]], sources: Path) -> tuple[Line, ...]:
    """The lines of a launch in which something was counted, from the rows of its classes of instruction."""
    by_source: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["what"] != "basic_block" or row["divergent"]:
            by_source.setdefault(row["line"], []).append(row)
    texts: dict[str, list[str]] = {}
    lines = []
    for source in sorted(by_source, key=_place):
        path, number = _place(source)
        if path not in texts:
            file = sources / path
            texts[path] = file.read_text(errors="replace").splitlines() if file.is_file() else []
        known = number <= len(texts[path]) and number > 0
        lines.append(
            Line(
                source=source or "an unknown place",
                text=texts[path][number - 1].strip() if known else "",
                counts=Counts.of(by_source[source]),
                requests=tuple(_request(row) for row in by_source[source] if "worst" in row),
            )
        )
    return tuple(lines)


def _merged(a: Line, b: Line) -> Line:
    worst: dict[tuple[str, str], Request] = {}
    for request in (*a.requests, *b.requests):
        key = request.instruction, request.space
        if key not in worst or request.cost > worst[key].cost:
            worst[key] = request
    return Line(a.source, a.text, a.counts + b.counts, tuple(worst.values()))


def _again(first: Launch, second: Launch) -> Launch:
    """The sum of two launches of the same function with the same grid and block."""
    lines = {line.source: line for line in first.lines}
    for line in second.lines:
        lines[line.source] = _merged(lines[line.source], line) if line.source in lines else line
    return replace(
        first,
        launches=first.launches + second.launches,
        warps=first.warps + second.warps,
        counts=first.counts + second.counts,
        lines=tuple(lines[source] for source in sorted(lines, key=_place)),
    )


def _function(name: str) -> str:
    """The name without what is left of its parameters."""
    depth = 0
    for i in range(len(name) - 1, -1, -1):
        depth += (name[i] == ")") - (name[i] == "(")
        if depth < 0:
            return name[:i]
    return name


def _plain_name(function: str) -> str:
    """The name without namespaces, template arguments and parameters."""
    name = function.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    return re.sub(r"[(<].*", "", name).rpartition("::")[2].rpartition(" ")[2]


def launches_of(text: str, arch: int, sources: Path) -> tuple[Launch, ...]:
    """From the emulator's JSON. ``sources``: the folder that its paths start from."""
    found: dict[object, Launch] = {}
    for row in json.loads(text):
        function, block = _function(row["kernel"]), row["block"]
        threads, smem = block[0] * block[1] * block[2], row["smem_bytes"]
        launch = Launch(
            function=function,
            launches=1,
            grid=tuple(row["grid"]),
            block=tuple(block),
            smem_bytes=smem,
            warps=row["warps"],
            occupancy=kernel_occupancy(function, arch, threads, smem) if arch in _MULTIPROCESSORS else None,
            counts=Counts.of(row["counts"]),
            lines=_lines(row["counts"], sources),
            timeline=tuple(
                Event(
                    event["kind"],
                    event["warp"],
                    event["arrived"],
                    event["released"],
                    event["line"],
                    tuple(map(_plain_name, event["calls"])),
                )
                for event in row["timeline"]
            ),
        )
        key = (launch.function, launch.grid, launch.block, launch.smem_bytes)
        found[key] = _again(found[key], launch) if key in found else launch
    return tuple(found.values())
