"""What test_distributed.py runs in several processes, each a rank of a process group.

    python tests/ranks.py --calls 10000 --first 0 --processes 3            random calls, forward and backward, alone
    python tests/ranks.py --device cuda --calls 1000 --processes 2         the same on two GPUs
    torchrun --nproc-per-node 2 tests/ranks.py --context-parallel          torch's context_parallel, on GPUs

A process runs every case of CASES and writes what went wrong with each. All ranks make the same random numbers and
compute the same reference, in float64 where nothing is packed around a kernel; each checks its own rows.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from reference import Mask, Modification, attention, normal
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as torch_cp
from torch.nn import functional

import flash_wmma
from flash_wmma import _hook, distributed
from flash_wmma.distributed import _layout, _messages, _peer, _ring, _rows, _ulysses
from flash_wmma.distributed._agree import place_of

DEVICE = torch.device("cpu")
"""Of this process's attention; inputs and what is expected are on the CPU."""

Attend = Callable[..., Any]
BOTH: tuple[Attend, ...] = (distributed.ring_attention, distributed.ulysses_attention)


class Problem(NamedTuple):
    """A call, by the lengths (queries, keys) of its sequences: one dense sequence, or packed ones."""

    lengths: tuple[tuple[int, int], ...] = ((37, 37),)
    packed: bool = False
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    causal: Any = False
    window: Any = None
    softcap: float = 0.0
    slopes: str = ""
    """ "" for none, "heads" or "each"."""
    dtype: torch.dtype = torch.float32
    with_lse: bool = True
    scale: float | None = None
    seq_len: bool = True
    """Whether the ranks are told the length."""
    sinks: bool = False
    dropout: float = 0.0
    layout: _layout.Layout = "zigzag"

    @property
    def dim(self) -> int:
        return 0 if self.packed else 2

    def ends(self, i: int) -> list[int]:
        """cu_seqlens of the queries or the keys."""
        return [0, *itertools.accumulate(each[i] for each in self.lengths)]


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    slopes: Tensor | None
    sinks: Tensor | None
    rng_state: Tensor

    def parameters(self) -> list[Tensor]:
        """What every rank holds, and has a gradient."""
        return [] if self.sinks is None else [self.sinks]


def tensors(problem: Problem, seed: int) -> Tensors:
    """The whole inputs, the same on every rank."""
    torch.manual_seed(seed)
    (hq, hk), (d, dv) = problem.heads, problem.dims
    nq, nk = problem.ends(0)[-1], problem.ends(1)[-1]

    def make(n: int, heads: int, width: int) -> Tensor:
        shape = (n, heads, width) if problem.packed else (problem.batch, heads, n, width)
        return torch.randn(shape).to(problem.dtype)

    dlse = torch.randn((hq, nq) if problem.packed else (problem.batch, hq, nq))
    inputs = make(nq, hq, d), make(nk, hk, d), make(nk, hk, dv), make(nq, hq, dv)
    entries = len(problem.lengths) if problem.packed else problem.batch
    slopes = {"": None, "heads": torch.rand(hq), "each": torch.rand(entries, hq)}[problem.slopes]
    # Of some heads the sinks decide, of others the keys
    sinks = (
        torch.randn(hq) + torch.tensor([0.0, 4.0, -4.0, -torch.inf])[torch.arange(hq) % 4] if problem.sinks else None
    )
    return Tensors(*inputs, dlse, slopes, sinks, torch.randint(-(2**63), 2**63 - 1, (2,)))


def loss(problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor) -> Tensor:
    total = (out * dout.to(out.dtype)).sum()
    if problem.with_lse:
        total = total + (lse.masked_fill(lse.isneginf(), 0) * dlse.to(lse.dtype)).sum()
    return total


def true(problem: Problem, given: Tensors) -> list[Tensor]:
    """out, lse, dq, dk, dv and the gradients of parameters in float64."""
    leaves = [t.double().requires_grad_() for t in (*given[:3], *given.parameters())]
    sinks = leaves[-1] if problem.sinks else None
    entries = len(problem.lengths) if problem.packed else problem.batch
    longest = [max((each[i] for each in problem.lengths), default=0) for i in range(2)]
    kept = flash_wmma.dropout_mask(given.rng_state, problem.dropout, entries, problem.heads[0], *longest)
    factors = kept / (1 - problem.dropout)
    mask, whole = Mask(problem.causal, problem.window), Modification(None, given.slopes, None, problem.softcap, sinks)
    if problem.packed:
        parts = []
        for b, ((q0, q1), (k0, k1)) in enumerate(
            zip(itertools.pairwise(problem.ends(0)), itertools.pairwise(problem.ends(1)), strict=True)
        ):
            rows = (leaves[0][q0:q1], leaves[1][k0:k1], leaves[2][k0:k1])
            its = factors[b : b + 1, :, : q1 - q0, : k1 - k0]
            parts.append(attention(*(t.transpose(0, 1)[None] for t in rows), mask, problem.scale, whole.entry(b), its))
        out = torch.cat([part[0].transpose(0, 1) for (part, _) in parts])
        lse = torch.cat([part[0] for (_, part) in parts], 1)
    else:
        out, lse = attention(*leaves[:3], mask, problem.scale, whole, factors)
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss(problem, out, lse, given.dout, given.dlse), leaves)]


def options(problem: Problem, given: Tensors, leaves: list[Tensor]) -> dict[str, Any]:
    return {
        "causal": problem.causal,
        "window": problem.window,
        "softcap": problem.softcap,
        "alibi_slopes": None if given.slopes is None else given.slopes.to(DEVICE),
        "sinks": leaves[-1] if problem.sinks else None,
        "dropout_p": problem.dropout,
        "rng_state": given.rng_state.to(DEVICE),
        "scale": problem.scale,
        "return_lse": True,
    }


def alone(problem: Problem, given: Tensors) -> list[Tensor]:
    """The same by one process."""
    leaves = [there(t) for t in (*given[:3], *given.parameters())]
    if problem.packed:
        ends = [torch.tensor(problem.ends(i), dtype=torch.int32, device=DEVICE) for i in range(2)]
        longest = [max(each[i] for each in problem.lengths) for i in range(2)]
        out, lse = flash_wmma.forward_varlen(*leaves[:3], *ends, *longest, **options(problem, given, leaves))
    else:
        out, lse = flash_wmma.forward(*leaves[:3], **options(problem, given, leaves))
    total = loss(problem, out, lse, given.dout.to(DEVICE), given.dlse.to(DEVICE))
    return here(out, lse, *torch.autograd.grad(total, leaves))


def there(t: Tensor) -> Tensor:
    """A leaf of its values on DEVICE."""
    return t.detach().to(DEVICE, copy=True).requires_grad_()


def here(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().cpu() for t in tensors]


def shard(problem: Problem, t: Tensor, i: int, dim: int | None = None, group: Any = None) -> Tensor:
    """This rank's rows of queries (i = 0) or keys."""
    ends = problem.ends(i) if problem.packed else None
    at = problem.dim if dim is None else dim
    return distributed.shard_sequence(t, group, dim=at, cu_seqlens=ends, layout=problem.layout)


def told(problem: Problem) -> dict[str, Any]:
    """What the ranks are told of the whole."""
    lengths: dict[str, Any]
    if problem.packed:
        same = problem.ends(0) == problem.ends(1)
        lengths = {"cu_seqlens": problem.ends(0), "cu_seqlens_k": None if same else problem.ends(1)}
    else:
        lengths = {"seq_len": problem.lengths[0]} if problem.seq_len else {}
    return {**lengths, "layout": problem.layout}


def together(problem: Problem, given: Tensors, attend: Attend, group: Any = None) -> list[Tensor]:
    """This rank's rows of the same, by all ranks; of parameters the sum of all ranks' gradients."""
    leaves = [there(shard(problem, t, i, group=group)) for t, i in zip(given[:3], (0, 1, 1), strict=True)]
    leaves += [there(t) for t in given.parameters()]
    out, lse = attend(*leaves[:3], group, **options(problem, given, leaves), **told(problem))
    dout, dlse = shard(problem, given.dout, 0, group=group), shard(problem, given.dlse, 0, -1, group)
    assert out.is_contiguous()
    assert out.dtype == problem.dtype
    gradients = torch.autograd.grad(loss(problem, out, lse, dout.to(DEVICE), dlse.to(DEVICE)), leaves)
    for gradient in gradients[3:]:
        dist.all_reduce(gradient, group=group)
    return here(out, lse, *gradients)


def size_of_dsinks(problem: Problem, given: Tensors, out: Tensor, lse: Tensor) -> float:
    """The largest sum of its terms' sizes: rows cancel, and out is rounded before."""
    assert given.sinks is not None
    sizes = (out * given.dout).abs().sum(-1)
    weights = (given.sinks[:, None] - lse).exp().masked_fill(lse.isneginf(), 0)
    of_rows = weights * (sizes.t() if problem.packed else sizes)
    return float(of_rows.sum(1 if problem.packed else (0, 2)).max())


def compare(
    problem: Problem,
    given: Tensors,
    got: list[Tensor],
    one: list[Tensor],
    expected: list[Tensor],
    group: Any = None,
) -> None:
    """At most four times the error of one process, each result in units of its largest value, and rounding. On GPUs
    ten times in bfloat16: parts are rounded before they are merged or summed, and may cancel."""
    names = ["out", "lse", "dq", "dk", "dv", *(["dsinks"] if problem.sinks else [])]
    for name, mine, whole, exact in zip(names, got, one, expected, strict=True):
        of_keys, dim = int(name in ("dk", "dv")), -1 if name == "lse" else None
        exact_rows = exact if name == "dsinks" else shard(problem, exact, of_keys, dim, group)
        assert mine.shape == exact_rows.shape, f"{name}: {mine.shape}, not {exact_rows.shape}"
        if exact.numel() == 0:
            continue
        hidden = exact.isneginf()
        assert torch.equal(mine.isneginf(), exact_rows.isneginf()), f"{name}: -inf in other places"
        unit = float(exact.masked_fill(hidden, 0).abs().max()) or 1.0
        if name == "lse":
            unit = max(unit, 1.0)
        if name == "dsinks":
            unit = max(unit, size_of_dsinks(problem, given, *expected[:2]))
        error = (mine.double() - exact_rows).masked_fill(exact_rows.isneginf(), 0).abs()
        allowed = (whole.double() - exact).masked_fill(hidden, 0).abs().max()
        exactly = problem.dtype == torch.float32 or name == "lse"
        times = 10 if DEVICE.type == "cuda" and not exactly else 4
        allowed = times * float(allowed) / unit + (1e-5 if exactly else 4e-3)
        worst = float(error.max()) / unit if error.numel() else 0.0
        assert worst <= allowed, f"{name}: error {worst:.2e}, allowed {allowed:.2e}"


def run(problem: Problem, attend: Attend, seed: int = 0, group: Any = None) -> None:
    given = tensors(problem, seed)
    got = together(problem, given, attend, group)
    compare(problem, given, got, alone(problem, given), true(problem, given), group)


# ------------------------------------------------------------------------------------------------------------ the cases

BF16 = torch.bfloat16
PACKED = ((23, 23), (0, 0), (1, 1), (40, 40), (7, 7))
PROBLEMS: dict[str, Problem] = {
    "plain": Problem(),
    "causal": Problem(causal=True),
    "even": Problem(((48, 48),), causal=True),
    "causal_bf16": Problem(((96, 96),), causal=True, dtype=BF16),
    "plain_bf16": Problem(dtype=BF16),
    "not_told": Problem(causal=True, seq_len=False),
    "no_lse": Problem(causal=True, with_lse=False),
    "scale": Problem(causal=True, scale=0.7),
    "one_head_of_keys": Problem(causal=True, heads=(6, 1)),
    "heads_across_ranks": Problem(causal=True, heads=(9, 3)),
    "head_dims": Problem(causal=True, dims=(24, 40)),
    "window": Problem(((64, 64),), window=(9, 5)),
    "window_causal": Problem(((64, 64),), causal=True, window=(11, None)),
    "window_of_itself": Problem(window=(0, 0)),
    "window_bf16": Problem(((64, 64),), causal=True, window=(20, None), dtype=BF16),
    "narrow": Problem(((80, 80),), causal=True, window=(8, None)),  # than a chunk, as far as "packed_narrow"
    "narrow_bf16": Problem(((96, 96),), window=(7, 5), heads=(6, 1), dtype=BF16, sinks=True),
    "narrow_alibi": Problem(((80, 80),), causal="bottom_right", window=(10, None), slopes="each", softcap=3.0),
    "narrow_dropout": Problem(((83, 83),), causal=True, window=(9, None), slopes="heads", dropout=0.3),
    "softcap": Problem(causal=True, softcap=2.0),
    "alibi": Problem(slopes="heads"),
    "alibi_causal": Problem(causal=True, slopes="each"),
    "alibi_window": Problem(((64, 64),), window=(9, 30), slopes="heads", softcap=3.0),
    "alibi_bf16": Problem(((64, 64),), causal=True, slopes="heads", dtype=BF16),
    "more_keys": Problem(((21, 50),), causal="bottom_right"),
    "more_keys_top_left": Problem(((21, 50),), causal=True),
    "more_queries": Problem(((50, 21),), causal="bottom_right"),
    "more_keys_window": Problem(((21, 50),), causal="bottom_right", window=(6, None)),
    "more_keys_alibi": Problem(((21, 50),), slopes="heads"),
    "more_queries_alibi": Problem(((50, 21),), causal=True, slopes="each"),
    "sinks": Problem(sinks=True),
    "sinks_causal_bf16": Problem(((96, 96),), causal=True, dtype=BF16, sinks=True),
    "sinks_window": Problem(((64, 64),), window=(9, 5), heads=(6, 1), sinks=True),
    "sinks_more_queries": Problem(((50, 21),), causal="bottom_right", slopes="each", sinks=True),
    "sinks_one_row": Problem(((1, 1),), causal=True, sinks=True),
    "sinks_no_key": Problem(((9, 0),), sinks=True),
    "dropout": Problem(dropout=0.3),
    "dropout_even": Problem(((192, 192),), batch=1, causal=True, dropout=0.5),
    "dropout_causal_bf16": Problem(((96, 96),), causal=True, dtype=BF16, dropout=0.1),
    "dropout_window": Problem(((75, 75),), window=(19, 5), heads=(6, 1), dropout=0.8, softcap=3.0),
    "dropout_more_queries": Problem(((50, 21),), causal="bottom_right", slopes="each", dropout=0.3),
    "dropout_alibi_window": Problem(((64, 64),), window=(9, 30), slopes="heads", dropout=0.3, sinks=True),
    "dropout_one_row": Problem(((1, 1),), causal=True, dropout=0.5),
    "dropout_no_row": Problem(((0, 0),), causal=True, dropout=0.5),
    "three_rows": Problem(((3, 3),), causal=True),
    "one_row": Problem(((1, 1),), causal=True),
    "no_row": Problem(((0, 0),), causal=True),
    "no_key": Problem(((9, 0),)),
    "no_query": Problem(((0, 9),)),
    "no_entry": Problem(batch=0, causal=True),
    "one_key": Problem(((37, 1),)),  # most ranks have none
    "packed": Problem(PACKED, True),
    "packed_causal": Problem(PACKED, True, causal=True),
    "packed_causal_bf16": Problem(PACKED, True, causal=True, dtype=BF16),
    "packed_window": Problem(PACKED, True, causal=True, window=(6, None)),
    "packed_narrow": Problem(((64, 64), (0, 0), (35, 35), (9, 20), (70, 70)), True, causal=True, window=(3, None)),
    "packed_narrow_many": Problem(tuple((40 + n, 40 + n) for n in range(8)), True, window=(2, 1), sinks=True),
    "packed_narrow_dropout": Problem(((64, 64), (33, 33), (70, 70)), True, causal=True, window=(3, None), dropout=0.4),
    "packed_narrow_alibi": Problem(((64, 64), (33, 33)), True, causal=True, window=(4, None), slopes="each"),
    "packed_alibi": Problem(PACKED, True, causal=True, slopes="each"),
    "packed_alibi_plain": Problem(PACKED, True, slopes="heads", softcap=4.0),
    "packed_sinks": Problem(PACKED, True, causal=True, window=(6, None), heads=(9, 3), sinks=True),
    "packed_cross_sinks": Problem(((5, 30), (31, 8), (0, 4), (6, 0)), True, causal="bottom_right", sinks=True),
    "packed_dropout": Problem(PACKED, True, causal=True, window=(16, None), heads=(9, 3), dropout=0.4),
    "packed_dropout_alibi": Problem(PACKED, True, slopes="each", dropout=0.4, sinks=True),
    "packed_dropout_cross": Problem(((5, 30), (31, 8), (0, 4), (6, 0)), True, causal="bottom_right", dropout=0.4),
    "packed_cross": Problem(((5, 30), (31, 8), (0, 4), (6, 0)), True, causal="bottom_right"),
    "packed_many": Problem(tuple((n % 11, n % 11) for n in range(40)), True, causal=True),
    "contiguous": Problem(layout="contiguous"),
    "contiguous_causal_bf16": Problem(((96, 96),), causal=True, dtype=BF16, layout="contiguous"),
    "contiguous_not_told": Problem(causal=True, seq_len=False, layout="contiguous"),
    "contiguous_more_keys": Problem(((21, 50),), causal="bottom_right", slopes="each", layout="contiguous"),
    "contiguous_window": Problem(((80, 80),), causal=True, window=(18, None), layout="contiguous"),
    "contiguous_window_bf16": Problem(
        ((96, 96),), window=(7, 5), heads=(6, 1), dtype=BF16, sinks=True, layout="contiguous"
    ),
    "contiguous_wide_window": Problem(((80, 80),), causal=True, window=(50, None), slopes="heads", layout="contiguous"),
    "contiguous_dropout": Problem(
        ((83, 83),), causal=True, window=(9, None), slopes="heads", dropout=0.3, layout="contiguous"
    ),
    "contiguous_three_rows": Problem(((3, 3),), causal=True, window=(1, None), layout="contiguous"),
    "contiguous_no_row": Problem(((0, 0),), causal=True, layout="contiguous"),
    "contiguous_packed": Problem(PACKED, True, causal=True, window=(6, None), sinks=True, layout="contiguous"),
    "contiguous_packed_cross": Problem(
        ((5, 30), (31, 8), (0, 4), (6, 0)), True, causal="bottom_right", layout="contiguous"
    ),
}


def of(problem: Problem, attend: Attend) -> Callable[[], None]:
    return lambda: run(problem, attend)


def random_problem(rng: random.Random) -> Problem:
    packed = rng.random() < 0.4
    lengths = [rng.randint(0, 50) for _ in range(rng.randint(1, 4) if packed else 1)]
    hk, d = rng.choice([1, 2, 3]), rng.choice([8, 16])
    windows = [None, None, (7, None), (None, rng.randint(0, 9)), (rng.randint(0, 20), rng.randint(0, 20))]
    return Problem(
        tuple((n, n if rng.random() < 0.7 else rng.randint(0, 40)) for n in lengths),
        packed,
        rng.choice([1, 2]),
        (hk * rng.choice([1, 2, 4]), hk),
        (d, rng.choice([d, 24])),
        rng.choice([False, True, True, "bottom_right"]),
        rng.choice(windows),
        rng.choice([0.0, 0.0, 5.0]),
        rng.choice(["", "", "heads", "each"]),
        rng.choice([torch.float32, torch.float32, BF16]),
        rng.random() < 0.5,
        None,
        rng.random() < 0.5,
        rng.random() < 0.3,
        rng.choice([0.0, 0.0, 0.2, 0.7]),
        rng.choice(_layout.LAYOUTS),
    )


RANDOM_CALLS = 200


def random_call(number: int) -> None:
    """Forward and backward of a problem that the number decides."""
    rng = random.Random(number)
    problem = random_problem(rng)
    attend = BOTH[rng.random() < 0.25 and problem.heads[0] >= dist.get_world_size()]
    try:
        run(problem, attend, number)
    except Exception as error:
        raise AssertionError(f"call {number}, {attend.__name__}, {problem}: {error}") from error


def random_calls() -> None:
    """On three ranks many, for they are neither one nor a power of two."""
    for number in range(RANDOM_CALLS if dist.get_world_size() == 3 else 10):
        random_call(number)


def repeated() -> None:
    """The same to the bit, from tensors in other layouts with NaN around them; the inputs' gradients are those of q, k
    and v alone."""
    problem = Problem(((40, 40),), causal=True, window=(17, None))
    given = tensors(problem, 1)
    for attend in BOTH:
        first = together(problem, given, attend)
        again = together(problem, given, attend)
        assert all(map(torch.equal, first, again))
    rows = [shard(problem, t, i) for t, i in zip(given[:3], (0, 1, 1), strict=True)]
    expected = distributed.ring_attention(*rows, causal=True, seq_len=40)
    for layout in ("bnhd", "sliced", "odd", "transposed"):
        moved = [normal(tuple(t.shape), layout).copy_(t) for t in rows]  # type: ignore[arg-type]
        assert torch.equal(distributed.ring_attention(*moved, causal=True, seq_len=40), expected), layout
    # Calls that differ in where the rows are alone
    rows = [distributed.shard_sequence(t, dim=2, layout="contiguous") for t in given[:3]]
    out = distributed.ring_attention(*rows, causal=True, seq_len=40, layout="contiguous")
    whole = distributed.unshard_sequence(out, dim=2, layout="contiguous")
    close(whole, distributed.unshard_sequence(expected, dim=2))


def states() -> None:
    """The first rank's state counts, given or drawn, and every rank's generator moves on alike."""
    world, rank = dist.get_world_size(), dist.get_rank()
    n = 29
    torch.manual_seed(3)
    whole = torch.randn(3, 2, 4, n, 16)
    mine = distributed.shard_sequence(whole, dim=3)
    for attend in BOTH:
        state = torch.tensor([5, 7]) + rank
        got = attend(*mine, seq_len=n, dropout_p=0.5, rng_state=state)
        expected = flash_wmma.forward(*whole, dropout_p=0.5, rng_state=torch.tensor([5, 7]))
        close(distributed.unshard_sequence(got, dim=2), expected)
        assert state.tolist() == [5 + rank, 7 + rank]
        torch.manual_seed(0)
        expected = flash_wmma.forward(*whole, dropout_p=0.5)
        after = torch.rand(1)
        torch.manual_seed(rank)
        got = attend(*mine, seq_len=n, dropout_p=0.5)
        close(distributed.unshard_sequence(got, dim=2), expected)
        if rank == 0:
            assert torch.equal(torch.rand(1), after)
        assert not torch.equal(attend(*mine, seq_len=n, dropout_p=0.5), got) or got.numel() == 0
        torch.manual_seed(0)
        attend(*mine, seq_len=n, dropout_p=0.5)
        assert torch.equal(torch.rand(1), after), f"rank {rank} of {world}"


def one_rank_is_forward() -> None:
    """To the bit: nothing is merged."""
    if dist.get_world_size() > 1:
        return
    for name in ("plain", "causal_bf16", "packed_causal_bf16", "dropout_even"):
        given = tensors(PROBLEMS[name], 4)
        for attend in BOTH:
            got = together(PROBLEMS[name], given, attend)
            assert all(map(torch.equal, got, alone(PROBLEMS[name], given))), (name, attend)


def rows() -> None:
    """Shards, places and the whole again."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for n, layout in itertools.product((0, 1, 2 * world - 1, 2 * world, 41), _layout.LAYOUTS):
        x = torch.arange(3 * n).view(1, n, 3).float()
        mine = distributed.shard_sequence(x, layout=layout)
        places = distributed.position_ids(n, layout=layout)
        assert torch.equal(mine[0, :, 0], 3.0 * places)
        assert abs(len(places) - n / world) <= 2
        for told in ({}, {"seq_len": n}):
            assert torch.equal(distributed.unshard_sequence(mine, layout=layout, **told), x)
        turned = distributed.unshard_sequence(mine.transpose(1, 2), dim=-1, layout=layout)
        assert torch.equal(turned, x.transpose(1, 2))
    ends = torch.tensor([0, 5, 5, 18, 19], dtype=torch.int32)
    x = torch.arange(19.0)
    of_ends = torch.cat([torch.arange(n) for n in (5, 0, 13, 1)])
    for layout in _layout.LAYOUTS:
        mine = distributed.shard_sequence(x, cu_seqlens=ends, layout=layout)
        assert torch.equal(distributed.unshard_sequence(mine, cu_seqlens=ends, layout=layout), x)
        assert torch.equal(distributed.position_ids(cu_seqlens=ends, layout=layout), of_ends[mine.long()])
    assert distributed.position_ids(5).dtype == torch.int64
    assert torch.equal(distributed.position_ids(4 * world, layout="contiguous"), 4 * rank + torch.arange(4))

    leaf = torch.arange(11.0, requires_grad=True)
    mine = distributed.shard_sequence(leaf, dim=0)
    whole = distributed.unshard_sequence(mine, dim=0)
    (whole * (rank + 1) * torch.arange(11.0)).sum().backward()
    total = distributed.unshard_sequence(distributed.shard_sequence(leaf.grad, dim=0), dim=0)
    assert torch.equal(total, torch.arange(11.0) * world * (world + 1) / 2), "the sum of all ranks' gradients"


def raises(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), f"{error!r} says nothing of {text!r}"
    else:
        raise AssertionError(f"nothing raised; {text!r} expected")


def mismatches() -> None:
    """Every rank is told what differs, and the group still works."""
    world, rank = dist.get_world_size(), dist.get_rank()
    n = _layout.held(24, _layout.Cut(world), rank)
    last = rank == world - 1

    def call(
        attend: Attend, change: str = "", told: bool = True, heads: int = 4, **changed: Any
    ) -> Callable[[], object]:
        q, k = torch.randn(1, 4, n, 8), torch.randn(1, heads, n, 8)
        arguments: dict[str, Any] = {"q": q, "k": k, "v": k.clone(), "causal": True, "seq_len": 24 if told else None}
        if last:
            arguments |= changed
        if change == "gradients":
            arguments["k" if last else "q"].requires_grad_()
        if last and change == "dtype":
            arguments |= {name: arguments[name].half() for name in "qkv"}
        if last and change == "rows":
            arguments |= {name: torch.randn(1, 4, n + 1, 8) for name in "qkv"}
        if last and change == "heads":
            arguments |= {name: torch.randn(1, 2, n, 8) for name in "kv"}
        return lambda: attend(**arguments)

    for attend, told in itertools.product(BOTH, (True, False)):
        if world > 1:
            differ = "the ranks of the group make different calls:\n  rank 0: " + attend.__name__
            for change, line in (("dtype", "torch.float16"), ("heads", "k (1, 2, N, 8)")):
                raises(ValueError, differ, call(attend, change, told))
                raises(ValueError, f"rank {world - 1}: {attend.__name__}", call(attend, change, told))
                raises(ValueError, line, call(attend, change, told))
            if attend is distributed.ulysses_attention:
                raises(ValueError, differ, call(attend, "gradients", told))
            raises(ValueError, differ, call(attend, told=told, causal=False))
            raises(ValueError, differ, call(attend, told=told, window=(5, None)))
            raises(ValueError, differ, call(attend, told=told, softcap=1.0))
            raises(ValueError, differ, call(attend, told=told, sinks=torch.zeros(4)))
            raises(ValueError, differ, call(attend, told=told, dropout_p=0.1))
            raises(ValueError, differ, call(attend, told=told, seq_len=23))
            raises(ValueError, differ, call(attend, told=told, layout="contiguous"))
        if told or world > 1:  # one rank that is not told may hold any number
            raises(ValueError, "q.shape: got ", call(attend, "rows", told))
        refused = "" if last else f"rank {world - 1} of the group refused its arguments: "
        raises(
            ValueError,
            refused + "q.dtype: got torch.float64",
            call(attend, told=told, q=torch.randn(1, 4, n, 8).double()),
        )
        wrong = [
            (TypeError, "q", None),
            (ValueError, "softcap", -1.0),
            (TypeError, "window", 3),
            (TypeError, "scale", {}),
            (ValueError, "layout", "zig"),
        ]
        for kind, name, value in wrong:
            raises(kind if last else ValueError, f"{refused}{name}: got", call(attend, told=told, **{name: value}))
        call(attend, told=told)()
    raises(
        ValueError,
        "cu_seqlens: got [0, 4, 3]",
        lambda: distributed.shard_sequence(torch.zeros(3), cu_seqlens=[0, 4, 3]),
    )
    raises(ValueError, "layout: got 3, allowed:", lambda: distributed.shard_sequence(torch.zeros(3, 1), layout=3))
    raises(ValueError, "layout: got 'a'", lambda: distributed.position_ids(3, layout="a"))
    raises(ValueError, "dim: got 2", lambda: distributed.shard_sequence(torch.zeros(3), dim=2))
    raises(ValueError, "seq_len: got None", lambda: distributed.position_ids())
    x = torch.zeros(1, 2, n, 8)
    raises(ValueError, "x.shape: got", lambda: distributed.unshard_sequence(torch.zeros(n + 1, 2), cu_seqlens=[0, 24]))
    raises(ValueError, "q.shape", lambda: distributed.ring_attention(x, x, x, cu_seqlens=[0, 24]))
    packed = torch.zeros(n + 1, 2, 8)
    raises(ValueError, "q.shape: got", lambda: distributed.ring_attention(packed, packed, packed, cu_seqlens=[0, 24]))
    if world > 2:
        raises(ValueError, "at least one for each", lambda: distributed.ulysses_attention(x, x, x, seq_len=24))
    raises(TypeError, "group: got int", lambda: distributed.ring_attention(x, x, x, 3))
    raises(ValueError, "layout: got array", lambda: distributed.shard_sequence(x, layout=x[0, 0, 0].numpy()))
    raises(ValueError, "x.device: got meta", lambda: distributed.unshard_sequence(x.to("meta")))
    raises(ValueError, "seq_len: got 24", lambda: distributed.unshard_sequence(x[0, 0], cu_seqlens=[0, 24], seq_len=24))
    meta = torch.zeros(2, dtype=torch.int32, device="meta")
    raises(ValueError, "cu_seqlens.device: got meta", lambda: distributed.shard_sequence(x[0, 0], cu_seqlens=meta))
    rows = torch.zeros(n, 2).to(torch.float8_e4m3fn)
    raises(ValueError, "x.dtype: got torch.float8", lambda: distributed.unshard_sequence(rows, dim=0))
    distributed.ring_attention(x, x, x, window=(5, 0), seq_len=(24, 24))
    for changed in ({"window": (5.0, 0)}, {"window": (5, False)}, {"seq_len": (24.0, 24)}):
        options: dict[str, Any] = {"window": (5, 0), "seq_len": (24, 24)} | changed
        name = next(iter(changed))
        raises(TypeError, f"{name}: got", lambda options=options: distributed.ring_attention(x, x, x, **options))
    destroyed = dist.new_group()
    dist.destroy_process_group(destroyed)
    raises(ValueError, "group: got one that was destroyed", lambda: distributed.ring_attention(x, x, x, destroyed))
    if world > 1:
        rows = torch.zeros(1, n + last, 2)
        raises(ValueError, "x.shape: got", lambda: distributed.unshard_sequence(rows, seq_len=24))
        rows = torch.zeros(1, n, 2, requires_grad=last)
        raises(ValueError, "gradient=True", lambda: distributed.unshard_sequence(rows, seq_len=24))


def other_devices() -> None:
    """That torch takes where it is told none."""
    for attend, name in itertools.product(BOTH, ("alibi_window", "packed_causal", "dropout_window", "packed_alibi")):
        problem = PROBLEMS[name]._replace(heads=(8, 4))
        given = tensors(problem, 7)
        expected = alone(problem, given), true(problem, given)
        for calls in (_rows.index, _ring._distances, _ulysses._order):
            calls.cache_clear()  # type: ignore[attr-defined]
        with torch.device("meta"):
            got = together(problem, given, attend)
            assert distributed.position_ids(8).device.type == "meta"
        compare(problem, given, got, *expected)


def beyond_kernels() -> None:
    """What no kernel runs is refused on every rank before anything is sent, so that the group still works."""
    n = _layout.held(24, _layout.Cut(dist.get_world_size()), dist.get_rank())
    for attend, recorded, (d, d_v) in itertools.product(BOTH, (False, True), ((600, 600), (8, 608), (0, 8), (8, 0))):
        for shape in ((1, 4, n), (n, 4)):
            q, v = (torch.zeros(*shape, width, requires_grad=recorded) for width in (d, d_v))
            told: dict[str, Any] = {"seq_len": 24} if len(shape) == 3 else {"cu_seqlens": [0, 24]}
            text = f"head dim: got {d if d in (0, 600) else d_v}"
            raises(ValueError, text, lambda told=told, q=q, v=v, attend=attend: attend(q, q, v, **told))
        run(Problem(causal=True), attend)


def parts_of_losses() -> None:
    """One rank's loss has lse alone, and the others' have out alone."""
    rank = dist.get_rank()
    problem = Problem(causal=True)
    given = tensors(problem, 5)
    dout, dlse = shard(problem, given.dout, 0), shard(problem, given.dlse, 0, -1)
    chosen = float(rank == 0)
    of_all = [distributed.unshard_sequence(t, dim=2) for t in (dout * (1 - chosen), dlse * chosen)]
    given = given._replace(dout=of_all[0], dlse=of_all[1])
    for attend in BOTH:
        leaves = [there(shard(problem, t, i)) for t, i in zip(given[:3], (0, 1, 1), strict=True)]
        out, lse = attend(*leaves, **options(problem, given, leaves), **told(problem))
        total = (lse * dlse).sum() if chosen else (out * dout).sum()
        got = [out, lse, *torch.autograd.grad(total, leaves)]
        compare(problem, given, got, alone(problem, given), true(problem, given))


def infinite_sinks() -> None:
    """A sink of +inf makes its head's rows NaN, and their gradients, as in one process."""
    problem = Problem(causal=True, sinks=True)
    given = tensors(problem, 6)
    assert given.sinks is not None
    given = given._replace(sinks=given.sinks.index_fill(0, torch.tensor([1]), torch.inf))
    expected = alone(problem, given)
    for attend in BOTH:
        got = together(problem, given, attend)
        torch.testing.assert_close(got[5], expected[5], equal_nan=True, rtol=1e-4, atol=1e-5)
        assert got[5].isnan().tolist() == [False, True, False, False]
        for mine, whole, i, dim in zip(got[:5], expected[:5], (0, 0, 0, 1, 1), (2, -1, 2, 2, 2), strict=True):
            rows = shard(problem, whole, i, dim)
            torch.testing.assert_close(mine, rows, equal_nan=True, rtol=1e-4, atol=1e-5)
            if rows.numel():
                assert rows[:, 1 if i == 0 else 0].isnan().any()


def derivatives() -> None:
    """Once, in reverse mode; in q, k and v."""
    n = _layout.held(12, _layout.Cut(dist.get_world_size()), dist.get_rank())
    q, k, v = (torch.randn(1, 4, n, 8, requires_grad=True) for _ in "qkv")
    out = distributed.ring_attention(q, k, v, causal=True, seq_len=12)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    if n:
        raises(NotImplementedError, "the gradient of a gradient", lambda: torch.autograd.grad(dq.sum(), q))
    slopes = torch.rand(4, requires_grad=True)
    for attend in BOTH:
        raises(NotImplementedError, "alibi_slopes", lambda attend=attend: attend(q, k, v, alibi_slopes=slopes))
    with torch.no_grad():
        assert not distributed.ring_attention(q, k, v, alibi_slopes=slopes).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        for attend in BOTH:
            out = attend(q, k, v, causal=True, deterministic=True)
            assert out.dtype == torch.bfloat16
            assert [t.dtype for t in torch.autograd.grad(out.float().sum(), (q, k, v))] == [torch.float32] * 3


def groups() -> None:
    """Some of the ranks, in an order of their own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world < 3:
        return
    members = [0, 2] if world == 3 else [1, 3]
    group = dist.new_group(members)
    if rank in members:
        for attend in BOTH:
            run(Problem(causal=True), attend, group=group)
            run(Problem(PACKED, True, causal=True), attend, group=group)
    else:
        x = torch.zeros(1, 4, 1, 8)
        raises(
            ValueError, "group: got one that this process is not in", lambda: distributed.ring_attention(x, x, x, group)
        )
    dist.barrier()


def messages() -> None:
    """Bytes that a rank sends: heads of k and v, not of q; under a causal mask what is seen; of a window its width."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sent = [0]
    post = dist.batch_isend_irecv

    def counted(operations: list[Any]) -> Any:
        sent[0] += sum(4 * o.tensor.numel() for o in operations if o.op is dist.isend)
        return post(operations)

    n, heads, d, dv = 16 * world, 2, 8, 16
    row = heads * (d + dv) * 4
    q, k, v = (torch.randn(1, h, n // world, e, requires_grad=True) for h, e in ((8, d), (heads, d), (heads, dv)))
    chunk = n // (2 * world)
    after = world - 1 - rank  # ranks that see chunk `rank` alone; the others see both chunks
    for given, rows_sent in (
        ({}, 2 * chunk * (world - 1)),
        ({"causal": True}, chunk * after + 2 * chunk * rank),
        ({"causal": True, "window": (3, None)}, 3 * ((rank < world - 1) + (rank > 0))),
    ):
        _messages.dist.batch_isend_irecv = counted
        try:
            sent[0] = 0
            out = distributed.ring_attention(q, k, v, seq_len=n, **given)
            assert sent[0] == row * rows_sent, (given, sent[0], row * rows_sent)
            sent[0] = 0
            torch.autograd.grad(out.sum(), (q, k, v))
        finally:
            _messages.dist.batch_isend_irecv = post
        everyone = torch.tensor(sent[0])
        dist.all_reduce(everyone)
        forward = torch.tensor(row * rows_sent)
        dist.all_reduce(forward)
        assert everyone == 2 * forward, "backward sends keys and values again, and their gradients home"


def close(got: Tensor, expected: Tensor) -> None:
    error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1))
    assert error < 1e-5, error


def model() -> None:
    """A layer with rotary embeddings on shards has the loss and the gradients of the layer on the whole."""
    torch.manual_seed(5)
    n, width, heads = 29, 32, 4
    qkv, out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
    x, target = torch.randn(2, n, width), torch.randn(2, n, width)

    def turned(t: Tensor, places: Tensor) -> Tensor:
        angles = places[:, None] / 100 ** (torch.arange(4) / 4)
        a, b = t.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)

    def layer(x: Tensor, places: Tensor, attend: Attend) -> Tensor:
        q, k, v = qkv(x).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return out(attend(turned(q, places), turned(k, places), v).transpose(1, 2).flatten(2))

    parameters = [*qkv.parameters(), *out.parameters()]
    whole = layer(x, torch.arange(n), lambda *t: flash_wmma.forward(*t, causal=True))
    expected = functional.mse_loss(whole, target)
    gradients = torch.autograd.grad(expected, parameters)
    for attend in BOTH:
        mine, wanted = distributed.shard_sequence(x), distributed.shard_sequence(target)
        got = layer(mine, distributed.position_ids(n), lambda *t, attend=attend: attend(*t, causal=True))
        share = functional.mse_loss(got, wanted, reduction="sum") / target.numel()
        for gradient, true_one in zip(torch.autograd.grad(share, parameters), gradients, strict=True):
            dist.all_reduce(gradient)
            close(gradient, true_one)
        total = share.detach().clone()
        dist.all_reduce(total)
        close(total, expected.detach())
        close(distributed.unshard_sequence(got.detach()), whole.detach())


@contextlib.contextmanager
def torchs_attention(device: str) -> Iterator[None]:
    """torch's attention with these kernels behind it. torch's context_parallel knows the operators for CUDA alone: on
    the CPU, what the hook puts in their place stands under the CPU's key, and is called directly."""
    if device == "cuda":
        torch.nn.attention.activate_flash_attention_impl(_hook.NAME)
        try:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                yield
        finally:
            torch.nn.attention.restore_flash_attention_impl()
        return
    library = torch.library.Library("aten", "IMPL")
    for name, make in (("", _hook._cuda), ("_backward", _hook._cuda_backward)):
        operator = f"_scaled_dot_product_flash_attention{name}"
        library.impl(operator, make(None), "CPU", with_keyset=True)
    torchs = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = torchs
        library._destroy()


def context_parallel(device: str = "cpu") -> None:
    """torch's own, forward and backward, by both of its ways to move keys and values."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    ways = itertools.product((True, False), ("allgather", "alltoall"), (4, 2))
    for causal, way, heads_k in ways:
        torch.manual_seed(0)
        shapes = [(2, heads, 16 * world, 64) for heads in (4, heads_k, heads_k, 4)]
        whole = [torch.randn(shape, device=device).to(torch.float16 if device == "cuda" else None) for shape in shapes]
        leaves = [t.clone().requires_grad_() for t in whole[:3]]
        expected = flash_wmma.forward(*leaves, causal=causal)
        wanted = [expected.detach(), *torch.autograd.grad(expected, leaves, whole[3])]
        torch_cp.set_rotate_method(way)
        torch_cp._cp_options.enable_load_balance = causal  # which torch has for a causal mask alone
        buffers = [t.clone() for t in whole]
        options = {"enable_gqa": True} if device == "cuda" and heads_k < 4 else {}
        with torchs_attention(device), torch_cp.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            mine = [t.clone().requires_grad_() for t in buffers[:3]]
            out = functional.scaled_dot_product_attention(*mine, is_causal=causal, **options)
            gradients = torch.autograd.grad(out, mine, buffers[3].clone())
        for got, exact in zip(
            torch_cp.context_parallel_unshard(mesh, [out.detach(), *gradients], [2] * 4), wanted, strict=True
        ):
            error = float((got - exact).abs().max() / exact.abs().max())
            assert error < (1e-2 if device == "cuda" else 1e-5), (causal, way, heads_k, error)


def inference_first() -> None:
    """What a call keeps for later ones serves gradients too."""
    problem = Problem(tuple((n, n) for n in range(3, 15)), True, causal=True, window=(4, None))
    with torch.inference_mode():
        q = torch.randn(
            sum(_layout.held(n, _layout.Cut(dist.get_world_size()), dist.get_rank()) for n, _ in problem.lengths), 4, 8
        )
        distributed.ring_attention(q, q, q, causal=True, window=(4, None), cu_seqlens=problem.ends(0))
        distributed.shard_sequence(torch.randn(sum(n for n, _ in problem.lengths), 3), cu_seqlens=problem.ends(0))
    for attend in BOTH:
        run(problem, attend)


def peer_copies() -> None:
    """They are there unless they are turned off."""
    peer = _peer.peer_of(place_of(None), DEVICE)
    assert (peer is not None) == (os.environ.get(_peer.VARIABLE) != "0")


CASES: dict[str, Callable[[], None]] = {
    **{f"ring-{name}": of(problem, BOTH[0]) for name, problem in PROBLEMS.items()},
    **{f"ulysses-{name}": of(problem, BOTH[1]) for name, problem in PROBLEMS.items()},
    "repeated": repeated,
    "states": states,
    "one_rank_is_forward": one_rank_is_forward,
    "rows": rows,
    "inference_first": inference_first,
    "derivatives": derivatives,
    "groups": groups,
    "messages": messages,
    "model": model,
    "context_parallel": context_parallel,
    "mismatches": mismatches,
    "other_devices": other_devices,
    "beyond_kernels": beyond_kernels,
    "parts_of_losses": parts_of_losses,
    "infinite_sinks": infinite_sinks,
    "random_calls": random_calls,
}
LONG = Problem(((3072, 3072),), batch=1, heads=(1, 1), dims=(64, 64), dtype=BF16)
"""So long that on Hopper the calls of backward of each of two ranks share its queries (_shared_queries.py)."""
LONG_PROBLEMS = {
    "long": LONG,
    "long_causal": LONG._replace(causal=True),
    "long_window": LONG._replace(causal=True, window=(831, None), layout="contiguous"),
}
GPU_CASES = {
    **{name: case for name, case in CASES.items() if name.startswith(("ring-", "ulysses-")) or name == "random_calls"},
    **{f"ring-{name}": of(problem, BOTH[0]) for name, problem in LONG_PROBLEMS.items()},
    "peer_copies": peer_copies,
}
"""Those that compute on DEVICE, without what is equal to the bit on CPUs alone."""


# -------------------------------------------------------------------------------------------------------- the processes


def begin(rank: int, world: int, store: str, seconds: float, device: str = "cpu") -> None:
    global DEVICE
    torch.set_num_threads(1)
    if device == "cuda":
        DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=seconds),
    )


def run_cases(rank: int, world: int, folder: str, device: str = "cpu") -> None:
    """Writes what went wrong with each case; "" if nothing. After an error in mid-communication the ranks no longer go
    together: the rest is not run."""
    begin(rank, world, f"{folder}/store", 30, device)
    cases = CASES if device == "cpu" else GPU_CASES
    results = dict.fromkeys(cases, "not run, since a case before it failed")
    for name, case in cases.items():
        try:
            case()
            results[name] = ""
        except AssertionError:
            results[name] = traceback.format_exc()
        except Exception:
            results[name] = traceback.format_exc()
            break
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def lose_one(rank: int, world: int, folder: str, how: str, seconds: float, device: str = "cpu") -> None:
    """Calls until rank 1 is gone ("killed"), or does not answer since it raised in a call ("raised"), or since its
    arguments were refused while the others' call is one that was agreed on ("refused"); writes how each ends, and after
    how many seconds."""
    begin(rank, world, f"{folder}/store", seconds, device)
    n = _layout.held(64, _layout.Cut(world), rank)
    x = torch.randn(1, 2, n, 8, device=DEVICE, requires_grad=True)
    distributed.ring_attention(x, x, x, causal=True, seq_len=64).sum().backward()
    start = time.monotonic()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

        def broken(*_: object) -> Any:
            raise MemoryError("no memory left")

        if how == "refused":
            x = x.detach().double()
        else:
            _ring._ops.forward = broken  # type: ignore[assignment]
    result = "no error"
    try:
        for _ in range(3):
            distributed.ring_attention(x, x, x, causal=True, seq_len=64).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()  # what a lost rank leaves undone ends the process, by NCCL's watchdog
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    took = time.monotonic() - start
    Path(folder, f"rank{rank}.json").write_text(json.dumps([result, took]))
    if rank == 1:
        time.sleep(2 * seconds)  # alive, but silent
    os._exit(0)


def call_at_random(rank: int, world: int, folder: str, first: int, calls: int, device: str = "cpu") -> None:
    """Those calls, and a line from rank 0 now and then."""
    begin(rank, world, f"{folder}/store", 120, device)
    start = time.monotonic()
    for number in range(first, first + calls):
        random_call(number)
        done = number + 1 - first
        if rank == 0 and (done % 500 == 0 or done == calls):
            print(f"{done} calls in {time.monotonic() - start:.0f} s, the last is number {number}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Random calls of ring and Ulysses attention, each checked.")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call, which decides its problem")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--context-parallel", action="store_true", help="torch's context_parallel, under torchrun")
    given = parser.parse_args()
    if given.context_parallel:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        context_parallel("cuda")
        print(f"rank {dist.get_rank()}: right")
        dist.destroy_process_group()
        raise SystemExit
    with tempfile.TemporaryDirectory() as store:
        sizes = (given.processes, store, given.first, given.calls, given.device)
        torch.multiprocessing.start_processes(call_at_random, sizes, nprocs=given.processes, start_method="spawn")
