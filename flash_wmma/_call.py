"""One call of attention as one value: every argument but q, k and v.

The public functions make a :class:`Call` with :func:`call_of`. Checks, autocast, the ops, their gradients and plain
torch ops take it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ._errors import refuse

Causal = bool | Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]

_new = tuple.__new__
_BOTTOM_RIGHT: dict[Causal, bool] = {False: False, True: False, "top_left": False, "bottom_right": True}


class Lengths(NamedTuple):
    """Where packed sequences lie: the arguments of the op ``forward_varlen`` between v and scale."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int


class Cache(NamedTuple):
    """Where sequences lie in a key/value cache: the arguments of the op ``forward_cached`` after v_cache."""

    cache_seqlens: Tensor
    page_table: Tensor | None
    cache_leftpad: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int
    num_splits: int = 0
    """About so many parts of a sequence's keys; 0: the kernel decides."""


class Call(NamedTuple):
    """What a call asks for. The fields up to kernel_name are the arguments of the op ``forward`` after v, in the order
    of its schema (csrc/torch/ops.cpp). Without out_bnhd they are the rest of ``forward_varlen``'s."""

    scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    bottom_right: bool = False
    out_bnhd: bool = False
    """The caller's tensors are (B, N, H, d), and so is out in memory."""
    attn_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_ranges: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    rng_state: Tensor | None = None
    dropout_p: float = 0.0
    dropout_origin: Tensor | None = None
    """(entry, head, query, key) of the first weight in the whole whose mask the call has part of, int64 on the CPU; of
    queries and keys multiples of 16."""
    num_splits: int = 1
    batch_invariant: bool = False
    kernel_name: str = "auto"

    backward_kernel: str = "auto"
    deterministic: bool | None = None
    lengths: Lengths | None = None
    """For packed sequences."""
    validate: bool = False
    """Check the values of the lengths."""
    only_band: bool = False
    """The call asks only for a scale, a band and the layout of out, as far as :func:`call_of` knows."""

    @property
    def band(self) -> tuple[int, int, bool]:
        """Which keys a query sees."""
        return self.window_left, self.window_right, self.bottom_right

    def split(self) -> tuple[Call, tuple[Tensor | None, ...]]:
        """The call without its tensors, and the tensors, which autograd saves. For a call without: itself and ()."""
        lengths = self.lengths
        tensors = [self.attn_bias, self.alibi_slopes, self.key_ranges, self.sinks, self.rng_state]
        if lengths is None and all(t is None for t in tensors):
            return self, ()
        if lengths is not None:
            tensors += [lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_k]
        return self.joined([None] * len(tensors)), tuple(tensors)

    def joined(self, tensors: Sequence[Any]) -> Call:
        """The call with the tensors that :meth:`split` gave."""
        if not tensors:
            return self
        attn_bias, alibi_slopes, key_ranges, sinks, rng_state, *of_lengths = tensors
        lengths = self.lengths
        if lengths is not None:
            cu_seqlens_q, cu_seqlens_k, seqused_k = of_lengths
            lengths = lengths._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
        return self._replace(
            attn_bias=attn_bias,
            alibi_slopes=alibi_slopes,
            key_ranges=key_ranges,
            sinks=sinks,
            rng_state=rng_state,
            lengths=lengths,
        )


PLAIN = Call(only_band=True)
"""The call with only q, k and v. Functions that are given it may skip their search for more."""


def call_of(
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    kernel: str = "auto",
    batch_invariant: bool = False,
    backward_kernel: str = "auto",
    deterministic: bool | None = None,
    key_ranges: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    bottom_right: bool = False,
    out_bnhd: bool = False,
    lengths: Lengths | None = None,
    validate: bool = False,
) -> Call:
    """The call of these arguments of ``forward`` and ``forward_varlen``. With ``bottom_right`` a window is aligned to
    the last key even without ``causal``. Only causal, window and deterministic are checked here, but fully.

    Raises:
        TypeError, ValueError: causal, window or deterministic.
    """
    if deterministic is not None and deterministic is not True and deterministic is not False:
        refuse("deterministic", repr(deterministic), "None or a bool", TypeError)
    try:
        only_band = (
            attn_bias is None
            and alibi_slopes is None
            and key_ranges is None
            and sinks is None
            and lengths is None
            and softcap == 0
            and dropout_p == 0
            and kernel == backward_kernel == "auto"
            and not batch_invariant
        )
    except (RuntimeError, TypeError, ValueError):  # for example of a tensor: the checks will name it
        only_band = False
    left = right = -1
    if causal is False and window is None:
        if only_band and scale is None and deterministic is None and not (bottom_right or out_bnhd):
            return PLAIN
    elif causal is True and window is None:
        right = 0
    else:
        left, right, aligned = band(causal, window)
        bottom_right = bottom_right or aligned
    if sinks is not None and getattr(sinks, "dtype", None) in (torch.float16, torch.bfloat16):
        sinks = sinks.float()  # which is what the ops take
    dropout_origin, num_splits = None, 1
    return _new(  # Call(...) takes twice the time
        Call,
        (
            scale,
            left,
            right,
            bottom_right,
            out_bnhd,
            attn_bias,
            alibi_slopes,
            key_ranges,
            softcap,
            sinks,
            rng_state,
            dropout_p,
            dropout_origin,
            num_splits,
            batch_invariant,
            kernel,
            backward_kernel,
            deterministic,
            lengths,
            validate,
            only_band,
        ),
    )


def band(causal: Any, window: Any) -> tuple[int, int, bool]:
    """The ops' (window_left, window_right, bottom_right); a negative bound excludes nothing.

    Raises:
        TypeError, ValueError: causal or window.
    """
    try:
        bottom_right = _BOTTOM_RIGHT[causal]
    except (KeyError, TypeError):
        error = ValueError if isinstance(causal, int | float | str) else TypeError
        refuse("causal", repr(causal), "False, True, 'top_left', 'bottom_right'", error)
    if window is None:
        return -1, 0 if causal else -1, bottom_right
    allowed = "None or a pair (left, right) of int or None"
    if not isinstance(window, tuple | list):
        refuse("window", repr(window), allowed, TypeError)
    if len(window) != 2:
        refuse("window", repr(window), allowed)
    bounds: list[Any] = []
    for bound in window:
        if bound is not None and not isinstance(bound, torch.SymInt):
            try:
                bound = None if isinstance(bound, bool) else operator.index(bound)
            except (TypeError, RuntimeError):  # a RuntimeError of a tensor that is no number
                bound = None
            if bound is None:
                refuse("window", repr(window), allowed, TypeError)
            if not -(2**63) <= bound < 2**63:
                refuse("window", repr(window), allowed + ", below 2**63")
        bounds.append(bound)
    left, right = bounds
    return -1 if left is None else left, 0 if causal else -1 if right is None else right, bottom_right
