"""Every tile shape of bwd_sm90, its items, its rings and packed sequences. In the emulator, checked."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from reference import DENSE, PLAIN, Mask, Modification, attention, poisoned_memory
from torch import Tensor

import flash_wmma
from flash_wmma._call import band
from flash_wmma._library import ops
from flash_wmma.emulator._runtime import alone, take_profile

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest value of a gradient
DEVICE = flash_wmma.DeviceFacts(arch=90, sm_count=132, smem_optin=227 * 1024)
SHAPES = [64, 96, 128, 192, 256]
"""The largest head dim of each tile shape. Two consumers have 64 keys each up to 128, above that the same 64; at 256
two blocks have 64 each of an item's 128."""
LONG = 1100
"""Keys of a sequence in which blocks never write dQ by turns, though above d = 128 they may have to add in order."""
SLOW = pytest.mark.parametrize("slow", [False, True])
"""Whether memory is slow, so that short sequences go by two passes, or above d = 128 blocks take turns at dQ."""


def memory_bus(slow: bool) -> int:
    """Bits, of an H100, or not known."""
    return 5120 if slow else 0


class Case(NamedTuple):
    nq: int
    nk: int
    mask: Mask = DENSE
    heads: tuple[int, int] = (2, 1)
    batch: int = 1


class Attention(NamedTuple):
    """What the kernel is given, beside a mask and what changes scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    out: Tensor
    lse: Tensor


def additive(modification: Modification) -> bool:
    """Whether there is a bias that has a gradient."""
    return modification.attn_bias is not None and modification.attn_bias.is_floating_point()


def solved(
    case: Case, d: int, dv: int, dtype: torch.dtype, seed: int = 0, modification: Modification = PLAIN
) -> tuple[Attention, list[Tensor]]:
    """Inputs, and float64's gradients of q, k and v, and of an additive bias."""
    make = torch.Generator().manual_seed(seed)
    (hq, hk), b = case.heads, case.batch
    shapes = ((b, hq, case.nq, d), (b, hk, case.nk, d), (b, hk, case.nk, dv), (b, hq, case.nq, dv))
    q, k, v, dout = (torch.randn(shape, generator=make).to(dtype) for shape in shapes)
    dlse = torch.randn(b, hq, case.nq, generator=make)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    if additive(modification):
        leaves.append(modification.attn_bias.double().requires_grad_())  # type: ignore[union-attr]
        modification = modification._replace(attn_bias=leaves[3])
    out, lse = attention(*leaves[:3], case.mask, None, modification)
    loss = (out * dout.double()).sum() + (lse.masked_fill(lse.isneginf(), 0) * dlse.double()).sum()
    expected = list(torch.autograd.grad(loss, leaves))
    return Attention(q, k, v, dout, dlse, out.detach().to(dtype), lse.detach().float()), expected


def judge(
    gradients: Sequence[Tensor],
    expected: Sequence[Tensor],
    dtype: torch.dtype,
    largest: Sequence[float] | None = None,
    drops: bool = False,
) -> None:
    """In units of the largest value of each gradient, or of `largest`. With dropout a query that sees but one key has a
    gradient of 0, which is but nearly so after rounding."""
    if largest is None:
        largest = [t.abs().amax().item() for t in expected]
    names = ("dq", "dk", "dv", "dbias")[: len(expected)]
    for name, got, want, unit in zip(names, gradients, expected, largest, strict=True):
        assert got.shape == want.shape
        assert not got.isnan().any(), f"NaN in {name}"
        error = (got.double() - want).abs().max().item() / max(unit, 1e-6) if got.numel() else 0.0
        assert error <= TOLERANCE[dtype], f"{name}: {error}"
        if not drops:
            assert not got[want.abs().sum(3) == 0].any(), f"{name} of a row without weights"


def compute(
    given: Attention,
    mask: Mask = DENSE,
    sm_count: int = 2,
    seed: int = 0,
    deterministic: bool = False,
    modification: Modification = PLAIN,
    slow: bool = False,
) -> list[Tensor]:
    """The kernel's gradients of q, k and v, and of an additive bias, from poisoned memory."""
    emulated = {"sm_count": sm_count, "seed": seed, "memory_bus": memory_bus(slow)}
    with flash_wmma.emulator.settings(mode="checked", **emulated), poisoned_memory():
        *gradients, dbias = ops.backward(
            *(given.dout, given.dlse, given.q, given.k, given.v, given.out, given.lse, None),
            *band(mask.causal, mask.window),
            *modification,
            bias_grad=additive(modification),
            deterministic=deterministic,
            kernel_name="bwd_sm90",
        )
    return [*gradients, dbias] if additive(modification) else gradients


def profiled(
    case: Case, d: int, modification: Modification = PLAIN, deterministic: bool = False, **emulated: int
) -> list[dict[str, Any]]:
    """A call's grids, in their order, on such a device: their names and counts."""
    (hq, hk), b = case.heads, case.batch
    q, k = torch.randn(b, hq, case.nq, d).half(), torch.randn(b, hk, case.nk, d).half()
    with alone(), flash_wmma.emulator.settings(mode="checked", counters=True, **emulated):
        take_profile()
        ops.backward(
            *(q, None, q, k, k, q, torch.zeros(b, hq, case.nq), None),
            *band(case.mask.causal, case.mask.window),
            *modification,
            deterministic=deterministic,
            kernel_name="bwd_sm90",
        )
        grids: list[dict[str, Any]] = json.loads(take_profile())
        return grids


def launches(
    case: Case, d: int, modification: Modification = PLAIN, deterministic: bool = False, **emulated: int
) -> list[str]:
    """The names of a call's grids, in their order, on such a device."""
    return [grid["kernel"] for grid in profiled(case, d, modification, deterministic, **emulated)]


def has_grid(grid: str, case: Case, d: int, sm_count: int, deterministic: bool = False, slow: bool = False) -> bool:
    names = launches(case, d, PLAIN, deterministic, sm_count=sm_count, memory_bus=memory_bus(slow))
    return any(grid in name for name in names)


def begins_beside_prepare(case: Case, d: int, sm_count: int, deterministic: bool = False, slow: bool = False) -> bool:
    return has_grid("prepare_beside", case, d, sm_count, deterministic, slow)


def check(
    case: Case,
    d: int,
    dv: int | None = None,
    dtype: torch.dtype = torch.float16,
    sm_count: int = 2,
    seed: int = 0,
    deterministic: bool = False,
    modification: Modification = PLAIN,
    slow: bool = False,
) -> None:
    given, expected = solved(case, d, dv or d, dtype, modification=modification)
    judge(compute(given, case.mask, sm_count, seed, deterministic, modification, slow), expected, dtype)


def check_packed(
    lengths: list[tuple[int, int, int]],
    mask: Mask,
    d: int,
    dv: int,
    bad: tuple[int, ...] = (),
    sm_count: int = 2,
    deterministic: bool = False,
    bound: int = 0,
    slow: bool = False,
) -> None:
    """Of sequences of (queries, keys, keys in use), for which the caller says that they have at most `bound` keys. Rows
    of no sequence, keys that are not in use and the sequences `bad` hold NaN and infinity, which reach nothing else."""
    dtype, heads, margin = torch.float16, (2, 1), 3
    ends_q = [margin, *itertools.accumulate((n for n, _, _ in lengths), initial=margin)][1:]
    ends_k = [margin, *itertools.accumulate((n for _, n, _ in lengths), initial=margin)][1:]
    total_q, total_k = ends_q[-1] + 5, ends_k[-1] + 7
    shapes = ((total_q, 2, d), (total_k, 1, d), (total_k, 1, dv), (total_q, 2, dv), (total_q, 2, dv))
    q, k, v, dout, out = (torch.full(shape, math.nan, dtype=dtype) for shape in shapes)
    k[::2] = v[::2] = math.inf
    dlse, lse = torch.full((2, 2, total_q), math.nan)
    truth = []
    for b, (nq, _, used) in enumerate(lengths):
        given, expected = solved(Case(nq, used, mask, heads), d, dv, dtype, seed=b)
        truth.append(expected)
        rows, keys = slice(ends_q[b], ends_q[b] + nq), slice(ends_k[b], ends_k[b] + used)
        if b in bad:
            continue
        for packed, own in ((q, given.q), (dout, given.dout), (out, given.out)):
            packed[rows] = own[0].transpose(0, 1)
        for packed, own in ((k, given.k), (v, given.v)):
            packed[keys] = own[0].transpose(0, 1)
        dlse[:, rows], lse[:, rows] = given.dlse[0], given.lse[0]
    tables = [torch.tensor(t, dtype=torch.int32) for t in (ends_q, ends_k, [used for _, _, used in lengths])]
    longest = [max(column) for column in zip(*lengths, strict=True)]
    longest[1] = max(longest[1], bound)
    emulated = {"sm_count": sm_count, "memory_bus": memory_bus(slow)}
    with flash_wmma.emulator.settings(mode="checked", **emulated), poisoned_memory():
        dq, dk, dv_, _ = ops.backward_varlen(
            *(dout, dlse, q, k, v, out, lse, *tables, *longest[:2], None),
            *band(mask.causal, mask.window),
            deterministic=deterministic,
            kernel_name="bwd_sm90",
        )
    largest = [max(t.abs().max().item() for t in same if t.numel()) for same in zip(*truth, strict=True)]
    outside_q, outside_k = torch.ones(total_q, dtype=torch.bool), torch.ones(total_k, dtype=torch.bool)
    for b, (nq, _, used) in enumerate(lengths):
        rows, keys = slice(ends_q[b], ends_q[b] + nq), slice(ends_k[b], ends_k[b] + used)
        outside_q[rows], outside_k[keys] = False, False
        own = [t[s].transpose(0, 1)[None] for t, s in ((dq, rows), (dk, keys), (dv_, keys))]
        if b not in bad:
            judge(own, truth[b], dtype, largest)
    assert not dq[outside_q].any()
    assert not dk[outside_k].any()
    assert not dv_[outside_k].any()


EDGES = [
    (1, 5, 5),
    (0, 40, 40),
    (127, 128, 128),
    (30, 0, 0),
    (128, 129, 127),
    (129, 127, 127),
    (1, 1, 1),
    (64, 200, 65),
]


@SLOW
@pytest.mark.parametrize("mask", [DENSE, Mask(True), Mask("bottom_right", (70, 0))], ids=str)
@pytest.mark.parametrize("d", SHAPES)
def test_packed(d: int, mask: Mask, slow: bool) -> None:
    """Lengths around a tile of 64 and of 128, none, one; keys that are not in use, in whole tiles too."""
    check_packed([*EDGES, (65, 300, 20)], mask, d, d, slow=slow)


@pytest.mark.parametrize(("d", "dv"), [(40, 64), (128, 72), (136, 192), (256, 200)])
def test_packed_among_infinite_ones(d: int, dv: int) -> None:
    """Every second sequence is NaN, one block works on all."""
    lengths = [(70, 70, 70), (20, 150, 130), (130, 60, 60), (65, 64, 64), (64, 65, 65), (3, 3, 3)]
    check_packed(lengths, Mask("bottom_right"), d, dv, bad=(1, 3, 5), sm_count=1, slow=True)
    check_packed(lengths, DENSE, d, dv, bad=(0, 2, 4))


@pytest.mark.parametrize("d", [64, 256])
def test_many_packed_sequences(d: int) -> None:
    """More than the lanes of a warp, which looks their tiles up."""
    check_packed([(b * 5 % 11, b * 7 % 13, b * 7 % 13) for b in range(70)], Mask(True), d, d)


@pytest.mark.parametrize(
    ("d", "dv"),
    [
        *[(8, 64), (64, 40), (72, 128), (128, 120), (120, 16)],
        *[(136, 136), (192, 192), (8, 192), (184, 64), (200, 200), (256, 256), (64, 248), (256, 136)],
    ],
)
def test_head_dims(d: int, dv: int) -> None:
    """Narrower than the tile on either side, whole panels of 64 columns among them."""
    check(Case(150, 200, Mask("bottom_right")), d, dv, slow=True)
    check(Case(90, 130, batch=2), d, dv, torch.bfloat16)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_grouped_heads_in_order(d: int, slow: bool) -> None:
    """Causal. There are so few multiprocessors that heads come together in two batches, one larger than the other. In a
    head there are items that walk down and items that walk up."""
    check(Case(330, 330, Mask(True), heads=(18, 9)), d, sm_count=12 if d > 128 else 6, slow=slow)
    check(Case(130, 200, Mask("bottom_right"), heads=(3, 1), batch=3), d, sm_count=2, slow=slow)


BANDS = {
    "window": ((520, 520), Mask(True, window=(140, None)), (4, 2)),
    "both sides": ((520, 520), Mask(window=(80, 60)), (2, 1)),
    "left": ((330, 330), Mask(window=(40, None)), (4, 2)),  # the last item is the longest
    "middle": ((260, 520), Mask(window=(0, 260)), (2, 1)),  # an item in the middle is
    "one head": ((260, 520), Mask(window=(0, 260)), (2, 2)),
    "few queries": ((70, 520), Mask("bottom_right", window=(140, None)), (4, 2)),
}


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("d", "slow"), [(64, False), (128, False), (128, True), (256, False)])
def test_order_with_a_band(d: int, slow: bool, band: str) -> None:
    """Items of a head are of different lengths, begin at different tiles and walk in different directions."""
    (nq, nk), mask, heads = BANDS[band]
    check(Case(nq, nk, mask, heads=heads), d, sm_count=2, slow=slow)


@pytest.mark.parametrize("sm_count", [2, 6, 9, 24])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 72), (128, 128)])
def test_items_in_parts(d: int, dv: int, sm_count: int) -> None:
    """There are so few items that those of the last round, or all, go in parts. Their sums find room in dq, or none."""
    check(Case(300, 300, heads=(12, 1)), d, dv, sm_count=sm_count)
    check(Case(300, 700, heads=(12, 1)), d, dv, sm_count=sm_count)
    check(Case(700, 130, heads=(10, 2), batch=2), d, dv, torch.bfloat16, sm_count=sm_count)


@pytest.mark.parametrize(("d", "slow"), [*((d, False) for d in SHAPES), *((d, True) for d in SHAPES if d <= 128)])
@pytest.mark.parametrize(
    "case",
    [
        Case(300, 300, Mask(True), heads=(4, 2), batch=2),
        Case(257, 200, Mask("bottom_right", (90, 0)), heads=(6, 3), batch=2),
        Case(250, 230, Mask(True), heads=(8, 2), batch=2),
        Case(230, 250, Mask(window=(130, None)), heads=(9, 3), batch=2),
    ],
    ids=str,
)
def test_prepare_beside_products(d: int, slow: bool, case: Case) -> None:
    """Rows are enough for two parts of each warp that prepares, and the last part of a head has few rows or none. Rows
    of heads that share keys come together, from the last ones or from the first, 64 or 128 at a time."""
    if d == 256:  # pairs, of which each row has to see more keys
        case = case._replace(nk=1100, mask=Mask("bottom_right"), batch=1)
    assert begins_beside_prepare(case, d, sm_count=2, slow=slow)
    check(case, d, sm_count=2, slow=slow)


@pytest.mark.parametrize(
    ("d", "case", "sm_count"),
    [(64, Case(448, 1280, heads=(5, 5)), 6), (128, Case(960, 4200, heads=(2, 1)), 4)],
    ids=["whole", "in parts"],
)
def test_equal_items_beside_prepare(d: int, case: Case, sm_count: int) -> None:
    """Blocks that come late cost no round. Items of the last round go in parts, or not."""
    assert begins_beside_prepare(case, d, sm_count)
    check(case, d, dtype=torch.bfloat16, sm_count=sm_count)


@pytest.mark.parametrize("d", [64, 128])
def test_few_equal_items_beside_prepare(d: int) -> None:
    """Two of six SMs lack an item in the last round. One of them prepares the second head of keys' rows beside the
    first items."""
    case = Case(300, 1000, heads=(8, 2))
    names = launches(case, d, sm_count=6, memory_bus=memory_bus(slow=False))
    assert sum("prepare_beside" in name for name in names) == 2
    assert any("finish_beside" in name for name in names)
    assert any(f"TileShape{{{d}, " in name for name in names)
    check(case, d, dtype=torch.bfloat16, sm_count=6)


def prepared_parts(grid: dict[str, Any]) -> int:
    """How many parts of rows a grid of prepare_beside counts: a lane each, in one atomic instruction of its code."""
    return max(count["lanes"] for count in grid["counts"] if count["what"] == "atomic")


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("case", "sm_count", "heads", "finishes"),
    [
        (Case(700, 640, heads=(6, 2)), 6, 3, True),
        (Case(700, 700, Mask(True), heads=(12, 3)), 10, 12, False),  # all heads come together
        (Case(700, 700, Mask(window=(0, None)), heads=(12, 3)), 10, 12, False),
    ],
    ids=["equal items", "causal", "reverse causal"],
)
def test_first_rows_are_prepared_ahead(d: int, case: Case, sm_count: int, heads: int, finishes: bool) -> None:
    """Where heads share keys and items are few: 512 rows of the first items' heads by all SMs, the others by one of
    those that lack an item in the last round. Heads that come together are complete at the end."""
    grids = profiled(case, d, sm_count=sm_count, memory_bus=memory_bus(slow=False))
    ahead, others = (grid for grid in grids if "prepare_beside" in grid["kernel"])
    rows_of_part = 32 if d == 64 else 16
    assert prepared_parts(ahead) == heads * 512 // rows_of_part
    assert prepared_parts(others) == (case.heads[0] * 704 - heads * 512) // rows_of_part
    assert ahead["grid"] == [sm_count, 1, 1] and others["grid"] == [1, 1, 1]
    assert any("finish_beside" in grid["kernel"] for grid in grids) == finishes
    check(case, d, dtype=torch.bfloat16, sm_count=sm_count)


@pytest.mark.parametrize("d", [64, 128])
def test_first_heads_are_prepared_ahead(d: int) -> None:
    """Where items are equal and heads do not share keys: the first of two heads. One of the two multiprocessors that
    lack an item in the last round prepares the other."""
    case = Case(1000, 640, heads=(2, 2))
    grids = profiled(case, d, sm_count=6, memory_bus=memory_bus(slow=False))
    parts = [prepared_parts(grid) for grid in grids if "prepare_beside" in grid["kernel"]]
    assert parts == 2 * [1024 // (32 if d == 64 else 16)]
    assert any("finish_beside" in grid["kernel"] for grid in grids)
    check(case, d, dtype=torch.bfloat16, sm_count=6)


@pytest.mark.parametrize(
    ("d", "sm_count", "ahead", "finishes"),
    [
        (64, 12, True, False),  # one of two blocks has time for all other rows
        (64, 8, False, False),  # the only one has not
        (128, 12, False, False),  # all heads come together
        (128, 8, False, True),  # heads become dq one by one
    ],
)
def test_few_grouped_items_of_two_rounds(d: int, sm_count: int, ahead: bool, finishes: bool) -> None:
    """Up to d = 64 no more blocks prepare than have to, if they are in time. Above it a sixth of the multiprocessors
    does, with nothing ahead."""
    case = Case(600, 700, Mask(True), heads=(8, 4))
    grids = profiled(case, d, sm_count=sm_count, memory_bus=memory_bus(slow=False))
    blocks = [grid["grid"][0] for grid in grids if "prepare_beside" in grid["kernel"]]
    assert blocks == ([sm_count, 1] if ahead else [sm_count // 6])
    assert any("finish_beside" in grid["kernel"] for grid in grids) == finishes
    check(case, d, dtype=torch.bfloat16, sm_count=sm_count)


@pytest.mark.parametrize("d", [72, 128])
@pytest.mark.parametrize(
    ("case", "grids"),
    [
        (Case(300, 300, Mask(True), heads=(6, 6)), 2),  # two heads have the first six items
        (Case(310, 300, Mask("bottom_right"), heads=(12, 6)), 1),  # rows come in the order of the products
        (Case(300, 300, Mask(window=(200, None)), heads=(6, 6)), 2),
        (Case(300, 300, Mask(True), heads=(5, 5)), 0),  # items of all heads but one come by turns
        (Case(300, 300, Mask(window=(100, 10)), heads=(6, 6)), 0),
    ],
)
def test_few_items_beside_prepare(d: int, case: Case, grids: int) -> None:
    """On six SMs. Rows of the heads that have the first items are prepared before, unless heads share keys."""
    names = launches(case, d, sm_count=6, memory_bus=memory_bus(slow=False))
    assert sum("prepare_beside" in name for name in names) == grids
    assert any("finish_beside" in name for name in names) == (grids > 0)
    check(case, d, dtype=torch.bfloat16, sm_count=6)


@pytest.mark.parametrize(
    "case",
    [
        Case(310, 300, Mask("bottom_right"), heads=(12, 6)),
        Case(500, 300, Mask(window=(300, None)), heads=(10, 5)),
        Case(200, 200, Mask(True), heads=(16, 8)),
    ],
    ids=str,
)
def test_few_grouped_items_beside_prepare(case: Case) -> None:
    """Up to d = 64, where heads do not become dq one by one unless items are equally long."""
    names = launches(case, 64, sm_count=6, memory_bus=memory_bus(slow=False))
    assert sum("prepare_beside" in name for name in names) == 1
    assert not any("finish_beside" in name for name in names)
    check(case, 64, dtype=torch.bfloat16, sm_count=6)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("case", [Case(130, 130), Case(300, 300, Mask(True), heads=(4, 2), batch=2)], ids=str)
def test_additions_fill_sectors(d: int, case: Case) -> None:
    """dQ's buffer begins with a sector at least, whatever comes before it: the queue, or counts too."""
    (counts,) = [grid["counts"] for grid in profiled(case, d, sm_count=2) if "::backward<" in grid["kernel"]]
    additions = max((count for count in counts if count["what"] == "atomic"), key=lambda count: int(count["lanes"]))
    assert additions["lanes"] == 32 * additions["instructions"]
    assert additions["sectors"] == 16 * additions["instructions"]  # of 32 bytes, where a lane has 16 at a time


@pytest.mark.parametrize("d", [72, 96, 128])
@pytest.mark.parametrize(
    ("case", "sm_count"),
    [
        (Case(300, 300, Mask(True), heads=(4, 2), batch=2), 2),
        (Case(257, 450, Mask("bottom_right", (300, 0)), heads=(6, 6), batch=2), 9),
        (Case(600, 250, Mask("bottom_right"), heads=(5, 5), batch=2), 3),
        (Case(200, 900, Mask(True), heads=(5, 5), batch=2), 2),  # a block has several items in a row that no query sees
        (Case(448, 1280, heads=(5, 5)), 6),
    ],
    ids=["grouped", "most blocks stay", "queries without keys", "keys without queries", "equal items"],
)
def test_finish_beside_products(d: int, case: Case, sm_count: int) -> None:
    """Heads are brought to dq as they are complete, and with a mask some blocks leave their SMs before the last items.
    A head has more parts than warps take at a time, and the last one has rows that do not exist."""
    assert has_grid("finish_beside", case, d, sm_count)
    check(case, d, dtype=torch.bfloat16, sm_count=sm_count)


@pytest.mark.parametrize("d", [72, 128])
@pytest.mark.parametrize("rows_of_heads_interleave", [False, True])
def test_facts_where_other_heads_come(d: int, rows_of_heads_interleave: bool) -> None:
    """L and D lie at the end of dq's memory, which holds one head after the other, or one batch entry after the other.
    Heads become dq as they are complete. The workspace is dQ's buffer and some counts."""
    case = Case(140, 140, Mask(True), heads=(2, 1), batch=32)
    assert has_grid("finish_beside", case, d, 4)
    given, expected = solved(case, d, d, torch.bfloat16)
    if rows_of_heads_interleave:
        q, dout, out = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (given.q, given.dout, given.out))
        given = given._replace(q=q, dout=dout, out=out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        gradients = compute(given, case.mask, sm_count=4)
    judge(gradients, expected, torch.bfloat16)
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    workspace = max(event.nbytes() for event in events if event.name() == "[memory]")
    rows = case.batch * case.heads[0] * 192
    assert 4 * d * rows < workspace < (4 * d + 1) * rows


def test_who_finishes_beside_products() -> None:
    """Sums up to d = 128 whose items have no parts, where rows are prepared beside products: few equal items, and above
    d = 64 others too, unless all heads come together."""
    many = Case(300, 300, Mask(True), heads=(4, 2), batch=2)
    assert has_grid("finish_beside", many, 72, 2)
    assert not has_grid("finish_beside", many, 72, 2, deterministic=True)
    assert not has_grid("finish_beside", many, 72, 2, slow=True)  # two passes
    assert not has_grid("finish_beside", many, 64, 2)
    assert not has_grid("finish_beside", many, 192, 2)
    assert not has_grid("finish_beside", many._replace(heads=(2, 1), batch=1), 72, 2)  # three items
    assert not has_grid("finish_beside", Case(960, 4200, heads=(2, 1)), 128, 4)  # in parts
    few = Case(300, 1000, heads=(8, 2))  # and equal
    assert has_grid("finish_beside", few, 72, 6)
    assert has_grid("finish_beside", few, 64, 6)
    assert not has_grid("finish_beside", few, 64, 4)


def test_who_begins_beside_prepare() -> None:
    """Not where blocks take turns, or late blocks cost a round, or items are few. Few equal items may: they leave SMs
    idle in the last round. So may few others, where heads share keys or become dq one by one."""
    many = Case(300, 300, Mask(True), heads=(4, 2), batch=2)
    assert begins_beside_prepare(many, 64, 2)
    assert begins_beside_prepare(many, 64, 2, deterministic=True)  # two passes
    assert begins_beside_prepare(many._replace(mask=DENSE), 64, 2, slow=True)
    assert not begins_beside_prepare(many._replace(mask=DENSE), 64, 2)
    assert not begins_beside_prepare(many._replace(mask=DENSE), 64, 2, deterministic=True)
    assert not begins_beside_prepare(many._replace(batch=1), 64, 2)
    assert not begins_beside_prepare(Case(130, 130, heads=(25, 25)), 64, 6)
    few = Case(300, 1000, heads=(8, 2))
    assert begins_beside_prepare(few, 64, 6)
    assert not begins_beside_prepare(few, 64, 4)  # all have an item in the last round
    assert not begins_beside_prepare(few._replace(nk=500), 64, 6)  # the first items need all heads
    assert not begins_beside_prepare(Case(300, 500, heads=(32, 8)), 64, 6)  # an item is over before
    assert not begins_beside_prepare(Case(4608, 200, heads=(16, 16)), 64, 31)  # in parts
    assert not begins_beside_prepare(few, 192, 6)
    assert begins_beside_prepare(many._replace(nk=100), 64, 2)
    assert not begins_beside_prepare(many._replace(nk=100, heads=(8, 1), batch=3), 64, 2)  # all rows come first
    assert not begins_beside_prepare(many._replace(nk=100, heads=(7, 7), batch=1), 64, 2)
    assert not begins_beside_prepare(many, 192, 2, deterministic=True)
    assert begins_beside_prepare(many, 192, 2)
    assert not begins_beside_prepare(many, 256, 2)


MASKS = {
    "last keys unseen": Case(70, 300, Mask(True)),
    "first keys unseen": Case(65, 400, Mask("bottom_right", (30, None))),
    "keys unseen on both sides": Case(40, 500, Mask(False, (0, 150))),
    "queries without keys": Case(300, 70, Mask("bottom_right")),
    "last queries without keys": Case(300, 70, Mask(False, (20, 10))),
    "whole tiles": Case(128, 256, Mask(True)),
    "one more than whole tiles": Case(129, 257, Mask("bottom_right")),
    "one less than whole tiles": Case(127, 255, Mask(True, (64, 0))),
    "diagonal": Case(200, 200, Mask(True, (0, 0))),
    "one query": Case(1, 200),
    "one key": Case(200, 1),
    "six heads to one": Case(140, 70, Mask("bottom_right"), heads=(6, 1)),
}


@SLOW
@pytest.mark.parametrize("d", SHAPES)
@pytest.mark.parametrize("case", MASKS)
def test_masks(case: str, d: int, slow: bool) -> None:
    """Among them items without queries between others with some."""
    check(MASKS[case], d, slow=slow)


@pytest.mark.parametrize(
    "case",
    [
        Case(300, 128),
        Case(129, 100, Mask(True), heads=(4, 2), batch=2),
        Case(513, 600, Mask(True), heads=(4, 2), batch=2),
        Case(130, 194, Mask("bottom_right")),  # 64 rows, if a tile has no more
        Case(200, 300, Mask(True, (199, 40))),
        Case(200, 300, Mask(True, (198, 0))),  # the last row does not see the first key
        Case(200, 140, Mask("bottom_right")),  # the first rows see no key
    ],
)
@pytest.mark.parametrize("d", [8, 64, 96, 128])
def test_rows_of_one_tile_of_keys(d: int, case: Case) -> None:
    """Rows that see keys of one tile alone, beside others."""
    check(case, d, sm_count=2)


@SLOW
@pytest.mark.parametrize("d", SHAPES)
@pytest.mark.parametrize(("sm_count", "seed"), [(1, 3), (3, 2)])
def test_many_items_a_block(sm_count: int, seed: int, d: int, slow: bool) -> None:
    """All rings go round, with items that no query sees among the others; each head's dQ comes from several items."""
    check(Case(140, 330, Mask(True), heads=(4, 2), batch=2), d, sm_count=sm_count, seed=seed, slow=slow)


@pytest.mark.parametrize("mask", [DENSE, Mask("bottom_right", (70, 0))], ids=str)
@pytest.mark.parametrize(("nk", "sm_count"), [(1, 1), (65, 3), (128, 3), (129, 6), (193, 1)])
@pytest.mark.parametrize(("d", "dv"), [(256, 200), (96, 256)])
def test_pairs(d: int, dv: int, nk: int, sm_count: int, mask: Mask) -> None:
    """The second block of a pair has a part of its keys or none of them, and columns of dQ that do not exist. A
    multiprocessor may have no partner."""
    check(Case(130, nk, mask), d, dv, sm_count=sm_count)


@pytest.mark.parametrize("sm_count", [1, 4])
def test_pairs_of_packed_sequences(sm_count: int) -> None:
    """A sequence, or what is in use of it, ends in the first block's keys, in the second's or between them."""
    lengths = [(70, 64, 64), (10, 65, 65), (5, 130, 63), (64, 128, 127), (1, 200, 190), (30, 20, 1), (66, 192, 129)]
    check_packed(lengths, Mask(True), 256, 200, sm_count=sm_count)


@pytest.mark.parametrize(
    "case",
    [
        Case(70, LONG, Mask("bottom_right")),
        Case(140, LONG, Mask(True), heads=(6, 2)),
        Case(130, LONG, heads=(3, 3)),
        Case(65, LONG, Mask("bottom_right", (500, 0))),
    ],
)
@pytest.mark.parametrize("d", SHAPES)
def test_long_sequences(d: int, case: Case) -> None:
    """Each head's dQ comes from many items."""
    check(case, d, sm_count=3)
    check(case, d - 24, d - 40, torch.bfloat16, sm_count=1)


@pytest.mark.parametrize(
    ("sm_count", "nk", "slow"), [(1, 150, True), (3, 150, True), (1, 150, False), (12, LONG, False)]
)
@pytest.mark.parametrize("d", SHAPES)
def test_infinite_queries_and_keys_stay_where_they_are(d: int, sm_count: int, nk: int, slow: bool) -> None:
    """A head's NaN reaches no other head, though a block works on one after the other. The third block, or the tenth
    (up to d = 128), begins with it: nothing came before, whose dQ could be added to the first rows of all."""
    case = Case(70, nk, heads=(3, 3))
    given, expected = solved(case, d, d, torch.float16)
    for t in (given.q, given.k, given.v, given.dout, given.out):
        t[:, 1] = math.nan
    gradients = compute(given, sm_count=sm_count, slow=slow)
    judge([t[:, ::2] for t in gradients], [t[:, ::2] for t in expected], torch.float16)


@pytest.mark.parametrize(
    ("bus", "d", "nq", "nk", "mask", "deterministic", "way"),
    [
        (5120, 64, 20, 335, DENSE, False, "passes"),
        (5120, 64, 20, 336, DENSE, False, "sums"),
        (6016, 64, 20, 335, DENSE, False, "sums"),
        (0, 64, 20, 335, DENSE, False, "sums"),  # not known
        (0, 64, 20, 128, DENSE, False, "sums"),
        (0, 64, 20, 513, DENSE, True, "passes"),
        (0, 64, 20, 512, DENSE, True, "sums"),  # by turns in a ring
        (5120, 64, 20, 335, DENSE, True, "passes"),
        (0, 64, 20, 512, Mask(True), True, "passes"),
        (5120, 96, 20, 365, DENSE, False, "passes"),
        (5120, 96, 20, 366, DENSE, False, "sums"),
        (5120, 96, 20, 400, Mask(window=(None, 370)), False, "passes"),  # 380 are visible, under a band
        (5120, 96, 20, 380, Mask(window=(370, None)), False, "passes"),
        (5120, 128, 20, 575, DENSE, False, "passes"),
        (6016, 128, 20, 575, DENSE, False, "sums"),
        (6016, 128, 20, 489, DENSE, False, "passes"),
        (5120, 128, 1200, 1200, Mask(True), False, "passes"),
        (5120, 128, 1300, 1300, Mask(True), False, "sums"),
        (5120, 128, 200, 1600, Mask(window=(500, 0)), False, "passes"),
        (5120, 128, 200, 1600, Mask("bottom_right"), False, "sums"),
        (5120, 128, 20, 576, DENSE, False, "sums"),
        (5120, 192, 20, 512, DENSE, False, "turns"),
        (5120, 192, 20, 513, DENSE, False, "sums"),
        (6016, 192, 20, 512, DENSE, False, "sums"),
        (0, 192, 20, 512, DENSE, True, "turns"),
    ],
)
def test_how_dq_comes(bus: int, d: int, nq: int, nk: int, mask: Mask, deterministic: bool, way: str) -> None:
    """By two passes where few keys are visible, if memory is slow, and if the gradients have to be deterministic and
    blocks take no turns. Where blocks bring dQ to its place, no grid behind the products does."""
    names = launches(Case(nq, nk, mask, heads=(1, 1)), d, PLAIN, deterministic, sm_count=4, memory_bus=bus)
    assert len(names) == (3 if way == "sums" else 2)
    assert any("two_passes" in name for name in names) == (way == "passes")


CAUSAL = Case(1500, 1500, Mask(True), (1, 1))
"""Of 12 items, the longest of which has 1,500 rows."""


@pytest.mark.parametrize(
    ("case", "sm_count", "passes"),
    [
        (CAUSAL, 32, True),
        (CAUSAL, 9, False),  # an SM's share of all is nearly as much
        (CAUSAL._replace(batch=4), 32, False),
        (CAUSAL._replace(heads=(4, 1)), 32, True),
        (CAUSAL._replace(heads=(4, 4)), 64, True),
        (CAUSAL._replace(heads=(4, 4)), 32, False),
        (CAUSAL._replace(mask=Mask(window=(700, None))), 32, True),
        (Case(2500, 2500, Mask(True, (1200, 0)), (1, 1)), 32, True),
        (Case(2500, 2500, Mask(True, (1200, 0)), (2, 2)), 32, False),
        (CAUSAL._replace(mask=DENSE), 32, False),  # in parts
        (Case(100, 3000, Mask("bottom_right"), (1, 1)), 64, False),  # the longest item of queries would have 3,000 keys
        (Case(5000, 2700, Mask("bottom_right"), (1, 1)), 14, False),  # 2,300 rows see no key
    ],
)
@pytest.mark.parametrize("d", [64, 128])
def test_few_long_items(d: int, case: Case, sm_count: int, passes: bool) -> None:
    """By two passes too, if items are of different lengths and most SMs would wait for the longest."""
    assert has_grid("two_passes", case, d, sm_count, slow=True) == passes
    assert not has_grid("two_passes", case, d, sm_count)  # nothing is known of the memory


def test_few_long_items_with_changed_scores() -> None:
    case = CAUSAL._replace(heads=(2, 2))
    names = launches(case, 64, change_of("ALiBi", 1500, 1500), sm_count=64, memory_bus=memory_bus(slow=True))
    assert not any("two_passes" in name for name in names)


@pytest.mark.parametrize(
    ("d", "case", "worked_on"),
    [
        (128, Case(256, 256, heads=(1, 1)), 16),
        (128, Case(256, 256, Mask(True), (1, 1)), 10),  # of 12, two of which see none of the second consumer's keys
        (128, Case(256, 256, Mask(True), (2, 1)), 21),  # a head after the other: one begins the last item
        (96, Case(256, 256, Mask(True), (1, 1)), 10),
        (64, Case(256, 256, Mask(True), (1, 1)), 6),  # a tile has 128 queries
        (128, Case(192, 192, heads=(1, 1)), 10),  # the last 64 keys do not exist: but for the first tile
        (128, Case(192, 192, Mask(True), (1, 1)), 7),
        (128, Case(384, 256, Mask(True, (127, 0)), (1, 1)), 12),  # of 16: each consumer has hidden ones
    ],
)
def test_tiles_are_skipped(d: int, case: Case, worked_on: int) -> None:
    """A consumer of the pass over own keys computes nothing for tiles whose queries see none of its keys."""

    def products(case: Case) -> int:
        """Of keys with queries, in the pass over keys."""
        grid = profiled(case, d, sm_count=2, memory_bus=memory_bus(slow=True))[-1]
        counts = [count for count in grid["counts"] if count["what"] == "wgmma"]
        return sum(count["instructions"] for count in counts if "wgmma/consumer.cuh" in count["line"])

    one = products(Case(64, 64, heads=(1, 1))) / 2  # a tile, of which both consumers work on their first
    assert products(case) == worked_on * one


@pytest.mark.parametrize("d", [96, 128])
def test_items_of_one_tile(d: int) -> None:
    """They have no second tile to begin with."""
    check(Case(50, 200, heads=(2, 2)), d, slow=True)


def test_no_heads_and_few_long_items() -> None:
    q = torch.empty(1, 0, 4096, 64, dtype=torch.float16)
    device = flash_wmma.DeviceFacts(90, 132, 227 * 1024, memory_bus=6016)
    assert flash_wmma.explain(q, q, q, causal=True, device_facts=device).backward_kernel == "bwd_sm90"


@pytest.mark.parametrize("mask", [Mask(True), Mask("bottom_right", (90, 0))], ids=str)
@pytest.mark.parametrize("d", [96, 128])
def test_skipped_tiles_with_dropout(d: int, mask: Mask) -> None:
    """Each later tile's weights are dropped as if none had been skipped."""
    n, dtype, p = 256, torch.float16, 0.3
    make = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, 2, n, d, generator=make).to(dtype) for _ in range(4))
    state = torch.tensor([7, 3])
    out, lse = flash_wmma.forward(q, k, v, dropout_p=p, rng_state=state, return_lse=True, **mask._asdict())
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    exact, _ = attention(*leaves, mask, None, PLAIN, flash_wmma.dropout_mask(state, p, 1, 2, n, n) / (1 - p))
    expected = torch.autograd.grad((exact * dout.double()).sum(), leaves)
    options = {"dropout_p": p, "rng_state": state, "kernel_name": "bwd_sm90"}
    with flash_wmma.emulator.settings(mode="checked", memory_bus=memory_bus(slow=True)), poisoned_memory():
        *gradients, _ = ops.backward(
            dout, None, q, k, v, out, lse, None, *band(mask.causal, mask.window), *PLAIN, **options
        )
    judge(gradients, expected, dtype, drops=True)


@pytest.mark.parametrize(
    ("d", "nk", "change", "passes"),
    [
        (128, 256, "ALiBi", True),
        (128, 257, "ALiBi", False),
        (64, 64, "soft cap", False),
        (128, 200, "ranges", False),
        (128, 620, "none", True),
        (128, 700, "none", False),
        (64, 1300, "none", False),
    ],
)
def test_who_goes_by_two_passes(d: int, nk: int, change: str, passes: bool) -> None:
    """Fewer keys where scores are changed; not with key ranges."""
    mask = Mask("bottom_right") if change == "none" else DENSE
    modification = PLAIN if change == "none" else change_of(change, 20, nk)
    names = launches(Case(20, nk, mask, heads=(2, 2)), d, modification, memory_bus=5120)
    assert any("two_passes" in name for name in names) == passes


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-36])
@pytest.mark.parametrize("d", SHAPES)
def test_scales(d: int, scale: float) -> None:
    """L is divided by the scale where it is a term of the products."""
    make = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, n, d, generator=make).half() for n in (70, 150, 150, 70))
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, Mask("bottom_right"), scale)
    expected = torch.autograd.grad((out * dout.double()).sum(), leaves)
    with flash_wmma.emulator.settings(mode="checked"), poisoned_memory():
        *gradients, _ = ops.backward(
            *(dout, None, q, k, v, out.detach().half(), lse.detach().float(), scale),
            *band("bottom_right", None),
            *PLAIN,
            kernel_name="bwd_sm90",
        )
    judge(gradients, expected, torch.float16)


@pytest.mark.parametrize("d", SHAPES)
def test_scores_far_below_zero(d: int) -> None:
    """Rows of a tile that hold no key or no query have the score 0, whose weight is infinite beside these."""
    make = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, n, d, generator=make).half() for n in (70, 50, 50, 70))
    q[..., 0], k[..., 0] = 40.0 * d**0.5, -6.0
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves)
    expected = torch.autograd.grad((out * dout.double()).sum(), leaves)
    given = Attention(q, k, v, dout, torch.zeros(1, 1, 70), out.detach().half(), lse.detach().float())
    judge(compute(given), expected, torch.bfloat16)


def change_of(kind: str, nq: int, nk: int, heads: int = 2) -> Modification:
    """One of CHANGES, the same for all batch entries."""
    make = torch.Generator().manual_seed(5)
    bias = torch.randn(1, heads, nq, nk, generator=make)
    slopes = torch.rand(heads, generator=make)
    begin = torch.randint(-2, nk, (1, heads, nq), generator=make)
    ranges = torch.stack((begin, begin + torch.randint(-1, nk, begin.shape, generator=make)), -1).int()
    if kind == "bias":
        return Modification(bias.half())
    if kind == "bias of a key":
        return Modification(bias[:, :1, :1])
    if kind == "mask":
        return Modification(bias > -0.5)
    if kind == "ALiBi":
        return Modification(alibi_slopes=slopes)
    if kind == "soft cap":
        return Modification(softcap=1.5)
    if kind == "documents":
        row = torch.arange(nq) * nk // nq // 90 * 90  # of about 90 keys
        return Modification(key_ranges=torch.stack((row, row + 90), -1).int()[None, None])
    if kind == "ranges":
        return Modification(key_ranges=ranges)
    return Modification(bias, slopes, ranges, 1.5)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("change", ["soft cap", "ranges", "documents"])
def test_general_problems_with_few_items(change: str, d: int) -> None:
    """Of a soft cap they go in parts. With key ranges they have different tiles, some none, and go whole."""
    check(Case(1300, 260, heads=(4, 2)), d, sm_count=18, modification=change_of(change, 1300, 260, heads=4))


CHANGES = ["bias", "bias of a key", "mask", "ALiBi", "soft cap", "documents", "ranges", "all"]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case(150, 330, Mask("bottom_right"), batch=2),
        Case(200, 140, heads=(2, 2)),
        Case(70, LONG, Mask(False, (700, 300))),
    ],
)
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_changes(d: int, kind: str, case: Case, deterministic: bool) -> None:
    """Biases, ALiBi, soft caps and key ranges, in items of several tiles."""
    change = change_of(kind, case.nq, case.nk)
    if deterministic and change.attn_bias is not None and additive(change):  # if broadcast, its gradient has no order
        case = case._replace(batch=1)
        change = change._replace(attn_bias=change.attn_bias.expand(1, 2, case.nq, case.nk).contiguous())
    dtype = torch.bfloat16 if kind in ("ALiBi", "soft cap", "documents") else torch.float16
    check(case, d, d - 16, dtype, deterministic=deterministic, modification=change, slow=case.nk == 330)


@pytest.mark.parametrize("nk", [200, LONG])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_changes_with_dropout(d: int, nk: int) -> None:
    """Dropped weights have a part in the bias's gradient, and their dS passes the soft cap."""
    nq, dtype, p = 70, torch.float16, 0.3
    make = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, 2, n, d, generator=make).to(dtype) for n in (nq, nk, nk, nq))
    change, state = change_of("all", nq, nk), torch.tensor([7, 3])
    out, lse = flash_wmma.forward(
        *(q, k, v), causal="bottom_right", dropout_p=p, rng_state=state, return_lse=True, **change._asdict()
    )
    assert change.attn_bias is not None
    leaves = [t.double().requires_grad_() for t in (q, k, v, change.attn_bias)]
    factors = flash_wmma.dropout_mask(state, p, 1, 2, nq, nk) / (1 - p)
    exact, _ = attention(*leaves[:3], Mask("bottom_right"), None, change._replace(attn_bias=leaves[3]), factors)
    expected = torch.autograd.grad((exact * dout.double()).sum(), leaves)
    options = {"bias_grad": True, "dropout_p": p, "rng_state": state, "kernel_name": "bwd_sm90"}
    with flash_wmma.emulator.settings(mode="checked", memory_bus=memory_bus(nk < LONG)), poisoned_memory():
        gradients = ops.backward(dout, None, q, k, v, out, lse, None, *band("bottom_right", None), *change, **options)
    judge(gradients, expected, dtype, drops=True)


def test_who_takes_what() -> None:
    """`auto` on sm_90: all that it takes, but deterministic gradients above d = 128, and short sequences with ranges;
    other cards have bwd_sm80."""
    q, wide = (torch.empty(2, 8, 1000, d, dtype=torch.float16, device="meta") for d in (64, 192))
    taken = ({}, {"causal": True}, {"window": (100, 0)}, {"deterministic": True}, {"softcap": 30.0})
    changes = ({"alibi_slopes": torch.empty(8, device="meta")}, {"attn_bias": torch.empty(1000, 1000, device="meta")})
    for options in (*taken, *changes):
        assert flash_wmma.explain(q, q, q, device_facts=DEVICE, **options).backward_kernel == "bwd_sm90"  # type: ignore[arg-type]
    for tensors in ((wide, wide, wide), (q, q, wide)):
        assert flash_wmma.explain(*tensors, device_facts=DEVICE).backward_kernel == "bwd_sm90"
        answer = flash_wmma.explain(*tensors, device_facts=DEVICE, deterministic=True)
        assert answer.backward_kernel == "bwd_sm80"
        named = flash_wmma.explain(*tensors, device_facts=DEVICE, deterministic=True, backward_kernel="bwd_sm90")
        assert named.backward_kernel == "bwd_sm90"
    for keys, kernel in ((513, "bwd_sm90"), (512, "bwd_sm80")):
        k, ranges = q[:, :, :keys], torch.empty(1, 1, 1000, 2, dtype=torch.int32, device="meta")
        answer = flash_wmma.explain(q, k, k, device_facts=DEVICE, key_ranges=ranges)
        assert answer.backward_kernel == kernel
    assert answer.backward_reasons["bwd_sm90"] == "leaves such a problem to another kernel"
    assert flash_wmma.explain(q.float(), q.float(), q.float(), device_facts=DEVICE).backward_kernel == "bwd_sm80"
    for arch in (80, 100, 120):
        answer = flash_wmma.explain(q, q, q, device_facts=flash_wmma.DeviceFacts(arch, 132, 227 * 1024))
        assert answer.backward_kernel == "bwd_sm80"


ORDERED = [
    Case(300, 300),
    Case(300, 330, Mask("bottom_right"), (4, 2)),
    Case(330, 300, Mask(True), batch=2),
    Case(400, 410, Mask(window=(90, 40))),
    Case(300, 320, Mask(True, window=(150, 10))),
    Case(140, 200, Mask(True), (6, 6)),  # more heads than take turns, and a rest of them
    Case(140, LONG, Mask("bottom_right")),
]
"""Three or more tiles of keys and of queries: above d = 128 items that wait for their turns, forwards and backwards."""


@pytest.mark.parametrize("d", SHAPES)
@pytest.mark.parametrize("case", ORDERED)
def test_deterministic(case: Case, d: int) -> None:
    """The same bits, whichever block is first; however many there are, unless blocks take turns up to d = 128."""
    given, expected = solved(case, d, d, torch.float16)
    fewest = 3 if case.mask == DENSE and d <= 128 else 1
    first, second = (compute(given, case.mask, n, seed, deterministic=True) for n, seed in ((fewest, 0), (3, 2)))
    judge(first, expected, torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("case", "sm_count"),
    [
        (Case(700, 500), 4),  # several tiles from one item's first to the next one's
        (Case(130, 500, heads=(3, 3)), 4),  # fewer tiles than items
        (Case(200, 640, heads=(4, 2), batch=2), 5),
        (Case(140, 600, heads=(2, 2), batch=2), 3),  # items one by one
        (Case(100, 1400, heads=(6, 2)), 6),  # batches of five and six
        (Case(130, 1400, heads=(1, 1)), 6),  # of one head, one behind the other
        (Case(70, 500, heads=(2, 2)), 8),  # two heads at once
        (Case(1, 130), 2),
    ],
)
@pytest.mark.parametrize("d", [64, 96, 128])
def test_turns_in_a_ring(d: int, case: Case, sm_count: int) -> None:
    """Blocks wait for each other, whichever is first. Up to d = 128 ordered additions to a buffer are a ring's."""
    given, expected = solved(case, d, d - 8, torch.float16)
    with alone(), flash_wmma.emulator.settings(counters=True):
        take_profile()
        bits = [compute(given, sm_count=sm_count, deterministic=True)]
        kernels = [launch["kernel"] for launch in json.loads(take_profile())]
    assert len(kernels) == 3
    assert not any("two_passes" in kernel for kernel in kernels)
    bits += [compute(given, sm_count=sm_count, seed=seed, deterministic=True) for seed in (1, 2)]
    judge(bits[0], expected, torch.float16)
    assert all(torch.equal(a, b) for other in bits[1:] for a, b in zip(bits[0], other, strict=True))


@pytest.mark.parametrize(
    ("case", "sm_count"),
    [
        (Case(400, 400, Mask(True), (4, 4)), 2),  # two groups of two heads
        (Case(410, 410, Mask(True), (10, 5)), 2),  # and one head that is left
        (Case(300, 300, Mask("bottom_right"), (8, 4), batch=2), 3),
        (Case(130, 130, Mask(True), (8, 8), batch=2), 4),
        (Case(200, 200, Mask(True), (11, 11), batch=3), 8),  # eleven heads in groups of four
    ],
)
@pytest.mark.parametrize("d", [64, 96, 128])
def test_turns_under_a_causal_mask(d: int, case: Case, sm_count: int) -> None:
    """As in a ring, but items have fewer tiles the later their keys are."""
    given, expected = solved(case, d, d - 8, torch.float16)
    names = launches(case, d, PLAIN, True, sm_count=sm_count)
    assert len(names) == 3
    assert not any("two_passes" in name for name in names)
    bits = [compute(given, case.mask, sm_count, seed, deterministic=True) for seed in range(3)]
    judge(bits[0], expected, torch.float16)
    assert all(torch.equal(a, b) for other in bits[1:] for a, b in zip(bits[0], other, strict=True))


@pytest.mark.parametrize(
    ("case", "sm_count"),
    [
        (Case(200, 200, Mask(True), (14, 14), batch=3), 10),  # five heads would begin together
        (Case(400, 400, Mask(True), (3, 3)), 2),  # few items
        (Case(400, 401, Mask(True), (4, 4)), 2),
        (Case(400, 400, Mask(window=(None, 60)), (4, 4)), 2),
        (Case(400, 400, Mask(window=(100, 0)), (4, 4)), 2),
    ],
)
def test_who_takes_no_turns_under_a_mask(case: Case, sm_count: int) -> None:
    """Two passes where many heads would begin together, where items are few, and under other masks."""
    assert any("two_passes" in name for name in launches(case, 64, PLAIN, True, sm_count=sm_count))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_deterministic_with_changes(d: int) -> None:
    case = Case(200, 300, Mask("bottom_right"))
    change = change_of("all", case.nq, case.nk)
    given, _ = solved(case, d, d, torch.float16, modification=change)
    bits = [compute(given, case.mask, n, seed, True, change) for n, seed in ((1, 0), (3, 1), (7, 2))]
    assert all(torch.equal(a, b) for other in bits[1:] for a, b in zip(bits[0], other, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("poisoned", [("k", "v"), ("q", "dout", "out")])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_documents_keep_to_themselves(d: int, poisoned: tuple[str, ...], deterministic: bool) -> None:
    """One document's NaN reaches no other, though in turns items have tiles of all."""
    case = Case(256, 256, heads=(2, 2))
    first = torch.arange(256) // 128 * 128
    change = Modification(key_ranges=torch.stack((first, first + 128), -1).int()[None, None])
    given, expected = solved(case, d, d, torch.float16, modification=change)
    for name in poisoned:
        getattr(given, name)[:, :, 128:] = math.nan
    gradients = compute(given, deterministic=deterministic, modification=change)
    judge([t[:, :, :128] for t in gradients], [t[:, :, :128] for t in expected], torch.float16)


def test_lengths_that_decrease_end() -> None:
    """What comes out is unspecified, but it comes out: items that are never found would be waited for."""
    q = torch.randn(300, 1, 136, generator=torch.Generator().manual_seed(0)).half()
    ends_q, ends_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 122, 138, 300, 300], [0, 300, 85, 300, 108]))
    options = {"deterministic": True, "kernel_name": "bwd_sm90"}
    given = (q, None, q, q, q, q, torch.zeros(1, 300), ends_q, ends_k, None, 300, 300, None)
    with flash_wmma.emulator.settings(mode="checked", sm_count=2, seed=13):
        *gradients, _ = ops.backward_varlen(*given, *band(True, None), **options)
    assert [t.shape for t in gradients] == [q.shape] * 3


@pytest.mark.parametrize("bound", [0, LONG])
@pytest.mark.parametrize("d", [64, 256])
def test_deterministic_packed(d: int, bound: int) -> None:
    """Above d = 128: with few keys blocks write dQ too, with many they add to it in order."""
    check_packed(EDGES, Mask("bottom_right"), d, d, deterministic=True, bound=bound)
