"""What ncu.py and rocprof.py share, and how Nsight Compute is found and read, by calibrate.py and rungs.py too."""

from __future__ import annotations

import argparse
import csv
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

Launch = dict[str, float]
"""The figures of one launch, by the names that the program gives them; a figure that the device lacks is absent."""


class CannotProfile(Exception):
    """The profile cannot be taken; the message says why and what to do."""


def find_ncu() -> str:
    """ncu's path."""
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin:/opt/nvidia/nsight-compute")
    if ncu is None:
        raise CannotProfile(
            "ncu was not found: install Nsight Compute (it comes with the CUDA toolkit) and put it on PATH"
        )
    return ncu


def parse_ncu(text: str, metrics: Mapping[str, str]) -> list[tuple[str, Launch]]:
    """Reads ncu's CSV (one row per metric): the launches in order, each with its kernel's name."""
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


def argument_parser(description: str | None, dtype: str) -> argparse.ArgumentParser:
    """The arguments that say what to profile; `dtype` is the default."""
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


def shape_of(args: argparse.Namespace) -> str:
    """The problem in words."""
    shape = f"B={args.batch} H={args.heads} N={args.length} d={args.head_dim} {args.dtype}"
    return f"{shape}{' causal' if args.causal else ''}"


def print_launches(
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
