"""Where the tests run the op append_kv: on a CPU, and its kernel on a GPU or else in the emulator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import torch
from conftest import on_gpu
from torch import Tensor

from flash_wmma import _append
from flash_wmma._sources import CSRC
from flash_wmma.emulator import Program

WHERE = ("cpu", "cuda" if on_gpu() else "emulated")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""In the order of ``DType`` in csrc/attention.h."""


@contextlib.contextmanager
def on(where: str) -> Iterator[str]:
    """The device of the tensors; inside, append_kv on it is what ``where`` says."""
    if where != "emulated":
        yield where
        return
    with mock.patch.object(_append, "append_kv", emulated):
        yield "cpu"


@functools.cache
def _program() -> Program:
    return Program(CSRC / "cache" / "append_emulated.cpp")


def emulated(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rotation: _append.Rotation | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``_append.append_kv``, by csrc/cache/append.cu, checked."""
    nothing = torch.empty(0)
    batch = cache_seqlens.shape[0]

    def tokens(t: Tensor, packed: bool) -> tuple[int, int]:
        return (t.shape[0], 0) if packed else (t.shape[0] * t.shape[2], t.shape[2])

    def strides(t: Tensor) -> tuple[int, int, int]:
        assert t.shape[-1] <= 1 or t.stride(-1) == 1
        return (t.stride(0), t.stride(1), t.stride(2)) if t.dim() == 4 else (0, t.stride(1), t.stride(0))

    q = torch.empty(0, 0, 0) if rotation is None else rotation.q
    turned = torch.empty_like(q.transpose(1, 2) if q.dim() == 4 else q, memory_format=torch.contiguous_format)
    turned = turned.transpose(1, 2) if q.dim() == 4 else turned
    seqlens = torch.empty_like(cache_seqlens)
    cos, sin, places = nothing, nothing, cache_seqlens
    queries, cu_seqlens_q, options = (0, 0), None, (0, 0)
    if rotation is not None:
        cos, sin, cu_seqlens_q = rotation.cos.contiguous(), rotation.sin.contiguous(), rotation.cu_seqlens_q
        places = cache_seqlens if rotation.seqlens is None else rotation.seqlens
        queries = tokens(q, cu_seqlens_q is not None)
        options = (int(rotation.interleaved), int(rotation.queries_advance))
    table = (0, -1) if page_table is None else page_table.shape
    sizes = (batch, q.shape[1], k_cache.shape[1], k_cache.shape[3], v_cache.shape[3])
    sizes = (*sizes, *queries, *tokens(k, cu_seqlens_k is not None), table[1], k_cache.shape[0], k_cache.shape[2])
    sizes = (*sizes, *(cos.shape if rotation else (0, 0)), *options)
    everything = (q, turned, k, v, k_cache, v_cache)
    numbers = (page_table, cu_seqlens_q, cu_seqlens_k)
    if batch:
        _program().call(
            "append",
            DTYPES.index(k.dtype),
            torch.tensor(sizes),
            torch.tensor([strides(t) for t in everything]),
            *everything,
            cache_seqlens,
            *(torch.empty(0, dtype=torch.int32) if t is None else t.contiguous() for t in numbers),
            cos,
            sin,
            places,
            seqlens,
        )
    return nothing if rotation is None else turned, seqlens
