"""Inputs that defeat a careless softmax. Each row is judged by itself: small rows stand beside large ones."""

from __future__ import annotations

import math

import pytest
import torch
from needs import needs
from reference import (
    DENSE,
    PLAIN,
    Mask,
    Modification,
    as_multiplied,
    attention,
    check,
    check_lse,
    check_rows,
    early_rung,
    few,
    grouped,
    head_error,
    normal,
    operand_dtype,
    reference,
    run,
)
from torch import Tensor

import flash_wmma

D = 64  # every kernel has it

Target = tuple[flash_wmma.Kernel, torch.dtype]


def operand_eps(target: Target) -> float:
    """Of what is multiplied or, if that is coarser, of the results."""
    kernel, dtype = target
    return max(torch.finfo(operand_dtype(kernel, dtype)).eps, torch.finfo(dtype).eps)


def verify(
    target: Target,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = DENSE,
    scale: float | None = None,
    modification: Modification = PLAIN,
) -> None:
    """Each row within 2 eps of the largest value that it sees."""
    kernel, dtype = target
    out, lse = run(kernel, q, k, v, mask, scale, modification)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    q, k, v = (as_multiplied(t, operand_dtype(kernel, dtype)) for t in (q, k, v))
    expected_out, expected_lse = attention(q, k, v, mask, scale, modification)
    visible = mask.visible(q.shape[2], k.shape[2], q.device)
    values = grouped(v, q.shape[1]).abs().amax(dim=3)[:, :, None] * visible
    scores = q.abs() @ grouped(k, q.shape[1]).abs().transpose(2, 3) * abs(scale) * visible
    assert not out.isnan().any()
    check_rows(out, expected_out, values.amax(dim=3), scores.amax(dim=3), operand_eps(target))
    check_lse(lse, expected_lse, torch.finfo(operand_dtype(kernel, dtype)).eps)


def from_scores(target: Target, row: Tensor, key: Tensor, d: int = D) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v for which the score of (i, j) is row[i] * key[j], exactly, at scale 1; both are fp16 values."""
    kernel, dtype = target
    heads = few(kernel, 2)
    q = torch.zeros(1, heads, len(row), d)
    k = torch.zeros(1, heads, len(key), d)
    q[..., d // 2] = row
    k[..., d // 2] = key
    v = normal((1, heads, len(key), d), seed=11)
    return tuple(t.to(dtype).to(kernel.device) for t in (q, k, v))  # type: ignore[return-value]


@pytest.mark.parametrize("gap", [20, 200, 1e4])
@pytest.mark.parametrize("nk", [33, 64, 200])
def test_rows_of_a_tile_far_apart(target: Target, nk: int, gap: float) -> None:
    """Maxima of neighbouring rows, and of those 8 apart, differ by `gap`: a maximum shared between rows would round the
    lower ones away."""
    row = torch.tensor([gap, 0, -gap, gap / 2, 1, -1, gap / 4, 0.5, 2] * 10)
    key = torch.randint(-8, 9, (nk,), generator=torch.Generator().manual_seed(1)) / 8
    verify(target, *from_scores(target, row, key), scale=1.0)


@pytest.mark.parametrize("gap", [20, 200, 1e4])
def test_one_row_far_below(target: Target, gap: float) -> None:
    """One row whose scores all lie `gap` below those of the others, and one far above."""
    for place in (0, 5, 15, 16, 40):
        row = torch.zeros(48)
        row[place] = -1
        above = torch.full((70,), gap) + torch.arange(70) % 4
        verify(target, *from_scores(target, row, above), scale=1.0)
        verify(target, *from_scores(target, -row, above), scale=1.0)


@pytest.mark.parametrize("step", [1, 10, 11, 11.0859375, 11.5, 20, 1000])
@pytest.mark.parametrize("tile", [16, 32, 64, pytest.param(128, marks=pytest.mark.long)])
@pytest.mark.parametrize("where", ["every row", "one row", "last tile", "falling", "zigzag"])
def test_rising_maximum(target: Target, where: str, tile: int, step: float) -> None:
    """Scores that rise by `step` a tile: the running maximum lags. From 11.09 on a weight passes fp16's range.

    "one row": of each warp's, whether its tiles have 16 rows or 32, in their upper half and in their lower, for kernels
    that begin at the first key and for those that begin at the last."""
    tiles = 6
    nk = tiles * tile - 3
    number = torch.arange(nk) // tile
    key = number * step
    row = torch.ones(50)
    if where == "one row":
        row = torch.zeros(50)
        row[[5, 45]] = 1
        row[[29, 48]] = -1
    elif where == "last tile":
        key = (number == tiles - 1) * step
    elif where == "falling":
        key = (tiles - 1 - number) * step
    elif where == "zigzag":
        key = (number % 2) * step
    q, k, v = from_scores(target, row, key.float())
    k[..., 0] = normal((1, 1, nk, 1), seed=3)[..., 0].to(k)  # and a little disorder, different in every row
    q[..., 0] = normal((1, 1, 50, 1), seed=4)[..., 0].to(q) / 4
    verify(target, q, k, v, scale=1.0)
    if "causal" in target[0].features:
        verify(target, q, k, v, Mask("bottom_right"), scale=1.0)


def test_maximum_in_a_few_keys(target: Target) -> None:
    """One group of 16 keys stands out from each side: in wide heads, whose keys several warps share, and of scores that
    are capped."""
    kernel, _ = target
    row = torch.tensor([1.0, -1.0]).repeat(20)
    key = torch.zeros(200)
    key[48:64], key[144:160] = 20, -20
    widest = D if early_rung(kernel.name) else min(256, kernel.head_dims[1])
    for d in sorted({D, widest}):
        for softcap in (0.0, 50.0) if "softcap" in kernel.features else (0.0,):
            q, k, v = from_scores(target, row, key, d)
            verify(target, q, k, v, DENSE, 1.0, Modification(softcap=softcap))


def test_scores_far_below_zero(target: Target) -> None:
    """No finite number stands for -inf: the largest scores are as low as the inputs' range lets them be."""
    kernel, dtype = target
    wide = dtype != torch.float16 and (dtype == operand_dtype(kernel, dtype) or kernel.auto_rank > 0)
    low = 1e16 if wide else 2e4
    for nk in (1, 40, 200):
        key = torch.where(torch.arange(nk) % 2 == 0, low, 2 * low)
        q, k, v = from_scores(target, torch.full((30,), -low), key)
        verify(target, q, k, v, scale=1.0)
        if "causal" in kernel.features:
            verify(target, q, k, v, Mask("top_left"), scale=1.0)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 30.0])
@pytest.mark.parametrize("nk", [1, 16, 31, 64, 257])
def test_equal_scores(target: Target, nk: int, value: float) -> None:
    """The mean of v; lse is the score plus log Nk."""
    q, k, v = from_scores(target, torch.full((20,), value), torch.ones(nk))
    verify(target, q, k, v, scale=1.0)
    _, lse = run(target[0], q, k, v, scale=1.0)
    assert torch.allclose(lse, torch.full_like(lse, value + math.log(nk)), atol=1e-3 * max(1, abs(value)))


@needs(lambda kernel, dtype, size: kernel.auto_rank > 0 or size <= torch.finfo(operand_dtype(kernel, dtype)).max)
@pytest.mark.parametrize("scale", [0.125, -0.125])
@pytest.mark.parametrize(("size", "nk"), [(3e3, 300), (3e4, 256), (3.3e7, 300), (3.3e7, 256)])
def test_equal_scores_of_any_size(target: Target, size: float, nk: int, scale: float) -> None:
    """The mean of v, however far the scores' unit in the last place lies above 1; also where no tile is masked."""
    kernel, dtype = target
    q, k = (torch.zeros(1, 1, n, D, dtype=dtype, device=kernel.device) for n in (40, nk))
    q[..., 0], k[..., 0] = -min(size, torch.finfo(dtype).max), min(1.37 * size, torch.finfo(dtype).max)
    v = normal((1, 1, nk, D), dtype=dtype, device=kernel.device, seed=1)
    operand = as_multiplied(v, operand_dtype(kernel, dtype))
    out, _ = run(kernel, q, k, v, scale=scale)
    assert head_error(out, operand.mean(2, keepdim=True).expand(out.shape)) <= 4 * operand_eps(target) + 1e-6


@pytest.mark.parametrize("scale", [0.0, -0.125, -5.0, 1e-6, 3.0])
def test_scale(target: Target, scale: float) -> None:
    kernel, dtype = target
    q, k, v = (normal((2, 2, 90, D), dtype=dtype, device=kernel.device, seed=s) for s in (1, 2, 3))
    verify(target, q, k, v, scale=scale)
    if "causal" in kernel.features:
        verify(target, q, k, v, Mask("top_left"), scale=scale)


def test_large_and_small_values_side_by_side(target: Target) -> None:
    """Heads, and rows of V within one head, of very different size."""
    kernel, dtype = target
    size = torch.tensor([2.0**-10, 1.0, 2.0**10])[None, :, None, None]
    q, k, v = (normal((1, 3, 130, D), seed=s) for s in (1, 2, 3))
    v = v * size
    q, k, v = (t.to(dtype).to(kernel.device) for t in (q, k, v))
    verify(target, q, k, v)
    if "causal" in kernel.features:
        growing = torch.where(torch.arange(130) < 64, 2.0**-8, 2.0**8)[:, None]
        v = (normal((1, 3, 130, D), seed=3) * growing).to(dtype).to(kernel.device)
        verify(target, q, k, v, Mask("top_left"))


RANGES = {
    "q 1e30, k 1e-30": (1e30, 1e-30, 1.0),
    "q 1e-30, k 1e30": (1e-30, 1e30, 1.0),
    "v 1e30": (1.0, 1.0, 1e30),
    "v 1e-30": (1.0, 1.0, 1e-30),
    "v 1e-38": (1.0, 1.0, 1e-38),
    "all 1e-30": (1e-30, 1e-30, 1e-30),
    "all zero": (0.0, 0.0, 0.0),
}


def range_of_float32(kernel: flash_wmma.Kernel) -> bool:
    """Whether the kernel promises that none of it is lost."""
    return torch.float32 in kernel.dtypes and kernel.auto_rank > 0


@needs(range_of_float32)
@pytest.mark.parametrize("sizes", RANGES.values(), ids=RANGES)
def test_float32_range(kernel: flash_wmma.Kernel, sizes: tuple[float, float, float]) -> None:
    """No range of float32 is lost, in the kernels that `auto` takes."""
    q, k, v = (
        normal((2, 3, n, D), device=kernel.device, seed=s) * size
        for s, (n, size) in enumerate(zip((100, 150, 150), sizes, strict=True))
    )
    verify((kernel, torch.float32), q, k, v)


TILE_EXPONENTS = {  # of 64 rows each; -inf: zeros
    "q": (-60, 0, 2, -3, 0, -100),
    "k": (-60, 0, 2, -30, 0, -100),
    "v": (-90, 60, 0, -20, 90, 3),
    "k far apart": (60, -70, 2, -30, 0, -100),
    "v near": (0, 3, -2, 1, 4, 0),
    "v far apart": (120, -120, 0, -120, 120, 3),
    "v with zeros": (-100, -math.inf, -102, -110, -100, -math.inf),
}


@needs(range_of_float32)
@pytest.mark.parametrize(("which", "d"), [*((which, D) for which in TILE_EXPONENTS), ("v", 128)])
def test_float32_range_differs_from_tile_to_tile(kernel: flash_wmma.Kernel, which: str, d: int) -> None:
    n = 5 * 64 + 10 if d == D else 2 * 64  # with few rows wgmma_sm90 has tiles of 128 keys at d = 128 too
    tensors = {name: normal((1, 2, n, d), device=kernel.device, seed=s) for s, name in enumerate("qkv")}
    size = 2.0 ** torch.tensor(TILE_EXPONENTS[which]).double()[torch.arange(n) // 64][:, None]
    tensors[which[0]] = (tensors[which[0]].double().cpu() * size).float().to(kernel.device)
    q, k, v = tensors.values()
    verify((kernel, torch.float32), q, k, v)
    if "causal" in kernel.features:
        verify((kernel, torch.float32), q, k, v, Mask("top_left"))


@needs(range_of_float32)
@pytest.mark.parametrize("which", "qkv")
def test_float32_one_large_row_in_a_tile(kernel: flash_wmma.Kernel, which: str) -> None:
    """The last of 64 rows: those of d = 128 are more than a pass over them keeps."""
    tensors = {name: normal((1, 2, 128, 128), device=kernel.device, seed=s) for s, name in enumerate("qkv")}
    tensors[which][:, :, 63::64] *= 64
    verify((kernel, torch.float32), *tensors.values())


@needs(lambda kernel: range_of_float32(kernel) and "window" in kernel.features)
def test_float32_values_outside_a_window(kernel: flash_wmma.Kernel) -> None:
    """No row sees the first 64 keys, of whose tile others are seen: how large their values are changes nothing."""
    q = normal((1, 2, 64, D), device=kernel.device, seed=0)
    k, v = (normal((1, 2, 192, D), device=kernel.device, seed=s) for s in (1, 2))
    v[:, :, :64] *= 2.0**120
    v[:, :, 64:] *= 2.0**-30
    verify((kernel, torch.float32), q, k, v, Mask("bottom_right", (63, 0)))


@needs(range_of_float32)
@pytest.mark.parametrize("size", [1e2, 3e4, 1e9])
def test_float32_large_value_without_weight(kernel: flash_wmma.Kernel, size: float) -> None:
    """A value that no query takes shares its scale with its own 64 rows, and shrinks the weights of no others."""
    q, k, v = (normal((1, 2, 300, D), device=kernel.device, seed=s) for s in range(3))
    q[..., 0] = 8
    k[:, :, [5, 130], 0] = -1e4
    v[:, :, [5, 130]] = size
    out, _ = run(kernel, q, k, v)
    expected, _ = attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=4e-3)


def compare_nonfinite(target: Target, q: Tensor, k: Tensor, v: Tensor, mask: Mask = DENSE) -> Tensor:
    """NaN where the written-out attention has it, close elsewhere. Returns where the rows are finite."""
    kernel, dtype = target
    out, lse = run(kernel, q, k, v, mask)
    expected, expected_lse = attention(q.double(), k.double(), v.double(), mask)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(lse.isfinite(), expected_lse.isfinite())
    finite = expected.isfinite().all(dim=3)
    error = (out.double() - expected).abs()[finite]
    assert error.numel() == 0 or float(error.max()) <= 16 * operand_eps((kernel, dtype)) + 1e-5
    return finite


def inputs(target: Target, n: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    kernel, dtype = target
    q, k, v = (normal((1, 2, n, D), dtype=dtype, device=kernel.device, seed=s) for s in (1, 2, 3))
    return q, k, v


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_query(target: Target, value: float) -> None:
    """One query's row is lost and no other."""
    q, k, v = inputs(target)
    q[0, 0, 37, 5] = value
    finite = compare_nonfinite(target, q, k, v)
    assert int((~finite).sum()) == 1


def test_nan_key(target: Target) -> None:
    """Lost are the queries that see the key."""
    q, k, v = inputs(target)
    k[0, 1, 50, 7] = math.nan
    assert int((~compare_nonfinite(target, q, k, v)).sum()) == 100
    if "causal" in target[0].features:
        assert int((~compare_nonfinite(target, q, k, v, Mask("top_left"))).sum()) == 50


@pytest.mark.parametrize("key", [0, 17, 63, 64, 99])
def test_minus_infinite_score(target: Target, key: int) -> None:
    """A key whose score is -inf has no weight."""
    q, k, v = inputs(target)
    q = q.abs()
    k[0, 1, key, 7] = -math.inf
    assert bool(compare_nonfinite(target, q, k, v).all())


def test_first_tiles_minus_infinite(target: Target) -> None:
    """The running maximum is still -inf after whole tiles of keys."""
    q, k, v = inputs(target, 300)
    q = q.abs()
    k[:, :, :257, 0] = -math.inf
    assert bool(compare_nonfinite(target, q, k, v).all())


def test_plus_infinite_score(target: Target) -> None:
    """inf - inf: NaN, as in SDPA."""
    q, k, v = inputs(target)
    q = q.abs()
    k[0, 0, 20, 7] = math.inf
    assert int((~compare_nonfinite(target, q, k, v)).sum()) == 100


def test_all_scores_minus_infinite(target: Target) -> None:
    """SDPA gives NaN without a mask and 0 with one; both are right here, a finite value is not."""
    q, k, v = inputs(target)
    q = q.abs()
    k[0, 0, :, 7] = -math.inf
    out, lse = run(target[0], q, k, v)
    assert bool((out[0, 0].isnan() | (out[0, 0] == 0)).all())
    assert bool((lse[0, 0].isnan() | lse[0, 0].isneginf()).all())
    assert bool(out[0, 1].isfinite().all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_value(target: Target, value: float) -> None:
    """It goes to its own column of every query that sees it."""
    q, k, v = inputs(target)
    v[0, 1, 40, 3] = value
    out, lse = run(target[0], q, k, v)
    column = out[0, 1, :, 3]
    assert bool((column.isnan() if math.isnan(value) else column == value).all())
    clean = out.clone()
    clean[0, 1, :, 3] = 0
    assert bool(clean.isfinite().all())
    assert bool(lse.isfinite().all())


def test_fp16_overflows_as_torch_does(target: Target) -> None:
    """Scores beyond fp16's range are float32 and do no harm."""
    kernel, dtype = target
    q, k, v = inputs(target)
    verify((kernel, dtype), q * 200, k * 200, v)


def test_out_is_rounded_once(target: Target) -> None:
    """A single key: its value comes back to the bit, as far as the operands hold it."""
    kernel, dtype = target
    q, k, v = (normal((2, 2, n, D), dtype=dtype, device=kernel.device, seed=n) for n in (40, 1, 1))
    out, _ = run(kernel, q, k, v)
    operands = operand_dtype(kernel, dtype)
    expected = as_multiplied(v, operands).expand_as(out)
    check(*run(kernel, q, k, v), reference(kernel, q, k, v))
    eps = torch.finfo(dtype).eps * (1 if operands == dtype else 4)  # a power of two goes in and out again
    assert torch.allclose(out.double(), expected, rtol=eps, atol=0)
