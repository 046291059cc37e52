"""Is a timed result right? The float64 reference and the rule by which every result is judged.

The reference is attention in float64 on the very numbers that a kernel multiplies: for float32 inputs on a kernel with
half-precision operands, on ``.half()`` of them. The error of a head is its largest absolute error divided by the
largest absolute value of the reference in that head, and a result is right if no head's error exceeds twice that of
plain PyTorch attention (matmul, softmax, matmul) in the multiplied type, plus 1e-5.

Everything works in chunks, so that the scores of a long sequence never exist as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

CHUNK_BYTES = 256 * 2**20
ALLCLOSE_ATOL = 1e-3
TOLERANCE = {"fp16": 1e-2, "bf16": 6e-2, "fp32": 1e-2}
"""How far two right results may be apart, relative to the largest element; fp32 may have been multiplied as fp16."""


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the reference."""

    error: float  #: largest error, normalised per head
    plain_error: float  #: the same of plain PyTorch attention in the multiplied type
    max_abs_error: float
    allclose: bool  #: torch.allclose(result, reference, atol=1e-3)

    @property
    def limit(self) -> float:
        return 2 * self.plain_error + 1e-5

    @property
    def right(self) -> bool:
        return self.error <= self.limit  # False for NaN


class Judge:
    """Judges results for one set of inputs. References are computed when first needed, one per multiplied type."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None):
        self._inputs = (q, k, v)
        self._causal = causal
        self._scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self._known: dict[torch.dtype, tuple[torch.Tensor, float]] = {}

    def judge(self, result: torch.Tensor, multiplied: torch.dtype) -> Verdict:
        """`result` against attention on the inputs rounded to `multiplied`."""
        reference, plain_error = self._reference(multiplied)
        if result.shape != reference.shape:
            return Verdict(math.inf, plain_error, math.inf, False)
        close = torch.allclose(result.double(), reference, atol=ALLCLOSE_ATOL)
        absolute = (result.double() - reference).abs().amax().item() if result.numel() else 0.0
        return Verdict(normalized_error(result, reference), plain_error, absolute, close)

    def _reference(self, multiplied: torch.dtype) -> tuple[torch.Tensor, float]:
        if multiplied not in self._known:
            q, k, v = (t.to(multiplied) for t in self._inputs)
            exact = attention(q.double(), k.double(), v.double(), self._causal, self._scale)
            plain = attention(q, k, v, self._causal, self._scale)
            self._known[multiplied] = (exact, normalized_error(plain, exact))
        return self._known[multiplied]


def normalized_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest over (batch, head) of max |result - reference| / max |reference|. NaN if there is any."""
    if reference.numel() == 0:
        return 0.0
    error = (result.double() - reference).abs().amax(dim=(-2, -1))
    return (error / reference.abs().amax(dim=(-2, -1)).clamp_min(1e-30)).amax().item()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """Plain attention in the inputs' type, in chunks of rows. Causal is aligned to the first key, as in SDPA."""
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    # CPU matmuls of half types are very slow: multiply in float32 and round, as GPUs do.
    wide = torch.float32 if q.device.type == "cpu" and q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    keys = torch.arange(k.shape[-2], device=q.device)
    flat_q, flat_k, flat_v, flat_out = (t.flatten(0, 1) for t in (q, k, v, out))
    for heads, rows in _chunks(flat_q.shape[0], q.shape[-2], k.shape[-2], torch.finfo(wide).bits // 8):
        scores = (flat_q[heads, rows].to(wide) @ flat_k[heads].to(wide).mT).to(q.dtype) * scale
        if causal:
            queries = torch.arange(rows.start, rows.stop, device=q.device)
            scores.masked_fill_(keys > queries[:, None], -math.inf)
        weights = scores.softmax(-1)
        flat_out[heads, rows] = (weights.to(wide) @ flat_v[heads].to(wide)).to(q.dtype)
    return out


def _chunks(heads: int, queries: int, keys: int, itemsize: int) -> Iterator[tuple[slice, slice]]:
    """Slices of heads and of query rows whose scores take at most CHUNK_BYTES."""
    rows_at_once = max(1, CHUNK_BYTES // max(1, keys * itemsize))
    heads_at_once = max(1, rows_at_once // max(1, queries))
    for first_head in range(0, heads, heads_at_once):
        for first_row in range(0, queries, rows_at_once):
            last_row = min(first_row + rows_at_once, queries)
            yield slice(first_head, first_head + heads_at_once), slice(first_row, last_row)
