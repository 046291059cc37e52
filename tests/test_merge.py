"""The op merge_parts: torch's ops on a CPU, and the kernel on a GPU or else in the emulator, against float64."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from conftest import on_gpu
from torch import Tensor

from flash_wmma._library import ops
from flash_wmma._merge import merge_parts
from flash_wmma._sources import CSRC
from flash_wmma.emulator import Program

WHERE = ("cpu", "cuda" if on_gpu() else "emulated")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""In the order of ``DType`` in csrc/attention.h."""
PAIRS = [(torch.float32, part) for part in DTYPES] + [(half, half) for half in DTYPES[1:]]
INF = torch.inf


@functools.cache
def program() -> Program:
    return Program(CSRC / "merge" / "merge_emulated.cpp")


def merge(where: str, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
    """In place, by the implementation ``where`` says; the tensors are the CPU's unless that is a GPU's."""
    if where != "emulated":
        merge_parts(out, lse, part_out, part_lse, rows)
        return
    packed = out.dim() == 3

    def strides(t: Tensor) -> list[int]:
        if t is out or t is part_out:
            return [0, t.stride(1), t.stride(0)] if packed else [t.stride(0), t.stride(1), t.stride(2)]
        return [0, *t.stride()] if packed else list(t.stride())

    sizes = [1, out.shape[1], part_out.shape[0]] if packed else [*out.shape[:2], part_out.shape[2]]
    program().call(
        "merge",
        DTYPES.index(out.dtype),
        DTYPES.index(part_out.dtype),
        torch.tensor([*sizes, out.shape[-1]]),
        torch.tensor([strides(t) for t in (out, part_out, lse, part_lse)]),
        out,
        lse,
        part_out,
        part_lse,
        torch.empty(0, dtype=torch.int64) if rows is None else rows,
    )


def expected(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """In float64."""
    packed = out.dim() == 3
    dim = 0 if packed else 2
    out, lse, part_out, part_lse = (t.double() for t in (out, lse, part_out, part_lse))
    rows = torch.arange(out.shape[dim]) if rows is None else rows.cpu()
    old_out, old_lse = out.index_select(dim, rows), lse.index_select(-1, rows)
    weights = torch.stack((old_lse, part_lse)).softmax(0).nan_to_num()
    if packed:
        weights = weights.transpose(1, 2)
    new_out = old_out * weights[0, ..., None] + part_out * weights[1, ..., None]
    return out.index_copy(dim, rows, new_out), lse.index_copy(lse.dim() - 1, rows, torch.logaddexp(old_lse, part_lse))


def random_parts(packed: bool, n: int, n_part: int, d: int, dtypes: tuple[torch.dtype, torch.dtype]) -> list[Tensor]:
    def make(rows: int, dtype: torch.dtype) -> list[Tensor]:
        out = torch.randn((rows, 3, d) if packed else (2, 3, rows, d)).to(dtype)
        lse = 3 * torch.randn((3, rows) if packed else (2, 3, rows))
        lse[..., ::5] = -INF
        return [out, lse]

    whole, part = make(n, dtypes[0]), make(n_part, dtypes[1])
    part[1][..., ::3] += 60
    return [*whole, *part]


def compare(where: str, tensors: list[Tensor], rows: Tensor | None) -> None:
    right = expected(*tensors, rows)
    device = "cuda" if where == "cuda" else "cpu"
    given = [t.to(device) if device == "cuda" else t for t in tensors]
    merge(where, *given, None if rows is None else rows.to(device))  # type: ignore[misc]
    precision = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[tensors[0].dtype]
    torch.testing.assert_close(given[0].cpu().double(), right[0], rtol=precision, atol=precision)
    torch.testing.assert_close(given[1].cpu().double(), right[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize(("n", "d"), [(1, 8), (7, 64), (33, 128), (5, 192), (3, 512), (4, 20), (6, 1)])
def test_all_rows(where: str, packed: bool, dtypes: tuple[torch.dtype, torch.dtype], n: int, d: int) -> None:
    torch.manual_seed(n)
    compare(where, random_parts(packed, n, n, d, dtypes), None)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_some_rows(where: str, packed: bool, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """The others stay as they are."""
    torch.manual_seed(0)
    compare(where, random_parts(packed, 40, 11, 64, dtypes), torch.randperm(40)[:11])


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("shift", [0, 1, 4, 8])
def test_views(where: str, shift: int) -> None:
    """Rows in the middle of longer ones, on any boundary; what lies around them stays."""
    torch.manual_seed(0)
    out, lse, part_out, part_lse = random_parts(False, 24, 24, 96, (torch.float16, torch.float16))
    device = "cuda" if where == "cuda" else "cpu"
    tensors = [t.to(device) for t in (out, lse, part_out, part_lse)]
    views = [
        tensors[0].transpose(1, 2)[:, 5:13, :, shift : shift + 64].transpose(1, 2),
        tensors[1][..., 5:13],
        tensors[2][:, :, 2:10, :64],
        tensors[3][..., 2:10],
    ]
    right = expected(*(v.cpu() for v in views), None)
    before = [t.clone() for t in tensors[:2]]
    merge(where, *views, None)  # type: ignore[misc]
    torch.testing.assert_close(views[0].cpu().double(), right[0], rtol=2**-10, atol=2**-10)
    torch.testing.assert_close(views[1].cpu().double(), right[1], rtol=1e-6, atol=1e-6)
    before[0].transpose(1, 2)[:, 5:13, :, shift : shift + 64] = views[0].transpose(1, 2)
    before[1][..., 5:13] = views[1]
    assert torch.equal(before[0], tensors[0])
    assert torch.equal(before[1], tensors[1])


@pytest.mark.parametrize("where", WHERE)
def test_what_no_key_is_seen_by(where: str) -> None:
    """A part without keys does not count, whatever is finite in it; NaN in it does, and so does a NaN lse."""
    device = "cuda" if where == "cuda" else "cpu"
    nan = torch.nan
    lse, part_lse = (
        torch.tensor([[x]], device=device) for x in ([-INF, 1.0, -INF, 1.0, nan], [2.0, -INF, -INF, -INF, 0.0])
    )
    out = torch.tensor([3.0, 4.0, 5.0, 6.0, 7.0], device=device)[None, None, :, None].repeat(1, 1, 1, 8)
    part_out = torch.tensor([1.0, 2.0, 9.0, nan, 1.0], device=device)[None, None, :, None].repeat(1, 1, 1, 8)
    merge(where, out, lse, part_out, part_lse, None)
    row = torch.tensor([1.0, 4.0, 0.0, nan, nan])
    torch.testing.assert_close(out.cpu()[0, 0], row[:, None].repeat(1, 8), equal_nan=True)
    torch.testing.assert_close(lse.cpu()[0, 0], torch.tensor([2.0, 1.0, -INF, 1.0, nan]), equal_nan=True)


@pytest.mark.parametrize("where", [w for w in WHERE if w != "emulated"])
@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8), (2, 2, 3, 0)])
def test_empty(where: str, shape: tuple[int, ...]) -> None:
    out = torch.zeros(shape, device=where)
    lse = torch.zeros(shape[:3], device=where)
    merge(where, out, lse, out.clone(), torch.zeros_like(lse), None)
    torch.testing.assert_close(lse, torch.full_like(lse, 2.0).log())


@pytest.mark.skipif(not on_gpu(), reason="no GPU")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"out": torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16)}, "out"),
        ({"lse": torch.zeros(2, 3, 5)}, "lse"),
        ({"part_lse": torch.zeros(2, 3, 4, dtype=torch.float64)}, "part_lse"),
        ({"part_out": torch.zeros(2, 3, 3, 8, dtype=torch.float16), "part_lse": torch.zeros(2, 3, 3)}, "part_out"),
        ({"rows": torch.zeros(4, dtype=torch.int32)}, "rows"),
    ],
)
def test_errors(change: dict[str, Tensor], named: str) -> None:
    given: dict[str, Any] = {
        "out": torch.zeros(2, 3, 4, 8, dtype=torch.float16),
        "lse": torch.zeros(2, 3, 4),
        "part_out": torch.zeros(2, 3, 4, 8, dtype=torch.float16),
        "part_lse": torch.zeros(2, 3, 4),
        "rows": None,
    }
    given = {name: t if t is None else t.cuda() for name, t in (given | change).items()}
    with pytest.raises((RuntimeError, ValueError), match=named):
        merge_parts(*given.values())


@pytest.mark.parametrize("where", [w for w in WHERE if w != "emulated"])
@pytest.mark.parametrize(("packed", "some"), list(itertools.product((False, True), (False, True))))
def test_opcheck(where: str, packed: bool, some: bool) -> None:
    torch.manual_seed(0)
    tensors = [t.to(where) for t in random_parts(packed, 9, 4 if some else 9, 16, (torch.float32, torch.float32))]
    rows = torch.tensor([8, 0, 3, 2], device=where) if some else None
    torch.library.opcheck(ops.merge_parts.default, (*tensors, rows))
