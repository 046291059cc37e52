"""Messages between the GPUs of one host by their copy engines, which take no multiprocessor from the kernels beside.

Each rank has two places for messages in symmetric memory (torch.distributed._symmetric_memory), which the other ranks'
GPUs read and write. A message is written to a place on the stream that computes. Its reader's copy engine brings it
from there, on a stream of its own. Two numbers in the ranks' symmetric memory order this, which streams write and wait
for (the driver's stream memory operations, no kernels):

- ``written[sender]`` of the reader: how many messages the sender has written, whose last is the reader's;
- ``read[reader]`` of the sender: how many messages were written when the reader had read its last one.

The place of message n is n modulo 2. Its writer waits until message n - 2 was read. Nothing waits for a later message,
so that nothing waits in a circle.

Each call also begins a collective of torch.distributed with one number. If a rank is lost, the group's timeout finds
that collective and ends the process, as it does for any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import socket
import zlib
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ._agree import Group, Place, exchanged
from ._messages import Message, Shape, Travel

PLACES = 2
MANY = 64
"""Ranks of a group that has this post, at most."""
VARIABLE = "FLASH_WMMA_PEER_COPIES"
"""0 turns it off, on every rank."""

_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ, cyclic."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _checked(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"flash_wmma: {what}: CUDA driver error {result}")


def _word(flags: Tensor, index: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(flags.data_ptr() + index * flags.element_size())


def _write(stream: torch.cuda.Stream, flags: Tensor, index: int, value: int) -> None:
    """Once all before it on the stream is done, and visible to other GPUs."""
    given = ctypes.c_void_p(stream.cuda_stream), _word(flags, index), ctypes.c_uint32(value), ctypes.c_uint(0)
    _checked(_driver().cuStreamWriteValue32_v2(*given), "cuStreamWriteValue32")


def _wait(stream: torch.cuda.Stream, flags: Tensor, index: int, value: int) -> None:
    given = ctypes.c_void_p(stream.cuda_stream), _word(flags, index), ctypes.c_uint32(value)
    _checked(_driver().cuStreamWaitValue32_v2(*given, ctypes.c_uint(_AT_LEAST)), "cuStreamWaitValue32")


class _Symmetric:
    """Memory of this rank that all ranks of the group see."""

    def __init__(self, place: Place, elements: int, dtype: torch.dtype) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.own = symmetric.empty(elements, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device()))
        self.handle = symmetric.rendezvous(self.own, place.group)
        self.of = [self.handle.get_buffer(rank, (elements,), dtype) for rank in range(place.world)]


class _PeerTravel:
    def __init__(self, post: Peer, number: int, to: int, sent: bool, source: int, received: Message | None) -> None:
        self._post, self._number = post, number
        self._to, self._sent, self._source, self._received = to, sent, source, received
        self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._written.record(post.computing)  # what is sent is in its place, and what is received has free memory
        self._arrived: torch.cuda.Event | None = None

    def start(self) -> None:
        self._post.start_up_to(self)

    def begin(self) -> None:
        """Its part on the stream of copies."""
        post, number, stream = self._post, self._number, self._post.copying
        stream.wait_event(self._written)
        if self._sent:
            _write(stream, post.flags.of[self._to], post.place.rank, number + 1)
        if self._received is not None:
            memory = self._received.memory
            _wait(stream, post.flags.own, self._source, number + 1)
            with torch.cuda.stream(stream):
                memory.copy_(post.memory_of(self._source, number, memory.numel(), memory.dtype))
            _write(stream, post.flags.of[self._source], post.place.world + post.place.rank, number + 1)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(stream)

    def arrive(self) -> Message | None:
        self.start()
        if self._arrived is not None:
            self._post.computing.wait_event(self._arrived)
        return self._received

    def finish(self) -> None:
        """The places say themselves when they may be overwritten."""
        self.start()


class Peer:
    """By copy engines, between GPUs that see each other's memory."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.flags = _Symmetric(place, 2 * place.world, torch.int32)  # written, then read
        self.flags.own.zero_()
        self.copying = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.computing: torch.cuda.Stream = torch.cuda.current_stream()
        self._memory: _Symmetric | None = None
        self._capacity = 0
        self._number = 0
        self._waiting: list[_PeerTravel] = []
        """Travels that have not begun."""
        self._readers: list[tuple[int, int] | None] = [None] * PLACES
        """Of each place: who reads the message there, and its number."""
        self._beat = torch.zeros(1, device=self.flags.own.device)
        torch.cuda.synchronize()
        dist.barrier(place.group)  # all numbers are 0

    def begin(self, capacity: int) -> None:
        """Before the messages of a call, of at most so many bytes, the same on every rank."""
        self.computing = torch.cuda.current_stream()
        if capacity > self._capacity:
            torch.cuda.synchronize()
            dist.barrier(self.place.group)  # nobody reads the old memory
            self._capacity = 1 << math.ceil(math.log2(max(capacity, 1 << 20)))
            self._memory = None
            self._memory = _Symmetric(self.place, PLACES * self._capacity, torch.uint8)
            self._readers = [None] * PLACES

    def end(self) -> None:
        """After the messages of a call."""
        dist.all_reduce(self._beat, group=self.place.group, async_op=True)

    def memory_of(self, rank: int, number: int, elements: int, dtype: torch.dtype) -> Tensor:
        """The place of a message of a rank."""
        assert self._memory is not None
        begin = number % PLACES * self._capacity
        return self._memory.of[rank][begin : begin + elements * dtype.itemsize].view(dtype)

    def start_up_to(self, travel: _PeerTravel) -> None:
        """In the order of their numbers, so that the numbers that ranks write never become less."""
        while travel in self._waiting:
            self._waiting.pop(0).begin()

    def outgoing(self, shape: Shape, to: int) -> Message:
        number, place = self._number, self._number % PLACES
        before = self._readers[place]
        if before is not None:
            reader, last = before
            _wait(self.computing, self.flags.own, self.place.world + reader, last + 1)
        self._readers[place] = to, number
        return Message(shape, self.memory_of(self.place.rank, number, shape.elements(), shape.dtype))

    def travel(self, to: int, sent: Message | None, source: int, received: Shape | None) -> Travel:
        coming = None if received is None else Message(received)
        travel = _PeerTravel(self, self._number, to, sent is not None, source, coming)
        self._number += 1
        self._waiting.append(travel)
        return travel


_posts: WeakKeyDictionary[Group, Peer | None] = WeakKeyDictionary()
"""Of each group; ``None`` where some GPU of it is on another host, or cannot see another one's memory."""


def peer_of(place: Place, device: torch.device) -> Peer | None:
    """The group's post, if it has one and may be used now. A group's first call is one of all its ranks."""
    if device.type != "cuda" or place.world == 1:
        return None
    if torch.cuda.is_current_stream_capturing():  # the numbers of messages would be the same in every replay
        return None
    if place.group not in _posts:
        wanted = os.environ.get(VARIABLE) != "0" and "cuda:nccl" in str(dist.get_backend_config(place.group))
        _posts[place.group] = _made(place, device, wanted)
    return _posts[place.group]


def _host() -> int:
    """A number of this host since it was started."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name += Path("/proc/sys/kernel/random/boot_id").read_text()
    return zlib.crc32(name.encode())


def _made(place: Place, device: torch.device, wanted: bool) -> Peer | None:
    everyone = exchanged(place, int(wanted), _host(), torch.cuda.current_device())
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
    with contextlib.suppress(ImportError, AttributeError, OSError, RuntimeError):
        made = Peer(place)
    return made if all(each[0] for each in exchanged(place, int(made is not None))) else None
