"""``torch.nn.functional.scaled_dot_product_attention``, on the kernels of this library where they can run it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _checks
from ._forward import dense
from ._native import native


def _overrides(t: Tensor) -> bool:
    """A subclass that reroutes torch's functions, such as torch.nn.attention.bias.CausalBias."""
    cls = type(t)
    return cls is not Tensor and cls.__torch_function__ is not torch._C._disabled_torch_function_impl


@functools.lru_cache(maxsize=1024)
def _cached_largest_head_dim(device: str, dtype: str, features: str) -> int:
    from ._explain import device_facts  # which takes the reasons of this module into its answers

    try:
        table = native()
    except ImportError:  # forward works without the table, and says itself what it cannot run
        return 1 << 30
    facts = device_facts(device)
    largest = 0
    for d in {kernel["head_dims"][1] for kernel in table.kernels()}:
        sizes = {"batch": 1, "heads_q": 1, "heads_k": 1, "seqlen_q": 1, "seqlen_k": 1, "head_dim": d}
        answer = table.explain(
            "auto",
            dtype,
            sizes | {"head_dim_v": d // 2 if "d_v" in features else d},
            (-1, 0 if "causal" in features else -1, False),
            False,  # packed
            "attn_bias" in features,
            False,  # alibi_slopes
            0.0,  # softcap
            (facts.arch, facts.sm_count, facts.smem_optin, facts.warp_size),
        )
        largest = max(largest, d if answer["kernel"] else 0)
    return largest


def _largest_head_dim(device: str, dtype: str, features: str) -> int:
    """Up to which head dim ``auto`` has a kernel; 0 if it has none. ``features``: of "causal", "attn_bias", "d_v"."""
    return _cached_largest_head_dim(device, dtype, features)


# As torch.compiler.assume_constant_result does, which would import torch._dynamo: traced calls are answered at once.
_largest_head_dim._dynamo_marked_constant = True  # type: ignore[attr-defined]


def left_to_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    differentiable: bool = True,
) -> str:
    """Why torch's own attention computes this; empty if a kernel of this library does.

    ``differentiable``: whether a gradient may be asked for, so that inputs that require one matter.
    """
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if any(_overrides(t) for t in given):
        return "an input is a tensor subclass with an attention of its own"
    if any(t.is_nested or t.layout is not torch.strided for t in given):
        return "an input is no dense tensor"
    if query.device.type not in ("cpu", "cuda"):
        return f"the device is {query.device.type}"
    if dropout_p != 0:
        return "dropout_p is not 0"
    if differentiable and torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return "an input requires grad, and backward is not built yet"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        if dtype not in _checks.DTYPES or any(t.dtype == torch.float64 for t in given):
            return f"autocast to {dtype} is on"
    else:
        dtype = query.dtype
        if dtype not in _checks.DTYPES or key.dtype != dtype or value.dtype != dtype:
            return "the dtypes are not one of float32, float16, bfloat16"
    if any(t.device != query.device for t in given):
        return "the inputs are on several devices"
    if any(t.dim() != 4 for t in given[:3]):
        return "query, key and value are not all (B, H, N, d)"
    batch, heads = query.shape[:2]
    if key.shape[0] != batch or key.shape[:3] != value.shape[:3] or key.shape[3] != query.shape[3]:
        return "the shapes are not (B, Hq, Nq, d), (B, Hk, Nk, d) and (B, Hk, Nk, d_v)"
    if key.shape[1] != heads and (not enable_gqa or key.shape[1] == 0 or heads % key.shape[1] != 0):
        return "key has other heads than query" + (", and not a divisor of them" if enable_gqa else "")
    if attn_mask is not None:
        if is_causal:
            return "both attn_mask and is_causal are given"
        if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
            return f"attn_mask is {attn_mask.dtype}"
        full = (batch, heads, query.shape[2], key.shape[2])
        sizes = attn_mask.shape
        if len(sizes) > 4 or any(n != 1 and n != m for n, m in zip(reversed(sizes), reversed(full), strict=False)):
            return "attn_mask does not broadcast to (B, Hq, Nq, Nk)"
    if query.is_cuda and dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "torch.get_float32_matmul_precision() is 'highest', and the kernels multiply float16"
    features = "attn_bias" if attn_mask is not None else "causal" if is_causal else ""
    name = str(dtype).removeprefix("torch.")
    d, dv = query.shape[3], value.shape[3]
    if d != dv:
        features += " d_v"
    largest = _largest_head_dim(str(query.device), name, features)
    if d < 1 or dv < 1 or d > largest or dv > largest:
        return f"no kernel runs head dims {d} and {dv}{' with ' * bool(features)}{features}"
    return ""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A stand-in for :func:`torch.nn.functional.scaled_dot_product_attention`, with its signature and semantics.

    What no kernel of this library covers goes to torch's own implementation, which also raises for what is wrong:
    dropout, inputs that require grad, other ranks than 4, float64, float32 on a GPU while
    ``torch.get_float32_matmul_precision()`` is ``"highest"``, … :func:`flash_wmma.explain` names the reason.

    Args:
        query: (B, Hq, Nq, d).
        key: (B, Hk, Nk, d); Hk is Hq, or with ``enable_gqa`` a divisor of it.
        value: (B, Hk, Nk, d_v).
        attn_mask: what broadcasts to (B, Hq, Nq, Nk): bool, ``True`` where the query sees the key, or added to the
            scores.
        dropout_p: probability of dropping a weight.
        is_causal: query i sees the keys j <= i; not together with ``attn_mask``.
        scale: factor on the scores; default 1 / sqrt(d).
        enable_gqa: query head h reads key and value head h // (Hq // Hk).

    Returns:
        (B, Hq, Nq, d_v), in query's dtype (autocast's under ``torch.autocast``).

    Raises:
        RuntimeError, TypeError, ValueError: as torch's.
    """
    given = isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
    if not given or left_to_torch(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return dense(query, key, value, bool(is_causal), scale, None, attn_mask, None, 0.0, "auto", False, False)[0]
