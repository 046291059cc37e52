"""flash_wmma.reductions: the CUDA kernels, on a GPU or else in the emulator, against torch and float64."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import on_gpu
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

import flash_wmma
from flash_wmma import reductions

ops = torch.ops.flash_wmma
DEVICE = "cuda" if on_gpu() else "cpu"
WARP_SIZES = {"warp32": 32} if on_gpu() else {"warp32": 32, "wavefront64": 64}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int32)
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(reductions, name) for name in ("max", "sum", "row_max", "row_sum", "row_softmax")
}
# One element, around a vector, a warp, a block; then several warps, a block a row, and several blocks a row.
SIZES = (1, 2, 3, 7, 9, 33, 255, 1025, 2049, 5000, 20001)
MATRICES = ((1, 1), (3, 1), (700, 2), (5, 3), (9, 33), (7, 260), (4, 2050), (3, 4097), (2, 20001))


@pytest.fixture(autouse=True, params=WARP_SIZES.values(), ids=WARP_SIZES)
def emulator(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checked, with warps of 32 lanes and of 64, as on AMD; a GPU has what it has."""
    with flash_wmma.emulator.settings(mode="checked", warp_size=request.param):
        yield


def numbers(shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0, seed: int = 0) -> Tensor:
    """Random numbers, `offset` elements into memory that holds NaN, or the least int32, on both sides."""
    generator = torch.Generator().manual_seed(seed)
    n = math.prod(shape)
    poison = -(2**31) if dtype == torch.int32 else math.nan
    memory = torch.full((n + offset + 9,), poison, dtype=dtype)
    values = torch.randn(n, generator=generator)
    memory[offset : offset + n] = (
        (values * 1e9).clamp(-(2**31), 2**31 - 200).to(dtype) if dtype == torch.int32 else values
    )
    return memory.to(DEVICE)[offset : offset + n].view(shape)


def check_sum(found: Tensor, x: Tensor, dims: tuple[int, ...]) -> None:
    """int32: exact, in int64. Else within a few fp32 roundings of what was added, and one of the result's type."""
    if x.dtype == torch.int32:
        assert found.dtype == torch.int64
        assert torch.equal(found, x.sum(dims))
        return
    assert found.dtype == x.dtype
    exact = x.double().sum(dims)
    allowed = 2**-21 * x.double().abs().sum(dims) + torch.finfo(x.dtype).eps * exact.abs()
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_array(dtype: torch.dtype, offset: int) -> None:
    for n in SIZES:
        x = numbers((n,), dtype, offset, seed=n)
        assert torch.equal(reductions.max(x, kernel="shuffle"), x.amax()), n
        check_sum(reductions.sum(x, kernel="shuffle"), x, (0,))


@pytest.mark.parametrize("offset", [0, 1, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(dtype: torch.dtype, offset: int) -> None:
    for shape in MATRICES:
        x = numbers(shape, dtype, offset)
        assert torch.equal(reductions.row_max(x, kernel="shuffle"), x.amax(1)), shape
        check_sum(reductions.row_sum(x, kernel="shuffle"), x, (1,))


ROUNDS = ((520, 129), (65, 2049), (130, 700))
"""More rows than the blocks of one SM take at once: lanes of a warp a row, and a block a row of a sum and a softmax."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_blocks_that_go_round(dtype: torch.dtype) -> None:
    with flash_wmma.emulator.settings(sm_count=1):
        for shape in ROUNDS:
            x = numbers(shape, dtype)
            assert torch.equal(reductions.row_max(x, kernel="shuffle"), x.amax(1)), shape
            check_sum(reductions.row_sum(x, kernel="shuffle"), x, (1,))
            if dtype == torch.float32:
                check_softmax(reductions.row_softmax(x, kernel="shuffle"), x)


def test_more_segments_than_threads() -> None:
    """Of a row that is long enough for the block that combines its segments to go round."""
    x = torch.zeros(300 * 8192, dtype=torch.float16, device=DEVICE)
    x[-1], x[0] = 3, 1
    with flash_wmma.emulator.settings(sm_count=100):  # enough blocks for 300 segments
        assert reductions.sum(x, kernel="shuffle") == 4
        assert reductions.max(x, kernel="shuffle") == 3


def check_softmax(found: Tensor, x: Tensor) -> None:
    exact = x.double().softmax(1)
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    assert found.is_contiguous()
    # An exponential's argument is rounded: an error that grows with its size. Then the result is.
    below = (x.double().amax(1, keepdim=True) - x.double()).nan_to_num(0, 0, 0)
    allowed = 2**-23 * (below + 8) + (0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps)
    least = 2 * torch.finfo(x.dtype).tiny * torch.finfo(x.dtype).eps  # two subnormal numbers
    assert torch.equal(found.isnan(), exact.isnan())
    assert ((found.double() - exact).abs() <= allowed * exact + least).logical_or(exact.isnan()).all()


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax(dtype: torch.dtype, offset: int) -> None:
    for shape in MATRICES:
        x = 3 * numbers(shape, dtype, offset)
        check_softmax(reductions.row_softmax(x, kernel="shuffle"), x)


@pytest.mark.parametrize("columns", [11, 3000, 13000])  # lanes of a warp; a block, kept in shared memory; read again
def test_softmax_of_extreme_rows(columns: int) -> None:
    x = numbers((9, columns), torch.float32)
    x[0] = -math.inf
    x[1, :-1] = -math.inf
    x[2, columns // 2] = math.inf
    x[3, -1] = math.nan
    x[4] -= 3e4
    x[5, 0] += 500
    x[6] = torch.arange(columns, device=DEVICE) * 0.5  # every step has a new maximum
    x[7] = -x[6]
    x[8] = 3e38
    check_softmax(reductions.row_softmax(x, kernel="shuffle"), x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [5, 3000, 20001])
def test_nan_propagates(dtype: torch.dtype, n: int) -> None:
    for place in (0, 1, n // 2, n - 1):
        x = numbers((2, n), dtype)
        x[1, place] = math.nan
        for name in ("row_max", "row_sum"):
            found = FUNCTIONS[name](x, kernel="shuffle")
            assert found.isnan().tolist() == [False, True], (name, place)
        assert reductions.max(x, kernel="shuffle").isnan()
        assert reductions.sum(x, kernel="shuffle").isnan()


@pytest.mark.parametrize("n", [3, 20001])
def test_infinities(n: int) -> None:
    x = numbers((3, n), torch.float32)
    x[0] = -math.inf
    x[1, -1] = math.inf
    x[2, 0], x[2, -1] = math.inf, -math.inf
    assert torch.equal(reductions.row_max(x, kernel="shuffle"), x.amax(1))
    assert reductions.row_sum(x, kernel="shuffle").isnan().tolist() == [False, False, True]
    assert reductions.row_sum(x, kernel="shuffle")[:2].tolist() == [-math.inf, math.inf]


def test_integers_at_their_limits() -> None:
    x = torch.full((3, 9001), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    x[1:] = -(2**31)
    assert reductions.row_sum(x, kernel="shuffle").tolist() == [9001 * (2**31 - 1), *[-9001 * 2**31] * 2]
    assert reductions.row_max(x, kernel="shuffle").tolist() == [2**31 - 1, -(2**31), -(2**31)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_in_float32(dtype: torch.dtype) -> None:
    """In the type itself a sum of ones ends at 2048, or 256."""
    ones = torch.ones(2, 16384, dtype=dtype, device=DEVICE)
    assert reductions.sum(ones, kernel="shuffle") == 32768
    assert reductions.row_sum(ones[:, :4096], kernel="shuffle").tolist() == [4096, 4096]


def test_strides() -> None:
    x = numbers((40, 60), torch.float32)
    for view in (x[:, 1:-2], x[::3], x.t(), x[:, ::2], x[:1].expand(5, 60), x[:, 3:4], x[5:6], x[:, 8:48]):
        check_sum(reductions.row_sum(view, kernel="shuffle"), view, (1,))
        check_sum(reductions.sum(view, kernel="shuffle"), view, (0, 1))
        assert torch.equal(reductions.row_max(view, kernel="shuffle"), view.amax(1))
        check_softmax(reductions.row_softmax(view, kernel="shuffle"), view)
    cube = numbers((3, 5, 7), torch.float16)
    assert torch.equal(reductions.max(cube.transpose(0, 2), kernel="shuffle"), cube.amax())
    assert torch.equal(reductions.max(cube[0, 0, 0], kernel="shuffle"), cube[0, 0, 0])


@pytest.mark.parametrize("which", ["auto", "shuffle"])
def test_empty(which: str) -> None:
    empty = torch.empty(0, 5, device=DEVICE)
    assert reductions.sum(empty, kernel=which) == 0
    assert reductions.sum(empty.int(), kernel=which).dtype == torch.int64
    assert reductions.row_sum(empty, kernel=which).shape == (0,)
    assert reductions.row_max(empty, kernel=which).shape == (0,)
    assert reductions.row_softmax(empty, kernel=which).shape == (0, 5)
    assert reductions.row_sum(empty.t(), kernel=which).tolist() == [0] * 5
    assert reductions.row_softmax(empty.t(), kernel=which).shape == (5, 0)
    for refused in (lambda: reductions.max(empty, kernel=which), lambda: reductions.row_max(empty.t(), kernel=which)):
        with pytest.raises(ValueError, match=r"x\.shape: got \(.*, allowed: at least one element"):
            refused()


def test_the_same_to_the_bit_whatever_the_order_of_warps() -> None:
    x = numbers((3, 20001), torch.float32)
    expected = {name: function(x, kernel="shuffle") for name, function in FUNCTIONS.items()}
    for seed, threads in ((1, 1), (2, 2), (3, 1)):
        with flash_wmma.emulator.settings(seed=seed, threads=threads):
            for name, function in FUNCTIONS.items():
                assert torch.equal(function(x, kernel="shuffle"), expected[name]), name


@hypothesis_settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 3000),
    offset=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape(rows: int, columns: int, offset: int, dtype: torch.dtype) -> None:
    x = numbers((rows, columns), dtype, offset, seed=rows * columns)
    assert torch.equal(reductions.row_max(x, kernel="shuffle"), x.amax(1))
    check_sum(reductions.row_sum(x, kernel="shuffle"), x, (1,))
    if dtype != torch.int32:
        check_softmax(reductions.row_softmax(x, kernel="shuffle"), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_auto_gives_what_torch_gives(dtype: torch.dtype) -> None:
    x = numbers((33, 70), dtype)
    assert torch.equal(reductions.max(x), x.amax())
    assert torch.equal(reductions.row_max(x), x.amax(1))
    check_sum(reductions.sum(x), x, (0, 1))
    check_sum(reductions.row_sum(x), x, (1,))
    if dtype != torch.int32:
        check_softmax(reductions.row_softmax(x), x)


# ----------------------------------------------------------------------------------------------------- torch and errors


@pytest.mark.parametrize("op", ["array_max", "array_sum", "row_max", "row_sum", "row_softmax"])
def test_opcheck(op: str) -> None:
    for dtype in FLOATS if op == "row_softmax" else DTYPES:
        x = numbers((5, 37), dtype)
        torch.library.opcheck(getattr(ops, op).default, (x,))
        torch.library.opcheck(getattr(ops, op).default, (x.t(),))


def test_compile() -> None:
    x = numbers((5, 37), torch.float32)

    def f(x: Tensor) -> Tensor:
        return reductions.row_softmax(x) * reductions.row_sum(x)[:, None] + reductions.max(x)

    torch.testing.assert_close(torch.compile(f, backend="aot_eager", fullgraph=True)(x), f(x))


def as_torch(name: str, x: Tensor) -> Tensor:
    """The same by torch."""
    return {
        "max": lambda: x.max(), "sum": lambda: x.sum(), "row_max": lambda: x.amax(1), "row_sum": lambda: x.sum(1),
        "row_softmax": lambda: x.softmax(1),
    }[name]()  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chosen", ["auto", "shuffle"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name: str, chosen: str, dtype: torch.dtype) -> None:
    """As torch's, with ties: of a few whole numbers many share a maximum. One element, one column, a row of equals."""
    for shape in ((1, 1), (5, 1), (3, 40), (2, 300)):
        x = numbers(shape, dtype).float().mul(2).round().to(dtype)
        x[-1] = 3
        ours, torchs = (x.clone().requires_grad_() for _ in range(2))
        out, right = FUNCTIONS[name](ours, kernel=chosen), as_torch(name, torchs)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        out.backward(weight)
        right.backward(weight)
        torch.testing.assert_close(
            ours.grad, torchs.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-3 if dtype != torch.float32 else 1e-6
        )
        assert ours.grad is not None
        assert ours.grad.dtype == dtype


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck(name: str) -> None:
    """The first and the second derivatives. No two elements are closer than the steps."""
    x = (torch.randperm(15, generator=torch.Generator().manual_seed(2)).view(3, 5) / 4).double().requires_grad_()

    def function(x: Tensor) -> Tensor:
        return FUNCTIONS[name](x.to(DEVICE).float()).double()

    assert torch.autograd.gradcheck(function, (x,), eps=1e-2, atol=5e-3, rtol=1e-2)
    assert torch.autograd.gradgradcheck(function, (x,), eps=1e-2, atol=5e-3, rtol=1e-2)


def test_gradients_of_nan_and_nothing() -> None:
    """Those elements that are NaN share the gradient of a maximum that is NaN. Empty sums have an empty gradient."""
    x = torch.tensor([[1.0, math.nan, 3.0, math.nan], [1.0, 2.0, 2.0, 0.0]], device=DEVICE, requires_grad=True)
    (of_rows,) = torch.autograd.grad(reductions.row_max(x).sum(), x)
    assert of_rows.tolist() == [[0, 0.5, 0, 0.5], [0, 0.5, 0.5, 0]]
    assert torch.equal(torch.autograd.grad(reductions.max(x), x)[0], torch.autograd.grad(x.max(), x)[0])
    empty = torch.zeros(3, 0, device=DEVICE, requires_grad=True)
    for name in ("sum", "row_sum", "row_softmax"):
        assert torch.autograd.grad(FUNCTIONS[name](empty).sum(), empty)[0].shape == (3, 0)


def test_compiled_gradient() -> None:
    x = numbers((4, 9), torch.float32).requires_grad_()

    def f(x: Tensor) -> Tensor:
        return reductions.row_softmax(x).square().sum() + reductions.max(x) + reductions.row_sum(x).square().sum()

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(*(torch.autograd.grad(g(x), x)[0] for g in (compiled, f)))


def scalar(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """A loss that is not linear in what the function gives."""
    return (function(x) * torch.arange(1, 4, device=x.device).view(-1, 1)).square().sum()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x[0],), (x[1],))[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x[0]),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0]),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of vmap": lambda f, x: torch.func.vmap(torch.func.vmap(f, in_dims=2))(x[..., None]),
    "grad": lambda f, x: torch.func.grad(lambda t: scalar(f, t))(x[0]),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda t: scalar(f, t)))(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda t: torch.func.vmap(f)(t).square().sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda t: scalar(f, t))(x[0]),
    "jvp of grad": lambda f, x: torch.func.jvp(torch.func.grad(lambda t: scalar(f, t)), (x[0],), (x[1],))[1],
    "grad of jvp": lambda f, x: torch.func.grad(lambda t: torch.func.jvp(f, (t,), (x[1],))[1].square().sum())(x[0]),
    "jvp of jvp": lambda f, x: torch.func.jvp(lambda t: torch.func.jvp(f, (t,), (x[1],))[1], (x[0],), (x[1],))[1],
    "jvp of vjp": lambda f, x: torch.func.jvp(torch.func.vjp(f, x[0])[1], (f(x[0]),), (f(x[1]),))[1][0],
    "functionalize": lambda f, x: torch.func.functionalize(torch.func.grad(lambda t: scalar(f, t)))(x[0]),
}
REVERSE = ("jacrev", "grad", "jvp of vjp")
"""Those that record in reverse mode alone: the kernels run."""


def with_ties(dtype: torch.dtype = torch.float32) -> Tensor:
    """Two matrices of few whole numbers: many elements share a maximum."""
    x = numbers((2, 3, 5), torch.float32).mul(2).round()
    x[:, -1] = 3
    return x.to(dtype)


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms(name: str, transform: str) -> None:
    """As of torch's ops, with ties, and without torch's loop over what is mapped."""
    x, transformed = with_ties(), TRANSFORMS[transform]
    found = transformed(FUNCTIONS[name], x)
    # amax shares gradients as max() does, which torch cannot map without its loop
    right = transformed(torch.amax if name == "max" else lambda t: as_torch(name, t), x)
    torch.testing.assert_close(found, right)
    if transform in REVERSE:
        torch.testing.assert_close(transformed(lambda t: FUNCTIONS[name](t, kernel="shuffle"), x), right)
        return
    with pytest.raises(NotImplementedError, match=r'kernel="shuffle": of torch\.func .* kernel="auto" takes torch'):
        transformed(lambda t: FUNCTIONS[name](t, kernel="shuffle"), x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode(name: str, dtype: torch.dtype) -> None:
    """Outside of torch.func, of a tensor that requires a gradient and of one that does not."""
    x, tangent = with_ties(dtype)
    for recorded in (False, True):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(recorded), tangent)
            found = forward_ad.unpack_dual(FUNCTIONS[name](dual))
            right = forward_ad.unpack_dual(as_torch(name, dual))
            assert found.tangent.dtype == dtype
            torch.testing.assert_close(found, right)
            with pytest.raises(NotImplementedError, match=r'kernel="shuffle": .* no forward mode'):
                FUNCTIONS[name](dual, kernel="shuffle")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mapped_results_are_as_others(name: str) -> None:
    """dtypes, NaN, infinities, sums in float32 and of nothing, whether or not vmap is active, or autocast."""
    for dtype in FLOATS if name == "row_softmax" else DTYPES:
        x = numbers((2, 6, 5000), dtype)
        if dtype != torch.int32:
            x[1, 0, 3], x[1, 1, 4], x[1, 2], x[1, 3] = math.nan, math.inf, -math.inf, 1
        for kept in (x, x[:, 3:4], x[..., :1], x.transpose(1, 2)[:, :7], x[:, :0], x[..., :0]):
            if "max" in name and (kept.shape[2] == 0 or (name == "max" and kept.numel() == 0)):
                continue
            each = torch.stack([FUNCTIONS[name](of) for of in kept])
            with torch.autocast(DEVICE, torch.bfloat16):
                found = torch.func.vmap(FUNCTIONS[name])(kept)
            assert found.dtype == each.dtype
            torch.testing.assert_close(found, each, equal_nan=True)


def test_transforms_of_maxima_of_nan_and_infinity() -> None:
    """Those elements that are NaN share the derivative of a maximum that is NaN, as in reverse mode."""
    x = torch.tensor([[1, math.nan, 3, math.nan], [1, 2, 2, 0], [math.inf, 0, math.inf, 1]], device=DEVICE)
    shares = torch.tensor([[0, 0.5, 0, 0.5], [0, 0.5, 0.5, 0], [0.5, 0, 0.5, 0]], device=DEVICE)
    tangent = numbers((3, 4), torch.float32)
    maximum, moved = torch.func.jvp(reductions.row_max, (x,), (tangent,))
    torch.testing.assert_close(maximum, x.amax(1), equal_nan=True)
    torch.testing.assert_close(moved, (tangent * shares).sum(1))
    gradients = torch.func.vmap(torch.func.grad(lambda t: reductions.row_max(t).sum()))(x[None])
    torch.testing.assert_close(gradients[0], shares)
    moved = torch.func.jvp(reductions.max, (x,), (tangent,))[1]
    torch.testing.assert_close(moved, tangent[0, 1::2].mean())


@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap of grad"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_transforms(name: str, transform: str) -> None:
    x, transformed = with_ties(), TRANSFORMS[transform]
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: transformed(FUNCTIONS[name], t), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), transformed(FUNCTIONS[name], x))


def test_bad_arguments_are_named() -> None:
    x = torch.zeros(3, 4, device=DEVICE)
    for name, function in FUNCTIONS.items():
        with pytest.raises(TypeError, match=r"x: got list"):
            function([1.0])
        with pytest.raises(ValueError, match=r"x\.dtype: got torch\.float64, allowed: torch\.float32"):
            function(x.double())
        with pytest.raises(ValueError, match=r"x\.layout: got torch\.sparse_coo"):
            function(x.to_sparse())
        with pytest.raises(ValueError, match=r"kernel: got 'cub', allowed: 'auto', 'shuffle'"):
            function(x, kernel="cub")
        with pytest.raises(TypeError, match=r"kernel: got 3"):
            function(x, kernel=3)
        if name.startswith("row"):
            with pytest.raises(ValueError, match=r"x\.shape: got \(12,\), allowed: \(N, C\)"):
                function(x.flatten())
    with pytest.raises(ValueError, match=r"x\.dtype: got torch\.int32"):
        reductions.row_softmax(x.int())


@pytest.mark.gpu
def test_more_elements_than_an_int_counts(cuda: torch.device, gpu_memory: Callable[[int], None]) -> None:
    n = 2**31 + 7
    gpu_memory(5 * 2 * n)
    x = torch.zeros(n, dtype=torch.float16, device=cuda)
    x[-1], x[2**31 - 1], x[0] = 3, 2, 1
    assert reductions.sum(x) == 6
    assert reductions.max(x) == 3
    rows = x[: 2**31 + 4].view(-1, 4)
    assert reductions.row_sum(rows)[[0, 2**29 - 1]].tolist() == [1, 2]
    assert reductions.row_softmax(x[1:].view(2, -1)[:, : n // 2])[1, -1] == 0


@pytest.mark.gpu
def test_on_another_stream_and_in_a_graph(cuda: torch.device) -> None:
    x = torch.randn(300, 5000, device=cuda)
    expected = reductions.sum(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(reductions.sum(x), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = reductions.sum(x)
    x.mul_(2)
    graph.replay()
    assert torch.equal(total, 2 * expected)


# -------------------------------------------------------------------------------------------------------- the benchmark

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_benchmark(dtype: torch.dtype) -> None:
    """A row of the table: what was timed is checked, and a wrong result is no row."""
    benchmark = importlib.import_module("reductions")
    method = benchmark.timing.Method(warmup=1, repeats=3)
    x = numbers((64, 200), dtype).cpu()
    for name, pair in benchmark.ROWS.items():
        if name != "row_softmax" or dtype != torch.int32:
            row = benchmark.measured(name, pair, x, method)
            assert row["ratio"] > 0
            assert row["shape"] == [64, 200]
            with pytest.raises(AssertionError):
                benchmark.measured(name, (lambda x, f=pair[0]: f(x) * 2 + 1, pair[1]), x, method)


def test_benchmark_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = importlib.import_module("reductions")
    monkeypatch.setattr(sys, "argv", ["reductions.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        benchmark.main()
