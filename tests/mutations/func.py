"""Faults in torch.func's transforms."""

from __future__ import annotations

from mutations.fault import Fault

FUNC = "flash_wmma/_func.py"
TESTS = ("func",)

FAULTS = [
    Fault(
        name="vmap-sinks-into-entries",
        path=FUNC,
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
        name="vmap-slopes-of-entries",
        path=FUNC,
        old="own=of_entries or self.into_heads",
        new="own=self.into_heads",
        why="slopes of one batch entry are too few for the batch entries of all mapped calls",
        tests=TESTS,
    ),
    Fault(
        name="vmap-key-heads",
        path=FUNC,
        old="heads_k = fold.full if not fold.into_heads else fold.first(*k).shape[2]",
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
        path=FUNC,
        old="if mapped.rng_state is None:",
        new="if False:",
        why="calls that share a state drop different weights",
        tests=TESTS,
    ),
    Fault(
        name="vmap-mapped-lengths",
        path=FUNC,
        old="if packed and any(dim is not None for dim in mapped.lengths):",
        new="if False:",
        why="lengths of each mapped call reach an op that takes one",
        tests=TESTS,
    ),
    Fault(
        name="func-traced-by-dynamo",
        path=FUNC,
        old="    torch.compiler.allow_in_graph(_attend)",
        new="    return  # torch.compiler.allow_in_graph(_attend)",
        why="torch.compile loses the gradient of a mapped call",
        tests=TESTS,
    ),
    Fault(
        name="func-gradient-of-slopes",
        path=FUNC,
        old="        if slopes_grad:",
        new="        if False:",
        why="the gradient of slopes is silently 0",
        tests=TESTS,
    ),
]
