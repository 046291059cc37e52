"""A hook of mkdocs: pages quote the sources as they are when the site is built.

A fenced block whose info string ends in `quote` names a file of the repository and how a line of it begins:

    ```cpp quote
    csrc/forward/simt/simt_naive.cu: for (int first = keys.first_tile
    ```

becomes the statement, function or struct that begins there, to its closing brace or semicolon. One line alone may
begin so. A block `md quote` names rows of a table in Markdown, a line each, and becomes the rows with the heading:

    ```md quote
    docs/ladder.md: | `simt_naive`
    docs/ladder.md: | `simt_coalesced`
    ```
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w+) quote\n((?:.+: .+\n)+)```$", re.M)


def line_of(path: str, beginning: str) -> int:
    """The index of the one line of a file that begins so, indentation aside.

    Raises:
        ValueError: there is none, or more than one.
    """
    lines = (ROOT / path).read_text().splitlines()
    found = [i for i, line in enumerate(lines) if line.lstrip().startswith(beginning)]
    if len(found) != 1:
        raise ValueError(f"{path}: {len(found)} lines begin with {beginning!r}, one should")
    return found[0]


def statement(path: str, beginning: str) -> str:
    """C++ from the line that begins so to where its brackets are closed and a brace or semicolon ends a line."""
    first = line_of(path, beginning)
    lines = (ROOT / path).read_text().splitlines()[first:]
    indent, depth = len(lines[0]) - len(lines[0].lstrip()), 0
    for count, line in enumerate(lines, 1):
        code = line.partition("//")[0].rstrip()
        depth += sum(map(code.count, "({[")) - sum(map(code.count, ")}]"))
        if depth == 0 and code.endswith((";", "}")):
            quoted = (row if row.startswith("#") else row[indent:] for row in lines[:count])
            return "\n".join(quoted)
    raise ValueError(f"{path}: what begins with {beginning!r} does not end")


def table_rows(path: str, *beginnings: str) -> str:
    """The rows of one table in Markdown that begin so, below the table's heading."""
    lines = (ROOT / path).read_text().splitlines()
    headings, rows = set(), []
    for beginning in beginnings:
        row = heading = line_of(path, beginning)
        while heading and lines[heading - 1].startswith("|"):
            heading -= 1
        if row < heading + 2:
            raise ValueError(f"{path}: {beginning!r} is no row of a table")
        headings.add(heading)
        rows.append(lines[row])
    if len(headings) > 1:
        raise ValueError(f"{path}: {beginnings} are rows of {len(headings)} tables, should be of one")
    heading = headings.pop()
    return "\n".join([*lines[heading : heading + 2], *rows])


def quote(match: re.Match[str]) -> str:
    """What stands in place of a block."""
    language = match[1]
    paths, beginnings = zip(*(line.split(": ", 1) for line in match[2].splitlines()), strict=True)
    if len(set(paths)) > 1 or (language != "md" and len(paths) > 1):
        raise ValueError(f"a block quotes {paths}: should be one statement, or rows of one table")
    if language == "md":
        return table_rows(paths[0], *beginnings)
    return f'```{language} title="{paths[0]}"\n{statement(paths[0], beginnings[0])}\n```'


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs for every page. An error ends the build."""
    return FENCE.sub(quote, markdown)
