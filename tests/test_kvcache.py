"""Attention with a key/value cache: pages of any size, what is not in use, appending in place, a serving simulation."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import pytest
import torch
from needs import needs
from reference import DENSE, PLAIN, Mask, Modification, bits, check, emulated, filled, poisoned_memory, reference
from torch import Tensor

import flash_wmma
from flash_wmma import forward_cached
from flash_wmma.emulator import EmulatorError

Target = tuple[flash_wmma.Kernel, torch.dtype]
CACHE = "a key/value cache"
CAUSAL = Mask("bottom_right")


class Paged(NamedTuple):
    """A cache whose unused rows are NaN, and whose table's unused entries are no page at all."""

    k: Tensor
    v: Tensor
    table: Tensor
    seqlens: Tensor
    ks: list[Tensor]
    vs: list[Tensor]
    """The keys and values of each sequence, (1, Hk, n, d)."""


def int32(values: Any, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def nan_pages(layout: str, pages: int, heads: int, size: int, d: int, dtype: torch.dtype, device: str) -> Tensor:
    """(pages, heads, size, d) of NaN, in memory as the layout says."""
    if layout == "head first":
        return torch.full((pages, heads, size, d), math.nan, dtype=dtype, device=device)
    if layout == "row first":
        return torch.full((pages, size, heads, d), math.nan, dtype=dtype, device=device).transpose(1, 2)
    if layout == "margins":  # k and v of an engine that keeps both in one tensor
        whole = torch.full((pages, 2, size + 1, heads + 1, d + 8), math.nan, dtype=dtype, device=device)
        return whole[:, 1, 1:, 1:, 8:].transpose(1, 2)
    raise ValueError(layout)


def paged(
    target: Target,
    lengths: tuple[int, ...],
    size: int,
    heads: int = 2,
    d: int = 64,
    dv: int | None = None,
    layout: str = "row first",
    shared: bool = False,
) -> Paged:
    """Sequences of these lengths in pages in random order. ``shared``: sequences 0 and 1 have their first page in
    common."""
    kernel, dtype = target
    generator = torch.Generator().manual_seed(size)
    runs = max(1, -(-max(lengths) // size)) + 1
    pages = len(lengths) * runs + 2
    k = nan_pages(layout, pages, heads, size, d, dtype, kernel.device)
    v = nan_pages(layout, pages, heads, size, dv or d, dtype, kernel.device)
    table = torch.randperm(pages, generator=generator)[: len(lengths) * runs].view(len(lengths), runs).int()
    if shared:
        table[1, 0] = table[0, 0]
    ks, vs = [], []
    for b, n in enumerate(lengths):
        for cache, kept in ((k, ks), (v, vs)):
            rows = torch.randn(heads, n, cache.shape[3], generator=generator).to(dtype)
            if shared and b == 1:
                rows[:, :size] = kept[0][0][:, :size].cpu()
            kept.append(rows[None].to(kernel.device))
            for i in range(0, n, size):
                part = rows[:, i : i + size]
                filled(cache[table[b, i // size], :, : part.shape[1]], part.to(kernel.device))
    stale = torch.tensor([2**31 - 1, -1, -(2**31), pages], dtype=torch.int32)
    for b, n in enumerate(lengths):
        used = -(-n // size)
        table[b, used:] = stale[torch.arange(runs - used) % 4]
    return Paged(k, v, table.to(kernel.device), int32(lengths, kernel.device), ks, vs)


def queries(target: Target, *shape: int, seed: int = 7) -> Tensor:
    """Random normals in a storage of NaN."""
    kernel, dtype = target
    storage = torch.full((*shape[:-1], shape[-1] + 8), math.nan, dtype=dtype, device=kernel.device)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return filled(storage[..., 8:], values.to(dtype).to(kernel.device))


def run(target: Target, q: Tensor, cache: Paged, **options: Any) -> tuple[Tensor, Tensor]:
    """From poisoned memory; the inputs' storages stay as they are."""
    tensors = q, cache.k, cache.v, cache.table, cache.seqlens
    before = [bits(t) for t in tensors]
    given = {"block_table": cache.table, "kernel": target[0].name, "return_lse": True} | options
    with poisoned_memory():
        out, lse = forward_cached(q, cache.k, cache.v, cache.seqlens, **given)
    assert all(torch.equal(bits(t), b) for t, b in zip(tensors, before, strict=True)), "an input was written"
    return out, lse


def check_each(
    target: Target,
    q: Tensor,
    cache: Paged,
    result: tuple[Tensor, Tensor],
    mask: Mask = DENSE,
    modification: Modification = PLAIN,
) -> None:
    """Each sequence by the yardstick."""
    out, lse = result
    for b, (k, v) in enumerate(zip(cache.ks, cache.vs, strict=True)):
        if k.shape[2] == 0:
            assert not out[b].any()
            assert bool(lse[b].isneginf().all())
            continue
        entry = modification.entry(b)
        if entry.attn_bias is not None:
            entry = entry._replace(attn_bias=entry.attn_bias[..., : k.shape[2]])
        expected = reference(target[0], q[b : b + 1], k, v, mask, None, entry)
        check(out[b : b + 1], lse[b : b + 1], expected)


LENGTHS = (70, 0, 1, 64, 131)
SHAPES: dict[str, tuple[int, int, int, int, int, int, str, Mask]] = {
    # page size, query heads, key heads, queries, d, d_v, layout of the pages, mask
    "decode": (16, 8, 2, 1, 64, 64, "row first", DENSE),
    "one head": (16, 1, 1, 1, 64, 64, "head first", CAUSAL),
    "pages of one": (1, 4, 2, 3, 64, 64, "row first", CAUSAL),
    "odd pages": (7, 6, 2, 5, 64, 40, "margins", CAUSAL),
    "large pages": (256, 4, 4, 2, 128, 128, "head first", DENSE),
    "window": (33, 6, 3, 9, 32, 32, "row first", Mask("bottom_right", (20, 0))),
    "more rows than a tile": (16, 6, 2, 50, 64, 64, "row first", CAUSAL),
    "every head in one group": (16, 9, 1, 8, 96, 96, "row first", CAUSAL),
    "large d": (12, 4, 2, 2, 192, 192, "row first", CAUSAL),
    "largest d": (16, 4, 2, 1, 256, 256, "row first", DENSE),
    "odd d": (5, 4, 2, 2, 59, 35, "row first", CAUSAL),
}


@needs(CACHE)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_against_float64(target: Target, shape: tuple[int, int, int, int, int, int, str, Mask]) -> None:
    size, heads_q, heads_k, n, d, dv, layout, mask = shape
    cache = paged(target, LENGTHS, size, heads_k, d, dv, layout)
    q = queries(target, len(LENGTHS), heads_q, n, d)
    result = run(target, q, cache, causal=mask.causal, window=mask.window)
    check_each(target, q, cache, result, mask)


@needs(CACHE)
@pytest.mark.parametrize("kind", ["attn_bias", "bool", "alibi_slopes", "softcap"])
@pytest.mark.parametrize("n", [1, 6])
def test_modified_scores(target: Target, kind: str, n: int) -> None:
    """Query heads of a group, which may share a tile, have biases and slopes of their own."""
    cache = paged(target, LENGTHS, 16)
    q = queries(target, len(LENGTHS), 6, n, 64)
    held = cache.table.shape[1] * 16
    generator = torch.Generator().manual_seed(4)
    device = target[0].device
    modification = {
        "attn_bias": Modification(torch.randn(len(LENGTHS), 6, n, held, generator=generator).to(device)),
        "bool": Modification((torch.rand(len(LENGTHS), 6, 1, held, generator=generator) > 0.3).to(device)),
        "alibi_slopes": Modification(None, torch.rand(len(LENGTHS), 6, generator=generator).to(device)),
        "softcap": Modification(softcap=3.0),
    }[kind]
    if kind == "bool":
        modification.attn_bias[..., 0] = True
    result = run(target, q, cache, causal=True, **modification._asdict())
    check_each(target, q, cache, result, CAUSAL, modification)


def packed_queries(target: Target, counts: tuple[int, ...], heads: int, d: int, extra: int) -> tuple[Tensor, Tensor]:
    """(q, cu_seqlens_q); the rows behind the last sequence are NaN."""
    q = queries(target, sum(counts) + extra, heads, d)
    if extra:
        q[sum(counts) :] = math.nan
    ends = torch.tensor([0, *counts]).cumsum(0)
    return q, int32(ends.tolist(), target[0].device)


@needs(CACHE)
@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1), (3, 2, 0, 70, 1), (0, 5, 1, 0, 131)])
@pytest.mark.parametrize("group", [1, 3])
def test_packed_queries(target: Target, counts: tuple[int, ...], group: int) -> None:
    cache = paged(target, LENGTHS, 16)
    q, cu = packed_queries(target, counts, 2 * group, 64, extra=3)
    out, lse = run(target, q, cache, causal=True, cu_seqlens_q=cu, max_seqlen_q=max(counts))
    begin = 0
    for b, n in enumerate(counts):
        rows = slice(begin, begin + n)
        begin += n
        if n == 0:
            continue
        if LENGTHS[b] == 0:
            assert not out[rows].any()
            assert bool(lse[:, rows].isneginf().all())
            continue
        one = q[rows].transpose(0, 1)[None]
        expected = reference(target[0], one, cache.ks[b], cache.vs[b], CAUSAL)
        check(out[rows].transpose(0, 1)[None].contiguous(), lse[None, :, rows].contiguous(), expected)
    assert not out[begin:].any()
    assert bool(lse[:, begin:].isneginf().all())


@needs(CACHE)
def test_more_sequences_than_a_warp_has_lanes(target: Target) -> None:
    lengths = tuple(n % 9 for n in range(35))
    counts = tuple(n % 3 for n in range(35))
    cache = paged(target, lengths, 4, heads=1)
    q, cu = packed_queries(target, counts, 2, 64, extra=0)
    out, _ = run(target, q, cache, causal=True, cu_seqlens_q=cu, max_seqlen_q=2)
    ends = cu.tolist()
    for b in range(35):
        one = q[ends[b] : ends[b + 1]].transpose(0, 1)[None]
        if one.shape[2] and lengths[b]:
            expected = reference(target[0], one, cache.ks[b], cache.vs[b], CAUSAL).out
            got = out[ends[b] : ends[b + 1]].transpose(0, 1)[None].double()
            torch.testing.assert_close(got, expected, atol=0.02, rtol=0)


@needs(CACHE)
@pytest.mark.parametrize("n", [1, 4])
def test_the_page_size_changes_no_bit(target: Target, n: int) -> None:
    """Nor do the order and the layout of pages, or a cache without them."""
    kernel, _ = target
    one = paged(target, LENGTHS, 16)
    q = queries(target, len(LENGTHS), 4, n, 64)
    expected = run(target, q, one, causal=True)
    longest = max(LENGTHS)
    for size, layout in ((1, "head first"), (13, "margins"), (200, "row first")):
        other = paged(target, LENGTHS, size, layout=layout)
        for b, length in enumerate(LENGTHS):
            for i in range(length):
                other.k[other.table[b, i // size], :, i % size] = one.ks[b][0, :, i]
                other.v[other.table[b, i // size], :, i % size] = one.vs[b][0, :, i]
        result = run(target, q, other, causal=True)
        assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True)), (size, layout)
    k = nan_pages("head first", len(LENGTHS), 2, longest, 64, q.dtype, kernel.device)
    v = k.clone()
    for b, length in enumerate(LENGTHS):
        k[b, :, :length], v[b, :, :length] = one.ks[b][0], one.vs[b][0]
    flat = one._replace(k=k, v=v)
    result = run(target, q, flat, causal=True, block_table=None)
    assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))
    order = int32([3, 1, 4, 0, 2], kernel.device)
    mixed = flat._replace(k=k[order.argsort()], v=v[order.argsort()])
    result = run(target, q, mixed, causal=True, block_table=None, cache_batch_idx=order)
    assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


@needs(CACHE)
@pytest.mark.parametrize("poison", [math.inf, 6e4, 0.0])
def test_nothing_unused_has_influence(target: Target, poison: float) -> None:
    """Other contents of unused rows, and other stale entries, change no bit."""
    cache = paged(target, LENGTHS, 16)
    q = queries(target, len(LENGTHS), 4, 3, 64)
    expected = run(target, q, cache, causal=True)
    k, v = (torch.where(t.isnan(), poison, t) for t in (cache.k, cache.v))
    table = cache.table.clone()
    for b, n in enumerate(LENGTHS):
        table[b, -(-n // 16) :] = b
    result = run(target, q, cache._replace(k=k, v=v, table=table), causal=True)
    assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


@needs(CACHE)
def test_shared_pages(target: Target) -> None:
    cache = paged(target, (40, 35, 9), 16, shared=True)
    q = queries(target, 3, 4, 2, 64)
    check_each(target, q, cache, run(target, q, cache, causal=True), CAUSAL)


@needs(CACHE)
@pytest.mark.parametrize("with_pages", [False, True])
def test_leftpad(target: Target, with_pages: bool) -> None:
    """Rows before a sequence begins are not in use, and places count from there."""
    lengths, leftpad = (70, 33, 64, 20, 5), (3, 33, 17, 40, 0)
    cache = paged(target, lengths, 16 if with_pages else 100)
    if not with_pages:
        k, v = (t[cache.table[:, 0].clamp(0, len(t) - 1).long()] for t in (cache.k, cache.v))
        cache = cache._replace(k=k, v=v)
    for b, n in enumerate(leftpad):
        for i in range(min(n, lengths[b])):
            page, row = (int(cache.table[b, i // 16]), i % 16) if with_pages else (b, i)
            cache.k[page, :, row] = math.nan
            cache.v[page, :, row] = math.nan
    begins = int32(leftpad, target[0].device)
    cache = cache._replace(
        ks=[t[:, :, n:] for t, n in zip(cache.ks, leftpad, strict=True)],
        vs=[t[:, :, n:] for t, n in zip(cache.vs, leftpad, strict=True)],
    )
    q = queries(target, len(lengths), 4, 3, 64)
    slopes = torch.rand(4).to(target[0].device)
    table = cache.table if with_pages else None
    result = run(target, q, cache, causal=True, block_table=table, cache_leftpad=begins, alibi_slopes=slopes)
    check_each(target, q, cache, result, CAUSAL, Modification(None, slopes))


@needs(CACHE)
def test_wrong_numbers_are_clamped(target: Target) -> None:
    """Whatever lengths and tables hold, nothing outside the tensors is read (the emulator watches)."""
    kernel, _ = target
    cache = paged(target, (64, 64, 64, 64), 16)
    cache = cache._replace(k=cache.k.nan_to_num(), v=cache.v.nan_to_num())
    pages, held = cache.k.shape[0], cache.table.shape[1] * 16
    q = queries(target, 4, 4, 2, 64)
    wrong = int32([[-5, 3, 2**31 - 1, 1, pages]] * 4, kernel.device)
    seqlens = int32([2**31 - 1, -(2**31), held, 20], kernel.device)
    result = run(target, q, cache._replace(table=wrong, seqlens=seqlens), causal=True)
    right, fits = wrong.clamp(0, pages - 1), seqlens.clamp(0, held)
    expected = run(target, q, cache._replace(table=right, seqlens=fits), causal=True)
    assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))
    assert not result[0].isnan().any()
    leftpad = int32([2**31 - 1, -(2**31), 19, -1], kernel.device)
    result = run(target, q, cache._replace(table=wrong, seqlens=seqlens), causal=True, cache_leftpad=leftpad)
    clamped = run(
        target, q, cache._replace(table=right, seqlens=fits), causal=True, cache_leftpad=leftpad.clamp(0, held)
    )
    assert all(torch.equal(x, y) for x, y in zip(result, clamped, strict=True))
    q, _ = packed_queries(target, (2, 2, 2, 2), 4, 64, extra=0)
    for numbers in ([-3, 5, 2, 2**31 - 1, 4], [0, 2, 4, 6, 100]):
        overlap = numbers[1] > numbers[2] and emulated(kernel)  # two sequences have the same rows
        with pytest.raises(EmulatorError, match="write after write") if overlap else contextlib.nullcontext():
            run(target, q, cache, cu_seqlens_q=int32(numbers, kernel.device), max_seqlen_q=8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_table": int32([[0, 9], [1, 2]])}, r"block_table: got 9 at \(0, 1\), allowed: 0 to 5"),
        ({"cache_seqlens": int32([9, 8])}, r"cache_seqlens: got 9 at 0, allowed: 0 to the capacity, 8"),
        ({"cache_seqlens": int32([-1, 8])}, r"cache_seqlens: got -1 at 0"),
        ({"cache_leftpad": int32([0, 9])}, r"cache_leftpad: got 9 at 1, allowed: 0 to cache_seqlens, 6"),
    ],
)
def test_validate(wrong: dict[str, Any], message: str) -> None:
    k = v = torch.randn(6, 1, 4, 8)
    given: dict[str, Any] = {"cache_seqlens": int32([5, 6]), "block_table": int32([[0, 5], [1, 2]])}
    q = torch.randn(2, 1, 1, 8)
    forward_cached(q, k, v, **given, validate=True)
    with pytest.raises(ValueError, match=message):
        forward_cached(q, k, v, **given | wrong, validate=True)
    unused = {"cache_seqlens": int32([4, 6])} if "block_table" in wrong else {}
    if unused:
        forward_cached(q, k, v, **given | wrong | unused, validate=True)
