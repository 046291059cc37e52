"""A server in miniature: sequences come, grow, fork over shared pages, and go, for as many steps as wanted.

    python tests/serving.py --steps 100000 --device cuda [--kernel mma_sm80] [--dtype fp16] [--seed 0]

Everything that is not in use holds NaN or no page at all, so that a kernel that looks at it gives NaN: that is checked
at each step. What a sample of the steps computes is compared with float64. Exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from typing import NamedTuple

import torch
from reference import Mask, attention
from torch import Tensor

from flash_wmma import append_kv, forward_cached

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CAUSAL = Mask("bottom_right")


def tolerance(dtype: torch.dtype, halves: bool) -> float:
    """Of the largest value of an output. `halves`: the kernel multiplies float32 as half."""
    return max(TOLERANCE[dtype], TOLERANCE[torch.float16] if halves else 0.0)


class Where(NamedTuple):
    """Which kernel runs, on what."""

    kernel: str
    device: str
    dtype: torch.dtype
    tolerance: float


class Shape(NamedTuple):
    """Of the cache, and how busy the server is."""

    page_size: int = 4
    pages: int = 60
    heads: int = 2
    group: int = 2
    d: int = 32
    sequences: int = 6
    prompt: int = 14
    """Tokens of a prompt at most, less one."""


SMALL = Shape()


class Server:
    """Sequences over pages with references. It keeps each sequence's keys and values apart as well, as the truth."""

    def __init__(self, where: Where, shape: Shape, rng: random.Random) -> None:
        self.where, self.shape, self.rng = where, shape, rng
        size = shape.pages, shape.heads, shape.page_size, shape.d
        self.k, self.v = (torch.full(size, math.nan, dtype=where.dtype, device=where.device) for _ in "kv")
        self.references = [0] * shape.pages
        self.pages: list[list[int]] = []
        self.truth: list[tuple[Tensor, Tensor]] = []

    def take(self) -> int:
        """A page."""
        page = self.rng.choice([i for i, n in enumerate(self.references) if n == 0])
        self.references[page] = 1
        return page

    def give(self, page: int) -> None:
        """Back, unless another sequence has it."""
        self.references[page] -= 1
        if self.references[page] == 0:
            self.k[page] = self.v[page] = math.nan

    def free(self) -> int:
        return self.references.count(0)

    def come(self) -> None:
        empty = torch.zeros(1, self.shape.heads, 0, self.shape.d, dtype=self.where.dtype)
        self.pages.append([])
        self.truth.append((empty, empty))

    def fork(self, b: int) -> None:
        """A second sequence with the same past: the full pages are shared, the last one is copied."""
        n = self.truth[b][0].shape[2]
        whole = n // self.shape.page_size
        pages = self.pages[b][:whole]
        for page in pages:
            self.references[page] += 1
        if n % self.shape.page_size:
            copy, last = self.take(), self.pages[b][whole]
            self.k[copy], self.v[copy] = self.k[last].clone(), self.v[last].clone()
            pages = [*pages, copy]
        self.pages.append(pages)
        self.truth.append(self.truth[b])

    def go(self, b: int) -> None:
        for page in self.pages[b]:
            self.give(page)
        del self.pages[b], self.truth[b]

    def step(self, counts: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """Appends so many keys to each sequence and attends with as many queries, packed: (out, q, first rows)."""
        shape, device, dtype = self.shape, self.where.device, self.where.dtype

        def int32(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        lengths = [truth[0].shape[2] for truth in self.truth]
        for b, n in enumerate(counts):
            while len(self.pages[b]) * shape.page_size < lengths[b] + n:
                self.pages[b].append(self.take())
        runs = max(map(len, self.pages)) + 1
        stale = [2**31 - 1, -1, len(self.references), -(2**31)]
        rows = [[*pages, *self.rng.choices(stale, k=runs - len(pages))] for pages in self.pages]
        table, cu = int32(rows), [0, *torch.tensor(counts).cumsum(0).tolist()]
        k, v = (torch.randn(cu[-1], shape.heads, shape.d).to(dtype) for _ in "kv")
        q = torch.randn(cu[-1], shape.group * shape.heads, shape.d).to(dtype)
        ends = int32(cu)
        append_kv(
            self.k,
            self.v,
            k.to(device),
            v.to(device),
            int32(lengths),
            block_table=table,
            cu_seqlens_k=ends,
            validate=True,
        )
        for b in range(len(counts)):
            part = slice(cu[b], cu[b + 1])
            old_k, old_v = self.truth[b]
            new_k, new_v = (t[part].transpose(0, 1)[None] for t in (k, v))
            self.truth[b] = torch.cat((old_k, new_k), dim=2), torch.cat((old_v, new_v), dim=2)
        out = forward_cached(
            q.to(device),
            self.k,
            self.v,
            int32([n + m for n, m in zip(lengths, counts, strict=True)]),
            block_table=table,
            cu_seqlens_q=ends,
            max_seqlen_q=max(counts),
            causal=True,
            kernel=self.where.kernel,
        )
        assert isinstance(out, Tensor)
        return out, q, cu

    def wrong(self, out: Tensor, q: Tensor, cu: list[int]) -> str:
        """What differs from float64 in the step that gave this; empty if nothing does."""
        for b, (k, v) in enumerate(self.truth):
            rows = slice(cu[b], cu[b + 1])
            if cu[b] == cu[b + 1]:
                continue
            wide = q[rows].transpose(0, 1)[None].double()
            expected, _ = attention(wide, k.double(), v.double(), CAUSAL)
            error = (out[rows].cpu().transpose(0, 1)[None].double() - expected).abs().max() / expected.abs().max()
            if not error <= self.where.tolerance:
                return f"sequence {b} of {k.shape[2]} keys: error {error:.1e}"
        return ""


class Events(NamedTuple):
    """How often what happened."""

    forks: int
    goes: int


def simulate(where: Where, steps: int, every: int, seed: int = 11, shape: Shape = SMALL) -> Events:
    """Of `steps` steps each `every`-th is compared with float64.

    Raises:
        AssertionError: with the step and what is wrong.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    server = Server(where, shape, rng)
    forks = goes = 0
    for step in range(steps):
        roomy = len(server.truth) < shape.sequences and server.free() > shape.pages // 2
        if not server.truth or (roomy and rng.random() < 0.3):
            server.come()
        elif roomy and rng.random() < 0.1:
            server.fork(rng.randrange(len(server.truth)))
            forks += 1
        while server.free() < 2 * shape.pages // 5 or (len(server.truth) > 1 and rng.random() < 0.05):
            server.go(rng.randrange(len(server.truth)))
            goes += 1
            if not server.truth:
                server.come()
        counts = [
            rng.randrange(1, shape.prompt) if truth[0].shape[2] == 0 else rng.choice([1, 1, 1, 0, 3])
            for truth in server.truth
        ]
        if not any(counts):
            continue
        out, q, cu = server.step(counts)
        assert not out.isnan().any(), f"step {step}: NaN, which is in all that is not in use"
        if step % every == 0:
            wrong = server.wrong(out, q, cu)
            assert not wrong, f"step {step}: {wrong}"
    return Events(forks, goes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=10, help="of the steps compared with float64")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in Shape()._asdict().items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    args = parser.parse_args()
    dtype = DTYPES[args.dtype]
    shape = Shape(*(getattr(args, name) for name in Shape._fields))
    try:
        where = Where(args.kernel, args.device, dtype, tolerance(dtype, args.device == "cuda"))
        events = simulate(where, args.steps, args.every, args.seed, shape)
    except AssertionError as error:
        print(f"seed {args.seed}, {error}")
        return 1
    print(f"{args.steps} steps, {events.forks} forks, {events.goes} sequences gone: nothing wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
