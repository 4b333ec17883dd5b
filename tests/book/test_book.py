"""The real notebooks: what they export, the order they stand in, and the form they keep."""

import ast
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from helios.book.export import export_all, read_modules
from helios.book.links import chapter_page, relink
from helios.book.new import in_words

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
SETUP = 'importlib.util.find_spec("helios") is None'
# A home, a system folder or a temporary one: none belongs in an output that others will compare with theirs.
LOCAL_PATH = re.compile(r"(?<![\w.:/])/(?:work|root|tmp|home|usr|var|opt|Users|content|mnt)/[\w.]|[A-Z]:\\\\")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["cells"]
    for cell in cells:
        cell["source"] = "".join(cell["source"])
    return cells


def code_of(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in cells_of(path) if cell["cell_type"] == "code"]


def exported_by(path: Path) -> set[str]:
    return {f"helios.{module.name}".removesuffix(".__init__") for module in read_modules(path)}


def imported_by(path: Path) -> set[str]:
    """Every helios module that any cell imports, at its top or inside a function."""
    found: set[str] = set()
    for cell in code_of(path):
        plain = re.sub(r"^(\s*)[%!].*$", r"\1pass", cell["source"], flags=re.M)
        for node in ast.walk(ast.parse(plain)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
    return {name for name in found if name.split(".")[0] == "helios"}


def test_the_package_is_what_the_notebooks_export() -> None:
    outcome = export_all(ROOT, check=True)
    assert not outcome.diffs, "run `helios export`:\n" + "\n".join(outcome.diffs.values())[:4000]
    assert not outcome.orphans, f"no notebook exports {outcome.orphans}"


def test_chapters_are_numbered_without_gaps_and_each_has_a_page() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(len(NOTEBOOKS))]
    pages = {path.name for path in (ROOT / "chapters").glob("[0-9][0-9]-*.md")}
    assert pages == {chapter_page(path.name) for path in NOTEBOOKS}


@each_notebook
def test_a_chapter_imports_only_from_itself_and_before(path: Path) -> None:
    known = {module for earlier in NOTEBOOKS if earlier.name <= path.name for module in exported_by(earlier)}
    packages = {module.rpartition(".")[0] for module in known} - {"helios"}
    assert imported_by(path) <= known | packages


def test_the_links_are_up_to_date() -> None:
    assert relink(ROOT, check=True) == [], "run `python -m helios.book.links`"


@each_notebook
def test_a_notebook_begins_with_title_summary_links_and_setup(path: Path) -> None:
    first, second = cells_of(path)[:2]
    assert first["cell_type"] == "markdown" and first["source"].startswith("# ")
    assert "<!-- badges --> [" in first["source"]
    assert second["cell_type"] == "code" and SETUP in second["source"]
    assert re.search(r'(?m)^    %pip install -q "helios @ git\+', second["source"]), (
        "the install line must not be a comment"
    )


@each_notebook
def test_a_notebook_is_made_of_small_cells(path: Path) -> None:
    lengths = sorted(len(cell["source"].splitlines()) for cell in code_of(path))
    assert 40 <= len(cells_of(path)) <= 110
    assert statistics.median(lengths) <= 8
    assert sum(length <= 30 for length in lengths) >= 0.9 * len(lengths)


@each_notebook
def test_outputs_are_committed_from_one_clean_run(path: Path) -> None:
    cells = [cell for cell in code_of(path) if "NBVAL_SKIP" not in cell["source"]]
    counts = [cell["execution_count"] for cell in cells]
    assert all(counts) and counts == sorted(set(counts)), "run the notebook from top to bottom and save it"
    assert any(cell["outputs"] for cell in cells)
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert "error" not in kinds


@each_notebook
def test_outputs_show_no_local_paths(path: Path) -> None:
    for number, cell in enumerate(cells_of(path), start=1):
        for output in cell.get("outputs", []):
            text = re.sub(r"base64,[\w+/=]+", "", json.dumps(output))
            found = LOCAL_PATH.search(text)
            assert not found, f"cell {number} prints {text[max(0, found.start() - 40) :][:120]}"


@each_notebook
def test_every_plot_has_a_description(path: Path) -> None:
    for number, cell in enumerate(cells_of(path), start=1):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            assert not {"image/png", "image/svg+xml"} & data.keys(), f"cell {number}: show plots with helios.book.plots"
            for image in re.findall(r"<img [^>]*", "".join(data.get("text/html", ""))):
                assert re.search(r'alt="[^"]{10,}"', image), f"cell {number}: describe the picture in alt"


def test_the_readme_lists_every_chapter() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for notebook in NOTEBOOKS:
        page = notebook.stem.replace("_", "-")
        assert f"| {page[:2]} |" in text and f"(chapters/{page}.md)" in text and f"(notebooks/{notebook.name})" in text
    assert f"{in_words(len(NOTEBOOKS)).capitalize()} notebooks build" in text, "say how many there are"
