#!/usr/bin/env python3
"""One kernel on an AMD GPU under rocprof: its counters, and what follows from them and from its time.

    ./dev rocprof simt [--batch 2] [--heads 4] [--length 2048] [--head-dim 64] [--causal] [--json FILE]

The kernel runs a few times; the figures are those of the last call, of every launch that belongs to it. The derived
figures assume instructions of 64 lanes that move 4 bytes each: with fewer active lanes less is done, and an instruction
that moves 16 bytes per lane moves four times as much as they say.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.profilers import CannotProfile, Launch, argument_parser, call_of, print_launches

COUNTERS = {
    "waves": "SQ_WAVES",
    "valu": "SQ_INSTS_VALU",
    "lds": "SQ_INSTS_LDS",
    "vmem_read": "SQ_INSTS_VMEM_RD",
    "vmem_write": "SQ_INSTS_VMEM_WR",
    "lds_active": "SQ_LDS_IDX_ACTIVE",
    "lds_conflicts": "SQ_LDS_BANK_CONFLICT",
}
"""No more than the hardware counts in one run."""
CALLS = 4
LANES, BYTES = 64, 4  # lanes of an instruction; bytes that a lane moves


def parse(text: str, calls: int = CALLS) -> list[tuple[str, Launch]]:
    """Reads rocprof's CSV (one row per dispatch): this project's launches of the last of `calls` equal calls.

    A launch has COUNTERS' keys, and "duration" in ns.
    """
    launches = []
    for row in csv.DictReader(text.splitlines()):
        name = (row.get("KernelName") or "").removesuffix(" [clone .kd]")
        if "flash_wmma::" not in name:
            continue  # torch's own
        values: Launch = {}
        for key, column in {**COUNTERS, "duration": "DurationNs"}.items():
            try:
                values[key] = float(row[column])
            except (KeyError, TypeError, ValueError):
                continue
        if "duration" not in values and row.get("BeginNs") and row.get("EndNs"):  # some versions write no more
            values["duration"] = float(row["EndNs"]) - float(row["BeginNs"])
        launches.append((name, values))
    return launches[len(launches) - len(launches) // calls :]


def table(launch: Launch) -> list[tuple[str, str]]:
    def rate(unit: str, each: int, key: str) -> str:
        if not launch.get("duration") or key not in launch:
            return "n/a"
        return f"{launch[key] * each / launch['duration']:,.1f} {unit}"  # a nanosecond each: 10^9 a second

    def share(part: str, whole: str) -> str:
        if part not in launch or not launch.get(whole):
            return "n/a"
        return f"{100 * launch[part] / launch[whole]:.1f} %"

    counted = [(name, f"{launch[key]:,.0f}" if key in launch else "n/a") for key, name in COUNTERS.items()]
    return [
        ("duration", f"{launch['duration'] / 1e3:.2f} µs" if "duration" in launch else "n/a"),
        *counted,
        (f"VALU, x {LANES} / time", rate("Gop/s", LANES, "valu")),
        (f"LDS, x {LANES} x {BYTES} B / time", rate("GB/s", LANES * BYTES, "lds")),
        (f"VMEM reads, x {LANES} x {BYTES} B / time", rate("GB/s", LANES * BYTES, "vmem_read")),
        (f"VMEM writes, x {LANES} x {BYTES} B / time", rate("GB/s", LANES * BYTES, "vmem_write")),
        ("LDS bank conflicts, of its active cycles", share("lds_conflicts", "lds_active")),
    ]


def find() -> str:
    """rocprof's path."""
    rocprof = shutil.which("rocprof") or shutil.which("rocprof", path="/opt/rocm/bin")
    if rocprof is None:
        raise CannotProfile("rocprof was not found: install rocprofiler (it comes with ROCm) and put it on PATH")
    return rocprof


def profile(arguments: list[str]) -> list[tuple[str, Launch]]:
    with tempfile.TemporaryDirectory() as folder:
        wanted, result = Path(folder) / "counters.txt", Path(folder) / "counters.csv"
        wanted.write_text(f"pmc: {' '.join(COUNTERS.values())}\n")
        command = [find(), "--timestamp", "on", "-i", str(wanted), "-o", str(result)]
        command += [sys.executable, __file__, "--run", *arguments]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        launches = parse(result.read_text()) if result.exists() else []
    if not launches or done.returncode:
        raise CannotProfile(f"rocprof measured nothing (exit status {done.returncode}): what it said is above")
    return launches


def run_kernel(args: argparse.Namespace) -> None:
    """Runs the kernel, under rocprof."""
    import torch

    call = call_of(args)
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()


def check(kernel: str) -> None:
    try:
        import torch

        import flash_wmma
    except ImportError as missing:
        raise CannotProfile(f"flash_wmma cannot be imported ({missing}): run ./dev rocprof {kernel}") from None
    if not torch.version.hip:
        raise CannotProfile(f"rocprof profiles AMD GPUs, and torch {torch.__version__} is not built for ROCm")
    if not torch.cuda.is_available():
        raise CannotProfile("torch sees no AMD GPU here")
    names = [known.name for known in flash_wmma.kernels() if known.name != "cpu"]
    if kernel not in names:
        raise CannotProfile(f"kernel: got {kernel!r}, allowed: {', '.join(names)}")


def main() -> int:
    args = argument_parser(__doc__, "fp32").parse_args()
    if args.run:
        run_kernel(args)
        return 0
    try:
        check(args.kernel)
        launches = profile(sys.argv[1:])
    except CannotProfile as why:
        print(f"rocprof.py: {why}", file=sys.stderr)
        return 2
    print_launches(args, launches, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
