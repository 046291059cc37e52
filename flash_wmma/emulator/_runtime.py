"""The emulator's libraries as ctypes sees them, and the answer when libflash_wmma.so asks for a kernel's library."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Sequence

from torch import Tensor

from .._errors import INTERRUPTED, EmulatorError
from .._library import library
from .._sources import kernel_sources
from ._compile import kernel_library, runtime
from ._settings import Settings, current


class Config(ctypes.Structure):
    """``emulator::Config`` (csrc/emulator/api.h)."""

    _fields_ = (
        ("warp_size", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("checks", ctypes.c_bool),
        ("counters", ctypes.c_bool),
        ("seed", ctypes.c_uint64),
    )

    @classmethod
    def of(cls, s: Settings) -> Config:
        return cls(s.warp_size, s.os_threads, s.mode == "checked", s.counters and s.mode == "checked", s.seed)


class Buffer(ctypes.Structure):
    """``emulator::Buffer`` (csrc/emulator/api.h)."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("writable", ctypes.c_bool),
    )


class Target(ctypes.Structure):
    """``EmulatorTarget`` (csrc/torch/emulation.h)."""

    _fields_ = (
        ("library", ctypes.c_char * 4096),
        ("error", ctypes.c_char * 16384),
        ("arch", ctypes.c_int32),
        ("sm_count", ctypes.c_int32),
        ("smem_optin", ctypes.c_int32),
        ("memory_bus", ctypes.c_int32),
        ("config", Config),
    )


@functools.cache
def emulator() -> ctypes.CDLL:
    """The emulator's own library."""
    loaded = ctypes.CDLL(str(runtime()))
    loaded.flash_wmma_emulator_take_profile.restype = ctypes.c_char_p
    return loaded


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keeps the launches of other threads out, including those of torch's ops."""
    library.flash_wmma_lock_emulator()
    try:
        yield
    finally:
        library.flash_wmma_unlock_emulator()


def take_profile() -> str:
    """The counters of the launches since the last call, as JSON."""
    text: bytes = emulator().flash_wmma_emulator_take_profile()
    return text.decode()


def _bytes_from(t: Tensor) -> int:
    """Of its storage, from its first element on. A part of an empty tensor may begin behind the storage's end."""
    return max(0, int(t.untyped_storage().nbytes()) - int(t.storage_offset()) * t.element_size())


def configure(buffers: Sequence[tuple[str, Tensor, bool]]) -> None:
    """Sets settings and memory of the next launches: (name, tensor, whether it may be written)."""
    emulator().flash_wmma_emulator_configure(ctypes.byref(Config.of(current())))
    rows = [Buffer(name.encode(), t.data_ptr(), _bytes_from(t), writable) for name, t, writable in buffers]
    emulator().flash_wmma_emulator_buffers((Buffer * len(rows))(*rows), len(rows))


PREFIX = b"emulator: "
"""Begins every message of the emulator."""
DONE, UNKNOWN, FAILED = 1, 2, -1
"""Answers of ``EmulatorResolver`` (csrc/torch/emulation.h)."""


def fill(name: bytes, direction: bytes, target: Target) -> int:
    """Fills in the target of a kernel, or why there is none. Called from C++: must not raise."""
    try:
        kernel, sources = name.decode(), kernel_sources("backward" if direction == b"backward" else "forward")
        if kernel not in sources:
            target.error = " ".join(sources).encode()
            return UNKNOWN
        now = current()
        target.library = os.fsencode(kernel_library(kernel, now.mode))
        target.arch, target.sm_count, target.smem_optin = now.arch, now.sm_count, now.shared_memory
        target.memory_bus = now.memory_bus
        target.config = Config.of(now)
        return DONE
    except KeyboardInterrupt:
        target.error = INTERRUPTED.encode()
        return FAILED
    except BaseException as error:
        kept = Target.error.size - len(PREFIX) - 1
        said = str(error) if isinstance(error, EmulatorError) else f"{type(error).__name__}: {error}"
        target.error = PREFIX + said.encode(errors="replace")[-kept:]
        return FAILED


_Resolver = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)


@_Resolver  # type: ignore[untyped-decorator]
def _resolve(name: bytes, direction: bytes, target: int) -> int:
    """``EmulatorResolver`` (csrc/torch/emulation.h): the library asks it for a CUDA kernel to run on CPU tensors."""
    return fill(name, direction, Target.from_address(target))


library.flash_wmma_set_emulator_resolver(_resolve)
