"""Every tile shape of bwd_sm80 and bwd_sm75, in the emulator: the head dims, the shared memory of each generation of
cards, both loop orders, and what only the general instances do."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from reference import grouped
from torch import Tensor

import flash_wmma

TOLERANCE = {torch.float32: 4e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of a gradient's largest value
KIB = 1024


class Case(NamedTuple):
    nq: int
    nk: int
    causal: bool = False
    left: int = -1
    softcap: float = 0.0
    slopes: tuple[float, float] | None = None
    bias: tuple[int, int, int, int] | None = None
    dlse: bool = False
    batch: int = 1


CAUSAL = Case(70, 100, causal=True, batch=2)  # of some tile of any shape the first query does not see the last key
GENERAL = Case(150, 70, softcap=3.0, slopes=(0.3, 0.1), dlse=True)
# Of the first, the last query that sees some tile of keys begins a tile. Of the second, a query that sees all other
# keys of some tile does not see its last, or not its first.
MANY_TILES = Case(330, 140, left=3), Case(290, 259, causal=True, left=63)
WINDOW = Case(130, 100, causal=True, left=20)  # the first 30 queries see no key


def check(kernel: str, case: Case, d: int, dv: int, dtype: torch.dtype, smem_kib: int, deterministic: bool) -> None:
    """Two query heads that share a key/value head, against float64 autograd of plain attention."""
    make = torch.Generator().manual_seed(0)
    b = case.batch
    shapes = ((b, 2, case.nq, d), (b, 1, case.nk, d), (b, 1, case.nk, dv), (b, 2, case.nq, dv))
    q, k, v, dout = (torch.randn(shape, generator=make).to(dtype) for shape in shapes)
    dlse = torch.randn(b, 2, case.nq, generator=make) if case.dlse else None
    bias = torch.randn(case.bias, generator=make) if case.bias else None
    slopes = torch.tensor(case.slopes) if case.slopes else None

    wanted = [x.double().requires_grad_() for x in (q, k, v, *([bias] if bias is not None else []))]
    x = wanted[0] @ grouped(wanted[1], 2).mT * d**-0.5
    if case.softcap:
        x = case.softcap * (x / case.softcap).tanh()
    if bias is not None:
        x = x + wanted[3]
    place, key = torch.arange(case.nq)[:, None] + case.nk - case.nq, torch.arange(case.nk)
    if slopes is not None:
        x = x - slopes.double()[:, None, None] * (place - key).abs()
    seen = torch.ones(case.nq, case.nk, dtype=torch.bool)
    if case.causal:
        seen &= key <= place
    if case.left >= 0:
        seen &= key >= place - case.left
    lse = x.masked_fill(~seen, -math.inf).logsumexp(-1)
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    out = torch.where(seen, (x - finite[..., None]).exp(), 0.0) @ grouped(wanted[2], 2)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (finite * dlse.double()).sum()
    gradients = torch.autograd.grad(loss, wanted)

    def run() -> tuple[Tensor, ...]:
        return tuple(
            torch.ops.flash_wmma.backward(
                *(dout, dlse, q, k, v, out.detach().to(dtype), lse.detach().float()),
                window_left=case.left,
                window_right=0 if case.causal else -1,
                bottom_right=True,
                attn_bias=bias,
                alibi_slopes=slopes,
                softcap=case.softcap,
                bias_grad=bias is not None,
                deterministic=deterministic,
                kernel_name=kernel,
            )
        )

    with flash_wmma.emulator.settings(mode="checked", smem_optin=smem_kib * KIB):
        results = run()
        again = run() if deterministic else results
    for name, got, want, repeated in zip(("dq", "dk", "dv", "dbias"), results, gradients, again, strict=False):
        error = ((got.double() - want).abs().max() / want.abs().max()).item()
        assert error < TOLERANCE[dtype], f"{name}: {error}"
        assert torch.equal(got, repeated), name


HEAD_DIMS = [(8, 8), (32, 16), (64, 64), (40, 96), (128, 72), (136, 192), (256, 248)]
WIDE = [(512, 264), (72, 512)]  # of bwd_sm80


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("name", "d", "dv"),
    [(name, *dims) for name in ("bwd_sm80", "bwd_sm75") for dims in HEAD_DIMS] + [("bwd_sm80", *dims) for dims in WIDE],
)
def test_head_dims(name: str, d: int, dv: int, deterministic: bool) -> None:
    for case in (CAUSAL, GENERAL):
        check(name, case, d, dv, torch.float16, 227 if name == "bwd_sm80" else 64, deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 96, 128, 256, 512])
def test_many_tiles(d: int, deterministic: bool) -> None:
    """Queries and keys of several tiles: rings go round, and what one tile leaves to the next is used."""
    for case in MANY_TILES:
        check("bwd_sm80", case, d, d, torch.float16, 227, deterministic)


@pytest.mark.parametrize("smem_kib", [64, 227])
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_many_tiles_of_sm75(d: int, smem_kib: int) -> None:
    """The same, where an SM holds one block and where it holds two."""
    for case in MANY_TILES:
        check("bwd_sm75", case, d, d, torch.float16, smem_kib, False)


@pytest.mark.parametrize(("d", "dv"), [*HEAD_DIMS, *WIDE])
def test_bf16(d: int, dv: int) -> None:
    for case in (CAUSAL, GENERAL):
        check("bwd_sm80", case, d, dv, torch.bfloat16, 227, False)


@pytest.mark.parametrize("smem_kib", [99, 163])
@pytest.mark.parametrize("d", [64, 128, 192, 256, 512])
def test_less_shared_memory(d: int, smem_kib: int) -> None:
    for deterministic in (False, True):
        check("bwd_sm80", CAUSAL, d, d, torch.float16, smem_kib, deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["bwd_sm80", "bwd_sm75"])
def test_masked_rows_and_bias(name: str, deterministic: bool) -> None:
    smem_kib = 227 if name == "bwd_sm80" else 64
    check(name, WINDOW, 64, 64, torch.float16, smem_kib, deterministic)
    check(name, Case(70, 80, bias=(1, 2, 70, 80), softcap=2.0), 64, 64, torch.float16, smem_kib, deterministic)
    if not deterministic:  # a sum over what the bias is broadcast over goes by atomics
        check(name, Case(70, 80, bias=(1, 1, 1, 80), dlse=True), 128, 64, torch.float16, smem_kib, False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("name", "d", "dv"),
    [
        *((name, *dims) for name in ("bwd_sm80", "bwd_sm75") for dims in ((64, 64), (40, 96), (128, 72), (256, 248))),
        ("bwd_sm80", 512, 328),
    ],
)
def test_converted_inputs(name: str, d: int, dv: int, deterministic: bool) -> None:
    """On general instances of half, of little shared memory."""
    case = Case(70, 150, causal=True, softcap=3.0, bias=(1, 2, 70, 150), dlse=True)
    check(name, case, d, dv, torch.float32, 99 if name == "bwd_sm80" else 64, deterministic)


class Terms(NamedTuple):
    """What the gradients of statistics and of slopes add to a call."""

    nq: int
    nk: int
    left: int
    softcap: float = 0.0


def check_terms(kernel: str, case: Terms, d: int, dtype: torch.dtype, smem_kib: int, deterministic: bool) -> None:
    """Gradients through out, lse, the entropy and the column sums at once, to the slopes too."""
    make = torch.Generator().manual_seed(0)
    nq, nk = case.nq, case.nk
    shapes = ((1, 2, nq, d), (1, 1, nk, d), (1, 1, nk, d), (1, 2, nq, d))
    q, k, v, dout = (torch.randn(shape, generator=make).half().to(dtype) for shape in shapes)
    dlse, dentropy = torch.randn(2, 1, 2, nq, generator=make).unbind()
    dcolumns, slopes = torch.randn(1, 2, nk, generator=make), torch.tensor([0.05, 0.02])

    wanted = [t.double().requires_grad_() for t in (q, k, v, slopes)]
    x = wanted[0] @ grouped(wanted[1], 2).mT * d**-0.5
    if case.softcap:
        x = case.softcap * (x / case.softcap).tanh()
    place, key = torch.arange(nq)[:, None] + nk - nq, torch.arange(nk)
    seen = (key <= place) & (key >= place - case.left)
    x = (x - wanted[3][:, None, None] * (place - key).abs()).masked_fill(~seen, -math.inf)
    lse = x.logsumexp(-1)
    logs = (x - lse[..., None]).masked_fill(~seen, 0.0)
    weights = logs.exp().masked_fill(~seen, 0.0)
    out, entropy = weights @ grouped(wanted[2], 2), -(weights * logs).sum(-1)
    loss = (out * dout.double()).sum() + (lse * dlse).sum() + (entropy * dentropy).sum()
    gradients = torch.autograd.grad(loss + (weights.sum(2) * dcolumns).sum(), wanted)
    of_weights = dcolumns[:, :, None] - dentropy[..., None] * (logs + 1)
    subtrahend = (weights * of_weights).sum(-1) + dentropy

    def run() -> tuple[Tensor, ...]:
        *found, _, dslopes = torch.ops.flash_wmma.backward_with_statistics(
            *(dout, (dlse - subtrahend).detach().float(), q, k, v, out.detach().to(dtype), lse.detach().float()),
            *(dentropy, dcolumns, None, None, None, 0, 0),
            window_left=case.left,
            window_right=0,
            bottom_right=True,
            alibi_slopes=slopes,
            softcap=case.softcap,
            slopes_grad=True,
            deterministic=deterministic,
            kernel_name=kernel,
        )
        return (*found, dslopes.sum((0, 2)))

    with flash_wmma.emulator.settings(mode="checked", smem_optin=smem_kib * KIB):
        results = run()
        again = run() if deterministic else results
    for name, got, want, repeated in zip(("dq", "dk", "dv", "dslopes"), results, gradients, again, strict=True):
        error = ((got.double() - want).abs().max() / want.abs().max()).item()
        assert error < TOLERANCE[dtype], f"{name}: {error}"
        assert torch.equal(got, repeated), name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("name", "d", "dtype"),
    [
        *(("bwd_sm80", d, dtype) for d in (64, 128, 256, 512) for dtype in TOLERANCE),
        *(("bwd_sm75", d, dtype) for d in (64, 128, 256) for dtype in (torch.float32, torch.float16)),
    ],
)
def test_terms(name: str, d: int, dtype: torch.dtype, deterministic: bool) -> None:
    """Of several tiles of keys and of queries, where some tile of keys is not seen by the last queries."""
    case = Terms(150, 170, 90, softcap=4.0 if deterministic else 0.0)
    check_terms(name, case, d, dtype, 99 if name == "bwd_sm80" else 64, deterministic)
