#!/usr/bin/env python3
"""Is a build of flash_wmma as fast as an earlier one? The kernels of two builds, timed in turn in one run.

    python benchmark/builds.py BEFORE                    BEFORE's flash_wmma, beside this clone's
    python benchmark/builds.py BEFORE AFTER --forward mma_sm80 --backward --features dense packed bias
    python benchmark/builds.py BEFORE --dtype bf16 --json builds.json
    python benchmark/builds.py BEFORE --dtype fp32       fp32: inputs that kernels on tensor cores convert

BEFORE and AFTER are folders that hold a flash_wmma package with its native libraries: `git worktree add` and then
`./dev build` in the worktree make one. Each build runs in a process of its own (`harness/build_worker.py`), and while
one is timed the other waits, so that power and clocks are alike for both. In every round each build times the kernel
for some 30 milliseconds by the method of `harness/timing.py`; the builds alternate in beginning a round.

The problems are those of forward.py and backward.py: for every d and N the batch is 16,384 / N and the heads are
2048 / d. A row's speed is that of AFTER relative to BEFORE: the median of the ratios round by round. The results of
both builds are compared, and the program says whether they agree to the bit. Exit status: 0, however fast the builds
are; 1 if results differ or a kernel fails; 2 if the program cannot run as asked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.accuracy import TOLERANCE
from harness.build_worker import Case
from harness.problems import Problem
from harness.program import CannotRun, positive
from harness.report import ABSENT, Table, progress
from harness.sweep import BACKWARD_KERNELS, FORWARD_KERNELS, HIDDEN, TOKENS

FEATURES = ("dense", "packed", "bias", "alibi")
LONGEST_BIAS = 2048
"""A (1, H, N, N) tensor grows with N squared."""
TURN_MS = 30.0
"""The timed calls of a turn take about that long, but there are at most MOST_REPEATS and at least one."""
MOST_REPEATS = 5
RESULTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


class NotRun(Exception):
    """A build did not run a case. `refusal`: whether the build does not take such a problem."""

    def __init__(self, reason: str, refusal: bool) -> None:
        super().__init__(reason)
        self.refusal = refusal


class Build:
    """A process that runs one build's kernels by `harness/build_worker.py`."""

    def __init__(self, name: str, folder: Path, device: str | None, seed: int) -> None:
        self.name, self.folder, self._seed = name, folder.resolve(), seed
        if not (self.folder / "flash_wmma" / "__init__.py").is_file():
            raise CannotRun(f"{name}: there is no flash_wmma package in {folder}")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.build_worker", *([device] if device else [])],
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(self.folder)},
        )

    def hello(self) -> dict[str, Any]:
        """What the process says about its build, once it has started."""
        facts = self._read()
        if Path(facts["package"]) != self.folder / "flash_wmma":
            raise CannotRun(f"{self.name}: Python took {facts['package']}, not the package in {self.folder}")
        return facts

    def ask(self, what: str, case: Case, **arguments: Any) -> dict[str, Any]:
        """The answer to a request, or NotRun."""
        assert self._process.stdin is not None
        request = {"do": what, "case": asdict(case), "seed": self._seed, **arguments}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._read()
        if "error" in answer:
            raise NotRun(f"{self.name}: {answer['error']}", answer["refusal"])
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CannotRun(f"{self.name}: the process of the build in {self.folder} ended")
        record: dict[str, Any] = json.loads(line)
        return record

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Row:
    """A case in both builds. Without times a build did not run it, and `reason` says why."""

    case: Case
    before_ms: list[float] = field(default_factory=list)  #: one per round
    after_ms: list[float] = field(default_factory=list)
    speed: float | None = None  #: speed of after relative to before
    differences: dict[str, float] = field(default_factory=dict)  #: errors of the results that differ in bits
    repeatable: bool = True  #: a second call of one build has the same bits
    right: bool | None = None  #: None: neither build takes such a problem
    reason: str | None = None

    @property
    def label(self) -> str:
        case, problem = self.case, self.case.problem
        mask = ", causal" if problem.causal else ""
        return f"{case.kernel}, {case.feature}, d = {problem.head_dim}, N = {problem.length}{mask}"


def compare(case: Case, before: Build, after: Build, rounds: int, on_round: Callable[[], None]) -> Row:
    """Checks and times a case in both builds."""
    row = Row(case)
    try:
        repeats = check(row, before, after)
        turns = [(before, row.before_ms), (after, row.after_ms)]
        for _ in range(rounds if repeats else 0):
            for build, samples in turns:
                samples.append(build.ask("time", case, repeats=repeats)["ms"])
            turns.reverse()
            on_round()
    except NotRun as error:
        row.right, row.reason = False, str(error)
        return row
    if row.before_ms:
        row.speed = statistics.median(b / a for b, a in zip(row.before_ms, row.after_ms, strict=True))
    return row


def check(row: Row, before: Build, after: Build) -> int:
    """Compares the results of both builds. Returns how often a turn repeats the call: 0 if a build refuses it."""
    checks, refusals = [], []
    for build in (before, after):
        try:
            checks.append(build.ask("check", row.case))
        except NotRun as error:
            if not error.refusal:
                raise
            refusals.append(error)
    if refusals:
        row.right, row.reason = None if not checks else False, str(refusals[0])
        return 0
    row.repeatable = all(found["repeatable"] for found in checks)
    sums = zip(*(found["sums"] for found in checks), strict=True)
    if apart := [index for index, (one, other) in enumerate(sums) if one != other]:
        row.differences = differences(row.case, before, after, apart)
    tolerance = TOLERANCE[row.case.problem.dtype]
    row.right = all(difference <= tolerance for difference in row.differences.values())  # false for NaN
    return max(1, min(MOST_REPEATS, round(TURN_MS / max(found["ms"] for found in checks))))


def differences(case: Case, before: Build, after: Build, which: Sequence[int]) -> dict[str, float]:
    """How far the results with these indices are apart."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "results.pt")
        before.ask("save", case, which=which, path=path)
        errors = after.ask("compare", case, which=which, path=path)["errors"]
    return dict(zip((RESULTS[case.direction][index] for index in which), errors, strict=True))


def cases(options: argparse.Namespace) -> list[Case]:
    """The cases in the tables' order: causal last, since both masks share a cell."""
    found = []
    for direction, feature in itertools.product(("forward", "backward"), options.features):
        for kernel, d, n in itertools.product(getattr(options, direction), options.head_dims, options.lengths):
            if feature == "bias" and n > LONGEST_BIAS:
                continue
            shape = (options.tokens // n, options.hidden // d, n, d, options.dtype)
            found += [Case(direction, kernel, feature, Problem(*shape, causal)) for causal in (False, True)]
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table per direction and feature: d and N by kernel, in a cell not causal / causal."""
    found: dict[tuple[str, str], dict[tuple[int, int], dict[str, list[str]]]] = {}
    for row in rows:
        case, problem = row.case, row.case.problem
        lines = found.setdefault((case.direction, case.feature), {})
        cells = lines.setdefault((problem.head_dim, problem.length), {})
        cells.setdefault(case.kernel, []).append(ABSENT if row.speed is None else f"{row.speed:.3f}")
    result = []
    for (direction, feature), lines in found.items():
        kernels = list(next(iter(lines.values())))
        body = [[str(d), str(n), *(" / ".join(cells[k]) for k in kernels)] for (d, n), cells in lines.items()]
        title = f"{direction}, {feature}: speed of after relative to before"
        result.append(Table(title, ["d", "N", *kernels], body))
    return result


def summary(rows: Sequence[Row]) -> list[str]:
    """For every kernel and for all: the mean speed, the smallest, and whether the results agree."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.case.kernel, []).append(row)
    if len(groups) > 1:
        groups["all"] = list(rows)
    lines = []
    for name, group in groups.items():
        timed = [(row.speed, row) for row in group if row.speed is not None]
        if not timed:
            lines.append(f"{name}: in no row")
            continue
        mean = statistics.geometric_mean([speed for speed, _ in timed])
        least, where = min(timed, key=lambda pair: pair[0])
        lines.append(f"{name}: geometric mean {mean:.3f}, smallest {least:.3f} ({where.label}); {agreement(group)}")
    return lines


def agreement(rows: Sequence[Row]) -> str:
    checked = [row for row in rows if row.right is not None and row.speed is not None]
    apart = [row for row in checked if row.differences]
    text = f"results of {len(checked) - len(apart)} of {len(checked)} rows agree to the bit"
    if not apart:
        return text
    largest = max(value for row in apart for value in row.differences.values())
    names = sorted({name for row in apart for name in row.differences})
    repeated = "" if any(row.repeatable for row in apart) else ", as do those of two calls of one build"
    return f"{text}, in the others {', '.join(names)} differ by up to {largest:.1e}{repeated}"


def notes(rows: Sequence[Row]) -> list[str]:
    """What did not run, a line for each reason."""
    reasons: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.reason:
            key = (row.case.kernel, row.case.feature, row.reason)
            reasons[key] = reasons.get(key, 0) + 1
    return [f"{ABSENT} {k}, {f}, {n} rows: {reason}" for (k, f, reason), n in reasons.items()]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("before", type=Path, metavar="BEFORE", help="the folder of the earlier build")
    add("after", type=Path, nargs="?", default=Path(__file__).resolve().parents[1], metavar="AFTER")
    add("--forward", nargs="*", default=list(FORWARD_KERNELS), metavar="KERNEL", help="without a name: none")
    add("--backward", nargs="*", default=list(BACKWARD_KERNELS), metavar="KERNEL", help="without a name: none")
    add("--dtype", choices=tuple(TOLERANCE), default="fp16")
    add("--head-dims", nargs="+", type=positive, default=[64, 128, 256], metavar="D")
    add("--lengths", nargs="+", type=positive, default=[512, 2048, 16384], metavar="N")
    add("--features", nargs="+", choices=FEATURES, default=["dense"])
    add("--rounds", type=positive, default=7)
    add("--tokens", type=positive, default=TOKENS, help="batch times N")
    add("--hidden", type=positive, default=HIDDEN, help="heads times d")
    add("--device", help="cuda, cuda:1, cpu, ... (default: cuda if there is a GPU)")
    add("--seed", type=int, default=0, help="of the normally distributed inputs")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    for name, sizes, whole in (
        ("head-dims", options.head_dims, options.hidden),
        ("lengths", options.lengths, options.tokens),
    ):
        if wrong := [size for size in sizes if whole % size]:
            raise CannotRun(f"--{name}: got {wrong[0]}, allowed are divisors of {whole}")
    asked = cases(options)
    if not asked:
        raise CannotRun("no kernel and no problem is left to compare")
    rows = []
    with ExitStack() as processes:
        builds = []
        for name in ("before", "after"):  # they start side by side
            builds.append(Build(name, getattr(options, name), options.device, options.seed))
            processes.callback(builds[-1].close)
        hellos = {build.name: build.hello() for build in builds}
        for name, hello in hellos.items():
            print(f"{name:9} {hello['package']}", *hello["environment"], sep="\n          ")
        print(f"method    {options.rounds} rounds, in each both builds, in alternating order", end="\n\n", flush=True)
        bar = processes.enter_context(progress())
        for (kernel, feature), group in itertools.groupby(asked, key=lambda case: (case.kernel, case.feature)):
            same = list(group)
            bar.start(f"{kernel}, {feature}", len(same) * options.rounds)
            rows += [compare(case, *builds, options.rounds, bar.advance) for case in same]
    for table in tables(rows):
        table.print()
    print("\n".join([*summary(rows), *notes(rows)]), flush=True)
    if options.json:
        document = {"builds": hellos, "rounds": options.rounds, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    wrong = [row for row in rows if row.right is False]
    for row in wrong:
        print(f"{row.label}: {row.reason or f'results differ: {row.differences}'}", file=sys.stderr)
    if not any(row.speed is not None for row in rows):
        raise CannotRun("no kernel ran in both builds")
    return int(bool(wrong))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        return run(options)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
