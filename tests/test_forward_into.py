"""The op forward_into: rows of tensors that are there, beside rows that stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import on_gpu
from torch import Tensor

import flash_wmma
from flash_wmma import _ops
from flash_wmma._call import Call, call_of
from flash_wmma._library import ops

WHERE = ["cpu", "cuda" if on_gpu() else "emulated"]
KERNELS = {"cpu": ["cpu"], "cuda": ["auto"], "emulated": ["mma_sm75", "mma_sm80", "wgmma_sm90"]}
CASES = [(where, kernel) for where in WHERE for kernel in KERNELS[where]]
ROWS, BEGIN = 60, 10


def inputs(where: str, d: int = 64, d_v: int = 64, n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(d + n)
    device = "cuda" if where == "cuda" else "cpu"
    shapes = (2, 4, n, d), (2, 2, 50, d), (2, 2, 50, d_v)
    q, k, v = (torch.randn(shape, generator=make).half().to(device) for shape in shapes)
    return q, k, v


def place(q: Tensor, d_v: int, layout: str) -> tuple[Tensor, Tensor]:
    """out with more rows on both sides, and its rows that are q's."""
    b, h, n = q.shape[:3]
    out = q.new_full((b, ROWS, h, d_v), 7.0).transpose(1, 2) if layout == "bnhd" else q.new_full((b, h, ROWS, d_v), 7.0)
    if layout == "odd rows":
        out = q.new_full((b, h, ROWS, d_v + 3), 7.0)[..., 1 : d_v + 1]
    return out, out[:, :, BEGIN : BEGIN + n]


def check_others(x: Tensor, n: int) -> None:
    assert (x[:, :, :BEGIN] == 7).all()
    assert (x[:, :, BEGIN + n :] == 7).all()


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "odd rows"])
@pytest.mark.parametrize(("where", "named"), CASES)
def test_rows(where: str, named: str, layout: str) -> None:
    """As forward's, to the bit; with head dims that are no multiple of 8 too."""
    for d, d_v in ((64, 64), (20, 36)):
        q, k, v = inputs(where, d, d_v)
        call = call_of(causal="bottom_right", kernel=named)
        expected = flash_wmma.forward(q, k, v, causal="bottom_right", kernel=named, return_lse=True)
        out, rows = place(q, d_v, layout)
        with flash_wmma.emulator.settings(mode="checked"):
            lse = _ops.forward_into(rows, q, k, v, call)
        for got, right in zip((rows, lse), expected, strict=True):
            assert torch.equal(got, right)
        check_others(out, q.shape[2])


@pytest.mark.parametrize("where", WHERE)
def test_options(where: str) -> None:
    """They arrive in their places."""
    q, k, v = inputs(where)
    options: dict[str, Any] = {
        "scale": 0.3,
        "window": (30, 2),
        "attn_bias": torch.randn(50, device=q.device).half(),
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4], device=q.device),
        "softcap": 3.0,
        "sinks": torch.tensor([0.0, 1.0, -1.0, 2.0], device=q.device),
        "kernel": "mma_sm80" if where != "cpu" else "cpu",
    }
    expected = flash_wmma.forward(q, k, v, return_lse=True, **options)
    _, rows = place(q, 64, "bhnd")
    lse = _ops.forward_into(rows, q, k, v, call_of(**options))
    for got, right in zip((rows, lse), expected, strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("where", WHERE)
def test_no_key(where: str) -> None:
    q, k, v = inputs(where)
    out, rows = place(q, 64, "bhnd")
    lse = _ops.forward_into(rows, q, k[:, :, :0], v[:, :, :0], Call(only_band=True))
    assert not rows.any()
    assert lse.isneginf().all()
    check_others(out, q.shape[2])


@pytest.mark.parametrize(
    ("out", "named"),
    [
        (torch.zeros(2, 4, 41, 64).half(), r"out.*\(B, Hq, Nq, d_v\)"),
        (torch.zeros(2, 4, 40, 64), "out.dtype"),
    ],
)
def test_errors(out: Tensor, named: str) -> None:
    q, k, v = inputs("cpu")
    with pytest.raises((RuntimeError, ValueError), match=named):
        _ops.forward_into(out, q, k, v, Call(only_band=True))


def test_opcheck() -> None:
    q, k, v = inputs("cpu")
    torch.library.opcheck(ops.forward_into.default, (torch.zeros_like(q), q, k, v))
