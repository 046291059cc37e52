"""One build of flash_wmma, which answers requests: `builds.py` starts this module once for each of its two builds.

The ops of two builds have the same names, so each build needs a process of its own. Requests come on standard input and
answers go to standard output, a line of JSON each. The first answer needs no request: it says which build this is.
Then every request names a case, and what to do with it:

    check     {"ms", "sums", "repeatable"}: checksums of the bits of the results, and whether a second call has them too
    time      {"ms"}: the median of `repeats` samples, by timing.py's method
    save      {}: writes the results with the indices `which` to the file `path`
    compare   {"errors"}: how far these results are from those in the file `path`, by accuracy.normalized_error

A case that does not run is answered by {"error", "refusal"}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .accuracy import normalized_error
from .environment import describe
from .problems import DTYPES, Problem, is_refusal, make_inputs
from .program import CannotRun, choose_device, load_library
from .timing import Contender, DeviceLost, Method, measure


@dataclass(frozen=True)
class Case:
    """A kernel, the form of its inputs, and their shape."""

    direction: str  #: "forward" or "backward"
    kernel: str  #: a name that ends in " deterministic" is a backward kernel with deterministic=True
    feature: str  #: "dense", "packed" (sequences of equal lengths), "bias" (one for all batch entries) or "alibi"
    problem: Problem

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Case:
        return cls(**{**record, "problem": Problem(**record["problem"])})


@dataclass(frozen=True)
class Prepared:
    """A case with its inputs on the device."""

    case: Case
    results: Callable[[], tuple[Tensor, ...]]  #: the output, or the gradients of q, k and v

    def milliseconds(self, device: torch.device, repeats: int) -> float:
        """Forward in CUDA graphs, so that host time does not count; autograd, which has its own streams, without."""
        graph = "on" if self.case.direction == "forward" else "off"
        method = Method(warmup=2, repeats=repeats, graph=graph)
        measured = measure({"kernel": Contender(lambda: self.results()[0])}, device, method)
        for error in measured.failures.values():
            raise error
        return measured.timings["kernel"].median


def prepare(library: ModuleType, case: Case, device: torch.device, seed: int) -> Prepared:
    problem, backward = case.problem, case.direction == "backward"
    q, k, v = make_inputs(problem, DTYPES[problem.dtype], device, seed)
    kernel, _, deterministic = case.kernel.partition(" ")
    options: dict[str, Any] = {"causal": problem.causal}
    options |= {"backward_kernel": kernel, "deterministic": bool(deterministic)} if backward else {"kernel": kernel}
    attend = library.forward
    generator = torch.Generator(device).manual_seed(seed + 1)
    if case.feature == "packed":
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        step, total = problem.length, problem.batch * problem.length
        starts = torch.arange(0, total + 1, step, device=device, dtype=torch.int32)
        attend = partial(attend_packed, library, starts, step)
    elif case.feature == "bias":
        shape = (1, problem.heads, problem.length, problem.length)
        options["attn_bias"] = torch.randn(shape, generator=generator, device=device, dtype=q.dtype)
    elif case.feature == "alibi":
        options["alibi_slopes"] = 2.0 ** -torch.linspace(1, 8, problem.heads, device=device)
    if not backward:
        return Prepared(case, lambda: (attend(q, k, v, **options),))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attend(*leaves, **options)
    gradient = torch.randn(out.shape, generator=generator, device=device, dtype=out.dtype)
    return Prepared(case, lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True))


def attend_packed(
    library: ModuleType, starts: Tensor, length: int, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Tensor:
    out: Tensor = library.forward_varlen(q, k, v, starts, starts, length, length, **options)
    return out


def checksum(tensor: Tensor) -> int:
    """The sum of the bits, weighted by odd numbers, modulo 2^64. It always shows a difference in one element."""
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).long()
    generator = torch.Generator(tensor.device).manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, bits.shape, generator=generator, device=tensor.device)
    return int((bits * (2 * weights + 1)).sum().item())


def by_head(tensor: Tensor) -> Tensor:
    """The tensor as (..., N, d); a packed one is (total, H, d)."""
    return tensor.transpose(0, 1) if tensor.dim() == 3 else tensor


def answer(prepared: Prepared, request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    if request["do"] == "time":
        return {"ms": prepared.milliseconds(device, request["repeats"])}
    if request["do"] == "check":
        sums, again = ([checksum(t) for t in prepared.results()] for _ in "12")
        return {"ms": prepared.milliseconds(device, 1), "sums": sums, "repeatable": sums == again}
    if request["do"] in ("save", "compare"):
        results = prepared.results()
        chosen = [results[index] for index in request["which"]]
        if request["do"] == "save":
            torch.save(chosen, request["path"])
            return {}
        others = torch.load(request["path"], map_location=device)
        return {"errors": [normalized_error(by_head(x), by_head(y)) for x, y in zip(chosen, others, strict=True)]}
    raise ValueError(f"do: got {request['do']!r}, allowed are check, time, save and compare")


def serve(device_name: str | None = None) -> int:
    """Answers requests until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # text that a library prints is no answer

    def say(record: dict[str, Any]) -> None:
        print(json.dumps(record), file=answers, flush=True)

    try:
        library, device = load_library(), choose_device(device_name)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    package = Path(library.__file__ or "").resolve().parent
    say({"package": str(package), "device": str(device), "environment": describe(library, device).lines()})
    prepared: Prepared | None = None
    for line in sys.stdin:
        request = json.loads(line)
        case = Case.from_json(request["case"])
        try:
            with torch.inference_mode(case.direction == "forward"):
                if prepared is None or prepared.case != case:
                    prepared = None  # frees its memory first
                    prepared = prepare(library, case, device, request["seed"])
                say(answer(prepared, request, device))
        except DeviceLost:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            say({"error": lines[0], "refusal": is_refusal(error)})
    return 0


if __name__ == "__main__":
    sys.exit(serve(*sys.argv[1:]))
