"""``flash_wmma._C``, imported when first asked for: ``forward`` does not need it."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from . import _library  # noqa: F401  (_C refers to symbols of the library, which refers to torch's)


@functools.cache
def native() -> ModuleType:
    """The extension module. ``ImportError`` says what to do if this Python has none."""
    try:
        return importlib.import_module("._C", __package__)
    except ImportError as error:
        raise ImportError(
            f"flash_wmma._C cannot be imported ({error}). It holds the kernel table, which forward does not need. "
            "Build it for this Python: in the source folder run: pip install ."
        ) from error
