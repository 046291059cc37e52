"""Which attention weights dropout keeps, in plain torch ops: csrc/dropout.h, number for number."""

from __future__ import annotations

import torch
from torch import Tensor

from ._errors import refuse

_LOW = 0xFFFFFFFF


def draw(device: torch.device) -> Tensor:
    """A new state, from torch's generator of the device: two numbers of 64 bits."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)


def probability(**named: object) -> None:
    """Each must be from 0 to 1, and not 1 itself."""
    allowed = "a float from 0 to 1, not 1 itself"
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat):
            refuse(name, repr(value), allowed, TypeError)
        if not 0 <= value < 1:
            refuse(name, value, allowed)


def check_state(rng_state: Tensor | None, device: torch.device) -> None:
    """(2,), int64."""
    if rng_state is None:
        return
    if not isinstance(rng_state, Tensor):
        refuse("rng_state", type(rng_state).__name__, "None or a torch.Tensor", TypeError)
    if rng_state.dtype != torch.int64:
        refuse("rng_state.dtype", rng_state.dtype, "torch.int64")
    if rng_state.device != device:
        refuse("rng_state.device", rng_state.device, f"q's, {device}")
    if rng_state.shape != (2,):
        refuse("rng_state.shape", tuple(rng_state.shape), "(2,)")


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of the product of 32-bit numbers, which int64 does not hold."""
    lower, upper = (x & 0xFFFF) * factor, (x >> 16) * factor
    return (upper + (lower >> 16)) >> 16, (lower + ((upper & 0xFFFF) << 16)) & _LOW


def _philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32 with 7 rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(7):
        x_high, x_low = _product(c0, 0xD2511F53)
        y_high, y_low = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = y_high ^ c1 ^ k0, y_low, x_high ^ c3 ^ k1, x_low
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def _below(number: Tensor, limit: int) -> Tensor:
    """Whether the lower 16 bits, read as a half, are below the half whose bits have this order. A NaN is not."""
    size = number & 0x7FFF
    return (size <= 0x7C00) & (torch.where((number & 0x8000) != 0, -size, size) < limit)


def dropout_mask(rng_state: Tensor, dropout_p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The weights that a call with these arguments keeps: (batch, heads, seqlen_q, seqlen_k), bool.

    It is a pure function of the state, the batch entry (of packed sequences: the sequence), the query head, the query
    and the key, whichever kernel runs and however the call is split. Kept weights are multiplied by
    1 / (1 - dropout_p).

    Raises:
        TypeError, ValueError: rng_state or dropout_p.
    """
    probability(dropout_p=dropout_p)
    check_state(rng_state, rng_state.device if isinstance(rng_state, Tensor) else torch.device("cpu"))
    return part_of_mask(rng_state, dropout_p, range(batch), range(heads), range(seqlen_q), range(seqlen_k))


def part_of_mask(
    rng_state: Tensor, dropout_p: float, entries: range, heads: range, queries: range, keys: range
) -> Tensor:
    """The part of :func:`dropout_mask` that belongs to these batch entries, query heads, queries and keys."""

    def numbers(dim: int, n: range) -> Tensor:
        return torch.arange(n.start, n.stop, device=rng_state.device).view(*(-1 if i == dim else 1 for i in range(4)))

    entry, head, query, key = map(numbers, range(4), (entries, heads, queries, keys))
    of_keys, of_queries = key // 16 * 4 + key % 8 // 2, query // 16 * 8 + query % 8
    words = _philox((head, of_queries, entry, of_keys), rng_state[0] ^ rng_state[1] * (0x9E3779B97F4A7C15 - 2**64))
    half = key // 8 % 2 * 2 + query // 8 % 2
    word = torch.where(half < 2, torch.where(half == 0, words[0], words[1]), torch.where(half == 2, words[2], words[3]))
    dropped = min(int(float(torch.tensor(dropout_p)) * 65536 + 0.5), 65535)
    keeps_below = dropped > 0x8000
    below = 65536 - dropped if keeps_below else dropped
    limit = below - 0x7C00 if below <= 0x7C00 else below - 0x7C01
    return _below(word >> (key % 2 * 16), limit) == keeps_below
