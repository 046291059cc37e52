"""Messages between ranks: rows of k and v, or of their gradients.

A :class:`Post` sends them. :class:`Direct` does so by torch.distributed, on any device. :class:`flash_wmma.distributed.
_peer.Peer` has the copy engines of the GPUs of one host do it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ._agree import Place


class Shape(NamedTuple):
    """Of a message: that many rows, dimension ``dim``, of tensors like k and v."""

    like_k: Tensor
    like_v: Tensor
    rows: int
    dim: int
    dtype: torch.dtype

    def sizes(self) -> tuple[torch.Size, torch.Size]:
        """Of its k and v."""
        k, v = self.like_k.shape, self.like_v.shape
        size = torch.Size((*k[: self.dim], self.rows, *k[self.dim + 1 :]))
        return size, size if k == v else torch.Size((*v[: self.dim], self.rows, *v[self.dim + 1 :]))


class Message:
    """k and v in one piece of memory."""

    def __init__(self, shape: Shape, memory: Tensor | None = None) -> None:
        """``memory``: of shape.elements(); by default new."""
        k_size, v_size = shape.sizes()
        if memory is None:
            memory = torch.empty(k_size.numel() + v_size.numel(), dtype=shape.dtype, device=shape.like_k.device)
        self.memory = memory
        if k_size == v_size:  # in one step, since each takes the host some microseconds
            self.k, self.v = memory.view(2, *k_size).unbind(0)
        else:
            k, v = torch.split(memory, [k_size.numel(), v_size.numel()])
            self.k, self.v = k.view(k_size), v.view(v_size)

    def fill(self, k: Tensor, v: Tensor) -> Message:
        """Copies into it."""
        self.k.copy_(k)
        self.v.copy_(v)
        return self


class Travel(Protocol):
    """A message on its way, in each direction."""

    def start(self) -> None:
        """Called behind the launches that the messages travel beside."""

    def arrive(self) -> Message | None:
        """What was received; the current stream waits for it."""

    def finish(self) -> None:
        """What was sent may be overwritten. Called once, behind :meth:`arrive`."""


class Post(Protocol):
    """Sends messages. All ranks of a group make the same calls of :meth:`travel` in the same order."""

    def travel(
        self, to: int, sent: tuple[Tensor, Tensor] | None, source: int, received: Shape | None, lasting: bool = False
    ) -> Travel:
        """Sends k and v, or their gradients, to a rank if there are any, and receives such of another if there are.
        ``lasting``: what is sent is there, unchanged, until :meth:`Travel.finish`. What is received may then be
        overwritten once the travel after the next is made, and no kernels of another stream may read it."""


class _DirectTravel:
    def __init__(self, place: Place, to: int, sent: Tensor | None, source: int, received: Message | None) -> None:
        self._received = received
        group = place.group
        operations = []
        if received is not None:
            operations.append(dist.P2POp(dist.irecv, received.memory, place.peer(source), group))
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent, place.peer(to), group))
        requests: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        first = len(requests) - (sent is not None and len(requests) == len(operations))  # NCCL has one request for all
        self._arrival, self._rest = requests[:first], requests[first:]

    def start(self) -> None:
        """NCCL's copies take multiprocessors: they began before the kernels that they travel beside."""

    def arrive(self) -> Message | None:
        for request in self._arrival:
            request.wait()
        return self._received

    def finish(self) -> None:
        """Waits until all was sent too. Gloo's requests must not be waited for twice."""
        for request in self._rest:
            request.wait()


class Direct:
    """By torch.distributed's own sending and receiving."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def travel(
        self, to: int, sent: tuple[Tensor, Tensor] | None, source: int, received: Shape | None, lasting: bool = False
    ) -> Travel:
        memory = None
        if sent is not None:
            k, v = sent
            memory = Message(Shape(k, v, k.shape[0], 0, k.dtype)).fill(k, v).memory
        coming = None if received is None else Message(received)
        return _DirectTravel(self._place, to, memory, source, coming)
