"""Messages between the GPUs of one host by their copy engines, which take no multiprocessor from the kernels beside.

Each rank has places for messages in symmetric memory (torch.distributed._symmetric_memory), which the other ranks' GPUs
read and write. Numbers in the ranks' symmetric memory order this, which streams write and wait for (the driver's stream
memory operations, no kernels).

Keys and values last as long as a call, so their sender's stream for copies brings them to a place of their reader,
whose kernels read them there:

- ``free[reader]`` of the sender: the last message for which the reader has a place, plus one;
- ``brought[sender]`` of the reader: the last message that is in its place, plus one.

Gradients do not last, so the stream that computes writes them to a place of their own rank, and their reader's stream
for copies brings them to memory that it may keep:

- ``written[sender]`` of the reader: how many messages the sender has written, whose last is the reader's;
- ``read[reader]`` of the sender: how many messages were written when the reader had read its last one.

The place of message n is n modulo 2. Its writer waits until message n - 2 was read. Nothing waits for a later message,
so that nothing waits in a circle.

A rank that is lost leaves streams waiting, which no error of CUDA ends. So after each call its stream writes a number
to memory of the host, and a thread looks whether it comes within the group's timeout. If not, the process ends with a
message, as it does by NCCL's watchdog.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import math
import os
import socket
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._agree import Group, Place, exchanged, is_alive
from ._messages import Message, Shape, Travel

PLACES = 2
"""Of messages of a kind."""
MANY = 64
"""Ranks of a group that has this post, at most."""
VARIABLE = "FLASH_WMMA_PEER_COPIES"
"""0 turns it off, on every rank."""
LEAST = 1 << 20
"""Bytes of a place."""
SHORTEST = 1 << 11
"""Elements of a run where there are several: 16 rows of d = 128. The bound is not measured."""
LONGEST = 1 << 28
"""Elements of four bytes or two between the runs of a tensor: less than 2 GiB."""
CALLS = 1024
"""Of a group, whose ends the host looks for at the same time."""

# ------------------------------------------------------------------------------------------------------- the driver

_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ, cyclic."""
_DEVICE = 2
"""CU_MEMORYTYPE_DEVICE."""


class _Side(ctypes.Structure):
    """Where a copy of lines reads, or writes."""

    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class _Lines(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("source", _Side), ("to", _Side), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t))


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(driver, name).argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    driver.cuMemcpyDtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    driver.cuMemcpy2DAsync_v2.argtypes = (ctypes.POINTER(_Lines), ctypes.c_void_p)
    return driver


def _checked(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"flash_wmma: {what}: CUDA driver error {result}")


def _write(stream: torch.cuda.Stream, word: int, value: int) -> None:
    """Once all before it on the stream is done, and visible to other GPUs."""
    value %= 1 << 32
    _checked(_driver().cuStreamWriteValue32_v2(stream.cuda_stream, word, value, 0), "cuStreamWriteValue32")


def _wait(stream: torch.cuda.Stream, word: int, value: int) -> None:
    value %= 1 << 32
    _checked(_driver().cuStreamWaitValue32_v2(stream.cuda_stream, word, value, _AT_LEAST), "cuStreamWaitValue32")


class Runs(NamedTuple):
    """A tensor as pieces of memory of one length, whose elements are adjacent, at equal distances."""

    number: int
    elements: int
    distance: int
    """In elements."""


@functools.lru_cache(64)
def runs_of(shape: torch.Size, strides: tuple[int, ...]) -> Runs | None:
    """In the order of the tensor's elements. ``None``: their distances differ, or are longer than the driver takes, or
    they are so short that bringing them together first is faster."""
    elements, dim = 1, len(shape)
    while dim > 0 and (strides[dim - 1] == elements or shape[dim - 1] == 1):
        dim -= 1
        elements *= shape[dim]
    number, distance = 1, elements
    for n, stride in zip(reversed(shape[:dim]), reversed(strides[:dim]), strict=True):
        if n == 1:
            continue
        if number == 1:
            distance = stride
        elif stride != number * distance:
            return None
        number *= n
    fits = number == 1 or elements == 0 or SHORTEST <= elements <= distance < LONGEST
    return Runs(number, elements, distance) if fits else None


def _copy(stream: torch.cuda.Stream, to: Tensor, source: Tensor) -> None:
    """As to.copy_(source) on the stream, ``to`` in one piece and ``source`` in runs, in a tenth of the host's time. The
    copy engine does it between two GPUs. Within one GPU multiprocessors do."""
    if to.numel() == 0:
        return
    runs = runs_of(source.shape, source.stride())
    assert runs is not None
    size = runs.elements * to.element_size()
    if runs.number == 1:
        given = to.data_ptr(), source.data_ptr(), size, stream.cuda_stream
        _checked(_driver().cuMemcpyDtoDAsync_v2(*given), "cuMemcpyDtoDAsync")
        return
    lines = _Lines(
        _Side(kind=_DEVICE, device=source.data_ptr(), pitch=runs.distance * to.element_size()),
        _Side(kind=_DEVICE, device=to.data_ptr(), pitch=size),
        size,
        runs.number,
    )
    _checked(_driver().cuMemcpy2DAsync_v2(lines, stream.cuda_stream), "cuMemcpy2DAsync")


class _Symmetric:
    """Memory of this rank, on the current device, that all ranks of the group see."""

    def __init__(self, place: Place, elements: int, dtype: torch.dtype) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.own = symmetric.empty(elements, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device()))
        self._handle = symmetric.rendezvous(self.own, place.group)
        self.of = [self._handle.get_buffer(rank, (elements,), dtype) for rank in range(place.world)]

    def word(self, rank: int, index: int) -> int:
        """The address of an element of a rank."""
        return self.of[rank].data_ptr() + index * self.own.element_size()


# ------------------------------------------------------------------------------------------------------ the watchdog


class _Watchdog:
    """Ends the process if a call of a group does not end in time."""

    def __init__(self, seconds: float, rank: int) -> None:
        self._seconds, self._rank = seconds, rank
        self._done = torch.zeros(CALLS, dtype=torch.int32, device="cpu").pin_memory()
        """The last call that ended, of those whose number has this remainder: streams end in any order."""
        self._calls = 0
        self._expected: collections.deque[tuple[int, float]] = collections.deque()
        self._begun = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="flash_wmma peer watchdog").start()

    def expect(self, stream: torch.cuda.Stream) -> None:
        """All that is on the stream by now ends in time."""
        self._calls += 1
        _write(stream, self._done.data_ptr() + self._calls % CALLS * self._done.element_size(), self._calls)
        self._expected.append((self._calls, time.monotonic() + self._seconds))
        self._begun.set()

    def _run(self) -> None:
        while True:
            self._begun.wait()
            self._begun.clear()
            while self._expected:
                number, deadline = self._expected[0]
                if (int(self._done[number % CALLS]) - number) % (1 << 32) < 1 << 31:
                    self._expected.popleft()
                elif time.monotonic() > deadline:
                    print(
                        f"flash_wmma: ring attention did not end within the process group's timeout, {self._seconds:g} "
                        f"s: another rank is lost, or makes other calls. Rank {self._rank} ends.",
                        file=sys.stderr,
                        flush=True,
                    )
                    os.abort()
                else:
                    time.sleep(min(0.1, self._seconds / 10))


def _timeout(group: Group) -> float:
    """Of a group's collectives on CUDA tensors, in seconds."""
    backend: Any = group._get_backend(torch.device("cuda"))
    with contextlib.suppress(AttributeError):
        return float(backend.options._timeout.total_seconds())
    return 600.0  # NCCL's own


# ---------------------------------------------------------------------------------------------------------- the post

_FREE, _BROUGHT, _WRITTEN, _READ = range(4)
"""Numbers that a rank has of each other rank."""


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """All that is on the stream by now."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class _Brought:
    """Keys and values: brought to their reader's place."""

    def __init__(
        self, post: Peer, number: int, to: int, sent: tuple[Tensor, Tensor] | None, source: int, coming: Shape | None
    ) -> None:
        self._post, self._number, self._to, self._sent, self._source = post, number, to, sent, source
        self._received = None if coming is None else post.place_of(post.place.rank, number, coming)
        if self._received is not None:  # the kernels that read the place's last message are on this stream
            _write(post.computing, post.word(source, _FREE, post.place.rank), number + 1)
        self._ready = None if sent is None else _event(post.computing)
        self._over: torch.cuda.Event | None = None

    def start(self) -> None:
        self._post.start_up_to(self)

    def begin(self) -> None:
        """Its part on the stream for copies."""
        post, number, stream = self._post, self._number, self._post.copying
        if self._sent is None or self._ready is None:
            return
        stream.wait_event(self._ready)
        _wait(stream, post.word(post.place.rank, _FREE, self._to), number + 1)
        k, v = self._sent
        place = post.place_of(self._to, number, Shape(k, v, k.shape[0], 0, k.dtype))
        _copy(stream, place.k, k)
        _copy(stream, place.v, v)
        _write(stream, post.word(self._to, _BROUGHT, post.place.rank), number + 1)
        self._over = _event(stream)

    def arrive(self) -> Message | None:
        """What was received is overwritten by the message after the next."""
        self.start()
        if self._received is not None:
            post = self._post
            _wait(post.computing, post.word(post.place.rank, _BROUGHT, self._source), self._number + 1)
        return self._received

    def finish(self) -> None:
        self.start()
        if self._over is not None:  # from then on the memory of what was sent may be another tensor's
            self._post.computing.wait_event(self._over)


class _Fetched:
    """Gradients: written to a place of their own rank, and fetched from there."""

    def __init__(
        self, post: Peer, number: int, to: int, sent: tuple[Tensor, Tensor] | None, source: int, coming: Shape | None
    ) -> None:
        self._post, self._number, self._to, self._source = post, number, to, source
        self._sends = sent is not None
        if sent is not None:
            post.await_reader(number, to)
            k, v = sent
            post.place_of(post.place.rank, number, Shape(k, v, k.shape[0], 0, k.dtype), own=True).fill(k, v)
        self._received = None if coming is None else Message(coming)
        self._like = coming
        if self._received is not None:
            post.keep(self._received)
        # What is sent is in its place, and what is received has free memory
        self._ready = _event(post.computing) if sent is not None or coming is not None else None
        self._over: torch.cuda.Event | None = None

    def start(self) -> None:
        self._post.start_up_to(self)

    def begin(self) -> None:
        """Its part on the stream for copies."""
        post, number, stream = self._post, self._number, self._post.copying
        if self._ready is None:
            return
        stream.wait_event(self._ready)
        if self._sends:
            _write(stream, post.word(self._to, _WRITTEN, post.place.rank), number + 1)
        if self._received is not None and self._like is not None:
            _wait(stream, post.word(post.place.rank, _WRITTEN, self._source), number + 1)
            _copy(stream, self._received.memory, post.place_of(self._source, number, self._like, own=True).memory)
            _write(stream, post.word(self._source, _READ, post.place.rank), number + 1)
            self._over = _event(stream)

    def arrive(self) -> Message | None:
        self.start()
        if self._over is not None:
            self._post.computing.wait_event(self._over)
        return self._received

    def finish(self) -> None:
        """The places say themselves when they may be overwritten."""
        self.start()


class Peer:
    """By copy engines, between GPUs that see each other's memory."""

    @torch.inference_mode(False)  # what is made here serves calls outside of it too
    def __init__(self, place: Place, device: torch.device) -> None:
        self.place, self.device = place, device
        self.flags = _Symmetric(place, 4 * place.world, torch.int32)
        self.flags.own.zero_()
        self.copying = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.computing: torch.cuda.Stream = torch.cuda.current_stream()
        _write(self.copying, self.flags.word(place.rank, 0), 0)  # raises where the driver lacks these operations
        _wait(self.copying, self.flags.word(place.rank, 0), 0)
        self._watchdog = _Watchdog(_timeout(place.group), dist.get_rank())
        self._memory: _Symmetric | None = None
        self._capacity = 0
        self._messages: dict[object, Message] = {}
        """Views of places, by their rank, place and sizes."""
        self._brought = self._fetched = 0
        """Messages of either kind."""
        self._waiting: collections.deque[_Brought | _Fetched] = collections.deque()
        """Travels that have not begun."""
        self._readers: list[tuple[int, int] | None] = [None] * PLACES
        """Of each place for gradients: who reads the message there, and its number."""
        self._memory_of_call: list[Message | tuple[Tensor, Tensor]] = []
        """What copies of the call that is being made read and write."""
        self._kept: list[Message | tuple[Tensor, Tensor]] = []
        """Of calls that ended with an error: their copies may still be to come."""
        self._ended: torch.cuda.Event | None = None
        """The last call's kernels, which read places."""
        self._failed = False
        torch.cuda.synchronize()
        dist.barrier(place.group)  # all numbers are 0

    @contextlib.contextmanager
    def call(self, capacity: int) -> Iterator[None]:
        """Around the messages of a call, of at most so many bytes, the same on every rank.

        Raises:
            RuntimeError: the ranks' last calls ended with errors in different places.
        """
        with torch.cuda.device(self.device):  # the driver's default stream is the current device's
            self._begin(capacity)
            try:
                yield
            except BaseException:
                self._failed = True
                self._kept += self._memory_of_call
                raise
            finally:
                self._memory_of_call.clear()
                self._ended = _event(self.computing)
                self._watchdog.expect(self.computing)

    def _begin(self, capacity: int) -> None:
        before, self.computing = self.computing, torch.cuda.current_stream()
        if self._ended is not None and self.computing != before:
            self.computing.wait_event(self._ended)
        if self._failed:
            numbers = exchanged(self.place, self._brought, self._fetched)
            if any(each != numbers[0] for each in numbers):
                raise RuntimeError("flash_wmma: an earlier call of the group failed on some ranks: make a new group")
            while self._waiting:  # what had not begun: others wait for it
                self._waiting.popleft().begin()
            torch.cuda.synchronize()
            dist.barrier(self.place.group)  # nobody writes to places any more
            self._kept.clear()
            self._failed = False
        if capacity > self._capacity or self._memory is None:
            torch.cuda.synchronize()
            dist.barrier(self.place.group)  # nobody reads or writes the old memory
            self._capacity = 1 << math.ceil(math.log2(max(capacity, LEAST)))
            self._messages.clear()
            self._memory = None
            with torch.inference_mode(False):
                self._memory = _Symmetric(self.place, 2 * PLACES * self._capacity, torch.uint8)
            self._readers = [None] * PLACES

    def word(self, rank: int, kind: int, of: int) -> int:
        """The address of a rank's number of a kind that belongs to another rank."""
        return self.flags.word(rank, kind * self.place.world + of)

    def place_of(self, rank: int, number: int, shape: Shape, own: bool = False) -> Message:
        """The place of a message at a rank. ``own``: it is one of the rank's own gradients."""
        sizes = shape.sizes()
        key = rank, number % PLACES, own, sizes, shape.dtype
        if key not in self._messages:
            if len(self._messages) > 8 * PLACES * self.place.world:
                self._messages.clear()
            assert self._memory is not None
            begin = (number % PLACES + own * PLACES) * self._capacity
            size = sum(size.numel() for size in sizes) * shape.dtype.itemsize
            with torch.inference_mode(False):
                self._messages[key] = Message(shape, self._memory.of[rank][begin : begin + size].view(shape.dtype))
        return self._messages[key]

    def keep(self, memory: Message | tuple[Tensor, Tensor]) -> None:
        """Copies of the call that is being made read or write it."""
        self._memory_of_call.append(memory)

    def await_reader(self, number: int, to: int) -> None:
        """The place of a gradient, which a rank will read, was read before."""
        before = self._readers[number % PLACES]
        if before is not None:
            reader, last = before
            _wait(self.computing, self.word(self.place.rank, _READ, reader), last + 1)
        self._readers[number % PLACES] = to, number

    def start_up_to(self, travel: _Brought | _Fetched) -> None:
        """In the order of their numbers, so that the numbers that ranks write never become less."""
        while travel in self._waiting:
            self._waiting.popleft().begin()

    def travel(
        self, to: int, sent: tuple[Tensor, Tensor] | None, source: int, received: Shape | None, lasting: bool = False
    ) -> Travel:
        travel: _Brought | _Fetched
        if lasting:
            if sent is not None:
                k, v = (t if runs_of(t.shape, t.stride()) else t.contiguous() for t in sent)
                sent = k, v
                self.keep(sent)
            travel = _Brought(self, self._brought, to, sent, source, received)
            self._brought += 1
        else:
            travel = _Fetched(self, self._fetched, to, sent, source, received)
            self._fetched += 1
        self._waiting.append(travel)
        return travel


_posts: dict[Group, Peer | None] = {}
"""Of each group; ``None`` where some GPU of it is on another host, or cannot see another one's memory."""


def peer_of(place: Place, device: torch.device) -> Peer | None:
    """The group's post, if it has one and may be used now. A group's first call is one of all its ranks.

    Raises:
        RuntimeError: the group's first call was on another device.
    """
    if device.type != "cuda" or place.world == 1:
        return None
    if torch.cuda.is_current_stream_capturing():  # the numbers of messages would be the same in every replay
        return None
    if place.group not in _posts:
        for group in [group for group in _posts if not is_alive(group)]:
            del _posts[group]
        wanted = os.environ.get(VARIABLE) != "0" and "cuda:nccl" in str(dist.get_backend_config(place.group))
        with torch.cuda.device(device):
            _posts[place.group] = _made(place, device, wanted)
    post = _posts[place.group]
    if post is not None and post.device != device:
        raise RuntimeError(f"flash_wmma: k is on {device}, and was on {post.device} in the group's first call")
    return post


def _host() -> int:
    """A number of this host since it was started."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name += Path("/proc/sys/kernel/random/boot_id").read_text()
    return zlib.crc32(name.encode())


def _made(place: Place, device: torch.device, wanted: bool) -> Peer | None:
    everyone = exchanged(place, int(wanted), _host(), device.index)
    devices = [each[2] for each in everyone]
    one_host = len({each[1] for each in everyone}) == 1 and len(set(devices)) == place.world
    count = torch.cuda.device_count()
    sees = one_host and all(
        other == device.index or (other < count and torch.cuda.can_device_access_peer(device.index, other))
        for other in devices
    )
    possible = sees and place.world <= MANY and all(each[0] for each in everyone)
    if not all(each[0] for each in exchanged(place, int(possible))):
        return None
    made: Peer | None = None
    try:
        made = Peer(place, device)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        warnings.warn(f"flash_wmma: messages go by NCCL, since peer copies cannot be set up: {error}", stacklevel=2)
    return made if all(each[0] for each in exchanged(place, int(made is not None))) else None
