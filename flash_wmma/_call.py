"""One call of attention as one value: every argument but q, k and v, as the caller gave it.

The public functions make a :class:`Call`. Checks, autocast, the ops, their gradients and plain torch ops take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

Causal = bool | Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]

_BOTTOM_RIGHT: dict[Causal, bool] = {False: False, True: False, "top_left": False, "bottom_right": True}


def band(causal: Causal, window: Window | None) -> tuple[int, int, bool]:
    """The ops' (window_left, window_right, bottom_right); a negative bound excludes nothing."""
    if window is None:
        left = right = None
    else:
        if not isinstance(window, tuple | list) or any(isinstance(bound, bool) for bound in window):
            raise TypeError("window")
        left, right = window
    bottom_right = _BOTTOM_RIGHT[causal]
    return -1 if left is None else left, 0 if causal else -1 if right is None else right, bottom_right


class Lengths(NamedTuple):
    """Where packed sequences lie: arguments of ``forward_varlen``."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int


class Call(NamedTuple):
    """The arguments of ``forward``, and what its relatives add."""

    causal: Causal = False
    scale: float | None = None
    window: Window | None = None
    attn_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softcap: float = 0.0
    kernel: str = "auto"
    batch_invariant: bool = False
    backward_kernel: str = "auto"
    deterministic: bool | None = None
    bottom_right: bool = False
    """A window is aligned to the last key, whatever ``causal`` says."""
    out_bnhd: bool = False
    """The caller's tensors are (B, N, H, d), and so is out in memory."""
    lengths: Lengths | None = None
    """Of packed sequences."""
    validate: bool = False
    """Look at what the lengths are."""

    @property
    def band(self) -> tuple[int, int, bool]:
        """The ops' (window_left, window_right, bottom_right)."""
        left, right, bottom_right = band(self.causal, self.window)
        return left, right, bottom_right or self.bottom_right

    @property
    def only_band(self) -> bool:
        """Whether the call asks for nothing but a scale and a band, of sequences that are not packed."""
        return (
            self.attn_bias is None
            and self.alibi_slopes is None
            and self.lengths is None
            and self.softcap == 0
            and self.kernel == "auto"
            and not self.batch_invariant
        )

    def split(self) -> tuple[Call, tuple[Tensor | None, ...]]:
        """The call without its tensors, and these, which autograd saves. Of a call that has none: itself and ()."""
        lengths = self.lengths
        if self.attn_bias is None and self.alibi_slopes is None and lengths is None:
            return self, ()
        tensors = [self.attn_bias, self.alibi_slopes]
        if lengths is not None:
            tensors += [lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_k]
        return self.joined([None] * len(tensors)), tuple(tensors)

    def joined(self, tensors: Sequence[Any]) -> Call:
        """The call with the tensors that :meth:`split` gave."""
        if not tensors:
            return self
        attn_bias, alibi_slopes, *of_lengths = tensors
        lengths = self.lengths
        if lengths is not None:
            cu_seqlens_q, cu_seqlens_k, seqused_k = of_lengths
            lengths = lengths._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
        return self._replace(attn_bias=attn_bias, alibi_slopes=alibi_slopes, lengths=lengths)

    # What the ops take, in the order of their schemas (csrc/ops.cpp). Every argument that is handed to an op costs host
    # time: those at the end that have their defaults are left out.

    def forward_arguments(self) -> tuple[Any, ...]:
        """Of ``forward``, or of ``forward_varlen``, after v."""
        if self is PLAIN:
            return ()
        begin: tuple[Any, ...] = (self.scale, *self.band)
        lengths = self.lengths
        if lengths is None:
            begin = (*begin, self.out_bnhd)
            if self.only_band:
                return begin
        else:
            page_table = None
            tables = (lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_k, page_table)
            begin = (*tables, lengths.max_seqlen_q, lengths.max_seqlen_k, *begin)
        sinks = rng_state = None
        dropout_p, num_splits = 0.0, 1
        return (
            *begin,
            self.attn_bias,
            self.alibi_slopes,
            self.softcap,
            sinks,
            rng_state,
            dropout_p,
            num_splits,
            self.batch_invariant,
            self.kernel,
        )

    def backward_arguments(self, bias_grad: bool, deterministic: bool) -> tuple[Any, ...]:
        """Of ``backward``, or of ``backward_varlen``, after lse."""
        plain = not bias_grad and not deterministic and self.backward_kernel == "auto"
        if plain and self is PLAIN:
            return ()
        begin: tuple[Any, ...] = (self.scale, *self.band)
        if plain and self.only_band:
            return begin
        if self.lengths is not None:
            begin = (*self.lengths, *begin)
        sinks = rng_state = None
        dropout_p = 0.0
        return (
            *begin,
            self.attn_bias,
            self.alibi_slopes,
            self.softcap,
            sinks,
            rng_state,
            dropout_p,
            bias_grad,
            deterministic,
            self.backward_kernel,
            self.kernel,
        )


PLAIN = Call()
"""The call of nothing but q, k and v. Who is given it, may leave out what asks for the rest."""


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
) -> Call:
    """The call of these arguments: :data:`PLAIN` if all are defaults."""
    if (
        causal is False
        and scale is None
        and window is None
        and attn_bias is None
        and alibi_slopes is None
        and softcap == 0
        and kernel == backward_kernel == "auto"
        and not batch_invariant
        and deterministic is None
    ):
        return PLAIN
    return Call(
        causal, scale, window, attn_bias, alibi_slopes, softcap, kernel, batch_invariant, backward_kernel, deterministic
    )
