"""Faults of attention over several ranks."""

from __future__ import annotations

from .fault import Fault

INIT = "flash_wmma/distributed/__init__.py"
AGREE = "flash_wmma/distributed/_agree.py"
LAYOUT = "flash_wmma/distributed/_layout.py"
PLAN = "flash_wmma/distributed/_plan.py"
RING = "flash_wmma/distributed/_ring.py"
ROWS = "flash_wmma/distributed/_rows.py"
ULYSSES = "flash_wmma/distributed/_ulysses.py"

FAULTS = [
    # ------------------------------------------------------------------------------------------- which rows a rank has
    Fault(
        name="ranks-no-zigzag",
        path=LAYOUT,
        old="at, last = bounds(n, world), 2 * world - 1 - rank\n",
        new="at, last = bounds(n, world), world + rank\n",
        why="causal work is not balanced",
    ),
    Fault(
        name="ranks-chunks-rounded",
        path=LAYOUT,
        old="[c * n // (2 * world) for c in range(2 * world + 1)]",
        new="[min(n, c * -(-n // (2 * world))) for c in range(2 * world + 1)]",
        why="the last ranks have fewer rows than the others by more than two",
    ),
    Fault(
        name="ranks-places-of-the-packed",
        path=LAYOUT,
        old="return numbers(tuple(piece for n in lengths for piece in pieces(n, world, rank)))",
        new="return numbers(rows(lengths, world, rank))",
        why="places of packed rows are counted from the first sequence on",
    ),
    # ------------------------------------------------------------------------------------------------------- the plan
    Fault(
        name="plan-window-untrimmed",
        path=PLAN,
        old="            j0 = max(j0, i0 + shift - band.left)\n",
        new="",
        why="keys before the window travel, and a bound of the band is negative: none",
    ),
    Fault(
        name="plan-trimmed-once",
        path=PLAN,
        old="        if before == (i0, i1, j0, j1):\n            return _Area(*before)\n",
        new="        return _Area(i0, i1, j0, j1)\n",
        why="what one bound cuts off is not cut off by the other",
    ),
    Fault(
        name="plan-bottom-right",
        path=PLAN,
        old="    shift = apart if band.bottom_right else 0\n",
        new="    shift = apart\n",
        why="a band aligned to the first key is aligned to the last one",
    ),
    Fault(
        name="plan-free-bound",
        path=PLAN,
        old="left if left < area.i1 - area.i0 - 1 else -1",
        new="left if left < area.i1 - area.i0 - 2 else -1",
        why="a window that hides one score is dropped",
    ),
    Fault(
        name="plan-causal-joined-with-a-window",
        path=PLAN,
        old="if a.side != PLAIN or a.left >= 0 or c.left >= 0 or a.right < 0",
        new="if a.side != PLAIN or a.right < 0",
        why="windows are joined to one causal call",
        harmless="a window that hides nothing of the part below the diagonals hides nothing of them",
    ),
    Fault(
        name="plan-joined-by-queries-alone",
        path=PLAN,
        old="    if (a.q0, a.q1, a.k1) == (b.q0, b.q1, b.k0):\n",
        new="    if (a.q0, a.q1) == (b.q0, b.q1):\n",
        why="tiles with other keys between them become one",
        harmless="the keys that a query sees follow each other in a message, and tiles are sorted by them",
    ),
    Fault(
        name="plan-alibi-side",
        path=PLAN,
        old="    if farthest <= 0:\n        return [(area, -1)]\n",
        new="    if farthest <= 0:\n        return [(area, 1)]\n",
        why="the distance to later keys has the wrong sign",
    ),
    Fault(
        name="plan-alibi-aligned",
        path=PLAN,
        old="    if j1 - i1 == apart:\n        return [(area, ALIGNED)]\n",
        new="    if j1 - j0 == i1 - i0:\n        return [(area, ALIGNED)]\n",
        why="a rectangle beside the diagonal is taken for one on it",
    ),
    # ------------------------------------------------------------------------------------------------------- the ring
    Fault(
        name="ring-bias-of-the-wrong-key",
        path=RING,
        old="nearest = columns[-1] if job.side == 1 else columns[0]",
        new="nearest = columns[0]",
        why="the term of a key grows with the distance, and fp32 loses what counts",
        survives="short sequences, as the tests have, lose nothing",
    ),
    Fault(
        name="ring-shift-left-out",
        path=RING,
        old="merged.add(job.q, out, lse if shift is None else lse + shift)",
        new="merged.add(job.q, out, lse)",
        why="parts are merged without the queries' term of ALiBi",
    ),
    Fault(
        name="ring-shift-in-backward",
        path=RING,
        old="            of_lse = of_lse if shift is None else of_lse - shift\n",
        new="",
        why="weights are recomputed without the queries' term of ALiBi",
    ),
    Fault(
        name="ring-slopes-of-packed",
        path=RING,
        old="        if per_entry and ring.packed:\n",
        new="        if False:\n",
        why="a job of some sequences takes the slopes of the first ones",
    ),
    Fault(
        name="ring-dlse",
        path=RING,
        old="None if of_dlse is None else padded(of_dlse, more_q, of_dlse.dim() - 1),",
        new="None,",
        why="the gradient of lse is dropped",
    ),
    Fault(
        name="ring-softcap",
        path=RING,
        old="plain = tables is None and call.softcap == 0 and not ring.band.dropout",
        new="plain = tables is None and not ring.band.dropout",
        why="softcap is ignored",
    ),
    Fault(
        name="ring-gradients-of-parts-in-half",
        path=RING,
        old="        total = None if needed.once or not needed.rows else _zeros(k, v, needed.rows, dim)\n",
        new="        total = None if not needed.jobs else _zeros(k, v, needed.rows, dim)\n",
        why="a rank sends fp32 where the other expects its keys' dtype",
    ),
    Fault(
        name="ring-own-keys-forgotten",
        path=RING,
        old="            dk.add(needed.message, total.k)\n            dv.add(needed.message, total.v)\n",
        new="            pass\n",
        why="gradients of a rank's own keys are lost where they are a sum",
    ),
    Fault(
        name="ring-values-of-another-width",
        path=RING,
        old="sizes = [torch.Size(shape).numel() for shape in shapes]",
        new="sizes = [torch.Size(shapes[0]).numel()] * 2",
        why="values are taken for as wide as keys",
    ),
    Fault(
        name="ring-everything-is-sent",
        path=RING,
        old="        sent = self._memory(asked.message) if asked.rows else None\n",
        new="        sent = self._memory(((0, self._k.shape[ring.dim]),)) if asked.rows else None\n",
        why="keys travel that nobody sees, into memory that is too small for them",
    ),
    Fault(
        name="ring-global-ranks",
        path=AGREE,
        old="        return dist.get_global_rank(self.group, rank)\n",
        new="        return rank\n",
        why="ranks of a group are taken for those of all processes",
    ),
    # ----------------------------------------------------------------------------------------------- parts, and sums
    Fault(
        name="merge-hidden-part",
        path=ROWS,
        old="of_all.clamp_min(torch.finfo(torch.float32).min)",
        new="of_all",
        why="a query that sees no key, and has a sink of -inf, is NaN",
    ),
    Fault(
        name="merge-weight-of-the-old",
        path=ROWS,
        old="scaled = old_out.mul_(old_weight)",
        new="scaled = old_out",
        why="the parts before are not weighted",
    ),
    Fault(
        name="merge-lse-of-rows",
        path=ROWS,
        old="            old_lse.copy_(new_lse)\n",
        new="",
        why="lse of a part of the rows stays that of the parts before",
    ),
    Fault(
        name="merge-in-half",
        path=ROWS,
        old="            self._sum = torch.zeros(self._like.shape, dtype=torch.float32,",
        new="            self._sum = torch.zeros(self._like.shape, dtype=self._like.dtype,",
        why="gradients add up in half precision",
        survives="a few parts lose less than the tests allow",
    ),
    Fault(
        name="merge-empty-part",
        path=ROWS,
        old="            lse = torch.full(lse_shape, -torch.inf, device=self._like.device)\n        if sinks",
        new="            lse = torch.zeros(lse_shape, device=self._like.device)\n        if sinks",
        why="a rank that sees no key has lse 0",
    ),
    Fault(
        name="merge-sinks",
        path=ROWS,
        old="out, lse = out * self._weight(_share(lse, with_sinks)), with_sinks",
        new="lse = with_sinks",
        why="sinks take no weight from the keys",
    ),
    Fault(
        name="ring-sinks-dlse",
        path=RING,
        old="_autograd.sinks_gradient(dout, dlse, out,",
        new="_autograd.sinks_gradient(dout, None, out,",
        why="the gradient of sinks lacks that of lse",
    ),
    # ------------------------------------------------------------------------------------------------------- dropout
    Fault(
        name="plan-dropout-joined",
        path=PLAN,
        old="_joined(sorted(tiles), band.dropout)",
        new="_joined(sorted(tiles), False)",
        why="a call has rows from two places, and the mask of those behind the first ones",
    ),
    Fault(
        name="ring-dropout-entry",
        path=RING,
        old="entry = tile.sequence if ring.packed else 0",
        new="entry = 0",
        why="all packed sequences have the first one's mask",
    ),
    Fault(
        name="ring-padding-is-seen",
        path=RING,
        old="    ranges = torch.stack((first, end), -1) + padding.keys\n",
        new="    ranges = torch.stack((first * 0, end + padding.keys), -1)\n",
        why="queries see the zeros before their keys",
    ),
    Fault(
        name="ring-padding-window",
        path=RING,
        old="    end = (query + right + 1).clamp(0, nk)",
        new="    end = (query + right).clamp(0, nk)",
        why="the last key that a query sees is hidden where rows are padded",
    ),
    Fault(
        name="ulysses-dropout-heads",
        path=INIT,
        old="dropout_origin=torch.tensor([0, here[0], 0, 0]",
        new="dropout_origin=torch.tensor([0, 0, 0, 0]",
        why="every rank has the mask of the first heads",
    ),
    Fault(
        name="agree-state-of-each",
        path=AGREE,
        old="    dist.broadcast(x, place.peer(0), group=place.group)\n",
        new="",
        why="every rank has the mask of its own state",
    ),
    # ---------------------------------------------------------------------------------------------------- agreement
    Fault(
        name="agree-never-asks",
        path=AGREE,
        old="    if error is None and call.lengths is not None and key in known:\n",
        new="    if error is None and call.lengths is not None:\n",
        why="calls that differ are not found",
    ),
    Fault(
        name="agree-rows-unchecked",
        path=AGREE,
        old="            if each[1 + i] != expected and not call.packed:\n",
        new="            if False:\n",
        why="rows that are not as shard_sequence has them are not found",
    ),
    Fault(
        name="agree-refusal-of-one",
        path=AGREE,
        old="_REFUSED if error else digest, *call.rows",
        new="digest, *call.rows",
        why="the others are not told that a rank refuses",
    ),
    Fault(
        name="agree-description-without-the-band",
        path=INIT,
        old='"band": call.band, "softcap": call.softcap,',
        new='"softcap": call.softcap,',
        why="ranks with other masks go together",
    ),
    # ------------------------------------------------------------------------------------------------------- Ulysses
    Fault(
        name="ulysses-grouped-heads",
        path=ULYSSES,
        old="        in_line = n % shared == 0 and read == tuple(h // (n // shared) for h in range(n))\n",
        new="        in_line = n % shared == 0\n",
        why="query heads read the keys of another group where the ranks divide a group",
    ),
    Fault(
        name="ulysses-shared-heads",
        path=ULYSSES,
        old="        total.narrow(1, heads[0], len(heads)).add_(piece)\n",
        new="        total.narrow(1, heads[0], len(heads)).copy_(piece)\n",
        why="the gradient of a head that several ranks read is that of the last rank",
    ),
    Fault(
        name="ulysses-order",
        path=ULYSSES,
        old="    return whole.index_select(dim, _order(exchange.lengths, place.world, x.device))\n",
        new="    return whole\n",
        why="rows stand in the order of the ranks",
    ),
    Fault(
        name="ulysses-slopes",
        path=INIT,
        old="else t[..., here[0] : here[-1] + 1].contiguous()",
        new="else t[..., : len(here)].contiguous()",
        why="every rank takes the slopes and sinks of the first heads",
    ),
    Fault(
        name="unshard-gradient",
        path=ULYSSES,
        old="    dist.all_reduce(total, group=place.group)\n",
        new="",
        why="the gradient is that of this rank alone",
    ),
]
