"""How the package refuses an argument, and how it raises the library's errors."""

from __future__ import annotations

from typing import NoReturn

import torch

INTERRUPTED = "emulator: interrupted"
"""The library's message if ``KeyboardInterrupt`` was raised while it asked Python for a kernel, and the emulator's if
Ctrl-C was pressed while a kernel ran."""


class EmulatorError(RuntimeError):
    """What the emulator found wrong with a kernel, or why a kernel could not be compiled for it."""

    __module__ = "flash_wmma.emulator"  # its public name, which tracebacks show


def refuse(argument: str, got: object, allowed: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raises an error that names the argument, what it was, and what is allowed."""
    raise error(f"{argument}: got {got}, allowed: {allowed}")


def raise_library_error(error: Exception) -> None:
    """Raises the library's error with its own type, whatever torch has made of it: a refusal to choose a kernel is a
    ``ValueError``, a finding of the emulator an ``EmulatorError``, memory that torch's allocator did not have a
    ``torch.OutOfMemoryError``. Returns if the error is none of these."""
    message = str(error)
    if message == INTERRUPTED:
        raise KeyboardInterrupt from None
    if message.startswith("kernel"):
        raise ValueError(message) from None
    if "aoti_torch_empty_strided" in message:  # torch's C functions make it a RuntimeError, older ones without a text
        raise torch.OutOfMemoryError(f"out of memory: {message.splitlines()[0]}") from None
    if message.startswith("emulator: "):
        raise EmulatorError(message) from None
