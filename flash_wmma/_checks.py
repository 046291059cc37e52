"""What arguments may be, and the words that say what was wrong with them.

Every message names the argument, what it was, and what is allowed: ``TypeError`` where a type is wrong, ``ValueError``
where a value is, ``NotImplementedError`` where the value is right but no kernel does it yet.

The eager path calls the op first and comes here only after it failed, so that a good call pays nothing; the fake
kernels, which do not know better, always come here.
"""

from __future__ import annotations

from typing import Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

INTERRUPTED = "emulator: interrupted"
"""What the library says when ``KeyboardInterrupt`` was raised while it asked Python for a kernel."""

Causal = bool | Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]


def refuse(argument: str, got: object, allowed: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{argument}: got {got}, allowed: {allowed}")


def _shape(t: Tensor) -> str:
    return "(" + ", ".join(map(str, t.shape)) + ")"


def tensors(**named: object) -> None:
    """Each is a dense tensor."""
    for name, t in named.items():
        if not isinstance(t, Tensor):
            refuse(name, type(t).__name__, "torch.Tensor", TypeError)
        if t.is_nested:
            refuse(name, "a nested tensor", "a dense tensor (B, H, N, d)")
        if t.layout is not torch.strided:
            refuse(f"{name}.layout", t.layout, "torch.strided")


def inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q (B, Hq, Nq, d), k (B, Hk, Nk, d), v (B, Hk, Nk, d_v), of one dtype, on one device, Hq a multiple of Hk."""
    tensors(q=q, k=k, v=v)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            refuse(f"{name}.shape", _shape(t), "(B, H, N, d)")
    if q.dtype not in DTYPES:
        refuse("q.dtype", q.dtype, ", ".join(map(str, DTYPES)))
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            refuse(f"{name}.dtype", t.dtype, f"q's, {q.dtype}")
        if t.device != q.device:
            refuse(f"{name}.device", t.device, f"q's, {q.device}")
        if t.shape[0] != q.shape[0]:
            refuse(f"{name}.shape", _shape(t), f"the batch of q, {q.shape[0]}, first")
    if k.shape[3] != q.shape[3]:
        refuse("k.shape", _shape(k), f"the head dim of q, {q.shape[3]}, last")
    if v.shape[1] != k.shape[1] or v.shape[2] != k.shape[2]:
        refuse("v.shape", _shape(v), f"(B, H, N, d_v) with the heads and the length of k, {_shape(k)}")
    if (k.shape[1] == 0 and q.shape[1] != 0) or (k.shape[1] != 0 and q.shape[1] % k.shape[1] != 0):
        refuse("q.shape", _shape(q), f"a number of heads that is a multiple of k's, {k.shape[1]}")


def no_gradient(q: Tensor, k: Tensor, v: Tensor) -> None:
    """No input requires grad: forward alone is built."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.requires_grad:
            raise NotImplementedError(
                f"{name}: got a tensor that requires grad, but backward is not built yet; "
                f"call under torch.no_grad() or pass {name}.detach()"
            )


def no_tangent(q: Tensor, k: Tensor, v: Tensor) -> None:
    """No input carries a forward-mode tangent."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if forward_ad.unpack_dual(t).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(
                f"{name}: got a dual tensor, but forward-mode differentiation is not built; "
                f"pass torch.autograd.forward_ad.unpack_dual({name}).primal"
            )


def band(causal: object, window: object) -> None:
    """The two arguments that bound the visible keys."""
    allowed = "False, True, 'top_left', 'bottom_right'"
    if not isinstance(causal, int | float | str):
        refuse("causal", repr(causal), allowed, TypeError)
    if causal not in (False, True, "top_left", "bottom_right"):
        refuse("causal", repr(causal), allowed)
    allowed = "None or a pair (left, right) of int or None"
    if window is None:
        return
    if not isinstance(window, tuple | list):
        refuse("window", repr(window), allowed, TypeError)
    if len(window) != 2:
        refuse("window", repr(window), allowed)
    for bound in window:
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | torch.SymInt)):
            refuse("window", repr(window), allowed, TypeError)
        if bound is not None and not -(2**63) <= bound < 2**63:
            refuse("window", repr(window), allowed + ", below 2**63")


def not_yet(attn_bias: object, alibi_slopes: object, softcap: object) -> None:
    """Arguments that the op already carries and that no kernel implements."""
    if not isinstance(softcap, int | float):
        refuse("softcap", repr(softcap), "a float", TypeError)
    for name, given in (
        ("attn_bias", attn_bias is not None),
        ("alibi_slopes", alibi_slopes is not None),
        ("softcap", softcap != 0),
    ):
        if given:
            raise NotImplementedError(f"{name}: no kernel implements it yet")


def forward(q: object, k: object, v: object, causal: object, scale: object, window: object, kernel: object) -> None:
    """All that :func:`flash_wmma.forward` can be given wrong, but for what only the choice of a kernel knows."""
    tensors(q=q, k=k, v=v)
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    inputs(q, k, v)
    if q.device.type not in ("cpu", "cuda", "meta"):
        refuse("q.device", q.device, "cpu, cuda")
    band(causal, window)
    if scale is not None and not isinstance(scale, int | float | torch.SymFloat):
        refuse("scale", repr(scale), "None or a float", TypeError)
    if not isinstance(kernel, str):
        refuse("kernel", repr(kernel), "'auto' or a name of flash_wmma.kernels()", TypeError)


def library(error: Exception) -> None:
    """What the library said, whatever torch has made of it: its refusal to choose a kernel is a ``ValueError``, what
    the emulator found an ``EmulatorError``."""
    message = str(error)
    if message == INTERRUPTED:
        raise KeyboardInterrupt from None
    if message.startswith("kernel"):
        raise ValueError(message) from None
    if message.startswith("emulator: "):
        from .emulator import EmulatorError

        raise EmulatorError(message) from None
