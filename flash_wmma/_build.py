"""What was built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ._library import PATH
from ._native import native
from ._version import __version__


@dataclass(frozen=True)
class BuildInfo:
    """Facts of the build, not of the machine it runs on."""

    version: str
    library: Path
    """``libflash_wmma.so``."""
    cuda: str | None
    """Version of the CUDA toolkit that compiled the kernels, such as ``"13.0"``; ``None``: CPU kernels alone."""
    architectures: tuple[str, ...]
    """Machine code and PTX in the library, such as ``("7.5", "8.0", "8.0+PTX")``."""


def build_info() -> BuildInfo:
    """The version, the library, and what CUDA code is in it.

    Raises:
        ImportError: ``flash_wmma._C`` was not built for this Python.
    """
    cuda, architectures = native().cuda_build() or (None, "")
    return BuildInfo(
        version=__version__,
        library=PATH,
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        architectures=tuple(filter(None, architectures.split(";"))),
    )
