"""The kernel table, the choice of a kernel, and the command line."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from conftest import name
from reference import operand_dtype

import flash_wmma
from flash_wmma.__main__ import main

KIB = 1024
DEVICES = {  # opt-in shared memory, multiprocessors
    75: (64 * KIB, 40),
    80: (163 * KIB, 108),
    86: (99 * KIB, 82),
    89: (99 * KIB, 128),
    90: (227 * KIB, 132),
    120: (99 * KIB, 170),
}


def facts(arch: int) -> flash_wmma.DeviceFacts:
    smem, sm_count = DEVICES[arch]
    return flash_wmma.DeviceFacts(arch=arch, sm_count=sm_count, smem_optin=smem)


def kernel_named(name: str) -> flash_wmma.Kernel:
    return next(kernel for kernel in flash_wmma.kernels() if kernel.name == name)


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_table_is_consistent() -> None:
    kernels = flash_wmma.kernels()
    names = [kernel.name for kernel in kernels]
    assert names == sorted(names)
    assert "cpu" in names
    for kernel in kernels:
        assert kernel.device == ("cuda" if kernel.min_arch else "cpu")
        assert kernel.min_arch == 0 or kernel.min_arch >= 75
        assert kernel.summary
        assert kernel.dtypes
        assert (torch.bfloat16 in kernel.dtypes) == (kernel.bf16_min_arch > 0)
        assert kernel.bf16_min_arch == 0 or kernel.bf16_min_arch >= kernel.min_arch
        low, high = kernel.head_dims
        assert 1 <= low <= 64 <= high  # the tests rely on d = 64
        assert kernel.auto_rank >= 0
        assert kernel.max_arch is None or kernel.max_arch >= kernel.min_arch > 0
        for instance in kernel.instances:
            assert instance.dtype in kernel.dtypes
            assert instance.head_dim <= (high + 15) // 16 * 16
            assert min(instance.br, instance.bc) > 0
            assert instance.smem_bytes <= 227 * KIB
        if kernel.device == "cuda":
            assert max(instance.head_dim for instance in kernel.instances) >= high
    ranks = [kernel.auto_rank for kernel in kernels if kernel.auto_rank]
    assert len(ranks) == len(set(ranks)), "two kernels of one rank"


def test_kernels_run_on_the_architectures_that_the_table_says(kernel: flash_wmma.Kernel) -> None:
    if kernel.min_arch == 0:
        assert kernel.max_arch is None
    for arch in DEVICES if kernel.min_arch else ():
        q = meta(1, 2, 100, 64, dtype=kernel.dtypes[0])
        answer = flash_wmma.explain(q, q, q, kernel=kernel.name, device_facts=facts(arch))
        runs = kernel.min_arch <= arch <= (arch if kernel.max_arch is None else kernel.max_arch)
        assert (answer.kernel == kernel.name) == runs
        if kernel.max_arch == kernel.min_arch and not runs:
            assert answer.reasons[kernel.name] == f"runs on sm_{kernel.min_arch} alone, the device is sm_{arch}"


def test_hoppers_kernel_runs_on_hopper_alone() -> None:
    """It is machine code for sm_90a, which no later device takes."""
    table = {kernel.name: kernel.max_arch for kernel in flash_wmma.kernels()}
    if "wgmma_sm90" not in table:
        pytest.skip("no CUDA kernel, and no g++ for the emulator")
    assert {name for name, last in table.items() if last is not None} == {"wgmma_sm90"}
    assert table["wgmma_sm90"] == 90


def test_kernels_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        flash_wmma.kernels()[0].name = "other"  # type: ignore[misc]
    assert flash_wmma.kernels() == flash_wmma.kernels()
    flash_wmma.kernels().clear()
    assert flash_wmma.kernels()


@pytest.mark.parametrize("arch", DEVICES)
def test_every_tile_that_auto_takes_fits(arch: int) -> None:
    """On each architecture, for each dtype, head dim, length and mask; and for each kernel by name."""
    device = facts(arch)
    names = ["auto", *(kernel.name for kernel in flash_wmma.kernels())]
    taken = 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for d in (1, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 512):
            for n in (1, 128, 2048, 65536):
                for causal in (False, "bottom_right"):
                    q = meta(2, 8, n, d, dtype=dtype)
                    for kernel in names:
                        answer = flash_wmma.explain(q, q, q, causal=causal, kernel=kernel, device_facts=device)
                        if answer.kernel is None or answer.instance is None:
                            continue
                        taken += 1
                        assert answer.instance.smem_bytes <= device.smem_optin, f"{answer.kernel}: {answer.instance}"
                        assert answer.instance.min_arch <= arch, f"{answer.kernel}: {answer.instance}"
                        assert answer.instance.dtype in (dtype, operand_dtype(kernel_named(answer.kernel), dtype))
                        assert answer.instance.head_dim >= d
    cuda = any(0 < kernel.min_arch <= arch for kernel in flash_wmma.kernels())
    assert bool(taken) == cuda


@pytest.mark.parametrize("arch", DEVICES)
def test_auto_has_a_kernel_for_the_usual(arch: int) -> None:
    """float32 and float16 on every architecture from sm_75 on, bfloat16 where a kernel lists it."""
    kernels = [k for k in flash_wmma.kernels() if k.device == "cuda" and k.auto_rank]
    if not kernels:
        pytest.skip("built without CUDA kernels that auto takes")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q = meta(2, 8, 2000, 64, dtype=dtype)
        answer = flash_wmma.explain(q, q, q, causal=True, device_facts=facts(arch))
        able = [
            k
            for k in kernels
            if k.min_arch <= arch
            and (k.name != "wgmma_sm90" or arch == 90)  # machine code of sm_90a runs nowhere else
            and dtype in k.dtypes
            and (dtype != torch.bfloat16 or k.bf16_min_arch <= arch)
            and "causal" in k.features
        ]
        best = max(able, key=lambda k: k.auto_rank, default=None)
        assert answer.kernel == (best.name if best else None)
        assert answer.kernel is not None or dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("shape_q", "keys", "small"),
    [
        ((1, 1, 16, 64), 16, True),
        ((1, 8, 256, 128), 255, True),
        ((1, 8, 256, 128), 256, False),
        ((1, 8, 512, 64), 511, True),
        ((4, 32, 256, 64), 256, False),  # no SM to spare
        ((16, 32, 64, 64), 64, True),  # few rows a head
        ((16, 32, 2048, 64), 64, False),
    ],
)
def test_auto_leaves_small_problems_to_mma_sm80(shape_q: tuple[int, ...], keys: int, small: bool) -> None:
    """On sm_90, unless the choice must not depend on the batch; dense or packed."""
    if not {"wgmma_sm90", "mma_sm80"} <= {kernel.name for kernel in flash_wmma.kernels()}:
        pytest.skip("no CUDA kernel, and no g++ for the emulator")
    q = meta(*shape_q, dtype=torch.float16)
    k = meta(*shape_q[:2], keys, shape_q[3], dtype=torch.float16)
    answer = flash_wmma.explain(q, k, k, device_facts=facts(90))
    assert answer.kernel == ("mma_sm80" if small else "wgmma_sm90")
    assert (answer.reasons.get("wgmma_sm90") == "leaves such a problem to another kernel") == small
    for option in ({"kernel": "wgmma_sm90"}, {"batch_invariant": True}):
        other = flash_wmma.explain(q, k, k, device_facts=facts(90), **option)  # type: ignore[arg-type]
        assert other.kernel == "wgmma_sm90"


def test_explain_of_packed_sequences() -> None:
    """How many there are, and how long they are, matters as in forward_varlen."""
    if not {"wgmma_sm90", "mma_sm80"} <= {kernel.name for kernel in flash_wmma.kernels()}:
        pytest.skip("no CUDA kernel, and no g++ for the emulator")
    q = meta(8192, 1, 64, dtype=torch.float16)
    one = flash_wmma.explain(q, q, q, device_facts=facts(90))
    many = flash_wmma.explain(q, q, q, batch=64, max_seqlen_q=128, max_seqlen_k=128, device_facts=facts(90))
    assert (one.kernel, many.kernel) == ("wgmma_sm90", "mma_sm80")
    bias = meta(64, 1, 128, 128, dtype=torch.float16)
    flash_wmma.explain(q, q, q, batch=64, max_seqlen_q=128, max_seqlen_k=128, attn_bias=bias, device_facts=facts(90))


def test_explain_sees_the_dtype_of_autocast() -> None:
    q = torch.randn(1, 2, 8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_wmma.explain(q, q.half(), q).kernel == "cpu"
        assert "bfloat16" in flash_wmma.explain(q, q, q, kernel="simt").reasons["simt"]


def test_explain_where_no_tile_fits() -> None:
    if "mma_sm80" not in {kernel.name for kernel in flash_wmma.kernels()}:
        pytest.skip("no CUDA kernel, and no g++ for the emulator")
    q = meta(1, 1, 8, 64, dtype=torch.float16)
    device = flash_wmma.DeviceFacts(80, 108, 1000)
    answer = flash_wmma.explain(q, q, q, kernel="mma_sm80", device_facts=device)
    assert answer.kernel is None
    assert answer.reasons["mma_sm80"] == "no tile of this kernel fits the shared memory of this device"


def test_auto_on_the_cpu() -> None:
    q = torch.zeros(1, 2, 10, 64)
    answer = flash_wmma.explain(q, q, q, causal=True)
    assert answer.kernel == "cpu"
    assert answer.device.arch == 0
    others = {kernel.name for kernel in flash_wmma.kernels()} - {"cpu"}
    assert answer.reasons.keys() == others
    assert all("runs on cuda tensors" in why for why in answer.reasons.values())
    assert "cpu" in str(answer)


def test_explain_a_named_kernel() -> None:
    for kernel in flash_wmma.kernels():
        device = facts(90) if kernel.device == "cuda" else flash_wmma.device_facts("cpu")
        q = meta(1, 2, 100, 64, dtype=kernel.dtypes[0])
        answer = flash_wmma.explain(q, q, q, kernel=kernel.name, device_facts=device)
        assert answer.kernel == kernel.name
        assert answer.reasons == {}
        if kernel.device == "cuda":
            assert answer.instance in kernel.instances
        d = kernel.head_dims[1] + 1
        answer = flash_wmma.explain(
            *[meta(1, 2, 100, d, dtype=kernel.dtypes[0])] * 3, kernel=kernel.name, device_facts=device
        )
        assert answer.kernel is None
        assert answer.instance is None
        assert answer.reasons == {kernel.name: answer.reasons[kernel.name]}
        assert f"head dim: got {d}" in answer.reasons[kernel.name]
        assert "none can run this" in str(answer)
        assert kernel.name in str(answer)


def test_explain_features_that_a_kernel_lacks(kernel: flash_wmma.Kernel) -> None:
    device = facts(90) if kernel.device == "cuda" else flash_wmma.device_facts("cpu")
    bias, slopes = (meta(*shape, dtype=torch.float32) for shape in ((10, 10), (2,)))
    q = meta(1, 2, 10, 64, dtype=kernel.dtypes[0])
    options = {"attn_bias": {"attn_bias": bias}, "alibi_slopes": {"alibi_slopes": slopes}, "softcap": {"softcap": 30.0}}
    for feature, option in options.items():
        answer = flash_wmma.explain(q, q, q, **option, kernel=kernel.name, device_facts=device)  # type: ignore[arg-type]
        if feature in kernel.features:
            assert answer.kernel == kernel.name
        else:
            assert answer.kernel is None
            assert answer.reasons[kernel.name] == f"does not support {feature}"


@pytest.mark.parametrize("wanted", [False, True])
def test_explain_of_the_slopes_gradient(wanted: bool) -> None:
    """bwd_sm90 takes slopes, but has no gradient of them."""
    if "bwd_sm90" not in {kernel.name for kernel in flash_wmma.kernels("backward")}:
        pytest.skip("no CUDA kernel, and no g++ for the emulator")
    q = meta(1, 2, 1024, 64, dtype=torch.float16)
    slopes = meta(2, dtype=torch.float32).requires_grad_(wanted)
    answer = flash_wmma.explain(q, q, q, alibi_slopes=slopes, device_facts=facts(90))
    assert answer.backward_kernel == ("bwd_sm80" if wanted else "bwd_sm90")
    assert ("the gradient of alibi_slopes" in answer.backward_reasons.get("bwd_sm90", "")) == wanted


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("flag", [False, True])
def test_explain_of_a_bias_gradient(wanted: bool, flag: bool) -> None:
    """It is asked for if the bias requires one, and deterministic if torch's flag is set, unless the call says so."""
    name = "the gradient of a broadcast attn_bias with deterministic"
    if "bwd_sm80" not in {kernel.name for kernel in flash_wmma.kernels("backward")}:
        pytest.skip("no CUDA kernel, and no g++ for the emulator")
    q = meta(1, 2, 10, 64, dtype=torch.float16)
    bias = meta(10, 10, dtype=torch.float32).requires_grad_(wanted)
    torch.use_deterministic_algorithms(flag)
    try:
        for deterministic, asked in ((None, flag), (False, False), (True, True)):
            given = {"attn_bias": bias, "deterministic": deterministic, "device_facts": facts(80)}
            reasons = flash_wmma.explain(q, q, q, **given).backward_reasons  # type: ignore[arg-type]
            assert (name in reasons.get("bwd_sm80", "")) == (wanted and asked)
    finally:
        torch.use_deterministic_algorithms(False)


def test_explain_packed_sequences(kernel: flash_wmma.Kernel) -> None:
    device = facts(90) if kernel.device == "cuda" else flash_wmma.device_facts("cpu")
    q, k, v = (meta(n, h, 64, dtype=kernel.dtypes[0]) for n, h in ((100, 4), (120, 2), (120, 2)))
    answer = flash_wmma.explain(q, k, v, kernel=kernel.name, device_facts=device)
    assert answer.kernel == (kernel.name if "varlen" in kernel.features else None)
    with pytest.raises(ValueError, match=r"v\.shape: got \(12, 2, 64\)"):
        flash_wmma.explain(q, k, v[:12], device_facts=device)


def test_explain_agrees_with_forward(kernel: flash_wmma.Kernel) -> None:
    """A kernel runs what explain says it runs and refuses what explain says it refuses, in the same words."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for d in (1, 40, 64, 65, 256, 300):
            for options in ({}, {"causal": True}, {"window": (3, None)}):
                q = torch.zeros(1, 2, 20, d, dtype=dtype, device=kernel.device)
                answer = flash_wmma.explain(q, q, q, kernel=kernel.name, **options)  # type: ignore[arg-type]
                if answer.kernel:
                    flash_wmma.forward(q, q, q, kernel=kernel.name, **options)  # type: ignore[call-overload]
                else:
                    with pytest.raises(ValueError) as caught:
                        flash_wmma.forward(q, q, q, kernel=kernel.name, **options)  # type: ignore[call-overload]
                    assert answer.reasons[kernel.name] in str(caught.value)


def test_explain_refuses() -> None:
    q = meta(1, 2, 10, 64)
    with pytest.raises(
        ValueError, match="device_facts: got None, allowed: a DeviceFacts for tensors on the meta device"
    ):
        flash_wmma.explain(q, q, q)
    with pytest.raises(ValueError, match=r"kernel: got 'none', allowed: .*'cpu'"):
        flash_wmma.explain(q, q, q, kernel="none", device_facts=facts(90))
    with pytest.raises(ValueError, match=r"k\.shape"):
        flash_wmma.explain(q, q[..., :32], q, device_facts=facts(90))
    with pytest.raises(TypeError, match=r"q: got int"):
        flash_wmma.explain(1, q, q, device_facts=facts(90))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device: got meta, allowed: cpu, cuda"):
        flash_wmma.device_facts("meta")


def test_build_info() -> None:
    build = flash_wmma.build_info()
    assert build.version == flash_wmma.__version__
    assert build.library.is_file()
    assert (build.cuda is None) == (build.architectures == ())


def test_function_facts_of_a_cpu_kernel() -> None:
    stranger = flash_wmma.Instance(torch.float32, 0, 8, 1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"instance: got .*, allowed: one of cpu's"):
        flash_wmma.function_facts("cpu", stranger)
    with pytest.raises(ValueError, match="kernel: got 'none', allowed: "):
        flash_wmma.function_facts("none", stranger)


@pytest.mark.gpu
def test_function_facts(kernel: flash_wmma.Kernel, cuda: torch.device) -> None:
    arch = flash_wmma.device_facts(cuda).arch
    for instance in kernel.instances:
        if arch < instance.min_arch:
            continue
        compiled = flash_wmma.function_facts(kernel.name, instance)
        assert compiled is not None
        assert compiled.binary_version // 10 == arch // 10
        assert compiled.ptx_version <= compiled.binary_version
        assert 0 < compiled.registers <= 255
        assert compiled.max_threads >= 32 * instance.warps


@pytest.mark.gpu
def test_device_facts(cuda: torch.device) -> None:
    properties = torch.cuda.get_device_properties(cuda)
    device = flash_wmma.device_facts(cuda)
    assert device.arch == 10 * properties.major + properties.minor
    assert device.sm_count == properties.multi_processor_count
    assert device.smem_optin == properties.shared_memory_per_block_optin
    assert device.warp_size == 32


def test_command_info() -> None:
    module = Path(flash_wmma.__file__).parent / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not module.exists():
        pytest.skip("flash_wmma._C is not installed for this Python")
    done = subprocess.run([sys.executable, "-m", "flash_wmma", "info"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"flash_wmma {flash_wmma.__version__}" in done.stdout
    assert torch.__version__ in done.stdout
    for kernel in flash_wmma.kernels():
        assert kernel.name in done.stdout
        assert kernel.summary in done.stdout
    assert "auto, float32   cpu" in done.stdout
    for kernel in flash_wmma.kernels():
        where = f"sm_{kernel.min_arch} {'on' if kernel.max_arch is None else 'alone'}; "
        if kernel.min_arch:
            shown = done.stdout[done.stdout.index(kernel.summary) :].splitlines()[1]
            assert where in shown
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name() in done.stdout
    else:
        assert "no device that torch can use" in done.stdout


def test_command_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("info", "explain", "profile"))


def test_command_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"flash_wmma {flash_wmma.__version__}\n"


def test_docstring_names_what_is_there() -> None:
    named = re.findall(r":\w+:`(\w+)`", flash_wmma.__doc__ or "")
    assert {"forward", "scaled_dot_product_attention", "flash_attn_func", "emulator", "reductions"} <= set(named)
    assert set(named) <= set(flash_wmma.__all__)


def test_modules_show_what_they_export() -> None:
    assert dir(flash_wmma.reductions) == sorted(flash_wmma.reductions.__all__)
    shown = {name for name in dir(flash_wmma) if not name.startswith("_")}
    assert shown == {name for name in flash_wmma.__all__ if not name.startswith("_")}
    assert {name for name in dir(flash_wmma.emulator) if not name.startswith("_")} == set(flash_wmma.emulator.__all__)


def test_command_explain(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["explain", "--shape", "2,8,2048,64"]
    assert main([*shape, "--dtype", "float32", "--device", "cpu", "--causal"]) == 0
    assert "kernel   cpu" in capsys.readouterr().out
    assert main([*shape, "--device", "cpu", "--window", "3", "-1", "--kv-heads", "2", "--kv-length", "100"]) == 0
    assert "kernel   cpu" in capsys.readouterr().out
    assert main([*shape, "--device", "cpu", "--attn-bias", "--alibi-slopes", "--softcap", "30"]) == 0
    assert "kernel   cpu" in capsys.readouterr().out
    assert main([*shape, "--arch", "70"]) == 0
    out = capsys.readouterr().out
    assert "none can run this" in out
    assert all(kernel.name in out for kernel in flash_wmma.kernels())
    with pytest.raises(SystemExit):
        main(["explain", "--shape", "2,8,64"])
    assert "B,H,N,d" in capsys.readouterr().err
    assert main([*shape, "--kernel", "none", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.startswith("error: kernel: got 'none'")


WITHOUT_NATIVE = """
import sys
import sysconfig
from pathlib import Path
sys.modules["flash_wmma._C"] = None
import torch, flash_wmma
q = torch.randn(1, 2, 10, 64)
assert flash_wmma.forward(q, q, q).shape == q.shape
try:
    flash_wmma.kernels()
except ImportError as error:
    assert "pip install ." in str(error), error
else:
    raise SystemExit("kernels() without _C")
"""


def test_forward_works_without_the_extension_module() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_NATIVE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_is_light() -> None:
    """No module beyond torch's and the standard library's is imported, and neither is _C nor what profiles need."""
    code = "import sys, torch; a = set(sys.modules); import flash_wmma; print(*sorted(set(sys.modules) - a))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = done.stdout.split()
    assert "flash_wmma._C" not in new
    later = {"_figures", "_occupancy", "_profile", "_profiler", "distributed", "reductions"}
    assert later.isdisjoint(module.removeprefix("flash_wmma.") for module in new)
    assert {module.partition(".")[0] for module in new} <= {"flash_wmma", *sys.stdlib_module_names, "torch"}
    assert not any(module.startswith(("torch._dynamo", "torch._inductor")) for module in new)


def test_every_public_name_is_there() -> None:
    """Those too that are imported when they are first used."""
    code = "import flash_wmma; print(*(n for n in flash_wmma.__all__ if getattr(flash_wmma, n, None) is None))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    with pytest.raises(AttributeError, match=r"module 'flash_wmma' has no attribute 'nothing'"):
        _ = flash_wmma.nothing  # type: ignore[attr-defined]


def test_explain_knows_all_kernels_at_once() -> None:
    """In a build without CUDA too, whose kernels nobody has asked for in this process."""
    code = (
        "import torch, flash_wmma; q = torch.empty(1, 8, 1000, 64, dtype=torch.half, device='meta'); "
        "answer = flash_wmma.explain(q, q, q, device_facts=flash_wmma.DeviceFacts(90, 132, 227 * 1024)); "
        "print(answer.kernel, {*answer.reasons, answer.kernel} == {k.name for k in flash_wmma.kernels()})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["wgmma_sm90", "True"]


def test_missing_library_says_what_to_do(tmp_path: object) -> None:
    package = f"{tmp_path}/flash_wmma"
    code = (
        f"import shutil, sys; shutil.copytree({str(flash_wmma.__path__[0])!r}, {package!r}, "
        f"ignore=shutil.ignore_patterns('*.so')); sys.path.insert(0, {str(tmp_path)!r}); import flash_wmma"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "libflash_wmma.so is missing" in done.stderr
    assert "pip install ." in done.stderr


def test_instances_and_dtypes_print_well() -> None:
    for kernel in flash_wmma.kernels():
        for instance in kernel.instances:
            assert f"{instance.br} x {instance.bc}" in str(instance)
        assert all(name(dtype) in ("float32", "float16", "bfloat16") for dtype in kernel.dtypes)


CONVERTED = [  # arch, dtype, forward's kernel, the kernels taken
    (75, torch.bfloat16, "auto", "mma_sm75", "bwd_sm75"),
    (75, torch.float32, "auto", "mma_sm75", "bwd_sm75"),
    (75, torch.float32, "simt", "simt", "bwd_simt"),
    (80, torch.bfloat16, "auto", "mma_sm80", "bwd_sm80"),
    (80, torch.float32, "auto", "mma_sm80", "bwd_sm80"),
    (80, torch.float32, "wmma_v3", "wmma_v3", "bwd_sm80"),
    (75, torch.float32, "wmma_v1", "wmma_v1", "bwd_sm75"),
    (80, torch.float32, "wmma_v2", "wmma_v2", "bwd_sm80"),
    (80, torch.float32, "simt_naive", "simt_naive", "bwd_simt"),
    (90, torch.float32, "unfused", "unfused", "bwd_simt"),
]


@pytest.mark.parametrize(("arch", "dtype", "asked", "forward", "backward"), CONVERTED)
def test_backward_converts_what_forward_converted(
    arch: int, dtype: torch.dtype, asked: str, forward: str, backward: str
) -> None:
    names = {kernel.name for direction in ("forward", "backward") for kernel in flash_wmma.kernels(direction)}  # type: ignore[arg-type]
    if not {forward, backward} <= names:
        pytest.skip("no CUDA kernel, and no g++ for the emulator")
    q = meta(1, 2, 100, 64, dtype=dtype)
    answer = flash_wmma.explain(q, q, q, kernel=asked, device_facts=facts(arch))
    assert (answer.kernel, answer.backward_kernel) == (forward, backward)
    named = flash_wmma.explain(q, q, q, kernel=asked, backward_kernel="bwd_sm75", device_facts=facts(arch))
    assert named.backward_kernel == "bwd_sm75"
