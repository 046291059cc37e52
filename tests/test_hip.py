"""The kernels for AMD GPUs, on which nothing here runs: what setup.py compiles and links under a torch for ROCm, what
is in the objects that hipcc makes of them (./dev hip), the banks of wavefronts of 64 lanes, how rocprof is read.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flash_wmma
from flash_wmma.emulator import Program, settings

ROOT = Path(__file__).resolve().parent.parent
OBJECTS = sorted(p for p in (ROOT / "build" / "hip").glob("csrc/**/*.o") if p.name != "runtime.cu.o")  # has no kernel


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"flash_wmma_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------------- what is built


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not (ROOT / "setup.py").is_file():
        pytest.skip("no setup.py here")
    for name in ("ROCM_HOME", "ROCM_PATH", "PYTORCH_ROCM_ARCH", "FLASH_WMMA_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    return load(ROOT / "setup.py", monkeypatch)


@pytest.fixture
def rocm_torch(tmp_path: Path, setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that says what a torch for ROCm says of itself, and is what setup.py finds."""
    torch_folder = tmp_path / "torch"
    torch_folder.mkdir()
    (torch_folder / "version.py").write_text("cuda = None\nhip: str | None = '6.2.41133-dd7f95766'\n")
    monkeypatch.setattr(setup_py, "find_torch", lambda: torch_folder)
    return torch_folder


@pytest.fixture
def rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ROCm that has the files that setup.py looks for."""
    home = tmp_path / "rocm"
    for name in ("bin/hipcc", "lib/libamdhip64.so"):
        (home / name).parent.mkdir(parents=True)
        (home / name).touch()
    monkeypatch.setenv("ROCM_HOME", str(home))
    return home


def edges(text: str) -> dict[str, tuple[str, str]]:
    """Of a ninja script: each source's rule and flags."""
    found = re.findall(r"^build \S+: (\w+) (csrc/\S+)\n  flags = (.*)$", text, re.M)
    return {source: (rule, flags) for rule, source, flags in found}


def test_a_torch_without_rocm_takes_nvcc(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup_py.hip_version(setup_py.find_torch()) == torch.version.hip
    if torch.version.hip is None:
        monkeypatch.setattr(setup_py, "cuda_toolkit", lambda: "nvcc's")
        assert setup_py.gpu_toolkit(setup_py.find_torch()) == "nvcc's"


def test_sources_under_rocm(setup_py: ModuleType, rocm_torch: Path, rocm: Path) -> None:
    assert setup_py.hip_version(rocm_torch) == "6.2.41133-dd7f95766"
    text, logs = setup_py.ninja_file(Path("build"), Path("libflash_wmma.so"), Path("_C.so"))
    compiled = edges(text)
    by_hipcc = {source for source, (rule, _) in compiled.items() if rule == "hipcc"}
    simt = {f"csrc/forward/simt/{p.name}" for p in (ROOT / "csrc" / "forward").glob("simt/simt*.cu")}
    assert len(simt) == 9  # the ladder's eight and FlashAttention-1's order
    assert by_hipcc == simt | {
        "csrc/device/runtime.cu",
        "csrc/cache/append.cu",
        "csrc/merge/merge.cu",
        "csrc/reductions/reduce.cu",
        "csrc/reductions/softmax.cu",
    } | {
        f"csrc/backward/simt/{name}.cu"
        for name in ("bwd_simt", *(f"instances/bwd_simt_{part}" for part in ("fused", "keys", "queries", "statistics")))
    }
    assert all(rule == "cxx" for source, (rule, _) in compiled.items() if source not in by_hipcc)
    assert {"csrc/cpu/attention.cpp", "csrc/torch/ops_forward.cpp"} <= set(compiled)
    assert all("--offload-arch=gfx90a" in compiled[source][1] for source in by_hipcc)
    assert 'architectures = -DFLASH_WMMA_ARCHITECTURES=\\"gfx90a\\"' in text
    assert "$architectures" in compiled["csrc/device/runtime.cu"][1]
    link = re.search(r"^build libflash_wmma.so: link (.*)\n  flags = (.*)$", text, re.M)
    assert link is not None
    assert f" {rocm}/lib/libamdhip64.so" in link[2]
    assert "cudart" not in text.partition("builddir")[2]
    assert all(f"build/{source}.o" in link[1] for source in by_hipcc)
    assert logs == []


def test_one_hip_runtime(setup_py: ModuleType, rocm_torch: Path, rocm: Path) -> None:
    """The one that torch brings along, if it does."""
    assert setup_py.gpu_toolkit(rocm_torch).runtime == rocm / "lib" / "libamdhip64.so"
    (rocm_torch / "lib").mkdir()
    (rocm_torch / "lib" / "libamdhip64.so").touch()
    toolkit = setup_py.gpu_toolkit(rocm_torch)
    assert toolkit == ("hip", rocm / "bin" / "hipcc", rocm_torch / "lib" / "libamdhip64.so")


def test_no_runtime(setup_py: ModuleType, rocm_torch: Path, rocm: Path) -> None:
    (rocm / "lib" / "libamdhip64.so").unlink()
    with pytest.raises(setup_py.SetupError, match=r"no libamdhip64\.so in"):
        setup_py.gpu_toolkit(rocm_torch)


def test_no_hipcc(
    setup_py: ModuleType, rocm_torch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_py, "find_hipcc", lambda: None)
    if not Path("/dev/kfd").exists():
        assert setup_py.gpu_toolkit(rocm_torch) is None
        assert "torch is built for ROCm 6.2" in capsys.readouterr().err
    monkeypatch.setenv("FLASH_WMMA_CUDA", "1")
    with pytest.raises(setup_py.SetupError, match="apt-get install hipcc"):
        setup_py.gpu_toolkit(rocm_torch)


def test_cpu_alone(setup_py: ModuleType, rocm_torch: Path, rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_WMMA_CUDA", "0")
    text, _ = setup_py.ninja_file(Path("build"), Path("libflash_wmma.so"), Path("_C.so"))
    assert {rule for rule, _ in edges(text).values()} == {"cxx"}
    assert str(rocm) not in text


@pytest.mark.parametrize("wanted", ["gfx90a;gfx1100", "gfx90a gfx1100"])
def test_targets(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    assert setup_py.hip_targets() == ["gfx90a"]
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", wanted)
    assert setup_py.hip_targets() == ["gfx90a", "gfx1100"]
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "sm_90")
    with pytest.raises(setup_py.SetupError, match="PYTORCH_ROCM_ARCH: got 'sm_90'"):
        setup_py.hip_targets()


# ------------------------------------------------------------------------------------------------------ what hipcc made


def llvm(name: str) -> str:
    """A tool of the compiler that hipcc calls."""
    folders = sorted(Path("/usr/lib").glob("llvm-*/bin"), reverse=True)
    path = shutil.which(name) or shutil.which(name, path=":".join(map(str, [*folders, "/opt/rocm/llvm/bin"])))
    if path is None:
        pytest.skip(f"{name} not found")
    return path


@pytest.mark.skipif(not OBJECTS, reason="nothing compiled by ./dev hip here")
@pytest.mark.parametrize("path", OBJECTS, ids=[p.name.partition(".")[0] for p in OBJECTS])
def test_code_object(path: Path, tmp_path: Path) -> None:
    """Every kernel is for wavefronts of 64, keeps its registers, and has its shared memory from the launch alone."""
    bundle, code = tmp_path / "bundle", tmp_path / "code"
    subprocess.run(
        [llvm("llvm-objcopy"), f"--dump-section=.hip_fatbin={bundle}", path, tmp_path / "rest.o"], check=True
    )
    target = "hipv4-amdgcn-amd-amdhsa--gfx90a"
    command = [llvm("clang-offload-bundler"), "--type=o", "--unbundle", f"--targets={target}"]
    subprocess.run([*command, f"--input={bundle}", f"--output={code}"], check=True)
    command = [llvm("llvm-readelf"), "--notes", str(code)]
    notes = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels = [
        dict(re.findall(r"\.(\w+): +(\S+)", part))
        for part in re.split(r"^  - ", notes.partition("amdhsa.kernels")[2].partition("amdhsa.target")[0], flags=re.M)
        if ".wavefront_size" in part
    ]
    assert kernels
    for kernel in kernels:
        assert "flash_wmma" in kernel["symbol"]
        assert kernel["wavefront_size"] == "64"
        assert kernel["private_segment_fixed_size"] == "0", kernel  # what would be spilled to memory
        assert kernel["group_segment_fixed_size"] == "0", kernel
        assert 0 < int(kernel["vgpr_count"]) <= 512


# ----------------------------------------------------------------------------------------------- wavefronts of 64 lanes

BANKS = """
#include <entry.h>
#include <launch.h>
#include <shared_memory.cuh>

using namespace flash_wmma;

struct SharedMemory {
    float words[64 * 64];
};

template <class T>
__global__ void copy(float* out, const int* where, int stored) {
    auto& smem = shared_memory<SharedMemory>();
    const int lane = static_cast<int>(threadIdx.x);
    for (int i = lane; i < 64 * 64; i += 64) smem.words[i] = 0.f;
    __syncthreads();
    T* const own = reinterpret_cast<T*>(&smem.words[where[lane]]);
    if (stored) *own = *reinterpret_cast<const T*>(&out[4 * lane]);  // the store
    __syncthreads();
    *reinterpret_cast<T*>(&out[4 * lane]) = *own;  // the load
}
template <class T>
void run(float* out, const int* where, int stored) {
    launch(copy<T>, {dim3(1), dim3(64), sizeof(SharedMemory)}, nullptr, out, where, stored);
}
const Entry k4("copy4", run<float>), k8("copy8", run<float2>), k16("copy16", run<float4>);
"""


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> Program:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    source = tmp_path_factory.mktemp("hip") / "banks.cu"
    source.write_text(BANKS)
    return Program(source)


# Words 0-15 of a row, or 16-31, by the lane's group of four: groups 0 and 1, 2 and 3, ... take both halves of the
# banks, groups 0 and 5, 1 and 4, 2 and 7, 3 and 6 the same.
HALVES = (0, 1, 0, 1, 1, 0, 1, 0)


@pytest.mark.parametrize(
    ("width", "where", "stores", "loads", "parts"),
    [
        (4, range(64), 2, 2, 2),  # each half of the wavefront is all banks once
        (4, range(0, 128, 2), 4, 4, 2),
        (4, range(0, 64 * 32, 32), 64, 64, 2),  # a column of rows of 32 words: one bank
        (4, range(0, 64 * 33, 33), 2, 2, 2),  # padded
        (4, [lane // 32 for lane in range(64)], 2, 2, 2),  # one word, to all lanes of a half
        (8, range(0, 128, 2), 4, 4, 4),
        (8, [2 * (lane // 2) for lane in range(64)], 4, 4, 4),  # pairs that want the same save nothing
        (16, range(0, 256, 4), 8, 8, 8),
        (16, range(0, 64 * 36, 36), 8, 8, 8),
        (16, [32 * (lane // 4) + 16 * HALVES[lane // 4 % 8] + 4 * (lane % 4) for lane in range(64)], 8, 16, 8),
    ],
)
def test_banks_of_a_wavefront_of_64(
    banks: Program, width: int, where: list[int] | range, stores: int, loads: int, parts: int
) -> None:
    own = len(set(where)) == 64  # words that several lanes store to would be a race
    with settings(warp_size=64):
        profile = banks.profile(f"copy{width}", torch.zeros(256), torch.tensor(where, dtype=torch.int32), int(own))
    for kind, cost in (("store", stores), ("load", loads))[not own :]:
        (line,) = profile.at(1 + BANKS[: BANKS.index(f"// the {kind}")].count("\n"))
        shared = line.counts.shared_memory[kind]
        assert (shared.requests, shared.wavefronts, shared.ideal_wavefronts) == (1, cost, parts)
        (request,) = (request for request in line.requests if request.space == "shared")
        assert len(request.addresses) == 64
        assert request.cost == cost


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_ladder_on_wavefronts_of_64() -> None:
    """Rows of 64 keys, one a lane: a column of K in one bank takes 32 wavefronts for each half of the lanes."""
    q, k, v = (torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    with settings(warp_size=64):
        shared, padded = (flash_wmma.profile(q, k, v, kernel=f"simt_{name}") for name in ("shared", "padded"))
    assert shared.launches[0].block == padded.launches[0].block == (64, 16, 1)
    assert shared.counts.shared_memory["load"].bank_conflicts == 62 * 64 * 64 * 64 // 64
    assert padded.counts.bank_conflicts == 0
    assert flash_wmma.profile(q, k, v, kernel="simt_padded").launches[0].block == (32, 32, 1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_gradients_on_wavefronts_of_64() -> None:
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(1, 2, 50, 64, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, 2, 70, 64, generator=generator) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with settings(mode="checked", warp_size=64):
        out = flash_wmma.forward(q, k, v, causal="bottom_right", kernel="simt", backward_kernel="bwd_simt")
        found = torch.autograd.grad(out, leaves, dout)
    visible = torch.ones(50, 70, dtype=torch.bool).tril(70 - 50)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), visible)
    for gradient, expected in zip(found, torch.autograd.grad(exact, leaves, dout.double()), strict=True):
        assert (gradient - expected).abs().max() < 1e-5 * expected.abs().max()


# ------------------------------------------------------------------------------------------------------------- rocprof

# Made by hand, in the form that rocprof's documentation gives: no AMD GPU wrote it.
CSV = """\
"Index","KernelName","gpu-id","queue-id","queue-index","pid","tid","grd","wgr","lds","scr","arch_vgpr","accum_vgpr",\
"sgpr","wave_size","sig","obj","SQ_WAVES","SQ_INSTS_VALU","SQ_INSTS_LDS","SQ_INSTS_VMEM_RD","SQ_INSTS_VMEM_WR",\
"SQ_LDS_IDX_ACTIVE","SQ_LDS_BANK_CONFLICT","DispatchNs","BeginNs","EndNs","CompleteNs","DurationNs"
0,"void at::native::fill(float*) [clone .kd]",0,0,0,7,7,64,64,0,0,8,0,16,64,"0x0","0x7f",1,9,0,0,1,0,0,1,2,10,11,8
1,"void flash_wmma::simt::forward<T>(flash_wmma::ForwardParams) [clone .kd]",0,0,2,7,7,8192,128,64000,0,128,0,64,64,\
"0x0","0x7f",256,4000,900,70,30,8000,2000,20,100,2100,2200,2000
2,"void flash_wmma::simt::forward<T>(flash_wmma::ForwardParams) [clone .kd]",0,0,4,7,7,8192,128,64000,0,128,0,64,64,\
"0x0","0x7f",256,5000,1000,80,40,8000,1000,2020,2100,4100,4200,2000
"""


@pytest.fixture
def rocprof(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(ROOT / "benchmark" / "rocprof.py", monkeypatch)


def test_rocprof_figures(rocprof: ModuleType) -> None:
    ((name, launch),) = rocprof.parse(CSV, calls=2)
    assert name == "void flash_wmma::simt::forward<T>(flash_wmma::ForwardParams)"
    assert launch == {
        "waves": 256,
        "valu": 5000,
        "lds": 1000,
        "vmem_read": 80,
        "vmem_write": 40,
        "lds_active": 8000,
        "lds_conflicts": 1000,
        "duration": 2000,
    }
    shown = dict(rocprof.table(launch))
    assert shown["duration"] == "2.00 µs"
    assert shown["SQ_INSTS_VALU"] == "5,000"
    assert shown["VALU, x 64 / time"] == "160.0 Gop/s"  # 5000 * 64 / 2 µs
    assert shown["LDS, x 64 x 4 B / time"] == "128.0 GB/s"
    assert shown["VMEM reads, x 64 x 4 B / time"] == "10.2 GB/s"
    assert shown["VMEM writes, x 64 x 4 B / time"] == "5.1 GB/s"
    assert shown["LDS bank conflicts, of its active cycles"] == "12.5 %"


def test_rocprof_without_some_columns(rocprof: ModuleType) -> None:
    text = CSV.replace("SQ_INSTS_LDS", "SQ_OTHER").replace(",DurationNs", ",Other").replace(',"DurationNs"', ',"Other"')
    ((_, launch),) = rocprof.parse(text, calls=2)
    assert "lds" not in launch
    assert launch["duration"] == 4100 - 2100
    assert dict(rocprof.table(launch))["LDS, x 64 x 4 B / time"] == "n/a"
    assert rocprof.parse("", calls=2) == []


@pytest.mark.skipif(bool(torch.version.hip), reason="says what it does without ROCm")
def test_rocprof_says_what_is_missing(rocprof: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run([sys.executable, rocprof.__file__, "simt"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not built for ROCm" in done.stderr
    monkeypatch.setenv("PATH", "")
    if not Path("/opt/rocm/bin/rocprof").exists():
        with pytest.raises(rocprof.CannotProfile, match="rocprof was not found"):
            rocprof.find()
