"""Every CUDA kernel on small problems with edges, to be run under compute-sanitizer:

compute-sanitizer --tool memcheck python tests/sanitize.py
compute-sanitizer --tool racecheck python tests/sanitize.py --kernel wmma_v3
"""

from __future__ import annotations

import argparse
import itertools

import torch

import flash_wmma

CASES = (  # Nq, Nk, options
    (1, 1, {}),
    (17, 33, {"causal": True}),
    (100, 255, {"causal": "bottom_right"}),
    (130, 130, {"window": (40, 20)}),
    (200, 300, {}),
    (70, 130, {"softcap": 5.0, "alibi_slopes": True, "attn_bias": True}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append", default=[], help="that kernel alone; may be repeated")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[32, 64, 72, 128, 192, 256])
    names = parser.parse_args()
    kernels = names.kernel or [kernel.name for kernel in flash_wmma.kernels() if kernel.device == "cuda"]
    calls = dict.fromkeys(kernels, 0)
    for kernel, head_dim in itertools.product(kernels, names.head_dims):
        for dtype, (nq, nk, options) in itertools.product((torch.float32, torch.float16, torch.bfloat16), CASES):
            q = torch.randn(1, 4, nq, head_dim, device="cuda", dtype=dtype)
            k, v = (torch.randn(1, 2, nk, head_dim, device="cuda", dtype=dtype) for _ in range(2))
            # scores that rise from tile to tile defeat the lagged maximum
            k *= torch.linspace(0.5, 40, nk, device="cuda", dtype=dtype)[:, None]
            options = dict(options)
            if "alibi_slopes" in options:
                options["alibi_slopes"] = torch.rand(4, device="cuda")
                options["attn_bias"] = torch.randn(1, 4, nq, nk, device="cuda", dtype=dtype)
            try:
                out = flash_wmma.forward(q, k, v, kernel=kernel, **options)
            except ValueError:
                continue  # not this dtype or head dim
            assert not out.isnan().any()
            calls[kernel] += 1
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            packed = torch.randn(3, 300, 4, head_dim, device="cuda", dtype=dtype)
            offsets = torch.tensor([0, 1, 1, 130, 260], device="cuda", dtype=torch.int32)
            try:
                flash_wmma.forward_varlen(*packed, offsets, offsets, 130, 130, causal=True, kernel=kernel)
            except ValueError:
                continue
            calls[kernel] += 1
    torch.cuda.synchronize()
    print(", ".join(f"{kernel}: {count} calls" for kernel, count in calls.items()))
    assert all(calls.values())


if __name__ == "__main__":
    main()
