"""Trains the small GPT of train_tiny_gpt.py on sequences that several GPUs hold together.

    torchrun --nproc-per-node 2 examples/train_long_context.py                  128 Ki characters on two GPUs
    torchrun --nproc-per-node 2 examples/train_long_context.py --device cpu --length 512 --steps 20 --compare

Each rank holds its rows of every sequence (``shard_sequence``) and all parameters; ring attention sees the whole. The
loss of a rank is its share of the mean, so that the sum of all ranks' gradients is that of one process: with
``--compare`` each rank then trains on whole sequences by itself, from the same seed, and the program fails if the last
losses differ by more than ``--tolerance``.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from train_tiny_gpt import DTYPES, TinyGPT, positive, sums

import flash_wmma
from flash_wmma import distributed

ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "ring": distributed.ring_attention,
    "ulysses": distributed.ulysses_attention,
}
BASE = 10_000.0
"""Of the rotary embedding's wavelengths."""


def turned(x: Tensor, places: Tensor) -> Tensor:
    """q or k (B, H, n, d) with the rotary embedding of their rows' places in the whole sequence."""
    half = x.shape[-1] // 2
    angles = places[:, None] / BASE ** (torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class LongAttention(flash_wmma.MultiheadAttention):
    """The same projections, rotary embeddings, and attention that may span the ranks."""

    def __init__(self, width: int, heads: int, *, causal: bool, places: Tensor, attend: Callable[..., Tensor]) -> None:
        super().__init__(width, heads, causal=causal)
        self.places, self.attend = places, attend

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.heads, dim=1)
        attended = self.attend(turned(q, self.places), turned(k, self.places), v, causal=self.causal)
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return projected


def train(arguments: argparse.Namespace, device: torch.device, together: bool) -> list[float]:
    """The loss of every step, by all ranks together or by each alone."""
    length = arguments.length
    if together:
        places = distributed.position_ids(length, device=device)
        attend: Callable[..., Tensor] = partial(ATTENTIONS[arguments.attention], seq_len=length)
    else:
        places, attend = torch.arange(length, device=device), flash_wmma.forward
    torch.manual_seed(arguments.seed)
    make: Callable[..., nn.Module] = partial(LongAttention, places=places, attend=attend)
    model = TinyGPT(make, arguments.width, arguments.heads, arguments.layers, length=1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate)
    dtype = DTYPES[arguments.dtype]
    half = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
    rng = random.Random(arguments.seed)
    losses = []
    for step in range(arguments.steps):
        begin = time.perf_counter()
        text = sums(rng, arguments.batch, length).to(device)  # the same on every rank
        rows, next_ones = text[:, :-1], text[:, 1:]
        if together:
            rows, next_ones = (distributed.shard_sequence(t) for t in (rows, next_ones))
        with half:
            logits = model(rows)
        total = functional.cross_entropy(logits.float().flatten(0, 1), next_ones.flatten(), reduction="sum")
        loss = total / (arguments.batch * length)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if together:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            dist.all_reduce(loss)
        optimizer.step()
        losses.append(loss.item())
        if together and dist.get_rank() == 0:
            took = time.perf_counter() - begin
            print(f"step {step}: loss {losses[-1]:.4f}, {arguments.batch * length / took:.0f} characters/s", flush=True)
    return losses


def main() -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = (("steps", 20), ("batch", 1), ("length", 2**17), ("width", 256), ("heads", 4), ("layers", 2))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--attention", choices=ATTENTIONS, default="ring")
    parser.add_argument("--rate", type=float, default=3e-3, help="of learning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: bf16 on CUDA, fp32 on the CPU")
    parser.add_argument("--compare", action="store_true", help="trains once more, each rank alone")
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest difference of the last losses")
    arguments = parser.parse_args()
    if arguments.dtype is None:
        arguments.dtype = "bf16" if arguments.device == "cuda" else "fp32"
    if "RANK" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node NUMBER examples/train_long_context.py")

    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    losses = train(arguments, device, together=True)
    difference = 0.0
    if arguments.compare:
        alone = train(arguments, device, together=False)
        difference = abs(losses[-1] - alone[-1])
        if dist.get_rank() == 0:
            print(f"last loss {losses[-1]:.5f}, of one process {alone[-1]:.5f}, first {losses[0]:.5f}")
    dist.barrier()
    dist.destroy_process_group()
    return int(not difference <= arguments.tolerance)  # NaN is not


if __name__ == "__main__":
    raise SystemExit(main())
