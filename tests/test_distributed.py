"""Ring and Ulysses attention: the plan by itself, and several processes on the CPU (ranks.py) against one."""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.multiprocessing

import flash_wmma
from flash_wmma.distributed import _layout
from flash_wmma.distributed._layout import LAYOUTS, Cut, Layout
from flash_wmma.distributed._plan import ALIGNED, PLAIN, Band, distances, most_rows, pair

ROOT = Path(__file__).resolve().parent.parent
WORLDS = (1, 2, 3, 4)
TIMEOUT = 4.0
"""Of a process group that loses a rank, in seconds."""


def start(function: Any, *arguments: object, processes: int, join: bool = True) -> Any:
    """Processes that are forked from one that has imported torch, and has no threads."""
    multiprocessing.set_forkserver_preload(["torch", "flash_wmma", "flash_wmma.distributed"])
    return torch.multiprocessing.start_processes(
        function, arguments, nprocs=processes, join=join, start_method="forkserver"
    )


# ---------------------------------------------------------------------------------------------------- without processes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("n", [0, 1, 3, 8, 29])
def test_each_row_is_on_one_rank(world: int, n: int, layout: Layout) -> None:
    cut = Cut(world, layout)
    held = [i for rank in range(world) for begin, end in _layout.pieces(n, cut, rank) for i in range(begin, end)]
    assert sorted(held) == list(range(n))
    assert held == list(range(n)) or layout == "zigzag"
    order = _layout.order((n,), cut).tolist()
    assert [held[i] for i in order] == list(range(n))


@pytest.mark.parametrize("world", WORLDS)
def test_causal_work_is_balanced(world: int) -> None:
    """Scores of each rank, and calls of a kernel: one for each rank whose keys are seen."""
    n, cut = 24 * world, Cut(world)
    work = []
    for rank in range(world):
        places = _layout.positions((n,), cut, rank)
        work.append(int((places + 1).sum()))
        for source in range(world):
            found = pair(((n, n),), cut, rank, source, Band(None, 0))
            assert len(found.jobs) == 1
            assert found.once
            plain = found.jobs[0].left < 0 and found.jobs[0].right < 0
            assert plain == (source != rank)
            assert found.rows == (12 if source < rank else 24)
    assert max(work) == min(work)


@pytest.mark.parametrize("world", WORLDS)
def test_a_window_has_two_calls_where_rows_are_contiguous(world: int) -> None:
    """One with a rank's own keys, and one with keys of the rank before, of which as many are sent as the window has."""
    n, cut = 24 * world, Cut(world, "contiguous")
    band = Band(10, 0)
    for rank in range(world):
        for source in range(world):
            found = pair(((n, n),), cut, rank, source, band)
            assert len(found.jobs) == (source in (rank, rank - 1))
            assert found.rows == {rank: 24, rank - 1: 10}.get(source, 0)
            assert found.once
    assert most_rows(((n, n),), cut, band) == (10, 10)
    assert distances(((n, n),), cut, band) == tuple(range(min(world, 2)))


def random_band(rng: random.Random) -> Band:
    left, right = rng.choice([None, None, 0, 1, 3, 8]), rng.choice([None, 0, 0, 0, 2, 5])
    return Band(left, right, rng.random() < 0.5, rng.random() < 0.4)


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_has_every_score_once(seed: int) -> None:
    """Random lengths and bands, with the kernels' own reading of a band and of ALiBi."""
    rng = random.Random(seed)
    for _ in range(100):
        cut, band = Cut(rng.randint(1, 4), rng.choice(LAYOUTS)), random_band(rng)
        each = [rng.randint(0, 24) for _ in range(rng.randint(1, 3))]
        lengths = tuple((n, n if rng.random() < 0.6 else rng.randint(0, 20)) for n in each)
        for rank in range(cut.world):
            check_plan(lengths, cut, rank, band)


Score = tuple[tuple[int, int], tuple[int, int]]
"""A query and a key, each a sequence and a place in it."""


def check_plan(lengths: tuple[tuple[int, int], ...], cut: Cut, rank: int, band: Band) -> None:
    """Of all calls of a rank."""
    seen: set[Score] = set()
    for n in distances(lengths, cut, band):
        more = scores_of_pair(lengths, cut, rank, (rank - n) % cut.world, band)
        assert not seen & more
        seen |= more

    def visible(query: tuple[int, int], key: tuple[int, int]) -> bool:
        nq, nk = lengths[query[0]]
        place = query[1] + (nk - nq if band.bottom_right else 0)
        behind = band.left is None or key[1] >= place - band.left
        return query[0] == key[0] and behind and (band.right is None or key[1] <= place + band.right)

    queries = [(s, i) for s, (nq, _) in enumerate(lengths) for i in _layout.positions((nq,), cut, rank).tolist()]
    keys = [(s, j) for s, (_, nk) in enumerate(lengths) for j in range(nk)]
    assert seen == {(query, key) for query in queries for key in keys if visible(query, key)}


def scores_of_pair(lengths: tuple[tuple[int, int], ...], cut: Cut, rank: int, source: int, band: Band) -> set[Score]:
    """Those of the calls with the keys of one rank."""
    found = pair(lengths, cut, rank, source, band)
    if rank != source:
        keys_of_one, gradients = most_rows(lengths, cut, band)
        assert found.rows <= keys_of_one
        assert found.rows * (1 if found.once else 2) <= gradients
    queries = [(s, i) for s, (nq, _) in enumerate(lengths) for i in _layout.positions((nq,), cut, rank).tolist()]
    keys = [(s, j) for s, (_, nk) in enumerate(lengths) for j in _layout.positions((nk,), cut, source).tolist()]
    message = [keys[row] for begin, end in found.message for row in range(begin, end)]
    assert len(message) == found.rows
    seen = set()
    for tile in (tile for job in found.jobs for tile in job.tiles):
        nq, nk = lengths[tile.sequence]
        of_tile = message[tile.k0 : tile.k1]
        last = tile.keys - (tile.q1 - tile.q0)
        for i in range(tile.q1 - tile.q0):
            for j in range(tile.keys):
                if (tile.left >= 0 and j < i - tile.left) or (tile.right >= 0 and j > i + tile.right):
                    continue
                query, key = queries[tile.q0 + i], of_tile[j]
                assert query[0] == key[0] == tile.sequence
                assert (query, key) not in seen
                seen.add((query, key))
                distance = query[1] + nk - nq - key[1]
                if tile.side == ALIGNED:
                    assert abs(i + last - j) == abs(distance)
                elif tile.side != PLAIN:
                    assert distance * tile.side >= 0
                assert band.alibi == (tile.side != PLAIN)
    for job in found.jobs:
        assert len({tile.sequence for tile in job.tiles}) == len(job.tiles)
        rows = [row for begin, end in job.q for row in range(begin, end)]
        assert rows == [row for tile in job.tiles for row in range(tile.q0, tile.q1)]
        keys = [row for begin, end in job.k for row in range(begin, end)]
        assert keys == [row for tile in job.tiles for row in range(tile.k0, tile.k1)]
    return seen


def test_without_a_process_group() -> None:
    x = torch.zeros(1, 1, 4, 8)
    for call in (flash_wmma.distributed.ring_attention, flash_wmma.distributed.ulysses_attention):
        with pytest.raises(RuntimeError, match=r"torch.distributed is not initialised: call torch.distributed.init"):
            call(x, x, x)


def test_it_is_imported_when_it_is_used() -> None:
    """The import of the library does not wait for it."""
    program = """
import sys, torch, flash_wmma
assert not [name for name in sys.modules if name.startswith("flash_wmma.distributed")]
assert flash_wmma.distributed.__name__ in sys.modules
assert dir(flash_wmma.distributed) == sorted(flash_wmma.distributed.__all__)
try:
    flash_wmma.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------- with processes


def check_ranks(world: int, device: str = "cpu") -> None:
    """Every case of ranks.py, in processes that are started once."""
    cases = ranks.CASES if device == "cpu" else ranks.GPU_CASES
    with tempfile.TemporaryDirectory() as folder:
        start(ranks.run_cases, world, folder, device, processes=world)
        results = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(world)]
    assert all(list(each) == list(cases) for each in results)
    wrong = [f"{case}, rank {rank}: {each[case]}" for case in cases for rank, each in enumerate(results) if each[case]]
    assert not wrong, "\n".join(wrong)


def test_one_rank() -> None:
    check_ranks(1)


def test_two_ranks() -> None:
    check_ranks(2)


def test_three_ranks() -> None:
    """With the random calls."""
    check_ranks(3)


def test_four_ranks() -> None:
    check_ranks(4)


def test_benchmark(tmp_path: Path) -> None:
    """A dry run on the CPU; without ranks it says how to start it."""
    program = [sys.executable, ROOT / "benchmark" / "ring.py"]
    sizes = ["--device=cpu", "--dtype=fp32", "--tokens=64", "--heads=4", "--heads-kv=2", "--head-dim=16", "--repeats=1"]
    file = tmp_path / "ring.json"
    done = subprocess.run(
        [*program, "--processes=2", *sizes, "--json", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["world"] == 2
    assert set(row["errors"]) == {"ring", "ulysses"}
    assert max(row["errors"].values()) < 1e-4
    assert len(row["median_ms"]) == 6
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert "torchrun" in done.stderr


def test_shares_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The FLOPs that it counts are those of the mask."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    ring = importlib.import_module("ring")
    for n, causal, window in itertools.product((1, 7, 40), (True, False), (None, 1, 5, 100)):
        i, j = torch.arange(n)[:, None], torch.arange(n)
        seen = torch.ones(n, n, dtype=torch.bool)
        if causal:
            seen &= j <= i
        if window is not None:
            seen &= (i - j).abs() <= window
        sizes = ring.Sizes(n, 1, 1, 8, causal, window, "zigzag")
        assert sizes.pairs(n) == int(seen.sum()), (n, causal, window)
    assert abs(ring.Sizes(8192, 32, 8, 128, True, None, "zigzag").length_alone(4) - 16384) <= ring.STEP


@pytest.mark.parametrize("how", ["killed", "raised", "refused"])
def test_a_lost_rank_ends_the_others(how: str, tmp_path: Path) -> None:
    """Within the group's timeout: one that is killed, one whose call raised and that answers no more, and one whose
    arguments are wrong, which is told so."""
    processes = start(ranks.lose_one, 3, str(tmp_path), how, TIMEOUT, processes=3, join=False)
    for process in processes.processes:
        process.join(60)
        assert process.exitcode is not None, "a rank hangs"
    for rank in (0, 2):
        error, took = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert error.startswith(("RuntimeError", "DistBackendError", "DistNetworkError")), error
        assert took < 2 * TIMEOUT + 2, f"{took} s"
    own = {"raised": "MemoryError: no memory left", "refused": "ValueError: q.dtype: got torch.float64"}
    if how in own:
        assert json.loads((tmp_path / "rank1.json").read_text())[0].startswith(own[how])


# ------------------------------------------------------------------------------------------------------- with GPUs

GPUS = torch.cuda.device_count()
PEER_COPIES = pytest.mark.parametrize("peer_copies", ["1", "0"])
"""Messages by copy engines, or by NCCL."""


@pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} GPUs")
@PEER_COPIES
def test_on_gpus(peer_copies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_WMMA_PEER_COPIES", peer_copies)
    check_ranks(min(GPUS, 4), "cuda")


@pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} GPUs")
@PEER_COPIES
@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_lost_rank_ends_the_others_on_gpus(
    how: str, peer_copies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error, or NCCL's watchdog, within the group's timeout and some seconds until the watchdog looks."""
    monkeypatch.setenv("FLASH_WMMA_PEER_COPIES", peer_copies)
    timeout = 10.0
    begin = time.monotonic()
    processes = start(ranks.lose_one, 2, str(tmp_path), how, timeout, "cuda", processes=2, join=False)
    process = processes.processes[0]
    process.join(90)
    took = time.monotonic() - begin
    assert process.exitcode is not None, "rank 0 hangs"
    found = tmp_path / "rank0.json"
    ended = json.loads(found.read_text())[0] if found.exists() else f"exit code {process.exitcode}"
    assert ended not in ("no error", "exit code 0")
    assert took < 2 * timeout + 40, f"{ended} after {took} s"
    for each in processes.processes:
        each.kill()
