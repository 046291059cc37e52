"""A hook of mkdocs: pages quote the sources as they are when the site is built.

A fenced block whose info string ends in `quote` names a file of the repository and how a line of it begins:

    ```cpp quote
    csrc/forward/simt/simt_naive.cu: for (int first = keys.first_tile
    ```

becomes the statement, function or struct that begins there, to its closing brace or semicolon. Of a table in Markdown
(`md quote`) it becomes the row that begins so, below the table's heading. No line may begin so but one. Of Python
(`python quote`), where the name of a function or class stands instead, it becomes its signature and docstring.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
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


def definition(path: str, name: str) -> str:
    """A function's signature and docstring; of a class also its fields and its public methods'.

    Raises:
        ValueError: there is none of that name, or one without a docstring.
    """
    text = (ROOT / path).read_text()
    lines = text.splitlines()

    def head(node: ast.FunctionDef | ast.ClassDef) -> str:
        if ast.get_docstring(node) is None:
            raise ValueError(f"{path}: {node.name} has no docstring")
        fields = itertools.takewhile(lambda n: not isinstance(n, ast.FunctionDef), node.body)
        shown = list(fields) if isinstance(node, ast.ClassDef) else node.body[:1]
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return "\n".join(lines[first - 1 : shown[-1].end_lineno])

    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
    if not nodes:
        raise ValueError(f"{path}: no function or class {name}")
    node = nodes[-1]  # after overloads
    parts = [head(node)]
    if isinstance(node, ast.ClassDef):
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and ast.get_docstring(n)]
        parts += [head(n) for n in methods if not n.name.startswith("_") or n.name == "__init__"]
    return textwrap.dedent("\n\n".join(parts))


def quote(match: re.Match[str]) -> str:
    """What stands in place of a block."""
    language, path, beginning = match.groups()
    if language == "md":
        return table_row(path, beginning)
    if language == "python":
        return f"```python\n{definition(path, beginning)}\n```"
    return f'```{language} title="{path}"\n{statement(path, beginning)}\n```'


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs for every page. An error ends the build."""
    return FENCE.sub(quote, markdown)
