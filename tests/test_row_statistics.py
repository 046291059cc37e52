"""Maxima and entropies that wgmma_sm90 tells from forward's own pass, against float64. In the emulator, checked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference import DENSE, PLAIN, Mask, Modification, poisoned_memory
from test_statistics import compare, expected
from torch import Tensor

import flash_wmma

KERNEL = "wgmma_sm90"
BOTH = ("max", "entropy")
NAMES = (("max",), ("entropy",), BOTH)
Shape = tuple[int, int, int, int, int, int]


def tensors(shape: Shape, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    """q, k and v for (batch, Hq, Hk, Nq, Nk, d)."""
    b, hq, hk, nq, nk, d = shape
    make = torch.Generator().manual_seed(nq + nk + d)
    return [torch.randn(b, h, n, d, generator=make).to(dtype) for h, n in ((hq, nq), (hk, nk), (hk, nk))]


def told(
    q: Tensor, k: Tensor, v: Tensor, names: tuple[str, ...] = BOTH, sm_count: int = 2, **options: Any
) -> dict[str, Tensor]:
    """The statistics, beside an out and an lse that are as without them."""
    with flash_wmma.emulator.settings(mode="checked", sm_count=sm_count), poisoned_memory():
        out, lse, aux = flash_wmma.forward(q, k, v, kernel=KERNEL, return_aux=names, return_lse=True, **options)
    again, its_lse = flash_wmma.forward(q, k, v, return_lse=True, **options)
    assert list(aux) == list(names)
    tolerance = 2e-2 if q.dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(out, again, atol=tolerance * float(v.abs().max()), rtol=0, equal_nan=True)
    torch.testing.assert_close(lse, its_lse, atol=2e-3, rtol=1e-4, equal_nan=True)
    return aux


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = DENSE,
    names: tuple[str, ...] = BOTH,
    sm_count: int = 2,
    scale: float | None = None,
    changes: Modification = PLAIN,
) -> None:
    aux = told(q, k, v, names, sm_count, scale=scale, sinks=changes.sinks, **mask._asdict())
    right = expected(q.double(), k.double(), mask, changes, scale)
    largest = right["max"].masked_fill(right["max"].isinf(), 0).abs().max()
    compare(aux, right, factor=1 + float(largest) / 50)  # scores are rounded to fp32


SHAPES: list[tuple[int, Shape]] = [  # multiprocessors, and a problem that takes the shape with them
    (2, (1, 2, 1, 256, 200, 64)),  # four consumers
    (2, (1, 2, 1, 190, 300, 64)),  # three
    (2, (1, 3, 1, 120, 300, 40)),
    (2, (1, 2, 2, 190, 150, 128)),
    (2, (2, 4, 2, 70, 150, 72)),
]
MASKS = [DENSE, Mask("top_left"), Mask("bottom_right"), Mask("bottom_right", (70, 0)), Mask(False, (30, 40))]


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("sm_count", "shape"), SHAPES)
def test_shapes(sm_count: int, shape: Shape, mask: Mask, names: tuple[str, ...]) -> None:
    check(*tensors(shape, torch.bfloat16 if mask == DENSE else torch.float16), mask, names, sm_count)


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 130), (65, 1), (300, 40), (40, 300)])
def test_few_queries_or_keys(nq: int, nk: int, names: tuple[str, ...]) -> None:
    """With rows that see no key."""
    for mask in (DENSE, Mask("bottom_right")):
        check(*tensors((1, 2, 1, nq, nk, 64)), mask, names)


SPLIT: dict[str, tuple[int, Shape, Mask]] = {  # multiprocessors, a problem, and its mask
    "one item": (4, (1, 1, 1, 100, 1100, 64), DENSE),
    "behind whole ones": (2, (1, 3, 1, 60, 1100, 128), DENSE),
    "last item smaller": (9, (1, 1, 1, 300, 1600, 64), Mask("bottom_right")),
    "more parts than tiles": (40, (1, 1, 1, 1540, 1600, 64), Mask("top_left")),
    "rows without keys": (24, (1, 1, 1, 1200, 1030, 64), Mask("bottom_right")),
}


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
@pytest.mark.parametrize("case", SPLIT)
def test_parts(case: str, names: tuple[str, ...]) -> None:
    """Items whose keys several blocks share."""
    sm_count, shape, mask = SPLIT[case]
    q, k, v = tensors(shape, torch.bfloat16 if case == "one item" else torch.float16)
    check(q, k, v, mask, names, sm_count)


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_parts_of_different_scale(names: tuple[str, ...]) -> None:
    """Scores of one part that are e^200 times the other's weights, either way round; and one part's rows all -inf."""
    q, k, v = tensors((1, 2, 2, 40, 1100, 64))
    q[..., 0], k[..., 0] = 16.0, 0.0
    k[:, 0, :550, 0], k[:, 1, 550:, 0] = 100.0, 100.0
    check(q, k, v, names=names, sm_count=4)
    q[..., 0], k[:, 0, 600:, 0] = 1.0, -math.inf
    check(q, k, v, names=names, sm_count=4)


def test_a_queue() -> None:
    """Causal, and more items than two for each block."""
    check(*tensors((1, 6, 3, 520, 530, 64)), Mask("top_left"))


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("rise", [1.0, 8.0, 10.0, 20.0, 1000.0])
@pytest.mark.parametrize("where", ["every row", "one row", "last tile"])
def test_rising_scores(where: str, rise: float, d: int, names: tuple[str, ...]) -> None:
    """Scores that rise, in log2 units, from each tile to the one before it, which comes next: the old m serves for some
    time, then for none. In all rows, in one, or in the tile that comes last alone."""
    nk, keys = 640, 32
    q, k, v = tensors((1, 2, 1, 256, nk, d))
    tile = (nk - 1 - torch.arange(nk)) // keys if where != "last tile" else (torch.arange(nk) < keys).float() * 8
    q[..., 0], k[..., 0] = 0.0, 0.0
    if where == "one row":
        q[:, :, 77, 0] = 1.0
    else:
        q[..., 0] = 1.0
    k[..., 0] = (tile * rise * math.log(2) * math.sqrt(d)).clamp(max=6e4)
    check(q, k, v, names=names)


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_rows_far_apart(names: tuple[str, ...]) -> None:
    """Rows whose scores differ by e^200, a row of equal scores, and rows with one key far above all others."""
    q, k, v = tensors((1, 2, 2, 200, 300, 64))
    q[:, :, 3] = 0
    q[:, :, 5] *= 60
    q[:, :, 7] /= 200
    k[:, :, 20] *= 4
    check(q, k, v, names=names)
    if "entropy" in names:
        entropy = told(q, k, v, names)["entropy"][:, :, 3]
        torch.testing.assert_close(entropy, torch.full_like(entropy, math.log(300)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0**18])
def test_scales(scale: float, names: tuple[str, ...]) -> None:
    """The last makes scores of more than 2^24, which no tile tries with the old m."""
    check(*tensors((1, 2, 1, 130, 200, 64)), names=names, scale=scale)


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
@pytest.mark.parametrize(("sm_count", "nk"), [(2, 200), (4, 1100)])
def test_sinks(sm_count: int, nk: int, names: tuple[str, ...]) -> None:
    """A sink far below all scores, some near them, one far above; with parts, and with rows without keys."""
    sinks = torch.tensor([-50.0, 0.0, 3.0, 60.0])
    check(*tensors((1, 4, 2, 40, nk, 64)), DENSE, names, sm_count, changes=Modification(sinks=sinks))
    check(*tensors((1, 4, 4, 90, 40, 64)), Mask("bottom_right"), names, sm_count, changes=Modification(sinks=sinks))


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("nk", [50, 300])
def test_what_is_not_finite_stays_in_its_row(nk: int, value: float, names: tuple[str, ...]) -> None:
    q, k, v = tensors((2, 4, 2, 40, nk, 64))
    q[0, 1, 7, 3] = value
    with flash_wmma.emulator.settings(mode="checked", sm_count=2):
        _, aux = flash_wmma.forward(q, k, v, kernel=KERNEL, return_aux=names)
    right = expected(q.double(), k.double(), DENSE)
    others = torch.ones(2, 4, 40, dtype=torch.bool)
    others[0, 1, 7] = False
    compare({n: t[others] for n, t in aux.items()}, {n: right[n][others] for n in names})
    if "entropy" in names:
        assert aux["entropy"][0, 1, 7].isnan()
    if "max" in names:
        assert aux["max"][0, 1, 7].isnan() if math.isnan(value) else aux["max"][0, 1, 7] == math.inf


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_scores_of_minus_infinity(names: tuple[str, ...]) -> None:
    """On tiles that all rows see, where the keys are hidden by nothing but their numbers."""
    q, k, v = tensors((1, 2, 1, 100, 400, 64))
    q[..., 0] = 1.0
    for key in (3, 130, 131, 390):
        k[:, :, key] = 0
        k[:, :, key, 0] = -math.inf
    check(q, k, v, names=names)


@pytest.mark.parametrize("names", [*NAMES, ("column_sum", "entropy"), ("max", "entropy", "column_sum")], ids=" ".join)
def test_gradients(names: tuple[str, ...]) -> None:
    """They are those of the pass of its own, which a named kernel of backward makes."""
    made, sinks = tensors((1, 4, 2, 40, 70, 64)), torch.tensor([0.0, 1.0, -3.0, 2.0])
    found = []
    for backward_kernel in ("auto", "bwd_cpu"):
        leaves = [t.clone().requires_grad_() for t in (*made, sinks)]
        out, lse, aux = flash_wmma.forward(
            *leaves[:3], causal=True, sinks=leaves[3], kernel=KERNEL, return_aux=names, return_lse=True,
            backward_kernel=backward_kernel,
        )  # fmt: skip
        if "max" in names:
            with pytest.raises(NotImplementedError, match='"max" has no gradient'):
                aux["max"].sum().backward(retain_graph=True)
        loss = out.float().square().sum() + lse.square().sum()
        for name in set(names) - {"max"}:
            loss = loss + aux[name].square().sum()
        found.append(torch.autograd.grad(loss, leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=4e-3, rtol=1e-3)


def test_opcheck() -> None:
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 6, 8)
    op = flash_wmma._library.ops.forward_with_statistics.default
    for wanted in ("", "max", "entropy", "max entropy"):
        torch.library.opcheck(op, (q, k, k, wanted))
        found = op(q, k, k, wanted, sinks=torch.zeros(4))[2:]
        assert [t.numel() > 0 for t in found] == [name in wanted for name in BOTH]


def test_compile() -> None:
    q = torch.randn(1, 2, 9, 16, requires_grad=True)

    def loss(q: Tensor) -> Tensor:
        out, aux = flash_wmma.forward(q, q, q, causal=True, return_aux=BOTH)
        return out.sum() + aux["entropy"].square().sum() + aux["max"].detach().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), loss(q))
    torch.testing.assert_close(*(torch.autograd.grad(f(q), q)[0] for f in (compiled, loss)))


def test_no_queries_or_no_keys() -> None:
    for nq, nk in ((0, 3), (3, 0)):
        q, k = torch.randn(1, 2, nq, 64).half(), torch.randn(1, 2, nk, 64).half()
        _, aux = flash_wmma.forward(q, k, k, kernel=KERNEL, return_aux=BOTH)
        assert aux["max"].isneginf().all()
        assert not aux["entropy"].any()


def test_who_tells() -> None:
    """Plain dense problems on sm_90, of heads up to 128."""
    device = flash_wmma.DeviceFacts(arch=90, sm_count=132, smem_optin=227 * 1024)
    q = torch.empty(2, 8, 1000, 64, dtype=torch.float16, device="meta")

    def tells(t: Tensor, **options: Any) -> bool:
        return flash_wmma.explain(t, t, t, device_facts=options.pop("device_facts", device), **options).tells

    assert tells(q)
    assert tells(q, window=(100, 3), causal="bottom_right", sinks=torch.empty(8, device="meta"))
    assert tells(torch.empty(2, 8, 1000, 128, dtype=torch.bfloat16, device="meta"))
    assert not tells(q.float())
    assert not tells(q, softcap=3.0)
    assert not tells(q, alibi_slopes=torch.empty(8, device="meta"))
    assert not tells(torch.empty(2, 8, 1000, 136, dtype=torch.float16, device="meta"))
    assert not tells(torch.empty(1000, 8, 64, dtype=torch.float16, device="meta"))
    assert not tells(q, device_facts=flash_wmma.DeviceFacts(80, 108, 163 * 1024))
