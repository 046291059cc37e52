"""How every program starts: the library, or the reason why it cannot be used; the device; types of arguments.

This module can be imported without torch; CannotRun then says that torch is missing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HINT = """\
flash_wmma cannot be used by {python} ({why}).
Run the benchmark from the root of the clone with

    ./dev bench

It installs what is missing, builds the library and prints this table."""


class CannotRun(Exception):
    """The benchmark cannot run as asked; the message says why and what to do."""


def load_library() -> ModuleType:
    """flash_wmma with its ops, or CannotRun that names the one command to run."""
    try:
        import torch

        library = importlib.import_module("flash_wmma")
        getattr(library, "forward")  # noqa: B009 (a folder of that name is no library)
        getattr(torch.ops.flash_wmma, "forward")  # noqa: B009 (raises unless the compiled library is loaded)
    except Exception as error:
        raise CannotRun(HINT.format(python=sys.executable, why=error)) from error
    return library


def choose_device(name: str | None) -> torch.device:
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise CannotRun(f"--device {name}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise CannotRun(f"--device {name}: allowed are cpu and cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise CannotRun(f"--device {name}: this torch sees no GPU (try --device cpu)")
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise CannotRun(f"--device {name}: there are {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(device)
    return device


def positive(text: str) -> int:
    """An int of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, allowed: 1 and more")
    return number


def integers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",") if part]


def names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]
