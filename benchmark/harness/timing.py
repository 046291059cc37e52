"""How the benchmarks of this folder take time: one method, in one place.

All contenders of a row are timed together, in rounds. A round times every contender once, and the order rotates by one
place every other round and is turned around in between, so that clock, power and temperature drift hits all of them
alike, and none always comes behind the same one; the ratio of two contenders is the median of their ratios round by
round.

A contender's turn is one untimed call, then one timed call. The untimed call fixes the state of the caches (warm: the
same inputs were just read) and keeps the device busy while the host prepares the timed one. ``Method.sample_ms`` makes
both of them as many calls in a row as take that long: a card with a power limit then comes near its limit.

Clock
    ``wall``    CPU: ``time.perf_counter`` around the call.
    ``events``  CUDA: an event before and after the call, on the current stream.
    ``graph``   CUDA, when any contender of the row takes less than ``Method.graph_below_ms``: launching from Python
                takes 20 us and more, which such a call does not hide. So every contender of the row is captured in a
                CUDA graph of several calls, and a replay is timed instead of a call.

Results are kept: the tensor that a contender's last timed call wrote is handed back, to be checked. A graph's output
is filled with NaN before the first replay.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch

Call = Callable[[], torch.Tensor]
Clock = Literal["wall", "events", "graph"]


@dataclass(frozen=True)
class Contender:
    """A call to be timed, and a context that is entered before its turn and is not part of the time."""

    call: Call
    context: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Method:
    """The parameters of the method. The published tables use the defaults."""

    warmup: int = 10
    repeats: int = 42
    graph: Literal["auto", "on", "off"] = "auto"
    graph_below_ms: float = 0.1
    graph_target_ms: float = 2.0
    graph_max_calls: int = 100
    untimed_call_below_ms: float = 5.0
    sample_ms: float = 0.0  #: clock "events": the calls in a row of a sample take about that long; at least one call

    def describe(self, device: torch.device) -> str:
        """The method in a sentence, for the head of a table."""
        text = f"{self.warmup} warm-ups, {self.repeats} rounds in rotating order"
        untimed = f"each timed call follows an untimed one (below {self.untimed_call_below_ms:g} ms)"
        if device.type == "cpu":
            return f"{text}, wall clock; caches warm: {untimed}"
        graphs = {
            "auto": f", CUDA graphs of several calls in rows with a contender below {1000 * self.graph_below_ms:g} us",
            "on": ", CUDA graphs in every row",
            "off": "",
        }[self.graph]
        in_a_row = f" around calls in a row for {self.sample_ms:g} ms" if self.sample_ms else ""
        return f"{text}, CUDA events{in_a_row}{graphs}; L2 warm: {untimed} on the same inputs"


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call, one sample per round."""

    samples: tuple[float, ...]
    calls_per_sample: int = 1

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def p10(self) -> float:
        return quantile(self.samples, 0.1)

    @property
    def p90(self) -> float:
        return quantile(self.samples, 0.9)

    @property
    def spread(self) -> float:
        """Half the distance from the 10th to the 90th percentile, relative to the median."""
        return 0.5 * (self.p90 - self.p10) / self.median if self.median > 0 else 0.0

    def speedup_over(self, other: Timing) -> float:
        """How many times faster than `other`: the median of the ratios of the same rounds."""
        return statistics.median(b / a for a, b in zip(self.samples, other.samples, strict=True) if a > 0)


@dataclass
class Measurement:
    """One row: what was timed, what each timed call wrote, and what could not be timed and why."""

    clock: Clock
    timings: dict[str, Timing] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)


class DeviceLost(RuntimeError):
    """The CUDA context is unusable after an error: nothing further can be measured in this process."""


def quantile(samples: tuple[float, ...], q: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def measure(
    contenders: Mapping[str, Contender],
    device: torch.device,
    method: Method,
    on_round: Callable[[], None] = lambda: None,
) -> Measurement:
    """Times `contenders` together. One that raises is left out and its exception kept; the others go on."""
    failures: dict[str, Exception] = {}
    estimates: dict[str, float] = {}
    for name, contender in contenders.items():
        try:
            with contender.context():
                estimates[name] = _warm_up(contender.call, device, method)
        except Exception as error:
            failures[name] = _survivable(error, device)

    clock = _choose_clock(min(estimates.values(), default=math.inf), device, method)
    runners: dict[str, _Runner] = {}
    for name, estimate in estimates.items():
        try:
            with contenders[name].context():
                runners[name] = _runner(contenders[name].call, clock, estimate, method)
        except Exception as error:
            failures[name] = _survivable(error, device)

    samples: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(method.repeats):
        for name in _rotated(list(runners), turn):
            runner = runners[name]
            try:
                with contenders[name].context():
                    if estimates[name] < method.untimed_call_below_ms:
                        runner.run()
                    runner.timed_run()
            except Exception as error:  # an allocation can fail here that succeeded in the warm-up
                failures[name] = _survivable(error, device)
                del runners[name]
        _synchronize(device)
        for name, runner in runners.items():
            samples[name].append(runner.elapsed_ms())
        on_round()

    return Measurement(
        clock,
        timings={name: Timing(tuple(samples[name]), runner.calls) for name, runner in runners.items()},
        outputs={name: runner.output for name, runner in runners.items()},
        failures=failures,
    )


def _choose_clock(fastest_ms: float, device: torch.device, method: Method) -> Clock:
    if device.type == "cpu":
        return "wall"
    short = fastest_ms < method.graph_below_ms
    return "graph" if method.graph == "on" or (method.graph == "auto" and short) else "events"


def _rotated(names: list[str], turn: int) -> list[str]:
    """Rotated by one every other round, and in between from the last to the first."""
    shift = turn // 2 % len(names) if names else 0
    order = names[shift:] + names[:shift]
    return order[::-1] if turn % 2 else order


def _runner(call: Call, clock: Clock, estimate_ms: float, method: Method) -> _Runner:
    if clock == "graph":
        return _GraphRunner(call, min(math.ceil(method.graph_target_ms / estimate_ms), method.graph_max_calls))
    return _EventRunner(call, max(1, round(method.sample_ms / estimate_ms))) if clock == "events" else _WallRunner(call)


class _Runner:
    """Runs a contender, untimed or timed. `elapsed_ms` is read once the device is idle."""

    calls = 1
    output: torch.Tensor

    def run(self) -> None:
        raise NotImplementedError

    def timed_run(self) -> None:
        raise NotImplementedError

    def elapsed_ms(self) -> float:
        raise NotImplementedError


class _WallRunner(_Runner):
    def __init__(self, call: Call) -> None:
        self._call = call
        self._elapsed = 0.0

    def run(self) -> None:
        self.output = self._call()

    def timed_run(self) -> None:
        start = time.perf_counter()
        self.output = self._call()
        self._elapsed = 1e3 * (time.perf_counter() - start)

    def elapsed_ms(self) -> float:
        return self._elapsed


class _EventRunner(_Runner):
    def __init__(self, call: Call, calls: int) -> None:
        self._call = call
        self.calls = calls
        self._start, self._end = (torch.Event("cuda", enable_timing=True) for _ in "12")

    def run(self) -> None:
        for _ in range(self.calls):
            self.output = self._call()

    def timed_run(self) -> None:
        self._start.record()
        self.run()
        self._end.record()

    def elapsed_ms(self) -> float:
        elapsed: float = self._start.elapsed_time(self._end)
        return elapsed / self.calls


@contextmanager
def _without_collection() -> Iterator[None]:
    """Python's garbage collector rests: the graph of an earlier row, collected while another is captured, would end the
    capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _GraphRunner(_EventRunner):
    def __init__(self, call: Call, calls: int) -> None:
        super().__init__(call, calls)
        self._graph = torch.cuda.CUDAGraph()
        with _without_collection(), torch.cuda.graph(self._graph):
            for _ in range(calls):
                self.output = call()
        self.output.fill_(math.nan)

    def run(self) -> None:
        self._graph.replay()


def _warm_up(call: Call, device: torch.device, method: Method) -> float:
    """Runs `call` often enough to be warm. Returns milliseconds per call, as the host sees them."""
    call()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(max(method.warmup - 1, 1)):
        call()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - start) / max(method.warmup - 1, 1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _survivable(error: Exception, device: torch.device) -> Exception:
    """Returns `error` if the device still works. Frees the memory that an out-of-memory error left behind."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except Exception as lost:
            raise DeviceLost(f"the CUDA device is unusable after: {error}") from lost
    return error
