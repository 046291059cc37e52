"""Sweep of the tile shapes of wmma_v3, mma_sm80, mma_sm75 and simt: warps, Br, Bc, stages, what stays in registers.

    python benchmark/tiles.py build --kernel mma_sm80 --head-dim 64 128     # needs nvcc; no GPU
    python benchmark/tiles.py run --kernel mma_sm80 --head-dim 64 128       # needs the GPU; the fastest, the optimum
    python benchmark/tiles.py run --kernel mma_sm80 --head-dim 64 128 --plot tiles.png --json tiles.json
    python benchmark/tiles.py rungs                                         # Br and Bc of the SIMT ladder, GPU or not

`build` compiles every shape of the sweep into a small library of its own; the tables of shapes that ship
(csrc/forward: wmma/wmma_v3.cuh, mma/mma_sm80.cuh, mma/mma_sm75.cu) are what this program found. mma_sm75 is compiled to
compute_75 PTX, which the driver compiles for the present device.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from harness import rungs
from harness.nvcc import INCLUDES, find_nvcc

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent


def library_of(kernel: str, head_dim: int) -> Path:
    """Where the sweep for a kernel and head dim is compiled to."""
    return ROOT / "build" / "tiles" / f"{kernel}_d{head_dim}.so"


@dataclass(frozen=True)
class Shape:
    """One instance of a kernel template: the parameters of its Tile."""

    bc: int
    br: int = field(init=False)

    #: the kernel's header in csrc, its namespace, its struct of shared memory
    header: ClassVar[str]
    namespace: ClassVar[str]
    shared_memory: ClassVar[str]
    dtype: ClassVar[str] = "float16"
    #: the template's arguments behind the Tile
    more: ClassVar[str] = ""

    def tile(self, head_dim: int) -> str:
        """The Tile in C++."""
        raise NotImplementedError

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class WmmaShape(Shape):
    """An instance of wmma_v3."""

    warps: int
    row_tiles: int
    q_in_registers: bool
    blocks_per_sm: int
    handover: str = "Registers"
    pad: int = 8

    header: ClassVar[str] = "forward/wmma/wmma_v3.cuh"
    namespace: ClassVar[str] = "wmma_v3"
    shared_memory: ClassVar[str] = "SharedMemory"
    more: ClassVar[str] = ", wmma_v3::kPlain"

    def __post_init__(self) -> None:
        object.__setattr__(self, "br", 16 * self.warps * self.row_tiles)

    def tile(self, head_dim: int) -> str:
        q = str(self.q_in_registers).lower()
        return (
            f"wmma_v3::Tile<half, wmma_v3::TileShape{{{head_dim}, {self.warps}, {self.row_tiles}, {self.bc}, {q}, "
            f"{self.blocks_per_sm}, wmma_v3::Handover::k{self.handover}, {self.pad}}}>"
        )


@dataclass(frozen=True)
class MmaShape(Shape):
    """An instance of mma_sm80 or mma_sm75."""

    row_warps: int
    dim_warps: int
    row_tiles: int
    stages: int
    q_steps: int
    blocks_per_sm: int
    machine: str = "Sm80"

    header: ClassVar[str] = "forward/mma/mma_sm80.cuh"
    namespace: ClassVar[str] = "mma"
    shared_memory: ClassVar[str] = "Smem"
    more: ClassVar[str] = ", Problems::kPlain"

    def __post_init__(self) -> None:
        object.__setattr__(self, "br", 16 * self.row_warps * self.row_tiles)

    def tile(self, head_dim: int) -> str:
        return (
            f"mma::Tile<mma::{self.machine}, half, mma::TileShape{{{head_dim}, {self.row_warps}, {self.dim_warps}, "
            f"{self.row_tiles}, {self.bc}, {self.stages}, {self.q_steps}, {self.blocks_per_sm}}}>"
        )


@dataclass(frozen=True)
class SimtShape(Shape):
    """An instance of simt."""

    warps: int
    lane_columns: int
    rows: int
    stages: int
    blocks_per_sm: int

    header: ClassVar[str] = "forward/simt/simt.cuh"
    namespace: ClassVar[str] = "simt"
    shared_memory: ClassVar[str] = "SharedMemory"
    dtype: ClassVar[str] = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "br", 32 // self.lane_columns * self.warps * self.rows)

    def tile(self, head_dim: int) -> str:
        return (
            f"simt::Tile<simt::TileShape{{{head_dim}, {self.warps}, {self.lane_columns}, {self.rows}, {self.bc}, "
            f"{self.stages}, {self.blocks_per_sm}}}>"
        )


def wmma_shapes(head_dim: int) -> Iterator[WmmaShape]:
    """Shapes that may be fast, then shapes that show the worth of the padding and of the register handover."""
    for warps, row_tiles, bc, blocks in itertools.product((2, 4, 8), (1, 2), (16, 32, 64), (1, 2, 3, 4)):
        o_registers = row_tiles * head_dim // 2
        if o_registers > 128 or (bc == 16 and head_dim < 128):
            continue
        for q_in_registers in (True, False) if row_tiles * head_dim <= 128 else (False,):
            registers = registers_of_a_thread(32 * warps * blocks)
            needed = o_registers + row_tiles * bc // 2 + (row_tiles * head_dim // 4 if q_in_registers else 0) + 32
            if needed <= registers and (blocks == 1 or registers < MOST_REGISTERS):
                yield WmmaShape(bc, warps, row_tiles, q_in_registers, blocks)
    base = WmmaShape(32, 4, 1, head_dim <= 64, 2)
    yield replace(base, pad=0)
    yield replace(base, handover="Shared")


def mma_shapes(head_dim: int, machine: str) -> Iterator[MmaShape]:
    """Shapes that may be fast: registers for S, O, Q's steps and, on Turing, the next K/V tile; 8 warps per SM."""
    turing = machine == "Sm75"
    layouts = itertools.product((2, 4, 8), (1, 2), (1, 2), (16, 32, 64), (1, 2) if turing else (1, 2, 3))
    for row_warps, dim_warps, row_tiles, bc, stages in layouts:
        warps = row_warps * dim_warps
        if not 4 <= warps <= 8 or bc // dim_warps % 16 or (dim_warps > 1 and head_dim < 128):
            continue
        blocks = 8 // warps
        q_bytes, stage_bytes = 32 * row_warps * row_tiles * head_dim, 4 * bc * head_dim
        if blocks * (q_bytes + stages * stage_bytes) > (64 if turing else 227) * 1024 * (blocks if turing else 1):
            continue
        needed = row_tiles * (head_dim // dim_warps // 2 + bc // dim_warps // 2) + 48
        if turing:
            needed += bc * head_dim // (32 * warps)
        left = registers_of_a_thread(32 * warps * blocks) - needed
        most = min(head_dim // 16, left // (4 * row_tiles))
        if most < 0:
            continue
        for q_steps in sorted({0, most // 3, 2 * most // 3, most}):
            yield MmaShape(bc, row_warps, dim_warps, row_tiles, stages, q_steps, blocks, machine)


def simt_shapes(head_dim: int) -> Iterator[SimtShape]:
    """Shapes that may be fast: registers for S, O and a step's operands; they fit shared memory; 8 warps or more."""
    layouts = itertools.product((4, 8), (8, 16), (4, 8), (16, 32, 64), (1, 2), (1, 2, 3))
    for warps, lane_columns, rows, bc, stages, blocks in layouts:
        if head_dim % (4 * lane_columns) or bc % lane_columns or not 8 <= warps * blocks <= 16:
            continue
        if bc * (8 * warps // (head_dim // 4)) % 8 or (bc == 16 and head_dim < 256):
            continue
        shape = SimtShape(bc, warps, lane_columns, rows, stages, blocks)
        smem = 4 * (shape.br * (head_dim + 4 + bc * 3 // 2) + stages * bc * (2 * head_dim + 4))
        needed = rows * (bc + head_dim) // lane_columns + 4 * rows + 32
        if blocks * (smem + 1024) <= 228 * 1024 and 96 <= needed <= registers_of_a_thread(32 * warps * blocks):
            yield shape


MOST_REGISTERS = 255


def registers_of_a_thread(threads: int) -> int:
    """The registers that an SM's 64 Ki leave to each of so many threads."""
    return min(65536 // threads, MOST_REGISTERS)


SWEEPS: dict[str, Callable[[int], Iterator[Shape]]] = {
    "wmma_v3": wmma_shapes,
    "mma_sm80": partial(mma_shapes, machine="Sm80"),
    "mma_sm75": partial(mma_shapes, machine="Sm75"),
    "simt": simt_shapes,
}


SOURCE = """
{includes}
using namespace flash_wmma;

template <void (*Launch)(const ForwardParams&, Stream)>
int run_tile(const ForwardParams& p, void* stream) try {{
    Launch(p, stream);
    return 0;
}} catch (const std::exception&) {{
    return 1;
}}

static int (*const kRun[])(const ForwardParams&, void*) = {{ {runs} }};
static const void* const kFunctions[] = {{ {functions} }};
static const int kSmem[] = {{ {smems} }};

// Contiguous q, k, v, o (B, H, N, d) of one dtype, lse (B, H, N).
extern "C" int run(int tile, void* q, void* k, void* v, void* o, float* lse, long long b, long long hq, long long hk,
                   long long nq, long long nk, int d, int causal, void* stream) {{
    ForwardParams p{{}};
    p.dtype = p.out_dtype = DType::k{dtype};
    p.batch = b, p.heads_q = hq, p.heads_k = hk, p.seqlen_q = nq, p.seqlen_k = nk, p.head_dim = p.head_dim_v = d;
    p.q = {{q, hq * nq * d, nq * d, d}}, p.o = {{o, hq * nq * d, nq * d, d}};
    p.k = {{k, hk * nk * d, nk * d, d}}, p.v = {{v, hk * nk * d, nk * d, d}};
    p.lse = lse, p.lse_batch = hq * nq, p.lse_head = nq;
    p.scale = 1.f / sqrtf(float(d));
    p.band = {{kUnbounded, causal ? 0 : kUnbounded, false}};
    return kRun[tile](p, stream);
}}
extern "C" int facts(int tile, int* registers, int* local_bytes, int* smem_bytes) {{
    cudaFuncAttributes a;
    if (cudaFuncGetAttributes(&a, kFunctions[tile]) != cudaSuccess) return 1;
    *registers = a.numRegs, *local_bytes = int(a.localSizeBytes), *smem_bytes = kSmem[tile];
    return 0;
}}
"""


def build(library: Path, head_dim: int, tiles: Sequence[Shape], arch: str) -> None:
    """Compiles these shapes into a library of their own."""
    nvcc = find_nvcc()
    if nvcc is None:
        sys.exit("tiles.py build: nvcc not found; set CUDA_HOME or put nvcc on PATH")
    library.parent.mkdir(parents=True, exist_ok=True)
    source = library.with_suffix(".cu")

    def each(code: str) -> list[str]:
        parts = [(t.namespace, t.shared_memory, t.tile(head_dim), t.more) for t in tiles]
        return [
            code.format(space=space, shared_memory=memory, tile=tile, more=more) for space, memory, tile, more in parts
        ]

    headers = sorted({tile.header for tile in tiles} | {"device/sm75.cuh" for tile in tiles if "Sm75" in str(tile)})
    source.write_text(
        SOURCE.format(
            includes="\n".join(f'#include "{header}"' for header in headers),
            runs=", ".join(f"run_tile<{launch}>" for launch in each("{space}::launch_tile<{tile}{more}>")),
            functions=", ".join(f"(const void*)&{function}" for function in each("{space}::forward<{tile}{more}>")),
            dtype=tiles[0].dtype.capitalize(),
            smems=", ".join(f"sizeof({memory})" for memory in each("{space}::{shared_memory}<{tile}>")),
        )
    )
    flags = ["-std=c++20", "-O3", *INCLUDES, "-shared", "-Xcompiler", "-fPIC", f"-arch={arch}"]
    subprocess.run([nvcc, *flags, "--split-compile=0", str(source), "-o", str(library)], check=True)


class Library:
    """A compiled sweep."""

    def __init__(self, path: Path) -> None:
        self._native = ctypes.CDLL(str(path))

    def forward(self, index: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> None:
        """Runs shape `index` on contiguous tensors (B, H, N, d) of its dtype and lse (B, H, N)."""
        import torch

        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (q, k, v, out, lse)]
        lengths = [ctypes.c_longlong(n) for n in (q.size(0), q.size(1), k.size(1), q.size(2), k.size(2))]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self._native.run(index, *pointers, *lengths, q.size(3), int(causal), stream):
            raise RuntimeError(f"shape {index}: launch failed")

    def facts(self, index: int) -> tuple[int, int, int]:
        """Registers per thread, bytes of local memory per thread, bytes of shared memory per block."""
        numbers = [ctypes.c_int() for _ in range(3)]
        self._native.facts(index, *(ctypes.byref(n) for n in numbers))
        registers, local_bytes, smem_bytes = (n.value for n in numbers)
        return registers, local_bytes, smem_bytes


@dataclass(frozen=True)
class Result:
    """One shape as measured."""

    head_dim: int
    shape: Shape
    registers: int
    local_bytes: int
    smem_bytes: int
    us: float
    tflops: float
    over_sdpa: float

    def row(self) -> str:
        return (
            f"{self.head_dim:4} {self.us:8.1f} {self.tflops:7.0f} {self.over_sdpa:6.2f} {self.registers:4} "
            f"{self.local_bytes:5} {self.smem_bytes:6}  {self.shape}"
        )


HEADING = f"{'d':>4} {'us':>8} {'TFLOP/s':>7} {'x SDPA':>6} {'regs':>4} {'local':>5} {'smem':>6}  shape"


def sweep(head_dim: int, args: argparse.Namespace) -> list[Result]:
    """Times every shape of one head dim together with SDPA, its flash backend or for fp32 its memory-efficient one, and
    checks it against that; fastest first."""
    import torch
    import torch.nn.functional as functional

    from harness import timing

    library = Library(library_of(args.kernel, head_dim))
    size = (args.batch, args.heads or max(1, 2048 // head_dim), args.seq_len, head_dim)
    torch.manual_seed(0)
    tiles = list(SWEEPS[args.kernel](head_dim))
    half = tiles[0].dtype == "float16"
    q, k, v = (torch.randn(size, device="cuda", dtype=getattr(torch, tiles[0].dtype)) for _ in range(3))
    lse = torch.empty(size[:3], device="cuda")

    def forward(index: int) -> torch.Tensor:
        out = torch.empty_like(q)
        library.forward(index, q, k, v, out, lse, args.causal)
        return out

    def sdpa() -> torch.Tensor:
        backends = torch.nn.attention.SDPBackend
        with torch.nn.attention.sdpa_kernel(backends.FLASH_ATTENTION if half else backends.EFFICIENT_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=args.causal)

    contenders = {str(i): timing.Contender(partial(forward, i)) for i in range(len(tiles))}
    # A shape that asks for more than the device has fails, and is left out.
    measured = timing.measure(
        {"sdpa": timing.Contender(sdpa), **contenders}, q.device, timing.Method(repeats=args.repeats)
    )
    expected, peer = sdpa().float(), measured.timings["sdpa"]
    flops = 4 * math.prod(size) * args.seq_len * (0.5 if args.causal else 1)
    results = []
    for name, times in measured.timings.items():
        if name == "sdpa":
            continue
        if not (measured.outputs[name].float() - expected).abs().max().item() < (2e-2 if half else 1e-4):
            sys.exit(f"wrong result: d = {head_dim}, {tiles[int(name)]}")
        results.append(
            Result(
                head_dim,
                tiles[int(name)],
                *library.facts(int(name)),
                us=times.median * 1e3,
                tflops=flops / times.median / 1e9,
                over_sdpa=times.speedup_over(peer),
            )
        )
    return sorted(results, key=lambda result: result.us)


def run(args: argparse.Namespace) -> None:
    """Prints each head dim's shapes, fastest first, then the optimum of each."""
    import torch

    print(f"{args.kernel}, {torch.cuda.get_device_name()}, N = {args.seq_len}{', causal' if args.causal else ''}")
    results = {head_dim: sweep(head_dim, args) for head_dim in args.head_dim}
    print(HEADING)
    for rows in results.values():
        print("\n".join(result.row() for result in rows[: args.top]))
    print(f"\nThe optimum of each head dim\n{HEADING}")
    for rows in results.values():
        print(rows[0].row())
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(r) for rows in results.values() for r in rows], indent=1))
    if args.plot:
        plot(results, args.plot)


def plot(results: dict[int, list[Result]], path: str) -> None:
    """TFLOP/s over Br, a panel per head dim and a line per Bc (the best of each), the optimum marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(3 * len(results), 3.2), squeeze=False, layout="constrained")
    for axes, (head_dim, rows) in zip(panels[0], results.items(), strict=True):
        for bc in sorted({row.shape.bc for row in rows}):
            best: dict[int, float] = {}
            for row in (row for row in rows if row.shape.bc == bc):
                best[row.shape.br] = max(best.get(row.shape.br, 0), row.tflops)
            axes.plot(sorted(best), [best[br] for br in sorted(best)], marker="o", label=f"Bc = {bc}")
        axes.plot(rows[0].shape.br, rows[0].tflops, marker="*", markersize=14, color="black", linestyle="none")
        axes.set(title=f"d = {head_dim}", xlabel="Br", ylabel="TFLOP/s", ylim=(0, None))
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    builder, runner = commands.add_parser("build"), commands.add_parser("run")
    for command in (builder, runner):
        command.add_argument("--kernel", choices=SWEEPS, default="mma_sm80")
        command.add_argument("--head-dim", type=int, nargs="+", default=[64])
    builder.add_argument("--arch", help="nvcc -arch (default sm_90; of mma_sm75 compute_75, which is PTX)")
    runner.add_argument("--batch", type=int, default=8)
    runner.add_argument("--heads", type=int, help="default: hidden size 2048")
    runner.add_argument("--seq-len", type=int, default=2048)
    runner.add_argument("--causal", action="store_true")
    runner.add_argument("--repeats", type=int, default=11)
    runner.add_argument("--top", type=int, default=8, help="shapes to print of each head dim")
    runner.add_argument("--json")
    runner.add_argument("--plot")
    rungs.add_arguments(commands.add_parser("rungs", help="Br and Bc of the SIMT ladder (harness/rungs.py)"))
    args = parser.parse_args()
    if args.command == "rungs":
        rungs.run(args)
        return
    if args.command == "run":
        run(args)
        return
    for head_dim in args.head_dim:
        tiles = list(SWEEPS[args.kernel](head_dim))
        library = library_of(args.kernel, head_dim)
        build(library, head_dim, tiles, args.arch or ("compute_75" if args.kernel == "mma_sm75" else "sm_90"))
        print(f"{library}: {len(tiles)} shapes")


if __name__ == "__main__":
    main()
