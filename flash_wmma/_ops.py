"""The ops, given a call: ``flash_wmma::forward`` and ``flash_wmma::forward_varlen``."""

from __future__ import annotations

from torch import Tensor

from ._call import PLAIN, Call
from ._library import ops

_forward = ops.forward.default
_forward_varlen = ops.forward_varlen.default


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse), not recorded for gradients."""
    if call is PLAIN:
        return _forward(q, k, v)  # type: ignore[no-any-return]
    op = _forward if call.lengths is None else _forward_varlen
    return op(q, k, v, *call.forward_arguments())  # type: ignore[no-any-return]
