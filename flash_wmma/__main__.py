"""``python -m flash_wmma info``, ``python -m flash_wmma explain`` and ``python -m flash_wmma profile``."""

from __future__ import annotations

import argparse
import ctypes
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import flash_wmma
from flash_wmma._table import not_built
from flash_wmma.emulator._settings import SMEM_OPTIN

CARDS = {  # multiprocessors of a usual card
    70: 80,  # V100
    75: 40,  # T4
    80: 108,  # A100
    86: 82,  # RTX 3090
    89: 128,  # RTX 4090
    90: 132,  # H100
    100: 148,  # B200
    120: 170,  # RTX 5090
}


def _kernel_lines() -> list[str]:
    lines = []
    for k in (*flash_wmma.kernels(), *flash_wmma.kernels("backward")):
        where = "cpu" if k.device == "cpu" else f"cuda, sm_{k.min_arch} {'on' if k.max_arch is None else 'alone'}"
        dtypes = ", ".join(str(t).removeprefix("torch.") for t in k.dtypes)
        if k.device == "cuda" and k.bf16_min_arch > k.min_arch:
            dtypes += f" (sm_{k.bf16_min_arch} on)"
        low, high = k.head_dims
        lines.append(f"  {k.name:12} {k.summary}")
        lines.append(f"  {'':12} {where}; {dtypes}; d {low if low == high else f'{low} to {high}'}")
        features = ", ".join(sorted(k.features)) or "dense attention alone"
        lines.append(f"  {'':12} {features}; {len(k.instances)} instances")
    missing = not_built()
    for reason in dict.fromkeys(missing.values()):
        lines.append(f"  not compiled: {', '.join(name for name, why in missing.items() if why == reason)}: {reason}")
    return lines


def _auto_lines(device: flash_wmma.DeviceFacts) -> list[str]:
    """What ``auto`` takes on that device for the usual dtypes and head dims."""
    lines = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        picks: dict[str, list[int]] = {}
        for d in (32, 64, 128, 256):
            q = torch.empty(1, 8, 2048, d, dtype=dtype, device="meta")
            name = flash_wmma.explain(q, q, q, device_facts=device).kernel or "none"
            picks.setdefault(name, []).append(d)
        text = "; ".join(f"{name} (d {', '.join(map(str, dims))})" for name, dims in picks.items())
        lines.append(f"    auto, {str(dtype).removeprefix('torch.'):9} {text}")
    return lines


def _device_lines() -> list[str]:
    cpu = flash_wmma.device_facts("cpu")
    lines = [f"  cpu      {platform.machine()}, {torch.get_num_threads()} threads", *_auto_lines(cpu)]
    if not torch.cuda.is_available():
        return [*lines, "  cuda     no device that torch can use"]
    for index in range(torch.cuda.device_count()):
        lines.append(f"  cuda:{index}   {torch.cuda.get_device_name(index)}")
        try:
            facts = flash_wmma.device_facts(f"cuda:{index}")
        except RuntimeError as error:
            lines.append(f"    {error}")
            continue
        lines += [f"    {facts}", *_auto_lines(facts)]
    return lines


def _driver() -> str:
    """Version of CUDA that the driver supports."""
    if not torch.cuda.is_available():
        return "none"
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    version = number.value
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def info() -> None:
    """Prints versions, build, kernels and devices."""
    build = flash_wmma.build_info()
    cuda = f"CUDA {build.cuda}, {' '.join(build.architectures)}" if build.cuda else "CPU; CUDA kernels in the emulator"
    print(f"flash_wmma {build.version} ({cuda})")
    print(f"torch      {torch.__version__}")
    print(f"Python     {platform.python_version()} on {platform.platform()}")
    print(f"driver     {_driver()}")
    print("\nkernels", *_kernel_lines(), sep="\n")
    print("\ndevices", *_device_lines(), sep="\n")


def explain(arguments: argparse.Namespace) -> None:
    """Prints which kernel runs a shape."""
    batch, heads, length, head_dim = arguments.shape
    dtype = getattr(torch, arguments.dtype)
    q = torch.empty(batch, heads, length, head_dim, dtype=dtype, device="meta")
    k = torch.empty(
        batch, arguments.kv_heads or heads, arguments.kv_length or length, head_dim, dtype=dtype, device="meta"
    )
    if arguments.arch is not None:
        facts = flash_wmma.DeviceFacts(
            arch=arguments.arch,
            sm_count=arguments.sm_count or CARDS[arguments.arch],
            smem_optin=arguments.smem_optin or SMEM_OPTIN[arguments.arch] * 1024,
        )
    else:
        device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        facts = flash_wmma.device_facts(device)
    causal = arguments.causal or False
    window = None if arguments.window is None else tuple(arguments.window)
    bias = torch.empty(length, k.shape[2], dtype=torch.bool, device="meta") if arguments.attn_bias else None
    slopes = torch.empty(heads, device="meta") if arguments.alibi_slopes else None
    print(
        flash_wmma.explain(
            q,
            k,
            k,
            causal=causal,
            window=window,
            attn_bias=bias,
            alibi_slopes=slopes,
            softcap=arguments.softcap,
            kernel=arguments.kernel,
            device_facts=facts,
        )
    )


def profile(arguments: argparse.Namespace) -> None:
    """Prints, writes and draws a kernel's profile."""
    generator = torch.Generator().manual_seed(0)

    def tensor(length: int) -> torch.Tensor:
        return torch.randn(arguments.batch, arguments.heads, length, arguments.head_dim, generator=generator)

    inputs = [tensor(n) for n in (arguments.seq_len, *[arguments.kv_length or arguments.seq_len] * 2)]
    options = {"arch": arguments.arch, "seed": arguments.seed, "causal": arguments.causal or False}

    def run(dtype: str) -> flash_wmma.Profile:
        q, k, v = (x.to(getattr(torch, dtype)) for x in inputs)
        return flash_wmma.profile(q, k, v, kernel=arguments.kernel, **options)

    try:
        result = run(arguments.dtype or "float16")
    except ValueError as error:
        if arguments.dtype or "dtype" not in str(error):
            raise
        result = run("float32")
    if arguments.json:
        arguments.json.write_text(result.to_json() + "\n", encoding="utf-8")
    if arguments.plot and arguments.timeline:
        result.plot_timeline(arguments.plot)
    elif arguments.plot:
        result.plot_banks(arguments.banks, arguments.plot)
    print(result)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: 1 or more")
    return number


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split(","))
    if len(sizes) != 4 or min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: B,H,N,d")
    return sizes


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_wmma",
        description="Which attention kernels are here, which one runs a shape, and what a profiler shows of one.",
    )
    parser.add_argument("--version", action="version", version=f"flash_wmma {flash_wmma.__version__}")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("info", help="versions, driver, devices, architectures, kernels, what auto takes")
    p = commands.add_parser("explain", help="which kernel runs a shape, and why not the others")
    p.add_argument("--shape", type=_shape, required=True, metavar="B,H,N,d", help="of q")
    p.add_argument("--kv-heads", type=int, help="heads of k and v (default: q's)")
    p.add_argument("--kv-length", type=int, help="length of k and v (default: q's)")
    p.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float16")
    p.add_argument("--causal", nargs="?", const="top_left", choices=("top_left", "bottom_right"))
    p.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="negative: unbounded")
    p.add_argument("--attn-bias", action="store_true", help="with a mask or bias")
    p.add_argument("--alibi-slopes", action="store_true", help="with ALiBi")
    p.add_argument("--softcap", type=float, default=0.0)
    p.add_argument("--kernel", default="auto")
    p.add_argument("--device", help="cpu or cuda[:index] (default: cuda if there is one)")
    p.add_argument("--arch", type=int, choices=CARDS, help="a card that need not be there: 10 * major + minor")
    p.add_argument("--sm-count", type=int, help="its multiprocessors (default: as a usual one has)")
    p.add_argument("--smem-optin", type=int, help="bytes of shared memory a block may opt in to (default: likewise)")
    p = commands.add_parser("profile", help="a kernel's figures, as a profiler shows them, from the emulator: no GPU")
    p.add_argument("--kernel", required=True, help="the name of a CUDA kernel")
    p.add_argument("--seq-len", type=_positive, default=64, metavar="N", help="of q (default: 64)")
    p.add_argument("--kv-length", type=_positive, metavar="N", help="length of k and v (default: q's)")
    p.add_argument("--batch", type=_positive, default=1, metavar="B")
    p.add_argument("--heads", type=_positive, default=1, metavar="H")
    p.add_argument("--head-dim", type=_positive, default=64, metavar="d")
    dtypes = ("float32", "float16", "bfloat16")
    p.add_argument("--dtype", choices=dtypes, help="default: float16, or float32 if the kernel takes no halves")
    p.add_argument("--causal", nargs="?", const="top_left", choices=("top_left", "bottom_right"))
    p.add_argument("--arch", type=int, choices=CARDS, help="10 * major + minor (default: 90)")
    p.add_argument("--seed", type=int, help="of the order in which warps run (default: by their number)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    p.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the banks of --banks, or the timeline, as .png, .svg, …"
    )
    what = p.add_mutually_exclusive_group()
    what.add_argument("--banks", metavar="LINE", help="121 or wmma_v2.cu:121 (default: that with most bank conflicts)")
    what.add_argument("--timeline", action="store_true", help="the warps of a block and its barriers")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    if arguments.command == "profile" and (arguments.banks or arguments.timeline) and not arguments.plot:
        p.error("--banks and --timeline say what to draw: --plot FILE is needed too")
    try:
        {"info": lambda _: info(), "explain": explain, "profile": profile}[arguments.command](arguments)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program quietly
    sys.exit(main())
