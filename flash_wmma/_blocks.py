"""Derivatives of attention that no kernel computes, in plain torch ops, a block of queries at a time.

A block's scores are stored, so that memory grows with the number of keys and not with its square. Everything is
computed in float32. What belongs to queries is joined; what they share (the gradients of keys, of masks that are
broadcast over queries) is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _math
from ._call import Call

MAX_SCORES = 1 << 22
"""About so many scores, over all heads and batch entries, are stored at a time."""

Tensors = Sequence[Tensor | None]
Function = Callable[..., tuple[Tensor, ...]]
"""Of a range of queries and, for each tensor, what belongs to it."""


class Blocks:
    """A call with dense tensors, and what its functions are differentiated in: the arguments q, k, v, attn_bias,
    alibi_slopes and sinks, and for the gradients dout and dlse before them."""

    def __init__(self, arguments: Tensors, call: Call) -> None:
        if call.lengths is not None:
            raise NotImplementedError(
                'this derivative of packed sequences is not built: kernel="math" is plain torch ops, which have every '
                "derivative"
            )
        q, k, _, bias, *_ = arguments
        assert q is not None and k is not None
        self.call = call
        self.queries = q.shape[2]
        self.block = max(MAX_SCORES // max(q.shape[0] * q.shape[1] * k.shape[2], 1), 1)
        self.added = bias is not None and bias.is_floating_point()
        """Whether attn_bias is added to the scores, and so has derivatives."""
        per_query = bias is not None and bias.dim() >= 2 and bias.shape[-2] != 1
        self.bias_dim = -2 if per_query else None
        self.dims = (2, None, None, self.bias_dim, None, None)
        """The dimension of queries in each argument; None: they share it."""

    def attend(self, queries: range, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        q, k, v, bias, slopes, sinks = arguments
        ranges = self.call.key_ranges
        if ranges is not None:
            ranges = ranges.narrow(2, queries.start, len(queries))
        call = self.call._replace(attn_bias=bias, alibi_slopes=slopes, sinks=sinks, key_ranges=ranges)
        return _math.dense(q, k, v, call, queries, self.queries)

    def gradients(self, queries: range, dout: Tensor, dlse: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Of q, k, v and, if it is added, attn_bias."""
        count = 4 if self.added else 3

        def attend(*some: Tensor) -> tuple[Tensor, Tensor]:
            return self.attend(queries, *some, *arguments[count:])

        return torch.func.vjp(attend, *arguments[:count])[1]((dout, dlse))  # type: ignore[no-any-return]

    def jvp(self, function: Function, tensors: Tensors, tangents: Tensors, dims: Any, results: Any) -> list[Tensor]:
        """The tangents of a function's results. ``dims``: of queries, in the tensors, and in the ``results``."""
        moving = [i for i, t in enumerate(tangents) if t is not None] or [0]

        def block(queries: range, *given: Tensor) -> tuple[Tensor, ...]:
            held, moved = list(given[: len(dims)]), given[len(dims) :]

            def of_moving(*some: Tensor) -> tuple[Tensor, ...]:
                return function(queries, *_with(held, moving, some))

            # Not torch.func.jvp, which does not run where the caller has entered a level of torch.autograd.forward_ad.
            # The gradient is linear in those of the results, and its own gradient in these is the tangent.
            made: Any = torch.func.vjp(of_moving, *(held[i] for i in moving))
            return torch.func.vjp(made[1], tuple(map(torch.zeros_like, made[0])))[1](moved)[0]  # type: ignore[no-any-return]

        moved = (torch.zeros_like(tensors[i]) if tangents[i] is None else tangents[i] for i in moving)  # type: ignore[arg-type]
        return self._each(block, [*tensors, *moved], [*dims, *(dims[i] for i in moving)], results)

    def vjp(
        self, function: Function, tensors: Tensors, wanted: Sequence[int], cotangents: Tensors, dims: Any, results: Any
    ) -> list[Tensor]:
        """The gradients of the tensors that are ``wanted``, given those of the function's results."""

        def block(queries: range, *given: Tensor) -> tuple[Tensor, ...]:
            held, of_results = list(given[: len(dims)]), given[len(dims) :]

            def of_wanted(*some: Tensor) -> tuple[Tensor, ...]:
                return function(queries, *_with(held, wanted, some))

            return torch.func.vjp(of_wanted, *(held[i] for i in wanted))[1](of_results)  # type: ignore[no-any-return]

        return self._each(block, [*tensors, *cotangents], [*dims, *results], [dims[i] for i in wanted])

    def _each(self, function: Function, tensors: Tensors, dims: Any, results: Any) -> list[Tensor]:
        """The results of all blocks."""
        wide = [None if t is None else _wide(t) for t in tensors]
        parts: list[list[Tensor]] = [[] for _ in results]
        for first in range(0, max(self.queries, 1), self.block):
            queries = range(first, min(first + self.block, self.queries))
            given = (
                t if t is None or dim is None else t.narrow(dim, first, len(queries))
                for t, dim in zip(wide, dims, strict=True)
            )
            for part, t, dim in zip(parts, function(queries, *given), results, strict=True):
                if dim is None and part:
                    part[0] = part[0] + t
                else:
                    part.append(t)
        return [part[0] if dim is None else torch.cat(part, dim) for part, dim in zip(parts, results, strict=True)]


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32)) if t.is_floating_point() else t


def _with(held: list[Any], places: Sequence[int], values: Sequence[Tensor]) -> list[Any]:
    """``held`` with other values in some places."""
    held = list(held)
    for i, value in zip(places, values, strict=True):
        held[i] = value
    return held
