"""Where the C++ sources lie, and which CUDA kernels they state."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Literal, get_args

Direction = Literal["forward", "backward"]

_PACKAGE = Path(__file__).resolve().parent
CSRC = next((p for p in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc") if p.is_dir()), _PACKAGE / "csrc")
"""The C++ sources: in the package where it is installed, beside it in a source folder."""


@functools.cache
def kernel_sources(direction: Direction | None = None) -> dict[str, tuple[Path, ...]]:
    """The sources of each CUDA kernel (of that direction), by its name: the file that states it and those whose names
    begin as its does."""
    folders = (direction,) if direction else get_args(Direction)
    files = sorted(p for folder in folders for p in (CSRC / folder).glob("*.cu"))
    stated = {path: re.findall(r'/\*name=\*/\s*"(\w+)"', path.read_text()) for path in files}
    return {
        name: (
            path,
            *(p for p in files if not stated[p] and p.parent == path.parent and p.stem.startswith(f"{path.stem}_")),
        )
        for path, names in stated.items()
        for name in names
    }
