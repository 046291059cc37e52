"""The op forward_merged: a kernel of forward merges attention over some keys into that over others, against float64. On
Hopper, or else in the emulator, checked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import on_gpu
from reference import DENSE, Mask, attention, poisoned_memory
from test_row_statistics import MASKS, SHAPES, SPLIT, Shape
from torch import Tensor

import flash_wmma
from flash_wmma import _ops
from flash_wmma._call import call_of
from flash_wmma._library import ops
from flash_wmma.distributed._rows import Merged

KERNEL = "wgmma_sm90"
DEVICE = "cuda" if on_gpu() and torch.cuda.get_device_capability() == (9, 0) else "cpu"
HALVES = [torch.float16, torch.bfloat16]
BEFORE, BEHIND = 3, 2
"""Rows of the whole around those of the call."""


def tensors(shape: Shape, dtype: torch.dtype = torch.float16, d_v: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v for (batch, Hq, Hk, Nq, Nk, d)."""
    b, hq, hk, nq, nk, d = shape
    make = torch.Generator().manual_seed(nq + nk + d)
    sizes = (hq, nq, d), (hk, nk, d), (hk, nk, d_v or d)
    q, k, v = (torch.randn(b, *size, generator=make).to(dtype).to(DEVICE) for size in sizes)
    return q, k, v


class Whole:
    """out and lse of more rows than those of a call, which are its ``out`` and ``lse``."""

    def __init__(self, q: Tensor, v: Tensor, dtype: torch.dtype, layout: str = "bhnd") -> None:
        b, h, n = q.shape[:3]
        make = torch.Generator().manual_seed(n)
        rows, d_v = n + BEFORE + BEHIND, v.shape[-1]
        out = torch.randn((b, rows, h, d_v) if layout == "bnhd" else (b, h, rows, d_v), generator=make)
        self._out = out.to(dtype).to(DEVICE)
        if layout == "bnhd":
            self._out = self._out.transpose(1, 2)
        self._lse = (3 * torch.randn(b, h, rows, generator=make) + 4).to(DEVICE)
        self.out, self.lse = self._out[:, :, BEFORE : BEFORE + n], self._lse[:, :, BEFORE : BEFORE + n]
        self._before = self._out.clone(), self._lse.clone()

    def unchanged(self, rows: slice) -> bool:
        """Whether those rows are what they were when it was made."""
        return all(
            torch.equal(t[:, :, rows], b[:, :, rows]) for t, b in zip((self._out, self._lse), self._before, strict=True)
        )

    def check_around(self) -> None:
        """No other rows were written."""
        assert self.unchanged(slice(BEFORE))
        assert self.unchanged(slice(self._out.shape[2] - BEHIND, None))


def attend(
    whole: Whole,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = DENSE,
    merges: bool = True,
    sm_count: int = 2,
    scale: float | None = None,
) -> None:
    """Compares out and lse with what they are to be. Weights and out are rounded to v's type once each, or out to
    float32."""
    right, right_lse = exact(whole if merges else None, q, k, v, mask, scale)
    call = call_of(kernel=KERNEL, scale=scale, **mask._asdict())
    if not merges:
        whole.out.fill_(torch.nan)
        whole.lse.fill_(torch.nan)
    with flash_wmma.emulator.settings(mode="checked", sm_count=sm_count), poisoned_memory():
        assert _ops.forward_merged(whole.out, whole.lse, q, k, v, merges, call)
    eps = torch.finfo(v.dtype).eps
    largest = max(float(v.abs().max()), float(right.nan_to_num().abs().max()))
    torch.testing.assert_close(whole.out.double(), right, atol=1.5 * eps * largest, rtol=0, equal_nan=True)
    torch.testing.assert_close(whole.lse.double(), right_lse, atol=eps, rtol=1e-5, equal_nan=True)
    whole.check_around()


def exact(
    others: Whole | None, q: Tensor, k: Tensor, v: Tensor, mask: Mask = DENSE, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Merged in float64."""
    part, part_lse = attention(*(t.double() for t in (q, k, v)), mask, scale)
    if others is None:
        return part, part_lse
    lse = others.lse.double()
    both = torch.logaddexp(lse, part_lse)

    def weight(of: Tensor) -> Tensor:
        return (of - both.clamp_min(torch.finfo(torch.float64).min)).exp()[..., None]

    return others.out.double().masked_fill(lse.isneginf()[..., None], 0) * weight(lse) + part * weight(part_lse), both


def check(
    shape: Shape,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    mask: Mask = DENSE,
    sm_count: int = 2,
    layout: str = "bhnd",
    d_v: int | None = None,
) -> None:
    """Merged with others; in float32 also alone, in memory that holds NaN."""
    q, k, v = tensors(shape, dtype, d_v)
    for merges in [True, False] if out_dtype == torch.float32 else [True]:
        attend(Whole(q, v, out_dtype, layout), q, k, v, mask, merges, sm_count)


@pytest.mark.parametrize("kept", ["own type", "float32"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("sm_count", "shape"), SHAPES)
def test_shapes(sm_count: int, shape: Shape, mask: Mask, kept: str) -> None:
    dtype = torch.bfloat16 if mask == DENSE else torch.float16
    check(shape, dtype, dtype if kept == "own type" else torch.float32, mask, sm_count)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 130), (65, 1), (300, 40), (40, 300)])
def test_few_queries_or_keys(nq: int, nk: int, out_dtype: torch.dtype) -> None:
    """With rows that see no key, which stay what they are."""
    for mask in (DENSE, Mask("bottom_right")):
        check((1, 2, 1, nq, nk, 64), torch.float16, out_dtype, mask)


@pytest.mark.parametrize("d_v", [32, 104, 128])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_value_dims_and_layouts(out_dtype: torch.dtype, layout: str, d_v: int) -> None:
    check((2, 2, 1, 100, 90, 64), torch.bfloat16, out_dtype, layout=layout, d_v=d_v)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("case", SPLIT)
def test_parts(case: str, out_dtype: torch.dtype) -> None:
    """Items whose keys several blocks share: the second grid merges them."""
    sm_count, shape, mask = SPLIT[case]
    check(shape, torch.float16, out_dtype, mask, sm_count)


def test_a_queue() -> None:
    """Causal, and more items than two for each block."""
    check((1, 6, 3, 520, 530, 64), torch.float16, torch.float32, Mask("top_left"))


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("lse", [30.0, -30.0, 200.0, -200.0, -math.inf, math.nan, 1e8, -1e8])
def test_far_apart(lse: float, out_dtype: torch.dtype) -> None:
    """One side's weights are e^200 times the other's, in some rows or in all; no key on one side, or both; NaN."""
    q, k, v = tensors((1, 2, 1, 70, 190, 64))
    for rows in (slice(None), slice(20, 70, 3)):
        for mask in (DENSE, Mask("bottom_right", (5, -150))):  # the second has rows without a key
            whole = Whole(q, v, out_dtype)
            whole.lse[:, :, rows] = lse
            if lse == -math.inf:  # is not read
                whole.out[:, :, rows] = math.nan
            attend(whole, q, k, v, mask)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("rise", [1.0, 8.0, 20.0, 1000.0])
def test_rising_scores(rise: float, d: int) -> None:
    """Scores that rise above the others' lse, in log2 units, from each tile to the one that comes next: the m that the
    others give serves for some time, then for none."""
    q, k, v = tensors((1, 2, 1, 256, 640, d))
    q[..., 0] = 1.0
    tile = (639 - torch.arange(640)) // 32
    k[..., 0] = (tile * rise * math.log(2) * math.sqrt(d)).clamp(max=6e4).to(DEVICE)
    attend(Whole(q, v, torch.float32), q, k, v)


def test_scale() -> None:
    q, k, v = tensors((1, 2, 1, 70, 90, 64))
    attend(Whole(q, v, torch.float32), q, k, v, scale=0.3)
    attend(Whole(q, v, torch.float32), q, k, v, scale=-0.3)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("parts", [2, 3])
def test_several_parts(parts: int, dtype: torch.dtype) -> None:
    """What a ring does on a GPU (Merged.attend): parts of all queries, of the second half, and of all again."""
    q, k, v = tensors((1, 4, 2, 96, 90 * parts, 64), dtype)
    call = call_of(kernel=KERNEL)._replace(only_band=True)
    sums = Merged(q.shape, q.shape[:3], 2, q, parts)
    sums._merges = True

    def keys(seen: list[int]) -> list[Tensor]:
        return [torch.cat([t[:, :, 90 * part : 90 * (part + 1)] for part in seen], 2) for t in (k, v)]

    for part in range(parts):
        begin = 48 if part == 1 else 0
        given = q[:, :, begin:], *keys([part])
        alone = sums.attend(((begin, 96),), *given, call)
        assert alone == (part > 0 or parts > 2)  # the first of two is forward's own out
        if not alone:
            sums.add(((begin, 96),), *_ops.forward(*given, call._replace(only_band=False)))
    out, lse = sums.take(dtype)
    for begin, seen in ((0, [part for part in range(parts) if part != 1]), (48, list(range(parts)))):
        rows = slice(begin, begin + 48)
        right, right_lse = exact(None, q[:, :, rows], *keys(seen))
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out[:, :, rows].double(), right, atol=1.5 * eps * float(v.abs().max()), rtol=0)
        torch.testing.assert_close(lse[:, :, rows].double(), right_lse, atol=eps, rtol=1e-5)


def test_parts_that_no_kernel_merges() -> None:
    """What is there stays as it is: rows of which only some have a part, more than a band, and another kernel."""
    q, k, v = tensors((1, 2, 1, 96, 90, 64))
    every = ((0, 96),)
    call = call_of(kernel=KERNEL)._replace(only_band=True)
    sums = Merged(q.shape, q.shape[:3], 2, q, 3)
    sums._merges = True
    assert not sums.attend(((0, 10), (20, 30)), q[:, :, :20], k, v, call)
    assert sums.attend(((0, 48),), q[:, :, :48], k, v, call)
    assert not sums.attend(every, q, k, v, call)
    assert not sums.attend(((48, 96),), q[:, :, 48:], k, v, call._replace(only_band=False))
    assert sums._merges
    sums = Merged(q.shape, q.shape[:3], 2, q, 3)
    sums._merges = True
    given = _ops.forward(q, k, v, call._replace(only_band=False))
    sums.add(every, *given)
    assert not sums.attend(every, q, k, v, call._replace(kernel_name="mma_sm80"))
    assert not sums._merges
    assert sums._out is given[0]
    assert sums._lse is given[1]


REFUSED: dict[str, tuple[Shape, dict[str, Any]]] = {
    "d = 192": ((1, 2, 1, 30, 40, 192), {}),
    "another kernel": ((1, 2, 1, 30, 40, 64), {"kernel": "mma_sm80"}),
    "no keys": ((1, 2, 1, 30, 0, 64), {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """Nothing is done."""
    shape, options = REFUSED[case]
    q, k, v = tensors(shape)
    whole = Whole(q, v, torch.float16)
    call = call_of(**({"kernel": KERNEL} | options))
    assert not _ops.forward_merged(whole.out, whole.lse, q, k, v, True, call)
    assert whole.unchanged(slice(None))


@pytest.mark.parametrize("d_v", [64, 60])
def test_rows_that_no_kernel_writes(d_v: int) -> None:
    """They are not aligned, or no multiples of 16 bytes."""
    q, k, v = tensors((1, 2, 1, 30, 40, 64), d_v=d_v)
    out = q.new_zeros((1, 2, 30, d_v + 3))[..., 1 : d_v + 1]
    call = call_of(kernel=KERNEL)
    assert not _ops.forward_merged(out, torch.zeros(1, 2, 30, device=DEVICE), q, k, v, True, call)


@pytest.mark.parametrize(
    ("out", "lse", "named"),
    [
        (torch.zeros(1, 2, 31, 64).half(), torch.zeros(1, 2, 30), r"out.*\(B, Hq, Nq, d_v\)"),
        (torch.zeros(1, 2, 30, 64).bfloat16(), torch.zeros(1, 2, 30), r"out.*float32, or q's dtype"),
        (torch.zeros(1, 2, 30, 64), torch.zeros(1, 2, 29), r"lse.*\(B, Hq, Nq\)"),
        (torch.zeros(1, 2, 30, 64), torch.zeros(1, 2, 30).double(), r"lse.*float32"),
        (torch.zeros(1, 2, 30, 64), torch.zeros(1, 30, 2).transpose(1, 2), r"lse.*adjacent"),
    ],
)
def test_errors(out: Tensor, lse: Tensor, named: str) -> None:
    q, k, v = tensors((1, 2, 1, 30, 40, 64))
    with pytest.raises((RuntimeError, ValueError), match=named):
        _ops.forward_merged(out.to(DEVICE), lse.to(DEVICE), q, k, v, True, call_of())


@pytest.mark.parametrize("merges", [False, True])
def test_opcheck(merges: bool) -> None:
    q, k, v = tensors((1, 2, 2, 30, 40, 64))
    whole = Whole(q, v, torch.float32)
    given = whole.out, whole.lse, q, k, v, merges, None, -1, -1, False, KERNEL
    # torch functionalizes no op that writes and returns a bool; ring attention is no part of a compiled graph
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.forward_merged.default, given, test_utils=tests)
