"""``kernel="math"``: attention written out in plain torch ops.

It stores the score matrix and is slow. In return it has whatever torch's ops have: gradients of gradients,
forward-mode differentiation, ``torch.func``, float64. ``flash_wmma._attention`` calls it with autocast suspended.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._call import Call, Lengths
from ._dropout import part_of_mask


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


def dense(
    q: Tensor, k: Tensor, v: Tensor, call: Call, queries: range, nq: int, first_entry: int = 0
) -> tuple[Tensor, Tensor]:
    """(out, lse) of some ``queries`` of ``nq``: q and the call's tensors have their rows alone. ``first_entry``: what
    dropout's mask counts the batch entries from."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // max(k.shape[1], 1)
    keys, values = (t.to(dtype).repeat_interleave(group, dim=1) for t in (k, v))
    nk = k.shape[2]
    hidden = ~_visible(queries, nq, nk, *call.band, q.device)
    if call.key_ranges is not None:
        key, (first, end) = torch.arange(nk, device=q.device), call.key_ranges[..., None].unbind(-2)
        hidden = hidden | (key < first) | (key >= end)
    scale = 1 / math.sqrt(max(q.shape[3], 1)) if call.scale is None else call.scale
    scores = q.to(dtype) @ keys.transpose(2, 3) * scale
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
    if call.sinks is not None:  # a last key, of which there is no value
        column = call.sinks.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=3)
    # Scores of a query that sees nothing are replaced, so that no derivative of any order meets inf - inf.
    empty = scores.detach().isneginf().all(dim=3, keepdim=True)
    scores = scores.masked_fill(empty, 0)
    weights = scores.softmax(dim=3).masked_fill(empty, 0)[..., :nk]
    if call.dropout_p and call.rng_state is not None:
        entries = range(first_entry, first_entry + q.shape[0])
        kept = part_of_mask(call.rng_state, call.dropout_p, entries, q.shape[1], queries, nk)
        weights = weights.masked_fill(~kept, 0) / (1 - call.dropout_p)
    out = weights @ values
    lse = scores.logsumexp(dim=3).masked_fill(empty[..., 0], -math.inf)
    return out.to(q.dtype), lse.float() if dtype == torch.float32 else lse


def _packed(q: Tensor, k: Tensor, v: Tensor, call: Call, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """One sequence after the other."""
    begins_q, begins_k, seqused_k = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist(), lengths.seqused_k
    outs, lses, done = [], [], 0
    dtype = torch.promote_types(q.dtype, torch.float32)

    def rest(rows: int) -> None:
        outs.append(q.new_zeros(rows, q.shape[1], v.shape[2]))
        sinks = q.new_full((q.shape[1],), -math.inf, dtype=dtype) if call.sinks is None else call.sinks.to(dtype)
        lses.append(sinks[:, None].expand(-1, rows))

    for b in range(len(begins_q) - 1):
        rows, keys = slice(*begins_q[b : b + 2]), slice(*begins_k[b : b + 2])
        if seqused_k is not None:
            keys = slice(keys.start, min(keys.start + max(int(seqused_k[b]), 0), keys.stop))
        rest(rows.start - done)
        done = rows.stop
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
        nq = one.shape[2]
        out, lse = dense(one, its_keys, its_values, its_call, range(nq), nq, b)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    rest(q.shape[0] - done)
    return torch.cat(outs), torch.cat(lses, dim=1)
