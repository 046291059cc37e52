"""What attention allocates, reads and writes, operation by operation, forward and backward.

    python benchmark/memory.py                               # on the GPU if there is one, else on the CPU
    python benchmark/memory.py --shape 2,8,4096,64 --json memory.json --plot memory.png
    python benchmark/memory.py --from memory.json --plot memory.png

Contenders, all causal:

    op by op     S, its scale, its mask, exp, the division by the row's sum, P V: each a torch op, gradients by autograd
    explicit     the same, in place where that can be, and FlashAttention's formulas for the gradients as matmuls:
                 dV = P^T dO, dP = dO V^T, D = rowsum(dO * O), dS = P * (dP - D), dQ = dS K, dK = dS^T Q
    unfused      flash_wmma.forward(kernel="unfused"): cuBLAS, one softmax kernel between the products, cuBLAS
    flash_wmma   flash_wmma.forward: the fused kernel that "auto" takes

A dispatch mode sees every op that torch runs, in backward too, with the tensors that it reads and writes; views move no
data and are left out. A square buffer is a tensor of B H T T elements. It is alive as long as its storage is, whoever
holds it: a variable, or autograd for backward. No dispatch mode sees the workspace that an op allocates for itself, so
peaks are the allocator's (on a GPU torch's memory statistics, whose history is also read for a second count of
the square buffers; on the CPU the profiler's record).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import flash_wmma
from harness import environment
from harness.problems import DTYPES

MIB = 2**20

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


# ----------------------------------------------------------------------------------------------------------- contenders


def causal_mask(t: Tensor) -> Tensor:
    """(T, T), true where the key is hidden."""
    n = t.shape[2]
    return torch.ones(n, n, dtype=torch.bool, device=t.device).triu(1)


def op_by_op(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """The worked example: the scores' maximum is left out, as in the formula of the softmax."""
    s = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    x = s.masked_fill(hidden, -torch.inf)
    e = x.exp()
    p = e / e.sum(-1, keepdim=True)
    return p @ v


class Explicit(torch.autograd.Function):
    """Standard attention with its gradients written out; in place wherever a buffer is no longer needed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        ctx.scale = q.shape[-1] ** -0.5
        s = q @ k.transpose(-2, -1)
        p = s.mul_(ctx.scale).masked_fill_(hidden, -torch.inf).softmax(-1)
        o = p @ v
        ctx.save_for_backward(q, k, v, o, p)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, o, p = ctx.saved_tensors
        dv = p.transpose(-2, -1) @ do
        dp = do @ v.transpose(-2, -1)
        ds = dp.sub_((do * o).sum(-1, keepdim=True)).mul_(p)
        return (ds @ k).mul_(ctx.scale), (ds.transpose(-2, -1) @ q).mul_(ctx.scale), dv, None


def contenders(q: Tensor) -> dict[str, Attention]:
    """The contenders by name, each a function of q, k and v."""
    hidden = causal_mask(q)
    return {
        "op by op": lambda q, k, v: op_by_op(q, k, v, hidden),
        "explicit": lambda q, k, v: Explicit.apply(q, k, v, hidden),
        "unfused": lambda q, k, v: flash_wmma.forward(q, k, v, causal=True, kernel="unfused"),
        "flash_wmma": lambda q, k, v: flash_wmma.forward(q, k, v, causal=True),
    }


INSIDE = {"unfused": (2, 2)}
"""Square buffers that the forward op itself reads and writes, which torch does not see: S, then P."""


# ------------------------------------------------------------------------------------------------------------ recording


@dataclass
class Op:
    """One operation that moves data."""

    name: str
    phase: str  #: forward or backward
    node: str  #: the autograd node whose gradient it is part of
    square_reads: int  #: inputs of B H T T elements
    square_writes: int  #: outputs of B H T T elements, new ones and those written in place
    read_bytes: int
    written_bytes: int
    allocated: list[int]  #: square buffers that it made, by number
    alive: list[int]  #: square buffers alive when it ended
    peak_bytes: int = 0  #: the most that was allocated while it ran, without the inputs
    begin_ns: int = 0
    end_ns: int = 0


@dataclass
class Record:
    """The operations of one contender."""

    ops: list[Op] = field(default_factory=list)
    history_squares: int | None = None  #: the most square buffers alive by the allocator's own history

    def of(self, phase: str) -> list[Op]:
        return [op for op in self.ops if op.phase == phase]

    def most_alive(self, phase: str) -> int:
        """The most square buffers alive."""
        return max((len(op.alive) for op in self.of(phase)), default=0)

    def peak_bytes(self, phase: str) -> int:
        return max((op.peak_bytes for op in self.of(phase)), default=0)

    def total(self, phase: str, what: str) -> int:
        return sum(getattr(op, what) for op in self.of(phase))

    def most_in_a_node(self) -> tuple[str, int]:
        """The autograd node whose gradient allocates most square buffers, and how many."""
        made: dict[str, int] = {}
        for op in self.of("backward"):
            made[op.node] = made.get(op.node, 0) + len(op.allocated)
        return max(made.items(), key=lambda item: item[1], default=("", 0))


class Recorder(TorchDispatchMode):
    """Sees every op."""

    def __init__(self, square: int, device: torch.device) -> None:
        super().__init__()
        self.record = Record()
        self.phase = "forward"
        self.square, self.device = square, device
        self.buffers: list[StorageWeakRef] = []
        self.base = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def is_square(self, t: Tensor) -> bool:
        """Whether t has B H T T elements, in memory too."""
        return t.numel() == self.square and t.untyped_storage().nbytes() >= t.nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = time.time_ns()
        result = func(*args, **(kwargs or {}))
        end = time.time_ns()
        inputs, outputs = list(tensors((args, kwargs))), list(tensors(result))
        read = {t.untyped_storage().data_ptr() for t in inputs}
        mutable = func._schema.is_mutable
        if not mutable and all(t.untyped_storage().data_ptr() in read for t in outputs):
            return result  # a view
        made = []
        for t in outputs:
            storage = StorageWeakRef(t.untyped_storage())
            if self.is_square(t) and not any(s == storage for s in self.buffers if not s.expired()):
                made.append(len(self.buffers))
                self.buffers.append(storage)
        written = [*outputs, *(t for t, a in zip(args, func._schema.arguments, strict=False) if is_written(t, a))]
        written = list({(t.untyped_storage().data_ptr(), t.storage_offset()): t for t in written}.values())
        node = torch._C._current_autograd_node()
        peak = torch.cuda.max_memory_allocated(self.device) - self.base if self.device.type == "cuda" else 0
        self.record.ops.append(
            Op(
                name=str(func).removeprefix("aten.").rpartition(".")[0],
                phase=self.phase,
                node=node.name() if node is not None and self.phase == "backward" else "",
                square_reads=sum(self.is_square(t) for t in inputs),
                square_writes=sum(self.is_square(t) for t in written),
                read_bytes=sum(moved(t) for t in inputs),
                written_bytes=sum(moved(t) for t in written),
                allocated=made,
                alive=[i for i, s in enumerate(self.buffers) if not s.expired()],
                peak_bytes=peak,
                begin_ns=begin,
                end_ns=end,
            )
        )
        return result


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors(one)


def is_written(value: object, argument: Any) -> bool:
    """Whether an op writes that argument."""
    return isinstance(value, Tensor) and argument.alias_info is not None and argument.alias_info.is_write


def moved(t: Tensor) -> int:
    """Bytes of its elements; for a broadcast tensor, those in memory."""
    return min(t.nbytes, t.untyped_storage().nbytes())


def recorded(attention: Attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Record:
    """One call, forward and backward."""
    square = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    recorder = Recorder(square, q.device)

    def run() -> None:
        with recorder:
            o = attention(q, k, v)
            recorder.phase = "backward"
            o.backward(do)

    if q.device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        try:
            run()
            torch.cuda.synchronize(q.device)
            events = torch.cuda.memory._snapshot(q.device)["device_traces"][q.device.index or 0]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        bytes_ = square * q.element_size()
        recorder.record.history_squares = most_in_history(events, bytes_, (bytes_ + 511) // 512 * 512)
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            run()
        assert record.profiler is not None
        events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
        set_cpu_peaks(recorder.record.ops, [(e.start_ns(), e.nbytes()) for e in events])
    for t in (q, k, v):
        t.grad = None
    return recorder.record


def most_in_history(events: Sequence[dict[str, Any]], least: int, most: int) -> int:
    """The most blocks of `least` to `most` bytes that were allocated at a time."""
    alive = highest = 0
    for event in events:
        if least <= event["size"] <= most:
            alive += {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
            highest = max(highest, alive)
    return highest


def set_cpu_peaks(ops: Sequence[Op], events: Sequence[tuple[int, int]]) -> None:
    """Peaks from the allocator's events, (ns, bytes allocated or, negative, freed)."""
    queue, total = sorted(events), 0
    for op in ops:
        while queue and queue[0][0] < op.begin_ns:
            total += queue.pop(0)[1]
        op.peak_bytes = total
        while queue and queue[0][0] <= op.end_ns:
            total += queue.pop(0)[1]
            op.peak_bytes = max(op.peak_bytes, total)


# ------------------------------------------------------------------------------------------------------------ reporting


def table(name: str, record: Record, square_bytes: int) -> Any:
    from rich.table import Table

    rows = Table(title=f"{name}, op by op", title_justify="left")
    for column in ("", "op", "gradient of"):
        rows.add_column(column)
    for column in ("T² reads", "writes", "MiB read", "written", "T² made", "alive", "peak, T² buffers"):
        rows.add_column(column, justify="right")
    for op in record.ops:
        if op.square_reads + op.square_writes == 0 and "flash_wmma" not in op.name:
            continue
        rows.add_row(
            op.phase,
            op.name,
            op.node,
            str(op.square_reads),
            str(op.square_writes),
            f"{op.read_bytes / MIB:.1f}",
            f"{op.written_bytes / MIB:.1f}",
            str(len(op.allocated)),
            str(len(op.alive)),
            f"{op.peak_bytes / square_bytes:.2f}",
        )
    return rows


def summary(records: dict[str, Record], square_bytes: int) -> Any:
    from rich.table import Table

    rows = Table(title="B H T T buffers: most alive, reads and writes; peak in bytes", title_justify="left")
    rows.add_column("contender")
    for phase in ("forward", "backward"):
        for column in ("alive", "reads", "writes", "peak MiB", "peak, T² buffers"):
            rows.add_column(f"{phase}\n{column}", justify="right")
    for name, record in records.items():
        row = [name]
        for phase in ("forward", "backward"):
            more = INSIDE.get(name, (0, 0)) if phase == "forward" else (0, 0)
            row += [
                str(record.most_alive(phase)),
                str(record.total(phase, "square_reads") + more[0]),
                str(record.total(phase, "square_writes") + more[1]),
                f"{record.peak_bytes(phase) / MIB:.1f}",
                f"{record.peak_bytes(phase) / square_bytes:.2f}",
            ]
        rows.add_row(*row)
    return rows


def plot(records: dict[str, Record], square_bytes: int, path: Path) -> None:
    """Above: the life of each square buffer of the op-by-op form. Below: bytes of every contender, op by op."""
    from matplotlib import pyplot as plt

    figure, (lives, levels) = plt.subplots(2, 1, figsize=(11, 9), layout="constrained", height_ratios=[1.3, 1])
    ops = [op for op in records["op by op"].ops if op.square_reads + op.square_writes]
    made = sorted({i for op in ops for i in op.alive})
    for lane, buffer in enumerate(made):
        steps = [i for i, op in enumerate(ops) if buffer in op.alive]
        birth = ops[steps[0]]
        color = "#d55e00" if birth.node.startswith("Div") else "#0072b2"
        lives.broken_barh([(steps[0] - 0.45, steps[-1] - steps[0] + 0.9)], (lane - 0.38, 0.76), color=color, alpha=0.8)
    first = sum(op.phase == "forward" for op in ops)
    lives.axvline(first - 0.5, color="black", linewidth=0.8)
    lives.set_xticks(range(len(ops)), [f"{op.name}\n{len(op.alive)} alive" for op in ops], rotation=60, ha="right")
    lives.set_ylim(len(made) - 0.4, -0.6)
    lives.set_ylabel("(B, H, T, T) buffer, by number")
    lives.set_title("op by op: buffers alive at each op (orange: made by the division's gradient)", fontsize=10)
    for color, (name, record) in zip(("#0072b2", "#009e73", "#d55e00", "#cc79a7"), records.items(), strict=False):
        peaks = [op.peak_bytes / square_bytes for op in record.ops]
        share = sum(op.phase == "forward" for op in record.ops)
        # Forward takes the left half, backward the right one, whatever the number of ops.
        at = [
            i / max(share, 1) if i < share else 1 + (i - share) / max(len(peaks) - share, 1) for i in range(len(peaks))
        ]
        levels.step([*at, 2.0], [*peaks, peaks[-1]], where="post", color=color, label=name)
    levels.axvline(1, color="black", linewidth=0.8)
    levels.set_xticks([0.5, 1.5], ["forward", "backward"])
    levels.set_ylabel("allocated, in (B, H, T, T) buffers")
    levels.legend(frameon=False)
    for axes in (lives, levels):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(given: dict[str, Any], records: dict[str, Record]) -> None:
    from rich.console import Console

    console = Console(width=132)
    console.print("\n".join(given["environment"]), highlight=False)
    console.print(f"B, H, T, d = {given['shape']}, {given['dtype']}, causal", highlight=False)
    for name, record in records.items():
        console.print(table(name, record, given["square_bytes"]))
    console.print(summary(records, given["square_bytes"]))
    node, count = records["op by op"].most_in_a_node()
    console.print(f"op by op: most are made by {node}: {count}", highlight=False)
    history = {name: record.history_squares for name, record in records.items() if record.history_squares is not None}
    if history:
        console.print(f"most alive by the allocator's history: {history}", highlight=False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", help="B,H,T,d (default: 2,8,2048,64, on the CPU 1,2,256,32)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp16, on the CPU fp32")
    parser.add_argument("--json", type=Path, help="write the records there")
    parser.add_argument("--plot", type=Path, help="draw them there")
    parser.add_argument("--from", dest="source", type=Path, help="records from there instead of a run")
    return parser.parse_args()


def measured(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Record]]:
    """The facts of the run, and every contender's record."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    for t in (q, k, v):
        t.requires_grad_()
    records, expected = {}, None
    for name, attention in contenders(q).items():
        out = attention(q, k, v)
        out.backward(do)  # so that lazily made state, such as cuBLAS's, is no part of the record
        expected = out.detach() if expected is None else expected
        assert (out.detach() - expected).abs().max() < (1e-4 if dtype == torch.float32 else 3e-2), name
        q.grad = k.grad = v.grad = None
        del out
        records[name] = recorded(attention, q, k, v, do)
    given = {
        "environment": environment.describe(flash_wmma, device).lines(),
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "square_bytes": shape[0] * shape[1] * shape[2] ** 2 * dtype.itemsize,
    }
    return given, records


def main() -> None:
    args = arguments()
    if args.source:
        text = json.loads(args.source.read_text())
        given = text["given"]
        records = {
            name: Record([Op(**op) for op in r["ops"]], r["history_squares"]) for name, r in text["records"].items()
        }
    else:
        on_cpu = args.device == "cpu"
        shape = tuple(map(int, (args.shape or ("1,2,256,32" if on_cpu else "2,8,2048,64")).split(",")))
        dtype = DTYPES[args.dtype or ("fp32" if on_cpu else "fp16")]
        given, records = measured(torch.device(args.device), shape, dtype)
    report(given, records)
    if args.json:
        text = {"given": given, "records": {name: asdict(record) for name, record in records.items()}}
        args.json.write_text(json.dumps(text, indent=1) + "\n")
    if args.plot:
        plot(records, given["square_bytes"], args.plot)


if __name__ == "__main__":
    main()
