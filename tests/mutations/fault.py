"""What a seeded fault is."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of the sources that some test must notice.

    The list follows the code: a fault whose place no longer exists, or exists twice, is an error of `tests/mutate.py`.
    """

    name: str
    """Unique among all faults."""
    path: str
    """The file, from the root of the repository."""
    old: str
    """What stands there, once in the file."""
    new: str
    """What stands there instead."""
    why: str
    """What goes wrong with it."""
    kernels: tuple[str, ...] = ()
    """For CUDA sources: the kernels whose tests are run, in this order. Empty: all that the file is part of."""
    tests: tuple[str, ...] = ()
    """Names of the test files that concern it, if not those of its file."""
    harmless: str = ""
    """Why no test can notice it. Such faults are listed apart and not counted."""
    survives: str = ""
    """Why no test notices it yet: a known hole."""
