"""Faults in transforms: vmap, forward mode, second derivatives."""

from __future__ import annotations

from mutations.fault import Fault

FUNC = "flash_wmma/_func.py"
FOLD = "flash_wmma/_fold.py"
TANGENT = "flash_wmma/_tangent.py"
BLOCKS = "flash_wmma/_blocks.py"
MATH = "flash_wmma/_math.py"
TESTS = ("func",)

FAULTS = [
    # ------------------------------------------------------------------------------------------------------------ vmap
    Fault(
        name="vmap-sinks-into-entries",
        path=FOLD,
        old="into_heads = packed or mapped.sinks is not None",
        new="into_heads = packed",
        why="sinks of each mapped call are taken for more heads than there are",
        tests=TESTS,
    ),
    Fault(
        name="vmap-shares-a-bias-that-has-a-gradient",
        path=FUNC,
        old="fold.call(call, m, own_bias=bias_grad)",
        new="fold.call(call, m)",
        why="the gradient of a shared bias is summed over the mapped calls too early",
        tests=TESTS,
    ),
    Fault(
        name="vmap-return-aux-unmapped-lse",
        path="flash_wmma/_statistics.py",
        old="fold.tensor(lse, dims[5], fold.lse),",
        new="fold.tensor(lse, dims[5], fold.rows),",
        why="LSEs of packed sequences are laid out as rows of q",
        tests=TESTS,
    ),
    Fault(
        name="vmap-return-aux-every-transform",
        path="flash_wmma/_statistics.py",
        old="if forward_ad._current_level >= 0 or (mapped and not _vmap_alone()):",
        new="if forward_ad._current_level >= 0:",
        why="derivatives under torch.func are let through to ops that have none",
        tests=TESTS,
    ),
    Fault(
        name="vmap-slopes-of-entries",
        path=FOLD,
        old="own=of_entries or self.into_heads",
        new="own=self.into_heads",
        why="slopes of one batch entry are too few for the batch entries of all mapped calls",
        tests=TESTS,
    ),
    Fault(
        name="vmap-key-heads",
        path=FUNC,
        old="heads_k = fold.full if not fold.into_heads else fold.first(k, mapped[3]).shape[2]",
        new="heads_k = fold.full",
        why="the gradients of k and v have as many heads as q",
        tests=TESTS,
    ),
    Fault(
        name="vmap-mapped-state",
        path=FUNC,
        old="if call.dropout_p and not drawn and _is_mapped(call.rng_state):",
        new="if False:",
        why="of the caller's states all but the first are ignored",
        tests=TESTS,
    ),
    Fault(
        name="vmap-shared-state",
        path=FOLD,
        old="""        if mapped.rng_state is None:
            refuse("dropout_p", f"{call.dropout_p} with a state that mapped calls share", ONE_STATE)
""",
        new="""        if mapped.rng_state is None:
            return call
""",
        why="calls that share a state drop different weights",
        tests=TESTS,
    ),
    Fault(
        name="vmap-mapped-lengths",
        path=FOLD,
        old="if packed and any(dim is not None for dim in mapped.lengths[:3]):",
        new="if False:",
        why="lengths of each mapped call reach an op that takes one",
        tests=TESTS,
    ),
    Fault(
        name="vmap-loses-slopes",
        path=FUNC,
        old="    if recorded[4]:  # the slopes",
        new="    if False:  # the slopes",
        why="slopes of a mapped call have no gradient outside of vmap",
        tests=TESTS,
    ),
    Fault(
        name="func-traced-by-dynamo",
        path=FUNC,
        old="    torch.compiler.allow_in_graph(_traced)",
        new="    return  # torch.compiler.allow_in_graph(_traced)",
        why="torch.compile loses the gradient of a mapped call",
        tests=TESTS,
    ),
    # ---------------------------------------------------------------------------------------------------- forward mode
    Fault(
        name="tangent-without-keys",
        path=TANGENT,
        old="cotangents = torch.cat((k, dk), -1), torch.cat((dq, q), -1)",
        new="cotangents = torch.cat((k, dk), -1), torch.cat((dq, torch.zeros_like(q)), -1)",
        why="the tangent of k has no influence",
        tests=TESTS,
    ),
    Fault(
        name="tangent-of-lse-without-scale",
        path=TANGENT,
        old="moved_lse = scale * (mean",
        new="moved_lse = (mean",
        why="the tangent of lse lacks the scale",
        tests=TESTS,
    ),
    Fault(
        name="tangent-of-a-sink",
        path=TANGENT,
        old="    return dout - (of_rows[..., None] * out).to(out.dtype), dlse + share\n",
        new="    return dout, dlse + share\n",
        why="a moving sink leaves the other weights as they are",
        tests=TESTS,
    ),
    Fault(
        name="tangent-of-dropped-weights",
        path=TANGENT,
        old="and not (call.softcap or call.dropout_p)\n        and attn_bias",
        new="and not call.softcap\n        and attn_bias",
        why="delta counts the weights that are dropped as well",
        tests=TESTS,
    ),
    Fault(
        name="tangent-of-capped-scores",
        path=TANGENT,
        old="and not (call.softcap or call.dropout_p)\n        and attn_bias",
        new="and not call.dropout_p\n        and attn_bias",
        why="backward's derivative of softcap multiplies delta too",
        tests=TESTS,
    ),
    Fault(
        name="tangent-by-conversion",
        path=TANGENT,
        old="not converts\n        and",
        new="True\n        and",
        why="columns of k and v share a scale",
        tests=TESTS,
    ),
    Fault(
        name="tangent-of-wide-heads",
        path=TANGENT,
        old="max(2 * d, d + d_v)",
        new="max(d, d_v)",
        why="the stand-ins' head dims are more than any kernel takes",
        tests=TESTS,
    ),
    Fault(
        name="forward-mode-within-forward-mode",
        path=FUNC,
        old="with forward_ad._set_fwd_grad_enabled(True):",
        new="with forward_ad._set_fwd_grad_enabled(False):",
        why="an outer transform does not see what the tangent depends on",
        tests=TESTS,
    ),
    # -------------------------------------------------------------------------------------------------------- blocks
    Fault(
        name="blocks-forget-the-sum",
        path=BLOCKS,
        old="part[0] = part[0] + t",
        new="part[0] = t",
        why="what queries share is that of the last block alone",
        tests=TESTS,
    ),
    Fault(
        name="blocks-in-one",
        path=BLOCKS,
        old="self.block = max(",
        new="self.block = 1 << 30 or max(",
        why="all scores are stored",
        tests=TESTS,
    ),
    Fault(
        name="blocks-share-a-bias",
        path=BLOCKS,
        old="bias.shape[-2] != 1",
        new="False",
        why="every block takes all rows of the bias",
        tests=TESTS,
    ),
    Fault(
        name="blocks-place-of-the-first-query",
        path=MATH,
        old="place = torch.arange(queries.start, queries.stop, device=device)",
        new="place = torch.arange(len(queries), device=device)",
        why="every block has the band of the first",
        tests=TESTS,
    ),
    Fault(
        name="blocks-distance-of-the-first-query",
        path=MATH,
        old="place = torch.arange(queries.start, queries.stop, device=q.device)",
        new="place = torch.arange(len(queries), device=q.device)",
        why="every block has the ALiBi distances of the first",
        tests=TESTS,
    ),
    Fault(
        name="blocks-of-packed-sequences",
        path=BLOCKS,
        old="if call.lengths is not None:",
        new="if False:",
        why="packed sequences are taken for dense tensors",
        tests=TESTS,
    ),
]
