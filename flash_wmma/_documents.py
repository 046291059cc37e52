"""The key ranges of documents in packed rows."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from . import _checks
from ._errors import refuse

_DTYPES = (torch.int64, torch.int32)


@overload
def document_ranges(document_ids: Tensor) -> Tensor: ...


@overload
def document_ranges(*, position_ids: Tensor) -> Tensor: ...


def document_ranges(document_ids: Tensor | None = None, *, position_ids: Tensor | None = None) -> Tensor:
    """The ``key_ranges`` of :func:`flash_wmma.forward` for rows of q, k and v that hold several documents, one after
    the other: each query sees its own document. With ``causal=True`` it sees its document up to itself.

    Say where the documents are in one of two ways. Nothing waits for the device, and ``torch.compile`` traces it.

    Args:
        document_ids: (B, N) or (N,), int64 or int32: the document of each place. A document is a run of equal numbers;
            the same number further behind is another document. A negative number is padding, which sees nothing and
            which nothing sees.
        position_ids: (B, N) or (N,), int64 or int32: the position of each place within its document. A document ends
            where a position is not the one before plus 1, as in Hugging Face transformers.

    Returns:
        (B, 1, N, 2), of (N,) (1, 1, N, 2), int32: the first and the last-plus-one place of the document of each place.

    Raises:
        TypeError, ValueError: neither or both are given, or one of a wrong type, dtype or shape.

    >>> flash_wmma.document_ranges(torch.tensor([7, 7, 7, 2, 2, -1]))[0, 0].tolist()
    [[0, 3], [0, 3], [0, 3], [3, 5], [3, 5], [0, 0]]
    """
    if (document_ids is None) == (position_ids is None):
        got = "neither" if document_ids is None else "both"
        refuse("document_ids, position_ids", got, "one of them")
    name, given = ("document_ids", document_ids) if position_ids is None else ("position_ids", position_ids)
    _checks.tensors(**{name: given})
    assert given is not None
    if given.dtype not in _DTYPES:
        refuse(f"{name}.dtype", given.dtype, ", ".join(map(str, _DTYPES)))
    if given.dim() not in (1, 2):
        refuse(f"{name}.shape", tuple(given.shape), "(B, N) or (N,)")
    rows = given if given.dim() == 2 else given[None]
    n = rows.shape[1]
    place = torch.arange(n, device=rows.device).expand(rows.shape)
    ends = rows[:, 1:] != rows[:, :-1] + (0 if position_ids is None else 1)  # before place i + 1
    inner = torch.nn.functional.pad(ends, (1, 0))
    first = (place * inner).cummax(dim=1).values if n else place
    behind = torch.where(torch.nn.functional.pad(ends, (0, 1)), place + 1, n)
    end = behind.flip(1).cummin(dim=1).values.flip(1) if n else place
    ranges = torch.stack((first, end), dim=-1)
    if position_ids is None:
        ranges = ranges.masked_fill((rows < 0)[..., None], 0)
    return ranges[:, None].to(torch.int32)
