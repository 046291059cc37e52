#!/usr/bin/env python3
"""What calls cost beside the same calls without: statistics, sinks, transforms, gradients of slopes. Needs a GPU.

    python benchmark/costs.py                             16,384 tokens, hidden size 2048, N = 2048, fp16
    python benchmark/costs.py --rows max vmap --head-dims 64 --json costs.json
    python benchmark/costs.py --rows max entropy column_sum --backward-kernel bwd_sm80

Each row times two calls in turn by the method of harness/timing.py, and gives the median of the ratios round by round:

    max, entropy, column_sum, sinks    forward with that argument, over forward
    training with column_sum           the same, and the gradients of q, k and v through out
    gradients of slopes                forward and backward with alibi_slopes that require a gradient, over slopes that
                                       do not
    vmap                               torch.func.vmap of forward over 8 entries, over the batched call
    jvp                                torch.func.jvp of forward in q, k and v, at N = 16,384 and one batch entry, over
                                       forward; also in q, k or v alone

With --backward-kernel the statistics of the first three are computed by a pass of that kernel. Without, forward's
kernel tells maxima and entropies if it can. Samples are calls in a row for 10 ms, queued without a wait between them.
So a row shows the host's time only where it exceeds the GPU's.
Exit status: 0; 1 if a call failed; 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import environment, timing
from harness.problems import DTYPES
from harness.program import CannotRun, choose_device, load_library, positive
from harness.report import Table
from harness.sweep import HIDDEN, TOKENS

Call = Callable[[], Tensor]
LENGTH, LONG = 2048, 16384
MAPPED = 8


class Calls:
    """The pairs of calls, of a head dim: with what the row is for, and without."""

    def __init__(
        self, library: Any, device: torch.device, dtype: torch.dtype, d: int, backward_kernel: str = "auto"
    ) -> None:
        self.forward, self.options = library.forward, {"device": device, "dtype": dtype}
        self.backward_kernel = backward_kernel
        self.d, self.heads, self.device = d, HIDDEN // d, device
        self.q, self.k, self.v = self.tensors(TOKENS // LENGTH, LENGTH)

    def tensors(self, batch: int, n: int) -> list[Tensor]:
        return [torch.randn(batch, self.heads, n, self.d, **self.options) for _ in range(3)]

    def plain(self) -> Tensor:
        return self.forward(self.q, self.k, self.v)  # type: ignore[no-any-return]

    def aux(self, name: str) -> tuple[Call, Call]:
        options = {"return_aux": (name,), "backward_kernel": self.backward_kernel}
        return lambda: self.forward(self.q, self.k, self.v, **options)[0], self.plain

    def training(self) -> tuple[Call, Call]:
        leaves = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]
        dout = torch.randn_like(self.q)

        def step(**options: Any) -> Tensor:
            out = self.forward(*leaves, **options)
            return torch.autograd.grad(out[0] if options else out, leaves, dout)[0]

        return lambda: step(return_aux=("column_sum",)), step

    def sinks(self) -> tuple[Call, Call]:
        sinks = torch.randn(self.heads, device=self.device)
        return lambda: self.forward(self.q, self.k, self.v, sinks=sinks), self.plain

    def slopes(self) -> tuple[Call, Call]:
        leaves = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]
        dout = torch.randn_like(self.q)

        def step(slopes: Tensor) -> Tensor:
            out = self.forward(*leaves, alibi_slopes=slopes)
            wanted = [*leaves, slopes] if slopes.requires_grad else leaves
            return torch.autograd.grad(out, wanted, dout)[0]

        slopes = torch.rand(self.heads, device=self.device) / 100
        learned = slopes.clone().requires_grad_()
        return lambda: step(learned), lambda: step(slopes)

    def vmap(self) -> tuple[Call, Call]:
        mapped = [t.unflatten(0, (MAPPED, -1)) for t in (self.q, self.k, self.v)]
        return lambda: torch.func.vmap(self.forward)(*mapped).flatten(0, 1), self.plain

    def jvp(self, moves: Sequence[int] = (0, 1, 2)) -> tuple[Call, Call]:
        """With tangents of those of q, k and v."""
        primals, tangents = (self.tensors(1, LONG) for _ in range(2))
        with_tangents: Any = torch.func.jvp

        def attend(*moving: Tensor) -> Tensor:
            given = list(primals)
            for i, t in zip(moves, moving, strict=True):
                given[i] = t
            return self.forward(*given)

        moving = [tuple(of[i] for i in moves) for of in (primals, tangents)]
        return lambda: with_tangents(attend, *moving)[1], lambda: self.forward(*primals)


ROWS: dict[str, Callable[[Calls], tuple[Call, Call]]] = {
    "max": lambda calls: calls.aux("max"),
    "entropy": lambda calls: calls.aux("entropy"),
    "column_sum": lambda calls: calls.aux("column_sum"),
    "training with column_sum": Calls.training,
    "sinks": Calls.sinks,
    "gradients of slopes": Calls.slopes,
    "vmap": Calls.vmap,
    "jvp": Calls.jvp,
    "jvp in q alone": lambda calls: calls.jvp([0]),
    "jvp in k alone": lambda calls: calls.jvp([1]),
    "jvp in v alone": lambda calls: calls.jvp([2]),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--head-dims", nargs="+", type=positive, default=[64, 128])
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--backward-kernel", default="auto", help="of max, entropy and column_sum")
    parser.add_argument("--repeats", type=positive, default=11)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args(arguments)
    try:
        library, device = load_library(), choose_device("cuda")
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    method = timing.Method(repeats=options.repeats, graph="off", sample_ms=10)
    head = [*environment.describe(library, device).lines(), f"method    {method.describe(device)}"]
    print("\n".join(head))
    rows, failed = [], False
    for d in options.head_dims:
        calls = Calls(library, device, DTYPES[options.dtype], d, options.backward_kernel)
        for name in options.rows:
            with_it, without = ROWS[name](calls)
            found = timing.measure(
                {"with": timing.Contender(with_it), "without": timing.Contender(without)}, device, method
            )
            for error in found.failures.values():
                print(f"d {d}, {name}: {error}", file=sys.stderr)
                failed = True
            if not found.failures:
                t = found.timings
                rows.append((d, name, t["with"].median, t["without"].median, 1 / t["with"].speedup_over(t["without"])))
    cells = [[name, str(d), f"{a:.3g}", f"{b:.3g}", f"{times:.2f}"] for d, name, a, b, times in rows]
    print("\n" + Table("Calls beside the same calls without", ["", "d", "ms", "ms without", "times"], cells).text())
    if options.json:
        fields = ("head_dim", "row", "ms", "ms_without", "times")
        made = {"environment": head, "rows": [dict(zip(fields, row, strict=True)) for row in rows]}
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
