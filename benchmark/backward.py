#!/usr/bin/env python3
"""The backward kernels over head dims and lengths at a fixed amount of data, in one process. Needs a GPU.

    python benchmark/backward.py                          16,384 tokens, hidden size 2048, fp16
    python benchmark/backward.py --dtype bf16 --kernels bwd_sm80 --json backward.json

The problems, the method and the tables are forward.py's; TFLOP/s count five products. What is timed is one
``torch.autograd.grad`` of q, k and v, whose forward pass ran before. ``bwd_sm80 split`` is the kernel with
``deterministic=True``. Gradients are compared with those of the first contender that ran, SDPA's flash backend if it
can. Exit status: 0; 1 if they differ or a kernel does not run; 2 if the benchmark cannot run as asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from contenders import SDPA_BACKENDS
from forward import PEERS, parse_arguments, run
from timing import Contender, Method, measure
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmark import DTYPES, CannotRun, Cell, Problem, Row, load_library, make_inputs, timed_cell

KERNELS = ("bwd_sm80", "bwd_sm80 split", "bwd_sm75")
PRODUCTS = 2.5
"""Of backward, to forward's two: five."""
TOLERANCE = {"fp16": 1e-2, "bf16": 6e-2}
"""Of the largest element of a gradient."""


def forward(library: ModuleType, name: str, causal: bool) -> tuple[Callable[..., Tensor], AbstractContextManager[None]]:
    """The contender's forward pass, and the context that it needs."""
    if name in SDPA_BACKENDS:
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal), sdpa_kernel(SDPA_BACKENDS[name])
    kernel, _, split = name.partition(" ")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = library.forward(q, k, v, causal=causal, backward_kernel=kernel, deterministic=bool(split))
        return out

    return attend, nullcontext()


def refuse(cell: Cell, name: str, error: Exception) -> None:
    """Why a contender did not run; of the project's own kernels that counts as wrong."""
    cell.reason = str(error).splitlines()[0]
    cell.right = None if name in SDPA_BACKENDS else False


def measure_row(
    library: ModuleType,
    problem: Problem,
    names: Sequence[str],
    device: torch.device,
    method: Method,
    seed: int,
    on_round: Callable[[], None],
) -> Row:
    """Times the gradients of all contenders together on one set of inputs, and compares them."""
    leaves = [t.requires_grad_() for t in make_inputs(problem, DTYPES[problem.dtype], device, seed)]
    gradient = torch.randn_like(leaves[0])
    cells = {name: Cell() for name in names}
    outputs = {}
    for name in names:
        attend, context = forward(library, name, problem.causal)
        try:
            with context:
                outputs[name] = attend(*leaves)
        except (RuntimeError, ValueError) as error:
            refuse(cells[name], name, error)

    def gradients(name: str) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs[name], leaves, gradient, retain_graph=True)

    def contender(name: str) -> Contender:
        return Contender(lambda: gradients(name)[0])

    measured = measure({name: contender(name) for name in outputs}, device, method, on_round)
    for name, error in measured.failures.items():
        refuse(cells[name], name, error)
    if not measured.timings:
        return Row(problem, measured.clock, cells)
    expected = gradients(next(iter(measured.timings)))
    for name in measured.timings:
        cell = cells[name] = timed_cell(problem, measured, name, None)
        cell.tflops = PRODUCTS * (cell.tflops or 0.0)
        pairs = zip(gradients(name), expected, strict=True)
        errors = torch.stack([(x - y).abs().max() / y.abs().max() for x, y in pairs])
        cell.error = errors.max().item()  # NaN if there is any
        cell.right = cell.error <= TOLERANCE[problem.dtype]
    return Row(problem, measured.clock, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(__doc__ or "", KERNELS, arguments)
    try:
        library = load_library()

        def measured(problem: Problem, device: torch.device, method: Method, on_round: Callable[[], None]) -> Row:
            names = (*PEERS, *options.kernels)
            return measure_row(library, problem, names, device, method, options.seed, on_round)

        return run(library, options, measured)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
