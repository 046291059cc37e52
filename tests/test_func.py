"""Transforms of attention in any order, against plain torch ops in float64 under the same: torch.func's vmap, grad, jvp
and what is made of them, torch.autograd.forward_ad, gradients of gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from reference import Mask, Modification, attention
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flash_wmma
from flash_wmma import _autograd, _blocks, _ops, _tangent, forward, forward_varlen
from flash_wmma._call import Call

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


@pytest.mark.parametrize("with_sinks", [False, True], ids=["into entries", "into heads"])
def test_shared_masks_of_one_entry_or_head(with_sinks: bool) -> None:
    """Slopes do not broadcast: one batch entry's, or one head's, are those of each mapped call."""
    q, k, v = normal(W, 1, 1, NQ, D), normal(1, 1, NK, D, seed=1), normal(W, 1, 1, NK, DV, seed=2)
    names = ("sinks",) if with_sinks else ()
    rest = [normal(W, 1, seed=3)] if with_sinks else []
    for slopes in (normal(1, 1, seed=4).abs(), normal(1, seed=4).abs()):
        dims = (0, None, 0, None, *(0 for _ in rest))
        same(lambda f, dims=dims: vmap(loss(f, "alibi_slopes", *names), in_dims=dims), q, k, v, slopes, *rest)


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
    (q_, k_, v_, *_), (_, _, q_b, k_b, v_b, *_) = seen
    assert q_.shape[0] == q_b.shape[0] == W
    for given, shared in ((k_, k), (k_b, k), (v_, v), (v_b, v)):
        assert given.data_ptr() == shared.data_ptr()
        assert given.shape[0] == W
    assert seen[0][8].data_ptr() == mask.data_ptr()


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


AUX = ("max", "entropy", "column_sum")


@pytest.mark.parametrize("mask", MASKS)
def test_vmap_of_return_aux(mask: str) -> None:
    """Each call's are those of the call by itself."""
    name, tensor, dim = MASKS[mask]
    q, k, v = inputs((0, None, 0))

    def one(q: Tensor, v: Tensor, tensor: Tensor) -> tuple[Tensor, ...]:
        out, lse, aux = forward(q, k, v, window=(5, 4), return_lse=True, return_aux=AUX, **{name: tensor})
        assert tuple(aux) == AUX
        return out, lse, *aux.values()

    got = vmap(one, in_dims=(0, 0, dim))(q, v, tensor)
    for i in range(W):
        close(tuple(t[i] for t in got), one(q[i], v[i], tensor if dim is None else tensor.select(dim, i)))


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_mapped_return_aux(packed: bool) -> None:
    """Outside of vmap, of tensors that each call has and of those that all share; some names alone."""
    if packed:
        cu_q, cu_k = (torch.tensor(n, dtype=torch.int32) for n in ((0, 4, 9), (0, 9, NK)))
        q, k = normal(W, NQ, HQ, D), normal(NK, HK, D, seed=1)

        def attend(q: Tensor, k: Tensor, **options: Any) -> Any:
            return forward_varlen(q, k, k, cu_q, cu_k, 5, 9, **options)
    else:
        q, k, _ = inputs((0, None, None))

        def attend(q: Tensor, k: Tensor, **options: Any) -> Any:
            return forward(q, k, k, **options)

    leaves = [t.requires_grad_() for t in (q, k, normal(W, HQ, seed=8), normal(HQ, seed=9).abs(), normal(W, NK))]

    def one(q: Tensor, k: Tensor, sinks: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"alibi_slopes": slopes, "sinks": sinks} if packed else {"attn_bias": bias}
        _, aux = attend(q, k, return_aux=("entropy", "column_sum"), **options)
        return aux["entropy"].sin().sum() + aux["column_sum"].square().sum()  # type: ignore[no-any-return]

    total = vmap(one, in_dims=(0, None, 0, None, 0))(*leaves).sum()
    each = sum(one(leaves[0][i], leaves[1], leaves[2][i], leaves[3], leaves[4][i]) for i in range(W))
    wanted = leaves[:4] if packed else [*leaves[:2], leaves[4]]
    assert isinstance(each, Tensor)
    close(torch.autograd.grad(total, wanted), torch.autograd.grad(each, wanted))


def test_nested_vmap_of_return_aux() -> None:
    """And a call in it that nothing is mapped of."""
    q, k, v = normal(2, W, B, HQ, NQ, D), normal(W, B, HK, NK, D), normal(2, B, HK, NK, D)

    def one(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return forward(q, k, v, return_aux=("column_sum",))[1]["column_sum"]

    got = vmap(vmap(one, in_dims=(0, 0, None)), in_dims=(0, None, 0))(q, k, v)
    for i in range(2):
        for j in range(W):
            close(got[i, j], one(q[i, j], k[j], v[i]))
    alone = one(q[0, 0], k[0], v[0])
    close(vmap(lambda x: x * one(q[0, 0], k[0], v[0]))(torch.arange(3.0)), torch.stack((0 * alone, alone, 2 * alone)))


def test_return_aux_under_other_transforms() -> None:
    """A refusal names plain torch ops, which have them."""
    q = normal(W, B, HQ, NQ, D)

    def value(q: Tensor, kernel: str = "auto") -> Tensor:
        return forward(q, q, q, return_aux=("entropy",), kernel=kernel)[1]["entropy"].sum()  # type: ignore[no-any-return]

    for transformed in (
        grad(lambda q: value(q[0])),
        vmap(grad(value)),
        grad(lambda q: vmap(value)(q).sum()),
        lambda q: jvp(value, (q[0],), (q[1],))[1],
        lambda q: jvp(vmap(value), (q,), (q,))[1],
        torch.compile(vmap(value), backend="eager", fullgraph=True),
    ):
        with pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported), match="there is vmap alone"):
            transformed(q)
    vmap(grad(functools.partial(value, kernel="math")))(q)


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


# ------------------------------------------------------------------------------------ forward mode, second derivatives


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (3, 2)},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 1.5},
    "ranges": {"key_ranges": ranges(B, 1)},
    "bias": {"attn_bias": normal(HQ, NQ, NK)},
    "mask": {"attn_bias": normal(NQ, NK) > -0.3},
    "slopes": {"alibi_slopes": normal(HQ).abs()},
    "sinks": {"sinks": normal(HQ)},
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 queries."""
    monkeypatch.setattr(_blocks, "MAX_SCORES", B * HQ * NK * 4)


@pytest.fixture
def only_blocks(monkeypatch: pytest.MonkeyPatch, small_blocks: None) -> None:
    """Tangents by no kernel."""
    monkeypatch.setattr(_tangent, "has_kernels", lambda *_: False)


def moved(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(normal(*t.shape, seed=20 + i, dtype=t.dtype) for i, t in enumerate(tensors))


def tangent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of the arguments, and of as many tangents."""

    def value(*t: Tensor) -> Any:
        half = len(t) // 2
        return jvp(function, t[:half], t[half:])[1]

    return value


def norm(gradients: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    return lambda *t: sum((g * g).sum() for g in gradients(*t))  # type: ignore[return-value]


def compared(transformed: Callable[..., Any], tensors: Sequence[Tensor], eps: float = 1.2e-7, **options: Any) -> None:
    """``transformed(attend)(*tensors)`` with these options and without copies of them in float64 in ours."""
    exact = {name: double((t,))[0] if isinstance(t, Tensor) else t for name, t in options.items()}
    got = transformed(functools.partial(forward, **options))(*tensors)
    close(got, transformed(functools.partial(plain, **exact))(*double(tuple(tensors))), eps)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("by", ["kernels", "blocks"])
def test_jvp(by: str, options: str, request: pytest.FixtureRequest) -> None:
    """Tangents of out and lse, of all inputs and of each."""
    if by == "blocks":
        request.getfixturevalue("only_blocks")
    q, k, v = inputs((None, None, None))
    tensors = [q, k, v, *moved((q, k, v))]
    compared(lambda f: tangent(functools.partial(f, return_lse=True)), tensors, **OPTIONS[options])
    for i in range(3):

        def of_one(f: Callable[..., Any], i: int = i) -> Callable[..., Any]:
            def value(*t: Tensor) -> Any:
                def moving(x: Tensor) -> Any:
                    return f(*t[:i], x, *t[i + 1 : 3], return_lse=True)

                return jvp(moving, (t[i],), (t[3 + i],))[1]

            return value

        compared(of_one, tensors, **OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
def test_second_derivatives(options: str, small_blocks: None) -> None:
    """Forward over reverse, reverse over reverse (of autograd too), reverse over forward."""
    tensors = inputs((None, None, None))
    tangents = moved(tensors)
    of_all = (0, 1, 2)
    compared(lambda f: tangent(grad(loss(f), of_all)), [*tensors, *tangents], 3e-7, **OPTIONS[options])
    compared(lambda f: grad(norm(grad(loss(f), of_all)), of_all), tensors, 5e-7, **OPTIONS[options])
    compared(lambda f: grad(tangent(loss(f)), of_all), [*tensors, *tangents], 5e-7, **OPTIONS[options])

    def twice(f: Callable[..., Any]) -> Callable[..., Any]:
        def value(*t: Tensor) -> tuple[Tensor, ...]:
            leaves = [x.clone().requires_grad_() for x in t]
            first = torch.autograd.grad(loss(f)(*leaves), leaves, create_graph=True)
            return torch.autograd.grad(norm(lambda *g: g)(*first), leaves)

        return value

    compared(twice, tensors, 5e-7, **OPTIONS[options])


@pytest.mark.parametrize(
    "mask", [name for name in MASKS if "shared" in name and "ranges" not in name] + ["bias of all"]
)
def test_moving_masks(mask: str, small_blocks: None) -> None:
    """Masks with tangents and second derivatives of their own."""
    name, tensor, _ = MASKS.get(mask, ("attn_bias", normal(B, HQ, NQ, NK, seed=6), None))
    tensors = [*inputs((None, None, None)), tensor]
    both = [*tensors, *moved(tensors)]
    compared(lambda f: tangent(lambda q, k, v, m: f(q, k, v, return_lse=True, **{name: m})), both)
    wanted = (0, 1, 2) if name == "alibi_slopes" else (0, 1, 2, 3)
    compared(lambda f: tangent(grad(loss(f, name), wanted)), both, 3e-7)
    compared(lambda f: grad(norm(grad(loss(f, name), wanted)), wanted), tensors, 5e-7)


def test_hessians(small_blocks: None) -> None:
    """Every order, vmap about it."""
    q, k, v = (t[:1, :, :3] for t in inputs((None, None, None)))
    for hessian in (
        lambda f: jacfwd(jacrev(f)),
        lambda f: jacrev(jacrev(f)),
        lambda f: jacrev(jacfwd(f)),
        lambda f: jacfwd(jacfwd(f)),
    ):
        compared(lambda f, h=hessian: h(lambda q: loss(f, causal=True)(q, k.to(q.dtype), v.to(q.dtype))), [q], 3e-7)
    compared(lambda f: jacfwd(functools.partial(f, causal=True), (0, 1, 2)), (q, k, v))


def test_vmap_of_tangents(small_blocks: None) -> None:
    """Of Hessian-vector products, and of tangents of which only some are mapped."""
    tensors = inputs((0, 0, 0))
    product = [*tensors, *moved(tensors)]
    compared(lambda f: vmap(tangent(grad(loss(f, causal=True), (0, 1, 2)))), product, 3e-7)
    dims = (0, None, None, 0, None, 0)
    some = [t if dim == 0 else t[0] for t, dim in zip(product, dims, strict=True)]
    compared(lambda f: vmap(tangent(functools.partial(f, causal=True)), in_dims=dims), some)


def test_dual_numbers(small_blocks: None) -> None:
    """torch.autograd.forward_ad without torch.func, and over the gradient."""

    def value(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def duals(*t: Tensor) -> tuple[Tensor, ...]:
            with forward_ad.dual_level():
                inputs = [forward_ad.make_dual(a, b).requires_grad_() for a, b in zip(t[:3], t[3:], strict=True)]
                out = f(*inputs, **options)
                gradients = torch.autograd.grad(out.square().sum(), inputs)
                return tuple(forward_ad.unpack_dual(x).tangent.detach() for x in (out, *gradients))

        return duals

    tensors = inputs((None, None, None))
    for options in ({}, {"softcap": 1.5}):
        compared(lambda f, options=options: value(f, **options), [*tensors, *moved(tensors)], 3e-7)


def test_calls_without_queries_or_keys_have_derivatives() -> None:
    for nq, nk in ((0, NK), (NQ, 0), (1, 1)):
        tensors = [t[:, :, :n] for t, n in zip(inputs((None, None, None)), (nq, nk, nk), strict=True)]
        for options in ({}, {"softcap": 1.5}):
            both = [*tensors, *moved(tensors)]
            compared(lambda f: tangent(functools.partial(f, return_lse=True)), both, **options)
            compared(lambda f: tangent(grad(loss(f), (0, 1, 2))), both, 3e-7, **options)


def test_tangents_under_dropout(small_blocks: None) -> None:
    """The weights that are dropped are those of the state, in second derivatives too."""
    state = torch.tensor([3, 4])
    tensors = inputs((None, None, None))

    def attend(kernel: str) -> Callable[..., Any]:
        return functools.partial(forward, dropout_p=0.4, rng_state=state, kernel=kernel)

    both = [*tensors, *moved(tensors)]
    for transformed in (
        lambda f: tangent(functools.partial(f, return_lse=True)),
        lambda f: tangent(grad(loss(f), (0, 1, 2))),
    ):
        close(transformed(attend("auto"))(*both), transformed(attend("math"))(*double(tuple(both))), 3e-7)


def test_memory_of_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor has the scores of all queries."""
    monkeypatch.setattr(_blocks, "MAX_SCORES", 1 << 12)
    q, k, v = normal(1, 1, 512, 8), normal(1, 1, 512, 8, seed=1), normal(1, 1, 512, 8, seed=2)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for t in tree_leaves(result):
                if isinstance(t, Tensor):
                    largest = max(largest, t.untyped_storage().nbytes() // 4)
            return result

    with Sizes():
        leaves = [t.requires_grad_() for t in (q, k, v)]
        first = torch.autograd.grad(forward(*leaves).square().sum(), leaves, create_graph=True)
        torch.autograd.grad(norm(lambda *g: g)(*first), leaves)
    assert 512 * 8 <= largest < 512 * 512 / 8


def test_packed_tangents() -> None:
    """By kernels; where these have none, the error names the way out."""
    lengths_q, lengths_k = (torch.tensor(t, dtype=torch.int32) for t in ([0, 4, 9], [0, 5, 11]))

    def attend(*t: Tensor, **options: Any) -> Any:
        q, k, v, sinks = t
        return forward_varlen(
            q, k, v, lengths_q, lengths_k, 5, 6, causal="bottom_right", sinks=sinks, return_lse=True, **options
        )

    tensors = [normal(10, HQ, D), normal(12, HK, D, seed=1), normal(12, HK, DV, seed=2), normal(HQ, seed=3)]
    both = (*tensors, *moved(tensors))
    close(tangent(attend)(*both), tangent(functools.partial(attend, kernel="math"))(*double(both)))
    for refused in (tangent(functools.partial(attend, softcap=1.0)), tangent(grad(lambda *t: attend(*t)[0].sum()))):
        with pytest.raises(NotImplementedError, match="this derivative of packed sequences is not built: kernel="):
            refused(*both)


HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
BY_KERNELS = [  # dtype, d, d_v, kernel, backward_kernel, and whether tangents are those kernels'
    (SINGLE, 8, 16, "auto", "auto", True),
    (SINGLE, 256, 256, "cpu", "bwd_cpu", True),
    (SINGLE, 8, 505, "auto", "auto", False),  # 513 columns of k and v
    (SINGLE, 257, 8, "auto", "auto", False),  # 514 columns of k and its tangent
    (SINGLE, 64, 64, "simt", "bwd_simt", True),
    (SINGLE, 64, 64, "simt", "bwd_sm80", False),
    (SINGLE, 64, 64, "mma_sm80", "auto", False),
    (HALF, 256, 256, "mma_sm80", "bwd_sm80", True),
    (HALF, 128, 128, "mma_sm75", "bwd_sm75", True),
    (HALF, 128, 136, "mma_sm75", "bwd_sm75", False),
    (HALF, 136, 64, "wgmma_sm90", "bwd_sm90", False),
    (BF16, 64, 64, "mma_sm80", "bwd_sm80", True),
    (BF16, 64, 64, "mma_sm75", "auto", False),
    (BF16, 64, 64, "auto", "bwd_sm75", False),
    (HALF, 64, 64, "wmma_v3", "auto", False),
]


@pytest.mark.parametrize("row", BY_KERNELS, ids=lambda row: "-".join(map(str, row[:5])))
def test_which_tangents_have_kernels(row: tuple[Any, ...]) -> None:
    dtype, d, d_v, kernel, backward_kernel, expected = row
    q, v = normal(1, 1, 2, d, dtype=dtype), normal(1, 1, 2, d_v, dtype=dtype)
    asked = Call(kernel_name=kernel, backward_kernel=backward_kernel)
    assert _tangent.has_kernels(q, v, [None] * 7, asked) == expected
    for other in (asked._replace(softcap=1.0), asked._replace(dropout_p=0.5)):
        assert not _tangent.has_kernels(q, v, [None] * 7, other)
    for mask in (3, 4):
        assert not _tangent.has_kernels(q, v, [q if i == mask else None for i in range(7)], asked)


def test_tangents_of_wide_heads() -> None:
    tensors = [normal(1, 1, 3, 260), normal(1, 1, 5, 260, seed=1), normal(1, 1, 5, 300, seed=2)]
    compared(lambda f: tangent(functools.partial(f, return_lse=True)), [*tensors, *moved(tensors)])


def errors(got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True)]


@pytest.mark.parametrize(
    ("name", "backward_name", "dtype"),
    [
        ("cpu", "bwd_cpu", SINGLE),
        ("cpu", "bwd_cpu", HALF),
        ("cpu", "bwd_cpu", BF16),
        ("simt", "bwd_simt", SINGLE),
        ("mma_sm80", "bwd_sm80", HALF),
        ("mma_sm80", "bwd_sm80", SINGLE),
    ],
)
def test_tangents_of_kernels(
    name: str, backward_name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most twice as far from float64 as plain torch ops of that dtype. What a kernel would convert takes none."""
    tensors = [normal(1, 2, 70, 16, dtype=dtype), *(normal(1, 1, 33, 16, seed=s, dtype=dtype) for s in (1, 2))]
    both = (*tensors, *moved(tensors))
    called: list[object] = []
    compute = _autograd._backward
    monkeypatch.setattr(_autograd, "_backward", lambda *t: (called.append(t[-2]), compute(*t))[1])

    def transformed(f: Callable[..., Any], **options: Any) -> Any:
        return tangent(functools.partial(f, causal=True, return_lse=True, **options))(*both)

    got = transformed(forward, kernel=name, backward_kernel=backward_name)
    assert called == ([] if name == "mma_sm80" and dtype == SINGLE else [backward_name])
    exact = tangent(functools.partial(plain, causal=True, return_lse=True))(*double(both))
    for ours, theirs in zip(errors(got, exact), errors(transformed(plain), exact), strict=True):
        assert ours <= 2 * theirs + 1e-5


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


def test_errors_name_what_one_mapped_call_was_given() -> None:
    q, k, v = inputs((0, 0, 0))
    with pytest.raises(ValueError, match=r"k.shape: got \(2, 2, 13, 7\), allowed: the head dim of q, 8, last"):
        vmap(forward)(q, k[..., :7], v)


def test_compile_leaves_forward_mode_to_eager_code() -> None:
    torch._dynamo.reset()
    q, k, v = inputs((None, None, None))

    def value(q: Tensor, t: Tensor) -> Tensor:
        return jvp(lambda q: forward(q, k, v), (q,), (t,))[1]  # type: ignore[no-any-return]

    close(torch.compile(value, backend="aot_eager")(q, q), value(q, q))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="forward-mode differentiation is not traced"):
        torch.compile(value, fullgraph=True, backend="aot_eager")(q, q)


@pytest.mark.parametrize("name", ["q", "k", "v", "attn_bias", "alibi_slopes", "sinks"])
def test_recorded_gradient_of_a_mapped_call(name: str) -> None:
    """Autograd's, outside of vmap, where that tensor alone requires a gradient."""
    names = ("q", "k", "v", "attn_bias", "alibi_slopes", "sinks")
    tensors = dict(zip(names, (*inputs((0, 0, 0)), normal(NQ, NK), normal(HQ).abs(), normal(HQ)), strict=True))
    found = []
    for attend, given in ((forward, tensors), (plain, {n: t.double() for n, t in tensors.items()})):
        leaves = given | {name: given[name].detach().requires_grad_()}
        one = loss(attend, *names[3:], causal=True)
        total = vmap(one, in_dims=(0, 0, 0, None, None, None))(*leaves.values()).sum()
        found.append(torch.autograd.grad(total, leaves[name])[0])
    close(*found)


@pytest.mark.parametrize("mapped", [False, True])
def test_gradient_of_slopes(mapped: bool) -> None:
    q, k, v = inputs((0, 0, 0) if mapped else (None, None, None))

    def value(f: Callable[..., Any]) -> Callable[..., Any]:
        one = loss(f, "alibi_slopes", causal=True)
        if not mapped:
            return grad(one, 3)
        return grad(lambda *t: vmap(one, in_dims=(0, 0, 0, None))(*t).sum(), 3)

    compared(value, [q, k, v, normal(HQ).abs()])
