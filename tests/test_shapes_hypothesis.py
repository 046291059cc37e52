"""Shapes, strides and masks as hypothesis finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import LAYOUTS, Mask, check, early_rung, emulated, few, normal, reference, run

import flash_wmma

BOUNDS = st.none() | st.integers(-1, 80)


def test_any_shape(target: tuple[flash_wmma.Kernel, torch.dtype]) -> None:
    kernel, dtype = target
    examples = 60 if not emulated(kernel) else 10 if early_rung(kernel.name) else 40

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(data=st.data())
    def any_shape(data: st.DataObject) -> None:
        check_shape(kernel, dtype, data.draw)

    any_shape()


def check_shape(kernel: flash_wmma.Kernel, dtype: torch.dtype, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
    """One that `draw` draws."""
    most, longest = (2, 100) if emulated(kernel) else (3, 150)
    batch, heads_k, group = draw(st.integers(1, most)), draw(st.integers(1, most)), draw(st.integers(1, few(kernel, 4)))
    nq, nk = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    head_dim = st.integers(*kernel.head_dims)
    d = draw(head_dim)
    dv = draw(head_dim) if "d_v != d" in kernel.features else d
    causal = draw(st.sampled_from([False, "top_left", "bottom_right"])) if "causal" in kernel.features else False
    window = draw(st.none() | st.tuples(BOUNDS, BOUNDS)) if "window" in kernel.features else None
    scale = draw(st.none() | st.floats(-2, 2, width=16))
    layouts = st.sampled_from(LAYOUTS)
    q = normal((batch, heads_k * group, nq, d), draw(layouts), dtype, kernel.device, seed=1)
    k = normal((batch, heads_k, nk, d), draw(layouts), dtype, kernel.device, seed=2)
    v = normal((batch, heads_k, nk, dv), draw(layouts), dtype, kernel.device, seed=3)
    mask = Mask(causal, window)
    check(*run(kernel, q, k, v, mask, scale), reference(kernel, q, k, v, mask, scale))
