"""Where the CUDA compiler is, and its flags for the headers that kernels include."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDES = [f"-I{ROOT / folder}" for folder in ("csrc", "csrc/device")]


def find_nvcc() -> str | None:
    """The toolkit's compiler, or None."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    return str(home) if home.exists() else shutil.which("nvcc")
