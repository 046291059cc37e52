"""The ops under ``torch.autocast``: q, k and v become autocast's dtype, as those of torch's own attention do.

Not ``torch.library.register_autocast``: it would cast the ALiBi slopes and a float32 bias as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ._call import Call
from ._checks import DTYPES
from ._library import NAMESPACE, ops

_HALF = (torch.float16, torch.bfloat16)
_library = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]


def _half(x: Any, dtype: torch.dtype) -> Any:
    """A half-precision bias becomes the inputs' new dtype."""
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in _HALF else x


def enabled(device: torch.device) -> bool:
    """Whether autocast is on for that device."""
    return device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)


def suspended(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which torch's ops compute in their inputs' dtypes."""
    return torch.autocast(device.type, enabled=False) if enabled(device) else nullcontext()


def cast(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Call]:
    """The differentiable inputs as the ops will see them: autograd must save the cast tensors."""
    if not enabled(q.device):
        return q, k, v, call
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (t.to(dtype) if t.dtype in DTYPES else t for t in (q, k, v))
    if call.attn_bias is not None:
        call = call._replace(attn_bias=_half(call.attn_bias, dtype))
    return q, k, v, call


def _register(name: str, device: str, key: str) -> None:
    op = getattr(ops, name).default
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)

        with torch._C._ExcludeDispatchKeyGuard(keyset):
            return op(
                *(t.to(dtype) if t.dtype in DTYPES else t for t in (q, k, v)),
                *(_half(x, dtype) for x in rest),
                **{name: _half(x, dtype) for name, x in options.items()},
            )

    op.py_impl(getattr(torch._C.DispatchKey, key))(forward)
    _library.impl(name, forward, key)  # type: ignore[no-untyped-call]


for _name in ("forward", "forward_with_statistics", "forward_varlen"):
    _register(_name, "cpu", "AutocastCPU")
    _register(_name, "cuda", "AutocastCUDA")
