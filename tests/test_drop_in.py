"""The stand-ins for torch's and flash-attn's functions, torch's own attention with these kernels behind it, and the way
of every option to the ops."""

from __future__ import annotations

import inspect
import math
import shutil
from typing import Any

import numpy
import pytest
import torch
from reference import DENSE, Mask, Modification, attention, bits, normal
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

import flash_wmma
from flash_wmma import _autograd, _flash_attn, _hook, _sdpa
from flash_wmma._library import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-12}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        request.getfixturevalue("cuda")
    return str(request.param)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=TOLERANCE[a.dtype], rtol=TOLERANCE[a.dtype])


def calls(what: Any) -> list[str]:
    """Which attention ran in that function: the names of torch's and of this library's operators."""
    with torch.profiler.profile() as profile:
        what()
    return [event.key for event in profile.key_averages() if "attention" in event.key or "flash_wmma" in event.key]


# ----------------------------------------------------------------------------------------------------------------- SDPA


def test_sdpa_has_torchs_signature() -> None:
    ours = inspect.signature(flash_wmma.scaled_dot_product_attention)
    said = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    assert list(ours.parameters) == [word.split("=")[0] for word in said.split(", ")]
    assert said.replace(" ", "") in "".join((functional.scaled_dot_product_attention.__doc__ or "").split())


SDPA: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool": {"attn_mask": (20, 30, torch.bool)},
    "float": {"attn_mask": (4, 20, 30, None)},
    "batch, key": {"attn_mask": (2, 1, 1, 30, torch.bool)},
    "positional": {"positional": (None, 0.0, True)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", SDPA)
def test_sdpa(case: str, dtype: torch.dtype, device: str) -> None:
    options = dict(SDPA[case])
    q, k, v = (normal((2, 4, n, 64), dtype=dtype, device=device, seed=s) for n, s in ((20, 1), (30, 2), (30, 3)))
    positional = options.pop("positional", ())
    if "attn_mask" in options:
        *shape, kind = options["attn_mask"]
        values = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(device)
        options["attn_mask"] = values > -0.5 if kind == torch.bool else values.to(dtype)
    ours = flash_wmma.scaled_dot_product_attention(q, k, v, *positional, **options)
    close(ours, functional.scaled_dot_product_attention(q, k, v, *positional, **options))
    assert ours.dtype == dtype


def test_sdpa_grouped_heads(device: str) -> None:
    q, k, v = (normal((2, h, 20, 64), device=device, dtype=torch.float16, seed=h) for h in (6, 2, 2))
    ours = flash_wmma.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    close(ours, functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    with pytest.raises(RuntimeError):  # torch's error
        flash_wmma.scaled_dot_product_attention(q, k, v)


def test_sdpa_rows_that_see_nothing(device: str) -> None:
    q = normal((1, 2, 20, 64), device=device, dtype=torch.float16)
    mask = torch.ones(20, 20, dtype=torch.bool, device=device)
    mask[3] = False
    ours = flash_wmma.scaled_dot_product_attention(q, q, q, mask)
    assert not ours[:, :, 3].any()
    seen = [i for i in range(20) if i != 3]  # what torch's kernels give for the other row differs between them
    close(ours[:, :, seen], functional.scaled_dot_product_attention(q, q, q, mask)[:, :, seen])


def tensors(*shape: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(s)).to(**options) for s in (1, 2, 3))
    return q, k, v


LEFT = {
    "dropout": (lambda: (*tensors(1, 2, 8, 64), None, 1.0), "dropout_p is 1.0"),
    "float64": (lambda: tensors(1, 2, 8, 64, dtype=torch.float64), "the dtype is torch.float64"),
    "large d": (lambda: tensors(1, 2, 8, 520), "no kernel runs head dims 520 and 520"),
    "large d_v": (
        lambda: (*tensors(1, 2, 8, 64)[:2], tensors(1, 2, 8, 520)[2]),
        "no kernel runs head dims 64 and 520",
    ),
    "no keys": (lambda: (tensors(4, 8, 64)[0], *tensors(1, 0, 64)[1:]), "an input is empty"),
    "subclass": (
        lambda: (*tensors(1, 2, 8, 64), causal_lower_right(8, 8)),
        "a tensor subclass",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_sdpa_leaves_to_torch(case: str) -> None:
    make, why = LEFT[case]
    arguments = make()
    assert why in _sdpa.left_to_torch(*arguments)
    torch.manual_seed(0)
    ours = flash_wmma.scaled_dot_product_attention(*arguments)
    torch.manual_seed(0)
    assert torch.equal(ours, functional.scaled_dot_product_attention(*arguments))
    assert "flash_wmma::forward" not in calls(lambda: flash_wmma.scaled_dot_product_attention(*arguments))


def test_sdpa_has_gradients() -> None:
    inputs = [t.requires_grad_() for t in (*tensors(1, 2, 8, 64), torch.zeros(8, 8))]
    assert not _sdpa.left_to_torch(*inputs)
    ours, torchs = (
        torch.autograd.grad(attend(*inputs).square().sum(), inputs)
        for attend in (flash_wmma.scaled_dot_product_attention, functional.scaled_dot_product_attention)
    )
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 1, 8), (3, 1, 8, 8), (3, 2, 8, 8)])
def test_sdpa_gradient_of_a_broadcast_mask_is_deterministic(
    shape: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels on a GPU add it up by atomics, and refuse; the CPU's does here what they do."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    inputs = [t.requires_grad_() for t in tensors(3, 2, 8, 64, device=device, dtype=dtype)]
    inputs.append(torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(device).requires_grad_())

    def backward(*arguments: Any) -> Any:
        attn_bias, deterministic = arguments[11], arguments[-3]
        if deterministic and attn_bias.shape != (3, 2, 8, 8):
            raise ValueError("kernel 'auto' cannot run this: the gradient of a broadcast attn_bias with deterministic")
        return ops.backward.default(*arguments)

    monkeypatch.setattr(_autograd, "_backward", backward)
    theirs = functional.scaled_dot_product_attention(*(t.double() for t in inputs))
    expected = torch.autograd.grad(theirs.square().sum(), inputs)
    torch.use_deterministic_algorithms(True)
    try:
        assert _sdpa.left_to_torch(*inputs) == ""
        results = [
            torch.autograd.grad(flash_wmma.scaled_dot_product_attention(*inputs).float().square().sum(), inputs)
            for _ in range(3)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    for ours, right in zip(results[0], expected, strict=True):
        torch.testing.assert_close(ours, right, atol=TOLERANCE[dtype] * float(right.abs().max()), rtol=0)


def test_explain_says_what_is_left_to_torch() -> None:
    q, k, v = tensors(1, 2, 8, 64)
    assert flash_wmma.explain(q, k, v).left_to_torch == ""
    answer = flash_wmma.explain(q, k, v, dropout_p=0.1)
    assert (answer.kernel, answer.backward_kernel, answer.left_to_torch) == ("cpu", "bwd_cpu", "")
    answer = flash_wmma.explain(q, k, v, dropout_p=1.0)
    assert answer.left_to_torch == "dropout_p is 1.0"
    assert "left to torch: dropout_p is 1.0" in str(answer)
    assert flash_wmma.explain(q.requires_grad_(), k, v).left_to_torch == ""
    q = tensors(1, 6, 8, 64)[0]
    assert flash_wmma.explain(q, k, v).left_to_torch == ""
    assert "do not broadcast" in flash_wmma.explain(q, k, v, enable_gqa=False).left_to_torch
    assert flash_wmma.explain(q, k, v, enable_gqa=True).left_to_torch == ""
    with sdpa_kernel(SDPBackend.MATH):
        assert "switched off" in flash_wmma.explain(q, k, v, enable_gqa=True).left_to_torch
    packed = q[0]  # sequences for forward_varlen are not torch's
    assert flash_wmma.explain(packed, packed, packed).left_to_torch == ""


@pytest.mark.parametrize("shape", [(8, 64), (2, 8, 64), (1, 2, 8, 64), (2, 1, 2, 8, 64)], ids=len)
@pytest.mark.parametrize("masked", [False, True])
def test_explain_takes_sdpas_arguments(shape: tuple[int, ...], masked: bool) -> None:
    """The answer is that of forward for the same heads, (B, H, N, d)."""
    q, k, v = tensors(*shape)
    mask = torch.zeros(*shape[:-1], 8) if masked else None
    answer = flash_wmma.explain(q, k, v, attn_mask=mask, is_causal=False)
    assert (answer.kernel, answer.left_to_torch) == ("cpu", "")
    bias = torch.zeros(8, 8) if masked else None
    assert answer.reasons == flash_wmma.explain(*tensors(2, 2, 8, 64), attn_bias=bias).reasons
    assert flash_wmma.explain(q, k, v, attn_mask=mask, dropout_p=1.0).left_to_torch == "dropout_p is 1.0"
    assert "both" in flash_wmma.explain(q, k, v, attn_mask=torch.zeros(8, 8), is_causal=True).left_to_torch


def test_explain_takes_sdpas_arguments_for_another_device() -> None:
    """The kernel is the one that SDPA's stand-in asks for there: float32 is multiplied as float32."""
    q = torch.empty(3, 8, 64, device="meta")
    facts = flash_wmma.DeviceFacts(75, 40, 64 * 1024)
    answer = flash_wmma.explain(q, q, q, is_causal=True, device_facts=facts)
    assert (answer.kernel, answer.backward_kernel) == ("simt", "bwd_simt")
    assert flash_wmma.explain(q.half(), q.half(), q.half(), is_causal=True, device_facts=facts).kernel == "mma_sm75"


@pytest.mark.parametrize("option", [{"causal": True}, {"attn_bias": torch.zeros(8, 8)}])
def test_explain_refuses_arguments_of_two_functions(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="attn_bias, causal: got both with attn_mask or is_causal"):
        flash_wmma.explain(*tensors(1, 2, 8, 64), is_causal=False, **option)


def test_explain_says_each_reason_once() -> None:
    text = str(flash_wmma.explain(*tensors(1, 2, 8, 64)))
    why = "runs on cuda tensors, and on cpu tensors by name, in the emulator"
    assert " ".join(text.split()).count(why) == 2  # forward's kernels and backward's
    assert all(kernel.name in text for kernel in flash_wmma.kernels())
    assert max(map(len, text.splitlines())) <= 120


def test_explain_of_inputs_that_torch_alone_takes() -> None:
    make, why = LEFT["float64"]
    answer = flash_wmma.explain(*make())
    assert answer.kernel is None
    assert why in answer.left_to_torch


def test_explain_of_plain_torch_ops() -> None:
    """kernel="math" is no kernel, and takes float64."""
    q = tensors(1, 2, 8, 64, dtype=torch.float64)[0]
    answer = flash_wmma.explain(q, q, q, kernel="math")
    assert (answer.kernel, answer.backward_kernel) == ("math", "math")
    assert "torch.float64" in answer.left_to_torch


def test_sdpa_leaves_transforms_to_torch() -> None:
    q, k, v = tensors(2, 2, 8, 64)

    def gradients(attend: Any) -> list[Tensor]:
        def loss(x: Tensor) -> Tensor:
            return attend(x, k, v).square().sum()

        def of_one(x: Tensor) -> Tensor:
            return attend(x[None], k[:1], v[:1]).square().sum()

        return [torch.func.grad(loss)(q), torch.func.jacrev(loss)(q), torch.func.vmap(torch.func.grad(of_one))(q)]

    ours = gradients(flash_wmma.scaled_dot_product_attention)
    torch.testing.assert_close(ours, gradients(functional.scaled_dot_product_attention))


def test_sdpa_leaves_distributed_tensors_to_torch() -> None:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    if torch.distributed.is_initialized():
        pytest.skip("a process group is there")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        q = tensors(1, 2, 8, 64)[0]
        shards = distribute_tensor(q, DeviceMesh("cpu", [0]), [Shard(1)])
        assert "wraps others" in _sdpa.left_to_torch(shards, shards, shards)
        try:
            functional.scaled_dot_product_attention(shards, shards, shards)
        except NotImplementedError:
            pytest.skip("this torch does not take it")
        ours = flash_wmma.scaled_dot_product_attention(shards, shards, shards)
        close(ours.full_tensor(), functional.scaled_dot_product_attention(q, q, q))
    finally:
        torch.distributed.destroy_process_group()


def test_sdpa_within_the_math_backend_is_torchs() -> None:
    """To the bit, and with the derivatives of the derivatives, which no kernel here has."""
    inputs = [t.requires_grad_() for t in tensors(1, 2, 8, 64)]

    def derivatives(attend: Any) -> list[Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            out = attend(*inputs, is_causal=True)
            first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
            second = torch.autograd.grad(sum(t.square().sum() for t in first), inputs)
        return [out, *first, *second]

    ours = derivatives(flash_wmma.scaled_dot_product_attention)
    assert len(ours) == 7
    assert all(map(torch.equal, ours, derivatives(functional.scaled_dot_product_attention)))


@pytest.mark.parametrize(
    ("backends", "ours"),
    [
        ([SDPBackend.FLASH_ATTENTION], True),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], True),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], False),
        ([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], False),
        ([SDPBackend.MATH], False),
    ],
    ids=lambda x: "+".join(backend.name for backend in x) if isinstance(x, list) else None,
)
@pytest.mark.parametrize("compiled", [False, True])
def test_sdpa_keeps_to_the_callers_backends(backends: list[SDPBackend], ours: bool, compiled: bool) -> None:
    """These kernels stand for flash attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            return flash_wmma.scaled_dot_product_attention(q, k, v)

    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    arguments = tensors(1, 2, 8, 64)
    attend(*arguments)
    assert ("flash_wmma::forward" in calls(lambda: attend(*arguments))) == ours
    assert "flash_wmma::forward" in calls(lambda: flash_wmma.scaled_dot_product_attention(*arguments))


@pytest.mark.parametrize("scale", [math.nan, math.inf, 1e300, torch.tensor(0.5)], ids=str)
def test_sdpa_takes_any_scale_that_torch_takes(scale: Any) -> None:
    ours, torchs = (
        attend(*tensors(1, 2, 8, 64), scale=scale)
        for attend in (flash_wmma.scaled_dot_product_attention, functional.scaled_dot_product_attention)
    )
    torch.testing.assert_close(ours, torchs, equal_nan=True)


RANKS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = {
    # q's, k's and v's dimensions before (N, d), and enable_gqa
    "N": ((), (), (), False),
    "HN": ((3,), (3,), (3,), False),
    "HN grouped": ((4,), (2,), (2,), True),
    "BHN": ((2, 3), (2, 3), (2, 3), False),
    "ABHN": ((2, 1, 3), (2, 1, 3), (2, 1, 3), False),
    "ABHN grouped": ((2, 3, 4), (2, 3, 2), (2, 3, 2), True),
    "six": ((2, 1, 3, 2), (2, 1, 3, 2), (2, 1, 3, 2), False),
    "one key head": ((2, 3), (2, 1), (2, 1), False),
    "one key head, value heads": ((2, 3), (2, 1), (2, 3), False),
    "one query head": ((2, 1), (2, 3), (2, 3), False),
    "one batch entry of keys": ((2, 3), (1, 3), (1, 3), False),
    "one batch entry of queries": ((1, 3), (2, 3), (2, 3), False),
    "one batch entry of keys, grouped": ((2, 4), (1, 2), (1, 2), True),
    "batch of values alone": ((1, 3), (1, 3), (2, 3), False),
    "keys without batch": ((2, 3), (3,), (), False),
    "queries without batch": ((), (2, 3), (3,), False),
    "each in its own dimension": ((2, 1, 1), (1, 3, 1), (1, 1, 2), False),
}
MASKS: dict[str, Any] = {  # the mask's dimensions, from those of the scores
    "full": lambda scores: scores,
    "one for all": lambda scores: (*(1 for _ in scores[:-2]), *scores[-2:]),
    "rank 2": lambda scores: scores[-2:],
    "rank 1": lambda scores: scores[-1:],
    "first repeated": lambda scores: (1, *scores[1:]),
    "one row": lambda scores: (*scores[:-2], 1, scores[-1]),
}
KINDS = ["no mask", "causal", *(f"{mask}, {kind}" for mask in MASKS for kind in ("bool", "float"))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", RANKS)
def test_sdpa_of_other_ranks(ranks: str, kind: str, device: str) -> None:
    """Forward and every gradient, on these kernels."""
    of_q, of_k, of_v, enable_gqa = RANKS[ranks]
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float16 if device == "cuda" else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    inputs = [normal(*of_q, 5, 16), normal(*of_k, 7, 16), normal(*of_v, 7, 8)]
    options: dict[str, Any] = {"is_causal": kind == "causal", "enable_gqa": enable_gqa}
    given, (mask, _, dtype_of_mask) = inputs, kind.partition(", ")
    scores = (*torch.broadcast_shapes(of_q, (*of_k[:-1], of_q[-1]) if enable_gqa else of_k), 5, 7)
    if mask in MASKS:
        bias = normal(*MASKS[mask](scores))
        given = [*inputs, bias.detach() > -1 if dtype_of_mask == "bool" else bias]
        inputs = given if dtype_of_mask == "float" else inputs
    assert _sdpa.left_to_torch(*given, **options) == ""
    with Recorded() as recorded:
        ours = flash_wmma.scaled_dot_product_attention(*given, **options)
        gradients = torch.autograd.grad(ours.float().square().sum(), inputs)
    assert [op for op, _ in recorded.calls] == ["forward", "backward"]
    exact = [t.double() if t.is_floating_point() else t for t in given]
    exact[3:] = [t.expand(scores) for t in exact[3:]]  # torch refuses some masks of one dimension
    right = functional.scaled_dot_product_attention(*exact, **options)
    assert ours.shape == right.shape
    assert ours.is_contiguous()
    for got, expected in zip(
        (ours, *gradients), (right, *torch.autograd.grad(right.square().sum(), inputs)), strict=True
    ):
        tolerance = (2e-5 if dtype == torch.float32 else 1e-2) * max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(got.double(), expected.double(), atol=tolerance, rtol=0)


def test_sdpa_repeats_nothing_where_a_view_will_do() -> None:
    """Keys and values that all batch entries or all heads share are read where they lie."""
    for of_q, of_k in (((2, 3, 4), ()), ((2, 3, 4), (4,)), ((2, 4), (2, 1)), ((4,), (4,))):
        q, k, v = tensors(*of_q, 8, 64)[0], *tensors(*of_k, 8, 64)[1:]
        with Recorded() as recorded:
            flash_wmma.scaled_dot_product_attention(q, k, v)
        ((_, arguments),) = recorded.calls
        assert [arguments[name].data_ptr() for name in "qkv"] == [t.data_ptr() for t in (q, k, v)]


@pytest.mark.parametrize(
    ("shapes", "mask", "options"),
    [
        (((64,), (64,), (64,)), None, {}),
        (((3, 8, 64), (2, 8, 64), (2, 8, 64)), None, {}),
        (((2, 2, 8, 64), (3, 2, 8, 64), (3, 2, 8, 64)), None, {}),
        (((8, 64), (9, 64), (8, 64)), None, {}),
        (((2, 8, 64), (2, 8, 32), (2, 8, 64)), None, {}),
        (((3, 8, 64), (2, 8, 64), (2, 8, 64)), None, {"enable_gqa": True}),
        (((1, 8, 64), (2, 8, 64), (2, 8, 64)), None, {"enable_gqa": True}),
        (((8, 64), (8, 64), (8, 64)), (2, 8, 8), {}),
        (((1, 2, 8, 64), (1, 2, 8, 64), (3, 2, 8, 64)), (3, 1, 8, 8), {}),
        (((2, 8, 64), (2, 8, 64), (2, 8, 64)), (3, 8, 8), {}),
        (((2, 8, 64), (2, 8, 64), (2, 8, 64)), (8, 8), {"is_causal": True}),
    ],
)
def test_sdpa_of_shapes_that_do_not_go_together(
    shapes: tuple[tuple[int, ...], ...], mask: tuple[int, ...] | None, options: dict[str, Any]
) -> None:
    """Torch's errors."""
    arguments = [torch.zeros(shape) for shape in shapes] + ([] if mask is None else [torch.zeros(mask)])
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        functional.scaled_dot_product_attention(*arguments, **options)
    with pytest.raises(theirs.type) as ours:
        flash_wmma.scaled_dot_product_attention(*arguments, **options)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sdpa_of_empty_inputs(ranks: int, empty: str) -> None:
    sizes = {"batch": 2, "heads": 2, "queries": 5, "keys": 7} | {empty: 0}
    before = (2, sizes["batch"], sizes["heads"])[-ranks:]
    q, k = (torch.randn(*before, sizes[n], 16) for n in ("queries", "keys"))
    for few in (k, k[..., :1, :, :]):
        ours = flash_wmma.scaled_dot_product_attention(q, few, few)
        torch.testing.assert_close(ours, functional.scaled_dot_product_attention(q, few, few))


def test_sdpa_of_other_ranks_compiles() -> None:
    torch._dynamo.reset()
    attend = torch.compile(flash_wmma.scaled_dot_product_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (20, 33):
        q, k, v = (t.requires_grad_() for t in (*tensors(2, 1, 3, n, 16)[:2], tensors(2, 1, n, 16)[2]))
        got, right = (f(q, k, v, is_causal=True) for f in (attend, functional.scaled_dot_product_attention))
        torch.testing.assert_close(got, right)
        for a, b in zip(*(torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (got, right)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
def test_sdpa_follows_the_float32_precision(cuda: torch.device) -> None:
    """Gradients too: as "highest" float32 is multiplied as such."""
    q, k, v = (t.requires_grad_() for t in tensors(1, 2, 64, 64, device=cuda))
    exact = functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    gradients = torch.autograd.grad(exact.square().sum(), (q, k, v))
    before = torch.get_float32_matmul_precision()
    try:
        for precision, least, most in (("highest", 0.0, 1e-5), ("high", 1e-5, 1e-2)):
            torch.set_float32_matmul_precision(precision)
            assert _sdpa.left_to_torch(q, k, v) == ""
            out = flash_wmma.scaled_dot_product_attention(q, k, v)
            assert least <= (out - exact).abs().max() <= most
            for got, expected in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), gradients, strict=True):
                assert (got - expected).abs().max() <= 100 * most
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "arguments",
    [
        ([1.0], None, None),
        (*tensors(1, 2, 8, 64), torch.zeros(7, 7)),
        (*tensors(1, 2, 8, 64), torch.zeros(8, 8), 0.0, True),
        (*tensors(1, 2, 8, 64), torch.zeros(8, 8, dtype=torch.float64)),
        (*tensors(1, 2, 8, 64), [1]),
        (*tensors(1, 2, 8, 64), None, 0.0, "no"),
        (*tensors(1, 2, 8, 64), None, 0.0, None),
    ],
    ids=["list", "mask shape", "mask and causal", "mask dtype", "mask a list", "causal a word", "causal None"],
)
def test_sdpa_raises_what_torch_raises(arguments: tuple[Any, ...]) -> None:
    try:
        functional.scaled_dot_product_attention(*arguments)
    except Exception as theirs:
        with pytest.raises(type(theirs)):
            flash_wmma.scaled_dot_product_attention(*arguments)
    else:
        pytest.skip("this torch takes it")


def test_sdpa_compiles(device: str) -> None:
    torch._dynamo.reset()
    attend = torch.compile(flash_wmma.scaled_dot_product_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (20, 33):
        q, k, v = (normal((1, 2, n, 64), device=device, dtype=torch.float16, seed=s) for s in (1, 2, 3))
        assert torch.equal(attend(q, k, v, is_causal=True), flash_wmma.forward(q, k, v, causal=True))
    assert "flash_wmma::forward" in calls(lambda: attend(q, k, v, is_causal=True))
    q.requires_grad_()
    attend(q, q, q).sum().backward()  # the same tensor three times
    assert q.grad is not None


# ----------------------------------------------------------------------------------------------------------- flash-attn

FLASH_ATTN = {  # version 2.8
    "flash_attn_func": "q, k, v",
    "flash_attn_kvpacked_func": "q, kv",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k",
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k",
    "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen",
}
DEFAULTS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}


@pytest.mark.parametrize("function", FLASH_ATTN)
def test_flash_attn_signatures(function: str) -> None:
    parameters = inspect.signature(getattr(flash_wmma, function)).parameters
    defaults = DEFAULTS | ({"block_table": None} if function == "flash_attn_varlen_func" else {})
    positional = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == [*FLASH_ATTN[function].split(", "), *defaults]
    assert {p.name: p.default for p in positional if p.default is not p.empty} == defaults


def test_with_kvcache_signature() -> None:
    """flash-attn 2.8's, by position; other names are keywords."""
    names = [
        *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"),
        *("cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved"),
        *("alibi_slopes", "num_splits", "return_softmax_lse"),
    ]
    parameters = inspect.signature(flash_wmma.flash_attn_with_kvcache).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == names
    changed = {"causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "num_splits": 0}
    changed["return_softmax_lse"] = False
    for p in positional[3:]:
        assert p.default == changed.get(p.name), p.name


WINDOWS = [(False, (-1, -1)), (True, (-1, -1)), (False, (5, 3)), (True, (7, 100)), (False, (-1, 4)), (True, (0, 0))]


def flash_attn_mask(causal: bool, window: tuple[int, int], nq: int, nk: int) -> Tensor:
    """As flash-attn's documentation says it: always from the last key."""
    left, right = window
    place = torch.arange(nq)[:, None] + nk - nq
    key = torch.arange(nk)
    seen = torch.ones(nq, nk, dtype=torch.bool)
    if left >= 0:
        seen &= key >= place - left
    if causal:
        right = 0
    if right >= 0:
        seen &= key <= place + right
    return seen


@pytest.mark.parametrize("causal, window", WINDOWS)
@pytest.mark.parametrize("nq, nk", [(1, 1), (20, 33), (33, 20), (1, 40)])
def test_flash_attn_func(nq: int, nk: int, causal: bool, window: tuple[int, int], device: str) -> None:
    q, k, v = (
        torch.randn(2, n, h, 64, generator=torch.Generator().manual_seed(h + n)) for n, h in ((nq, 6), (nk, 2), (nk, 2))
    )
    q, k, v = (t.half().to(device) for t in (q, k, v))
    slopes = (0.5 ** torch.arange(6)).to(device)
    for options in ({}, {"softcap": 5.0}, {"alibi_slopes": slopes}, {"softmax_scale": 0.2}):
        if (
            device == "cuda"
            and flash_wmma.explain(
                *(t.transpose(1, 2) for t in (q, k, v)), **{x: y for x, y in options.items() if x != "softmax_scale"}
            ).kernel
            is None
        ):
            continue
        out, lse, probabilities = flash_wmma.flash_attn_func(
            q, k, v, causal=causal, window_size=window, return_attn_probs=True, **options
        )
        scale = options.get("softmax_scale")
        seen = flash_attn_mask(causal, window, nq, nk).to(device)
        dense = [t.transpose(1, 2).double() for t in (q, k, v)]
        # The reference's own mask is not used: a row hides what flash-attn's text hides.
        modification = Modification(None, options.get("alibi_slopes"), softcap=options.get("softcap", 0.0))
        expected, expected_lse = masked_attention(*dense, seen, scale, modification)
        close(out, expected.transpose(1, 2).half())
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=1e-3)
        assert out.is_contiguous()
        assert out.shape == q.shape
        assert lse.shape == (2, 6, nq)
        assert lse.dtype == torch.float32
        assert probabilities.numel() == 0
        assert torch.equal(
            flash_wmma.flash_attn_func(
                q, k, v, 0.0, scale, causal, window, **{x: y for x, y in options.items() if x != "softmax_scale"}
            ),
            out,
        )


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None, modification: Modification
) -> tuple[Tensor, Tensor]:
    class Seen(Mask):
        def visible(self, nq: int, nk: int, device: torch.device | str = "cpu") -> Tensor:
            return seen

    return attention(q, k, v, Seen(), scale, modification)


OPTIONS: dict[str, Any] = {
    "softmax_scale": -0.3,
    "causal": True,
    "window_size": (4, 2),
    "softcap": 2.0,
    "alibi_slopes": torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.3, 0.1]]),
    "deterministic": True,
    "return_attn_probs": True,
}


class Recorded(TorchDispatchMode):
    """The calls of this library's ops in it, of forward and backward: names and arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace == "flash_wmma":
            defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
            self.calls.append((op._opname, defaults | dict(zip(defaults, args, strict=False)) | kwargs))
        return op(*args, **kwargs)


def flash_attn(function: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """That function, whatever it takes, of q, k and v (B, N, H, d); for packed sequences the batch's entries."""
    tensors = [q, k, v]
    if "kvpacked" in function:
        tensors = [torch.stack(tensors, 2)] if "qkvpacked" in function else [q, torch.stack([k, v], 2)]
    if "varlen" not in function:
        return getattr(flash_wmma, function)(*tensors, **options)
    batch, *longest = q.shape[0], q.shape[1], k.shape[1]
    ends = [n * torch.arange(batch + 1, dtype=torch.int32, device=q.device) for n in longest]
    lengths = [ends[0], longest[0]] if "qkvpacked" in function else [*ends, *longest]
    result = getattr(flash_wmma, function)(*(t.flatten(0, 1) for t in tensors), *lengths, **options)
    out, *rest = result if isinstance(result, tuple) else (result,)
    out = out.unflatten(0, (batch, -1))
    return (out, rest[0].unflatten(1, (batch, -1)).transpose(0, 1), rest[1]) if rest else out


@pytest.mark.parametrize("chosen", [*OPTIONS, "all"])
@pytest.mark.parametrize("function", FLASH_ATTN)
def test_flash_attn_options(function: str, chosen: str, device: str) -> None:
    """Every form has every option, forward and backward."""
    assert {"dropout_p", *OPTIONS} == set(DEFAULTS)
    nq, nk = (14, 14) if "qkvpacked" in function else (9, 14)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, 4, 64, generator=generator).half().to(device) for n in (nq, nk, nk))
    options = {name: value for name, value in OPTIONS.items() if chosen in (name, "all")}
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    with Recorded() as recorded:
        result = flash_attn(function, *(t.requires_grad_() for t in (q, k, v)), **options)
        out, *rest = result if isinstance(result, tuple) else (result,)
        gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    (_, forward), (_, backward) = recorded.calls
    assert ("cu_seqlens_q" in forward) == ("cu_seqlens_q" in backward) == ("varlen" in function)
    assert backward["deterministic"] == options.get("deterministic", False)

    inputs = [t.detach().double().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    seen = flash_attn_mask(options.get("causal", False), options.get("window_size", (-1, -1)), nq, nk).to(device)
    modification = Modification(None, options.get("alibi_slopes"), softcap=options.get("softcap", 0.0))
    expected, lse = masked_attention(*inputs, seen, options.get("softmax_scale"), modification)
    close(out, expected.transpose(1, 2).half())
    for got, right in zip(gradients, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        torch.testing.assert_close(got.double(), right.transpose(1, 2), atol=0.01 * float(right.abs().max()), rtol=0)
    assert bool(rest) == ("return_attn_probs" in options)
    if rest:
        torch.testing.assert_close(rest[0].double(), lse, atol=2e-3, rtol=1e-3)
        assert rest[1].numel() == 0
    if chosen == "causal":
        torch.manual_seed(3)
        dropped = flash_attn(function, q, k, v, dropout_p=0.5, **options)
        assert not torch.equal(dropped, flash_attn(function, q, k, v, **options))
        torch.manual_seed(3)
        assert torch.equal(dropped, flash_attn(function, q, k, v, dropout_p=0.5, **options))


SEQUENCES: dict[str, Any] = {
    "tuple": (3, 5),
    "list": [3, 5],
    "tensor": torch.tensor([3, 5]),
    "int32": torch.tensor([3, 5], dtype=torch.int32),
    "size": torch.Size([3, 5]),
    "range": range(3, 7, 2),
    "array": numpy.array([3, 5]),
    "tuple of array's": tuple(numpy.array([3, 5])),
    "tuple of tensor's": tuple(torch.tensor([3, 5])),
}


@pytest.mark.parametrize("window", SEQUENCES)
@pytest.mark.parametrize("function", FLASH_ATTN)
def test_flash_attn_window_is_any_sequence(function: str, window: str) -> None:
    """As in flash-attn's own tests, which pass a tensor."""
    q, k, v = (t.transpose(1, 2) for t in tensors(2, 4, 14, 64))
    with Recorded() as recorded:
        ours = flash_attn(function, q, k, v, window_size=SEQUENCES[window])
    ((_, given),) = recorded.calls
    assert (given["window_left"], given["window_right"]) == (3, 5)
    assert torch.equal(ours, flash_attn(function, q, k, v, window_size=(3, 5)))


@pytest.mark.parametrize("window", [(-1, -1), torch.tensor([-1, -1])], ids=["tuple", "tensor"])
def test_flash_attn_window_without_bounds(window: Any) -> None:
    q, k, v = (t.transpose(1, 2) for t in tensors(2, 4, 14, 64))
    with Recorded() as recorded:
        flash_wmma.flash_attn_func(q, k, v, window_size=window)
    ((_, given),) = recorded.calls
    assert (given["window_left"], given["window_right"]) == (-1, -1)


@pytest.mark.parametrize("flag", [1, 0, numpy.bool_(True), torch.tensor(True)], ids=repr)
def test_flash_attn_flags_have_truth_values(flag: Any) -> None:
    q, k, v = (t.transpose(1, 2) for t in tensors(1, 2, 14, 64))
    options = ("causal", "deterministic", "return_attn_probs")
    result = flash_wmma.flash_attn_func(q, k, v, **dict.fromkeys(options, flag))
    expected = flash_wmma.flash_attn_func(q, k, v, **dict.fromkeys(options, bool(flag)))
    assert isinstance(result, tuple) == bool(flag)
    assert all(map(torch.equal, *((r if isinstance(r, tuple) else (r,)) for r in (result, expected))))


def test_flash_attn_packed_forms(device: str) -> None:
    """Each packed form is the unpacked one, on views: nothing is copied."""
    qkv = torch.randn(2, 20, 3, 4, 64, generator=torch.Generator().manual_seed(1)).half().to(device)
    q, k, v = qkv.unbind(2)
    before = bits(qkv)
    expected = flash_wmma.flash_attn_func(q, k, v, causal=True)
    with Recorded() as recorded:
        assert torch.equal(flash_wmma.flash_attn_qkvpacked_func(qkv, causal=True), expected)
        assert torch.equal(flash_wmma.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), expected)
    assert torch.equal(bits(qkv), before)
    for _, arguments in recorded.calls:
        assert [arguments[name].data_ptr() for name in "qkv"] == [t.data_ptr() for t in (q, k, v)]


def test_flash_attn_varlen_forms(device: str) -> None:
    qkv = torch.randn(20, 3, 4, 64, generator=torch.Generator().manual_seed(1)).half().to(device)
    q, k, v = qkv.unbind(1)
    if device == "cuda" and flash_wmma.explain(q, k, v).kernel is None:
        pytest.skip("no kernel has varlen")
    cu = torch.tensor([0, 7, 7, 20], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"causal": True, "window_size": (4, -1)}
    out, lse, _ = flash_wmma.flash_attn_varlen_func(q, k, v, cu, cu, 13, 13, return_attn_probs=True, **options)
    assert (out.shape, lse.shape) == ((20, 4, 64), (4, 20))
    for begin, end in ((0, 7), (7, 20)):
        one = (t[None, begin:end] for t in (q, k, v))
        alone, alone_lse, _ = flash_wmma.flash_attn_func(*one, return_attn_probs=True, **options)
        close(out[begin:end], alone[0])
        torch.testing.assert_close(lse[:, begin:end], alone_lse[0])
    assert torch.equal(flash_wmma.flash_attn_varlen_qkvpacked_func(qkv, cu, 13, **options), out)
    assert torch.equal(flash_wmma.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 13, 13, **options), out)
    with pytest.raises(ValueError, match="max_seqlen_q: got 12"):
        flash_wmma.flash_attn_varlen_qkvpacked_func(qkv, cu, 12, validate=True)
    with pytest.raises(ValueError, match="max_seqlen_k: got 12"):
        flash_wmma.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 13, 12, validate=True)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dropout": ({"dropout_p": 1.0}, ValueError, "dropout_p: got 1.0, allowed: a float from 0 to 1, not 1 itself"),
    "dropout type": ({"dropout_p": "a"}, TypeError, "dropout_p: got 'a', allowed: a float"),
    "window": ({"window_size": 3}, TypeError, r"window_size: got 3, allowed: a pair \(left, right\)"),
    "window of three": ({"window_size": (1, 2, 3)}, ValueError, r"window_size: got \(1, 2, 3\)"),
    "window a word": ({"window_size": "35"}, TypeError, r"window_size: got '35', allowed: a pair"),
    "window a set": ({"window_size": {3, 5}}, TypeError, r"window_size: got \{3, 5\}, allowed: a pair"),
    "window a number's tensor": ({"window_size": torch.tensor(3)}, TypeError, r"window_size: got tensor\(3\), allowed"),
    "window of three's tensor": (
        {"window_size": torch.zeros(3).long()},
        ValueError,
        r"window_size: got tensor\(\[0, 0",
    ),
    "window of floats": ({"window_size": torch.tensor([3.0, 5.0])}, TypeError, r"window: got \(3\.0, 5\.0\), allowed"),
    **{
        f"{flag} {value!r}": ({flag: value}, TypeError, f"{flag}: got {value!r}, allowed: a bool")
        for flag in ("causal", "deterministic", "return_attn_probs")
        for value in ("yes", None)
    },
    "softcap": ({"softcap": -1.0}, ValueError, r"softcap: got -1\.0, allowed: 0 \(none\) or a positive float"),
    "slopes": (
        {"alibi_slopes": torch.zeros(3)},
        ValueError,
        r"alibi_slopes\.shape: got \(3,\), allowed: \(Hq\) = \(4,\)",
    ),
    "rank": ({"k": torch.zeros(20, 4, 64)}, ValueError, r"k\.shape: got \(20, 4, 64\), allowed: \(B, N, H, d\)"),
    "v length": (
        {"v": torch.zeros(1, 21, 4, 64)},
        ValueError,
        r"v\.shape: got \(1, 21, 4, 64\), allowed: \(B, N, H, d_v\) .* of k, \(1, 20, 4, 64\)",
    ),
    "no tensor": ({"v": None}, TypeError, r"v: got NoneType, allowed: torch\.Tensor"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_flash_attn_errors(wrong: str) -> None:
    changes, error, message = REFUSED[wrong]
    call = {x: torch.zeros(1, 20, 4, 64) for x in "qkv"} | changes
    with pytest.raises(error, match=message):
        flash_wmma.flash_attn_func(**call)


def test_flash_attn_layouts() -> None:
    q, cu = torch.zeros(20, 4, 64), torch.tensor([0, 20], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"k\.shape: got \(20, 4, 64\), allowed: \(pages, page_size, H, d\)"):
        flash_wmma.flash_attn_varlen_func(q, q, q, cu, cu, 20, 20, block_table=cu[None])
    with pytest.raises(ValueError, match=r"qkv\.shape: got \(20, 4, 64\), allowed: \(total, 3, H, d\)"):
        flash_wmma.flash_attn_varlen_qkvpacked_func(q, cu, 20)
    with pytest.raises(ValueError, match=r"kv\.shape: got .* allowed: \(B, N, 2, H, d\)"):
        flash_wmma.flash_attn_kvpacked_func(q[None], torch.zeros(1, 20, 3, 4, 64))


def test_flash_attn_is_exported() -> None:
    exported = {name for name in vars(_flash_attn) if name.startswith("flash_attn_")}
    assert exported == {*FLASH_ATTN, "flash_attn_with_kvcache"}
    assert exported <= set(flash_wmma.__all__)


# ------------------------------------------------------------------------------------------------------------- the hook

HOOK = hasattr(torch.nn.attention, "activate_flash_attention_impl") and hasattr(torch.library, "get_kernel")


@pytest.fixture
def activated() -> Any:
    if not HOOK:
        pytest.skip("this torch has no flash-attention hook")
    torch.nn.attention.activate_flash_attention_impl(_hook.NAME)
    yield
    if torch.nn.attention.current_flash_attention_impl() == _hook.NAME:
        torch.nn.attention.restore_flash_attention_impl()


def test_hook_is_listed_and_inactive() -> None:
    if not HOOK:
        pytest.skip("this torch has no flash-attention hook")
    assert _hook.NAME in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("kind", ["plain", "causal", "float", "rows hidden"])
def test_hook_on_the_cpu(activated: None, kind: str) -> None:
    """Torch's attention runs this library's; restored, it runs its own."""
    q, k, v = (t.requires_grad_() for t in tensors(2, 4, 33, 64))
    mask = None
    if kind == "float":
        mask = torch.randn(33, 33)
    if kind == "rows hidden":
        mask = torch.rand(33, 33, generator=torch.Generator().manual_seed(1)) > 0.5
        mask[3] = False

    def attend() -> list[Tensor]:
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=kind == "causal")
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    assert "flash_wmma::forward" in calls(attend)
    ours = attend()
    torch.nn.attention.restore_flash_attention_impl()
    assert "flash_wmma::forward" not in calls(attend)
    for a, b in zip(ours, attend(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        assert a.stride() == b.stride()


def test_hook_leaves_the_rest_to_torch(activated: None) -> None:
    q, k, v = tensors(2, 4, 33, 64, dtype=torch.float64)
    assert "flash_wmma::forward" not in calls(lambda: functional.scaled_dot_product_attention(q, k, v))
    close(functional.scaled_dot_product_attention(q, k, v), attention(q, k, v, DENSE, 1 / math.sqrt(64))[0])


def test_hook_with_packed_sequences() -> None:
    """The operator behind torch.nn.attention.varlen, called as torch would."""
    q, k, v = tensors(20, 4, 64)
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    forward = _hook._cuda_packed(None)
    result = forward(None, q, k, v, cu, cu, 13, 13, 0.0, True, False, scale=0.2, window_size_left=5)
    assert len(result) == 5
    out, lse = flash_wmma.forward_varlen(
        q, k, v, cu, cu, 13, 13, causal="bottom_right", window=(5, None), scale=0.2, return_lse=True
    )
    assert torch.equal(result[0], out)
    assert torch.equal(result[1], lse)


def test_hook_is_as_deterministic_as_torch() -> None:
    """Gradients behind torch's attention follow its flag."""
    q, k, v = tensors(1, 2, 14, 64)
    out, lse = _hook._cpu(None)(None, q, k, v)
    with Recorded() as recorded:
        for flag in (False, True):
            torch.use_deterministic_algorithms(flag)
            _hook._cpu_backward(None)(None, out, q, k, v, out, lse, 0.0, False)
    torch.use_deterministic_algorithms(False)
    assert [given["deterministic"] for _, given in recorded.calls] == [False, True]


@pytest.mark.gpu
def test_hook_on_the_gpu(activated: None, cuda: torch.device) -> None:
    q, k, v = (t.half().to(cuda).requires_grad_() for t in tensors(2, 4, 100, 64))

    def attend() -> list[Tensor]:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    assert "flash_wmma::forward" in calls(attend)
    ours = attend()
    torch.nn.attention.restore_flash_attention_impl()
    for a, b in zip(ours, attend(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


# ------------------------------------------------------------------------------------- the way of options to the ops

REACHING: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "causal": ("bottom_right", {"window_right": 0, "bottom_right": True}, {"window_right": 0, "bottom_right": True}),
    "scale": (0.3, {"scale": 0.3}, {"scale": 0.3}),
    "window": ((3, 2), {"window_left": 3, "window_right": 2}, {"window_left": 3, "window_right": 2}),
    "attn_bias": (torch.ones(14), {"attn_bias": [1.0] * 14}, {"attn_bias": [1.0] * 14}),
    "alibi_slopes": (torch.ones(2), {"alibi_slopes": [1.0, 1.0]}, {"alibi_slopes": [1.0, 1.0]}),
    "softcap": (2.0, {"softcap": 2.0}, {"softcap": 2.0}),
    "sinks": (torch.ones(2), {"sinks": [1.0, 1.0]}, {"sinks": [1.0, 1.0]}),
    "kernel": ("cpu", {"kernel_name": "cpu"}, {"forward_kernel": "cpu"}),
    "batch_invariant": (True, {"batch_invariant": True}, {}),
    "backward_kernel": ("bwd_cpu", {}, {"kernel_name": "bwd_cpu"}),
    "deterministic": (True, {}, {"deterministic": True}),
}
"""A value of each option, and what the forward op and the backward op are then given that is not their default."""


def one_sequence(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    ends = (torch.tensor([0, t.shape[2]], dtype=torch.int32) for t in (q, k))
    rows = (t[0].transpose(0, 1) for t in (q, k, v))
    return flash_wmma.forward_varlen(*rows, *ends, q.shape[2], k.shape[2], **options)


def module(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    logits = options.pop("sinks", None)
    made = flash_wmma.MultiheadAttention(16, 2, sinks=logits is not None, **options)
    if logits is not None:
        made.sinks.data.copy_(logits)
    attended: Tensor = made(q[0])
    return attended


ROUTES = {
    "forward": (flash_wmma.forward, flash_wmma.forward),
    "forward_varlen": (flash_wmma.forward_varlen, one_sequence),
    "MultiheadAttention": (flash_wmma.MultiheadAttention, module),
}


def options_of(function: Any) -> list[str]:
    return [option for option in REACHING if option in inspect.signature(function).parameters]


def beyond_defaults(op: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are not their defaults, tensors as lists."""
    optional = {a.name: a.default_value for a in getattr(ops, op).default._schema.arguments if a.has_default_value()}
    values = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in given.items()}
    return {name: values[name] for name, default in optional.items() if values[name] != default}


@pytest.mark.parametrize(
    ("route", "option"), [(route, option) for route in ROUTES for option in options_of(ROUTES[route][0])]
)
def test_option_reaches_the_ops(route: str, option: str) -> None:
    """Given alone, with a gradient and without one, and no other is changed."""
    _, attend = ROUTES[route]
    value, forward, backward = REACHING[option]
    q, k, v = tensors(1, 2, 14, 16)
    with Recorded() as recorded:
        attend(q, k, v, **{option: value})
        attend(*(t.requires_grad_() for t in (q, k, v)), **{option: value}).sum().backward()
    assert [name.partition("_")[0] for name, _ in recorded.calls] == ["forward", "forward", "backward"]
    for (name, given), expected in zip(recorded.calls, (forward, forward, backward), strict=True):
        assert beyond_defaults(name, given) == expected


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("option", [option for option in options_of(flash_wmma.profile) if option != "kernel"])
def test_option_reaches_the_profiled_kernel(option: str) -> None:
    value, forward, _ = REACHING[option]
    with Recorded() as recorded:
        flash_wmma.profile(*tensors(1, 2, 14, 16), kernel="simt", **{option: value})
    ((name, given),) = recorded.calls
    assert beyond_defaults(name, given) == forward | {"kernel_name": "simt"}
