#!/usr/bin/env python3
"""A kernel idea written, run, checked and profiled without a GPU: the steps of docs/emulator.md, "Ten minutes"."""

from pathlib import Path

import torch

from flash_wmma import emulator

n, d = 100, 64
torch.manual_seed(0)
q, k, v = torch.randn(3, n, d)
o = torch.empty(n, d)
expected = torch.nn.functional.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])[0, 0]

program = emulator.Program(Path(__file__).with_name("first_kernel.cu"))

print("1. A barrier is missing. On a GPU the result may be right all the same.")
try:
    program.call("forgotten", q, k, v, o, n, d**-0.5)
except emulator.EmulatorError as error:
    print(error)

print("\n2. With the barrier, under ten schedules:")
for seed in range(10):
    o.fill_(float("nan"))
    with emulator.settings(seed=seed):
        program.call("conflicts", q, k, v, o, n, d**-0.5)
    torch.testing.assert_close(o, expected, atol=1e-5, rtol=0)
print(f"right: error {(o - expected).abs().max():.1e}")

print("\n3. What it costs:")
for name in ("conflicts", "padded"):
    profile = program.profile(name, q, k, v, o, n, d**-0.5)
    print(f"{name}:")
    print(profile)
