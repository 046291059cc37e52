"""Attention in float64, the yardstick that a kernel is measured against, and inputs that hide nothing.

The yardstick: a kernel's largest error, normalised per head by the head's largest value, is at most twice plain
PyTorch attention's at the same dtype, plus 1e-5. Plain attention counts as no better than the rounding of its result.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor

import flash_wmma

libc = ctypes.CDLL(None)
M_PERTURB = -6

SCALE_ROWS = 64  # rows of a tile that share one power-of-two scale when a kernel converts its inputs


class Mask(NamedTuple):
    """The options that say which keys a query sees, as flash_wmma.forward takes them."""

    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None

    def visible(self, nq: int, nk: int, device: torch.device | str = "cpu") -> Tensor:
        """(Nq, Nk), true where the query sees the key."""
        offset = nk - nq if self.causal == "bottom_right" else 0
        place = torch.arange(nq, device=device)[:, None] + offset
        key = torch.arange(nk, device=device)[None, :]
        left, right = self.window or (None, None)
        if self.causal:
            right = 0
        seen = torch.ones(nq, nk, dtype=torch.bool, device=device)
        if left is not None and left >= 0:
            seen &= key >= place - left
        if right is not None and right >= 0:
            seen &= key <= place + right
        return seen


DENSE = Mask()


def grouped(t: Tensor, heads: int) -> Tensor:
    """k or v with one head for each query head."""
    return t.repeat_interleave(heads // t.shape[1], dim=1) if t.shape[1] not in (0, heads) else t


class Modification(NamedTuple):
    """The options that change scores, as flash_wmma.forward takes them."""

    attn_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_ranges: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are given."""
        return [t for t in self if isinstance(t, Tensor)]

    def apply(self, scores: Tensor) -> Tensor:
        """softcap, then bias, then ALiBi, then the ranges, on scaled scores (B, Hq, Nq, Nk), in their dtype."""
        nq, nk = scores.shape[2:]
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.attn_bias is not None and self.attn_bias.dtype == torch.bool:
            scores = scores.masked_fill(~self.attn_bias, -math.inf)
        elif self.attn_bias is not None:
            scores = scores + self.attn_bias.to(scores.dtype)
        if self.alibi_slopes is not None:
            place = torch.arange(nq, device=scores.device)[:, None] + nk - nq
            distance = (place - torch.arange(nk, device=scores.device)).abs()
            scores = scores - (self.alibi_slopes.to(scores.dtype)[..., None, None] * distance).to(scores.dtype)
        if self.key_ranges is not None:
            key, first, end = torch.arange(nk, device=scores.device), *self.key_ranges.long()[..., None].unbind(-2)
            scores = scores.masked_fill((key < first) | (key >= end), -math.inf)
        return scores

    def entry(self, batch: int, rows: slice = slice(None)) -> Modification:
        """That of one packed sequence, which has those rows of q."""
        bias, slopes, ranges = self.attn_bias, self.alibi_slopes, self.key_ranges
        if bias is not None and bias.dim() == 4 and bias.shape[0] > 1:
            bias = bias[batch : batch + 1]
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[batch : batch + 1]
        return Modification(bias, slopes, None if ranges is None else ranges[None, :, rows], self.softcap, self.sinks)


PLAIN = Modification()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = DENSE,
    scale: float | None = None,
    modification: Modification = PLAIN,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention written out, in the dtype of its inputs. A query that sees no key: out 0, lse -inf or its head's sink,
    which is a last key without a value. ``factors``: what dropout multiplies the weights by."""
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    k, v = grouped(k, q.shape[1]), grouped(v, q.shape[1])
    visible = mask.visible(q.shape[2], k.shape[2], q.device)
    scores = modification.apply((q @ k.transpose(2, 3)) * scale)
    scores = scores.masked_fill(~visible, -math.inf)
    if modification.sinks is not None:
        column = modification.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=3)
    empty = scores.isneginf().all(dim=3)
    scores = scores.masked_fill(empty[..., None], 0)  # whose gradient would be NaN
    weights = scores.softmax(dim=3).masked_fill(empty[..., None], 0)
    weights = weights[..., : k.shape[2]]
    return (weights if factors is None else weights * factors) @ v, scores.logsumexp(dim=3).masked_fill(
        empty, -math.inf
    )


def emulated(kernel: flash_wmma.Kernel) -> bool:
    """Whether it is a CUDA kernel that the tests run on CPU tensors, in the emulator."""
    return kernel.min_arch > 0 and kernel.device == "cpu"


def on_a_cpu(kernel: flash_wmma.Kernel) -> bool:
    """Whether the tests run it on CPU tensors."""
    return kernel.device == "cpu"


def early_rung(kernel_name: str) -> bool:
    """Whether it is one of the early rungs of the ladder on CUDA cores: little to go wrong, and slow to emulate."""
    return kernel_name.startswith("simt_")


def no_repetition(kernel: flash_wmma.Kernel, dtype: torch.dtype) -> bool:
    """Not what a test of the op around the kernel would repeat for an emulated kernel: other dtypes, early rungs."""
    return not emulated(kernel) or (dtype == kernel.dtypes[0] and not early_rung(kernel.name))


def few(kernel: flash_wmma.Kernel, number: int) -> int:
    """That many heads, batch entries or repetitions; one in the emulator, which takes a thousand times a GPU's time."""
    return 1 if emulated(kernel) else number


def exact_forward(q: Tensor) -> str:
    """The forward kernel whose lse is that of exact products: on a GPU `auto` would convert fp32, and may sum weights
    of half inputs that it has rounded."""
    if not q.is_cuda:
        return "auto"
    return "simt" if q.dtype == torch.float32 else "mma_sm75"


def operand_dtype(kernel: flash_wmma.Kernel, dtype: torch.dtype) -> torch.dtype:
    """What the kernel multiplies. CUDA kernels on tensor cores take float32 inputs as float16, and bfloat16 ones too if
    no instance reads them."""
    if kernel.min_arch == 0 or "simt" in kernel.name or kernel.name.startswith("unfused"):
        return dtype
    reads = {instance.dtype for instance in kernel.instances}
    return torch.float16 if dtype == torch.float32 or dtype not in reads else dtype


def as_multiplied(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in float64, rounded to `dtype` with a power-of-two scale per tile of rows, so that no range is lost."""
    if t.dtype == dtype or t.numel() == 0:
        return t.double()
    padding = -t.shape[2] % SCALE_ROWS
    tiles = torch.nn.functional.pad(t.double(), (0, 0, 0, padding)).unflatten(2, (-1, SCALE_ROWS))
    _, exponent = tiles.abs().amax(dim=(3, 4), keepdim=True).nan_to_num(1.0, 1.0).frexp()
    rounded = torch.ldexp(torch.ldexp(tiles, -exponent).to(dtype).double(), exponent)
    return rounded.flatten(2, 3)[:, :, : t.shape[2]]


class Reference(NamedTuple):
    """What a kernel must give, and how far from it plain PyTorch attention is."""

    out: Tensor
    lse: Tensor
    plain_error: float
    operand_eps: float


def head_error(out: Tensor, reference: Tensor) -> float:
    """The largest error of any head, normalised by that head's largest value, or by that of all heads where a head has
    too few values for its own largest to mean anything (one that is nearly 0 by chance would decide alone). Kernels
    flush subnormal numbers: results may be off by a few times the least normal one, 1e-38, whatever is beside them."""
    if out.numel() == 0:
        return 0.0
    error = ((out.double() - reference).abs().amax(dim=(2, 3)) - 4 * torch.finfo(torch.float32).tiny).clamp_min(0)
    largest = reference.abs().amax(dim=(2, 3))
    if reference.shape[2] * reference.shape[3] < 64:
        largest = largest.max()
    return float((error / largest.clamp_min(1e-300)).max())


def reference(
    kernel: flash_wmma.Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = DENSE,
    scale: float | None = None,
    modification: Modification = PLAIN,
) -> Reference:
    """Float64 attention on what the kernel multiplies, and plain attention's error at that dtype."""
    operand = operand_dtype(kernel, q.dtype)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    multiplied = [as_multiplied(t, operand) for t in (q, k, v)]
    out, lse = attention(*multiplied, mask, scale, modification)
    plain, _ = attention(*(t.to(operand) for t in multiplied), mask, scale, modification)
    rounding = max(torch.finfo(operand).eps, torch.finfo(q.dtype).eps) / 2
    eps = torch.finfo(operand).eps if kernel.min_arch else torch.finfo(torch.float32).eps
    return Reference(out, lse, max(head_error(plain, out), rounding), eps)


def check(out: Tensor, lse: Tensor, expected: Reference) -> None:
    """The yardstick, on out and on lse."""
    assert out.shape == expected.out.shape
    assert out.is_contiguous()
    assert not out.isnan().any(), "NaN in out"
    error = head_error(out, expected.out)
    assert error <= 2 * expected.plain_error + 1e-5, f"out: error {error:.3e}, plain's {expected.plain_error:.3e}"
    check_lse(lse, expected.lse, expected.operand_eps)


def check_no_key(out: Tensor, lse: Tensor, modification: Modification = PLAIN) -> None:
    """The result of queries that see no key; lse is (..., Hq, Nq)."""
    assert not out.any()
    sinks = modification.sinks
    expected = lse.new_full((1, 1), -math.inf) if sinks is None else sinks[:, None]
    torch.testing.assert_close(lse, expected.expand_as(lse), rtol=1e-6, atol=0)


def check_lse(lse: Tensor, expected: Tensor, operand_eps: float) -> None:
    """lse is a float32 sum of weights, each at worst rounded to the operands' dtype."""
    assert lse.dtype == torch.float32
    assert lse.shape == expected.shape
    assert lse.is_contiguous()
    hidden = expected.isneginf()
    assert torch.equal(lse.isneginf(), hidden), "lse is -inf for other rows than those that see no key"
    error = (lse.double() - expected).masked_fill(hidden, 0).abs()
    allowed = operand_eps + 1e-5 * expected.masked_fill(hidden, 0).abs().clamp_min(1)
    assert bool((error <= allowed).all()), f"lse: error {float(error.max()):.3e}"


def check_rows(out: Tensor, expected: Tensor, values: Tensor, scores: Tensor, eps: float) -> None:
    """Each row by itself, in units of the largest value it averages: 2 eps, and float32's rounding of the scores."""
    error = (out.double() - expected).abs().amax(dim=3) / values.clamp_min(1e-300)
    allowed = 2 * eps + 1e-5 + 2 * torch.finfo(torch.float32).eps * scores
    worst = float((error / allowed).max())
    assert worst <= 1, f"row error {worst:.2f} times what is allowed"


# ---------------------------------------------------------------------------------------------------------- the inputs

LAYOUTS = ("contiguous", "bnhd", "sliced", "odd", "transposed", "broadcast", "broadcast_rows", "poisoned_batch")


def surrounded(shape: tuple[int, int, int, int], layout: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An uninitialised view of that shape; everything else in its storage is NaN."""
    b, h, n, d = shape

    def nan(*sizes: int) -> Tensor:
        return torch.full(sizes, math.nan, dtype=dtype, device=device)

    if layout == "contiguous":
        margin = 64
        return nan(b * h * n * d + 2 * margin)[margin : margin + b * h * n * d].view(shape)
    if layout == "bnhd":
        return nan(b, n + 1, h, d)[:, :n].transpose(1, 2)
    if layout == "sliced":  # rows stay on 16-byte boundaries
        return nan(b, h + 1, n + 3, d + 16)[:, 1:, 1 : n + 1, 8 : 8 + d]
    if layout == "odd":  # rows do not
        return nan(b * h * (n + 2) * (d + 1) + 1)[1:].view(b, h, n + 2, d + 1)[:, :, 1 : n + 1, :d]
    if layout == "transposed":  # the last dimension is not contiguous
        return nan(b, h, d + 1, n + 2)[:, :, :d, 1 : n + 1].transpose(2, 3)
    if layout == "broadcast":
        return nan(1, 1, n + 1, d)[:, :, :n].expand(shape)
    if layout == "broadcast_rows":
        return nan(b, h, 1, d + 8)[..., :d].expand(shape)
    if layout == "poisoned_batch":
        return nan(2 * b + 1, h, n, d)[1::2]
    raise ValueError(layout)


def filled(view: Tensor, values: Tensor) -> Tensor:
    """The view, with the values written through it; a broadcast view takes the first of what it repeats."""
    for dim, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[dim] > 1:
            filled(view.narrow(dim, 0, 1), values.narrow(dim, 0, 1))
            return view
    view.copy_(values)
    return view


def normal(
    shape: tuple[int, int, int, int],
    layout: str = "contiguous",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Tensor:
    """Random normals in that layout, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return filled(surrounded(shape, layout, dtype, device), values.to(dtype).to(device))


RANGES = (None, "any", "any of a head", "documents", "prefix", "empty", "between numbers")


def ranges_of(
    kind: str | None, b: int, h: int, nq: int, nk: int, device: torch.device | str, seed: int = 13
) -> Tensor | None:
    """Key ranges (B or 1, Hq or 1, Nq, 2) of that kind."""
    if kind is None:
        return None
    query = torch.arange(nq)
    if kind == "documents":  # of 37 rows, before and behind the keys too
        first = (query + max(nk - nq, -40)) // 37 * 37
        return torch.stack((first, first + 37), dim=-1).int()[None, None].to(device)
    if kind == "prefix":  # ends that do not grow, and strides of 0
        end = ((query + 5) * 7 % (nk + 1)).int()
        return torch.stack((torch.zeros_like(end), end), dim=-1).to(device).expand(b, h, nq, 2)
    if kind == "empty":
        return torch.full((1, 1, nq, 2), 3, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(seed)
    heads = (b, h) if kind == "any" else (1, h)
    any_ = torch.randint(-5, nk + 6, (*heads, nq, 2), generator=generator)  # half of them end before they begin
    any_[:, :, ::5] = any_[:, :, ::5].sort(dim=-1).values
    any_[:, :, 3::7] = torch.tensor([-(2**31), 2**31 - 1])
    any_[:, :, 5::7] = torch.tensor([2**31 - 1, -(2**31)])
    if kind == "between numbers":  # which would show every key
        storage = torch.tensor([-(2**31), 2**31 - 1]).int()[:, None].repeat(1, 3).expand(1, h, nq + 2, 2, 3).clone()
        view = storage.to(device)[:, :, 1:-1, :, 1]
        return view.copy_(any_)
    return any_.int().to(device)


class _Poison:
    """Of the whole process: the first thread inside begins it, the last one ends it."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, (False, False)

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            self._before = torch.are_deterministic_algorithms_enabled(), warns
            torch.use_deterministic_algorithms(True, warn_only=True)
            libc.mallopt(M_PERTURB, 0x100)  # fills with its lowest byte's complement; 0 turns it off
            assert torch.utils.deterministic.fill_uninitialized_memory

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                libc.mallopt(M_PERTURB, 0)
                torch.use_deterministic_algorithms(self._before[0], warn_only=self._before[1])


_POISON = _Poison()


def poisoned_memory() -> contextlib.AbstractContextManager[None]:
    """Memory that is allocated inside holds NaN until it is written: on the GPU torch does it, on the CPU glibc's
    allocator (bytes of 0xff)."""
    return _POISON


def bits(t: Tensor) -> Tensor:
    """The whole storage behind a tensor, to see whether anything was written."""
    return torch.tensor([], dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).clone()


def run(
    kernel: flash_wmma.Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = DENSE,
    scale: float | None = None,
    modification: Modification = PLAIN,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of that kernel, from poisoned memory; the inputs' storages stay as they are."""
    tensors = [q, k, v, *modification.tensors]
    before = [bits(t) for t in tensors]
    with poisoned_memory():
        out, lse = flash_wmma.forward(
            q,
            k,
            v,
            causal=mask.causal,
            window=mask.window,
            scale=scale,
            kernel=kernel.name,
            return_lse=True,
            **modification._asdict(),
        )
    assert all(torch.equal(bits(t), b) for t, b in zip(tensors, before, strict=True)), "an input was written"
    assert out.dtype == q.dtype
    assert out.device == lse.device == q.device
    return out, lse
