#!/usr/bin/env python3
"""Backward with a feature beside backward without it: deterministic, grouped heads, packed sequences. Needs a GPU.

    python benchmark/backward_features.py                 16,384 tokens, hidden size 2048, d = 64 and 128, fp16
    python benchmark/backward_features.py --kernels bwd_sm90 bwd_sm80 --dtype bf16 --json backward_features.json
    python benchmark/backward_features.py --device cpu --dtype fp32 --hidden 128 --head-dims 16 --lengths 16 1 8 7

The last line is a try without a GPU. A cell is not causal / causal. A line gives the speed of one call relative to
another:

    deterministic    over the same call that is not deterministic, at twice the longest of --lengths
    GQA 8:1          over the same with 8 times the K and V heads, at the longest of --lengths
    packed           sequences of --lengths, over padded ones: dense, as many and all as long as the longest
    packed           over a dense call of as many tokens: fewer sequences, all as long as the longest

What is timed is one ``torch.autograd.grad`` of q, k and v, whose forward pass ran before. The calls of a line are timed
together by the method of harness/timing.py, and the speed is the median of the ratios round by round. The gradients of
the first call are compared with the same ones computed otherwise: by the second call, or of packed sequences by a dense
call for each of them.
Exit status: 0; 1 if gradients differ or a call does not run; 2 if the program cannot run as asked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from harness.accuracy import TOLERANCE, normalized_error
from harness.build_worker import by_head
from harness.environment import describe
from harness.problems import DTYPES, Problem, make_inputs
from harness.program import CannotRun, choose_device, load_library, positive
from harness.report import Table, progress
from harness.sweep import HIDDEN, PACKED_LENGTHS, SAMPLE_HELP, both
from harness.timing import Call, Contender, DeviceLost, Method, measure

GROUP = 8
"""Query heads to a K and V head."""
MASKS = (False, True)

Gradients = Callable[[], tuple[Tensor, ...]]
"""Computes the gradients of q, k and v."""


@dataclass(frozen=True)
class Comparison:
    """A call with a feature, and calls without it."""

    name: str
    feature: Gradients
    others: Mapping[str, Gradients]
    expected: Gradients  #: the gradients that the feature has to give, computed otherwise


@dataclass(frozen=True)
class Result:
    """A comparison with one of the other calls, as measured."""

    kernel: str
    head_dim: int
    causal: bool
    name: str
    over: str
    ms: float
    over_ms: float
    speed: float
    error: float
    right: bool
    samples_ms: Sequence[float]
    over_samples_ms: Sequence[float]


def gradients(attend: Callable[..., Tensor], inputs: Iterable[Tensor], dout: Tensor) -> Gradients:
    """The gradients of `attend`'s inputs. Its forward pass runs at once."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def first(call: Gradients) -> Call:
    return lambda: call()[0]


@dataclass(frozen=True)
class Setting:
    """What all comparisons share, and the comparisons."""

    library: ModuleType
    device: torch.device
    dtype: str
    seed: int
    lengths: Sequence[int]
    hidden: int
    kernel: str
    head_dim: int
    causal: bool

    @property
    def heads(self) -> int:
        """Whole groups of them."""
        return self.hidden // (GROUP * self.head_dim) * GROUP

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def inputs(self, batch: int, length: int) -> list[Tensor]:
        """q, k and v, (batch, heads, length, head_dim)."""
        problem = Problem(batch, self.heads, length, self.head_dim, self.dtype, self.causal)
        return make_inputs(problem, DTYPES[self.dtype], self.device, self.seed)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, deterministic: bool = False) -> Tensor:
        out: Tensor = self.library.forward(
            q, k, v, causal=self.causal, backward_kernel=self.kernel, deterministic=deterministic
        )
        return out

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        starts = torch.tensor((0, *self.lengths), device=self.device).cumsum(0, dtype=torch.int32)
        out: Tensor = self.library.forward_varlen(
            q, k, v, starts, starts, self.longest, self.longest, causal=self.causal, backward_kernel=self.kernel
        )
        return out

    def dense(self, batch: int) -> tuple[str, Gradients]:
        """The shape, and the gradients of so many sequences, all as long as the longest."""
        inputs = self.inputs(batch, self.longest)
        return f"{batch} x {self.longest}", gradients(self.attend, inputs, torch.randn_like(inputs[0]))

    def deterministic(self) -> Comparison:
        length = 2 * self.longest
        inputs = self.inputs(sum(self.lengths) // length, length)
        dout = torch.randn_like(inputs[0])
        without = gradients(self.attend, inputs, dout)
        feature = gradients(partial(self.attend, deterministic=True), inputs, dout)
        return Comparison("deterministic", feature, {f"not, N = {length}": without}, without)

    def grouped(self) -> Comparison:
        q, *keys_and_values = self.inputs(sum(self.lengths) // self.longest, self.longest)
        dout = torch.randn_like(q)
        narrow = [t[:, ::GROUP].contiguous() for t in keys_and_values]
        without = gradients(self.attend, (q, *(t.repeat_interleave(GROUP, 1) for t in narrow)), dout)

        def expected() -> tuple[Tensor, ...]:
            dq, *wide = without()
            return dq, *(t.float().unflatten(1, (-1, GROUP)).sum(2) for t in wide)

        over = f"{GROUP} times the K and V heads, N = {self.longest}"
        return Comparison(f"GQA {GROUP}:1", gradients(self.attend, (q, *narrow), dout), {over: without}, expected)

    def packed(self) -> Comparison:
        inputs = [t[0].transpose(0, 1).contiguous() for t in self.inputs(1, sum(self.lengths))]
        dout = torch.randn_like(inputs[0])

        def one_by_one() -> tuple[Tensor, ...]:
            sequences = zip(*(t.transpose(0, 1)[None].split(self.lengths, 2) for t in (*inputs, dout)), strict=True)
            found = [gradients(self.attend, qkv, part)() for *qkv, part in sequences]
            return tuple(torch.cat(parts, 2)[0].transpose(0, 1) for parts in zip(*found, strict=True))

        padded, padded_gradients = self.dense(len(self.lengths))
        tokens, dense_gradients = self.dense(sum(self.lengths) // self.longest)
        others = {f"padded, {padded}": padded_gradients, f"as many tokens, {tokens}": dense_gradients}
        return Comparison("packed", gradients(self.attend_packed, inputs, dout), others, one_by_one)

    def measured(self, comparison: Comparison, method: Method, on_round: Callable[[], None]) -> list[Result]:
        """A result for each of the other calls. All are timed together."""
        calls = {comparison.name: comparison.feature, **comparison.others}
        found = measure({name: Contender(first(call)) for name, call in calls.items()}, self.device, method, on_round)
        for failure in found.failures.values():
            raise failure
        pairs = zip(comparison.feature(), comparison.expected(), strict=True)
        errors = [normalized_error(by_head(x), by_head(y)) for x, y in pairs]
        error = torch.tensor(errors).max().item()  # NaN if there is any
        ours = found.timings[comparison.name]
        return [
            Result(
                kernel=self.kernel,
                head_dim=self.head_dim,
                causal=self.causal,
                name=comparison.name,
                over=name,
                ms=ours.median,
                over_ms=found.timings[name].median,
                speed=ours.speedup_over(found.timings[name]),
                error=error,
                right=error <= TOLERANCE[self.dtype],
                samples_ms=ours.samples,
                over_samples_ms=found.timings[name].samples,
            )
            for name in comparison.others
        ]


COMPARISONS = (Setting.deterministic, Setting.grouped, Setting.packed)


def table(title: str, results: Iterable[Result]) -> Table:
    """A line for each pair of calls and head dim, with both masks."""
    lines: dict[tuple[str, int], dict[bool, Result]] = {}
    for result in results:
        lines.setdefault((f"{result.name} over {result.over}", result.head_dim), {})[result.causal] = result

    def cells(found: Mapping[bool, Result]) -> list[str]:
        forms = {"ms": "{:.3g}", "over_ms": "{:.3g}", "speed": "{:.2f}"}
        return [both([getattr(found.get(c), field, None) for c in MASKS], form) for field, form in forms.items()]

    rows = [[name, str(d), *cells(found)] for (name, d), found in lines.items()]
    return Table(title, ["", "d", "ms", "over ms", "speed"], rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", default=["auto"], metavar="NAME", help="of backward (default: auto)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--head-dims", nargs="+", type=positive, default=[64, 128], metavar="D")
    parser.add_argument(
        "--lengths", nargs="+", type=positive, default=list(PACKED_LENGTHS), metavar="N", help="of packed sequences"
    )
    parser.add_argument("--hidden", type=positive, default=HIDDEN, help=f"head dim times heads (default: {HIDDEN})")
    parser.add_argument("--repeats", type=positive, default=7, metavar="ROUNDS")
    parser.add_argument("--sample-ms", type=float, default=0.0, metavar="MS", help=SAMPLE_HELP)
    parser.add_argument("--seed", type=int, default=0, help="of the normally distributed inputs")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    return parser.parse_args(arguments)


def check_sizes(lengths: Sequence[int], hidden: int, head_dims: Sequence[int]) -> None:
    if sum(lengths) % (2 * max(lengths)):
        raise CannotRun(f"--lengths: got a sum of {sum(lengths)}, allowed are multiples of twice the longest")
    if wrong := [d for d in head_dims if GROUP * d > hidden]:
        raise CannotRun(f"--head-dims: got {wrong[0]}, allowed are at most --hidden / {GROUP}, {hidden // GROUP}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        check_sizes(options.lengths, options.hidden, options.head_dims)
        library, device = load_library(), choose_device(options.device)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    environment = describe(library, device)
    # Autograd has streams of its own, which a graph does not capture
    method = Method(warmup=3, repeats=options.repeats, graph="off", sample_ms=options.sample_ms)
    print("\n".join(environment.lines()), f"method    {method.describe(device)}", sep="\n", end="\n\n", flush=True)

    results: list[Result] = []
    failures: list[str] = []
    with progress() as bar:
        for kernel, d in itertools.product(options.kernels, options.head_dims):
            bar.start(f"{kernel}, d = {d}", len(COMPARISONS) * len(MASKS) * options.repeats)
            for compare, causal in itertools.product(COMPARISONS, MASKS):
                setting = Setting(
                    library, device, options.dtype, options.seed, options.lengths, options.hidden, kernel, d, causal
                )
                try:
                    results += setting.measured(compare(setting), method, bar.advance)
                except DeviceLost:
                    raise
                except (RuntimeError, ValueError) as error:
                    where = f"{kernel}, d = {d}, {compare.__name__}, causal: {causal}"
                    failures.append(f"{where}: {str(error).splitlines()[0]}")
    for kernel in dict.fromkeys(result.kernel for result in results):
        of_kernel = [result for result in results if result.kernel == kernel]
        title = f"Backward by {kernel}, {options.dtype}: speed of one call relative to another"
        print(table(title, of_kernel).text(), end="\n\n")
    if options.json:
        rows = [asdict(result) for result in results]
        document = {"environment": environment.to_json(), "method": asdict(method), "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    wrong = [result for result in results if not result.right]
    failures += [f"{r.kernel}, d = {r.head_dim}, {r.name}, causal: {r.causal}: off by {r.error:.1e}" for r in wrong]
    for failure in dict.fromkeys(failures):
        print(failure, file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
