#!/usr/bin/env python3
"""Ring and Ulysses attention over the GPUs of a host, or of several: time, and efficiency against one GPU alone.

    torchrun --nproc-per-node 2 benchmark/ring.py                       8 Ki tokens a GPU, causal, bf16
    torchrun --nproc-per-node 2 benchmark/ring.py --tokens 32768 --json ring.json
    torchrun --nproc-per-node 4 benchmark/ring.py --window 4096         time per token, which should not grow
    python benchmark/ring.py --processes 2 --device cpu --tokens 256    a dry run by gloo, two processes of its own

Efficiency is the time that one GPU needs for its share of the FLOPs, over the ring's. The share is timed as one call of
flash_wmma.forward of the length whose FLOPs come closest, on every GPU at the same time, and scaled by the rest. A time
is that of the slowest rank, between two events on CUDA, of ``--in-a-row`` calls, as in training, where the host runs
ahead of the GPU; the median of ``--repeats``. Contenders take turns. The results are checked against one call over the
whole sequence. Exit status: 0; 1 if they differ; 2 if it cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from harness import environment
from harness.problems import BACKWARD_PRODUCTS, DTYPES
from harness.program import CannotRun, integers, load_library, positive
from harness.report import Table, milliseconds

WARM_UP = 3
STEP = 64
"""One GPU's length is a multiple of this."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Of results in units of the largest value."""
COLUMNS = ("tokens a rank", "pass", "by", "ms", "TFLOP/s a rank", "efficiency", "error")
PASSES = ("forward", "forward + backward")


class Sizes(NamedTuple):
    """A problem."""

    tokens: int
    """On each rank."""
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool
    window: int | None
    layout: str

    def pairs(self, n: int) -> int:
        """Scores of a sequence of n that the mask leaves."""
        if self.window is not None:
            w = min(self.window, n - 1)
            before = w * (w + 1) // 2 + (n - w) * (w + 1) - n  # without the queries themselves
            return n + (before if self.causal else 2 * before)
        return n * (n + 1) // 2 if self.causal else n * n

    def flops(self, n: int) -> float:
        """Of forward."""
        return 4.0 * self.heads * self.head_dim * self.pairs(n)

    def length_alone(self, world: int) -> int:
        """A length whose FLOPs are about a rank's share."""
        share = self.pairs(self.tokens * world) / world
        low, high = 1, self.tokens * world
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.pairs(middle) < share else (low, middle)
        return max(STEP, round(low / STEP) * STEP)

    def options(self) -> dict[str, Any]:
        """Of the functions."""
        right = None if self.causal else self.window
        return {"causal": self.causal, "window": None if self.window is None else (self.window, right)}


def inputs(sizes: Sizes, n: int, arguments: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of out for a sequence of n, the same on every rank."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, heads, n, sizes.head_dim) for heads in (sizes.heads, *2 * [sizes.heads_kv], sizes.heads)]
    made = [torch.randn(shape, generator=generator, device=device, dtype=torch.float32) for shape in shapes]
    return [t.to(DTYPES[arguments.dtype]) for t in made]


def milliseconds_of(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Of one call of several in a row, begun by all ranks together; the time of the slowest."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        taken = start.elapsed_time(end) / calls
    else:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        taken = 1e3 * (time.perf_counter() - begin) / calls
    slowest = torch.tensor(taken, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def worst_error(sizes: Sizes, whole: list[Tensor], results: dict[str, list[Tensor]], library: Any) -> dict[str, float]:
    """Of out and the gradients, against one call over the whole sequence, on the rank where it is largest."""
    leaves = [t.clone().requires_grad_() for t in whole[:3]]
    out = library.forward(*leaves, **sizes.options())
    expected = [out.detach(), *torch.autograd.grad(out, leaves, whole[3])]
    found = {}
    for name, got in results.items():
        errors = []
        for mine, exact in zip(got, expected, strict=True):
            rows = library.distributed.shard_sequence(exact, dim=2, layout=sizes.layout)
            errors.append((mine.float() - rows.float()).abs().max() / exact.float().abs().max())
        worst = torch.stack(errors).max()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        found[name] = float(worst)
    return found


def turns(names: list[str], count: int) -> Iterator[tuple[int, str]]:
    """The number of each turn with each name. Turns begin with one after the other, and every second is reversed: so no
    name always comes behind the same."""
    for turn in range(count):
        first = turn // 2 % len(names)
        order = names[first:] + names[:first]
        yield from ((turn, name) for name in (reversed(order) if turn % 2 else order))


def measure(sizes: Sizes, arguments: argparse.Namespace, device: torch.device, library: Any) -> dict[str, Any]:
    """The times of one problem."""
    world = dist.get_world_size()
    n, alone = sizes.tokens * world, sizes.length_alone(world)
    whole = inputs(sizes, n, arguments, device)
    mine = [library.distributed.shard_sequence(t, dim=2, layout=sizes.layout) for t in whole]
    told = {**sizes.options(), "seq_len": n, "layout": sizes.layout}
    small = inputs(sizes, alone, arguments, device)
    attentions: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "one GPU": (lambda *t: library.forward(*t, **sizes.options()), small),
        "ring": (lambda *t: library.distributed.ring_attention(*t, **told), mine),
    }
    if sizes.heads >= world:
        ulysses = library.distributed.ulysses_attention
        attentions["ulysses"] = (lambda *t: ulysses(*t, **told), mine)

    def both(attend: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]

    results = {name: both(*given) for name, given in attentions.items() if name != "one GPU"}
    errors = {} if arguments.unchecked else worst_error(sizes, whole, results, library)
    del results, whole
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for name, (attend, tensors) in attentions.items():
        calls[name, PASSES[0]] = lambda attend=attend, tensors=tensors: attend(*tensors[:3])
        calls[name, PASSES[1]] = lambda attend=attend, tensors=tensors: both(attend, tensors)
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for what in PASSES:  # apart: a backward pass slows what comes behind it
        for turn, name in turns(list(attentions), arguments.repeats + WARM_UP):
            taken = milliseconds_of(calls[name, what], device, arguments.in_a_row)
            if turn >= WARM_UP:
                samples[name, what].append(taken)
    scale = sizes.flops(n) / world / sizes.flops(alone)
    return {
        **sizes._asdict(),
        "world": world,
        "length_alone": alone,
        "share_over_alone": scale,
        "errors": errors,
        "samples_ms": {f"{name}, {what}": each for (name, what), each in samples.items()},
        "median_ms": {f"{name}, {what}": statistics.median(each) for (name, what), each in samples.items()},
    }


def lines(row: dict[str, Any], sizes: Sizes) -> Iterator[list[str]]:
    """One for each pass and contender."""
    world, medians = row["world"], row["median_ms"]
    for what in PASSES:
        alone = medians[f"one GPU, {what}"] * row["share_over_alone"]
        flops = sizes.flops(sizes.tokens * world) / world * (1 if what == PASSES[0] else 1 + BACKWARD_PRODUCTS)
        for name in ("one GPU", "ring", "ulysses"):
            if f"{name}, {what}" not in medians:
                continue
            taken = alone if name == "one GPU" else medians[f"{name}, {what}"]
            error = row["errors"].get(name)
            yield [
                str(sizes.tokens),
                what,
                name,
                milliseconds(taken),
                f"{flops / taken / 1e9:.3g}",
                "" if name == "one GPU" else f"{alone / taken:.3f}",
                "" if error is None else f"{error:.1e}",
            ]


def run(arguments: argparse.Namespace) -> int:
    """What one rank does."""
    library = load_library()
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))
    if arguments.device == "cuda":
        if local >= torch.cuda.device_count():
            raise CannotRun(f"rank {local} of this host has no GPU: there are {torch.cuda.device_count()}")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    layout = arguments.layout or ("zigzag" if arguments.window is None else "contiguous")
    rows, wrong, printed = [], [], []
    for tokens in arguments.tokens:
        shape = (tokens, arguments.heads, arguments.heads_kv, arguments.head_dim)
        sizes = Sizes(*shape, not arguments.full, arguments.window, layout)
        row = measure(sizes, arguments, device, library)
        rows.append(row)
        wrong += [name for name, error in row["errors"].items() if not error <= TOLERANCE[DTYPES[arguments.dtype]]]
        printed += lines(row, sizes)
    if first:
        described = environment.describe(library, device)
        mask = "no mask" if arguments.full else "causal"
        mask += "" if arguments.window is None else f", window {arguments.window}"
        heads = f"{arguments.heads} heads of q, {arguments.heads_kv} of k and v"
        print(*described.lines(), sep="\n")
        print(f"ranks     {world}, torch.distributed by {dist.get_backend_config()}")
        print(f"inputs    B 1, {heads}, d {arguments.head_dim}, {arguments.dtype}, {mask}")
        print(f"rows      {layout}")
        method = f"the slowest rank, {arguments.in_a_row} calls in a row, median of {arguments.repeats}"
        print(f"method    {method}; one GPU: its share of the FLOPs")
        Table("\nAttention over ranks", COLUMNS, printed).print()
        if arguments.json:
            content = {"environment": described.to_json(), "dtype": arguments.dtype, "rows": rows}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")
        if wrong:
            print(f"wrong results: {', '.join(dict.fromkeys(wrong))}", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()
    return int(bool(wrong))


def run_rank(rank: int, arguments: argparse.Namespace, port: str) -> None:
    """One of the program's own processes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    status = run(arguments)
    if status:
        raise SystemExit(status)


def free_port() -> str:
    """A port for the processes to meet at."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--tokens", type=integers, default=[8192], help="on each rank: 8192,32768")
    parser.add_argument("--heads", type=positive, default=32)
    parser.add_argument("--heads-kv", type=positive, default=8)
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if cuda else "fp32")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--window", type=positive, help="keys before a query that it sees, and without a mask behind")
    parser.add_argument("--layout", choices=("zigzag", "contiguous"), help="by default contiguous with a window")
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--in-a-row", type=positive, default=20 if cuda else 1, help="calls of a sample")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--processes", type=positive, help="start so many; by default torchrun does")
    parser.add_argument("--unchecked", action="store_true", help="no call over the whole sequence, which needs memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes every sample")
    arguments = parser.parse_args(argv)
    try:
        if arguments.processes is None:
            if "RANK" not in os.environ:
                raise CannotRun("start it by torchrun --nproc-per-node NUMBER, or pass --processes NUMBER")
            return run(arguments)
        if arguments.json:
            arguments.json.touch()
        torch.multiprocessing.spawn(run_rank, (arguments, free_port()), nprocs=arguments.processes)
    except CannotRun as error:
        print(f"ring: {error}", file=sys.stderr)
        return 2
    except torch.multiprocessing.ProcessExitedException as error:
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
