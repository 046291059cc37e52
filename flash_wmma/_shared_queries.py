"""Backward in several calls with the same queries and different keys, whose dq is one sum.

Each call of backward alone finds the D of its queries, clears a buffer in float32 for dq, and rounds it; then the dq of
the calls are added up. Here the calls have one buffer, and D is found once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._call import Call
from ._errors import raise_library_error
from ._library import ops

UNIT = 64
"""Of queries at which a call can begin and end."""


def _run(op: Any, *arguments: Any) -> Any:
    try:
        return op(*arguments)
    except (RuntimeError, ValueError) as error:
        raise_library_error(error)
        raise


class SharedQueries:
    """Queries of dense calls with a scale, the same for all, and a band."""

    def __init__(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> None:
        """``out`` and ``lse`` are those of all keys; ``k``, ``v`` and the call those of one of the calls.

        Which kernel computes is the call's choice.
        """
        self._all, self._kernels = (q, k, v), (call.backward_kernel, call.kernel_name)
        self._memory = _run(
            ops.backward_begin.default, dout, dlse, q, k, v, out, lse, call.scale, *call.band, *self._kernels
        )
        self.offered = self._memory.numel() > 0
        """Whether the kernel can share queries, and is not faster without. Else there is nothing to add to."""

    def add(self, first: int, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """(dk, dv) of a call, whose queries are those from ``first`` on, a multiple of :data:`UNIT`. So is their end,
        unless it is that of all."""
        place = first, self._all[0].shape[2]
        given = self._memory, *place, dout, q, k, v, call.scale, *call.band, *self._kernels
        return _run(ops.backward_add.default, *given)  # type: ignore[no-any-return]

    def end(self, call: Call) -> Tensor:
        """dq of all calls."""
        given = self._memory, *self._all, call.scale, *call.band, *self._kernels
        return _run(ops.backward_end.default, *given)  # type: ignore[no-any-return]
