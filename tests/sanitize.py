"""Every CUDA kernel, forward and backward, on small problems with edges, to be run under compute-sanitizer:

compute-sanitizer --tool memcheck python tests/sanitize.py
compute-sanitizer --tool racecheck python tests/sanitize.py --kernel wmma_v3 --kernel bwd_sm80

With --device cpu the same calls run in the emulator, under its own checks.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import flash_wmma

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CASES: tuple[tuple[int, int, dict[str, Any]], ...] = (  # Nq, Nk, options
    (1, 1, {}),
    (17, 33, {"causal": True}),
    (100, 255, {"causal": "bottom_right"}),
    (130, 130, {"window": (40, 20)}),
    (200, 300, {}),
    (20, 1100, {"causal": "bottom_right"}),  # keys that blocks share
)
BIAS_SHAPES = ((1, 4, 70, 130), (1, 1, 70, 130), (4, 70, 1), (130,))
"""Whose gradient is a sum over the dimensions that are missing."""
OFFSETS = (0, 1, 1, 130, 260)
"""Of packed sequences in 300 rows."""

Problem = tuple[dict[str, Tensor], dict[str, Any]]
"""What may have a gradient, and the other arguments but for the kernel."""


def problems(head_dim: int, device: str) -> Iterator[Problem]:
    """Of every dtype, with two query heads to a head of k."""

    def inputs(nq: int, nk: int, dtype: torch.dtype) -> dict[str, Tensor]:
        q = torch.randn(1, 4, nq, head_dim, device=device, dtype=dtype)
        k, v = (torch.randn(1, 2, nk, head_dim, device=device, dtype=dtype) for _ in range(2))
        # scores that rise from tile to tile defeat the lagged maximum
        return {"q": q, "k": k * torch.linspace(0.5, 40, nk, device=device, dtype=dtype)[:, None], "v": v}

    offsets = torch.tensor(OFFSETS, device=device, dtype=torch.int32)
    longest = max(end - begin for begin, end in itertools.pairwise(OFFSETS))
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
    for dtype in DTYPES:
        for nq, nk, options in CASES:
            yield inputs(nq, nk, dtype), options
        for shape in BIAS_SHAPES:
            bias = {"attn_bias": torch.randn(shape, device=device, dtype=dtype)}
            yield inputs(70, 130, dtype) | bias, {"softcap": 5.0, "alibi_slopes": torch.rand(4, device=device)}
        packed = {name: t[0].transpose(0, 1) for name, t in inputs(300, 300, dtype).items()}
        yield packed, {**lengths, "causal": True}


def results(problem: Problem, kernels: dict[str, Any]) -> tuple[Tensor, ...]:
    """Out, or the gradients if ``kernels`` names the kernel for them."""
    tensors, options = problem
    attend: Any = flash_wmma.forward_varlen if "cu_seqlens_q" in options else flash_wmma.forward
    if "backward_kernel" not in kernels:
        return (attend(**tensors, **options, **kernels),)
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    out = attend(**leaves, **options, **kernels)
    return torch.autograd.grad(out, tuple(leaves.values()), torch.randn_like(out))


def main(arguments: Sequence[str] | None = None) -> None:
    calls: dict[str, list[dict[str, Any]]] = {  # each kernel's names in a call
        kernel.name: [{"kernel": kernel.name}] for kernel in flash_wmma.kernels() if kernel.min_arch
    } | {
        kernel.name: [{"backward_kernel": kernel.name, "deterministic": flag} for flag in (False, True)]
        for kernel in flash_wmma.kernels("backward")
        if kernel.min_arch
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append", choices=calls, help="that kernel alone; may be repeated")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[32, 64, 72, 128, 192, 256])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args(arguments)
    counts = dict.fromkeys(asked.kernel or calls, 0)
    for name, head_dim in itertools.product(counts, asked.head_dims):
        for problem, kernels in itertools.product(problems(head_dim, asked.device), calls[name]):
            try:
                given = results(problem, kernels)
            except ValueError as error:
                if "cannot run this" not in str(error):
                    raise
                continue  # not this dtype, head dim or feature
            assert not any(t.isnan().any() for t in given)
            counts[name] += 1
    if asked.device == "cuda":
        torch.cuda.synchronize()
    print(", ".join(f"{name}: {count} calls" for name, count in counts.items()))
    assert all(counts.values())


if __name__ == "__main__":
    main()
