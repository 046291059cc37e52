"""Few cases in which every pair of two parameters' values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(parameters: Mapping[str, Sequence[Any]], seed: int = 0, candidates: int = 6) -> list[dict[str, Any]]:
    """Greedy: each case takes a pair that is still missing and as many others as the best of a few tries has."""
    rng = random.Random(seed)
    names = list(parameters)
    sizes = [len(parameters[name]) for name in names]
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }
    order = sorted(missing)
    rng.shuffle(order)
    cases = []
    for i, a, j, b in order:
        if (i, a, j, b) not in missing:
            continue
        best: set[tuple[int, int, int, int]] = set()
        for _ in range(candidates):
            case = [rng.randrange(size) for size in sizes]
            case[i], case[j] = a, b
            pairs = {(x, case[x], y, case[y]) for x, y in itertools.combinations(range(len(names)), 2)} & missing
            if len(pairs) > len(best):
                best, chosen = pairs, case
        missing -= best
        cases.append({name: parameters[name][index] for name, index in zip(names, chosen, strict=True)})
    return cases


def every(parameters: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations."""
    return [dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())]
