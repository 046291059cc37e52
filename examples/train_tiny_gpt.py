"""Trains a small GPT on text that it makes, once with flash_wmma and once with torch's attention, from the same seed.

    python examples/train_tiny_gpt.py [--steps 200] [--device cuda] [--plot losses.png]

The text is sums ("27+58=85;"), so that there is something to learn. Both runs see the same batches, and their losses
must agree within noise: the program says by how much they differ and fails if it is more than ``--tolerance``.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import flash_wmma

CHARACTERS = "0123456789+=;"


class TorchAttention(flash_wmma.MultiheadAttention):
    """The same projections around torch's attention."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(*heads.split(self.heads, dim=1), is_causal=True)
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return projected


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


def train(make: Callable[..., nn.Module], arguments: argparse.Namespace) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    size = (arguments.width, arguments.heads, arguments.layers, arguments.length)
    model = TinyGPT(make, *size).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(arguments.steps):
        text = sums(rng, arguments.batch, arguments.length).to(arguments.device)
        loss = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("steps", 200), ("batch", 32), ("length", 64), ("width", 64), ("heads", 4), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest difference of the last losses' means")
    parser.add_argument("--plot", help="file to draw both losses into (needs matplotlib)")
    arguments = parser.parse_args()

    runs = {
        "flash_wmma": train(flash_wmma.MultiheadAttention, arguments),
        "torch": train(TorchAttention, arguments),
    }
    last = max(1, arguments.steps // 10)
    means = {name: sum(losses[-last:]) / last for name, losses in runs.items()}
    for name, losses in runs.items():
        print(f"{name:10} first loss {losses[0]:.4f}, mean of the last {last} {means[name]:.4f}")
    difference = abs(means["flash_wmma"] - means["torch"])
    print(f"they differ by {difference:.5f}")
    if arguments.plot:
        from matplotlib import pyplot

        for name, losses in runs.items():
            pyplot.plot(losses, label=name, linestyle="-" if name == "torch" else "--")
        pyplot.xlabel("step")
        pyplot.ylabel("loss")
        pyplot.legend()
        pyplot.savefig(arguments.plot)
    return int(difference > arguments.tolerance)


if __name__ == "__main__":
    raise SystemExit(main())
