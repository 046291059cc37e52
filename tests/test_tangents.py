"""Tangents that wgmma_sm90 computes in forward's own pass, against float64. In the emulator, checked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from reference import DENSE, Mask, Modification, attention, poisoned_memory
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vmap

import flash_wmma
from flash_wmma import _ops

KERNEL = "wgmma_sm90"
HALF, BF16 = torch.float16, torch.bfloat16
Shape = tuple[int, int, int, int, int, int]

ours = functools.partial(flash_wmma.forward, kernel=KERNEL)


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """Grows by an element with each call of the kernel, which runs checked."""
    made: list[None] = []
    compute = _ops._forward_with_tangents

    def counted(*t: Any) -> Any:
        made.append(None)
        return compute(*t)

    monkeypatch.setattr(_ops, "_forward_with_tangents", counted)
    with flash_wmma.emulator.settings(mode="checked", sm_count=2):
        yield made


def tensors(shape: Shape, dtype: torch.dtype = HALF, d_v: int | None = None) -> list[Tensor]:
    """q, k and v for (batch, Hq, Hk, Nq, Nk, d), and their tangents."""
    b, hq, hk, nq, nk, d = shape
    make = torch.Generator().manual_seed(nq + nk + d)
    sizes = [(b, hq, nq, d), (b, hk, nk, d), (b, hk, nk, d_v or d)] * 2
    return [torch.randn(size, generator=make).to(dtype) for size in sizes]


def plain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """forward in plain torch ops and the inputs' dtype."""
    with_lse = options.pop("return_lse", False)
    mask = Mask(options.pop("causal", False), options.pop("window", None))
    out, lse = attention(q, k, v, mask, options.pop("scale", None), Modification(**options))
    return (out, lse) if with_lse else out


def moved(
    attend: Callable[..., Any], given: Sequence[Tensor], moves: Sequence[int] | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """out, lse, and their tangents: if those tensors move, or all."""
    half = len(given) // 2
    which = range(half) if moves is None else moves

    def function(*moving: Tensor) -> Any:
        arguments = list(given[:half])
        for i, t in zip(which, moving, strict=True):
            arguments[i] = t
        return attend(*arguments, return_lse=True, **options)

    results, tangents = jvp(function, *(tuple(of[i] for i in which) for of in (given[:half], given[half:])))[:2]
    return (*results, *tangents)


def double(given: Sequence[Tensor]) -> list[Tensor]:
    return [t.double() for t in given]


def errors(got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """The largest, in units of the largest value."""
    found = []
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        hidden = b.isneginf()
        assert torch.equal(a.isneginf(), hidden)
        a, b = (t.double().masked_fill(hidden, 0) for t in (a, b))
        assert not a.isnan().any()
        largest = float(b.abs().max()) if b.numel() else 0.0
        found.append(float((a - b).abs().max()) / max(largest, 0.1) if b.numel() else 0.0)
    return found


def check(
    given: Sequence[Tensor],
    mask: Mask = DENSE,
    factor: float = 2.0,
    moves: Sequence[int] | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """At most twice as far from float64 as plain torch ops of that dtype."""
    options |= mask._asdict()
    with poisoned_memory():
        got = moved(ours, given, moves, **options)
    numbers = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}
    right = moved(plain, double(given), moves, **numbers)
    for found, theirs in zip(errors(got, right), errors(moved(plain, given, moves, **options), right), strict=True):
        assert found <= factor * theirs + 1e-5
    return got


SHAPES: list[tuple[Shape, int | None]] = [
    ((1, 2, 1, 128, 128, 64), None),
    ((2, 4, 2, 129, 257, 64), None),
    ((1, 2, 2, 70, 300, 40), None),
    ((1, 2, 1, 260, 150, 128), None),
    ((1, 2, 2, 65, 64, 72), None),
    ((1, 2, 1, 40, 130, 64), 128),
    ((1, 2, 1, 40, 130, 96), 24),
    ((1, 2, 2, 20, 30, 7), 13),
]
MASKS = [DENSE, Mask("top_left"), Mask("bottom_right"), Mask("bottom_right", (70, 0)), Mask(False, (30, 40))]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("shape", "d_v"), SHAPES)
def test_shapes(shape: Shape, d_v: int | None, mask: Mask, passes: list[None]) -> None:
    for dtype in (HALF, BF16) if mask.causal != "top_left" else (HALF,):
        check(tensors(shape, dtype, d_v), mask)
    assert passes


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 130), (65, 1), (300, 40), (40, 300)])
def test_few_queries_or_keys(nq: int, nk: int, d: int) -> None:
    """With rows that see no key, whose tangents are 0."""
    for mask in (DENSE, Mask("bottom_right"), Mask(False, (3, -2))):
        out, lse, *tangents = check(tensors((1, 2, 1, nq, nk, d)), mask)
        for t in (out, *tangents):
            assert not t[lse.isneginf()].any()


def test_a_queue_and_many_items() -> None:
    """Causal, with more items than two for each block; consumers pass over tiles that only others see."""
    check(tensors((1, 6, 3, 520, 530, 64)), Mask("top_left"))
    check(tensors((2, 3, 1, 300, 400, 128)), Mask(False, (20, 50)))


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("moves", ["q", "the last keys", "all"])
@pytest.mark.parametrize("key", [0, 200, 559])
def test_a_key_that_has_most_of_the_weight(key: int, moves: str, d: int, dtype: torch.dtype) -> None:
    """In the tile that comes last, in between, or first: each row is as precise as its own tangent. A row's tangents
    of scores are near that of this key, not near those of the tile that came first."""
    given = tensors((1, 2, 1, 70, 560, d), dtype)
    q, k, _, dq, dk, dv = given
    q[..., 0] = 4.0
    k[..., 0] = 0.0
    k[:, :, key, 0] = 2.6 * math.sqrt(d / 4)
    if moves != "all":
        dv.zero_()
        (dk if moves == "q" else dq).zero_()
        if moves != "q":
            dk[:, :, :-32] = 0
    *_, got, of_lse = moved(ours, given)
    *_, right, lse_right = moved(plain, double(given))
    rows = (got.double() - right).norm(dim=-1) / right.norm(dim=-1)
    assert rows.max() <= 6 * torch.finfo(dtype).eps
    assert ((of_lse.double() - lse_right).abs() <= 1e-4 * (1 + lse_right.abs())).all()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("rise", [1.0, 3.0, 5.0, 20.0, 300.0])
@pytest.mark.parametrize("where", ["every row", "one row", "last tile"])
def test_rising_scores(where: str, rise: float, d: int) -> None:
    """Scores that rise, in log2 units, from each tile to the one before it, which comes next: the old maximum serves
    for some time, then for none. In all rows, in one, or in the tile that comes last alone."""
    nk, keys = 640, 64
    given = tensors((1, 2, 1, 130, nk, d))
    q, k = given[:2]
    tile = (nk - 1 - torch.arange(nk)) // keys if where != "last tile" else (torch.arange(nk) < keys).float() * 8
    q[..., 0], k[..., 0] = 0.0, 0.0
    if where == "one row":
        q[:, :, 77, 0] = 1.0
    else:
        q[..., 0] = 1.0
    k[..., 0] = (tile * rise * math.log(2) * math.sqrt(d)).clamp(max=6e4)
    if rise < 100:
        check(given)
    else:  # plain ops overflow in fp16. The last tile's tangents have thousands in common, on which c has to settle
        assert max(errors(moved(ours, given), moved(plain, double(given)))) <= 4e-3


@pytest.mark.parametrize("d", [64, 128])
def test_rows_far_apart(d: int) -> None:
    """Rows whose scores differ by e^200, a row of equal scores, and rows with one key far above all others."""
    given = tensors((1, 2, 2, 200, 300, d))
    q, k = given[:2]
    q[:, :, 3] = 0
    q[:, :, 5] *= 60
    q[:, :, 7] /= 200
    k[:, :, 20] *= 4
    check(given, factor=3)  # a row's tangents are far apart too, and c is the mean of its first tile


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0**18])
def test_scales(scale: float) -> None:
    """The last makes scores of more than 2^24, and tangents of more than fp16 holds, which are compared on rows of one
    key: the LSE moves as the score does."""
    given = tensors((1, 2, 1, 130, 200, 64), BF16)
    if scale < 1:
        check(given, scale=scale)
        check(given, Mask("top_left"), scale=scale)
    else:
        mask = Mask(False, (0, 0))._asdict()
        assert (
            max(errors(moved(ours, given, scale=scale, **mask), moved(plain, double(given), scale=scale, **mask)))
            <= 1e-2
        )


@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_what_tangents_of_a_row_have_in_common(size: float) -> None:
    """Scores that all move alike move nothing but the LSE, however far they move: weights are not rounded by it."""
    given = tensors((1, 2, 1, 130, 300, 64))
    q, _, _, *tangents = given
    for t in tangents:
        t.zero_()
    q[..., 0], tangents[1][..., 0] = 8.0, size
    _, _, dout, dlse = moved(ours, given)
    torch.testing.assert_close(dlse, torch.full_like(dlse, size), rtol=1e-6, atol=0)
    assert float(dout.abs().max()) <= 1e-6 * size


@pytest.mark.parametrize("nk", [40, 300])
def test_sinks(nk: int) -> None:
    """A sink far below all scores, some near them, one far above; with rows without keys; and sinks that move."""
    sinks = torch.tensor([-50.0, 0.0, 3.0, 60.0])
    for mask in (DENSE, Mask("bottom_right")):
        given = tensors((1, 4, 2, 90, nk, 64))
        check(given, mask, sinks=sinks)
        both = (*given[:3], sinks, *given[3:], torch.tensor([1.0, -2.0, 0.5, 1.0]))

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, f: Callable[..., Any], **options: Any) -> Any:
            return f(q, k, v, sinks=sinks, **options)

        got = moved(functools.partial(attend, f=ours), both, **mask._asdict())
        right = moved(functools.partial(attend, f=plain), double(both), **mask._asdict())
        assert max(errors(got, right)) <= 3e-3


@pytest.mark.parametrize("mask", [DENSE, Mask("bottom_right"), Mask(False, (30, 40))], ids=str)
@pytest.mark.parametrize(("shape", "d_v"), SHAPES)
def test_one_tensor_moves(shape: Shape, d_v: int | None, mask: Mask, passes: list[None]) -> None:
    """The tangents of the others are 0, but not tensors of zeros. If v alone moves, no kernel for tangents runs."""
    for moves in range(3):
        check(tensors(shape, HALF if mask == DENSE else BF16, d_v), mask, moves=[moves])
    assert len(passes) == 2


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("moves", [0, 1])
def test_rising_scores_of_one_tensor(moves: int, d: int) -> None:
    """m rises in each tile, and with it c: N has no product with dV to begin with."""
    given = tensors((1, 2, 1, 70, 400, d))
    given[1] = given[1] * torch.linspace(8, 0.1, 400)[:, None].to(HALF)
    check(given, factor=3.0, moves=[moves])


@pytest.mark.parametrize("moves", [(0, 1), (0, 2), (1, 2)])
def test_two_tensors_move(moves: tuple[int, int], passes: list[None]) -> None:
    check(tensors((1, 2, 1, 70, 200, 64)), moves=moves)
    assert len(passes) == 1


def test_finite_differences() -> None:
    given = tensors((1, 2, 1, 70, 90, 64))
    _, _, dout, dlse = moved(ours, given, causal=True)
    exact, step = double(given), 1e-4
    ends = [
        plain(*(t + sign * step * dt for t, dt in zip(exact[:3], exact[3:], strict=True)), causal=True, return_lse=True)
        for sign in (1, -1)
    ]
    slopes = [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]
    assert max(errors((dout, dlse), slopes)) <= 2e-3


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("nk", [50, 300])
def test_what_is_not_finite_stays_in_its_row(nk: int, moves: bool, value: float) -> None:
    """In q or in its tangent."""
    given = tensors((2, 4, 2, 40, nk, 64))
    right = moved(plain, double(given))
    given[3 if moves else 0][0, 1, 7, 3] = value
    got = moved(ours, given)
    others = torch.ones(2, 4, 40, dtype=torch.bool)
    others[0, 1, 7] = False
    assert max(errors([t[others] for t in got], [t[others] for t in right])) <= 2e-3
    for t in got[2:]:
        assert not t[0, 1, 7].isfinite().any()
    for t in got[:2]:
        assert t[0, 1, 7].isfinite().all() == moves


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_hidden_keys_do_not_move_rows(value: float, d: int) -> None:
    """Whatever their tangents are, and their products with q."""
    given = tensors((1, 2, 1, 150, 150, d))
    right = moved(plain, double(given), causal=True)
    given[1][:, :, 100], given[4][:, :, 100] = value, value
    got = moved(ours, given, causal=True)
    assert max(errors([t[:, :, :100] for t in got], [t[:, :, :100] for t in right])) <= 2e-3


def test_layouts() -> None:
    """Tangents and tensors of other strides, and out in the layout of flash-attn's callers."""
    given = tensors((2, 3, 3, 40, 50, 64))
    other = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
    other[4] = torch.cat((given[4], given[4]), -1)[..., 64:]
    for a, b in zip(moved(ours, given), moved(ours, other), strict=True):
        assert torch.equal(a, b)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_wmma.flash_attn_func(q, k, v, causal=True)

    q, k, v, *tangents = (t.transpose(1, 2) for t in given)
    with pytest.MonkeyPatch.context() as patch:
        taken = _ops._forward_with_tangents
        seen: list[Any] = []

        def named(*t: Any) -> Any:
            seen.append(taken(*t[:-1], KERNEL))
            return seen[-1]

        patch.setattr(_ops, "_takes_tangents", lambda *_: True)
        patch.setattr(_ops, "_forward_with_tangents", named)
        got = jvp(attend, (q, k, v), tuple(tangents))
    right = moved(plain, double(given), causal="bottom_right")
    for a, b in zip(got, (right[0], right[2]), strict=True):
        assert a.is_contiguous()
        assert errors([a.transpose(1, 2)], [b])[0] <= 2e-3


def test_transforms(passes: list[None]) -> None:
    """What asks for more than tangents is made of calls that can be differentiated and mapped, of which some take the
    kernel again."""
    given = tensors((1, 2, 1, 20, 30, 32))

    def loss(f: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda q, k, v: f(q, k, v, causal=True).float().square().sum()

    def value(f: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(f, causal=True, return_lse=True)

    every: dict[str, tuple[Callable[..., Any], int | None]] = {
        "forward over reverse": (lambda f, t: jvp(grad(loss(f), (0, 1, 2)), tuple(t[:3]), tuple(t[3:]))[1], 1),
        "reverse over forward": (
            lambda f, t: grad(lambda q: jvp(loss(f), (q, *t[1:3]), tuple(t[3:]))[1])(t[0]),
            0,
        ),
        "forward over forward": (
            lambda f, t: jvp(lambda q: jvp(value(f), (q, *t[1:3]), tuple(t[3:]))[1], (t[0],), (t[3],))[1],
            None,
        ),
        "mapped tangents": (
            lambda f, t: vmap(lambda dq: jvp(lambda q: value(f)(q, *t[1:3]), (t[0],), (dq,))[1])(
                torch.stack((t[3], t[0]))
            ),
            0,
        ),
        "tangents of a mapped call": (
            lambda f, t: jvp(
                vmap(value(f)), tuple(torch.stack((x, x)) for x in t[:3]), tuple(torch.stack((x, x)) for x in t[3:])
            )[1],
            1,
        ),
        "jacobian": (lambda f, t: jacfwd(lambda x: f(t[0][:, :, :1] * x, *t[1:3]))(t[0].new_ones(2, 1, 1)), 0),
    }
    for name, (transformed, calls) in every.items():
        passes.clear()
        got, right = transformed(ours, given), transformed(plain, double(given))
        got, right = ((t,) if isinstance(t, Tensor) else t for t in (got, right))
        assert max(errors(got, right)) <= 5e-3, name
        assert calls is None or len(passes) == calls, name

    passes.clear()
    dual, unpacked = (getattr(forward_ad, name) for name in ("make_dual", "unpack_dual"))
    with forward_ad.dual_level():
        made = value(ours)(*(dual(a, b) for a, b in zip(given[:3], given[3:], strict=True)))
        tangents = [unpacked(t).tangent for t in made]
    assert max(errors(tangents, moved(plain, double(given), causal=True)[2:])) <= 2e-3
    assert len(passes) == 1

    def recorded(f: Callable[..., Any], t: Sequence[Tensor]) -> Any:
        with forward_ad.dual_level():
            leaves = [dual(a, b).requires_grad_() for a, b in zip(t[:3], t[3:], strict=True)]
            out = f(*leaves, causal=True)
            return unpacked(out).tangent.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)

    assert max(errors(recorded(ours, given), recorded(plain, double(given)))) <= 5e-3


def test_no_queries_or_no_keys() -> None:
    for nq, nk in ((0, 3), (3, 0)):
        given = tensors((1, 2, 1, nq, nk, 64))
        out, lse, dout, dlse = moved(ours, given)
        assert lse.isneginf().all()
        assert not any(t.any() for t in (out, dout, dlse))


def test_who_has_tangents(passes: list[None]) -> None:
    """Plain dense problems on sm_90, of fp16 and bf16 and heads up to 128. All other calls are made of others."""
    device = flash_wmma.DeviceFacts(arch=90, sm_count=132, smem_optin=227 * 1024)
    q = torch.empty(2, 8, 1000, 64, dtype=HALF, device="meta")

    def tangents(t: Tensor, **options: Any) -> bool:
        return flash_wmma.explain(t, t, t, device_facts=options.pop("device_facts", device), **options).tangents

    assert tangents(q)
    assert tangents(q, window=(100, 3), causal="bottom_right", sinks=torch.empty(8, device="meta"))
    assert tangents(torch.empty(2, 8, 1000, 128, dtype=BF16, device="meta"))
    assert not tangents(q.float())
    assert not tangents(q, softcap=3.0)
    assert not tangents(q, alibi_slopes=torch.empty(8, device="meta"))
    assert not tangents(torch.empty(2, 8, 1000, 136, dtype=HALF, device="meta"))
    assert not tangents(torch.empty(1000, 8, 64, dtype=HALF, device="meta"))
    assert not tangents(q, device_facts=flash_wmma.DeviceFacts(80, 108, 163 * 1024))

    given = tensors((1, 2, 2, 10, 12, 16))
    for options in ({"softcap": 2.0}, {"alibi_slopes": torch.rand(2)}, {"backward_kernel": "bwd_cpu"}):
        moved(functools.partial(flash_wmma.forward, kernel="cpu"), given, **options)
        assert not passes


def test_op() -> None:
    """What torch asks of an op, and what it refuses."""
    ops = flash_wmma._library.ops
    q, k, v, dq, dk, dv = tensors((1, 2, 1, 5, 6, 16))
    op = ops.forward_with_tangents.default
    torch.library.opcheck(op, (q, k, v, dq, None, dv), {"kernel_name": KERNEL, "out_bnhd": True})
    assert ops.takes_tangents(q, k, v, kernel_name=KERNEL)
    assert not ops.takes_tangents(q, k, v)
    with pytest.raises((ValueError, RuntimeError), match="kernel 'cpu' has no tangents"):
        op(q, k, v, dq, dk, dv, kernel_name="cpu")
    for wrong in (dq[:, :, 1:], dq.float()):
        with pytest.raises((ValueError, RuntimeError), match="dq"):
            op(q, k, v, wrong, dk, dv, kernel_name=KERNEL)
