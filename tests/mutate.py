"""Seeded faults: does a test notice each of them?

python tests/mutate.py                        every fault, two at a time on two cores
python tests/mutate.py --only v3-vote-one-row that one, with what the test printed; may be repeated
python tests/mutate.py --path csrc/cpu        those in files that begin so
python tests/mutate.py --sample 10            ten that are known to be caught, others each day
python tests/mutate.py --list                 their names and places, nothing is run

Each fault is put into a copy of the repository. What it changes is compiled there: the kernels for the emulator,
libflash_wmma.so where C++ of the host changed. Then the tests that concern the file run, up to the first that fails.
The one that noticed the fault when it was recorded comes first. A fault that a compiler refuses by a static assertion
counts as caught; one that does not compile otherwise is an error, and so is one whose place is not in the file exactly
once.

The results lie in build/mutations.json; --record brings docs/data/mutations.json up to date with them. A fault that was
caught is not tried again as long as its text and the code around its place stay as they are (--again: it is). The exit
status is 1 if a fault survives whose record gives no reason for that.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import functools
import hashlib
import importlib
import json
import os
import pkgutil
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import mutations
from mutations.fault import Fault

from flash_wmma.emulator import kernel_sources

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "mutations.json"
RECORD = ROOT / "docs" / "data" / "mutations.json"
TIMEOUT = 3600
"""Seconds for the tests of one kernel, or for a compilation."""
HANG = 600
"""Seconds of a test that hangs."""
PYTEST = (
    *("-x", "-q", "-rfE", "--color=no", "-p", "no:cacheprovider"),
    *("-o", f"faulthandler_timeout={HANG}", "-o", "faulthandler_exit_on_timeout=true"),
)

FORWARD_TESTS = (
    *("forward", "numerics", "features", "varlen", "wgmma_sm90", "wgmma_masks", "unfused", "simt", "emulated"),
    *("interface_hypothesis", "tiles", "profile", "emulator_sm90", "key_ranges", "sinks", "dropout", "kvcache"),
    "wide_heads",
)
BACKWARD_TESTS = (
    "bwd_sm90",
    "shared_queries",
    "backward",
    "backward_mma",
    "loop_orders",
    "autograd",
    "features",
    "varlen",
    "interface_hypothesis",
    "key_ranges",
    "sinks",
    "dropout",
    "statistics",
    "slopes",
)
CPU_TESTS = (
    *("forward", "backward", "numerics", "features", "autograd", "varlen", "torch", "interface_hypothesis"),
    *("key_ranges", "sinks", "dropout", "kvcache", "statistics", "slopes"),
)
OP_TESTS = ("errors", "drop_in", "kernels", "hook", "forward_into", "forward_merged", "shared_queries", *CPU_TESTS)
EMULATOR_TESTS = ("emulator_faults", "emulator_sm90", "emulator_counts", "emulator_lane_maps", "emulated", "profile")
TESTS = {
    "csrc/cache/": ("kvcache",),
    "csrc/merge/": ("merge",),
    "csrc/reductions/": ("reductions",),
    "csrc/emulator/": EMULATOR_TESTS,
    "csrc/cpu/": CPU_TESTS,
    "csrc/torch/ops.cpp": ("packages", *OP_TESTS, "emulated"),
    "csrc/": (*OP_TESTS, "emulated"),
    "flash_wmma/emulator/": EMULATOR_TESTS,
    "flash_wmma/_profile.py": ("profile",),
    "flash_wmma/_profiler.py": ("profile", "hook"),
    "flash_wmma/_figures.py": ("profile",),
    "flash_wmma/_report.py": ("profile",),
    "flash_wmma/_occupancy.py": ("occupancy", "profile"),
    "flash_wmma/_explain.py": ("kernels", "drop_in", "emulated"),
    "flash_wmma/_ranks.py": ("drop_in",),
    "flash_wmma/_documents.py": ("key_ranges",),
    "flash_wmma/_statistics.py": ("statistics", "slopes"),
    "flash_wmma/_slopes.py": ("slopes",),
    "flash_wmma/reductions.py": ("reductions",),
    "flash_wmma/_append.py": ("kvcache",),
    "flash_wmma/_merge.py": ("merge", "distributed"),
    "flash_wmma/_cached.py": ("kvcache",),
    "flash_wmma/integrations/transformers.py": ("transformers",),
    "flash_wmma/_shared_queries.py": ("shared_queries",),
    "flash_wmma/distributed/": ("peer", "shared_queries", "distributed"),
    "flash_wmma/__init__.py": ("packages", *OP_TESTS),
    "flash_wmma/_autocast.py": ("packages", *OP_TESTS),
    "flash_wmma/_native.py": ("packages", *OP_TESTS),
    "flash_wmma/": OP_TESTS,
    "packages/": ("packages",),
}
"""Names of test files for the files that begin so; the first that fits. Kernels have those of their direction."""
FIRST = {"csrc/device/key_mask.cuh": "key_ranges", "csrc/device/row_group_mask.cuh": "key_ranges"}
"""Of a file that kernels are made of: the test file that comes first."""
DEVICE_CODE = (
    *("csrc/forward/", "csrc/backward/", "csrc/device/"),
    *("csrc/shape_table.h", "csrc/forward_shapes.h", "csrc/backward_shapes.h"),
)
"""What kernels are made of."""
HOST_CODE = ("csrc/torch/", "csrc/cpu/", "csrc/attention.h", "csrc/cached_rows.h", "csrc/dropout.h", "csrc/registry.")
"""What libflash_wmma.so without CUDA is made of."""
CPU_KERNELS = ("cpu", "bwd_cpu")
HOST_KERNELS = (*CPU_KERNELS, "wmma_v2")
"""By which kernels a fault outside the kernels is seen."""


class Verdict(NamedTuple):
    """What became of a fault."""

    outcome: str
    """"caught", "survived" or "error"."""
    by: str = ""
    """The test and what it said, or what is wrong with the fault."""
    seconds: float = 0.0
    log: str = ""


def all_faults() -> list[Fault]:
    """Those of every file in tests/mutations."""
    names = sorted(m.name for m in pkgutil.iter_modules(mutations.__path__) if m.name != "fault")
    faults = [fault for name in names for fault in importlib.import_module(f"mutations.{name}").FAULTS]
    twice = {fault.name for fault in faults if sum(other.name == fault.name for other in faults) > 1}
    if twice:
        raise SystemExit(f"mutate: two faults have the name {', '.join(sorted(twice))}")
    return faults


def misplaced(fault: Fault) -> str:
    """Why the fault cannot be put into its file; empty if it can."""
    path = ROOT / fault.path
    if not path.is_file():
        return f"there is no {fault.path}"
    times = path.read_text().count(fault.old)
    if times != 1:
        return f"its text is {times} times in {fault.path}"
    return "" if fault.old != fault.new else "it changes nothing"


# ------------------------------------------------------------------------------------------------ what a fault concerns


@functools.cache
def included(path: Path) -> frozenset[Path]:
    """The project's files that a source includes, the emulator's own left out, and the source itself."""
    files = {path}
    for name in re.findall(r'^#include [<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE):
        places = (ROOT / "csrc" / "device" / name, ROOT / "csrc" / name)
        found = next((place.resolve() for place in places if place.is_file()), None)
        if found is not None and found != path:
            files |= included(found)
    return frozenset(files)


def kernels_with(path: Path) -> list[str]:
    """The CUDA kernels that a file is part of."""
    shared = set((ROOT / "csrc" / "device").glob("*.cu"))  # linked with every kernel
    return [
        name
        for name, sources in kernel_sources().items()
        if path in shared or any(path in included(source.resolve()) for source in sources)
    ]


def backward(kernel: str) -> bool:
    return kernel in kernel_sources("backward")


class Check(NamedTuple):
    """A call of pytest, and the kernel that it needs compiled."""

    arguments: tuple[str, ...]
    kernel: str = ""


def files(names: Sequence[str]) -> list[str]:
    """The files of tests that have these names: a name without a file would let a fault run all tests."""
    found = [f"tests/test_{name}.py" for name in names]
    for file in found:
        if not (ROOT / file).exists():
            raise ValueError(f"no file {file}")
    return found


def kernel_check(kernel: str, first: str = "", of_fault: Sequence[str] = ()) -> Check:
    """The tests of one kernel: those whose names say so, of the file `first` before the others. Of files that a fault
    names, all: some are about one kernel, which the names of their tests do not say."""
    if of_fault:
        return Check((*files(of_fault), "--kernel", kernel), kernel)
    names_of_files = BACKWARD_TESTS if backward(kernel) else FORWARD_TESTS
    tests = files(sorted(names_of_files, key=lambda name: name != first))
    rungs = [name for name in kernel_sources() if kernel in name and kernel != name]
    names = " and ".join([kernel, *(f"not {name}" for name in rungs)])
    return Check((*tests, "--kernel", kernel, "-k", names), kernel)


@functools.cache
def recorded() -> dict[str, dict[str, str | float]]:
    """What docs/data/mutations.json knows of each fault."""
    rows: dict[str, dict[str, str | float]] = json.loads(RECORD.read_text())
    return rows


def noticed_by(fault: Fault) -> str:
    """The test that noticed the fault when it was recorded; empty if there is none."""
    test, _, _ = str(recorded().get(fault.name, {}).get("by", "")).partition(" - ")  # pytest's own words
    return test if test.startswith("tests/") else ""


def checks(fault: Fault) -> Iterator[Check]:
    """The tests that concern a fault, the likeliest first."""
    kernels = list(fault.kernels) or (kernels_with(ROOT / fault.path) if is_device_code(fault) else [])
    for kernel in sorted(kernels, key=lambda name: name not in noticed_by(fault)):
        yield kernel_check(kernel, FIRST.get(fault.path, ""), fault.tests)
    if not kernels:
        of_file = next(tests for beginning, tests in TESTS.items() if fault.path.startswith(beginning))
        named = fault.tests or of_file
        seen_by = CPU_KERNELS if fault.path.startswith("csrc/cpu/") else HOST_KERNELS
        yield Check((*files(named), *(word for kernel in seen_by for word in ("--kernel", kernel))))


def is_device_code(fault: Fault) -> bool:
    return fault.path.startswith(DEVICE_CODE)


def is_host_code(fault: Fault) -> bool:
    """Whether libflash_wmma.so has to be built anew to see it."""
    return fault.path.startswith(HOST_CODE)


# --------------------------------------------------------------------------------------------------- a copy of the tree


class Tree:
    """A copy of the repository that faults are put into, one at a time."""

    def __init__(self, folder: Path, host: bool) -> None:
        self.folder, self.host = folder, host
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(folder),  # comes before the editable install
            "FLASH_WMMA_CACHE": str(folder / "build" / "emulator"),
            "OMP_WAIT_POLICY": "passive",
            "FLASH_WMMA_CUDA": "0",
            "PYTHONDONTWRITEBYTECODE": "1",  # a file that changes twice in a second looks unchanged
        }
        self.copy()
        if host:
            self.build()

    def copy(self) -> None:
        """What git knows or does not ignore, and the native libraries as they are."""
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        wanted = {Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()}
        if not self.host:
            built = [*(ROOT / "flash_wmma").glob("*.so"), ROOT / "flash_wmma" / "kernels.json"]
            wanted |= {path.relative_to(ROOT) for path in built}
        for name in wanted:
            source, target = ROOT / name, self.folder / name
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        for folder in ("csrc", "flash_wmma", "tests"):
            for path in (self.folder / folder).rglob("*.*"):
                name = path.relative_to(self.folder)
                if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp", ".inl") and name not in wanted:
                    path.unlink()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], cwd=self.folder, env=self.environment, timeout=TIMEOUT, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def build(self) -> str:
        """libflash_wmma.so without CUDA. The compiler's messages if it fails."""
        done = self.run("setup.py", "-q", "build_ext", "--inplace")
        return done.stdout if done.returncode else ""

    def compile(self, kernel: str) -> str:
        """A kernel for the checked emulator. The compiler's messages if it fails."""
        code = f"from flash_wmma.emulator import kernel_library; kernel_library({kernel!r}, 'checked')"
        done = self.run("-c", code)
        return done.stdout if done.returncode else ""

    def compile_all(self) -> str:
        """The same of all kernels, which pytest would wait for, where libflash_wmma.so has none."""
        done = self.run("-m", "flash_wmma.emulator", "build", "--mode", "checked")
        return done.stdout if done.returncode else ""

    def verdict(self, fault: Fault) -> Verdict:
        """Puts the fault in, runs the tests that concern it, and takes it out again."""
        start = time.perf_counter()
        path = self.folder / fault.path
        sound = path.read_text()
        path.write_text(sound.replace(fault.old, fault.new))
        try:
            found = self.search(fault)
        finally:
            path.write_text(sound)
        return found._replace(seconds=round(time.perf_counter() - start, 1))

    def search(self, fault: Fault) -> Verdict:
        if self.host and (said := self.build() or self.compile_all()):
            return uncompiled(said)
        ran = []
        first = ("--first", noticed_by(fault)) if noticed_by(fault) else ()
        for check in checks(fault):
            if check.kernel and (said := self.compile(check.kernel)):
                return uncompiled(said)
            try:
                done = self.run("-m", "pytest", *PYTEST, *first, *check.arguments)
            except subprocess.TimeoutExpired as late:
                return Verdict(
                    "error", f"took more than {TIMEOUT} s: {' '.join(check.arguments)}", log=str(late.stdout)
                )
            if re.search(r"^Timeout \(", done.stdout, re.MULTILINE):
                return Verdict("caught", f"a hang: {' '.join(check.arguments)}", log=done.stdout)
            if done.returncode == 1 and (said := re.search(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE)):
                return Verdict("caught", said[1], log=done.stdout)
            if done.returncode in (-signal.SIGTERM, -signal.SIGKILL):
                return Verdict("error", "the tests were killed from outside", log=done.stdout)
            if done.returncode < 0 or done.returncode > 5:
                return Verdict("caught", f"a crash, status {done.returncode}", log=done.stdout)
            if done.returncode not in (0, 5):  # 5: no test has the kernel's name
                if re.search(r"^ERROR tests/", done.stdout, re.MULTILINE):
                    return Verdict("caught", "collection of the tests fails", log=done.stdout)
                return Verdict("error", f"pytest ended with status {done.returncode}", log=done.stdout)
            ran.append(re.search(r"(\d+) passed", done.stdout))
        passed = sum(int(found[1]) for found in ran if found)
        return Verdict("survived", f"{passed} tests passed") if passed else Verdict("error", "no test was run")


def uncompiled(said: str) -> Verdict:
    refused = re.search(r"static assertion failed.*", said)
    if refused:
        return Verdict("caught", f"the compiler: {refused[0]}", log=said)
    line = next((line for line in said.splitlines() if "error:" in line), said.strip()[-200:])
    return Verdict("error", f"does not compile: {line}", log=said)


# ---------------------------------------------------------------------------------------------------------- all of them


NEAR = 20
"""Lines on either side of a fault's place. If they change, the fault is tried again."""


def code_near(fault: Fault) -> str:
    """The code around the fault's place, without comments and white space."""
    before, _, after = (ROOT / fault.path).read_text().partition(fault.old)
    near = [*before.splitlines()[-NEAR:], fault.old, *after.splitlines()[:NEAR]]
    comment = r"#.*" if fault.path.endswith(".py") else r"//.*"
    return re.sub(r"\s+", "", "".join(re.sub(comment, "", line) for line in near))


def digest(fault: Fault) -> str:
    """Changes with the fault and with the code around its place."""
    parts = [fault.path, fault.old, fault.new, code_near(fault)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class Results:
    """What is known of the faults, kept in a file."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[str, dict[str, object]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def caught(self, fault: Fault) -> bool:
        row = self.known.get(fault.name, {})
        return row.get("outcome") == "caught" and row.get("digest") == digest(fault)

    def add(self, fault: Fault, verdict: Verdict) -> None:
        row = {"digest": digest(fault), **verdict._asdict()}
        del row["log"]
        RESULTS.parent.mkdir(exist_ok=True)
        with self.lock, RESULTS.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may run other faults
            self.known = (json.loads(RESULTS.read_text()) if RESULTS.exists() else {}) | {fault.name: row}
            RESULTS.write_text(json.dumps(self.known, indent=1) + "\n")


def line(fault: Fault, verdict: Verdict) -> str:
    by = verdict.by if len(verdict.by) < 200 else f"{verdict.by[:200]} …"
    return f"{verdict.outcome:8} {fault.name} ({fault.path}) {verdict.seconds:.0f} s: {by}"


def try_all(faults: Sequence[Fault], jobs: int, folder: Path, results: Results) -> dict[str, Verdict]:
    """Each fault's verdict. A worker has its own copies. The first begins with the faults of the host."""
    queue = sorted(faults, key=is_host_code, reverse=True)
    lock, verdicts = threading.Lock(), {}

    def work(index: int) -> None:
        trees: dict[bool, Tree] = {}
        while True:
            with lock:
                if not queue:
                    return
                fault = queue.pop(0 if index == 0 else -1)
            host = is_host_code(fault)
            if host not in trees:
                trees[host] = Tree(folder / f"{index}-{'host' if host else 'kernels'}", host)
            verdict = trees[host].verdict(fault)
            verdicts[fault.name] = verdict
            results.add(fault, verdict)
            print(line(fault, verdict), flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(work, index) for index in range(jobs)]:
            done.result()
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="that fault; may be repeated")
    parser.add_argument("--path", default="", help="faults in files that begin so")
    parser.add_argument("--sample", type=int, metavar="N", help="N that are known to be caught, others each day")
    parser.add_argument("--record", action="store_true", help="bring docs/data up to date, and run nothing")
    parser.add_argument("--again", action="store_true", help="also those that are known to be caught")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at a time")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutations", help="where the copies are made")
    options = parser.parse_args(arguments)

    faults = [fault for fault in all_faults() if fault.path.startswith(options.path)]
    if options.only:
        faults = [fault for fault in faults if fault.name in options.only]
        if len(faults) < len(set(options.only)):
            absent = sorted(set(options.only) - {fault.name for fault in faults})
            parser.error(f"--only: there is no fault {', '.join(absent)}; --list names them")
    wrong = [f"{fault.name}: {why}" for fault in faults if (why := misplaced(fault))]
    if wrong:
        print("mutate: the list no longer fits the code", *wrong, sep="\n  ", file=sys.stderr)
        return 2
    if options.list:
        for fault in faults:
            print(f"{fault.name} ({fault.path}): {fault.why}" + f" [harmless: {fault.harmless}]" * bool(fault.harmless))
        return 0
    if options.record:
        record(faults, Results())
        return 0
    if options.sample is not None:
        today = random.Random(datetime.date.today().toordinal())
        caught = [fault for fault in faults if recorded().get(fault.name, {}).get("outcome") == "caught"]
        faults = today.sample(caught, min(options.sample, len(caught)))

    results = Results()
    again = options.again or options.only or options.sample is not None
    rest = faults if again else [fault for fault in faults if not results.caught(fault)]
    verdicts = try_all(rest, max(1, min(options.jobs, len(rest))), options.folder, results) if rest else {}
    if options.only:
        for name, verdict in verdicts.items():
            print(f"--- {name}\n{verdict.log[-4000:]}")
    return summary(faults, results)


def record(faults: Sequence[Fault], results: Results) -> None:
    """Writes to docs/data/mutations.json what became of each fault that was tried as it is now. Other rows stay, unless
    their fault is no more."""
    known = dict(recorded())
    tried = [fault for fault in faults if results.known.get(fault.name, {}).get("digest") == digest(fault)]
    for fault in tried:
        result = results.known[fault.name]
        known[fault.name] = {"path": fault.path, **{key: result[key] for key in ("outcome", "by", "seconds")}}
    rows = {fault.name: known[fault.name] for fault in all_faults() if fault.name in known}
    RECORD.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(tried)} faults were tried as they are now; {RECORD.relative_to(ROOT)} has {len(rows)}")


def summary(faults: Sequence[Fault], results: Results) -> int:
    """Prints what is known of these faults."""
    outcome = {fault.name: results.known[fault.name]["outcome"] for fault in faults}
    counted = [fault for fault in faults if not fault.harmless]
    caught = [fault for fault in counted if outcome[fault.name] == "caught"]
    print(f"\n{len(caught)} of {len(counted)} faults caught ({100 * len(caught) / max(1, len(counted)):.1f} %)")
    for fault in faults:
        if outcome[fault.name] != "caught" or fault.harmless:
            reason = (fault.harmless and f"harmless: {fault.harmless}") or fault.survives or "no reason is known"
            print(f"  {outcome[fault.name]}: {fault.name} ({fault.path}): {fault.why}. {reason}")
    unexpected = [fault for fault in counted if outcome[fault.name] != "caught" and not fault.survives]
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main())
