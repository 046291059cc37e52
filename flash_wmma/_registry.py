"""The answers of the library's registry of kernels (csrc/registry.h): names, and the kernel for a problem."""

from __future__ import annotations

import functools
from dataclasses import astuple
from typing import Any, NamedTuple

from ._device import DeviceFacts
from ._native import native
from ._sources import Direction, kernel_sources


@functools.cache
def _built(direction: Direction) -> frozenset[str]:
    return frozenset(facts["name"] for facts in native().kernels(direction))


def kernel_names(direction: Direction) -> tuple[str, ...]:
    """The names of that direction's kernels; nothing is compiled to find them. Empty without ``_C``, since only ``_C``
    knows what is built."""
    try:
        return tuple(sorted(_built(direction).union(kernel_sources(direction))))
    except ImportError:
        return ()


# As torch.compiler.assume_constant_result does, which would import torch._dynamo: a constant in traced calls.
kernel_names._dynamo_marked_constant = True  # type: ignore[attr-defined]


class BiasFacts(NamedTuple):
    """What the choice depends on of an additive bias or a boolean mask."""

    dtype: str
    """``"bool"``, ``"float32"`` or that of q."""
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    """(b, h, i, j), in elements; 0 where the bias is broadcast."""
    misalignment: int = 0
    """Bytes from a multiple of 16 to its first element."""


class Problem(NamedTuple):
    """What the choice of a kernel depends on, beside the device."""

    dtype: str
    """``"float16"``."""
    sizes: dict[str, int]
    """Batch, heads, lengths and head dims, by their names in csrc/torch/module.cpp, which reads these fields."""
    band: tuple[int, int, bool] = (-1, -1, False)
    """(window_left, window_right, bottom_right) of the ops."""
    packed: bool = False
    attn_bias: BiasFacts | None = None
    alibi_slopes: bool = False
    key_ranges: bool = False
    softcap: float = 0.0
    sinks: bool = False
    dropout: bool = False
    batch_invariant: bool = False


def choose(kernel: str, problem: Problem, device: DeviceFacts, statistics: tuple[str, ...] = ()) -> dict[str, Any]:
    """If ``kernel`` is asked for: which forward kernel runs (``"kernel"``, ``None`` if none can), its tile
    (``"instance"``), why the others do not (``"reasons"``), and whether it tells statistics (``"tells"``) and has
    tangents in one pass (``"tangents"``).

    ``statistics``: the names of those that the call asks for, which may take a tile of their own."""
    answer: dict[str, Any] = native().explain(kernel, problem, astuple(device), set(statistics))
    return answer


def choose_backward(
    kernel: str,
    problem: Problem,
    device: DeviceFacts,
    *,
    bias_strides: tuple[int, ...] | None,
    deterministic: bool,
    slopes_gradient: bool = False,
    forward_kernel: str = "auto",
) -> dict[str, Any]:
    """The same as :func:`choose`, for the gradients.

    Args:
        bias_strides: strides (b, h, i, j) of the bias's gradient, as far as they matter: 0 where the bias is broadcast.
            ``None``: that gradient is not asked for.
        slopes_gradient: whether that of the slopes is.
        forward_kernel: the ``kernel`` that forward was called with.
    """
    answer: dict[str, Any] = native().explain_backward(
        kernel,
        problem,
        astuple(device),
        dbias_strides=bias_strides,
        dslopes=slopes_gradient,
        deterministic=deterministic,
        forward_kernel=forward_kernel,
    )
    return answer
