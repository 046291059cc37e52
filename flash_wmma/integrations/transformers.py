"""The library as an attention implementation of Hugging Face transformers.

:func:`register` adds two functions under one name: :func:`attention`, which models call in place of their own, and
:func:`mask`, which makes what models hand to it as ``attention_mask``. That is one of

- ``None``: causality and the window, as far as the model asks for them, say all;
- (B, Nk), bool: besides, these keys are not padding. Keys behind the mask's end are not in use;
- (B, N), int32: besides, a query sees keys with its own number alone: packed sequences;
- (B or 1, H or 1, Nq, Nk): the whole truth, causality and window included.

The two-dimensional masks are only for models that run with flash-attention too, since those pass such masks through
and tell the attention function their window. Models whose attention modules do not say whether they are causal get
eager's masks, and None then hides nothing.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    eager_mask,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.import_utils import is_tracing

from .._attention import attend
from .._call import Lengths, call_of
from .._errors import refuse
from .._sdpa import backward_kernel_for, kernel_for

_KNOWN = "_flash_wmma_known"
"""The attribute of a two-dimensional mask with what was found out about it, so that not every layer asks the device."""


def register(name: str = "wmma") -> None:
    """Puts the library behind ``attn_implementation=name`` of Hugging Face transformers.

    Afterwards ``from_pretrained(..., attn_implementation="wmma")``, ``from_config`` and ``set_attn_implementation``
    take that name. What the library cannot do (attention weights as a result, …) is an error when the model is called.

    Args:
        name: without "flash" in it, which transformers takes for a package of its own list.

    Raises:
        ValueError: the name contains "flash", or is one of transformers' own.
    """
    taken = {"eager", "sdpa", "flex_attention"}
    if not isinstance(name, str) or not name or "flash" in name or "|" in name or name in taken:
        refuse("name", repr(name), "a name that is not transformers' own, without 'flash' and '|'")
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)


# ---------------------------------------------------------------------------------------------------------------- masks


class _Known(NamedTuple):
    """Of a mask (B, Nk)."""

    full: bool
    """No key is padding."""
    causal: bool | None
    """Whether the future is hidden, which eager reads from the mask alone, whatever the module says."""
    window: int | None
    """How many keys a query sees, its own place included."""
    ends: tuple[Tensor, Tensor] | None
    """If the keys of every sequence follow each other: where they begin and end, (B) each."""
    lengths: dict[tuple[int, bool, bool], Lengths]
    """Of the sequences without padding, by the number of queries, whether they are causal, and :func:`_of_keys`'s
    ``all_rows``."""


class _Packing(NamedTuple):
    """Of a mask (B, N) of numbers."""

    cu_seqlens: Tensor
    longest: int


class _Model(NamedTuple):
    """What the source of a model says of it."""

    own_attention: bool
    """It computes attention itself and never asks for another implementation."""
    flash: bool
    """It runs with flash-attention: it hands masks of two dimensions through."""
    window: bool
    """It tells the attention function its sliding window."""


def _models(name: str) -> list[type[PreTrainedModel]]:
    """The models in the file ``modeling_….py`` with this name; none of another file."""
    if not name.rpartition(".")[2].startswith("modeling_") or name not in sys.modules:
        return []
    members = vars(sys.modules[name]).values()
    return [m for m in members if isinstance(m, type) and issubclass(m, PreTrainedModel) and m is not PreTrainedModel]


@lru_cache(maxsize=1024)
def _read_causality(kind: type) -> bool:
    for base in kind.__mro__:
        name = base.__module__.replace("configuration_", "modeling_")
        models = _models(name)
        if not models:
            continue
        models = [model for model in models if model.config_class is base] or models
        if any(model._supports_sdpa for model in models):
            return True
        if not any(model._supports_flash_attn for model in models):
            return False
        # Some of these make causal masks although their modules say, always, that they are not causal
        try:
            source = inspect.getsource(sys.modules[name])
        except (OSError, TypeError):
            return False
        says = re.search(r"\bis_causal *= *(?![ =]|is_causal\b|False\b)", source)
        return says is not None or re.search(r"\bcreate_\w*causal_mask\(", source) is None
    return True


def _says_causality(kind: type) -> bool:
    """Whether the attention modules of a model say rightly if they are causal, as SDPA and flash-attention need it.

    Eager reads it from the mask alone, and so may a model that supports neither; of a model that is not found, they do.
    ``kind``: the class of the model's configuration, or of one of its modules."""
    return _read_causality(kind)


_says_causality._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as _model_of


@lru_cache(maxsize=256)
def _read(config: type) -> _Model:
    name = config.__module__.replace("configuration_", "modeling_")
    module = sys.modules.get(name)
    if module is None or name == config.__module__:
        return _Model(False, False, False)
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        source = ""
    attends = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return _Model(
        own_attention=attends is not None and "ALL_ATTENTION_FUNCTIONS" not in source,
        flash=any(getattr(member, "_supports_flash_attn", False) for member in vars(module).values()),
        window="sliding_window=" in source,
    )


def _model_of(config: type) -> _Model:
    """The model that a configuration belongs to; of one that is not found nothing is assumed."""
    return _read(config)


_model_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in _sdpa.py: a constant in traced calls


_TRACES_CELLS = torch.__version__ >= "2.15"
"""Whether torch.compile reads the cells of a function that it traces. Where it does not, the mask is made whole."""


def _cells(function: object, name: str) -> dict[str, Any]:
    """What a function that ``name`` has made is bound to; empty if another one made it."""
    if not isinstance(function, FunctionType) or not function.__qualname__.startswith(f"{name}.<locals>."):
        return {}
    cells = function.__closure__ or ()
    return {key: cell.cell_contents for key, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _packed(mask_function: object, window: int | None) -> Tensor | None:
    """The numbers of the sequences, if all that a mask function hides is other sequences, the future, and what lies
    before the window."""
    if torch.compiler.is_compiling() and not _TRACES_CELLS:
        return None
    both = _cells(mask_function, "and_masks").get("mask_functions", ())
    if len(both) != 2:
        return None
    if not _cells(both[0], "packed_sequence_mask_function"):
        both = both[::-1]  # before transformers 5.23 and from 5.24 on
    numbers = _cells(both[0], "packed_sequence_mask_function").get("packed_sequence_mask")
    # Before 5.23 the other one counts places in the whole row, with the same distances
    within = _cells(both[1], "remap_positions_for_packed_sequence").get("mask_function", both[1])
    if window is not None:
        banded = _cells(within, "and_masks").get("mask_functions", ())
        if len(banded) != 2 or _cells(banded[0], "sliding_window_overlay").get("sliding_window") != window:
            return None
        within = banded[1]
    return numbers if within is causal_mask_function and isinstance(numbers, Tensor) else None


def _modules_say_causal(config: Any) -> bool:
    """Whether attention modules may say that they are causal where the model's mask is. Gemma's with this option say
    that they are not, and leave it to the mask (Gemma 1 and 2, PaliGemma's)."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return not getattr(text, "use_bidirectional_attention", False)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **rest: Any,
) -> Tensor | None:
    """The mask that models hand to :func:`attention`; the arguments are those of ``transformers.masking_utils``.

    ``allow_is_causal_skip`` says that nothing is hidden but the future, padding, and what ``local_size`` leaves out;
    ``allow_is_bidirectional_skip`` the same without the future.
    """
    model = _model_of(config.__class__)
    if model.own_attention:
        raise NotImplementedError(
            f"{type(config).__name__}: this model computes attention itself, whatever attn_implementation says"
        )
    given = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "local_size": local_size,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
        "use_vmap": use_vmap,
        "device": device,
        **rest,
    }
    if not _says_causality(config.__class__):
        # What its own code takes too, where a part of the model computes attention itself
        added: Tensor | None = eager_mask(**given)
        return added
    told = _modules_say_causal(config)
    if model.flash and not use_vmap:
        short, made = _short_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            local_size,
            allow_is_causal_skip,
            allow_is_bidirectional_skip,
            device,
            told=told,
            window=local_size is None
            or (
                model.window
                and local_size == getattr(config, "sliding_window", None)
                and local_size != getattr(config, "attention_chunk_size", None)
            ),
        )
        if short:
            return made
    # None stands for a causal mask only where all agree how queries and keys are aligned
    aligned = allow_is_causal_skip and (q_length == 1 or (q_length == kv_length and told))
    whole: Tensor | None = sdpa_mask(**given, allow_is_causal_skip=aligned)
    return whole


def _short_mask(
    batch: int,
    nq: int,
    nk: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Any,
    padding: Tensor | None,
    local_size: int | None,
    causal: bool,
    bidirectional: bool,
    device: torch.device | str,
    told: bool,
    window: bool,
) -> tuple[bool, Tensor | None]:
    """Whether a mask of two dimensions or none says it all, and that mask. ``told``, ``window``: the attention function
    is told causality, and that local_size is a window."""
    if local_size is not None and (nk < local_size or (causal and nk == local_size)):
        local_size = None  # no key is that far away
    elif not window:
        return False, None
    if padding is not None and padding.dim() != 2:
        return False, None
    tracing = is_tracing(padding)
    if tracing and causal and not told and nq != 1:
        return False, None  # what is known of a mask is not traced
    if isinstance(q_offset, Tensor):
        if tracing or is_tracing(q_offset):
            return False, None
        q_offset = int(q_offset)
    rest = False
    if causal:
        if q_offset == kv_offset == 0 and nq < nk:
            nk, rest = nq, True  # a cache of fixed length that was empty: the rest of it is the future
        elif q_offset + nq != kv_offset + nk:
            return False, None
    elif bidirectional:
        if local_size is not None:
            return False, None  # transformers counts the tokens of this window in another way
    else:
        numbers = None
        if padding is None and q_offset == kv_offset == 0 and nq == nk:
            numbers = _packed(mask_function, local_size)
        return numbers is not None, None if numbers is None else numbers.to(torch.int32)
    keys = None
    if padding is not None:
        keys = prepare_padding_mask(padding, nk, kv_offset)[:, kv_offset : kv_offset + nk].to(torch.bool)
        if tracing:
            return True, keys
        if bool(keys.all()):
            keys = None
    full = keys is None
    # The window goes with the mask too, should the model not pass it on; None would say nothing of it
    if full and not rest and (not causal or nq == 1 or (nq == nk and told)) and (local_size is None or tracing):
        return True, None
    if kv_offset != 0 and not tracing:
        return False, None  # generate may hand it to a model as padding, which counts from key 0 on
    if keys is None:
        keys = torch.ones(batch, nk, dtype=torch.bool, device=device)
    if not tracing:
        setattr(keys, _KNOWN, _Known(full, causal, local_size, None if full else _ends(keys), {}))
    return True, keys


def _ends(keys: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where the keys of each sequence begin and end, (B) each, if no padding stands between them; waits for the
    device."""
    begin = keys.to(torch.int32).argmax(1)  # the first of the largest
    end = begin + keys.sum(1)
    place = torch.arange(keys.shape[1], device=keys.device)
    between = (place >= begin[:, None]) & (place < end[:, None])
    return (begin, end) if torch.equal(between, keys) else None


# ------------------------------------------------------------------------------------------------------------ attention


def _not_yet(what: str) -> NoReturn:
    raise NotImplementedError(f"{what}: not built yet; this model needs another attn_implementation")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: object = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    output_attentions: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it: query (B, Hq, Nq, d), key (B, Hk, Nk, d), value (B, Hk, Nk, d_v).

    Returns:
        out (B, Nq, Hq, d_v), contiguous, and None in place of the weights.
    """
    if rest.get("indices") is not None or rest.get("block_indices") is not None:
        _not_yet("sparse attention (indices)")
    if cache is not None:
        _not_yet("a paged cache (continuous batching)")
    if output_attentions:
        raise NotImplementedError("output_attentions: the weights are never stored")
    says = _says_causality(module.__class__) and _says_causality(getattr(module, "config", None).__class__)
    if not says and cu_seq_lens_q is not None:
        _not_yet(f"{module.__class__.__name__}, which does not say whether it is causal, with packed sequences")
    asked = _Asked(
        says and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        sliding_window if says else None,
        scaling,
        softcap or 0.0,
        rest.get("sinks") if s_aux is None else s_aux,
        dropout,
    )
    seen = attention_mask
    if seen is not None and not (
        seen.dim() == 4 or (seen.dim() == 2 and (seen.dtype == torch.bool or seen.dtype == torch.int32))
    ):
        refuse(
            "attention_mask",
            f"{seen.dim()} dimensions, {seen.dtype}",
            "4, or what flash_wmma's own mask function makes",
        )
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if cu_seq_lens_q is None or cu_seq_lens_k is None:
            refuse("cu_seq_lens_q, cu_seq_lens_k", "one of them", "both or none")
        if position_bias is not None or (seen is not None and (seen.dim() != 2 or seen.dtype == torch.bool)):
            refuse("cu_seq_lens_q", "packed sequences with an attention_mask or a position_bias", "packed ones alone")
        longest_q = _longest(cu_seq_lens_q) if max_length_q is None else int(max_length_q)
        longest_k = _longest(cu_seq_lens_k) if max_length_k is None else int(max_length_k)
        lengths = Lengths(cu_seq_lens_q.int(), cu_seq_lens_k.int(), None, longest_q, longest_k)
        return _packed_out(query, key, value, asked, lengths), None
    if seen is not None and seen.dim() == 2:
        if seen.dtype != torch.bool:
            return _of_numbers(query, key, value, seen, asked, position_bias), None
        return _of_keys(query, key, value, seen, asked, position_bias, all_rows=not module.training), None
    if seen is not None:
        return _out(query, key, value, asked._replace(causal=False, window=None), _both(seen, position_bias)), None
    if asked.causal and query.shape[2] not in (1, key.shape[2]):
        refuse(
            "attention_mask",
            f"None, with {query.shape[2]} causal queries and {key.shape[2]} keys",
            "a mask, which says where the queries stand",
        )
    return _out(query, key, value, asked, position_bias), None


class _Asked(NamedTuple):
    """What a call asks for, besides tensors. The last query stands at the last key."""

    causal: bool
    window: int | None
    """How many keys a query sees, its own place included."""
    scale: float | None
    softcap: float
    sinks: Tensor | None
    dropout: float

    def options(self, q: Tensor) -> dict[str, Any]:
        """Arguments of ``call_of``. float32 on a GPU is multiplied as the SDPA stand-in does."""
        device = q.device.type
        kernel = "auto" if torch.is_autocast_enabled(device) else kernel_for(device, q.dtype)
        return {
            "causal": self.causal,
            "window": None if self.window is None else (self.window - 1, self.window - 1),
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "dropout_p": self.dropout,
            "kernel": kernel,
            "backward_kernel": backward_kernel_for(kernel),
            "bottom_right": True,
        }


def _out(q: Tensor, k: Tensor, v: Tensor, asked: _Asked, bias: Tensor | None = None) -> Tensor:
    if bias is not None and bias.dtype not in (torch.bool, torch.float32, q.dtype):
        bias = bias.float()
    return attend(q, k, v, call_of(attn_bias=bias, out_bnhd=True, **asked.options(q)))[0].transpose(1, 2)


def _packed_out(q: Tensor, k: Tensor, v: Tensor, asked: _Asked, lengths: Lengths, bottom_right: bool = True) -> Tensor:
    """Of a batch whose rows, one entry after the other, are sequences as ``lengths`` says."""
    rows_q, rows_k, rows_v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    options = asked.options(q) | {"bottom_right": bottom_right}
    out = attend(rows_q, rows_k, rows_v, call_of(lengths=lengths, **options))[0]
    return out.view(q.shape[0], q.shape[2], *out.shape[1:])


def _both(seen: Tensor, position_bias: Tensor | None) -> Tensor:
    """One bias of a mask and of what the model adds to the scores."""
    if position_bias is None:
        return seen
    if seen.dtype == torch.bool:
        return torch.where(seen, position_bias, float("-inf"))
    return seen + position_bias


def _longest(cu_seqlens: Tensor) -> int:
    return int(cu_seqlens.diff().max()) if cu_seqlens.shape[0] > 1 else 0


def _of_keys(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, asked: _Asked, position_bias: Tensor | None, all_rows: bool
) -> Tensor:
    """With a mask (B, Nk) of the keys that are not padding.

    Sequences without padding between their tokens run packed where they lie, so that kernels that take no mask run
    them too. A padded query before them then sees no key, and its result is 0, which no model reads. So it is with one
    behind them, unless ``all_rows`` are asked for. All else (a cache, few queries, a position_bias) runs with the mask
    as a bias that is the same for every query."""
    nq, nk = q.shape[2], seen.shape[1]
    if nk < k.shape[2]:
        k, v = k[:, :, :nk], v[:, :, :nk]
        position_bias = None if position_bias is None else position_bias[..., :nk]
    if nk > k.shape[2]:
        refuse("attention_mask", f"{nk} keys", f"at most {k.shape[2]}, as there are")
    known = None
    if not is_tracing(seen):
        known = getattr(seen, _KNOWN, None)
        if known is None:
            known = _Known(bool(seen.all()), None, None, _ends(seen), {})
            setattr(seen, _KNOWN, known)
        if known.causal is not None:
            asked = asked._replace(causal=known.causal)
        if known.window is not None:
            asked = asked._replace(window=known.window)
        if known.full:
            return _out(q, k, v, asked, position_bias)
        apart = nq == nk if asked.causal else nq > 1 and asked.window is None
        if known.ends is not None and position_bias is None and apart:
            key = nq, asked.causal, all_rows
            if key not in known.lengths:
                begin, end = known.ends
                known.lengths[key] = _without_padding(begin, end, nq, nk, asked.causal, all_rows)
            return _packed_out(q, k, v, asked, known.lengths[key], bottom_right=False)
    return _out(q, k, v, asked, _both(seen[:, None, None, :], position_bias))


def _without_padding(begin: Tensor, end: Tensor, nq: int, nk: int, causal: bool, all_rows: bool) -> Lengths:
    """2 B + 1 sequences: padding, the first entry's tokens, padding, the second's, …, padding. If ``causal``, queries
    are divided as keys are, and padding uses no key; with ``all_rows`` what comes behind an entry's tokens belongs to
    them, as queries. Otherwise all queries of an entry belong to its keys."""
    batch = begin.shape[0]
    first = torch.arange(batch, device=begin.device)
    cu_k = torch.zeros(2 * batch + 2, dtype=torch.int32, device=begin.device)
    cu_k[1:-1:2] = first * nk + begin
    cu_k[2:-1:2] = first * nk + (nk if causal and all_rows else end)
    cu_k[-1] = batch * nk
    if causal:
        used = torch.zeros(2 * batch + 1, dtype=torch.int32, device=begin.device)
        used[1::2] = end - begin
        return Lengths(cu_k, cu_k, used, nq, nk)
    cu_q = torch.zeros_like(cu_k)
    cu_q[1:-1:2] = first * nq
    cu_q[2:-1:2] = (first + 1) * nq
    cu_q[-1] = batch * nq
    return Lengths(cu_q, cu_k, None, nq, nk)


def _of_numbers(
    q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, asked: _Asked, position_bias: Tensor | None
) -> Tensor:
    """With a mask (B, N) of the number of each token's sequence in its row."""
    if is_tracing(numbers) or position_bias is not None:
        same = numbers[:, None, :, None] == numbers[:, None, None, :]
        return _out(q, k, v, asked, _both(same, position_bias))
    packing = getattr(numbers, _KNOWN, None)
    if packing is None:
        new = torch.ones_like(numbers, dtype=torch.bool)
        new[:, 1:] = numbers.diff(dim=1) != 0
        places = new.flatten().nonzero().flatten().to(torch.int32)
        cu_seqlens = torch.cat([places, places.new_tensor([numbers.numel()])])
        packing = _Packing(cu_seqlens, _longest(cu_seqlens))
        setattr(numbers, _KNOWN, packing)
    cu_seqlens, longest = packing
    return _packed_out(q, k, v, asked, Lengths(cu_seqlens, cu_seqlens, None, longest, longest))
