"""benchmark/ncu.py: how it reads what Nsight Compute writes, and what it says where it cannot run."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "benchmark" / "ncu.py"
sys.path.insert(0, str(SCRIPT.parent))
ncu = importlib.import_module("ncu")
profilers = importlib.import_module("harness.profilers")
CSV = """\
==PROF== Connected to process 1
==PROF== Profiling "wmma_v2" - 0: 0%....50%....100% - 1 pass
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","python","host","convert(float)","1","7","(32, 1, 1)","(8, 1, 1)","0","9.0","",\
"gpu__time_duration.sum","ns","1,500"
"1","1","python","host","wmma_v2(T1, P)","1","7","(32, 1, 1)","(8, 1, 1)","0","9.0","",\
"gpu__time_duration.sum","ns","23,040"
"1","1","python","host","wmma_v2(T1, P)","1","7","(32, 1, 1)","(8, 1, 1)","0","9.0","",\
"l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","request","576"
"1","1","python","host","wmma_v2(T1, P)","1","7","(32, 1, 1)","(8, 1, 1)","0","9.0","",\
"l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","9,216"
"1","1","python","host","wmma_v2(T1, P)","1","7","(32, 1, 1)","(8, 1, 1)","0","9.0","",\
"sm__inst_executed_pipe_tensor.sum","inst","n/a"
"""


def test_parse() -> None:
    (first, conversion), (second, attention) = profilers.parse_ncu(CSV, ncu.METRICS)
    assert (first, second) == ("convert(float)", "wmma_v2(T1, P)")
    assert conversion == {"duration": 1500}
    assert attention == {"duration": 23040, "requests_load": 576, "sectors_load": 9216}
    shown = dict(ncu.table(attention))
    assert shown["duration"] == "23.04 µs"
    assert shown["global sectors per request, load"].startswith("16.00")
    assert shown["tensor pipe, instructions"] == "n/a"
    assert profilers.parse_ncu("==ERROR== nothing\n", ncu.METRICS) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it does without a GPU")
def test_says_that_there_is_no_gpu() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "wmma_v2"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "sees no GPU" in done.stderr
