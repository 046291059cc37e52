#!/usr/bin/env python3
"""Forward and backward on the CPU beside torch's scaled_dot_product_attention, with any instruction set it has.

    python benchmark/cpu.py                                        bf16, 1,024 keys, 2 rows of 16 heads, d = 64 and 128
    python benchmark/cpu.py --dtype fp32 --sets avx512 avx2 --causal

``auto`` is the set that the library takes by itself; the others are named as ``FLASH_WMMA_CPU_ISA`` names them.
Backward is one ``torch.autograd.grad`` of q, k and v, whose forward pass ran before.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import Tensor

import flash_wmma
from harness.problems import BACKWARD_PRODUCTS, DTYPES, Problem, make_inputs
from harness.program import positive
from harness.timing import Contender, Method, measure

VARIABLE = "FLASH_WMMA_CPU_ISA"


def passes(attend: Callable[..., Tensor], leaves: list[Tensor], causal: bool) -> dict[str, Callable[[], Tensor]]:
    """A call of each pass."""
    out = attend(*leaves, is_causal=causal)
    gradient = torch.randn_like(out)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*leaves, is_causal=causal)

    def backward() -> Tensor:
        return torch.autograd.grad(out, leaves, gradient, retain_graph=True)[0]

    return {"forward": forward, "backward": backward}


def ours(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    out: Tensor = flash_wmma.forward(q, k, v, causal=is_causal)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--head-dims", type=positive, nargs="+", default=[64, 128])
    for name, default in {"length": 1024, "batch": 2, "heads": 16, "repeats": 15}.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--sets", nargs="+", default=["auto"], help=f"auto, or as {VARIABLE} names them")
    options = parser.parse_args()
    device, method = torch.device("cpu"), Method(warmup=3, repeats=options.repeats)
    print(f"{options.dtype}, {options.batch} x {options.heads} heads, {options.length} rows, ", end="")
    print(f"{'causal' if options.causal else 'full'}, {torch.get_num_threads()} threads; {method.describe(device)}")
    print(f"{'d':>4} {'pass':8} {'by':12} {'ms':>8} {'TFLOP/s':>8} {'over torch':>10}")
    for d in options.head_dims:
        problem = Problem(options.batch, options.heads, options.length, d, options.dtype, options.causal)
        leaves = [t.requires_grad_() for t in make_inputs(problem, DTYPES[options.dtype], device, 0)]
        of_pass: dict[str, dict[str, Contender]] = {"forward": {}, "backward": {}}
        for name in ("torch", *options.sets):
            attend = torch.nn.functional.scaled_dot_product_attention if name == "torch" else ours
            named = {} if name in ("torch", "auto") else {VARIABLE: name}
            context = partial(mock.patch.dict, os.environ, named)  # the library reads it at each call
            with context():
                calls = passes(attend, leaves, options.causal)
            for which, call in calls.items():
                of_pass[which][name] = Contender(call, context)
        for which, contenders in of_pass.items():
            measured = measure(contenders, device, method)
            flops = problem.flops * (1.0 if which == "forward" else BACKWARD_PRODUCTS)
            for name, times in measured.timings.items():
                ratio = times.speedup_over(measured.timings["torch"])
                print(f"{d:4} {which:8} {name:12} {times.median:8.2f} {flops / times.median / 1e9:8.2f} {ratio:10.2f}")
            for name, error in measured.failures.items():
                print(f"{d:4} {which:8} {name:12} {error}")


if __name__ == "__main__":
    main()
