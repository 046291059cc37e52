"""The emulator's counters, line by line, against counts derived by hand: tests/emulator/micro.cu.

A request is one instruction of a warp. Shared memory: 32 banks of 4 bytes; a wavefront takes one word from each bank.
Requests of 8 bytes a lane go in two halves of the warp, of 16 bytes in four quarters. Global memory: 32-byte sectors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from programs import FOLDER, marked_lines

from flash_wmma.emulator import Program, settings

SOURCE = FOLDER / "micro.cu"
Expected = Mapping[str, Mapping[str, Mapping[str, int]]]
"""By a line's label and the class of instruction."""


def shared(requests: int, wavefronts: int, *, lanes: int | None = None, ideal: int | None = None) -> dict[str, int]:
    return {
        "instructions": requests,
        "lanes": 32 * requests if lanes is None else lanes,
        "wavefronts": wavefronts,
        "ideal_wavefronts": requests if ideal is None else ideal,
    }


def global_(requests: int, sectors: int, *, lanes: int | None = None, ideal: int | None = None) -> dict[str, int]:
    return {
        "instructions": requests,
        "lanes": 32 * requests if lanes is None else lanes,
        "sectors": sectors,
        "ideal_sectors": sectors if ideal is None else ideal,
    }


def issued(count: int) -> dict[str, int]:
    return {"instructions": count}


@dataclass(frozen=True)
class Case:
    entry: str
    expected: Expected
    arguments: tuple[str | int, ...] = ("out", "in")
    """"out" and "in" stand for tensors."""
    dtype: torch.dtype = torch.float32
    """Of "in"; and of "out", unless that is float."""
    float_out: bool = False
    divergent: int = 0
    """Branches at which the lanes of a warp part."""


def global_stride(stride: int, sectors: int) -> Case:
    # 32 lanes x 4 bytes x stride: 128 bytes and 4 sectors at stride 1, 8 at 2, and from 8 on a sector for every lane
    each = global_(1, sectors, ideal=4)
    lines = {"global_stride load": {"global_load": each}, "global_stride store": {"global_store": each}}
    return Case(f"global_stride_{stride}", lines)


def transpose(pad: int, wavefronts: int) -> Case:
    # 8 warps x 4 rows = 32 requests each way. A row is 128 bytes: 4 sectors, 1 wavefront. A column's words are 32 + pad
    # apart: without padding all in one bank, 32 wavefronts a request; with it one in each bank, 1 wavefront
    rows = global_(32, 128)
    return Case(
        f"transpose_{pad}",
        {
            "transpose global load": {"global_load": rows},
            "transpose store": {"shared_store": shared(32, 32)},
            "transpose barrier": {"barrier": issued(8)},
            "transpose load": {"shared_load": shared(32, wavefronts)},
            "transpose global store": {"global_store": rows},
        },
    )


def shared_stride(stride: int, wavefronts: int) -> Case:
    # Words `stride` apart use 32 / gcd(stride, 32) banks, so that gcd(stride, 32) words lie in each
    return Case(
        f"shared_stride_{stride}",
        {
            "shared_stride global load": {"global_load": global_(1, 4)},
            "shared_stride store": {"shared_store": shared(1, wavefronts)},
            "shared_stride sync": {"syncwarp": issued(1)},
            "shared_stride load": {"shared_load": shared(1, wavefronts)},
            "shared_stride global store": {"global_store": global_(1, 4)},
        },
    )


def vectors(name: str, size: int, wavefronts: int, pairs: int) -> Case:
    # Consecutive vectors fill all banks in each part of the warp: as many wavefronts as parts, size / 4. Rows of 128
    # bytes all start in bank 0: a wavefront for each lane of a part, 16 (8 bytes) or 8 (16 bytes). Rows of 144 bytes
    # start 4 banks further each. `pairs`: lanes 2 i and 2 i + 1 read the same vector, and the request takes half as
    # many parts of twice as many lanes, but one at least
    parts = size // 4
    sectors = global_(1, size)
    return Case(
        f"vectors_{name}",
        {
            "vectors global load": {"global_load": sectors},
            "vectors store": {"shared_store": shared(1, wavefronts, ideal=parts)},
            "vectors sync": {"syncwarp": issued(1)},
            "vectors load": {"shared_load": shared(1, wavefronts, ideal=parts)},
            "vectors global store": {"global_store": sectors},
            "vectors pairs": {"shared_load": shared(1, pairs, ideal=max(parts // 2, 1))},
            "vectors second global store": {"global_store": sectors},
        },
    )


def half_column(pitch: int, wavefronts: int) -> Case:
    # Rows of 64 halves are 32 words apart: a column lies in one bank. Rows of 66 halves, 33 words: in all 32.
    # 32 neighbouring halves from the second one on are 17 words; in global memory 64 bytes are 2 sectors
    return Case(
        f"half_column_{pitch}",
        {
            "half_column global load": {"global_load": global_(1, 2)},
            "half_column store": {"shared_store": shared(1, wavefronts)},
            "half_column row": {"shared_store": shared(1, 1)},
            "half_column sync": {"syncwarp": issued(1)},
            "half_column load": {"shared_load": shared(1, wavefronts)},
            "half_column global store": {"global_store": global_(1, 2)},
        },
        dtype=torch.float16,
    )


# 16 rows of 128 bytes, 16 bytes a lane: 128 pieces, 4 requests of 512 bytes (16 sectors). Each quarter of a request is
# one row, and 32 words are all banks: 4 wavefronts
FILL: Expected = {
    "fill": {"global_load": global_(4, 64), "shared_store": shared(4, 16, ideal=16)},
    "fill sync": {"syncwarp": issued(1)},
}


def ldmatrix(pad: int, wavefronts_a_matrix: int) -> Case:
    # A matrix is 8 rows of 16 bytes. 128 bytes apart all lie in the same 4 banks: 8 wavefronts; 144 apart in all: 1
    return Case(
        f"ldmatrix_{pad}",
        {
            **FILL,
            "ldmatrix x4": {"ldmatrix": shared(1, 4 * wavefronts_a_matrix, ideal=4)},
            "ldmatrix x2": {"ldmatrix": shared(1, 2 * wavefronts_a_matrix, lanes=16, ideal=2)},
            "ldmatrix global store": {"global_store": global_(1, 4)},
        },
    )


def accumulator(name: str, requests: int, wavefronts: int) -> Case:
    # Lane l holds row l / 4 and columns 2 (l % 4), + 1. By rows: pairs of columns, so 4 requests of 8 bytes a lane.
    # Half a warp, 4 rows of 8 words, is one wavefront where rows start 8 banks apart (pitch 24), two where they overlap
    # in twos (pitch 16: rows 0 and 2; pitch 20: row 3 in banks 28 to 3), four at pitch 32: 8, 16, 16 and 32 in all. By
    # columns: 8 requests of 4 bytes, of 4 columns, 2 pitches apart, of 8 words each: one wavefront where those start 8
    # banks apart (pitch 20: 0, 8, 16, 24), two at 24 (0, 16, 0, 16), four at 16: 8, 16 and 32 in all. 8 rows of 32
    # bytes in global memory are a sector each, 4 requests
    moved = shared(requests, wavefronts, ideal=8)
    return Case(
        f"accumulator_{name}",
        {
            "accumulator store": {"shared_store": moved},
            "accumulator sync": {"syncwarp": issued(1)},
            "accumulator load": {"shared_load": moved},
            "accumulator global store": {"global_store": global_(4, 32)},
        },
        arguments=("out",),
    )


def operands(pad: int, wavefronts: int) -> Case:
    # From shared memory: one ldmatrix of four matrices, as above. From global memory: 4 requests of 32 bits a lane,
    # each 8 rows of 16 bytes: 8 sectors, of which half is used. One product is two mma.m16n8k16
    return Case(
        f"operands_{pad}",
        {
            **FILL,
            "operands shared": {"ldmatrix": shared(1, wavefronts, ideal=4)},
            "operands global": {"global_load": global_(4, 32, ideal=16)},
            "operands product": {"mma": issued(2)},
            "operands store": {"global_store": global_(4, 32)},
        },
        dtype=torch.float16,
        float_out=True,
    )


CASES = [
    global_stride(1, 4),
    global_stride(2, 8),
    global_stride(8, 32),
    global_stride(33, 32),
    Case(
        "global_shifted",  # 128 bytes from 4 bytes past a sector's start
        {
            "global_shifted load": {"global_load": global_(1, 5, ideal=4)},
            "global_shifted store": {"global_store": global_(1, 4)},
        },
    ),
    Case(
        "global_broadcast",  # 3 blocks of 2 warps
        {
            "global_broadcast load": {"global_load": global_(6, 6)},
            "global_broadcast store": {"global_store": global_(6, 24)},
        },
        arguments=("out", "in", 3),
    ),
    Case(
        "partial_warp",  # 48 threads, n = 40: 32 lanes (4 sectors) and 8 of 16 (1 sector), which part from the other 8
        {
            "partial_warp load": {"global_load": global_(2, 5, lanes=40)},
            "partial_warp store": {"global_store": global_(2, 5, lanes=40)},
        },
        arguments=("out", "in", 40),
        divergent=1,
    ),
    transpose(0, 32 * 32),
    transpose(1, 32),
    shared_stride(1, 1),
    shared_stride(2, 2),
    shared_stride(8, 8),
    shared_stride(16, 16),
    shared_stride(32, 32),
    shared_stride(33, 1),
    vectors("4", 4, 1, 1),
    vectors("8", 8, 2, 1),
    vectors("16", 16, 4, 2),
    vectors("8_by_row", 8, 2 * 16, 16),
    vectors("16_by_row", 16, 4 * 8, 2 * 8),
    vectors("16_by_padded_row", 16, 4, 2),
    Case(
        "shared_broadcast",  # one word: one wavefront. Words 0 and 32, both in bank 0: two
        {
            "shared_broadcast store": {"shared_store": shared(1, 1)},
            "shared_broadcast second store": {"shared_store": shared(1, 1)},
            "shared_broadcast sync": {"syncwarp": issued(1)},
            "shared_broadcast one": {"shared_load": shared(1, 1)},
            "shared_broadcast two": {"shared_load": shared(1, 2)},
            "shared_broadcast global store": {"global_store": global_(1, 4)},
        },
        arguments=("out", 5),
    ),
    half_column(64, 32),
    half_column(66, 1),
    Case(
        "divergent_loop",  # rounds 0, 1, 2 are made by 24, 16 and 8 lanes; before each, 8 lanes part from them
        {
            "divergent_loop store": {"shared_store": shared(3, 3)},
            "divergent_loop sync": {"syncwarp": issued(1)},
            "divergent_loop load": {"shared_load": shared(3, 3, lanes=24 + 16 + 8)},
            "divergent_loop global store": {"global_store": global_(1, 4)},
        },
        arguments=("out",),
        divergent=3,
    ),
    Case(
        "divergent_branch",  # 4 rounds each way. Odd lanes: every second word of 128 bytes, in 4 sectors instead of 2.
        # Even lanes 2 l: every fourth word, 16 words in 8 sectors
        {
            "divergent_branch load": {"global_load": global_(1, 4)},
            "divergent_branch odd": {"global_load": global_(4, 16, lanes=64, ideal=8)},
            "divergent_branch even": {"global_load": global_(4, 32, lanes=64, ideal=8)},
            "divergent_branch store": {"global_store": global_(1, 4)},
        },
        arguments=("out", "in", 4),
        divergent=1,
    ),
    Case(
        "uniform_branch",  # 2 warps, of which one goes in for 4 rounds, all its lanes
        {
            "uniform_branch load": {"global_load": global_(2, 8)},
            "uniform_branch one warp": {"global_load": global_(4, 16)},
            "uniform_branch store": {"global_store": global_(2, 8)},
        },
        arguments=("out", "in", 4),
    ),
    ldmatrix(0, 8),
    ldmatrix(8, 1),
    accumulator("rows_16", 4, 16),
    accumulator("rows_20", 4, 16),
    accumulator("rows_24", 4, 8),
    accumulator("rows_32", 4, 32),
    accumulator("columns_16", 8, 32),
    accumulator("columns_20", 8, 8),
    accumulator("columns_24", 8, 16),
    operands(0, 32),
    operands(8, 4),
    Case(
        "products",  # 2 warps x 3 rounds; two words a lane are loaded
        {
            "products load": {"global_load": global_(4, 16)},
            "products m16n8k8": {"mma": issued(6)},
            "products m16n8k16 half": {"mma": issued(6)},
            "products m16n8k16 bfloat16": {"mma": issued(6)},
            "products store": {"global_store": global_(2, 8)},
        },
        arguments=("out", "in", 3),
        dtype=torch.int32,
        float_out=True,
    ),
    Case(
        "async_copy",  # 512 bytes: 16 sectors read, 4 wavefronts written
        {
            "async_copy": {"async_load": global_(1, 16), "async_copy": shared(1, 4, ideal=4)},
            "async_copy sync": {"syncwarp": issued(1)},
            "async_copy load": {"shared_load": shared(1, 1)},
            "async_copy store": {"global_store": global_(1, 4)},
        },
    ),
    Case(
        "atomics",
        {
            "atomics load": {"global_load": global_(1, 4)},
            "atomics store": {"shared_store": shared(1, 1)},
            "atomics sync": {"syncwarp": issued(1)},
            "atomics shared": {"atomic": shared(1, 1)},
            "atomics second sync": {"syncwarp": issued(1)},
            "atomics shared load": {"shared_load": shared(1, 1)},
            "atomics global": {"atomic": global_(1, 4)},
        },
        dtype=torch.int32,
    ),
    Case(
        "shuffles",  # 2 warps: 5 shuffles of a float each, then one of a double, which is two
        {
            "shuffles load": {"global_load": global_(2, 8)},
            "shuffles xor": {"shuffle": issued(10)},
            "shuffles double": {"shuffle": issued(4)},
            "shuffles vote": {"vote": issued(2)},
            "shuffles store": {"global_store": global_(2, 8)},
        },
    ),
    Case(
        "named_barriers",  # one warp arrives, the other waits; then both
        {
            "named_barriers global load": {"global_load": global_(1, 4)},
            "named_barriers store": {"shared_store": shared(1, 1)},
            "named_barriers arrive": {"barrier": issued(1)},
            "named_barriers sync": {"barrier": issued(1)},
            "named_barriers load": {"shared_load": shared(1, 1)},
            "named_barriers global store": {"global_store": global_(1, 4)},
            "named_barriers all": {"barrier": issued(2)},
        },
    ),
    Case(
        "exponentials",  # 2 warps x 2
        {
            "exponentials load": {"global_load": global_(2, 8)},
            "exponentials": {"exp2": issued(4)},
            "exponentials store": {"global_store": global_(2, 8)},
        },
    ),
]


@pytest.fixture(scope="module")
def micro() -> Program:
    return Program(SOURCE)


@pytest.fixture(scope="module")
def lines() -> dict[str, int]:
    return marked_lines(SOURCE, "count")


def counts(program: Program, case: Case) -> list[dict[str, Any]]:
    tensors = {
        "in": torch.arange(4096).remainder(100).to(case.dtype),
        "out": torch.zeros(4096, dtype=torch.float32 if case.float_out else case.dtype),
    }
    arguments = [tensors[a] if isinstance(a, str) else a for a in case.arguments]
    (launch,) = json.loads(program.counts(case.entry, *arguments))
    rows: list[dict[str, Any]] = launch["counts"]
    return rows


@pytest.mark.parametrize("case", CASES, ids=[case.entry for case in CASES])
def test_counts(micro: Program, lines: dict[str, int], case: Case) -> None:
    rows = counts(micro, case)
    fields = ("instructions", "lanes", "wavefronts", "ideal_wavefronts", "sectors", "ideal_sectors")
    measured = {
        (row["line"], row["what"]): {field: row[field] for field in fields if row[field]}
        for row in rows
        if row["what"] != "basic_block"
    }
    assert measured == {
        (f"{SOURCE}:{lines[label]}", what): count
        for label, whats in case.expected.items()
        for what, count in whats.items()
    }
    assert sum(row["divergent"] for row in rows) == case.divergent


def test_every_mark_is_of_a_case(lines: dict[str, int]) -> None:
    tested = {label for case in CASES for label in case.expected}
    assert tested == {label for label in lines if not label.startswith("block_sum")}


def test_blocks_on_several_threads_add_up(micro: Program) -> None:
    tensors = torch.zeros(4096), torch.arange(4096.0)
    launches = []
    for threads in (1, 3):
        with settings(threads=threads):
            launches += json.loads(micro.counts("global_broadcast", *tensors, 48))
    one, three = launches
    (load,) = (row for row in one["counts"] if row["what"] == "global_load")
    assert load["instructions"] == 2 * 48
    assert one["grid"] == [48, 1, 1]
    assert one["warps"] == 96
    for launch in launches:
        for row in launch["counts"]:
            row.pop("worst", None)  # one of several that are equally bad
    assert one["counts"] == three["counts"]


def test_worst_request(micro: Program) -> None:
    """What plots of banks draw: where each lane's word lies."""
    rows = counts(micro, shared_stride(16, 16))
    (load,) = (row for row in rows if row["what"] == "shared_load")
    addresses = load["worst"]["addresses"][:32]
    assert addresses == [(31 - lane) * 64 for lane in range(32)]
    assert {address // 4 % 32 for address in addresses} == {0, 16}


@pytest.mark.parametrize("warp_size", [32, 64])
def test_warp_size(micro: Program, lines: dict[str, int], warp_size: int) -> None:
    """A warp of 64, as on AMD's CDNA: half as many warps, one more step of shuffles."""
    x, out = torch.arange(256.0), torch.zeros(64)
    for seed in range(3):
        with settings(warp_size=warp_size, seed=seed):
            (launch,) = json.loads(micro.counts("block_sum", out, x))
        assert out[:2].tolist() == [256 * 255 / 2, warp_size]
        assert launch["warps"] == 256 // warp_size
        warps, steps = 256 // warp_size, {32: 5, 64: 6}[warp_size]
        measured = {row["what"]: (row["line"], row["instructions"]) for row in launch["counts"]}
        assert measured["shuffle"] == (f"{SOURCE}:{lines['block_sum shuffle']}", steps * warps)
        assert measured["barrier"] == (f"{SOURCE}:{lines['block_sum barrier']}", warps)
