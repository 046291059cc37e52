"""Builds the two native libraries of flash_wmma; everything declarative is in pyproject.toml.

  flash_wmma/libflash_wmma.so   ops and kernels: no Python in it, torch's stable ABI, static CUDA runtime
  flash_wmma/_C.*.so            small pybind11 module beside it
  flash_wmma/kernels.json       registers and so on of every CUDA kernel, as ptxas said; empty without CUDA
  flash_wmma/csrc/              in a wheel alone: the sources that flash_wmma.emulator compiles

Why not torch's BuildExtension: it finds no nvcc under a CPU build of torch and refuses a toolkit whose CUDA version is
not torch's. Neither matters here: kernels see no torch header, and the stable ABI and the static runtime make one
binary serve every torch. So the sources are compiled by ninja, each group with its own flags; ninja also knows their
headers, so that a second build compiles what changed and nothing else. docs/building.md says more.

Under a torch for ROCm hipcc takes nvcc's place, for the kernels without tensor cores (docs/hip.md). `setup.py
build_hip` compiles those to objects, with no torch.

Environment: FLASH_WMMA_CUDA=0/1 (without/with GPU kernels whatever is found), FLASH_WMMA_WERROR=1, CUDA_HOME, CXX,
TORCH_CUDA_ARCH_LIST (as torch reads it: narrows the architectures), MAX_JOBS; ROCM_HOME, PYTORCH_ROCM_ARCH (gfx90a).
For what is given to others (packages/): FLASH_WMMA_NAMESPACE (of the ops; flash_wmma), FLASH_WMMA_OLD_LIBRARIES.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
WERROR = os.environ.get("FLASH_WMMA_WERROR") == "1"
OLD_LIBRARIES = os.environ.get("FLASH_WMMA_OLD_LIBRARIES")  # what packages/old_libraries.py wrote
NAMESPACE = os.environ.get("FLASH_WMMA_NAMESPACE") or "flash_wmma"
X86 = platform.machine() in ("x86_64", "AMD64")

# -------------------------------------------------------------------------------------------- what is compiled, and how


# By folder. A source that differs from the others of its folder says so in a line of its own (`declared`):
#     // architectures: 7.5+PTX                   a .cu's code, in place of ARCHITECTURES
#     // architectures: 8.0+PTX;9.0, one PTX      with 9.0's machine code from 8.0's PTX, which takes longest to make
#     // x86-64: avx2 fma                         a .cpp for that machine alone, with these instructions
HIDDEN = "-fvisibility=hidden -fvisibility-inlines-hidden"
HOST_FLAGS = {
    "csrc": "",  # the registry's functions are what libflash_wmma.so exports
    "csrc/torch": f"{HIDDEN} -isystem $torch_include",
    "csrc/cpu": HIDDEN,
}
MODULE = Path("csrc/torch/module.cpp")  # the one source of flash_wmma._C; all others are libflash_wmma.so's
OPS = Path("csrc/torch/ops.cpp")  # the one source that knows the ops' namespace
ARCHITECTURES = "7.5;8.0+PTX;9.0"  # as in TORCH_CUDA_ARCH_LIST: machine code, "+PTX" adds PTX

KERNELS = (
    *("csrc/device/*.cu", "csrc/forward/**/*.cu", "csrc/backward/**/*.cu"),
    *("csrc/cache/*.cu", "csrc/merge/*.cu", "csrc/reductions/*.cu"),
)
SOURCES = (*(f"{folder}/*.cpp" for folder in HOST_FLAGS), *KERNELS)
# What hipcc compiles: the kernels that use no tensor core.
HIP_SOURCES = (
    *("csrc/device/runtime.cu", "csrc/forward/simt/**/*.cu", "csrc/backward/simt/**/*.cu"),
    *("csrc/cache/*.cu", "csrc/merge/*.cu", "csrc/reductions/*.cu"),
)
SHIPPED = (
    *("csrc/*.h", "csrc/registry.cpp", "csrc/emulator/**/*", "csrc/device/*"),
    *("csrc/forward/**/*", "csrc/backward/**/*", "csrc/cache/*", "csrc/merge/*", "csrc/reductions/*"),
)

# -Wno-restrict: g++ 12 is wrong about std::string's operator+ (GCC bug 105651)
CXX_FLAGS = "-std=c++20 -O3 -fPIC -Wall -Wextra -Wno-restrict -Icsrc" + (" -Werror" if WERROR else "")
# No --use_fast_math: it would flush denormals and replace every division, expf and logf of a file, those that finish a
# row and its LSE too. The kernels name the fast instructions where they want them (ptx.cuh).
# -compress-all: the library has less than half the size; the driver unpacks what it loads.
NVCC_FLAGS = (
    "-std=c++20 -O3 --expt-relaxed-constexpr -Icsrc/device -Icsrc -Xptxas -v -Xfatbin -compress-all"
    " -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra"
    + (" -Werror all-warnings" if WERROR else "")
    + (" -lineinfo" if os.environ.get("FLASH_WMMA_LINEINFO") == "1" else "")
)
# csrc/device/hip comes first: it has <cuda_runtime.h>, <launch.h> and <ptx.cuh>.
HIP_FLAGS = (
    f"-x hip -std=c++20 -O3 -fPIC {HIDDEN} -Wall -Wextra -Wno-missing-braces -Icsrc/device/hip -Icsrc/device -Icsrc"
    " -include cuda_runtime.h" + (" -Werror" if WERROR else "")
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


def gencode(generated: set[Code], one_ptx: bool = False) -> str:
    """nvcc's flags for this code, one -gencode for each time that its PTX is made.

    That is once an architecture, or with `one_ptx` once for 8.0 and what is later.
    """

    def front(code: Code) -> str:
        return "8.0" if one_ptx and not code.ptx and code.version >= (8, 0) else code.arch

    flags = []
    for arch in sorted({front(code) for code in generated}):
        kinds = sorted(str(code) for code in generated if front(code) == arch)
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


# ------------------------------------------------------------------------------------------------ what sources declare


def declared(source: Path, what: str) -> str | None:
    """What a source's line `// {what}: ...` says. None: it has no such line."""
    match = re.search(rf"^// {re.escape(what)}: (.+)$", (ROOT / source).read_text(), re.M)
    return match[1] if match else None


def cuda_code(source: Path) -> tuple[set[Code], bool]:
    """The code that nvcc generates of a source, and whether machine code from 8.0 on is made from one PTX."""
    listed, _, how = (declared(source, "architectures") or ARCHITECTURES).partition(", ")
    if how not in ("", "one PTX"):
        raise SetupError(f"{source}: got architectures {how!r}, expected 'one PTX' or nothing behind the list")
    return codes(listed), how == "one PTX"


def host_flags(source: Path) -> str | None:
    """The flags of a source that g++ compiles, beside CXX_FLAGS. None: it is not for this machine."""
    flags = HOST_FLAGS[str(source.parent)]
    if source == MODULE:
        flags += " -isystem $python_include"
    if source == OPS and NAMESPACE != "flash_wmma":
        flags += f" -DFLASH_WMMA_NAMESPACE={NAMESPACE}"
    instructions = declared(source, "x86-64")
    if instructions is None:
        return flags
    return " ".join([flags, *(f"-m{name}" for name in instructions.split())]) if X86 else None


# ---------------------------------------------------------------------------------------------------------------- tools


def find_torch() -> Path:
    spec = importlib.util.find_spec("torch")  # its folder is enough: importing it would take seconds
    if spec is None or not spec.submodule_search_locations:
        raise SetupError("torch >= 2.10 is needed to build flash_wmma: pip install torch")
    return Path(spec.submodule_search_locations[0])


class Toolkit(NamedTuple):
    """What compiles the kernels for GPUs, and the runtime that they are linked to."""

    platform: Literal["cuda", "hip"]
    compiler: Path
    runtime: Path


def hip_version(torch: Path) -> str | None:
    """torch.version.hip of the torch in that folder, which is not imported; None: it is not a torch for ROCm."""
    version: str | None = runpy.run_path(str(torch / "version.py")).get("hip")
    return version


def find_hipcc() -> Path | None:
    homes = [home for home in (os.environ.get("ROCM_HOME"), os.environ.get("ROCM_PATH")) if home]
    on_path = shutil.which("hipcc")
    found = [Path(home) / "bin" / "hipcc" for home in (*homes, "/opt/rocm")]
    if on_path:
        found.insert(len(homes), Path(on_path))
    return next((path for path in found if path.is_file()), None)


def hip_targets() -> list[str]:
    """The architectures to compile for, as clang names them."""
    targets = re.split(r"[;,\s]+", os.environ.get("PYTORCH_ROCM_ARCH", "").strip() or "gfx90a")
    for target in targets:
        if not re.fullmatch(r"gfx[0-9a-f]{3,4}(:\w+[+-])*", target):
            raise SetupError(f"PYTORCH_ROCM_ARCH: got {target!r}, expected items such as gfx90a")
    return targets


def hip_toolkit(torch: Path) -> Toolkit | None:
    """hipcc and the HIP runtime, or None for a CPU-only build."""
    switch = os.environ.get("FLASH_WMMA_CUDA", "")
    if switch == "0":
        return None
    remedy = (
        "install ROCm and set ROCM_HOME, or take it from Debian or Ubuntu:\n"
        "    apt-get install hipcc rocm-device-libs libamdhip64-dev"
    )
    hipcc = find_hipcc()
    if hipcc is None:
        why = f"torch is built for ROCm {hip_version(torch)}, but no hipcc was found"
        if switch == "1" or Path("/dev/kfd").exists():
            raise SetupError(f"{why}: {remedy}\nor set FLASH_WMMA_CUDA=0: the CPU kernel alone")
        notice(f"{why} and no AMD GPU: building the CPU kernel alone. For the HIP kernels, {remedy}")
        return None
    # torch brings its runtime along, as a rule, and a process should have one.
    home = hipcc.resolve().parent.parent
    folders = [torch / "lib", home / "lib", home / "lib64", home / "lib" / f"{platform.machine()}-linux-gnu"]
    runtime = next((path for path in (folder / "libamdhip64.so" for folder in folders) if path.exists()), None)
    if runtime is None:
        raise SetupError(f"{hipcc} was found, but no libamdhip64.so in {', '.join(map(str, folders))}: {remedy}")
    return Toolkit("hip", hipcc, runtime)


def gpu_toolkit(torch: Path) -> Toolkit | None:
    """The compiler for the GPUs that this torch is for. None: a CPU-only build."""
    return hip_toolkit(torch) if hip_version(torch) else cuda_toolkit()


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


def cuda_toolkit() -> Toolkit | None:
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
    return Toolkit("cuda", nvcc, runtime)


def notice(text: str) -> None:
    print(f"flash_wmma: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------- ninja

RULES = r"""
cxx_flags = {cxx_flags}
nvcc_flags = {nvcc_flags}
hip_flags = {hip_flags}
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
rule hipcc
  command = {hipcc} -MD -MF $out.d $hip_flags $flags -c $in -o $out
  description = $in
  depfile = $out.d
  deps = gcc
rule link
  command = {cxx} -shared -o $out $in $flags
  description = $out
"""


def escape(path: object) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def edge(target: Path, rule: str, source: Path, flags: str) -> str:
    if source == Path("csrc/device/runtime.cu"):
        flags += " $architectures"
    return f"build {escape(target)}: {rule} {escape(source)}\n  flags = {flags}"


def found(patterns: Iterable[str]) -> list[Path]:
    """In the order in which ninja starts: the last rungs of the ladder take longest."""
    return sorted((p.relative_to(ROOT) for pattern in patterns for p in ROOT.glob(pattern)), reverse=True)


def hip_edges(build: Path) -> tuple[list[str], list[Path]]:
    """What hipcc compiles as ninja text, and its objects."""
    flags = " ".join(f"--offload-arch={target}" for target in hip_targets())
    objects = {source: build / f"{source}.o" for source in reversed(found(HIP_SOURCES))}  # here the first take longest
    return [edge(target, "hipcc", source, flags) for source, target in objects.items()], list(objects.values())


def ninja_rules(toolkit: Toolkit | None, torch: Path | None, architectures: str) -> str:
    """`architectures`: what the GPU kernels are compiled for, to say so at run time."""
    cxx = shlex.join(shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or "c++"])
    compiler = toolkit.compiler if toolkit else None
    rules = RULES.format(
        cxx=cxx,
        nvcc=f"{compiler} -ccbin {cxx.split()[0]}" if "CXX" in os.environ else compiler,
        hipcc=compiler,
        cxx_flags=CXX_FLAGS,
        nvcc_flags=NVCC_FLAGS,
        hip_flags=HIP_FLAGS,
        torch=torch,
        python=sysconfig.get_path("include"),
    )
    if toolkit:
        notice(f"{toolkit.platform.upper()} kernels for {architectures} by {toolkit.compiler}")
        rules += f'architectures = -DFLASH_WMMA_ARCHITECTURES=\\"{architectures}\\"\n'.replace(";", r"\;")
    return rules


def ninja_file(build: Path, library: Path, module: Path) -> tuple[str, list[Path]]:
    """The build as ninja text, and the logs of ptxas that it leaves.

    `library` and `module`: where libflash_wmma.so and _C are linked to.
    """
    torch = find_torch()
    toolkit = gpu_toolkit(torch)
    wanted = codes(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    objects: dict[str, list[Path]] = {"library": [], "module": []}
    edges: list[str] = []
    logs, built = [], set()
    if toolkit and toolkit.platform == "hip":
        edges, objects["library"] = hip_edges(build)
    for source in found(SOURCES):
        target = build / f"{source}.o"
        if source.suffix == ".cu":
            if not (toolkit and toolkit.platform == "cuda"):
                continue
            available, one_ptx = cuda_code(source)
            generated = narrow(available, wanted) if wanted else available
            if not generated:
                notice(f"{source}: no code for {os.environ['TORCH_CUDA_ARCH_LIST']}, left out")
                continue
            built |= generated
            edges.append(edge(target, "nvcc", source, gencode(generated, one_ptx)))
            logs.append(Path(f"{target}.log"))
        elif (flags := host_flags(source)) is not None:
            edges.append(edge(target, "cxx", source, flags))
        else:
            continue
        objects["module" if source == MODULE else "library"].append(target)

    architectures = ";".join(c.arch + "+PTX" * c.ptx for c in sorted(built, key=lambda c: (c.ptx, c.version)))
    if toolkit and toolkit.platform == "hip":
        architectures = ";".join(hip_targets())
    elif toolkit and not built:
        raise SetupError(f"TORCH_CUDA_ARCH_LIST={os.environ['TORCH_CUDA_ARCH_LIST']}: no kernel has code for it")
    rules = ninja_rules(toolkit, torch, architectures)

    # libtorch.so alone is named by every torch, CPU or GPU, and leads to the libraries that hold the stable ABI
    # (libtorch_cpu) and the current stream (libtorch_cuda). -z defs: a missing symbol fails here, not at import.
    link = f"-Wl,-z,defs -Wl,-soname,{library.name} -Wl,--exclude-libs,ALL"
    link += f" -L{torch}/lib -Wl,--no-as-needed -ltorch -Wl,--as-needed -ltorch_cpu" + (
        f" {toolkit.runtime} -ldl -lrt -lpthread" if toolkit else ""
    )
    for target, kind, needs, flags in (
        (library, "library", "", link),
        (module, "module", escape(library), f"-Wl,-rpath,'$$ORIGIN' -Wl,--no-as-needed {library}"),
    ):
        inputs = " ".join(map(escape, objects[kind]))
        if OLD_LIBRARIES:
            flags += " " + shlex.quote(f"@{OLD_LIBRARIES}/flags")
        edges.append(f"build {escape(target)}: link {inputs}{f' || {needs}' if needs else ''}\n  flags = {flags}")
    return ninja_text(build, rules, edges), logs


def ninja_text(build: Path, rules: str, edges: list[str]) -> str:
    return f"builddir = {escape(build)}\n{rules}\n" + "\n".join(edges) + "\n"


def run_ninja(script: Path, text: str) -> None:
    """Writes the script, and builds what it says."""
    (ROOT / script).parent.mkdir(parents=True, exist_ok=True)
    (ROOT / script).write_text(text)
    ninja = [sys.executable, "-m", "ninja"] if importlib.util.find_spec("ninja") else [shutil.which("ninja") or ""]
    if not ninja[-1]:
        raise SetupError("ninja is needed to build flash_wmma: pip install ninja")
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    if subprocess.run([*ninja, "-f", script, "-j", jobs], cwd=ROOT, check=False).returncode:
        raise SetupError("the native build failed: the compiler's messages are above")


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
        plain = {"libflash_wmma": f"lib{NAMESPACE}.so", "kernels": "kernels.json"}.get(fullname.rpartition(".")[2])
        return str(Path(name).with_name(plain)) if plain else name

    def build_extensions(self) -> None:
        build = Path(self.build_temp)
        products = [build / Path(self.get_ext_filename(ext.name)).name for ext in self.extensions]
        library, module, table = products
        text, logs = ninja_file(build, library, module)
        run_ninja(build / "build.ninja", text)
        facts = kernel_table((ROOT / log).read_text() for log in logs)
        (ROOT / table).write_text(json.dumps(facts, indent=1) + "\n")
        for ext, product in zip(self.extensions, products, strict=True):
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # a process that has the old one mapped keeps it
            shutil.copy2(ROOT / product, target)


class BuildHip(Command):
    """The kernels for AMD's GPUs as objects in build/hip: that they compile is seen without a torch for ROCm."""

    description = "compile the HIP kernels, without linking them"
    user_options: list[tuple[str, str | None, str]] = []  # noqa: RUF012 # setuptools' interface

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        hipcc = find_hipcc()
        if hipcc is None:
            raise SetupError("no hipcc was found: set ROCM_HOME, or put it on PATH")
        build = Path("build") / "hip"
        edges, _ = hip_edges(build)
        rules = ninja_rules(Toolkit("hip", hipcc, Path()), None, ";".join(hip_targets()))
        run_ninja(build / "build.ninja", ninja_text(build, rules, edges))


def long_description() -> str:
    """README.md for pages outside of the repository: links and pictures are absolute, those of this version's tag."""
    metadata = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    if metadata is None:
        raise SetupError("pyproject.toml: [project.urls] has no Repository")
    version = runpy.run_path(str(ROOT / "flash_wmma" / "_version.py"))["__version__"]
    text = (ROOT / "README.md").read_text()
    text = re.sub(r'(!\[[^]]*\]\(|<img src=")(?!https?:)', rf"\g<1>{metadata[1]}/raw/v{version}/", text)
    return re.sub(r"\]\((?!https?:|#)", f"]({metadata[1]}/blob/v{version}/", text)


if __name__ == "__main__":
    setup(
        long_description=long_description(),
        long_description_content_type="text/markdown",
        # Two libraries and a table: "extensions" are what setuptools puts beside the Python files, editable or not.
        ext_modules=[Extension(f"flash_wmma.{name}", []) for name in ("libflash_wmma", "_C", "kernels")],
        cmdclass={"build_ext": NinjaBuild, "build_py": ShipSources, "build_hip": BuildHip},
    )
