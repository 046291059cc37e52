"""A hook of mkdocs: formulas become MathML when the site is built, which browsers draw without a script.

Pages write TeX as GitHub reads it too, `$...$` within a line and a block fenced by ```math. The extension arithmatex
finds both and marks them; latex2mathml translates.
"""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

MARKED = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def formula(match: re.Match[str]) -> str:
    """The MathML of one formula."""
    element, tex = match.groups()
    if element == "span":
        return convert(html.unescape(tex), display="inline")
    return f'<div class="formula">{convert(html.unescape(tex), display="block")}</div>'


def on_page_content(content: str, **_: object) -> str:
    """Called by mkdocs with the HTML of every page."""
    return MARKED.sub(formula, content)
