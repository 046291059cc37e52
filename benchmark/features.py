"""The cost of masks, biases, grouped heads and packed sequences, against a peer with the same feature.

    python benchmark/features.py                       # mma_sm80, fp16, d = 64; needs the GPU
    python benchmark/features.py --kernel mma_sm75 --dtype bf16 --json features.json
    python benchmark/features.py --kernel wgmma_sm90 --rows bias bool

Every row is one problem of 16,384 tokens and hidden size 2048, and one peer:

    window 1024         FlashAttention-2 (torch's own copy) with the same window
    GQA 8:1             the same kernel without groups
    bias (1, H, N, N)   SDPA's efficient backend, and cuDNN, with the same additive mask
    bool (B, 1, 1, N)   cuDNN with the same boolean mask, which hides a third of the keys: at random, or the last ones
    bool (B, 1, N, N)   cuDNN with the same boolean mask, of blocks of 128 by 128, of which half are hidden
    ALiBi, softcap      FlashAttention-2 without either, which torch's copy does not take; and the same kernel without
    sinks               the same kernel without
    dropout             FlashAttention-2 with the same probability, 0.1
    documents           the same kernel on packed sequences, without key_ranges
    varlen              FlashAttention-2 on the same packed sequences, of lengths 1 to 4096

Rows that the kernel does not take are left out.

The timed outputs are compared with the peer's if both compute the same. The method is harness/timing.py's.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_wmma
from harness import timing
from harness.sweep import HIDDEN, PACKED_LENGTHS, TOKENS

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class Row:
    """A problem: our call and the peer's."""

    name: str
    peer: str
    ours: Callable[[], Tensor]
    theirs: Callable[[], Tensor]
    same: bool = True  #: whether both compute the same
    needs: str = ""  #: the feature of the kernel, if not every one has it


def flash2(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout_p: float = 0.0, **window: int) -> Tensor:
    """FlashAttention-2 as torch has it; (B, H, N, d)."""
    transposed = (t.transpose(1, 2) for t in (q, k, v))
    n, scale = q.size(2), q.size(3) ** -0.5
    out = torch.ops.aten._flash_attention_forward(
        *transposed, None, None, n, n, dropout_p, causal, False, scale=scale, **window
    )[0]
    return out.transpose(1, 2)


def flash2_packed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, causal: bool) -> Tensor:
    """FlashAttention-2 on packed sequences; (total, H, d)."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, offsets, offsets, longest, longest, 0.0, causal, False, scale=q.size(2) ** -0.5
    )[0]
    return out


def rows(kernel: str, dtype: torch.dtype, head_dim: int, causal: bool) -> Iterator[Row]:
    """The problems, one after the other, so that only one is in memory."""
    heads = HIDDEN // head_dim
    torch.manual_seed(0)

    def inputs(n: int, heads_k: int = heads) -> tuple[Tensor, Tensor, Tensor]:
        def make(h: int) -> Tensor:
            return torch.randn(TOKENS // n, h, n, head_dim, device="cuda", dtype=dtype)

        return make(heads), make(heads_k), make(heads_k)

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        return flash_wmma.forward(q, k, v, kernel=kernel, causal=causal, **options)

    q, k, v = inputs(TOKENS)
    sides = {"window_size_left": 1024, "window_size_right": 0 if causal else 1024}
    window = (1024, None) if causal else (1024, 1024)
    yield Row(
        "window 1024, N=16384",
        "FA2, same window",
        lambda: forward(q, k, v, window=window),
        lambda: flash2(q, k, v, causal, **sides),
    )
    q, k, v = inputs(2048)
    narrow = inputs(2048, max(1, heads // 8))
    yield Row("GQA 8:1, N=2048", "itself, MHA", lambda: forward(*narrow), lambda: forward(q, k, v), same=False)
    sinks = torch.randn(heads, device="cuda")
    yield Row(
        "sinks, N=2048",
        "itself, without",
        lambda: forward(q, k, v, sinks=sinks),
        lambda: forward(q, k, v),
        same=False,
        needs="sinks",
    )
    yield Row(
        "dropout 0.1, N=2048",
        "FA2, dropout 0.1",
        lambda: forward(q, k, v, dropout_p=0.1),
        lambda: flash2(q, k, v, causal, dropout_p=0.1),
        same=False,
        needs="dropout",
    )
    bias = torch.randn(1, heads, 2048, 2048, device="cuda", dtype=dtype)
    if causal:
        bias += torch.full((2048, 2048), -torch.inf, device="cuda", dtype=dtype).triu(1)

    def sdpa(backend: SDPBackend, mask: Tensor) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, attn_mask=mask)

        return call

    for peer, backend in (("SDPA efficient", SDPBackend.EFFICIENT_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        theirs = sdpa(backend, bias)
        yield Row(
            "bias (1, H, N, N), N=2048", peer, lambda: forward(q, k, v, attn_bias=bias), theirs, needs="attn_bias"
        )
    past = torch.ones(2048, 2048, device="cuda", dtype=torch.bool).tril()
    blocks = torch.rand(q.size(0), 1, 16, 16, device="cuda") > 0.5
    blocks |= torch.eye(16, device="cuda", dtype=torch.bool)  # every query sees a key
    at_random = torch.rand(q.size(0), 1, 1, 2048, device="cuda") > 1 / 3
    at_random[..., 0] = True
    for name, seen in {
        "bool (B, 1, 1, N), random": at_random,
        "bool (B, 1, 1, N), padding": torch.arange(2048, device="cuda").expand(q.size(0), 1, 1, 2048) < 1365,
        "bool (B, 1, N, N), blocks": blocks.repeat_interleave(128, 2).repeat_interleave(128, 3),
    }.items():
        theirs = sdpa(SDPBackend.CUDNN_ATTENTION, seen & past if causal else seen)
        yield Row(
            f"{name}, N=2048", "cuDNN", lambda seen=seen: forward(q, k, v, attn_bias=seen), theirs, needs="attn_bias"
        )
    peers = {"FA2 without": lambda: flash2(q, k, v, causal), "itself, without": lambda: forward(q, k, v)}
    slopes = 2.0 ** -torch.linspace(1, 8, heads, device="cuda")
    for name, argument, given in (("ALiBi", "alibi_slopes", slopes), ("softcap", "softcap", 30.0)):
        for peer, theirs in peers.items():
            ours = functools.partial(forward, q, k, v, **{argument: given})
            yield Row(f"{name}, N=2048", peer, ours, theirs, same=False, needs=argument)
    packed = [torch.randn(TOKENS, heads, head_dim, device="cuda", dtype=dtype) for _ in range(3)]
    offsets = torch.tensor((0, *PACKED_LENGTHS), device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    yield Row(
        "varlen, 1 to 4096",
        "FA2 varlen",
        lambda: flash_wmma.forward_varlen(
            *packed, offsets, offsets, max(PACKED_LENGTHS), max(PACKED_LENGTHS), kernel=kernel, causal=causal
        ),
        lambda: flash2_packed(*packed, offsets, max(PACKED_LENGTHS), causal),
        needs="varlen",
    )
    numbers = torch.repeat_interleave(torch.arange(len(PACKED_LENGTHS), device="cuda"), offsets.diff())[None]
    ranges = flash_wmma.document_ranges(document_ids=numbers)
    row = [t.transpose(0, 1)[None] for t in packed]
    yield Row(
        "documents, 1 to 4096",
        "itself, varlen",
        lambda: forward(*row, key_ranges=ranges)[0].transpose(0, 1),
        lambda: flash_wmma.forward_varlen(
            *packed, offsets, offsets, max(PACKED_LENGTHS), max(PACKED_LENGTHS), kernel=kernel, causal=causal
        ),
        needs="key_ranges",
    )


@dataclass(frozen=True)
class Result:
    """A row as measured."""

    name: str
    causal: bool
    peer: str
    ms: float
    peer_ms: float
    ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="mma_sm80")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rows", nargs="+", default=[""], metavar="NAME", help="those alone whose names begin so")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("features.py: no CUDA device")
    dtype, device = DTYPES[args.dtype], torch.device("cuda")
    method = timing.Method(repeats=args.repeats)
    print(
        f"{args.kernel}, {args.dtype}, d = {args.head_dim}, {torch.cuda.get_device_name()}; {method.describe(device)}"
    )
    print(f"{'problem':28} {'causal':6} {'ms':>8}  {'peer':18} {'ms':>8} {'ratio':>6}")
    results = []
    (features,) = (kernel.features for kernel in flash_wmma.kernels() if kernel.name == args.kernel)
    for causal in (False, True):
        for row in rows(args.kernel, dtype, args.head_dim, causal):
            if not row.name.startswith(tuple(args.rows)) or row.needs not in {"", *features}:
                continue
            contenders = {"ours": timing.Contender(row.ours), "peer": timing.Contender(row.theirs)}
            measured = timing.measure(contenders, device, method)
            for name, error in measured.failures.items():
                sys.exit(f"features.py: {row.name}, {name}: {error}")
            out, expected = (measured.outputs[name].float() for name in contenders)
            if row.same and not (out - expected).abs().max().item() < TOLERANCE[dtype]:
                sys.exit(f"features.py: {row.name}: results differ by {(out - expected).abs().max().item()}")
            ours, peer = measured.timings["ours"], measured.timings["peer"]
            result = Result(row.name, causal, row.peer, ours.median, peer.median, ours.speedup_over(peer))
            results.append(result)
            print(
                f"{result.name:28} {causal!s:6} {result.ms:8.3f}  {result.peer:18} {result.peer_ms:8.3f} "
                f"{result.ratio:6.2f}",
                flush=True,
            )
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
