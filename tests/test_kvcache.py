"""Attention with a key/value cache: pages of any size, what is not in use, appending in place, a serving simulation."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import random
import shutil
from typing import Any, NamedTuple

import appending
import pytest
import serving
import torch
from needs import needs
from reference import (
    DENSE,
    PLAIN,
    Mask,
    Modification,
    bits,
    check,
    check_no_key,
    emulated,
    filled,
    poisoned_memory,
    reference,
)
from torch import Tensor

import flash_wmma
from flash_wmma import append_kv, flash_attn_varlen_func, flash_attn_with_kvcache, forward_cached
from flash_wmma.emulator import EmulatorError, _runtime

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
    wide = torch.full((len(lengths), runs + 3), 2**31 - 1, dtype=torch.int32, device=kernel.device)
    wide[:, :runs] = table.to(kernel.device)  # a view of an engine's table
    return Paged(k, v, wide[:, :runs], int32(lengths, kernel.device), ks, vs)


def beyond_l2(cache: Paged) -> Paged:
    """The same with a capacity of more than 64 MiB, which kernels take for more than an L2 cache holds. What is not in
    use has no page."""
    sequences, columns = cache.table.shape
    page = cache.k[0].numel() * cache.k.element_size() + cache.v[0].numel() * cache.v.element_size()
    more = (64 << 20) // (sequences * page) + 1
    table = torch.nn.functional.pad(cache.table, (0, more), value=2**31 - 1)
    table[:, columns::2] = -1
    return cache._replace(table=table)


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
            check_no_key(out[b], lse[b], modification)
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
    options = modification._asdict()
    assert options.pop("key_ranges") is None  # a cache has none
    result = run(target, q, cache, causal=True, **options)
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
    for size, layout in ((1, "head first"), (13, "margins"), (24, "row first"), (32, "margins"), (200, "row first")):
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


# ------------------------------------------------------------------------------------------------ split over the keys


def splits(kernel: flash_wmma.Kernel) -> bool:
    """Whether it splits keys over blocks."""
    return kernel.name.startswith("mma_")


def natural(dtype: torch.dtype, kernel: flash_wmma.Kernel) -> bool:
    """Whether the kernel reads that type unconverted: a cache that is converted is not split."""
    return dtype == torch.float16 or (dtype == torch.bfloat16 and kernel.name == "mma_sm80")


def multiprocessors(kernel: flash_wmma.Kernel, *counts: int) -> list[int]:
    """Numbers of multiprocessors to emulate; a GPU has its own."""
    return list(counts) if emulated(kernel) else [0]


def on(sm_count: int) -> contextlib.AbstractContextManager[Any]:
    return flash_wmma.emulator.settings(sm_count=sm_count) if sm_count else contextlib.nullcontext()


def test_blocks_of_a_t4() -> None:
    """Two blocks of 32 KiB each fill the 64 KiB of a Turing multiprocessor, which reserves none of them."""
    q, cache = torch.randn(1, 1, 1, 64).half(), torch.randn(1, 1, 8192, 64).half()
    with _runtime.alone(), flash_wmma.emulator.settings(counters=True, arch=75, sm_count=4):
        _runtime.take_profile()
        forward_cached(q, cache, cache, 8192, kernel="mma_sm75")
        products, _ = json.loads(_runtime.take_profile())
    assert products["grid"] == [8, 1, 1]


EDGES = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300)


@needs(CACHE, splits, natural)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("n", "group"), [(1, 4), (3, 2), (5, 5), (40, 2)])
def test_splits(target: Target, n: int, group: int, packed: bool) -> None:
    """Blocks begin and end anywhere: within tiles of keys, between them, between sequences without keys."""
    cache = paged(target, EDGES, 16)
    q = queries(target, len(EDGES), 2 * group, n, 64)
    for sm_count in multiprocessors(target[0], 1, 5, 23):
        with on(sm_count):
            if packed:
                rows = q.transpose(1, 2).flatten(0, 1)
                cu = int32([i * n for i in range(len(EDGES) + 1)], target[0].device)
                out, lse = run(target, rows, cache, causal=True, cu_seqlens_q=cu, max_seqlen_q=n)
                lse = lse.unflatten(1, (len(EDGES), n)).transpose(0, 1).contiguous()
                result = out.unflatten(0, (len(EDGES), n)).transpose(1, 2).contiguous(), lse
            else:
                result = run(target, q, cache, causal=True)
        check_each(target, q, cache, result, CAUSAL)


@needs(CACHE, splits, natural)
@pytest.mark.parametrize("size", [7, 16])
@pytest.mark.parametrize("d", [32, 96, 128, 192, 256])
def test_splits_of_every_head_dim(target: Target, d: int, size: int) -> None:
    """With few rows a key (one tile shape), with some and with many (others). A warp copies pages of 16 rows whole."""
    cache = paged(target, (150, 3, 260), size, heads=1, d=d)
    for heads in (3, 20, 40):
        q = queries(target, 3, heads, 1, d)
        for sm_count in multiprocessors(target[0], 3):
            with on(sm_count):
                check_each(target, q, cache, run(target, q, cache))


@pytest.mark.parametrize(("heads", "kib"), [(20, 64), (40, 80)])
def test_tiles_of_an_a100(heads: int, kib: int) -> None:
    """Its multiprocessor does not hold two blocks with an H200's tiles for more than 16 rows. Its own have half as many
    keys: as many as 32 rows, so that Q has no place of its own, and fewer than 64."""
    (kernel,) = (kernel for kernel in flash_wmma.kernels() if kernel.name == "mma_sm80")
    cpu = dataclasses.replace(kernel, device="cpu"), torch.float16
    cache = paged(cpu, (150, 3, 260), 16, heads=1, d=128)
    q = queries(cpu, 3, heads, 1, 128)
    sizes = []
    for arch in (80, 90):
        with _runtime.alone(), flash_wmma.emulator.settings(counters=True, arch=arch, sm_count=3):
            _runtime.take_profile()
            result = run(cpu, q, cache)
            sizes.append(json.loads(_runtime.take_profile())[0]["smem_bytes"])
        check_each(cpu, q, cache, result)
    assert sizes == [kib * 1024, 96 * 1024]


@needs(CACHE, splits, natural)
def test_one_long_sequence_among_many(target: Target) -> None:
    """More sequences than a warp has lanes, one of which has most of the keys."""
    lengths = (*range(20), 900, *range(20))
    cache = paged(target, lengths, 16, heads=1)
    q = queries(target, len(lengths), 2, 1, 64)
    for sm_count in multiprocessors(target[0], 2, 9):
        with on(sm_count):
            check_each(target, q, cache, run(target, q, cache))


@needs(CACHE, splits, natural)
@pytest.mark.parametrize("empty", [1, 9])
def test_many_parts_of_a_row(target: Target, empty: int) -> None:
    """Lanes that share a row's parts, and, beside many empty sequences, one that reads more than it can at once. Some
    parts have no visible key; one row's keys are all NaN."""
    cache = paged(target, (1800, *[0] * empty), 16, heads=1, d=128)
    q = queries(target, 1 + empty, 5, 1, 128)
    q[0, 4] = math.nan
    for sm_count in multiprocessors(target[0], 17):
        with on(sm_count):
            out, lse = run(target, q, cache, window=(1500, 0), causal=True)
            check_each(target, q[:, :4], cache, (out[:, :4], lse[:, :4]), Mask("bottom_right", (1500, 0)))
            assert out[0, 4].isnan().all() and lse[0, 4].isnan().all()


@needs(CACHE, splits, natural)
@pytest.mark.parametrize("window", [(30, 0), (100, 0), (0, 0)])
def test_splits_with_a_window(target: Target, window: tuple[int, int]) -> None:
    """Rows of a part that see none of its keys have weight 0."""
    cache = paged(target, EDGES, 16)
    q = queries(target, len(EDGES), 4, 70, 64)
    for sm_count in multiprocessors(target[0], 5):
        with on(sm_count):
            result = run(target, q, cache, window=window, causal=True)
        check_each(target, q, cache, result, Mask("bottom_right", window))


def write_late(t: Tensor, before: Tensor) -> None:
    """What ``t`` holds comes from the grid before the next, which has not written it yet: ``before`` is there."""
    values = bits(t)
    t.copy_(before)
    storage = t.untyped_storage()
    late = _runtime.emulator().flash_wmma_emulator_write_late
    late(*(ctypes.c_void_p(x) for x in (storage.data_ptr(), values.data_ptr())), ctypes.c_size_t(values.numel()))


LENGTH_TENSORS = ("seqlens", "cache_leftpad", "cu_seqlens_q")
LATE = [(what, 5) for what in ("q", "k", "v", "table")] + [(what, n) for what in LENGTH_TENSORS for n in (5, 40, 70)]


@needs(CACHE, splits, natural)
@pytest.mark.parametrize(("what", "sequences"), LATE)
def test_the_grid_before_writes_late(target: Target, what: str, sequences: int) -> None:
    """A block plans beside the grid before. It has one, two or three sequences a lane to look at again.

    In the emulator, on a machine with a GPU too: no grid of torch's writes so late."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    target = dataclasses.replace(target[0], device="cpu"), target[1]
    cache = beyond_l2(paged(target, tuple(300 + 37 * i % 150 for i in range(sequences)), 16, heads=1))
    q, cu = packed_queries(target, tuple(1 + i % 2 for i in range(sequences)), 2, 64, extra=0)
    given = {"cu_seqlens_q": cu, "max_seqlen_q": 2, "cache_leftpad": int32([i % 7 for i in range(sequences)])}
    given |= {"block_table": cache.table, "causal": True, "kernel": target[0].name, "return_lse": True}
    t = ({"q": q} | cache._asdict() | given)[what]
    of_lengths = what in LENGTH_TENSORS
    for changed in (0, 1, sequences - 1) if of_lengths else (0,):
        before = t.clone()
        if what == "seqlens":  # a single one changes
            before[changed] = 0
        elif of_lengths:
            before[changed] += 40 if what == "cache_leftpad" else 1 if changed == 0 else -1
        else:
            before.fill_(math.nan if t.is_floating_point() else 0)
        with on(3):
            expected = forward_cached(q, cache.k, cache.v, cache.seqlens, **given)
            write_late(t, before)
            with poisoned_memory():
                result = forward_cached(q, cache.k, cache.v, cache.seqlens, **given)
        assert all(map(torch.equal, result, expected)), changed


@needs(CACHE, splits, natural)
@pytest.mark.parametrize(
    ("size", "n", "d", "dv"), [(16, 1, 64, 64), (7, 3, 96, 40), (256, 5, 128, 128), (16, 20, 64, 64), (1, 1, 256, 72)]
)
def test_more_than_l2_holds(target: Target, size: int, n: int, d: int, dv: int) -> None:
    """Blocks ask for their first rows ahead. The emulator looks whether they read what they ask for."""
    lengths = (*LENGTHS, 700)
    cache = beyond_l2(paged(target, lengths, size, d=d, dv=dv))
    q = queries(target, len(lengths), 4, n, d)
    for sm_count in multiprocessors(target[0], 2, 23):
        with on(sm_count):
            check_each(target, q, cache, run(target, q, cache, causal=True), CAUSAL)


@needs(CACHE, splits, natural)
@pytest.mark.parametrize("num_splits", [1, 2, 3, 100])
def test_num_splits(target: Target, num_splits: int) -> None:
    cache = paged(target, EDGES, 16)
    q = queries(target, len(EDGES), 4, 1, 64)
    results = []
    for sm_count in multiprocessors(target[0], 2, 23):
        with on(sm_count):
            results.append(run(target, q, cache, num_splits=num_splits))
        check_each(target, q, cache, results[-1])
    if num_splits == 1:
        assert all(torch.equal(x, y) for x, y in zip(results[0], results[-1], strict=True))


@needs(CACHE, splits, natural)
@pytest.mark.parametrize("n", [1, 20])
def test_batch_invariant(target: Target, n: int) -> None:
    """A sequence's bits do not depend on the others, on how many there are, nor on the multiprocessors."""
    lengths = (1200, 0, 513, 70, 512, 1025)
    cache = paged(target, lengths, 16, heads=1)
    q = queries(target, len(lengths), 2, n, 64)
    expected = run(target, q, cache, causal=True, batch_invariant=True)
    check_each(target, q, cache, expected, CAUSAL)
    cu = int32([i * n for i in range(len(lengths) + 1)], target[0].device)
    rows = q.transpose(1, 2).flatten(0, 1)
    out, _ = run(target, rows, cache, causal=True, batch_invariant=True, cu_seqlens_q=cu, max_seqlen_q=n)
    assert torch.equal(out.unflatten(0, (len(lengths), n)).transpose(1, 2), expected[0])
    some = torch.arange(len(lengths)) % 2 == 1  # have queries
    cu = int32([0, *(n * some).cumsum(0).tolist()], target[0].device)
    rows = q[some].transpose(1, 2).flatten(0, 1)
    out, _ = run(target, rows, cache, causal=True, batch_invariant=True, cu_seqlens_q=cu, max_seqlen_q=n)
    assert torch.equal(out.unflatten(0, (-1, n)).transpose(1, 2), expected[0][some])
    for sm_count in multiprocessors(target[0], 1, 11):
        with on(sm_count):
            again = run(target, q, cache, causal=True, batch_invariant=True)
            assert all(torch.equal(x, y) for x, y in zip(again, expected, strict=True))
            for part in (slice(0, 1), slice(2, 5), slice(5, 6)):
                some = cache._replace(table=cache.table[part], seqlens=cache.seqlens[part])
                alone = run(target, q[part], some, causal=True, batch_invariant=True)
                assert all(torch.equal(x, y[part]) for x, y in zip(alone, expected, strict=True)), part


@needs(CACHE, splits, natural)
def test_scores_far_apart_in_parts(target: Target) -> None:
    """The maxima of a row's parts differ by hundreds, and whole parts have weight 0."""
    kernel, dtype = target
    cache = paged(target, (500,), 16, heads=1)
    k = cache.ks[0]
    k[..., 0] = torch.arange(500, device=kernel.device).to(dtype) / 10  # rises by 50 within the keys
    for i in range(0, 500, 16):
        cache.k[cache.table[0, i // 16], :, : min(16, 500 - i)] = k[0, :, i : i + 16]
    q = queries(target, 1, 3, 1, 64)
    q[..., 0] = torch.tensor([40.0, -40.0, 0.0]).to(q)[:, None]
    for sm_count in multiprocessors(kernel, 2, 9):
        with on(sm_count):
            check_each(target, q, cache, run(target, q, cache))


@needs(CACHE)
def test_one_graph_serves_all_lengths(target: Target) -> None:
    """On a GPU every length from 0 to the capacity by the same captured graph; in the emulator some lengths."""
    kernel, _ = target
    held = 96
    cache = paged(target, (held, held), 16, heads=1, d=32)
    q = queries(target, 2, 3, 1, 32)
    seqlens = cache.seqlens.clone()
    given: dict[str, Any] = {"block_table": cache.table, "kernel": kernel.name}

    def step() -> Tensor:
        out = forward_cached(q, cache.k, cache.v, seqlens, **given)
        assert isinstance(out, Tensor)
        return out

    if kernel.device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
    for length in range(held + 1) if kernel.device == "cuda" or kernel.min_arch == 0 else (0, 1, 15, 16, 64, 65, 96):
        seqlens.copy_(int32([length, held - length]))
        if kernel.device == "cuda":
            graph.replay()
            out = captured
        else:
            out = step()
        for b, used in enumerate((length, held - length)):
            if used == 0:
                assert not out[b].any()
                continue
            expected = reference(kernel, q[b : b + 1], cache.ks[b][:, :, :used], cache.vs[b][:, :, :used], DENSE).out
            torch.testing.assert_close(out[b : b + 1].double(), expected.to(out.device), atol=0.02, rtol=0)


# ------------------------------------------------------------------------------------------------ appending, in place


def places(table: Tensor | None, size: int, b: int, i: int) -> tuple[int, int]:
    """Page and row of a sequence's row."""
    return (b, i) if table is None else (int(table[b, i // size]), i % size)


@pytest.mark.parametrize("where", appending.WHERE)
@pytest.mark.parametrize("layout", ["head first", "row first", "margins"])
@pytest.mark.parametrize("with_pages", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_append(where: str, layout: str, with_pages: bool, packed: bool) -> None:
    """Exactly the rows that have a place are written: not those behind the capacity, and none on a page that does not
    exist."""
    size, batch = (4, 5) if with_pages else (12, 5)
    table = int32([[7, 2, 9], [3, 0, 1], [4, 99, 5], [6, 8, -1], [10, 11, 12]]) if with_pages else None
    caches = [nan_pages(layout, 13, 2, size, d, torch.float32, "cpu").nan_to_num(0.5) for d in (8, 16)]
    expected = [t.clone() for t in caches]
    seqlens = [0, 11, 3, 6, 5]
    counts = [2, 2, 3, 0, 4] if packed else [3] * batch
    cu = [0, *torch.tensor(counts).cumsum(0).tolist()]
    news = [torch.randn(sum(counts) + packed, 2, d) for d in (8, 16)]
    for cache, new in zip(expected, news, strict=True):
        for b in range(batch):
            for t in range(counts[b]):
                i = seqlens[b] + t
                if i < 12 and 0 <= places(table, size, b, i)[0] < 13:
                    page, row = places(table, size, b, i)
                    cache[page, :, row] = new[cu[b] + t]
    given = [t if packed else t.unflatten(0, (batch, 3)).transpose(1, 2) for t in news]
    with appending.on(where) as device:
        caches = [like(t, device) for t in caches]
        given = [t.to(device) for t in given]
        before = [bits(t) for t in given]
        on_pages = None if table is None else table.to(device)
        ends = int32(cu, device) if packed else None
        append_kv(*caches, *given, int32(seqlens, device), block_table=on_pages, cu_seqlens_k=ends)
        for cache, right in zip(caches, expected, strict=True):
            assert torch.equal(cache.cpu(), right)
        assert all(torch.equal(bits(t), b) for t, b in zip(given, before, strict=True))
        with pytest.raises(
            ValueError, match=r"cache_seqlens: got 11 at 1 and \d new keys, allowed: at most the capacity, 12"
        ):
            lengths = int32(seqlens, device)
            append_kv(*caches, *given, lengths, block_table=on_pages, cu_seqlens_k=ends, validate=True)
        fits = int32([0, 1, 3, 6, 5], device)
        wrong = pytest.raises(ValueError, match=r"block_table: got 99 at \(2, 1\)")
        with wrong if with_pages else contextlib.nullcontext():
            append_kv(*caches, *given, fits, block_table=on_pages, cu_seqlens_k=ends, validate=True)


def like(t: Tensor, device: str) -> Tensor:
    """t on a device, with its strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)


@pytest.mark.parametrize("where", appending.WHERE)
def test_append_without_a_place_changes_nothing(where: str) -> None:
    with appending.on(where) as device:
        caches = [torch.randn(3, 2, 4, 8, device=device) for _ in range(2)]
        before = [t.clone() for t in caches]
        append_kv(*caches, *torch.randn(2, 3, 2, 1, 8, device=device), int32([4, 2**31 - 1, -1], device))
        assert all(torch.equal(t, b) for t, b in zip(caches, before, strict=True))
        append_kv(*caches, *torch.randn(2, 3, 2, 0, 8, device=device), int32([0, 0, 0], device))
        none = torch.zeros(2, 0, 2, 4, 8, device=device)
        append_kv(*none, *torch.randn(2, 0, 2, 1, 8, device=device), int32([], device))
        no_rows = torch.zeros(2, 3, 2, 0, 8, device=device)
        append_kv(*no_rows, *torch.randn(2, 3, 2, 1, 8, device=device), int32([0, 0, 0], device))
        no_pages = torch.zeros(2, 0, 2, 4, 8, device=device)
        none_held = torch.zeros(3, 0, dtype=torch.int32, device=device)
        append_kv(*caches, *torch.randn(2, 3, 2, 1, 8, device=device), int32([0, 0, 0], device), block_table=none_held)
        table = torch.zeros(3, 2, dtype=torch.int32, device=device)
        append_kv(*no_pages, *torch.randn(2, 3, 2, 1, 8, device=device), int32([0, 0, 0], device), block_table=table)
        assert all(torch.equal(t, b) for t, b in zip(caches, before, strict=True))


@pytest.mark.parametrize("where", appending.WHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_append_many(where: str, dtype: torch.dtype) -> None:
    """More tokens than blocks, as bits: NaN of any payload and infinities come through."""
    n, batch = 2100, 2
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    with appending.on(where) as device:
        new = torch.randint(-(2**15), 2**15, (2, batch, 1, n, 8), device=device).to(whole)
        caches = torch.zeros(2, batch, 1, n + 3, 8, dtype=whole, device=device)
        append_kv(*caches.view(dtype), *new.view(dtype), int32([1, 2], device))
        for b in range(batch):
            assert torch.equal(caches[:, b, :, b + 1 : n + b + 1], new[:, b])
            assert not caches[:, b, :, : b + 1].any()
            assert not caches[:, b, :, n + b + 1 :].any()


ROWS = {
    "whole": (32, 0, 16),
    "part": (32, 0, 8),
    "odd d": (27, 0, 13),
    "unaligned": (32, 1, 16),
    "odd pairs": (32, 0, 5),
    "many pairs": (160, 0, 72),
}
"""Head dim, elements before the first row, pairs."""


@pytest.mark.parametrize("where", appending.WHERE)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_append_rotated(where: str, rows: tuple[int, int, int], interleaved: bool, dtype: torch.dtype) -> None:
    """Rows of whole vectors and others; places beyond the tables take their last row; the new lengths."""
    d, offset, pairs = rows
    batch, heads, n, held = 3, 2, 2, 6
    starts, lengths = [0, 9, 3], [0, 2, 5]

    def numbers(*shape: int) -> Tensor:
        """With NaN around them."""
        memory = torch.full((math.prod(shape) + offset + 9,), math.nan).to(dtype)
        values = memory[offset : offset + math.prod(shape)].view(shape)
        return values.copy_(torch.randn(shape))

    q, k, v = numbers(batch, n, 3, d), numbers(batch, n, heads, d), numbers(batch, n, heads, d)
    angle = torch.rand(5, pairs) * 6
    cos, sin = numbers(5, pairs).copy_(angle.cos()), numbers(5, pairs).copy_(angle.sin())
    caches = torch.zeros(2, batch, heads, held, d, dtype=dtype)
    with appending.on(where) as device:
        on = caches.to(device)
        rotation = flash_wmma._append.Rotation(
            q.to(device).transpose(1, 2), None, cos.to(device), sin.to(device), int32(starts, device), True, interleaved
        )
        given = (like(t.transpose(1, 2), device) for t in (k, v))
        turned_q, seqlens = flash_wmma._append.append_kv(*on, *given, int32(lengths, device), None, None, rotation)
    assert seqlens.tolist() == [n + length for length in lengths]
    eps = torch.finfo(dtype).eps
    for b in range(batch):
        at = (starts[b] + torch.arange(n)).clamp_max(4)
        right_q, right_k = (
            torch.cat([turned(x[i][None], cos, sin, int(at[i]), interleaved) for i in range(n)]) for x in (q[b], k[b])
        )
        torch.testing.assert_close(turned_q[b].transpose(0, 1).cpu().double(), right_q, atol=4 * eps, rtol=4 * eps)
        for i in range(n):
            if lengths[b] + i < held:
                caches[0, b, :, lengths[b] + i], caches[1, b, :, lengths[b] + i] = right_k[i].to(dtype), v[b, i]
    torch.testing.assert_close(on[0].cpu(), caches[0], atol=8 * eps, rtol=8 * eps)
    assert torch.equal(on[1].cpu(), caches[1])


DEVICES = [where for where in appending.WHERE if where != "emulated"]


@pytest.mark.parametrize("device", DEVICES)
def test_append_is_seen_by_autograd(device: str) -> None:
    """What was computed from a cache before has no gradients any more: they would need its old values."""
    cache = torch.randn(2, 2, 4, 8, device=device, requires_grad=True)
    square = cache.square().sum()
    append_kv(cache, torch.zeros_like(cache), *torch.randn(2, 2, 2, 1, 8, device=device), int32([0, 3], device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("device", DEVICES)
def test_append_to_elements_apart(device: str) -> None:
    """A cache and new rows whose elements are not adjacent."""
    caches = torch.zeros(2, 3, 2, 16, 6, device=device).transpose(3, 4)
    new = torch.randn(2, 3, 2, 16, 1, device=device).transpose(3, 4)
    append_kv(*caches, *new, int32([0, 5, 3], device))
    for b, at in enumerate((0, 5, 3)):
        assert torch.equal(caches[:, b, :, at], new[:, b, :, 0])
    assert int(caches.count_nonzero()) == new.numel()


# ------------------------------------------------------------------------------ flash-attn's properties, written anew


def turned(x: Tensor, cos: Tensor, sin: Tensor, at: int, interleaved: bool, advance: bool = True) -> Tensor:
    """One sequence's x (n, H, d) rotated as complex numbers, in float64."""
    half = cos.shape[1]
    rows = at + torch.arange(x.shape[0]) * advance
    angle = torch.complex(cos.double(), sin.double())[rows][:, None]
    x = x.double()
    part = x[..., : 2 * half]
    pairs = part.unflatten(-1, (half, 2)) if interleaved else part.unflatten(-1, (2, half)).transpose(-1, -2)
    result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    result = result.flatten(-2) if interleaved else result.transpose(-1, -2).flatten(-2)
    return torch.cat((result, x[..., 2 * half :]), dim=-1)


def attention64(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """q (n, Hq, d), k and v (m, Hk, d) of one sequence in float64, aligned to the last key."""
    n, m = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
    scores = q.double().transpose(0, 1) @ k.mT / math.sqrt(q.shape[2])
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    distance = torch.arange(n)[:, None] + m - n - torch.arange(m)
    if options.get("alibi_slopes") is not None:
        scores = scores - options["alibi_slopes"].double()[:, None, None] * distance.abs()
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal") else right
    hidden = torch.zeros(n, m, dtype=torch.bool)
    hidden |= (distance > left) if left >= 0 else False
    hidden |= (-distance > right) if right >= 0 else False
    scores = scores.masked_fill(hidden, -math.inf)
    empty = scores.isneginf().all(dim=-1, keepdim=True) if m else torch.ones(1, n, 1, dtype=torch.bool)
    weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return (weights @ v).transpose(0, 1)


class KvCase(NamedTuple):
    """A case of test_with_kvcache."""

    size: int
    """Of pages; 0: none."""
    new: int
    queries: int
    heads: tuple[int, int]
    rotary: float
    """The part of d that is rotated."""
    interleaved: bool
    options: dict[str, Any]
    place: str
    """"entries": cache_batch_idx; "leftpad"; "int": the lengths are one number."""
    lengths: str
    """ "cache", or "rotary": the rotation has places of its own."""


def kv_cases() -> list[KvCase]:
    """Random ones, the same on each run."""
    rng = random.Random(3)
    cases = []
    for _ in range(48):
        size = rng.choice([0, 0, 1, 16, 7, 256])
        new = rng.choice([0, 1, 1, 5])
        window = rng.choice([(-1, -1), (-1, -1), (9, 0), (4, 6)])
        options: dict[str, Any] = {"causal": rng.random() < 0.6, "window_size": window}
        options |= rng.choice([{}, {"softcap": 4.0}, {"alibi": True}])
        place = rng.choice(["", "entries", "leftpad", "int"]) if size == 0 else rng.choice(["", "int"])
        rotary = rng.choice([0.0, 0.5, 1.0]) if new else 0.0
        heads = rng.choice([(6, 6), (6, 3), (6, 1)])
        lengths = rng.choice(["cache", "cache", "rotary"]) if rotary else "cache"
        queries_ = rng.choice([1, new or 1, 8])
        cases.append(KvCase(size, new, queries_, heads, rotary, rng.random() < 0.5, options, place, lengths))
    return cases


@pytest.mark.parametrize("where", appending.WHERE)
@pytest.mark.parametrize("case", kv_cases(), ids=lambda case: f"{case.size}-{case.new}-{case.queries}-{case.place}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_with_kvcache(where: str, case: KvCase, dtype: torch.dtype) -> None:
    """The cache is what it should be, bit for bit where nothing is rotated, and so is the result."""
    batch, d, held = 4, 32, 64
    heads_q, heads_k = case.heads
    rows = case.size or held
    pages = 2 * batch * -(-held // rows)
    q = torch.randn(batch, case.queries, heads_q, d).to(dtype)
    k, v = torch.randn(2, batch, case.new, heads_k, d).to(dtype) if case.new else (None, None)
    k_cache, v_cache = torch.randn(2, pages, rows, heads_k, d).to(dtype)
    seqlens = [20, 0, 37, held - case.new] if case.place != "int" else [13] * batch
    given: dict[str, Any] = {**case.options, "rotary_interleaved": case.interleaved}
    slopes = torch.rand(heads_q) if given.pop("alibi", False) else None
    given |= {"alibi_slopes": slopes, "cache_seqlens": 13 if case.place == "int" else int32(seqlens)}
    leftpad = [0] * batch
    table = torch.arange(pages)[:batch, None]
    if case.size:
        table = torch.randperm(pages)[: batch * -(-held // rows)].view(batch, -1)
        given["block_table"] = table.int()
    if case.place == "entries":
        table = torch.tensor([5, 1, 6, 2])[:, None]
        given["cache_batch_idx"] = table[:, 0].int()
    if case.place == "leftpad":
        leftpad = [5, 0, 36, 1]
        given["cache_leftpad"] = int32(leftpad)
    cos = sin = None
    starts = seqlens
    if case.rotary:
        angle = torch.rand(max(held, rows) + 8, int(case.rotary * d) // 2) * 2 * math.pi
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        given |= {"rotary_cos": cos, "rotary_sin": sin}
        if case.lengths == "rotary":
            starts = [3, 0, 40, 7]
            given["rotary_seqlens"] = int32(starts)
    right_k, right_v = k_cache.clone(), v_cache.clone()
    advance = case.options["causal"] or case.options["window_size"] != (-1, -1)
    expected = []
    for b in range(batch):
        own_q = q[b].double()
        if k is not None and v is not None:
            own_k = k[b].double()
            if cos is not None and sin is not None:
                own_k = turned(own_k, cos, sin, starts[b], case.interleaved)
                own_q = turned(own_q, cos, sin, starts[b], case.interleaved, advance)
            for i in range(case.new):
                page, row = places(table, rows, b, seqlens[b] + i)
                right_k[page, row], right_v[page, row] = own_k[i].to(dtype), v[b, i]
        end = seqlens[b] + case.new
        at = [places(table, rows, b, i) for i in range(leftpad[b], end)]
        keys, values = (torch.stack([t[place] for place in at]) if at else t[0, :0] for t in (right_k, right_v))
        expected.append(attention64(own_q.to(dtype), keys, values, **{**case.options, "alibi_slopes": slopes}))
    with appending.on(where) as device:
        q, k, v, k_cache, v_cache = (None if t is None else t.to(device) for t in (q, k, v, k_cache, v_cache))
        given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
        out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, return_softmax_lse=True, validate=True, **given)
    k_cache, v_cache, out = k_cache.cpu(), v_cache.cpu(), out.cpu()
    assert torch.equal(v_cache, right_v)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(k_cache, right_k, atol=8 * eps, rtol=0 if not case.rotary else 8 * eps)
    if not case.rotary:
        assert torch.equal(k_cache, right_k)
    assert out.shape == q.shape
    assert lse.shape == (batch, heads_q, case.queries)
    of_result = torch.finfo(torch.float16).eps if where == "cuda" else eps  # a kernel there converts fp32
    torch.testing.assert_close(out.double(), torch.stack(expected), atol=16 * of_result, rtol=0)


@pytest.mark.parametrize("where", appending.WHERE)
def test_with_kvcache_packed(where: str) -> None:
    """FlashAttention-3's cu_seqlens_q and cu_seqlens_k_new: each sequence as by itself."""
    with appending.on(where) as device:
        check_packed(device)


def check_packed(device: str) -> None:
    lengths, counts = [11, 0, 30], [2, 5, 1]
    cu = int32([0, 2, 7, 8], device)
    k_cache, v_cache = torch.randn(2, 12, 8, 2, 32, device=device)
    table = torch.randperm(12)[:12].view(3, 4).int().to(device)
    q, (k, v) = torch.randn(8, 4, 32, device=device), torch.randn(2, 8, 2, 32, device=device)
    angle = torch.rand(40, 16, device=device)
    shared: dict[str, Any] = {"causal": True, "rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    caches = k_cache.clone(), v_cache.clone()
    lens = {"cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": 5, "page_table": table}
    out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=int32(lengths, device), **lens, **shared)
    assert isinstance(out, Tensor)
    begin = 0
    for b, n in enumerate(counts):
        rows = slice(begin, begin + n)
        begin += n
        one = [t[rows][None] for t in (q, k, v)]
        expected = flash_attn_with_kvcache(
            one[0], k_cache, v_cache, *one[1:], cache_seqlens=lengths[b], block_table=table[b : b + 1], **shared
        )
        assert torch.equal(out[rows][None], expected)
    assert all(torch.equal(t, u) for t, u in zip(caches, (k_cache, v_cache), strict=True))


def test_with_kvcache_defaults() -> None:
    """Without cache_seqlens the whole cache is used; out is written and returned; num_splits changes nothing."""
    q, k_cache = torch.randn(2, 3, 4, 32), torch.randn(2, 50, 2, 32)
    expected = flash_attn_with_kvcache(q, k_cache, k_cache, cache_seqlens=50)
    assert torch.equal(flash_attn_with_kvcache(q, k_cache, k_cache), expected)
    assert torch.equal(flash_attn_with_kvcache(q, k_cache, k_cache, num_splits=5), expected)
    out = torch.full_like(q, math.nan)
    assert flash_attn_with_kvcache(q, k_cache, k_cache, out=out) is out
    assert torch.equal(out, expected)
    graded = q.clone().requires_grad_()
    result = flash_attn_with_kvcache(graded, k_cache, k_cache)
    assert isinstance(result, Tensor)
    assert not result.requires_grad


@pytest.mark.parametrize("size", [1, 16, 100])
@pytest.mark.parametrize("window", [(-1, -1), (10, 0)])
def test_varlen_with_pages(size: int, window: tuple[int, int]) -> None:
    """As if the pages were one packed tensor, bit for bit."""
    counts, lengths = [3, 1, 40, 0], [70, 0, 41, 5]
    q = torch.randn(sum(counts), 6, 32)
    k, v = torch.randn(2, sum(lengths), 2, 32)
    cu_q, cu_k = (int32([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (counts, lengths))
    runs = -(-70 // size)
    table = torch.randperm(4 * runs).view(4, runs).int()
    k_pages, v_pages = torch.full((2, 4 * runs, size, 2, 32), math.nan)
    for b, n in enumerate(lengths):
        for i in range(n):
            page, row = places(table, size, b, i)
            k_pages[page, row], v_pages[page, row] = k[cu_k[b] + i], v[cu_k[b] + i]
        table[b, -(-n // size) :] = 2**31 - 1
    given: dict[str, Any] = {"causal": True, "window_size": window, "return_attn_probs": True}
    expected = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 40, 70, **given)
    result = flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu_k, 40, 70, block_table=table, validate=True, **given)
    out = torch.empty_like(q)
    used = cu_k.diff()
    again = flash_attn_varlen_func(
        q, k_pages, v_pages, cu_q, None, 40, 70, block_table=table, seqused_k=used, out=out, **given
    )
    assert again[0] is out
    for a, b_, c in zip(expected, result, again, strict=True):
        assert torch.equal(a, b_)
        assert torch.equal(a, c)


# --------------------------------------------------------------------------------------------- a server, in miniature


@needs(CACHE)
def test_serving(target: Target, request: pytest.FixtureRequest) -> None:
    """Each step is checked for NaN, which are all that is not in use, and a sample against float64 (serving.py)."""
    kernel, dtype = target
    steps = 12 if emulated(kernel) else 10_000 if request.config.getoption("--part").of <= 2 else 300
    where = serving.Where(kernel.name, kernel.device, dtype, serving.tolerance(dtype, kernel.min_arch > 0))
    events = serving.simulate(where, steps, every=1 if emulated(kernel) else 10)
    assert emulated(kernel) or (events.forks > 5 and events.goes > 5)


# --------------------------------------------------------------------------------------------------------- bad input


def good() -> dict[str, Any]:
    return {
        "q": torch.randn(2, 4, 1, 16),
        "k_cache": torch.randn(6, 2, 8, 16),
        "v_cache": torch.randn(6, 2, 8, 16),
        "cache_seqlens": int32([3, 9]),
        "block_table": int32([[0, 1], [2, 3]]),
    }


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q": ({"q": 1}, TypeError, r"q: got int, allowed: torch\.Tensor"),
    "q rank": ({"q": torch.zeros(2, 4, 16)}, ValueError, r"q\.shape: got \(2, 4, 16\), allowed: \(B, H, N, d\)"),
    "q dtype": ({"q": torch.zeros(2, 4, 1, 16).double()}, ValueError, r"q\.dtype: got torch\.float64"),
    "cache rank": ({"k_cache": torch.zeros(2, 8, 16)}, ValueError, r"k_cache\.shape: got \(2, 8, 16\)"),
    "cache dtype": (
        {"v_cache": torch.zeros(6, 2, 8, 16).half()},
        ValueError,
        r"v_cache\.dtype: got torch\.float16, allowed: q's, torch\.float32",
    ),
    "cache head dim": ({"k_cache": torch.zeros(6, 2, 8, 24)}, ValueError, r"k_cache\.shape: .* the head dim of q, 16"),
    "caches differ": ({"v_cache": torch.zeros(6, 2, 7, 16)}, ValueError, r"v_cache\.shape: got \(6, 2, 7, 16\)"),
    "heads": ({"q": torch.zeros(2, 3, 1, 16)}, ValueError, r"q\.shape: .* a multiple of k_cache's, 2"),
    "lengths dtype": (
        {"cache_seqlens": torch.tensor([3, 9])},
        ValueError,
        r"cache_seqlens\.dtype: got torch\.int64, allowed: torch\.int32",
    ),
    "lengths shape": ({"cache_seqlens": int32([3])}, ValueError, r"cache_seqlens\.shape: got \(1,\), allowed: \(B,\)"),
    "lengths text": ({"cache_seqlens": "3"}, TypeError, r"cache_seqlens: got '3', allowed: an int or a tensor"),
    "lengths beyond": ({"cache_seqlens": 17}, ValueError, r"cache_seqlens: got 17, allowed: 0 to 16"),
    "lengths below": ({"cache_seqlens": -1}, ValueError, r"cache_seqlens: got -1, allowed: 0 to 16"),
    "table dtype": (
        {"block_table": torch.zeros(2, 2)},
        ValueError,
        r"block_table\.dtype: got torch\.float32, allowed: torch\.int32",
    ),
    "table shape": ({"block_table": int32([[0, 1]])}, ValueError, r"block_table\.shape: got \(1, 2\)"),
    "table rank": ({"block_table": int32([0, 1])}, ValueError, r"block_table\.shape: got \(2,\)"),
    "table device": (
        {"block_table": torch.zeros(2, 2, dtype=torch.int32, device="meta")},
        ValueError,
        r"block_table\.device: got meta",
    ),
    "two places": ({"cache_batch_idx": int32([0, 1])}, ValueError, r"cache_batch_idx: .* None if there is a block_tab"),
    "too few entries": (
        {"block_table": None, "q": torch.zeros(7, 4, 1, 16), "cache_seqlens": int32([0] * 7)},
        ValueError,
        r"k_cache\.shape: got \(6, 2, 8, 16\), allowed: at least 7 batch entries",
    ),
    "leftpad": ({"cache_leftpad": int32([0])}, ValueError, r"cache_leftpad\.shape: got \(1,\)"),
    "max_seqlen_q": ({"max_seqlen_q": 1}, ValueError, r"max_seqlen_q: got 1, allowed: None without cu_seqlens_q"),
    "causal": ({"causal": "top_left"}, ValueError, r"causal: got 'top_left', allowed: False, True, 'bottom_right'"),
    "math": ({"kernel": "math"}, ValueError, r"kernel: got 'math'"),
    "kernel without": (
        {"kernel": "simt_naive"},
        ValueError,
        r"kernel 'simt_naive' cannot run this: .* a key/value cache",
    ),
    "bias": ({"attn_bias": torch.zeros(1, 17)}, ValueError, r"attn_bias\.shape: got \(1, 17\), .* \(2, 4, 1, 16\)"),
    "grad": (
        {"q": torch.zeros(2, 4, 1, 16, requires_grad=True)},
        NotImplementedError,
        r"q: got a tensor that requires",
    ),
    "validate": ({"validate": 1}, TypeError, r"validate: got 1, allowed: a bool"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_bad_input(wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    changes, error, message = wrong
    call = good()
    forward_cached(**call)
    with pytest.raises(error, match=message):
        forward_cached(**call | changes)


PACKED_KEYS = {"cu_seqlens_q": [0, 1, 2], "cu_seqlens_k_new": [0, 1, 3]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_k_new": [0, 1, 9]}, r"cu_seqlens_k_new: got 9 last, allowed: at most the 3 rows of k"),
        ({"cu_seqlens_k_new": [1, 1, 3]}, r"cu_seqlens_k_new: got 1 at 0, allowed: 0 first"),
        ({"cu_seqlens_k_new": [0, 2, 1]}, r"cu_seqlens_k_new: got 2 at 1 and 1 at 2, allowed: no number below"),
        ({"rotary_seqlens": [50, 2]}, r"rotary_seqlens: got 50 at 0, allowed: 0 to 19, since rotary_cos has 20 rows"),
        ({"rotary_seqlens": [3, 19]}, r"rotary_seqlens: got 19 at 1, allowed: 0 to 18, since rotary_cos has 20 rows"),
        ({"rotary_seqlens": [-3, 2]}, r"rotary_seqlens: got -3 at 0, allowed: 0 to 19"),
        ({"cu_seqlens_q": [0, 30, 31]}, r"rotary_cos\.shape: got \(20, 4\), allowed: at least 30 rows"),
    ],
)
def test_validate_what_is_appended(changes: dict[str, Any], message: str) -> None:
    """What only the device knows of packed new keys, and of the rows of the rotary tables; unless it is validated it
    is clamped."""
    cu = {name: int32(ends) for name, ends in (PACKED_KEYS | changes).items()}
    tables = {"rotary_cos": torch.rand(20, 4), "rotary_sin": torch.rand(20, 4)} if "rotary" in message else {}
    caches, new = torch.zeros(2, 2, 20, 2, 16), torch.randn(2, 3, 2, 16)
    q = torch.randn(int(cu["cu_seqlens_q"][-1]), 4, 16)
    given = {"cache_seqlens": int32([0, 0]), "causal": True, "max_seqlen_q": 30, **tables}
    flash_attn_with_kvcache(q, *caches, *new, **given, **cu)
    before = caches.clone()
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(q, *caches, *new, **given, **cu, validate=True)
    assert torch.equal(caches, before)


WRONG_KV: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "v alone": ({"k": None}, TypeError, r"k: got None, allowed: both k and v"),
    "k heads": ({"k": torch.zeros(2, 1, 4, 16)}, ValueError, r"k\.shape: got \(2, 1, 4, 16\), allowed: heads"),
    "k dtype": ({"k": torch.zeros(2, 1, 2, 16).half()}, ValueError, r"k\.dtype: got torch\.float16"),
    "more keys than rows": (
        {"k": torch.zeros(2, 9, 2, 16), "v": torch.zeros(2, 9, 2, 16), "cache_seqlens": 0},
        ValueError,
        r"k: got 9 new keys, allowed: at most 8, which the cache holds",
    ),
    "no rank": ({"k": torch.zeros(16)}, ValueError, r"k\.shape: got \(16,\), allowed: \(B, N, H, d\)"),
    "no tensor": ({"k": [1]}, TypeError, r"k: got list, allowed: torch\.Tensor"),
    "cache dtype": (
        {name: torch.zeros(2, 8, 2, 16).bool() for name in ("k_cache", "v_cache")}
        | {name: torch.zeros(2, 1, 2, 16).bool() for name in "kv"}
        | {"rotary_cos": None, "rotary_sin": None},
        ValueError,
        r"k\.dtype: got torch\.bool",
    ),
    "v shape": ({"v": torch.zeros(2, 2, 2, 16)}, ValueError, r"v\.shape: "),
    "no lengths": ({"cache_seqlens": None}, TypeError, r"cache_seqlens: got None"),
    "no room": ({"cache_seqlens": 8}, ValueError, r"cache_seqlens: got 8, allowed: 0 to 7"),
    "one table": ({"rotary_sin": None}, TypeError, r"rotary_sin: got None, allowed: both tables"),
    "short table": (
        {"rotary_cos": torch.zeros(7, 4), "rotary_sin": torch.zeros(7, 4)},
        ValueError,
        r"rotary_cos\.shape: got \(7, 4\), allowed: at least 8 rows",
    ),
    "wide table": (
        {"rotary_cos": torch.zeros(8, 9), "rotary_sin": torch.zeros(8, 9)},
        ValueError,
        r"rotary_cos\.shape: got \(8, 9\)",
    ),
    "table dtype": (
        {"rotary_cos": torch.zeros(8, 4).half(), "rotary_sin": torch.zeros(8, 4)},
        ValueError,
        r"rotary_cos\.dtype: got torch\.float16",
    ),
    "rotary without k": ({"k": None, "v": None}, ValueError, r"rotary_cos: got a tensor, allowed: None unless k"),
    "num_splits": ({"num_splits": -1}, ValueError, r"num_splits: got -1, allowed: 0 or more"),
    "num_splits text": ({"num_splits": "2"}, TypeError, r"num_splits: got '2', allowed: an int"),
    "two tables": (
        {"page_table": int32([[0], [1]]), "block_table": int32([[0], [1]])},
        ValueError,
        r"page_table: got a tensor, allowed: None if there is a block_table",
    ),
    "out": ({"out": torch.zeros(2, 1, 4, 8)}, ValueError, r"out: got \(2, 1, 4, 8\)"),
    "q packed": ({"cu_seqlens_q": int32([0, 1, 2])}, ValueError, r"q\.shape: got \(2, 1, 4, 16\), allowed: \(total, H"),
    "q dtype": (
        {
            "q": torch.zeros(2, 1, 4, 16).half(),
            "rotary_cos": torch.ones(8, 4).half(),
            "rotary_sin": torch.ones(8, 4).half(),
        },
        ValueError,
        r"q\.dtype: got torch\.float16, allowed: k's, torch\.float32",
    ),
    "q head dim": ({"q": torch.zeros(2, 1, 4, 24)}, ValueError, r"q\.shape: got .* allowed: k's head dim, 16"),
}


@pytest.mark.parametrize("wrong", WRONG_KV.values(), ids=WRONG_KV)
def test_bad_input_with_kvcache(wrong: tuple[dict[str, Any], type[Exception], str]) -> None:
    changes, error, message = wrong
    call = {
        "q": torch.randn(2, 1, 4, 16),
        "k_cache": torch.randn(2, 8, 2, 16),
        "v_cache": torch.randn(2, 8, 2, 16),
        "k": torch.randn(2, 1, 2, 16),
        "v": torch.randn(2, 1, 2, 16),
        "rotary_cos": torch.ones(8, 4),
        "rotary_sin": torch.zeros(8, 4),
        "cache_seqlens": 3,
    }
    flash_attn_with_kvcache(**call)
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**call | changes)


# ------------------------------------------------------------------------------------------------------- torch's tools


def test_opcheck() -> None:
    call = good()
    forward = torch.ops.flash_wmma.forward_cached.default
    tensors = call["q"], call["k_cache"], call["v_cache"], call["cache_seqlens"]
    torch.library.opcheck(forward, (*tensors, call["block_table"], None, None, 0))
    torch.library.opcheck(forward, (*tensors, None, int32([1, 0]), None, 0), {"window_right": 0, "out_bnhd": True})
    packed = torch.randn(5, 4, 16), *tensors[1:]
    torch.library.opcheck(forward, (*packed, call["block_table"], None, int32([0, 2, 5]), 3))
    append = torch.ops.flash_wmma.append_kv.default
    new = torch.randn(2, 2, 2, 3, 16)
    caches = call["k_cache"], call["v_cache"]
    torch.library.opcheck(append, (*caches, *new, call["cache_seqlens"], call["block_table"], None))
    torch.library.opcheck(append, (*caches, *torch.randn(2, 5, 2, 16), int32([0, 4]), None, int32([0, 2, 5])))
    angle = torch.randn(2, 16, 4)
    torch.library.opcheck(
        append, (*caches, *new, call["cache_seqlens"], call["block_table"], None, call["q"], None, *angle)
    )
    packed_q = torch.randn(5, 4, 16), int32([0, 1, 5])
    torch.library.opcheck(append, (*caches, *new, int32([0, 4]), None, None, *packed_q, *angle, int32([1, 2]), True))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_step_of_any_batch(dynamic: bool | None) -> None:
    """A second batch size makes the first one a symbol."""

    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, seqlens: Tensor) -> Tensor:
        out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=seqlens, causal=True)
        assert isinstance(out, Tensor)
        return out

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in (2, 3, 5):
        caches, (k, v) = torch.randn(2, batch, 20, 2, 16), torch.randn(2, batch, 1, 2, 16)
        q, seqlens, again = torch.randn(batch, 1, 4, 16), int32(range(batch)), caches.clone()
        assert torch.equal(compiled(q, *caches, k, v, seqlens), step(q, *again, k, v, seqlens))
        assert torch.equal(caches, again)


def test_compiled_step() -> None:
    """A decode step that rotates, appends in place and attends is one graph, for all lengths."""

    def step(q: Tensor, k: Tensor, v: Tensor, caches: Tensor, seqlens: Tensor) -> Tensor:
        out = flash_attn_with_kvcache(
            q, caches[0], caches[1], k, v, cos, sin, cache_seqlens=seqlens, block_table=table, causal=True
        )
        assert isinstance(out, Tensor)
        return out

    angle = torch.rand(32, 8)
    cos, sin = angle.cos(), angle.sin()
    table = torch.randperm(8).view(2, 4).int()
    caches = torch.randn(2, 8, 8, 2, 16)
    again = caches.clone()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n in range(4):
        q, k, v = torch.randn(2, 1, 4, 16), *torch.randn(2, 2, 1, 2, 16)
        seqlens = int32([n, 20 + n])
        assert torch.equal(compiled(q, k, v, caches, seqlens), step(q, k, v, again, seqlens))
        assert torch.equal(caches, again)
