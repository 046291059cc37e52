"""Stand-ins for the C and C++ libraries of manylinux_2_28, to link with on a newer system.

A linker binds each name to the newest version of it that this machine's libraries have, and so the result would run on
systems as new as this one alone. The stand-ins have the same names, each in the newest version that glibc 2.28 and the
libstdc++ of GCC 8 know, and no code. What these libraries do not have at all comes from the static libstdc++, as in Red
Hat's toolsets.

    old_libraries.py FOLDER

writes them, and FOLDER/flags: what g++ is given to link with them (setup.py: FLASH_WMMA_OLD_LIBRARIES=FOLDER).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
# Parts of libc in glibc 2.28; files without names in later ones, which keep the names in libc.
PARTS = ("libpthread.so.0", "libdl.so.2", "librt.so.1")
# A flag of newer glibcs that headers of g++ read: whether there is one thread. 0 is always right.
ABSENT = """
.section .note.GNU-stack
.data
.globl __libc_single_threaded
.hidden __libc_single_threaded
__libc_single_threaded: .byte 0
"""


class Symbol(NamedTuple):
    name: str
    kind: str  # as readelf says it
    version: str  # "GLIBC_2.2.5"

    @property
    def rank(self) -> tuple[str, tuple[int, ...]]:
        prefix, _, numbers = self.version.partition("_")
        return prefix, tuple(int(n) for n in numbers.split("."))

    @property
    def old(self) -> bool:
        if not re.fullmatch(rf"({'|'.join(NEWEST)})_[\d.]+", self.version):  # GLIBC_PRIVATE
            return False
        return self.rank[1] <= NEWEST[self.rank[0]]


def run_readelf(*arguments: str | Path) -> str:
    return subprocess.run(["readelf", *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def symbols(library: Path) -> list[Symbol]:
    """What the library has for others to link with, each name in its newest version that is old enough."""
    table = run_readelf("-W", "--dyn-syms", library)
    found: dict[str, Symbol] = {}
    for kind, name, version in re.findall(r"(\w+) +(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +\d+ ([^\s@]+)@@?(\S+)", table):
        symbol = Symbol(name, kind, version)
        if symbol.old and (name not in found or found[name].rank < symbol.rank):
            found[name] = symbol
    return list(found.values())


def assembly(names: list[Symbol]) -> str:
    lines = []
    for number, (name, kind, version) in enumerate(names):
        section, of = {"TLS": (".section .tbss", "tls_object"), "OBJECT": (".bss", "object")}.get(
            kind, (".text", "function")
        )
        label = f"s{number}"
        lines += [section, f".globl {label}", f".type {label}, @{of}", f"{label}: .symver {label}, {name}@@@{version}"]
    return "\n".join([*lines, ""])


def write(folder: Path) -> None:
    cxx = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    def run(*arguments: str | Path) -> str:
        return subprocess.run([*cxx, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    def stand_in(name: str, names: list[Symbol]) -> None:
        source, script = folder / f"{name}.s", folder / f"{name}.map"
        source.write_text(assembly(names))
        script.write_text("".join(f"{version} {{}};\n" for version in sorted({s.version for s in names})))
        versions = [f"-Wl,--version-script={script}"] if names else []
        run("-shared", "-nostdlib", f"-Wl,-soname,{name}", *versions, source, "-o", folder / name)

    libc = run("-print-file-name=libc.so.6")
    (loader,) = re.findall(r"\(NEEDED\).*\[(.*)\]", run_readelf("-d", libc))  # ld-linux-x86-64.so.2
    for library in ("libstdc++.so.6", "libm.so.6", "libc.so.6", loader):
        stand_in(library, symbols(Path(run(f"-print-file-name={library}"))))
    for part in PARTS:
        stand_in(part, [])
    (folder / "absent.s").write_text(ABSENT)
    run("-c", folder / "absent.s", "-o", folder / "absent.o")
    old = {
        name: f'"{folder / name}"' for name in ("absent.o", "libstdc++.so.6", "libm.so.6", "libc.so.6", loader, *PARTS)
    }
    (folder / "flags").write_text(
        f"-nodefaultlibs -Wl,--exclude-libs,ALL {old['absent.o']} {old['libstdc++.so.6']} -l:libstdc++.a"
        f" {old['libm.so.6']} -lgcc_s -lgcc {old['libc.so.6']} -l:libc_nonshared.a -Wl,--as-needed {old[loader]}"
        f" -Wl,--no-as-needed {' '.join(old[part] for part in PARTS)}\n"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
