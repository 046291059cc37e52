"""Loads ``libflash_wmma.so``: importing this module registers the torch ops."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

PATH = Path(__file__).with_name("libflash_wmma.so")
"""The library with the ops and kernels."""

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

ops = torch.ops.flash_wmma
