"""Trains small GPTs with the attention of gpt-oss and of Gemma 2, by flash_wmma and by eager torch operations.

    python examples/train_tiny_blocks.py [--model gpt-oss] [--steps 200] [--device cuda --dtype bf16]

gpt-oss: eight query heads of 64 columns share one key/value head, each head has a learned attention sink, and a query
sees the last 128 keys. Gemma: heads of 256 columns, scores capped at 50 by a tanh, and the same window. The rest of
the models, the text and the training are those of train_tiny_gpt.py.

All runs of a model start from the same seed and see the same batches. The third run is the eager one with attention in
float64: its distance from the eager run is what rounding alone does. The program fails if a loss of flash_wmma's run
differs from that of the eager run by more than four times as much and by more than ``--tolerance``. In fp32 rounding
moves losses by some 10^-6 in 200 steps. A window one key too short, no sinks, sinks without a gradient or no softcap
move them by 3 10^-3 or more, so that the tolerance of 10^-4 lies between.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from train_tiny_gpt import DTYPES, positive, sums, train

import flash_wmma

WINDOW = 128
"""Keys that a query sees, its own among them."""


@dataclass(frozen=True)
class Heads:
    """The heads of a model, and what changes their scores."""

    queries: int
    keys: int
    dim: int
    softcap: float = 0.0
    sinks: bool = False
    gain: float = 1.0
    """By which the first weights of q and k are larger, so that scores reach where the softcap bends them."""


MODELS = {
    "gpt-oss": Heads(queries=8, keys=1, dim=64, sinks=True),
    "gemma": Heads(queries=2, keys=1, dim=256, softcap=50.0, gain=5.0),
}


def eager(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: tuple[int, int], softcap: float, sinks: Tensor | None
) -> Tensor:
    """What flash_wmma.forward computes of these arguments, causal and with N keys, from the scores of all pairs."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[3])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(q.shape[2], device=q.device)
    behind = place[:, None] - place
    scores = scores.masked_fill((behind < 0) | (behind > window[0]), -math.inf)
    if sinks is not None:  # a key without a value
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), dim=3)
    return scores.softmax(dim=3)[..., : k.shape[2]].to(v.dtype) @ v


def in_float64(q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None, **options: object) -> Tensor:
    """The same, in float64."""
    with torch.autocast(q.device.type, enabled=False):
        out = eager(q.double(), k.double(), v.double(), sinks=None if sinks is None else sinks.double(), **options)
    return out.to(q.dtype)


RUNS: dict[str, Callable[..., Tensor]] = {"flash_wmma": flash_wmma.forward, "eager": eager, "float64": in_float64}


class Attention(nn.Module):
    """x (B, N, width), attended to by these heads and projected: (B, N, width)."""

    def __init__(self, width: int, heads: int, *, causal: bool, like: Heads, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads = (heads, like.keys, like.keys)
        self.dim = like.dim
        self.qkv = nn.Linear(width, sum(self.heads) * like.dim, bias=False)
        with torch.no_grad():
            self.qkv.weight[: (heads + like.keys) * like.dim] *= like.gain
        self.out = nn.Linear(heads * like.dim, width, bias=False)
        self.sinks = nn.Parameter(torch.zeros(heads)) if like.sinks else None
        self.attend = partial(attend, causal=causal, window=(WINDOW - 1, 0), softcap=like.softcap)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.dim)).transpose(1, 2).split(self.heads, dim=1)
        projected: Tensor = self.out(self.attend(q, k, v, sinks=self.sinks).transpose(1, 2).flatten(2))
        return projected


def compared(name: str, batches: list[Tensor], arguments: argparse.Namespace) -> bool:
    """Trains a model three times and prints the losses; whether flash_wmma's are those of eager attention."""
    like = MODELS[name]
    sizes = argparse.Namespace(**vars(arguments), heads=like.queries)
    losses = {}
    print(f"{name}: {like}, window {WINDOW}, {arguments.dtype} on {arguments.device}")
    for run, attend in RUNS.items():
        attention = partial(Attention, like=like, attend=attend)
        train(attention, batches[:1], sizes)  # loads kernels
        begin = time.perf_counter()
        losses[run] = train(attention, batches, sizes)
        tokens = arguments.steps * arguments.batch * arguments.length
        print(f"{run:10} {tokens / (time.perf_counter() - begin):8.0f} tokens/s", flush=True)
    print("  step", *(f"{run:>11}" for run in RUNS))
    for step in sorted({*range(0, arguments.steps, 20), arguments.steps - 1}):
        print(f"{step:6}", *(f"{losses[run][step]:11.6f}" for run in RUNS))
    difference, rounding = (
        max(abs(a - b) for a, b in zip(losses[run], losses["eager"], strict=True)) for run in ("flash_wmma", "float64")
    )
    allowed = max(arguments.tolerance, 4 * rounding)
    print(f"largest difference {difference:.1e} (float64: {rounding:.1e}), allowed {allowed:.1e}")
    return difference <= allowed  # NaN is not


def main() -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, help="default: both")
    for name, default in (("steps", 200), ("batch", 4), ("length", 160), ("width", 64), ("layers", 1)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="autocast's; default: bf16 on CUDA, fp32 on the CPU")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="difference of losses that is always allowed")
    arguments = parser.parse_args()
    if arguments.dtype is None:
        arguments.dtype = "bf16" if arguments.device.startswith("cuda") else "fp32"
    rng = random.Random(arguments.seed)
    batches = [sums(rng, arguments.batch, arguments.length).to(arguments.device) for _ in range(arguments.steps)]
    models = [arguments.model] if arguments.model else list(MODELS)
    good = [compared(name, batches, arguments) for name in models]
    return int(not all(good))


if __name__ == "__main__":
    raise SystemExit(main())
