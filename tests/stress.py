"""Random problems on a GPU, thousands of them: a kernel that hangs, races or loses a key now and then is found here.

    python tests/stress.py [--kernel wgmma_sm90] [--launches 10000] [--seed 0]
    python tests/stress.py --kernel bwd_sm90             gradients

Each problem is launched five times into poisoned memory: right by plain attention in fp32, and every time the same to
the bit, which gradients are in the half of the problems that are deterministic. A hang ends by the caller's timeout.
Exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from reference import Mask, attention, poisoned_memory
from torch import Tensor

import flash_wmma

NAMES = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}
REPEATS = 5
TOLERANCE = {torch.float16: 8e-3, torch.bfloat16: 5e-2}  # of the largest value of an output, or of its terms


def problem(rng: random.Random) -> tuple[tuple[int, ...], torch.dtype, Mask, float]:
    """(B, Hq, Hk, Nq, Nk, d), dtype, mask and scale."""
    d = rng.choice((64, 64, 128, 128, 256, rng.randint(1, 256)))
    heads_k, group = rng.choice((1, 1, 1, 2, 2, 2, 80)), rng.choice((1, 1, 2, 4))  # 80: several items for each block
    nq = rng.choice((rng.randint(1, 64), rng.randint(1, 700)))
    nk = rng.choice((rng.randint(1, 64), rng.randint(1, 700), rng.randint(1024, 3000)))  # so many: in several parts
    masks = (Mask(), Mask("top_left"), Mask("bottom_right"), Mask("bottom_right", (rng.randint(0, 200), 0)))
    shape = (rng.choice((1, 2, 3)), heads_k * group, heads_k, nq, nk, d)
    return shape, rng.choice(list(TOLERANCE)), rng.choice(masks), rng.choice((1 / math.sqrt(d), 1.0, 4.0))


def gradients(out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, dout, retain_graph=True)


def wrong(kernel: str, direction: str, rng: random.Random) -> str:
    """What is wrong with one problem's results; empty if nothing is."""
    (b, hq, hk, nq, nk, d), dtype, mask, scale = problem(rng)
    where: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    q, k, v = (torch.randn(b, h, n, d, **where) for h, n in ((hq, nq), (hk, nk), (hk, nk)))
    exact = [t.float() for t in (q, k, v)]
    if direction == "forward":
        label, repeatable, least = kernel, True, {}
        expected = attention(*exact, mask, scale)

        def call() -> tuple[Tensor, ...]:
            return flash_wmma.forward(q, k, v, scale=scale, kernel=kernel, return_lse=True, **mask._asdict())
    else:
        repeatable = rng.random() < 0.5
        scale = min(scale, 2 / math.sqrt(d))  # with a weight near 1 in each row gradients are differences of equals
        label = kernel + " deterministic" * repeatable
        leaves, exact = ([t.requires_grad_() for t in ts] for ts in ((q, k, v), exact))
        options = {"backward_kernel": kernel, "deterministic": repeatable, **mask._asdict()}
        out = flash_wmma.forward(*leaves, scale=scale, **options)
        dout = torch.randn_like(out)
        expected = gradients(attention(*exact, mask, scale)[0], exact, dout.float())
        # out is rounded, and so is delta: what that may do to dS, times the largest key or query
        rounded = scale * (out.float() * dout.float()).norm(dim=-1).max()
        least = {"dq": rounded * k.abs().max(), "dk": rounded * q.abs().max()}

        def call() -> tuple[Tensor, ...]:
            return gradients(out, leaves, dout)

    label = f"{label} {(b, hq, hk, nq, nk, d)} {dtype} {mask} scale {scale:.3f}"
    results = []
    for _ in range(REPEATS):
        with poisoned_memory():
            results.append(call())
    if repeatable and not all(all(map(torch.equal, results[0], other)) for other in results[1:]):
        return f"{label}: differs from run to run"
    for name, values, right in zip(NAMES[direction], zip(*results, strict=True), expected, strict=True):
        finite = right.isfinite()
        scale_of = right[finite].abs().max().clamp_min(1e-6) if finite.any() else torch.tensor(1.0)
        scale_of = max(scale_of, least.get(name, scale_of))
        for value in values:
            error = ((value - right)[finite].abs().max() / scale_of).item() if finite.any() else 0.0
            if not error <= TOLERANCE[dtype] or not torch.equal(value.isneginf(), right.isneginf()):
                return f"{label}: error {error:.1e} of {name}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kernel", default="wgmma_sm90")
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    direction = (
        "backward" if options.kernel in {kernel.name for kernel in flash_wmma.kernels("backward")} else "forward"
    )
    rng = random.Random(options.seed)
    torch.manual_seed(options.seed)
    problems = -(-options.launches // REPEATS)
    found = [text for text in (wrong(options.kernel, direction, rng) for _ in range(problems)) if text]
    print(*found, f"{problems * REPEATS} launches of {problems} problems, {len(found)} wrong", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
