"""The folder of the C++ sources, and the sources of each CUDA kernel."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal, get_args

Direction = Literal["forward", "backward"]

_PACKAGE = Path(__file__).resolve().parent
CSRC = next((p for p in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc") if p.is_dir()), _PACKAGE / "csrc")
"""The C++ sources: in the package where it is installed, beside it in a source folder."""


@functools.cache
def kernel_sources(direction: Direction | None = None) -> dict[str, tuple[Path, ...]]:
    """The sources of each CUDA kernel (of that direction), by its name: ``NAME.cu`` in its family's folder, and its
    instances beneath, ``instances/NAME_*.cu``."""
    directions = (direction,) if direction else get_args(Direction)
    kernels = sorted(path for d in directions for path in (CSRC / d).glob("*/*.cu"))
    return {path.stem: (path, *sorted(path.parent.glob(f"instances/{path.stem}_*.cu"))) for path in kernels}
