"""Every kernel and dtype against float64, over lengths, head dims, masks, groups of heads, strides and offsets."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import label, marks, name, obstacle, parametrize, targets
from far_apart import far_apart
from needs import needs
from pairwise import every, pairwise
from reference import LAYOUTS, Mask, check, emulated, few, normal, on_a_cpu, reference, run

import flash_wmma
from flash_wmma.emulator import settings

EMULATED_LENGTHS = (1, 15, 16, 17, 33, 64, 65, 100, 160)
LENGTHS = (1, 15, 16, 17, 31, 33, 63, 64, 65, 100, 255, 1000, 2048)
HEAD_DIMS = (1, 7, 8, 16, 31, 33, 40, 64, 72, 80, 96, 100, 128, 160, 192, 256, 512)
HEADS = ((1, 1), (4, 4), (4, 2), (6, 2), (5, 1))
EMULATED_HEADS = ((1, 1), (2, 2), (4, 2), (3, 1))
EMULATED_WINDOWS = (None, (0, 0), (3, None), (16, 7), (40, -1))
WINDOWS = (None, (0, 0), (3, None), (None, 5), (16, 7), (40, -1), (100, 100))
# Every tile table, an SM count that gives blocks several tiles, and orders in which warps run.
EMULATED_DEVICES = tuple(
    {"arch": arch, "seed": seed, "sm_count": sm_count}
    for arch, seed, sm_count in ((75, 0, 2), (75, 1, 1), (80, 2, 1), (86, 3, 4), (90, 4, 2), (90, 5, 100))
)


def parameters(kernel: flash_wmma.Kernel) -> dict[str, tuple[Any, ...]]:
    """What the kernel says it can do."""
    low, high = kernel.head_dims
    head_dims = tuple(sorted({d for d in HEAD_DIMS if low <= d <= high} | {low, high}))
    small = emulated(kernel)
    lengths = LENGTHS if kernel.device == "cuda" else tuple(n for n in LENGTHS if n <= 255)
    masks = tuple(
        Mask(causal, window)
        for causal in (False, "top_left", "bottom_right")
        for window in (EMULATED_WINDOWS if small else WINDOWS)
        if (not causal or "causal" in kernel.features) and (window is None or "window" in kernel.features)
    )
    return {
        "nq": EMULATED_LENGTHS if small else lengths,
        "nk": EMULATED_LENGTHS if small else lengths,
        "d": head_dims,
        "dv": (None, *head_dims[:: max(1, len(head_dims) // 3)]) if "d_v != d" in kernel.features else (None,),
        "mask": masks,
        "heads": EMULATED_HEADS if small else HEADS,
        "batch": (1, 2) if small else (1, 2, 3),
        "layout_q": LAYOUTS,
        "layout_k": LAYOUTS,
        "layout_v": LAYOUTS,
        "scale": (None, 0.25),
        **({"device": EMULATED_DEVICES} if small else {}),
    }


def identifier(case: dict[str, Any]) -> str:
    mask: Mask = case["mask"]
    parts = [f"{case['nq']}x{case['nk']}", f"d{case['d']}"]
    parts += [f"dv{case['dv']}"] if case["dv"] else []
    parts += [str(mask.causal)] if mask.causal else []
    parts += [f"window{mask.window[0]},{mask.window[1]}"] if mask.window else []
    parts += ["b{}h{}/{}".format(case["batch"], *case["heads"])]
    parts += [case["layout_q"], case["layout_k"], case["layout_v"]]
    parts += [f"scale{case['scale']}"] if case["scale"] else []
    parts += ["sm{arch}-seed{seed}".format(**case["device"])] if "device" in case else []
    return "-".join(parts)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case`: every pair of parameters (--every-combination: all), for each kernel and dtype."""
    if "case" not in metafunc.fixturenames:
        return
    rows = []
    for kernel, dtype in targets(metafunc.config):
        space = parameters(kernel)
        seed = zlib.crc32(f"{kernel.name} {dtype}".encode())
        cases = every(space) if metafunc.config.getoption("--every-combination") else pairwise(space, seed)
        if obstacle(kernel, dtype):
            cases = cases[:1]  # one visible skip says it
        rows += [
            pytest.param(
                (kernel, dtype, case),
                id=f"{label(kernel)}-{name(dtype)}-{identifier(case)}",
                marks=marks(kernel, dtype),
            )
            for case in cases
        ]
    parametrize(metafunc, "case", rows)


def test_against_float64(case: tuple[flash_wmma.Kernel, torch.dtype, dict[str, Any]], modes: tuple[str, ...]) -> None:
    kernel, dtype, c = case
    hq, hk = c["heads"]
    shape = {"dtype": dtype, "device": kernel.device}
    q = normal((c["batch"], hq, c["nq"], c["d"]), c["layout_q"], seed=1, **shape)
    k = normal((c["batch"], hk, c["nk"], c["d"]), c["layout_k"], seed=2, **shape)
    v = normal((c["batch"], hk, c["nk"], c["dv"] or c["d"]), c["layout_v"], seed=3, **shape)
    expected = reference(kernel, q, k, v, c["mask"], c["scale"])
    if not emulated(kernel):
        check(*run(kernel, q, k, v, c["mask"], c["scale"]), expected)
        return
    least = kernel.bf16_min_arch if dtype == torch.bfloat16 else kernel.min_arch
    device = c["device"] | {"arch": max(c["device"]["arch"], least)}
    for mode in modes:
        with settings(mode=mode, **device):
            check(*run(kernel, q, k, v, c["mask"], c["scale"]), expected)


MASKS = (
    Mask(),
    Mask("top_left"),
    Mask("bottom_right"),
    Mask(False, (5, 3)),
    Mask("top_left", (20, None)),
    Mask("bottom_right", (70, None)),
    Mask(False, (0, 130)),
)


def supported(kernel: flash_wmma.Kernel, mask: Mask) -> bool:
    needed = {"window"} if mask.window else {"causal"} if mask.causal else set()
    return needed <= kernel.features


@needs(supported)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("nq, nk", [(65, 65), (33, 100), (130, 47), (16, 1), (200, 200)])
def test_one_hot_values(target: tuple[flash_wmma.Kernel, torch.dtype], nq: int, nk: int, mask: Mask) -> None:
    """With one-hot values the output is the weights themselves: a hidden key's is 0, to the bit."""
    kernel, dtype = target
    d = 64
    heads = few(kernel, 2)
    q = normal((1, heads, nq, d), dtype=dtype, device=kernel.device, seed=4)
    k = normal((1, heads, nk, d), dtype=dtype, device=kernel.device, seed=5)
    visible = mask.visible(nq, nk, kernel.device)
    for first in sorted({0, max(0, nk - d), max(0, nk // 2 - d // 2)}):
        count = min(d, nk - first)
        v = torch.zeros(1, heads, nk, d, dtype=dtype, device=kernel.device)
        v[:, :, first : first + count, :count] = torch.eye(count, dtype=dtype, device=kernel.device)
        out, lse = run(kernel, q, k, v, mask)
        check(out, lse, reference(kernel, q, k, v, mask))
        weights = out[..., :count]
        assert bool((weights > 0).eq(visible[:, first : first + count]).all())


@pytest.mark.parametrize("nk", [1, 16, 17, 31, 64, 65, 100, 129, 255])
@pytest.mark.parametrize("spike", ["first", "last"])
def test_spiked_key(target: tuple[flash_wmma.Kernel, torch.dtype], nk: int, spike: str) -> None:
    """One key takes nearly all weight, and its value is unlike all others: to lose it loses everything."""
    kernel, dtype = target
    d, j = 64, 0 if spike == "first" else nk - 1
    q = normal((2, 2, 40, d), dtype=dtype, device=kernel.device, seed=6).abs()
    k = normal((2, 2, nk, d), dtype=dtype, device=kernel.device, seed=7)
    v = normal((2, 2, nk, d), dtype=dtype, device=kernel.device, seed=8)
    k[:, :, j] = 4
    v[:, :, j] = 100
    out, lse = run(kernel, q, k, v)
    check(out, lse, reference(kernel, q, k, v))
    assert out.min() > 50


@needs("causal")
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("n", [16, 33, 64, 100, 150])
def test_neighbour_of_the_diagonal_is_hidden(
    target: tuple[flash_wmma.Kernel, torch.dtype], n: int, alignment: str
) -> None:
    """The first hidden key of every row would take all weight if it were seen, the last visible one would be missed."""
    kernel, dtype = target
    d, nk = 64, n if alignment == "top_left" else n + 7
    rise = torch.arange(nk, dtype=torch.float64)  # scores rise by 6 from key to key
    q = torch.zeros(1, 1, n, d, dtype=dtype, device=kernel.device)
    k = torch.zeros(1, 1, nk, d, dtype=dtype, device=kernel.device)
    q[..., 0] = 6
    k[0, 0, :, 0] = rise.to(dtype).to(kernel.device)
    v = (rise % 64).to(dtype).to(kernel.device)[None, None, :, None].expand(1, 1, nk, d).contiguous()
    mask = Mask(alignment)
    out, lse = run(kernel, q, k, v, mask, scale=1.0)
    check(out, lse, reference(kernel, q, k, v, mask, scale=1.0))
    last = torch.arange(n) + (nk - n)
    assert float((out[0, 0, :, 0].double().cpu() - (last % 64)).abs()[last % 64 > 1].max()) < 0.5


@needs("causal")
def test_rows_that_see_nothing(target: tuple[flash_wmma.Kernel, torch.dtype]) -> None:
    """Bottom-right with more queries than keys: the first rows see no key."""
    kernel, dtype = target
    for nq, nk in ((100, 37), (200, 3), (17, 16), (300, 64)):
        q, k, v = (
            normal((2, 2, n, 64), dtype=dtype, device=kernel.device, seed=n + i) for i, n in enumerate((nq, nk, nk))
        )
        mask = Mask("bottom_right")
        out, lse = run(kernel, q, k, v, mask)
        check(out, lse, reference(kernel, q, k, v, mask))
        hidden = nq - nk
        assert not out[:, :, :hidden].any()
        assert bool((lse[:, :, :hidden] == -math.inf).all())
        assert bool(lse[:, :, hidden:].isfinite().all())


@needs("window")
@pytest.mark.parametrize("window", [(2**63 - 1, 2**63 - 1), (2**62, 2**62), (2**40, -1), (10**6, 2**31)], ids=str)
def test_window_far_beyond_the_keys(target: tuple[flash_wmma.Kernel, torch.dtype], window: tuple[int, int]) -> None:
    kernel, dtype = target
    q, k, v = (normal((1, 2, 77, 64), dtype=dtype, device=kernel.device, seed=s) for s in (1, 2, 3))
    out, lse = run(kernel, q, k, v, Mask(False, window))
    check(out, lse, reference(kernel, q, k, v))


def test_every_head_has_its_own_keys(target: tuple[flash_wmma.Kernel, torch.dtype]) -> None:
    """Two batch entries, two groups of heads, and more queries than one tile's."""
    kernel, dtype = target
    q, k, v = (
        normal((2, h, n, 64), layout, dtype, kernel.device, seed=s)
        for s, (h, n, layout) in enumerate(((4, 35, "contiguous"), (2, 40, "bnhd"), (2, 40, "contiguous")))
    )
    out, lse = run(kernel, q, k, v)
    check(out, lse, reference(kernel, q, k, v))


def test_equal_from_run_to_run(target: tuple[flash_wmma.Kernel, torch.dtype]) -> None:
    kernel, dtype = target
    shape = (few(kernel, 3), few(kernel, 4), 333, 64)
    q, k, v = (normal(shape, dtype=dtype, device=kernel.device, seed=s) for s in (1, 2, 3))
    mask = Mask("top_left") if "causal" in kernel.features else Mask()
    first = run(kernel, q, k, v, mask)
    for _ in range(few(kernel, 5)):
        again = run(kernel, q, k, v, mask)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


@pytest.mark.gpu
@pytest.mark.parametrize("large", ["q", "k", "v"])
def test_offsets_beyond_32_bits(kernel: flash_wmma.Kernel, large: str, gpu_memory: Callable[[int], None]) -> None:
    """The last head of a tensor of more than 2^32 bytes and 2^31 elements."""
    b, h, n, d = 2, 2, 100, 64
    stride = 2**31 // h + 64  # elements from head to head: the last head starts beyond 2^31
    dtype = torch.float16 if torch.float16 in kernel.dtypes else torch.float32
    gpu_memory(3 * dtype.itemsize * b * h * stride)
    tensors = {
        "q": normal((b, h, n, d), dtype=dtype, device="cuda", seed=1),
        "k": normal((b, h, n, d), dtype=dtype, device="cuda", seed=2),
        "v": normal((b, h, n, d), dtype=dtype, device="cuda", seed=3),
    }
    expected = reference(kernel, **tensors)
    storage = torch.empty(b * h * stride, dtype=dtype, device="cuda")
    view = storage.as_strided((b, h, n, d), (h * stride, stride, d, 1))
    view.copy_(tensors[large])
    tensors[large] = view
    check(*flash_wmma.forward(**tensors, kernel=kernel.name, return_lse=True), expected)


@needs(on_a_cpu)
@pytest.mark.parametrize("dim", [1, 2], ids=["head", "row"])
@pytest.mark.parametrize("large", ["q", "k", "v"])
def test_strides_beyond_32_bits(kernel: flash_wmma.Kernel, large: str, dim: int) -> None:
    """The same on a CPU, where memory that nobody touches costs nothing: the last head or row begins beyond 2^31."""
    dtype = torch.float16 if torch.float16 in kernel.dtypes else torch.float32
    tensors = {name: normal((1, 2, 20, 64), dtype=dtype, seed=seed) for seed, name in enumerate("qkv")}
    expected = reference(kernel, **tensors)
    tensors[large] = far_apart(tensors[large], dim)
    check(*flash_wmma.forward(**tensors, kernel=kernel.name, return_lse=True), expected)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(kernel: flash_wmma.Kernel, gpu_memory: Callable[[int], None]) -> None:
    """Contiguous tensors whose last batch entries lie beyond 2^31 elements, in and out."""
    h, n, d = 8, 128, 64
    b = 2**31 // (h * n * d) + 3
    dtype = torch.float16 if torch.float16 in kernel.dtypes else torch.float32
    gpu_memory(5 * dtype.itemsize * b * h * n * d)
    q, k, v = (torch.zeros(b, h, n, d, dtype=dtype, device="cuda") for _ in range(3))
    some = torch.tensor([0, 1, b // 2, b - 3, b - 2, b - 1], device="cuda")
    for seed, t in enumerate((q, k, v)):
        t[some] = normal((len(some), h, n, d), dtype=dtype, device="cuda", seed=seed)
    out, lse = flash_wmma.forward(q, k, v, kernel=kernel.name, return_lse=True)
    assert out.numel() > 2**31
    check(out[some], lse[some], reference(kernel, q[some], k[some], v[some]))
    assert not out[2 : b // 2].any()
    assert not out[b // 2 + 1 : b - 3].any()
