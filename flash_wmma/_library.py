"""Loads ``libflash_wmma.so``: importing this module registers the torch ops.

Their namespace is the library's name without "lib". It is another one in a copy of this package that carries another
library, such as those for the kernels hub (packages/hub.py), so that several copies can live in one process.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_HERE = Path(__file__).parent
PATH = next(_HERE.glob("lib*flash_wmma*.so"), _HERE / "libflash_wmma.so")
"""The library with the ops and kernels."""

NAMESPACE = PATH.stem.removeprefix("lib")
"""Of the ops: ``torch.ops.flash_wmma``."""

if not PATH.exists():
    if PATH.parent.with_name("setup.py").exists():  # imported from the source folder, which hides an installed package
        raise ImportError(
            f"flash_wmma is not built in its source folder: {PATH} is missing. Build it there (pip install "
            "--no-build-isolation -e .), or, if it is installed, run from another folder than the source's."
        )
    raise ImportError(f"flash_wmma is not built: {PATH} is missing. In the source folder run: pip install .")

library = ctypes.CDLL(str(PATH))
"""The library, for its functions that are no ops."""

torch.ops.load_library(PATH)  # type: ignore[no-untyped-call]

ops = getattr(torch.ops, NAMESPACE)
