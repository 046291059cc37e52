"""Faults of what puts the library into other packages."""

from __future__ import annotations

from .fault import Fault

TRANSFORMERS = "flash_wmma/integrations/transformers.py"

FAULTS = [
    Fault(
        name="transformers-window-one-too-wide",
        path=TRANSFORMERS,
        old="None if self.window is None else (self.window - 1, self.window - 1)",
        new="None if self.window is None else (self.window, self.window - 1)",
        why="transformers' window counts the token itself",
    ),
    Fault(
        name="transformers-window-left-out",
        path=TRANSFORMERS,
        old='"window": None if self.window is None else (self.window - 1, self.window - 1)',
        new='"window": None',
        why="sliding_window is ignored",
    ),
    Fault(
        name="transformers-window-twice",
        path=TRANSFORMERS,
        old="asked._replace(causal=False, window=None), _both(seen, position_bias)",
        new="asked._replace(causal=False), _both(seen, position_bias)",
        why="a mask that has the window gets it again, aligned to the end of a cache of fixed length",
    ),
    Fault(
        name="transformers-causal-twice",
        path=TRANSFORMERS,
        old="asked._replace(causal=False, window=None), _both(seen, position_bias)",
        new="asked._replace(window=None), _both(seen, position_bias)",
        why="a mask that says all is made causal besides",
    ),
    Fault(
        name="transformers-softcap",
        path=TRANSFORMERS,
        old="        softcap or 0.0,\n",
        new="        0.0,\n",
        why="softcap is ignored",
    ),
    Fault(
        name="transformers-scale",
        path=TRANSFORMERS,
        old='"scale": self.scale,',
        new='"scale": None,',
        why="scaling is ignored",
    ),
    Fault(
        name="transformers-dropout",
        path=TRANSFORMERS,
        old='            "dropout_p": self.dropout,\n',
        new='            "dropout_p": 0.0,\n',
        why="dropout in training is ignored",
    ),
    Fault(
        name="transformers-no-mask-function",
        path=TRANSFORMERS,
        old="    ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)\n",
        new="",
        why="padding is not seen",
    ),
    Fault(
        name="transformers-cache-of-fixed-length",
        path=TRANSFORMERS,
        old="        k, v = k[:, :, :nk], v[:, :, :nk]\n",
        new="",
        why="the unused rest of a cache of fixed length is read",
    ),
    Fault(
        name="transformers-chunk-alignment",
        path=TRANSFORMERS,
        old="        elif q_offset + nq != kv_offset + nk:\n            return False, None\n",
        new="",
        why="queries in the middle of a cache of fixed length are taken for its last",
    ),
    Fault(
        name="transformers-cross-padding",
        path=TRANSFORMERS,
        old="_without_padding(begin, end, nq, nk, asked.causal, all_rows)",
        new="_without_padding(begin, end, nq, nk, nq == nk, all_rows)",
        why="queries whose place is padding among the keys of another sequence see nothing",
    ),
    Fault(
        name="transformers-padding-end",
        path=TRANSFORMERS,
        old="first * nk + (nk if causal and all_rows else end)\n",
        new="(first + 1) * nk\n",
        why="padding behind the tokens is seen",
    ),
    Fault(
        name="transformers-rows-behind-the-tokens",
        path=TRANSFORMERS,
        old="first * nk + (nk if causal and all_rows else end)\n",
        new="first * nk + end\n",
        why="generate reads a row of zeros where padding is on the right",
    ),
    Fault(
        name="transformers-mask-of-a-window-made-ahead",
        path=TRANSFORMERS,
        old="    if kv_offset != 0 and not tracing:\n",
        new="    if False:\n",
        why="a model takes generate's mask of a window's keys for the padding from key 0 on",
    ),
    Fault(
        name="transformers-holes",
        path=TRANSFORMERS,
        old="return (begin, end) if torch.equal(between, keys) else None",
        new="return begin, end",
        why="padding between tokens is seen",
    ),
    Fault(
        name="transformers-packed-rows",
        path=TRANSFORMERS,
        old="new[:, 1:] = numbers.diff(dim=1) != 0",
        new="new.view(-1)[1:] = numbers.flatten().diff() != 0",
        why="the last sequence of a row and the first of the next are one if their numbers are equal",
    ),
    Fault(
        name="transformers-packed-traced",
        path=TRANSFORMERS,
        old="same = numbers[:, None, :, None] == numbers[:, None, None, :]",
        new="same = numbers[:, None, :, None] >= numbers[:, None, None, :]",
        why="a compiled model sees the sequences before",
    ),
    Fault(
        name="transformers-own-attention",
        path=TRANSFORMERS,
        old="    if model.own_attention:\n",
        new="    if False:\n",
        why="models that compute attention themselves get masks that are not meant for them",
    ),
    Fault(
        name="transformers-position-bias",
        path=TRANSFORMERS,
        old="    return _out(query, key, value, asked, position_bias), None\n",
        new="    return _out(query, key, value, asked), None\n",
        why="T5's position bias is left out where nothing is masked",
    ),
    Fault(
        name="transformers-causality-taken-for-granted",
        path=TRANSFORMERS,
        old="    if not _says_causality(config.__class__):",
        new="    if False:",
        why="models whose modules do not say whether they are causal get no mask, and run causal or not by chance",
    ),
]
