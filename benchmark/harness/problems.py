"""A problem, its inputs, and a row of a table: all contenders timed together on one set of inputs, and checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .accuracy import Judge
from .contenders import SDPA, Implementation, why_not
from .report import ABSENT
from .timing import Contender, Measurement, Method, Timing, measure

BACKWARD_PRODUCTS = 2.5
"""Backward's five products relative to forward's two."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Problem:
    """One row: attention on (batch, heads, length, head_dim) tensors."""

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str
    causal: bool

    @property
    def flops(self) -> float:
        """FLOPs of the two matrix products; with a causal mask, half of them."""
        full = 4.0 * self.batch * self.heads * self.length * self.length * self.head_dim
        return full / 2 if self.causal else full


@dataclass
class Cell:
    """One contender in one row. If the median is None, the contender did not run, and `reason` says why."""

    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    spread: float | None = None
    calls_per_sample: int | None = None
    tflops: float | None = None
    speedup_over_sdpa: float | None = None
    error: float | None = None
    plain_error: float | None = None
    max_abs_error: float | None = None
    allclose: bool | None = None
    right: bool | None = None
    choice: str | None = None  #: what it called, if that depends on the inputs
    reason: str | None = None
    samples_ms: list[float] = field(default_factory=list)


@dataclass
class Row:
    problem: Problem
    clock: str
    cells: dict[str, Cell]


def measure_row(
    problem: Problem,
    implementations: Sequence[Implementation],
    device: torch.device,
    method: Method,
    seed: int,
    on_round: Callable[[], None] = lambda: None,
) -> Row:
    """Times all implementations together on one set of inputs, and checks their outputs."""
    dtype = DTYPES[problem.dtype]
    try:
        inputs = make_inputs(problem, dtype, device, seed)
    except torch.cuda.OutOfMemoryError:
        return Row(problem, "none", {i.name: Cell(reason="out of memory (inputs)") for i in implementations})
    q, k, v = inputs
    contenders = {i.name: Contender(partial(i.attend, q, k, v, problem.causal), i.context) for i in implementations}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SDPA's reasons for not running: why_not asks for them again
        measured = measure(contenders, device, method, on_round)

    judge = Judge(q, k, v, problem.causal)
    cells = {}
    for implementation in implementations:
        name = implementation.name
        if name in measured.timings:
            cells[name] = timed_cell(problem, measured, name, measured.timings.get(SDPA))
            check(cells[name], judge, measured.outputs.pop(name), implementation.multiplied(dtype))
            if implementation.choice:
                cells[name].choice = implementation.choice(q, k, v, problem.causal)
        else:
            error = measured.failures[name]
            broken = implementation.ours and not is_refusal(error)
            reason = why_not(implementation, error, inputs, problem.causal)
            cells[name] = Cell(reason=reason, right=False if broken else None)
    return Row(problem, measured.clock, cells)


def make_inputs(problem: Problem, dtype: torch.dtype, device: torch.device, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (problem.batch, problem.heads, problem.length, problem.head_dim)
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in "qkv"]


def timed_cell(problem: Problem, measured: Measurement, name: str, sdpa: Timing | None) -> Cell:
    timing = measured.timings[name]
    return Cell(
        median_ms=timing.median,
        p10_ms=timing.p10,
        p90_ms=timing.p90,
        spread=timing.spread,
        calls_per_sample=timing.calls_per_sample,
        tflops=problem.flops / (1e9 * timing.median),
        speedup_over_sdpa=timing.speedup_over(sdpa) if sdpa else None,
        samples_ms=[round(s, 6) for s in timing.samples],
    )


def check(cell: Cell, judge: Judge, output: torch.Tensor, multiplied: torch.dtype) -> None:
    """Fills in how far the output is from the reference, unless the reference does not fit in memory."""
    try:
        verdict = judge.judge(output, multiplied)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        cell.reason = "timed, but not checked: out of memory"
        return
    cell.error, cell.plain_error = verdict.error, verdict.plain_error
    cell.max_abs_error, cell.allclose, cell.right = verdict.max_abs_error, verdict.allclose, verdict.right


def mark(*results: Any) -> str:
    """One verdict on cells or emulated kernels: the worst of them."""
    checked = [result for result in results if result.right is not None]
    if not checked:
        return ABSENT
    if not all(result.right for result in checked):
        return "WRONG"
    return "ok" if all(result.allclose for result in checked) else "right"


def is_refusal(error: Exception) -> bool:
    """Whether a kernel refused such inputs, or memory did not suffice; any other error is a defect."""
    return isinstance(error, ValueError | TypeError | NotImplementedError | torch.cuda.OutOfMemoryError)
