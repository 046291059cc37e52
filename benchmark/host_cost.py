"""What a call costs the host: eager Python to the last launch, with and without gradients, beside SDPA.

    python benchmark/host_cost.py [--device cpu] [--json FILE]

The tensors are so small that the work itself hardly counts, and on a GPU nothing waits for the device: the clock stops
when all is queued. A sample is the mean of ``--calls`` calls; contenders take turns, and a ratio is the median of the
ratios round by round. On the CPU one thread runs, so that no other one is woken.

    forward             inputs that require no gradient
    recorded forward    inputs that require gradients: forward and autograd's record of it
    forward + backward  torch.autograd.grad of q, k and v
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_wmma
from harness import environment, report, timing

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
BASELINE = "sdpa"
ROWS = ("forward", "recorded forward", "forward + backward")


def contenders(device: torch.device) -> dict[str, tuple[Attention, Callable[[], AbstractContextManager[object]]]]:
    """The function of each contender, and a context that is entered before its turn."""
    found: dict[str, tuple[Attention, Callable[[], AbstractContextManager[object]]]] = {
        "flash_wmma": (flash_wmma.forward, nullcontext),
        "flash_wmma, SDPA's form": (flash_wmma.scaled_dot_product_attention, nullcontext),
        BASELINE: (scaled_dot_product_attention, nullcontext),
    }
    if device.type == "cuda":
        found["sdpa_flash"] = (scaled_dot_product_attention, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION))
    return found


def call_of(row: str, attend: Attention, tensors: Sequence[Tensor], dout: Tensor) -> Callable[[], object]:
    """The call of a row."""
    if row == "forward":
        tensors = [t.detach() for t in tensors]
    q, k, v = tensors
    if row == "forward + backward":
        return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
    return lambda: attend(q, k, v)


def microseconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Microseconds of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e6 * taken / calls


def measure(
    row: str, device: torch.device, rounds: int, calls: int, on_round: Callable[[], None] = lambda: None
) -> dict[str, timing.Timing]:
    """Every contender's microseconds."""
    shape, dtype = ((1, 1, 64, 64), torch.float16) if device.type == "cuda" else ((1, 1, 1, 8), torch.float32)
    q, k, v, dout = (torch.randn(shape, dtype=dtype, device=device) for _ in "qkvo")
    inputs = [t.requires_grad_() for t in (q, k, v)]
    found = contenders(device)
    called = {name: call_of(row, attend, inputs, dout) for name, (attend, _) in found.items()}
    samples: dict[str, list[float]] = {name: [] for name in found}
    names = list(found)
    for turn in range(rounds + 3):  # the first three warm up
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with found[name][1]():
                taken = microseconds(called[name], calls, device)
            if turn >= 3:
                samples[name].append(taken)
        on_round()
    return {name: timing.Timing(tuple(each)) for name, each in samples.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=20, help="in a sample")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    torch.set_num_threads(1)

    rows: list[list[str]] = []
    results: dict[str, Any] = {}
    with report.progress() as progress:
        for row in ROWS:
            progress.start(row, arguments.rounds + 3)
            timings = measure(row, device, arguments.rounds, arguments.calls, progress.advance)
            ratios = {name: 1 / each.speedup_over(timings[BASELINE]) for name, each in timings.items()}
            rows.append([row, *(f"{each.median:.1f} ({ratios[name]:.2f})" for name, each in timings.items())])
            results[row] = {
                name: {"us": each.median, "p10": each.p10, "p90": each.p90, f"over {BASELINE}": ratios[name]}
                for name, each in timings.items()
            }
    found = environment.describe(flash_wmma, device)
    print("\n".join(found.lines()))
    title = f"us a call on the host (and how many times {BASELINE}'s)"
    report.Table(title, ["", *contenders(device)], rows).print()
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": found.to_json(), "rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
