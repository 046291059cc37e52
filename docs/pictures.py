"""Draws the pictures of docs/rungs from the emulator's data, no GPU needed. Called as

    python docs/pictures.py                  # all of them, into docs/images

Each is one request of a kernel: which lane touches which bank of shared memory, or which sector of global memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import flash_wmma

sys.path.insert(0, str(Path(__file__).parent))
import quote

IMAGES = Path(__file__).resolve().parent / "images"
FORWARD = "csrc/forward/"
PICTURES = {  # file: the kernel, its source, and how the line with the request begins
    "sectors_simt_naive.png": ("simt_naive", "simt_naive.cu", "for (int c = 0; c < p.head_dim; ++c) product"),
    "sectors_simt_coalesced.png": ("simt_coalesced", "simt_coalesced.cu", "for (int c = lane; c < p.head_dim; c"),
    "banks_simt_shared.png": ("simt_shared", "simt_shared.cuh", "for (int c = 0; c < p.head_dim; ++c) product"),
    "banks_simt_padded.png": ("simt_padded", "simt_shared.cuh", "for (int c = 0; c < p.head_dim; ++c) product"),
}


def draw(name: str, folder: Path) -> None:
    """One picture: a head of 32 queries and keys, d = 64."""
    kernel, source, beginning = PICTURES[name]
    q, k, v = torch.randn(3, 1, 1, 32, 64, generator=torch.Generator().manual_seed(0))
    profile = flash_wmma.profile(q, k, v, kernel=kernel)
    profile.plot_banks(f"{source}:{quote.line_of(FORWARD + source, beginning) + 1}", folder / name)


if __name__ == "__main__":
    for name in PICTURES:
        draw(name, IMAGES)
