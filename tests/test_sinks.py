"""Attention sinks beyond their values, forward and backward: packed sequences, caches, splits, torch's machinery.

Forward with every other feature is in test_features.py.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from needs import needs
from reference import (
    DENSE,
    PLAIN,
    Mask,
    Modification,
    attention,
    check,
    few,
    no_repetition,
    normal,
    operand_dtype,
    reference,
    run,
)
from test_backward import MASKS, as_deterministic, has_mask
from test_backward import check as check_gradients
from test_backward import inputs as gradient_inputs
from test_kvcache import CACHE, LENGTHS, check_each, paged, queries
from test_kvcache import run as run_cached
from test_varlen import check_sequences, cumulative, packed, run_packed
from torch import Tensor

import flash_wmma
from flash_wmma._library import ops

Target = tuple[flash_wmma.Kernel, torch.dtype]


def sinks(*logits: float, device: str = "cpu") -> Modification:
    return Modification(sinks=torch.tensor(logits, device=device))


def inputs(target: Target, nq: int, nk: int, hq: int = 4, hk: int = 2, batch: int = 2) -> list[Tensor]:
    kernel, dtype = target
    shapes = ((hq, nq, 1), (hk, nk, 2), (hk, nk, 3))
    return [normal((batch, h, n, 64), "contiguous", dtype, kernel.device, seed) for h, n, seed in shapes]


# ------------------------------------------------------------------------------------------------------------ forward


@needs("sinks")
def test_what_a_sink_says(target: Target) -> None:
    """Equal scores of 0: the sink's logit s counts exp(s) keys of value 0."""
    kernel, dtype = target
    nq, nk, logits = 20, 70, (0.0, math.log(70), -40.0, 40.0)
    q, k, v = inputs(target, nq, nk)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    out, lse = run(kernel, q, k, v, modification=sinks(*logits, device=kernel.device))
    total = nk + torch.tensor(logits, dtype=torch.float64, device=kernel.device).exp()
    expected = v.double().sum(2).repeat_interleave(2, dim=1) / total[:, None]
    scale = expected.abs().amax(-1, keepdim=True)  # of each head: one of them is nearly 0
    eps = torch.finfo(operand_dtype(kernel, dtype)).eps + torch.finfo(dtype).eps
    smallest = torch.finfo(dtype).smallest_normal  # float16 rounds e-17 to 0
    assert bool(((out.double() - expected[:, :, None]).abs() <= 2 * eps * scale[:, :, None] + smallest).all())
    torch.testing.assert_close(lse.double(), total.log()[:, None].expand_as(lse), rtol=1e-6, atol=1e-6)


@needs("sinks")
@pytest.mark.parametrize("mask", [DENSE, Mask("bottom_right"), Mask(False, (3, 0))], ids=str)
def test_no_sink(target: Target, mask: Mask) -> None:
    """Sinks of -inf change nothing."""
    kernel, _ = target
    if not has_mask(kernel, "window" if mask.window else "causal"):
        mask = DENSE
    q, k, v = inputs(target, 70, 33)
    expected = run(kernel, q, k, v, mask)
    for a, b in zip(
        run(kernel, q, k, v, mask, None, sinks(*[-math.inf] * 4, device=kernel.device)), expected, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=2e-7 if a.dtype == torch.float32 else 0, atol=1e-6)


@needs("sinks", "causal")
def test_queries_that_see_no_key(target: Target) -> None:
    """out is 0 and lse the sink, even a NaN or an infinite one."""
    kernel, _ = target
    q, k, v = inputs(target, 150, 20)
    modification = sinks(0.5, -300.0, math.nan, -math.inf, device=kernel.device)
    out, lse = run(kernel, q, k, v, Mask("bottom_right"), None, modification)
    assert not out[:, :, :130].any()
    expected = modification.sinks[:, None].expand(2, 4, 130)
    torch.testing.assert_close(lse[:, :, :130], expected, rtol=1e-6, atol=0, equal_nan=True)
    assert bool(lse[:, :, 130:].isnan().any(dim=(0, 2)).eq(torch.tensor([0, 0, 1, 0], device=kernel.device)).all())


@needs("sinks", "attn_bias")
def test_queries_whose_bias_hides_all(target: Target) -> None:
    kernel, _ = target
    q, k, v = inputs(target, 37, 70)
    seen = (torch.arange(37, device=kernel.device) % 3 > 0)[:, None]
    modification = sinks(0.5, -3.0, 20.0, 0.0, device=kernel.device)._replace(attn_bias=seen)
    expected = reference(kernel, q, k, v, DENSE, None, modification)
    check(*run(kernel, q, k, v, DENSE, None, modification), expected)
    assert bool(expected.lse[:, :, ::3].eq(modification.sinks.double()[:, None]).all())


@needs("sinks")
@pytest.mark.parametrize("logit", [math.nan, math.inf])
def test_a_sink_that_is_no_number(target: Target, logit: float) -> None:
    """It makes its own head NaN, and no other."""
    kernel, _ = target
    q, k, v = inputs(target, 37, 70)
    out, lse = run(kernel, q, k, v, modification=sinks(0.5, logit, 2.0, 0.0, device=kernel.device))
    for t in (out, lse):
        assert bool(t[:, 1].isnan().all())
        assert not t[:, [0, 2, 3]].isnan().any()


@needs("sinks")
@pytest.mark.parametrize("scale", [1.0, -1.0, 100.0])
@pytest.mark.parametrize("logits", [(3e4, -3e4), (1000.0, 90.0), (88.0, -104.0)])
def test_far_from_the_scores(target: Target, logits: tuple[float, float], scale: float) -> None:
    """Above them by more than a float's exponent: out is 0 and lse the sink. Below: nothing but the keys."""
    kernel, dtype = target
    q, k, v = inputs(target, 20, 150, 2, 1)
    modification = sinks(*logits, device=kernel.device)
    out, lse = run(kernel, q, k, v, DENSE, scale, modification)
    operand = operand_dtype(kernel, dtype)
    multiplied = [t.to(operand).double() for t in (q, k, v)]
    expected, expected_lse = attention(*multiplied, DENSE, scale, modification)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=2e-3 if operand != torch.float32 else 1e-4)
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02 if operand != torch.float32 else 1e-3)
    assert not out[:, (expected.abs().amax((0, 2, 3)) < 1e-30)].any()


@needs("sinks")
@pytest.mark.parametrize("step", [0.0, 1.0, 20.0, 1000.0])
def test_rising_scores(target: Target, step: float) -> None:
    """The sink joins at the true maximum's scale, wherever the running one lags."""
    kernel, _ = target
    q, k, v = inputs(target, 20, 300, 2, 1, few(target[0], 2))
    q[:], k[:] = 0, 0
    q[..., 0] = 1
    k[..., 0] = (torch.arange(300, device=kernel.device) // 16 * step).to(k.dtype)
    modification = sinks(0.0, 18 * step, device=kernel.device)
    expected = reference(kernel, q, k, v, DENSE, 1.0, modification)
    check(*run(kernel, q, k, v, DENSE, 1.0, modification), expected)


@needs("sinks")
@pytest.mark.parametrize("nq", [1, 3, 40])
def test_split_over_keys(target: Target, nq: int) -> None:
    """However many parts a row's keys have, its sink counts once."""
    kernel, _ = target
    q, k, v = inputs(target, nq, 2100, 2, 1, 1)
    modification = sinks(6.0, 9.0, device=kernel.device)
    check(*run(kernel, q, k, v, modification=modification), reference(kernel, q, k, v, DENSE, None, modification))


@needs("sinks")
def test_empty_inputs(target: Target) -> None:
    kernel, dtype = target
    for b, hq, hk, nq, nk in ((0, 4, 2, 5, 6), (2, 0, 0, 5, 6), (2, 4, 2, 0, 6), (2, 4, 2, 5, 0)):
        q, k = (torch.zeros(b, h, n, 64, dtype=dtype, device=kernel.device) for h, n in ((hq, nq), (hk, nk)))
        modification = Modification(sinks=torch.arange(hq, device=kernel.device).float())
        out, lse = run(kernel, q, k, k, modification=modification)
        assert not out.any()
        assert nk > 0 or bool(lse.eq(modification.sinks[:, None]).all())


@needs("sinks", "varlen")
@pytest.mark.parametrize("mask", [DENSE, Mask("bottom_right"), Mask(False, (20, 5))], ids=str)
def test_packed(target: Target, mask: Mask) -> None:
    """Every sequence has them; rows of none, and of one without keys, have the sink in lse."""
    kernel, dtype = target
    lengths = (5, 0, 70, 1, 33, 4), (9, 4, 0, 200, 33, 700)
    q = packed(sum(lengths[0]), 4, 64, dtype, kernel.device, 1, extra=3)
    k, v = (packed(sum(lengths[1]), 2, 64, dtype, kernel.device, s, extra=5) for s in (2, 3))
    modification = sinks(0.5, -2.0, 30.0, -math.inf, device=kernel.device)
    cu = [cumulative(n, kernel.device) for n in lengths]
    out, lse = run_packed(kernel, q, k, v, *cu, causal=mask.causal, window=mask.window, **modification._asdict())
    check_sequences(kernel, (q, k, v), lengths, (out, lse), mask, modification)


@needs("sinks", CACHE)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("n", [1, 4, 40])
def test_cached(target: Target, n: int, group: int) -> None:
    kernel, _ = target
    cache = paged(target, LENGTHS, 16)
    q = queries(target, len(LENGTHS), 2 * group, n, 64)
    modification = sinks(*(0.5, -2.0, 30.0, 3.0, -math.inf, 1.0)[: 2 * group], device=kernel.device)
    result = run_cached(target, q, cache, causal=True, sinks=modification.sinks)
    check_each(target, q, cache, result, Mask("bottom_right"), modification)


@needs("sinks", lambda kernel, dtype: no_repetition(kernel, dtype))
@pytest.mark.parametrize("sinks_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_and_strides(target: Target, sinks_dtype: torch.dtype) -> None:
    kernel, _ = target
    q, k, v = inputs(target, 20, 33)
    storage = torch.full((4, 3), math.nan, dtype=sinks_dtype, device=kernel.device)
    storage[:, 1] = torch.tensor([0.3, -2.1, 1.7, 5.2])
    results = [run(kernel, q, k, v, modification=Modification(sinks=t)) for t in (storage[:, 1], storage[:, 1].float())]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ----------------------------------------------------------------------------------------------------------- backward


@needs("sinks", has_mask, as_deterministic)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("nq", "nk"), [(1, 70), (100, 66), (65, 129)])
def test_gradients(backward_target: Target, mask: str, nq: int, nk: int, deterministic: bool) -> None:
    """Those of q, k and v: the sink is in lse. Some queries see no key, and lse is finite all the same."""
    kernel, dtype = backward_target
    modification = sinks(0.5, 12.0, -math.inf, -1.0, device=kernel.device)
    check_gradients(kernel, gradient_inputs(kernel, dtype, nq, nk), MASKS[mask], modification, deterministic)


@needs("sinks", "attn_bias", "softcap", "alibi_slopes")
def test_gradients_with_modified_scores(backward_target: Target) -> None:
    kernel, dtype = backward_target
    given = gradient_inputs(kernel, dtype)
    seen = (torch.arange(100, device=kernel.device) % 3 > 0)[:, None].expand(100, 70)
    slopes = torch.rand(4, generator=torch.Generator().manual_seed(1)).to(kernel.device)
    modification = Modification(seen, slopes, None, 5.0, sinks(0.5, 3.0, -1.0, 0.0, device=kernel.device).sinks)
    check_gradients(kernel, given, Mask("bottom_right"), modification)


def true_gradient_of_sinks(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, dlse: Tensor | None, mask: Mask, given: Modification
) -> Tensor:
    assert given.sinks is not None
    leaf = given.sinks.double().requires_grad_()
    out, lse = attention(q.double(), k.double(), v.double(), mask, None, given._replace(sinks=leaf))
    loss = torch.zeros((), dtype=torch.float64, device=q.device)
    if dout is not None:
        loss = loss + (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isneginf(), 0) * dlse).sum()
    return torch.autograd.grad(loss, leaf)[0]


@needs("sinks", lambda kernel, dtype: no_repetition(kernel, dtype))
@pytest.mark.parametrize("parts", ["both", "out", "lse"])
@pytest.mark.parametrize("mask", ["dense", "bottom right"])
def test_gradient_of_sinks(target: Target, mask: str, parts: str) -> None:
    """Through out, through lse and through both; with queries that see no key, whose lse is the sink alone."""
    kernel, dtype = target
    q, k, v = inputs(target, 100, 66)
    modification = sinks(0.5, 3.0, 40.0, -math.inf, device=kernel.device)
    leaf = modification.sinks.clone().requires_grad_()
    options = {"kernel": kernel.name, "return_lse": True, "causal": MASKS[mask].causal}
    out, lse = flash_wmma.forward(q, k, v, sinks=leaf, **options)
    dout = normal(tuple(out.shape), "contiguous", dtype, kernel.device, 5) if parts != "lse" else None
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(6)).to(lse) if parts != "out" else None
    outputs = [(o, g) for o, g in ((out, dout), (lse, dlse)) if g is not None]
    (got,) = torch.autograd.grad([o for o, _ in outputs], leaf, [g for _, g in outputs], retain_graph=True)
    (again,) = torch.autograd.grad([o for o, _ in outputs], leaf, [g for _, g in outputs])
    expected = true_gradient_of_sinks(q, k, v, dout, dlse, MASKS[mask], modification)
    assert got.dtype == torch.float32
    assert torch.equal(got, again)
    assert float(got[3]) == 0
    # out is rounded to its dtype, and so is what of it enters delta
    eps = max(torch.finfo(t).eps for t in (dtype, operand_dtype(kernel, dtype)))
    size = float(expected.abs().max())
    assert float((got.double() - expected).abs().max()) <= (4 * eps + 1e-5) * max(size, 1.0) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_gradients_at_once(dtype: torch.dtype) -> None:
    """q, k, v, a bias and sinks in their own dtypes, dense and packed; a sink alone as well."""
    q, k, v = (normal((1, 4, 37, 64), seed=s).to(dtype) for s in range(3))
    k, v = k[:, ::2], v[:, ::2]
    bias, logits = torch.randn(37, 37), torch.tensor([0.5, -1.0, 2.0, 0.0])
    leaves = [t.clone().requires_grad_() for t in (q, k, v, bias, logits.to(dtype))]
    dense = flash_wmma.forward(*leaves[:3], attn_bias=leaves[3], sinks=leaves[4], causal=True)
    gradients = torch.autograd.grad(dense.float().square().sum(), leaves)
    assert [g.dtype for g in gradients] == [t.dtype for t in leaves]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out = flash_wmma.forward(*exact[:3], attn_bias=bias, sinks=exact[4], causal=True, kernel="math")
    expected = torch.autograd.grad(out.square().sum(), [*exact[:3], exact[4]])
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for a, b in zip((*gradients[:3], gradients[4]), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)

    cu = torch.tensor([0, 20, 20, 37], dtype=torch.int32)
    rows = [t[0].transpose(0, 1).detach() for t in (q, k, v)]
    alone = logits.clone().requires_grad_()
    out, lse = flash_wmma.forward_varlen(*rows, cu, cu, 20, 20, sinks=alone, return_lse=True)
    (got,) = torch.autograd.grad(out.float().square().sum() + lse.sum(), alone)
    in_double = logits.double().requires_grad_()
    out, lse = flash_wmma.forward_varlen(
        *(t.double() for t in rows), cu, cu, 20, 20, sinks=in_double, return_lse=True, kernel="math"
    )
    (expected_alone,) = torch.autograd.grad(out.square().sum() + lse.sum(), in_double)
    torch.testing.assert_close(got.double(), expected_alone, rtol=tolerance, atol=tolerance)


def test_math_has_every_derivative() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    logits = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return flash_wmma.forward(*tensors[:3], sinks=tensors[3], causal=True, kernel="math", return_lse=True)

    assert torch.autograd.gradcheck(function, (q, k, v, logits))
    assert torch.autograd.gradgradcheck(function, (q, k, v, logits))


def test_math_of_packed_sequences() -> None:
    rows = [torch.randn(9, 2, 8, dtype=torch.float64) for _ in range(3)]
    cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    logits = torch.tensor([0.5, -1.0], dtype=torch.float64)
    out, lse = flash_wmma.forward_varlen(*rows, cu, cu, 5, 5, sinks=logits, return_lse=True, kernel="math")
    assert bool(lse[:, 8].eq(logits).all())
    for begin, end in ((0, 3), (3, 8)):
        one = [t[begin:end].transpose(0, 1)[None] for t in rows]
        expected = attention(*one, DENSE, None, Modification(sinks=logits))
        torch.testing.assert_close(out[begin:end], expected[0][0].transpose(0, 1))
        torch.testing.assert_close(lse[:, begin:end], expected[1][0])


# --------------------------------------------------------------------------------------------------- torch's machinery


def test_opcheck() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    logits = torch.tensor([0.5, -1.0])
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    rows = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    out, lse = ops.forward(q, k, v, sinks=logits)
    torch.library.opcheck(ops.forward.default, (q, k, v), {"sinks": logits})
    torch.library.opcheck(ops.forward_varlen.default, (*rows, cu, cu, None, 3, 3), {"sinks": logits})
    torch.library.opcheck(ops.backward.default, (q, None, q, k, v, out, lse), {"sinks": logits})
    seqlens = torch.tensor([5], dtype=torch.int32)
    torch.library.opcheck(ops.forward_cached.default, (q, k, v, seqlens, None, None, None, 0), {"sinks": logits})


def test_compile() -> None:
    """One graph, with gradients."""
    leaves = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
    leaves.append(torch.tensor([0.5, -1.0], requires_grad=True))

    def loss(*tensors: Tensor) -> Tensor:
        return flash_wmma.forward(*tensors[:3], sinks=tensors[3], causal=True).square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves), leaves)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_and_overwriting() -> None:
    """Autograd keeps the sinks, and notices if they change before backward."""
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    logits = torch.tensor([0.5, -1.0], requires_grad=True)

    def function(*tensors: Tensor) -> Tensor:
        return flash_wmma.forward(*tensors[:3], sinks=tensors[3])

    expected = torch.autograd.grad(function(q, k, v, logits).sum(), (q, k, v, logits))
    out = torch.utils.checkpoint.checkpoint(function, q, k, v, logits, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v, logits)), expected, strict=True):
        assert torch.equal(a, b)
    fixed = logits.detach().clone()
    out = function(q, k, v, fixed)
    fixed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_explain_says_who_takes_them() -> None:
    q, k, v = (torch.zeros(1, 2, 64, 64) for _ in range(3))
    logits = torch.zeros(2)
    answer = flash_wmma.explain(q, k, v, sinks=logits)
    assert (answer.kernel, answer.backward_kernel) == ("cpu", "bwd_cpu")
    for kernel in flash_wmma.kernels():
        why = flash_wmma.explain(q, k, v, sinks=logits, kernel=kernel.name).reasons.get(kernel.name, "")
        assert ("does not support sinks" in why) == ("sinks" not in kernel.features)
    names = {kernel.name for kernel in flash_wmma.kernels() if "sinks" in kernel.features}
    assert names == {"cpu", "simt", "wmma_v3", "mma_sm75", "mma_sm80", "wgmma_sm90"}
    assert all("sinks" in kernel.features for kernel in flash_wmma.kernels("backward"))


# --------------------------------------------------------------------------------------------- the module, stand-ins


def test_module() -> None:
    plain = flash_wmma.MultiheadAttention(64, 4, num_kv_heads=2)
    module = flash_wmma.MultiheadAttention(64, 4, num_kv_heads=2, sinks=True)
    assert plain.sinks is None
    assert "sinks" not in plain.state_dict()
    module.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 9, 64)
    with torch.no_grad():
        module.sinks.fill_(-math.inf)
        torch.testing.assert_close(module(x), plain(x), rtol=1e-6, atol=1e-6)
        module.sinks.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    heads = module.qkv(x).unflatten(-1, (-1, 16)).transpose(1, 2)
    out, _ = attention(*heads.split((4, 2, 2), dim=1), DENSE, None, Modification(sinks=module.sinks))
    result = module(x)
    torch.testing.assert_close(result, module.out(out.transpose(1, 2).flatten(2)), rtol=1e-5, atol=1e-5)
    result.square().sum().backward()
    assert bool(module.sinks.grad.isfinite().all())
    assert bool(module.sinks.grad.any())
    assert flash_wmma.MultiheadAttention(64, 4, sinks=True, dtype=torch.bfloat16).sinks.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="sinks: got 1, allowed: a bool"):
        flash_wmma.MultiheadAttention(64, 4, sinks=1)  # type: ignore[arg-type]


def test_stand_ins() -> None:
    """FlashAttention-4's name, and vLLM's where it has one of its own."""
    q, k, v = (torch.randn(2, 9, 4, 64) for _ in range(3))
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0])
    expected = flash_wmma.forward(*(t.transpose(1, 2) for t in (q, k, v)), causal=True, sinks=logits).transpose(1, 2)
    torch.testing.assert_close(flash_wmma.flash_attn_func(q, k, v, causal=True, learnable_sink=logits), expected)
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    for name in ("learnable_sink", "s_aux"):
        got: Any = flash_wmma.flash_attn_varlen_func(*rows, cu, cu, 9, 9, causal=True, **{name: logits.bfloat16()})
        torch.testing.assert_close(got.view_as(expected), expected)
        cached = flash_wmma.flash_attn_with_kvcache(q, k, v, causal=True, **{name: logits.requires_grad_()})
        torch.testing.assert_close(cached, expected)
        logits = logits.detach()
    with pytest.raises(ValueError, match="s_aux: got a tensor, allowed: None if there is a learnable_sink"):
        flash_wmma.flash_attn_with_kvcache(q, k, v, learnable_sink=logits, s_aux=logits)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([0.0] * 4, TypeError, "sinks: got list, allowed: torch.Tensor"),
        (torch.zeros(3), ValueError, "sinks.shape: got (3,), allowed: (Hq) = (4,)"),
        (torch.zeros(1, 4), ValueError, "sinks.shape: got (1, 4), allowed: (Hq) = (4,)"),
        (torch.zeros(()), ValueError, "sinks.shape: got (), allowed: (Hq) = (4,)"),
        (torch.zeros(4, dtype=torch.int64), ValueError, "sinks.dtype: got torch.int64, allowed: torch.float32, "),
        (torch.zeros(4, dtype=torch.float64), ValueError, "sinks.dtype: got torch.float64, allowed: torch.float32, "),
        (torch.zeros(4, device="meta"), ValueError, "sinks.device: got meta, allowed: q's, cpu"),
    ],
)
def test_errors(given: Any, error: type[Exception], message: str) -> None:
    q, k, v = (torch.randn(2, 4, 9, 64) for _ in range(3))
    rows, cu = q[0].transpose(0, 1), torch.tensor([0, 9], dtype=torch.int32)
    calls = [
        lambda: flash_wmma.forward(q, k, v, sinks=given),
        lambda: flash_wmma.forward(q.requires_grad_(), k, v, sinks=given),
        lambda: flash_wmma.forward(q, k, v, sinks=given, kernel="math"),
        lambda: flash_wmma.explain(q, k, v, sinks=given),
        lambda: flash_wmma.forward_varlen(rows, rows, rows, cu, cu, 9, 9, sinks=given),
    ]
    if getattr(given, "dtype", None) == torch.float64:
        calls.pop(2)  # which takes float64
    for call in calls:
        with pytest.raises(error, match=re.escape(message)):
            call()
    with torch.no_grad(), pytest.raises(error, match=re.escape(message)):
        flash_wmma.forward_cached(q, k, v, 9, sinks=given)


def test_the_op_checks_them_too() -> None:
    q = torch.randn(1, 4, 9, 64)
    for given, message in (
        (torch.zeros(3), "sinks: got shape (3), allowed: (Hq)"),
        (torch.zeros(4, dtype=torch.float16), "sinks.dtype: allowed: float32"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=re.escape(message)):
            ops.forward(q, q, q, sinks=given)


def test_what_has_no_gradients_says_so() -> None:
    q, k, v = (torch.randn(2, 4, 9, 64) for _ in range(3))
    logits = torch.zeros(4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="sinks: got a tensor that requires grad"):
        flash_wmma.forward_cached(q, k, v, 9, sinks=logits)


def test_plain_calls_stay_plain() -> None:
    """Without sinks no call carries any."""
    assert PLAIN.sinks is None
    call = flash_wmma._call.call_of(sinks=torch.zeros(2))
    assert not call.only_band
    assert flash_wmma._call.call_of() is flash_wmma._call.PLAIN
