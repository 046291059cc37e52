"""The training benchmark: its file, and what it says to wrong arguments."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmark"))
training = importlib.import_module("training")
training_report = importlib.import_module("training_report")
host_cost = importlib.import_module("host_cost")

SMALL = ["--batch_size=1", "--seq_len=32", "--num_heads=2", "--emb_dim=32", "--repeats=2", "--dtype=fp32"]
KEYS = ["forward", "backward", "forward_backward", "peak_memory_usage(MB)"]


@pytest.mark.parametrize("implementation", ["Pytorch", "Flash2", "SDPA"])
def test_file(tmp_path: Path, implementation: str) -> None:
    file = tmp_path / "result.json"
    assert training.main([*SMALL, "--impl", implementation, "--causal", "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    assert list(result) == KEYS
    times = {name: result[name]["time(s)"] for name in KEYS[:3]}
    assert times["forward_backward"] == times["forward"] + times["backward"]
    for name, share in (("forward", 1), ("backward", 2.5), ("forward_backward", 3.5)):
        assert list(result[name]) == ["time(s)", "FLOPS(TFLOPs/s)"]
        flops = 4 * 32**2 * 32 / 2 * share
        assert result[name]["FLOPS(TFLOPs/s)"] == pytest.approx(flops / times[name] / 1e12)
    assert result["peak_memory_usage(MB)"] > 0


def test_implementations_agree() -> None:
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in "qkv")
    plain, *others = (attend(q, k, v, True) for attend in training.IMPLEMENTATIONS.values())
    for other in others:
        torch.testing.assert_close(other, plain)


def test_out_of_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 1 PiB")

    monkeypatch.setitem(training.IMPLEMENTATIONS, "SDPA", fail)
    assert training.main([*SMALL, "--impl=SDPA"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert list(result) == [*KEYS, "error"]
    assert result["backward"] == {"time(s)": None, "FLOPS(TFLOPs/s)": None}
    assert "1 PiB" in result["error"]


def test_out_of_the_cpus_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """For which torch has no exception of its own: the score matrix of three million rows."""
    assert training.main([*SMALL, "--impl=Pytorch", "--seq_len=3000000", "--num_heads=1", "--emb_dim=1"]) == 1
    assert json.loads(capsys.readouterr().out)["error"].startswith("out of memory: ")


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setitem(training.IMPLEMENTATIONS, "SDPA", fail)
    with pytest.raises(RuntimeError, match="something else"):
        training.main([*SMALL, "--impl=SDPA"])


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_backend_of_sdpa(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert training.main([*SMALL, "--impl=SDPA", f"--sdpa_backend={backend}"]) == 0
    printed = capsys.readouterr()
    assert list(json.loads(printed.out)) == KEYS
    assert printed.err == f"training: SDPA ran its backend {backend}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output=/"], "--output: / cannot be written: Is a directory"),
        (["--impl=Flash2", "--sdpa_backend=flash"], "--sdpa_backend: got flash with --impl Flash2, allowed: with SDPA"),
        (["--repeats=many"], "--repeats: invalid positive value: 'many'"),
        (["--emb_dim=33"], "--emb_dim: got 33, allowed: a multiple of --num_heads, 2"),
        (["--seq_len=0"], "--seq_len: got 0, allowed: 1 and more"),
        (["--output=/nowhere/file"], "--output: /nowhere/file cannot be written: No such file"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.main([*SMALL, *arguments])
    assert message in capsys.readouterr().err


# ---- The report ------------------------------------------------------------------------------------------------------


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A process each, resumed, drawn, and drawn again from its file; an eager configuration runs out of memory."""
    centre = training_report.Configuration(1, 32, 2, 32, True, 2)
    grid = training_report.Grid(
        centre,
        {"causal": (False, True)},
        [training_report.Configuration(1, n, 1, 1, True, 1) for n in (32, 3000000)],
    )
    monkeypatch.setattr(training_report, "TINY", grid)
    # Flash2's name, eager's speed and memory
    monkeypatch.setitem(training_report.CONTENDERS, "Flash2", ["--impl=Pytorch"])
    file = tmp_path / "training.json"
    call = ["--tiny", "--dtype=fp32", "--rounds=2", "--contenders", "Flash2", "--json", str(file)]
    assert training_report.main(call) == 0
    written = json.loads(file.read_text())
    entries = written["entries"]
    assert [entry["configuration"]["seq_len"] for entry in entries] == [32, 32, 32, 3000000]
    assert [len(entry["results"]["Flash2"]) for entry in entries] == [2, 1, 1, 1], "the centre has two rounds"
    assert list(entries[0]["results"]["Flash2"][0]) == KEYS
    assert entries[3]["results"]["Flash2"][0]["error"].startswith("out of memory")

    file.write_text(json.dumps({**written, "entries": entries[:2]}))
    assert training_report.main([*call, "--resume"]) == 0
    again = json.loads(file.read_text())["entries"]
    assert again[:2] == entries[:2]
    assert len(again) == 4

    file.write_text(json.dumps({**written, "environment": ["elsewhere"]}))
    with pytest.raises(SystemExit):
        training_report.main([*call, "--resume"])
    file.write_text(json.dumps(written))
    capsys.readouterr()
    assert training_report.main(["--tiny", "--from", str(file), "--plots", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("| 1 |") == 4
    assert all((tmp_path / name).stat().st_size > 0 for name in ("training_speed.png", "training_memory.png"))


def test_report_says_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that ends without a result."""
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    result = training_report.measured(context, ["--seq_len=0"], tmp_path)
    assert result["error"].startswith("exit status 2 ")
    assert "--seq_len: got 0" in result["error"]


def test_turns_rotate() -> None:
    plan = list(training_report.rounds(training_report.FULL, ["a", "b", "c"], 3))
    assert [order[0] for _, order in plan[:4]] == ["a", "b", "c", "a"]
    assert [c for c, _ in plan[:3]] == [training_report.FULL.centre] * 3
    assert plan[3][0] != training_report.FULL.centre
    assert all(sorted(order) == ["a", "b", "c"] for _, order in plan)


def test_published_results() -> None:
    """docs/data/training.json is a whole result, and the analysis has its figures."""
    docs = Path(__file__).resolve().parents[1] / "docs"
    written = json.loads((docs / "data" / "training.json").read_text())
    results = training_report.from_json(written["entries"])
    grid = training_report.FULL
    assert set(results) >= set(grid.configurations()) - set(grid.growing)
    text = (docs / "training.md").read_text()
    for table in training_report.tables(grid, results)[:1]:
        for row in table.rows:
            for figure in row[9:]:  # ratios and memory
                assert figure in (training_report.report.ABSENT, *text.replace("|", " ").split()), row
    for c, each in results.items():  # the formula of "Memory", in MB
        expected = (20 * c.batch_size * c.seq_len * c.emb_dim + 4 * c.batch_size * c.seq_len * c.num_heads) / 2**20
        assert abs(each["Flash2"][0]["peak_memory_usage(MB)"] - expected) < 0.01


def test_host_cost(tmp_path: Path) -> None:
    file, threads = tmp_path / "host.json", torch.get_num_threads()
    try:
        assert host_cost.main(["--device=cpu", "--rounds=2", "--calls=2", "--json", str(file)]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(file.read_text())["rows"]
    assert list(rows) == list(host_cost.ROWS)
    for row in rows.values():
        assert list(row) == ["flash_wmma", "flash_wmma, SDPA's form", "sdpa"]
        assert row["sdpa"]["over sdpa"] == 1
        assert all(each["us"] > 0 for each in row.values())
