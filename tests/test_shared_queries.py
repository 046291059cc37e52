"""Backward in several calls with the same queries and different keys, whose dq is one sum in the kernel
(SharedQueries), against float64. On Hopper, or else in the emulator, checked."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from conftest import on_gpu
from reference import Modification, poisoned_memory
from test_bwd_sm90 import SHAPES, Attention, Case, judge, solved
from torch import Tensor

import flash_wmma
from flash_wmma import _autograd
from flash_wmma._call import Call, call_of
from flash_wmma._library import ops
from flash_wmma._shared_queries import SharedQueries
from flash_wmma.distributed import _ring
from flash_wmma.distributed._agree import Place
from flash_wmma.distributed._layout import Cut
from flash_wmma.distributed._plan import Band

KERNEL = "bwd_sm90"
DEVICE = "cuda" if on_gpu() and torch.cuda.get_device_capability() == (9, 0) else "cpu"


class Piece(NamedTuple):
    """A call: its queries, its keys, and its band."""

    q: tuple[int, int]
    k: tuple[int, int]
    left: int = -1
    right: int = -1

    def visible(self) -> Tensor:
        """(queries, keys), of this piece."""
        row, key = (torch.arange(end - begin) for begin, end in (self.q, self.k))
        distance = key - row[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left >= 0:
            seen &= distance >= -self.left
        if self.right >= 0:
            seen &= distance <= self.right
        return seen


CUTS = {
    "zigzag": [Piece((0, 256), (0, 256), right=0), Piece((0, 256), (256, 384)), Piece((128, 256), (384, 640))],
    "window": [Piece((0, 200), (0, 200), 100, 0), Piece((0, 128), (200, 300), 0)],
    "middle": [Piece((64, 128), (0, 130)), Piece((0, 300), (130, 131)), Piece((192, 300), (131, 200), right=70)],
    "one row": [Piece((0, 1), (0, 1)), Piece((0, 1), (1, 260))],
    "row behind a unit": [Piece((64, 65), (0, 70)), Piece((0, 65), (70, 140), right=3)],
    "some see nothing": [Piece((0, 64), (0, 64), right=0), Piece((128, 150), (64, 128))],
}


def call_with(piece: Piece, kernel: str = KERNEL) -> Call:
    """The call of a piece."""
    call = call_of(backward_kernel=kernel)
    return call._replace(window_left=piece.left, window_right=piece.right)


def problem(
    pieces: list[Piece], heads: tuple[int, int], d: int, dv: int, dtype: torch.dtype, batch: int = 1
) -> tuple[Attention, list[Tensor]]:
    """Inputs of attention over all pieces, and float64's gradients."""
    nq, nk = (max(piece[i][1] for piece in pieces) for i in range(2))
    seen = torch.zeros(nq, nk, dtype=torch.bool)
    for piece in pieces:
        seen[slice(*piece.q), slice(*piece.k)] = piece.visible()
    mask = Modification(attn_bias=seen[None, None])
    given, expected = solved(Case(nq, nk, heads=heads, batch=batch), d, dv, dtype, modification=mask)
    return Attention(*(t.to(DEVICE) for t in given)), [t.to(DEVICE) for t in expected]


def begin(given: Attention) -> SharedQueries:
    """What the calls share. It begins with many keys, for which kernels sum dq on every device."""
    q, k, v, dout, dlse, out, lse = given
    more_k, more_v = (t.new_zeros(*t.shape[:2], 4096, t.shape[3]) for t in (k, v))
    shared = SharedQueries(dout, dlse, q, more_k, more_v, out, lse, call_of(backward_kernel=KERNEL))
    assert shared.offered
    return shared


def compute(
    given: Attention, pieces: list[Piece], sm_count: int = 2, layout: str = "bhnd", memory_bus: int = 0
) -> list[Tensor]:
    """(dq, dk, dv), from poisoned memory."""
    if layout == "bnhd":
        rows = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in given[:4])
        given = Attention(*rows, *given[4:])
    q, k, v, dout, *_ = given
    of_keys = []
    with flash_wmma.emulator.settings(mode="checked", sm_count=sm_count, memory_bus=memory_bus), poisoned_memory():
        shared = begin(given)
        for piece in pieces:
            queries, keys = slice(*piece.q), slice(*piece.k)
            tensors = dout[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys]
            of_keys.append(shared.add(piece.q[0], *tensors, call_with(piece)))
        dq = shared.end(call_with(pieces[0]))
    return [dq, *(torch.cat(parts, 2) for parts in zip(*of_keys, strict=True))]


@pytest.mark.parametrize("d", SHAPES)
@pytest.mark.parametrize("cut", CUTS)
def test_cuts(cut: str, d: int) -> None:
    """Each tile shape. Queries that begin behind others, end before others, and see nothing."""
    given, expected = problem(CUTS[cut], (2, 1), d, d, torch.float16)
    judge(compute(given, CUTS[cut]), expected, torch.float16)


@pytest.mark.parametrize(
    ("heads", "d", "dv", "batch"), [((4, 2), 40, 72, 2), ((2, 2), 128, 64, 3), ((3, 1), 100, 36, 2)]
)
def test_heads_and_batch_entries(heads: tuple[int, int], d: int, dv: int, batch: int) -> None:
    """Each finds its rows, where a call has some of them; head dims that a kernel has to pad."""
    given, expected = problem(CUTS["zigzag"], heads, d, dv, torch.bfloat16, batch)
    judge(compute(given, CUTS["zigzag"], layout="bnhd"), expected, torch.bfloat16)


@pytest.mark.parametrize("sm_count", [6, 9])
def test_items_in_parts(sm_count: int) -> None:
    """There are so few items of a call without a mask that several blocks share them, in sums that are cleared."""
    pieces = [Piece((0, 300), (0, 300)), Piece((0, 300), (300, 640))]
    given, expected = problem(pieces, (12, 1), 64, 64, torch.float16)
    judge(compute(given, pieces, sm_count), expected, torch.float16)


def test_few_keys_behind_many() -> None:
    """A call that would go by two passes if it were alone adds to the sum all the same."""
    pieces = [Piece((0, 64), (0, 600)), Piece((0, 64), (600, 640))]
    given, expected = problem(pieces, (1, 1), 64, 64, torch.float16)
    judge(compute(given, pieces, memory_bus=5120), expected, torch.float16)


def test_who_shares() -> None:
    """Not what another way of a kernel is faster for, nor kernels that cannot."""
    pieces = CUTS["zigzag"]
    given, _ = problem(pieces, (2, 1), 64, 64, torch.float16)
    q, k, v, dout, dlse, out, lse = (t.cpu() for t in given)

    def shares(kernel: str, memory_bus: int = 0) -> bool:
        with flash_wmma.emulator.settings(memory_bus=memory_bus):
            return SharedQueries(dout, dlse, q, k, v, out, lse, call_with(pieces[0], kernel)).offered

    assert shares(KERNEL)
    assert not shares(KERNEL, memory_bus=5120)  # few keys: two passes
    assert not shares("bwd_sm80")
    assert not shares("auto")


@pytest.mark.parametrize(
    ("first", "rows", "message"),
    [
        (-64, 256, "first -64"),
        (32, 256, "first 32"),
        (192, 256, "first 192"),
        (2**63 - 64, 256, "first 9223372036854775744"),  # behind which int64 begins anew
        (0, -256, "rows -256"),
        (0, 256, "first 0"),
        (0, 320, "memory"),
    ],
)
def test_other_queries_are_refused(first: int, rows: int, message: str) -> None:
    """Those that no group of rows begins with or ends with, and those that are not of the memory."""
    given, _ = problem([Piece((0, 256), (0, 64))], (1, 1), 64, 64, torch.float16)
    q, k, v, dout, *_ = given
    rest = (None, -1, -1, False, KERNEL, "auto")
    memory = begin(given)._memory
    some = slice(0, 100 if rows == 256 and first == 0 else 128)
    with pytest.raises((RuntimeError, ValueError), match=message):
        ops.backward_add(memory, first, rows, dout[:, :, some], q[:, :, some], k, v, *rest)


def test_memory_of_others_is_refused() -> None:
    """Its size and its type say whose it is."""
    given, _ = problem([Piece((0, 256), (0, 64))], (1, 1), 64, 64, torch.float16)
    q, k, v, *_ = given
    rest = (None, -1, -1, False, KERNEL, "auto")
    for memory in (torch.empty(64, dtype=torch.uint8, device=DEVICE), torch.empty(64, device=DEVICE)):
        with pytest.raises((RuntimeError, ValueError), match="memory"):
            ops.backward_end(memory, q, k, v, *rest)


def test_opcheck() -> None:
    """The schemas say what is written, and the shapes of fake tensors are right."""
    given, _ = problem([Piece((0, 128), (0, 64))], (1, 1), 64, 64, torch.float16)
    q, k, v, dout, dlse, out, lse = given
    rest = (None, -1, -1, False, KERNEL, "auto")
    memory = begin(given)._memory.zero_()
    arguments = (dout, dlse, q, k, v, out, lse, *rest)
    tests = ["test_schema", "test_faketensor"]
    torch.library.opcheck(ops.backward_begin.default, arguments, test_utils=tests)
    torch.library.opcheck(ops.backward_add.default, (memory, 0, 128, dout, q, k, v, *rest), test_utils=tests)
    torch.library.opcheck(ops.backward_end.default, (memory, q, k, v, *rest), test_utils=tests)


# ------------------------------------------------------------------------------------------------------------- the ring


class InTorch(SharedQueries):
    """The same of backward's calls, whose dq are added up here."""

    made: ClassVar[list[InTorch]] = []

    def __init__(self, dout: Tensor, dlse: Tensor | None, q: Tensor, *rest: Any) -> None:
        self._given, self._dq, self.firsts, self.offered = (dlse, *rest[2:4]), torch.zeros(q.shape), set(), True
        self.made.append(self)

    def add(self, first: int, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        rows = slice(first, first + q.shape[2])
        dlse, out, lse = (None if t is None else t[:, :, rows] for t in self._given)
        dq, dk, dv, _ = _autograd.gradients(dout, dlse, q, k, v, out, lse, False, call)
        self._dq[:, :, rows] += dq
        self.firsts.add(first)
        return dk, dv

    def end(self, call: Call) -> Tensor:
        return self._dq


def of_a_ring(n: int, band: Band, deterministic: bool) -> list[Tensor]:
    """The gradients of a ring of one rank that has several calls."""
    make = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, 16, generator=make).requires_grad_() for _ in range(3))
    place = Place(None, 1, 0)  # type: ignore[arg-type]
    ring = _ring.Ring(place, ((n, n),), band, False, Cut(1, "zigzag"), call_of(deterministic=deterministic))
    out, lse = _ring.RingAttention.apply(q, k, v, None, None, ring)
    grads = torch.autograd.grad((out * torch.randn(out.shape, generator=make)).sum() + lse.sum(), (q, k, v))
    return list(grads)


@pytest.mark.parametrize(("n", "shares"), [(256, True), (250, False)])
def test_the_ring_shares_what_it_can(n: int, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its calls begin at multiples of 64; not in deterministic calls."""
    window = Band(left=30, right=0)
    expected = of_a_ring(n, window, deterministic=True)
    monkeypatch.setattr(_ring, "SharedQueries", InTorch)
    monkeypatch.setattr(InTorch, "made", [])
    for got, want in zip(of_a_ring(n, window, deterministic=True), expected, strict=True):
        assert torch.equal(got, want)
    assert not InTorch.made
    for got, want in zip(of_a_ring(n, window, deterministic=False), expected, strict=True):
        assert (got - want).abs().max() < 1e-5
    assert [made.firsts for made in InTorch.made] == ([{0, n // 2}] if shares else [])


def test_pieces_are_apart() -> None:
    """What this file's cuts are taken for."""
    for pieces in CUTS.values():
        for a, b in itertools.pairwise(sorted(piece.k for piece in pieces)):
            assert a[1] == b[0]
