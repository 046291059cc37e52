"""Sweep of wmma_v3's tile shapes: warps, row tiles (Br), Bc, Q in registers, padding, the way P is handed over.

    python benchmark/tiles.py build --head-dim 64 128     # needs nvcc; no GPU
    python benchmark/tiles.py run --head-dim 64 128       # needs the GPU; prints the fastest shapes and the optimum
    python benchmark/tiles.py run --head-dim 64 128 --plot tiles.png --json tiles.json

`build` compiles every shape of the sweep into one small library of its own; the table of instances that ships in
csrc/forward/wmma_v3.cu is what this program found.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent


def library_of(head_dim: int) -> Path:
    """Where the sweep for a head dim is compiled to."""
    return ROOT / "build" / "tiles" / f"tiles_d{head_dim}.so"


@dataclass(frozen=True)
class Shape:
    """One instance of the kernel template: the parameters of wmma_v3::Tile."""

    warps: int
    row_tiles: int
    bc: int
    q_in_registers: bool
    blocks_per_sm: int
    handover: str = "Registers"
    pad: int = 8

    @property
    def br(self) -> int:
        return 16 * self.warps * self.row_tiles

    def cpp(self, head_dim: int) -> str:
        """The instance as C++."""
        q = str(self.q_in_registers).lower()
        return (
            f"Tile<half, {head_dim}, {self.warps}, {self.row_tiles}, {self.bc}, {q}, "
            f"{self.blocks_per_sm}, Handover::k{self.handover}, {self.pad}>"
        )


def shapes(head_dim: int) -> Iterator[Shape]:
    """The sweep: what may be fast, then what the padding and the register handover are worth."""
    for warps, row_tiles, bc, blocks in itertools.product((2, 4, 8), (1, 2), (16, 32, 64), (1, 2, 3, 4)):
        o_registers = row_tiles * head_dim // 2
        if o_registers > 128 or (bc == 16 and head_dim < 128):
            continue
        for q_in_registers in (True, False) if row_tiles * head_dim <= 128 else (False,):
            registers = min(65536 // (blocks * warps * 32), 255)
            needed = o_registers + row_tiles * bc // 2 + (row_tiles * head_dim // 4 if q_in_registers else 0) + 32
            if needed <= registers and (blocks == 1 or registers < 255):
                yield Shape(warps, row_tiles, bc, q_in_registers, blocks)
    base = Shape(4, 1, 32, head_dim <= 64, 2)
    yield Shape(**{**asdict(base), "pad": 0})
    yield Shape(**{**asdict(base), "handover": "Shared"})


SOURCE = """
#include "{root}/csrc/forward/wmma_v3.cuh"
using namespace flash_wmma;
using namespace flash_wmma::wmma_v3;

template <class T>
int run_tile(const ForwardParams& p, void* stream) try {{
    wmma_v3::launch_tile<T, false>(p, stream);
    return 0;
}} catch (const std::exception&) {{
    return 1;
}}
template <class T>
int smem() {{ return sizeof(SharedMemory<T>); }}

static int (*const kRun[])(const ForwardParams&, void*) = {{ {runs} }};
static const void* const kFunctions[] = {{ {functions} }};
static int (*const kSmem[])() = {{ {smems} }};

// Contiguous q, k, v, o (B, H, N, d) of half, lse (B, H, N).
extern "C" int run(int tile, void* q, void* k, void* v, void* o, float* lse, long long b, long long hq, long long hk,
                   long long nq, long long nk, int d, int causal, void* stream) {{
    ForwardParams p{{}};
    p.dtype = p.out_dtype = DType::kFloat16;
    p.batch = b, p.heads_q = hq, p.heads_k = hk, p.seqlen_q = nq, p.seqlen_k = nk, p.head_dim = p.head_dim_v = d;
    p.q = {{q, hq * nq * d, nq * d, d}}, p.o = {{o, hq * nq * d, nq * d, d}};
    p.k = {{k, hk * nk * d, nk * d, d}}, p.v = {{v, hk * nk * d, nk * d, d}};
    p.lse = lse;
    p.scale = 1.f / sqrtf(float(d));
    p.band = {{kUnbounded, causal ? 0 : kUnbounded, false}};
    return kRun[tile](p, stream);
}}
extern "C" int facts(int tile, int* registers, int* local_bytes, int* smem_bytes) {{
    cudaFuncAttributes a;
    if (cudaFuncGetAttributes(&a, kFunctions[tile]) != cudaSuccess) return 1;
    *registers = a.numRegs, *local_bytes = int(a.localSizeBytes), *smem_bytes = kSmem[tile]();
    return 0;
}}
"""


def find_nvcc() -> str | None:
    """The toolkit's compiler, or None."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    return str(home) if home.exists() else shutil.which("nvcc")


def build(library: Path, head_dim: int, tiles: list[Shape], arch: str) -> None:
    """Compiles these shapes into a library of their own."""
    nvcc = find_nvcc()
    if nvcc is None:
        sys.exit("tiles.py build: nvcc not found; set CUDA_HOME or put nvcc on PATH")
    library.parent.mkdir(parents=True, exist_ok=True)
    names = [tile.cpp(head_dim) for tile in tiles]
    source = library.with_suffix(".cu")
    source.write_text(
        SOURCE.format(
            root=ROOT,
            runs=", ".join(f"run_tile<{n}>" for n in names),
            functions=", ".join(f"(const void*)&wmma_v3::forward<{n}, false>" for n in names),
            smems=", ".join(f"smem<{n}>" for n in names),
        )
    )
    flags = ["-std=c++17", "-O3", f"-I{ROOT / 'csrc' / 'device'}", "-shared", "-Xcompiler", "-fPIC", f"-arch={arch}"]
    subprocess.run([nvcc, *flags, "--split-compile=0", str(source), "-o", str(library)], check=True)


class Library:
    """A compiled sweep."""

    def __init__(self, path: Path) -> None:
        self._native = ctypes.CDLL(str(path))

    def forward(self, index: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> None:
        """Runs shape `index` on contiguous fp16 tensors (B, H, N, d) and lse (B, H, N), on the current stream."""
        import torch

        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (q, k, v, out, lse)]
        lengths = [ctypes.c_longlong(n) for n in (q.size(0), q.size(1), k.size(1), q.size(2), k.size(2))]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self._native.run(index, *pointers, *lengths, q.size(3), int(causal), stream):
            raise RuntimeError(f"shape {index}: launch failed")

    def facts(self, index: int) -> tuple[int, int, int]:
        """Registers a thread, bytes of local memory a thread, bytes of shared memory a block."""
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
    over_sdpa_flash: float

    def row(self) -> str:
        t = self.shape
        return (
            f"{self.head_dim:4} {t.warps:5} {t.br:4} {t.bc:3} {'regs' if t.q_in_registers else 'smem':>5} "
            f"{t.blocks_per_sm:6} {t.handover:>9} {t.pad:3} {self.registers:4} {self.local_bytes:5} "
            f"{self.smem_bytes:6} {self.us:8.1f} {self.tflops:7.0f} {self.over_sdpa_flash:12.2f}"
        )


HEADING = (
    f"{'d':>4} {'warps':>5} {'Br':>4} {'Bc':>3} {'Q':>5} {'blk/SM':>6} {'P':>9} {'pad':>3} {'regs':>4} {'local':>5} "
    f"{'smem':>6} {'us':>8} {'TFLOP/s':>7} {'x SDPA flash':>12}"
)


def sweep(head_dim: int, args: argparse.Namespace) -> list[Result]:
    """Times every shape of one head dim together with SDPA's flash backend, checked against it; fastest first."""
    import timing
    import torch
    import torch.nn.functional as functional

    library = Library(library_of(head_dim))
    size = (args.batch, args.heads or max(1, 2048 // head_dim), args.seq_len, head_dim)
    torch.manual_seed(0)
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.float16) for _ in range(3))
    lse = torch.empty(size[:3], device="cuda")

    def forward(index: int) -> torch.Tensor:
        out = torch.empty_like(q)
        library.forward(index, q, k, v, out, lse, args.causal)
        return out

    def sdpa() -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=args.causal)

    tiles = list(shapes(head_dim))
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
        if not (measured.outputs[name].float() - expected).abs().max().item() < 2e-2:
            sys.exit(f"wrong result: d = {head_dim}, {tiles[int(name)]}")
        results.append(
            Result(
                head_dim,
                tiles[int(name)],
                *library.facts(int(name)),
                us=times.median * 1e3,
                tflops=flops / times.median / 1e9,
                over_sdpa_flash=times.speedup_over(peer),
            )
        )
    return sorted(results, key=lambda result: result.us)


def run(args: argparse.Namespace) -> None:
    """Prints each head dim's shapes, fastest first, then the optimum of each."""
    import torch

    print(f"{torch.cuda.get_device_name()}, N = {args.seq_len}, fp16{', causal' if args.causal else ''}")
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
        command.add_argument("--head-dim", type=int, nargs="+", default=[64])
    builder.add_argument("--arch", default="sm_90", help="nvcc -arch (default sm_90)")
    runner.add_argument("--batch", type=int, default=8)
    runner.add_argument("--heads", type=int, help="default: hidden size 2048")
    runner.add_argument("--seq-len", type=int, default=2048)
    runner.add_argument("--causal", action="store_true")
    runner.add_argument("--repeats", type=int, default=11)
    runner.add_argument("--top", type=int, default=8, help="shapes to print of each head dim")
    runner.add_argument("--json")
    runner.add_argument("--plot")
    args = parser.parse_args()
    if args.command == "run":
        run(args)
        return
    for head_dim in args.head_dim:
        tiles = list(shapes(head_dim))
        build(library_of(head_dim), head_dim, tiles, args.arch)
        print(f"{library_of(head_dim)}: {len(tiles)} shapes")


if __name__ == "__main__":
    main()
