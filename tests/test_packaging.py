"""The build: what the binaries need, which code is in them, what ptxas said, how architecture lists are read."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

import flash_wmma
from flash_wmma import _forward
from flash_wmma.emulator import kernel_sources

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))
import issue_model

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = flash_wmma.build_info().library

# What each source's kernels are compiled to when TORCH_CUDA_ARCH_LIST does not narrow it. The first pattern counts.
CODE = {
    "csrc/*/wgmma_sm90*.cu": {"sm_90a"},
    "csrc/*/bwd_sm90*.cu": {"sm_90a"},
    "csrc/device/convert_sm90.cu": {"sm_90a"},
    "csrc/*/*_sm75*.cu": {"sm_75", "compute_75"},
    "csrc/*/*_sm80*.cu": {"sm_80", "sm_90", "compute_80"},
    "csrc/*/*.cu": {"sm_75", "sm_80", "sm_90", "compute_80"},
}


def expected_code(source: str) -> set[str]:
    return next(code for pattern, code in CODE.items() if fnmatch(source, pattern))


def tool(name: str) -> str:
    """A binary tool's path, as the issue model finds it. Skips the test if there is none."""
    try:
        return issue_model.tool(name)
    except issue_model.CannotModel:
        pytest.skip(f"{name} not found")


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed(library: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", run(tool("readelf"), "-d", library)))


@pytest.fixture(scope="module")
def cuda_sources() -> list[str]:
    """The CUDA sources of a build for every architecture."""
    built = flash_wmma.build_info()
    if built.cuda is None:
        pytest.skip("built without CUDA kernels")
    if not (ROOT / "csrc").is_dir():
        pytest.skip("no sources here")
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cu"))
    full = {code for source in sources for code in expected_code(source)}
    have = {
        f"{'compute' if arch.endswith('+PTX') else 'sm'}_{arch.removesuffix('+PTX').replace('.', '')}"
        for arch in built.architectures
    }
    if have != full:
        pytest.skip(f"built for {';'.join(built.architectures)} alone")
    return sources


# ------------------------------------------------------------------------------------------------------------ binaries


def test_one_version() -> None:
    try:
        installed = importlib.metadata.version("flash_wmma")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flash_wmma is not installed")
    assert installed == flash_wmma.__version__


def test_editable_install_is_a_path(tmp_path: Path) -> None:
    """Which type checkers follow to py.typed. They do not follow setuptools' import hook, which could be there."""
    project, wheels = tmp_path / "project", tmp_path / "wheels"
    shutil.copytree(ROOT / "flash_wmma", project / "flash_wmma", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, project)
    (project / "setup.py").write_text("from setuptools import setup; setup(long_description='-')")  # nothing to compile
    wheels.mkdir()
    code = f"from setuptools.build_meta import build_editable; print(build_editable({str(wheels)!r}))"
    built = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(wheels / built.stdout.split()[-1]) as wheel:
        (pth,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        (path,) = wheel.read(pth).decode().split()
    assert (Path(path) / "flash_wmma" / "py.typed").samefile(project / "flash_wmma" / "py.typed")


@pytest.mark.parametrize("function", ["forward", "forward_varlen"])
def test_overloads_cover_every_return_lse(function: str) -> None:
    """To type checkers a ``bool`` that is not known is neither of the literals."""
    overloads = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(_forward)))
        if isinstance(node, ast.FunctionDef) and node.name == function and node.decorator_list
    ]
    with_aux = [node for node in overloads if "return_aux" in {argument.arg for argument in node.args.kwonlyargs}]
    assert [ast.unparse(node.returns) for node in with_aux if node.returns] == ["tuple[Any, ...]"]
    kinds = {
        ast.unparse(argument.annotation): ast.unparse(node.returns)
        for node in overloads
        if node not in with_aux
        for argument in node.args.kwonlyargs
        if argument.arg == "return_lse" and argument.annotation is not None and node.returns is not None
    }
    out, both = "Tensor", "tuple[Tensor, Tensor]"
    assert kinds == {"Literal[False]": out, "Literal[True]": both, "bool": f"{out} | {both}"}


def test_library_needs_no_cuda_library() -> None:
    libraries = needed(LIBRARY)
    assert not [
        name for name in libraries if re.match(r"lib(cuda|cublas|c10_cuda|torch_cuda|torch_python|python)", name)
    ]
    # libtorch.so is in every torch and leads to the others.
    assert {name for name in libraries if "torch" in name or "c10" in name} <= {"libtorch.so", "libtorch_cpu.so"}


def test_module_finds_the_library_beside_it() -> None:
    module = LIBRARY.with_name(f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")
    if not module.exists():
        pytest.skip(f"no {module.name} beside the library")
    assert LIBRARY.name in needed(module)
    assert "[$ORIGIN]" in run(tool("readelf"), "-d", module)


def test_library_exports_nothing_of_the_cuda_runtime() -> None:
    """A second CUDA runtime in the process must neither take over this library's calls nor be taken over by them."""
    names = [line.split()[-1] for line in run(tool("nm"), "-D", "--defined-only", LIBRARY).splitlines()]
    assert not [name for name in names if re.match(r"_*cuda|cu[A-Z]|cublas", name)]


# ----------------------------------------------------------------------------------------------------------- CUDA code


@pytest.fixture(scope="module")
def build_folder(cuda_sources: list[str]) -> Path:
    """Where the library under test was built."""
    for build in (ROOT / "build").glob("*/libflash_wmma.so"):
        if build.read_bytes() == LIBRARY.read_bytes():
            return build.parent
    pytest.skip("the library under test was not built here")


def generated_code(binary: Path) -> set[str]:
    """The machine code ("sm_80") and PTX ("compute_80") in a library or an object file."""
    entries = re.findall(r"^Fatbin (elf|ptx) code:\n.*\narch = sm_(\w+)$", run(tool("cuobjdump"), binary), re.M)
    return {f"{'sm' if kind == 'elf' else 'compute'}_{arch}" for kind, arch in entries}


def test_generated_code(cuda_sources: list[str], build_folder: Path) -> None:
    expected = {source: expected_code(source) for source in cuda_sources}
    assert {source: generated_code(build_folder / f"{source}.o") for source in cuda_sources} == expected
    assert generated_code(LIBRARY) == set().union(*expected.values())


@pytest.fixture(scope="module")
def ptxas_logs(cuda_sources: list[str], build_folder: Path) -> dict[str, str]:
    """What ptxas said about each source while it compiled the library that is under test."""
    return {source: (build_folder / f"{source}.o.log").read_text() for source in cuda_sources}


def kernel_comments(source: Path) -> dict[str, str]:
    """The comment above each function of the device in a file and in the files it includes, by the function's name."""
    text = source.read_text()
    comments = {}
    for name in re.findall(r'#include "(.*)"', text):
        if name.endswith(".cuh"):
            comments |= kernel_comments(ROOT / "csrc" / name)
    bounds = r"__(?:launch_bounds|maxnreg)__\((?:[^()]|\([^()]*\))*\)"
    for match in re.finditer(
        r"((?:^(?://|template).*\n)*)^[^\n/]*__(?:global|device)__([^;{]*?)(\w+)\(", re.sub(bounds, "", text), re.M
    ):
        comments[match[3]] = match[1]
    return comments


def test_ptxas_output(ptxas_logs: dict[str, str], setup_py: ModuleType) -> None:
    """No spills, and nothing that ptxas says of wgmma, unless a comment above the kernel says why (`// spills: sm_75:
    ...`, `// ptxas: C7519: ...`). No product is serialized, no setmaxnreg undone."""
    findings = []
    for source, log in ptxas_logs.items():
        findings += re.findall(r".*(?:wgmma.*serializ|setmaxnreg.*ignored).*", log)
        comments = kernel_comments(ROOT / source)
        for said, code, function in re.findall(r"(.*\((C75\d\d)\).*in function '(\w+)'.*)", log):
            above = "".join(text for name, text in comments.items() if f"{len(name)}{name}" in function)
            if not re.search(rf"// ptxas:.*\b{code}\b", above):
                findings.append(said)
        for compiled in setup_py.compiled_functions(log):
            if compiled.spill_store_bytes or compiled.spill_load_bytes:
                above = "".join(text for name, text in comments.items() if f"{len(name)}{name}" in compiled.function)
                if not re.search(rf"// spills:.*\b{compiled.arch}\b", above):
                    findings.append(f"{source}: {compiled}")
    assert not findings, "\n".join(findings)


def test_compiled_kernels(ptxas_logs: dict[str, str], setup_py: ModuleType) -> None:
    """The table that ships has every kernel of the library, with the registers that stand in the binary itself."""
    dump = run(tool("cuobjdump"), "-res-usage", LIBRARY)
    arch, found = "", []
    for line in dump.splitlines():
        if line.startswith("arch = "):
            arch = line.removeprefix("arch = ")
        elif function := re.match(r" Function (\w+):", line):
            found.append([function[1], arch])
        elif usage := re.match(r"  REG:(\d+) STACK:(\d+) ", line):
            found[-1] += [int(usage[1]), int(usage[2])]
    names = setup_py.demangled(function for function, *_ in found)
    table = flash_wmma.compiled_kernels()
    shipped = {
        (name, code, kernel.registers, kernel.stack_bytes)
        for name, codes in table.items()
        for code, kernel in codes.items()
    }
    assert shipped == {(name, *facts) for name, (_, *facts) in zip(names, found, strict=True)}
    assert len(shipped) == sum(map(len, table.values()))  # no two sources compile one name differently


# As in wmma_v2.cu and wmma_v3.cuh: kernels of an anonymous namespace, and every kind of template argument.
NAMES = """
struct __half {};
namespace flash_wmma {
struct ForwardParams {};
enum class Problems : unsigned { kAny = 519 };
namespace {
template <class T> void __attribute__((used)) wmma_v2(ForwardParams) {}
template void wmma_v2<__half>(ForwardParams);
template void wmma_v2<float>(ForwardParams);
}
namespace wmma_v3 {
enum class Handover { kRegisters, kShared };
struct TileShape { int d, warps, row_tiles, keys; bool q_in_registers; int blocks; Handover handover; int pad; };
template <class Scalar, TileShape> struct Tile {};
template <class Tile, Problems> void forward(ForwardParams) {}
template void forward<
    Tile<__half, TileShape{256, 2, 1, 16, false, 1, Handover::kRegisters, 8}>, Problems::kAny>(ForwardParams);
}
}
"""


def test_names_of_kernels(cuda_sources: list[str], setup_py: ModuleType, tmp_path: Path) -> None:
    """A kernel that g++ compiles has the name under which the table has what nvcc compiled."""
    (tmp_path / "names.cpp").write_text(NAMES)
    run(tool("g++"), "-std=c++20", "-c", tmp_path / "names.cpp", "-o", tmp_path / "names.o")
    mangled = [line.split()[-1] for line in run(tool("nm"), tmp_path / "names.o").splitlines()]
    names = setup_py.demangled(mangled)
    assert len(names) == 3
    assert set(names) <= set(flash_wmma.compiled_kernels())


# -------------------------------------------------------------------------------------------------- architecture lists


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    path = ROOT / "setup.py"
    spec = importlib.util.spec_from_file_location("flash_wmma_setup", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        pytest.skip("no setup.py here")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WMMA, BF16, MMA_75, WGMMA = "7.5;8.0+PTX;9.0", "8.0+PTX;9.0", "7.5+PTX", "9.0a"


@pytest.mark.parametrize(
    ("available", "wanted", "generated"),
    [
        (WMMA, "7.5", "sm_75"),
        (WMMA, "7.5;9.0", "sm_75 sm_90"),
        (WMMA, "7.5+PTX", "sm_75 compute_75"),
        (WMMA, "8.0+PTX", "sm_80 compute_80"),
        (WMMA, "8.6", "sm_80"),
        (WMMA, "8.9", "sm_80"),
        (WMMA, "8.9+PTX", "sm_80 compute_80"),
        (WMMA, "12.0", "compute_80"),
        (WMMA, "12.0+PTX", "compute_80"),
        (WMMA, "7.0 7.5, 8.6;Hopper", "sm_75 sm_80 sm_90"),
        (WMMA, "6.1", ""),
        (WMMA, "9.0a", "sm_90"),
        (BF16, "7.5", ""),
        (BF16, "7.5+PTX", ""),
        (BF16, "7.5;8.6", "sm_80"),
        (MMA_75, "7.5", "sm_75"),
        (MMA_75, "9.0", "compute_75"),
        (WGMMA, "9.0", "sm_90a"),
        (WGMMA, "9.0+PTX", "sm_90a"),
        (WGMMA, "9.0a", "sm_90a"),
        (WGMMA, "10.0", ""),
        (WGMMA, "8.0+PTX", ""),
    ],
)
def test_architecture_list_narrows(setup_py: ModuleType, available: str, wanted: str, generated: str) -> None:
    code = setup_py.narrow(setup_py.codes(available), setup_py.codes(wanted))
    assert {str(c) for c in code} == set(generated.split())


def test_gencode_flags(setup_py: ModuleType) -> None:
    assert setup_py.gencode(setup_py.codes("8.0+PTX;9.0"), one_ptx=True) == (
        "-gencode arch=compute_80,code=[compute_80,sm_80,sm_90]"
    )
    assert setup_py.gencode(setup_py.codes("8.0;9.0")) == (
        "-gencode arch=compute_80,code=[sm_80] -gencode arch=compute_90,code=[sm_90]"
    )
    assert setup_py.gencode(setup_py.codes("9.0a")) == "-gencode arch=compute_90a,code=[sm_90a]"
    assert setup_py.gencode(setup_py.codes("8.0+PTX;7.5")) == (
        "-gencode arch=compute_75,code=[sm_75] -gencode arch=compute_80,code=[compute_80,sm_80]"
    )


@pytest.mark.parametrize("wanted", ["sm_75", "75", "8.0+SASS"])
def test_architecture_list_refuses(setup_py: ModuleType, wanted: str) -> None:
    with pytest.raises(Exception, match=f"TORCH_CUDA_ARCH_LIST: got '{re.escape(wanted)}'"):
        setup_py.codes(wanted)


def test_every_source_has_its_flags(setup_py: ModuleType) -> None:
    for source in setup_py.found(setup_py.SOURCES):
        if source.suffix == ".cu":
            assert {str(c) for c in setup_py.cuda_code(source)[0]} == expected_code(str(source))
        else:
            flags = setup_py.host_flags(source)
            assert (flags is None) == (re.search("avx|amx", source.name) is not None and not setup_py.X86)
            assert flags is None or ("-fvisibility=hidden" in flags) == (source.name != "registry.cpp")
            assert flags is None or ("-mavx512f" in flags) == (re.search("avx512|amx", source.name) is not None)


def test_every_source_is_compiled(setup_py: ModuleType) -> None:
    """But for those of the emulator."""
    written = {p.relative_to(ROOT) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cu", ".cpp")}
    assert set(setup_py.found(setup_py.SOURCES)) == {
        source for source in written if source.parts[1] != "emulator" and not source.stem.endswith("_emulated")
    }


@pytest.mark.parametrize("said", ["8.0+PTX;9.0, one ptx", "8.0 PTX", "sm_80"])
def test_wrong_architectures_are_refused(setup_py: ModuleType, tmp_path: Path, said: str) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(f"// A kernel.\n// architectures: {said}\n")
    with pytest.raises(setup_py.SetupError, match="got"):
        setup_py.cuda_code(source)


def test_sources_that_ship(setup_py: ModuleType) -> None:
    """A wheel holds every source but those of the native libraries, and that is all the emulator asks for."""
    every = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    shipped = {str(p.relative_to(ROOT)) for pattern in setup_py.SHIPPED for p in ROOT.glob(pattern) if p.is_file()}
    native = {source for source in every if source.startswith(("csrc/torch/", "csrc/cpu/", "csrc/device/hip/"))}
    assert every - shipped == native
    kernels = {str(p.relative_to(ROOT)) for paths in kernel_sources().values() for p in paths}
    assert kernels == {source for source in every if fnmatch(source, "csrc/*ward/*.cu")}
    assert kernels <= shipped


def test_a_kernel_has_the_name_of_its_file() -> None:
    for name, (source, *instances) in kernel_sources().items():
        assert re.search(rf'"{name}"', source.read_text()), source
        assert all("KernelInfo" not in path.read_text() for path in instances)
