"""What the pages of the documentation say that it runs, runs; and what they quote from the sources is there."""

from __future__ import annotations

import html
import importlib.util
import inspect
import json
import re
import shutil
import statistics
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flash_wmma
from flash_wmma import _registry
from flash_wmma.emulator import _compile, _runtime

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def execute(page: str) -> None:
    """A page's Python, block after block, as a reader would type it; it checks itself."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", ["attention.md", "choice.md"])
def test_code_on_a_page_runs(page: str) -> None:
    execute(page)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_kernel_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/adding.md, with the files that it shows. The library's own kernel lies elsewhere than csrc/forward, so that
    no other test sees it."""
    monkeypatch.chdir(tmp_path)
    shown = dict(re.findall(r'^```cpp title="(.+?)"\n(.*?)^```$', (DOCS / "adding.md").read_text(), re.M | re.S))
    assert set(shown) == {"by_row.cu", "csrc/forward/simt/simt_by_row.cu"}
    for name, text in shown.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    sources = {"simt_by_row": (tmp_path / "csrc/forward/simt/simt_by_row.cu",)}
    for module in (_compile, _runtime, _registry):
        monkeypatch.setattr(module, "kernel_sources", lambda direction="forward": sources)
    execute("adding.md")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_example_of_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/api.md: the line that is drawn is one that touches shared memory."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(
        r"^```python\n(result = flash_wmma\.profile.*?)^```$", (DOCS / "api.md").read_text(), re.M | re.S
    )
    q, k, v = torch.randn(3, 1, 1, 32, 64).half()
    exec(compile(block, "api.md", "exec"), {"flash_wmma": flash_wmma, "q": q, "k": k, "v": v})
    assert Path("banks.png").is_file() and Path("timeline.png").is_file()


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def quote() -> ModuleType:
    """docs/quote.py, the hook that puts quotations into pages."""
    return program("quote")


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    """docs/pictures.py."""
    return program("pictures")


@pytest.mark.parametrize("page", sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")))
def test_quotations_are_found(quote: ModuleType, page: str) -> None:
    """Every quotation's beginning is one line of its file, and no block with `quote` is left over."""
    markdown = (DOCS / page).read_text()
    built = quote.on_page_markdown(markdown)
    assert not re.search(r"^```\w* quote", built, re.M)
    assert built.count('title="csrc/') >= markdown.count("```cpp quote")


def test_a_quotation_is_the_statement(quote: ModuleType) -> None:
    """To the brace or semicolon that ends it, without its indentation."""
    loop = quote.statement("csrc/forward/simt/simt_naive.cu", "for (int first = keys.first_tile")
    source = (ROOT / "csrc/forward/simt/simt_naive.cu").read_text()
    assert loop.startswith("for (int first") and loop.endswith("\n}")
    assert "o[c] = (o[c] * before + sum) * inverse;" in loop
    assert all(line.strip() in source for line in loop.splitlines())
    assert loop.count("{") == loop.count("}")
    assert "p.lse" not in loop, "what follows the loop"


@pytest.mark.parametrize("beginning", ["no line begins so", "float"])
def test_a_quotation_that_is_not_one_line_is_refused(quote: ModuleType, beginning: str) -> None:
    with pytest.raises(ValueError, match=r"simt_naive\.cu: \d+ lines begin"):
        quote.statement("csrc/forward/simt/simt_naive.cu", beginning)


def test_table_rows_have_their_heading(quote: ModuleType) -> None:
    heading, rule, *rows = quote.table_rows("docs/ladder.md", "| `simt_naive`", "| `simt_block`").splitlines()
    assert heading.startswith("| kernel | inputs") and set(rule) <= set("|-:")
    assert [row.split("`")[1] for row in rows] == ["simt_naive", "simt_block"]
    assert heading.count("|") == rule.count("|") == rows[0].count("|")


@pytest.mark.parametrize(
    "path, beginnings, message",
    [
        ("docs/ladder.md", ["# The ladder"], "no row of a table"),
        ("docs/ladder.md", ["| `simt_naive`", "| duration"], "rows of 2 tables"),
    ],
)
def test_what_is_no_row_of_one_table_is_refused(
    quote: ModuleType, path: str, beginnings: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        quote.table_rows(path, *beginnings)


@pytest.mark.parametrize("rung", sorted(set(flash_wmma.emulator.kernel_sources("forward")) - {"unfused"}))
def test_every_kernel_of_the_ladder_has_a_page(quote: ModuleType, rung: str) -> None:
    """With its code, its row of the ladder, a way on, and on tensor cores a picture of its own."""
    page = (DOCS / f"rungs/{rung}.md").read_text()
    assert page.startswith(f"# `{rung}`: ")
    assert "```cpp quote" in page and "\n**Next.** " in page and "\n**Read on.** " in page
    rows = [line for line in page.splitlines() if line.startswith(f"docs/ladder.md: | `{rung}` | fp")]
    assert len(rows) == 1
    if not rung.startswith("simt"):
        assert ("fragments" if rung == "wmma_v3" else f"_{rung}") + ".png)" in page
    assert f"]({rung}.md)" in (DOCS / "rungs/index.md").read_text()
    assert f"rungs/{rung}.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("page", sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")))
def test_formulas_are_translated(page: str) -> None:
    """Every formula of a page becomes MathML, and no TeX is left of it."""
    formulas = program("formulas")
    text = re.sub(r"^```(?!math).*?^```$|`[^`\n]+`", "", (DOCS / page).read_text(), flags=re.M | re.S)
    blocks = re.findall(r"^```math\n(.*?)^```$", text, re.M | re.S)
    lines = re.findall(r"\$([^$\n]+)\$", text)
    assert text.count("$") == 2 * len(lines)
    marked = [rf'<div class="arithmatex">\[{html.escape(tex)}\]</div>' for tex in blocks]
    marked += [rf'<span class="arithmatex">\({html.escape(tex)}\)</span>' for tex in lines]
    for source in marked:
        built = formulas.on_page_content(source)
        assert built.count("<math ") == 1 and "arithmatex" not in built
        assert "\\" not in built, built


@pytest.mark.parametrize("module", [flash_wmma, flash_wmma.distributed, flash_wmma.reductions, flash_wmma.emulator])
def test_reference_has_every_public_name(module: ModuleType) -> None:
    page = (DOCS / "reference.md").read_text()
    prefix = re.escape(module.__name__)
    found = set(re.findall(rf"^::: {prefix}\.(\w+)$", page, re.M))
    described = {name for name in module.__all__ if inspect.getdoc(getattr(module, name)) and name != "__version__"}
    modules = {name for name in described if inspect.ismodule(getattr(module, name))}
    assert found == described - modules - {"Direction", "Mode"}, "all but types that are a choice of strings"


def test_pictures_have_their_lines(quote: ModuleType, pictures: ModuleType) -> None:
    """Every request that is drawn is that of one line, and every picture is shown on a page."""
    pages = "".join(p.read_text() for p in DOCS.rglob("*.md"))
    for name, (_, source, beginning) in pictures.REQUESTS.items():
        quote.line_of(f"csrc/{source}", beginning)
        assert (DOCS / "images" / name).is_file() and f"images/{name}" in pages
    assert (DOCS / "images" / pictures.TIMELINE).is_file() and f"images/{pictures.TIMELINE}" in pages


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_picture_of_fragments(pictures: ModuleType, tmp_path: Path) -> None:
    pictures.draw_fragments(tmp_path / "fragments.png")
    assert (tmp_path / "fragments.png").stat().st_size > 0
    left, accumulator = (pictures.holders(entry) for entry in ("matrix_a_half_row", "accumulator_row"))
    assert left == accumulator, "what docs/rungs/wmma_v3.md says"
    assert {lane // 4 for (row, _), (lane, _) in left.items() if row == 9} == {1}, "a row lies in a quad"


def test_first_code_of_the_readme_runs() -> None:
    """On the CPU here, unchanged on a GPU."""
    names: dict[str, object] = {}
    block = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block is not None
    exec(compile(block[1], "README.md", "exec"), names)
    out = names["out"]
    assert isinstance(out, torch.Tensor) and isinstance(sdpa := names["sdpa"], torch.Tensor)
    assert out.shape == (2, 4, 2048, 64) and (out - sdpa).abs().max() < 1e-2


def test_claim_of_the_readme() -> None:
    """The ratios of its first sentence: the least and the largest of the rows of docs/data/forward_h200.json."""
    claim = re.search(
        r"\*\*([\d.]+) to ([\d.]+) times.*?([\d.]+) to ([\d.]+) times", (ROOT / "README.md").read_text(), re.S
    )
    assert claim is not None
    rows = json.loads((DOCS / "data/forward_h200.json").read_text())["rows"]
    for peer, least, most in (("sdpa_flash", *claim.groups()[:2]), ("sdpa_cudnn", *claim.groups()[2:])):
        ratios = []
        for row in rows:
            rounds = (row["cells"][name]["samples_ms"] for name in (peer, "wgmma_sm90"))
            ratios.append(statistics.median(theirs / ours for theirs, ours in zip(*rounds, strict=True)))
        found = [
            f"{extreme:.{len(said.split('.')[1])}f}" for extreme, said in ((min(ratios), least), (max(ratios), most))
        ]
        assert found == [least, most], peer
