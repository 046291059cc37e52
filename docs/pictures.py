"""Draws pictures of docs from the emulator's data, no GPU needed. Called as

    python docs/pictures.py                  # all of them, into docs/images

One request of a kernel, by a line of its source: which lane touches which bank of shared memory, or which sector of
global memory. The fragments of WMMA: which lane holds which element. And what a block's warps wait for, over time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch

import flash_wmma

sys.path.insert(0, str(Path(__file__).parent))
import quote

IMAGES = Path(__file__).resolve().parent / "images"
LANE_MAPS = quote.ROOT / "tests" / "emulator" / "lane_maps.cu"
FORWARD = "csrc/forward/"
REQUESTS = {  # file: the kernel, its source, and how the line with the request begins
    "sectors_simt_naive.png": ("simt_naive", "simt/simt_naive.cu", "for (int c = 0; c < p.head_dim; ++c) product"),
    "sectors_simt_coalesced.png": ("simt_coalesced", "simt/simt_coalesced.cu", "for (int c = lane; c < p.head_dim; c"),
    "banks_simt_shared.png": ("simt_shared", "simt/shared_rung.cuh", "for (int c = 0; c < p.head_dim; ++c) product"),
    "banks_simt_padded.png": ("simt_padded", "simt/shared_rung.cuh", "for (int c = 0; c < p.head_dim; ++c) product"),
    "banks_wmma_v1.png": ("wmma_v1", "wmma/wmma_v1.cu", "return all_visible ||"),
    "banks_wmma_v2.png": ("wmma_v2", "wmma/wmma_v2.cu", "wmma::load_matrix_sync(k_fragment"),
}
FRAGMENTS = {  # entries of lane_maps.cu: what they hold
    "matrix_a_half_row": "left operand (Q, P)",
    "matrix_b_half_column": "right operand (Kᵀ)",
    "accumulator_row": "accumulator (S, O)",
}

TIMELINE = "timeline_wgmma_sm90.png"


def draw_request(name: str, folder: Path) -> None:
    """A head of 32 queries and keys, d = 64."""
    kernel, source, beginning = REQUESTS[name]
    q, k, v = torch.randn(3, 1, 1, 32, 64, generator=torch.Generator().manual_seed(0))
    profile = flash_wmma.profile(q, k, v, kernel=kernel)
    profile.plot_banks(f"{FORWARD}{source}:{quote.line_of(FORWARD + source, beginning) + 1}", folder / name)


def holders(entry: str) -> dict[tuple[int, int], tuple[int, int]]:
    """Lane and element that hold (row, column) of a 16 x 16 tile, as a fragment of the tile's own indices says."""
    out = torch.full((32, 16), -1.0)
    flash_wmma.emulator.Program(LANE_MAPS).call(entry, out)
    index = out[:, :8].int().tolist()  # half operands hold each element twice
    column_major = entry.endswith("column")
    return {
        (divmod(at, 16)[::-1] if column_major else divmod(at, 16)): (lane, i)
        for lane, row in enumerate(index)
        for i, at in enumerate(row)
    }


def draw_fragments(path: Path) -> None:
    """Each element of a tile with the lane that holds it; its colour is the lane's quad."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(FRAGMENTS), figsize=(18, 6.4), layout="constrained")
    for panel, (entry, title) in zip(panels, FRAGMENTS.items(), strict=True):
        places = holders(entry)
        if len(places) != 256:
            raise ValueError(f"{entry}: {len(places)} elements of a tile are held, 256 should be")
        quads = [[places[r, c][0] // 4 for c in range(16)] for r in range(16)]
        panel.imshow(quads, cmap="Pastel1", vmin=0, vmax=8)
        for (r, c), (lane, i) in places.items():
            panel.text(c, r, f"{lane}\nx[{i}]", ha="center", va="center", fontsize=6)
        panel.set(title=title, xlabel="column", ylabel="row", xticks=range(16), yticks=range(16))
    figure.suptitle("Which lane holds an element, and as which of its own; colours: the four lanes of a quad")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_timeline(path: Path) -> None:
    """A block of `wgmma_sm90`: two warpgroups of consumers, six tiles of 128 keys, four stages."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 256, 64, generator=generator).half()
    k, v = torch.randn(2, 1, 1, 768, 64, generator=generator).half()
    flash_wmma.profile(q, k, v, kernel="wgmma_sm90", arch=90).plot_timeline(path)


if __name__ == "__main__":
    for name in REQUESTS:
        draw_request(name, IMAGES)
    draw_fragments(IMAGES / "fragments.png")
    draw_timeline(IMAGES / TIMELINE)
