"""A training step of a Llama-like model of Hugging Face transformers, in tokens a second, with several attentions.

    python benchmark/llama_step.py [--layers 8 --hidden 2048 --heads 32 --heads-kv 8 --length 4096 --batch 2]

Forward, backward and AdamW's step of a ``LlamaForCausalLM`` with random weights, under autocast. The contenders take
turns: ``attn_implementation="wmma"`` (this library), ``"sdpa"`` with the backend that torch chooses, and ``"sdpa"``
with FlashAttention-2 alone, which is what ``"flash_attention_2"`` calls by another package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_wmma.integrations.transformers
from harness import timing
from harness.problems import DTYPES
from harness.program import choose_device, positive


def step_of(model: Any, tokens: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """One step of the model on the tokens; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=tokens.is_cuda)

    def step() -> Tensor:
        with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 8, "hidden": 2048, "heads": 32, "heads-kv": 8, "length": 4096, "batch": 2, "repeats": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    device = choose_device(args.device)
    flash_wmma.integrations.transformers.register()
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads_kv,
        max_position_embeddings=args.length,
    )
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (args.batch, args.length), device=device)
    flash = partial(sdpa_kernel, [SDPBackend.FLASH_ATTENTION])
    asked: dict[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = {
        "wmma": ("wmma", nullcontext),
        "sdpa": ("sdpa", nullcontext),
    }
    if device.type == "cuda":
        asked["sdpa, FlashAttention-2"] = ("sdpa", flash)
    contenders, losses = {}, {}
    for name, (implementation, context) in asked.items():
        torch.manual_seed(0)
        config._attn_implementation = implementation
        model = LlamaForCausalLM(config).to(device)
        assert model.config._attn_implementation == implementation
        step = step_of(model, tokens, DTYPES[args.dtype])
        with context():
            losses[name] = float(step())
        contenders[name] = timing.Contender(step, context)
    method = timing.Method(repeats=args.repeats, sample_ms=500)  # steps in a row, as in training
    measured = timing.measure(contenders, device, method)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"Llama, {args.layers} layers, hidden {args.hidden}, {args.heads}/{args.heads_kv} heads,")
    print(f"{args.batch} rows of {args.length} tokens, {args.dtype}, {where}; {method.describe(device)}")
    results = {}
    for name, times in measured.timings.items():
        ratio = measured.timings["wmma"].speedup_over(times)
        rate = args.batch * args.length / times.median * 1000
        results[name] = {"ms": times.median, "tokens/s": rate, "wmma over it": ratio, "first loss": losses[name]}
        print(
            f"{name:24} {times.median:9.2f} ms {rate:12,.0f} tokens/s  wmma over it {ratio:5.2f}"
            f"  first loss {losses[name]:.4f}"
        )
    for name, error in measured.failures.items():
        print(f"{name:24} {error}")
    if args.json:
        args.json.write_text(json.dumps({"sizes": vars(args) | {"json": str(args.json)}, "results": results}, indent=1))


if __name__ == "__main__":
    main()
