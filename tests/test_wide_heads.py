"""Heads wider than 256: the shape that each amount of shared memory gets, V narrower and wider than a block's part of
the columns, and who refuses them."""

from __future__ import annotations

import math

import pytest
import torch
from needs import needs
from reference import DENSE, Mask, Modification, check, reference, run

import flash_wmma

KIB = 1024
SMEM_KIB = {"simt": (64, 227), "mma_sm75": (64,), "mma_sm80": (99, 163, 227)}


def inputs(
    dtype: torch.dtype, nq: int, nk: int, d: int, dv: int, device: str = "cpu", heads: tuple[int, int] = (4, 2)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = ((1, heads[0], nq, d), (1, heads[1], nk, d), (1, heads[1], nk, dv))
    q, k, v = (torch.randn(shape, generator=make).to(dtype).to(device) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize(("d", "dv"), [(512, 512), (264, 384), (72, 264), (512, 128), (400, 136)])
@pytest.mark.parametrize(("name", "smem_kib"), [(name, kib) for name, sizes in SMEM_KIB.items() for kib in sizes])
def test_every_amount_of_shared_memory(name: str, smem_kib: int, d: int, dv: int) -> None:
    """Few queries and many, since a shape may depend on them; the last tile of keys is not full."""
    kernel = next(k for k in flash_wmma.kernels() if k.name == name)
    q, k, v = inputs(kernel.dtypes[0] if name == "simt" else torch.float16, 130, 75, d, dv)
    for sm_count in (1, 132):
        with flash_wmma.emulator.settings(mode="checked", smem_optin=smem_kib * KIB, sm_count=sm_count):
            for mask in (DENSE, Mask("bottom_right")):
                check(*run(kernel, q, k, v, mask), reference(kernel, q, k, v, mask))


@needs(lambda kernel: kernel.head_dims[1] >= 512)
@pytest.mark.parametrize(("d", "dv"), [(512, 512), (328, 272)])
@pytest.mark.parametrize("modified", [False, True])
def test_wide_heads(target: tuple[flash_wmma.Kernel, torch.dtype], d: int, dv: int, modified: bool) -> None:
    """Against float64, with fully hidden rows (causal, more queries than keys), and with all modifications."""
    kernel, dtype = target
    q, k, v = inputs(dtype, 90, 70, d, dv, kernel.device)
    modification = Modification()
    if modified:
        bias = torch.randn(1, 4, 90, 70, device=kernel.device)
        bias[..., 3] = -math.inf
        modification = Modification(attn_bias=bias, alibi_slopes=torch.rand(4, device=kernel.device), softcap=5.0)
    mask = Mask("bottom_right")
    check(*run(kernel, q, k, v, mask, None, modification), reference(kernel, q, k, v, mask, None, modification))


def test_what_a_device_refuses() -> None:
    """The largest head dim depends on the shared memory: bwd_simt has none above 256 for 64 KiB."""
    q = torch.empty(1, 2, 100, 320, dtype=torch.float32, device="meta")
    for smem_kib, arch in ((64, 75), (99, 86)):
        device = flash_wmma.DeviceFacts(arch=arch, sm_count=40, smem_optin=smem_kib * KIB)
        answer = flash_wmma.explain(q, q, q, kernel="simt", backward_kernel="bwd_simt", device_facts=device)
        assert answer.kernel == "simt"
        if smem_kib == 64:
            assert answer.backward_kernel is None
            text = "head dim: got 320, allowed: 1 to 256 with the shared memory of this device"
            assert answer.backward_reasons["bwd_simt"] == text
        else:
            assert answer.backward_kernel == "bwd_simt"


@pytest.mark.parametrize("name", ["cpu", "mma_sm80", "mma_sm75"])
def test_wide_heads_of_a_cache(name: str) -> None:
    """The CPU kernel takes them; the others say what they take."""
    q, k, v = inputs(torch.float16, 3, 40, 264, 264)
    lengths = torch.tensor([37], dtype=torch.int32)
    if name == "cpu":
        out = flash_wmma.forward_cached(q, k, v, lengths, kernel=name)
        torch.testing.assert_close(out, flash_wmma.forward(q, k[:, :, :37], v[:, :, :37], kernel=name))
    else:
        with pytest.raises(ValueError, match="head dim: got 264, allowed: 1 to 256 with a key/value cache"):
            flash_wmma.forward_cached(q, k, v, lengths, kernel=name)
