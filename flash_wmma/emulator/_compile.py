"""Compiles kernel sources for the emulator with g++ alone, at first use, into a cache."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from .._errors import EmulatorError
from .._sources import CSRC, kernel_sources

Mode = Literal["fast", "checked"]

_CPUINFO = Path("/proc/cpuinfo")

_COMMON = [
    *("-std=c++20", "-g1", "-fPIC", "-fvisibility=hidden"),  # lines and functions, for the places that are reported
    *(["-march=x86-64-v3"] if platform.machine() == "x86_64" else []),
]
_KERNEL = [
    *_COMMON,
    "-O1",  # -O2 compiles half as long again, and the code runs no faster: most time is the emulator's
    *("-ffp-contract=fast", "-fno-strict-aliasing", "-fno-optimize-sibling-calls", "-Wno-unknown-pragmas"),
    "-U_FORTIFY_SOURCE",  # which some distributions set, and which has a memcpy of its own
    "-fstack-clash-protection",  # a frame larger than a fiber's guard page does not jump over it
    *(f"-I{CSRC / folder}" for folder in ("emulator/include", "device", "")),
    *("-include", "cuda_runtime.h", "-x", "c++"),
]
_UNUSED_FOR = 30 * 24 * 3600  # seconds without use after which a file leaves the cache
_compilers = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
"""One per core, for all threads of this process."""
_CHECKED = [
    *("-DFLASH_WMMA_CHECKED", "-fsanitize=thread", "-fsanitize-coverage=trace-pc"),
    # An access of 16 bytes stays one access, and addresses of code follow the order of the source.
    *("-fno-tree-sra", "-fno-ipa-sra", "-fno-reorder-blocks", "-fno-reorder-blocks-and-partition"),
]


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``FLASH_WMMA_CACHE``, or ``flash_wmma`` in the user's cache folder."""
    named = os.environ.get("FLASH_WMMA_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash_wmma"


def _lacking() -> str:
    """The features that ``-march=x86-64-v3`` needs and this CPU lacks."""
    flags = re.search(r"^flags\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE) if _CPUINFO.exists() else None
    if platform.machine() != "x86_64" or flags is None:
        return ""
    return ", ".join(flag for flag in ("avx2", "bmi2", "f16c", "fma") if flag not in flags[1].split())


@functools.cache
def compiler() -> tuple[str, str]:
    """g++ and its version. clang++ will not do: it splits 16-byte accesses.

    Raises:
        EmulatorError: there is no g++, or the CPU lacks features that it would compile for.
    """
    command = os.environ.get("FLASH_WMMA_GXX") or "g++"
    if lacking := _lacking():
        raise EmulatorError(f"running a CUDA kernel on the CPU needs an x86-64 with AVX2: this one lacks {lacking}")
    path = shutil.which(command)
    if path is None:
        raise EmulatorError(
            f"running a CUDA kernel on the CPU needs {command}, which was not found: install it (Debian, Ubuntu: "
            "apt-get install g++), or set FLASH_WMMA_GXX to its path"
        )
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
        version = done.stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise EmulatorError(f"{path} --version failed, so it is no g++ to compile CUDA kernels with: {error}") from None
    if "clang" in version:
        raise EmulatorError(f"running a CUDA kernel on the CPU needs g++, {path} is {version}")
    return path, version


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"compiling for the emulator failed:\n$ {shlex.join(command)}\n{done.stderr.strip()}")


def _dependencies(depfile: Path) -> list[str]:
    """The files that a make rule of -MMD names: all but those in the compiler's own folders of headers."""
    words = re.findall(r"(?:\\.|[^\\\s])+", depfile.read_text().replace("\\\n", " ").removeprefix("object:"))
    return [re.sub(r"\\(.)", r"\1", word).replace("$$", "$") for word in words]


def _digest(files: list[str], salt: str) -> str:
    digest = hashlib.sha256(salt.encode())
    for name in files:
        digest.update(name.encode())
        digest.update(Path(name).read_bytes() if Path(name).exists() else b"")
    return digest.hexdigest()[:20]


def _prune(folder: Path, name: str) -> None:
    """Removes files that have not been used for long."""
    for path in folder.glob(f"{glob.escape(name)}-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _UNUSED_FOR:
                path.unlink()


def _used(*paths: Path) -> None:
    """Keeps files from being pruned."""
    for path in paths:
        with contextlib.suppress(OSError):  # another user's
            os.utime(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _object(source: Path, flags: list[str], *, cached_only: bool = False) -> Path | None:
    """A source's object file: from the cache, if neither the source nor what it includes has changed. Kernels share
    the object files that all of them are linked with. None: with ``cached_only``, if it would have to be compiled."""
    path, version = compiler()
    folder, name = cache_folder(), f"{source.parent.name}_{source.stem}"
    salt = "\n".join([version, str(source), *flags])
    listed = folder / f"{name}-{_digest([], salt)}.files"

    def cached() -> Path:
        return folder / f"{name}-{_digest(listed.read_text().splitlines(), salt)}.o"

    def find() -> Path | None:
        with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
            if listed.exists() and cached().exists():
                _used(listed, cached())
                return cached()
        return None

    if cached_only:
        return find()
    with _locked(listed.with_suffix(".lock")):
        if found := find():
            return found
        _prune(folder, name)
        with tempfile.TemporaryDirectory(dir=folder) as work, _compilers:
            built = Path(work) / "object.o"
            _run([path, *flags, "-c", str(source), "-o", str(built), "-MMD", "-MT", "object"])
            listed.write_text("\n".join(sorted({str(source), *_dependencies(built.with_suffix(".d"))})))
            built.replace(cached())
    return cached()


def _link(name: str, sources: list[Path], compile_flags: list[str], link_flags: list[str]) -> Path:
    """The shared library ``name`` of these sources: from the cache, if nothing that it was made of has changed."""
    path, _ = compiler()
    if os.environ.get("FLASH_WMMA_WERROR") == "1":
        compile_flags = [*compile_flags, "-Werror"]
    folder = cache_folder()
    with _locked(folder / f"{name}.lock"):
        objects = [_object(source, compile_flags, cached_only=True) for source in sources]
        if not all(objects):
            print(f"flash_wmma: compiling {name} for the emulator", file=sys.stderr, flush=True)
            with ThreadPoolExecutor(len(sources)) as pool:
                objects = list(pool.map(lambda source: _object(source, compile_flags), sources))
        files = [str(o) for o in objects]
        digest = _digest([], "\n".join([path, *files, *link_flags]))
        library = folder / f"{name}-{digest}.so"
        if library.exists():
            _used(library)
            return library
        _prune(folder, name)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            built = Path(work) / "library.so"
            _run([path, "-shared", "-o", str(built), *files, *link_flags])
            built.replace(library)
    return library


def runtime() -> Path:
    """The emulator's own library, which every kernel's library needs."""
    # -Wno-restrict: g++ 12 is wrong about std::string's operator+ (GCC bug 105651)
    flags = [*_COMMON, f"-I{CSRC}", "-O3", "-Wall", "-Wextra", "-Wno-restrict"]
    sources = sorted(p for p in (CSRC / "emulator").glob("*.cpp") if p.name != "kernel_library.cpp")
    # It binds to its own inline functions: those of the same names in a kernel's library are instrumented.
    return _link("libemulator", sources, flags, ["-ldl", "-pthread", "-Wl,-Bsymbolic"])


def build(name: str, sources: list[Path], mode: Mode) -> Path:
    """A library of CUDA sources, for the emulator.

    Args:
        name: begins the library's file name.
        sources: .cu and .cpp files; ``<launch.h>`` and the like are the emulator's.
        mode: ``"fast"`` runs them, ``"checked"`` also watches every access to memory.

    Raises:
        EmulatorError: no g++, or the compiler's messages.
    """
    flags = _KERNEL + (_CHECKED if mode == "checked" else [])
    emulator = runtime()
    return _link(f"{name}.{mode}", sources, flags, [str(emulator), f"-Wl,-rpath,{emulator.parent}"])


def kernel_library(kernel: str, mode: Mode) -> Path:
    """The library of a kernel of this project.

    Raises:
        KeyError: no kernel has that name.
        EmulatorError: as :func:`build`.
    """
    bricks = [p for p in sorted((CSRC / "device").glob("*.cu")) if p.name != "runtime.cu"]
    sources = kernel_sources()[kernel]
    files = [*sources, *bricks, CSRC / "registry.cpp", CSRC / "emulator" / "kernel_library.cpp"]
    return build(kernel, files, mode)
