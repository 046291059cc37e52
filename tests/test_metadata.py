"""What stands in several files, because tools want it there, agrees: address, version, links, files of an sdist."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import flash_wmma

ROOT = Path(__file__).resolve().parent.parent
MARKDOWN = ["README.md", "CONTRIBUTING.md"]
LINK = re.compile(r'(?:\]\(|<img src=")([^)"\s]+)')


def one(pattern: str, path: str) -> str:
    """The one group of a pattern's one match in a file."""
    (found,) = re.findall(pattern, (ROOT / path).read_text(), re.M)
    assert isinstance(found, str)
    return found


@pytest.fixture(scope="module")
def setup_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flash_wmma_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_address() -> None:
    address = one(r'^Repository = "(.+)"$', "pyproject.toml")
    assert one(r"^repository-code: (.+)$", "CITATION.cff") == address
    cells = json.loads((ROOT / "benchmark/flash_wmma_colab.ipynb").read_text())["cells"]
    (set_there,) = re.findall(r'^REPO_URL = "(.*)"$', "\n".join("".join(cell["source"]) for cell in cells), re.M)
    assert set_there == address
    for name in ("Documentation", "Changelog", "Issues"):
        assert one(rf'^{name} = "(.+)"$', "pyproject.toml").startswith(f"{address}/")


def test_one_version() -> None:
    """The changelog's newest version is the package's and has a date, which is the citation's."""
    version = flash_wmma.__version__
    assert one(r"^version: (.+)$", "CITATION.cff") == version
    newest = re.search(r"^## \[([\d.]+)\] - (\d{4}-\d{2}-\d{2})$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None and newest[1] == version
    assert one(r'^date-released: "(.+)"$', "CITATION.cff") == newest[2]


@pytest.mark.parametrize("page", MARKDOWN)
def test_links_of_a_page_lead_to_files(page: str) -> None:
    links = [link.partition("#")[0] for link in LINK.findall((ROOT / page).read_text())]
    inside = {link for link in links if link and not link.startswith("http")}
    assert inside and all((ROOT / link).exists() for link in inside)


def test_links_outside_of_the_repository_are_absolute(setup_module: ModuleType) -> None:
    """What a package index shows: README.md, every link to the tag of this version."""
    shown = setup_module.long_description()
    links, relative = LINK.findall(shown), LINK.findall((ROOT / "README.md").read_text())
    assert len(links) == len(relative)
    address = one(r'^Repository = "(.+)"$', "pyproject.toml")
    for link, before in zip(links, relative, strict=True):
        if before.startswith(("http", "#")):
            assert link == before
        else:
            kind = "raw" if before.endswith(".png") else "blob"
            assert link == f"{address}/{kind}/v{flash_wmma.__version__}/{before}"


def test_an_sdist_has_what_pages_link_to(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (listed,) = tmp_path.glob("*.egg-info/SOURCES.txt")
    files = set(listed.read_text().split())
    wanted = {"README.md", "CONTRIBUTING.md", "CITATION.cff", "CHANGELOG.md", "dev"}
    for folder in ("examples", "docs", "benchmark"):
        wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")}
    assert wanted <= files, wanted - files
    (metadata,) = tmp_path.glob("*.egg-info/PKG-INFO")
    assert "Project-URL: Repository, " in metadata.read_text()
