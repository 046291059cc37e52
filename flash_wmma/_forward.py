"""``forward`` and ``forward_varlen``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from torch import Tensor

from ._attention import attend, attend_with_statistics
from ._call import Call, Causal, Lengths, Window, call_of
from ._checks import flag
from ._statistics import Aux, checked_names, statistics, told_by_forward

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """The options that :func:`forward` and :func:`forward_varlen` share, for type checkers."""

    causal: Causal
    scale: float | None
    window: Window | None
    attn_bias: Tensor | None
    alibi_slopes: Tensor | None
    key_ranges: Tensor | None
    softcap: float
    sinks: Tensor | None
    dropout_p: float
    rng_state: Tensor | None
    kernel: str
    batch_invariant: bool
    backward_kernel: str
    deterministic: bool | None


class VarlenOptions(Options, total=False):
    """The options that :func:`forward_varlen` adds."""

    seqused_k: Tensor | None
    validate: bool


def _with_statistics(
    q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool, return_aux: object
) -> tuple[Any, ...]:
    """The results of a call with return_aux."""
    names = checked_names(return_aux)
    if wanted := told_by_forward(call, names):
        out, lse, *told = attend_with_statistics(q, k, v, call, wanted)
        aux = statistics(q, k, v, lse, call, names, (told[0], told[1]))
    else:
        out, lse = attend(q, k, v, call)
        aux = statistics(q, k, v, lse, call, names)
    return (out, lse, aux) if return_lse else (out, aux)


@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...


@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...


@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...


@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, return_aux: Aux, return_lse: bool = ..., **options: Unpack[Options]
) -> tuple[Any, ...]: ...


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    batch_invariant: bool = False,
    backward_kernel: str = "auto",
    deterministic: bool | None = None,
    return_aux: Aux = (),
) -> Tensor | tuple[Any, ...]:
    """Exact attention, ``softmax(q kᵀ · scale + bias) v``, by the tiled online softmax of FlashAttention-2.

    The score matrix is never stored: memory grows with N, not with N². Scores, softmax and accumulation are float32.
    out and lse are differentiable in q, k, v, an additive attn_bias, alibi_slopes and sinks; backward recomputes the
    weights from lse and stores no score matrix either. ``torch.func``, forward mode and gradients of gradients work
    too, the last by plain torch ops, a block of queries at a time. Under ``torch.autocast`` q, k and v are cast to its
    dtype.

    Args:
        q: (B, Hq, Nq, d), float32, float16 or bfloat16, on a CPU or a CUDA device, any strides.
        k: (B, Hk, Nk, d), q's dtype and device. Hq is a multiple of Hk: query head h reads head h // (Hq // Hk).
        v: (B, Hk, Nk, d_v), likewise. ``wmma_v1`` and ``wmma_v2`` need d_v = d.
        causal: ``True`` or ``"top_left"``: query i sees keys j <= i. ``"bottom_right"``: j <= i + Nk - Nq, so that the
            last query sees every key.
        scale: factor on the scores; default 1 / sqrt(d).
        window: (left, right): a query sees that many keys before and after its own position, which is shifted as
            ``causal`` says. ``None`` or a negative number bounds nothing. With ``causal`` the right bound is 0.
        attn_bias: broadcastable to (B, Hq, Nq, Nk), any strides, read in place. float32 or q's dtype: added to the
            scaled scores, -inf hides the key. bool: ``True`` where the query sees the key.
        alibi_slopes: (Hq) or (B, Hq), float32: -slope * |i + Nk - Nq - j| is added to the score of query i and key j,
            whatever the alignment of ``causal`` (flash-attn's ALiBi, https://arxiv.org/abs/2108.12409).
        key_ranges: (B or 1, Hq or 1, Nq, 2), int32, any strides: the first and the last-plus-one key that each query
            sees, of those that ``causal`` and ``window`` leave. A range is cut to the Nk keys; one that ends where it
            begins, or before, is empty. Tiles of keys before the first and behind the last that a tile of queries sees
            are skipped, forward and backward. :func:`flash_wmma.document_ranges` makes the ranges of documents.
        softcap: if not 0, scaled scores x become softcap * tanh(x / softcap), before anything is added.
        sinks: (Hq), float32, float16 or bfloat16: for each query head the logit of one more key, which every query sees
            and which has no value, so that the softmax's denominator gets exp(sinks[h]) (gpt-oss's attention sinks).
            -inf: no sink. +inf and NaN make the head's results NaN.
        dropout_p: each weight is dropped with this probability (rounded to 1 / 65536), and the others are divided by
            1 - dropout_p. lse is that of all weights. Which weights are dropped depends on rng_state and the place of
            the weight alone: :func:`flash_wmma.dropout_mask`.
        rng_state: (2,), int64, on q's device: the state of dropout's generator; default: drawn from torch's generator,
            so that ``torch.manual_seed`` repeats a call, and replays of a CUDA graph differ.
        kernel: ``"auto"``, or the name of one of :func:`flash_wmma.kernels`, which then runs or raises: nothing falls
            back. :func:`flash_wmma.explain` says what ``"auto"`` takes. A CUDA kernel takes CPU tensors too:
            :mod:`flash_wmma.emulator` then runs its source. ``"math"`` is no kernel but plain torch ops, which store
            the score matrix, take float64 too, and have every derivative: second derivatives of packed sequences, the
            gradient of return_aux's maximum.
        return_lse: also return the logarithm of the softmax's denominator, sinks included.
        return_aux: also return a dict of float32 tensors about the weights P, without dropout, by these names. "max"
            (B, Hq, Nq): each row's largest score, after scale, softcap, bias and ALiBi; -inf for a row that sees no
            key; without a gradient. "entropy" (B, Hq, Nq): -sum_j P_ij ln P_ij, 0 for a row that sees no key.
            "column_sum" (B, Hq, Nk): sum_i P_ij. With sinks P has the sink in its denominator, and no column for it.
            The kernels of backward compute them from lse in a pass of their own (``backward_kernel`` names one), except
            maxima and entropies that the kernel of forward tells (:attr:`flash_wmma.Explanation.tells`).
        batch_invariant: choose tiles and splits by (Nq, Nk, d) and the device alone, so that a batch entry's result is
            bitwise independent of the other entries.
        backward_kernel: like ``kernel``, for the gradients: ``"auto"`` or one of ``flash_wmma.kernels("backward")``. An
            unknown name is refused at once, a call that the kernel cannot run when the gradients are computed.
        deterministic: compute gradients that are bitwise the same from run to run; default
            ``torch.are_deterministic_algorithms_enabled()`` at that time. The forward pass is always deterministic.

    Returns:
        out (B, Hq, Nq, d_v), contiguous, in q's dtype; with ``return_lse`` also lse (B, Hq, Nq), float32, natural
        logarithm; with ``return_aux`` last the dict. A query that sees no key has out 0, and lse is -inf or its head's
        sink. Results are bitwise the same from run to run.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: shapes, dtypes or devices do not go together, the kernel is unknown, or it cannot run this.
        NotImplementedError: a derivative is asked for that no kernel has: of return_aux's maximum, a second one of
            packed sequences, of return_aux or of alibi_slopes, one of return_aux under ``torch.func`` (which has its
            vmap alone); ``kernel="math"`` has them.
        RuntimeError: CUDA tensors but no CUDA kernels in this build, or CUDA reports an error.
        flash_wmma.emulator.EmulatorError: a CUDA kernel on CPU tensors: it could not be compiled, or a check failed.

    FlashAttention: https://arxiv.org/abs/2205.14135. FlashAttention-2: https://arxiv.org/abs/2307.08691. Online
    softmax: https://arxiv.org/abs/1805.02867.
    """
    with_lse: object = return_lse
    if not isinstance(with_lse, bool):
        flag(return_lse=with_lse)
    call = call_of(  # by position, which costs the host less than by name
        causal,
        scale,
        window,
        attn_bias,
        alibi_slopes,
        softcap,
        kernel,
        batch_invariant,
        backward_kernel,
        deterministic,
        key_ranges,
        sinks,
        dropout_p,
        rng_state,
    )
    if return_aux:
        return _with_statistics(q, k, v, call, return_lse, return_aux)
    out, lse = attend(q, k, v, call)
    return (out, lse) if return_lse else out


@overload
def forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...


@overload
def forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


@overload
def forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_aux: Aux,
    return_lse: bool = ...,
    **options: Unpack[VarlenOptions],
) -> tuple[Any, ...]: ...


def forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_ranges: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    batch_invariant: bool = False,
    backward_kernel: str = "auto",
    deterministic: bool | None = None,
    return_aux: Aux = (),
    validate: bool = False,
) -> Tensor | tuple[Any, ...]:
    """:func:`forward` for sequences of different lengths, packed one after the other without padding.

    Sequence b is the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and the rows cu_seqlens_k[b] to
    cu_seqlens_k[b + 1] of k and v; it may be empty. Whatever the lengths are, nothing is read outside the tensors: the
    kernel clamps the lengths, so that the call does not wait for the device.

    Args:
        q: (total_q, Hq, d), float32, float16 or bfloat16, on a CPU or a CUDA device, any strides.
        k: (total_k, Hk, d), q's dtype and device. Hq is a multiple of Hk.
        v: (total_k, Hk, d_v), likewise.
        cu_seqlens_q: (B + 1), int32, from 0 on, not decreasing.
        cu_seqlens_k: (B + 1), int32, likewise.
        max_seqlen_q: at least the number of queries of every sequence; the results of a longer one are unspecified.
        max_seqlen_k: the same for keys.
        seqused_k: (B), int32: sequence b uses only its first seqused_k[b] keys.
        causal, scale, window, softcap, sinks: as for :func:`forward`; Nq and Nk are the sequence's.
        dropout_p, rng_state: as for :func:`forward`.
        kernel, batch_invariant, backward_kernel, deterministic: as for :func:`forward`.
        attn_bias: broadcastable to (B, Hq, max_seqlen_q, max_seqlen_k), indexed within the sequence.
        alibi_slopes: (Hq) or (B, Hq), float32, as for :func:`forward`.
        key_ranges: (Hq or 1, total_q, 2), int32, as for :func:`forward`; keys count from the sequence's first.
        return_lse: also return the logarithm of the softmax's denominator.
        return_aux: as for :func:`forward`; "max" and "entropy" are (Hq, total_q), "column_sum" (Hq, total_k).
        validate: check the lengths and raise if they are wrong, which waits for the device.

    Returns:
        out (total_q, Hq, d_v), contiguous, in q's dtype; with ``return_lse`` also lse (Hq, total_q), float32; with
        ``return_aux`` last the dict. A query that sees no key, or that lies behind the last sequence, has out 0, and
        lse is -inf or its head's sink.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as :func:`forward`.
        ValueError: with ``validate``, lengths that decrease, end beyond a tensor, or exceed max_seqlen.
    """
    flag(return_lse=return_lse, validate=validate)
    call = call_of(
        causal,
        scale,
        window,
        attn_bias,
        alibi_slopes,
        softcap,
        kernel,
        batch_invariant,
        backward_kernel,
        deterministic,
        key_ranges,
        sinks,
        dropout_p,
        rng_state,
        lengths=Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k),
        validate=validate,
    )
    if return_aux:
        return _with_statistics(q, k, v, call, return_lse, return_aux)
    out, lse = attend(q, k, v, call)
    return (out, lse) if return_lse else out
