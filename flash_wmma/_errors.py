"""How the package refuses an argument, and how it raises what the library said."""

from __future__ import annotations

from typing import NoReturn

import torch

INTERRUPTED = "emulator: interrupted"
"""What the library says when ``KeyboardInterrupt`` was raised while it asked Python for a kernel, and the emulator when
Ctrl-C was pressed while a kernel ran."""


class EmulatorError(RuntimeError):
    """What the emulator found wrong with a kernel, or why a kernel could not be compiled for it."""

    __module__ = "flash_wmma.emulator"  # as it is caught, and as tracebacks call it


def refuse(argument: str, got: object, allowed: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raises: the argument, what it was, what is allowed."""
    raise error(f"{argument}: got {got}, allowed: {allowed}")


def raise_library_error(error: Exception) -> None:
    """Raises what the library said as what it is, whatever torch has made of it: a refusal to choose a kernel is a
    ``ValueError``, a finding of the emulator an ``EmulatorError``, memory that torch's allocator did not have a
    ``torch.OutOfMemoryError``. Returns if the error is none of these."""
    message = str(error)
    if message == INTERRUPTED:
        raise KeyboardInterrupt from None
    if message.startswith("kernel"):
        raise ValueError(message) from None
    if "aoti_torch_empty_strided" in message:  # torch's C functions make it a RuntimeError, older ones without a word
        raise torch.OutOfMemoryError(f"out of memory: {message.splitlines()[0]}") from None
    if message.startswith("emulator: "):
        raise EmulatorError(message) from None
