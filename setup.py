"""Builds the two native libraries of flash_wmma; everything declarative is in pyproject.toml.

  flash_wmma/libflash_wmma.so   ops and kernels: no Python in it, torch's stable ABI, static CUDA runtime
  flash_wmma/_C.*.so            small pybind11 module beside it
  flash_wmma/kernels.json       registers and so on of every CUDA kernel, as ptxas said; empty without CUDA
  flash_wmma/csrc/              in a wheel alone: the sources that flash_wmma.emulator compiles

Why not torch's BuildExtension: it finds no nvcc under a CPU build of torch and refuses a toolkit whose CUDA version is
not torch's. Neither matters here: kernels see no torch header, and the stable ABI and the static runtime make one
binary serve every torch. So the sources are compiled by ninja, each group with its own flags; ninja also knows their
headers, so that a second build compiles what changed and nothing else. docs/building.md says more.

Environment: FLASH_WMMA_CUDA=0/1 (without/with CUDA kernels whatever is found), FLASH_WMMA_WERROR=1, CUDA_HOME, CXX,
TORCH_CUDA_ARCH_LIST (as torch reads it: narrows the architectures), MAX_JOBS.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
WERROR = os.environ.get("FLASH_WMMA_WERROR") == "1"
X86 = platform.machine() in ("x86_64", "AMD64")

# -------------------------------------------------------------------------------------------- what is compiled, and how


class Group(NamedTuple):
    """Sources with the same flags. A source belongs to the first group whose pattern fits."""

    pattern: str
    flags: str = ""
    cuda: str = ""  # the code to generate, as in TORCH_CUDA_ARCH_LIST: machine code, "+PTX" adds PTX
    skip: bool = False


HIDDEN = "-fvisibility=hidden -fvisibility-inlines-hidden"
TORCH = "-isystem $torch_include"
AVX2 = "-mavx2 -mfma -mf16c"
GROUPS = (
    Group("csrc/module.cpp", f"{HIDDEN} {TORCH} -isystem $python_include"),
    Group("csrc/registry.cpp"),  # the registry's functions are what libflash_wmma.so exports
    Group("csrc/ops*.cpp", f"{HIDDEN} {TORCH}"),
    Group("csrc/arguments.cpp", f"{HIDDEN} {TORCH}"),
    Group("csrc/emulation.cpp", HIDDEN),
    Group("csrc/cpu/*_avx512.cpp", f"{HIDDEN} {AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl", skip=not X86),
    Group("csrc/cpu/*_avx2.cpp", f"{HIDDEN} {AVX2}", skip=not X86),
    Group("csrc/cpu/*.cpp", f"{HIDDEN} {TORCH}"),
    Group("csrc/*/wgmma_sm90*.cu", cuda="9.0a"),  # its PTX runs on no other architecture
    Group("csrc/*/*_sm75*.cu", cuda="7.5+PTX"),
    Group("csrc/*/*_sm80*.cu", cuda="8.0+PTX;9.0"),
    Group("csrc/*/*.cu", cuda="7.5;8.0+PTX;9.0"),
)
SHIPPED = (
    *("csrc/*.h", "csrc/registry.cpp", "csrc/emulator/**/*", "csrc/device/*"),
    *("csrc/forward/*", "csrc/backward/*", "csrc/reductions/*"),
)
SOURCES = (
    "csrc/*.cpp",
    "csrc/cpu/*.cpp",
    *(f"csrc/{folder}/*.cu" for folder in ("device", "forward", "backward", "reductions")),
)

CXX_FLAGS = "-std=c++17 -O3 -fPIC -Wall -Wextra -Icsrc" + (" -Werror" if WERROR else "")
# No --use_fast_math: it would flush denormals and replace every division, expf and logf of a file, those that finish a
# row and its LSE too. The kernels name the fast instructions where they want them (ptx.cuh).
NVCC_FLAGS = (
    "-std=c++17 -O3 -lineinfo --expt-relaxed-constexpr -Icsrc/device -Xptxas -v"
    " -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra" + (" -Werror all-warnings" if WERROR else "")
)


# --------------------------------------------------------------------------------------------------- CUDA architectures


class Code(NamedTuple):
    """Code that nvcc generates: for one architecture ("8.0", "9.0a"), as machine code or as PTX."""

    arch: str
    ptx: bool

    @property
    def version(self) -> tuple[int, int]:
        major, minor = self.arch.rstrip("a").split(".")
        return int(major), int(minor)

    def __str__(self) -> str:  # as nvcc says it
        return f"{'compute' if self.ptx else 'sm'}_{self.arch.replace('.', '')}"


def gencode(generated: set[Code]) -> str:
    """nvcc's flags for this code, one -gencode an architecture."""
    flags = []
    for arch in sorted({code.arch for code in generated}):
        kinds = sorted(str(code) for code in generated if code.arch == arch)
        flags.append(f"-gencode arch={Code(arch, True)},code=[{','.join(kinds)}]")
    return " ".join(flags)


def codes(arch_list: str) -> set[Code]:
    """Reads an architecture list: "7.5;8.0+PTX", separated by semicolons, commas or spaces."""
    named = {"Turing": "7.5", "Ampere": "8.0;8.6", "Ada": "8.9", "Hopper": "9.0", "Blackwell": "10.0;12.0"}
    result = set()
    for item in re.split(r"[;,\s]+", arch_list.strip()):
        arch, plus, suffix = item.partition("+")
        if arch in named:
            result |= codes(";".join(a + plus + suffix for a in named[arch].split(";")))
        elif re.fullmatch(r"\d+\.\d[af]?", arch) and suffix in ("", "PTX"):
            result |= {Code(arch, False)} | ({Code(arch, True)} if plus else set())
        elif item:
            raise SetupError(f"TORCH_CUDA_ARCH_LIST: got {item!r}, expected items such as 7.5, 9.0 or 8.0+PTX")
    return result


def narrow(available: set[Code], wanted: set[Code]) -> set[Code]:
    """The part of a source's code that serves the wanted architectures. Empty: nothing in this source is for them.

    Machine code runs on later minors of its major (8.0's on 8.6 and 8.9), PTX on everything later.
    """
    result = set()
    for want in wanted:
        earlier = [c for c in available if c.version <= want.version]
        machine = [c for c in earlier if not c.ptx and c.version[0] == want.version[0]]
        machine = [c for c in machine if not c.arch.endswith("a") or c.version == want.version]
        best = max(machine or [c for c in earlier if c.ptx], key=lambda c: c.version, default=None)
        if best and want.ptx and not best.arch.endswith("a"):
            best = Code(best.arch, True)
        result |= {best} if best else set()
    return result


# ---------------------------------------------------------------------------------------------------------------- tools


def find_torch() -> Path:
    spec = importlib.util.find_spec("torch")  # its folder is enough: importing it would take seconds
    if spec is None or not spec.submodule_search_locations:
        raise SetupError("torch >= 2.10 is needed to build flash_wmma: pip install torch")
    return Path(spec.submodule_search_locations[0])


def find_nvcc() -> Path | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if not any(homes):
        on_path = shutil.which("nvcc")
        homes += [str(Path(on_path).resolve().parent.parent)] if on_path else []
        homes += ["/usr/local/cuda"]
        homes += [f"{folder}/nvidia/cu13" for folder in (*sys.path, sysconfig.get_path("purelib"))]
    return next((p for p in (Path(home) / "bin" / "nvcc" for home in homes if home) if p.is_file()), None)


def has_gpu() -> bool:
    if any(Path(p).exists() for p in ("/dev/nvidia0", "/dev/nvidiactl")):
        return True
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True, check=False).returncode == 0


def cuda_toolkit() -> tuple[Path, Path] | None:
    """nvcc and the static CUDA runtime, or None for a CPU-only build."""
    switch = os.environ.get("FLASH_WMMA_CUDA", "")
    if switch == "0":
        return None
    remedy = (
        "install a CUDA toolkit (12.4 or later) and set CUDA_HOME, or take nvcc from PyPI:\n"
        "    pip install --target cuda --no-deps nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-crt==13.0.* "
        "nvidia-cuda-runtime==13.0.* nvidia-cuda-cccl==13.0.*\n"
        "    export CUDA_HOME=$PWD/cuda/nvidia/cu13"
    )
    nvcc = find_nvcc()
    if nvcc is None:
        if switch == "1" or has_gpu():
            why = "FLASH_WMMA_CUDA=1" if switch == "1" else "this machine has an NVIDIA GPU"
            raise SetupError(f"{why}, but no nvcc was found: {remedy}\nor set FLASH_WMMA_CUDA=0: the CPU kernel alone")
        notice(f"no nvcc and no GPU found: building the CPU kernel alone. For the CUDA kernels, {remedy}")
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", text)
    if not match or (int(match[1]), int(match[2])) < (12, 4):
        raise SetupError(f"{nvcc} is {match[0] if match else 'of unknown version'}, 12.4 or later is needed: {remedy}")
    home = nvcc.resolve().parent.parent
    machine = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}.get(platform.machine(), "")
    runtimes = [home / folder / "libcudart_static.a" for folder in ("lib64", "lib", f"targets/{machine}/lib")]
    runtime = next((path for path in runtimes if path.is_file()), None)
    if runtime is None:
        raise SetupError(f"{nvcc} was found, but no libcudart_static.a beside it in {home}: {remedy}")
    return nvcc, runtime


def notice(text: str) -> None:
    print(f"flash_wmma: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------- ninja

RULES = r"""
cxx_flags = {cxx_flags}
nvcc_flags = {nvcc_flags}
torch_include = {torch}/include
python_include = {python}
rule cxx
  command = {cxx} -MD -MF $out.d $cxx_flags $flags -c $in -o $out
  description = $in
  depfile = $out.d
  deps = gcc
rule nvcc
  command = {nvcc} -MD -MF $out.d $nvcc_flags $flags -c $in -o $out >$out.log 2>&1; status=$$?; $
    grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame|^ +Function properties' $out.log; exit $$status
  description = $in
  depfile = $out.d
  deps = gcc
rule link
  command = {cxx} -shared -o $out $in $flags
  description = $out
"""


def escape(path: object) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def ninja_file(build: Path, library: Path, module: Path) -> tuple[str, list[Path]]:
    """The build as ninja text, and the logs of ptxas that it leaves.

    `library` and `module`: where libflash_wmma.so and _C are linked to.
    """
    torch, toolkit = find_torch(), cuda_toolkit()
    wanted = codes(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    objects: dict[str, list[Path]] = {"library": [], "module": []}
    edges, logs, built = [], [], set()
    # Ninja starts in this order, and the last rungs of the ladder take longest.
    for source in sorted((p.relative_to(ROOT) for pattern in SOURCES for p in ROOT.glob(pattern)), reverse=True):
        group = next(g for g in GROUPS if fnmatch(str(source), g.pattern))
        target = build / f"{source}.o"
        flags = group.flags
        if group.skip or (group.cuda and toolkit is None):
            continue
        if group.cuda:
            available = codes(group.cuda)
            generated = narrow(available, wanted) if wanted else available
            if not generated:
                notice(f"{source}: no code for {os.environ['TORCH_CUDA_ARCH_LIST']}, left out")
                continue
            built |= generated
            flags = f"{flags} {gencode(generated)}".strip()
            logs.append(Path(f"{target}.log"))
        if source == Path("csrc/device/runtime.cu"):
            flags += " $architectures"
        edges.append(f"build {escape(target)}: {'nvcc' if group.cuda else 'cxx'} {escape(source)}\n  flags = {flags}")
        objects["module" if source.name == "module.cpp" else "library"].append(target)

    cxx = shlex.join(shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or "c++"])
    nvcc, cudart = toolkit or (None, None)
    rules = RULES.format(
        cxx=cxx,
        nvcc=f"{nvcc} -ccbin {cxx.split()[0]}" if "CXX" in os.environ else nvcc,
        cxx_flags=CXX_FLAGS,
        nvcc_flags=NVCC_FLAGS,
        torch=torch,
        python=sysconfig.get_path("include"),
    )
    if toolkit:
        if not built:
            raise SetupError(f"TORCH_CUDA_ARCH_LIST={os.environ['TORCH_CUDA_ARCH_LIST']}: no kernel has code for it")
        text = ";".join(c.arch + "+PTX" * c.ptx for c in sorted(built, key=lambda c: (c.ptx, c.version)))
        notice(f"CUDA kernels for {text} by {nvcc}")
        rules += f'architectures = -DFLASH_WMMA_ARCHITECTURES=\\"{text}\\"\n'.replace(";", r"\;")

    # libtorch.so alone is named by every torch, CPU or CUDA, and leads to the libraries that hold the stable ABI
    # (libtorch_cpu) and the current stream (libtorch_cuda). -z defs: a missing symbol fails here, not at import.
    link = f"-Wl,-z,defs -Wl,-soname,{library.name} -Wl,--exclude-libs,ALL"
    link += f" -L{torch}/lib -Wl,--no-as-needed -ltorch -Wl,--as-needed -ltorch_cpu" + (
        f" {cudart} -ldl -lrt -lpthread" if cudart else ""
    )
    for target, kind, needs, flags in (
        (library, "library", "", link),
        (module, "module", escape(library), f"-Wl,-rpath,'$$ORIGIN' -Wl,--no-as-needed {library}"),
    ):
        inputs = " ".join(map(escape, objects[kind]))
        edges.append(f"build {escape(target)}: link {inputs}{f' || {needs}' if needs else ''}\n  flags = {flags}")
    return f"builddir = {escape(build)}\n{rules}\n" + "\n".join(edges) + "\n", logs


# ------------------------------------------------------------------------------------------------------ what ptxas said


class Compiled(NamedTuple):
    """What ptxas made of one function for one architecture: bytes a thread, of shared memory a block."""

    function: str  # mangled
    arch: str  # "sm_80"
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int = 0
    registers: int | None = None  # a kernel's, enough for what it calls; None: a function that kernels call


def compiled_functions(log: str) -> Iterator[Compiled]:
    """Every kernel, and every function that was not inlined, from what ptxas -v wrote."""
    for entry in log.split("Compiling entry function ")[1:]:
        kernel, arch = re.findall(r"'(\w+)'", entry.partition("\n")[0])
        for function, *numbers in re.findall(
            r"Function properties for (\w+)\n"
            r" +(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
            entry,
        ):
            facts = Compiled(function, arch, *map(int, numbers))
            if function == kernel and (used := re.search(r"Used (\d+) registers(?:.*, (\d+) bytes smem)?", entry)):
                facts = facts._replace(registers=int(used[1]), static_smem_bytes=int(used[2] or 0))
            yield facts


def demangled(names: Iterable[str]) -> list[str]:
    """The names without parameters: the same whether nvcc or g++ mangled them, anonymous namespaces included."""
    filt = shutil.which("c++filt")
    if filt is None:
        notice("no c++filt (of binutils) was found: kernels.json has mangled names, which nothing will find")
        return list(names)
    run = subprocess.run([filt, "-p"], input="\n".join(names), stdout=subprocess.PIPE, text=True, check=True)
    return run.stdout.splitlines()


def kernel_table(logs: Iterable[str]) -> dict[str, dict[str, dict[str, object]]]:
    """The facts of every kernel by its name and architecture. Sources that share an instance compile it alike."""
    kernels = [function for log in logs for function in compiled_functions(log) if function.registers is not None]
    table: dict[str, dict[str, dict[str, object]]] = {}
    for name, kernel in zip(demangled(k.function for k in kernels), kernels, strict=True):
        facts = {key: value for key, value in kernel._asdict().items() if key not in ("function", "arch")}
        table.setdefault(name, {})[kernel.arch] = facts
    return table


class ShipSources(build_py):
    """A wheel also holds the sources that flash_wmma.emulator compiles, as flash_wmma/csrc. An editable install and a
    source folder have them beside the package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source in sorted(p for pattern in SHIPPED for p in ROOT.glob(pattern) if p.is_file()):
            target = Path(self.build_lib, "flash_wmma", source.relative_to(ROOT))
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target), preserve_mode=False)


class NinjaBuild(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        name = f"{sys.implementation.cache_tag}-{platform.machine()}{'-werror' if WERROR else ''}"
        self.build_temp = str(Path("build") / name)  # kept between installs, so that the next one builds what changed

    def get_ext_filename(self, fullname: str) -> str:
        name: str = super().get_ext_filename(fullname)
        plain = {"libflash_wmma": "libflash_wmma.so", "kernels": "kernels.json"}.get(fullname.rpartition(".")[2])
        return str(Path(name).with_name(plain)) if plain else name

    def build_extensions(self) -> None:
        build = Path(self.build_temp)
        (ROOT / build).mkdir(parents=True, exist_ok=True)
        products = [build / Path(self.get_ext_filename(ext.name)).name for ext in self.extensions]
        library, module, table = products
        script = build / "build.ninja"
        text, logs = ninja_file(build, library, module)
        (ROOT / script).write_text(text)
        ninja = [sys.executable, "-m", "ninja"] if importlib.util.find_spec("ninja") else [shutil.which("ninja") or ""]
        if not ninja[-1]:
            raise SetupError("ninja is needed to build flash_wmma: pip install ninja")
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        if subprocess.run([*ninja, "-f", script, "-j", jobs], cwd=ROOT, check=False).returncode:
            raise SetupError("the native build failed: the compiler's messages are above")
        facts = kernel_table((ROOT / log).read_text() for log in logs)
        (ROOT / table).write_text(json.dumps(facts, indent=1) + "\n")
        for ext, product in zip(self.extensions, products, strict=True):
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # a process that has the old one mapped keeps it
            shutil.copy2(ROOT / product, target)


if __name__ == "__main__":
    setup(
        # Two libraries and a table: "extensions" are what setuptools puts beside the Python files, editable or not.
        ext_modules=[Extension(f"flash_wmma.{name}", []) for name in ("libflash_wmma", "_C", "kernels")],
        cmdclass={"build_ext": NinjaBuild, "build_py": ShipSources},
    )
