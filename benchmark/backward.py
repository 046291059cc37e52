#!/usr/bin/env python3
"""The backward kernels over head dims and lengths at a fixed amount of data, in one process. Needs a GPU.

    python benchmark/backward.py                          16,384 tokens, hidden size 2048, fp16
    python benchmark/backward.py --dtype bf16 --kernels bwd_sm80 --json backward.json

The problems, the method and the tables are forward.py's; TFLOP/s count five products. What is timed is one
``torch.autograd.grad`` of q, k and v, whose forward pass ran before. A name that ends in " deterministic" is the kernel
with ``deterministic=True``. Gradients are compared with those of the first contender that ran, SDPA's flash backend if
it can. Exit status: 0; 1 if they differ or a kernel does not run; 2 if the benchmark cannot run as asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from harness.accuracy import TOLERANCE
from harness.contenders import Implementation, peers
from harness.problems import BACKWARD_PRODUCTS, DTYPES, Cell, Problem, Row, make_inputs, timed_cell
from harness.program import CannotRun, load_library
from harness.sweep import BACKWARD_KERNELS, PEERS, parse_arguments, run
from harness.timing import Contender, Method, measure


def backward_kernel(library: ModuleType, name: str) -> Implementation:
    """Attention whose gradients this kernel computes: deterministic ones if the name ends so."""
    kernel, _, deterministic = name.partition(" ")

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out: Tensor = library.forward(q, k, v, causal=causal, backward_kernel=kernel, deterministic=bool(deterministic))
        return out

    return Implementation(name, "flash_wmma", attend)


def measure_row(
    problem: Problem,
    implementations: Sequence[Implementation],
    device: torch.device,
    method: Method,
    seed: int,
    on_round: Callable[[], None],
) -> Row:
    """Times the gradients of all contenders together on one set of inputs, and compares them."""
    leaves = [t.requires_grad_() for t in make_inputs(problem, DTYPES[problem.dtype], device, seed)]
    q, k, v = leaves
    gradient = torch.randn_like(q)
    outputs: dict[str, Tensor] = {}
    failures: dict[str, Exception] = {}
    for implementation in implementations:
        try:
            with implementation.context():
                outputs[implementation.name] = implementation.attend(q, k, v, problem.causal)
        except (RuntimeError, ValueError) as error:
            failures[implementation.name] = error

    def gradients(name: str) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs[name], leaves, gradient, retain_graph=True)

    def contender(name: str) -> Contender:
        return Contender(lambda: gradients(name)[0])

    measured = measure({name: contender(name) for name in outputs}, device, method, on_round)
    failures |= measured.failures
    ours = {implementation.name: implementation.ours for implementation in implementations}
    cells = {
        name: Cell(reason=str(error).splitlines()[0], right=False if ours[name] else None)
        for name, error in failures.items()
    }
    if not measured.timings:
        return Row(problem, measured.clock, cells)
    expected = gradients(next(iter(measured.timings)))
    for name in measured.timings:
        cell = cells[name] = timed_cell(problem, measured, name, None)
        cell.tflops = BACKWARD_PRODUCTS * (cell.tflops or 0.0)
        pairs = zip(gradients(name), expected, strict=True)
        errors = torch.stack([(x - y).abs().max() / y.abs().max() for x, y in pairs])
        cell.error = errors.max().item()  # NaN if there is any
        cell.right = cell.error <= TOLERANCE[problem.dtype]
    return Row(problem, measured.clock, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(__doc__ or "", BACKWARD_KERNELS, arguments)
    try:
        library = load_library()
        implementations = [peer for peer in peers(torch.device("cuda"), PEERS) if peer.name in PEERS]
        implementations += [backward_kernel(library, name) for name in options.kernels]

        def measured(problem: Problem, device: torch.device, method: Method, on_round: Callable[[], None]) -> Row:
            return measure_row(problem, implementations, device, method, options.seed, on_round)

        return run(library, options, measured)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
