"""A hook of mkdocs: docstrings name functions as :func:`flash_wmma.kernels`. On a page that describes the function, the
name becomes a link; elsewhere it stays code."""

from __future__ import annotations

import re

ROLE = re.compile(r":(?:func|class|mod|meth):<code>([\w.]+)</code>")


def on_page_content(content: str, **_: object) -> str:
    """Called by mkdocs with the HTML of every page."""

    def linked(match: re.Match[str]) -> str:
        name = match[1]
        code = f"<code>{name}</code>"
        return f'<a href="#{name}">{code}</a>' if f'id="{name}"' in content else code

    return ROLE.sub(linked, content)
