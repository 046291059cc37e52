"""Every tile shape of wgmma_sm90, which the number of multiprocessors chooses, and what its maps and its choice must
get right. In the emulator, checked."""

from __future__ import annotations

import json
import math

import pytest
import torch
from reference import DENSE, PLAIN, Mask, Modification, grouped, poisoned_memory
from test_varlen import check_sequences, cumulative, packed, run_packed
from torch import Tensor

import flash_wmma
from flash_wmma.emulator._runtime import alone, take_profile

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-3}  # of the largest value of an output
DEVICE = flash_wmma.DeviceFacts(arch=90, sm_count=132, smem_optin=227 * 1024)


def tensors(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    b, hq, hk, nq, nk, d = shape
    make = torch.Generator().manual_seed(nq + nk + d)
    return tuple(torch.randn(b, h, n, d, generator=make).to(dtype) for h, n in ((hq, nq), (hk, nk), (hk, nk)))  # type: ignore[return-value]


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask = DENSE, softcap: float = 0.0, sm_count: int = 2) -> None:
    with flash_wmma.emulator.settings(mode="checked", sm_count=sm_count), poisoned_memory():
        out, lse = flash_wmma.forward(q, k, v, kernel="wgmma_sm90", return_lse=True, softcap=softcap, **mask._asdict())
        again = flash_wmma.forward(q, k, v, kernel="wgmma_sm90", softcap=softcap, **mask._asdict())
    scores = (q.double() @ grouped(k, q.shape[1]).double().mT) / math.sqrt(q.shape[3])
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask.visible(q.shape[2], k.shape[2]), -math.inf)
    empty = scores.isneginf().all(dim=3)
    expected = scores.masked_fill(empty[..., None], 0).softmax(3).masked_fill(empty[..., None], 0)
    expected = expected @ grouped(v, q.shape[1]).double()
    assert (out - expected).abs().max() <= TOLERANCE[q.dtype] * expected.abs().max().clamp_min(1e-6)
    assert torch.equal(lse.isneginf(), empty)
    assert (lse - scores.logsumexp(3)).masked_fill(empty, 0).abs().max() < 2e-3
    assert torch.equal(out, again)


SHAPES = [  # (br, softcap), a problem that takes it with two multiprocessors
    (256, 0.0, (1, 2, 1, 256, 200, 64)),
    (192, 0.0, (1, 2, 1, 190, 300, 64)),
    (128, 0.0, (1, 3, 1, 120, 300, 64)),
    (256, 5.0, (1, 2, 1, 256, 200, 64)),
    (128, 5.0, (1, 3, 1, 120, 300, 64)),
    (192, 0.0, (1, 2, 2, 190, 150, 96)),
    (128, 0.0, (1, 2, 1, 120, 150, 96)),
    (192, 5.0, (1, 2, 2, 190, 150, 96)),
    (128, 5.0, (1, 2, 1, 120, 150, 72)),
    (192, 0.0, (1, 2, 2, 190, 150, 128)),
    (128, 0.0, (1, 2, 1, 120, 150, 128)),
    (192, 5.0, (1, 2, 2, 190, 150, 128)),
    (128, 5.0, (1, 2, 1, 120, 150, 128)),
    (128, 0.0, (1, 1, 1, 150, 200, 192)),
    (128, 5.0, (1, 1, 1, 150, 200, 160)),
    (128, 0.0, (1, 1, 1, 150, 100, 256)),
    (128, 5.0, (1, 1, 1, 150, 100, 256)),
    (128, 0.0, (1, 1, 1, 150, 100, 512)),
    (128, 5.0, (1, 1, 1, 150, 100, 264)),
]
FLOAT32_SHAPES = [  # the same of converted inputs
    (256, 0.0, (1, 2, 1, 256, 200, 64)),
    (192, 0.0, (1, 2, 1, 190, 300, 64)),
    (128, 0.0, (1, 3, 1, 120, 300, 64)),
    (192, 5.0, (1, 2, 1, 190, 300, 64)),
    (192, 0.0, (1, 2, 2, 190, 150, 96)),
    (192, 0.0, (1, 2, 2, 190, 150, 128)),
    (128, 0.0, (1, 2, 1, 120, 150, 128)),
    (192, 5.0, (1, 2, 2, 190, 150, 72)),
    (128, 0.0, (1, 1, 1, 150, 200, 192)),
    (128, 5.0, (1, 1, 1, 150, 200, 160)),
    (128, 0.0, (1, 1, 1, 150, 100, 256)),
    (128, 5.0, (1, 1, 1, 150, 100, 256)),
    (128, 0.0, (1, 1, 1, 150, 100, 512)),
    (128, 5.0, (1, 1, 1, 150, 100, 512)),
]


@pytest.mark.parametrize("mask", [DENSE, Mask("bottom_right"), Mask("bottom_right", (70, 0))], ids=str)
@pytest.mark.parametrize(("br", "softcap", "shape"), SHAPES)
def test_shapes(br: int, softcap: float, shape: tuple[int, int, int, int, int, int], mask: Mask) -> None:
    q, k, v = tensors(shape, torch.bfloat16 if mask == DENSE else torch.float16)
    device = flash_wmma.DeviceFacts(arch=90, sm_count=2, smem_optin=227 * 1024)
    answer = flash_wmma.explain(q, k, v, softcap=softcap, kernel="wgmma_sm90", device_facts=device, **mask._asdict())
    assert answer.instance is not None
    assert answer.instance.br == br
    check(q, k, v, mask, softcap)


@pytest.mark.parametrize("mask", [DENSE, Mask("bottom_right", (70, 0))], ids=str)
@pytest.mark.parametrize(("br", "softcap", "shape"), FLOAT32_SHAPES)
def test_float32_shapes(br: int, softcap: float, shape: tuple[int, int, int, int, int, int], mask: Mask) -> None:
    q, k, v = tensors(shape, torch.float32)
    device = flash_wmma.DeviceFacts(arch=90, sm_count=2, smem_optin=227 * 1024)
    answer = flash_wmma.explain(q, k, v, kernel="wgmma_sm90", softcap=softcap, device_facts=device)
    assert answer.instance is not None
    assert answer.instance.br == br
    check(q, k, v, mask, softcap)


@pytest.mark.parametrize("d_v", [512, 264])
def test_wide_values(d_v: int) -> None:
    """Columns of V beyond a block's: a queue or parts of items for each launch, in the same workspace."""
    v = tensors((1, 2, 1, 1, 1100, d_v), torch.float16)[2]
    q, k, _ = tensors((1, 2, 1, 100, 1100, 64), torch.float16)
    assert functions(q, k, v, DENSE, 4, times=2) == ["forward", "merge"]
    check(q, k, v, sm_count=4)
    q, k, _ = tensors((1, 2, 1, 520, 530, 64), torch.float16)
    assert functions(q, k, v[:, :, :530], Mask("top_left"), 2, times=2) == ["clear", "forward"]
    check(q, k, v[:, :, :530], Mask("top_left"))


@pytest.mark.parametrize(
    "mask", [DENSE, Mask("bottom_right"), Mask("top_left", (70, 0)), Mask(window=(30, None))], ids=str
)
@pytest.mark.parametrize("sm_count", [2, 3, 4, 7])
def test_every_tile_once(sm_count: int, mask: Mask) -> None:
    """Heads whose tiles are dealt in turn, for several periods, and heads that are left over and mixed."""
    check(*tensors((1, 10, 5, 500, 70, 64), torch.float16), mask, sm_count=sm_count)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_queue(softcap: float) -> None:
    """Causal, and more items than two for each block: heads in order, then the mixed ones."""
    check(*tensors((1, 6, 3, 520, 530, 64), torch.float16), Mask("top_left"), softcap)


@pytest.mark.parametrize("window", [(20, None), (512, 0), (300, 320), (0, 520)], ids=str)
def test_queue_with_a_band(window: tuple[int, int | None]) -> None:
    """The longest items are a head's first ones, its last ones, or others."""
    q, k, v = tensors((1, 6, 3, 1040, 1040, 64), torch.float16)
    assert functions(q, k, v, Mask(window=window), 2) == ["clear", "forward"]
    check(q, k, v, Mask(window=window))


@pytest.mark.parametrize("cap", [1e-3, 0.5, 30.0, 50.0, 1e4])
@pytest.mark.parametrize("sign", [-1, 1])
def test_capped_scores(cap: float, sign: int) -> None:
    """All keys are one, so that the LSE is a row's score: of all sizes, in free tiles too. A lane's second row has
    scores three times those of its first."""
    sizes = torch.logspace(-3, 1, 16, dtype=torch.float64)[:, None] * (1 + torch.arange(16) // 8 * 2)
    scores = sign * cap * sizes.reshape(-1)
    q = torch.zeros(1, 1, 256, 64)
    q[..., 0] = scores.float()
    scale = 2.0 ** math.floor(math.log2(scores.abs().max() / 1e4))
    q = (q / scale).half()
    k = torch.zeros(1, 1, 192, 64, dtype=torch.float16)
    k[..., 0] = 1.0
    with flash_wmma.emulator.settings(mode="checked", sm_count=2), poisoned_memory():
        _, lse = flash_wmma.forward(q, k, k, kernel="wgmma_sm90", softcap=cap, scale=scale, return_lse=True)
    expected = cap * (q[..., 0].double() * scale / cap).tanh()
    error = (lse - math.log(192) - expected).abs()
    assert (error <= 4.5e-5 + 1e-6 * expected.abs()).all()


@pytest.mark.parametrize("cap", [1e-25, 1e-20, 30.0, 1e30])
@pytest.mark.parametrize("scale", [0.0, -0.125, 1e-30, 1e10])
def test_caps_without_a_polynomial(cap: float, scale: float) -> None:
    """Coefficients that fp32 cannot hold, and signs that no polynomial is for: tanh itself."""
    q, k, v = tensors((1, 1, 1, 80, 200, 64), torch.float16)
    q[..., :16, :] = 0
    with flash_wmma.emulator.settings(mode="checked", sm_count=2), poisoned_memory():
        out, lse = flash_wmma.forward(q, k, v, kernel="wgmma_sm90", softcap=cap, scale=scale, return_lse=True)
    scores = cap * (q.double() @ k.double().mT * scale / cap).tanh()
    assert (out - scores.softmax(3) @ v.double()).abs().max() <= TOLERANCE[q.dtype]
    torch.testing.assert_close(lse.double(), scores.logsumexp(3), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("size", [0.3, 3.0, 100.0, math.inf, math.nan])
def test_capped_tiles_of_different_sizes(size: float, where: str) -> None:
    """One tile of keys has larger products than the others, of both signs, or one that is infinite or NaN."""
    q, k, v = tensors((1, 2, 1, 130, 400, 64), torch.float16)
    first = {"first": 0, "middle": 192, "last": 384}[where]
    if math.isfinite(size):
        k[..., first : first + 64, :] *= size
        check(q, k, v, softcap=5.0)
        return
    k[..., first + 5, 0] = size
    with flash_wmma.emulator.settings(mode="checked", sm_count=2):
        out, lse = flash_wmma.forward(q, k, v, kernel="wgmma_sm90", softcap=5.0, return_lse=True)
    scores = 5 * (q.double() @ k.double().mT / 8 / 5).tanh()
    assert torch.equal(lse.isnan(), scores.logsumexp(3).isnan())
    torch.testing.assert_close(lse.double(), scores.logsumexp(3), atol=1e-4, rtol=1e-6, equal_nan=True)
    torch.testing.assert_close(out.double(), scores.softmax(3) @ v.double(), atol=4e-3, rtol=0, equal_nan=True)


@pytest.mark.parametrize("row", [3, 12, 77])
@pytest.mark.parametrize("key", [0, 70, 319])
@pytest.mark.parametrize("score", [9.5, -90.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_one_capped_score_is_large(score: float, key: int, row: int, dim: int) -> None:
    """Two terms serve all products but one, in a tile behind others that they serve."""
    q, k, v = tensors((1, 1, 1, 130, 400, dim), torch.float16)
    q[..., -1] = k[..., -1] = 0
    q[..., row, -1], k[..., key, -1] = 8, score * math.sqrt(dim) / 8
    with flash_wmma.emulator.settings(mode="checked", sm_count=2):
        out, lse = flash_wmma.forward(q, k, v, kernel="wgmma_sm90", softcap=50.0, return_lse=True)
    scores = 50 * (q.double() @ k.double().mT / math.sqrt(dim) / 50).tanh()
    torch.testing.assert_close(lse.double(), scores.logsumexp(3), atol=1e-4, rtol=1e-6)
    torch.testing.assert_close(out.double(), scores.softmax(3) @ v.double(), atol=4e-3, rtol=0)


def check_packed(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[int, ...],
    sm_count: int,
    queue: bool,
    mask: Mask = DENSE,
    modification: Modification = PLAIN,
) -> None:
    """Each sequence, and what is in none; whether blocks take items from a queue."""
    kernel = next(kernel for kernel in flash_wmma.kernels() if kernel.name == "wgmma_sm90")
    bounds = cumulative(lengths, "cpu")
    options = {"causal": mask.causal, "window": mask.window, **modification._asdict()}
    with alone(), flash_wmma.emulator.settings(mode="checked", counters=True, sm_count=sm_count):
        take_profile()
        result = run_packed(kernel, *tensors, bounds, bounds, **options)
        grids = json.loads(take_profile())
    check_sequences(kernel, tensors, (lengths, lengths), result, mask, modification)
    assert any("clear" in grid["kernel"] for grid in grids) == queue


PACKED = {  # multiprocessors, heads and the sequences' lengths; whether blocks take items from a queue
    "rounds": (2, (4, 2), (200, 0, 30, 270, 1), False),
    "queue": (2, (6, 3), (520, 0, 30, 270, 1, 0), True),
    "one head at a time": (1, (5, 1), (1300, 40), True),
    "some heads together": (3, (7, 7), (600, 513), True),
    "more sequences than a warp has lanes": (2, (2, 1), tuple(n % 4 * 7 for n in range(70)), False),
    "most items do not exist": (1, (3, 3), (1,) * 10 + (700,) + (2,) * 10, True),
}


@pytest.mark.parametrize("mask", [DENSE, Mask("bottom_right"), Mask(False, (30, 40))], ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("case", PACKED)
def test_packed_items(case: str, d: int, mask: Mask) -> None:
    """Each item of packed sequences once, with rows behind the last sequence."""
    sm_count, (hq, hk), lengths, queue = PACKED[case]
    q, k, v = (packed(sum(lengths), n, d, torch.float16, "cpu", n + d, extra=3) for n in (hq, hk, hk))
    check_packed((q, k, v), lengths, sm_count, queue and not mask.window, mask)  # few keys need no queue


@pytest.mark.parametrize("kind", ["softcap", "alibi_slopes", "bool", "float32", "bfloat16", "d = 192", "d = 512"])
def test_packed_queue_of_other_instances(kind: str) -> None:
    lengths, d = (515, 3), int(kind[4:]) if kind.startswith("d = ") else 64
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(kind, torch.float16)
    q, k, v = (packed(sum(lengths), 2, d, dtype, "cpu", i) for i in range(3))
    generator = torch.Generator().manual_seed(4)
    modification = {
        "softcap": Modification(softcap=3.0),
        "alibi_slopes": Modification(None, torch.rand(2, 2, generator=generator)),
        "bool": Modification(torch.rand(2, 1, 1, 515, generator=generator) > 0.3),
    }.get(kind, PLAIN)
    check_packed((q, k, v), lengths, sm_count=1, queue=True, modification=modification)


@pytest.mark.parametrize("nk", [16384, 16385])
def test_sums_by_the_product_of_few_keys(nk: int) -> None:
    """The tensor cores cut their sums. So lanes sum the weights of rows with many keys, before these are rounded."""
    q, k, v = tensors((1, 1, 1, 1, nk, 64), torch.bfloat16)
    with flash_wmma.emulator.settings(sm_count=1):
        _, lse, _ = flash_wmma.forward(4 * q, k, v, kernel="wgmma_sm90", return_aux=("max",), return_lse=True)
    error = lse - (4 * q.double() @ k.double().mT / 8).logsumexp(3)
    assert (error.abs().max() > 1e-5) == (nk == 16384)


def functions(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sm_count: int, times: int = 1) -> list[str]:
    """That a call launches, in order, each so often."""
    with flash_wmma.emulator.settings(sm_count=sm_count):
        profile = flash_wmma.profile(q, k, v, kernel="wgmma_sm90", **mask._asdict())
    assert {launch.launches for launch in profile.launches} == {times}
    return [launch.name for launch in profile.launches]


SPLIT = {  # multiprocessors, a problem, and its mask
    "one item": (4, (1, 1, 1, 100, 1100, 64), DENSE),
    "some rows": (4, (1, 1, 1, 5, 1100, 256), DENSE),
    "behind whole ones": (2, (1, 3, 1, 60, 1100, 128), DENSE),
    "two rounds of parts": (5, (1, 3, 3, 20, 1600, 72), DENSE),
    "last item smaller": (9, (1, 1, 1, 300, 1600, 64), Mask("bottom_right")),
    "more parts than tiles": (40, (1, 1, 1, 1540, 1600, 64), Mask("top_left")),
    "window": (4, (1, 1, 1, 70, 1600, 64), Mask("bottom_right", (1050, 0))),
    "few short items": (18, (1, 1, 1, 4950, 4950, 64), Mask(True, (1100, None))),
    "rows without keys": (24, (1, 1, 1, 1200, 1030, 64), Mask("bottom_right")),
}


@pytest.mark.parametrize("case", SPLIT)
def test_split(case: str) -> None:
    """Items whose keys several blocks share."""
    sm_count, shape, mask = SPLIT[case]
    q, k, v = tensors(shape, torch.float16 if mask == DENSE else torch.bfloat16)
    check(q, k, v, mask, sm_count=sm_count)


@pytest.mark.parametrize("case", SPLIT)
def test_split_is_taken(case: str) -> None:
    sm_count, shape, mask = SPLIT[case]
    assert functions(*tensors(shape, torch.float16), mask, sm_count) == ["forward", "merge"]


@pytest.mark.parametrize(
    ("nq", "nk", "mask"),
    [(100, 900, DENSE), (1, 4096, Mask("top_left")), (300, 4096, Mask("bottom_right", (64, 64)))],
    ids=str,
)
def test_few_visible_keys_are_not_split(nq: int, nk: int, mask: Mask) -> None:
    assert functions(*tensors((1, 1, 1, nq, nk, 64), torch.float16), mask, 13) == ["forward"]


def test_part_that_some_rows_do_not_see() -> None:
    """NaN in v stays with those warpgroups that see its key. The first item's parts are tiles of 64 keys, and its first
    two warpgroups see nothing of the third."""
    q, k, v = tensors((1, 1, 1, 1600, 1600, 128), torch.float16)
    v[..., 150, :] = math.nan
    with flash_wmma.emulator.settings(mode="checked", sm_count=27):
        out = flash_wmma.forward(q, k, v, kernel="wgmma_sm90", causal="top_left")
    assert out[:, :, 150:].isnan().all()
    assert not out[:, :, :128].isnan().any()


def test_parts_of_different_scale() -> None:
    """Scores of one part that are e^200 times the other's weights, either way round; and one part's rows all -inf."""
    q, k, v = tensors((1, 2, 2, 40, 1100, 64), torch.float16)
    q[..., 0], k[..., 0] = 16.0, 0.0
    k[:, 0, :550, 0], k[:, 1, 550:, 0] = 100.0, 100.0
    check(q, k, v, sm_count=4)
    q[..., 0], k[:, 0, 600:, 0] = 1.0, -math.inf
    check(q, k, v, sm_count=4)


def test_batch_invariant_is_not_split() -> None:
    """The number of parts depends on the batch."""
    q, k, v = tensors((2, 2, 1, 40, 1100, 64), torch.float16)
    with flash_wmma.emulator.settings(mode="checked", sm_count=4):
        both, first = (
            flash_wmma.forward(*t, kernel="wgmma_sm90", batch_invariant=True)
            for t in ((q, k, v), (q[:1], k[:1], v[:1]))
        )
    assert torch.equal(both[:1], first)


def test_strides() -> None:
    """Heads and batches that are one and the same (stride 0), heads inside rows, a row pitch that is not d."""
    q, k, v = tensors((2, 4, 1, 100, 150, 64), torch.float16)
    check(q.transpose(1, 2).contiguous().transpose(1, 2), k.expand(2, 4, 150, 64), v[:1].expand(2, 4, 150, 64))
    wide = torch.cat([v, v], dim=3)
    check(q, k, wide[..., :64])


@pytest.mark.parametrize("d", [8, 40, 72, 200])
def test_head_dims_between_tiles(d: int) -> None:
    check(*tensors((1, 2, 1, 70, 90, d), torch.float16), Mask("top_left"))


def test_first_maximum_from_a_sample() -> None:
    """The first m is that of a quarter of a tile: the largest score stands outside it, by more than fp16 holds."""
    q, k, v = tensors((1, 1, 1, 64, 256, 64), torch.float16)
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[0, 0, 8 + 128 :: 32, 0] = 60.0  # in every group of 32 keys, one of its second eight
    check(q, k, v)


def test_who_takes_what() -> None:
    """`auto` on sm_90: all problems, fp32 ones converted; on other cards mma_sm80."""
    q = torch.empty(2, 8, 1000, 64, dtype=torch.float16, device="meta")
    changes = {
        "alibi_slopes": torch.empty(8, device="meta"),
        "attn_bias": torch.empty(1, 8, 1000, 1000, device="meta"),
        "key_ranges": torch.empty(2, 1, 1000, 2, dtype=torch.int32, device="meta"),
    }
    for options in ({}, {"causal": True}, {"window": (100, 0)}, {"softcap": 30.0}, changes):
        assert flash_wmma.explain(q, q, q, device_facts=DEVICE, **options).kernel == "wgmma_sm90"  # type: ignore[arg-type]
        x = q.float()
        assert flash_wmma.explain(x, x, x, device_facts=DEVICE, **options).kernel == "wgmma_sm90"  # type: ignore[arg-type]
    wide = torch.empty(2, 8, 1000, 512, dtype=torch.bfloat16, device="meta")
    assert flash_wmma.explain(wide, wide, wide, device_facts=DEVICE).kernel == "wgmma_sm90"
    for arch in (80, 100, 120):
        answer = flash_wmma.explain(q, q, q, device_facts=flash_wmma.DeviceFacts(arch, 132, 227 * 1024))
        assert answer.kernel == "mma_sm80"
        assert "sm_90" in answer.reasons["wgmma_sm90"]


@pytest.mark.parametrize("sm_count", [2, 5])
@pytest.mark.parametrize(
    ("d", "d_v", "bc"), [(192, 128, 128), (168, 72, 128), (192, 136, 64), (128, 192, 64), (96, 40, 128), (64, 96, 128)]
)
def test_value_dims(d: int, d_v: int, bc: int, sm_count: int) -> None:
    """A V narrower or wider than K, split over the keys too. d of 129 to 192 with d_v up to 128 has its own tile."""
    q, k, _ = tensors((1, 2, 1, 130, 1100, d), torch.float16)
    v = tensors((1, 2, 1, 1, 1100, d_v), torch.float16)[2]
    answer = flash_wmma.explain(q, k, v, kernel="wgmma_sm90", device_facts=DEVICE)
    assert answer.instance is not None
    assert (answer.instance.head_dim, answer.instance.bc) == (96 if d <= 96 else 192, bc)
    check(q, k, v, sm_count=sm_count)
