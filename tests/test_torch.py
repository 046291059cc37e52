"""The ops among torch's own machinery: opcheck, compile, meta tensors, streams, graphs, threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
import torch
from reference import Mask, check, few, normal, reference, run
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


def test_opcheck(target: Target) -> None:
    kernel, _ = target
    q, k, v = inputs(target)
    options = [{}, {"scale": 0.3}]
    options += [{"window_right": 0}, {"window_right": 0, "bottom_right": True}] if "causal" in kernel.features else []
    options += [{"window_left": 5, "window_right": 7}] if "window" in kernel.features else []
    for option in options:
        torch.library.opcheck(ops.forward.default, (q, k, v), {**option, "kernel_name": kernel.name})
    torch.library.opcheck(ops.forward.default, (q, k[:, :2], v[:, :2]), {"kernel_name": kernel.name})
    torch.library.opcheck(ops.forward.default, (q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {})
    torch.library.opcheck(ops.forward.default, (q[:, :, :0], k, v), {"kernel_name": kernel.name})
    if "d_v != d" in kernel.features:
        torch.library.opcheck(ops.forward.default, (q, k, v[..., :13]), {"kernel_name": kernel.name})


def test_fake_results_are_like_real_ones(target: Target) -> None:
    kernel, _ = target
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(target))
    real = ops.forward(q, k, v, kernel_name=kernel.name)
    fake = ops.forward(q.to("meta"), k.to("meta"), v.to("meta"), kernel_name=kernel.name)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert b.device.type == "meta"


def test_meta_tensors_are_checked() -> None:
    q = torch.empty(2, 4, 20, 64, device="meta")
    assert flash_wmma.forward(q, q, q).shape == q.shape
    with pytest.raises(ValueError, match=r"k\.shape"):
        flash_wmma.forward(q, q[..., :32], q)


def test_ops_that_are_not_built_yet() -> None:
    """They have schemas and shapes; they raise when they are run."""
    q, k, v = (torch.randn(1, 2, 10, 64) for _ in "qkv")
    lse = torch.randn(1, 2, 10)
    with pytest.raises(RuntimeError, match="backward: not yet built"):
        ops.backward(q, None, q, k, v, q, lse)
    packed, lengths = torch.randn(10, 2, 64), torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="forward_varlen: not yet built"):
        ops.forward_varlen(packed, packed, packed, lengths, lengths, None, None, 10, 10)
    with pytest.raises(RuntimeError, match="backward_varlen: not yet built"):
        ops.backward_varlen(packed, None, packed, packed, packed, packed, lse[0], lengths, lengths, None, 10, 10)
    for op in ("forward", "forward_varlen", "backward", "backward_varlen"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_wmma::{op}", "CPU")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_wmma::{op}", "CUDA")


def test_fakes_of_ops_that_are_not_built_yet() -> None:
    q, k, v = (torch.empty(1, h, n, d, device="meta") for h, n, d in ((4, 10, 64), (2, 12, 64), (2, 12, 32)))
    out, lse = ops.forward(q, k, v)
    bias = torch.empty(10, 12, device="meta")
    gradients = ops.backward(out, None, q, k, v, out, lse, bias)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape, bias.shape]
    assert ops.backward(out, None, q, k, v, out, lse)[3].numel() == 0
    q, k, v = (torch.empty(n, h, d, device="meta") for n, h, d in ((10, 4, 64), (12, 2, 64), (12, 2, 32)))
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    out, lse = ops.forward_varlen(q, k, v, lengths, lengths, None, None, 10, 12)
    assert (out.shape, lse.shape, lse.dtype) == ((10, 4, 32), (4, 10), torch.float32)
    gradients = ops.backward_varlen(out, None, q, k, v, out, lse, lengths, lengths, None, 10, 12)
    assert [g.shape for g in gradients[:3]] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_dynamic_length(target: Target, backend: str) -> None:
    """No graph break, and one graph for every length once lengths are dynamic."""
    kernel, dtype = target
    if backend == "inductor" and dtype != torch.float32:
        pytest.skip("once is enough")
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


def test_compile_refuses_what_eager_refuses() -> None:
    torch._dynamo.reset()
    attend = torch.compile(flash_wmma.forward, fullgraph=True, backend="eager")
    q = torch.randn(1, 2, 10, 64)
    with pytest.raises(Exception, match=r"k\.shape: got \(1, 2, 10, 32\)"):
        attend(q, q[..., :32], q)
    with pytest.raises(Exception, match=r"no kernel implements it yet|backward is not built yet|NotImplementedError"):
        attend(q.clone().requires_grad_(), q, q)


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


def test_vmap_loops() -> None:
    """No batching rule: torch's own loop does it, and says so."""
    q, k, v = (normal((2, 3, 20, 64), seed=s)[:, None] for s in (1, 2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mapped = torch.vmap(flash_wmma.forward)(q, k, v)
    for i in range(2):
        assert torch.equal(mapped[i], flash_wmma.forward(q[i], k[i], v[i]))


def test_views_with_a_pending_conjugation_or_sign() -> None:
    """A lazily negated view: what is seen is read, not what lies in memory."""
    z = torch.complex(*(normal((1, 2, 20, 64), seed=s) for s in (1, 2)))
    negated = z.conj().imag
    assert negated.is_neg()
    q, k = (normal((1, 2, 20, 64), seed=s) for s in (3, 4))
    assert torch.equal(flash_wmma.forward(q, k, negated), flash_wmma.forward(q, k, -z.imag))


@pytest.mark.gpu
def test_stream(target: Target) -> None:
    """The current stream is used: inputs written late on it are seen."""
    kernel, _ = target
    if kernel.device != "cuda":
        pytest.skip("on the GPU alone")
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
    if kernel.device != "cuda":
        pytest.skip("on the GPU alone")
    q, k, v = inputs(target)
    flash_wmma.forward(q, k, v, kernel=kernel.name)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        flash_wmma.forward(q, k, v, kernel=kernel.name)
        assert not torch.cuda.current_stream().query(), "forward waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")


CAPTURE = """
import torch, flash_wmma
name, dtype = {name!r}, {dtype}
q, k, v = (torch.randn(2, 4, n, 64, device="cuda", dtype=dtype) for n in (100, 130, 130))
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
    if kernel.device != "cuda":
        pytest.skip("on the GPU alone")
    done = subprocess.run(
        [sys.executable, "-c", CAPTURE.format(name=kernel.name, dtype=dtype)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_other_device(kernel: flash_wmma.Kernel) -> None:
    """The tensors' device is used, not the current one."""
    if torch.cuda.device_count() < 2 or kernel.device != "cuda":
        pytest.skip("needs two GPUs")
    dtype = kernel.dtypes[0]
    q, k, v = (normal((2, 4, 70, 64), dtype=dtype, device="cuda:1", seed=s) for s in (1, 2, 3))
    assert torch.cuda.current_device() == 0
    check(*run(kernel, q, k, v, Mask()), reference(kernel, q, k, v))
    assert torch.cuda.current_device() == 0
