"""Br and Bc of the SIMT ladder: the effect of a tile's size on time, occupancy and memory. Called as

    python benchmark/tiles.py rungs                  # with a GPU: Nsight Compute's counters; without: the emulator's
    python benchmark/tiles.py rungs --plot rungs.png --json rungs.json

The kernel is simt_padded, one thread per score, with Br in {4, 8, 16, 32} and Bc in {16, 32}, on wavefronts of 64
lanes also 64. Without a GPU there is no time: wavefronts of shared memory, sectors and conflicts are the emulator's,
the occupancy is the theoretical one with its limits, and SM efficiency says how full the grid's waves are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .nvcc import INCLUDES, find_nvcc
from .profilers import find_ncu, parse_ncu

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "tiles"
LADDER = (
    "simt_naive",
    "simt_coalesced",
    "simt_block",
    "simt_shared",
    "simt_padded",
    "simt_occupancy",
    "simt_registers",
    "simt",
)

METRICS = {
    "time": "gpu__time_duration.sum",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm_efficiency": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "branch_efficiency": "smsp__sass_average_branch_targets_threads_uniform.pct",
    "sectors_load": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "sectors_store": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "wavefronts_load": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "wavefronts_store": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared_efficiency": "smsp__sass_average_data_bytes_per_wavefront_mem_shared.pct",
    "conflicts_load": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "conflicts_store": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "integer": "smsp__sass_thread_inst_executed_op_integer_pred_on.sum",
    "ffma": "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    "fadd": "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",
    "fmul": "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum",
}


@dataclass(frozen=True)
class Row:
    """One tile. ``None``: not known without a GPU."""

    br: int
    bc: int
    us: float | None
    """Time."""
    occupancy: float
    """Percent of an SM's warps: achieved, or without a GPU the most possible."""
    limiter: str
    """The limits of the theoretical occupancy."""
    sm_efficiency: float
    """Percent of the time, or without a GPU of the places for blocks, in which SMs have work."""
    branch_efficiency: float
    """Percent of branches at which a warp stays together."""
    global_bytes: float
    """Bytes moved between SMs and L2."""
    shared_wavefronts: float
    shared_efficiency: float
    """Percent of the bytes that the wavefronts could have moved."""
    bank_conflicts: float
    integer: float | None
    """Integer instructions of threads."""
    flops: float

    def per_second(self, amount: float | None) -> float | None:
        return None if amount is None or self.us is None else amount / self.us * 1e6


def pairs(warp_size: int) -> list[tuple[int, int]]:
    """(Br, Bc): Bc lanes of one warp, and at most 1024 threads."""
    keys = (16, 32, 64) if warp_size == 64 else (16, 32)
    return [(br, bc) for br, bc in itertools.product((4, 8, 16, 32), keys) if br * bc <= 1024]


SOURCE = """
#include <entry.h>

#include "forward/simt/shared_rung.cuh"

using namespace flash_wmma;

template <int Br, int Bc>
void attend(float* q, float* k, float* v, float* o, float* lse, int batch, int heads, int n) {{
    ForwardParams p{{}};
    p.dtype = p.out_dtype = DType::kFloat32;
    p.batch = batch, p.heads_q = p.heads_k = heads, p.seqlen_q = p.seqlen_k = n, p.head_dim = p.head_dim_v = {d};
    const Rows rows{{nullptr, std::int64_t{{heads}} * n * {d}, std::int64_t{{n}} * {d}, {d}}};
    p.q = p.k = p.v = p.o = rows;
    p.q.data = q, p.k.data = k, p.v.data = v, p.o.data = o;
    p.lse = lse, p.lse_batch = heads * n, p.lse_head = n;
    p.scale = 1.f / sqrtf({d}.f);
    p.band = {{kUnbounded, kUnbounded, false}};
    simt::launch_shared<simt::SharedRung<{d}, Br, Bc, 1, false>>(p, DeviceFacts{{}}, nullptr);
}}
{entries}
"""


def write_source(head_dim: int, warp_size: int = 32) -> Path:
    """A program with every tile of the sweep, for nvcc and for the emulator."""
    tiles = pairs(warp_size)
    entries = "\n".join(f'const Entry k{br}x{bc}("{br}x{bc}", attend<{br}, {bc}>);' for br, bc in tiles)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"rungs_d{head_dim}_{warp_size}.cu"
    path.write_text(SOURCE.format(d=head_dim, entries=entries))
    return path


def smem_bytes(br: int, bc: int, d: int) -> int:
    return 4 * (br * d + bc * (d + 1) + bc * d)


def emulated(args: argparse.Namespace) -> list[Row]:
    """The sweep in the emulator, on a few rows: counts grow with them."""
    import torch

    from flash_wmma import theoretical_occupancy
    from flash_wmma.emulator import Program, settings

    d, n, heads = args.head_dim, args.seq_len, args.heads
    rows = []
    with settings(arch=args.arch, warp_size=args.warp_size):
        program = Program(write_source(d, args.warp_size))
        for br, bc in pairs(args.warp_size):
            q, k, v = torch.randn(3, 1, heads, n, d, generator=torch.Generator().manual_seed(0))
            out, lse = torch.empty_like(q), torch.empty(1, heads, n)
            counts = program.profile(f"{br}x{bc}", q, k, v, out, lse, 1, heads, n).counts
            torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
            occupancy = theoretical_occupancy(args.arch, br * bc, args.registers, smem_bytes(br, bc, d))
            blocks, places = args.batch * heads * math.ceil(n / br), max(1, occupancy.blocks) * args.sm_count
            shared, warps = counts.shared, heads * math.ceil(n / br) * math.ceil(br * bc / args.warp_size)
            tiles = math.ceil(n / bc)
            rows.append(
                Row(
                    br=br,
                    bc=bc,
                    us=None,
                    occupancy=occupancy.percent,
                    limiter=", ".join(occupancy.limiters),
                    sm_efficiency=100 * blocks / (math.ceil(blocks / places) * places),
                    branch_efficiency=100 * (1 - counts.divergent_branches / max(1, warps * tiles * (d + bc))),
                    global_bytes=counts.global_.bytes,
                    shared_wavefronts=shared.wavefronts,
                    shared_efficiency=100 * shared.ideal_wavefronts / max(1, shared.wavefronts),
                    bank_conflicts=shared.bank_conflicts,
                    integer=None,
                    flops=4.0 * heads * n * n * d,
                )
            )
    return rows


def profiled(args: argparse.Namespace) -> list[Row]:
    """The sweep under Nsight Compute."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [find_ncu(), "--clock-control", "none", "--profile-from-start", "off", "--csv"]
        command += ["--print-units", "base", "--log-file", str(log), "--metrics", ",".join(METRICS.values())]
        sizes = (args.head_dim, args.batch, args.heads, args.seq_len)
        command += [sys.executable, "-m", "harness.rungs", "--launch", *map(str, sizes)]
        subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
        return rows_of(log.read_text(), args)


def rows_of(csv: str, args: argparse.Namespace) -> list[Row]:
    """The rows from ncu's output, one launch per tile."""
    from flash_wmma import theoretical_occupancy

    rows = []
    for (br, bc), (_, m) in zip(pairs(32), parse_ncu(csv, METRICS), strict=True):
        occupancy = theoretical_occupancy(args.arch, br * bc, args.registers, smem_bytes(br, bc, args.head_dim))
        rows.append(
            Row(
                br=br,
                bc=bc,
                us=m["time"] / 1e3,
                occupancy=m["occupancy"],
                limiter=", ".join(occupancy.limiters),
                sm_efficiency=m["sm_efficiency"],
                branch_efficiency=m["branch_efficiency"],
                global_bytes=32 * (m["sectors_load"] + m["sectors_store"]),
                shared_wavefronts=m["wavefronts_load"] + m["wavefronts_store"],
                shared_efficiency=m["shared_efficiency"],
                bank_conflicts=m["conflicts_load"] + m["conflicts_store"],
                integer=m["integer"],
                flops=2 * m["ffma"] + m["fadd"] + m["fmul"],
            )
        )
    return rows


def library(head_dim: int) -> Path:
    return FOLDER / f"rungs_d{head_dim}.so"


def build(args: argparse.Namespace) -> None:
    """Compiles the sweep for a GPU."""
    nvcc = find_nvcc()
    if nvcc is None:
        sys.exit("tiles.py rungs: nvcc not found; set CUDA_HOME or put nvcc on PATH")
    flags = ["-std=c++20", "-O3", *INCLUDES, "-shared", "-Xcompiler", "-fPIC"]
    source, arch = write_source(args.head_dim), f"-arch=sm_{args.arch}"
    subprocess.run([nvcc, *flags, arch, str(source), "-o", str(library(args.head_dim))], check=True)


def launch_all(d: int, batch: int, heads: int, n: int) -> None:
    """Runs under ncu: every tile once, after one call that is not profiled."""
    import ctypes

    import torch

    from flash_wmma.emulator._program import argument_of, call_entry

    native = ctypes.CDLL(str(library(d)))
    q, k, v = torch.randn(3, batch, heads, n, d, device="cuda")
    out, lse = torch.empty_like(q), torch.empty(batch, heads, n, device="cuda")
    pointers = [argument_of(str(i), t.data_ptr()) for i, t in enumerate((q, k, v, out, lse))]
    sizes = [argument_of(name, value) for name, value in (("batch", batch), ("heads", heads), ("n", n))]
    for profiled_call in (False, True):
        if profiled_call:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        for br, bc in pairs(32):
            if error := call_entry(native, f"{br}x{bc}", [*pointers, *sizes]):
                sys.exit(error)
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def ladder_times(args: argparse.Namespace) -> dict[str, float]:
    """Microseconds of every rung, at the sweep's shape."""
    import torch

    import flash_wmma

    from . import timing

    q, k, v = torch.randn(3, args.batch, args.heads, args.seq_len, args.head_dim, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        name: lambda name=name: flash_wmma.forward(q, k, v, kernel=name)  # type: ignore[misc]
        for name in LADDER
    }
    measured = timing.measure({name: timing.Contender(call) for name, call in calls.items()}, q.device)
    return {name: times.median * 1e3 for name, times in measured.timings.items()}


def columns(row: Row) -> dict[str, str]:
    def number(value: float | None, scale: float = 1, digits: int = 1) -> str:
        return "" if value is None else f"{value / scale:,.{digits}f}"

    return {
        "Br": str(row.br),
        "Bc": str(row.bc),
        "us": number(row.us),
        "occupancy %": number(row.occupancy),
        "limited by": row.limiter,
        "SM eff. %": number(row.sm_efficiency),
        "branch eff. %": number(row.branch_efficiency),
        "global MB": number(row.global_bytes, 1e6),
        "global GB/s": number(row.per_second(row.global_bytes), 1e9),
        "shared wavefronts": number(row.shared_wavefronts, 1, 0),
        "shared GB/s": number(row.per_second(128 * row.shared_wavefronts), 1e9),
        "shared eff. %": number(row.shared_efficiency),
        "conflicts": number(row.bank_conflicts, 1, 0),
        "int Gop/s": number(row.per_second(row.integer), 1e9),
        "GFLOP/s": number(row.per_second(row.flops), 1e9),
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, without columns in which nothing is known."""
    cells = [columns(row) for row in rows]
    heading = [key for key in cells[0] if any(line[key] for line in cells)]
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    return "\n".join(lines + ["| " + " | ".join(line[key] for key in heading) + " |" for line in cells])


def suggested_keys(head_dim: int, smem_floats: int) -> int:
    """FlashAttention's Bc = ceil(M / 4 d), where fast memory holds M floats."""
    return math.ceil(smem_floats / (4 * head_dim))


def plot(rows: Sequence[Row], ladder: Mapping[str, float], suggested: int, path: str) -> None:
    """Br against occupancy and throughput, the Bc side by side, the ladder's cumulative speed-up, and the Bc that
    FlashAttention's paper takes against the fastest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = rows[0].us is not None
    what = "GFLOP/s" if timed else "FLOP a shared-memory wavefront"

    def speed(row: Row) -> float:
        return (row.per_second(row.flops) or 0) / 1e9 if timed else row.flops / row.shared_wavefronts

    figure, ((left, right), (bars, keys)) = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    heights, widths = sorted({row.br for row in rows}), sorted({row.bc for row in rows})
    at = {(row.br, row.bc): row for row in rows}
    for bc in widths:
        here = [br for br in heights if (br, bc) in at]
        left.plot(here, [at[br, bc].occupancy for br in here], marker="o", label=f"Bc = {bc}")
    left.set(xlabel="Br", ylabel="occupancy, %", ylim=(0, 105), title="Occupancy")
    for i, bc in enumerate(widths):
        here = [br for br in heights if (br, bc) in at]
        places = [heights.index(br) + 0.8 / len(widths) * i for br in here]
        right.bar(places, [speed(at[br, bc]) for br in here], 0.8 / len(widths), label=f"Bc = {bc}", align="edge")
    right.set_xticks([i + 0.4 for i in range(len(heights))], [str(br) for br in heights])
    right.set(xlabel="Br", ylabel=what, title="Throughput")
    if ladder:
        first = ladder[LADDER[0]]
        drawn = bars.bar([name.removeprefix("simt_") for name in ladder], [first / us for us in ladder.values()])
        bars.bar_label(drawn, fmt="%.1f")
        bars.tick_params(axis="x", rotation=30)
        bars.set(yscale="log", ylabel="times simt_naive's speed", title="The ladder")
    else:
        bars.text(0.5, 0.5, "times need a GPU", ha="center", transform=bars.transAxes)
        bars.set_axis_off()
    best = {bc: max(speed(row) for row in rows if row.bc == bc) for bc in widths}
    keys.plot(widths, [best[bc] for bc in widths], marker="o", label="fastest Br")
    keys.axvline(suggested, color="black", linestyle="--", label=f"⌈M/4d⌉ = {suggested}")
    keys.set(xscale="log", xlabel="Bc", ylabel=what, ylim=(0, None), title="FlashAttention's Bc")
    for axes in (left, right, keys):
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def run(args: argparse.Namespace) -> None:
    import torch

    on_gpu = torch.cuda.is_available() and not torch.version.hip  # under Nsight Compute
    if torch.cuda.is_available() and torch.version.hip:
        args.warp_size = torch.cuda.get_device_properties("cuda").warp_size
    if on_gpu:
        major, minor = torch.cuda.get_device_capability()
        args.arch = 10 * major + minor
        if not library(args.head_dim).exists():
            build(args)
    rows = profiled(args) if on_gpu else emulated(args)
    ladder = ladder_times(args) if on_gpu else {}
    where = torch.cuda.get_device_name() if on_gpu else f"emulated, sm_{args.arch}, wavefront of {args.warp_size}"
    report(rows, ladder, where, args)


def report(rows: Sequence[Row], ladder: Mapping[str, float], where: str, args: argparse.Namespace) -> None:
    """Prints the tables, and writes the files that were asked for."""
    print(f"simt_padded's tiles, {where}: B = {args.batch}, H = {args.heads}, N = {args.seq_len}, d = {args.head_dim}")
    print(table(rows))
    optin = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 120: 99}.get(args.arch, 64)
    suggested = suggested_keys(args.head_dim, 256 * optin)
    best = min(rows, key=lambda row: row.us if row.us is not None else row.shared_wavefronts)
    least = "fastest" if best.us is not None else "least wavefronts"
    print(f"\nBc = ceil(M / 4 d), M = {optin} KiB: {suggested}; {least}: Br = {best.br}, Bc = {best.bc}")
    for name, us in ladder.items():
        print(f"{name:16} {us:10.1f} us {ladder[LADDER[0]] / us:8.1f} x simt_naive")
    if args.json:
        text = json.dumps({"where": where, "rows": [asdict(row) for row in rows], "ladder_us": ladder}, indent=1)
        Path(args.json).write_text(text + "\n")
    if args.plot:
        plot(rows, ladder, suggested, args.plot)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--arch", type=int, default=75, help="the emulated architecture")
    parser.add_argument("--sm-count", type=int, default=40, help="its multiprocessors")
    parser.add_argument("--warp-size", type=int, choices=(32, 64), default=32, help="its lanes a warp")
    parser.add_argument("--registers", type=int, help="of a thread, for the theoretical occupancy; default: unknown")
    parser.add_argument("--json")
    parser.add_argument("--plot")


if __name__ == "__main__" and sys.argv[1:2] == ["--launch"]:
    launch_all(*map(int, sys.argv[2:]))
