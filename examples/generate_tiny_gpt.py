"""A small GPT continues texts from a paged key/value cache, and says the same as without a cache.

    python examples/generate_tiny_gpt.py [--steps 200] [--tokens 40] [--page-size 16] [--device cuda --dtype bf16]

It is trained on sums first (train_tiny_gpt.py). Its prompts have different lengths: they are packed one after the
other and fill the pages of their sequences, and then each sequence grows by a character a step. The most probable
character is taken. Without a cache, every step computes all rows of a sequence anew. The program fails if the two
texts differ.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from train_tiny_gpt import CHARACTERS, DTYPES, Block, TinyGPT, positive, sums

import flash_wmma

PROMPTS = ("27+58=", "3", "81+9", "1+1=2;2+2=4;3+3=", "")


def text_of(tokens: list[int]) -> str:
    return "".join(CHARACTERS[i] for i in tokens)


class Pages:
    """The keys and values of sequences in pages, for every layer. Pages are given out as sequences need them."""

    def __init__(self, model: TinyGPT, sequences: int, length: int, size: int) -> None:
        attention = model.blocks[0].attend[1]
        weight = model.logits[1].weight
        runs = -(-length // size)
        shape = len(model.blocks), 2, sequences * runs, size, attention.heads[1], attention.head_dim
        self.pages = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.table = torch.full((sequences, runs), -1, dtype=torch.int32)
        self.lengths = [0] * sequences
        self.free = random.sample(range(sequences * runs), sequences * runs)
        self.size = size

    def room_for(self, counts: list[int]) -> tuple[Tensor, Tensor]:
        """(table, lengths so far) after each sequence has the pages for so many more rows."""
        before = torch.tensor(self.lengths, dtype=torch.int32)
        for b, n in enumerate(counts):
            for run in range(-(-self.lengths[b] // self.size), -(-(self.lengths[b] + n) // self.size)):
                self.table[b, run] = self.free.pop()
            self.lengths[b] += n
        return self.table.to(self.pages.device), before.to(self.pages.device)


def next_logits(model: TinyGPT, pages: Pages, tokens: list[list[int]]) -> Tensor:
    """Logits (sequences, characters) behind these new tokens, one at least for each sequence."""
    counts = [len(new) for new in tokens]
    device = pages.pages.device
    table, lengths = pages.room_for(counts)
    ends = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    places = torch.cat([torch.arange(end - n, end) for n, end in zip(counts, pages.lengths, strict=True)]).to(device)
    x = model.embedding(torch.tensor([token for new in tokens for token in new], device=device)) + model.place[places]
    for block, (k_pages, v_pages) in zip(model.blocks, pages.pages, strict=True):
        assert isinstance(block, Block)
        norm, attention = block.attend
        q, k, v = attention.qkv(norm(x)).unflatten(-1, (-1, attention.head_dim)).split(attention.heads, dim=1)
        attended = flash_wmma.flash_attn_with_kvcache(
            q,
            k_pages,
            v_pages,
            k,
            v,
            cache_seqlens=lengths,
            block_table=table,
            causal=True,
            cu_seqlens_q=ends,
            cu_seqlens_k_new=ends,
            max_seqlen_q=max(counts),
        )
        assert isinstance(attended, Tensor)
        x = x + attention.out(attended.flatten(1))
        x = x + block.think(x)
    logits: Tensor = model.logits(x[ends[1:] - 1])
    return logits


def with_cache(model: TinyGPT, prompts: list[list[int]], count: int, length: int, size: int) -> list[list[int]]:
    """Each prompt with so many tokens behind it."""
    pages = Pages(model, len(prompts), length, size)
    texts, new = [list(prompt) for prompt in prompts], prompts
    for _ in range(count):
        best = next_logits(model, pages, new).argmax(dim=1).tolist()
        new = [[token] for token in best]
        for text, token in zip(texts, best, strict=True):
            text.append(token)
    return texts


def without_cache(model: TinyGPT, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The same, all rows anew for each token."""
    texts = [list(prompt) for prompt in prompts]
    device = model.place.device
    for text in texts:
        for _ in range(count):
            text.append(int(model(torch.tensor([text], device=device))[0, -1].argmax()))
    return texts


def trained(arguments: argparse.Namespace) -> TinyGPT:
    """A model that has seen sums."""
    torch.manual_seed(arguments.seed)
    size = arguments.width, arguments.heads, arguments.layers, arguments.length
    model = TinyGPT(flash_wmma.MultiheadAttention, *size).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(arguments.seed)
    for _ in range(arguments.steps):
        text = sums(rng, 16, arguments.length).to(arguments.device)
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.to(DTYPES[arguments.dtype]).eval()


def timed(run: Callable[[], list[list[int]]], what: str, count: int) -> list[list[int]]:
    begin = time.perf_counter()
    texts = run()
    print(f"{what}: {count / (time.perf_counter() - begin):.0f} tokens/s")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description="Generates text from a paged key/value cache.")
    for name, default in (
        ("steps", 200),
        ("tokens", 40),
        ("page-size", 16),
        ("width", 64),
        ("heads", 4),
        ("layers", 2),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--length", type=positive, default=96, help="of the texts that it learns from, and its longest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    arguments = parser.parse_args()
    prompts = [[CHARACTERS.index(c) for c in f";{prompt}"] for prompt in PROMPTS]
    if max(map(len, prompts)) + arguments.tokens > arguments.length:
        parser.error(f"argument --tokens: got {arguments.tokens}, allowed: what fits --length with the longest prompt")
    model = trained(arguments)
    count = arguments.tokens * len(prompts)
    with torch.no_grad():
        size = arguments.tokens, arguments.length, arguments.page_size
        cached = timed(lambda: with_cache(model, prompts, *size), "with a paged cache", count)
        anew = timed(lambda: without_cache(model, prompts, arguments.tokens), "without a cache", count)
    for text in cached:
        print(text_of(text))
    if cached != anew:
        raise SystemExit("the texts differ")


if __name__ == "__main__":
    main()
