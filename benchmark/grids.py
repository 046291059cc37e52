#!/usr/bin/env python3
"""How long each grid of a call takes: what a backward spends beside its products. Needs a GPU.

    python benchmark/grids.py                                  the backward that `auto` takes, 16,384 tokens, fp16
    python benchmark/grids.py --kernels bwd_sm90 bwd_sm80 --head-dims 64 128 --lengths 512

The problems are those of backward.py. Grids of `--calls` calls in a row are timed by torch's profiler, so a card near
its power limit is slower here than in backward.py; each figure is the median in microseconds, and TFLOP/s are those of
the longest grid alone. prepare_beside runs beside the products, which wait for it at first, and finish_beside, which
waits for them at last: their times overlap.
Exit status: 0; 2 if the program cannot run as asked.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from types import ModuleType

import torch

from harness.environment import describe
from harness.problems import BACKWARD_PRODUCTS, DTYPES, Problem, make_inputs
from harness.program import CannotRun, choose_device, load_library, positive
from harness.report import Table
from harness.sweep import HIDDEN, TOKENS


def grids_us(library: ModuleType, problem: Problem, kernel: str, calls: int, seed: int) -> dict[str, float]:
    """Median microseconds of each grid of the gradients, by the name of its kernel function, in the order of launch.
    Those of a call that have the same name are added up."""
    leaves = [t.requires_grad_() for t in make_inputs(problem, DTYPES[problem.dtype], torch.device("cuda"), seed)]
    out = library.forward(*leaves, causal=problem.causal, backward_kernel=kernel)
    gradient = torch.randn_like(out)

    def call() -> None:
        torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = defaultdict(list)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[function_name(event.name)].append(event.device_time)
    return {name: statistics.median(sums_of_calls(samples, calls)) for name, samples in times.items()}


def sums_of_calls(samples: Sequence[float], calls: int) -> list[float]:
    """Of samples in the order of time, as many of each call."""
    each = max(len(samples) // calls, 1)
    return [sum(samples[i : i + each]) for i in range(0, len(samples), each)]


def function_name(signature: str) -> str:
    """The name of a kernel function without its namespaces and template arguments."""
    found = re.search(r"(\w+)(?:<|\(|$)", signature.removeprefix("void ").split("<")[0] + "<")
    return found[1] if found else signature


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--head-dims", nargs="+", type=positive, default=[64, 128], metavar="D")
    parser.add_argument("--lengths", nargs="+", type=positive, default=[512, 2048, 16384], metavar="N")
    parser.add_argument("--kernels", nargs="+", default=["auto"], metavar="NAME")
    parser.add_argument("--calls", type=positive, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the normally distributed inputs")
    options = parser.parse_args(arguments)
    try:
        library = load_library()
        device = choose_device(None)
        if device.type != "cuda":
            raise CannotRun("no CUDA device")
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(describe(library, device).lines()), flush=True)
    rows = []
    for d, n, causal, kernel in itertools.product(options.head_dims, options.lengths, (False, True), options.kernels):
        problem = Problem(TOKENS // n, HIDDEN // d, n, d, options.dtype, causal)
        grids = grids_us(library, problem, kernel, options.calls, options.seed)
        tflops = BACKWARD_PRODUCTS * problem.flops / max(grids.values()) / 1e6
        shown = ", ".join(f"{name} {us:.0f}" for name, us in grids.items())
        rows.append([str(d), str(n), "causal" if causal else "full", kernel, shown, f"{tflops:.0f}"])
    Table("Grids, us", ["d", "N", "mask", "kernel", "grids", "TFLOP/s"], rows).print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
