"""The gradient of ALiBi's slopes, against plain torch ops in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from needs import needs
from reference import exact_forward, few, normal, operand_dtype
from test_backward import MASKS
from test_varlen import cumulative
from torch import Tensor

import flash_wmma

Target = tuple[flash_wmma.Kernel, torch.dtype]


def numbers(shape: tuple[int, ...], device: str, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def inputs(target: Target, nq: int, nk: int, d: int = 64, batch: int = 2) -> list[Tensor]:
    """q, k, v and the gradients of out and lse. A kernel that converts the former converts them exactly."""
    kernel, dtype = target
    shapes = ((4, nq, 1), (2, nk, 2), (2, nk, 3), (4, nq, 4))
    made = [normal((batch, h, n, d), "contiguous", dtype, kernel.device, seed) for h, n, seed in shapes]
    made = [t.to(operand_dtype(kernel, dtype)).to(dtype) for t in made]
    return [*made, numbers((batch, 4, nq), kernel.device, 5)]


def gradients(kernel: str, given: list[Tensor], slopes: Tensor, mask: str, **options: Any) -> list[Tensor]:
    """Of q, k, v and the slopes, through out and lse, where a query sees a key."""
    *leaves, dout, dlse = given
    leaves = [t.detach().requires_grad_() for t in (*leaves, slopes)]
    names = {"kernel": "math"} if kernel == "math" else {"backward_kernel": kernel, "kernel": exact_forward(leaves[0])}
    out, lse = flash_wmma.forward(
        *leaves[:3], alibi_slopes=leaves[3], causal=MASKS[mask].causal, window=MASKS[mask].window, return_lse=True,
        **names, **options,
    )  # fmt: skip
    loss = (out * dout.to(out.dtype)).sum() + (lse.masked_fill(lse.isneginf(), 0) * dlse.to(lse.dtype)).sum()
    return list(torch.autograd.grad(loss, leaves))


def compare(target: Target, got: list[Tensor], right: list[Tensor]) -> None:
    kernel, dtype = target
    # out is rounded to q's type, and so delta; dS to the type of the products
    low = max(torch.finfo(t).eps for t in (dtype, operand_dtype(kernel, dtype)))
    for name, one, its in zip(("q", "k", "v", "slopes"), got, right, strict=True):
        error = float((one.double() - its).abs().max()) / max(float(its.abs().max()), 0.1)
        assert error <= (16 if name == "slopes" else 4) * low + 1e-5, f"gradient of {name}: {error:.2e}"


@needs(
    "the gradient of alibi_slopes",
    lambda kernel, d, deterministic: (
        d <= kernel.head_dims[1] and (not deterministic or "deterministic" in kernel.features)
    ),
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", ["dense", "causal", "bottom right", "window"])
@pytest.mark.parametrize(
    ("nq", "nk", "d"), [(1, 1, 64), (1, 70, 64), (70, 1, 40), (100, 66, 64), (65, 129, 128), (9, 70, 512)]
)
def test_against_float64(backward_target: Target, nq: int, nk: int, d: int, mask: str, deterministic: bool) -> None:
    kernel, _ = backward_target
    given = inputs(backward_target, nq, nk, d, few(kernel, 2))
    shape = (4,) if deterministic else (given[0].shape[0], 4)
    slopes = numbers(shape, kernel.device, 6).abs() / 8
    got = gradients(kernel.name, given, slopes, mask, deterministic=deterministic)
    assert got[3].shape == slopes.shape
    compare(backward_target, got, gradients("math", [t.double() for t in given], slopes, mask))
    if deterministic:
        again = gradients(kernel.name, given, slopes, mask, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@needs("the gradient of alibi_slopes", "softcap", "attn_bias", "dropout", "sinks")
def test_with_everything(backward_target: Target) -> None:
    kernel, _ = backward_target
    given = inputs(backward_target, 40, 50)
    bias = numbers((4, 40, 50), kernel.device, 7)
    bias[0, 7] = -torch.inf
    options: dict[str, Any] = {
        "attn_bias": bias, "softcap": 3.0, "dropout_p": 0.3,
        "sinks": numbers((4,), kernel.device, 8),
        "rng_state": torch.tensor([1, 2], device=kernel.device),
    }  # fmt: skip
    slopes = numbers((4,), kernel.device, 6).abs() / 8
    got = gradients(kernel.name, given, slopes, "causal", **options)
    compare(backward_target, got, gradients("math", [t.double() for t in given], slopes, "causal", **options))


@needs("the gradient of alibi_slopes", "varlen", "attn_bias", "sinks")
@pytest.mark.parametrize("per_sequence", [False, True])
def test_packed(backward_target: Target, per_sequence: bool) -> None:
    """With the gradients of a bias and of sinks beside it, and a sequence without queries."""
    kernel, kernel_dtype = backward_target
    operand, device = operand_dtype(kernel, kernel_dtype), kernel.device
    lengths_q, lengths_k = (9, 0, 20), (12, 5, 16)
    shapes = ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    q, k, v = (torch.randn(sum(n), h, 16, device=device).to(operand).to(kernel_dtype) for n, h in shapes)
    slopes = torch.rand((3, 4) if per_sequence else (4,), device=device)
    bias, sinks = torch.randn(3, 1, 20, 16, device=device), torch.randn(4, device=device)

    def found(name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        cu = [cumulative(n, device) for n in (lengths_q, lengths_k)]
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        leaves += [t.clone().requires_grad_() for t in (bias, sinks, slopes)]
        kinds: dict[str, Any] = {"alibi_slopes": leaves[5], "sinks": leaves[4], "attn_bias": leaves[3]}
        kinds |= {"kernel": name} if name == "math" else {"backward_kernel": name, "kernel": exact_forward(q)}
        out, lse = flash_wmma.forward_varlen(*leaves[:3], *cu, 20, 16, return_lse=True, **kinds)
        return torch.autograd.grad(out.to(lse.dtype).square().sum() + lse.square().sum(), leaves)

    low = max(torch.finfo(t).eps for t in (kernel_dtype, operand))
    for a, b in zip(found(kernel.name, kernel_dtype), found("math", torch.float64), strict=True):
        tolerance = 1e-4 + 8 * low
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance * float(b.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_auto_takes_tensor_cores(cuda: torch.device, dtype: torch.dtype) -> None:
    made = [torch.randn(2, h, n, 64, device=cuda).to(dtype) for h, n in ((4, 70), (2, 90), (2, 90), (4, 70))]
    given = [*made, torch.randn(2, 4, 70, device=cuda)]
    slopes = torch.rand(4, device=cuda)
    name = "bwd_sm80" if flash_wmma.device_facts().arch >= 80 else "bwd_sm75"
    found = [gradients(kernel, given, slopes, "causal", deterministic=True) for kernel in ("auto", name)]
    assert all(map(torch.equal, *found))


def test_gradcheck() -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 6, 6))

    def function(slopes: Tensor) -> Tensor:
        return flash_wmma.forward(q, k, v, alibi_slopes=slopes.float()).double()

    slopes = torch.rand(2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(function, (slopes,), eps=1e-2, atol=2e-3, rtol=1e-2)


def test_flash_attn_and_autocast() -> None:
    q = torch.randn(1, 9, 2, 16, requires_grad=True)
    slopes = torch.rand(2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_wmma.flash_attn_func(q, q, q, alibi_slopes=slopes)
    dq, dslopes = torch.autograd.grad(out.float().square().sum(), (q, slopes))
    assert (out.dtype, dq.dtype, dslopes.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    exact = q.detach().bfloat16().double()
    right = flash_wmma.forward(*[exact.transpose(1, 2)] * 3, alibi_slopes=slopes, kernel="math").square().sum()
    torch.testing.assert_close(dslopes, torch.autograd.grad(right, slopes)[0], rtol=0.03, atol=0.03)


def test_compile() -> None:
    q, slopes = torch.randn(1, 2, 9, 16, requires_grad=True), torch.rand(2, requires_grad=True)

    def loss(q: Tensor, slopes: Tensor) -> Tensor:
        return flash_wmma.forward(q, q, q, alibi_slopes=slopes).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for a, b in zip(*(torch.autograd.grad(f(q, slopes), (q, slopes)) for f in (compiled, loss)), strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_refused() -> None:
    """A gradient of a gradient, and a kernel that lacks the gradient, when it is computed."""
    q, slopes = torch.randn(1, 2, 9, 16), torch.rand(2, requires_grad=True)
    (first,) = torch.autograd.grad(
        flash_wmma.forward(q, q, q, alibi_slopes=slopes).square().sum(), slopes, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="gradient of a gradient"):
        first.sum().backward()
    out = flash_wmma.forward(q.half(), q.half(), q.half(), alibi_slopes=slopes, backward_kernel="bwd_sm90")
    with pytest.raises(ValueError, match="'bwd_sm90' cannot run this: does not support the gradient of alibi_slopes"):
        out.sum().backward()
