"""Draws the pictures of docs that need no GPU. Called as

    python docs/pictures.py                  # all of them, into docs/images

From the emulator: one request of a kernel, by a line of its source, with the banks of shared memory or the sectors of
global memory that each lane touches; the lanes that hold the elements of WMMA's fragments; what the warps of a block
wait for, over time. From docs/data: the throughput over N that README shows.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import matplotlib
import torch

import flash_wmma

sys.path.insert(0, str(Path(__file__).parent))
import quote

IMAGES = Path(__file__).resolve().parent / "images"
LANE_MAPS = quote.ROOT / "tests" / "emulator" / "lane_maps.cu"
REQUESTS = {  # file: the kernel, its source, and how the line with the request begins
    "sectors_simt_naive.png": (
        "simt_naive",
        "forward/simt/simt_naive.cu",
        "for (int c = 0; c < p.head_dim; ++c) product",
    ),
    "sectors_simt_coalesced.png": (
        "simt_coalesced",
        "forward/simt/simt_coalesced.cu",
        "for (int c = lane; c < p.head_dim; c",
    ),
    "banks_simt_shared.png": (
        "simt_shared",
        "forward/simt/shared_rung.cuh",
        "for (int c = 0; c < p.head_dim; ++c) product",
    ),
    "banks_simt_padded.png": (
        "simt_padded",
        "forward/simt/shared_rung.cuh",
        "for (int c = 0; c < p.head_dim; ++c) product",
    ),
    "banks_wmma_v1.png": ("wmma_v1", "forward/wmma/wmma_v1.cu", "return all_visible ||"),
    "banks_wmma_v2.png": ("wmma_v2", "forward/wmma/wmma_v2.cu", "wmma::load_matrix_sync(k_fragment"),
    "banks_mma_sm75.png": ("mma_sm75", "forward/mma/products.cuh", "ptx::ldmatrix_x4(b, k_lane"),
    "copies_mma_sm80.png": ("mma_sm80", "device/sm80.cuh", "ptx::cp_async_16(to, from, inside"),
}
FRAGMENTS = {  # entries of lane_maps.cu: what they hold
    "matrix_a_half_row": "left operand (Q, P)",
    "matrix_b_half_column": "right operand (Kᵀ)",
    "accumulator_row": "accumulator (S, O)",
}

TIMELINE = "timeline_wgmma_sm90.png"
FORWARD_DATA = quote.ROOT / "docs" / "data" / "forward_h200.json"
LINES = {  # contender: label, colour, width
    "wgmma_sm90": ("flash_wmma: wgmma_sm90", "#0072b2", 3.5),
    "mma_sm80": ("flash_wmma: mma_sm80", "#56a5d8", 2.0),
    "sdpa_cudnn": ("cuDNN (SDPA)", "#555555", 1.5),
    "sdpa_flash": ("FlashAttention-2 (SDPA)", "#999999", 1.5),
}


def draw_request(name: str, folder: Path) -> None:
    """A head of 64 queries and keys, d = 64."""
    kernel, source, beginning = REQUESTS[name]
    dtype = torch.float32 if kernel.startswith("simt") else torch.float16
    q, k, v = torch.randn(3, 1, 1, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    profile = flash_wmma.profile(q, k, v, kernel=kernel)
    profile.plot_banks(f"csrc/{source}:{quote.line_of(f'csrc/{source}', beginning) + 1}", folder / name)


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


def apart(heights: list[float], gap: float) -> list[float]:
    """The heights, moved upwards as far as labels that must not touch need."""
    moved = list(heights)
    order = sorted(range(len(heights)), key=heights.__getitem__)
    for lower, upper in itertools.pairwise(order):
        moved[upper] = max(moved[upper], moved[lower] + gap)
    return moved


def draw_forward(path: Path) -> None:
    """TFLOP/s over N of the fast kernels and of SDPA's, a panel for each head dim, not causal."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = json.loads(FORWARD_DATA.read_text())
    rows = [row for row in data["rows"] if not row["problem"]["causal"]]
    head_dims = sorted({row["problem"]["head_dim"] for row in rows})
    figure, panels = plt.subplots(1, len(head_dims), figsize=(11, 3.3), sharey=True, layout="constrained")
    for panel, head_dim in zip(panels, head_dims, strict=True):
        shown = [row for row in rows if row["problem"]["head_dim"] == head_dim]
        lengths = [row["problem"]["length"] for row in shown]
        speeds = {name: [row["cells"][name]["tflops"] for row in shown] for name in LINES}
        heights = apart([line[-1] for line in speeds.values()], 50)
        for (name, (label, colour, width)), height in zip(LINES.items(), heights, strict=True):
            panel.plot(lengths, speeds[name], "o-", color=colour, linewidth=width, markersize=width + 2)
            named = f"  {label}" if panel is panels[-1] else ""
            at = (1.03, height)
            text = f"{speeds[name][-1]:.0f}{named}"
            panel.annotate(text, at, xycoords=("axes fraction", "data"), va="center", color=colour, weight="bold")
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [f"{n:,}" for n in lengths])
        panel.set(title=f"d = {head_dim}", xlabel="N", ylim=(0, 850))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("TFLOP/s")
    device = data["environment"]["device"]
    figure.suptitle(f"{device}, fp16 forward, 16,384 tokens, hidden size 2048, not causal", fontsize=10)
    figure.savefig(path, dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    draw_forward(IMAGES / "forward.png")
    for name in REQUESTS:
        draw_request(name, IMAGES)
    draw_fragments(IMAGES / "fragments.png")
    draw_timeline(IMAGES / TIMELINE)
