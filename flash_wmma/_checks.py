"""Checks of arguments, and the messages about wrong ones.

Every message names the argument, what it was, and what is allowed: ``TypeError`` where a type is wrong, ``ValueError``
where a value is, ``NotImplementedError`` where the value is right but no kernel does it yet.

The eager path calls the op first and comes here only after it failed, so that a good call pays nothing; the fake
kernels, which do not know better, always come here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._call import Cache, Call, Lengths
from ._dropout import check_state, probability
from ._errors import refuse
from ._registry import kernel_names

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MATH_DTYPES = (*DTYPES, torch.float64)
"""The dtypes that ``kernel="math"`` takes."""
MAX_SEQLEN = 2**30
LARGEST = torch.finfo(torch.float32).max
"""The largest scale."""

FORWARD_MODE = (
    'forward-mode differentiation is not built: pass kernel="math", plain torch ops, which have every derivative, or '
    "torch.autograd.forward_ad.unpack_dual(...).primal"
)
"""The message about forward-mode differentiation."""


def _shape(sizes: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "") + ")"


def tensors(**named: object) -> None:
    """Each must be a dense tensor."""
    for name, t in named.items():
        if not isinstance(t, Tensor):
            refuse(name, type(t).__name__, "torch.Tensor", TypeError)
        if t.is_nested:
            refuse(name, "a nested tensor", "a dense tensor (B, H, N, d)")
        if t.layout is not torch.strided:
            refuse(f"{name}.layout", t.layout, "torch.strided")


def inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str = "(B, H, N, d)",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> None:
    """q (B, Hq, Nq, d), k (B, Hk, Nk, d), v (B, Hk, Nk, d_v), or with ``layout`` "(total, H, d)" q (total_q, Hq, d) and
    so on: of one dtype, on one device, Hq a multiple of Hk. With ``layout`` "(B, N, H, d)" the tensors are the same,
    but messages show them transposed."""
    tensors(q=q, k=k, v=v)
    packed = layout == "(total, H, d)"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != (3 if packed else 4):
            refuse(f"{name}.shape", _shape(t.shape), layout)

    def shape(t: Tensor) -> str:  # as the caller wrote it
        return _shape(t.transpose(1, 2).shape if layout == "(B, N, H, d)" else t.shape)

    if q.dtype not in dtypes:
        refuse("q.dtype", q.dtype, ", ".join(map(str, dtypes)))
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            refuse(f"{name}.dtype", t.dtype, f"q's, {q.dtype}")
        if t.device != q.device:
            refuse(f"{name}.device", t.device, f"q's, {q.device}")
        if not packed and t.shape[0] != q.shape[0]:
            refuse(f"{name}.shape", shape(t), f"the batch of q, {q.shape[0]}, first")
    if k.shape[-1] != q.shape[-1]:
        refuse("k.shape", shape(k), f"the head dim of q, {q.shape[-1]}, last")
    if v.shape[:-1] != k.shape[:-1]:
        allowed = f"{layout[:-1]}_v) with the heads and the length of k, {shape(k)}"
        refuse("v.shape", shape(v), allowed)
    hq, hk = q.shape[1], k.shape[1]
    if (hk == 0 and hq != 0) or (hk != 0 and hq % hk != 0):
        refuse("q.shape", shape(q), f"a number of heads that is a multiple of k's, {hk}")
    for name, t in (("q", q), ("k", k)):
        n = t.shape[0 if packed else 2]
        if isinstance(n, int) and n > MAX_SEQLEN:
            refuse(f"{name}.shape", shape(t), "a length of at most 2**30")


def _same_device(name: str, t: Tensor, q: Tensor) -> None:
    if t.device != q.device:
        refuse(f"{name}.device", t.device, f"q's, {q.device}")


def bias(attn_bias: Tensor | None, q: Tensor, full: Sequence[int]) -> None:
    """A mask that broadcasts to ``full`` = (B, Hq, Nq, Nk)."""
    if attn_bias is None:
        return
    tensors(attn_bias=attn_bias)
    if attn_bias.dtype not in (torch.bool, torch.float32, q.dtype):
        allowed = dict.fromkeys(map(str, (torch.bool, torch.float32, q.dtype)))
        refuse("attn_bias.dtype", attn_bias.dtype, ", ".join(allowed))
    _same_device("attn_bias", attn_bias, q)
    sizes = attn_bias.shape
    if len(sizes) > 4 or any(n != 1 and n != m for n, m in zip(reversed(sizes), reversed(full), strict=False)):
        refuse("attn_bias.shape", _shape(sizes), f"what broadcasts to (B, Hq, Nq, Nk) = {_shape(full)}")


def slopes(alibi_slopes: Tensor | None, q: Tensor, batch: int) -> None:
    """(Hq) or (B, Hq), float32."""
    if alibi_slopes is None:
        return
    tensors(alibi_slopes=alibi_slopes)
    if alibi_slopes.dtype != torch.float32:
        refuse("alibi_slopes.dtype", alibi_slopes.dtype, "torch.float32")
    _same_device("alibi_slopes", alibi_slopes, q)
    heads, sizes = q.shape[1], alibi_slopes.shape
    fits = len(sizes) in (1, 2) and sizes[-1] == heads and (len(sizes) == 1 or sizes[0] == batch)
    if not fits:
        allowed = f"(Hq) = {_shape((heads,))} or (B, Hq) = {_shape((batch, heads))}"
        refuse("alibi_slopes.shape", _shape(sizes), allowed)


def sink_logits(sinks: Tensor | None, q: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """(Hq)."""
    if sinks is None:
        return
    tensors(sinks=sinks)
    if sinks.dtype not in dtypes:
        refuse("sinks.dtype", sinks.dtype, ", ".join(map(str, dtypes)))
    _same_device("sinks", sinks, q)
    if sinks.dim() != 1 or sinks.shape[0] != q.shape[1]:
        refuse("sinks.shape", _shape(sinks.shape), f"(Hq) = {_shape((q.shape[1],))}")


def ranges(key_ranges: Tensor | None, q: Tensor) -> None:
    """(B or 1, Hq or 1, Nq, 2), for packed sequences (Hq or 1, total_q, 2), int32."""
    if key_ranges is None:
        return
    tensors(key_ranges=key_ranges)
    if key_ranges.dtype != torch.int32:
        refuse("key_ranges.dtype", key_ranges.dtype, "torch.int32")
    _same_device("key_ranges", key_ranges, q)
    packed = q.dim() == 3
    full = (q.shape[1], q.shape[0]) if packed else tuple(q.shape[:3])
    sizes = key_ranges.shape
    fits = (
        len(sizes) == len(full) + 1
        and sizes[-1] == 2
        and sizes[-2] == full[-1]
        and all(n in (1, m) for n, m in zip(sizes[:-2], full[:-1], strict=True))
    )
    if not fits:
        layout = "(Hq or 1, total_q, 2)" if packed else "(B or 1, Hq or 1, Nq, 2)"
        refuse("key_ranges.shape", _shape(sizes), f"{layout} of {_shape((*full, 2))}")


def cap(softcap: object) -> None:
    """0 or a positive number whose inverse is a float32."""
    allowed = "0 (none) or a positive float, 1e-30 to 1e30"
    if isinstance(softcap, bool) or not isinstance(softcap, int | float | torch.SymFloat):
        refuse("softcap", repr(softcap), allowed, TypeError)
    if not (softcap == 0 or 1e-30 <= softcap <= 1e30):
        refuse("softcap", softcap, allowed)


def int32(q: Tensor, *, batch: int | None = None, **named: Tensor | None) -> None:
    """cu_seqlens (B + 1), or with ``batch`` lengths (B)."""
    for name, t in named.items():
        if t is None:
            continue
        tensors(**{name: t})
        if t.dtype != torch.int32:
            refuse(f"{name}.dtype", t.dtype, "torch.int32")
        _same_device(name, t, q)
        if t.dim() != 1 or (t.shape[0] < 1 if batch is None else t.shape[0] != batch):
            refuse(f"{name}.shape", _shape(t.shape), "(B + 1,)" if batch is None else f"(B,) = {_shape((batch,))}")


def _lengths(q: Tensor, given: Lengths) -> int:
    """The arguments of packed sequences, except the values of the lengths. Returns the number of sequences."""
    cu_seqlens_q, cu_seqlens_k = given.cu_seqlens_q, given.cu_seqlens_k
    tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    int32(q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    batch = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] != batch + 1:
        refuse("cu_seqlens_k.shape", _shape(cu_seqlens_k.shape), f"cu_seqlens_q's, {_shape(cu_seqlens_q.shape)}")
    int32(q, batch=batch, seqused_k=given.seqused_k)
    for name, n in (("max_seqlen_q", given.max_seqlen_q), ("max_seqlen_k", given.max_seqlen_k)):
        if isinstance(n, bool) or not isinstance(n, int | torch.SymInt):
            refuse(name, repr(n), "an int", TypeError)
        if isinstance(n, int) and not 0 <= n <= MAX_SEQLEN:
            refuse(name, n, "0 to 2**30")
    return batch


def call_tensors(q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
    """The tensors of a call, except the values of packed sequences' lengths."""
    dtypes = MATH_DTYPES if call.kernel_name == "math" else DTYPES
    if call.lengths is None:
        inputs(q, k, v, "(B, N, H, d)" if call.out_bnhd else "(B, H, N, d)", dtypes)
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[2], k.shape[2]
    else:
        inputs(q, k, v, "(total, H, d)", dtypes)
        batch, seqlen_q, seqlen_k = _lengths(q, call.lengths), call.lengths.max_seqlen_q, call.lengths.max_seqlen_k
    bias(call.attn_bias, q, (batch, q.shape[1], seqlen_q, seqlen_k))
    slopes(call.alibi_slopes, q, batch)
    ranges(call.key_ranges, q)
    sink_logits(call.sinks, q, dtypes)
    probability(dropout_p=call.dropout_p)
    check_state(call.rng_state, q.device)


def cached_tensors(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: Cache, call: Call) -> None:
    """The tensors of a call with a key/value cache, except the values of lengths and tables."""
    tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    packed = cache.cu_seqlens_q is not None
    bnhd = call.out_bnhd
    if q.dim() != (3 if packed else 4):
        refuse("q.shape", _shape(q.shape), "(total, H, d)" if packed else "(B, N, H, d)" if bnhd else "(B, H, N, d)")
    if q.dtype not in DTYPES:
        refuse("q.dtype", q.dtype, ", ".join(map(str, DTYPES)))
    layout = "(pages, page_size, H, d)" if bnhd else "(pages, H, page_size, d)"
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        if t.dim() != 4:
            refuse(f"{name}.shape", _shape(t.shape), layout)
        if t.dtype != q.dtype:
            refuse(f"{name}.dtype", t.dtype, f"q's, {q.dtype}")
        _same_device(name, t, q)
    if k_cache.shape[-1] != q.shape[-1]:
        refuse("k_cache.shape", _shape(k_cache.shape), f"the head dim of q, {q.shape[-1]}, last")
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        refuse("v_cache.shape", _shape(v_cache.shape), f"k_cache's but for the last, {_shape(k_cache.shape)}")
    hq, hk = q.shape[1], k_cache.shape[1]
    if (hk == 0 and hq != 0) or (hk != 0 and hq % hk != 0):
        refuse("q.shape", _shape(q.shape), f"a number of heads that is a multiple of k_cache's, {hk}")
    batch = q.shape[0]
    if cache.cu_seqlens_q is not None:
        tensors(cu_seqlens_q=cache.cu_seqlens_q)
        int32(q, cu_seqlens_q=cache.cu_seqlens_q)
        batch = cache.cu_seqlens_q.shape[0] - 1
        longest: object = cache.max_seqlen_q
        if isinstance(longest, bool) or not isinstance(longest, int | torch.SymInt):
            refuse("max_seqlen_q", repr(longest), "an int", TypeError)
        if isinstance(longest, int) and not 0 <= longest <= MAX_SEQLEN:
            refuse("max_seqlen_q", longest, "0 to 2**30")
    tensors(cache_seqlens=cache.cache_seqlens)
    int32(q, batch=batch, cache_seqlens=cache.cache_seqlens)
    int32(q, batch=batch, cache_leftpad=cache.cache_leftpad)
    capacity(k_cache, cache.page_table, batch)
    if cache.page_table is not None:
        _same_device("block_table", cache.page_table, q)
    seqlen_q = cache.max_seqlen_q if packed else q.shape[2]
    runs = 1 if cache.page_table is None else cache.page_table.shape[1]
    bias(call.attn_bias, q, (batch, q.shape[1], seqlen_q, runs * k_cache.shape[2]))
    slopes(call.alibi_slopes, q, batch)
    sink_logits(call.sinks, q)


def capacity(k_cache: Tensor, page_table: Tensor | None, batch: int) -> int:
    """The rows that a sequence may have in a cache; the table's shape and dtype are checked."""
    pages, rows = k_cache.shape[0], k_cache.shape[2]
    runs = 1
    if page_table is None:
        if pages < batch:
            refuse("k_cache.shape", _shape(k_cache.shape), f"at least {batch} batch entries, or a block_table")
    else:
        tensors(block_table=page_table)
        if page_table.dtype != torch.int32:
            refuse("block_table.dtype", page_table.dtype, "torch.int32")
        if page_table.dim() != 2 or page_table.shape[0] != batch:
            refuse("block_table.shape", _shape(page_table.shape), f"(B, n) with B = {batch}")
        runs = page_table.shape[1]
    held = runs * rows
    if isinstance(held, int) and held > MAX_SEQLEN:
        refuse("k_cache.shape", _shape(k_cache.shape), "at most 2**30 rows a sequence")
    return held


def cached_values(k_cache: Tensor, cache: Cache, total_q: int) -> None:
    """The values of the lengths and of the table's entries in use. Waits for the device."""
    if cache.cu_seqlens_q is not None:
        cumulative("q", cache.cu_seqlens_q, total_q, cache.max_seqlen_q)
    batch = cache.cache_seqlens.shape[0]
    held = capacity(k_cache, cache.page_table, batch)
    used: list[int] = cache.cache_seqlens.tolist()
    leftpad: list[int] = [0] * batch if cache.cache_leftpad is None else cache.cache_leftpad.tolist()
    table = None if cache.page_table is None else cache.page_table.tolist()
    for b, (end, begin) in enumerate(zip(used, leftpad, strict=True)):
        if not 0 <= end <= held:
            refuse("cache_seqlens", f"{end} at {b}", f"0 to the capacity, {held}")
        if not 0 <= begin <= end:
            refuse("cache_leftpad", f"{begin} at {b}", f"0 to cache_seqlens, {end}")
        if table is not None and begin < end:
            rows, pages = k_cache.shape[2], k_cache.shape[0]
            for run in range(begin // rows, (end - 1) // rows + 1):
                if not 0 <= table[b][run] < pages:
                    refuse("block_table", f"{table[b][run]} at ({b}, {run})", f"0 to {pages - 1}, since it is in use")


def cumulative(name: str, t: Tensor, total: int, longest: int | None = None, argument: str = "") -> list[int]:
    """The lengths of the sequences whose first rows are t, the ``argument`` (cu_seqlens_<name>)."""
    ends, argument = t.tolist(), argument or f"cu_seqlens_{name}"
    if ends[0] != 0:
        refuse(argument, f"{ends[0]} at 0", "0 first")
    for b, (begin, end) in enumerate(itertools.pairwise(ends)):
        if end < begin:
            refuse(argument, f"{begin} at {b} and {end} at {b + 1}", "no number below the one before")
    if ends[-1] > total:
        refuse(argument, f"{ends[-1]} last", f"at most the {total} rows of {name}")
    lengths = [end - begin for begin, end in itertools.pairwise(ends)]
    if longest is not None and lengths and max(lengths) > longest:
        refuse(f"max_seqlen_{name}", longest, f"at least the longest sequence, {max(lengths)}")
    return lengths


def sequences(given: Lengths, total_q: int, total_k: int) -> None:
    """The values of the lengths. Waits for the device."""
    cumulative("q", given.cu_seqlens_q, total_q, given.max_seqlen_q)
    keys = cumulative("k", given.cu_seqlens_k, total_k, given.max_seqlen_k)
    if given.seqused_k is not None:
        for b, used in enumerate(given.seqused_k.tolist()):
            if not 0 <= used <= keys[b]:
                refuse("seqused_k", f"{used} at {b}", f"0 to the keys of the sequence, {keys[b]}")


def no_gradient(
    why: str = "no kernel computes",
    instead: str = ', or kernel="math", plain torch ops, which have its gradient',
    /,
    **named: Tensor | None,
) -> None:
    """These tensors must not require grad: ``why`` says who does not compute their gradients, ``instead`` who does."""
    for name, t in named.items():
        if t is not None and t.requires_grad:
            raise NotImplementedError(
                f"{name}: got a tensor that requires grad, which {why}; call under torch.no_grad(), pass "
                f"{name}.detach(){instead}"
            )


def no_tangent(**named: Tensor | None) -> None:
    """These tensors must not carry a forward-mode tangent."""
    for name, t in named.items():
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(f"{name}: got a dual tensor: {FORWARD_MODE}")


def options(call: Call) -> None:
    """The arguments of a call that are no tensors, except its band, which ``call_of`` has checked."""
    scale: object = call.scale
    if scale is not None and not isinstance(scale, int | float | torch.SymFloat):
        refuse("scale", repr(scale), "None or a float", TypeError)
    if isinstance(scale, int | float) and not abs(scale) <= LARGEST:
        refuse("scale", scale, "None or a finite float32")
    cap(call.softcap)
    kernel(call.kernel_name)
    flag(batch_invariant=call.batch_invariant)


def kernel(name: object) -> None:
    """``"auto"``, a kernel for the forward pass, or ``"math"``."""
    if not isinstance(name, str):
        refuse("kernel", repr(name), "'auto' or a name of flash_wmma.kernels()", TypeError)
    names = kernel_names("forward")
    if names and name not in ("auto", *names, "math"):
        refuse("kernel", repr(name), ", ".join(map(repr, ("auto", *names, "math"))))


def backward_kernel(name: object) -> None:
    """``"auto"`` or a kernel for gradients, whether or not they are asked for later."""
    if not isinstance(name, str):
        refuse("backward_kernel", repr(name), "'auto' or a name of flash_wmma.kernels('backward')", TypeError)
    if name == "auto":
        return
    names = kernel_names("backward")
    if names and name not in names:
        refuse("backward_kernel", repr(name), ", ".join(map(repr, ("auto", *names))))


def flag(**named: object) -> None:
    """Each must be a bool."""
    for name, value in named.items():
        if not isinstance(value, bool):
            refuse(name, repr(value), "a bool", TypeError)


def count(**named: object) -> None:
    """Each must be a positive int."""
    for name, value in named.items():
        if not isinstance(value, int) or isinstance(value, bool):
            refuse(name, repr(value), "an int", TypeError)
        if value < 1:
            refuse(name, value, "1 or more")


def device(q: Tensor) -> None:
    """A device that kernels run on."""
    if q.device.type not in ("cpu", "cuda", "meta"):
        refuse("q.device", q.device, "cpu, cuda")
