"""Which kernel runs, and why not the others."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import _autocast, _checks
from ._call import Call, Causal, Window, call_of
from ._device import DeviceFacts
from ._device import device_facts as facts_of
from ._errors import refuse
from ._ranks import folded, is_plain, refusal
from ._registry import BiasFacts, Problem, choose, choose_backward
from ._sdpa import backward_kernel_for, kernel_for, why_torch
from ._statistics import Aux, checked_names
from ._table import Instance, instance_of, kernel_named, not_built
from .emulator import current

_WIDTH = 120
"""Columns of text."""


@dataclass(frozen=True)
class Explanation:
    """The answer of :func:`explain`."""

    kernel: str | None
    """The kernel that runs; ``None`` if none can."""
    instance: Instance | None
    """The tile it takes; ``None`` if it has no choice of tiles."""
    reasons: dict[str, str]
    """For each kernel that was considered and not taken: why."""
    device: DeviceFacts
    emulated: bool = False
    """Whether a CUDA kernel is asked for on the CPU: ``device`` is then the one that the emulator stands for."""
    backward_kernel: str | None = None
    """The kernel that computes the gradients of q, k, v, and of an attn_bias or alibi_slopes that require one;
    ``None`` if none can."""
    backward_reasons: dict[str, str] = field(default_factory=dict)
    """For each of ``flash_wmma.kernels("backward")`` that was not taken: why."""
    tells: bool = False
    """Whether the kernel has ``return_aux``'s maxima and entropies from its own pass, if no backward_kernel is named.
    Otherwise they come from a pass of their own, as column sums do, whose kernel need not be ``backward_kernel``."""
    tangents: bool = False
    """Whether the kernel computes tangents (``torch.func.jvp``) in forward's pass, if no backward_kernel is named.
    Otherwise they are made of other calls."""
    left_to_torch: str = ""
    """Why :func:`flash_wmma.scaled_dot_product_attention` leaves these inputs to torch; empty if it does not."""

    def __str__(self) -> str:
        device = f"CPU, in the emulator: {self.device}" if self.emulated else self.device
        lines = [f"device   {device}", f"kernel   {self.kernel or 'none can run this'}"]
        if self.instance is not None:
            lines.append(f"tile     {self.instance}")
        lines += _refused(self.reasons)
        lines.append(f"backward {self.backward_kernel or 'none can run this'}")
        lines += _refused(self.backward_reasons)
        if self.left_to_torch:
            lines.append(f"SDPA     is left to torch: {self.left_to_torch}")
        return "\n".join(lines)


def _refused(reasons: dict[str, str]) -> list[str]:
    """Lines that say each reason once, after the kernels that it holds for."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return [
        textwrap.fill(f"{', '.join(whose)}: {why}", _WIDTH, initial_indent="not      ", subsequent_indent=" " * 9)
        for why, whose in names.items()
    ]


def explain(
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
    attn_mask: Tensor | None = None,
    is_causal: bool | None = None,
    dropout_p: float | None = None,
    enable_gqa: bool | None = None,
    batch: int = 1,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    kernel: str = "auto",
    batch_invariant: bool = False,
    backward_kernel: str = "auto",
    deterministic: bool | None = None,
    return_aux: Aux = (),
    device_facts: DeviceFacts | None = None,
) -> Explanation:
    """Which kernel and which tile :func:`flash_wmma.forward` takes for the same arguments, and why not the others.

    Nothing is computed, so q (B, Hq, Nq, d), k (B, Hk, Nk, d) and v (B, Hk, Nk, d_v) may be on the ``"meta"`` device
    if ``device_facts`` is given, which describes a device that need not be there. For a CUDA kernel named on the CPU
    the device is the one that the emulator stands for (:func:`flash_wmma.emulator.settings`). For packed sequences, as
    in :func:`flash_wmma.forward_varlen`, q is (total_q, Hq, d), k (total_k, Hk, d) and v (total_k, Hk, d_v):
    ``batch`` sequences, the longest of ``max_seqlen_q`` and ``max_seqlen_k`` rows (default: one sequence of all rows).

    ``Explanation.backward_kernel`` says which kernel computes the gradients; ``backward_kernel``, ``deterministic`` and
    ``return_aux`` are those of :func:`flash_wmma.forward`. ``Explanation.left_to_torch`` says whether
    :func:`flash_wmma.scaled_dot_product_attention` would call torch instead (for tensors on a real device).

    The question is about that function alone if one of its own arguments is given, ``attn_mask``, ``is_causal``,
    ``dropout_p`` or ``enable_gqa``, or if q has other than 3 or 4 dimensions: q, k and v are then (..., N, d) as there,
    of any rank, ``enable_gqa`` is ``False`` by default, and the kernel is the one that the function asks for. (Say
    ``is_causal=False`` for three dimensions, (H, N, d).) What it leaves to torch and :func:`flash_wmma.forward` does
    not take (float64, nested tensors, other ranks) has no other answer.

    In a build without CUDA the first call compiles the kernels for the emulator, as :func:`flash_wmma.kernels` does.

    Raises:
        TypeError, ValueError: as :func:`flash_wmma.forward`; a kernel that cannot run this is no error here.
        ImportError: ``flash_wmma._C`` was not built for this Python.
    """
    of_sdpa = any(given is not None for given in (attn_mask, is_causal, dropout_p, enable_gqa))
    of_sdpa = of_sdpa or (isinstance(q, Tensor) and (q.is_nested or q.dim() not in (3, 4)))
    grouped = not of_sdpa if enable_gqa is None else enable_gqa
    if attn_mask is not None or is_causal is not None:
        if attn_bias is not None or causal:
            refuse("attn_bias, causal", "both with attn_mask or is_causal", "the arguments of one function")
        attn_bias, causal = attn_mask, bool(is_causal)
    why = ""
    given = (q, k, v) if attn_bias is None else (q, k, v, attn_bias)
    if all(isinstance(t, Tensor) for t in given) and (of_sdpa or q.dim() == 4) and q.device.type != "meta":
        why = why_torch(q, k, v, attn_bias, dropout_p or 0.0, bool(causal), grouped)
        if why and kernel != "math" and _is_beyond_forward(q, k, v, attn_bias, grouped):
            device = device_facts or facts_of(q.device)
            return Explanation(kernel=None, instance=None, reasons={}, device=device, left_to_torch=why)
    for name, t in zip(("q", "k", "v", "attn_bias"), given, strict=False):
        _checks.tensors(**{name: t})
    _checks.device(q)
    if of_sdpa and not is_plain(q.shape, k.shape, v.shape, grouped):
        bias_shape = None if attn_bias is None else attn_bias.shape
        if refusal(q.shape, k.shape, v.shape, bias_shape, grouped) == "":
            q, k, v, attn_bias, _ = folded(q, k, v, attn_bias, grouped)
    call = call_of(
        causal,
        scale,
        window,
        attn_bias,
        alibi_slopes,
        softcap,
        kernel,
        batch_invariant,
        key_ranges=key_ranges,
        sinks=sinks,
    )
    q, k, v, call = _autocast.cast(q, k, v, call)
    is_packed = q.dim() == 3 and not of_sdpa
    dtypes = _checks.MATH_DTYPES if kernel == "math" else _checks.DTYPES
    _checks.inputs(q, k, v, "(total, H, d)" if is_packed else "(B, H, N, d)", dtypes)
    if is_packed:
        seqlen_q = q.shape[0] if max_seqlen_q is None else max_seqlen_q
        seqlen_k = k.shape[0] if max_seqlen_k is None else max_seqlen_k
    else:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[2], k.shape[2]
    _checks.bias(call.attn_bias, q, (batch, q.shape[1], seqlen_q, seqlen_k))
    _checks.slopes(alibi_slopes, q, batch)
    _checks.ranges(key_ranges, q)
    _checks.sink_logits(call.sinks, q, dtypes)
    _checks.options(call)
    _checks.backward_kernel(backward_kernel)
    statistics = checked_names(return_aux)
    not_built()  # in a build without CUDA: loads the kernels' facts
    if device_facts is None:
        if q.device.type == "meta":
            refuse("device_facts", None, "a DeviceFacts for tensors on the meta device")
        device_facts = facts_of(q.device)
    on_cpu = device_facts.arch == 0
    if kernel == "math":
        return Explanation("math", None, {}, device_facts, backward_kernel="math", left_to_torch=why)
    if of_sdpa and kernel == "auto" and not _autocast.enabled(q.device):
        kernel = kernel_for("cpu" if on_cpu else "cuda", q.dtype)
        if backward_kernel == "auto":
            backward_kernel = backward_kernel_for(kernel)
    emulated = kernel != "auto" and kernel_named(kernel, "forward").device == "cuda" and on_cpu
    if emulated:
        device_facts = _emulated_facts()
    problem = _problem(q, k, v, call, is_packed, (batch, seqlen_q, seqlen_k), dropout=bool(dropout_p))
    answer = choose(kernel, problem, device_facts, statistics if backward_kernel == "auto" else ())
    backward_device = device_facts
    if backward_kernel != "auto" and kernel_named(backward_kernel, "backward").device == "cuda" and on_cpu:
        backward_device = _emulated_facts()
    elif emulated:
        backward_device = facts_of("cpu")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    gradients = choose_backward(
        backward_kernel,
        problem,
        backward_device,
        bias_strides=_bias_strides(call.attn_bias),
        slopes_gradient=call.alibi_slopes is not None and call.alibi_slopes.requires_grad,
        deterministic=deterministic,
        forward_kernel=kernel,
    )
    tile = answer["instance"]
    return Explanation(
        kernel=answer["kernel"],
        instance=None if tile is None else instance_of(tile),
        reasons=answer["reasons"],
        device=device_facts,
        emulated=emulated,
        backward_kernel=gradients["kernel"],
        backward_reasons=gradients["reasons"],
        tells=answer["tells"],
        tangents=answer["tangents"],
        left_to_torch=why,
    )


def _is_beyond_forward(q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, enable_gqa: bool) -> bool:
    """Whether :func:`flash_wmma.scaled_dot_product_attention` takes these inputs, by calling torch, and no kernel takes
    such numbers or shapes."""
    if q.is_nested or q.dtype == torch.float64:
        return True
    bias_shape = None if attn_bias is None else attn_bias.shape
    return q.dim() != 4 and refusal(q.shape, k.shape, v.shape, bias_shape, enable_gqa) != ""


def _problem(
    q: Tensor, k: Tensor, v: Tensor, call: Call, packed: bool, sizes: tuple[int, int, int], dropout: bool
) -> Problem:
    """What the registry is asked about a call whose arguments are good. ``sizes``: how many sequences, and the most
    queries and keys of one."""
    batch, seqlen_q, seqlen_k = sizes
    return Problem(
        dtype=str(q.dtype).removeprefix("torch."),
        sizes={
            "batch": batch,
            "heads_q": q.shape[1],
            "heads_k": k.shape[1],
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
            "head_dim": q.shape[-1],
            "head_dim_v": v.shape[-1],
            "total_q": q.shape[0],
            "total_k": k.shape[0],
        },
        band=call.band,
        packed=packed,
        attn_bias=_bias_facts(call.attn_bias),
        alibi_slopes=call.alibi_slopes is not None,
        key_ranges=call.key_ranges is not None,
        softcap=call.softcap,
        sinks=call.sinks is not None,
        dropout=dropout,
        batch_invariant=call.batch_invariant,
    )


def _bias_facts(attn_bias: Tensor | None) -> BiasFacts | None:
    if attn_bias is None:
        return None
    strides = [0 if size == 1 else stride for size, stride in zip(attn_bias.shape, attn_bias.stride(), strict=True)]
    b, h, i, j = [0] * (4 - len(strides)) + strides
    at = 0 if attn_bias.device.type == "meta" else attn_bias.data_ptr()
    return BiasFacts(str(attn_bias.dtype).removeprefix("torch."), (b, h, i, j), at % 16)


def _bias_strides(attn_bias: Tensor | None) -> tuple[int, ...] | None:
    """The strides (b, h, i, j) of the bias's gradient, as far as they matter: 0 where the bias is broadcast. ``None``:
    that gradient is not asked for."""
    if attn_bias is None or not attn_bias.requires_grad:
        return None
    sizes = (1,) * (4 - attn_bias.dim()) + tuple(attn_bias.shape)
    return tuple(int(size != 1) for size in sizes)


def _emulated_facts() -> DeviceFacts:
    """The device that the emulator stands for."""
    now = current()
    return DeviceFacts(now.arch, now.sm_count, now.shared_memory, now.warp_size, now.memory_bus)
