"""The ops under ``torch.autocast``: q, k and v become autocast's dtype, as those of torch's own attention do.

Not ``torch.library.register_autocast``: it would cast the ALiBi slopes and a float32 bias as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._checks import DTYPES
from ._library import ops

_HALF = (torch.float16, torch.bfloat16)
_library = torch.library.Library("flash_wmma", "IMPL")  # type: ignore[no-untyped-call]


def _register(name: str, device: str, key: str) -> None:
    op = getattr(ops, name).default
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)

        def half(x: Any) -> Any:  # a bias in what was the inputs' dtype
            return x.to(dtype) if isinstance(x, Tensor) and x.dtype in _HALF else x

        with torch._C._ExcludeDispatchKeyGuard(keyset):
            return op(
                *(t.to(dtype) if t.dtype in DTYPES else t for t in (q, k, v)),
                *map(half, rest),
                **{name: half(x) for name, x in options.items()},
            )

    op.py_impl(getattr(torch._C.DispatchKey, key))(cast)
    _library.impl(name, cast, key)  # type: ignore[no-untyped-call]


for _name in ("forward", "forward_varlen"):
    _register(_name, "cpu", "AutocastCPU")
    _register(_name, "cuda", "AutocastCUDA")
