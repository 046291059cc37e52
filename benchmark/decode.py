"""A step of generation, few queries against a long key/value cache, beside SDPA's backends.

    python benchmark/decode.py                                        # needs the GPU
    python benchmark/decode.py --rows 1,32/8,128,1024 --pages 0,16,256 --kernels auto,mma_sm75 --json decode.json
    python benchmark/decode.py --device cpu --rows 2,4/2,64,500       # a try without one

A row is B,Hq/Hk,d,keys[,queries]: sequences, query and key/value heads, head dim, keys of each sequence, and its new
queries, each of which sees all keys. The figures are microseconds and TB/s of K and V: what a step has to read. Ours
reads a cache with rows of all heads side by side, as an engine keeps it (`--layout heads`: each head by itself):
without pages (0) or in pages of so many tokens, in random order. SDPA's backends read K and V as they like them best,
(B, Hk, N, d). All contenders of a row are timed together, in CUDA graphs; the method is harness/timing.py's. One
sequence of what each has computed is compared with attention in float64. `--append` adds a contender that first
rotates q and a new key, and appends the key.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_wmma
from harness import timing
from harness.program import CannotRun, choose_device, names
from harness.report import ABSENT, Table, microseconds

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}
ROWS = (
    "16,32/32,64,8192",
    "16,32/8,128,8192",
    "1,32/8,128,32768",
    "64,32/8,128,2048",
    "4,16/1,128,16384",
    "1,32/8,128,1024",
    "16,32/8,128,8192,8",
)


@dataclass(frozen=True)
class Row:
    """A problem."""

    batch: int
    heads_q: int
    heads_k: int
    head_dim: int
    keys: int
    queries: int = 1

    @staticmethod
    def parse(text: str) -> Row:
        try:
            batch, heads, *rest = text.split(",")
            row = Row(int(batch), *map(int, heads.split("/")), *map(int, rest))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"got {text!r}, allowed: B,Hq/Hk,d,keys[,queries]") from None
        if min(asdict(row).values()) < 1 or row.heads_q % row.heads_k:
            raise argparse.ArgumentTypeError(f"got {text!r}, allowed: positive numbers, Hq a multiple of Hk")
        return row

    def __str__(self) -> str:
        heads = f"{self.heads_q}/{self.heads_k}"
        return f"B {self.batch}, {heads}, d {self.head_dim}, {self.keys} keys, {self.queries} q"

    def read(self, dtype: torch.dtype) -> int:
        """Bytes of K and V."""
        return 2 * self.batch * self.heads_k * self.keys * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class Result:
    """A contender in a row."""

    row: str
    contender: str
    us: float
    tbps: float
    over: dict[str, float]
    """How many times faster than each of the others: medians of ratios."""


def laid_out(t: Tensor, layout: str) -> Tensor:
    """t (B, H, N, d) in memory as (B, N, H, d), or with "heads" as it is."""
    return t.transpose(1, 2).contiguous().transpose(1, 2) if layout == "rows" else t.contiguous()


def paged(t: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """t (B, H, N, d) in pages (pages, H, size, d) in random order, and the table."""
    batch, heads, n, d = t.shape
    runs = -(-n // size)
    order = torch.randperm(batch * runs, generator=torch.Generator().manual_seed(0)).to(t.device)
    pages = t.new_zeros(batch * runs, size, heads, d)
    rows = torch.nn.functional.pad(t, (0, 0, 0, runs * size - n)).transpose(1, 2).reshape(-1, size, heads, d)
    pages[order] = rows
    return pages.transpose(1, 2), order.view(batch, runs).int()


def peer(backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor) -> timing.Call:
    def call() -> Tensor:
        if backend is None:
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def appended(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, kernel: str) -> Callable[[], Tensor]:
    """A step that rotates and appends before it attends: the last key of each sequence anew."""
    angle = torch.rand(k.shape[2], q.shape[3] // 2, device=q.device)
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    k_cache, v_cache = (t.transpose(1, 2).contiguous() for t in (k, v))
    new_k, new_v = (t[:, -1:].contiguous() for t in (k_cache, v_cache))
    before = lengths - 1
    if kernel != "auto":
        raise CannotRun("--append: only with the kernel 'auto', which flash_attn_with_kvcache takes")

    def call() -> Tensor:
        out = flash_wmma.flash_attn_with_kvcache(
            q.transpose(1, 2), k_cache, v_cache, new_k, new_v, cos, sin, cache_seqlens=before
        )
        assert isinstance(out, Tensor)
        return out

    return call


def contenders(
    row: Row,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Sequence[str],
    pages: Sequence[int],
    layout: str,
    append: bool,
) -> tuple[dict[str, timing.Contender], Tensor]:
    """By name, and what they have to give for the first sequence."""
    torch.manual_seed(0)
    q = torch.randn(row.batch, row.heads_q, row.queries, row.head_dim, device=device, dtype=dtype)
    k, v = (torch.randn(row.batch, row.heads_k, row.keys, row.head_dim, device=device, dtype=dtype) for _ in range(2))
    lengths = torch.full((row.batch,), row.keys, device=device, dtype=torch.int32)
    found: dict[str, timing.Contender] = {}

    def ours(kernel: str, caches: tuple[Tensor, Tensor], table: Tensor | None) -> timing.Call:
        def call() -> Tensor:
            out = flash_wmma.forward_cached(q, *caches, lengths, block_table=table, kernel=kernel)
            assert isinstance(out, Tensor)
            return out

        return call

    for size in pages:
        table = None
        if size:
            (k_cache, table), (v_cache, _) = paged(k, size), paged(v, size)
        else:
            k_cache, v_cache = k, v
        caches = laid_out(k_cache, layout), laid_out(v_cache, layout)
        for kernel in kernels:
            found[f"{kernel}, pages of {size}" if size else kernel] = timing.Contender(ours(kernel, caches, table))
    if append:
        found["append"] = timing.Contender(appended(q, k, v, lengths, kernels[0]))
    backends: dict[str, SDPBackend | None] = {**PEERS} if device.type == "cuda" else {"SDPA": None}
    for name, backend in backends.items():
        found[name] = timing.Contender(peer(backend, q, k, v))
    group = row.heads_q // row.heads_k
    wide_k, wide_v = (t[0].double().repeat_interleave(group, 0) for t in (k, v))
    return found, scaled_dot_product_attention(q[0].double(), wide_k, wide_v)


def measured(row: Row, args: argparse.Namespace, device: torch.device, method: timing.Method) -> list[Result]:
    dtype = DTYPES[args.dtype]
    found, expected = contenders(row, dtype, device, args.kernels, args.pages, args.layout, args.append)
    times = timing.measure(found, device, method)
    for name, failure in times.failures.items():
        print(f"{row}: {name} does not run: {str(failure).splitlines()[0]}", file=sys.stderr)
    for name, out in times.outputs.items():
        if name != "append":  # which has rotated its queries
            error = (out[0].double() - expected).abs().max().item()
            if not error < TOLERANCE[dtype]:
                raise CannotRun(f"{row}: {name} is off by {error}")
    results = []
    for name, time in times.timings.items():
        over = {other: time.speedup_over(t) for other, t in times.timings.items() if other != name}
        results.append(Result(str(row), name, 1e3 * time.median, row.read(dtype) / time.median / 1e9, over))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=Row.parse, default=[Row.parse(row) for row in ROWS])
    parser.add_argument("--pages", type=lambda text: [int(part) for part in text.split(",")], default=[0, 16, 256])
    parser.add_argument("--layout", choices=("rows", "heads"), default="rows", help="of our caches in memory")
    parser.add_argument("--kernels", type=names, default=["auto"], help="of ours, separated by commas")
    parser.add_argument("--append", action="store_true", help="also a step that rotates and appends first")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--device", help="cuda or cpu")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    args = parser.parse_args()
    try:
        device = choose_device(args.device)
        method = timing.Method(repeats=args.repeats, graph="on")
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        print(f"{where}, torch {torch.__version__}, {args.dtype}; {method.describe(device)}\n")
        results: list[Result] = []
        for row in args.rows:
            of_row = measured(row, args, device, method)
            results += of_row
            others = [result.contender for result in of_row if result.contender in ("cuDNN", "FA2", "SDPA")]
            lines = [
                [
                    result.contender,
                    microseconds(result.us / 1e3),
                    f"{result.tbps:.2f}",
                    *(f"{result.over[other]:.2f}" if other in result.over else ABSENT for other in others),
                ]
                for result in of_row
            ]
            columns = ["contender", "us", "TB/s", *(f"x {other}" for other in others)]
            Table(str(row), columns, lines).print()
    except CannotRun as error:
        sys.exit(f"decode.py: {error}")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
