"""A training step of a small GPT, in tokens a second, with this library's attention and with torch's.

    python benchmark/training_step.py [--length 4096 --batch 4 --width 1024 --heads 16 --layers 8 --dtype bf16]

The model is that of examples/train_tiny_gpt.py: forward, backward and the optimizer's step, under autocast. The
contenders take turns: ``flash_wmma.MultiheadAttention``, torch's attention with the backend that it chooses (on a GPU
cuDNN or FlashAttention-2), and, on a GPU, with FlashAttention-2 and cuDNN by name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_wmma
from harness import timing
from harness.problems import DTYPES
from harness.program import choose_device, positive

EXAMPLE = Path(__file__).parents[1] / "examples/train_tiny_gpt.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step_of(model: nn.Module, text: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """One step of the model on the text; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=text.is_cuda)

    def step() -> Tensor:
        half = nullcontext() if dtype == torch.float32 else torch.autocast(text.device.type, dtype)
        with half:
            logits = model(text[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"batch": 4, "length": 4096, "width": 1024, "heads": 16, "layers": 8, "repeats": 7}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    device, example = choose_device(args.device), load_example()
    text = example.sums(random.Random(0), args.batch, args.length).to(device)

    backends: dict[str, list[SDPBackend]] = {"torch, its choice": []}
    if device.type == "cuda":
        backends["torch, FlashAttention-2"] = [SDPBackend.FLASH_ATTENTION]
        backends["torch, cuDNN"] = [SDPBackend.CUDNN_ATTENTION]
    contexts: dict[str, Callable[[], AbstractContextManager[None]]] = {
        name: partial(sdpa_kernel, only) for name, only in backends.items() if only
    }
    makes = {"flash_wmma": flash_wmma.MultiheadAttention, **dict.fromkeys(backends, example.TorchAttention)}
    contenders = {}
    for name, make in makes.items():
        torch.manual_seed(0)
        model = example.TinyGPT(make, args.width, args.heads, args.layers, args.length).to(device)
        step = step_of(model, text, DTYPES[args.dtype])
        contenders[name] = timing.Contender(step, contexts.get(name, nullcontext))
    method = timing.Method(repeats=args.repeats, sample_ms=500)  # steps in a row, as in training
    measured = timing.measure(contenders, device, method)
    tokens = args.batch * args.length
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{args.layers} layers of width {args.width}, {args.heads} heads, {args.batch} rows of {args.length} tokens,")
    print(f"{args.dtype}, {where}; {method.describe(device)}")
    results = {}
    for name, times in measured.timings.items():
        ratio, rate = measured.timings["flash_wmma"].speedup_over(times), tokens / times.median * 1000
        results[name] = {"ms": times.median, "tokens/s": rate, "ours over it": ratio}
        print(f"{name:24} {times.median:9.2f} ms {rate:12,.0f} tokens/s  ours over it {ratio:5.2f}")
    for name, error in measured.failures.items():
        print(f"{name:24} {error}")
    if args.json:
        args.json.write_text(json.dumps({"sizes": vars(args) | {"json": str(args.json)}, "results": results}, indent=1))


if __name__ == "__main__":
    main()
