"""Which kernel runs, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import _autocast, _checks
from ._call import Causal, Window, call_of
from ._device import DeviceFacts
from ._device import device_facts as facts_of
from ._errors import refuse
from ._registry import Problem, choose, choose_backward
from ._sdpa import left_to_torch
from ._table import Instance, instance_of, kernel_named, not_built
from .emulator import current


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
    """The kernel that computes the gradients of q, k, v and an attn_bias that requires one; ``None`` if none can."""
    backward_reasons: dict[str, str] = field(default_factory=dict)
    """For each of ``flash_wmma.kernels("backward")`` that was not taken: why."""
    left_to_torch: str = ""
    """Why :func:`flash_wmma.scaled_dot_product_attention` leaves these inputs to torch; empty if it does not."""

    def __str__(self) -> str:
        device = f"CPU, in the emulator: {self.device}" if self.emulated else self.device
        lines = [f"device   {device}", f"kernel   {self.kernel or 'none can run this'}"]
        if self.instance is not None:
            lines.append(f"tile     {self.instance}")
        width = max(map(len, (*self.reasons, *self.backward_reasons)), default=0)
        lines += [f"{'not':8} {name:{width}}  {why}" for name, why in self.reasons.items()]
        lines.append(f"backward {self.backward_kernel or 'none can run this'}")
        lines += [f"{'not':8} {name:{width}}  {why}" for name, why in self.backward_reasons.items()]
        if self.left_to_torch:
            lines.append(f"SDPA     is left to torch: {self.left_to_torch}")
        return "\n".join(lines)


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
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    enable_gqa: bool = True,
    batch: int = 1,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    kernel: str = "auto",
    batch_invariant: bool = False,
    backward_kernel: str = "auto",
    deterministic: bool | None = None,
    device_facts: DeviceFacts | None = None,
) -> Explanation:
    """Which kernel and which tile :func:`flash_wmma.forward` takes for the same arguments, and why not the others.

    Nothing is computed, so q (B, Hq, Nq, d), k (B, Hk, Nk, d) and v (B, Hk, Nk, d_v) may be on the ``"meta"`` device
    if ``device_facts`` is given, which describes a device that need not be there. For a CUDA kernel named on the CPU
    the device is the one that the emulator stands for (:func:`flash_wmma.emulator.settings`). For packed sequences, as
    in :func:`flash_wmma.forward_varlen`, q is (total_q, Hq, d), k (total_k, Hk, d) and v (total_k, Hk, d_v):
    ``batch`` sequences, the longest of ``max_seqlen_q`` and ``max_seqlen_k`` rows (default: one sequence of all rows).

    ``Explanation.backward_kernel`` says which kernel computes the gradients; ``backward_kernel`` and ``deterministic``
    are those of :func:`flash_wmma.forward`. ``Explanation.left_to_torch`` says whether
    :func:`flash_wmma.scaled_dot_product_attention` would call torch instead (for tensors on a real device);
    ``dropout_p`` and ``enable_gqa`` are arguments of that function alone. For inputs that only that function takes
    (float64, other ranks, nested), nothing else is answered. In a build without CUDA the first call compiles the
    kernels for the emulator, as :func:`flash_wmma.kernels` does.

    Raises:
        TypeError, ValueError: as :func:`flash_wmma.forward`; a kernel that cannot run this is no error here.
        ImportError: ``flash_wmma._C`` was not built for this Python.
    """
    why = ""
    given = (q, k, v) if attn_bias is None else (q, k, v, attn_bias)
    if all(isinstance(t, Tensor) for t in given) and q.device.type != "meta":
        why = left_to_torch(q, k, v, attn_bias, dropout_p, bool(causal), enable_gqa)
        if why and _beyond_forward(q):
            device = device_facts or facts_of(q.device)
            return Explanation(kernel=None, instance=None, reasons={}, device=device, left_to_torch=why)
    _checks.tensors(q=q, k=k, v=v)
    _checks.device(q)
    call = call_of(causal, scale, window, attn_bias, alibi_slopes, softcap, kernel, batch_invariant)
    q, k, v, call = _autocast.cast(q, k, v, call)
    is_packed = q.dim() == 3
    _checks.inputs(q, k, v, "(total, H, d)" if is_packed else "(B, H, N, d)")
    if is_packed:
        seqlen_q = q.shape[0] if max_seqlen_q is None else max_seqlen_q
        seqlen_k = k.shape[0] if max_seqlen_k is None else max_seqlen_k
    else:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[2], k.shape[2]
    _checks.bias(call.attn_bias, q, (batch, q.shape[1], seqlen_q, seqlen_k))
    _checks.slopes(alibi_slopes, q, batch)
    _checks.options(call)
    _checks.backward_kernel(backward_kernel)
    not_built()  # in a build without CUDA: loads the kernels' facts
    if device_facts is None:
        if q.device.type == "meta":
            refuse("device_facts", None, "a DeviceFacts for tensors on the meta device")
        device_facts = facts_of(q.device)
    on_cpu = device_facts.arch == 0
    emulated = kernel != "auto" and kernel_named(kernel, "forward").device == "cuda" and on_cpu
    if emulated:
        device_facts = _emulated_facts()
    sizes = {
        "batch": batch,
        "heads_q": q.shape[1],
        "heads_k": k.shape[1],
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
        "total_q": q.shape[0],
        "total_k": k.shape[0],
    }
    problem = Problem(
        dtype=str(q.dtype).removeprefix("torch."),
        sizes=sizes,
        band=call.band,
        packed=is_packed,
        attn_bias=attn_bias is not None,
        alibi_slopes=alibi_slopes is not None,
        softcap=softcap,
        batch_invariant=batch_invariant,
    )
    answer = choose(kernel, problem, device_facts)
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
        left_to_torch=why,
    )


def _beyond_forward(q: Tensor) -> bool:
    """Whether :func:`flash_wmma.scaled_dot_product_attention` takes q, by calling torch, and :func:`flash_wmma.forward`
    does not."""
    return q.is_nested or q.dtype == torch.float64 or q.dim() not in (3, 4)


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
    return DeviceFacts(now.arch, now.sm_count, now.shared_memory, now.warp_size)
