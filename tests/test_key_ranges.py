"""key_ranges in backward, with packed sequences and in torch's machinery, and document_ranges.

Forward, with every other feature, is in test_features.py.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs
from reference import DENSE, RANGES, Mask, Modification, attention, normal, operand_dtype, ranges_of, run
from test_backward import MASKS, as_deterministic, check, compute, inputs
from test_varlen import check_sequences, cumulative, packed, run_packed
from torch import Tensor

import flash_wmma
from flash_wmma._library import ops

Target = tuple[flash_wmma.Kernel, torch.dtype]
KINDS = RANGES[1:]


def bounds(*pairs: tuple[int, int], device: str = "cpu") -> Tensor:
    """(1, 1, Nq, 2)."""
    return torch.tensor(pairs, dtype=torch.int32, device=device)[None, None]


# ------------------------------------------------------------------------------------------------------------ forward


@needs("key_ranges")
def test_what_a_range_says(target: Target) -> None:
    """Empty, reversed, cut at both ends, all keys, one key: out is the mean of the values that the query sees."""
    kernel, dtype = target
    nk = 70
    pairs = [(0, 70), (5, 5), (9, 2), (-3, 4), (60, 99), (70, 99), (-9, 0), (-(2**31), 2**31 - 1), (63, 64), (69, 70)]
    q = torch.zeros(1, 1, len(pairs), 64, dtype=dtype, device=kernel.device)
    k, v = (torch.zeros(1, 1, nk, 64, dtype=dtype, device=kernel.device) for _ in range(2))
    v[:] = torch.arange(nk, device=kernel.device)[:, None]
    out, lse = run(kernel, q, k, v, modification=Modification(key_ranges=bounds(*pairs, device=kernel.device)))
    for i, (first, end) in enumerate(pairs):
        seen = range(max(first, 0), min(end, nk))
        mean, logarithm = (sum(seen) / len(seen), math.log(len(seen))) if seen else (0.0, -math.inf)
        assert out[0, 0, i].float().allclose(torch.tensor(mean, device=kernel.device), rtol=1e-2, atol=1e-6)
        assert float(lse[0, 0, i]) == pytest.approx(logarithm, abs=1e-4)


@needs("key_ranges")
@pytest.mark.parametrize("mask", [DENSE, Mask(True), Mask("bottom_right"), Mask(False, (20, 5))], ids=str)
def test_ranges_of_a_mask(target: Target, mask: Mask) -> None:
    """The ranges of a band are that band, but for the order of tiles; on top of it they change nothing."""
    kernel, dtype = target
    nq, nk = 130, 150
    q, k, v = (normal((1, 2, n, 64), "contiguous", dtype, kernel.device, s) for s, n in enumerate((nq, nk, nk)))
    place = torch.arange(nq) + (nk - nq if mask.causal == "bottom_right" else 0)
    left, right = mask.window or (None, 0 if mask.causal else None)
    first = place - left if left is not None else torch.zeros_like(place)
    end = place + right + 1 if right is not None else torch.full_like(place, nk)
    ranges = Modification(key_ranges=torch.stack((first, end), dim=-1).int()[None, None].to(kernel.device))
    expected = run(kernel, q, k, v, mask)
    exact, multiplies_fp32 = 2 * torch.finfo(dtype).eps, operand_dtype(kernel, dtype) == torch.float32
    for result in (run(kernel, q, k, v, DENSE, None, ranges), run(kernel, q, k, v, mask, None, ranges)):
        # Of wgmma_sm90 the two have another first maximum, to which the weights are rounded
        atol = 2e-6 if multiplies_fp32 else 2e-3 if kernel.name == "wgmma_sm90" else 1e-3
        torch.testing.assert_close(result[0], expected[0], rtol=exact, atol=atol)
        torch.testing.assert_close(result[1], expected[1], rtol=1e-6, atol=2e-6)


@needs("key_ranges", lambda kernel: kernel.name != "unfused")  # which multiplies zeros by all of V
@pytest.mark.parametrize("hides", ["k", "v", "both"])
def test_keys_that_no_query_sees(target: Target, hides: str) -> None:
    """NaN and inf in whole tiles of keys outside of every range reach no row, and in k nowhere."""
    kernel, dtype = target
    nq, nk = 40, 512
    q, k, v = (normal((1, 1, n, 64), "contiguous", dtype, kernel.device, s) for s, n in enumerate((nq, nk, nk)))
    ranges = ranges_of("any of a head", 1, 1, nq, 100, kernel.device)
    assert ranges is not None
    modification = Modification(key_ranges=ranges.clamp(-5, 100) + 200)
    expected = run(kernel, q, k, v, modification=modification)
    for poison, (begin, end) in itertools.product((math.nan, math.inf), ((0, 128), (384, 512))):
        for name, t in (("k", k), ("v", v)):
            if hides in (name, "both"):
                t[:, :, begin:end] = poison
    if hides == "k":  # also in tiles that some query sees
        k[:, :, 128:195] = k[:, :, 300:] = math.nan
    converted = operand_dtype(kernel, dtype) != dtype  # with other scales for the tiles between
    for a, b in zip(run(kernel, q, k, v, modification=modification), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2 if converted and hides == "k" else 0)


@needs("key_ranges", lambda kernel: kernel.min_arch == 0)
@pytest.mark.parametrize("nq", [1, 37])
def test_hidden_keys_may_hold_anything(target: Target, nq: int) -> None:
    """On the CPU: no key outside a query's range reaches its row, whatever it holds."""
    kernel, dtype = target
    q, k, v = (normal((2, 2, n, 64), "contiguous", dtype, kernel.device, s) for s, n in enumerate((nq, 90, 90)))
    modification = Modification(key_ranges=bounds(*((i % 3 + 10, i % 3 + 60) for i in range(nq))))
    expected = run(kernel, q, k, v, modification=modification)
    for t in (k, v):
        t[:, :, :10] = math.nan
        t[:, :, 62:] = math.inf
    for a, b in zip(run(kernel, q, k, v, modification=modification), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("by_name", ["mma_sm75", "mma_sm80", "wmma_v3"])
def test_tiles_are_skipped(by_name: str) -> None:
    """Products are computed of those tiles alone that some query of a tile sees: of 8 documents an eighth, and more
    where a tile of queries has two documents."""
    q, k, v = (normal((1, 1, 1024, 64), dtype=torch.float16, seed=s) for s in range(3))
    ranges = flash_wmma.document_ranges(torch.arange(1024) // 128)
    # The bias makes both calls run the same instance
    zero = torch.zeros(1)
    every = flash_wmma.profile(q, k, v, kernel=by_name, attn_bias=zero).counts.mma
    of_documents = flash_wmma.profile(q, k, v, kernel=by_name, attn_bias=zero, key_ranges=ranges).counts.mma
    assert 0 < of_documents <= every / 7


# ------------------------------------------------------------------------------------------------------------ backward


@needs("key_ranges", as_deterministic)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", ["dense", "causal", "window", "bottom right"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nq", "nk"), [(1, 70), (150, 66), (100, 300)])
def test_gradients(backward_target: Target, kind: str, mask: str, nq: int, nk: int, deterministic: bool) -> None:
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, nq, nk, heads=(4, 2))
    ranges = ranges_of(kind, given.q.shape[0], 4, nq, nk, kernel.device)
    check(kernel, given, MASKS[mask], Modification(key_ranges=ranges), deterministic)


@needs("key_ranges", "d_v != d", "softcap", "alibi_slopes", "attn_bias", "the gradient of attn_bias")
@pytest.mark.parametrize(("d", "dv"), [(64, 24), (128, 128), (40, 256)])
@pytest.mark.parametrize("kind", ["any", "documents"])
def test_gradients_with_everything(backward_target: Target, kind: str, d: int, dv: int) -> None:
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 90, 140, d, dv)
    b = given.q.shape[0]
    bias = normal((1, 4, 90, 140), device=kernel.device, seed=5)
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.125], device=kernel.device)
    ranges = ranges_of(kind, b, 4, 90, 140, kernel.device)
    check(kernel, given, MASKS["bottom right"], Modification(bias, slopes, ranges, 5.0))


@needs("key_ranges", as_deterministic)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_keys_that_no_query_sees(backward_target: Target, deterministic: bool) -> None:
    """They are 0, and what whole tiles of such keys hold reaches no gradient."""
    kernel, dtype = backward_target
    nk = 640
    given = inputs(kernel, dtype, 40, nk, heads=(2, 1), batch=1)
    ranges = bounds(*((300 + i, 310 + i) for i in range(40)), device=kernel.device)
    modification = Modification(key_ranges=ranges)
    expected = compute(kernel, given, DENSE, modification, deterministic)
    for t in (given.k, given.v):
        t[:, :, :256] = math.nan
        t[:, :, 384:] = math.inf
    gradients = compute(kernel, given, DENSE, modification, deterministic)
    for gradient in gradients[1:]:
        assert not gradient[:, :, :256].any()
        assert not gradient[:, :, 384:].any()
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@needs("key_ranges")
def test_gradients_of_queries_that_see_nothing(backward_target: Target) -> None:
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 130, 140, heads=(2, 1))
    ranges = bounds(*((5, 5) if i < 70 else (i - 60, i) for i in range(130)), device=kernel.device)
    dq, _, _ = check(kernel, given, DENSE, Modification(key_ranges=ranges))
    assert not dq[:, :, :70].any()


@needs("key_ranges", as_deterministic)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_heads_that_see_other_keys(backward_target: Target, deterministic: bool) -> None:
    """Two query heads read one head of keys: the second sees keys that the first does not, and is seen elsewhere."""
    kernel, dtype = backward_target
    given = inputs(kernel, dtype, 200, 260, heads=(2, 1), batch=1)
    first = bounds(*((i // 2, i // 2 + 9) for i in range(200)), device=kernel.device)
    second = bounds(*((250 - i, 260 - i) for i in range(200)), device=kernel.device)
    check(kernel, given, DENSE, Modification(key_ranges=torch.cat((first, second), dim=1)), deterministic)


# --------------------------------------------------------------------------------------------------- packed sequences

LENGTHS = (5, 0, 64, 1, 130, 33)


@needs("key_ranges", "varlen")
@pytest.mark.parametrize("mask", [DENSE, Mask(True)], ids=str)
@pytest.mark.parametrize("lengths", [LENGTHS, (0, 5, 64)], ids=str)
def test_packed(target: Target, lengths: tuple[int, ...], mask: Mask) -> None:
    """Keys count from the sequence's first."""
    kernel, dtype = target
    total = sum(lengths)
    q = packed(total, 4, 64, dtype, kernel.device, 1, extra=3)
    k, v = (packed(total, 2, 64, dtype, kernel.device, s, extra=3) for s in (2, 3))
    cu = cumulative(lengths, kernel.device)
    ranges = ranges_of("any of a head", 1, 4, total + 3, 100, kernel.device)
    assert ranges is not None
    modification = Modification(key_ranges=ranges[0])
    result = run_packed(kernel, q, k, v, cu, cu, causal=mask.causal, **modification._asdict())
    check_sequences(kernel, (q, k, v), (lengths, lengths), result, mask, modification)


@needs("key_ranges", "varlen", as_deterministic)
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_gradients(backward_target: Target, deterministic: bool) -> None:
    """Those of each sequence by itself."""
    kernel, dtype = backward_target
    total, device = sum(LENGTHS), kernel.device
    q, dout = (packed(total, 4, 64, dtype, device, s).contiguous() for s in (1, 4))
    k, v = (packed(total, 2, 64, dtype, device, s).contiguous() for s in (2, 3))
    cu = cumulative(LENGTHS, device)
    ranges = ranges_of("any of a head", 1, 4, total, 100, device)
    assert ranges is not None
    longest = max(LENGTHS)
    common = (cu, cu, None, longest, longest)
    forward = "simt" if kernel.name == "bwd_simt" and device == "cuda" else "auto"
    out, lse = flash_wmma.forward_varlen(
        q, k, v, cu, cu, longest, longest, causal=True, key_ranges=ranges[0], return_lse=True, kernel=forward
    )
    options = {"key_ranges": ranges[0], "deterministic": deterministic, "kernel_name": kernel.name}
    gradients = ops.backward_varlen(dout, None, q, k, v, out, lse, *common, None, -1, 0, **options)[:3]
    begin = 0
    for n in LENGTHS:
        rows, begin = slice(begin, begin + n), begin + n
        if not n:
            continue
        one = [t[rows].transpose(0, 1)[None].double().requires_grad_() for t in (q, k, v)]
        expected_out, _ = attention(*one, Mask(True), None, Modification(key_ranges=ranges[:, :, rows]))
        loss = (expected_out * dout[rows].transpose(0, 1)[None]).sum()
        for gradient, exact in zip(gradients, torch.autograd.grad(loss, one), strict=True):
            tolerance = 1e-4 if operand_dtype(kernel, dtype) == torch.float32 else 4e-2
            torch.testing.assert_close(gradient[rows].transpose(0, 1)[None].double(), exact, rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------------- torch's machinery


def call(nq: int = 20, nk: int = 30, **options: Any) -> tuple[list[Tensor], Tensor]:
    q, k, v = (normal((2, 4, n, 64), seed=s).requires_grad_() for s, n in enumerate((nq, nk, nk)))
    ranges = ranges_of("any", 2, 4, nq, nk, "cpu")
    assert ranges is not None
    return [q, k, v], ranges


def test_opcheck() -> None:
    tensors, ranges = call()
    q, k, v = (t.detach() for t in tensors)
    options = {"key_ranges": ranges}
    torch.library.opcheck(ops.forward.default, (q, k, v), options)
    torch.library.opcheck(ops.forward.default, (q, k, v), {"key_ranges": ranges[:1, :1]})
    out, lse = ops.forward(q, k, v, **options)
    torch.library.opcheck(ops.backward.default, (out, lse, q, k, v, out, lse), options)
    rows = [t[0].transpose(0, 1) for t in (q, k, v)]
    lengths = [torch.tensor([0, n], dtype=torch.int32) for n in (20, 30)]
    arguments = (*rows, *lengths, None, 20, 30)
    torch.library.opcheck(ops.forward_varlen.default, arguments, {"key_ranges": ranges[0]})


def test_compile() -> None:
    """One graph, forward and backward, also with other ranges; document_ranges is traced too."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        ranges = flash_wmma.document_ranges(ids)
        return flash_wmma.forward(q, k, v, causal=True, key_ranges=ranges)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    (q, k, v), _ = call(30, 30)
    for cut in (7, 15):
        ids = (torch.arange(30) >= cut).long().expand(2, 30)
        results = []
        for function in (attend, compiled):
            out = function(q, k, v, ids)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def test_saved_for_backward() -> None:
    """torch notices that the ranges were overwritten before backward read them."""
    (q, k, v), ranges = call()
    out = flash_wmma.forward(q, k, v, key_ranges=ranges)
    ranges.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_math() -> None:
    (q, k, v), ranges = call()
    for options in ({}, {"causal": True}):
        for x, y in zip(
            flash_wmma.forward(q, k, v, key_ranges=ranges, kernel="math", return_lse=True, **options),
            flash_wmma.forward(q, k, v, key_ranges=ranges, return_lse=True, **options),
            strict=True,
        ):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    rows = [t[0].transpose(0, 1) for t in (q, k, v)]
    cu_q, cu_k = (torch.tensor([0, n // 2, n], dtype=torch.int32) for n in (20, 30))
    for x, y in zip(
        flash_wmma.forward_varlen(*rows, cu_q, cu_k, 20, 30, key_ranges=ranges[0], kernel="math", return_lse=True),
        flash_wmma.forward_varlen(*rows, cu_q, cu_k, 20, 30, key_ranges=ranges[0], return_lse=True),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_explain() -> None:
    (q, k, v), ranges = call()
    hopper = flash_wmma.DeviceFacts(90, 132, 232448, 32)
    halves = [t.detach().half().to("meta") for t in (q, k, v)]
    with_ranges = flash_wmma.explain(*halves, key_ranges=ranges.to("meta"), device_facts=hopper)
    assert with_ranges.kernel in ("wgmma_sm90", "mma_sm80")  # mma_sm80: few rows and keys
    assert with_ranges.backward_kernel == "bwd_sm80"
    assert "key_ranges" not in with_ranges.reasons.get("wgmma_sm90", "")
    assert with_ranges.backward_reasons["bwd_sm90"] == "leaves such a problem to another kernel"
    assert flash_wmma.explain(q, k, v, key_ranges=ranges).kernel == "cpu"


WRONG = {
    "a list": ([[0, 1]], TypeError, r"key_ranges: got list, allowed: torch\.Tensor"),
    "int64": (
        torch.zeros(2, 4, 20, 2).long(),
        ValueError,
        r"key_ranges\.dtype: got torch\.int64, allowed: torch\.int32",
    ),
    "rank": (
        torch.zeros(20, 2).int(),
        ValueError,
        r"key_ranges\.shape: got \(20, 2\), allowed: \(B or 1, Hq or 1, Nq, 2\)",
    ),
    "heads": (
        torch.zeros(1, 2, 20, 2).int(),
        ValueError,
        r"key_ranges\.shape: got \(1, 2, 20, 2\), .* \(2, 4, 20, 2\)",
    ),
    "batch": (torch.zeros(3, 1, 20, 2).int(), ValueError, r"key_ranges\.shape: got \(3, 1, 20, 2\)"),
    "queries": (torch.zeros(1, 1, 1, 2).int(), ValueError, r"key_ranges\.shape: got \(1, 1, 1, 2\)"),
    "one bound": (torch.zeros(1, 1, 20, 1).int(), ValueError, r"key_ranges\.shape: got \(1, 1, 20, 1\)"),
    "device": (
        torch.zeros(1, 1, 20, 2, device="meta").int(),
        ValueError,
        r"key_ranges\.device: got meta, allowed: q's",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_ranges(what: str) -> None:
    (q, k, v), _ = call()
    ranges, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        flash_wmma.forward(q, k, v, key_ranges=ranges)
    with pytest.raises(error, match=message):
        flash_wmma.explain(q, k, v, key_ranges=ranges)
    if isinstance(ranges, Tensor):  # the ops' own checks
        with pytest.raises((RuntimeError, ValueError), match="key_ranges"):
            ops.forward(q.detach(), k.detach(), v.detach(), key_ranges=ranges)


def test_wrong_ranges_of_packed_sequences() -> None:
    (q, k, v), ranges = call()
    rows = [t[0].transpose(0, 1) for t in (q, k, v)]
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (20, 30))
    with pytest.raises(
        ValueError, match=r"key_ranges\.shape: got .*, allowed: \(Hq or 1, total_q, 2\) of \(4, 20, 2\)"
    ):
        flash_wmma.forward_varlen(*rows, cu_q, cu_k, 20, 30, key_ranges=ranges)


def test_a_kernel_without_ranges_refuses() -> None:
    (q, k, v), ranges = call()
    halves = [t.detach().half() for t in (q, k, v)]
    with pytest.raises(ValueError, match="kernel 'wmma_v2' cannot run this: does not support key_ranges"):
        flash_wmma.forward(*halves[:1], *(t[:, :, :20] for t in halves[1:]), key_ranges=ranges, kernel="wmma_v2")


# ----------------------------------------------------------------------------------------------------- document_ranges


def by_hand(ids: list[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for number, run_ in itertools.groupby(ids):
        first, n = len(ranges), len(list(run_))
        ranges += [[first, first + n] if number >= 0 else [0, 0]] * n
    return ranges


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "ids", [[7], [0, 0, 0], [0, 1, 2], [3, 3, 1, 1, 1, 3], [-1, -1, 4, 4, -1, 4, -7], [5, 5, 6, -1]], ids=str
)
def test_document_ids(ids: list[int], dtype: torch.dtype) -> None:
    given = torch.tensor(ids, dtype=dtype)
    ranges = flash_wmma.document_ranges(given)
    assert ranges.dtype == torch.int32
    assert ranges.tolist() == [[by_hand(ids)]]
    both = flash_wmma.document_ranges(torch.stack((given, given.flip(0))))
    assert both.tolist() == [[by_hand(ids)], [by_hand(ids[::-1])]]


def test_position_ids() -> None:
    """A document begins where positions do not go on; its first position need not be 0."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [5, 6, 7, 8, 1, 1], [3, 3, 2, 3, 4, 5]])
    ids = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 2], [0, 1, 2, 2, 2, 2]])
    expected = flash_wmma.document_ranges(ids)
    assert torch.equal(flash_wmma.document_ranges(position_ids=positions), expected)
    assert torch.equal(flash_wmma.document_ranges(position_ids=positions[1].int()), expected[1:2])


def test_no_places() -> None:
    for shape, batch in (((0,), 1), ((3, 0), 3), ((0, 5), 0)):
        for ranges in (
            flash_wmma.document_ranges(torch.zeros(shape, dtype=torch.int64)),
            flash_wmma.document_ranges(position_ids=torch.zeros(shape, dtype=torch.int64)),
        ):
            assert ranges.shape == (batch, 1, shape[-1], 2)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_packed_sequences(causal: bool) -> None:
    lengths = (5, 64, 1, 130, 33)
    (q, k, v), _ = call(sum(lengths), sum(lengths))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    out = flash_wmma.forward(q, k, v, causal=causal, key_ranges=flash_wmma.document_ranges(ids))
    cu = cumulative(lengths, "cpu")
    for b in range(2):
        rows = [t[b].transpose(0, 1) for t in (q, k, v)]
        expected = flash_wmma.forward_varlen(*rows, cu, cu, max(lengths), max(lengths), causal=causal)
        torch.testing.assert_close(out[b].transpose(0, 1), expected, rtol=1e-5, atol=1e-5)


def test_examples_of_the_docs() -> None:
    """docs/api.md, the section on key ranges."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text()
    section = page.partition("### Key ranges")[2].partition("\n### ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    assert len(blocks) == 2
    names: dict[str, object] = {"torch": torch, "flash_wmma": flash_wmma}
    for block in blocks:
        exec(compile(block, "api.md", "exec"), names)
    assert torch.equal(names["documents"], flash_wmma.document_ranges(names["ids"]))  # type: ignore[arg-type]


def test_wrong_documents() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64)
    document_ranges: Any = flash_wmma.document_ranges
    for arguments, options, error, message in (
        ((), {}, ValueError, "document_ids, position_ids: got neither, allowed: one of them"),
        ((ids,), {"position_ids": ids}, ValueError, "document_ids, position_ids: got both"),
        (([0, 1],), {}, TypeError, r"document_ids: got list, allowed: torch\.Tensor"),
        (
            (ids.float(),),
            {},
            ValueError,
            r"document_ids\.dtype: got torch\.float32, allowed: torch\.int64, torch\.int32",
        ),
        (
            (),
            {"position_ids": ids[None]},
            ValueError,
            r"position_ids\.shape: got \(1, 2, 5\), allowed: \(B, N\) or \(N,\)",
        ),
    ):
        with pytest.raises(error, match=message):
            document_ranges(*arguments, **options)
