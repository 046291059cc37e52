"""What is refused, and in which words: each message names the argument, what it was, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import name
from needs import needs
from reference import Mask, check, reference, run
from torch import Tensor

import flash_wmma

Call = dict[str, Any]


def good(device: str = "cpu") -> Call:
    return {x: torch.randn(2, 4, 20, 64, device=device) for x in "qkv"}


def zeros(*shape: int, **options: Any) -> Callable[[str], Tensor]:
    return lambda device: torch.zeros(shape, **{"device": device, **options})


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q a list": ({"q": [1.0]}, TypeError, r"q: got list, allowed: torch\.Tensor"),
    "k None": ({"k": None}, TypeError, r"k: got NoneType, allowed: torch\.Tensor"),
    "v a number": ({"v": 3}, TypeError, r"v: got int, allowed: torch\.Tensor"),
    "q rank 3": ({"q": zeros(4, 20, 64)}, ValueError, r"q\.shape: got \(4, 20, 64\), allowed: \(B, H, N, d\)"),
    "k rank 5": (
        {"k": zeros(1, 2, 4, 20, 64)},
        ValueError,
        r"k\.shape: got \(1, 2, 4, 20, 64\), allowed: \(B, H, N, d\)",
    ),
    "v rank 0": ({"v": zeros()}, ValueError, r"v\.shape: got \(\), allowed: \(B, H, N, d\)"),
    "k batch": ({"k": zeros(3, 4, 20, 64)}, ValueError, r"k\.shape: got \(3, 4, 20, 64\), allowed: the batch of q, 2"),
    "v batch": ({"v": zeros(1, 4, 20, 64)}, ValueError, r"v\.shape: got \(1, 4, 20, 64\), allowed: the batch of q, 2"),
    "k head dim": (
        {"k": zeros(2, 4, 20, 32)},
        ValueError,
        r"k\.shape: got \(2, 4, 20, 32\), allowed: the head dim of q, 64",
    ),
    "v heads": (
        {"v": zeros(2, 2, 20, 64)},
        ValueError,
        r"v\.shape: got \(2, 2, 20, 64\), allowed: .*k, \(2, 4, 20, 64\)",
    ),
    "v length": (
        {"v": zeros(2, 4, 21, 64)},
        ValueError,
        r"v\.shape: got \(2, 4, 21, 64\), allowed: .*k, \(2, 4, 20, 64\)",
    ),
    "batch_invariant text": ({"batch_invariant": "x"}, TypeError, r"batch_invariant: got 'x', allowed: a bool"),
    "heads not a multiple": (
        {"k": zeros(2, 3, 20, 64), "v": zeros(2, 3, 20, 64)},
        ValueError,
        r"q\.shape: got \(2, 4, 20, 64\), allowed: a number of heads that is a multiple of k's, 3",
    ),
    "more heads in k": (
        {"k": zeros(2, 8, 20, 64), "v": zeros(2, 8, 20, 64)},
        ValueError,
        r"q\.shape: got \(2, 4, 20, 64\), allowed: a number of heads that is a multiple of k's, 8",
    ),
    "no heads in k": (
        {"k": zeros(2, 0, 20, 64), "v": zeros(2, 0, 20, 64)},
        ValueError,
        r"q\.shape: got \(2, 4, 20, 64\), allowed: a number of heads that is a multiple of k's, 0",
    ),
    "k dtype": (
        {"k": zeros(2, 4, 20, 64, dtype=torch.float16)},
        ValueError,
        r"k\.dtype: got torch\.float16, allowed: q's, torch\.float32",
    ),
    "v dtype": (
        {"v": zeros(2, 4, 20, 64, dtype=torch.int64)},
        ValueError,
        r"v\.dtype: got torch\.int64, allowed: q's, torch\.float32",
    ),
    **{
        f"{t} inputs": (
            {x: zeros(2, 4, 20, 64, dtype=t) for x in "qkv"},
            ValueError,
            rf"q\.dtype: got {t}, allowed: torch\.float32, torch\.float16, torch\.bfloat16",
        )
        for t in (torch.float64, torch.int32, torch.complex64, torch.bool)
    },
    "k device": (
        {"k": zeros(2, 4, 20, 64, device="meta")},
        ValueError,
        r"k\.device: got meta, allowed: q's, (cpu|cuda:0)",
    ),
    "q sparse": (
        {"q": lambda device: torch.zeros(2, 4, 20, 64, device=device).to_sparse()},
        ValueError,
        r"q\.layout: got torch\.sparse_coo, allowed: torch\.strided",
    ),
    "causal a word": (
        {"causal": "upper"},
        ValueError,
        r"causal: got 'upper', allowed: False, True, 'top_left', 'bottom_",
    ),
    "causal None": ({"causal": None}, TypeError, r"causal: got None, allowed: False, True, 'top_left', 'bottom_right'"),
    "causal a list": ({"causal": []}, TypeError, r"causal: got \[\], allowed: False, True"),
    "window a number": ({"window": 3}, TypeError, r"window: got 3, allowed: None or a pair \(left, right\)"),
    "window a set": ({"window": {1, 2}}, TypeError, r"window: got \{1, 2\}, allowed: None or a pair"),
    "window of flags": ({"window": (True, 2)}, TypeError, r"window: got \(True, 2\), allowed: None or a pair"),
    "softcap tiny": ({"softcap": 1e-50}, ValueError, r"softcap: got 1e-50, allowed: 0 \(none\) or a positive float"),
    "softcap huge": ({"softcap": 1e31}, ValueError, r"softcap: got 1e\+31, allowed: 0 \(none\) or a positive float"),
    "window of one": ({"window": (3,)}, ValueError, r"window: got \(3,\), allowed: None or a pair \(left, right\)"),
    "window of three": ({"window": (1, 2, 3)}, ValueError, r"window: got \(1, 2, 3\), allowed: None or a pair"),
    "window of floats": ({"window": (1.5, 2)}, TypeError, r"window: got \(1\.5, 2\), allowed: None or a pair"),
    "window of words": ({"window": ("a", 2)}, TypeError, r"window: got \('a', 2\), allowed: None or a pair"),
    "window too large": (
        {"window": (2**63, 1)},
        ValueError,
        r"window: got \(9223372036854775808, 1\), allowed: .*2\*\*63",
    ),
    "scale a word": ({"scale": "1"}, TypeError, r"scale: got '1', allowed: None or a float"),
    "kernel None": ({"kernel": None}, TypeError, r"kernel: got None, allowed: 'auto' or a name"),
    "kernel unknown": (
        {"kernel": "wmma_v0"},
        ValueError,
        r"kernel: got 'wmma_v0', allowed: 'auto', .*'cpu', .*'math'$",
    ),
    "kernel empty": ({"kernel": ""}, ValueError, r"kernel: got '', allowed: 'auto', .*'cpu', .*'math'$"),
    **{
        f"scale {scale}": (
            {"scale": scale},
            ValueError,
            rf"scale: got {re.escape(str(scale))}, allowed: None or a finite",
        )
        for scale in (float("nan"), float("inf"), -float("inf"), 1e39)
    },
    **{
        f"{option} {value!r}": ({option: value}, TypeError, rf"{option}: got {value!r}, allowed: .*a bool")
        for option, value in (
            *(("return_lse", value) for value in ("yes", 1, None)),
            *(("deterministic", value) for value in ("yes", 0)),
            ("batch_invariant", "yes"),
        )
    },
    "bias a list": ({"attn_bias": [[0.0]]}, TypeError, r"attn_bias: got list, allowed: torch\.Tensor"),
    "bias shape": (
        {"attn_bias": zeros(20, 21)},
        ValueError,
        r"attn_bias\.shape: got \(20, 21\), allowed: what broadcasts to \(B, Hq, Nq, Nk\) = \(2, 4, 20, 20\)",
    ),
    "bias heads": (
        {"attn_bias": zeros(2, 2, 20, 20)},
        ValueError,
        r"attn_bias\.shape: got \(2, 2, 20, 20\), allowed: what broadcasts to",
    ),
    "bias rank 5": ({"attn_bias": zeros(1, 1, 1, 1, 1)}, ValueError, r"attn_bias\.shape: got \(1, 1, 1, 1, 1\)"),
    **{
        f"bias {t}": (
            {"attn_bias": zeros(20, 20, dtype=t)},
            ValueError,
            rf"attn_bias\.dtype: got {t}, allowed: torch\.bool, torch\.float32$",
        )
        for t in (torch.float64, torch.float16, torch.int32)
    },
    "bias device": (
        {"attn_bias": zeros(20, 20, device="meta")},
        ValueError,
        r"attn_bias\.device: got meta, allowed: q's",
    ),
    "bias sparse": (
        {"attn_bias": lambda device: torch.zeros(20, 20, device=device).to_sparse()},
        ValueError,
        r"attn_bias\.layout: got torch\.sparse_coo",
    ),
    "slopes shape": (
        {"alibi_slopes": zeros(3)},
        ValueError,
        r"alibi_slopes\.shape: got \(3,\), allowed: \(Hq\) = \(4,\) or \(B, Hq\) = \(2, 4\)",
    ),
    "slopes batch": ({"alibi_slopes": zeros(3, 4)}, ValueError, r"alibi_slopes\.shape: got \(3, 4\), allowed: \(Hq\)"),
    "slopes dtype": (
        {"alibi_slopes": zeros(4, dtype=torch.float16)},
        ValueError,
        r"alibi_slopes\.dtype: got torch\.float16, allowed: torch\.float32",
    ),
    "slopes a number": ({"alibi_slopes": 0.5}, TypeError, r"alibi_slopes: got float, allowed: torch\.Tensor"),
    "slopes device": ({"alibi_slopes": zeros(4, device="meta")}, ValueError, r"alibi_slopes\.device: got meta"),
    "softcap negative": (
        {"softcap": -30.0},
        ValueError,
        r"softcap: got -30\.0, allowed: 0 \(none\) or a positive float",
    ),
    "softcap NaN": (
        {"softcap": float("nan")},
        ValueError,
        r"softcap: got nan, allowed: 0 \(none\) or a positive float",
    ),
    "softcap infinite": ({"softcap": float("inf")}, ValueError, r"softcap: got inf, allowed: 0 \(none\) or a positive"),
    "softcap a word": ({"softcap": "a"}, TypeError, r"softcap: got 'a', allowed: 0 \(none\) or a positive float"),
    "head dim 0": (
        {x: zeros(2, 4, 20, 0) for x in "qkv"},
        ValueError,
        r"kernel 'auto' cannot run this: .*head dim: got 0",
    ),
    "head dim too large": (
        {x: zeros(1, 1, 20, 10000) for x in "qkv"},
        ValueError,
        r"kernel 'auto' cannot run this: .*head dim: got 10000, allowed: ",
    ),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_argument(wrong: str, device: str, request: pytest.FixtureRequest) -> None:
    if device == "cuda":
        request.getfixturevalue("cuda")
    changes, error, message = WRONG[wrong]
    call = good(device)
    call |= {x: value(device) if callable(value) else value for x, value in changes.items()}
    with pytest.raises(error, match=message) as caught:
        flash_wmma.forward(**call)
    assert "csrc" not in str(caught.value)
    call = good(device)  # and nothing is broken after it
    kernel = next(k for k in flash_wmma.kernels() if k.name == flash_wmma.explain(**call).kernel)
    check(*run(kernel, **call), reference(kernel, **call))


def test_named_kernel_refuses_head_dim(kernel: flash_wmma.Kernel) -> None:
    low, high = kernel.head_dims
    allowed = str(low) if low == high else f"{low} to {high}"
    for d in {high + 1, low - 1}:
        q = torch.zeros(1, 1, 8, d, dtype=kernel.dtypes[0], device=kernel.device)
        for of_k, of_v in ((d, d), (low, d)):  # of v alone too
            k, v = (q.new_zeros(1, 1, 8, n) for n in (of_k, of_v))
            with pytest.raises(
                ValueError, match=rf"kernel '{kernel.name}' cannot run this: head dim: got {d}, allowed: {allowed}"
            ):
                flash_wmma.forward(k, k, v, kernel=kernel.name)


def test_named_kernel_refuses_dtype(kernel: flash_wmma.Kernel) -> None:
    refused = {torch.float32, torch.float16, torch.bfloat16} - set(kernel.dtypes)
    for dtype in refused:
        q = torch.zeros(1, 1, 8, 64, dtype=dtype, device=kernel.device)
        with pytest.raises(
            ValueError, match=rf"kernel '{kernel.name}' cannot run this: dtype: got {name(dtype)}, allowed: "
        ):
            flash_wmma.forward(q, q, q, kernel=kernel.name)


def test_named_kernel_refuses_features(kernel: flash_wmma.Kernel) -> None:
    q = torch.zeros(1, 1, 8, 64, dtype=kernel.dtypes[0], device=kernel.device)
    options: dict[str, Call] = {
        "causal": {"causal": True},
        "window": {"window": (3, 3)},
        "attn_bias": {"attn_bias": torch.zeros(8, 8, device=kernel.device)},
        "alibi_slopes": {"alibi_slopes": torch.zeros(1, device=kernel.device)},
        "softcap": {"softcap": 3.0},
    }
    for feature, option in (*options.items(), ("window", {"window": (None, 3)}), ("window", {"window": (3, None)})):
        if feature not in kernel.features:
            with pytest.raises(
                ValueError, match=rf"kernel '{kernel.name}' cannot run this: does not support {feature}"
            ):
                flash_wmma.forward(q, q, q, kernel=kernel.name, **option)
    if "d_v != d" not in kernel.features:
        with pytest.raises(ValueError, match=rf"kernel '{kernel.name}' cannot run this: .*d"):
            flash_wmma.forward(q, q, q[..., :32], kernel=kernel.name)


@pytest.mark.gpu
def test_cpu_kernel_on_cuda_tensors(cuda: torch.device) -> None:
    q = torch.zeros(1, 1, 8, 64, device=cuda)
    with pytest.raises(
        ValueError, match="kernel 'cpu' cannot run this: runs on cpu tensors, these are on a cuda device"
    ):
        flash_wmma.forward(q, q, q, kernel="cpu")
    with pytest.raises(ValueError, match=r"k\.device: got cpu, allowed: q's, cuda:0"):
        flash_wmma.forward(q, q.cpu(), q)


def test_device_below_the_least_architecture() -> None:
    """Said by explain, since no such device may be here; forward asks the same function."""
    q = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device="meta")
    facts = flash_wmma.DeviceFacts(arch=70, sm_count=80, smem_optin=96 * 1024)
    answer = flash_wmma.explain(q, q, q, device_facts=facts)
    assert answer.kernel is None
    for kernel in flash_wmma.kernels():
        expected = f"needs sm_{kernel.min_arch} or later" if kernel.min_arch else "runs on cpu tensors"
        if kernel.max_arch is not None:
            expected = f"runs on sm_{kernel.max_arch} alone"
        assert answer.reasons[kernel.name].startswith(expected)


def test_no_grad_lets_inputs_that_require_it_through() -> None:
    call = good()
    call["q"].requires_grad_()
    with torch.no_grad():
        assert not flash_wmma.forward(**call).requires_grad
    with torch.inference_mode():
        flash_wmma.forward(**call)


def test_errors_under_autocast_name_what_is_wrong() -> None:
    """Several dtypes are right there."""
    call = good()
    call["k"] = call["k"].half()
    with torch.autocast("cpu", torch.bfloat16):
        flash_wmma.forward(**call)
        for argument, value in (("softcap", -1.0), ("kernel", "none"), ("window", (1,))):
            with pytest.raises(ValueError, match=rf"{argument}: got "):
                flash_wmma.forward(**call, **{argument: value})


SIZES = {
    "no batch": ((0, 4, 20, 64), (0, 4, 30, 64)),
    "no heads": ((2, 0, 20, 64), (2, 0, 30, 64)),
    "no query heads": ((2, 0, 20, 64), (2, 4, 30, 64)),
    "no queries": ((2, 4, 0, 64), (2, 4, 30, 64)),
    "no keys": ((2, 4, 20, 64), (2, 2, 0, 64)),
    "nothing": ((0, 0, 0, 64), (0, 0, 0, 64)),
}


@needs(lambda kernel, mask: not mask.causal or "causal" in kernel.features)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("mask", [Mask(), Mask("bottom_right")], ids=str)
def test_zero_sizes(target: tuple[flash_wmma.Kernel, torch.dtype], sizes: tuple[Any, Any], mask: Mask) -> None:
    """Out is 0 and lse -inf where there is anything."""
    kernel, dtype = target
    q, k = (torch.full(shape, torch.nan, dtype=dtype, device=kernel.device) for shape in sizes)
    out, lse = run(kernel, q, k, k, mask)
    assert out.shape == sizes[0]
    assert lse.shape == sizes[0][:3]
    assert not out.any()
    assert bool(lse.isneginf().all())


def test_errors_of_the_op_itself() -> None:
    """The last line of defence, in C++: nothing gets past it when Python's checks are gone around."""
    op = torch.ops.flash_wmma.forward
    for changes, _, _ in WRONG.values():
        if not changes.keys() <= set("qkv"):
            continue
        call = good() | {x: value("cpu") if callable(value) else value for x, value in changes.items()}
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
            op(**call)
    for argument, wrong in (
        ("attn_bias", torch.zeros(3)),
        ("attn_bias", torch.zeros(20, 20, dtype=torch.float64)),
        ("attn_bias", torch.zeros(20, device="meta")),
        ("alibi_slopes", torch.zeros(3)),
        ("alibi_slopes", torch.zeros(4, dtype=torch.float16)),
        ("sinks", torch.zeros(3)),
        ("sinks", torch.zeros(4, dtype=torch.float16)),
        ("softcap", -1.0),
        ("softcap", float("nan")),
    ):
        with pytest.raises((RuntimeError, ValueError), match=argument):
            op(**good(), **{argument: wrong})
    for options in (
        {"dropout_p": 1.0},
        {"dropout_p": -0.5},
        {"dropout_p": float("nan")},
        {"dropout_p": 0.5},
        {"rng_state": torch.zeros(2), "dropout_p": 0.5},
        {"rng_state": torch.zeros(3, dtype=torch.int64), "dropout_p": 0.5},
        {"num_splits": 2},
    ):
        with pytest.raises((RuntimeError, ValueError), match=next(iter(options))):
            op(**good(), **options)


def test_sequence_too_long() -> None:
    q = torch.zeros(1, 1, 1, 64).expand(1, 1, 2**30 + 1, 64)
    message = "k.shape: got (1, 1, 1073741825, 64), allowed: a length of at most 2**30"
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_wmma.forward(q[:, :, :1], q, q)


def test_not_a_positional_option() -> None:
    call = good()
    with pytest.raises(TypeError):
        flash_wmma.forward(call["q"], call["k"], call["v"], True)  # type: ignore[misc]


def test_flags_of_packed_sequences() -> None:
    q, cu = torch.zeros(20, 4, 64), torch.tensor([0, 20], dtype=torch.int32)
    for option in ("return_lse", "deterministic", "validate"):
        with pytest.raises(TypeError, match=rf"{option}: got 'yes', allowed: .*a bool"):
            flash_wmma.forward_varlen(q, q, q, cu, cu, 20, 20, **{option: "yes"})  # type: ignore[call-overload]


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scale_is_checked_everywhere(scale: float) -> None:
    for kernel in ("math", "cpu"):
        with pytest.raises(ValueError, match=f"scale: got {scale}"):
            flash_wmma.forward(**good(), scale=scale, kernel=kernel)
    with pytest.raises((RuntimeError, ValueError), match="scale"):
        torch.ops.flash_wmma.forward(**good(), scale=scale)


MODULE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "embed_dim a float": ({"embed_dim": 64.0}, TypeError, r"embed_dim: got 64\.0, allowed: an int"),
    "embed_dim 0": ({"embed_dim": 0}, ValueError, "embed_dim: got 0, allowed: 1 or more"),
    "num_heads a word": ({"num_heads": "4"}, TypeError, "num_heads: got '4', allowed: an int"),
    "num_heads a flag": ({"num_heads": True}, TypeError, "num_heads: got True, allowed: an int"),
    "num_heads negative": ({"num_heads": -4}, ValueError, "num_heads: got -4, allowed: 1 or more"),
    "num_heads no divisor": ({"num_heads": 5}, ValueError, "num_heads: got 5, allowed: a divisor of embed_dim, 64"),
    "num_kv_heads a float": ({"num_kv_heads": 2.0}, TypeError, r"num_kv_heads: got 2\.0, allowed: an int"),
    "num_kv_heads 0": ({"num_kv_heads": 0}, ValueError, "num_kv_heads: got 0, allowed: 1 or more"),
    "num_kv_heads no divisor": (
        {"num_kv_heads": 3},
        ValueError,
        "num_kv_heads: got 3, allowed: a divisor of num_heads",
    ),
    "causal a word": ({"causal": "bottomright"}, ValueError, "causal: got 'bottomright', allowed: .*'bottom_right'"),
    "causal None": ({"causal": None}, TypeError, "causal: got None, allowed: False, True"),
    "kernel unknown": ({"kernel": "x"}, ValueError, "kernel: got 'x', allowed: 'auto', .*'math'"),
    "kernel None": ({"kernel": None}, TypeError, "kernel: got None, allowed: 'auto' or a name"),
    "backward_kernel unknown": ({"backward_kernel": "cpu"}, ValueError, "backward_kernel: got 'cpu', allowed: 'auto'"),
    "deterministic a word": ({"deterministic": "yes"}, TypeError, "deterministic: got 'yes', allowed: None or a bool"),
    "bias a word": ({"bias": "yes"}, TypeError, "bias: got 'yes', allowed: a bool"),
    "dtype a word": ({"dtype": "half"}, TypeError, r"dtype: got 'half', allowed: torch\.float32, "),
    "dtype int": ({"dtype": torch.int32}, ValueError, r"dtype: got torch\.int32, allowed: torch\.float32, "),
}


@pytest.mark.parametrize("wrong", MODULE)
def test_wrong_argument_of_the_module(wrong: str) -> None:
    """Refused when it is made, not when it is called."""
    changes, error, message = MODULE[wrong]
    with pytest.raises(error, match=message):
        flash_wmma.MultiheadAttention(**{"embed_dim": 64, "num_heads": 4} | changes)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1.0], TypeError, r"x: got list, allowed: torch\.Tensor"),
        (torch.zeros(8, 64), ValueError, r"x\.shape: got \(8, 64\), allowed: \(B, N, embed_dim\) with embed_dim = 64"),
        (torch.zeros(2, 4, 8, 64), ValueError, r"x\.shape: got \(2, 4, 8, 64\), allowed: \(B, N, embed_dim\)"),
        (torch.zeros(2, 8, 32), ValueError, r"x\.shape: got \(2, 8, 32\), allowed: \(B, N, embed_dim\)"),
        (
            torch.zeros(2, 8, 64).half(),
            ValueError,
            r"x\.dtype: got torch\.float16, allowed: the parameters', torch\.float32",
        ),
        (torch.zeros(2, 8, 64, device="meta"), ValueError, r"x\.device: got meta, allowed: the parameters', cpu"),
        (torch.zeros(2, 8, 64).to_sparse(), ValueError, r"x\.layout: got torch\.sparse_coo"),
    ],
    ids=["list", "rank 2", "rank 4", "width", "dtype", "device", "sparse"],
)
def test_wrong_input_of_the_module(x: Any, error: type[Exception], message: str) -> None:
    module = flash_wmma.MultiheadAttention(64, 4)
    with pytest.raises(error, match=message):
        module(x)
    with torch.autocast("cpu", torch.bfloat16):  # which casts x
        assert module(torch.zeros(2, 8, 64).half()).dtype == torch.bfloat16


def test_module_of_float64() -> None:
    module = flash_wmma.MultiheadAttention(16, 2, kernel="math", dtype=torch.float64)
    assert module(torch.zeros(1, 3, 16, dtype=torch.float64)).dtype == torch.float64
