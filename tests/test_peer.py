"""Messages by copy engines (flash_wmma/distributed/_peer.py) without GPUs: threads are ranks, and what the driver puts
on streams happens at once, in a rank's own time. So a wait that is missing, or one that nothing ends, shows."""

from __future__ import annotations

import ctypes
import random
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_wmma
from flash_wmma._call import Call
from flash_wmma.distributed import _layout, _peer, _ring
from flash_wmma.distributed._agree import Place
from flash_wmma.distributed._messages import Shape, Travel
from flash_wmma.distributed._plan import Band

PATIENCE = 20.0
"""Seconds."""
CPU = torch.device("cpu")


class Stream:
    """All on it is over when a call returns."""

    cuda_stream = 0
    local = threading.local()
    """``depth``: how many devices the thread has made its current one."""

    def check(self) -> None:
        """The driver's default stream is that of the current device, which must be the peer's."""
        assert getattr(self.local, "depth", 0) > 0

    def wait_event(self, event: Event) -> None:
        assert event.recorded


class Event:
    recorded = False

    def record(self, stream: Stream) -> None:
        self.recorded = True


class Host:
    """What the ranks of a host share."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.barrier = threading.Barrier(world, timeout=PATIENCE)
        self.memory: dict[tuple[int, int], Tensor] = {}
        """By the number of a rank's request and the rank."""
        self.local = threading.local()

    def exchanged(self, place: Place, *numbers: int) -> list[list[int]]:
        memory = Memory(self, place, len(numbers), torch.int64)
        memory.own.copy_(torch.tensor(numbers))
        self.barrier.wait()
        return [each.tolist() for each in memory.of]


class Memory(_peer._Symmetric):
    def __init__(self, host: Host, place: Place, elements: int, dtype: torch.dtype) -> None:
        request = host.local.requests = getattr(host.local, "requests", 0) + 1
        self.own = torch.empty(elements, dtype=dtype)
        host.memory[request, place.rank] = self.own
        host.barrier.wait()
        self.of = [host.memory[request, rank] for rank in range(place.world)]


def value(word: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(word)


def write(stream: Stream, word: int, number: int) -> None:
    stream.check()
    value(word).value = number % (1 << 32)


def wait(stream: Stream, word: int, number: int) -> None:
    stream.check()
    begin = time.monotonic()
    while (value(word).value - number) % (1 << 32) >= 1 << 31:
        if time.monotonic() > begin + PATIENCE:
            raise TimeoutError("nothing ends a wait")
        time.sleep(0.0005)


@pytest.fixture
def host_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Host]:
    """Makes a host of so many ranks."""

    @contextmanager
    def device(_: Any) -> Iterator[None]:
        depth = getattr(Stream.local, "depth", 0)
        Stream.local.depth = depth + 1
        try:
            yield
        finally:
            Stream.local.depth = depth

    class Watchdog:
        def __init__(self, seconds: float, rank: int) -> None:
            self.calls = 0

        def expect(self, stream: Stream) -> None:
            self.calls += 1

    def make(world: int) -> Host:
        host = Host(world)
        delays = random.Random(world)

        def copy(stream: Stream, to: Tensor, source: Tensor) -> None:
            time.sleep(delays.choice([0, 0, 0.004]))  # others go on
            to.copy_(source)

        class Group:
            @staticmethod
            def barrier(_: Any) -> None:
                host.barrier.wait()

            @staticmethod
            def get_rank() -> int:
                return 0

        for name, fake in (
            ("_write", write),
            ("_wait", wait),
            ("_copy", copy),
            ("_Symmetric", lambda *given: Memory(host, *given)),
            ("_Watchdog", Watchdog),
            ("_timeout", lambda group: PATIENCE),
            ("dist", Group),
            ("exchanged", host.exchanged),
        ):
            monkeypatch.setattr(_peer, name, fake)
        for name, fake in (
            ("Stream", Stream),
            ("Event", Event),
            ("current_stream", Stream),
            ("synchronize", lambda: None),
            ("device", device),
        ):
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(_ring, "peer_of", lambda place, device: host.local.peer)
        return host

    return make


def on_ranks(host: Host, work: Callable[[Place], Any]) -> list[Any]:
    """What each rank's work returns."""
    results: list[Any] = [None] * host.world

    def run(rank: int) -> None:
        place = Place(None, host.world, rank)  # type: ignore[arg-type]
        try:
            host.local.stream = Stream()
            with torch.cuda.device(0):
                host.local.peer = _peer.Peer(place, CPU)
            results[rank] = work(place)
        except BaseException as error:  # for the thread that waits
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(host.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * PATIENCE)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Case:
    """Tensors of a whole sequence, and what attention makes of them."""

    def __init__(self, n: int, nk: int, band: Band, seed: int, layout: _layout.Layout = "zigzag") -> None:
        self.lengths, self.band, self.layout = ((n, nk),), band, layout
        make = torch.Generator().manual_seed(seed)
        self.q, self.dout = (torch.randn(1, 4, n, 16, generator=make) for _ in range(2))
        self.k, self.v = (torch.randn(1, 2, nk, 16, generator=make) for _ in range(2))
        leaves = [t.clone().requires_grad_() for t in (self.q, self.k, self.v)]
        window = None if band.left is None and band.right in (None, 0) else (band.left, band.right)
        out = flash_wmma.forward(*leaves, causal=band.right == 0, window=window)
        self.right = [out.detach(), *torch.autograd.grad(out, leaves, self.dout)]

    def of(self, place: Place, x: Tensor) -> Tensor:
        """A rank's rows."""
        pieces = _layout.pieces(x.shape[2], self.cut(place), place.rank)
        return torch.cat([x[:, :, begin:end] for begin, end in pieces], 2)

    def cut(self, place: Place) -> _layout.Cut:
        return _layout.Cut(place.world, self.layout)

    def ring(self, place: Place) -> _ring.Ring:
        return _ring.Ring(place, self.lengths, self.band, False, self.cut(place), Call())

    def check(self, place: Place, times: int = 1) -> None:
        ring = self.ring(place)
        q, k, v, dout = (self.of(place, t) for t in (self.q, self.k, self.v, self.dout))
        made = [_ring._forward(ring, q, k, v, None, None) for _ in range(times)]  # some calls before their gradients
        for out, lse in reversed(made):
            found = _ring._backward(ring, dout, None, q, k, v, out, lse, None, None)
            for got, right in zip((out, *found), self.right, strict=False):
                torch.testing.assert_close(got, self.of(place, right), atol=2e-5, rtol=1e-4)


BANDS = {"full": Band(), "causal": Band(None, 0), "narrow": Band(5, 0), "wide": Band(30, 0), "both": Band(3, 2)}


@pytest.mark.parametrize(
    ("layout", "band"), [*(("zigzag", band) for band in BANDS), *(("contiguous", band) for band in ("narrow", "both"))]
)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_calls(host_of: Callable[[int], Host], world: int, band: str, layout: _layout.Layout) -> None:
    """Calls of different lengths, some of them longer than all before, several before their gradients."""
    cases = [Case(n, n, BANDS[band], n, layout) for n in (41, 96, 48, 400)]

    def work(place: Place) -> None:
        for case in cases:
            case.check(place, times=3)

    on_ranks(host_of(world), work)


@pytest.mark.parametrize("lasting", [False, True])
def test_a_late_reader(host_of: Callable[[int], Host], lasting: bool) -> None:
    """Messages that are sent long before they are read, more of them than there are places."""
    host = host_of(2)
    sizes = torch.Size((1, 1, 4, 2))

    def work(place: Place) -> None:
        peer = host.local.peer
        with peer.call(1 << 10):
            for i in range(5):
                sent, coming = (torch.full(sizes, float(i)), torch.full(sizes, i + 0.5)), None
                if place.rank == 1:
                    time.sleep(0.02)
                    sent, coming = None, Shape(torch.empty(sizes), torch.empty(sizes), 4, 2, torch.float32)
                travel = peer.travel(1 - place.rank, sent, 1 - place.rank, coming, lasting)
                travel.start()
                if place.rank == 1:
                    message = travel.arrive()
                    time.sleep(0.02)
                    assert (message.k == i).all()
                    assert (message.v == i + 0.5).all()
                travel.finish()

    on_ranks(host, work)


def test_ranks_without_keys(host_of: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """They make as much room as the others."""
    monkeypatch.setattr(_peer, "LEAST", 1)
    case = Case(37, 1, Band(), 0)
    on_ranks(host_of(3), case.check)


def test_inference_first(host_of: Callable[[int], Host]) -> None:
    """What the first call makes serves later ones outside of inference mode."""
    case = Case(48, 48, Band(None, 0), 1)

    def work(place: Place) -> None:
        ring = case.ring(place)
        with torch.inference_mode():
            _ring._forward(ring, *(case.of(place, t) for t in (case.q, case.k, case.v)), None, None)
        case.check(place)

    on_ranks(host_of(2), work)


def test_numbers_wrap(host_of: Callable[[int], Host]) -> None:
    """The numbers of messages are counted modulo 2^32."""
    case = Case(48, 48, Band(None, 0), 2)
    host = host_of(2)

    def work(place: Place) -> None:
        peer = host.local.peer
        peer._brought = peer._fetched = (1 << 32) - 2
        peer.flags.own.fill_(-2)
        host.barrier.wait()
        for _ in range(3):
            case.check(place)
        assert min(peer._brought, peer._fetched) > 1 << 32

    on_ranks(host, work)


def test_calls_on_different_streams(host_of: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call waits for the kernels of one on another stream, which read places."""
    case = Case(48, 48, Band(None, 0), 4)
    host = host_of(2)

    class Counting(Stream):
        def __init__(self) -> None:
            self.awaited: list[Event] = []

        def wait_event(self, event: Event) -> None:
            super().wait_event(event)
            self.awaited.append(event)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: host.local.stream)

    def work(place: Place) -> None:
        ring = case.ring(place)
        given = [case.of(place, t) for t in (case.q, case.k, case.v)]
        peer, first, second = host.local.peer, Counting(), Counting()
        for stream in (first, first, second):
            host.local.stream, ended = stream, peer._ended
            _ring._forward(ring, *given, None, None)
            assert (ended in stream.awaited) == (stream is second)

    on_ranks(host, work)


def test_errors_in_a_call(host_of: Callable[[int], Host]) -> None:
    """Ranks that failed in the same place go on together. Others are told."""
    case = Case(48, 48, Band(None, 0), 3)
    host = host_of(2)

    def work(place: Place) -> list[str]:
        peer = host.local.peer

        def fail(messages: int) -> str:
            with pytest.raises(KeyError), peer.call(1 << 10):
                for _ in range(messages):
                    peer.travel(1 - place.rank, None, 1 - place.rank, None)
                raise KeyError
            return ""

        case.check(place)
        fail(1)
        case.check(place)
        fail(1 + place.rank)
        with pytest.raises(RuntimeError, match="an earlier call of the group failed on some ranks"):
            case.check(place)
        assert peer._watchdog.calls == 2 * 2 + 2
        return []

    on_ranks(host, work)


@pytest.mark.parametrize("late", range(5))
def test_messages_of_a_failed_call(host_of: Callable[[int], Host], late: int) -> None:
    """All ranks fail in one place, where a message has not begun. It comes to no place of the next call, however late
    its sender is."""
    host = host_of(5)
    sizes = torch.Size((1, 1, 2, 2))

    def work(place: Place) -> None:
        peer = host.local.peer

        def send(call: int, n: int) -> Travel:
            to, source = ((place.rank + sign * n) % 5 for sign in (1, -1))
            sent = torch.full(sizes, float(100 * call + 10 * n + place.rank)), torch.zeros(sizes)
            coming = Shape(torch.empty(sizes), torch.empty(sizes), 2, 2, torch.float32)
            return peer.travel(to, sent, source, coming, lasting=True)

        with pytest.raises(KeyError), peer.call(1 << 10):
            for n in (1, 2, 3, 4):
                travel = send(0, n)
                if n == 4:
                    raise KeyError
                travel.start()
                travel.arrive()
        with peer.call(1 << 10):
            for n in (1, 2, 3, 4):
                travel = send(1, n)
                if n == 1 and place.rank == late:  # others have the message of the second step by then
                    time.sleep(0.15)
                travel.start()
                message = travel.arrive()
                time.sleep(0.1)
                assert (message.k == 100 + 10 * n + (place.rank - n) % 5).all()

    on_ranks(host, work)


class Watched:
    """A watchdog whose calls end when this says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.aborted = threading.Event()
        self._ends: list[tuple[int, int]] = []
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
        monkeypatch.setattr(_peer.os, "abort", self._abort)
        monkeypatch.setattr(_peer, "_write", lambda _, word, number: self._ends.append((word, number)))
        self.watchdog = _peer._Watchdog(seconds, 3)

    def _abort(self) -> None:
        self.aborted.set()
        threading.Event().wait()  # a thread that ends with the process

    def call(self) -> None:
        self.watchdog.expect(Stream())  # type: ignore[arg-type]

    def end(self, call: int) -> None:
        word, number = self._ends[call]
        value(word).value = number


def test_watchdog_lets_calls_end_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of two streams do."""
    watched = Watched(monkeypatch, 0.3)
    for _ in range(2):
        watched.call()
        assert not watched.aborted.is_set()
    watched.end(1)
    watched.end(0)
    assert not watched.aborted.wait(1)


def test_watchdog_ends_a_process_that_waits(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    watched = Watched(monkeypatch, 0.3)
    watched.call()
    watched.end(0)
    watched.call()
    begin = time.monotonic()
    assert watched.aborted.wait(PATIENCE)
    assert time.monotonic() - begin > 0.2
    assert "another rank is lost, or makes other calls. Rank 3 ends" in capfd.readouterr().err


def copied(to: int, source: int, size: int, stream: int) -> int:
    ctypes.memmove(to, source, size)
    return 0


def lines_copied(lines: _peer._Lines, stream: int) -> int:
    assert lines.source.kind == lines.to.kind == 2  # of CUmemorytype
    for i in range(lines.height):
        places = lines.to.device + i * lines.to.pitch, lines.source.device + i * lines.source.pitch
        ctypes.memmove(*places, lines.width)
    return 0


def test_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver is asked for, of a tensor in one piece, of one in several, and of none."""
    driver = types.SimpleNamespace(cuMemcpyDtoDAsync_v2=copied, cuMemcpy2DAsync_v2=lines_copied)
    monkeypatch.setattr(_peer, "_driver", lambda: driver)
    whole = torch.randn(2, 3, 80, 64).half()
    for source in (whole, whole[:, :, 8:48], whole[1:, 1:], whole[:, :, :0]):
        assert _peer.runs_of(source.shape, source.stride()) is not None
        to = torch.zeros(source.numel() + 8).half()
        _peer._copy(Stream(), to[: source.numel()], source)  # type: ignore[arg-type]
        assert torch.equal(to[: source.numel()], source.flatten())
        assert not to[source.numel() :].any()


def test_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is its runs, one behind the other."""
    short = torch.zeros(2, 40, 64)[:, :30]
    assert _peer.runs_of(short.shape, short.stride()) is None
    monkeypatch.setattr(_peer, "SHORTEST", 1)
    _peer.runs_of.cache_clear()
    memory = torch.arange(2 * 3 * 8 * 4)
    whole = memory.view(2, 3, 8, 4)
    views = {
        whole: 1,
        whole[:, :, 2:5]: 6,
        whole[:, 1:2]: 2,
        whole[:1, :, :4]: 3,
        whole[1:, 1:, 7:]: 2,
        whole[..., :3]: 48,
        memory[:1].view(1, 1, 1, 1): 1,
    }
    for view, count in views.items():
        runs = _peer.runs_of(view.shape, view.stride())
        assert runs is not None
        assert runs.number == count
        begins = [view.storage_offset() + i * runs.distance for i in range(count)]
        found = torch.cat([memory[begin : begin + runs.elements] for begin in begins])
        assert torch.equal(found, view.flatten())
    apart = [whole[:, :2, :3], whole.transpose(1, 2), memory[:12].view(1, 1, 3, 4).expand(2, 3, 3, 4)]
    for view in apart:
        assert _peer.runs_of(view.shape, view.stride()) is None
    _peer.runs_of.cache_clear()
