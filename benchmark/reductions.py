"""Bandwidth of flash_wmma.reductions beside torch's own reductions. Needs a GPU.

    python benchmark/reductions.py
    python benchmark/reductions.py --json reductions.json

Every row is one reduction of one array: 2^28 elements, and the rows of (8192, 8192), (2^20, 100) and (64, 2^22 + 1).
Bandwidth counts x once, and once more what softmax writes. The method is harness/timing.py's: contenders take turns,
the ratio is the median over the rounds. All arrays are larger than the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flash_wmma
from flash_wmma import reductions
from harness import environment, timing

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int32": torch.int32}
SHAPES = ((2**28,), (8192, 8192), (2**20, 100), (64, 2**22 + 1))
TARGET = 0.9  #: of torch's bandwidth

Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
ARRAY: dict[str, Pair] = {"max": (reductions.max, torch.amax), "sum": (reductions.sum, torch.sum)}
ROWS: dict[str, Pair] = {
    "row_max": (reductions.row_max, lambda x: torch.amax(x, 1)),
    "row_sum": (reductions.row_sum, lambda x: torch.sum(x, 1)),
    "row_softmax": (reductions.row_softmax, lambda x: torch.softmax(x, 1)),
}


def measured(name: str, pair: Pair, x: Tensor, method: timing.Method) -> dict[str, Any]:
    """A row of the table."""
    ours, theirs = pair
    if not x.dtype.is_floating_point:  # a graph's output is filled with NaN first, and integers have no NaN
        method = replace(method, graph="off")
    found = timing.measure(
        {"flash_wmma": timing.Contender(lambda: ours(x)), "torch": timing.Contender(lambda: theirs(x))},
        x.device,
        method,
    )
    for failure in found.failures.values():
        raise failure
    a, b = found.outputs["flash_wmma"].double(), found.outputs["torch"].double()
    if "sum" in name and x.dtype != torch.int32:  # an error is relative to the sum of absolute values
        allowed: Any = 1e-5 * x.abs().double().sum() / b.numel() + 1e-2 * b.abs()
        assert ((a - b).abs() <= allowed).all(), name
    else:
        torch.testing.assert_close(a, b, rtol=1e-2 if "softmax" in name else 0, atol=1e-6 if "softmax" in name else 0)
    moved = x.nbytes * (2 if "softmax" in name else 1)
    t = found.timings
    return {
        "reduction": name,
        "shape": list(x.shape),
        "dtype": str(x.dtype).removeprefix("torch."),
        "gb_per_s": {n: moved / (1e6 * t[n].median) for n in t},
        "ratio": t["flash_wmma"].speedup_over(t["torch"]),
        "clock": found.clock,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--repeats", type=int, default=21)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmark/reductions.py needs a GPU")
    device = torch.device("cuda")
    method = timing.Method(warmup=3, repeats=args.repeats)
    head = [*environment.describe(flash_wmma, device).lines(), f"method    {method.describe(device)}"]
    print("\n".join(head))
    rows = []
    for shape in SHAPES:
        for dtype in DTYPES.values():
            x = torch.randn(shape, device=device)
            x = (x * 1e6).to(dtype) if dtype == torch.int32 else x.to(dtype)
            for name, pair in (ARRAY if len(shape) == 1 else ROWS).items():
                if name == "row_softmax" and dtype == torch.int32:
                    continue
                row = measured(name, pair, x, method)
                rows.append(row)
                speeds = ", ".join(f"{n} {speed:6.0f} GB/s" for n, speed in row["gb_per_s"].items())
                below = "" if row["ratio"] >= TARGET else f"  below {TARGET}"
                print(f"{name:12} {shape!s:16} {row['dtype']:9} {speeds}, ratio {row['ratio']:.2f}{below}")
            del x
    if args.json:
        args.json.write_text(json.dumps({"environment": head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
