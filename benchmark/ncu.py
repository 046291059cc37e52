#!/usr/bin/env python3
"""One kernel under Nsight Compute: duration, occupancy, bank conflicts, coalescing, tensor-pipe use.

    ./dev ncu wmma_v2 [--dtype fp16] [--batch 2] [--heads 4] [--length 2048] [--head-dim 64] [--causal] [--json FILE]

The kernel runs a few times first; then one call is profiled, with every launch that belongs to it (a conversion of the
inputs, say). Clocks are left alone, so durations are those of a card that runs as it does in use.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

METRICS = {
    "duration": "gpu__time_duration.sum",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "conflicts_load": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "conflicts_store": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "wavefronts_load": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "wavefronts_ldsm": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum",
    "wavefronts_store": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "requests_load": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "sectors_load": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "requests_store": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "sectors_store": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor_instructions": "sm__inst_executed_pipe_tensor.sum",
}
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

Launch = dict[str, float]  # the metrics of one launch, by METRICS' keys; absent: not on this device


class CannotProfile(Exception):
    """The profile cannot be taken; the message says why and what to do."""


def parse(text: str, metrics: Mapping[str, str] = METRICS) -> list[tuple[str, Launch]]:
    """ncu's CSV (one row a metric): the launches in order, each with its kernel's name."""
    names = {metric: key for key, metric in metrics.items()}
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, tuple[str, Launch]] = {}
    for row in csv.DictReader(lines[start:]):
        _, values = launches.setdefault(row["ID"], (row["Kernel Name"], {}))
        try:
            values[names[row["Metric Name"]]] = float(row["Metric Value"].replace(",", ""))
        except (KeyError, ValueError):
            continue  # a metric that this device does not have
    return list(launches.values())


def table(metrics: Launch) -> list[tuple[str, str]]:
    def count(key: str) -> str:
        return f"{metrics[key]:,.0f}" if key in metrics else "n/a"

    def percent(key: str) -> str:
        return f"{metrics[key]:.1f} %" if key in metrics else "n/a"

    def per_request(op: str) -> str:
        requests, sectors = metrics.get(f"requests_{op}"), metrics.get(f"sectors_{op}")
        if requests is None or sectors is None:
            return "n/a"
        return f"{sectors / requests:.2f}  ({sectors:,.0f} / {requests:,.0f})" if requests else "no request"

    return [
        ("duration", f"{metrics['duration'] / 1e3:.2f} µs" if "duration" in metrics else "n/a"),
        ("achieved occupancy", percent("occupancy")),
        ("shared-memory bank conflicts, load", count("conflicts_load")),
        ("shared-memory bank conflicts, store", count("conflicts_store")),
        ("shared-memory wavefronts, load", count("wavefronts_load")),
        ("shared-memory wavefronts, ldmatrix", count("wavefronts_ldsm")),
        ("shared-memory wavefronts, store", count("wavefronts_store")),
        ("global sectors per request, load", per_request("load")),
        ("global sectors per request, store", per_request("store")),
        ("tensor pipe, busy", percent("tensor")),
        ("tensor pipe, instructions", count("tensor_instructions")),
    ]


def find() -> str:
    """ncu's path."""
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin:/opt/nvidia/nsight-compute")
    if ncu is None:
        raise CannotProfile(
            "ncu was not found: install Nsight Compute (it comes with the CUDA toolkit) and put it on PATH"
        )
    return ncu


def profile(arguments: list[str]) -> list[tuple[str, Launch]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [find(), "--clock-control", "none", "--profile-from-start", "off", "--csv", "--print-units", "base"]
        command += ["--log-file", str(log), "--metrics", ",".join(METRICS.values())]
        command += [sys.executable, __file__, "--run", *arguments]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        text = log.read_text() if log.exists() else ""
    launches = parse(text)
    if not launches or done.returncode:
        said = "\n".join(line for line in text.splitlines() if line.startswith("=="))
        if "ERR_NVGPUCTRPERM" in text:
            said += (
                "\nThe driver keeps its counters to root: run as root, or set NVreg_RestrictProfilingToAdminUsers=0."
            )
        raise CannotProfile(f"ncu measured nothing (exit status {done.returncode}):\n{said}")
    return launches


def call_of(args: argparse.Namespace) -> Callable[[], None]:
    """The call that is profiled."""
    import torch

    import flash_wmma

    shape = (args.batch, args.heads, args.length, args.head_dim)
    generator = torch.Generator("cuda").manual_seed(0)
    dtype = getattr(torch, DTYPES[args.dtype])
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(3))

    def call() -> None:
        flash_wmma.forward(q, k, v, causal=args.causal, kernel=args.kernel)

    return call


def run_kernel(args: argparse.Namespace) -> None:
    """What runs under ncu."""
    import torch

    call = call_of(args)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def check(kernel: str) -> None:
    try:
        import torch

        import flash_wmma
    except ImportError as missing:
        raise CannotProfile(f"flash_wmma cannot be imported ({missing}): run ./dev ncu {kernel}") from None
    if not torch.cuda.is_available():
        raise CannotProfile("ncu profiles GPU code, and torch sees no GPU here")
    names = [known.name for known in flash_wmma.kernels() if known.name != "cpu"]
    if kernel not in names:
        raise CannotProfile(
            f"kernel: got {kernel!r}, allowed: {', '.join(names) or 'none, this build has no CUDA kernel'}"
        )


def argument_parser(description: str | None, dtype: str) -> argparse.ArgumentParser:
    """What to profile; `dtype` is the default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel")
    parser.add_argument("--dtype", choices=DTYPES, default=dtype)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--json", type=Path, help="write the raw metrics there too")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    return parser


def shape_of(args: argparse.Namespace) -> str:
    """The problem in words."""
    shape = f"B={args.batch} H={args.heads} N={args.length} d={args.head_dim} {args.dtype}"
    return f"{shape}{' causal' if args.causal else ''}"


def report(
    args: argparse.Namespace, launches: list[tuple[str, Launch]], table: Callable[[Launch], list[tuple[str, str]]]
) -> None:
    """Prints the table of each launch; the raw metrics go to ``--json``."""
    print(f"{args.kernel}, {shape_of(args)}: {len(launches)} launch(es) a call")
    for name, metrics in launches:
        rows = table(metrics)
        width = max(len(label) for label, _ in rows) + 2
        print(f"\n{name}")
        for label, value in rows:
            print(f"  {label:{width}}{value}")
    if args.json:
        args.json.write_text(json.dumps([{"name": name, **metrics} for name, metrics in launches], indent=2) + "\n")


def main() -> int:
    args = argument_parser(__doc__, "fp16").parse_args()
    if args.run:
        run_kernel(args)
        return 0
    try:
        check(args.kernel)
        launches = profile(sys.argv[1:])
    except CannotProfile as why:
        print(f"ncu.py: {why}", file=sys.stderr)
        return 2
    report(args, launches, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
