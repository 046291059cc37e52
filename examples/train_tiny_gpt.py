"""Trains a small GPT on text that it makes, once with flash_wmma and once with torch's attention, from the same seed.

    python examples/train_tiny_gpt.py [--steps 200] [--device cuda --dtype bf16] [--plot losses.png]

The text is sums ("27+58=85;"), so that there is something to learn. The runs see the same batches, and their losses
must agree within noise: the program fails if the last ones differ by more than ``--tolerance``. What noise is, a third
run shows, with torch's plain attention: the same numbers added in yet another order.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_wmma

CHARACTERS = "0123456789+=;"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class TorchAttention(flash_wmma.MultiheadAttention):
    """The same projections around torch's attention."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(*heads.split(self.heads, dim=1), is_causal=True)
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return projected


class PlainAttention(TorchAttention):
    """And around torch's attention that stores the score matrix."""

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x)


RUNS: dict[str, Callable[..., nn.Module]] = {
    "flash_wmma": flash_wmma.MultiheadAttention,
    "torch": TorchAttention,
    "torch_plain": PlainAttention,
}


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and around a residual."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(width), attention)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.think(x)  # type: ignore[no-any-return]


class TinyGPT(nn.Module):
    """Characters (B, N) to the logits of the next ones (B, N, characters)."""

    def __init__(self, make: Callable[..., nn.Module], width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, make(width, heads, causal=True)) for _ in range(layers)))
        self.logits = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS)))

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.blocks(self.embedding(text) + self.place[: text.shape[1]]))
        return logits


def sums(rng: random.Random, batch: int, length: int) -> Tensor:
    """(batch, length + 1): indices into CHARACTERS."""
    rows = []
    for _ in range(batch):
        text = ""
        while len(text) <= length:
            a, b = rng.randrange(100), rng.randrange(100)
            text += f"{a}+{b}={a + b};"
        rows.append([CHARACTERS.index(c) for c in text[: length + 1]])
    return torch.tensor(rows)


def train(make: Callable[..., nn.Module], batches: Sequence[Tensor], arguments: argparse.Namespace) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(arguments.seed)
    size = (arguments.width, arguments.heads, arguments.layers, arguments.length)
    model = TinyGPT(make, *size).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate)
    device, dtype = torch.device(arguments.device).type, DTYPES[arguments.dtype]
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    half = nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)
    losses = []
    for text in batches:
        with half:
            logits = model(text[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def positive(text: str) -> int:
    """An argument that counts something of which there must be one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: a whole number from 1 on")
    return int(text)


def plot(runs: dict[str, list[float]], title: str, path: Path) -> None:
    """The losses, and by how much those of the other runs differ from torch's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    looks = {"torch": ("#d55e00", "-"), "flash_wmma": ("#0072b2", "--"), "torch_plain": ("#777777", ":")}
    for name, (color, style) in looks.items():
        left.plot(runs[name], color=color, linestyle=style, label=name)
        if name != "torch":
            apart = [abs(a - b) for a, b in zip(runs[name], runs["torch"], strict=True)]
            right.plot(apart, color=color, label=f"{name} against torch", alpha=0.8)
    left.set_ylabel("loss")
    right.set_ylabel("difference of the losses")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend(frameon=False)
        axes.grid(True, alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def main() -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("steps", 200), ("batch", 32), ("length", 64), ("width", 64), ("heads", 4), ("layers", 2)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--rate", type=float, default=3e-3, help="of learning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="autocast's; default: fp16 on CUDA, fp32 on the CPU")
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest difference of the last losses' means")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draws the losses (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the losses")
    arguments = parser.parse_args()
    if arguments.dtype is None:
        arguments.dtype = "fp16" if arguments.device.startswith("cuda") else "fp32"

    rng = random.Random(arguments.seed)
    batches = [sums(rng, arguments.batch, arguments.length).to(arguments.device) for _ in range(arguments.steps)]
    last = max(1, arguments.steps // 10)
    runs, means = {}, {}
    for name, make in RUNS.items():
        begin = time.perf_counter()
        runs[name] = losses = train(make, batches, arguments)
        means[name] = sum(losses[-last:]) / last
        took = time.perf_counter() - begin
        print(f"{name:11} {took:5.1f} s, first loss {losses[0]:.4f}, mean of the last {last} {means[name]:.4f}")
    difference, noise = (abs(means[name] - means["torch"]) for name in ("flash_wmma", "torch_plain"))
    print(f"flash_wmma and torch differ by {difference:.5f}; torch_plain and torch by {noise:.5f}")
    sizes = f"{arguments.layers} layers of width {arguments.width}, {arguments.heads} heads, "
    sizes += f"{arguments.batch} rows of {arguments.length} characters, {arguments.dtype}"
    if arguments.plot:
        plot(runs, sizes, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps({"sizes": sizes, "losses": runs}) + "\n")
    return int(not difference <= arguments.tolerance)  # NaN is not


if __name__ == "__main__":
    raise SystemExit(main())
