"""The emulator's libraries as ctypes sees them, and the answer when libflash_wmma.so asks for a kernel's library."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence

from torch import Tensor

from ._compile import EmulatorError, kernel_library, kernel_sources, runtime
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
    """``EmulatorTarget`` (csrc/emulation.h)."""

    _fields_ = (
        ("library", ctypes.c_char * 4096),
        ("error", ctypes.c_char * 16384),
        ("arch", ctypes.c_int32),
        ("sm_count", ctypes.c_int32),
        ("smem_optin", ctypes.c_int32),
        ("config", Config),
    )


@functools.cache
def emulator() -> ctypes.CDLL:
    """The emulator's own library."""
    library = ctypes.CDLL(str(runtime()))
    library.flash_wmma_emulator_take_profile.restype = ctypes.c_char_p
    return library


def take_profile() -> str:
    """The counters of the launches since the last call, as JSON."""
    text: bytes = emulator().flash_wmma_emulator_take_profile()
    return text.decode()


def configure(buffers: Sequence[tuple[str, Tensor, bool]]) -> None:
    """Settings and memory of the launches to come: (name, tensor, whether it may be written)."""
    library = emulator()
    library.flash_wmma_emulator_configure(ctypes.byref(Config.of(current())))
    rows = [
        Buffer(
            name.encode(), t.data_ptr(), t.untyped_storage().nbytes() - t.storage_offset() * t.element_size(), writable
        )
        for name, t, writable in buffers
    ]
    library.flash_wmma_emulator_buffers((Buffer * len(rows))(*rows), len(rows))


LOCK = threading.RLock()
"""Held while the launches of a program run: the emulator knows the memory and the counters of one caller at a time."""

PREFIX = b"emulator: "
"""Begins every message of the emulator."""


def fill(name: bytes, target: Target) -> int:
    """The target of a kernel: 1, filled in; 0, no such kernel; -1, an error. Called from C++: nothing may be raised."""
    try:
        kernel = name.decode()
        if kernel not in kernel_sources():
            target.error = " ".join(kernel_sources()).encode()
            return 0
        now = current()
        target.library = str(kernel_library(kernel, now.mode)).encode()
        target.arch, target.sm_count, target.smem_optin = now.arch, now.sm_count, now.shared_memory
        target.config = Config.of(now)
        return 1
    except BaseException as error:  # ctypes would print it, and the call go on
        kept = Target.error.size - len(PREFIX) - 1
        text = str(error) if isinstance(error, EmulatorError) else f"{type(error).__name__}: {error}"
        target.error = PREFIX + text.encode()[-kept:]
        return -1
