"""Dropout of attention weights: one mask for all kernels, layouts and passes; its statistics; torch's machinery."""

from __future__ import annotations

import functools
import math
import re
import sys
from typing import Any

import dropout_statistics
import pytest
import torch
from needs import needs
from reference import (
    Mask,
    as_multiplied,
    attention,
    few,
    grouped,
    head_error,
    normal,
    operand_dtype,
    poisoned_memory,
)
from test_backward import error, has_mask
from test_varlen import cumulative
from torch import Tensor

import flash_wmma
from flash_wmma import _attention
from flash_wmma._call import Call
from flash_wmma._library import ops

Target = tuple[flash_wmma.Kernel, torch.dtype]
STATE = (0x0123456789ABCDEF, -5)


def state(device: str = "cpu", numbers: tuple[int, int] = STATE) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def dropped(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, kept: Tensor, p: float, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention written out, with that mask of the weights."""
    _, lse = attention(q, k, v, mask, scale)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    keys, values = grouped(k, q.shape[1]), grouped(v, q.shape[1])
    scores = q @ keys.transpose(2, 3) * scale
    scores = scores.masked_fill(~mask.visible(q.shape[2], k.shape[2], q.device), -math.inf)
    finite = lse.masked_fill(lse.isneginf(), math.inf)[..., None]
    return ((scores - finite).exp() * kept / (1 - p)) @ values, lse


def inputs(target: Target, nq: int, nk: int, d: int = 64, hq: int = 4, hk: int = 2, batch: int = 2) -> list[Tensor]:
    kernel, dtype = target
    shapes = ((hq, nq, 1), (hk, nk, 2), (hk, nk, 3))
    return [normal((batch, h, n, d), "contiguous", dtype, kernel.device, seed) for h, n, seed in shapes]


def philox(counter: list[int], key: int) -> list[int]:
    """Philox-4x32-7 with Python's integers."""
    low = 0xFFFFFFFF
    c, k = list(counter), [key & low, key >> 32]
    for _ in range(7):
        x, y = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(y >> 32) ^ c[1] ^ k[0], y & low, (x >> 32) ^ c[3] ^ k[1], x & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c


# ---------------------------------------------------------------------------------------------------------- the mask


def test_the_mask_is_philox() -> None:
    seed, offset = (n % 2**64 for n in STATE)
    key = seed ^ (offset * 0x9E3779B97F4A7C15) % 2**64
    mask = flash_wmma.dropout_mask(state(), 0.3, 3, 5, 40, 70)
    for b, h, i, j in ((0, 0, 0, 0), (2, 4, 39, 69), (1, 3, 8, 9), (1, 3, 7, 14), (2, 0, 23, 33), (0, 1, 31, 64)):
        words = philox([h, i // 16 * 8 + i % 8, b, j // 16 * 4 + j % 8 // 2], key)
        number = words[j // 8 % 2 * 2 + i // 8 % 2] >> (j % 2 * 16) & 0xFFFF
        half, limit = (torch.tensor(n, dtype=torch.uint16).view(torch.float16) for n in (number, 0xFC00 - 19661))
        assert bool(mask[b, h, i, j]) == (not half < limit)


@functools.cache
def large_mask(p: float) -> torch.Tensor:
    return flash_wmma.dropout_mask(state(), p, 4, 8, 512, 512)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_kept_fraction(p: float) -> None:
    mask = large_mask(p)
    deviation = math.sqrt(p * (1 - p) / mask.numel())
    assert abs(float(mask.double().mean()) - (1 - p)) <= 5 * deviation + 1 / 65536


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("step", [(0, 0, 0, 1), (0, 0, 0, 8), (0, 0, 1, 0), (0, 0, 8, 0), (0, 1, 0, 0), (1, 0, 0, 0)])
def test_neighbours_are_independent(step: tuple[int, ...], p: float) -> None:
    """Chi-square of the four outcomes of a pair, against 1 in 10,000 (one degree of freedom: 15.1)."""
    assert dropout_statistics.chi_square(large_mask(p), step)[0] < 15.1


SMALL = (2, 2, 48, 48)


def statistics(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The program dropout_statistics.py on a few small masks: its exit status and what it prints."""
    monkeypatch.setattr(dropout_statistics, "SHAPE", SMALL)
    monkeypatch.setattr(sys, "argv", ["dropout_statistics.py", "--weights", "40000", "--p", "0.5", "--device", "cpu"])
    return dropout_statistics.main(), capsys.readouterr().out


def test_statistics_of_good_masks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = statistics(capsys, monkeypatch)
    assert status == 0
    assert "p = 0.5: 4.61e+04 weights" in text
    assert text.count("of 5 masks") == len(dropout_statistics.NEIGHBOURS)


@pytest.mark.parametrize("fault", ["fraction", *range(4)])
def test_statistics_of_bad_masks(
    fault: str | int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fiftieth more is kept, or every fifth weight is like its neighbour in one dimension."""
    generator = torch.Generator().manual_seed(0)

    def bad(*_: object) -> Tensor:
        mask = torch.rand(SMALL, generator=generator) < (0.52 if fault == "fraction" else 0.5)
        if isinstance(fault, int):
            mask = torch.where(torch.rand(SMALL, generator=generator) < 0.2, mask.roll(1, fault), mask)
        return mask

    monkeypatch.setattr(flash_wmma, "dropout_mask", bad)
    status, text = statistics(capsys, monkeypatch)
    assert status == 1
    assert text.endswith("failed\n")


def test_states_differ() -> None:
    masks = [
        flash_wmma.dropout_mask(state("cpu", n), 0.5, 1, 1, 64, 64)
        for n in ((0, 0), (1, 0), (0, 1), (1, 1), (2**40, 0))
    ]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert 0.4 < float((one == other).double().mean()) < 0.6


# ------------------------------------------------------------------------------------------------------------- forward


@needs("dropout")
@pytest.mark.parametrize("p", [0.3, 0.8])
def test_the_same_mask(target: Target, p: float) -> None:
    """Equal scores and a one-hot V show the mask itself, in every place."""
    kernel, dtype = target
    nq, nk = 70, 64
    q, k, _ = inputs(target, nq, nk, 64, 4, 2)
    q = torch.zeros_like(q)
    v = torch.eye(nk, dtype=dtype, device=kernel.device).expand(2, 2, nk, nk).contiguous()
    out, lse = flash_wmma.forward(
        q, k, v, kernel=kernel.name, dropout_p=p, rng_state=state(kernel.device), return_lse=True
    )
    mask = flash_wmma.dropout_mask(state(kernel.device), p, 2, 4, nq, nk)
    assert torch.equal(out != 0, mask)
    torch.testing.assert_close(
        out[mask].float(), torch.full_like(out[mask], 1 / nk / (1 - p)).float(), rtol=2e-2, atol=0
    )
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(nk)), rtol=1e-5, atol=1e-5)


ORIGIN = (3, 5, 32, 48)
"""Of a call in a whole: entry, head, query, key."""


def part_of_mask(p: float, *sizes: int) -> Tensor:
    whole = [first + size for first, size in zip(ORIGIN, sizes, strict=True)]
    return flash_wmma.dropout_mask(state(), p, *whole)[tuple(slice(first, None) for first in ORIGIN)]


@needs("dropout")
@pytest.mark.parametrize("p", [0.3, 0.8])
def test_a_part_of_a_whole(target: Target, p: float) -> None:
    """A call that is told where it lies in a whole has that part of the whole's mask."""
    kernel, dtype = target
    nq, nk = 70, 64
    q, k, _ = inputs(target, nq, nk, 64, 4, 2)
    v = torch.eye(nk, dtype=dtype, device=kernel.device).expand(2, 2, nk, nk).contiguous()
    out, _ = ops.forward(
        torch.zeros_like(q), k, v, rng_state=state(kernel.device), dropout_p=p, dropout_origin=torch.tensor(ORIGIN),
        kernel_name=kernel.name,
    )  # fmt: skip
    assert torch.equal(out.cpu() != 0, part_of_mask(p, 2, 4, nq, nk))


@needs("dropout")
def test_gradients_of_a_part_of_a_whole(backward_target: Target) -> None:
    """With equal weights and a one-hot dO, dV is the mask."""
    kernel, dtype = backward_target
    n, p = 64, 0.3
    q, k, v = inputs(backward_target, n, n, n, 2, 2)
    out, lse = torch.zeros_like(v), torch.full((2, 2, n), math.log(n), device=kernel.device)
    dout = torch.eye(n, dtype=dtype, device=kernel.device).expand(2, 2, n, n).contiguous()
    _, _, dv, _ = ops.backward(
        dout, None, torch.zeros_like(q), k, v, out, lse, rng_state=state(kernel.device), dropout_p=p,
        dropout_origin=torch.tensor(ORIGIN), kernel_name=kernel.name,
    )  # fmt: skip
    assert torch.equal(dv.cpu() != 0, part_of_mask(p, 2, 2, n, n).transpose(2, 3))


def test_a_part_of_a_whole_by_torch_ops() -> None:
    """The same, which derivatives of derivatives need."""
    q, k, v = torch.randn(3, 2, 4, 40, 16)
    call = Call(rng_state=state(), dropout_p=0.4, dropout_origin=torch.tensor(ORIGIN))
    expected, _ = _attention.attend(q, k, v, call)
    out, _ = _attention.attend(q, k, v, call._replace(kernel_name="math"))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("origin", [(0, 0, 8, 0), (0, 0, 0, 1), (0, -1, 0, 0), (0, 0, 2**40, 0), (0, 0, 0)])
def test_a_wrong_origin(origin: tuple[int, ...]) -> None:
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises((RuntimeError, ValueError), match="dropout_origin"):  # which of the two depends on torch
        ops.forward(x, x, x, rng_state=state(), dropout_p=0.5, dropout_origin=torch.tensor(origin))


@needs("dropout", has_mask)
@pytest.mark.parametrize("mask", ["dense", "bottom right", "window"])
@pytest.mark.parametrize(
    ("nq", "nk", "d"), [(1, 1, 64), (1, 700, 64), (3, 130, 64), (100, 66, 40), (65, 200, 128), (40, 70, 256)]
)
def test_against_float64(target: Target, nq: int, nk: int, d: int, mask: str) -> None:
    from test_backward import MASKS

    kernel, dtype = target
    p = 0.25
    q, k, v = inputs(target, nq, nk, d, batch=few(kernel, 2))
    with poisoned_memory():
        out, lse = flash_wmma.forward(
            q, k, v, kernel=kernel.name, dropout_p=p, rng_state=state(kernel.device), return_lse=True,
            causal=MASKS[mask].causal, window=MASKS[mask].window,
        )  # fmt: skip
    kept = flash_wmma.dropout_mask(state(kernel.device), p, *q.shape[:3], nk)
    operand = operand_dtype(kernel, dtype)
    multiplied = [as_multiplied(t, operand) for t in (q, k, v)]
    exact, exact_lse = dropped(*multiplied, MASKS[mask], kept, p)
    plain, _ = dropped(*(t.to(operand) for t in multiplied), MASKS[mask], kept, p)
    rounding = max(torch.finfo(operand).eps, torch.finfo(dtype).eps) / 2
    assert head_error(out, exact) <= 2 * max(head_error(plain, exact), rounding) + 1e-5
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=2 * torch.finfo(operand).eps)


@needs("dropout", "varlen")
def test_packed_is_dense(target: Target) -> None:
    """A sequence's mask is that of the batch entry with its number; grouped heads and a sink besides."""
    kernel, _ = target
    lengths, p = (40, 0, 70, 33), 0.4
    dense = inputs(target, 70, 70, batch=4)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=kernel.device)
    rows = [torch.cat([t[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]) for t in dense]
    cu = cumulative(lengths, kernel.device)
    options: dict[str, Any] = {"kernel": kernel.name, "dropout_p": p, "rng_state": state(kernel.device), "causal": True}
    options["sinks"] = sinks
    out = flash_wmma.forward_varlen(*rows, cu, cu, 70, 70, **options)
    begin = 0
    for b, n in enumerate(lengths):
        if n == 0:
            continue
        # an entry of its own: its mask must be the one of entry b
        entries = [t[: b + 1, :, :n].contiguous() for t in dense]
        alone = flash_wmma.forward(*entries, **options)[b].transpose(0, 1)
        torch.testing.assert_close(
            out[begin : begin + n], alone, rtol=2e-3, atol=2e-3 if out.dtype != torch.float32 else 1e-3
        )
        begin += n


@needs("dropout", "attn_bias", "softcap")
@pytest.mark.parametrize("biased", [False, True])
def test_with_modified_scores(target: Target, biased: bool) -> None:
    kernel, dtype = target
    q, k, v = inputs(target, 50, 70)
    bias = torch.randn(50, 70, generator=torch.Generator().manual_seed(1)).to(kernel.device)
    options: dict[str, Any] = {"softcap": 5.0, "dropout_p": 0.3, "rng_state": state(kernel.device)}
    if biased:
        options["attn_bias"] = bias
    out = flash_wmma.forward(q, k, v, kernel=kernel.name, **options)
    expected = flash_wmma.forward(q.double(), k.double(), v.double(), kernel="math", **options)
    coarse = operand_dtype(kernel, dtype) != torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.03 if coarse else 1e-4)


# ------------------------------------------------------------------------------------------------------------ backward


@needs("dropout", has_mask, lambda kernel, deterministic: not deterministic or "deterministic" in kernel.features)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", ["dense", "bottom right", "window"])
@pytest.mark.parametrize(("nq", "nk", "d"), [(1, 70, 64), (100, 66, 64), (65, 129, 40), (40, 70, 128), (40, 70, 256)])
def test_gradients(backward_target: Target, nq: int, nk: int, d: int, mask: str, deterministic: bool) -> None:
    """Of q, k and v, through out and lse, with the mask of forward."""
    from test_backward import MASKS

    kernel, dtype = backward_target
    if d > kernel.head_dims[1]:
        d = 64
    p, operand = 0.25, operand_dtype(kernel, dtype)
    q, k, v = inputs(backward_target, nq, nk, d, batch=few(kernel, 2))
    multiplied = [as_multiplied(t, operand) for t in (q, k, v)]
    dout = normal(tuple(q.shape), "contiguous", dtype, kernel.device, 5)
    kept = flash_wmma.dropout_mask(state(kernel.device), p, *q.shape[:3], nk)

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in multiplied]
        out, lse = dropped(*leaves, MASKS[mask], kept, p)
        loss = (out * dout.to(dtype)).sum() + lse.masked_fill(lse.isneginf(), 0).sum()
        return list(torch.autograd.grad(loss, leaves))

    out, lse = dropped(*multiplied, MASKS[mask], kept, p)
    band = flash_wmma._call.band(MASKS[mask].causal, MASKS[mask].window)
    with poisoned_memory():
        *got, _ = ops.backward(
            dout, torch.ones_like(lse, dtype=torch.float32), q, k, v, out.to(dtype), lse.float(), None, *band,
            rng_state=state(kernel.device), dropout_p=p, deterministic=deterministic, kernel_name=kernel.name,
        )  # fmt: skip
    coarser = max(operand, dtype, key=lambda t: torch.finfo(t).eps)
    exact, plain = gradients(torch.float64), gradients(coarser)
    for name, one, expected, its_plain in zip("qkv", got, exact, plain, strict=True):
        allowed = 2 * max(error(its_plain, expected), torch.finfo(coarser).eps / 2) + 1e-5
        assert error(one, expected) <= 1.5 * allowed, f"d{name}: {error(one, expected):.3e}, allowed {allowed:.3e}"


@needs("dropout", "attn_bias", "softcap", "the gradient of attn_bias")
@pytest.mark.parametrize("p", [0.3, 0.7])
def test_gradients_with_modified_scores(backward_target: Target, p: float) -> None:
    """Of the bias too, against plain torch ops in float64."""
    kernel, dtype = backward_target
    q, k, v = inputs(backward_target, 50, 70, batch=few(kernel, 2))
    dout = normal(tuple(q.shape), "contiguous", dtype, kernel.device, 5)
    bias = torch.randn(50, 70, generator=torch.Generator().manual_seed(1)).to(kernel.device)
    options: dict[str, Any] = {"softcap": 5.0, "dropout_p": p, "rng_state": state(kernel.device)}
    leaves = [t.double().requires_grad_() for t in (q, k, v, bias)]
    out, lse = flash_wmma.forward(*leaves[:3], attn_bias=leaves[3], kernel="math", return_lse=True, **options)
    exact = torch.autograd.grad(out, leaves, dout.double())
    got = ops.backward(
        dout, None, q, k, v, out.detach().to(dtype), lse.detach().float(), attn_bias=bias, bias_grad=True,
        kernel_name=kernel.name, **options,
    )  # fmt: skip
    for name, one, expected in zip(("q", "k", "v", "bias"), got, exact, strict=True):
        assert float((one.double() - expected).abs().max() / expected.abs().max()) < 0.03, f"gradient of {name}"


@pytest.mark.parametrize("packed", [False, True])
def test_autograd(packed: bool) -> None:
    """The whole way, with sinks and a bias, against plain torch ops."""
    p = 0.3
    q, k, v = (torch.randn(2, h, 40, 16) for h in (4, 2, 2))
    bias, sinks = torch.randn(1 if packed else 2, 1, 40, 40), torch.randn(4)
    options: dict[str, Any] = {"dropout_p": p, "rng_state": state(), "causal": True}

    def loss(kernel: str, leaves: list[Tensor]) -> Tensor:
        call = {**options, "kernel": kernel, "attn_bias": leaves[3].float(), "sinks": leaves[4].float()}
        if not packed:
            return flash_wmma.forward(*leaves[:3], **call).square().sum()
        rows = [t.transpose(1, 2).flatten(0, 1) for t in leaves[:3]]
        cu = torch.tensor([0, 40, 80], dtype=torch.int32)
        return flash_wmma.forward_varlen(*rows, cu, cu, 40, 40, **call).square().sum()

    leaves = [t.requires_grad_() for t in (q, k, v, bias, sinks)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    for a, b in zip(
        torch.autograd.grad(loss("auto", leaves), leaves), torch.autograd.grad(loss("math", exact), exact), strict=True
    ):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


# --------------------------------------------------------------------------------------------------- torch's machinery


def test_the_generator_decides() -> None:
    """Calls differ, torch.manual_seed repeats them, and a given state takes nothing from the generator."""
    q = torch.randn(1, 2, 20, 16)
    torch.manual_seed(7)
    first, second = (flash_wmma.forward(q, q, q, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(flash_wmma.forward(q, q, q, dropout_p=0.5), first)
    before = torch.get_rng_state()
    flash_wmma.forward(q, q, q, dropout_p=0.5, rng_state=state())
    flash_wmma.forward(q, q, q, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpointing_repeats_the_mask() -> None:
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_wmma.forward(q, k, v, dropout_p=0.5, deterministic=True)

    torch.manual_seed(3)
    expected = torch.autograd.grad(function(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(3)
    out = torch.utils.checkpoint.checkpoint(function, q, k, v, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, strict=True):
        assert torch.equal(a, b)


def test_opcheck() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    rows = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    options = {"rng_state": state(), "dropout_p": 0.5}
    out, lse = ops.forward(q, k, v, **options)
    torch.library.opcheck(ops.forward.default, (q, k, v), options)
    torch.library.opcheck(ops.forward_varlen.default, (*rows, cu, cu, None, 3, 3), options)
    torch.library.opcheck(ops.backward.default, (q, None, q, k, v, out, lse), options)


def test_compile() -> None:
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))

    def loss(q: Tensor, k: Tensor, v: Tensor, given: Tensor | None = None) -> Tensor:
        return flash_wmma.forward(q, k, v, dropout_p=0.5, rng_state=given).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for a, b in zip(
        torch.autograd.grad(compiled(q, k, v, state()), (q, k, v)),
        torch.autograd.grad(loss(q, k, v, state()), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert float(compiled(q, k, v)) != float(compiled(q, k, v))


def test_module_drops_in_training_alone() -> None:
    module = flash_wmma.MultiheadAttention(32, 2, dropout=0.5)
    x = torch.randn(1, 9, 32)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    with pytest.raises(ValueError, match="dropout: got 1, allowed: a float from 0 to 1, not 1 itself"):
        flash_wmma.MultiheadAttention(32, 2, dropout=1)


class TestStandIn:
    """flash_wmma.scaled_dot_product_attention, whose state is torch's generator's next one."""

    P = 0.3

    @staticmethod
    def next_state() -> Tensor:
        torch.manual_seed(11)
        made = flash_wmma._dropout.draw(torch.device("cpu"))
        torch.manual_seed(11)
        return made

    @pytest.mark.parametrize("shape", [(3, 2, 40, 16), (2, 40, 16), (40, 16), (2, 3, 2, 40, 16)], ids=len)
    @pytest.mark.parametrize("option", ["plain", "causal", "mask"])
    def test_mask(self, shape: tuple[int, ...], option: str) -> None:
        """Out and gradients are those of plain torch ops with forward's mask of the same state."""
        q, k, v, dout = (torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in range(4))
        bias = torch.randn(40, 40, generator=torch.Generator().manual_seed(4)) if option == "mask" else None
        leaves = [t.requires_grad_() for t in (q, k, v) if t is not None]
        leaves += [] if bias is None else [bias.requires_grad_()]
        given = self.next_state()
        out = flash_wmma.scaled_dot_product_attention(q, k, v, bias, self.P, option == "causal")
        exact = [t.detach().double().requires_grad_() for t in leaves]
        heads = [t.reshape(-1, shape[-3] if len(shape) > 2 else 1, 40, 16) for t in exact[:3]]
        expected = flash_wmma.forward(
            *heads, attn_bias=exact[3] if bias is not None else None, causal=option == "causal", dropout_p=self.P,
            rng_state=given, kernel="math",
        ).view(shape)  # fmt: skip
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
        for a, b in zip(
            torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, exact, dout.double()), strict=True
        ):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)

    def test_statistics(self) -> None:
        """Equal scores and a one-hot V show how many weights are kept, and that they are divided by 1 - p."""
        n = 256
        q, v = torch.zeros(4, 8, n, 16), torch.eye(n).expand(4, 8, n, n)
        torch.manual_seed(2)
        out = flash_wmma.scaled_dot_product_attention(q, q, v, dropout_p=self.P)
        kept = out != 0
        deviation = math.sqrt(self.P * (1 - self.P) / kept.numel())
        assert abs(float(kept.double().mean()) - (1 - self.P)) <= 5 * deviation
        torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / n / (1 - self.P)))
        again = flash_wmma.scaled_dot_product_attention(q, q, v, dropout_p=self.P) != 0
        assert abs(float((kept & again).double().mean()) - (1 - self.P) ** 2) <= 5 * deviation

    def test_expectation(self) -> None:
        """The mean over calls is torch's attention without dropout."""
        q, k, v = (torch.randn(1, 1, 8, 16) for _ in range(3))
        outs = torch.stack([flash_wmma.scaled_dot_product_attention(q, k, v, dropout_p=self.P) for _ in range(400)])
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert float(((outs.mean(0) - expected).abs() / outs.std(0) * math.sqrt(len(outs))).max()) < 5

    def test_compile(self) -> None:
        q = torch.randn(1, 2, 20, 16, requires_grad=True)

        def loss(q: Tensor) -> Tensor:
            return flash_wmma.scaled_dot_product_attention(q, q, q, dropout_p=self.P).square().sum()

        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        assert float(compiled(q)) != float(compiled(q))
        torch.manual_seed(3)
        first = torch.autograd.grad(compiled(q), q)[0]
        torch.manual_seed(3)
        assert torch.equal(torch.autograd.grad(compiled(q), q)[0], first)

    @pytest.mark.parametrize("p", [-0.1, 1.5])
    def test_errors_are_torchs(self, p: float) -> None:
        q = torch.randn(1, 2, 9, 16)
        for attend in (flash_wmma.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention):
            with pytest.raises(RuntimeError, match="dropout"):
                attend(q, q, q, dropout_p=p)

    def test_a_transform_is_left_to_torch(self) -> None:
        q = torch.randn(3, 2, 9, 16)

        def attend(x: Tensor) -> Tensor:
            return flash_wmma.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=self.P)[0]

        out = torch.func.vmap(attend, randomness="different")(q)
        assert out.shape == q.shape
        with pytest.raises(RuntimeError, match="randomness"):
            torch.func.vmap(attend)(q)


def test_expectation() -> None:
    """The mean over states is attention without dropout."""
    q, k, v = (torch.randn(1, 1, 8, 16) for _ in range(3))
    expected = flash_wmma.forward(q, k, v)
    outs = [flash_wmma.forward(q, k, v, dropout_p=0.3, rng_state=state("cpu", (i, 0))) for i in range(400)]
    deviation = torch.stack(outs).std(dim=0) / math.sqrt(len(outs))
    assert float(((torch.stack(outs).mean(dim=0) - expected).abs() / deviation).max()) < 5


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"dropout_p": 1.0}, ValueError, "dropout_p: got 1.0, allowed: a float from 0 to 1, not 1 itself"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p: got -0.1"),
        ({"dropout_p": math.nan}, ValueError, "dropout_p: got nan"),
        ({"dropout_p": "a"}, TypeError, "dropout_p: got 'a'"),
        ({"dropout_p": 0.5, "rng_state": [1, 2]}, TypeError, "rng_state: got list"),
        ({"dropout_p": 0.5, "rng_state": torch.zeros(2)}, ValueError, "rng_state.dtype: got torch.float32"),
        (
            {"dropout_p": 0.5, "rng_state": torch.zeros(3).long()},
            ValueError,
            "rng_state.shape: got (3,), allowed: (2,)",
        ),
    ],
)
def test_errors(given: dict[str, Any], error: type[Exception], message: str) -> None:
    q = torch.randn(1, 2, 9, 16)
    for kernel in ("auto", "math"):
        with pytest.raises(error, match=re.escape(message)):
            flash_wmma.forward(q, q, q, kernel=kernel, **given)
    with pytest.raises(error, match=re.escape(message)):
        flash_wmma.forward(q.clone().requires_grad_(), q, q, **given)


def test_the_op_checks_too() -> None:
    q = torch.randn(1, 2, 9, 16)
    for given, message in (
        ({"dropout_p": 1.0}, "dropout_p: allowed: 0 to 1"),
        ({"dropout_p": 0.5}, "rng_state: allowed: a tensor (2)"),
        ({"dropout_p": 0.5, "rng_state": torch.zeros(2)}, "rng_state.dtype: allowed: int64"),
        ({"dropout_p": 0.5, "rng_state": torch.zeros(3).long()}, "rng_state: got shape (3), allowed: (2)"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=re.escape(message)):
            ops.forward(q, q, q, **given)


def test_explain() -> None:
    for kernel in flash_wmma.kernels():
        q = torch.zeros(1, 2, 64, 64, dtype=kernel.dtypes[0])
        why = flash_wmma.explain(q, q, q, dropout_p=0.5, kernel=kernel.name).reasons.get(kernel.name, "")
        assert ("does not support dropout" in why) == ("dropout" not in kernel.features)
