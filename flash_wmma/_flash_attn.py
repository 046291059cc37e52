"""flash-attn's functions: its signatures, layouts, defaults and semantics (version 2.8).

Source of the semantics: ``flash_attn/flash_attn_interface.py`` of https://github.com/Dao-AILab/flash-attention. Causal
masks and windows are aligned to the last key; ALiBi is -slope * |i + Nk - Nq - j|.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from . import _checks
from ._attention import attend
from ._call import Lengths, call_of
from ._errors import refuse

Result = Tensor | tuple[Tensor, Tensor, Tensor]
WindowSize = Sequence[int] | Tensor
"""Two integers, (left, right). Those of a tensor on a GPU are read back, which waits for the device."""


def _not_yet(option: str, why: str) -> NoReturn:
    raise NotImplementedError(f"{option}: {why} is not built yet")


def _refuse_dropout(dropout_p: object) -> NoReturn:
    if not isinstance(dropout_p, int | float):
        refuse("dropout_p", repr(dropout_p), "a float", TypeError)
    if not 0 <= dropout_p <= 1:
        refuse("dropout_p", dropout_p, "0 to 1")
    _not_yet("dropout_p", "dropout")


def _window(window_size: WindowSize) -> tuple[int, int] | None:
    allowed = "a pair (left, right) of int, -1 for no bound"
    bounds: object = window_size.tolist() if hasattr(window_size, "tolist") else window_size
    if not isinstance(bounds, Sequence) or isinstance(bounds, str):
        refuse("window_size", repr(window_size), allowed, TypeError)
    if len(bounds) != 2:
        refuse("window_size", repr(window_size), allowed)
    left, right = bounds
    if isinstance(left, int) and isinstance(right, int) and left < 0 and right < 0:
        return None
    return left, right


def _flag(name: str, value: object) -> bool:
    """An argument that flash-attn's own functions take as a bool: whatever has a truth value of its own."""
    if value is None or not hasattr(type(value), "__bool__"):
        refuse(name, repr(value), "a bool", TypeError)
    return bool(value)


def _result(out: Tensor, lse: Tensor, return_attn_probs: bool) -> Result:
    """flash-attn's third result encodes which weights were dropped; without dropout it is empty."""
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def _unpacked(name: str, t: Tensor, dim: int, n: int, layout: str) -> tuple[Tensor, ...]:
    """The views of a tensor that holds ``n`` of q, k, v at dimension ``dim``."""
    _checks.tensors(**{name: t})
    if t.dim() != dim + 3 or t.shape[dim] != n:
        refuse(f"{name}.shape", tuple(t.shape), layout)
    return t.unbind(dim)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash-attn's ``flash_attn_func``.

    Args:
        q: (B, Nq, Hq, d), float32, float16 or bfloat16.
        k: (B, Nk, Hk, d); Hq is a multiple of Hk.
        v: (B, Nk, Hk, d_v).
        dropout_p: 0; anything else is not built yet.
        softmax_scale: factor on the scores; default 1 / sqrt(d).
        causal: query i sees the keys j <= i + Nk - Nq.
        window_size: (left, right), any sequence of two integers, a tensor included: query i sees the keys from
            i + Nk - Nq - left to i + Nk - Nq + right; -1: no bound.
        softcap: if not 0, scaled scores x become softcap * tanh(x / softcap).
        alibi_slopes: (Hq) or (B, Hq), float32: -slope * |i + Nk - Nq - j| is added to the scores.
        deterministic: compute gradients that are bitwise the same from run to run. The forward pass always is.
        return_attn_probs: also return lse and an empty tensor, which stands where flash-attn puts dropout's pattern.

    Returns:
        out (B, Nq, Hq, d_v), contiguous; with ``return_attn_probs`` (out, lse (B, Hq, Nq) float32, empty tensor).

    Raises:
        NotImplementedError: dropout, or alibi_slopes that require grad.
        TypeError, ValueError: as :func:`flash_wmma.forward`; messages use that function's argument names.
    """
    if dropout_p != 0:
        _refuse_dropout(dropout_p)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor) or t.dim() != 4:
            _checks.tensors(**{name: t})
            refuse(f"{name}.shape", tuple(t.shape), "(B, N, H, d)")
    call = call_of(
        causal=_flag("causal", causal),
        scale=softmax_scale,
        window=_window(window_size),
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        deterministic=_flag("deterministic", deterministic) or None,
        bottom_right=True,
        out_bnhd=True,
    )
    return_attn_probs = _flag("return_attn_probs", return_attn_probs)
    out, lse = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), call)
    return _result(out.transpose(1, 2), lse, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` with k and v in one tensor kv (B, Nk, 2, Hk, d), of which views are read."""
    k, v = _unpacked("kv", kv, 2, 2, "(B, N, 2, H, d)")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` with q, k and v in one tensor qkv (B, N, 3, H, d), of which views are read."""
    q, k, v = _unpacked("qkv", qkv, 2, 3, "(B, N, 3, H, d)")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    validate: bool = False,
) -> Result:
    """flash-attn's ``flash_attn_varlen_func``: sequences of different lengths, packed.

    Args:
        q: (total_q, Hq, d), float32, float16 or bfloat16.
        k: (total_k, Hk, d); Hq is a multiple of Hk.
        v: (total_k, Hk, d_v).
        cu_seqlens_q: (B + 1), int32: sequence b is the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        cu_seqlens_k: (B + 1), int32, the same for k and v.
        max_seqlen_q: at least the number of queries of every sequence.
        max_seqlen_k: the same for keys.
        block_table: a paged cache; not built yet.
        validate: check the lengths and raise if they are wrong, which waits for the device; flash-attn has no such
            argument. Without it the lengths are clamped, and nothing outside the tensors is read.

    The other arguments are those of :func:`flash_attn_func`, with Nq and Nk of each sequence.

    Returns:
        out (total_q, Hq, d_v), contiguous, 0 in the rows after the last sequence; with ``return_attn_probs`` (out, lse
        (Hq, total_q) float32, empty tensor).

    Raises:
        NotImplementedError: dropout, a paged cache, or alibi_slopes that require grad.
        TypeError, ValueError: as :func:`flash_wmma.forward_varlen`.
    """
    if dropout_p != 0:
        _refuse_dropout(dropout_p)
    if block_table is not None:
        _not_yet("block_table", "a paged cache")
    call = call_of(
        causal=_flag("causal", causal),
        scale=softmax_scale,
        window=_window(window_size),
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        deterministic=_flag("deterministic", deterministic) or None,
        bottom_right=True,
        lengths=Lengths(cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k),
        validate=_flag("validate", validate),
    )
    return_attn_probs = _flag("return_attn_probs", return_attn_probs)
    out, lse = attend(q, k, v, call)
    return _result(out, lse, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    validate: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` with k and v in one tensor kv (total_k, 2, Hk, d), of which views are read."""
    k, v = _unpacked("kv", kv, 1, 2, "(total_k, 2, H, d)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        validate=validate,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    validate: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` with q, k and v in one tensor qkv (total, 3, H, d), of which views are read."""
    q, k, v = _unpacked("qkv", qkv, 1, 3, "(total, 3, H, d)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        validate=validate,
    )
