"""``torch.nn.functional.scaled_dot_product_attention``, on the kernels of this library where they can run it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._attention import attend
from ._call import band, call_of
from ._checks import DTYPES, LARGEST
from ._device import device_facts
from ._native import native
from ._ranks import folded, is_plain, refusal
from ._registry import BiasFacts, Problem, choose, choose_backward


@functools.lru_cache(maxsize=1024)
def _largest_head_dim(
    device: str,
    index: int | None,
    dtype: torch.dtype,
    kernel: str,
    causal: bool,
    attn_bias: bool,
    other_d_v: bool,
    gradient: bool,
    bias_gradient: bool,
    deterministic: bool,
    dropout: bool,
) -> int:
    try:
        kernels = native().kernels("forward")
    except ImportError:  # forward works without the table, and says itself what it cannot run
        return 1 << 30
    try:
        facts = device_facts(device if index is None else f"{device}:{index}")
    except RuntimeError:  # a build without CUDA kernels
        return 0
    largest = 0
    for d in {row["head_dims"][1] for row in kernels}:
        sizes = {"batch": 1, "heads_q": 1, "heads_k": 1, "seqlen_q": 1, "seqlen_k": 1, "head_dim": d}
        problem = Problem(
            dtype=str(dtype).removeprefix("torch."),
            sizes=sizes | {"head_dim_v": d // 2 if other_d_v else d},
            band=band(causal, None),
            attn_bias=BiasFacts("float32") if attn_bias else None,
            dropout=dropout,
        )
        runs = choose(kernel, problem, facts)["kernel"]
        if runs and gradient:
            runs = choose_backward(
                backward_kernel_for(kernel),
                problem,
                facts,
                bias_strides=(1, 1, 1, 1) if bias_gradient else None,
                deterministic=deterministic,
            )["kernel"]
        largest = max(largest, d if runs else 0)
    return largest


def largest_head_dim(
    device: str,
    index: int | None,
    dtype: torch.dtype,
    kernel: str,
    causal: bool = False,
    attn_bias: bool = False,
    other_d_v: bool = False,
    gradient: bool = False,
    bias_gradient: bool = False,
    deterministic: bool = False,
    dropout: bool = False,
) -> int:
    """The largest head dim with which ``kernel`` (or "auto") runs this; 0 if there is none."""
    return _largest_head_dim(
        device, index, dtype, kernel, causal, attn_bias, other_d_v, gradient, bias_gradient, deterministic, dropout
    )


# As torch.compiler.assume_constant_result does, which would import torch._dynamo: a constant in traced calls.
largest_head_dim._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernel_for(device: str, dtype: torch.dtype) -> str:
    """The ``kernel`` for inputs of that dtype: float32 on a GPU is multiplied as float32 while
    ``torch.get_float32_matmul_precision()`` is ``"highest"``."""
    exact = device == "cuda" and dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "simt" if exact else "auto"


kernel_for._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the precision is that of the time of tracing


def backward_kernel_for(kernel: str) -> str:
    """The ``backward_kernel`` that goes with ``kernel_for``'s answer."""
    return "bwd_simt" if kernel == "simt" else "auto"


def _wraps(t: object) -> bool:
    """Whether t is of a tensor subclass that wraps other tensors. (t is an object, since to mypy no Tensor is one.)"""
    return is_traceable_wrapper_subclass(t)


def is_switched_off() -> bool:
    """Whether the caller has switched off the backend that these kernels stand for, torch's flash attention, as
    ``torch.nn.attention.sdpa_kernel`` does."""
    return not torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]


# As for largest_head_dim: to torch.compile the backends are those of the time of tracing, as for torch's own attention
is_switched_off._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
    """Why torch's own attention computes this, whichever backends are switched on; empty if a kernel of this library
    does.

    ``differentiable``: whether gradients may be asked for; only then do inputs that require one matter.
    """
    dropout = False
    if dropout_p != 0:  # a branch, since to torch.compile a traced comparison is no constant
        if not 0 < dropout_p < 1:
            return f"dropout_p is {dropout_p}"  # torch drops all weights with 1, and raises its error for the others
        dropout = True
    recorded = False
    for t in (query, key, value) if attn_mask is None else (query, key, value, attn_mask):
        if type(t) is not Tensor and type(t).__torch_function__ is not torch._C._disabled_torch_function_impl:
            return "an input is a tensor subclass with an attention of its own"  # torch.nn.attention.bias.CausalBias
        if type(t) is not Tensor and _wraps(t):
            return "an input is a tensor subclass that wraps others"  # DTensor
        if t.is_nested or t.layout is not torch.strided:
            return "an input is no dense tensor"
        recorded = recorded or t.requires_grad
    recorded = recorded and differentiable and torch.is_grad_enabled()
    if (recorded or dropout) and torch._C._are_functorch_transforms_active():
        return "a torch.func transform is on"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    device, dtype = query.device, query.dtype
    kind = device.type
    if kind not in ("cpu", "cuda"):
        return f"the device is {kind}"
    if key.device != device or value.device != device or (attn_mask is not None and attn_mask.device != device):
        return "the inputs are on several devices"
    if torch.is_autocast_enabled(kind):
        if torch.float64 in (dtype, key.dtype, value.dtype):
            return "autocast leaves float64 alone"
        dtype = torch.get_autocast_dtype(kind)
    elif key.dtype != dtype or value.dtype != dtype:
        return "the inputs are of several dtypes"
    if dtype not in DTYPES:
        return f"the dtype is {dtype}"
    q, k, v = query.shape, key.shape, value.shape
    if attn_mask is not None:
        if is_causal:
            return "both attn_mask and is_causal are given"
        if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
            return f"attn_mask is {attn_mask.dtype}"
    plain = is_plain(q, k, v, enable_gqa)
    if not plain and 0 in (*q, *k, *v):
        return "an input is empty"  # torch's result then has query's dimensions, whatever key's and value's are
    if attn_mask is not None or not plain:
        why_not = refusal(q, k, v, None if attn_mask is None else attn_mask.shape, enable_gqa)
        if why_not:
            return why_not
    d, dv = q[-1], v[-1]
    other_d_v = bias_gradient = deterministic = False
    if d != dv:  # a branch, since to torch.compile a traced comparison is no constant
        other_d_v = True
    if recorded:
        bias_gradient = attn_mask is not None and attn_mask.requires_grad
        deterministic = torch.are_deterministic_algorithms_enabled()
    largest = largest_head_dim(
        kind,
        device.index,
        dtype,
        kernel_for(kind, dtype),
        causal=is_causal,
        attn_bias=attn_mask is not None,
        other_d_v=other_d_v,
        gradient=recorded,
        bias_gradient=bias_gradient,
        deterministic=deterministic,
        dropout=dropout,
    )
    if d < 1 or dv < 1 or d > largest or dv > largest:
        gradient = "gradient of attn_bias" if bias_gradient else "gradient"
        asked = {"causal": is_causal, "attn_bias": attn_mask is not None, "d_v": other_d_v, gradient: recorded}
        asked["dropout"] = dropout
        features = " ".join(name for name, wanted in asked.items() if wanted)
        return f"no kernel runs head dims {d} and {dv}{' with ' * bool(features)}{features}"
    return ""


def why_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> str:
    """Why :func:`scaled_dot_product_attention` calls torch; empty if it does not."""
    if is_switched_off():
        return "the caller has switched off flash attention"
    return left_to_torch(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)


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

    Calls that no kernel of this library covers go to torch's own implementation: forward-mode differentiation,
    gradients and dropout under ``torch.func``, float64, … So do those for which torch's flash attention is switched
    off, which these kernels stand for, as within ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.
    :func:`flash_wmma.explain` names the reason.
    Torch also raises the errors for wrong arguments.
    float32 on a GPU is multiplied as float32, by the kernel ``simt``, while ``torch.get_float32_matmul_precision()`` is
    ``"highest"`` (torch's default), and otherwise by the kernel that ``auto`` takes, which multiplies float16. With
    ``torch.use_deterministic_algorithms(True)`` the gradient of a broadcast ``attn_mask`` is summed from the gradient
    of all scores, (B, Hq, Nq, Nk), which is stored, as in torch.

    Args:
        query: (..., Nq, d), as (B, Hq, Nq, d), (Hq, Nq, d) or (Nq, d).
        key: (..., Nk, d). The dimensions before Nk broadcast with query's; with ``enable_gqa`` the last of them, Hk, is
            a divisor of query's.
        value: (..., Nk, d_v), likewise.
        attn_mask: broadcastable to the scores, (..., Nq, Nk): bool, ``True`` where the query sees the key, or numbers
            added to the scores.
        dropout_p: probability of dropping a weight, as in :func:`flash_wmma.forward`: torch's generator draws the state
            of each call, from which these kernels make another mask than torch's. With 1 torch computes the call.
        is_causal: query i sees the keys j <= i; not together with ``attn_mask``.
        scale: factor on the scores; default 1 / sqrt(d).
        enable_gqa: query head h reads key and value head h // (Hq // Hk).

    Returns:
        (..., Nq, d_v), in query's dtype (autocast's under ``torch.autocast``).

    Raises:
        RuntimeError, TypeError, ValueError: as torch's.
    """
    given = isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
    given = given and (attn_mask is None or isinstance(attn_mask, Tensor))
    given = given and isinstance(is_causal, bool) and isinstance(enable_gqa, bool)
    given = given and (scale is None or (isinstance(scale, int | float | torch.SymFloat) and abs(scale) <= LARGEST))
    given = given and isinstance(dropout_p, int | float | torch.SymFloat)
    if not given or why_torch(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    batch = None
    if not is_plain(query.shape, key.shape, value.shape, enable_gqa):
        query, key, value, attn_mask, batch = folded(query, key, value, attn_mask, enable_gqa)
    if attn_mask is not None and attn_mask.requires_grad and torch.are_deterministic_algorithms_enabled():
        # No kernel on a GPU sums a broadcast mask's gradient in a fixed order: torch does, from all scores' gradients
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    device = query.device.type
    kernel = "auto" if torch.is_autocast_enabled(device) else kernel_for(device, query.dtype)
    call = call_of(
        causal=bool(is_causal),
        scale=scale,
        attn_bias=attn_mask,
        kernel=kernel,
        backward_kernel=backward_kernel_for(kernel),
        dropout_p=dropout_p,
    )
    out = attend(query, key, value, call)[0]
    return out if batch is None else out.view(*batch, *out.shape[2:])
