"""Packed sequences: each as the dense kernel gives it, whatever lies around it."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import pytest
import torch
from needs import needs
from reference import (
    DENSE,
    PLAIN,
    Mask,
    Modification,
    check,
    check_no_key,
    emulated,
    filled,
    poisoned_memory,
    reference,
)
from torch import Tensor

import flash_wmma
from flash_wmma.emulator import EmulatorError

Target = tuple[flash_wmma.Kernel, torch.dtype]

LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((5,), (9,)),
    "one key": ((1,), (1,)),
    "mixed": ((5, 0, 70, 1, 33), (9, 4, 0, 200, 33)),
    "odd pairs": ((113, 108, 1), (203, 256, 65)),
    "empty first and last": ((0, 3, 0), (0, 4, 0)),
    "nothing": ((0, 0), (0, 0)),
    "no keys": ((4, 5), (0, 0)),
    "decoding": ((1,) * 6, (3, 700, 64, 1, 600, 130)),  # the CPU splits two of them over their keys
    "more than a warp has lanes": (tuple(n % 3 for n in range(34)), tuple(n % 7 for n in range(34))),
}


def cumulative(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def packed(total: int, heads: int, d: int, dtype: torch.dtype, device: str, seed: int, extra: int = 0) -> Tensor:
    """(total + extra, heads, d) random normals in a storage of NaN; the rows past total are NaN."""
    storage = torch.full((total + extra + 2, heads + 1, d + 8), math.nan, dtype=dtype, device=device)
    view = storage[1:-1, 1:, 8:]
    values = torch.randn(total, heads, d, generator=torch.Generator().manual_seed(seed))
    filled(view[:total], values.to(dtype).to(device))
    return view


def run_packed(
    kernel: flash_wmma.Kernel, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    longest = [int(t.diff().clamp_min(0).max()) for t in (cu_q, cu_k)]
    options = {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]} | options
    with poisoned_memory():
        out, lse = flash_wmma.forward_varlen(q, k, v, cu_q, cu_k, kernel=kernel.name, return_lse=True, **options)
    assert out.shape == (q.shape[0], q.shape[1], v.shape[2])
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.dtype == torch.float32
    return out, lse


def dense(t: Tensor, begin: int, end: int) -> Tensor:
    """Rows [begin, end) as (1, H, N, d)."""
    return t[begin:end].transpose(0, 1)[None]


def check_sequences(
    kernel: flash_wmma.Kernel,
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    result: tuple[Tensor, Tensor],
    mask: Mask = DENSE,
    modification: Modification = PLAIN,
) -> None:
    """Each sequence by the yardstick; what is in none is 0 and -inf, or the sink."""
    q, k, v = tensors
    out, lse = result
    begin_q = begin_k = 0
    for b, (nq, nk) in enumerate(zip(*lengths, strict=True)):
        rows = slice(begin_q, begin_q + nq)
        if nk == 0:
            check_no_key(out[rows], lse[:, rows], modification)
        elif nq:
            entry = modification.entry(b, rows)
            if entry.attn_bias is not None:
                entry = entry._replace(attn_bias=entry.attn_bias[..., :nq, :nk])
            one = [dense(t, n, n + m) for t, n, m in ((q, begin_q, nq), (k, begin_k, nk), (v, begin_k, nk))]
            expected = reference(kernel, *one, mask, None, entry)
            check(dense(out, rows.start, rows.stop).contiguous(), lse[None, :, rows].contiguous(), expected)
        begin_q, begin_k = begin_q + nq, begin_k + nk
    check_no_key(out[begin_q:], lse[:, begin_q:], modification)


@needs("varlen")
@pytest.mark.parametrize("mask", [DENSE, Mask("top_left"), Mask("bottom_right"), Mask(False, (20, 5))], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_against_float64(target: Target, lengths: tuple[tuple[int, ...], tuple[int, ...]], mask: Mask) -> None:
    kernel, dtype = target
    q = packed(sum(lengths[0]), 4, 64, dtype, kernel.device, 1, extra=3)
    k = packed(sum(lengths[1]), 2, 64, dtype, kernel.device, 2, extra=5)
    v = packed(sum(lengths[1]), 2, 64, dtype, kernel.device, 3, extra=5)
    cu = [cumulative(n, kernel.device) for n in lengths]
    result = run_packed(kernel, q, k, v, *cu, causal=mask.causal, window=mask.window)
    check_sequences(kernel, (q, k, v), lengths, result, mask)


@needs("varlen", lambda kernel, d, dv: d == dv or "d_v != d" in kernel.features)
@pytest.mark.parametrize("d, dv", [(40, 40), (59, 59), (128, 64), (256, 256)])
def test_head_dims(target: Target, d: int, dv: int) -> None:
    kernel, dtype = target
    lengths = LENGTHS["mixed"]
    q = packed(sum(lengths[0]), 6, d, dtype, kernel.device, 1)
    k, v = (packed(sum(lengths[1]), 3, n, dtype, kernel.device, s) for n, s in ((d, 2), (dv, 3)))
    result = run_packed(kernel, q, k, v, *(cumulative(n, kernel.device) for n in lengths), causal="bottom_right")
    check_sequences(kernel, (q, k, v), lengths, result, Mask("bottom_right"))


@needs("varlen", lambda kernel, kind: ("attn_bias" if kind == "bool" else kind) in kernel.features)
@pytest.mark.parametrize("kind", ["attn_bias", "bool", "alibi_slopes", "softcap"])
def test_modified_scores(target: Target, kind: str) -> None:
    kernel, dtype = target
    lengths = LENGTHS["mixed"]
    q = packed(sum(lengths[0]), 4, 64, dtype, kernel.device, 1)
    k, v = (packed(sum(lengths[1]), 2, 64, dtype, kernel.device, s) for s in (2, 3))
    batch, nq, nk = len(lengths[0]), max(lengths[0]), max(lengths[1])
    generator = torch.Generator().manual_seed(4)
    bias = torch.randn(batch, 4, nq, nk, generator=generator)
    for b, (n, m) in enumerate(zip(*lengths, strict=True)):
        bias[b, :, n:] = bias[b, ..., m:] = math.nan  # for queries and keys that the sequence does not have
    modification = {
        "attn_bias": Modification(bias.to(kernel.device)),
        "bool": Modification((torch.rand(batch, 1, 1, nk, generator=generator) > 0.3).to(kernel.device)),
        "alibi_slopes": Modification(None, torch.rand(batch, 4, generator=generator).to(kernel.device)),
        "softcap": Modification(softcap=3.0),
    }[kind]
    cu = [cumulative(n, kernel.device) for n in lengths]
    result = run_packed(kernel, q, k, v, *cu, **modification._asdict())
    check_sequences(kernel, (q, k, v), lengths, result, DENSE, modification)


@needs("varlen")
def test_seqused_k(target: Target) -> None:
    """As if the keys past the used ones were not there: they are NaN and the largest numbers, which would spoil a
    conversion's scales. Negative and too large numbers of keys are clamped."""
    kernel, dtype = target
    lengths = ((5, 7, 40, 3), (9, 4, 100, 8))
    used = (3, 4, 65, 0)
    q = packed(sum(lengths[0]), 4, 64, dtype, kernel.device, 1)
    k, v = (packed(sum(lengths[1]), 2, 64, dtype, kernel.device, s) for s in (2, 3))
    kept_k, kept_v = k.clone(), v.clone()
    begin = 0
    for n, m in zip(lengths[1], used, strict=True):
        k[begin + m : begin + n] = v[begin + m : begin + n] = math.nan
        k[begin + m : begin + n : 2] = v[begin + m : begin + n : 2] = torch.finfo(dtype).max
        begin += n
    cu = [cumulative(n, kernel.device) for n in lengths]
    given = torch.tensor([3, 1000, 65, -7], dtype=torch.int32, device=kernel.device)
    for causal in (False, "bottom_right"):
        out, lse = run_packed(kernel, q, k, v, *cu, seqused_k=given, causal=causal)
        begin_q = begin_k = 0
        for nq, nk, m in zip(*lengths, used, strict=True):
            rows = slice(begin_q, begin_q + nq)
            if m == 0:
                assert not out[rows].any()
            else:
                one = [
                    dense(t, n, n + size)
                    for t, n, size in ((q, begin_q, nq), (kept_k, begin_k, m), (kept_v, begin_k, m))
                ]
                expected = reference(kernel, *one, Mask(causal))
                check(dense(out, rows.start, rows.stop).contiguous(), lse[None, :, rows].contiguous(), expected)
            begin_q, begin_k = begin_q + nq, begin_k + nk


WRONG = {
    "decreasing": ([0, 10, 4, 20], [0, 10, 4, 20]),
    "beyond the end": ([0, 10, 1000], [0, 10, 2000]),
    "far beyond": ([0, 2**31 - 1], [0, 2**31 - 1]),
    "negative": ([-5, 10, 20], [-(2**31), 10, 20]),
    "all negative": ([-9, -5, -1], [-9, -5, -1]),
    "last first": ([20, 10, 0], [20, 10, 0]),
    "starts late": ([7, 15], [7, 15]),
}


@needs("varlen")
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_lengths_read_nothing_outside(target: Target, wrong: tuple[list[int], list[int]]) -> None:
    """What is outside the tensors is NaN, and no NaN comes out (of a CUDA kernel, which may leave such rows unwritten,
    nothing fails, and the emulator sees no access outside); with validate=True it is an error instead."""
    kernel, dtype = target
    q = packed(20, 4, 64, dtype, kernel.device, 1)
    k, v = (packed(20, 2, 64, dtype, kernel.device, s) for s in (2, 3))
    cu = [torch.tensor(n, dtype=torch.int32, device=kernel.device) for n in wrong]
    overlap = wrong == WRONG["decreasing"] and emulated(kernel)  # two sequences have the same rows
    with pytest.raises(EmulatorError, match="write after write") if overlap else contextlib.nullcontext():
        out, lse = run_packed(kernel, q, k, v, *cu, max_seqlen_q=20, max_seqlen_k=20)
        if kernel.min_arch == 0:
            assert not out.isnan().any()
            assert not lse.isnan().any()
        elif kernel.device == "cuda":
            torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"cu_seqlens_q: got "):
        flash_wmma.forward_varlen(q, k, v, *cu, 20, 20, validate=True)


@needs("varlen")
def test_sequence_in_the_middle(target: Target) -> None:
    """A first number above 0: the sequences themselves are right."""
    kernel, dtype = target
    q, k, v = (packed(20, 2, 64, dtype, kernel.device, s) for s in (1, 2, 3))
    cu = torch.tensor([7, 15], dtype=torch.int32, device=kernel.device)
    out, lse = run_packed(kernel, q, k, v, cu, cu)
    expected = reference(kernel, *(dense(t, 7, 15) for t in (q, k, v)))
    check(dense(out, 7, 15).contiguous(), lse[None, :, 7:15].contiguous(), expected)
    assert not out[15:].any()
    assert bool(lse[:, 15:].isneginf().all())


@needs("varlen")
def test_longer_than_max_seqlen(target: Target) -> None:
    """It concerns no other sequence, and nothing outside is read, of a bias neither."""
    kernel, dtype = target
    q, k, v = (packed(60, 2, 64, dtype, kernel.device, s) for s in (1, 2, 3))
    cu = cumulative((40, 20), kernel.device)
    biases = [None]
    if "attn_bias" in kernel.features:
        storage = torch.full((2 * 2 * 30 * 25 + 1000,), math.nan, device=kernel.device)
        biases += [storage[500:-500].zero_().view(2, 2, 30, 25)]
    for bias in biases:
        out, lse = run_packed(kernel, q, k, v, cu, cu, max_seqlen_q=30, max_seqlen_k=25, attn_bias=bias)
        expected = reference(kernel, *(dense(t, 40, 60) for t in (q, k, v)))
        check(dense(out, 40, 60).contiguous(), lse[None, :, 40:].contiguous(), expected)
        assert not out.isnan().any()


@needs("varlen")
@pytest.mark.parametrize("foreign", [1000.0, math.inf, math.nan])
def test_neighbours_leave_no_trace(target: Target, foreign: float) -> None:
    """A sequence's result is the same to the bit, whatever the next one holds; its first tile of keys is full."""
    kernel, dtype = target
    lengths, keys = (41, 49), (256, 30)
    q = packed(sum(lengths), 2, 64, dtype, kernel.device, 1)
    k, v = (packed(sum(keys), 2, 64, dtype, kernel.device, s) for s in (2, 3))
    cu = [cumulative(n, kernel.device) for n in (lengths, keys)]
    beside_small = run_packed(kernel, q, k, v, *cu)[0][: lengths[0]].clone()
    for t, first in ((q, lengths[0]), (k, keys[0]), (v, keys[0])):
        t[first:] *= foreign
    out, _ = run_packed(kernel, q, k, v, *cu)
    assert torch.equal(out[: lengths[0]], beside_small)


def test_bitwise_as_dense_on_the_cpu() -> None:
    """A packed sequence gives what it would give alone."""
    lengths = LENGTHS["decoding"]
    q = packed(sum(lengths[0]), 4, 64, torch.float32, "cpu", 1)
    k, v = (packed(sum(lengths[1]), 2, 64, torch.float32, "cpu", s) for s in (2, 3))
    cu = [cumulative(n, "cpu") for n in lengths]
    out, lse = flash_wmma.forward_varlen(q, k, v, *cu, 1, 700, return_lse=True)
    for b in range(len(lengths[0])):
        keys = slice(int(cu[1][b]), int(cu[1][b + 1]))
        one = [dense(t, s.start, s.stop) for t, s in ((q, slice(b, b + 1)), (k, keys), (v, keys))]
        alone, alone_lse = flash_wmma.forward(*one, return_lse=True)
        assert torch.equal(alone[0, :, 0], out[b])
        assert torch.equal(alone_lse[0, :, 0], lse[:, b])


def good() -> dict[str, Any]:
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    return {x: torch.randn(12, 2, 64) for x in "qkv"} | {
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu,
        "max_seqlen_q": 7,
        "max_seqlen_k": 7,
    }


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q dense": (
        {"q": torch.zeros(1, 2, 12, 64)},
        ValueError,
        r"q\.shape: got \(1, 2, 12, 64\), allowed: \(total, H, d\)",
    ),
    "k heads": ({"k": torch.zeros(12, 4, 64), "v": torch.zeros(12, 4, 64)}, ValueError, r"q\.shape: got \(12, 2, 64\)"),
    "v length": ({"v": torch.zeros(13, 2, 64)}, ValueError, r"v\.shape: got \(13, 2, 64\)"),
    "k dtype": ({"k": torch.zeros(12, 2, 64).half()}, ValueError, r"k\.dtype: got torch\.float16"),
    "cu none": ({"cu_seqlens_k": None}, TypeError, r"cu_seqlens_k: got NoneType, allowed: torch\.Tensor"),
    "cu list": ({"cu_seqlens_q": [0, 5, 12]}, TypeError, r"cu_seqlens_q: got list, allowed: torch\.Tensor"),
    "cu int64": (
        {"cu_seqlens_q": torch.tensor([0, 5, 12])},
        ValueError,
        r"cu_seqlens_q\.dtype: got torch\.int64, .*int32",
    ),
    "cu rank": (
        {"cu_seqlens_k": torch.zeros(3, 1, dtype=torch.int32)},
        ValueError,
        r"cu_seqlens_k\.shape: got \(3, 1\), allowed: \(B \+ 1,\)",
    ),
    "cu empty": ({"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, ValueError, r"cu_seqlens_q\.shape: got \(0,\)"),
    "cu differ": (
        {"cu_seqlens_k": torch.zeros(4, dtype=torch.int32)},
        ValueError,
        r"cu_seqlens_k\.shape: got \(4,\), allowed: cu_seqlens_q's, \(3,\)",
    ),
    "cu device": (
        {"cu_seqlens_k": torch.zeros(3, dtype=torch.int32, device="meta")},
        ValueError,
        r"cu_seqlens_k\.device",
    ),
    "seqused shape": (
        {"seqused_k": torch.zeros(3, dtype=torch.int32)},
        ValueError,
        r"seqused_k\.shape: got \(3,\), allowed: \(B,\) = \(2,\)",
    ),
    "max negative": ({"max_seqlen_q": -1}, ValueError, r"max_seqlen_q: got -1, allowed: 0 to 2\*\*30"),
    "max a tensor": ({"max_seqlen_k": torch.randn(2)}, TypeError, r"max_seqlen_k: got tensor.*allowed: an int"),
    "bias shape": (
        {"attn_bias": torch.zeros(7, 8)},
        ValueError,
        r"attn_bias\.shape: got \(7, 8\), allowed: what broadcasts to .* = \(2, 2, 7, 7\)",
    ),
    "slopes shape": (
        {"alibi_slopes": torch.zeros(3)},
        ValueError,
        r"alibi_slopes\.shape: got \(3,\), allowed: \(Hq\) = \(2,\) or \(B, Hq\) = \(2, 2\)",
    ),
    "too short": (
        {"max_seqlen_q": 6, "validate": True},
        ValueError,
        "max_seqlen_q: got 6, allowed: at least .* 7",
    ),
    "decreasing": (
        {"cu_seqlens_k": torch.tensor([0, 8, 7], dtype=torch.int32), "validate": True},
        ValueError,
        "cu_seqlens_k: got 8 at 1 and 7 at 2, allowed: no number below the one before",
    ),
    "beyond": (
        {"cu_seqlens_k": torch.tensor([0, 7, 13], dtype=torch.int32), "validate": True},
        ValueError,
        "cu_seqlens_k: got 13 last, allowed: at most the 12 rows of k",
    ),
    "used too many": (
        {"seqused_k": torch.tensor([5, 8], dtype=torch.int32), "validate": True},
        ValueError,
        "seqused_k: got 8 at 1, allowed: 0 to the keys of the sequence, 7",
    ),
}


@pytest.mark.parametrize("wrong", ERRORS)
def test_errors(wrong: str) -> None:
    changes, error, message = ERRORS[wrong]
    with pytest.raises(error, match=message) as caught:
        flash_wmma.forward_varlen(**(good() | changes))
    assert "csrc" not in str(caught.value)
    assert flash_wmma.forward_varlen(**good(), validate=True).shape == (12, 2, 64)


@needs(lambda kernel: "varlen" not in kernel.features)
def test_kernel_without_varlen(kernel: flash_wmma.Kernel) -> None:
    call = {x: t.to(kernel.device) if isinstance(t, Tensor) else t for x, t in good().items()}
    call |= {x: call[x].to(kernel.dtypes[0]) for x in "qkv"}
    with pytest.raises(ValueError, match=f"kernel '{kernel.name}' cannot run this: does not support varlen"):
        flash_wmma.forward_varlen(**call, kernel=kernel.name)
