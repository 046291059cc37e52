"""The ops among torch's own machinery: opcheck, compile, meta tensors, streams, graphs, threads."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch._dynamo.testing
from conftest import obstacle
from needs import needs
from reference import Mask, check, few, no_repetition, normal, reference, run
from torch import Tensor

import flash_wmma

ops = torch.ops.flash_wmma
Target = tuple[flash_wmma.Kernel, torch.dtype]


def inputs(target: Target, nq: int = 33, nk: int = 50, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    kernel, dtype = target
    q, k, v = (
        normal((2, 4, n, 64), dtype=dtype, device=kernel.device, seed=seed + i) for i, n in enumerate((nq, nk, nk))
    )
    return q, k, v


@needs(no_repetition)
def test_opcheck(target: Target) -> None:
    kernel, _ = target
    q, k, v = inputs(target)
    options = [{}, {"scale": 0.3}]
    options += [{"window_right": 0}, {"window_right": 0, "bottom_right": True}] if "causal" in kernel.features else []
    options += [{"window_left": 5, "window_right": 7}] if "window" in kernel.features else []
    slopes = torch.rand(4, device=q.device)
    options += [{"softcap": 3.0}] if "softcap" in kernel.features else []
    if "alibi_slopes" in kernel.features:
        options += [{"alibi_slopes": slopes}, {"alibi_slopes": slopes.expand(2, 4)}]
    if "attn_bias" in kernel.features:
        bias = torch.randn(4, 33, 50, device=q.device)
        options += [{"attn_bias": bias}, {"attn_bias": bias.to(q.dtype)[:1]}, {"attn_bias": bias[0] > 0}]
    for option in options:
        torch.library.opcheck(ops.forward.default, (q, k, v), {**option, "kernel_name": kernel.name})
    torch.library.opcheck(ops.forward.default, (q, k, v), {"out_bnhd": True, "kernel_name": kernel.name})
    torch.library.opcheck(ops.forward.default, (q, k[:, :2], v[:, :2]), {"kernel_name": kernel.name})
    torch.library.opcheck(ops.forward.default, (q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {})
    torch.library.opcheck(ops.forward.default, (q[:, :, :0], k, v), {"kernel_name": kernel.name})
    if "d_v != d" in kernel.features:
        torch.library.opcheck(ops.forward.default, (q, k, v[..., :13]), {"kernel_name": kernel.name})


def packed(target: Target) -> tuple[tuple[Tensor, ...], dict[str, object]]:
    """Arguments of forward_varlen."""
    kernel, _ = target
    q, k, v = (t.flatten(0, 1) for t in inputs(target))
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    cu_q, cu_k = (torch.tensor([0, 9, n], dtype=torch.int32, device=q.device) for n in (33, 50))
    return (q, k, v, cu_q, cu_k, None, 24, 41), {"kernel_name": kernel.name}


@needs("varlen", no_repetition)
def test_opcheck_varlen(target: Target) -> None:
    kernel, _ = target
    arguments, options = packed(target)
    heads, device = arguments[0].shape[1], kernel.device
    torch.library.opcheck(ops.forward_varlen.default, arguments, options)
    used = torch.tensor([3, 4], dtype=torch.int32, device=device)
    torch.library.opcheck(ops.forward_varlen.default, (*arguments[:5], used, *arguments[6:]), options)
    for feature, option in (
        ("window", {"window_left": 3, "window_right": 0, "bottom_right": True}),
        ("alibi_slopes", {"alibi_slopes": torch.rand(2, heads, device=device)}),
        ("attn_bias", {"attn_bias": torch.randn(24, 41, device=device)}),
        ("softcap", {"softcap": 2.0}),
    ):
        if feature in kernel.features:
            torch.library.opcheck(ops.forward_varlen.default, arguments, {**option, **options})


def test_fake_results_are_like_real_ones(target: Target) -> None:
    kernel, _ = target
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(target))
    for bnhd in (False, True):
        real = ops.forward(
            q, k, v[..., :40] if "d_v != d" in kernel.features else v, out_bnhd=bnhd, kernel_name=kernel.name
        )
        fake = ops.forward(*(t.to("meta") for t in (q, k, v[..., : real[0].shape[3]])), out_bnhd=bnhd)
        same_layout(real, fake)
    if "varlen" in kernel.features:
        arguments, options = packed(target)
        real = ops.forward_varlen(*arguments, **options)
        same_layout(real, ops.forward_varlen(*(t.to("meta") if isinstance(t, Tensor) else t for t in arguments)))


def same_layout(real: tuple[Tensor, ...], fake: tuple[Tensor, ...]) -> None:
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert b.device.type == "meta"


def test_meta_tensors_are_checked() -> None:
    q = torch.empty(2, 4, 20, 64, device="meta")
    assert flash_wmma.forward(q, q, q).shape == q.shape
    with pytest.raises(ValueError, match=r"k\.shape"):
        flash_wmma.forward(q, q[..., :32], q)


def test_ops_are_registered() -> None:
    for op in ("forward", "forward_varlen", "backward", "backward_varlen"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_wmma::{op}", "CPU")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_wmma::{op}", "CUDA")


def test_fakes_of_backward() -> None:
    q, k, v = (torch.empty(1, h, n, d, device="meta") for h, n, d in ((4, 10, 64), (2, 12, 64), (2, 12, 32)))
    out, lse = ops.forward(q, k, v)
    bias = torch.empty(10, 12, device="meta")
    gradients = ops.backward(out, None, q, k, v, out, lse, attn_bias=bias, bias_grad=True)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape, bias.shape]
    assert ops.backward(out, None, q, k, v, out, lse)[3].numel() == 0
    q, k, v = (torch.empty(n, h, d, device="meta") for n, h, d in ((10, 4, 64), (12, 2, 64), (12, 2, 32)))
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    out, lse = ops.forward_varlen(q, k, v, lengths, lengths, None, 10, 12)
    assert (out.shape, lse.shape, lse.dtype) == ((10, 4, 32), (4, 10), torch.float32)
    gradients = ops.backward_varlen(out, None, q, k, v, out, lse, lengths, lengths, None, 10, 12)
    assert [g.shape for g in gradients[:3]] == [q.shape, k.shape, v.shape]


@needs(no_repetition, lambda dtype, backend: backend != "inductor" or dtype == torch.float32)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_dynamic_length(target: Target, backend: str) -> None:
    """No graph break, and one graph for every length once lengths are dynamic."""
    kernel, _ = target
    torch._dynamo.reset()
    graphs = after_first = 0

    def count(graph: torch.fx.GraphModule, example: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, example)

    causal = "bottom_right" if "causal" in kernel.features else False

    @torch.compile(fullgraph=True, dynamic=True, backend=count)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_wmma.forward(q, k, v, causal=causal, kernel=kernel.name, return_lse=True)

    for nq, nk in ((33, 50), (17, 99), (64, 65), (100, 31), (50, 50)):
        q, k, v = inputs(target, nq, nk)
        out, lse = attend(q, k, v)
        eager = flash_wmma.forward(q, k, v, causal=causal, kernel=kernel.name, return_lse=True)
        assert torch.equal(out, eager[0])
        assert torch.equal(lse, eager[1])
        after_first = after_first or graphs
    assert after_first
    assert graphs == after_first


@needs("varlen")
def test_compile_varlen_with_dynamic_lengths(target: Target) -> None:
    """max_seqlen, the totals and the batch change, the graph does not."""
    kernel, _ = target
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    after_first = 0

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        return flash_wmma.forward_varlen(
            q, k, v, cu, cu, longest, longest, causal="bottom_right", kernel=kernel.name, return_lse=True
        )

    for lengths in ((9, 24), (3, 40), (17, 5, 30), (1, 2, 3, 70)):
        cu = torch.tensor([0, *lengths], device=kernel.device).cumsum(0).int()
        q, k, v = (t[0].transpose(0, 1) for t in inputs(target, sum(lengths), sum(lengths)))
        out, lse = attend(q, k, v, cu, max(lengths))
        eager = flash_wmma.forward_varlen(
            q, k, v, cu, cu, *[max(lengths)] * 2, causal="bottom_right", kernel=kernel.name, return_lse=True
        )
        assert torch.equal(out, eager[0])
        assert torch.equal(lse, eager[1])
        after_first = after_first or counter.frame_count
    assert counter.frame_count == after_first


@needs("attn_bias", "alibi_slopes", "softcap")
def test_compile_with_every_option(target: Target) -> None:
    """Bias, slopes and softcap go through a compiled graph; flash-attn's function with its own layout too."""
    torch._dynamo.reset()
    attend = torch.compile(flash_wmma.forward, fullgraph=True, dynamic=True, backend="aot_eager")
    for nq, nk in ((33, 50), (20, 60)):
        q, k, v = inputs(target, nq, nk)
        options = {"attn_bias": torch.randn(nq, nk).to(q), "alibi_slopes": torch.rand(4).to(q.device), "softcap": 3.0}
        assert torch.equal(attend(q, k, v, **options), flash_wmma.forward(q, k, v, **options))
        packed = [t.transpose(1, 2) for t in (q, k, v)]
        other = torch.compile(flash_wmma.flash_attn_func, fullgraph=True, dynamic=True, backend="aot_eager")
        out = other(*packed, causal=True)
        assert torch.equal(out, flash_wmma.flash_attn_func(*packed, causal=True))
        assert out.is_contiguous()


@needs(lambda kernel, dtype: {torch.float32, dtype} <= set(kernel.dtypes))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(kernel: flash_wmma.Kernel, dtype: torch.dtype) -> None:
    """q, k and v are cast; slopes and a float32 bias stay as they are; so too in a compiled graph."""
    if why_not := obstacle(kernel, dtype):
        pytest.skip(f"{kernel.name}: {why_not}")
    q, k, v = inputs((kernel, torch.float32))
    options: dict[str, object] = {"kernel": kernel.name}
    if {"attn_bias", "alibi_slopes"} <= kernel.features:
        options |= {"attn_bias": torch.randn(33, 50).to(q), "alibi_slopes": torch.rand(4).to(q)}
    expected = flash_wmma.forward(*(t.to(dtype) for t in (q, k, v)), **options)
    torch._dynamo.reset()
    compiled = torch.compile(flash_wmma.forward, fullgraph=True, backend="aot_eager")
    with torch.autocast(kernel.device, dtype=dtype):
        for function in (flash_wmma.forward, compiled):
            assert torch.equal(function(q, k, v, **options), expected)
            assert torch.equal(function(q, k.to(dtype), v, **options), expected)
        if "varlen" in kernel.features:
            cu = torch.tensor([0, 33], dtype=torch.int32, device=q.device)
            out = flash_wmma.forward_varlen(*(t[0, :, :33].transpose(0, 1) for t in (q, k, v)), cu, cu, 33, 33)
            assert out.dtype == dtype
    with torch.autocast(kernel.device, dtype=dtype, enabled=False):
        assert flash_wmma.forward(q, k, v, **options).dtype == torch.float32


def test_compile_refuses_what_eager_refuses() -> None:
    torch._dynamo.reset()
    attend = torch.compile(flash_wmma.forward, fullgraph=True, backend="eager")
    q = torch.randn(1, 2, 10, 64)
    with pytest.raises(Exception, match=r"k\.shape: got \(1, 2, 10, 32\)"):
        attend(q, q[..., :32], q)


def test_module_and_export() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_wmma.forward(q, k, v, causal=True)

    q, k, v = (normal((1, 2, 20, 64), seed=s) for s in (1, 2, 3))
    n = torch.export.Dim("n", min=2, max=4096)
    program = torch.export.export(Attend(), (q, k, v), dynamic_shapes=[{2: n}] * 3)
    longer = [normal((1, 2, 77, 64), seed=s) for s in (1, 2, 3)]
    assert torch.equal(program.module()(*longer), flash_wmma.forward(*longer, causal=True))


def test_threads(target: Target) -> None:
    """Calls from several threads at once."""
    kernel, _ = target
    all_inputs = [inputs(target, 60 + i, 90 - i, seed=i) for i in range(4)]
    expected = [run(kernel, *qkv) for qkv in all_inputs]
    failures: list[object] = []

    def work(index: int) -> None:
        try:
            for _ in range(few(kernel, 20)):
                out, lse = flash_wmma.forward(*all_inputs[index], kernel=kernel.name, return_lse=True)
                if not (torch.equal(out, expected[index][0]) and torch.equal(lse, expected[index][1])):
                    failures.append(index)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_number_of_threads_changes_nothing() -> None:
    q, k, v = (normal((2, 3, 150, 64), seed=s) for s in (1, 2, 3))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(flash_wmma.forward(q, k, v, causal=True, return_lse=True))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


SHARED = {  # shapes of the scores, heads of keys, and shapes of a bias that is broadcast over what the tasks share out
    "batch": ((30, 2, 300, 300), 1, (1, 2, 1, 1)),
    "head": ((2, 8, 250, 250), 8, (2, 1, 1, 1)),
    "key": ((1, 2, 120, 4096), 2, (1, 2, 1, 1)),
}


@pytest.mark.parametrize("over", SHARED)
def test_number_of_threads_changes_no_gradient(over: str) -> None:
    """That of a bias neither, though all tasks that come one behind the other add to the same numbers."""
    (b, h, nq, nk), hk, shape = SHARED[over]
    q, dout = (normal((b, h, nq, 8), seed=s) for s in (1, 4))
    k, v = (normal((b, hk, nk, 8), seed=s) for s in (2, 3))
    bias = normal(shape, seed=5)
    out, lse = ops.forward(q, k, v, attn_bias=bias)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2, 2, 2, 2):
            torch.set_num_threads(threads)
            results.append(ops.backward(dout, None, q, k, v, out, lse, attn_bias=bias, bias_grad=True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_views_with_a_pending_conjugation_or_sign() -> None:
    """A lazily negated view: what is seen is read, not what lies in memory."""
    z = torch.complex(*(normal((1, 2, 20, 64), seed=s) for s in (1, 2)))
    negated = z.conj().imag
    assert negated.is_neg()
    q, k = (normal((1, 2, 20, 64), seed=s) for s in (3, 4))
    assert torch.equal(flash_wmma.forward(q, k, negated), flash_wmma.forward(q, k, -z.imag))


def test_export_varlen_and_drop_in() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
            packed = flash_wmma.flash_attn_varlen_func(q, q, q, cu, cu, q.shape[0], q.shape[0], causal=True)
            assert isinstance(packed, Tensor)
            dense = q.transpose(0, 1)[None]
            return packed, flash_wmma.scaled_dot_product_attention(dense, dense, dense, is_causal=True)

    n = torch.export.Dim("n", min=2, max=4096)
    cu = torch.tensor([0, 20], dtype=torch.int32)
    for strict in (False, True):
        program = torch.export.export(
            Attend(), (torch.randn(20, 2, 64), cu), dynamic_shapes=[{0: n}, None], strict=strict
        )
        assert "flash_wmma.forward_varlen" in str(program.graph)
        assert "flash_wmma.forward.default" in str(program.graph)
        q, cu_77 = torch.randn(77, 2, 64), torch.tensor([0, 77], dtype=torch.int32)
        for a, b in zip(program.module()(q, cu_77), Attend()(q, cu_77), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_stream(target: Target) -> None:
    """The current stream is used: inputs written late on it are seen."""
    kernel, _ = target
    q, k, v = inputs(target, 300, 300)
    expected = run(kernel, q, k, v)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out, lse = flash_wmma.forward(late, k, v, kernel=kernel.name, return_lse=True)
    stream.synchronize()
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.gpu
def test_no_synchronisation(target: Target) -> None:
    kernel, _ = target
    q, k, v = inputs(target)
    packed = [t[0, :, :33].transpose(0, 1) for t in (q, k, v)]
    lengths = torch.tensor([0, 33], dtype=torch.int32, device="cuda") if "varlen" in kernel.features else None

    def call() -> None:
        flash_wmma.forward(q, k, v, kernel=kernel.name)
        if lengths is not None:
            flash_wmma.forward_varlen(*packed, lengths, lengths, 33, 33, kernel=kernel.name)

    call()  # the first loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        call()
        assert not torch.cuda.current_stream().query(), "forward waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")


CAPTURE = """
import torch, flash_wmma
name, dtype = {name!r}, {dtype}
q, k, v = (torch.randn(2, 4, n, 64, device="cuda", dtype=dtype) for n in (100, 130, 130))
if {varlen}:
    cu = torch.tensor([0, 30, 100], dtype=torch.int32, device="cuda")
    packed = [t[0, :, :100].transpose(0, 1).contiguous() for t in (q, k, v)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_wmma.forward_varlen(*packed, cu, cu, 100, 100, kernel=name)
    cu.copy_(torch.tensor([0, 50, 90]))
    graph.replay()
    assert torch.equal(out, flash_wmma.forward_varlen(*packed, cu, cu, 100, 100, kernel=name))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out, lse = flash_wmma.forward(q, k, v, kernel=name, return_lse=True)
for t in (q, k, v):
    t.copy_(torch.randn_like(t))
graph.replay()
again = flash_wmma.forward(q, k, v, kernel=name, return_lse=True)
assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
"""


@pytest.mark.gpu
def test_graph_capture_from_the_first_call(target: Target) -> None:
    """In a fresh process: nothing has to be warmed up before it."""
    kernel, dtype = target
    done = subprocess.run(
        [sys.executable, "-c", CAPTURE.format(name=kernel.name, dtype=dtype, varlen="varlen" in kernel.features)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_other_device(kernel: flash_wmma.Kernel) -> None:
    """The tensors' device is used, not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    dtype = kernel.dtypes[0]
    q, k, v = (normal((2, 4, 70, 64), dtype=dtype, device="cuda:1", seed=s) for s in (1, 2, 3))
    assert torch.cuda.current_device() == 0
    check(*run(kernel, q, k, v, Mask()), reference(kernel, q, k, v))
    assert torch.cuda.current_device() == 0
