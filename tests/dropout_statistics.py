"""Statistics of dropout's masks: the fraction that is kept, and the independence of neighbouring weights.

    python tests/dropout_statistics.py [--weights 1000000000] [--p 0.1 0.5] [--device cuda] [--seed 0]

Each state of the generator gives a mask of 8 batch entries, 8 heads, 512 queries and 512 keys, until there are as many
weights as wanted: by default 10^9 on a GPU, 5 10^7 on the CPU. The fraction may miss 1 - p by five standard deviations
and half of the 1/65536 to which p is rounded: less than 10^-4 from 8 10^8 weights on. The pairs of neighbours, 1.4 10^7
in each mask or more, are counted by what becomes of the two weights. The chi-squares of all masks must have a sum that
independent weights exceed with a probability of 10^-5 or more. Exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
from torch import Tensor

import flash_wmma

SHAPE = (8, 8, 512, 512)
NEIGHBOURS = {
    "batch entries": (1, 0, 0, 0),
    "heads": (0, 1, 0, 0),
    "rows": (0, 0, 1, 0),
    "rows 8 apart": (0, 0, 8, 0),
    "columns": (0, 0, 0, 1),
    "columns 8 apart": (0, 0, 0, 8),
}
"""How far apart; rows and columns 8 apart are served by one call of Philox."""
DEVIATIONS = 5
LEAST_PROBABILITY = 1e-5


def chi_square(mask: Tensor, step: tuple[int, ...]) -> tuple[float, int]:
    """Of the four outcomes of pairs of weights that are so far apart, against independence (one degree of freedom), and
    the number of pairs."""
    one = other = mask
    for dim, n in enumerate(step):
        if n:
            one, other = one.narrow(dim, 0, one.shape[dim] - n), other.narrow(dim, n, other.shape[dim] - n)
    pairs = one.numel()
    both, first, second = (int(t.count_nonzero()) / pairs for t in (one & other, one, other))
    variance = first * (1 - first) * second * (1 - second)
    return pairs * (both - first * second) ** 2 / variance, pairs


def exceeded(chi_squares: float, degrees: int) -> float:
    """The probability that independent weights exceed this sum."""
    return float(torch.special.gammaincc(torch.tensor(degrees / 2.0).double(), torch.tensor(chi_squares / 2).double()))


def passes(p: float, masks: int, seed: int, device: str) -> bool:
    """Whether so many masks of that probability pass. Prints what they show."""
    kept, sums, pairs = 0, dict.fromkeys(NEIGHBOURS, 0.0), dict.fromkeys(NEIGHBOURS, 0)
    for number in range(masks):
        mask = flash_wmma.dropout_mask(torch.tensor([seed, number], device=device), p, *SHAPE)
        kept += int(mask.count_nonzero())
        for name, step in NEIGHBOURS.items():
            found, count = chi_square(mask, step)
            sums[name] += found
            pairs[name] += count
    weights = masks * math.prod(SHAPE)
    miss, allowed = kept / weights - (1 - p), DEVIATIONS * math.sqrt(p * (1 - p) / weights) + 0.5 / 65536
    good = abs(miss) <= allowed
    print(f"p = {p}: {weights:.2e} weights, kept {kept / weights:.6f}, off by {miss:+.1e}, allowed {allowed:.1e}")
    for name, total in sums.items():
        probability = exceeded(total, masks)
        good &= probability >= LEAST_PROBABILITY
        print(f"  {name:15} {pairs[name]:.2e} pairs, chi-square {total:7.2f} of {masks} masks: {probability:.3f}")
    return good


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--weights", type=float, help="at least so many; default: 1e9 on a GPU, 5e7 on the CPU")
    parser.add_argument("--p", type=float, nargs="+", default=[0.1, 0.5], help="probabilities of dropping a weight")
    parser.add_argument("--seed", type=int, default=0, help="the first number of the states")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    weights = options.weights or (1e9 if options.device.startswith("cuda") else 5e7)
    masks = math.ceil(weights / math.prod(SHAPE))
    good = [passes(p, masks, options.seed, options.device) for p in options.p]
    print("passed" if all(good) else "failed")
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
