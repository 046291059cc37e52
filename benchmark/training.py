"""Time, TFLOP/s and peak memory of attention's forward and backward, one configuration a process, as JSON.

    python benchmark/training.py --batch_size 32 --seq_len 1024 --num_heads 32 --emb_dim 2048 --impl Flash2 --causal

``Pytorch`` is eager matmul, mask, softmax, matmul; ``Flash2`` this library; ``SDPA`` torch's fused attention with the
backend that torch chooses, or ``--sdpa_backend``; which one that was is said on stderr. FLOPs are 4 * B * N^2 * emb_dim
for forward and 2.5 times that for backward, halved under ``--causal``. A time is the median of ``--repeats``, on CUDA
of the device's work between two events, with the host ahead of it; ``forward_backward`` is the sum of both times. MB
are 2^20 bytes: the peak of torch's allocator over a forward and a backward, inputs and gradients included; on the CPU
the largest resident set of the process. Out of memory, the figures are null and ``"error"`` says so.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from harness.contenders import SDPA_BACKENDS, sdpa_choice
from harness.problems import DTYPES
from harness.program import positive

PASSES = ("forward", "backward", "forward_backward")
BACKENDS = {name.removeprefix("sdpa_"): backend for name, backend in SDPA_BACKENDS.items()}
WARM_UP = 3
HEAD_START = 1_000_000
"""Cycles that the device is kept busy before a timed call, half a millisecond: the host has then queued the call."""


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Eager attention, which stores the score matrix."""
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(dim=3) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Torch's fused attention."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def flash2(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """This library's attention."""
    import flash_wmma

    return flash_wmma.forward(q, k, v, causal=causal)


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = {
    "Pytorch": plain,
    "Flash2": flash2,
    "SDPA": sdpa,
}


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: the device's time, without the host's; on the CPU both."""
    if device.type == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
    torch.cuda._sleep(HEAD_START)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def peak_memory(device: torch.device) -> float:
    """The peak in MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The three passes and the memory."""
    batch, n, heads, causal = arguments.batch_size, arguments.seq_len, arguments.num_heads, arguments.causal
    shape = (batch, heads, n, arguments.emb_dim // heads)
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, dtype=DTYPES[arguments.dtype], device=device).requires_grad_() for _ in "qkv")
    dout = torch.randn(shape, dtype=DTYPES[arguments.dtype], device=device)
    attend = IMPLEMENTATIONS[arguments.impl]
    times: dict[str, list[float]] = {"forward": [], "backward": []}

    def forward() -> None:
        nonlocal out
        out = attend(q, k, v, causal)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), dout)

    for turn in range(arguments.repeats + WARM_UP):
        out = torch.empty(0)
        for name, call in (("forward", forward), ("backward", backward)):
            taken = seconds(call, device)
            if turn >= WARM_UP:
                times[name].append(taken)
    flops = 4 * batch * n**2 * arguments.emb_dim * (0.5 if causal else 1)
    taken_in = {name: statistics.median(each) for name, each in times.items()}
    taken_in["forward_backward"] = taken_in["forward"] + taken_in["backward"]
    work = {"forward": flops, "backward": 2.5 * flops, "forward_backward": 3.5 * flops}
    result: dict[str, Any] = {
        name: {"time(s)": taken_in[name], "FLOPS(TFLOPs/s)": work[name] / taken_in[name] / 1e12} for name in PASSES
    }
    result["peak_memory_usage(MB)"] = peak_memory(device)
    if arguments.impl == "SDPA":
        chosen = arguments.sdpa_backend or (sdpa_choice(q, k, v, causal) or "unknown").removeprefix("sdpa_")
        print(f"training: SDPA ran its backend {chosen}", file=sys.stderr)
    return result


def out_of_memory(error: RuntimeError) -> bool:
    """Whether the error says that memory ran out: on the CPU torch has no exception of its own for that."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def run(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The content of the file."""
    try:
        with sdpa_kernel(BACKENDS[arguments.sdpa_backend]) if arguments.sdpa_backend else nullcontext():
            return measure(arguments, device)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        nothing = {name: {"time(s)": None, "FLOPS(TFLOPs/s)": None} for name in PASSES}
        text = str(error).splitlines()[0]
        return {**nothing, "peak_memory_usage(MB)": None, "error": f"out of memory: {text}"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; exits with a message if it is wrong."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("batch_size", 32), ("seq_len", 1024), ("num_heads", 32), ("emb_dim", 2048)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--impl", choices=IMPLEMENTATIONS, default="Flash2")
    parser.add_argument("--sdpa_backend", choices=BACKENDS, help="of --impl SDPA; default: what torch chooses")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repeats", type=positive, default=30)
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    arguments = parser.parse_args(argv)
    if arguments.emb_dim % arguments.num_heads:
        parser.error(f"--emb_dim: got {arguments.emb_dim}, allowed: a multiple of --num_heads, {arguments.num_heads}")
    if arguments.sdpa_backend and arguments.impl != "SDPA":
        parser.error(f"--sdpa_backend: got {arguments.sdpa_backend} with --impl {arguments.impl}, allowed: with SDPA")
    if arguments.output is not None:
        try:
            arguments.output.open("a").close()
        except OSError as error:
            parser.error(f"--output: {arguments.output} cannot be written: {error.strerror}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    arguments = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = run(arguments, device)
    text = json.dumps(result, indent=2)
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text + "\n")
    return int("error" in result)


if __name__ == "__main__":
    sys.exit(main())
