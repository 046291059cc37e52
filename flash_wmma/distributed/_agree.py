"""The process group, and whether its ranks make the same call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import refuse
from ._layout import Cut, Layout, held

Group = dist.ProcessGroup
Described = TypeVar("Described")

_REFUSED = -1
"""In place of the digest of a call, where the rank refuses its arguments."""


class Place(NamedTuple):
    """A process group and this process's place in it."""

    group: Group
    world: int
    rank: int

    def peer(self, rank: int) -> int:
        """The global rank of a rank of the group."""
        return dist.get_global_rank(self.group, rank)


def place_of(group: Group | None) -> Place:
    """The place in ``group``, or among all processes.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in the group.
        TypeError: it is no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    asked: Any = dist.group.WORLD if group is None else group
    if asked is dist.GroupMember.NON_GROUP_MEMBER:
        refuse("group", "one that this process is not in", "None or a group with this process")
    if not isinstance(asked, Group):
        refuse("group", type(asked).__name__, "None or a torch.distributed.ProcessGroup", TypeError)
    if not is_alive(asked):
        refuse("group", "one that was destroyed", "None or a group that is there")
    return Place(asked, dist.get_world_size(asked), dist.get_rank(asked))


def is_alive(group: Group) -> bool:
    """Whether it was not destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def _control_device(place: Place) -> torch.device:
    """Where the group exchanges small numbers: on the CPU if it can, which waits for no GPU."""
    backends = str(dist.get_backend_config(place.group))
    if "nccl" in backends and "gloo" not in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def exchanged(place: Place, *numbers: int) -> list[list[int]]:
    """Every rank's numbers."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=_control_device(place))
    everyone = [torch.empty_like(mine) for _ in range(place.world)]
    dist.all_gather(everyone, mine, group=place.group)
    found: list[list[int]] = torch.stack(everyone).tolist()
    return found


_agreed: WeakKeyDictionary[Group, dict[tuple[str, int, int], None]] = WeakKeyDictionary()
"""Of each group: the calls with known lengths that all ranks were found to agree on, at most REMEMBERED."""
REMEMBERED = 4096


class Call(NamedTuple):
    """What a rank asks for."""

    description: str
    """The same on every rank."""
    rows: tuple[int, int]
    """How many queries and keys this rank holds."""
    lengths: tuple[int, int] | None
    """How many there are on all ranks; ``None``: as many as the ranks hold."""
    packed: bool = False
    """``make`` has checked the rows itself."""
    layout: Layout = "zigzag"
    """How the sequence is cut."""
    names: tuple[str, str] = ("q", "k")
    """Of the arguments that hold the rows."""


def agree(place: Place, make: Callable[[], tuple[Call, Described]]) -> tuple[tuple[int, int], Described]:
    """The numbers of queries and keys on all ranks, and what ``make`` says beside the call.

    The ranks exchange a digest of the call and their rows. A call that gives the lengths does this once; later ones
    with the same description communicate nothing.

    Raises:
        ValueError: the ranks' calls differ, another rank refused its arguments, or rows are not as shard_sequence has
            them; on every rank.
        TypeError, ValueError, NotImplementedError: of ``make``, on this rank.
        RuntimeError: another rank does not answer: it has failed, or makes a call that was agreed on before.
    """
    error: Exception | None = None
    call = Call("", (0, 0), None)
    beside: Any = None
    try:
        call, beside = make()
    except (NotImplementedError, TypeError, ValueError) as refused:
        error = refused
    known = _agreed.setdefault(place.group, {})
    key = (call.description, *call.rows)
    if error is None and call.lengths is not None and key in known:
        return call.lengths, beside
    digest = int.from_bytes(hashlib.blake2b(call.description.encode(), digest_size=7).digest(), "big")
    try:
        everyone = exchanged(place, _REFUSED if error else digest, *call.rows)
        texts = _texts(place, call, error) if any(each[0] != digest for each in everyone) else []
    except RuntimeError as lost:
        if error is not None:
            raise error from lost
        raise
    if texts:
        _refuse(texts, error)
    total = sum(each[1] for each in everyone), sum(each[2] for each in everyone)
    lengths = total if call.lengths is None else call.lengths
    for i, name in enumerate(call.names):
        for rank, each in enumerate(everyone):
            expected = held(lengths[i], Cut(place.world, call.layout), rank)
            if each[1 + i] != expected and not call.packed:
                refuse(
                    f"{name}.shape",
                    f"{each[1 + i]} rows on rank {rank}, and {total[i]} on all {place.world} ranks",
                    f"{expected} rows there, as shard_sequence gives it of {lengths[i]}",
                )
    if call.lengths is not None:
        known[key] = None
        if len(known) > REMEMBERED:  # the oldest one, which is the same call on every rank
            del known[next(iter(known))]
    return lengths, beside


def of_the_first(place: Place, x: Tensor) -> Tensor:
    """The first rank's x, on every rank."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.broadcast(x, place.peer(0), group=place.group)
    return x


def _texts(place: Place, call: Call, error: Exception | None) -> list[tuple[str | None, str]]:
    """Every rank's error, if it has one, and call."""
    texts: list[Any] = [None] * place.world
    dist.all_gather_object(texts, (str(error) if error else None, call.description), group=place.group)
    return texts


def _refuse(texts: list[tuple[str | None, str]], error: Exception | None) -> NoReturn:
    """Says on every rank what differs."""
    if error is not None:
        raise error
    for rank, (message, _) in enumerate(texts):
        if message is not None:
            raise ValueError(f"rank {rank} of the group refused its arguments: {message}")
    lines = "".join(f"\n  rank {rank}: {text}" for rank, (_, text) in enumerate(texts))
    raise ValueError(f"the ranks of the group make different calls:{lines}")


def describe(name: str, q: Tensor, k: Tensor, v: Tensor, dim: int, **options: object) -> str:
    """A call of attention but for the rows of the rank."""

    def shape(t: Tensor) -> str:
        return "(" + ", ".join("N" if i == dim else str(n) for i, n in enumerate(t.shape)) + ")"

    given = "".join(f", {option}={value}" for option, value in options.items())
    return f"{name}(q {shape(q)}, k {shape(k)}, v {shape(v)}, {q.dtype}, {q.device.type}{given})"
