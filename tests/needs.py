"""What a case of a test needs of its kernel. A case that the kernel does not claim is not made (conftest.py does that).

What a kernel claims is its own record in flash_wmma.kernels(): features, dtypes, head dims.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import flash_wmma


@functools.cache
def features() -> frozenset[str]:
    """All that any kernel has."""
    kernels = [*flash_wmma.kernels("forward"), *flash_wmma.kernels("backward")]
    return frozenset().union(*(kernel.features for kernel in kernels))


def needs(*what: str | Callable[..., bool]) -> pytest.MarkDecorator:
    """Marks a test of which those cases are made that meet all of this: features of the kernel, by name, and functions
    of the case, whose arguments name what they ask for: `kernel`, `dtype` or a parameter of the test."""
    unknown = {need for need in what if isinstance(need, str)} - features()
    assert not unknown, f"no kernel has {unknown}"
    return pytest.mark.needs.with_args(*what)


def met(need: str | Callable[..., bool], case: Mapping[str, Any]) -> bool:
    """Whether a case meets it."""
    if isinstance(need, str):
        return need in case["kernel"].features
    return need(*(case[name] for name in inspect.signature(need).parameters))
