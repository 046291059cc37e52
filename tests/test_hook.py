"""Gradients of torch's own attention with these kernels behind it, and queries and keys of different lengths there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

import flash_wmma
from flash_wmma import _hook

HOOK = hasattr(torch.nn.attention, "activate_flash_attention_impl") and hasattr(torch.library, "get_kernel")


@pytest.fixture
def activated() -> Iterator[None]:
    if not HOOK:
        pytest.skip("this torch has no flash-attention hook")
    torch.nn.attention.activate_flash_attention_impl(_hook.NAME)
    yield
    if torch.nn.attention.current_flash_attention_impl() == _hook.NAME:
        torch.nn.attention.restore_flash_attention_impl()


def tensors(nq: int = 20, nk: int = 33, device: str = "cpu") -> list[Tensor]:
    """q, k, v and out's gradient."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, 4, n, 64, generator=generator) for n in (nq, nk, nk, nq)]
    return [t.to(device, torch.float16 if device == "cuda" else torch.float32) for t in made]


def ran(what: Any) -> set[str]:
    with torch.profiler.profile() as profile:
        what()
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "half", "scale"])
@pytest.mark.parametrize("compiled", [False, True])
def test_backward_on_the_cpu(activated: None, kind: str, compiled: bool) -> None:
    """Both passes are this library's, and a compiled graph finds the strides that torch promises."""
    q, k, v, dout = (t.bfloat16() if kind == "half" else t for t in tensors())
    mask = torch.rand(20, 33, generator=torch.Generator().manual_seed(1)) > 0.5 if kind == "mask" else None
    if mask is not None:
        mask[3] = False
    inputs = [t.requires_grad_() for t in (q, k, v)]
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": kind == "causal"}
    options["scale"] = 0.3 if kind == "scale" else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, **options)

    def gradients(attend: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*inputs), inputs, dout)

    torch._dynamo.reset()
    called = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    ours = gradients(called)
    assert {"flash_wmma::forward", "flash_wmma::backward"} <= ran(lambda: gradients(called))
    torch.nn.attention.restore_flash_attention_impl()
    assert "flash_wmma::backward" not in ran(lambda: gradients(attend))
    tolerance = 0.05 if kind == "half" else 1e-4
    for a, b in zip(ours, gradients(attend), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
        assert a.stride() == b.stride()


def test_forward_may_be_torchs(activated: None) -> None:
    """Backward takes out and lse from torch's forward too."""
    *inputs, dout = tensors()
    inputs = [t.requires_grad_() for t in inputs]
    torch.nn.attention.restore_flash_attention_impl()
    out = functional.scaled_dot_product_attention(*inputs)
    expected = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    torch.nn.attention.activate_flash_attention_impl(_hook.NAME)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, dout), expected, atol=1e-4, rtol=1e-4)


def test_backward_leaves_the_rest_to_torch(activated: None) -> None:
    q, k, v, dout = (t.double() for t in tensors())
    inputs = [t.requires_grad_() for t in (q, k, v)]
    names = ran(lambda: torch.autograd.grad(functional.scaled_dot_product_attention(*inputs), inputs, dout))
    assert not {"flash_wmma::forward", "flash_wmma::backward"} & names


@pytest.mark.parametrize(("nq", "nk"), [(20, 33), (33, 20), (20, 20)])
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_operators(nq: int, nk: int, causal: bool) -> None:
    """What is put in place of torch's CUDA operators, called as torch would: aligned to the last key."""
    q, k, v, dout = tensors(nq, nk)
    out, lse, cum_q, cum_k, *_ = _hook._cuda(None)(None, q, k, v, 0.0, causal, False, scale=0.2)
    rest = (cum_q, cum_k, nq, nk, 0.0, causal, torch.empty(0), torch.empty(0))
    got = _hook._cuda_backward(None)(None, dout, q, k, v, out, lse, *rest, scale=0.2)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    aligned = "bottom_right" if causal else False
    expected = flash_wmma.forward(*inputs, causal=aligned, scale=0.2, kernel="math")
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got, torch.autograd.grad(expected, inputs, dout), atol=1e-4, rtol=1e-4)


PACKED = (torch.tensor([0, 7, 20], dtype=torch.int32), torch.tensor([0, 12, 20], dtype=torch.int32), 13, 12)


@pytest.mark.parametrize("window", [(None, None), (5, None), (None, 3), (5, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_operators_with_packed_sequences(causal: bool, window: tuple[int | None, int | None]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(20, 4, 64, generator=generator) for _ in "qkvo")
    options: Any = {"scale": 0.2, "window_size_left": window[0], "window_size_right": window[1]}
    out, lse, *_ = _hook._cuda_packed(None)(None, q, k, v, *PACKED, 0.0, causal, False, **options)
    rest = (*PACKED, 0.0, causal, torch.empty(0), torch.empty(0))
    got = _hook._cuda_packed_backward(None)(None, dout, q, k, v, out, lse, *rest, **options)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    bounds = tuple(-1 if bound is None else bound for bound in window)
    expected = flash_wmma.flash_attn_varlen_func(*inputs, *PACKED, softmax_scale=0.2, causal=causal, window_size=bounds)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got, torch.autograd.grad(expected, inputs, dout), atol=1e-4, rtol=1e-4)


def test_cuda_operators_with_dropout() -> None:
    """Forward returns the state of its mask, of a dtype that torch's has not, and backward takes it."""
    p, (q, k, v, dout) = 0.3, tensors()
    torch.manual_seed(5)
    out, lse, *lengths, state, unused, _ = _hook._cuda(None)(None, q, k, v, p, True, False)
    assert state.dtype == torch.int64
    torch.manual_seed(5)
    assert torch.equal(_hook._cuda(None)(None, q, k, v, p, True, False)[0], out)
    assert not torch.equal(_hook._cuda(None)(None, q, k, v, p, True, False)[0], out)
    got = _hook._cuda_backward(None)(None, dout, q, k, v, out, lse, *lengths, p, True, state, unused)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    expected = flash_wmma.forward(*inputs, causal="bottom_right", dropout_p=p, rng_state=state, kernel="math")
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got, torch.autograd.grad(expected, inputs, dout), atol=1e-4, rtol=1e-4)


def test_cuda_operators_with_dropout_in_packed_sequences() -> None:
    p, generator = 0.3, torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(20, 4, 64, generator=generator) for _ in "qkvo")
    out, lse, state, unused, _ = _hook._cuda_packed(None)(None, q, k, v, *PACKED, p, True, False)
    got = _hook._cuda_packed_backward(None)(None, dout, q, k, v, out, lse, *PACKED, p, True, state, unused)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    options: Any = {"causal": "bottom_right", "dropout_p": p, "rng_state": state, "kernel": "math"}
    expected = flash_wmma.forward_varlen(*inputs, *PACKED, **options)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got, torch.autograd.grad(expected, inputs, dout), atol=1e-4, rtol=1e-4)


class Original:
    """Stands for torch's kernel; remembers that it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def call_boxed(self, *_: Any, **__: Any) -> None:
        self.calls += 1


def test_dropout_that_is_left_to_torch() -> None:
    """A backward whose forward was torch's, whose state is uint64; probability 1; operators without a state."""
    q, k, v, dout = tensors()
    out, lse = flash_wmma.forward(q, k, v, return_lse=True)
    original: Any = Original()
    torchs = torch.zeros(2, dtype=torch.uint64)
    _hook._cuda_backward(original)(None, dout, q, k, v, out, lse, None, None, 20, 33, 0.3, False, torchs, torchs)
    _hook._cuda(original)(None, q, k, v, 1.0)
    _hook._cpu(original)(None, q, k, v, 0.3)
    _hook._cpu_backward(original)(None, dout, q, k, v, out, lse, 0.3, False)
    assert original.calls == 4
    q, k, v, dout = (t[0].transpose(0, 1).contiguous() for t in (q, k, v, dout))
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (20, 33))
    _hook._cuda_packed(original)(None, q, k, v, cu_q, cu_k, 20, 33, 1.0, False, False)
    rest = (cu_q, cu_k, 20, 33, 0.3, False, torchs, torchs)
    _hook._cuda_packed_backward(original)(None, dout, q, k, v, q, lse[0], *rest)
    assert original.calls == 6


@pytest.mark.parametrize(
    "option",
    [
        {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
        {"seqused_k": torch.tensor([12, 3], dtype=torch.int32)},
    ],
    ids=lambda option: next(iter(option)),
)
def test_cuda_operator_of_inference(option: dict[str, Any]) -> None:
    """What torch gives its operator in forward alone."""
    q, k, v = (torch.randn(20, 4, 64, generator=torch.Generator().manual_seed(s)) for s in range(3))
    out, *_ = _hook._cuda_packed(None)(None, q, k, v, *PACKED, 0.0, True, False, **option)
    assert torch.equal(out, flash_wmma.forward_varlen(q, k, v, *PACKED, causal="bottom_right", **option))
    assert not torch.equal(out, flash_wmma.forward_varlen(q, k, v, *PACKED, causal="bottom_right"))


@pytest.mark.gpu
@pytest.mark.parametrize(("nq", "nk"), [(20, 33), (100, 100)])
def test_last_key_on_the_gpu(activated: None, cuda: torch.device, nq: int, nk: int) -> None:
    """torch.nn.attention.bias calls the operator with a mask that is aligned to the last key."""
    q, k, v, dout = tensors(nq, nk, "cuda")
    inputs = [t.requires_grad_() for t in (q, k, v)]

    def gradients() -> tuple[Tensor, ...]:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = functional.scaled_dot_product_attention(*inputs, attn_mask=causal_lower_right(nq, nk))
        return torch.autograd.grad(out, inputs, dout)

    assert {"flash_wmma::forward", "flash_wmma::backward"} <= ran(gradients)
    expected = torch.autograd.grad(flash_wmma.forward(*inputs, causal="bottom_right", kernel="math"), inputs, dout)
    torch.testing.assert_close(gradients(), expected, atol=2e-2, rtol=2e-2)
