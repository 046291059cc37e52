"""Gradients as callers get them: autograd, torch.compile, checkpointing, DDP, kernel="math"."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import flash_wmma
from flash_wmma import _autograd, forward, forward_varlen
from flash_wmma._library import ops


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        request.getfixturevalue("cuda")
    return str(request.param)


DTYPE = {"cpu": torch.float32, "cuda": torch.float16}
"""What the device's kernels have gradients of."""


def tensors(
    *sizes: int,
    count: int = 3,
    dtype: torch.dtype | None = None,
    requires_grad: bool = True,
    device: str = "cpu",
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(sizes, generator=generator).to(device, dtype or DTYPE[device]) for _ in range(count))
    return tuple(t.requires_grad_(requires_grad) for t in made)


def close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Each to the precision of its type, relative to its largest value."""
    for a, b in zip(got, expected, strict=True):
        allowed = 30 * torch.finfo(DTYPE[a.device.type]).eps * max(float(b.abs().max()), 0.1)
        torch.testing.assert_close(a, b, rtol=0, atol=allowed)


def loss(result: tuple[Tensor, Tensor]) -> Tensor:
    """Of out and lse both."""
    out, lse = result
    return out.float().square().sum() + lse.masked_fill(lse.isneginf(), 0).sin().sum()


def sums(result: tuple[Tensor, Tensor]) -> Tensor:
    """Of which the gradient is one number, expanded."""
    out, lse = result
    return out.float().sum() + lse.sum()


def sums_over_heads(result: tuple[Tensor, Tensor]) -> Tensor:
    """Of which the gradient is expanded over the heads."""
    out, lse = result
    weights = torch.linspace(1, 2, lse.shape[-1], device=lse.device)
    return out.float().sum(1).sin().sum() + (lse.sum(-2) * weights).sum()


def spread(t: Tensor) -> Tensor:
    """The same numbers, between others in memory."""
    return torch.stack((t, -1 - t), dim=-1)[..., 0]


SLOPES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.3, 0.2, 0.6], [0.1, 0.7, 0.0, 0.2]])
CALLS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (3, 2)},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": SLOPES[0]},
    "slopes of each": {"alibi_slopes": SLOPES},
    "scale": {"scale": -0.3},
}


def options_of(call: str, batch: int, device: str) -> dict[str, Any]:
    options: dict[str, Any] = dict(CALLS[call])
    if "alibi_slopes" in options:
        slopes = options["alibi_slopes"].to(device)
        options["alibi_slopes"] = spread(slopes if slopes.dim() == 1 else slopes[:batch])
    return options


@pytest.mark.parametrize("value", [loss, sums, sums_over_heads])
@pytest.mark.parametrize("call", CALLS)
def test_forward_against_math(call: str, value: Callable[..., Tensor], device: str) -> None:
    """With d_v != d, grouped heads and a bias that is broadcast over two dimensions."""
    q, bias = tensors(2, 4, 9, 16, count=1, device=device)[0], torch.randn(4, 1, 12, device=device, requires_grad=True)
    (k,), (v,) = (tensors(2, 2, 12, d, count=1, device=device) for d in (16, 24))
    options = options_of(call, 2, device)
    got, expected = (
        torch.autograd.grad(
            value(forward(q, k, v, attn_bias=bias, kernel=kernel, return_lse=True, **options)), (q, k, v, bias)
        )
        for kernel in ("auto", "math")
    )
    close(got, expected)


@pytest.mark.parametrize("value", [loss, sums, sums_over_heads])
@pytest.mark.parametrize("call", CALLS)
def test_varlen_against_math(call: str, value: Callable[..., Tensor], device: str) -> None:
    """With rows and keys behind the last sequence, and the lengths between other numbers in memory."""
    (q,), (k, v) = tensors(20, 4, 16, count=1, device=device), tensors(25, 2, 16, count=2, device=device)
    bias = torch.randn(3, 4, 1, 12, device=device, requires_grad=True)
    numbers = ([0, 7, 7, 18], [0, 12, 13, 22], [11, 1, 8])
    *lengths, used = (spread(torch.tensor(t, dtype=torch.int32, device=device)) for t in numbers)
    options = options_of(call, 3, device) | {"attn_bias": bias, "seqused_k": used, "return_lse": True}
    got, expected = (
        torch.autograd.grad(value(forward_varlen(q, k, v, *lengths, 11, 12, kernel=kernel, **options)), (q, k, v, bias))
        for kernel in ("auto", "math")
    )
    close(got, expected)
    assert not any(t[end:].any() for t, end in zip(got, (18, 21, 21), strict=False))


def test_math_is_forward() -> None:
    q, k, v = tensors(2, 4, 9, 16, requires_grad=False)
    mask = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[3] = False
    for got, expected in zip(
        *(forward(q, k, v, attn_bias=mask, kernel=kernel, return_lse=True) for kernel in ("math", "auto")), strict=True
    ):
        torch.testing.assert_close(got, expected)


def flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = flash_wmma.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


@pytest.mark.parametrize(
    "attend", [lambda q, k, v: flash_wmma.scaled_dot_product_attention(q, k, v, is_causal=True), flash_attn]
)
def test_drop_ins(attend: Callable[..., Tensor], device: str) -> None:
    inputs = tensors(2, 4, 9, 16, device=device)
    got = torch.autograd.grad(attend(*inputs).float().square().sum(), inputs)
    out = functional.scaled_dot_product_attention(*inputs, is_causal=True)
    close(got, torch.autograd.grad(out.float().square().sum(), inputs))


def test_only_the_gradients_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(1, 2, 9, 16)
    forward(q, k.detach(), v.detach()).sum().backward()
    assert q.grad is not None
    assert k.grad is None
    compute, asked = _autograd._backward, []

    def spy(*arguments: Any) -> Any:
        asked.append(arguments[-4])
        return compute(*arguments)

    monkeypatch.setattr(_autograd, "_backward", spy)
    bias = torch.zeros(9, 9)
    with torch.profiler.profile() as profile:
        forward(q, k, v, attn_bias=bias).sum().backward()
    assert bias.grad is None
    assert any(event.key == "flash_wmma::backward" for event in profile.key_averages())
    forward(q, k, v, attn_bias=bias.requires_grad_()).sum().backward()
    assert asked == [False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype, device: str) -> None:
    """Inputs that are converted have gradients of their own type."""
    q, k, v = tensors(1, 2, 9, 16, dtype=torch.float32, device=device)
    with torch.autocast(device, dtype):
        out = forward(q, k, v)
    assert out.dtype == dtype
    got = torch.autograd.grad(out.float().sum(), (q, k, v))
    expected = torch.autograd.grad(forward(q, k, v, kernel="math").sum(), (q, k, v))
    assert all(t.dtype == torch.float32 for t in got)
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@pytest.fixture
def warn_only() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("given", [None, False, True])
def test_deterministic_algorithms(
    given: bool | None, warn_only: None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Torch's flag holds unless the call says otherwise; where no kernel is deterministic, warn_only is respected."""
    asked = []

    def backward(*arguments: object) -> object:
        *_, deterministic, kernel, _ = arguments
        asked.append(deterministic)
        assert kernel == "bwd_cpu"
        if deterministic:
            raise ValueError("kernel 'auto' cannot run this: none is deterministic")
        return ops.backward.default(*arguments)

    monkeypatch.setattr(_autograd, "_backward", backward)
    q, k, v = tensors(1, 2, 9, 16)
    out = forward(q, k, v, deterministic=given, backward_kernel="bwd_cpu")
    if given:
        with pytest.raises(ValueError, match="none is deterministic"):
            out.sum().backward()
    else:
        out.sum().backward()
        assert q.grad is not None
    assert asked == {None: [True, False], False: [False], True: [True]}[given]
    assert [str(w.message) for w in recwarn if "differ from run to run" in str(w.message)] == (
        [
            "flash_wmma: gradients that may differ from run to run, since kernel 'auto' cannot run this: none is "
            "deterministic"
        ]
        if given is None
        else []
    )
    if given is not False:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(ValueError, match="none is deterministic"):
            forward(q, k, v, deterministic=given, backward_kernel="bwd_cpu").sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("reduced", [False, True])
def test_deterministic_gradients(cuda: torch.device, reduced: bool) -> None:
    """The flag makes gradients of a long sequence the same to the bit, also that of a bias that is not broadcast."""
    q, k, v = tensors(1, 2, 1030, 64, device="cuda")
    bias = torch.randn(1, 2, 1030, 1 if reduced else 1030, device=cuda, requires_grad=True)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(q, k, v, attn_bias=bias).float().square().sum(), (q, k, v, bias))

    torch.use_deterministic_algorithms(True)
    try:
        if reduced:
            with pytest.raises(ValueError, match="broadcast attn_bias with deterministic"):
                gradients()
            return
        first = gradients()
        for _ in range(50):
            assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_out_of_memory(cuda: torch.device) -> None:
    """Torch's own exception, though the allocation is the library's."""
    q = torch.zeros(1, 1, 1, 1, dtype=torch.float16, device=cuda).expand(1, 64, 1 << 26, 256)  # out: 2 TiB
    k = torch.zeros(1, 64, 1, 256, dtype=torch.float16, device=cuda)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        forward(q, k, k)


def test_kernel_by_name() -> None:
    q, k, v = tensors(1, 2, 9, 16)
    forward(q, k, v, backward_kernel="bwd_cpu").sum().backward()
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    close((compiled(q, k, v, backward_kernel="bwd_cpu"),), (forward(q, k, v),))


def packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """forward_varlen of one sequence."""
    ends = torch.tensor([0, q.shape[2]], dtype=torch.int32)
    rows = (t[0].transpose(0, 1) for t in (q, k, v))
    return forward_varlen(*rows, ends, ends, q.shape[2], k.shape[2], **options)


def module(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    layer: Callable[[Tensor], Tensor] = flash_wmma.MultiheadAttention(16, 2, **options)
    return layer(torch.zeros(1, 9, 16))


@pytest.mark.parametrize("options", [{}, {"kernel": "math"}], ids=["auto", "math"])
@pytest.mark.parametrize("call", [forward, packed, module, flash_wmma.explain])
def test_unknown_backward_kernel_is_refused_in_the_call(call: Callable[..., Any], options: dict[str, Any]) -> None:
    """Before anything is computed, whether or not a gradient is wanted."""
    for requires_grad in (True, False):
        q, k, v = tensors(1, 2, 9, 16, requires_grad=requires_grad)
        for name in ("nobody", "cpu"):  # a forward kernel is no backward kernel
            message = rf"backward_kernel: got '{name}', allowed: 'auto', .*'bwd_cpu', .*'bwd_sm80'"
            with pytest.raises(ValueError, match=message):
                call(q, k, v, **options, backward_kernel=name)
        with pytest.raises(TypeError, match=r"backward_kernel: got None, allowed: 'auto' or a name"):
            call(q, k, v, **options, backward_kernel=None)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_backward_is_told_forwards_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it converts no inputs that forward multiplied as they are."""
    compute, told = _autograd._backward, []

    def spy(*arguments: Any) -> Any:
        told.append(arguments[-1])
        return compute(*arguments)

    monkeypatch.setattr(_autograd, "_backward", spy)
    forward(*tensors(1, 2, 9, 16), kernel=name, deterministic=True).sum().backward()
    assert told == [name]


@pytest.mark.gpu
def test_exact_gradients_of_an_exact_forward(cuda: torch.device) -> None:
    inputs = tensors(1, 2, 100, 64, dtype=torch.float32, device="cuda")

    def gradients(kernel: str, backward_kernel: str) -> tuple[Tensor, ...]:
        out = forward(*inputs, kernel=kernel, backward_kernel=backward_kernel, deterministic=True)
        return torch.autograd.grad(out.square().sum(), inputs)

    assert all(map(torch.equal, gradients("simt", "auto"), gradients("simt", "bwd_simt")))
    assert not any(map(torch.equal, gradients("auto", "auto"), gradients("auto", "bwd_simt")))


# ---- What is not built ----------------------------------------------------------------------------------------------


def test_second_derivatives_of_packed_sequences_name_the_way_out() -> None:
    (q, k, v), lengths = tensors(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    (dq,) = torch.autograd.grad(forward_varlen(q, k, v, lengths, lengths, 5, 5).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r'this derivative of packed sequences is not built: kernel="math"'):
        dq.sum().backward()


@pytest.mark.parametrize("call", [{}, {"causal": "bottom_right"}, {"causal": True, "softcap": 1.5}, {"window": (1, 0)}])
def test_gradcheck(call: dict[str, object]) -> None:
    """In both modes and once more, with rows that see no key."""
    (q,), (k, v) = (tensors(1, h, n, 2, count=c, dtype=torch.float64) for h, n, c in ((2, 3, 1), (1, 2, 2)))
    bias = torch.randn(1, 2, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(2, requires_grad=False)

    def attend(*inputs: Tensor) -> Tensor:
        q, k, v, bias = inputs
        out, lse = forward(q, k, v, attn_bias=bias, alibi_slopes=slopes, kernel="math", return_lse=True, **call)  # type: ignore[call-overload]
        return out.sum(dim=3) + lse.masked_fill(lse.isneginf(), 0)  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(attend, (q, k, v, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, (q, k, v, bias))


# ---- Torch's machinery ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str, device: str) -> None:
    torch._dynamo.reset()
    q, k, v = tensors(2, 4, 9, 16, device=device)
    bias = torch.randn(9, 9, device=device, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return forward(q * 2, k, v, attn_bias=bias, causal=True, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    got, expected = (torch.autograd.grad(loss(f(q, k, v, bias)), (q, k, v, bias)) for f in (compiled, attend))
    close(got, expected)


def test_compile_of_packed_sequences() -> None:
    torch._dynamo.reset()
    q, k, v = tensors(20, 4, 16)
    lengths = torch.tensor([0, 7, 20], dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return forward_varlen(q, k, v, lengths, lengths, 13, 13, causal=True, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    got, expected = (torch.autograd.grad(loss(f(q, k, v)), (q, k, v)) for f in (compiled, attend))
    torch.testing.assert_close(got, expected)


def test_compile_with_autocast() -> None:
    torch._dynamo.reset()
    q, k, v = tensors(1, 2, 9, 16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(q, k, v, causal=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    got, expected = (torch.autograd.grad(f(q, k, v).float().sum(), (q, k, v)) for f in (compiled, attend))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_of_math(dtype: torch.dtype, compiled: bool, device: str) -> None:
    """q, k and v are cast, as for the other kernels; what follows is as exact as without autocast, to the bit."""
    torch._dynamo.reset()
    q, k, v = tensors(1, 2, 9, 16, dtype=torch.float32, device=device)
    bias, slopes = torch.randn(9, 9, device=device, requires_grad=True), torch.rand(2, device=device)
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return forward(q, k, v, attn_bias=bias, alibi_slopes=slopes, causal=True, kernel="math", return_lse=True)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rows = (t[0].transpose(0, 1) for t in (q, k, v))
        return forward_varlen(*rows, lengths, lengths, 5, 5, kernel="math", validate=True, return_lse=True)

    for function in (attend,) if compiled else (attend, packed):
        expected = function(*(t.to(dtype) for t in (q, k, v)))
        call = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
        with torch.autocast(device, dtype):
            got = call(q, k.to(dtype), v)
        assert [t.dtype for t in got] == [dtype, torch.float32]
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        gradients = (torch.autograd.grad(loss(result), (q, k, v)) for result in (got, expected))
        atol, rtol = (0.05, 2**-6) if compiled else (0, 0)  # torch.compile traces backward with autocast on
        torch.testing.assert_close(*gradients, rtol=rtol, atol=atol)
    with torch.autocast(device, dtype):
        double = forward(*(t.double() for t in (q, k, v)), kernel="math")
    assert double.dtype == torch.float64


def test_varlen_validates_what_autocast_makes() -> None:
    q, k, v = tensors(9, 2, 16, requires_grad=False)
    lengths = torch.tensor([0, 9], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        out = forward_varlen(q, k.bfloat16(), v, lengths, lengths, 9, 9, validate=True)
    assert out.dtype == torch.bfloat16


def test_compile_of_the_module_for_every_length() -> None:
    torch._dynamo.reset()
    layer = flash_wmma.MultiheadAttention(32, 4, num_kv_heads=2, causal=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (9, 12, 17):
            x = torch.randn(2, n, 32)
            got, expected = (torch.autograd.grad(f(x).sum(), tuple(layer.parameters())) for f in (compiled, layer))
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, device: str) -> None:
    inputs = tensors(2, 4, 9, 16, device=device)
    attend = functools.partial(forward, deterministic=True)
    out = checkpoint(attend, *inputs, use_reentrant=reentrant)
    out.sum().backward()
    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    torch.testing.assert_close(tuple(t.grad for t in inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(bias: bool) -> None:
    q, k, v = tensors(2, 4, 9, 16, requires_grad=False, dtype=torch.bfloat16 if bias else None)
    attn_bias = torch.randn(9, 9) if bias else None  # in float32 beside them
    out, lse = ops.forward(q, k, v, attn_bias=attn_bias)
    options = {"attn_bias": attn_bias, "bias_grad": bias}
    torch.library.opcheck(ops.backward.default, (out, lse, q, k, v, out, lse), options)
    layout = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    torch.library.opcheck(ops.backward.default, (out, None, *layout, out, lse), options)
    packed = [t[0].transpose(0, 1) for t in (out, q, k, v, out)]
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    torch.library.opcheck(
        ops.backward_varlen.default, (packed[0], None, *packed[1:], lse[0], lengths, lengths, None, 5, 5)
    )


DDP = """
import os, sys, torch, flash_wmma
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return flash_wmma.forward(q, k, v, causal=True)

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(0)
layer = Layer()
x = torch.randn(2, 9, 32)
layer(x).square().sum().div(2).backward()
expected = layer.qkv.weight.grad.clone()
layer.zero_grad()
parallel = DistributedDataParallel(layer)
parallel(x[rank : rank + 1]).square().sum().backward()
torch.testing.assert_close(layer.qkv.weight.grad, expected)
del parallel  # before the process group that it uses
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # the interpreter's end aborted in some runs: a thread was not joined, whose was not found out
"""


def test_data_parallel(tmp_path: object) -> None:
    """Two processes with half a batch each have the gradients of the whole."""
    processes = [
        subprocess.Popen([sys.executable, "-c", DDP, str(rank), f"{tmp_path}/store"], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


@pytest.mark.parametrize("shared", [None, 2])
def test_module(shared: int | None) -> None:
    torch.manual_seed(0)
    layer = flash_wmma.MultiheadAttention(32, 4, num_kv_heads=shared, causal=True)
    x = torch.randn(2, 9, 32)
    got = torch.autograd.grad(layer(x).square().sum(), tuple(layer.parameters()))
    layer.kernel = "math"
    expected = torch.autograd.grad(layer(x).square().sum(), tuple(layer.parameters()))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"num_heads: got 3, allowed: a divisor of embed_dim, 32"):
        flash_wmma.MultiheadAttention(32, 3)
    with pytest.raises(ValueError, match=r"num_kv_heads: got 3, allowed: a divisor of num_heads, 4"):
        flash_wmma.MultiheadAttention(32, 4, num_kv_heads=3)
