"""Hugging Face transformers with this library behind ``attn_implementation="wmma"``: small models with random weights
against ``"eager"``, in float32."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from flash_wmma._call import Call  # noqa: E402
from flash_wmma.integrations import transformers as integration  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCABULARY = 89
WINDOW = 6
N = 18
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0}
PADDING = {"left": (5, 0), "right": (0, 7), "both": (4, 3)}
"""Of the first entry, before and behind its tokens. The second has none, the third half as much."""


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        request.getfixturevalue("cuda")
    return str(request.param)


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


def mistral() -> Any:
    config = transformers.MistralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=WINDOW,
        **SIZES,
    )
    return transformers.MistralForCausalLM(config)


def gemma2() -> Any:
    """One layer with a window, one without; a softcap that changes the scores."""
    config = transformers.Gemma2Config(
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=4,
        attn_logit_softcapping=1.5,
        sliding_window=WINDOW,
        **SIZES,
    )
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    return transformers.Gemma2ForCausalLM(config)


def deepseek() -> Any:
    """Head dims 192 and 128."""
    config = transformers.DeepseekV3Config(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        **SIZES,
    )
    assert (config.qk_head_dim, config.v_head_dim) == (192, 128)
    return transformers.DeepseekV3ForCausalLM(config)


def gpt_oss() -> Any:
    """Attention sinks; one layer with a window, one without."""
    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=16,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=WINDOW,
        **SIZES,
    )
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-3, 5, 8))
    return model


def phi() -> Any:
    """Head dim 80."""
    config = transformers.PhiConfig(hidden_size=160, intermediate_size=64, num_attention_heads=2, **SIZES)
    return transformers.PhiForCausalLM(config)


DECODERS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "mistral": mistral,
    "gemma2": gemma2,
    "deepseek_v3": deepseek,
    "gpt_oss": gpt_oss,
    "phi": phi,
}


def large(model: nn.Module) -> nn.Module:
    """With weights so large that attention matters to the result."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "router" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def tokens(device: str, batch: int = 3, n: int = N) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, n), device=device)


def padding(side: str, device: str, n: int = N) -> Tensor:
    before, behind = PADDING[side]
    made = torch.ones(3, n, dtype=torch.long, device=device)
    for entry, factor in ((0, 1.0), (2, 0.5)):
        made[entry, : int(before * factor)] = 0
        made[entry, n - int(behind * factor) :] = 0
    return made


def close(a: Tensor, b: Tensor, name: str = "") -> None:
    torch.testing.assert_close(
        a, b, atol=2e-5 * max(1.0, float(b.abs().max())), rtol=1e-4, msg=lambda m: f"{name}: {m}"
    )


class Result(NamedTuple):
    logits: Tensor
    gradients: dict[str, Tensor]


def result(model: Any, implementation: str, read: Tensor | None, **arguments: Any) -> Result:
    """Of those logits that are read, as the loss is."""
    for part in model.modules():  # transformers 5.17 itself does not reach the parts of a T5
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(**arguments).logits
    if read is not None:
        logits = logits * read[..., None]
    (logits * torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits).sin()).sum().backward()
    return Result(logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def same(model: Any, read: Tensor | None = None, **arguments: Any) -> None:
    """Logits and gradients are eager's."""
    expected, got = (result(model, name, read, **arguments) for name in ("eager", "wmma"))
    close(got.logits, expected.logits, "logits")
    assert got.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        close(got.gradients[name], gradient, name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """What the library is asked for."""
    made: list[Call] = []
    attend = integration.attend

    def spy(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        made.append(call)
        return attend(q, k, v, call)

    monkeypatch.setattr(integration, "attend", spy)
    yield made
    assert made, "another implementation ran"


# ------------------------------------------------------------------------------------------------- logits and gradients


@pytest.mark.parametrize("name", DECODERS)
def test_a_batch_without_padding(name: str, device: str, calls: list[Call]) -> None:
    model = large(DECODERS[name]()).to(device)
    same(model, input_ids=tokens(device), attention_mask=torch.ones(3, N, dtype=torch.long, device=device))
    same(model, input_ids=tokens(device, n=3))
    assert all(call.attn_bias is None and call.lengths is None for call in calls)


@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("name", DECODERS)
def test_padded_batches(name: str, side: str, device: str, calls: list[Call]) -> None:
    """They run packed: no mask of N² entries, and no kernel is left out for want of masks. The lengths are made once
    for all layers of a kind."""
    kept = padding(side, device)
    same(large(DECODERS[name]()).to(device), kept, input_ids=tokens(device), attention_mask=kept)
    assert all(call.attn_bias is None and call.lengths is not None for call in calls)
    assert len({id(call.lengths) for call in calls}) == (2 if name in ("gemma2", "gpt_oss") else 1)


@pytest.mark.parametrize("name", DECODERS)
def test_padded_rows_of_a_model_in_use(name: str, device: str, calls: list[Call]) -> None:
    """Behind the tokens they see these, and may be read: generate reads the last row. In training they are 0."""
    kept = padding("both", device)
    read = (kept.cumsum(1) > 0).long()
    model = large(DECODERS[name]()).to(device)
    same(model.eval(), read, input_ids=tokens(device), attention_mask=kept)
    assert all(call.attn_bias is None and call.lengths is not None for call in calls)
    model.train()(input_ids=tokens(device), attention_mask=kept)
    before, behind = PADDING["both"]
    queries = [int(call.lengths.cu_seqlens_q.diff()[1]) for call in (calls[0], calls[-1]) if call.lengths]
    assert queries == [N - before, N - before - behind]


@pytest.mark.parametrize("name", DECODERS)
def test_a_full_window_needs_no_mask(name: str, device: str, calls: list[Call]) -> None:
    """Of one new query, with a cache that keeps as many keys as a window has, or all."""
    model = large(DECODERS[name]()).to(device).eval()
    model.set_attn_implementation("wmma")
    model.generate(tokens(device), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert all(call.attn_bias is None for call in calls)


@pytest.mark.parametrize("name", DECODERS)
def test_padding_between_tokens(name: str, device: str, calls: list[Call]) -> None:
    kept = padding("left", device)
    kept[1, 8:10] = 0
    kept[2] = 0
    kept[2, 4] = 1
    same(large(DECODERS[name]()).to(device), kept, input_ids=tokens(device), attention_mask=kept)
    assert all(call.attn_bias is not None and call.attn_bias.numel() == 3 * N for call in calls)


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "gpt_oss"])  # its masks know no positions
def test_packed_sequences(name: str, device: str, calls: list[Call]) -> None:
    """Told by their positions, in a batch of one and of three, and by flash-attention's arguments. One row is a single
    sequence."""
    model = large(DECODERS[name]()).to(device)
    rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in ((9, 1, 8), (18,), (3, 13, 2))]
    positions = torch.stack(rows).to(device)
    same(model, input_ids=tokens(device), position_ids=positions, use_cache=False)
    one = {"input_ids": tokens(device, 1), "position_ids": positions[:1], "use_cache": False}
    same(model, **one)
    cu_seqlens = torch.tensor([0, 9, 10, 18], dtype=torch.int32, device=device)
    told = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 9, "max_length_k": 9}
    expected, got = result(model, "eager", None, **one), result(model, "wmma", None, **one, **told)
    close(got.logits, expected.logits)
    for parameter, gradient in expected.gradients.items():
        close(got.gradients[parameter], gradient, parameter)
    assert all(call.attn_bias is None and call.lengths is not None for call in calls)
    assert max(call.lengths.max_seqlen_q for call in calls if call.lengths) == 18


@pytest.mark.parametrize("kind", ["bool", "additive", "heads"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_masks_of_four_dimensions(name: str, kind: str, device: str, calls: list[Call]) -> None:
    """They say all, causality and the window included."""
    model = large(DECODERS[name]()).to(device)
    seen = torch.rand(3, 4 if kind == "heads" else 1, N, N, device=device) < 0.5
    seen |= torch.eye(N, dtype=torch.bool, device=device)
    x = tokens(device)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    expected = result(model, "eager", None, input_ids=x, attention_mask=added)
    got = result(model, "wmma", None, input_ids=x, attention_mask=added if kind == "additive" else seen)
    close(got.logits, expected.logits)
    for parameter, gradient in expected.gradients.items():
        close(got.gradients[parameter], gradient, parameter)
    assert all(call.band == (-1, -1, True) for call in calls)


@pytest.mark.parametrize("side", [None, *PADDING])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_decoder_that_is_not_causal(name: str, side: str | None, device: str, calls: list[Call]) -> None:
    kept = padding(side, device) if side else None
    same(large(DECODERS[name]()).to(device), kept, input_ids=tokens(device), attention_mask=kept, is_causal=False)
    assert all(call.window_right != 0 for call in calls)


def test_the_mask_says_whether_the_future_is_hidden(device: str, calls: list[Call]) -> None:
    """As for eager: what the module says does not matter."""
    model = large(llama()).to(device)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    kept = padding("left", device)
    same(model, kept, input_ids=tokens(device), attention_mask=kept)


def test_the_window_is_the_kernels(device: str, calls: list[Call]) -> None:
    """It counts the token itself, and is applied once."""
    for make, expected in ((mistral, {WINDOW - 1}), (gemma2, {WINDOW - 1, -1})):
        for arguments in ({"attention_mask": padding("left", device)}, {}):
            calls.clear()
            result(make().to(device), "wmma", None, input_ids=tokens(device), use_cache=False, **arguments)
            assert {call.window_left for call in calls} == expected
            assert all(call.window_right == 0 and call.attn_bias is None for call in calls)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: str, calls: list[Call]) -> None:
    """As near to eager in float32 as eager in that dtype is."""
    x, kept = tokens(device), padding("left", device)
    model = large(llama()).to(device)
    exact = result(model, "eager", kept, input_ids=x, attention_mask=kept).logits
    model.to(dtype)
    errors = [
        (result(model, name, kept, input_ids=x, attention_mask=kept).logits.float() - exact).abs().max()
        for name in ("eager", "wmma")
    ]
    assert errors[1] <= 2 * errors[0]


# --------------------------------------------------------------------------------------------------------------- caches


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_caches(name: str, side: str | None, kind: str, device: str, calls: list[Call]) -> None:
    """The logits of a prompt, of one more token, of several more at once, of one more."""
    model = large(DECODERS[name]()).to(device).eval()
    x = tokens(device)
    kept = padding(side, device) if side else torch.ones_like(x)
    logits: dict[str, list[Tensor]] = {"eager": [], "wmma": []}
    for implementation, steps in logits.items():
        model.set_attn_implementation(implementation)
        cache = (
            transformers.DynamicCache(config=model.config)
            if kind == "dynamic"
            else transformers.StaticCache(config=model.config, max_cache_len=N + 3)
        )
        for begin, end in ((0, 10), (10, 11), (11, 15), (15, N)):
            arguments = {"attention_mask": kept[:, :end]} if side else {}
            with torch.no_grad():
                out = model(input_ids=x[:, begin:end], past_key_values=cache, **arguments).logits
            steps.append(out * kept[:, begin:end, None])
    for got, expected in zip(logits["wmma"], logits["eager"], strict=True):
        close(got, expected)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("name", "side"),
    # Right of the tokens are more places than a window is wide, and the last one would see nothing
    [
        (name, side)
        for name, side in itertools.product(DECODERS, PADDING)
        if side != "right" or name not in ("mistral", "gemma2", "gpt_oss")
    ],
)
def test_generate(name: str, side: str, cache: str, chunk: int | None, device: str, calls: list[Call]) -> None:
    """The same tokens."""
    model = large(DECODERS[name]()).to(device).eval()
    x, kept = tokens(device), padding(side, device)
    generated = []
    for implementation in ("eager", "wmma"):
        model.set_attn_implementation(implementation)
        for arguments in ({"attention_mask": kept}, {}):
            generated.append(
                model.generate(
                    x,
                    max_new_tokens=10,
                    do_sample=False,
                    eos_token_id=None,
                    cache_implementation=cache,
                    prefill_chunk_size=chunk,
                    disable_compile=True,
                    **arguments,
                )
            )
    padded, plain, padded_here, plain_here = generated
    assert padded.shape == (3, N + 10)
    assert torch.equal(padded_here, padded)
    assert torch.equal(plain_here, plain)


# -------------------------------------------------------------------------------------------------------- other models


def test_vit(device: str, calls: list[Call]) -> None:
    """Not causal."""
    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
    )
    model = large(transformers.ViTForImageClassification(config)).to(device)
    same(model, pixel_values=torch.randn(2, 3, 16, 16, device=device))
    assert all(call.band == (-1, -1, True) for call in calls)


def whisper(device: str) -> tuple[Any, Tensor]:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
    )
    return large(transformers.WhisperForConditionalGeneration(config)).to(device), torch.randn(3, 8, 40, device=device)


@pytest.mark.parametrize("side", [None, "right"])
def test_whisper(side: str | None, device: str, calls: list[Call]) -> None:
    """Cross attention."""
    model, features = whisper(device)
    kept = padding(side, device) if side else None
    same(model, kept, input_features=features, decoder_input_ids=tokens(device), decoder_attention_mask=kept)
    assert {call.window_right for call in calls} == {-1, 0}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_whisper_generates(cache: str, device: str, calls: list[Call]) -> None:
    model, features = whisper(device)
    model.eval()
    generated = []
    for implementation in ("eager", "wmma"):
        model.set_attn_implementation(implementation)
        arguments = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
        generated.append(model.generate(features, **arguments))
    assert torch.equal(*generated)


@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("n", [N, N - 5])
def test_bart(n: int, side: str, device: str, calls: list[Call]) -> None:
    """Cross attention to padded keys, as many as there are queries, and more."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        dropout=0.0,
    )
    model = large(transformers.BartForConditionalGeneration(config)).to(device)
    arguments = {"input_ids": tokens(device), "attention_mask": padding(side, device)}
    same(model, **arguments, decoder_input_ids=tokens(device, n=n))
    assert all(call.attn_bias is None for call in calls)


@pytest.mark.parametrize("side", PADDING)
def test_bert(side: str, device: str, calls: list[Call]) -> None:
    """Every query sees all keys that are not padding, padded queries too."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = large(transformers.BertForMaskedLM(config)).to(device)
    same(model, input_ids=tokens(device), attention_mask=padding(side, device))


@pytest.mark.parametrize("side", [None, "none", "left", "right"])
@pytest.mark.parametrize("name", ["Gemma", "Gemma2"])
def test_masks_that_are_causal_of_modules_that_are_not(
    name: str, side: str | None, device: str, calls: list[Call]
) -> None:
    """With this option the modules leave causality to the mask."""
    config = getattr(transformers, f"{name}Config")(
        **SIZES,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_bidirectional_attention=True,
    )
    model = large(getattr(transformers, f"{name}ForCausalLM")(config)).to(device)
    masks = {None: None, "none": torch.ones(3, N, dtype=torch.long, device=device)}
    kept = masks[side] if side in masks else padding(side, device)
    read = None if kept is None else kept.float()
    same(model, read, input_ids=tokens(device), attention_mask=kept)


@pytest.mark.parametrize("side", [None, "right"])
def test_t5(side: str | None, device: str, calls: list[Call]) -> None:
    """What the model adds to the scores, with its gradient."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = large(transformers.T5ForConditionalGeneration(config)).to(device)
    kept = padding(side, device) if side else None
    same(model, input_ids=tokens(device), attention_mask=kept, decoder_input_ids=tokens(device, n=9))


ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "pad_token_id": 0,
}


def splinter() -> Any:
    """An encoder whose attention modules have no ``is_causal``."""
    return transformers.SplinterForQuestionAnswering(transformers.SplinterConfig(question_token_id=3, **ENCODER))


def git() -> Any:
    """A decoder that computes attention itself."""
    return transformers.GitForCausalLM(transformers.GitConfig(**ENCODER))


def nllb_moe() -> Any:
    """The decoder says of itself that it is not causal."""
    config = transformers.NllbMoeConfig(num_experts=2, router_jitter_noise=0.0, moe_token_dropout=0.0, **SEQ2SEQ)
    return transformers.NllbMoeForConditionalGeneration(config)


def bigbird_pegasus() -> Any:
    """The encoder computes attention itself."""
    config = transformers.BigBirdPegasusConfig(attention_type="original_full", **SEQ2SEQ)
    return transformers.BigBirdPegasusForConditionalGeneration(config)


def pegasus_x() -> Any:
    """It runs with flash-attention, and its decoder says of itself that it is not causal."""
    return transformers.PegasusXForConditionalGeneration(
        transformers.PegasusXConfig(block_size=4, num_global_tokens=2, **SEQ2SEQ)
    )


WITHOUT_SDPA: dict[str, Callable[[], Any]] = {
    "splinter": splinter,
    "git": git,
    "nllb_moe": nllb_moe,
    "bigbird_pegasus": bigbird_pegasus,
    "pegasus_x": pegasus_x,
}


@pytest.mark.parametrize("side", [None, "ones", *PADDING])
@pytest.mark.parametrize("name", WITHOUT_SDPA)
def test_models_that_do_not_say_whether_they_are_causal(name: str, side: str | None, device: str) -> None:
    """transformers refuses some of them SDPA: the mask alone says it."""
    model = large(WITHOUT_SDPA[name]()).to(device).eval()
    kept = padding(side, device) if side in PADDING else torch.ones(3, N, dtype=torch.long, device=device)
    arguments = {"input_ids": tokens(device), "attention_mask": kept if side else None}
    if model.config.is_encoder_decoder:
        arguments.update(decoder_input_ids=tokens(device), decoder_attention_mask=arguments["attention_mask"])
    found = []
    for implementation in ("eager", "wmma"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(**arguments)[0])
    if name == "splinter":
        found = [scores.masked_fill(kept == 0, 0) for scores in found]
    else:
        found = [logits * kept[..., None] for logits in found]
    close(found[1], found[0])


@pytest.mark.parametrize("name", ["git", "nllb_moe", "pegasus_x"])
def test_models_that_do_not_say_whether_they_are_causal_generate(name: str, device: str) -> None:
    model = large(WITHOUT_SDPA[name]()).to(device).eval()
    x, kept = tokens(device), padding("left", device)
    generated = []
    for implementation in ("eager", "wmma"):
        model.set_attn_implementation(implementation)
        generated.append(model.generate(x, attention_mask=kept, max_new_tokens=8, do_sample=False, eos_token_id=None))
    assert torch.equal(*generated)


def test_what_is_known_of_causality() -> None:
    """Of a model, of its modules, and of classes that a user derives from them."""
    says = integration._says_causality
    for make in (llama, gemma2, gpt_oss, deepseek):
        model = make()
        assert says(type(model.config))
        assert says(type(model.model.layers[0].self_attn))
    for make in (splinter, nllb_moe, pegasus_x):
        model = make()
        assert not says(type("Derived", (type(model.config),), {}))
        attention = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
        assert not says(type("Derived", (type(attention),), {}))
    assert says(nn.Module)


def chunked() -> Any:
    """One layer sees its chunk alone."""
    config = transformers.Llama4TextConfig(
        hidden_size=64,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        attention_chunk_size=5,
        num_local_experts=2,
        moe_layers=[],
        layer_types=["chunked_attention", "full_attention"],
        **SIZES,
    )
    return transformers.Llama4ForCausalLM(config)


def window_on_both_sides() -> Any:
    config = transformers.ModernBertConfig(
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        local_attention=WINDOW,
        global_attn_every_n_layers=2,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
        **SIZES,
    )
    return transformers.ModernBertForMaskedLM(config)


def window_not_passed_on() -> Any:
    """The mask has a window that the attention function is not told."""
    config = transformers.Qwen2MoeConfig(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=2,
        num_experts_per_tok=1,
        sliding_window=WINDOW,
        use_sliding_window=True,
        max_window_layers=1,
        **SIZES,
    )
    return transformers.Qwen2MoeForCausalLM(config)


@pytest.mark.parametrize("side", [None, *PADDING])
@pytest.mark.parametrize("make", [chunked, window_on_both_sides, window_not_passed_on])
def test_masks_that_no_kernel_has(make: Callable[[], Any], side: str | None, device: str, calls: list[Call]) -> None:
    kept = padding(side, device) if side else None
    same(large(make()).to(device), kept, input_ids=tokens(device), attention_mask=kept)
    assert any(call.attn_bias is not None for call in calls)


# ------------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled(name: str, kind: str, device: str) -> None:
    """As one graph, which calls the library."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = large(DECODERS[name]()).to(device)
    x, kept = tokens(device), padding("left", device)
    positions = torch.cat([torch.arange(n, device=device) for n in (9, 1, 8)]).expand(3, -1)
    given = {"plain": {}, "padded": {"attention_mask": kept}, "packed": {"position_ids": positions}}[kind]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(input_ids=x, use_cache=False, **given).logits
        model.set_attn_implementation("wmma")
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        got = compiled(input_ids=x, use_cache=False, **given).logits
    (graph,) = graphs
    assert "flash_wmma" in graph.code
    read = kept[..., None] if kind == "padded" else 1
    close(got * read, expected * read)


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(model: Any, error: type[Exception], message: str, **arguments: Any) -> None:
    model.set_attn_implementation("wmma")
    with pytest.raises(error, match=message):
        model(**arguments)


def test_dropout_in_training_alone(calls: list[Call]) -> None:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.set_attn_implementation("wmma")
    for training in (True, False):
        calls.clear()
        torch.manual_seed(1)
        model.train(training)
        first = model(input_ids=tokens("cpu")).logits
        torch.manual_seed(1)
        assert torch.equal(model(input_ids=tokens("cpu")).logits, first)
        assert {call.dropout_p for call in calls} == {0.1 if training else 0.0}


def test_attention_weights_are_refused() -> None:
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_attention_heads=4, **SIZES)
    model = transformers.LlamaForCausalLM(config)
    refused(model, NotImplementedError, "output_attentions", input_ids=tokens("cpu"), output_attentions=True)


def test_a_model_with_an_attention_of_its_own_is_refused() -> None:
    """Transformers would hand this library's masks to the model's own code."""
    config = transformers.XGLMConfig(
        vocab_size=VOCABULARY, d_model=64, ffn_dim=64, num_layers=1, attention_heads=2, max_position_embeddings=64
    )
    model = transformers.XGLMForCausalLM._from_config(config, attn_implementation="wmma")
    with pytest.raises(NotImplementedError, match="XGLMConfig: this model computes attention itself"):
        model(input_ids=tokens("cpu"))


def test_packed_sequences_of_a_model_that_does_not_say_whether_it_is_causal_are_refused() -> None:
    module = splinter().splinter.encoder.layer[0].attention.self
    q, ends = torch.randn(1, 2, 5, 8), torch.tensor([0, 2, 5])
    with pytest.raises(NotImplementedError, match="SplinterSelfAttention, which does not say whether it is causal"):
        integration.attention(module, q, q, q, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


@pytest.mark.parametrize("name", ["flash_wmma", "sdpa", "eager", "paged|wmma", "", 3])
def test_names_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="name: got"):
        integration.register(name)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"is_causal": True}, ValueError, "attention_mask: got None, with 5 causal queries and 9 keys"),
        ({"cache": object()}, NotImplementedError, "a paged cache"),
        ({"indices": torch.zeros(1)}, NotImplementedError, "sparse attention"),
        (
            {"sinks": torch.zeros(3), "is_causal": False},
            ValueError,
            r"sinks.shape: got \(3,\), allowed: \(Hq\) = \(2,\)",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, ValueError, "got one of them, allowed: both or none"),
        (
            {
                "cu_seq_lens_q": torch.tensor([0, 5]),
                "cu_seq_lens_k": torch.tensor([0, 9]),
                "attention_mask": torch.ones(1, 9, dtype=torch.bool),
            },
            ValueError,
            "packed sequences with an attention_mask",
        ),
        (
            {"attention_mask": torch.ones(1, 10, dtype=torch.bool), "is_causal": False},
            ValueError,
            "got 10 keys, allowed: at most 9",
        ),
        ({"attention_mask": torch.ones(1, 1, 4, 9, dtype=torch.bool)}, ValueError, "attn_bias.shape"),
        ({"attention_mask": torch.ones(1, 9, dtype=torch.long)}, ValueError, "got 2 dimensions, torch.int64"),
        ({"attention_mask": torch.ones(2, 5, 9)}, ValueError, "got 3 dimensions"),
    ],
)
def test_calls_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    with pytest.raises(error, match=message):
        integration.attention(nn.Module(), q, k, k, **arguments)


def test_transformers_is_imported_on_request_alone() -> None:
    code = "import sys, flash_wmma; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
