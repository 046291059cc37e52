#!/usr/bin/env python3
"""A static issue model of mma_sm75 on Turing, from its sm_75 machine code.

    python benchmark/issue_model.py [--input FILE] [--head-dim 64 128 256] [--general] [--shared-bytes 64] [--json FILE]

It disassembles the kernel (FILE: the library, a cubin, or SASS as text by cuobjdump -sass or nvdisasm -c), finds the
loop over K/V tiles and in it the path of a plain tile (below), counts its instructions by the pipe that executes them,
and multiplies by each pipe's rate. The pipe with the most cycles bounds the speed.

This is a MODEL, not a measurement: no Turing card was involved. It knows instruction counts and throughputs, and
nothing of latency, dependencies, occupancy, bank conflicts, DRAM, barriers, prologue or epilogue, so that a real kernel
is slower than its bound.

The path of a plain tile. The loop's back edge is the one whose body holds the most HMMA; the body is taken as a graph
of basic blocks without that edge. A way through the graph, from the loop's head to the back edge, is a plain tile's if
it executes exactly the HMMA that the tile's shape asks for (Bc keys, all of d, both products, once; the function's name
gives the shape) and copies the next K/V tile (the most LDG and STS.128 of any such way). The shortest of these ways is
taken. The exact path, for masked tiles, also finds a maximum, by FMNMX and SHFL: a way with either is refused.
--blocks prints the way's basic blocks for inspection.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.report import Table

ROOT = Path(__file__).resolve().parent.parent
HMMA_FLOPS = 2 * 16 * 8 * 8  # of one m16n8k8
SUB_PARTITIONS = 4  # of an SM, each with its own warps, issue slot and pipes; shared memory is the SM's


class CannotModel(Exception):
    """There is nothing to model; the message says why and what to do."""


# ---------------------------------------------------------------------------------------------------------------- cards


@dataclass(frozen=True)
class Card:
    """What differs between cards of the same SM."""

    name: str
    sms: int
    boost_ghz: float
    hmma_cycles: int  #: cycles of an HMMA.1688.F32 on a sub-partition

    @property
    def tensor_tflops(self) -> float:
        """Peak of fp16 products with fp32 accumulation."""
        return self.sms * SUB_PARTITIONS * HMMA_FLOPS / self.hmma_cycles * self.boost_ghz / 1e3


# NVIDIA's data: T4 65 TFLOP/s of fp16 tensor products; RTX 2080 Ti (reference clock) 53.8 with fp32 accumulation, half
# of its 107.6 with fp16 accumulation.
CARDS = (Card("T4", 40, 1.590, 8), Card("RTX 2080 Ti", 68, 1.545, 16))

# --------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str  #: with its modifiers: "LDSM.16.M88.4"
    operands: str
    predicate: str = ""  #: "@P0", "@!P0"; empty: always

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> int | None:
        """The target of a branch, if it is known."""
        found = re.search(r"\b0x([0-9a-f]+)\b", self.operands) if self.base in ("BRA", "BRX") else None
        return int(found[1], 16) if found else None


INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);", re.M)


def functions(sass: str) -> Iterator[tuple[str, list[Instruction]]]:
    """The functions of a disassembly by cuobjdump -sass (branches to addresses) or nvdisasm -c (branches to labels)."""
    heads = list(re.finditer(r"^\s*(?:Function : (\w+)|\.text\.(\w+):)\s*$", sass, re.M))
    for head, end in zip(heads, [*(h.start() for h in heads[1:]), len(sass)], strict=True):
        body = sass[head.end() : end]
        labels: dict[str, int] = {}
        for label in re.finditer(r"^(\.L\w+):", body, re.M):
            after = INSTRUCTION.search(body, label.end())
            if after:
                labels[label[1]] = int(after[1], 16)

        def address(match: re.Match[str], known: Mapping[str, int] = labels) -> str:
            return hex(known[match[1]]) if match[1] in known else match[0]

        code = [
            Instruction(int(m[1], 16), m[3], re.sub(r"`\((\.L\w+)\)", address, m[4]).strip(), m[2] or "")
            for m in INSTRUCTION.finditer(body)
        ]
        if code:
            yield head[1] or head[2], code


# The pipe that executes an instruction, from Nsight Compute's documentation ("Pipelines"): FMA executes FP32 and
# integer multiplication, ALU other integer and logic instructions, XU special functions and conversions. XU also
# converts fp32 to fp16 (F2F); from Ampere on ALU does so (F2FP).
FP32 = {"FFMA", "FADD", "FMUL", "FFMA32I", "FADD32I", "FMUL32I"}
IMAD = {"IMAD", "IMUL", "IDP"}
CONVERSIONS = {"F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV"}
FP16 = {"HADD2", "HMUL2", "HFMA2", "HSET2", "HSETP2", "HMNMX2"}
MEMORY = {"LDSM": "LDSM", "LDS": "LDS", "STS": "STS", "ATOMS": "STS", "SHFL": "SHFL"} | dict.fromkeys(
    ("LDG", "STG", "LDL", "STL", "LD", "ST", "ATOM", "ATOMG", "RED"), "LDG"
)
CONTROL = {
    *("BRA", "BRX", "JMP", "JMX", "CALL", "RET", "EXIT", "BSSY", "BSYNC", "BREAK", "BMOV", "WARPSYNC", "YIELD", "NOP"),
    *("BAR", "MEMBAR", "DEPBAR", "ERRBAR", "NANOSLEEP", "KILL", "BPT"),
}
OTHER = {"S2R", "CS2R", "LDC", "ULDC", "B2R", "R2B"}  # of units that the loop hardly uses: counted only at issue
CLASSES = (
    *("HMMA", "FP32", "IMAD", "ALU", "MUFU", "F2F", "FP16", "LDSM", "LDS", "STS", "SHFL", "LDG"),
    *("uniform", "control", "other"),
)
PIPES = ("tensor", "FMA", "ALU", "XU", "shared memory", "issue")


def class_of(instruction: Instruction) -> str:
    """Its column in the instruction mix."""
    base = instruction.base
    sets = {"FP32": FP32, "IMAD": IMAD, "F2F": CONVERSIONS, "FP16": FP16, "control": CONTROL, "other": OTHER}
    if base in ("HMMA", "MUFU"):
        return base
    if base in MEMORY:
        return MEMORY[base]
    for kind, names in sets.items():
        if base in names:
            return kind
    return "uniform" if base.startswith("U") or base in ("R2UR", "VOTEU", "S2UR") else "ALU"


def wavefront_bytes(instruction: Instruction) -> int:
    """Bytes that a warp's access moves through the SM's memory, shared memory and L1 being one; without conflicts."""
    parts = instruction.opcode.split(".")
    if parts[0] == "LDSM":
        return 128 * (int(parts[-1]) if parts[-1].isdigit() else 1)  # 8x8 matrices of 16-bit elements
    width = next((int(part) for part in parts[1:] if part in ("64", "128")), 32)
    return 32 * width // 8


def cycles(path: Iterable[Instruction], hmma_cycles: int, shared_bytes: int) -> dict[str, float]:
    """Cycles that each pipe of a sub-partition needs for a warp's instructions, while the other three do the same.

    Results a clock and SM: FP32 and integer multiplication 64, integer and logic 64, special functions and conversions
    16, all by the CUDA programming guide. Shared memory moves `shared_bytes` for the four sub-partitions together.
    """
    total = dict.fromkeys(PIPES, 0.0)
    for instruction in path:
        kind = class_of(instruction)
        total["issue"] += 1
        if kind == "HMMA":
            total["tensor"] += hmma_cycles
        elif kind in ("FP32", "IMAD"):
            total["FMA"] += 2  # 16 lanes a sub-partition
        elif kind in ("MUFU", "F2F"):
            total["XU"] += 8  # 4 lanes
        elif kind in ("LDSM", "LDS", "STS", "SHFL", "LDG"):
            total["shared memory"] += SUB_PARTITIONS * wavefront_bytes(instruction) / shared_bytes
        elif kind in ("ALU", "FP16"):
            total["ALU"] += 2
    return total


# ------------------------------------------------------------------------------------------------------------- the loop


@dataclass(frozen=True)
class Shape:
    """The tile that a function's name describes."""

    head_dim: int
    row_warps: int
    dim_warps: int
    row_tiles: int
    keys: int
    stages: int
    q_in_registers: bool
    general: bool

    @property
    def hmma(self) -> int:
        """HMMA.1688 of a warp for both products of one tile of keys."""
        flops = 2 * 2 * 16 * self.row_tiles * self.keys * self.head_dim
        return flops // HMMA_FLOPS // self.dim_warps

    def __str__(self) -> str:
        warps = f"{self.row_warps}" + (f" x {self.dim_warps}" if self.dim_warps > 1 else "")
        q = "registers" if self.q_in_registers else "shared"
        general = ", general" if self.general else ""
        return f"{warps} warps, {16 * self.row_tiles} rows, Bc {self.keys}, {self.stages} stages, Q {q}{general}"


def shape_of(function: str) -> Shape | None:
    """The shape of an instance of mma_sm75, from its mangled name; None: another function, one for caches or dropout,
    whose loop has more than one way, or one whose blocks own a part of V's columns."""
    tile = r"4TileI\w*?4Sm75E6__halfXtlN\w+?9TileShapeE((?:L[ib]\d+E)+)E+"
    found = re.search(rf"3mma7forwardI\w*?{tile}LN\w+?8ProblemsE(\d+)E", function)
    if not found:
        return None
    cached, dropped = (bool(int(found[2]) & bit) for bit in (8, 512))  # problems.h
    if cached or dropped:
        return None
    numbers = [int(n) for n in re.findall(r"L[ib](\d+)E", found[1])]
    if len(numbers) < 7 or any(numbers[9:10]):  # the last are columns
        return None
    d, row_warps, dim_warps, row_tiles, keys, stages, q = numbers[:7]
    return Shape(d, row_warps, dim_warps, row_tiles, keys, stages, bool(q), found[2] != "0")


@dataclass(frozen=True)
class Block:
    """Instructions that are executed one after the other, by the positions of the first and behind the last."""

    begin: int
    end: int
    next: tuple[int, ...]  #: blocks that follow


def basic_blocks(code: Sequence[Instruction]) -> list[Block]:
    position = {instruction.address: i for i, instruction in enumerate(code)}
    leaders = {0}
    for i, instruction in enumerate(code):
        target = instruction.target
        if target in position:
            leaders.add(position[target])
        if instruction.base in ("BRA", "BRX", "EXIT", "RET", "CALL") and i + 1 < len(code):
            leaders.add(i + 1)
    starts = sorted(leaders)
    index = {start: i for i, start in enumerate(starts)}
    blocks = []
    for i, (begin, end) in enumerate(zip(starts, [*starts[1:], len(code)], strict=True)):
        last = code[end - 1]
        # "@P0 BRA P1, target" has two conditions; BRA.DIV falls through where the warp is converged
        always = not last.predicate and not re.match(r"!?U?P\d", last.operands) and last.opcode == "BRA"
        following = []
        if last.target in position:
            following.append(index[position[last.target]])
        if not (always or last.base in ("EXIT", "RET", "BRX")) and i + 1 < len(starts):
            following.append(i + 1)
        blocks.append(Block(begin, end, tuple(dict.fromkeys(following))))
    return blocks


Executed = tuple[int, int, int]  # HMMA, LDG.E.128, STS.128


def count(code: Iterable[Instruction], opcode: str) -> int:
    return sum(instruction.opcode.startswith(opcode) for instruction in code)


@dataclass(frozen=True)
class Way:
    """A plain tile's way through the loop."""

    instructions: list[Instruction]
    blocks: list[tuple[int, int]]  #: addresses of first and last instructions
    loop: tuple[int, int]  #: the same of the loop


def plain_path(code: Sequence[Instruction], hmma: int) -> Way:
    """See the head of the file."""
    blocks = basic_blocks(code)
    back_edges = [(i, j) for i, block in enumerate(blocks) for j in block.next if j <= i]
    if not back_edges:
        raise CannotModel("the function has no loop")
    # The loop with most HMMA; if several have as many (code behind the loop jumps back into it), the shortest
    latch, head = max(
        back_edges,
        key=lambda e: (count(code[blocks[e[1]].begin : blocks[e[0]].end], "HMMA"), e[1] - e[0]),
    )

    # The ways from the head to each block, by what they have executed: the shortest for each
    ways: dict[int, dict[Executed, tuple[int, list[int]]]] = {head: {(0, 0, 0): (0, [])}}
    done: dict[Executed, tuple[int, list[int]]] = {}
    for i in range(head, latch + 1):
        block = blocks[i]
        body = code[block.begin : block.end]
        here = (count(body, "HMMA"), count(body, "LDG.E.128"), count(body, "STS.128"))
        for state, (length, way) in ways.get(i, {}).items():
            after = (state[0] + here[0], state[1] + here[1], state[2] + here[2])
            if after[0] > hmma:
                continue
            step = (length + len(body), [*way, i])
            for j in block.next:
                to = done if i == latch and j == head else ways.setdefault(j, {}) if j > i else None
                if to is not None and (after not in to or step[0] < to[after][0]):
                    to[after] = step
    fitting = [(state[1] + state[2], -length, way) for state, (length, way) in done.items() if state[0] == hmma]
    if not fitting:
        raise CannotModel(f"no way through the loop executes {hmma} HMMA, those of one tile")
    _, _, way = max(fitting)
    return Way(
        [instruction for i in way for instruction in code[blocks[i].begin : blocks[i].end]],
        [(code[blocks[i].begin].address, code[blocks[i].end - 1].address) for i in way],
        (code[blocks[head].begin].address, code[blocks[latch].end - 1].address),
    )


# ------------------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Bound:
    """The model's result for one instance on one card."""

    card: str
    cycles: dict[str, float]  #: per pipe, for a warp's tile on a sub-partition
    binding: str  #: the pipe with the most
    tflops: float  #: the bound
    of_tensor_peak: float


@dataclass(frozen=True)
class Model:
    function: str
    shape: Shape
    loop: tuple[int, int]
    blocks: list[tuple[int, int]]
    mix: dict[str, int]  #: instructions of the path by class
    local_memory: int  #: LDL and STL on it: spills
    bounds: list[Bound]


def model(function: str, code: Sequence[Instruction], shape: Shape, shared_bytes: int) -> Model:
    path = plain_path(code, shape.hmma)
    if any(instruction.base in ("FMNMX", "SHFL") for instruction in path.instructions):
        raise CannotModel(f"{shape}: the shortest way through the loop takes a maximum, so it is not a plain tile's")
    mix = Counter(class_of(instruction) for instruction in path.instructions)
    bounds = []
    for card in CARDS:
        pipes = cycles(path.instructions, card.hmma_cycles, shared_bytes)
        binding = max(PIPES, key=lambda pipe: pipes[pipe])
        share = pipes["tensor"] / pipes[binding]
        bounds.append(Bound(card.name, pipes, binding, share * card.tensor_tflops, share))
    local = sum(instruction.base in ("LDL", "STL") for instruction in path.instructions)
    return Model(function, shape, path.loop, path.blocks, {kind: mix[kind] for kind in CLASSES}, local, bounds)


def tool(name: str) -> str:
    """cuobjdump: on PATH, beside nvcc, from PyPI, or from triton."""
    places = [Path(home) / "bin" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    for folder in map(Path, sys.path):
        places += [folder / "nvidia/cu13/bin", folder / "triton/backends/nvidia/bin"]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, places)))
    if not found:
        raise CannotModel(f"{name} (of the CUDA toolkit) was not found: put it on PATH, or give --input a text of SASS")
    return found


def disassembled(path: Path) -> str:
    """The sm_75 code of a library, a cubin or a text that holds it already."""
    if not path.is_file():
        raise CannotModel(f"{path} does not exist: build the library with CUDA (docs/building.md), or give --input")
    data = path.read_bytes()
    if not data.startswith(b"\x7fELF"):
        return data.decode()
    select = [] if path.suffix == ".cubin" else ["-arch", "sm_75"]
    done = subprocess.run([tool("cuobjdump"), "-sass", *select, path], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotModel(f"cuobjdump: {done.stderr.strip()}")
    return done.stdout


def mix_table(models: Sequence[Model]) -> Table:
    kinds = [kind for kind in CLASSES if any(m.mix[kind] for m in models)]
    rows = [
        [str(m.shape.head_dim), str(m.shape), *(str(m.mix[kind]) for kind in kinds), str(sum(m.mix.values()))]
        for m in models
    ]
    return Table(
        "Instructions of a warp for one plain K/V tile, copy of the next one included (sm_75 machine code)",
        ["d", "tile", *kinds, "all"],
        rows,
    )


def bound_table(models: Sequence[Model], card: Card, shared_bytes: int) -> Table:
    rows = []
    for m in models:
        bound = next(b for b in m.bounds if b.card == card.name)
        cells = [f"{bound.cycles[pipe]:.0f}" for pipe in PIPES]
        cells += [bound.binding, f"{bound.tflops:.1f}", f"{bound.of_tensor_peak:.0%}"]
        rows.append([str(m.shape.head_dim), str(m.shape), *cells])
    return Table(
        f"MODEL, not measured: {card.name}, {card.sms} SMs at {card.boost_ghz:.3f} GHz, tensor peak "
        f"{card.tensor_tflops:.1f} TFLOP/s (fp32 accumulation), {shared_bytes} bytes of shared memory a clock and SM; "
        "cycles of a sub-partition for a warp's tile",
        ["d", "tile", *PIPES, "binds", "TFLOP/s at most", "of tensor peak"],
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, default=ROOT / "flash_wmma" / "libflash_wmma.so", metavar="FILE")
    parser.add_argument("--head-dim", type=int, nargs="*", default=[64, 128, 256], help="none: all that there are")
    parser.add_argument("--general", action="store_true", help="the instances with score modifications as well")
    parser.add_argument("--shared-bytes", type=int, default=64, help="a clock and SM, of shared memory and L1")
    parser.add_argument("--blocks", action="store_true", help="print the basic blocks of the path")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the model there too")
    args = parser.parse_args(arguments)
    models = []
    try:
        for function, code in functions(disassembled(args.input)):
            shape = shape_of(function)
            if shape and (not args.head_dim or shape.head_dim in args.head_dim) and (args.general or not shape.general):
                models.append(model(function, code, shape, args.shared_bytes))
        if not models:
            raise CannotModel(f"{args.input} holds no sm_75 instance of mma_sm75 with such a head dim")
    except CannotModel as why:
        print(f"issue_model.py: {why}", file=sys.stderr)
        return 2
    models.sort(key=lambda m: (m.shape.general, m.shape.head_dim, -m.shape.row_tiles))
    print("A static model from machine code: no Turing card was measured. Latency, dependencies, occupancy,")
    print("bank conflicts and DRAM are not in it, so these are upper bounds.\n")
    mix_table(models).print()
    for card in CARDS:
        bound_table(models, card, args.shared_bytes).print()
    if args.blocks:
        for m in models:
            ways = ", ".join(f"{begin:#x}-{end:#x}" for begin, end in m.blocks)
            print(f"d={m.shape.head_dim}, {m.shape}: loop {m.loop[0]:#x}-{m.loop[1]:#x}; path {ways}")
    if args.json:
        note = "static model from sm_75 machine code; no Turing card was measured"
        result = {"note": note, "shared_bytes": args.shared_bytes, "cards": [dataclasses.asdict(c) for c in CARDS]}
        result["instances"] = [dataclasses.asdict(m) for m in models]
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
