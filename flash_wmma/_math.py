"""``kernel="math"``: attention written out in plain torch ops.

It stores the score matrix and is slow. In return it has whatever torch's ops have: gradients of gradients,
forward-mode differentiation, ``torch.func``, float64. ``flash_wmma._attention`` calls it with autocast suspended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ._call import Call, Lengths
from ._dropout import part_of_mask

NAMES = ("max", "entropy", "column_sum")
"""What ``return_aux`` may name, in the order in which the ops return it."""


def _visible(
    queries: range, nq: int, nk: int, left: int, right: int, bottom_right: bool, device: torch.device
) -> Tensor:
    """(queries, Nk): true where the band lets the query see the key."""
    place = torch.arange(queries.start, queries.stop, device=device)[:, None] + (nk - nq if bottom_right else 0)
    key = torch.arange(nk, device=device)
    seen = torch.ones(len(queries), nk, dtype=torch.bool, device=device)
    if left >= 0:
        seen = seen & (key >= place - left)
    if right >= 0:
        seen = seen & (key <= place + right)
    return seen


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call, computed in float32 (float64 for float64 inputs). With packed sequences it waits for the
    device."""
    if call.lengths is None:
        return dense(q, k, v, call, range(q.shape[2]), q.shape[2])
    return _packed(q, k, v, call, call.lengths)


def _scores(q: Tensor, k: Tensor, call: Call, queries: range, nq: int) -> tuple[Tensor, Tensor]:
    """The scores of some ``queries`` of ``nq``, with sinks those of a last key too, of which there is no value; and
    which rows see nothing, (B, Hq, queries, 1). Their scores are 0, so that no derivative of any order meets inf - inf.
    -inf: the key is hidden. q and the call's tensors have the rows of ``queries`` alone."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // max(k.shape[1], 1)
    nk = k.shape[2]
    hidden = ~_visible(queries, nq, nk, *call.band, q.device)
    if call.key_ranges is not None:
        key, (first, end) = torch.arange(nk, device=q.device), call.key_ranges[..., None].unbind(-2)
        hidden = hidden | (key < first) | (key >= end)
    scale = 1 / math.sqrt(max(q.shape[3], 1)) if call.scale is None else call.scale
    scores = q.to(dtype) @ k.to(dtype).repeat_interleave(group, dim=1).transpose(2, 3) * scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.attn_bias is not None and call.attn_bias.dtype == torch.bool:
        hidden = hidden | ~call.attn_bias
    elif call.attn_bias is not None:
        scores = scores + call.attn_bias.to(dtype)
    if call.alibi_slopes is not None:
        place = torch.arange(queries.start, queries.stop, device=q.device)[:, None] + nk - nq
        distance = (place - torch.arange(nk, device=q.device)).abs()
        scores = scores - call.alibi_slopes.to(dtype)[..., None, None] * distance
    scores = scores.masked_fill(hidden, -math.inf)
    if call.sinks is not None:
        column = call.sinks.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=3)
    empty = scores.detach().isneginf().all(dim=3, keepdim=True)
    return scores.masked_fill(empty, 0), empty


def dense(
    q: Tensor, k: Tensor, v: Tensor, call: Call, queries: range, nq: int, first_entry: int = 0
) -> tuple[Tensor, Tensor]:
    """(out, lse) of some ``queries`` of ``nq``: q and the call's tensors have their rows alone. ``first_entry``: what
    dropout's mask counts the batch entries from."""
    scores, empty = _scores(q, k, call, queries, nq)
    nk = k.shape[2]
    weights = scores.softmax(dim=3).masked_fill(empty, 0)[..., :nk]
    if call.dropout_p and call.rng_state is not None:
        origin = [0] * 4 if call.dropout_origin is None else call.dropout_origin.tolist()
        firsts = first_entry, 0, queries.start, 0
        sizes = q.shape[0], q.shape[1], len(queries), nk
        begins = [at + first for at, first in zip(origin, firsts, strict=True)]
        part = (range(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))
        kept = part_of_mask(call.rng_state, call.dropout_p, *part)
        weights = weights.masked_fill(~kept, 0) / (1 - call.dropout_p)
    out = weights @ v.to(weights.dtype).repeat_interleave(q.shape[1] // max(k.shape[1], 1), dim=1)
    lse = scores.logsumexp(dim=3).masked_fill(empty[..., 0], -math.inf)
    return out.to(q.dtype), lse.float() if weights.dtype == torch.float32 else lse


def _dense_statistics(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Of the weights without dropout: each row's largest score, its entropy, and the sums over the queries."""
    nq, nk = q.shape[2], k.shape[2]
    scores, empty = _scores(q, k, call, range(nq), nq)
    log_weights, scores = scores.log_softmax(dim=3)[..., :nk], scores[..., :nk]
    hidden = scores.detach().isneginf() | empty
    weights, log_weights = log_weights.exp().masked_fill(hidden, 0), log_weights.masked_fill(hidden, 0)
    lowest = scores.new_full((*scores.shape[:3], 1), -math.inf)
    row_max = torch.cat((scores.masked_fill(hidden, -math.inf), lowest), dim=3).amax(dim=3)
    return row_max, -(weights * log_weights).sum(dim=3), weights.sum(dim=2)


def statistics(q: Tensor, k: Tensor, v: Tensor, call: Call, names: tuple[str, ...]) -> dict[str, Tensor]:
    """What ``return_aux`` names. With packed sequences it waits for the device."""
    if call.lengths is None:
        found = _dense_statistics(q, k, call)
    else:
        dtype = torch.promote_types(q.dtype, torch.float32)
        of_rows, heads = (q.shape[1], q.shape[0]), q.shape[1]
        row_max, entropy = q.new_full(of_rows, -math.inf, dtype=dtype), q.new_zeros(of_rows, dtype=dtype)
        column_sum = q.new_zeros((heads, k.shape[0]), dtype=dtype)
        for rows, keys, one, its_keys, _, its_call in _sequences(q, k, v, call, call.lengths):
            its = [t[0] for t in _dense_statistics(one, its_keys, its_call)]
            row_max, entropy = (
                torch.cat((all_rows[:, : rows.start], part, all_rows[:, rows.stop :]), dim=1)
                for all_rows, part in zip((row_max, entropy), its[:2], strict=True)
            )
            column_sum = torch.cat((column_sum[:, : keys.start], its[2], column_sum[:, keys.stop :]), dim=1)
        found = row_max, entropy, column_sum
    wide = q.dtype == torch.float64
    return {name: t if wide else t.float() for name, t in zip(NAMES, found, strict=True) if name in names}


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, call: Call, lengths: Lengths
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor, Call]]:
    """Of each packed sequence its rows in q and in k, and q, k, v and call as those of a batch of one."""
    begins_q, begins_k, seqused_k = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist(), lengths.seqused_k
    for b in range(len(begins_q) - 1):
        rows, keys = slice(*begins_q[b : b + 2]), slice(*begins_k[b : b + 2])
        if seqused_k is not None:
            keys = slice(keys.start, min(keys.start + max(int(seqused_k[b]), 0), keys.stop))
        one, its_keys, its_values = (t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys]))
        bias, slopes = call.attn_bias, call.alibi_slopes
        if bias is not None:
            bias = bias[b : b + 1] if bias.dim() == 4 and bias.shape[0] > 1 else bias
            for dim, n in ((-2, one.shape[2]), (-1, its_keys.shape[2])):
                bias = bias.narrow(dim, 0, n) if bias.dim() >= -dim and bias.shape[dim] > 1 else bias
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b : b + 1]
        ranges = None if call.key_ranges is None else call.key_ranges[None, :, rows]
        its_call = call._replace(attn_bias=bias, alibi_slopes=slopes, key_ranges=ranges, lengths=None)
        yield rows, keys, one, its_keys, its_values, its_call


def _packed(q: Tensor, k: Tensor, v: Tensor, call: Call, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """One sequence after the other."""
    outs, lses, done = [], [], 0
    dtype = torch.promote_types(q.dtype, torch.float32)

    def rest(rows: int) -> None:
        outs.append(q.new_zeros(rows, q.shape[1], v.shape[2]))
        sinks = q.new_full((q.shape[1],), -math.inf, dtype=dtype) if call.sinks is None else call.sinks.to(dtype)
        lses.append(sinks[:, None].expand(-1, rows))

    for b, (rows, _, one, its_keys, its_values, its_call) in enumerate(_sequences(q, k, v, call, lengths)):
        rest(rows.start - done)
        done = rows.stop
        nq = one.shape[2]
        out, lse = dense(one, its_keys, its_values, its_call, range(nq), nq, b)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    rest(q.shape[0] - done)
    return torch.cat(outs), torch.cat(lses, dim=1)
