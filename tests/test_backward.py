"""Gradients of every kernel against float64, edges first.

The yardstick is forward's (reference.py), each gradient normalised by its own largest value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from conftest import on_gpu
from far_apart import BEYOND, far_apart
from needs import needs
from reference import (
    DENSE,
    LAYOUTS,
    PLAIN,
    SCALE_ROWS,
    Mask,
    Modification,
    as_multiplied,
    attention,
    bits,
    few,
    filled,
    head_error,
    normal,
    on_a_cpu,
    operand_dtype,
    poisoned_memory,
    surrounded,
)
from torch import Tensor

import flash_wmma
from flash_wmma._call import band
from flash_wmma._library import ops

BackwardTarget = tuple[flash_wmma.Kernel, torch.dtype]


class Inputs(NamedTuple):
    """What a kernel is given; without ``dlse`` the loss does not see lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(None if t is None else t.to(dtype) for t in self))  # type: ignore[arg-type]


def inputs(
    kernel: flash_wmma.Kernel,
    dtype: torch.dtype,
    nq: int = 100,
    nk: int = 70,
    d: int = 64,
    dv: int | None = None,
    heads: tuple[int, int] = (4, 2),
    batch: int | None = None,
    layout: str = "contiguous",
) -> Inputs:
    """By default two batch entries, in the emulator one."""
    hq, hk = heads
    batch = few(kernel, 2) if batch is None else batch
    shapes = ((hq, nq, d), (hk, nk, d), (hk, nk, dv or d), (hq, nq, dv or d))
    q, k, v, dout = (normal((batch, *shape), layout, dtype, kernel.device, seed) for seed, shape in enumerate(shapes))
    return Inputs(q, k, v, dout, normal((batch, hq, nq, 1), device=kernel.device, seed=9)[..., 0].contiguous())


def true_gradients(given: Inputs, mask: Mask, modification: Modification) -> list[Tensor]:
    """Plain attention's, in the inputs' dtype: of q, k, v and of an additive bias."""
    leaves = [t.detach().requires_grad_() for t in given[:3]]
    bias = modification.attn_bias
    if bias is not None and bias.dtype != torch.bool:
        bias = bias.to(given.q.dtype).detach().requires_grad_()
        leaves.append(bias)
    out, lse = attention(*leaves[:3], mask, None, modification._replace(attn_bias=bias))
    loss = (out * given.dout).sum()
    if given.dlse is not None:
        loss = loss + (lse.masked_fill(lse.isneginf(), 0) * given.dlse).sum()
    return list(torch.autograd.grad(loss, leaves))


def as_the_kernel_multiplies(kernel: flash_wmma.Kernel, given: Inputs) -> list[Tensor]:
    """q, k and v for forward, so that lse is that of the scores which the kernel computes again."""
    operand = operand_dtype(kernel, given.q.dtype)
    return [t if t.is_cuda else as_multiplied(t, operand).to(t.dtype) for t in given[:3]]


def forward_kernel(kernel: flash_wmma.Kernel) -> str:
    """One that is as exact as the gradients."""
    return "simt" if kernel.name == "bwd_simt" and kernel.device == "cuda" else "auto"


def compute(
    kernel: flash_wmma.Kernel,
    given: Inputs,
    mask: Mask = DENSE,
    modification: Modification = PLAIN,
    deterministic: bool = False,
) -> list[Tensor]:
    """The kernel's, from poisoned memory; the inputs' storages stay as they are."""
    out, lse = flash_wmma.forward(
        *as_the_kernel_multiplies(kernel, given),
        causal=mask.causal,
        window=mask.window,
        return_lse=True,
        kernel=forward_kernel(kernel),
        **modification._asdict(),
    )
    bias = modification.attn_bias
    before = [bits(t) for t in given if t is not None]
    with poisoned_memory():
        *gradients, dbias = ops.backward(
            given.dout,
            given.dlse,
            *given[:3],
            out,
            lse,
            None,
            *band(mask.causal, mask.window),
            *modification,
            bias_grad=bias is not None and bias.dtype != torch.bool,
            deterministic=deterministic,
            kernel_name=kernel.name,
        )
    assert all(torch.equal(bits(t), b) for t, b in zip((t for t in given if t is not None), before, strict=True))
    return [*gradients, dbias] if bias is not None and bias.dtype != torch.bool else gradients


def error(gradient: Tensor, expected: Tensor) -> float:
    """The largest, in units of the largest value of that gradient."""
    if gradient.numel() == 0:
        return 0.0
    scale = float(expected.abs().max()) or 1.0
    return float((gradient.double() - expected).abs().max()) / scale


def check(
    kernel: flash_wmma.Kernel,
    given: Inputs,
    mask: Mask = DENSE,
    modification: Modification = PLAIN,
    deterministic: bool = False,
    moderate: Inputs | None = None,
) -> list[Tensor]:
    """What the kernel computes, judged."""
    gradients = compute(kernel, given, mask, modification, deterministic)
    judge(kernel, given, gradients, mask, modification, moderate)
    return gradients


def judge(
    kernel: flash_wmma.Kernel,
    given: Inputs,
    gradients: list[Tensor],
    mask: Mask = DENSE,
    modification: Modification = PLAIN,
    moderate: Inputs | None = None,
) -> None:
    """The yardstick, on every gradient. Where plain attention cannot hold the inputs, it is measured on `moderate`."""
    dtype, operand = given.q.dtype, operand_dtype(kernel, given.q.dtype)
    multiplied = Inputs(*(as_multiplied(t, operand) for t in given[:4]), given.dlse)
    exact = true_gradients(multiplied.to(torch.float64), mask, modification)
    # Converted inputs: out, of which D is made, is rounded to their type
    coarser = max(operand, dtype, key=lambda t: torch.finfo(t).eps)
    plain = true_gradients((moderate or multiplied).to(coarser), mask, modification)
    moderate_exact = exact if moderate is None else true_gradients(moderate.to(torch.float64), mask, modification)
    rounding = torch.finfo(coarser).eps / 2
    leaves = (*given[:3], modification.attn_bias)
    for what, leaf, gradient, expected, its_plain, its_exact in zip(
        ("dq", "dk", "dv", "dbias"), leaves, gradients, exact, plain, moderate_exact, strict=False
    ):
        assert leaf is not None
        assert gradient.shape == leaf.shape
        assert gradient.dtype == leaf.dtype
        assert not gradient.isnan().any(), f"NaN in {what}"
        allowed = 2 * max(error(its_plain, its_exact), rounding) + 1e-5
        assert error(gradient, expected) <= allowed, f"{what}: {error(gradient, expected):.3e}, allowed {allowed:.3e}"


MASKS = {
    "bottom right": Mask("bottom_right"),
    "causal": Mask(True),
    "causal window": Mask("bottom_right", (60, None)),
    "window": Mask(False, (5, 9)),
    "dense": DENSE,
}


def has_mask(kernel: flash_wmma.Kernel, mask: str) -> bool:
    return mask == "dense" or ("window" if "window" in mask else "causal") in kernel.features


def as_deterministic(kernel: flash_wmma.Kernel, deterministic: bool) -> bool:
    """Whether the kernel is deterministic, if that is asked for."""
    return not deterministic or "deterministic" in kernel.features


@needs(has_mask)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 70), (100, 66), (65, 129)])
def test_masks(backward_target: BackwardTarget, mask: str, nq: int, nk: int) -> None:
    """Nq != Nk, one row, and queries or keys that see nothing. Of 100 queries and 66 keys, bottom-right, some tile of
    any shape is visible but for one key of one query: the last of the first, or in the window the first of the last."""
    kernel, dtype = backward_target
    check(kernel, inputs(kernel, dtype, nq, nk), MASKS[mask])


@needs("window")
def test_last_query_of_a_window(backward_target: BackwardTarget) -> None:
    """Query 64 is the last that sees a key, alone in its tile of queries, and it sees but the last key."""
    kernel, dtype = backward_target
    check(kernel, inputs(kernel, dtype, 100, 65), Mask(False, (0, 9)))


@needs(
    lambda kernel, d, dv: kernel.head_dims[0] <= min(d, dv) <= max(d, dv) <= kernel.head_dims[1],
    lambda kernel, d, dv: d == dv or "d_v != d" in kernel.features,
)
@pytest.mark.parametrize(("d", "dv"), [(8, 8), (5, 5), (40, 40), (128, 128), (64, 24), (20, 64), (512, 272), (40, 512)])
def test_head_dims(backward_target: BackwardTarget, d: int, dv: int) -> None:
    kernel, dtype = backward_target
    check(kernel, inputs(kernel, dtype, 40, 50, d, dv, heads=(2, 1), batch=2))


@needs("the gradient of attn_bias", lambda kernel: kernel.head_dims[1] >= 512)
def test_bias_of_wide_heads(backward_target: BackwardTarget) -> None:
    """Blocks that share own rows have all scores of these rows, but the bias gets one gradient."""
    kernel, dtype = backward_target
    bias = torch.randn(1, 2, 40, 50, device=kernel.device)
    given = inputs(kernel, dtype, 40, 50, 512, 272, heads=(2, 1), batch=1)
    check(kernel, given, Mask("bottom_right"), Modification(attn_bias=bias))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "broadcast_rows"])
def test_layouts(backward_target: BackwardTarget, layout: str) -> None:
    """Strides of every kind, with NaN all around. (Of equal rows the gradients cancel out: nothing to measure by.)"""
    kernel, dtype = backward_target
    check(kernel, inputs(kernel, dtype, 40, 50, heads=(2, 1), batch=2, layout=layout))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
def test_grouped_heads(backward_target: BackwardTarget, heads: tuple[int, int]) -> None:
    kernel, dtype = backward_target
    check(kernel, inputs(kernel, dtype, heads=heads), Mask())


def test_without_dlse_and_with_it_alone(backward_target: BackwardTarget) -> None:
    kernel, dtype = backward_target
    given = inputs(kernel, dtype)
    check(kernel, given._replace(dlse=None))
    check(kernel, given._replace(dout=torch.zeros_like(given.dout)))


@needs("softcap", "alibi_slopes", "causal")
def test_softcap_and_alibi(backward_target: BackwardTarget) -> None:
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, heads=(2, 1), batch=2)
    slopes = torch.rand(given.q.shape[:2], device=kernel.device)
    check(kernel, given, Mask("bottom_right"), Modification(None, slopes, softcap=2.0))


@needs("d_v != d", "softcap", "alibi_slopes", "attn_bias", "the gradient of attn_bias", "window", as_deterministic)
@pytest.mark.parametrize("deterministic", [False, True])
def test_all_options_together(backward_target: BackwardTarget, deterministic: bool) -> None:
    """For each batch entry and head its own bias and slope; in each pass the edges of both bounds of a window."""
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 100, 66, d=40, dv=24, heads=(2, 1), batch=2, layout="odd")
    bias = normal((2, 2, 100, 66), "sliced", device=kernel.device, seed=5)
    slopes = torch.rand(2, 2, device=kernel.device)
    check(kernel, given, MASKS["causal window"], Modification(bias, slopes, softcap=2.0), deterministic)


@needs("attn_bias", "the gradient of attn_bias")
@pytest.mark.parametrize("broadcast", list(itertools.product((False, True), repeat=4)))
def test_bias_is_reduced_over_what_it_is_broadcast_over(
    backward_target: BackwardTarget, broadcast: tuple[bool, ...]
) -> None:
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 40, 50, heads=(2, 1), batch=2)
    full = (*given.q.shape[:3], 50)
    shape = tuple(1 if one else n for one, n in zip(broadcast, full, strict=True))
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(kernel.device)
    check(kernel, given, DENSE, Modification(attn_bias=bias))


@needs("attn_bias", "the gradient of attn_bias")
@pytest.mark.parametrize("rank", range(4))
def test_bias_of_fewer_dimensions(backward_target: BackwardTarget, rank: int) -> None:
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 40, 50)
    shape = (given.q.shape[1], 40, 50)[3 - rank :]
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype).to(kernel.device)
    check(kernel, given, DENSE, Modification(attn_bias=bias))


@needs("attn_bias", lambda kernel, kind: kind == "bool" or "the gradient of attn_bias" in kernel.features)
@pytest.mark.parametrize("kind", ["bool", "infinite"])
def test_rows_hidden_by_a_bias(backward_target: BackwardTarget, kind: str) -> None:
    """A query that sees nothing, and a key that nobody sees, have gradient 0."""
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 40, 50)
    seen = torch.rand(40, 50, generator=torch.Generator().manual_seed(1)) > 0.3
    seen[7], seen[:, 11] = False, False
    seen = seen.to(kernel.device)
    bias = seen if kind == "bool" else torch.zeros(40, 50, device=kernel.device).masked_fill(~seen, -math.inf)
    dq, dk, dv, *_ = check(kernel, given, DENSE, Modification(attn_bias=bias))
    assert not any(t.any() for t in (dq[:, :, 7], dk[:, :, 11], dv[:, :, 11]))


@needs("attn_bias", "the gradient of attn_bias")
def test_infinite_keys_stay_in_their_head(backward_target: BackwardTarget) -> None:
    """NaN, of inf in one head, reaches no other head's gradients, that of the bias neither."""
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 40, 50)
    bias = torch.zeros(given.q.shape[0], given.q.shape[1], 40, 50, device=kernel.device)
    alone = compute(kernel, given, DENSE, Modification(attn_bias=bias))
    groups = given.q.shape[1] // given.k.shape[1]
    given.k[0, 0, 3] = math.inf
    for before, after in zip(alone, compute(kernel, given, DENSE, Modification(attn_bias=bias)), strict=True):
        heads = groups if after.shape[1] == given.q.shape[1] else 1
        for others in (before[0, heads:], after[0, heads:]), (before[1:], after[1:]):
            torch.testing.assert_close(*others, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("nq", "nk", "batch"), [(0, 5, 1), (5, 0, 1), (5, 5, 0)])
def test_empty(backward_target: BackwardTarget, nq: int, nk: int, batch: int) -> None:
    kernel, dtype = backward_target
    q, k = (torch.ones(batch, 2, n, 64, dtype=dtype, device=kernel.device) for n in (nq, nk))
    lse = torch.zeros(batch, 2, nq, device=kernel.device)
    with poisoned_memory():
        gradients = ops.backward(q, None, q, k, k, q, lse, kernel_name=kernel.name)
    assert [g.shape for g in gradients[:3]] == [q.shape, k.shape, k.shape]
    assert not any(g.any() for g in gradients[:3])


@needs("varlen", has_mask)
@pytest.mark.parametrize(("mask", "d"), [("dense", 8), ("causal", 64), ("bottom right", 40)])
def test_packed(backward_target: BackwardTarget, mask: str, d: int) -> None:
    """Each sequence as by itself; rows of no sequence, and keys that are not in use, have gradient 0."""
    kernel, dtype = backward_target
    device = kernel.device
    ends_q, ends_k, used = [67, 84, 84, 149], [69, 94, 101, 154], [25, 7, 40]
    lengths = [torch.tensor(t, dtype=torch.int32, device=device) for t in (ends_q, ends_k, used)]
    flat = inputs(kernel, dtype, 154, 164, d, batch=1)
    operand = operand_dtype(kernel, dtype)  # of which the inputs are, so that conversion changes nothing
    q, k, v, dout = (as_multiplied(t, operand).to(dtype)[0].transpose(0, 1) for t in flat[:4])
    q, k, v, dout = q.clone(), k.clone(), v.clone(), dout.clone()
    for t, start, factor in ((q, 84, 2), (k, 101, 0.25), (v, 101, 16), (dout, 84, 8)):
        t[start:] *= factor  # a conversion's scales differ from sequence to sequence
    k[141:154] = v[141:154] = torch.finfo(dtype).max  # which would spoil a conversion's scales
    assert flat.dlse is not None
    dlse = flat.dlse[0]
    causal = MASKS[mask].causal
    out, lse = flash_wmma.forward_varlen(
        *(q, k, v, *lengths[:2], 65, 53),
        seqused_k=lengths[2],
        causal=causal,
        return_lse=True,
        kernel=forward_kernel(kernel),
    )
    options: tuple[Any, ...] = (None, *band(causal, None))
    with poisoned_memory():
        dq, dk, dv, _ = ops.backward_varlen(
            dout, dlse, q, k, v, out, lse, *lengths, 65, 53, *options, kernel_name=kernel.name
        )
    assert not any(t.any() for t in (dq[:67], dq[149:], dk[:69], dk[141:], dv[:69], dv[141:]))
    for b in range(3):
        rows = slice(ends_q[b], ends_q[b + 1])
        keys = slice(ends_k[b], ends_k[b] + used[b])
        one = Inputs(
            *(t[s].transpose(0, 1)[None] for t, s in ((q, rows), (k, keys), (v, keys), (dout, rows))),
            dlse[None, :, rows].contiguous(),
        )
        alone = compute(kernel, one, MASKS[mask])
        for packed, expected in zip((dq[rows], dk[keys], dv[keys]), alone, strict=True):
            torch.testing.assert_close(packed.transpose(0, 1)[None], expected)


@needs("varlen", "softcap", "alibi_slopes", "attn_bias", "the gradient of attn_bias", "window", as_deterministic)
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_with_all_options(backward_target: BackwardTarget, deterministic: bool) -> None:
    """Each sequence has its own bias and slopes. The last one is longer than max_seqlen says, which concerns no other,
    and nothing outside is written."""
    kernel, dtype = backward_target
    device, mask = kernel.device, Mask("bottom_right", (9, None))
    ends = [0, 12, 30, 80]
    lengths = torch.tensor(ends, dtype=torch.int32, device=device)
    flat = inputs(kernel, dtype, 80, 80, 16, heads=(2, 1), batch=1)
    operand = operand_dtype(kernel, dtype)
    q, k, v, dout = (as_multiplied(t, operand).to(dtype)[0].transpose(0, 1) for t in flat[:4])
    assert flat.dlse is not None
    whole, slopes = normal((3, 2, 50, 50), device=device, seed=5), torch.rand(3, 2, device=device)
    bias = whole[..., :20, :18]
    modification = Modification(bias, slopes, softcap=2.0)
    options = {"softcap": 2.0, "alibi_slopes": slopes}
    out, lse = flash_wmma.forward_varlen(
        *(q, k, v, lengths, lengths, 50, 50),
        attn_bias=whole,
        causal=mask.causal,
        window=mask.window,
        return_lse=True,
        kernel=forward_kernel(kernel),
        **options,
    )
    with poisoned_memory():
        *gradients, dbias = ops.backward_varlen(
            *(dout, flat.dlse[0], q, k, v, out, lse, lengths, lengths, None, 20, 18, None),
            *band(mask.causal, mask.window),
            attn_bias=bias,
            bias_grad=True,
            deterministic=deterministic,
            kernel_name=kernel.name,
            **options,
        )
    for b in range(2):
        rows, n = slice(ends[b], ends[b + 1]), ends[b + 1] - ends[b]
        one = [t[rows].transpose(0, 1)[None] for t in (q, k, v, dout)]
        entry = modification.entry(b)._replace(attn_bias=bias[b : b + 1, :, :n, :n])
        alone = [t[rows].transpose(0, 1)[None] for t in gradients]
        judge(kernel, Inputs(*one, flat.dlse[..., rows]), [*alone, dbias[b : b + 1, :, :n, :n]], mask, entry)
        assert not dbias[b, :, n:].any()
        assert not dbias[b, ..., n:].any()


@needs("varlen", "attn_bias")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("foreign", [math.nan, math.inf])
def test_bias_behind_short_sequences(backward_target: BackwardTarget, foreign: float, causal: bool) -> None:
    """What a bias holds for queries and keys that a short sequence does not have, or that a mask hides, reaches no
    gradient."""
    kernel, dtype = backward_target
    ends_q, ends_k, device = [0, 3, 40], [0, 64, 104], kernel.device
    lengths = [torch.tensor(t, dtype=torch.int32, device=device) for t in (ends_q, ends_k)]
    flat = inputs(kernel, dtype, 40, 104, heads=(2, 1), batch=1)
    operand = operand_dtype(kernel, dtype)
    q, k, v, dout = (as_multiplied(t, operand).to(dtype)[0].transpose(0, 1) for t in flat[:4])
    bias = normal((2, 2, 37, 64), device=device, seed=5)
    bias[0, :, 3:] = bias[1, ..., 40:] = foreign
    mask = Mask(causal)
    if causal:
        bias.masked_fill_(~mask.visible(37, 64, device), foreign)
    rest = (q, k, v, *lengths, 37, 64)
    options: dict[str, Any] = {"attn_bias": bias, "kernel": forward_kernel(kernel)}
    out, lse = flash_wmma.forward_varlen(*rest, causal=causal, return_lse=True, **options)
    options = {"attn_bias": bias, "kernel_name": kernel.name}
    where = (*lengths, None, 37, 64, None, *band(causal, None))
    with poisoned_memory():
        gradients = ops.backward_varlen(dout, None, q, k, v, out, lse, *where, **options)[:3]
    for b in range(2):
        rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        one, found = (
            [t[s].transpose(0, 1)[None] for t, s in zip(tensors, (rows, keys, keys, rows), strict=False)]
            for tensors in ((q, k, v, dout), gradients)
        )
        entry = Modification(bias[b : b + 1, :, : one[0].shape[2], : one[1].shape[2]])
        judge(kernel, Inputs(*one, None), found, mask, entry)


@needs("deterministic")
def test_deterministic_is_the_same_to_the_bit(backward_target: BackwardTarget) -> None:
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 130, 300, heads=(2, 1), batch=2)
    bias = torch.randn(130, 300, device=kernel.device)
    reduced = "the gradient of a broadcast attn_bias with deterministic" in kernel.features
    modification = Modification(attn_bias=bias) if reduced else PLAIN
    first = check(kernel, given, DENSE, modification, deterministic=True)
    for _ in range(few(kernel, 5)):
        again = compute(kernel, given, DENSE, modification, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif(not on_gpu(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "nq", "nk", "d", "causal"),
    [
        *[((16, 2), 4096, 4096, 128, True), ((32, 8), 8192, 8192, 128, True)],
        *[((16, 16), 8192, 8192, 128, True), ((40, 20), 4200, 4200, 64, True)],  # by turns
        *[((16, 2), 4096, 4096, 128, False), ((32, 8), 8192, 8192, 64, False), ((16, 16), 256, 8192, 128, False)],
        ((2, 2), 2000, 17000, 96, False),  # more items of a head than blocks
    ],
)
def test_deterministic_with_many_blocks(
    heads: tuple[int, int], nq: int, nk: int, d: int, causal: bool, dtype: torch.dtype
) -> None:
    """Without a mask all blocks wait for each other. Under a causal mask some follow others, or none waits."""
    shapes = [(2, h, n, d) for h, n in ((heads[0], nq), (heads[1], nk), (heads[1], nk))]
    leaves = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    out = flash_wmma.forward(*leaves, causal=causal, deterministic=True)
    dout = torch.randn_like(out)
    first, again = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif(not on_gpu(), reason="no CUDA device")
@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_items_without_queries(d: int) -> None:
    """Most keys come behind the last query: blocks take their items as fast as they can, and blocks that share items
    have to agree on them."""
    shapes = [(2, h, n, d) for h, n in ((80, 500), (40, 2517), (40, 2517))]
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    out = flash_wmma.forward(*leaves, causal=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(200):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for a, b in zip(again, first, strict=True):
            assert (a - b).abs().max() <= 0.03 * b.abs().max()


@pytest.mark.skipif(not (on_gpu() and torch.cuda.get_device_capability() == (9, 0)), reason="no Hopper GPU")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("d", "shape", "few"),
    [
        (64, (5, 32, 32, 800), False),
        (128, (9, 32, 8, 2048), False),
        (128, (5, 32, 16, 2048), False),
        (256, (5, 16, 16, 1300), False),
        (64, (4, 32, 4, 4096), True),
        (64, (8, 32, 4, 2048), True),
        (128, (4, 16, 2, 4096), True),
        (128, (2, 32, 8, 4096), True),
        (128, (32, 8, 4, 2048), False),
        (96, (1, 16, 16, 4096), True),
    ],
)
@pytest.mark.parametrize("rows_of_heads_interleave", [False, True])
def test_products_wait_for_what_is_prepared(
    d: int,
    shape: tuple[int, int, int, int],
    few: bool,
    causal: bool,
    deterministic: bool,
    rows_of_heads_interleave: bool,
) -> None:
    """Where blocks prepare rows beside products, memory holds NaN until they have. `bwd_sm90` does so with so many
    items on 132 multiprocessors, unless blocks take turns, and with few of them if these are equal, or heads become dq
    one by one, or heads share keys. L and D lie in dq's memory, but where the rows of heads interleave in that of few
    batch entries."""
    batch, hq, hk, length = shape
    leaves = []
    for h in (hq, hk, hk):
        if rows_of_heads_interleave:
            leaf = torch.randn(batch, length, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        else:
            leaf = torch.randn(batch, h, length, d, device="cuda", dtype=torch.bfloat16)
        leaves.append(leaf.requires_grad_())
    dout = torch.randn_like(leaves[0])

    def of_kernel(name: str) -> Tensor:
        return flash_wmma.forward(*leaves, causal=causal, deterministic=deterministic, backward_kernel=name)

    expected = torch.autograd.grad(of_kernel("bwd_sm80"), leaves, dout)
    out = of_kernel("bwd_sm90")
    if not deterministic and torch.cuda.get_device_properties(0).multi_processor_count == 132:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.autograd.grad(out, leaves, dout, retain_graph=True)
            torch.cuda.synchronize()
        grids = " ".join(event.name for event in profile.events())
        assert "prepare_beside" in grids
        together = causal and shape == (4, 16, 2, 4096)  # all heads come together, and are complete at the end
        finishes = d in (96, 128) and not together
        assert ("finish_beside" in grids) == (finishes or (d == 64 and few and not causal))
    for _ in range(10):
        with poisoned_memory():
            got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for a, b in zip(got, expected, strict=True):
            assert (a - b).abs().max() <= 0.03 * b.abs().max()


@pytest.mark.skipif(not (on_gpu() and torch.cuda.get_device_capability() == (9, 0)), reason="no Hopper GPU")
def test_rows_that_no_item_comes_to() -> None:
    """Most rows see no key, and are prepared when the products have ended. Then their heads become dq."""
    batch, hq, hk, nq, nk, d = 2, 32, 8, 32768, 2944, 128
    shapes = ((batch, hq, nq, d), (batch, hk, nk, d), (batch, hk, nk, d))
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    dout = torch.randn_like(leaves[0])

    def of_kernel(name: str) -> Tensor:
        return flash_wmma.forward(*leaves, causal="bottom_right", backward_kernel=name)

    expected = torch.autograd.grad(of_kernel("bwd_sm80"), leaves, dout)
    out = of_kernel("bwd_sm90")
    for _ in range(3):
        with poisoned_memory():
            got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for a, b in zip(got, expected, strict=True):
            assert (a - b).abs().max() <= 0.03 * b.abs().max()


def test_large_and_small_rows(backward_target: BackwardTarget) -> None:
    """Scores far apart: the recomputed weights neither overflow nor vanish."""
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 40, 50)
    given.q[:, :, ::3] *= 8
    given.k[:, :, -1] *= 4
    check(kernel, given)


def takes_what_is_large(kernel: flash_wmma.Kernel, large: str) -> bool:
    return large != "attn_bias" or large in kernel.features


@needs(on_a_cpu, takes_what_is_large)
@pytest.mark.parametrize("dim", [1, 2], ids=["head", "row"])
@pytest.mark.parametrize("large", ["q", "k", "v", "dout", "attn_bias"])
def test_strides_beyond_32_bits(backward_target: BackwardTarget, large: str, dim: int) -> None:
    """On a CPU, where memory that nobody touches costs nothing: the last head or row begins beyond 2^31."""
    kernel, dtype = backward_target
    near = inputs(kernel, dtype, 20, 20, heads=(2, 2), batch=1)._replace(dlse=None)
    biased = "attn_bias" in kernel.features
    bias = normal((1, 2, 20, 20), dtype=dtype, seed=8)
    out, lse = ops.forward(*as_the_kernel_multiplies(kernel, near), attn_bias=bias if biased else None)
    given, far_bias = near, bias
    if large == "attn_bias":
        far_bias = far_apart(bias, dim)
    else:
        given = near._replace(**{large: far_apart(getattr(near, large), dim)})
    options = {"kernel_name": kernel.name} | ({"attn_bias": far_bias, "bias_grad": True} if biased else {})
    gradients = ops.backward(given.dout, None, *given[:3], out, lse, **options)
    modification = Modification(attn_bias=bias) if biased else PLAIN
    judge(kernel, near, list(gradients) if biased else list(gradients)[:3], modification=modification)


@pytest.mark.gpu
@needs(as_deterministic)
@pytest.mark.parametrize("deterministic", [False, True])
def test_more_than_2_to_the_31_elements(
    backward_target: BackwardTarget, deterministic: bool, gpu_memory: Callable[[int], None]
) -> None:
    """Contiguous tensors whose last batch entries lie beyond 2^31 elements, inputs and gradients."""
    kernel, dtype = backward_target
    h, n, d = 8, 128, 64
    b = BEYOND // (h * n * d) + 3
    bytes_an_element = 8 * dtype.itemsize + 2 * 4  # q, k, v, dout, out, dq, dk, dv; sums of dq, the allocator's slack
    if operand_dtype(kernel, dtype) != dtype:
        bytes_an_element += 4 * 2
    gpu_memory(bytes_an_element * b * h * n * d)
    q, k, v, dout = (torch.zeros(b, h, n, d, dtype=dtype, device="cuda") for _ in range(4))
    some = torch.tensor([0, 1, b // 2, b - 3, b - 2, b - 1], device="cuda")
    for seed, t in enumerate((q, k, v, dout)):
        t[some] = normal((len(some), h, n, d), dtype=dtype, device="cuda", seed=seed)
    out, lse = ops.forward(q, k, v, kernel_name=forward_kernel(kernel))
    *gradients, _ = ops.backward(dout, None, q, k, v, out, lse, deterministic=deterministic, kernel_name=kernel.name)
    assert all(t.numel() > BEYOND for t in gradients)
    judge(kernel, Inputs(q[some], k[some], v[some], dout[some], None), [t[some] for t in gradients])
    for t in gradients:
        assert not t[2 : b // 2].any()
        assert not t[b // 2 + 1 : b - 3].any()


def converts(kernel: flash_wmma.Kernel, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies another type than its inputs'."""
    return operand_dtype(kernel, dtype) != dtype


def scaled(t: Tensor, exponents: tuple[int, ...]) -> Tensor:
    """The rows of each tile that is converted with one scale, times two to its exponent."""
    each = torch.tensor(exponents, device=t.device).repeat_interleave(SCALE_ROWS)[: t.shape[2], None]
    return torch.ldexp(t, each)


RANGES = {
    "q 1e30, k 1e-30, dout 1e-6": (1e30, 1e-30, 1.0, 1e-6),
    "v 1e30, dout 1e-30": (1.0, 1.0, 1e30, 1e-30),
    "v 1e-30, dout 1e20": (1.0, 1.0, 1e-30, 1e20),
    "dout 1e30": (1.0, 1.0, 1.0, 1e30),
    "dout 1e-30": (1.0, 1.0, 1.0, 1e-30),
    "v, dout 1e-15": (1.0, 1.0, 1e-15, 1e-15),
    "dout zero": (1.0, 1.0, 1.0, 0.0),
    "all zero": (0.0, 0.0, 0.0, 0.0),
}


@needs(converts)
@pytest.mark.parametrize("sizes", RANGES.values(), ids=RANGES)
def test_range_of_converted_inputs(backward_target: BackwardTarget, sizes: tuple[float, ...]) -> None:
    """None of the type's is lost."""
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 70, 90, heads=(1, 1))._replace(dlse=None)
    values = [t * size for t, size in zip(given[:4], sizes, strict=True)]
    gradients = check(kernel, Inputs(*values, None), moderate=given)
    if sizes[3] == 0:
        assert not any(t.any() for t in gradients)


def check_each_tile(
    kernel: flash_wmma.Kernel, given: Inputs, gradients: list[Tensor], mask: Mask, modification: Modification = PLAIN
) -> None:
    """Each tile of a gradient is as exact as its own values allow."""
    operand = operand_dtype(kernel, given.q.dtype)
    multiplied = Inputs(*(as_multiplied(t, operand) for t in given[:4]), None)
    eps = max(torch.finfo(t).eps for t in (given.q.dtype, operand))
    for gradient, expected in zip(gradients, true_gradients(multiplied, mask, modification), strict=True):
        for tile, its_expected in zip(gradient.split(SCALE_ROWS, 2), expected.split(SCALE_ROWS, 2), strict=True):
            assert error(tile, its_expected) <= 4 * eps


TILES = {
    "q": ((-60, 2, -100), (0, 0, 0), (0, 0, 0), (0, 0, 0)),
    "k": ((0, 0, 0), (-60, 2, -30), (0, 0, 0), (0, 0, 0)),
    "v": ((0, 0, 0), (0, 0, 0), (-50, 40, 0), (0, 0, 0)),
    "dout": ((0, 0, 0), (0, 0, 0), (0, 0, 0), (40, -70, 20)),
    "v and dout": ((0, 0, 0), (0, 0, 0), (10, -60, 3), (-30, 30, 2)),
}


@needs(converts, "deterministic", "causal")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("which", TILES)
def test_range_differs_from_tile_to_tile(backward_target: BackwardTarget, which: str, deterministic: bool) -> None:
    """Accumulators follow the exponents."""
    kernel, dtype = backward_target
    moderate = inputs(kernel, dtype, 140, 150, heads=(1, 1))._replace(dlse=None)
    given = Inputs(*(scaled(t, e) for t, e in zip(moderate[:4], TILES[which], strict=True)), None)
    # Scores as large as the largest of these
    moderate = moderate._replace(
        **{name: getattr(moderate, name) * 2.0 ** max(e) for name, e in zip("qk", TILES[which], strict=False)}
    )
    gradients = check(kernel, given, Mask(True), PLAIN, deterministic, moderate)
    check_each_tile(kernel, given, gradients, Mask(True))


@needs(converts, "deterministic")
@pytest.mark.parametrize("deterministic", [False, True])
def test_range_differs_from_head_to_head(backward_target: BackwardTarget, deterministic: bool) -> None:
    """And from one batch entry to the other."""
    kernel, dtype = backward_target
    moderate = inputs(kernel, dtype, 20, 20, 16, heads=(4, 2), batch=2)._replace(dlse=None)
    of_q, of_k = (torch.arange(2 * heads, device=kernel.device).view(2, heads, 1, 1) for heads in (4, 2))
    exponents = (of_q % 2 - 20 * (of_q // 2), 20 * of_k, 7 * of_k, -5 * of_q)
    given = Inputs(*(torch.ldexp(t, e) for t, e in zip(moderate[:4], exponents, strict=True)), None)
    operand = operand_dtype(kernel, dtype)
    expected = true_gradients(Inputs(*(as_multiplied(t, operand) for t in given[:4]), None), DENSE, PLAIN)
    eps = max(torch.finfo(t).eps for t in (dtype, operand))
    for gradient, true in zip(compute(kernel, given, DENSE, PLAIN, deterministic), expected, strict=True):
        assert head_error(gradient, true) <= 4 * eps


@needs(converts, "deterministic", "window")
@pytest.mark.parametrize("deterministic", [False, True])
def test_range_of_keys_outside_the_window(backward_target: BackwardTarget, deterministic: bool) -> None:
    """Keys of the same tile that no query of a tile sees have no part in its unit."""
    kernel, dtype = backward_target
    mask = Mask(False, (10, 0))
    moderate = inputs(kernel, dtype, 200, 200, heads=(1, 1))._replace(dlse=None)
    large = (50, 0, 0, 0)
    q = moderate.q * 2.0**-50  # so that no weight saturates
    given = moderate._replace(q=q, k=scaled(moderate.k, large), v=scaled(moderate.v, large))
    check_each_tile(kernel, given, compute(kernel, given, mask, PLAIN, deterministic), mask)


@needs(converts, "deterministic", "attn_bias")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_range_of_keys_that_a_mask_hides(backward_target: BackwardTarget, hidden: int, deterministic: bool) -> None:
    """Large keys that a mask hides take nothing of the others' precision, before them or behind them."""
    kernel, dtype = backward_target
    moderate = inputs(kernel, dtype, 140, 150, heads=(1, 1))._replace(dlse=None)
    large = tuple(50 * (tile == hidden) for tile in range(3))
    given = moderate._replace(k=scaled(moderate.k, large), v=scaled(moderate.v, large))
    seen = torch.arange(150, device=kernel.device) // SCALE_ROWS != hidden
    modification = Modification(attn_bias=seen)
    gradients = compute(kernel, given, DENSE, modification, deterministic)
    check_each_tile(kernel, given, gradients, DENSE, modification)


@needs(converts)
@pytest.mark.parametrize("zero", range(4))
def test_tiles_of_zeros(backward_target: BackwardTarget, zero: int) -> None:
    """Of q, k, v or dout, among small values: nothing is lost beside them."""
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 140, 150, heads=(1, 1))._replace(dlse=None)
    given[zero][:, :, SCALE_ROWS : 2 * SCALE_ROWS] = 0
    values = [t * size for t, size in zip(given[:4], (1e-10, 1e10, 1e-8, 1e-12), strict=True)]
    deterministic = "deterministic" in kernel.features and zero % 2 == 0
    check(kernel, Inputs(*values, None), DENSE, PLAIN, deterministic, given)


@needs(converts)
def test_outliers_of_converted_inputs(backward_target: BackwardTarget) -> None:
    """A few values of v and of dout far above all others, in different columns, take little of dS's precision."""
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 140, 150, heads=(1, 1))._replace(dlse=None)
    given.v[:, :, 20, 3] *= 1000
    given.dout[:, :, 90, 7] *= 1000
    check(kernel, given)


def test_gradients_keep_the_order_of_heads_and_rows() -> None:
    q = filled(surrounded((2, 4, 9, 64), "bnhd", torch.float32, "cpu"), torch.randn(2, 4, 9, 64))
    out, lse = ops.forward(q, q, q)
    dq, *_ = ops.backward(out, None, q, q, q, out, lse)
    assert dq.transpose(1, 2).is_contiguous()


def test_refusals() -> None:
    q = torch.randn(1, 2, 10, 64)
    out, lse = ops.forward(q, q, q)
    for change, message in (
        ({"dout": out[:, :, 1:]}, r"dout: got shape \(1, 2, 9, 64\)"),
        ({"dout": out.half()}, "dout.dtype"),
        ({"lse": lse[:, 1:]}, "lse: got shape"),
        ({"dlse": lse.double()}, "dlse.dtype"),
        ({"bias_grad": True}, "bias_grad: there is no additive attn_bias"),
        ({"kernel_name": "cpu"}, r"kernel: got 'cpu', allowed: 'auto', .*'bwd_cpu'"),
        ({"softcap": -1.0}, "softcap"),
    ):
        call = {"dout": out, "dlse": None, "q": q, "k": q, "v": q, "out": out, "lse": lse} | change
        with pytest.raises((RuntimeError, ValueError), match=message):  # which of them depends on torch's version
            ops.backward(**call)


def test_table() -> None:
    names = {kernel.name for kernel in flash_wmma.kernels("backward")}
    assert "bwd_cpu" in names
    assert names.isdisjoint(kernel.name for kernel in flash_wmma.kernels())
    q = torch.randn(1, 2, 10, 64)
    answer = flash_wmma.explain(q, q, q)
    assert answer.backward_kernel == "bwd_cpu"
    assert set(answer.backward_reasons) == names - {"bwd_cpu"}
    assert "backward bwd_cpu" in str(answer)
    with pytest.raises(ValueError, match="direction: got 'sideways'"):
        flash_wmma.kernels("sideways")  # type: ignore[arg-type]
