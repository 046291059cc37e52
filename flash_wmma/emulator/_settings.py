"""What the emulator stands for and how it runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from .._errors import refuse
from ._compile import Mode

SMEM_OPTIN = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a block may opt in to, by architecture."""
_INT32 = 2**31 - 1
_RANGES = {
    "arch": (-_INT32, _INT32),
    "sm_count": (1, _INT32),
    "smem_optin": (0, _INT32),
    "warp_size": (-_INT32, _INT32),
    "memory_bus": (0, _INT32),
    "threads": (1, 1024),
    "seed": (0, 2**64 - 1),
}


@dataclass(frozen=True)
class Settings:
    """Settings of the next launches in this thread. :func:`settings` changes them for a while."""

    mode: Mode = "checked"
    """``"checked"`` watches every access to memory and every wait; ``"fast"`` only runs kernels."""
    arch: int = 90
    """Architecture that kernels choose their tiles for, 10 * major + minor."""
    sm_count: int = 2
    """Multiprocessors; few, so that blocks that can take several tiles do so."""
    smem_optin: int | None = None
    """Bytes of shared memory that a block may opt in to; ``None``: as the architecture has."""
    warp_size: int = 32
    """32, or 64 as on AMD's CDNA."""
    memory_bus: int = 0
    """Bits of the memory's bus, for kernels whose choice depends on it; 0: not known."""
    threads: int | None = None
    """OS threads that share the blocks of a launch; ``None``: as many as torch uses."""
    seed: int = 0
    """Order in which warps run; 0: by warp number."""
    counters: bool = False
    """Count requests, conflicts and instructions, which :func:`flash_wmma.profile` reports."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            refuse("mode", repr(self.mode), "'fast', 'checked'")
        if not isinstance(self.counters, bool):
            refuse("counters", repr(self.counters), "True, False", TypeError)
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in ("smem_optin", "threads"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                refuse(name, repr(value), "an int", TypeError)
            if not least <= value <= most:
                refuse(name, value, f"{least} … {most}")
        if self.arch not in SMEM_OPTIN:
            refuse("arch", self.arch, ", ".join(map(str, SMEM_OPTIN)))
        if self.warp_size not in (32, 64):
            refuse("warp_size", self.warp_size, "32, 64")

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a block may opt in to."""
        return SMEM_OPTIN[self.arch] * 1024 if self.smem_optin is None else self.smem_optin

    @property
    def os_threads(self) -> int:
        """OS threads that share the blocks of a launch."""
        return self.threads or torch.get_num_threads()


_changes: ContextVar[tuple[dict[str, Any], ...]] = ContextVar("flash_wmma.emulator.settings", default=())


def current() -> Settings:
    """The settings in force: ``FLASH_WMMA_EMULATOR`` gives the mode unless :func:`settings` does."""
    mode = os.environ.get("FLASH_WMMA_EMULATOR") or Settings.mode
    if mode not in get_args(Mode):
        refuse("FLASH_WMMA_EMULATOR", repr(mode), "'fast', 'checked'")
    fields: dict[str, Any] = {"mode": mode}
    for changes in _changes.get():
        fields.update(changes)
    return replace(Settings(), **fields)


@contextlib.contextmanager
def settings(**changes: Any) -> Iterator[Settings]:
    """Changes fields of :class:`Settings` within a ``with`` block, for the thread or asyncio task that runs it.
    A thread started within the block begins with the defaults, unless Python gives it the context of its starter.

    >>> with flash_wmma.emulator.settings(mode="fast", arch=75, seed=3):
    ...     flash_wmma.forward(q, k, v, kernel="wmma_v3")

    Raises:
        TypeError, ValueError: no such field, or a value that it cannot have.
    """
    _changes.set((*_changes.get(), changes))
    try:
        yield current()
    finally:
        _changes.set(tuple(known for known in _changes.get() if known is not changes))
