"""The floors of the Python package (docs/index.md): no import runs upwards or in a circle, late ones included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

from flash_wmma._call import Call, Lengths

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flash_wmma"
NATIVE = "flash_wmma._C"
"""No Python, and below all floors."""


def name_of(path: Path) -> str:
    """ "flash_wmma.emulator" for flash_wmma/emulator/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {name_of(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py")) if "csrc" not in path.parts}
PACKAGES = {name_of(path) for path in PACKAGE.rglob("__init__.py")}


def declared() -> dict[str, int]:
    """The floor of each module, as the table says."""
    rows = re.findall(r"^\| (\d) \| (`.+?`) \|", (ROOT / "docs" / "index.md").read_text(), re.M)
    pairs = [
        (f"flash_wmma.{name}".removesuffix(".__init__"), int(n)) for n, row in rows for name in row[1:-1].split("` `")
    ]
    assert len(pairs) == len(dict(pairs)), "a module is on two floors"
    return dict(pairs)


def dynamic_import(call: ast.Call) -> str | None:
    """What importlib or __import__ is asked for: what is known of its name, "?" if that is nothing."""
    function = call.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if called not in ("import_module", "__import__", "spec_from_file_location"):
        return None
    name = call.args[0] if call.args else None
    if isinstance(name, ast.JoinedStr):
        name = name.values[0]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "?"


def imported(module: str, tree: ast.AST) -> Iterator[str]:
    """The modules of the package that a module names in any import, wherever it stands."""

    def known(name: str) -> str:
        while name not in SOURCES and name != NATIVE:
            name = name.rpartition(".")[0]
        return name

    package = module if module in PACKAGES else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], node.module or ""]).strip(".")
            base = base if node.level else node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and (name := dynamic_import(node)) is not None:
            assert name != "?", f"{module}, line {node.lineno}: imports what cannot be read here"
            names = [f"{package}{name}" if name.startswith(".") else name]
        else:
            continue
        yield from (known(name) for name in names if name.partition(".")[0] == "flash_wmma")


def runs(module: str, target: str) -> Iterator[str]:
    """What an import of ``target`` runs: also the packages that it lies in, but for those of the module itself."""
    yield target
    while target := target.rpartition(".")[0]:
        if target != "flash_wmma" and not f"{module}.".startswith(f"{target}."):
            yield target


def faults(sources: dict[str, str]) -> list[str]:
    """What is wrong with the imports."""
    floors = declared()
    edges = {
        module: {run for name in imported(module, ast.parse(text)) if name != NATIVE for run in runs(module, name)}
        for module, text in sources.items()
    }
    found = [
        f"{module} (floor {floors[module]}) imports {target} (floor {floors[target]})"
        for module, targets in edges.items()
        for target in sorted(targets)
        if floors[target] > floors[module]
    ]
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found.append("a circle: " + " <- ".join(error.args[1]))
    return found


def test_every_module_is_on_a_floor() -> None:
    assert set(declared()) == set(SOURCES)


def test_no_import_runs_upwards() -> None:
    assert faults(SOURCES) == []


@pytest.mark.parametrize(
    ("module", "seeded", "expected"),
    [
        ("_checks", "from ._sdpa import left_to_torch", "_checks (floor 2) imports flash_wmma._sdpa (floor 3)"),
        ("_checks", "def late():\n    from . import _table", "_checks (floor 2) imports flash_wmma._table (floor 5)"),
        ("_sdpa", "def late():\n    import flash_wmma", "_sdpa (floor 3) imports flash_wmma (floor 6)"),
        ("_library", "def late():\n    from .emulator._runtime import fill", "imports flash_wmma.emulator._runtime"),
        ("_library", "def late():\n    from .emulator._runtime import fill", "imports flash_wmma.emulator (floor 4)"),
        ("_plots", "if TYPE_CHECKING:\n    from ._profiler import profile", "imports flash_wmma._profiler (floor 5)"),
        ("_call", "def late():\n    importlib.import_module('flash_wmma._explain')", "imports flash_wmma._explain"),
        ("emulator._settings", "from .. import reductions", "_settings (floor 4) imports flash_wmma.reductions"),
        ("emulator._settings", "from . import Program", "a circle"),
        ("_call", "def late():\n    from ._checks import options", "a circle"),
    ],
)
def test_seeded_imports_are_found(module: str, seeded: str, expected: str) -> None:
    module = f"flash_wmma.{module}"
    found = faults({**SOURCES, module: f"{SOURCES[module]}\n{seeded}\n"})
    assert any(expected in fault for fault in found), found


def test_an_import_that_cannot_be_read_is_a_fault() -> None:
    with pytest.raises(AssertionError, match=r"_call, line \d+: imports what cannot be read"):
        faults({**SOURCES, "flash_wmma._call": "import importlib\nimportlib.import_module(name)\n"})


def test_a_call_has_the_order_of_the_schemas() -> None:
    """So that parts of the records are the ops' arguments."""

    def arguments(op: str) -> list[str]:
        schema = getattr(torch.ops.flash_wmma, op).default._schema
        return [argument.name for argument in schema.arguments]

    fields = list(Call._fields[: Call._fields.index("kernel_name") + 1])
    assert arguments("forward") == ["q", "k", "v", *fields]
    fields.remove("out_bnhd")
    assert arguments("forward_varlen") == ["q", "k", "v", *Lengths._fields, *fields]
    defaults = {a.name: a.default_value for a in torch.ops.flash_wmma.forward.default._schema.arguments[3:]}
    assert {name: Call._field_defaults[name] for name in defaults} == defaults
