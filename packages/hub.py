"""Writes the library in the layout of Hugging Face's kernels hub, for torch 2.10 and whatever is later.

    hub.py [FOLDER]     by default build/hub

    FOLDER/build/torch-stable-abi210-cu130-x86_64-linux/    for torch with CUDA; -cpu- instead with FLASH_WMMA_CUDA=0
        metadata.json, __init__.py and the other modules, lib_flash_wmma_….so

The hub loads kernels of several versions into one process. So these ops have a namespace of their own, with a digest of
the sources in it, and the Python modules import each other relatively. The extension module _C is left out, since it is
for one Python alone: attention and its gradients work without it, the table of kernels (kernels, explain) does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = 1  # as the hub counts; users ask for it
CARD = """---
library_name: kernels
license: bsd-3-clause
---
flash_wmma: exact attention, forward and backward, with the functions of flash-attn.
"""


def digest() -> str:
    sources = sorted(p for folder in ("csrc", "flash_wmma") for p in (ROOT / folder).rglob("*"))
    sources = [p for p in sources if p.suffix in (".py", ".cpp", ".inl", ".h", ".cu", ".cuh")]
    whole = hashlib.sha256()
    for source in sources:
        whole.update(str(source.relative_to(ROOT)).encode() + b"\0" + source.read_bytes())
    return whole.hexdigest()[:10]


def torch_version() -> str:
    """The oldest torch that the library runs with, as the hub writes it."""
    text = (ROOT / "csrc/torch/stable.h").read_text()
    (numbers,) = re.findall(
        r"TORCH_TARGET_VERSION \(\(\(0ULL \+ (\d+)\) << 56\) \| \(\(0ULL \+ (\d+)\) << 48\)\)", text
    )
    return "".join(numbers)


def build(namespace: str, folder: Path) -> None:
    for earlier in (ROOT / "build").glob("*/lib_flash_wmma_*.so"):
        earlier.unlink()
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={folder}"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "FLASH_WMMA_NAMESPACE": namespace}, check=True)


def cuda_build(folder: Path) -> tuple[int, str] | None:
    """The version of CUDA and the architectures, as the library itself says them; None: it is for CPUs."""
    code = "import torch, _C, json; print(json.dumps(_C.cuda_build()))"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
    built = json.loads(run.stdout)
    return None if built is None else (built[0], built[1])


def write(folder: Path, built: Path) -> Path:
    """The folder that was written; ``built`` is an empty one for what is compiled."""
    device = "cpu" if os.environ.get("FLASH_WMMA_CUDA") == "0" else "cuda"
    namespace = f"_flash_wmma_{device}_{digest()}"
    build(namespace, built)
    cuda = cuda_build(built / "flash_wmma")
    backend = "cpu" if cuda is None else f"cu{cuda[0] // 1000}{cuda[0] % 1000 // 10}"
    variant = folder / "build" / f"torch-stable-abi{torch_version()}-{backend}-{platform.machine()}-linux"
    shutil.rmtree(variant, ignore_errors=True)
    shutil.copytree(ROOT / "flash_wmma", variant, ignore=shutil.ignore_patterns("*.so", "kernels.json", "__pycache__"))
    for product in (built / "flash_wmma").iterdir():
        if not product.name.startswith("_C."):
            shutil.copy2(product, variant)
    metadata = {
        "id": namespace,
        "name": "flash-wmma",
        "version": VERSION,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": "cpu"} if cuda is None else {"type": "cuda", "archs": cuda[1].split(";")},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (folder / "README.md").write_text(CARD)
    return variant


if __name__ == "__main__":
    hub = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "hub").resolve()
    with tempfile.TemporaryDirectory() as temporary:
        print(write(hub, Path(temporary)))
