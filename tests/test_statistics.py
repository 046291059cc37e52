"""return_aux: maxima, entropies and column sums of the weights, and their gradients, against plain ops in float64."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from needs import needs
from reference import (
    PLAIN,
    Mask,
    Modification,
    exact_forward,
    few,
    grouped,
    normal,
    operand_dtype,
    poisoned_memory,
)
from test_backward import MASKS
from test_varlen import cumulative
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flash_wmma
from flash_wmma._library import ops

Target = tuple[flash_wmma.Kernel, torch.dtype]
NAMES = ("max", "entropy", "column_sum")


def expected(
    q: Tensor, k: Tensor, mask: Mask, changes: Modification = PLAIN, scale: float | None = None
) -> dict[str, Tensor]:
    """Written out in the inputs' dtype."""
    row_max, log_weights, weights = expected_weights(q, k, mask, changes, scale)
    return {"max": row_max, "entropy": -(weights * log_weights).sum(3), "column_sum": weights.sum(2)}


def expected_weights(
    q: Tensor, k: Tensor, mask: Mask, changes: Modification = PLAIN, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows' maxima, ln P and P; 0 both where a key is hidden."""
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    nk = k.shape[2]
    scores = changes.apply(q @ grouped(k, q.shape[1]).transpose(2, 3) * scale)
    scores = scores.masked_fill(~mask.visible(q.shape[2], nk, q.device), -math.inf)
    row_max = torch.cat((scores, scores.new_full((*scores.shape[:3], 1), -math.inf)), 3).amax(3)
    if changes.sinks is not None:
        column = changes.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=3)
    empty = scores.isneginf().all(dim=3, keepdim=True)
    log_weights = scores.masked_fill(empty, 0).log_softmax(3)[..., :nk]
    hidden = scores[..., :nk].isneginf()
    weights, logs = log_weights.exp().masked_fill(hidden, 0), log_weights.masked_fill(hidden, 0)
    return row_max, logs, weights


def inputs(target: Target, nq: int, nk: int, d: int = 64, hq: int = 4, hk: int = 2, batch: int = 2) -> list[Tensor]:
    """A kernel that converts them converts them exactly."""
    kernel, dtype = target
    shapes = ((hq, nq, 1), (hk, nk, 2), (hk, nk, 3))
    made = [normal((batch, h, n, d), "contiguous", dtype, kernel.device, seed) for h, n, seed in shapes]
    return [t.to(operand_dtype(kernel, dtype)).to(dtype) for t in made]


def compare(got: dict[str, Tensor], right: dict[str, Tensor], factor: float = 1.0) -> None:
    """Sums of fp32 products and exponentials, over up to some hundred terms."""
    for name, t in got.items():
        assert t.dtype == torch.float32
        exact = right[name]
        assert torch.equal(t.isneginf(), exact.isneginf()), name
        finite = exact.masked_fill(exact.isneginf(), 0)
        error = (t.double().masked_fill(exact.isneginf(), 0) - finite).abs().max() if t.numel() else torch.zeros(())
        assert float(error) <= factor * 2e-5 * max(1.0, float(finite.abs().max()) if t.numel() else 1.0), name


def changes_of(name: str, device: str, nq: int, nk: int, batch: int = 2, heads: int = 4) -> Modification:
    generator = torch.Generator().manual_seed(9)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    bias = rand(heads, nq, nk)
    bias[0, nq // 2] = -math.inf  # a row that sees nothing
    bias[1, :, nk // 2] = -math.inf
    begin = (rand(batch, 1, nq).abs() * nk / 3).int()
    ranges = torch.stack((begin, begin + (rand(batch, 1, nq).abs() * nk / 2).int()), dim=-1)
    made = {
        "softcap": Modification(softcap=1.5),
        "bias": Modification(attn_bias=bias),
        "bool": Modification(attn_bias=rand(batch, 1, nq, nk) > 0.5),
        "alibi": Modification(alibi_slopes=rand(batch, heads).abs() / 4),
        "ranges": Modification(key_ranges=ranges),
        "sinks": Modification(sinks=rand(heads) * 2),
    }
    made["all"] = Modification(bias, made["alibi"].alibi_slopes, ranges, 1.5, made["sinks"].sinks)
    return made[name]


CHANGES = ("softcap", "bias", "bool", "alibi", "ranges", "sinks", "all")

# ------------------------------------------------------------------------------------------------------------- forward


@needs("return_aux", lambda kernel, d: d <= kernel.head_dims[1])
@pytest.mark.parametrize("mask", ["dense", "causal", "bottom right", "window"])
@pytest.mark.parametrize(
    ("nq", "nk", "d"),
    [
        (1, 1, 64),
        (1, 300, 64),
        (130, 3, 40),
        (100, 66, 64),
        (65, 129, 72),
        (65, 129, 128),
        (40, 70, 136),
        (40, 70, 256),
        (9, 70, 512),
    ],
)
def test_against_float64(backward_target: Target, nq: int, nk: int, d: int, mask: str) -> None:
    kernel, _ = backward_target
    q, k, v = inputs(backward_target, nq, nk, d, batch=few(kernel, 2))
    with poisoned_memory():
        out, lse, aux = flash_wmma.forward(
            q, k, v, causal=MASKS[mask].causal, window=MASKS[mask].window, return_lse=True, return_aux=NAMES,
            backward_kernel=kernel.name, kernel=exact_forward(q),
        )  # fmt: skip
    assert list(aux) == list(NAMES)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    compare(aux, expected(q.double(), k.double(), MASKS[mask]))


@needs("return_aux")
@pytest.mark.parametrize("mask", ["dense", "causal"])
@pytest.mark.parametrize("change", CHANGES)
def test_with_changed_scores(backward_target: Target, change: str, mask: str) -> None:
    kernel, _ = backward_target
    nq, nk = 70, 90
    q, k, v = inputs(backward_target, nq, nk)
    changes = changes_of(change, kernel.device, nq, nk)
    _, aux = flash_wmma.forward(
        q,
        k,
        v,
        causal=MASKS[mask].causal,
        return_aux=NAMES,
        backward_kernel=kernel.name,
        kernel=exact_forward(q),
        **changes._asdict(),
    )
    compare(aux, expected(q.double(), k.double(), MASKS[mask], changes))


@needs("return_aux")
@pytest.mark.parametrize("change", ["plain", "window", "ranges"])
def test_many_tiles(backward_target: Target, change: str) -> None:
    """Several tiles in each direction. With ranges: tiles of queries of which some groups of 64 see all keys of a tile,
    some see a part of them, and some none."""
    kernel, _ = backward_target
    nq, nk = 570, 420  # the last tile of queries has a group of 64 that does not exist
    q, k, v = inputs(backward_target, nq, nk, hq=2, hk=1, batch=1)
    mask = Mask("bottom_right", (200, 30)) if change == "window" else Mask()
    changes = PLAIN
    if change == "ranges":
        group = torch.arange(nq, device=kernel.device) // 64
        begin, end = 100 * (group % 4) - 100, nk - 90 * (group % 5)
        changes = Modification(key_ranges=torch.stack((begin, end), dim=-1).int()[None, None])
    with poisoned_memory():
        _, aux = flash_wmma.forward(
            q, k, v, causal=mask.causal, window=mask.window, return_aux=NAMES, backward_kernel=kernel.name,
            kernel=exact_forward(q), **changes._asdict(),
        )  # fmt: skip
    compare(aux, expected(q.double(), k.double(), mask, changes))


@pytest.mark.parametrize(
    ("mask", "change"), [*((m, None) for m in MASKS), ("left", None), ("dense", "ranges"), ("causal", "alibi")]
)
@pytest.mark.parametrize(("d", "sm_count"), [(64, 1), (64, 3), (128, 3), (256, 1)])
def test_items_by_turns(d: int, sm_count: int, mask: str, change: str | None) -> None:
    """Blocks of ``bwd_sm90`` with several items, in the emulator: all rings go round. Heads have several tiles of own
    rows, of which the last is not full, and warpgroups pass by tiles that others multiply."""
    nq, nk = 330, 580
    shapes = ((4, nq, 1), (2, nk, 2), (2, nk, 3))
    q, k, v = (normal((1, h, n, d), "contiguous", torch.bfloat16, "cpu", seed) for h, n, seed in shapes)
    band = Mask(False, (60, None)) if mask == "left" else MASKS[mask]
    changes = PLAIN if change is None else changes_of(change, "cpu", nq, nk, batch=1)
    options = {"return_aux": NAMES, "backward_kernel": "bwd_sm90", "kernel": exact_forward(q), **changes._asdict()}
    with flash_wmma.emulator.settings(mode="checked", sm_count=sm_count), poisoned_memory():
        _, aux = flash_wmma.forward(q, k, v, causal=band.causal, window=band.window, **options)
    compare(aux, expected(q.double(), k.double(), band, changes))


@pytest.mark.parametrize("d", [64, 128])
def test_long_sequences_in_a_pack(d: int) -> None:
    """In the emulator: sequences of ``bwd_sm90`` with several tiles of own rows, whose warpgroups pass by tiles."""
    lengths = (300, 0, 130, 420)
    q, k, v = (normal((1, 2, 850, d), "contiguous", torch.float16, "cpu", seed) for seed in (1, 2, 3))
    cu = cumulative(lengths, "cpu")
    rows = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    options = {"return_aux": NAMES, "backward_kernel": "bwd_sm90", "kernel": exact_forward(q), "causal": True}
    with flash_wmma.emulator.settings(mode="checked", sm_count=2), poisoned_memory():
        _, aux = flash_wmma.forward_varlen(*rows, cu, cu, 420, 420, **options)
    for first, last in ((0, 300), (300, 430), (430, 850)):
        right = expected(q[:, :, first:last].double(), k[:, :, first:last].double(), Mask(True))
        compare({name: t[None, :, first:last] for name, t in aux.items()}, right)


@needs("return_aux", "varlen")
def test_neighbours_in_a_pack_do_not_matter(backward_target: Target) -> None:
    """Rows of the other sequences hold NaN and inf."""
    kernel, _ = backward_target
    lengths = (50, 70, 90)
    q, k, v = inputs(backward_target, 210, 210, batch=1)
    rows = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    for t in rows[:2]:
        t[:50], t[120:] = math.nan, math.inf
    cu = cumulative(lengths, kernel.device)
    names = {"backward_kernel": kernel.name, "kernel": exact_forward(q)}
    _, aux = flash_wmma.forward_varlen(*rows, cu, cu, 90, 90, return_aux=NAMES, **names)
    right = expected(q[:, :, 50:120].double(), k[:, :, 50:120].double(), Mask())
    compare({name: t[None, :, 50:120] for name, t in aux.items()}, right)


@needs("return_aux", "varlen")
@pytest.mark.parametrize("changed", [False, True])
def test_packed_is_dense(backward_target: Target, changed: bool) -> None:
    """Each sequence's numbers; queries behind the last one see no key, and no query sees the keys there."""
    kernel, _ = backward_target
    lengths_q, lengths_k, used = (40, 0, 70, 33), (35, 20, 64, 0), (35, 20, 50, 0)
    q, k, v = inputs(backward_target, 150, 130, batch=1)
    rows = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    cu = [cumulative(lengths, kernel.device) for lengths in (lengths_q, lengths_k)]
    slopes = torch.rand(4, 4, generator=torch.Generator().manual_seed(3)).to(kernel.device) if changed else None
    with poisoned_memory():
        _, aux = flash_wmma.forward_varlen(
            *rows, *cu, 70, 64, causal="bottom_right", alibi_slopes=slopes, return_aux=NAMES,
            backward_kernel=kernel.name, kernel=exact_forward(q),
            seqused_k=torch.tensor(used, dtype=torch.int32, device=kernel.device),
        )  # fmt: skip
    right = {
        "max": torch.full((4, 150), -math.inf, dtype=torch.double, device=kernel.device),
        "entropy": torch.zeros(4, 150, dtype=torch.double, device=kernel.device),
        "column_sum": torch.zeros(4, 130, dtype=torch.double, device=kernel.device),
    }
    begin_q = begin_k = 0
    for b, (nq, nk, n) in enumerate(zip(lengths_q, lengths_k, used, strict=True)):
        one, keys = q[:, :, begin_q : begin_q + nq].double(), k[:, :, begin_k : begin_k + n].double()
        its = expected(
            one, keys, Mask("bottom_right"), Modification(alibi_slopes=None if slopes is None else slopes[b])
        )
        right["max"][:, begin_q : begin_q + nq] = its["max"][0]
        right["entropy"][:, begin_q : begin_q + nq] = its["entropy"][0]
        right["column_sum"][:, begin_k : begin_k + n] = its["column_sum"][0]
        begin_q, begin_k = begin_q + nq, begin_k + nk
    compare(aux, right)


@needs("return_aux")
def test_rows_far_apart(backward_target: Target) -> None:
    """Scores of rows that differ by e^200, a row of equal scores, and strides that are not contiguous."""
    kernel, dtype = backward_target
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(backward_target, 66, 70))
    q[:, :, 3] = 0
    if dtype == torch.float32:
        q[:, :, 5] *= 256
    _, aux = flash_wmma.forward(q, k, v, return_aux=NAMES, backward_kernel=kernel.name, kernel=exact_forward(q))
    right = expected(q.double(), k.double(), Mask())
    torch.testing.assert_close(aux["entropy"][:, :, 3].double(), right["entropy"][:, :, 3], rtol=1e-6, atol=1e-6)
    assert float(right["entropy"][0, 0, 3]) == pytest.approx(math.log(70))
    torch.testing.assert_close(aux["max"].double(), right["max"], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(aux["entropy"].double(), right["entropy"], rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(aux["column_sum"].double(), right["column_sum"], rtol=1e-3, atol=2e-3)


@needs("return_aux")
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scale(backward_target: Target, scale: float) -> None:
    kernel, _ = backward_target
    q, k, v = inputs(backward_target, 40, 70)
    _, aux = flash_wmma.forward(
        q, k, v, causal=True, scale=scale, return_aux=NAMES, backward_kernel=kernel.name, kernel=exact_forward(q)
    )
    compare(aux, expected(q.double(), k.double(), Mask(True), scale=scale))


@needs("return_aux")
@pytest.mark.parametrize("change", [None, *CHANGES])
def test_sums_of_weighted_keys(backward_target: Target, change: str | None) -> None:
    """What the gradient of column sums needs of each row."""
    kernel, _ = backward_target
    nq, nk = 70, 300
    q, k, v = inputs(backward_target, nq, nk)
    changes = PLAIN if change is None else changes_of(change, kernel.device, nq, nk)
    _, lse = flash_wmma.forward(q, k, v, causal=True, return_lse=True, kernel=exact_forward(q), **changes._asdict())
    weights = torch.randn(2, 4, nk, generator=torch.Generator().manual_seed(8)).to(kernel.device)
    given = {name: t for name, t in changes._asdict().items() if name != "sinks"}
    dense = (None, None, None, 0, 0)
    *none, row_sum = ops.statistics(q, k, lse, "", weights, *dense, window_right=0, kernel_name=kernel.name, **given)
    assert all(t.numel() == 0 for t in none)
    *_, right = expected_weights(q.double(), k.double(), Mask(True), changes)
    compare({"row_sum": row_sum}, {"row_sum": (right * weights[:, :, None].double()).sum(3)})


@needs("return_aux")
def test_weighted_keys_of_a_row_that_is_nan(backward_target: Target) -> None:
    """Nothing is read behind the weights, and other rows are as they were."""
    kernel, _ = backward_target
    q, k, _ = inputs(backward_target, 5, 17)
    weights = torch.randn(2, 4, 17, device=kernel.device)
    q[:, :, 2] = math.nan
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[3])
    lse = scores.logsumexp(-1).float()
    *_, row_sum = ops.statistics(q, k, lse, "", weights, None, None, None, 0, 0, kernel_name=kernel.name)
    expected = (scores.softmax(-1) * weights[:, :, None].double()).sum(3)
    assert row_sum[:, :, 2].isnan().all()
    rest = [0, 1, 3, 4]
    compare({"row_sum": row_sum[:, :, rest]}, {"row_sum": expected[:, :, rest]})


@needs("return_aux", "varlen", "attn_bias")
def test_a_packed_bias_where_no_row_is(backward_target: Target) -> None:
    """NaN in the bias of queries and keys that shorter sequences do not have reaches nothing."""
    kernel, _ = backward_target
    lengths_q, lengths_k = (40, 70), (70, 35)
    q, k, v = inputs(backward_target, 110, 105, batch=1)
    rows = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    cu = [cumulative(lengths, kernel.device) for lengths in (lengths_q, lengths_k)]
    bias = torch.zeros(2, 1, 70, 70, device=kernel.device)
    for b, (nq, nk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        bias[b, :, nq:] = bias[b, :, :, nk:] = math.nan
    names = {"backward_kernel": kernel.name, "kernel": exact_forward(q)}
    _, aux = flash_wmma.forward_varlen(*rows, *cu, 70, 70, attn_bias=bias, return_aux=NAMES, **names)
    _, plain = flash_wmma.forward_varlen(*rows, *cu, 70, 70, return_aux=NAMES, **names)
    for name in NAMES:
        torch.testing.assert_close(aux[name], plain[name], rtol=1e-5, atol=1e-5)


@needs("return_aux")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(backward_target: Target, value: float) -> None:
    kernel, _ = backward_target
    q, k, v = inputs(backward_target, 40, 50)
    q[0, 1, 7, 3] = value
    _, aux = flash_wmma.forward(
        q, k, v, return_aux=("max", "entropy"), backward_kernel=kernel.name, kernel=exact_forward(q)
    )
    right = expected(q.double(), k.double(), Mask())
    others = torch.ones(2, 4, 40, dtype=torch.bool, device=kernel.device)
    others[0, 1, 7] = False
    for name in aux:
        torch.testing.assert_close(aux[name][others].double(), right[name][others], rtol=1e-4, atol=1e-4)
    assert aux["entropy"][0, 1, 7].isnan()
    assert aux["max"][0, 1, 7].isnan() if math.isnan(value) else aux["max"][0, 1, 7] == math.inf


@needs("return_aux", "attn_bias")
@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_a_mask_hides_does_not_matter(backward_target: Target, value: float, boolean: bool) -> None:
    """A key that no query sees, and a query that sees no key, may hold anything."""
    kernel, _ = backward_target
    nq, nk = 100, 70
    q, k, v = inputs(backward_target, nq, nk)
    mask = torch.ones(nq, nk, dtype=torch.bool, device=kernel.device)
    mask[:, 50] = mask[20] = False
    right = expected(q.double(), k.double(), Mask(), Modification(attn_bias=mask))
    q[:, :, 20], k[:, :, 50] = value, value
    bias = mask if boolean else torch.zeros(nq, nk, device=kernel.device).masked_fill(~mask, -math.inf)
    _, aux = flash_wmma.forward(
        q, k, v, attn_bias=bias, return_aux=NAMES, backward_kernel=kernel.name, kernel=exact_forward(q)
    )
    compare(aux, right)


@needs("return_aux")
def test_column_sums_are_the_same_in_every_run(backward_target: Target) -> None:
    kernel, _ = backward_target
    q, k, v = inputs(backward_target, 200, 130)
    results = [
        flash_wmma.forward(q, k, v, return_aux=NAMES, backward_kernel=kernel.name, kernel=exact_forward(q))[1]
        for _ in range(3)
    ]
    for name in NAMES:
        assert torch.equal(results[0][name], results[1][name])
        assert torch.equal(results[0][name], results[2][name])


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (1, 0, 5, 8), (1, 2, 0, 8), (1, 2, 5, 0)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    """No entry, no head, no query, no key (where d is 5 and the length 0)."""
    batch, heads, nq, d = shape
    nk, d = (0, 8) if d == 0 else (6, d)
    q, k = torch.randn(batch, heads, nq, d), torch.randn(batch, heads, nk, d)
    for kernel in ("auto", "math"):
        _, aux = flash_wmma.forward(q, k, k, return_aux=NAMES, kernel=kernel)
        assert aux["max"].shape == aux["entropy"].shape == (batch, heads, nq)
        assert aux["column_sum"].shape == (batch, heads, nk)
        if nk == 0:
            assert aux["max"].isneginf().all()
        assert not aux["entropy"].any() or nk > 0
        assert not aux["column_sum"].any() or nq > 0


def test_dropout_does_not_matter() -> None:
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    _, plain = flash_wmma.forward(q, k, v, return_aux=NAMES)
    for kernel in ("auto", "math"):
        _, dropped = flash_wmma.forward(q, k, v, return_aux=NAMES, dropout_p=0.5, kernel=kernel)
        for name in NAMES:
            torch.testing.assert_close(dropped[name], plain[name])


@pytest.mark.parametrize("packed", [False, True])
def test_plain_torch_ops(packed: bool) -> None:
    """kernel="math" has them in float64, dense and packed."""
    q, k, v = (torch.randn(2, h, n, 16, dtype=torch.double) for h, n in ((4, 20), (2, 30), (2, 30)))
    changes = changes_of("all", "cpu", 20, 30)
    changes = changes._replace(key_ranges=None)
    if packed:
        rows = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
        cu = [cumulative((n, n), "cpu") for n in (20, 30)]
        _, aux = flash_wmma.forward_varlen(*rows, *cu, 20, 30, kernel="math", return_aux=NAMES, **changes._asdict())
        aux = {name: t.unflatten(1, (2, -1)).transpose(0, 1) for name, t in aux.items()}
    else:
        _, aux = flash_wmma.forward(q, k, v, kernel="math", return_aux=NAMES, **changes._asdict())
    for name, t in expected(q, k, Mask(), changes).items():
        assert aux[name].dtype == torch.double
        torch.testing.assert_close(aux[name], t)


# ----------------------------------------------------------------------------------------------------------- gradients


def gradients_are_right(
    kernel: str, leaves: dict[str, Tensor], mask: Mask, multiplied: torch.dtype = torch.float32, **options: Any
) -> None:
    """Of the entropy, of the column sums, and of both, to all leaves. `multiplied`: the type to which the kernel rounds
    dS before it multiplies it."""
    generator = torch.Generator().manual_seed(6)
    device, (batch, heads, nq, _), nk = leaves["q"].device, leaves["q"].shape, leaves["k"].shape[2]
    of_entropy = torch.randn(batch, heads, nq, generator=generator).to(device)
    of_columns = torch.randn(batch, heads, nk, generator=generator).to(device)
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    changes = Modification(**{n: t for n, t in exact.items() if n not in "qk"}, **options)
    right = expected(exact["q"], exact["k"], mask, changes)
    given = {name: t for name, t in leaves.items() if name not in "qk"}
    _, aux = flash_wmma.forward(
        leaves["q"], leaves["k"], leaves["k"], causal=mask.causal, window=mask.window, return_aux=NAMES,
        backward_kernel=kernel, kernel=exact_forward(leaves["q"]), **given, **options,
    )  # fmt: skip
    for names in (("entropy",), ("column_sum",), ("entropy", "column_sum")):
        weights = {"entropy": of_entropy, "column_sum": of_columns}
        loss, exact_loss = (
            torch.stack([(found[name] * weights[name].to(found[name].dtype)).sum() for name in names]).sum()
            for found in (aux, right)
        )
        got = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
        for name, one, its in zip(
            leaves, got, torch.autograd.grad(exact_loss, list(exact.values()), retain_graph=True), strict=True
        ):
            rounding = torch.finfo(leaves[name].dtype).eps + 2 * torch.finfo(multiplied).eps
            error = float((one.double() - its).abs().max()) / max(float(its.abs().max()), 0.1)
            assert error <= 1e-4 + rounding, f"{names}, gradient of {name}: {error:.2e}"


@needs("the gradients of entropy and column_sum")
@pytest.mark.parametrize("mask", ["dense", "causal", "bottom right", "window"])
@pytest.mark.parametrize(("nq", "nk", "d"), [(1, 70, 64), (70, 1, 64), (100, 66, 40), (65, 129, 128), (20, 40, 256)])
def test_gradients(backward_target: Target, nq: int, nk: int, d: int, mask: str) -> None:
    kernel, dtype = backward_target
    q, k, _ = inputs(backward_target, nq, nk, d, batch=few(kernel, 2))
    gradients_are_right(kernel.name, {"q": q, "k": k}, MASKS[mask], operand_dtype(kernel, dtype))


@needs("the gradients of entropy and column_sum", "the gradient of alibi_slopes", "the gradient of attn_bias")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mask", ["dense", "causal"])
def test_gradients_with_changed_scores(backward_target: Target, change: str, mask: str) -> None:
    kernel, dtype = backward_target
    nq, nk = 40, 50
    q, k, _ = inputs(backward_target, nq, nk, 24)
    changes = changes_of(change, kernel.device, nq, nk)
    floating = {n: t for n, t in changes._asdict().items() if isinstance(t, Tensor) and t.is_floating_point()}
    options = {n: t for n, t in changes._asdict().items() if n not in floating}
    leaves = {"q": q, "k": k, **floating}
    gradients_are_right(kernel.name, leaves, MASKS[mask], operand_dtype(kernel, dtype), **options)


@needs("the gradients of entropy and column_sum")
@pytest.mark.parametrize("largest", [1e-8, 1e6])
def test_gradients_that_cancel(backward_target: Target, largest: float) -> None:
    """Gradients of column sums that add up to 0 over equal weights: their mean says nothing of their size."""
    kernel, dtype = backward_target
    if largest < 1 and operand_dtype(kernel, dtype) == torch.float16 == dtype:
        largest = 1e-2  # halves have no smaller gradients
    q, k, _ = inputs(backward_target, 66, 130, batch=1)
    q = torch.zeros_like(q).requires_grad_()
    of_columns = largest * (1 - 2 * (torch.arange(130, device=kernel.device) % 2)).float()
    _, aux = flash_wmma.forward(
        q, k, k, return_aux=("column_sum",), backward_kernel=kernel.name, kernel=exact_forward(q)
    )
    (got,) = torch.autograd.grad((aux["column_sum"] * of_columns).sum(), q)
    keys = k.double().repeat_interleave(2, 1)
    its = (of_columns.double()[:, None] * keys).sum(2, keepdim=True).expand_as(q) / 130 / 8
    low = max(torch.finfo(t).eps for t in (dtype, operand_dtype(kernel, dtype)))
    torch.testing.assert_close(got.double() / largest, its / largest, rtol=2 * low + 1e-5, atol=(2 * low + 1e-5) / 10)


@needs("the gradients of entropy and column_sum")
@pytest.mark.parametrize("factor", [2.0**17, 2.0**-10])
def test_gradients_of_any_size(backward_target: Target, factor: float) -> None:
    """As a loss is scaled for halves: dS may be beyond what they hold, and below."""
    kernel, dtype = backward_target
    q, k, _ = (t.requires_grad_() for t in inputs(backward_target, 40, 70, batch=1))
    rows = torch.randn(40, device=kernel.device)

    def gradients(factor: float) -> tuple[Tensor, ...]:
        _, aux = flash_wmma.forward(
            q, k, k, return_aux=("entropy",), backward_kernel=kernel.name, kernel=exact_forward(q)
        )
        return torch.autograd.grad((aux["entropy"] * rows * factor).sum(), (q, k))

    held = torch.finfo(dtype)
    low = 4 * max(torch.finfo(t).eps for t in (dtype, operand_dtype(kernel, dtype)))
    for got, right in zip(gradients(factor), gradients(1.0), strict=True):
        right = (right.double() * factor).clamp(held.min, held.max)
        got = got.double().clamp(held.min, held.max)
        torch.testing.assert_close(got, right, rtol=low, atol=low * float(right.abs().max()) + held.tiny)


@needs("the gradients of entropy and column_sum", "dropout")
def test_gradients_beside_dropout(backward_target: Target) -> None:
    """The op is linear in its gradients, whether it drops weights for some of them or not."""
    kernel, dtype = backward_target
    q, k, v = inputs(backward_target, 40, 50, 64, 2, 2)
    state = torch.tensor([3, 4], device=kernel.device)
    dout, columns = normal((2, 2, 40, 64), "contiguous", dtype, kernel.device, 4), q[:, :, :1, :50].float()[:, :, 0]
    drops = {"rng_state": state, "dropout_p": 0.4}
    out, lse = flash_wmma.forward(q, k, v, return_lse=True, **drops)
    dense = (None, None, None, 0, 0)

    def found(dout: Tensor, terms: tuple[Tensor | None, Tensor | None], drops: dict[str, Any]) -> tuple[Tensor, ...]:
        given = (dout, None, q, k, v, out, lse, *terms, *dense)
        return ops.backward_with_statistics(*given, kernel_name=kernel.name, **drops)[:2]

    none = torch.zeros_like(dout)
    both = found(dout, (lse, columns), drops)
    for a, b, c in zip(both, found(dout, (None, None), drops), found(none, (lse, columns), {}), strict=True):
        tolerance = 1e-4 + 4 * max(torch.finfo(t).eps for t in (dtype, operand_dtype(kernel, dtype)))
        torch.testing.assert_close(a.double(), b.double() + c.double(), rtol=tolerance, atol=tolerance)


@needs(
    *("the gradients of entropy and column_sum", "the gradient of alibi_slopes", "varlen", "sinks"),
    lambda kernel, deterministic: not deterministic or "deterministic" in kernel.features,
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_packed_sequences(backward_target: Target, deterministic: bool) -> None:
    """With slopes for each sequence, whose gradient is summed over its keys alone."""
    kernel, dtype = backward_target
    operand, device = operand_dtype(kernel, dtype), kernel.device
    lengths_q, lengths_k = (9, 0, 20), (12, 5, 16)
    q, k = (
        torch.randn(sum(n), h, 16, device=device).to(operand).to(dtype) for n, h in ((lengths_q, 4), (lengths_k, 2))
    )
    slopes, sinks = torch.rand(3, 4, device=device), torch.randn(4, device=device)
    weights = torch.randn(4, 29, device=device), torch.randn(4, 33, device=device)

    def loss(name: str, q: Tensor, k: Tensor, slopes: Tensor, sinks: Tensor) -> Tensor:
        cu = [cumulative(n, device) for n in (lengths_q, lengths_k)]
        options: dict[str, Any] = {"deterministic": deterministic, "return_aux": NAMES[1:]}
        options |= {"kernel": name} if name == "math" else {"backward_kernel": name, "kernel": exact_forward(q)}
        _, aux = flash_wmma.forward_varlen(
            q, k, k, *cu, 20, 16, alibi_slopes=slopes.float(), sinks=sinks, causal=True, **options
        )
        return sum((aux[n] * w.to(aux[n].dtype)).sum() for n, w in zip(NAMES[1:], weights, strict=True))

    leaves = [t.requires_grad_() for t in (q, k, slopes, sinks)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    found = torch.autograd.grad(loss(kernel.name, *leaves), leaves)
    for a, b in zip(found, torch.autograd.grad(loss("math", *exact), exact), strict=True):
        tolerance = 1e-4 + 4 * max(torch.finfo(t).eps for t in (a.dtype, operand))
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize("change", ["softcap", "bias", "sinks"])
def test_gradcheck(change: str) -> None:
    """The fp32 kernel against its own differences."""
    q, k = (torch.randn(1, 2, n, 8, dtype=torch.double, requires_grad=True) for n in (5, 6))
    changes = changes_of(change, "cpu", 5, 6, 1, 2)
    if changes.attn_bias is not None:
        changes = changes._replace(attn_bias=changes.attn_bias.clamp(min=-2))

    def function(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        given = [t.float() for t in (q, k)]
        _, aux = flash_wmma.forward(given[0], given[1], given[1], return_aux=NAMES[1:], **changes._asdict())
        return aux["entropy"].double(), aux["column_sum"].double()

    assert torch.autograd.gradcheck(function, (q, k), eps=1e-2, atol=2e-3, rtol=1e-2)


def test_gradients_through_everything() -> None:
    """A loss on out, lse and the statistics at once, with dropout, against plain torch ops."""
    q, k, v = (torch.randn(2, 4, 20, 16) for _ in range(3))
    options: dict[str, Any] = {"dropout_p": 0.3, "rng_state": torch.tensor([3, 4]), "return_lse": True}

    def loss(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, aux = flash_wmma.forward(q, k, v, kernel=kernel, return_aux=NAMES[1:], **options)
        return (
            out.square().sum() + lse.square().sum() + aux["entropy"].square().sum() + aux["column_sum"].square().sum()
        )

    leaves = [t.requires_grad_() for t in (q, k, v)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    found = torch.autograd.grad(loss("auto", *leaves), leaves)
    for a, b in zip(found, torch.autograd.grad(loss("math", *exact), exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("names", [("entropy",), ("column_sum",), ("max", "entropy")], ids=" ".join)
def test_checkpointing(names: tuple[str, ...]) -> None:
    q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in "qkv")

    def attend(*tensors: Tensor) -> Tensor:
        out, aux = flash_wmma.forward(*tensors, return_aux=names)
        return out.square().sum() + sum(aux[name].square().sum() for name in names if name != "max")

    kept = checkpoint(attend, q, k, v, use_reentrant=False)
    for a, b in zip(*(torch.autograd.grad(loss, (q, k, v)) for loss in (kept, attend(q, k, v))), strict=True):
        torch.testing.assert_close(a, b)


def test_what_has_no_gradient() -> None:
    q = torch.randn(1, 2, 9, 16, requires_grad=True)
    _, aux = flash_wmma.forward(q, q, q, return_aux=NAMES)
    with pytest.raises(NotImplementedError, match='"max" has no gradient'):
        aux["max"].sum().backward()
    (first,) = torch.autograd.grad(aux["entropy"].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradient of a gradient"):
        first.sum().backward()
    _, exact = flash_wmma.forward(q, q, q, return_aux=NAMES, kernel="math")
    exact["max"].sum().backward()
    assert q.grad is not None


def test_under_autocast() -> None:
    q = torch.randn(1, 2, 9, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        _, aux = flash_wmma.forward(q, q, q, return_aux=NAMES)
    low = q.detach().bfloat16().double()
    compare(aux, expected(low, low, Mask()))
    (gradient,) = torch.autograd.grad(aux["entropy"].sum(), q)
    assert gradient.dtype == torch.float32


# --------------------------------------------------------------------------------------------------- torch's machinery


def test_opcheck() -> None:
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 6, 8)
    out, lse = ops.forward(q, k, k)
    columns = torch.randn(1, 4, 6)
    dense = (None, None, None, 0, 0)
    torch.library.opcheck(ops.statistics.default, (q, k, lse, "max entropy column_sum", columns, *dense))
    options = {"alibi_slopes": torch.rand(4), "slopes_grad": True}
    given = (out, None, q, k, k, out, lse, lse, columns, *dense)
    torch.library.opcheck(ops.backward_with_statistics.default, given, options)
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    rows = torch.randn(5, 4, 8)
    out, lse = ops.forward_varlen(rows, rows, rows, cu, cu, None, 3, 3)
    packed = (cu, cu, None, 3, 3)
    torch.library.opcheck(ops.statistics.default, (rows, rows, lse, "column_sum", None, *packed))
    given = (out, None, rows, rows, rows, out, lse, lse, torch.randn(4, 5), *packed)
    torch.library.opcheck(ops.backward_with_statistics.default, given, options)


def test_compile() -> None:
    q = torch.randn(1, 2, 9, 16, requires_grad=True)

    def loss(q: Tensor) -> Tensor:
        out, aux = flash_wmma.forward(q, q, q, causal=True, return_aux=("entropy", "column_sum"))
        return out.sum() + aux["entropy"].square().sum() + aux["column_sum"].square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(*(torch.autograd.grad(f(q), q)[0] for f in (compiled, loss)))


def test_kernels_without_their_gradients_say_so() -> None:
    q = torch.randn(1, 2, 9, 16).half().requires_grad_()
    _, aux = flash_wmma.forward(q, q, q, return_aux=("entropy",), backward_kernel="bwd_sm90")
    lacks = "kernel 'bwd_sm90' cannot run this: does not support the gradients of entropy and column_sum"
    with pytest.raises(ValueError, match=lacks):
        aux["entropy"].sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_auto_takes_tensor_cores(cuda: torch.device, dtype: torch.dtype) -> None:
    """Unless forward multiplied fp32 as it is."""
    q = torch.randn(1, 2, 90, 64, device=cuda).to(dtype)

    def found(backward_kernel: str, kernel: str = "auto") -> torch.Tensor:
        options: dict[str, Any] = {"kernel": kernel, "backward_kernel": backward_kernel}
        return flash_wmma.forward(q, q, q, causal=True, return_aux=("entropy",), **options)[1]["entropy"]

    arch = flash_wmma.device_facts().arch
    wide = "bwd_sm90" if arch == 90 and dtype != torch.float32 else "bwd_sm80"
    assert torch.equal(found("auto"), found(wide if arch >= 80 else "bwd_sm75"))
    if dtype == torch.float32:
        assert torch.equal(found("auto", "simt"), found("bwd_simt", "simt"))


@pytest.mark.gpu
@pytest.mark.parametrize("backward_kernel", ["auto", "bwd_simt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_halves(cuda: torch.device, dtype: torch.dtype, backward_kernel: str) -> None:
    """On tensor cores, or by name in fp32."""
    leaves = {name: torch.randn(2, h, 90, 64, device=cuda).to(dtype) for name, h in (("q", 4), ("k", 2))}
    leaves["attn_bias"] = torch.randn(4, 90, 90, device=cuda).to(dtype)
    multiplied = torch.float32 if backward_kernel == "bwd_simt" else dtype
    gradients_are_right(backward_kernel, leaves, MASKS["causal"], multiplied)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("max", TypeError, "return_aux: got 'max', allowed: a tuple of some of 'max', 'entropy', 'column_sum'"),
        (3, TypeError, "return_aux: got 3"),
        (("minimum",), ValueError, "return_aux: got 'minimum'"),
        ((3,), TypeError, "return_aux: got 3"),
    ],
)
def test_errors(given: Any, error: type[Exception], message: str) -> None:
    q = torch.randn(1, 2, 9, 16)
    with pytest.raises(error, match=re.escape(message)):
        flash_wmma.forward(q, q, q, return_aux=given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"key_weights": torch.zeros(1, 2, 8)}, "key_weights: got shape (1, 2, 8), allowed: (B, Hq, Nk)"),
        ({"lse": torch.zeros(1, 2, 8)}, "lse: got shape (1, 2, 8)"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, "cu_seqlens_q, cu_seqlens_k: one without the other"),
    ],
)
def test_the_op_checks_too(given: dict[str, Tensor], message: str) -> None:
    q = torch.randn(1, 2, 9, 16)
    call: dict[str, Any] = {"q": q, "k": q, "lse": q[..., 0], "wanted": "max", "key_weights": None}
    call |= {"cu_seqlens_q": None, "cu_seqlens_k": None, "seqused_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0}
    with pytest.raises((RuntimeError, ValueError), match=re.escape(message)):
        ops.statistics(**call | given)
