"""The code on the pages of the documentation that say that it runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize("page", ["attention.md"])
def test_code_on_a_page_runs(page: str) -> None:
    """Block after block, as a reader would type them; they check themselves."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
