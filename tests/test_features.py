"""Every feature that a kernel lists, with every other, against float64: masks, bias, ALiBi, softcap, groups, sizes."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import marks, name, obstacle, parametrize, targets
from needs import needs
from pairwise import every, pairwise
from reference import (
    DENSE,
    LAYOUTS,
    PLAIN,
    RANGES,
    Mask,
    Modification,
    as_multiplied,
    attention,
    check,
    early_rung,
    head_error,
    libc,
    normal,
    operand_dtype,
    ranges_of,
    reference,
    run,
)
from torch import Tensor

import flash_wmma

Target = tuple[flash_wmma.Kernel, torch.dtype]

# Small sizes where a CUDA kernel's source is run without a GPU, full ones on the GPU.
SMALL = ((1, 1), (1, 40), (17, 16), (33, 47), (47, 33))
MEDIUM = (*SMALL, (1, 700), (97, 97), (113, 203), (108, 256), (203, 113))
FULL = (*MEDIUM, (1023, 1024), (1024, 1023), (2048, 1500), (2047, 2048))
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256, 320)
HEADS = ((4, 4), (4, 1), (6, 2))  # MHA, MQA, GQA
CAUSAL = (False, "top_left", "bottom_right")
WINDOWS = (None, (20, 5), (64, 0), (0, None), (3, 100))
BIASES = (
    None,
    "full",
    "head",
    "query",
    "key",
    "scalar",
    "transposed",
    "odd",
    "bool",
    "bool key",
    "some -inf",
    "rows -inf",
)
SLOPES = (None, "head", "batch")
SOFTCAPS = (0.0, 2.0, 30.0)
SINKS = (None, "near", "far")


def lengths(kernel: flash_wmma.Kernel) -> tuple[tuple[int, int], ...]:
    if kernel.device == "cpu":
        return MEDIUM
    return FULL if torch.cuda.is_available() else SMALL


def bias_of(kind: str | None, b: int, h: int, nq: int, nk: int, dtype: torch.dtype, device: str) -> Tensor | None:
    """A bias of that kind, everything around it in its storage NaN (or the other truth value)."""
    if kind is None:
        return None
    generator = torch.Generator().manual_seed(11)

    def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    if kind == "full":
        return values(b, h, nq, nk)
    if kind == "head":
        return values(h, nq, nk, dtype=dtype)
    if kind == "query":
        return values(1, h, nq, 1)
    if kind == "key":
        return values(b, 1, 1, nk, dtype=dtype)
    if kind == "scalar":
        return values(1)
    if kind == "transposed":
        return values(b, h, nk, nq, dtype=dtype).transpose(2, 3)
    if kind == "odd":
        storage = torch.full((b, nq + 2, nk + 3), math.nan, dtype=dtype, device=device)
        storage[:, 1:-1, 1:-2] = values(b, nq, nk, dtype=dtype)
        return storage[:, None, 1:-1, 1:-2]
    seen = torch.rand((1, h, nq, nk), generator=generator) > 0.4
    if kind == "bool":
        return seen.to(device)
    if kind == "bool key":
        return (torch.rand((b, 1, 1, nk), generator=generator) > 0.4).to(device)
    if kind == "some -inf":
        return values(1, h, nq, nk, dtype=dtype).masked_fill(~seen.to(device), -math.inf)
    assert kind == "rows -inf"
    return values(b, 1, nq, nk).masked_fill((torch.arange(nq, device=device) % 3 == 0)[:, None], -math.inf)


def slopes_of(kind: str | None, b: int, h: int, device: str) -> Tensor | None:
    """ALiBi's geometric slopes, between others in memory."""
    if kind is None:
        return None
    slopes = 2.0 ** -torch.arange(1, h + 1, device=device)
    if kind == "batch":
        slopes = slopes * torch.arange(1, b + 1, device=device)[:, None]
    return torch.stack((slopes, torch.full_like(slopes, math.nan)), dim=-1)[..., 0]


def sinks_of(kind: str | None, h: int, device: str) -> Tensor | None:
    """A logit for each head, between others in memory: among the scores, or far above and below them, or -inf."""
    if kind is None:
        return None
    logits = [0.5, -1.0, 2.0] if kind == "near" else [30.0, -60.0, -math.inf, 150.0]
    sinks = torch.tensor([logits[i % len(logits)] for i in range(h)], device=device)
    return torch.stack((sinks, torch.full_like(sinks, math.nan)), dim=-1)[..., 0]


def parameters(kernel: flash_wmma.Kernel) -> dict[str, tuple[Any, ...]]:
    """What the kernel says it can do."""
    low, high = kernel.head_dims
    has = kernel.features
    head_dims = tuple(d for d in HEAD_DIMS if low <= d <= high)
    return {
        "lengths": lengths(kernel),
        "d": head_dims,
        "dv": (None, *head_dims[::4]) if "d_v != d" in has else (None,),
        "heads": HEADS,
        "batch": (1, 2),
        "causal": CAUSAL if "causal" in has else (False,),
        "window": WINDOWS if "window" in has else (None,),
        "bias": BIASES if "attn_bias" in has else (None,),
        "slopes": SLOPES if "alibi_slopes" in has else (None,),
        "ranges": RANGES if "key_ranges" in has else (None,),
        "softcap": SOFTCAPS if "softcap" in has else (0.0,),
        "sinks": SINKS if "sinks" in has else (None,),
        "scale": (None, 0.3, -0.2),
        "layout": LAYOUTS[:5],
    }


def identifier(case: dict[str, Any]) -> str:
    return "-".join(f"{key}_{value}".replace(" ", "") for key, value in case.items() if value not in (None, False, 0.0))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case`: every pair of parameters (--every-combination: all), for each kernel and dtype."""
    if "case" not in metafunc.fixturenames:
        return
    rows = []
    for kernel, dtype in targets(metafunc.config):
        seed = zlib.crc32(f"features {kernel.name} {dtype}".encode())
        space = parameters(kernel)
        cases = every(space) if metafunc.config.getoption("--every-combination") else pairwise(space, seed)
        if obstacle(kernel, dtype):
            cases = cases[:1]  # one visible skip says it
        rows += [
            pytest.param(
                (kernel, dtype, case),
                id=f"{kernel.name}-{name(dtype)}-{identifier(case)}",
                marks=marks(kernel, dtype),
            )
            for case in cases
        ]
    parametrize(metafunc, "case", rows)


def test_features(case: tuple[flash_wmma.Kernel, torch.dtype, dict[str, Any]]) -> None:
    kernel, dtype, c = case
    (nq, nk), (hq, hk), b = c["lengths"], c["heads"], c["batch"]
    where = {"dtype": dtype, "device": kernel.device}
    q = normal((b, hq, nq, c["d"]), c["layout"], seed=1, **where)
    k = normal((b, hk, nk, c["d"]), c["layout"], seed=2, **where)
    v = normal((b, hk, nk, c["dv"] or c["d"]), c["layout"], seed=3, **where)
    mask = Mask(c["causal"], c["window"])
    modification = Modification(
        bias_of(c["bias"], b, hq, nq, nk, dtype, kernel.device),
        slopes_of(c["slopes"], b, hq, kernel.device),
        ranges_of(c["ranges"], b, hq, nq, nk, kernel.device),
        c["softcap"],
        sinks_of(c["sinks"], hq, kernel.device),
    )
    expected = reference(kernel, q, k, v, mask, c["scale"], modification)
    check(*run(kernel, q, k, v, mask, c["scale"], modification), expected)


def test_features_at_length(target: Target) -> None:
    """One long case a kernel, all that it has at once."""
    kernel, dtype = target
    nq, nk = lengths(kernel)[-1] if kernel.device == "cuda" else (203, 256) if early_rung(kernel.name) else (1023, 1024)
    where = {"dtype": dtype, "device": kernel.device}
    q, k, v = (normal((1, h, n, 64), seed=s, **where) for h, n, s in ((4, nq, 1), (2, nk, 2), (2, nk, 3)))
    has = kernel.features
    modification = Modification(
        bias_of("odd", 1, 4, nq, nk, dtype, kernel.device) if "attn_bias" in has else None,
        slopes_of("head", 1, 4, kernel.device) if "alibi_slopes" in has else None,
        ranges_of("documents", 1, 4, nq, nk, kernel.device) if "key_ranges" in has else None,
        5.0 if "softcap" in has else 0.0,
        sinks_of("near", 4, kernel.device) if "sinks" in has else None,
    )
    mask = Mask("bottom_right", (300, None) if "window" in has else None) if "causal" in has else DENSE
    check(*run(kernel, q, k, v, mask, None, modification), reference(kernel, q, k, v, mask, None, modification))


def inputs(target: Target, nq: int = 37, nk: int = 70, hk: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    kernel, dtype = target
    where = {"dtype": dtype, "device": kernel.device}
    return (
        normal((2, 4, nq, 64), seed=1, **where),
        normal((2, hk, nk, 64), seed=2, **where),
        normal((2, hk, nk, 64), seed=3, **where),
    )


@needs("attn_bias", lambda dtype, bias_dtype: bias_dtype in (dtype, torch.float32))
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_least_finite_bias_hides_nothing(target: Target, bias_dtype: torch.dtype) -> None:
    """A row whose keys all carry it is the mean of v, as softmax has it; beside others they weigh nothing."""
    kernel, _ = target
    q, k, v = inputs(target, 20, 150)
    bias = torch.zeros(20, 150, dtype=bias_dtype, device=kernel.device)
    bias[3] = bias[:, 70:] = torch.finfo(bias_dtype).min
    out, lse = run(kernel, q, k, v, modification=Modification(bias))
    check_out = reference(kernel, q, k, v, modification=Modification(bias))
    assert head_error(out, check_out.out) <= 2 * check_out.plain_error + 1e-5
    assert bool(lse.isfinite().all())


@needs("attn_bias")
@pytest.mark.parametrize("nq, nk", [(1, 1), (1, 65), (3, 700), (49, 1), (64, 64)])
@pytest.mark.parametrize("kind", ["all false", "all -inf", "first key", "last key"])
def test_bias_that_hides(target: Target, kind: str, nq: int, nk: int) -> None:
    """Rows that see nothing give 0 and -inf; rows that see one key give its value, to the bit (where the inputs are
    converted, a weight may be a last bit off)."""
    kernel, dtype = target
    q, k, v = inputs(target, nq, nk)
    bias = torch.zeros(nq, nk, dtype=torch.bool, device=kernel.device)
    if kind == "all -inf":
        bias = torch.full((nq, nk), -math.inf, dtype=dtype, device=kernel.device)
    elif kind != "all false":
        bias[:, 0 if kind == "first key" else -1] = True
    out, lse = run(kernel, q, k, v, modification=Modification(bias))
    if kind in ("first key", "last key"):
        operands = operand_dtype(kernel, dtype)
        value = as_multiplied(v, operands).to(dtype)
        value = value[:, :, 0 if kind == "first key" else -1].repeat_interleave(2, dim=1)
        exact = 0.0 if operands == dtype else 4 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(out, value[:, :, None].expand_as(out), rtol=exact, atol=0.0)
        assert bool(lse.isfinite().all())
    else:
        assert not out.any()
        assert bool(lse.isneginf().all())


@needs("attn_bias", lambda kernel: kernel.min_arch == 0)
@pytest.mark.parametrize("nq", [1, 37])
def test_hidden_keys_may_hold_anything(target: Target, nq: int) -> None:
    """What the bias hides does not reach a row, be it NaN or infinite."""
    kernel, _ = target
    q, k, v = inputs(target, nq)
    seen = torch.rand(k.shape[2], generator=torch.Generator().manual_seed(5)) > 0.3
    expected = run(kernel, q, k[:, :, seen], v[:, :, seen])
    for poison in (math.nan, math.inf):
        k[:, :, ~seen] = poison
        v[:, :, ~seen] = poison
        for bias in (seen, torch.zeros(k.shape[2]).masked_fill(~seen, -math.inf)):
            out, lse = run(kernel, q, k, v, modification=Modification(bias))
            torch.testing.assert_close(out, expected[0], atol=4e-3 if q.dtype != torch.float32 else 1e-5, rtol=0)
            torch.testing.assert_close(lse, expected[1], atol=1e-5, rtol=1e-5)


@needs("attn_bias")
def test_bias_one_column_beyond_reach(target: Target) -> None:
    """A bias that lies at the end of its memory: nothing past it is read into a result."""
    kernel, _ = target
    for nq, nk in ((1, 63), (50, 65), (64, 129)):
        q, k, v = inputs(target, nq, nk)
        wide = torch.full((nq, nk + 1), math.nan, device=kernel.device)
        wide[:, :nk] = torch.randn(nq, nk, generator=torch.Generator().manual_seed(1))
        modification = Modification(wide[:, :nk])
        check(*run(kernel, q, k, v, DENSE, None, modification), reference(kernel, q, k, v, DENSE, None, modification))


@needs("attn_bias")
def test_bool_is_as_minus_infinity(target: Target) -> None:
    kernel, dtype = target
    q, k, v = inputs(target)
    seen = torch.rand(37, 70, generator=torch.Generator().manual_seed(3)).to(kernel.device) > 0.5
    additive = torch.zeros(37, 70, dtype=dtype, device=kernel.device).masked_fill(~seen, -math.inf)
    for a, b in zip(
        run(kernel, q, k, v, modification=Modification(seen)),
        run(kernel, q, k, v, modification=Modification(additive)),
        strict=True,
    ):
        if kernel.name == "wgmma_sm90" and dtype == torch.float32:  # rounds a score before it adds an fp32 bias
            torch.testing.assert_close(a, b, atol=torch.finfo(torch.float16).eps, rtol=1e-6)
        else:
            assert torch.equal(a, b)


@needs("alibi_slopes")
def test_alibi_as_bias(target: Target) -> None:
    """ALiBi is the bias that it says it is. Where its scores rise, wgmma_sm90 takes the exact maximum, and rounds the
    weights to it."""
    kernel, dtype = target
    rounds = 1e-5
    if kernel.name == "wgmma_sm90":  # whose weights are rounded to fp16 where the inputs are fp32
        rounds = torch.finfo(torch.float16 if dtype == torch.float32 else dtype).eps
    q, k, v = inputs(target)
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.125], device=kernel.device)
    distance = (torch.arange(37)[:, None] + 70 - 37 - torch.arange(70)).abs().to(kernel.device)
    for mask in (DENSE, Mask("bottom_right"), Mask("top_left")):
        a = run(kernel, q, k, v, mask, None, Modification(None, slopes))
        b = run(kernel, q, k, v, mask, None, Modification(-slopes[:, None, None] * distance))
        for x, y, atol in zip(a, b, (rounds, 1e-5), strict=True):
            torch.testing.assert_close(x, y, atol=atol, rtol=2 * torch.finfo(x.dtype).eps)


@needs("softcap")
def test_softcap_bounds_the_scores(target: Target) -> None:
    """Large scores, capped: the weights are those of scores of +-softcap."""
    kernel, _ = target
    q, k, v = inputs(target)
    modification = Modification(softcap=1.0)
    out, lse = run(kernel, 100 * q, k, v, DENSE, None, modification)
    check(out, lse, reference(kernel, 100 * q, k, v, DENSE, None, modification))
    assert float(lse.max()) <= 1 + math.log(70) + 1e-3


@needs("softcap")
@pytest.mark.parametrize("cap", [1e-3, 1.0, 50.0, 1e4])
def test_softcap_of_small_and_large_scores(target: Target, cap: float) -> None:
    kernel, _ = target
    q, k, v = inputs(target)
    for factor in (1e-3, 1.0, 30.0):
        modification = Modification(softcap=cap)
        expected = reference(kernel, factor * q, k, v, DENSE, None, modification)
        check(*run(kernel, factor * q, k, v, DENSE, None, modification), expected)


@needs("attn_bias")
def test_empty_inputs_with_everything(target: Target) -> None:
    kernel, dtype = target
    for b, hq, hk, nq, nk in ((0, 4, 2, 5, 6), (2, 0, 0, 5, 6), (2, 4, 2, 0, 6), (2, 4, 2, 5, 0)):
        q, k = (torch.zeros(b, h, n, 64, dtype=dtype, device=kernel.device) for h, n in ((hq, nq), (hk, nk)))
        bias = torch.zeros(b, hq, nq, nk, device=kernel.device)
        slopes = torch.ones(hq, device=kernel.device) if "alibi_slopes" in kernel.features else None
        out, lse = run(kernel, q, k, k, modification=Modification(bias, slopes))
        assert not out.any()
        assert bool(lse.isneginf().all())


def test_results_are_rounded_to_nearest(target: Target) -> None:
    """Means of two whole numbers, of which every second one lies between two of the type: to even."""
    kernel, dtype = target
    numbers = {torch.bfloat16: 256, torch.float16: 2048}.get(dtype, 2048)
    v = torch.randint(-numbers, numbers, (1, 1, 2, 64), generator=torch.Generator().manual_seed(1))
    q, k = (torch.zeros(1, 1, n, 64, dtype=dtype, device=kernel.device) for n in (20, 2))
    out, _ = run(kernel, q, k, v.to(kernel.device, dtype))
    assert torch.equal(out, v.float().mean(dim=2, keepdim=True).to(kernel.device, dtype).expand_as(out))


@needs("causal")
def test_run_to_run(target: Target) -> None:
    """Bitwise the same again, with every feature the kernel has; and a batch entry by itself, if it is asked for."""
    kernel, _ = target
    nq, nk = (37, 70) if early_rung(kernel.name) else (150, 200)
    q, k, v = inputs(target, nq, nk)
    has = kernel.features
    bias = bias_of("full", 2, 4, nq, nk, q.dtype, kernel.device) if "attn_bias" in has else None
    slopes = slopes_of("head", 2, 4, kernel.device) if "alibi_slopes" in has else None
    modification = Modification(bias, slopes, softcap=5.0) if "softcap" in has else PLAIN
    first = run(kernel, q, k, v, Mask("bottom_right"), None, modification)
    for _ in range(3):
        for a, b in zip(run(kernel, q, k, v, Mask("bottom_right"), None, modification), first, strict=True):
            assert torch.equal(a, b)
    both = flash_wmma.forward(q, k, v, kernel=kernel.name, batch_invariant=True, **modification._asdict())
    for b in range(2):
        entry = modification.entry(b)._asdict()
        one = flash_wmma.forward(
            q[b : b + 1], k[b : b + 1], v[b : b + 1], kernel=kernel.name, batch_invariant=True, **entry
        )
        assert torch.equal(one[0], both[b])


INSTRUCTION_SETS = """
import sys, torch, flash_wmma
case, results = torch.load(sys.argv[1]), []
for q, k, v, options in case:
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = flash_wmma.forward(*leaves, return_lse=True, **options)
    gradients = torch.autograd.grad(out.sum() + (out * out).sum(), leaves)
    results.append([t.detach() for t in (out, lse, *gradients)])
torch.save(results, sys.argv[2])
"""


def run_instruction_set(isa: str, case: Path, results: Path) -> Any:
    """The results of a case, if the processor has the instructions."""
    done = subprocess.run(
        [sys.executable, "-c", INSTRUCTION_SETS, case, results],
        env={**os.environ, "FLASH_WMMA_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    if "FLASH_WMMA_CPU_ISA" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return torch.load(results)


@pytest.mark.parametrize("isa", ["avx2", "avx512", "avx512_bf16", "amx"])
def test_other_instruction_sets(isa: str, tmp_path: Path) -> None:
    """Each against the baseline, with everything at once, for tiles and for few rows."""
    case = []
    for nq, nk, d in ((37, 70, 64), (3, 700, 40), (1, 65, 128), (100, 100, 59), (130, 259, 72)):
        q, k, v = (normal((2, h, n, d), seed=h + n) for h, n in ((4, nq), (2, nk), (2, nk)))
        options: dict[str, Any] = {"attn_bias": bias_of("odd", 2, 4, nq, nk, torch.float32, "cpu"), "softcap": 5.0}
        options |= {"alibi_slopes": slopes_of("batch", 2, 4, "cpu"), "causal": "bottom_right"}
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            case += [(q.to(dtype), k.to(dtype), v.to(dtype), options), (q.to(dtype), k.to(dtype), v.to(dtype), {})]
    torch.save(case, tmp_path / "case")
    got = run_instruction_set(isa, tmp_path / "case", tmp_path / "results")
    every = run_instruction_set("baseline", tmp_path / "case", tmp_path / "expected")
    for (q, _, _, _), results, expected in zip(case, got, every, strict=True):
        # A result that is rounded to the inputs' type may be the neighbouring number
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[q.dtype]
        for which, x, y in zip(("out", "lse", "dq", "dk", "dv"), results, expected, strict=True):
            allowed = 1e-5 if which == "lse" else tolerance
            torch.testing.assert_close(x, y, atol=allowed * float(y.abs().max()), rtol=allowed)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_tile_products(tmp_path: Path) -> None:
    """AMX's products with tile registers in memory, for processors without it."""
    tests = Path(__file__).parent
    source, csrc = tests / "tile_products.cpp", tests.parent / "csrc"
    sets = csrc / "cpu" / "attention_avx512.cpp"
    (line,) = (line for line in sets.read_text().splitlines() if line.startswith("// x86-64: "))
    instructions = line.removeprefix("// x86-64: ").split()
    if not set(instructions) <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip(f"the processor lacks one of {line}")
    flags = ["-std=c++20", "-O1", f"-I{csrc}", *(f"-m{name}" for name in instructions)]
    subprocess.run(["g++", *flags, source, "-o", tmp_path / "products"], check=True)
    done = subprocess.run([tmp_path / "products"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("d", [24, 64])
def test_bf16_on_the_cpu_is_multiplied_as_fp32(d: int) -> None:
    """Terms that cancel: weights of half precision, or their gradients, would be off by more than rounding."""
    q, k, v, dout = (normal((1, 2, 200, d), seed=seed).bfloat16() for seed in range(4))
    leaves = [t.requires_grad_() for t in (q * 0.1, k * 0.1, v.sign() + 0.1 * v)]
    out = flash_wmma.forward(*leaves)
    exact_q, exact_k, exact_v, exact_dout = (t.detach().double() for t in (*leaves, dout))
    weights = (exact_q @ exact_k.mT / d**0.5).softmax(-1)
    delta = (out.detach().double() * exact_dout).sum(-1, keepdim=True)  # of what was rounded
    scores = weights * (exact_dout @ exact_v.mT - delta) / d**0.5
    expected = weights @ exact_v, scores @ exact_k, scores.mT @ exact_q, weights.mT @ exact_dout
    results = out.detach(), *torch.autograd.grad(out, leaves, dout)
    for got, true in zip(results, expected, strict=True):
        error = (got.double() - true).abs()
        assert bool((error <= 2**-8 * true.abs() + 3e-5 * true.abs().max()).all()), float(error.max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [50, 100])
def test_a_hidden_nan_on_the_cpu(hidden: int, dtype: torch.dtype) -> None:
    """Rows that do not see it have the same bits, whatever the number of threads and whatever stands there."""
    q, k, v = (normal((1, 2, 192, 64), seed=seed).to(dtype) for seed in range(3))
    plain = flash_wmma.forward(q, k, v, causal=True)
    v[:, :, hidden] = math.nan
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 16):
            torch.set_num_threads(count)
            out = flash_wmma.forward(q, k, v, causal=True)
            assert torch.equal(out[:, :, :hidden], plain[:, :, :hidden])
            assert out[:, :, hidden:].isnan().all()
            window = flash_wmma.forward(q, k, v, window=(20, 0))
            assert window.isnan().all(-1).sum() == 2 * 21 and window.isnan().any(-1).sum() == 2 * 21
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_beside_a_nan_that_no_query_sees(dtype: torch.dtype) -> None:
    """Queries up to no multiple of a tile, and a NaN of V behind the last key that they see, in that key's tile."""
    leaves = [normal((1, 2, n, 64), seed=n).to(dtype).requires_grad_() for n in (100, 192, 192)]

    def gradients() -> tuple[torch.Tensor, ...]:
        out = flash_wmma.forward(*leaves, causal=True)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    expected = gradients()
    with torch.no_grad():
        leaves[2][:, :, 110] = math.nan
    for got, same in zip(gradients(), expected, strict=True):
        assert torch.equal(got, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_infinite_gradient_of_a_score_is_no_nan(dtype: torch.dtype) -> None:
    """dP overflows where a weight of 1e-20 meets a large value; what it is added to is finite."""
    n, d = 70, 32
    q, k, v = (torch.ones(1, 1, rows, d, dtype=dtype) for rows in (3, n, n))
    k[0, 0, 0], v[0, 0, 0] = 1 - 46 / d**0.5, 1e10
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = flash_wmma.forward(*leaves)
    dq, dk, _ = torch.autograd.grad(out, leaves, torch.full_like(out, 1e30))
    assert dq.isposinf().all() or dq.isneginf().all(), dq
    assert dk[0, 0, 0].isposinf().all()
    assert dk[0, 0, 1:].isfinite().all()


def at_page_end(t: Tensor) -> Tensor:
    """A contiguous copy that ends where memory ends: one byte further, and the process dies."""
    size = t.numel() * t.element_size()
    pages = -(-size // mmap.PAGESIZE) or 1
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    assert libc.mprotect(ctypes.c_void_p(view.data_ptr() + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    end = pages * mmap.PAGESIZE
    return view[end - size : end].view(t.dtype).view(t.shape).copy_(t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nothing_is_read_past_the_end(dtype: torch.dtype) -> None:
    """The CPU kernel, with every tensor at the end of its memory."""
    for nq, nk, d in ((1, 1, 8), (1, 65, 8), (3, 63, 40), (37, 71, 64), (50, 129, 24), (128, 128, 64)):
        q, k, v = (at_page_end(normal((2, h, n, d), seed=h + n).to(dtype)) for h, n in ((4, nq), (2, nk), (2, nk)))
        slopes = at_page_end(torch.rand(2, 4))
        for kind in ("full", "head", "key", "query", "bool", "bool key", "some -inf"):
            bias = bias_of(kind, 2, 4, nq, nk, dtype, "cpu")
            assert bias is not None
            modification = Modification(at_page_end(bias), slopes)
            expected = attention(q.double(), k.double(), v.double(), DENSE, None, modification)
            out, lse = flash_wmma.forward(q, k, v, return_lse=True, kernel="cpu", **modification._asdict())
            torch.testing.assert_close(lse.double(), expected[1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(out.double(), expected[0], atol=3e-2, rtol=3e-2)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        windows = flash_wmma.forward(*leaves, window=(37, 5), kernel="cpu")
        exact = [t.detach().float().requires_grad_() for t in leaves]
        of_exact = flash_wmma.forward(*exact, window=(37, 5), kernel="cpu")
        torch.testing.assert_close(windows.float(), of_exact, atol=3e-2, rtol=3e-2)
        dout = at_page_end(torch.ones_like(windows))
        gradients = torch.autograd.grad(windows, leaves, dout), torch.autograd.grad(of_exact, exact, dout.float())
        for got, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(got.float(), expected, atol=3e-2 * float(expected.abs().max() + 1), rtol=3e-2)
        packed = [at_page_end(t.detach()[0].transpose(0, 1)) for t in (q, k, v)]
        cu_q, cu_k = (at_page_end(torch.tensor([0, n // 2, n], dtype=torch.int32)) for n in (nq, nk))
        assert flash_wmma.forward_varlen(*packed, cu_q, cu_k, nq, nk).isfinite().all()
