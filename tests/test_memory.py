"""benchmark/memory.py: the worked example, op by op, and what its tracker counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))
import memory

SHAPE = (1, 2, 128, 16)
Records = dict[str, memory.Record]


@pytest.fixture(scope="module")
def records() -> Records:
    return memory.measured(torch.device("cpu"), SHAPE, torch.float32)[1]


def test_worked_example(records: Records) -> None:
    """Op by op: 4 buffers in forward, with 6 reads and 5 writes; 6 in backward, 5 of them the division's."""
    record = records["op by op"]
    assert record.most_alive("forward") == 4
    assert record.total("forward", "square_reads") == 6
    assert record.total("forward", "square_writes") == 5
    assert record.most_alive("backward") == 6
    assert record.most_in_a_node() == ("DivBackward0", 5)


def test_steps_of_the_worked_example(records: Records) -> None:
    forward = [(op.name, op.square_reads, op.square_writes) for op in records["op by op"].of("forward")]
    assert forward == [
        ("bmm", 0, 1),
        ("mul", 1, 1),
        ("masked_fill", 1, 1),
        ("exp", 1, 1),
        ("sum", 1, 0),
        ("div", 1, 1),
        ("bmm", 1, 0),
    ]


def test_bytes(records: Records) -> None:
    """Of the first product: q and k in, the scores out."""
    batch, heads, n, d = SHAPE
    first = records["op by op"].ops[0]
    assert first.read_bytes == 2 * batch * heads * n * d * 4
    assert first.written_bytes == batch * heads * n * n * 4
    assert records["explicit"].ops[1].name == "mul_"
    assert records["explicit"].ops[1].written_bytes == first.written_bytes


def test_what_the_others_hold(records: Records) -> None:
    square = SHAPE[0] * SHAPE[1] * SHAPE[2] ** 2 * 4
    assert records["explicit"].most_alive("forward") == records["explicit"].most_alive("backward") == 2
    for name in ("unfused", "flash_wmma"):
        assert records[name].most_alive("forward") == records[name].most_alive("backward") == 0
    assert records["unfused"].peak_bytes("forward") >= square  # S, in the op's workspace
    assert records["flash_wmma"].peak_bytes("forward") < square
    assert records["op by op"].peak_bytes("backward") >= 6 * square


def test_buffers_end_when_their_storage_does() -> None:
    with memory.Recorder(16, torch.device("cpu")) as recorder:
        a = torch.ones(4, 4)
        b = a.t() + 1  # a is held by a variable, through a view too
        view = a[:2]
        del a
        c = b * 2
        del view
        d = c.add_(b)  # in place: nothing is made
        e = d.sum(0).expand(4, 4) * 1  # a broadcast row is no square buffer
        assert e.shape == (4, 4)
    counts = [(op.name, op.square_reads, op.square_writes, len(op.alive)) for op in recorder.record.ops]
    assert counts == [
        ("ones", 0, 1, 1),
        ("add", 1, 1, 2),
        ("mul", 1, 1, 3),
        ("add_", 2, 1, 2),
        ("sum", 1, 0, 2),
        ("mul", 0, 1, 3),
    ]


def test_history() -> None:
    """The most blocks of the size that lived at a time, whatever else is in the record."""
    events = [
        {"action": action, "size": size}
        for action, size in (
            ("segment_alloc", 1024),
            ("alloc", 1024),
            ("alloc", 512),
            ("alloc", 1000),
            ("free_requested", 1024),
            ("free_completed", 1024),
            ("alloc", 1024),
            ("alloc", 1024),
            ("free_completed", 1000),
        )
    ]
    assert memory.most_in_history(events, 1000, 1024) == 3


def test_cpu_peaks() -> None:
    """A workspace that is gone when an op ends counts; what lies between two ops is before the second."""
    ops = [memory.Op("", "forward", "", 0, 0, 0, 0, [], [], 0, begin, begin + 10) for begin in (100, 200)]
    memory.set_cpu_peaks(ops, [(101, 64), (105, 1000), (108, -1000), (150, 8), (205, 32)])
    assert [op.peak_bytes for op in ops] == [1064, 104]


def test_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    saved, drawn = tmp_path / "memory.json", tmp_path / "memory.png"
    command = ["memory.py", "--device", "cpu", "--shape", "1,1,32,8", "--json", str(saved)]
    monkeypatch.setattr(sys, "argv", command)
    memory.main()
    first = capsys.readouterr().out
    assert "DivBackward0: 5" in first
    monkeypatch.setattr(sys, "argv", ["memory.py", "--from", str(saved), "--plot", str(drawn)])
    memory.main()
    assert capsys.readouterr().out == first
    assert drawn.stat().st_size > 10_000


def test_committed_records_have_the_worked_example() -> None:
    path = Path(__file__).resolve().parent.parent / "docs" / "data" / "memory_h200.json"
    text = json.loads(path.read_text())
    record = memory.Record([memory.Op(**op) for op in text["records"]["op by op"]["ops"]])
    assert (record.most_alive("forward"), record.most_alive("backward")) == (4, 6)
    assert text["records"]["op by op"]["history_squares"] == 6
