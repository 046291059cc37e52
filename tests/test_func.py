"""torch.func: vmap, grad and jacrev of attention, in any order, against plain torch ops in float64 under the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import Mask, Modification, attention
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

import flash_wmma
from flash_wmma import _autograd, _ops, forward, forward_varlen

W, B, HQ, HK, NQ, NK, D, DV = 3, 2, 4, 2, 9, 13, 8, 16
"""Mapped calls, and the sizes of each."""

KERNELS = [("cpu", "bwd_cpu"), ("simt", "bwd_simt"), ("mma_sm80", "bwd_sm80")]
"""On CPU tensors the CUDA kernels run in the emulator."""


def normal(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """forward in plain torch ops and the inputs' dtype."""
    with_lse = options.pop("return_lse", False)
    mask = Mask(options.pop("causal", False), options.pop("window", None))
    out, lse = attention(q, k, v, mask, options.pop("scale", None), Modification(**options))
    return (out, lse) if with_lse else out


def double(arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in arguments)


def close(got: Any, expected: Any, eps: float = 1.2e-7) -> None:
    """Each tensor to 60 eps of its largest value."""
    got, expected = ((t,) if isinstance(t, Tensor) else t for t in (got, expected))
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        hidden = b.isneginf()
        assert torch.equal(a.isneginf(), hidden)
        a, b = (t.double().masked_fill(hidden, 0) for t in (a, b))
        torch.testing.assert_close(a, b, rtol=0, atol=60 * eps * max(float(b.abs().max()) if b.numel() else 0, 0.1))


def same(transformed: Callable[..., Any], *arguments: Tensor, eps: float = 1.2e-7, **options: Any) -> None:
    """``transformed(attend)(*arguments)`` is that of plain ops in float64. ``options``: of ours alone."""
    got = transformed(functools.partial(forward, **options))(*arguments)
    close(got, transformed(plain)(*double(arguments)), eps)


def loss(attend: Callable[..., Any], *names: str, **options: Any) -> Callable[..., Tensor]:
    """Of out and lse, as a function of q, k, v and the options of these names."""

    def value(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        out, lse = attend(q, k, v, return_lse=True, **dict(zip(names, tensors, strict=True)), **options)
        return out.sin().sum() + lse.masked_fill(lse.isneginf(), 0).square().sum()  # type: ignore[no-any-return]

    return value


def inputs(dims: tuple[int | None, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k and v, those mapped with their dimension at ``dims``."""
    shapes = ((B, HQ, NQ, D), (B, HK, NK, D), (B, HK, NK, DV))
    made = []
    for seed, (shape, dim) in enumerate(zip(shapes, dims, strict=True)):
        t = normal(W, *shape, seed=seed, dtype=dtype)
        made.append(t[0] if dim is None else t.movedim(0, dim))
    return made


def ranges(*sizes: int) -> Tensor:
    """Any key ranges, some of them empty."""
    return torch.randint(-2, NK + 3, (*sizes, NQ, 2), generator=torch.Generator().manual_seed(5)).int()


MASKS = {
    "bias of each call": ("attn_bias", normal(W, B, HQ, NQ, NK, seed=6), 0),
    "bias broadcast over entries": ("attn_bias", normal(HQ, 1, NK, W, seed=6), 3),
    "bias of a key": ("attn_bias", normal(W, NK, seed=6), 0),
    "shared bias": ("attn_bias", normal(B, 1, NQ, 1, seed=6), None),
    "shared bias of a key": ("attn_bias", normal(NK, seed=6), None),
    "slopes of each call": ("alibi_slopes", normal(B, W, HQ, seed=7).abs(), 1),
    "slopes of the heads": ("alibi_slopes", normal(W, HQ, seed=7).abs(), 0),
    "shared slopes": ("alibi_slopes", normal(B, HQ, seed=7).abs(), None),
    "shared slopes of the heads": ("alibi_slopes", normal(HQ, seed=7).abs(), None),
    "ranges of each call": ("key_ranges", ranges(W, B, HQ), 0),
    "ranges broadcast over entries": ("key_ranges", ranges(W, 1, HQ), 0),
    "ranges broadcast over heads": ("key_ranges", ranges(W, B, 1), 0),
    "shared ranges": ("key_ranges", ranges(B, 1), None),
    "sinks of each call": ("sinks", normal(HQ, W, seed=8), 1),
    "shared sinks": ("sinks", normal(HQ, seed=8), None),
}
"""An argument's name, a tensor, and the dimension that is mapped."""


def seen(mask: Tensor) -> Tensor:
    return mask > -0.5


# ---------------------------------------------------------------------------------------------------------------- vmap


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, -1, 4), (None, None, 1)], ids=str)
def test_vmap_of_inputs(dims: tuple[int | None, ...]) -> None:
    same(lambda f: vmap(functools.partial(f, causal=True, return_lse=True), in_dims=dims), *inputs(dims))


@pytest.mark.parametrize("with_sinks", [False, True], ids=["into entries", "into heads"])
@pytest.mark.parametrize("mask", MASKS)
def test_vmap_of_masks(mask: str, with_sinks: bool) -> None:
    """Sinks of each call make of mapped calls heads instead of batch entries."""
    name, tensor, dim = MASKS[mask]
    if with_sinks == (name == "sinks"):
        with_sinks, others, rest = False, (), ()
    else:
        others, rest = (("sinks",), (normal(W, HQ, seed=9),)) if with_sinks else ((), ())

    def mapped(f: Callable[..., Any]) -> Callable[..., Any]:
        def one(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Any:
            return f(q, k, v, window=(5, 4), return_lse=True, **dict(zip((name, *others), masks, strict=True)))

        return vmap(one, in_dims=(0, None, 0, dim, *(0 for _ in rest)))

    same(mapped, *inputs((0, None, 0)), tensor, *rest)
    if name == "attn_bias":
        same(mapped, *inputs((0, None, 0)), seen(tensor), *rest)


@pytest.mark.parametrize("order", ["grad of vmap", "vmap of grad"])
@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 1, None)], ids=str)
@pytest.mark.parametrize("mask", ["bias of each call", "bias broadcast over entries", "shared bias of a key"])
@pytest.mark.parametrize("sinks", [None, 0], ids=["shared sinks", "sinks of each call"])
def test_gradients(order: str, dims: tuple[int | None, ...], mask: str, sinks: int | None) -> None:
    _, bias, dim = MASKS[mask]
    logits = normal(W, HQ, seed=9)
    arguments = [*inputs(dims), bias, logits if sinks == 0 else logits[0]]
    places = (*dims, dim, sinks)
    everything = tuple(range(5))

    def transformed(f: Callable[..., Any]) -> Callable[..., Any]:
        value = loss(f, "attn_bias", "sinks", causal="bottom_right")
        if order == "vmap of grad":
            return vmap(grad(value, argnums=everything), in_dims=places)
        return grad(lambda *t: vmap(value, in_dims=places)(*t).sum(), argnums=everything)

    same(transformed, *arguments)


def test_gradients_of_a_bias_of_every_shape() -> None:
    for mask in ("shared bias", "bias of a key", "bias of each call"):
        _, bias, dim = MASKS[mask]
        dims = (0, 0, None, dim)
        same(lambda f, dims=dims: vmap(grad(loss(f, "attn_bias"), 3), in_dims=dims), *inputs((0, 0, None)), bias)


def test_jacrev() -> None:
    """vmap over the gradient of the result, of inputs that it does not map."""
    q, k, v = (t[:1, :, :3] for t in inputs((None, None, None)))
    same(lambda f: jacrev(functools.partial(f, causal=True), argnums=(0, 1, 2)), q, k, v)
    same(lambda f: jacrev(lambda q: f(q, k.to(q.dtype), v.to(q.dtype), return_lse=True)[1]), q)


def test_gradients_of_samples() -> None:
    """Of a module's parameters, for each sample by itself."""
    layer = flash_wmma.MultiheadAttention(16, 2, causal=True)
    x = normal(W, 7, 16)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def value(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, parameters, (x[None],)).square().sum()  # type: ignore[no-any-return]

    got = vmap(grad(value), in_dims=(None, 0))(parameters, x)
    for i in range(W):
        expected = torch.autograd.grad(layer(x[i : i + 1]).square().sum(), tuple(layer.parameters()))
        close(tuple(got[name][i] for name in parameters), expected)


def test_nested_vmap() -> None:
    """An outer map of q and v, an inner one of q and k."""
    q, k, v = inputs((0, 0, 0))
    q = normal(2, W, *q.shape[1:])
    same(lambda f: vmap(vmap(f, in_dims=(0, 0, None)), in_dims=(0, None, 0)), q, k, v[:2])
    value = functools.partial(loss, causal=True)
    same(lambda f: vmap(vmap(grad(value(f), (0, 1, 2)), in_dims=(0, 0, None)), in_dims=(0, None, 0)), q, k, v[:2])


@pytest.mark.parametrize("sinks", [False, True], ids=["into entries", "into heads"])
def test_vmap_of_nothing(sinks: bool) -> None:
    q, k, v = inputs((0, None, None))
    names, rest = (("sinks",), (normal(0, HQ),)) if sinks else ((), ())
    dims = (0, None, None, *(0 for _ in rest))
    out = vmap(lambda *t: loss(forward, *names)(*t), in_dims=dims)(q[:0], k, v, *rest)
    assert out.shape == (0,)
    dq, dk = vmap(grad(loss(forward, *names), (0, 1)), in_dims=dims)(q[:0], k, v, *rest)
    assert (dq.shape, dk.shape) == ((0, B, HQ, NQ, D), (0, B, HK, NK, D))


def test_calls_without_queries_or_keys() -> None:
    for nq, nk in ((0, NK), (NQ, 0), (1, 1)):
        q, k, v = (t[:, :, :, :n] for t, n in zip(inputs((0, 0, 0)), (nq, nk, nk), strict=True))
        same(lambda f: vmap(loss(f)), q, k, v)
        same(lambda f: vmap(grad(loss(f), (0, 1, 2))), q, k, v)


def test_vmap_is_one_call_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what calls with one batch entry share."""
    seen: list[tuple[Any, ...]] = []
    forward_op, backward_op = _ops._forward, _autograd._backward
    monkeypatch.setattr(_ops, "_forward", lambda *t: (seen.append(t), forward_op(*t))[1])
    monkeypatch.setattr(_autograd, "_backward", lambda *t: (seen.append(t), backward_op(*t))[1])
    q, k, v = (t[:, :1] if i == 0 else t[:1] for i, t in enumerate(inputs((0, None, None))))
    mask = normal(1, 1, NQ, NK)
    vmap(lambda q: grad(loss(forward, attn_bias=mask, causal=True))(q, k, v))(q)
    assert len(seen) == 2
    (q_, k_, v_, *_, bias), (_, _, q_b, k_b, v_b, *_) = (t[:10] for t in seen)
    assert q_.shape[0] == q_b.shape[0] == W
    for given, shared in ((k_, k), (k_b, k), (v_, v), (v_b, v)):
        assert given.data_ptr() == shared.data_ptr()
        assert given.shape[0] == W
    assert seen[0][8] is mask or seen[0][8].data_ptr() == mask.data_ptr()


@pytest.mark.parametrize("names", KERNELS, ids=lambda names: names[0])
def test_kernels(names: tuple[str, str]) -> None:
    """Each by name, both orders, with lengths of more than a tile and of less."""
    kernel, backward_kernel = names
    dtype, eps = (torch.float16, 1e-3) if "mma" in kernel else (torch.float32, 1.2e-7)
    q, k, v = normal(2, 1, 2, 70, 16, dtype=dtype), normal(1, 1, 33, 16, seed=1, dtype=dtype), None
    v = normal(2, 1, 1, 33, 16, seed=2, dtype=dtype)
    options = {"kernel": kernel, "backward_kernel": backward_kernel}
    value = functools.partial(loss, causal=True)
    for order in (
        lambda f: vmap(grad(value(f), (0, 1, 2)), in_dims=(0, None, 0)),
        lambda f: grad(lambda *t: vmap(value(f), in_dims=(0, None, 0))(*t).sum(), (0, 1, 2)),
    ):
        same(order, q, k, v, eps=eps, **options)


# ---------------------------------------------------------------------------------------------------- packed sequences


@pytest.mark.parametrize("sinks", [None, 0], ids=["shared sinks", "sinks of each call"])
@pytest.mark.parametrize("bias", [None, 0], ids=["shared bias", "bias of each call"])
def test_packed(sinks: int | None, bias: int | None) -> None:
    """Against a loop, with rows behind the last sequence."""
    q, k, v = normal(W, 10, HQ, D), normal(12, W, HK, D, seed=1), normal(12, HK, DV, seed=2)
    lengths_q, lengths_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 4, 9], [0, 5, 11]))
    logits, biases = normal(W, HQ, seed=3), normal(W, 2, 1, 5, 6, seed=4)

    def attend(q: Tensor, k: Tensor, v: Tensor, kernel: str = "auto", **options: Any) -> Any:
        return forward_varlen(
            q, k, v, lengths_q, lengths_k, 5, 6, kernel=kernel, key_ranges=ranges_, causal="bottom_right", **options
        )

    ranges_ = ranges(1)[:, :1].expand(1, 10, 2)
    dims = (0, 1, None, bias, sinks)
    tensors = [q, k, v, *(t if dim == 0 else t[0] for t, dim in ((biases, bias), (logits, sinks)))]
    value = loss(attend, "attn_bias", "sinks")
    expected_value = loss(functools.partial(attend, kernel="math"), "attn_bias", "sinks")
    everything = tuple(range(5))
    got = vmap(grad(value, everything), in_dims=dims)(*tensors)
    total = grad(lambda *t: vmap(value, in_dims=dims)(*t).sum(), everything)(*tensors)
    for i in range(W):
        one = double(tuple(t if dim is None else t.select(dim, i) for t, dim in zip(tensors, dims, strict=True)))
        expected = grad(expected_value, everything)(*one)
        close(tuple(t[i] for t in got), expected)
        for t, e, dim in zip(total, expected, dims, strict=True):
            if dim is not None:
                close(t.select(dim, i), e)


def test_mapped_lengths_are_refused() -> None:
    q, k = normal(W, 10, HQ, D), normal(10, HK, D)
    lengths = torch.tensor([[0, 4, 9]] * W, dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q, cu_seqlens_k, seqused_k: got lengths over which vmap maps"):
        vmap(lambda q, n: forward_varlen(q, k, k, n, n, 5, 5))(q, lengths)


# ------------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("sinks", [False, True], ids=["into entries", "into heads"])
def test_dropout_of_mapped_calls_differs(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is that of the one call, in the gradients too."""
    states: list[Tensor] = []
    op = _ops._forward
    monkeypatch.setattr(_ops, "_forward", lambda *t: (states.append(t[13]), op(*t))[1])
    q, k, v = torch.zeros(W, B, HQ, NQ, D), torch.zeros(B, HQ, NK, D), torch.eye(NK).expand(B, HQ, NK, NK)
    logits = torch.full((W, HQ), -math.inf)

    def value(q: Tensor, v: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        out = forward(q, k, v, dropout_p=0.5, sinks=logits if sinks else None)
        return out.sum(), out

    dv, out = vmap(grad(value, 1, has_aux=True), in_dims=(0, None, 0), randomness="different")(q, v, logits)
    assert len(states) == 1
    assert states[0].shape == (2,)
    entries, heads = (B, W * HQ) if sinks else (W * B, HQ)
    kept = flash_wmma.dropout_mask(states[0], 0.5, entries, heads, NQ, NK)
    kept = kept.unflatten(1, (W, HQ)).movedim(1, 0) if sinks else kept.unflatten(0, (W, B))
    close(out, kept.double() * 2 / NK)
    close(dv[..., 0], kept.double().sum(3) * 2 / NK)
    assert not torch.equal(kept[0], kept[1])


def test_dropout_that_does_not_become_one_call_is_refused() -> None:
    q, k, v = inputs((0, 0, 0))
    for randomness, error, message in (
        ("error", RuntimeError, "randomness"),
        ("same", ValueError, "dropout_p: got 0.5"),
    ):
        with pytest.raises(error, match=message):
            vmap(functools.partial(forward, dropout_p=0.5), randomness=randomness)(q, k, v)
    state = torch.tensor([[1, 2]] * W)
    for states, dim, message in ((state, 0, "rng_state: got a tensor over"), (state[0], None, "dropout_p: got 0.5")):
        with pytest.raises(ValueError, match=message):
            vmap(
                lambda q, k, v, state: forward(q, k, v, dropout_p=0.5, rng_state=state),
                in_dims=(0, 0, 0, dim),
                randomness="different",
            )(q, k, v, states)
    same(lambda f: vmap(f, randomness="same"), q, k, v, dropout_p=0.0)


# ---------------------------------------------------------------------------------------------------- torch's machinery


def test_compile() -> None:
    """As without, and the gradient of a mapped call too, which torch.compile itself would lose."""
    torch._dynamo.reset()
    q, k, v = inputs((0, 0, 0))
    value = loss(forward, causal=True)

    def every(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (
            vmap(forward)(q, k, v),
            vmap(grad(value))(q, k, v),
            grad(lambda *t: vmap(value)(*t).sum())(q, k, v),
        )

    compiled = torch.compile(every, fullgraph=True, backend="aot_eager")
    close(compiled(q, k, v), every(q, k, v))


def test_gradient_of_slopes_is_refused() -> None:
    """Under vmap too, where a tensor does not say that it requires one."""
    q, k, v = inputs((0, None, None))
    value = loss(forward, "alibi_slopes")
    with pytest.raises(NotImplementedError, match="alibi_slopes: got a tensor that requires grad"):
        grad(lambda s: vmap(value, in_dims=(0, None, None, None))(q, k, v, s).sum())(torch.rand(HQ))


def test_errors_name_what_one_mapped_call_was_given() -> None:
    q, k, v = inputs((0, 0, 0))
    with pytest.raises(ValueError, match=r"k.shape: got \(2, 2, 13, 7\), allowed: the head dim of q, 8, last"):
        vmap(forward)(q, k[..., :7], v)
