"""``python -m flash_wmma.emulator build`` compiles every CUDA kernel for the emulator, so that no later call has to."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

from . import EmulatorError, Mode, kernel_library, kernel_sources
from ._compile import cache_folder, runtime


def _build(kernel: str, mode: Mode) -> str:
    start = time.perf_counter()
    try:
        kernel_library(kernel, mode)
    except EmulatorError as error:
        return f"{kernel}, {mode}: {error}"
    print(f"{kernel:12} {mode:8} {time.perf_counter() - start:6.1f} s", flush=True)
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m flash_wmma.emulator", description=__doc__)
    parser.add_argument("command", choices=("build",))
    parser.add_argument("--mode", choices=get_args(Mode), help="that one alone (default: both)")
    arguments = parser.parse_args(argv)
    modes = [arguments.mode] if arguments.mode else get_args(Mode)
    try:
        runtime()
    except EmulatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    work = [(kernel, mode) for kernel in kernel_sources() for mode in modes]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        failures = [text for text in pool.map(_build, *zip(*work, strict=True)) if text]
    for text in failures:
        print(f"error: {text}", file=sys.stderr)
    print(f"in {cache_folder()}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
