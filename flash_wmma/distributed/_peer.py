"""Messages between the GPUs of one host by their copy engines, which take no multiprocessor from the kernels beside.

Each rank has two places for messages in symmetric memory (torch.distributed._symmetric_memory), which the other ranks'
GPUs read and write. The stream that computes writes a message to its place; its reader brings it from there on a stream
for copies. Two numbers in the ranks' symmetric memory order this, which streams write and wait for (the driver's stream
memory operations, no kernels):

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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._agree import Group, Place, exchanged, is_alive
from ._messages import Message, Shape, Travel

PLACES = 2
MANY = 64
"""Ranks of a group that has this post, at most."""
VARIABLE = "FLASH_WMMA_PEER_COPIES"
"""0 turns it off, on every rank."""
LEAST = 1 << 20
"""Bytes of a place."""
CALLS = 1024
"""Of a group, whose ends the host looks for at the same time."""

# ------------------------------------------------------------------------------------------------------- the driver

_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ, cyclic."""


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(driver, name).argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    driver.cuMemcpyDtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
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


def _copy(stream: torch.cuda.Stream, to: Tensor, source: Tensor) -> None:
    """As to.copy_(source) of contiguous memory on the stream, in a tenth of the host's time."""
    if to.numel() == 0:
        return
    given = to.data_ptr(), source.data_ptr(), to.numel() * to.element_size(), stream.cuda_stream
    _checked(_driver().cuMemcpyDtoDAsync_v2(*given), "cuMemcpyDtoDAsync")


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


class _PeerTravel:
    def __init__(self, post: Peer, number: int, to: int, sends: bool, source: int, received: Message | None) -> None:
        self._post, self._number = post, number
        self._to, self._sends, self._source, self._received = to, sends, source, received
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record(post.computing)  # what is sent is in its place, and what is received has free memory
        self._over: torch.cuda.Event | None = None

    def start(self) -> None:
        self._post.start_up_to(self)

    def begin(self) -> None:
        """Its part on the stream for copies."""
        post, number, stream = self._post, self._number, self._post.copying
        stream.wait_event(self._ready)
        if self._sends:
            _write(stream, post.flags.word(self._to, post.place.rank), number + 1)
        if self._received is not None:
            came = self._received.k, self._received.v
            _wait(stream, post.flags.word(post.place.rank, self._source), number + 1)
            _copy(stream, self._received.memory, post.message_of(self._source, number, came).memory)
            _write(stream, post.flags.word(self._source, post.place.world + post.place.rank), number + 1)
            self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._over.record(stream)

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
        self.flags = _Symmetric(place, 2 * place.world, torch.int32)  # written, then read
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
        self._number = 0
        self._waiting: collections.deque[_PeerTravel] = collections.deque()
        """Travels that have not begun."""
        self._readers: list[tuple[int, int] | None] = [None] * PLACES
        """Of each place: who reads the message there, and its number."""
        self._received: list[Message] = []
        """Of the call that is being made."""
        self._kept: list[Message] = []
        """Of calls that ended with an error: their copies may still be to come."""
        self._failed = False
        torch.cuda.synchronize()
        dist.barrier(place.group)  # all numbers are 0

    @contextlib.contextmanager
    def call(self, capacity: int) -> Iterator[None]:
        """Around the messages of a call, of at most so many bytes, the same on every rank.

        Raises:
            RuntimeError: the ranks' last calls ended with errors in different places.
        """
        with torch.cuda.device(self.device):
            self._begin(capacity)
        try:
            yield
        except BaseException:
            self._failed = True
            self._kept += self._received
            raise
        finally:
            self._received.clear()
            self._watchdog.expect(self.computing)

    def _begin(self, capacity: int) -> None:
        self.computing = torch.cuda.current_stream()
        if self._failed:
            numbers = exchanged(self.place, self._number)
            if any(each != numbers[0] for each in numbers):
                raise RuntimeError("flash_wmma: an earlier call of the group failed on some ranks: make a new group")
            self._failed = False
        if capacity > self._capacity or self._memory is None:
            torch.cuda.synchronize()
            dist.barrier(self.place.group)  # nobody reads the old memory
            self._capacity = 1 << math.ceil(math.log2(max(capacity, LEAST)))
            self._messages.clear()
            self._memory = None
            with torch.inference_mode(False):
                self._memory = _Symmetric(self.place, PLACES * self._capacity, torch.uint8)
            self._readers = [None] * PLACES

    def message_of(self, rank: int, number: int, like: tuple[Tensor, Tensor]) -> Message:
        """The place of a message of a rank, that has the sizes of k and v."""
        k, v = like
        key = rank, number % PLACES, k.shape, v.shape, k.dtype
        if key not in self._messages:
            if len(self._messages) > 4 * PLACES * self.place.world:
                self._messages.clear()
            assert self._memory is not None
            begin, size = number % PLACES * self._capacity, (k.numel() + v.numel()) * k.element_size()
            shape = Shape(k, v, k.shape[0], 0, k.dtype)
            with torch.inference_mode(False):
                self._messages[key] = Message(shape, self._memory.of[rank][begin : begin + size].view(k.dtype))
        return self._messages[key]

    def start_up_to(self, travel: _PeerTravel) -> None:
        """In the order of their numbers, so that the numbers that ranks write never become less."""
        while travel in self._waiting:
            self._waiting.popleft().begin()

    def travel(self, to: int, sent: tuple[Tensor, Tensor] | None, source: int, received: Shape | None) -> Travel:
        number = self._number
        self._number += 1
        if sent is not None:
            before = self._readers[number % PLACES]
            if before is not None:
                reader, last = before
                _wait(self.computing, self.flags.word(self.place.rank, self.place.world + reader), last + 1)
            self._readers[number % PLACES] = to, number
            self.message_of(self.place.rank, number, sent).fill(*sent)
        coming = None if received is None else Message(received)
        if coming is not None:
            self._received.append(coming)
        travel = _PeerTravel(self, number, to, sent is not None, source, coming)
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
