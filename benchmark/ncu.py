#!/usr/bin/env python3
"""One kernel under Nsight Compute: duration, occupancy, bank conflicts, coalescing, tensor-pipe use.

    ./dev ncu wmma_v2 [--dtype fp16] [--batch 2] [--heads 4] [--length 2048] [--head-dim 64] [--causal] [--json FILE]

The kernel runs a few times first; then one call is profiled, with every launch that belongs to it (a conversion of the
inputs, say). Clocks are not locked, so durations are those of a card in normal use.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.profilers import CannotProfile, Launch, argument_parser, call_of, find_ncu, parse_ncu, print_launches

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


def profile(arguments: list[str]) -> list[tuple[str, Launch]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [find_ncu(), "--clock-control", "none", "--profile-from-start", "off", "--csv"]
        command += ["--print-units", "base", "--log-file", str(log), "--metrics", ",".join(METRICS.values())]
        command += [sys.executable, __file__, "--run", *arguments]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        text = log.read_text() if log.exists() else ""
    launches = parse_ncu(text, METRICS)
    if not launches or done.returncode:
        said = "\n".join(line for line in text.splitlines() if line.startswith("=="))
        if "ERR_NVGPUCTRPERM" in text:
            said += (
                "\nThe driver keeps its counters to root: run as root, or set NVreg_RestrictProfilingToAdminUsers=0."
            )
        raise CannotProfile(f"ncu measured nothing (exit status {done.returncode}):\n{said}")
    return launches


def run_kernel(args: argparse.Namespace) -> None:
    """Runs the kernel, under ncu."""
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
    print_launches(args, launches, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
