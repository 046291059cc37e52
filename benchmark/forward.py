#!/usr/bin/env python3
"""The forward kernels over head dims and lengths at a fixed amount of data, in one process. Needs a GPU.

    python benchmark/forward.py                              16,384 tokens, hidden size 2048, fp16
    python benchmark/forward.py --dtype bf16 --kernels mma_sm80 wgmma_sm90 --json forward.json
    python benchmark/forward.py --sample-ms 10               a card at its power limit

For every d and N the batch is 16,384 / N and the heads are 2048 // d. All contenders of a problem are timed together by
the method of harness/timing.py, and every output is checked (harness/accuracy.py). Two tables: TFLOP/s, and each
kernel's speed relative to SDPA's flash backend and to its cuDNN backend, the median of the ratios round by round; in a
cell not causal / causal.

Exit status: 0; 1 if a kernel is wrong or fails; 2 if the benchmark cannot run as asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from harness.contenders import SDPA, UnknownName, flash_wmma_kernels, peers
from harness.problems import Problem, Row, measure_row
from harness.program import CannotRun, choose_device, load_library
from harness.sweep import FORWARD_KERNELS, PEERS, parse_arguments, run
from harness.timing import Method


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(__doc__ or "", FORWARD_KERNELS, arguments)
    try:
        library = load_library()
        device = choose_device(None)
        implementations = peers(device, PEERS if device.type == "cuda" else ())
        implementations += flash_wmma_kernels(library, device, options.kernels)
        implementations = [i for i in implementations if i.name != SDPA]

        def measured(problem: Problem, device: torch.device, method: Method, on_round: Callable[[], None]) -> Row:
            with torch.inference_mode():
                return measure_row(problem, implementations, device, method, options.seed, on_round)

        return run(library, options, measured)
    except (CannotRun, UnknownName) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
