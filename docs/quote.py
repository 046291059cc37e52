"""A hook of mkdocs: pages quote the sources as they are when the site is built.

A fenced block whose info string ends in `quote` names a file of the repository and how a line of it begins:

    ```cpp quote
    csrc/forward/simt_naive.cu: for (int first = keys.first_tile
    ```

becomes the statement, function or struct that begins there, to its closing brace or semicolon. Of a table in Markdown
(`md quote`) it becomes the row that begins so, below the table's heading. No line may begin so but one.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w+) quote\n(.+?): (.+)\n```$", re.M)


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


def table_row(path: str, beginning: str) -> str:
    """The row of a table in Markdown that begins so, with the table's heading."""
    row = heading = line_of(path, beginning)
    lines = (ROOT / path).read_text().splitlines()
    while heading and lines[heading - 1].startswith("|"):
        heading -= 1
    if row < heading + 2:
        raise ValueError(f"{path}: {beginning!r} is no row of a table")
    return "\n".join([*lines[heading : heading + 2], lines[row]])


def quote(match: re.Match[str]) -> str:
    """What stands in place of a block."""
    language, path, beginning = match.groups()
    if language == "md":
        return table_row(path, beginning)
    return f'```{language} title="{path}"\n{statement(path, beginning)}\n```'


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs for every page. An error ends the build."""
    return FENCE.sub(quote, markdown)
