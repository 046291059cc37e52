#!/usr/bin/env python3
"""The emulator's counters beside Nsight Compute's, launch by launch.

    python benchmark/calibrate.py measure gpu.json    on a machine with a GPU and ncu
    python benchmark/calibrate.py compare gpu.json    anywhere: runs the same launches in the emulator, prints a table

The launches are those of the kernels and of the micro-kernels in tests/emulator/micro.cu. For the micro-kernels
``measure`` takes the folder with micro.so, which nvcc makes of that file anywhere:

    nvcc -std=c++20 -Icsrc -Icsrc/device -shared -Xcompiler -fPIC -gencode arch=compute_90,code=sm_90 \\
        -o FOLDER/micro.so tests/emulator/micro.cu
    python benchmark/calibrate.py measure gpu.json --programs FOLDER
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import flash_wmma
from flash_wmma import emulator
from flash_wmma.emulator._program import argument_of, call_entry
from flash_wmma.emulator._runtime import take_profile
from harness.profilers import parse_ncu
from harness.report import ABSENT, Table

ROOT = Path(__file__).resolve().parent.parent
MICRO = ROOT / "tests" / "emulator" / "micro.cu"

Counts = dict[str, float]


class Metric(NamedTuple):
    """One figure, of the GPU and of the emulator."""

    ncu: str
    classes: tuple[str, ...]  # in the emulator's counts
    field: str


_T, _WAVEFRONTS = (
    "l1tex__t_{}_pipe_lsu_mem_global_op_{}.sum",
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{}.sum",
)
METRICS = {
    "shared load requests": Metric("smsp__sass_inst_executed_op_shared_ld.sum", ("shared_load",), "instructions"),
    "shared load wavefronts": Metric(_WAVEFRONTS.format("ld"), ("shared_load",), "wavefronts"),
    "shared store requests": Metric("smsp__sass_inst_executed_op_shared_st.sum", ("shared_store",), "instructions"),
    "shared store wavefronts": Metric(_WAVEFRONTS.format("st"), ("shared_store",), "wavefronts"),
    "ldmatrix requests": Metric("smsp__sass_inst_executed_op_ldsm.sum", ("ldmatrix",), "instructions"),
    "ldmatrix wavefronts": Metric(_WAVEFRONTS.format("ldsm"), ("ldmatrix",), "wavefronts"),
    "global load requests": Metric(_T.format("requests", "ld"), ("global_load", "async_load"), "instructions"),
    "global load sectors": Metric(_T.format("sectors", "ld"), ("global_load", "async_load"), "sectors"),
    "global store requests": Metric(_T.format("requests", "st"), ("global_store",), "instructions"),
    "global store sectors": Metric(_T.format("sectors", "st"), ("global_store",), "sectors"),
    "MMA": Metric("sm__inst_executed_pipe_tensor_op_hmma.sum", ("mma",), "instructions"),
    "divergent branches": Metric("smsp__sass_branch_targets_threads_divergent.sum", ("basic_block",), "divergent"),
}


class Case(NamedTuple):
    """One call of ``forward`` on (1, 1, n, d)."""

    kernel: str
    dtype: str
    n: int
    d: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.kernel} {self.dtype} N={self.n} d={self.d}{' causal' if self.causal else ''}"


CASES = (
    Case("simt_naive", "float32", 200, 64, True),
    Case("simt_coalesced", "float32", 200, 64, True),
    Case("simt_block", "float32", 200, 64, True),
    Case("simt_shared", "float32", 200, 64, True),
    Case("simt_padded", "float32", 200, 64, True),
    Case("simt_padded", "float32", 256, 128, False),
    Case("simt_occupancy", "float32", 200, 64, True),
    Case("simt_registers", "float32", 200, 64, True),
    Case("simt", "float32", 256, 64, False),
    Case("simt", "float32", 200, 64, True),
    Case("simt_fa1", "float32", 200, 64, True),
    Case("wmma_v1", "float16", 256, 64, False),
    Case("wmma_v1", "float32", 200, 64, True),
    Case("wmma_v2", "float16", 256, 64, False),
    Case("wmma_v2", "float32", 200, 64, True),
    Case("wmma_v3", "float16", 256, 64, False),
    Case("wmma_v3", "float16", 1000, 40, True),
    Case("wmma_v3", "bfloat16", 1024, 128, False),
    Case("wmma_v3", "float32", 256, 64, False),
)


def run_case(case: Case, device: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, case.n, case.d).to(getattr(torch, case.dtype)).to(device)
    flash_wmma.forward(q, k, v, causal=case.causal, kernel=case.kernel)


def micro_entries() -> list[str]:
    """Names of the entries of micro.cu."""
    return re.findall(r'const Entry \w+\("(\w+)"', MICRO.read_text())


OTHER_DTYPES = {
    "half_column": (torch.int16, torch.int16),
    "operands": (torch.float32, torch.int16),
    "products": (torch.float32, torch.int32),
    "atomics": (torch.int32, torch.int32),
}
"""The types of out and in of entries that do not take float, by the beginning of their names."""


def micro_arguments(entry: str, device: str) -> list[torch.Tensor | int]:
    """Arguments of an entry. Most entries take (out, in) of float."""
    out = torch.zeros(65536).to(device)
    if entry == "divergent_loop" or entry.startswith("accumulator"):
        return [out]
    if entry == "shared_broadcast":
        return [out, 3]
    count = {"global_broadcast": 2, "partial_warp": 40, "divergent_branch": 5, "uniform_branch": 5, "products": 4}
    values = (torch.arange(65536.0) % 1024).to(device)
    for beginning, dtypes in OTHER_DTYPES.items():
        if entry.startswith(beginning):
            out, values = out.view(dtypes[0]), values.view(dtypes[1])
    return [out, values, *([count[entry]] if entry in count else [])]


def run_micro(library: Path, entry: str) -> None:
    """Calls an entry of micro.so on the GPU."""
    arguments = micro_arguments(entry, "cuda")
    rows = [argument_of("argument", a.data_ptr() if isinstance(a, torch.Tensor) else a) for a in arguments]
    if error := call_entry(ctypes.CDLL(str(library)), entry, rows):
        raise RuntimeError(error)


PREPARES = "convert"
"""A part of the name of every kernel that is launched before another one of the same call."""


def ncu(arguments: list[str]) -> list[list[Counts]]:
    """Counters of the project's launches in a run of this program, those of a call together."""
    metrics = ",".join(metric.ncu for metric in METRICS.values())
    command = ["ncu", "--clock-control", "none", "--csv", "--metrics", metrics, "--kernel-name-base", "function"]
    command += ["-k", "regex:^(?!.*(at::|elementwise|reduce|distribution|vectorized|arange))"]
    text = subprocess.run(
        [*command, sys.executable, __file__, *arguments], capture_output=True, text=True, check=False
    ).stdout
    launches = parse_ncu(text, {name: metric.ncu for name, metric in METRICS.items()})
    if not launches:
        raise SystemExit(f"ncu gave no counters:\n{text}")
    calls: list[list[Counts]] = [[]]
    for kernel, counts in launches:
        calls[-1].append({name: counts.get(name, float("nan")) for name in METRICS})
        if PREPARES not in kernel:
            calls.append([])
    return calls[:-1]


def measure(output: Path, programs: Path | None) -> None:
    result = dict(zip(map(str, CASES), ncu(["run"]), strict=True))
    if programs:
        result |= dict(zip(micro_entries(), ncu(["run-micro", "--programs", str(programs)]), strict=True))
    output.write_text(json.dumps({"device": torch.cuda.get_device_name(), "launches": result}, indent=1))


def emulated(profile: str) -> list[Counts]:
    """The same counters of each launch, from the emulator's profile."""
    result = []
    for launch in json.loads(profile):
        counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for row in launch["counts"]:
            for name, value in row.items():
                if isinstance(value, int):
                    counts[row["what"]][name] += value
        result.append({n: sum(counts[c][m.field] for c in m.classes) for n, m in METRICS.items()})
    return result


def compare(path: Path) -> None:
    """Prints, per metric, both sides' figures for every launch; equal ones are summed up."""
    measured: dict[str, Any] = json.loads(path.read_text())
    program = emulator.Program(MICRO) if len(measured["launches"]) > len(CASES) else None
    equal = near = 0
    rows = []
    pairs = []
    for name, launches in measured["launches"].items():
        case = next((c for c in CASES if str(c) == name), None)
        if case:
            with emulator.settings(mode="checked", counters=True, sm_count=132):
                take_profile()
                run_case(case, "cpu")
            ours = emulated(take_profile())
        else:
            assert program is not None
            ours = emulated(program.counts(name, *micro_arguments(name, "cpu")))
        if len(ours) != len(launches):
            raise SystemExit(f"{name}: {len(launches)} launches on the GPU, {len(ours)} in the emulator")
        if case:
            pairs.append((name, launches[-1], ours[-1]))
        for i, (theirs, mine) in enumerate(zip(launches, ours, strict=True)):
            for metric in METRICS:
                a, b = theirs[metric], mine[metric]
                if a == b:
                    equal += a != 0
                elif abs(a - b) <= 0.02 * max(a, b):
                    near += 1
                else:
                    launch = f", launch {i + 1}" if len(ours) > 1 else ""
                    rows.append(f"| {name}{launch} | {metric} | {a:,.0f} | {b:,.0f} |")
    print(f"{measured['device']}: {equal} figures equal (zeros apart), {near} within 2 %, {len(rows)} further apart:\n")
    print("| launch | figure | GPU | emulator |\n|---|---|---|---|", *rows, sep="\n")
    print()
    side_by_side(pairs).print()


def side_by_side(pairs: Sequence[tuple[str, Counts, Counts]]) -> Table:
    """The cost of a request, by the GPU and by the emulator: a row per launch of a kernel."""

    def quotient(counts: Counts, kind: str, what: str) -> str:
        requests = counts[f"{kind} requests"]
        return f"{counts[f'{kind} {what}'] / requests:.2f}" if requests else ABSENT

    columns = [(kind, "wavefronts") for kind in ("shared load", "shared store", "ldmatrix")]
    columns += [(kind, "sectors") for kind in ("global load", "global store")]
    rows = [[name, *(" / ".join(quotient(side, *c) for side in sides) for c in columns)] for name, *sides in pairs]
    return Table("GPU / emulator", ["launch", *(f"{what} a {kind}" for kind, what in columns)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "compare"):
        commands.add_parser(name).add_argument("json", type=Path)
    commands.add_parser("run")
    commands.add_parser("run-micro")
    for name in ("measure", "run-micro"):
        commands.choices[name].add_argument("--programs", type=Path, help="folder with micro.so")
    arguments = parser.parse_args()
    if arguments.command == "measure":
        measure(arguments.json, arguments.programs)
    elif arguments.command == "compare":
        compare(arguments.json)
    elif arguments.command == "run":
        for case in CASES:
            run_case(case, "cuda")
        torch.cuda.synchronize()
    else:
        for entry in micro_entries():
            run_micro(arguments.programs / "micro.so", entry)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
