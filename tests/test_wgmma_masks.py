"""Biases, boolean masks, ALiBi and key ranges of wgmma_sm90: which tiles a mask hides, every way that a bias is read,
scores that defeat the old maximum under a bias. In the emulator, checked."""

from __future__ import annotations

import math
import re

import pytest
import torch
from reference import DENSE, Mask, Modification, attention, poisoned_memory
from torch import Tensor

import flash_wmma

KEYS = 64
"""Of a tile."""
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of the largest value of an output


def tensors(nq: int, nk: int, d: int = 64, dtype: torch.dtype = torch.float16, b: int = 1) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(nq + nk + d)
    return tuple(torch.randn(b, 2, n, d, generator=make).to(dtype) for n in (nq, nk, nk))


def check(
    q: Tensor, k: Tensor, v: Tensor, modification: Modification, mask: Mask = DENSE, sm_count: int = 2
) -> tuple[Tensor, Tensor]:
    options = modification._asdict() | mask._asdict()
    with flash_wmma.emulator.settings(mode="checked", sm_count=sm_count), poisoned_memory():
        out, lse = flash_wmma.forward(q, k, v, kernel="wgmma_sm90", return_lse=True, **options)
    expected, expected_lse = attention(q.double(), k.double(), v.double(), mask, None, modification)
    assert (out - expected).abs().max() <= TOLERANCE[q.dtype] * expected.abs().max().clamp_min(1e-6)
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    assert torch.equal(out == 0, (out == 0) | expected_lse.isneginf()[..., None])
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=1e-4)
    return out, lse


def within_nan(bias: Tensor, left: int = 1, right: int = 2) -> Tensor:
    """The bias as a part of a tensor, everything around it NaN, or true."""
    b, h, nq, nk = bias.shape
    around = True if bias.dtype == torch.bool else math.nan
    storage = torch.full((b, h, nq + 2, left + nk + right), around, dtype=bias.dtype)
    storage[:, :, 1:-1, left : left + nk] = bias
    return storage[:, :, 1:-1, left : left + nk]


def visible(nq: int, nk: int, tiles: list[str]) -> Tensor:
    """A mask whose tiles of keys are each hidden, free, or mixed."""
    seen = torch.rand(1, 2, nq, nk, generator=torch.Generator().manual_seed(len(tiles))) > 0.5
    for i, kind in enumerate(tiles):
        if kind != "mixed":
            seen[..., i * KEYS : (i + 1) * KEYS] = kind == "free"
    return seen


TILES = {
    "hidden first": ["hidden", "mixed", "free"],
    "hidden last": ["free", "mixed", "hidden"],
    "hidden in the middle": ["mixed", "hidden", "free"],
    "hidden first and last": ["hidden", "free", "mixed", "hidden"],
    "all hidden": ["hidden"] * 3,
    "all free": ["free"] * 3,
    "many hidden": ["mixed", *["hidden"] * 9, "free", *["hidden"] * 3],
}


@pytest.mark.parametrize("causal", [False, "top_left"])
@pytest.mark.parametrize("rest", [0, 27])
@pytest.mark.parametrize("tiles", TILES)
def test_tiles_of_a_mask(tiles: str, rest: int, causal: bool | str) -> None:
    nk = len(TILES[tiles]) * KEYS - rest
    check(*tensors(100, nk), Modification(within_nan(visible(100, nk, TILES[tiles]))), Mask(causal))


@pytest.mark.parametrize("nk", [64, 65, 300, 640])
@pytest.mark.parametrize("key", ["first", "last"])
def test_a_single_key(key: str, nk: int) -> None:
    """Its value, to the bit."""
    q, k, v = tensors(70, nk)
    seen = torch.zeros(1, 1, 70, nk, dtype=torch.bool)
    seen[..., 0 if key == "first" else -1] = True
    out, _ = check(q, k, v, Modification(seen))
    assert torch.equal(out, v[:, :, [0 if key == "first" else -1]].expand_as(out))


@pytest.mark.parametrize("shape", ["B11N", "BHNN", "11NN", "B1NN", "1HNN", "BH1N"])
def test_broadcast_masks(shape: str) -> None:
    """Also in another order of dimensions, with gaps, and with a stride of 0 for a whole dimension."""
    b, nq, nk = 2, 210, 150
    sizes = [b if shape[0] == "B" else 1, 2 if shape[1] == "H" else 1, nq if shape[2] == "N" else 1, nk]
    seen = torch.rand(sizes, generator=torch.Generator().manual_seed(3)) > 0.3
    q, k, v = tensors(nq, nk, b=b)
    expected = check(q, k, v, Modification(seen))
    for other in (seen.expand(b, 2, nq, nk), within_nan(seen), seen.mT.contiguous().mT):
        assert all(map(torch.equal, expected, check(q, k, v, Modification(other))))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_blocks_that_groups_of_rows_do_not_see(d: int) -> None:
    """Each 64 rows of a Q tile see tiles of their own, so that they pass over those of the others, also more of them in
    a row than the ring has places."""
    q, k, v = tensors(330, 1000, d)
    seen = torch.zeros(1, 1, 330, 1000, dtype=torch.bool)
    for group, tiles in enumerate([(0, 15), (7,), (), (3, 4, 5), (14, 1), (0, 9)]):
        for tile in tiles:
            seen[..., group * 64 : (group + 1) * 64, tile * KEYS : (tile + 1) * KEYS] = True
    seen[..., 300:310, 5] = True
    check(q, k, v, Modification(seen), sm_count=1)
    check(q, k, v, Modification(seen), Mask("bottom_right", (500, None)), sm_count=3)


def test_queue_of_masked_items() -> None:
    q, k, v = (t.repeat(1, 3, 1, 1) for t in tensors(400, 520))
    seen = torch.rand(1, 6, 400, 520, generator=torch.Generator().manual_seed(9)) > 0.9
    check(q, k, v, Modification(seen))


@pytest.mark.parametrize("hidden", ["mask", "ranges"])
@pytest.mark.parametrize("d", [64, 192])
def test_queue_of_items_with_tiles_at_the_end_that_few_rows_see(d: int, hidden: str) -> None:
    """Other rows are done while most of the item's tiles are still to be loaded. Of the mask those are rows that a Q
    tile has beyond the last query, if no row of it sees the first keys."""
    q, k, v = (t.repeat(1, 3, 1, 1) for t in tensors(400, 1000, d))
    if hidden == "mask":
        seen = torch.ones(1, 1, 400, 1000, dtype=torch.bool)
        seen[..., :64] = False
        check(q, k, v, Modification(seen))
    else:
        first = torch.arange(400) // 64 % 2 * 900
        ranges = torch.stack((first, torch.full((400,), 1000)), -1)[None, None].int()
        check(q, k, v, Modification(key_ranges=ranges))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["wide", "pairs", "singly", "transposed", "per row", "shared", "fp32", "fp32 singly"])
def test_ways_to_read_a_bias(kind: str, dtype: torch.dtype) -> None:
    """By 16 bytes, by pairs and one by one, beside a margin of NaN; the last tile of keys is incomplete."""
    nq, nk = 90, 200
    make = torch.Generator().manual_seed(4)
    bias = torch.randn(1, 2, nq, nk, generator=make).to(torch.float32 if "fp32" in kind else dtype)
    left, right = {"wide": (8, 8), "pairs": (2, 2)}.get(kind, (1, 2))
    if kind == "transposed":
        bias = within_nan(bias.mT).mT
    elif kind == "per row":
        bias = bias[..., :1]
    elif kind == "shared":
        bias = bias[:, :1, :1]
    else:
        bias = within_nan(bias, left, right)
    check(*tensors(nq, nk, dtype=dtype), Modification(bias))


@pytest.mark.parametrize("step", [1.0, 10.0, 20.0, 1000.0, -20.0])
@pytest.mark.parametrize("where", ["all rows", "one row", "last tile"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rising_scores_under_a_bias(dtype: torch.dtype, where: str, step: float) -> None:
    """From tile to tile, against the direction of the loop, which is backwards, so that the old maximum fails."""
    nq, nk = 70, 512
    bias = torch.zeros(1, 1, nq, nk, dtype=dtype)
    rows = slice(33, 34) if where == "one row" else slice(None)
    tile = torch.arange(nk) // KEYS
    rise = (tile == 0) if where == "last tile" else -tile
    bias[..., rows, :] = (rise * step).to(dtype)
    inputs = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    check(*tensors(nq, nk, dtype=inputs), Modification(bias))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize("slope", [1e-3, 0.5, 8.0, -0.5])
def test_alibi(slope: float, causal: bool | str, softcap: float) -> None:
    """Left and right of the diagonal, and across it."""
    slopes = torch.tensor([slope, slope / 3])
    check(*tensors(150, 400), Modification(alibi_slopes=slopes, softcap=softcap), Mask(causal))
    check(*tensors(400, 150), Modification(alibi_slopes=slopes, softcap=softcap), Mask(causal))


@pytest.mark.parametrize("slope", [0.0, 1e-3, 0.3, 8.0, 1e4, -0.3])
@pytest.mark.parametrize(
    ("nq", "nk"), [(1, 1), (1, 500), (500, 1), (600, 600), (130, 700), (700, 130), (320, 641)], ids=str
)
def test_alibi_from_the_diagonal(slope: float, nq: int, nk: int) -> None:
    """Items whose diagonal lies before the first key, in each tile, and in the last one; three tiles of keys and more
    to its right. The second head's slope is 0, the first head's may be too."""
    q, k, v = tensors(nq, nk)
    slopes = torch.tensor([slope, 0.0])
    check(q, k, v, Modification(alibi_slopes=slopes))
    check(q, k, v, Modification(alibi_slopes=slopes), Mask(False, (40, 150)))


@pytest.mark.parametrize("more", [1, 2, 14, 15])
def test_alibi_about_the_edge_of_a_tile(more: int) -> None:
    """Warps whose first row has the diagonal in a tile's last key or the one before, or whose last row has it in one of
    the first two. Scores are large there. With steeper slopes the lagging maximum is not tried on such a tile."""
    q, k, v = tensors(300, 300 + more)
    q[..., 0] = 8
    k[..., ::KEYS, 0] = k[..., KEYS - 1 :: KEYS, 0] = 3
    check(q, k, v, Modification(alibi_slopes=torch.tensor([0.04, 0.03])))


@pytest.mark.parametrize("slope", [0.05, 0.5, -0.5])
def test_alibi_beside_scores_of_other_scales(slope: float) -> None:
    """Rows whose scores differ by e^200, and a key far right of the diagonal whose score passes what ALiBi takes."""
    q, k, v = tensors(300, 600)
    q[..., ::7, :] *= 100
    q[..., 3, 0], k[..., 590, 0], k[..., 5, 1], q[..., 4, 1] = 60, 60, 60, 60
    check(q, k, v, Modification(alibi_slopes=torch.tensor([slope, slope / 8])))


@pytest.mark.parametrize("bias", [None, "fp16", "fp32", "bool"])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_everything_at_once(d: int, bias: str | None) -> None:
    nq, nk = 150, 330
    make = torch.Generator().manual_seed(d)
    values = torch.randn(1, 2, nq, nk, generator=make)
    added = {None: None, "fp16": values.half(), "fp32": values, "bool": values > 0}[bias]
    ranges = torch.randint(-20, nk + 50, (1, 2, nq, 2), generator=make).int()
    everything = Modification(added, torch.tensor([0.3, 0.01]), ranges, 4.0)
    check(*tensors(nq, nk, d), everything, Mask("bottom_right", (250, None)))


@pytest.mark.parametrize(
    "ranges", [(0, 0), (5, 5), (9, 3), (-4, 1000), (63, 64), (64, 128), (199, 400), (-9, -2), (200, 300)], ids=str
)
def test_ranges_of_all_rows(ranges: tuple[int, int]) -> None:
    given = torch.tensor(ranges, dtype=torch.int32).expand(1, 1, 100, 2)
    check(*tensors(100, 200), Modification(key_ranges=given))


def test_items_of_a_shared_bias_come_together() -> None:
    """Batch entries share the bias: the order of the items is another one, and every item comes once."""
    q, k, v = tensors(300, 70, b=3)
    bias = torch.randn(1, 2, 300, 70, generator=torch.Generator().manual_seed(1)).half()
    for sm_count in (1, 2, 5):
        check(q, k, v, Modification(bias), sm_count=sm_count)
        check(q, k, v, Modification(bias), Mask("top_left"), sm_count=sm_count)


def test_packed_sequences() -> None:
    """A mask that sequences share or have each, which is read within its bounds."""
    lengths = (70, 0, 130, 1)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in tensors(201, 201))
    for batch in (1, 4):
        seen = torch.rand(batch, 2, 130, 130, generator=torch.Generator().manual_seed(batch)) > 0.5
        for bias in (seen, torch.where(seen, 0.5, -0.25).half()):
            with flash_wmma.emulator.settings(mode="checked", sm_count=2), poisoned_memory():
                out = flash_wmma.forward_varlen(
                    q, k, v, cu, cu, 130, 130, attn_bias=within_nan(bias), causal=True, kernel="wgmma_sm90"
                )
            for i, n in enumerate(lengths):
                rows = slice(int(cu[i]), int(cu[i + 1]))
                one = [t[rows].transpose(0, 1)[None].double() for t in (q, k, v)]
                own = bias[min(i, batch - 1), None, :, :n, :n]
                expected, _ = attention(*one, Mask("bottom_right"), None, Modification(own))
                torch.testing.assert_close(out[rows].transpose(0, 1)[None].double(), expected, atol=4e-3, rtol=2e-3)


def test_hidden_tiles_are_not_loaded() -> None:
    """Half of the tiles hidden from all rows: about half of the copies."""
    q, k, v = tensors(128, 1024)
    loads = []
    for hidden in (False, True):
        seen = torch.ones(1, 1, 128, 1024, dtype=torch.bool)
        if hidden:
            seen.view(1, 1, 128, 8, 2, KEYS)[:, :, :, :, 0] = False
        with flash_wmma.emulator.settings(sm_count=2):
            profile = flash_wmma.profile(q, k, v, kernel="wgmma_sm90", attn_bias=seen)
        assert [launch.name for launch in profile.launches] == ["look_at_mask", "forward"]
        loads.append(profile.counts.instructions["tensor_copy"])
    assert 0.5 < loads[1] / loads[0] < 0.6


@pytest.mark.parametrize("kind", ["tiles", "mask", "fp32", "unaligned", "odd rows"])
def test_explain_names_the_tile_that_runs(kind: str) -> None:
    """The choice depends on the bias's type, strides and alignment: the copy engine takes some of them."""
    q, k, v = tensors(256, 200, 64)
    whole = torch.randn(1, 1, 256, 201).half()
    bias = {
        "tiles": whole[..., :200].contiguous(),
        "mask": whole[..., :200] > 0,
        "fp32": whole[..., :200].float(),
        "unaligned": torch.randn(256 * 200 + 1).half()[1:].view(1, 1, 256, 200),
        "odd rows": whole[..., :200],
    }[kind]
    with flash_wmma.emulator.settings(arch=90, sm_count=2):
        instance = flash_wmma.explain(q, k, v, attn_bias=bias, kernel="wgmma_sm90").instance
        profile = flash_wmma.profile(q, k, v, attn_bias=bias, kernel="wgmma_sm90")
    (function,) = {launch.function for launch in profile.launches if launch.name == "forward"}
    shape = re.search(r"TileShape\{\d+, \d+, \d+, (\d+), \w+, (\d+), (\d+), \d+(, true)?\}", function)
    assert shape is not None, function
    consumers, keys, stages = map(int, shape.groups()[:3])
    assert instance is not None
    assert (instance.br, instance.bc, instance.stages) == (64 * consumers, keys, stages)
    assert (shape[4] is not None) == (kind == "tiles")
