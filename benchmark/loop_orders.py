"""The global memory traffic of backward's two loop orders, counted by the emulator, beside the algorithm's.

    python benchmark/loop_orders.py [--kernel bwd_sm80] [--seq-len 512] [--head-dim 64] [--arch 90]      # no GPU

One head, not causal, so that every tile takes part. ``fused``: a block owns a tile of Bc keys, streams the queries, and
adds its part of dQ by fp32 atomics. ``split`` (``deterministic=True``): the same without dQ, then blocks that own Br
queries and stream the keys. Bytes are those that the multiprocessors ask for, loads and stores in whole sectors of 32;
caches are not modelled, so this is the traffic of L2. In brackets is what tiles of so many rows must move, without the
rows' statistics: 4 N d + 4 N^2 d / rows read, 4 N^2 d / Bc added. docs/training.md explains the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import flash_wmma
from flash_wmma._figures import Launch, launches_of
from flash_wmma._library import ops
from flash_wmma.emulator._compile import CSRC
from flash_wmma.emulator._runtime import alone, take_profile
from harness import report


def launches(kernel: str, n: int, d: int, arch: int, deterministic: bool) -> list[Launch]:
    """The launches of one backward, with their counts."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, n, d).half() for _ in "qkvo")
    out, lse = ops.forward(q, k, v)
    with alone(), flash_wmma.emulator.settings(mode="checked", counters=True, arch=arch):
        take_profile()  # of whatever ran before
        ops.backward(dout, None, q, k, v, out, lse, deterministic=deterministic, kernel_name=kernel)
        return list(launches_of(take_profile(), arch, CSRC.parent))


PASSES = {"prepare<": "prepare", "Pass)0": "fused", "Pass)1": "keys", "Pass)2": "queries", "finish<": "finish"}


def row(order: str, launch: Launch, n: int, d: int) -> list[str]:
    """The traffic of a launch. The rows of a tile are N divided by the number of blocks."""
    memory = launch.counts.global_memory
    name = next(name for part, name in PASSES.items() if part in launch.function)
    tile = n // launch.grid[0]
    products = name in ("fused", "keys", "queries")
    expected = [
        4 * n * d + 4 * n * n * d // tile if products else None,
        4 * n * n * d // tile if name == "fused" else 0,
    ]
    counted = [memory["load"].bytes + memory["async_copy"].bytes, 128 * launch.counts.instructions.get("atomic", 0)]
    cells = [f"{got:,}" + (f" ({want:,})" if want else "") for got, want in zip(counted, expected, strict=True)]
    return [order, name, str(tile), *cells, f"{memory['store'].bytes:,}", f"{launch.counts.mma:,}"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", default="bwd_sm80")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--arch", type=int, default=90)
    arguments = parser.parse_args(argv)
    n, d = arguments.seq_len, arguments.head_dim
    rows = []
    for order, deterministic in (("fused", False), ("split", True)):
        for launch in launches(arguments.kernel, n, d, arguments.arch, deterministic):
            rows.append(row(order, launch, n, d))
    columns = ["order", "launch", "rows a block", "read, B", "added, B", "written, B", "mma"]
    report.Table(f"{arguments.kernel}, fp16, one head, N = {n}, d = {d}", columns, rows).print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
