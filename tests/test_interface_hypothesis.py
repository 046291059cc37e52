"""The whole interface as hypothesis finds it: any call that the kernels say they take, forward and gradients, against
float64.

A failure prints the smallest call that fails. To repeat it, in this folder:
``python -c "from test_interface_hypothesis import *; check(Call(...))"``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from conftest import emulated_kernel, obstacle, on_gpu
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from reference import (
    LAYOUTS,
    Mask,
    Modification,
    attention,
    bits,
    check_lse,
    check_rows,
    early_rung,
    emulated,
    filled,
    grouped,
    operand_dtype,
    poisoned_memory,
    surrounded,
)
from torch import Tensor

import flash_wmma

Target = tuple[flash_wmma.Kernel, torch.dtype]
Draw = Callable[[st.SearchStrategy[Any]], Any]

EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96)
HEAD_DIMS = (1, 8, 16, 20, 33, 40, 64, 65)
OPTIONS = ("kernel", "causal", "window", "scale", "softcap", "return_lse", "batch_invariant")
SPACED = ("contiguous", "strided", "repeated", "expanded")
SLOPES = (*itertools.product((1, 2), SPACED[:2]), (2, "repeated"), (1, "expanded"))
BIAS_LAYOUTS = ("contiguous", "bnhd", "sliced", "odd", "transposed", "poisoned_batch")

# ------------------------------------------------------------------------------------------------------------ the call


class Short:
    """A dataclass whose repr leaves out what has its default."""

    def __repr__(self) -> str:
        values = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        shown = ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)
        return f"{type(self).__name__}({shown})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For hypothesis."""
        printer.text(repr(self))


@dataclasses.dataclass(frozen=True, repr=False)
class Bias(Short):
    """An attn_bias; each of its dimensions is "full", of size "one", or "expanded" from that (stride 0)."""

    dtype: torch.dtype = torch.float32
    sizes: tuple[str, ...] = ("full", "full")
    layout: str = "contiguous"
    hides: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class Packed(Short):
    """What forward_varlen adds. The pairs are of q, and of k and v."""

    before: tuple[int, int] = (0, 0)
    """Rows before the first sequence."""
    behind: tuple[int, int] = (0, 0)
    """Rows behind the last."""
    slack: tuple[int, int] = (0, 0)
    """By which max_seqlen is above the longest sequence."""
    used: tuple[int, ...] | None = None
    """seqused_k."""
    spaced: str = "contiguous"
    """How cu_seqlens and seqused_k lie in memory."""


@dataclasses.dataclass(frozen=True, repr=False)
class Gradients(Short):
    """Of a loss that sees out and lse, or one of them: the other's layout is ``None``."""

    kernel: str = "auto"
    dout: str | None = "contiguous"
    dlse: str | None = None
    of_bias: bool = False
    deterministic: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class Call(Short):
    """What a call is made of; the numbers in its tensors are always the same."""

    kernel: str
    dtype: torch.dtype
    lengths: tuple[tuple[int, int], ...] = ((1, 1),)
    """(Nq, Nk) of each sequence; the batch entries of a dense call have the same."""
    heads: tuple[int, int] = (1, 1)
    head_dims: tuple[int, int] = (1, 1)
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float = 0.0
    bias: Bias | None = None
    slopes: tuple[int, str] | None = None
    """Their dimensions, (Hq) or (B, Hq), and how they lie in memory."""
    return_lse: bool = True
    batch_invariant: bool = False
    packed: Packed | None = None
    gradients: Gradients | None = None

    @property
    def full(self) -> tuple[int, int, int, int]:
        """(B, Hq, Nq, Nk), or with max_seqlen_q and max_seqlen_k."""
        nq, nk = (max(side) for side in zip(*self.lengths, strict=True))
        more = self.packed.slack if self.packed else (0, 0)
        return len(self.lengths), self.heads[0], nq + more[0], nk + more[1]

    def ends(self, side: int) -> list[int]:
        """cu_seqlens of q (0) or of k and v (1)."""
        assert self.packed
        return list(itertools.accumulate((n[side] for n in self.lengths), initial=self.packed.before[side]))

    def rows(self, side: int) -> int:
        """Of q (0), or of k and v (1), a batch entry."""
        return self.ends(side)[-1] + self.packed.behind[side] if self.packed else self.lengths[0][side]


class Sequence(NamedTuple):
    """Where a sequence, or a batch entry, lies."""

    index: int
    queries: slice
    keys: slice
    """That are in use."""
    packed: bool

    def of(self, t: Tensor, rows: slice) -> Tensor:
        """As (1, H, N, d)."""
        return t[rows].transpose(0, 1)[None] if self.packed else t[self.index : self.index + 1]

    def of_lse(self, t: Tensor) -> Tensor:
        """As (1, H, N)."""
        return t[None, :, self.queries] if self.packed else t[self.index : self.index + 1]


def sequences(call: Call) -> Iterator[Sequence]:
    for index, (nq, nk) in enumerate(call.lengths):
        begin_q, begin_k, used = 0, 0, nk
        if call.packed:
            begin_q, begin_k = call.ends(0)[index], call.ends(1)[index]
            used = min(nk, call.packed.used[index]) if call.packed.used else nk
        yield Sequence(index, slice(begin_q, begin_q + nq), slice(begin_k, begin_k + used), call.packed is not None)


def unused(call: Call, side: int) -> Tensor:
    """The packed rows of q (0), or of k and v (1), that are in no sequence, or not in use."""
    rows = torch.ones(call.rows(side), dtype=torch.bool)
    for sequence in sequences(call):
        rows[sequence.keys if side else sequence.queries] = False
    return rows


# ------------------------------------------------------------------------------------------------------------ any call


def forward_kernel(name: str) -> flash_wmma.Kernel:
    kernel = next(kernel for kernel in flash_wmma.kernels() if kernel.name == name)
    return kernel if kernel.device == "cpu" or on_gpu() else emulated_kernel(kernel)


def backward_kernels(name: str, kernel: flash_wmma.Kernel, dtype: torch.dtype) -> list[flash_wmma.Kernel]:
    """The one of that name, or those that "auto" may take behind that forward kernel."""
    every = (b if b.device == "cpu" or on_gpu() else emulated_kernel(b) for b in flash_wmma.kernels("backward"))
    takes = [b for b in every if b.device == kernel.device and dtype in b.dtypes and not obstacle(b, dtype)]
    return [b for b in takes if b.name == name or (name == "auto" and not emulated(b))]


def sometimes(draw: Draw, strategy: st.SearchStrategy[Any], otherwise: Any = None, possible: bool = True) -> Any:
    return draw(strategy) if possible and draw(st.booleans()) else otherwise


@st.composite
def calls(draw: Draw, kernels: list[str], dtype: torch.dtype, backward: list[str | None]) -> Call:
    """One that a kernel of the first takes, and then one of the others."""
    kernel, then = forward_kernel(draw(st.sampled_from(kernels))), draw(st.sampled_from(backward))
    followers = backward_kernels(then, kernel, dtype) if then else []
    has = frozenset.intersection(*(k.features for k in (kernel, *followers)))
    small = any(emulated(k) for k in (kernel, *followers))
    low = max(k.head_dims[0] for k in (kernel, *followers))
    high = min(k.head_dims[1] for k in (kernel, *followers))

    heads_k, group = draw(st.integers(1, 2 if small else 3)), draw(st.integers(1, 2 if small else 4))
    head_dim = st.sampled_from([d for d in HEAD_DIMS if low <= d <= high]) | st.integers(low, high)
    d = draw(head_dim)
    dv = sometimes(draw, head_dim, d, "d_v != d" in has)
    length = st.sampled_from(EDGES) | st.integers(0, 100)
    packed = None
    if "varlen" in has and draw(st.booleans()):
        few = st.lists(st.tuples(length, length), min_size=1, max_size=3)
        many = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=33, max_size=36)
        lengths = tuple(draw(many if draw(st.integers(0, 7)) == 7 else few))
        packed = draw(packings(len(lengths)))
    else:
        lengths = ((draw(length), draw(length)),) * draw(st.integers(1, 2 if small else 3))
    bound = st.none() | st.integers(-1, 80)
    bias = sometimes(draw, biases(dtype), None, "attn_bias" in has)
    gradients = draw(losses(then, bias, followers)) if then else None
    return Call(
        kernel=kernel.name,
        dtype=dtype,
        lengths=lengths,
        heads=(heads_k * group, heads_k),
        head_dims=(d, dv),
        layouts=draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3)),
        causal=draw(st.sampled_from([False, "top_left", "bottom_right"])) if "causal" in has else False,
        window=sometimes(draw, st.tuples(bound, bound), None, "window" in has),
        scale=sometimes(draw, st.floats(-2, 2, width=16)),
        softcap=sometimes(draw, st.floats(0.5, 50, width=16), 0.0, "softcap" in has),
        bias=bias,
        slopes=sometimes(draw, st.sampled_from(SLOPES), None, "alibi_slopes" in has),
        return_lse=gradients is None or gradients.dlse is not None or draw(st.booleans()),
        batch_invariant=draw(st.booleans()),
        packed=packed,
        gradients=gradients,
    )


def packings(count: int) -> st.SearchStrategy[Packed]:
    rows = st.just((0, 0)) | st.tuples(st.integers(0, 20), st.integers(0, 20))
    used = st.none() | st.tuples(*[st.integers(0, 100)] * count)
    return st.builds(Packed, rows, rows, rows, used, st.sampled_from(SPACED[:2]))


def biases(dtype: torch.dtype) -> st.SearchStrategy[Bias]:
    dtypes = list(dict.fromkeys([torch.float32, dtype, torch.bool]))
    sizes = st.lists(st.sampled_from(["full", "one", "expanded"]), max_size=4).map(tuple)
    return st.builds(Bias, st.sampled_from(dtypes), sizes, st.sampled_from(BIAS_LAYOUTS), st.booleans())


@st.composite
def losses(draw: Draw, backward: str, bias: Bias | None, kernels: list[flash_wmma.Kernel]) -> Gradients:
    has = frozenset.intersection(*(kernel.features for kernel in kernels))
    dlse = draw(st.none() | st.sampled_from(SPACED))
    dout = st.sampled_from([*LAYOUTS, "expanded"])
    of_bias, reduced = False, False
    if bias and bias.dtype != torch.bool and "the gradient of attn_bias" in has:
        of_bias = draw(st.booleans())
        reduced = of_bias and (len(bias.sizes) < 4 or "one" in bias.sizes)
    deterministic = "the gradient of a broadcast attn_bias with deterministic" if reduced else "deterministic"
    return Gradients(
        backward,
        draw(dout if dlse is None else st.none() | dout),
        dlse,
        of_bias,
        deterministic in has and draw(st.booleans()),
    )


# --------------------------------------------------------------------------------------------------------- its tensors


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    attn_bias: Tensor | None
    alibi_slopes: Tensor | None
    dout: Tensor | None
    dlse: Tensor | None
    lengths: list[Tensor]
    """cu_seqlens_q, cu_seqlens_k and perhaps seqused_k of packed sequences."""


def spaced(values: Tensor, how: str) -> Tensor:
    """A small argument as callers come by it: every other number of a tensor, or one number or row many times."""
    if how == "strided":
        storage = torch.full((*values.shape, 2), -1000, dtype=values.dtype, device=values.device)
        return storage[..., 0].copy_(values)
    if how == "repeated":
        return values[:1].expand(values.shape)
    if how == "expanded" and values.numel():
        return values.flatten()[0].expand(values.shape)
    return values


def made(call: Call, operand: torch.dtype, device: str) -> Tensors:
    """Random normals that `operand` holds too. What is around them, and rows of no sequence, are NaN."""
    generator = torch.Generator().manual_seed(1)
    batch, hq, *_ = call.full
    packed, gradients = call.packed, call.gradients

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def rows(side: int, heads: int, width: int, layout: str) -> Tensor:
        shape = (1 if packed else batch, heads, call.rows(side), width)
        values = random(*shape).to(operand).to(call.dtype)
        if packed and layout not in ("broadcast_rows", "expanded"):
            values[:, :, unused(call, side)] = math.nan
        if layout == "expanded":
            view = spaced(values, layout)
        else:
            view = filled(surrounded(shape, layout, call.dtype, device), values)
        return view[0].transpose(0, 1) if packed else view

    d, dv = call.head_dims
    q, k, v = (
        rows(*facts)
        for facts in zip((0, 1, 1), (hq, call.heads[1], call.heads[1]), (d, d, dv), call.layouts, strict=True)
    )
    slopes = spaced(random(*(batch, hq)[-call.slopes[0] :]).abs(), call.slopes[1]) if call.slopes else None
    dout = rows(0, hq, dv, gradients.dout) if gradients and gradients.dout else None
    dlse = None
    if gradients and gradients.dlse:
        dlse = spaced(random(*((hq, q.shape[0]) if packed else (batch, hq, q.shape[2]))), gradients.dlse)
    lengths = [call.ends(0), call.ends(1), *([packed.used] if packed.used else [])] if packed else []
    ends = [spaced(torch.tensor(n, dtype=torch.int32, device=device), packed.spaced) for n in lengths if packed]
    return Tensors(q, k, v, bias_of(call, generator, device), slopes, dout, dlse, ends)


def bias_of(call: Call, generator: torch.Generator, device: str) -> Tensor | None:
    if not call.bias:
        return None
    absent = 4 - len(call.bias.sizes)
    sizes = dict(enumerate(call.bias.sizes, absent))
    stored = tuple(n if sizes.get(dim) == "full" else 1 for dim, n in enumerate(call.full))
    shown = tuple(n if sizes.get(dim) == "expanded" else -1 for dim, n in enumerate(call.full))
    values = torch.randn(stored, generator=generator)
    hidden = torch.rand(stored, generator=generator) < 0.3
    if call.bias.dtype == torch.bool:
        values = ~hidden
    elif call.bias.hides:
        values[hidden] = -math.inf
    view = surrounded(stored, call.bias.layout, call.bias.dtype, device)
    return filled(view, values.to(call.bias.dtype).to(device)).expand(shown)[(0,) * absent]


# ---------------------------------------------------------------------------------------------------- what it must give


def largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


class Expected(NamedTuple):
    """Of a sequence."""

    out: Tensor
    lse: Tensor
    values: Tensor
    """The largest that each row averages."""
    scores: float
    """The largest, each term for itself."""


def expected(call: Call, given: Tensors) -> tuple[list[Expected], list[Tensor], list[float]]:
    """Of each sequence, the gradients, and for each gradient what an error is measured by.

    That is its largest value; but its terms may cancel, and do so where a query sees one key. What is left then is the
    rounding of out, which changes the others as a gradient of lse would."""
    leaves = [t.detach().double().requires_grad_() for t in given[:3]]
    bias, slopes, full = given.attn_bias, given.alibi_slopes, call.full
    if bias is not None and bias.dtype != torch.bool:
        leaves.append(bias := bias.detach().double().requires_grad_())
    bias = None if bias is None else bias.expand(full)
    slopes = None if slopes is None else slopes.expand(full[:2])
    mask, scale = Mask(call.causal, call.window), call.scale
    scale = 1 / math.sqrt(call.head_dims[0]) if scale is None else scale
    each, loss, of_rounding, of_v = [], *torch.zeros(3, dtype=torch.float64, device=given.q.device)
    for one in sequences(call):
        q, k, v = (one.of(t, rows) for t, rows in zip(leaves, (one.queries, one.keys, one.keys), strict=False))
        nq, nk, entry = q.shape[2], k.shape[2], slice(one.index, one.index + 1)
        modification = Modification(
            None if bias is None else bias[entry, :, :nq, :nk],
            None if slopes is None else slopes[entry],
            softcap=call.softcap,
        )
        out, lse = attention(q, k, v, mask, scale, modification)
        seen = lse.masked_fill(lse.isneginf(), 0)
        with torch.no_grad():
            averaged, _ = attention(q, k, v.abs(), mask, scale, modification)
            products = (scale * q @ grouped(k, q.shape[1]).transpose(2, 3)).abs()
            distances = Modification(alibi_slopes=modification.alibi_slopes).apply(torch.zeros_like(products))
            scores = largest(products - distances)
            each.append(Expected(out.detach(), lse.detach(), averaged.amax(3), scores))
            dout = torch.zeros_like(out) if given.dout is None else one.of(given.dout, one.queries).double()
            dlse = torch.zeros_like(lse) if given.dlse is None else one.of_lse(given.dlse).double()
            rounding = (averaged * dout).square().sum(3).sqrt() + dlse.abs()
        loss = loss + (out * dout).sum() + (seen * dlse).sum()
        of_rounding = of_rounding + (seen * rounding).sum()
        of_v = of_v + (out * dout.abs()).sum()
    if not call.gradients:
        return each, [], []
    gradients, by_rounding, by_v = (
        torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)
        for total in (loss, of_rounding, of_v)
    )
    units = [t.abs() + (by_v if i == 2 else by_rounding)[i].abs() for i, t in enumerate(gradients)]
    return each, list(gradients), [largest(t) for t in units]


def run(call: Call, given: Tensors) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """out, lse if the call returns it, and the gradients."""
    q, k, v, bias = (None if t is None else t.detach() for t in given[:4])
    options = {name: getattr(call, name) for name in OPTIONS} | {"attn_bias": bias, "alibi_slopes": given.alibi_slopes}
    leaves = []
    if call.gradients:
        leaves = [q, k, v, bias] if call.gradients.of_bias else [q, k, v]
        options |= {"backward_kernel": call.gradients.kernel, "deterministic": call.gradients.deterministic}
    for leaf in leaves:
        leaf.requires_grad_()
    if call.packed:
        ends_q, ends_k, *used = given.lengths
        options |= {"seqused_k": used[0]} if used else {}
        result = flash_wmma.forward_varlen(q, k, v, ends_q, ends_k, *call.full[2:], **options)
    else:
        result = flash_wmma.forward(q, k, v, **options)
    out, lse = result if call.return_lse else (result, None)
    if not call.gradients:
        return out, lse, []
    loss = {t: dt for t, dt in ((out, given.dout), (lse, given.dlse)) if dt is not None}
    gradients = torch.autograd.grad(list(loss), leaves, list(loss.values()))
    return out.detach(), None if lse is None else lse.detach(), list(gradients)


def check(call: Call) -> None:
    """Everything that the call gives; the arguments' storages stay as they are."""
    kernel = forward_kernel(call.kernel)
    backward = backward_kernels(call.gradients.kernel, kernel, call.dtype) if call.gradients else []
    types = [call.dtype, *(operand_dtype(k, call.dtype) for k in (kernel, *backward))]
    coarsest = max(types, key=lambda dtype: torch.finfo(dtype).eps)
    given = made(call, coarsest, kernel.device)
    arguments = [t for t in (*given[:-1], *given.lengths) if t is not None]
    before = [bits(t) for t in arguments]
    with poisoned_memory():
        out, lse, gradients = run(call, given)
    assert all(torch.equal(bits(t), b) for t, b in zip(arguments, before, strict=True)), "an argument was written"

    each, true_gradients, units = expected(call, given)
    assert out.shape == (*given.q.shape[:-1], call.head_dims[1])
    assert out.dtype == call.dtype
    assert out.is_contiguous()
    eps, float32_eps = (torch.finfo(dtype).eps for dtype in (coarsest, torch.float32))
    for one, its in zip(sequences(call), each, strict=True):
        if its.out.numel():
            check_rows(one.of(out, one.queries), its.out, its.values, torch.full_like(its.lse, its.scores), eps)
        if lse is not None:
            of_weights = eps if kernel.min_arch else float32_eps
            check_lse(one.of_lse(lse).contiguous(), its.lse, of_weights + 2 * float32_eps * its.scores)
    if call.packed:
        assert not out[call.ends(0)[-1] :].any()
        assert lse is None or bool(lse[:, call.ends(0)[-1] :].isneginf().all())
        assert not any(t[unused(call, side)].any() for t, side in zip(gradients, (0, 1, 1), strict=False))
    allowed = 4 * eps + 1e-5 + 4 * float32_eps * max(its.scores for its in each)
    leaves = zip(("dq", "dk", "dv", "dbias"), given, strict=False)
    for (name, leaf), gradient, true, unit in zip(leaves, gradients, true_gradients, units, strict=False):
        assert gradient.shape == leaf.shape
        assert gradient.dtype == leaf.dtype
        assert not gradient.isnan().any(), f"NaN in {name}"
        error = largest(gradient.double() - true)
        underflow = torch.finfo(leaf.dtype).smallest_normal * torch.finfo(leaf.dtype).eps
        assert error <= allowed * unit + underflow, f"{name}: error {error / (unit or 1):.3e}, allowed {allowed:.3e}"


def search(request: pytest.FixtureRequest, examples: int, some: st.SearchStrategy[Call]) -> None:
    """Tries that many calls, ten times as many with --every-combination, others for each kernel and dtype."""

    @seed(zlib.crc32(request.node.name.encode()))
    @settings(
        max_examples=examples * (10 if request.config.getoption("--every-combination") else 1),
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(call=some)
    def any_call(call: Call) -> None:
        check(call)

    any_call()


def test_any_call(target: Target, request: pytest.FixtureRequest) -> None:
    """Of a forward kernel, with the gradients that follow of themselves."""
    kernel, dtype = target
    examples = 40 if not emulated(kernel) else 4 if early_rung(kernel.name) else 15
    search(request, examples, calls([kernel.name], dtype, [None, "auto"]))


def test_any_gradient(backward_target: Target, request: pytest.FixtureRequest) -> None:
    """Of a backward kernel, behind any forward kernel of its device that has most features."""
    kernel, dtype = backward_target
    forward = [forward_kernel(k.name) for k in flash_wmma.kernels() if {"varlen", "attn_bias"} <= k.features]
    forward = [k for k in forward if k.device == kernel.device and emulated(k) <= emulated(kernel)]
    names = [k.name for k in forward if dtype in k.dtypes and not obstacle(k, dtype)]
    search(request, 10 if emulated(kernel) else 40, calls(names, dtype, [kernel.name]))
