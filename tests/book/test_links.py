"""Links to where the project lives, written from its one statement in pyproject.toml."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helios.book.links import links_command, project_url, relink, relinked_notebook, relinked_page

ROOT = Path(__file__).parents[2]
URL = "https://github.com/reader/fork"
FIRST = "# T\n\nSummary.\n\n<!-- badges -->"
SETUP = '%pip install -q "helios @ git+https://github.com/someone/else"'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "notebooks").mkdir()
    facts = f'[project]\nname = "x"\nversion = "1.2.3"\n[project.urls]\nRepository = "{URL}.git"\n'
    (tmp_path / "pyproject.toml").write_text(facts)
    cells = [{"cell_type": "markdown", "source": FIRST.splitlines(True)}, {"cell_type": "code", "source": [SETUP]}]
    (tmp_path / "notebooks" / "06_kv_cache.ipynb").write_text(json.dumps({"cells": cells}, indent=1))
    page = "<!-- badges --> old\n\n    git clone https://github.com/someone/else\n"
    (tmp_path / "README.md").write_text(page)
    return tmp_path


def test_the_address_is_read_from_pyproject(checkout: Path) -> None:
    assert project_url(checkout) == URL


def test_a_missing_address_says_where_to_state_it(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(ValueError, match=r"under \[project.urls\]"):
        project_url(tmp_path)


def test_links_are_written_and_then_up_to_date(checkout: Path) -> None:
    assert relink(checkout, check=True) == ["notebooks/06_kv_cache.ipynb", "README.md"]
    assert relink(checkout) == ["notebooks/06_kv_cache.ipynb", "README.md"]
    assert relink(checkout, check=True) == []


def test_a_notebook_gets_its_links_and_its_address(checkout: Path) -> None:
    relink(checkout)
    first, setup = json.loads((checkout / "notebooks" / "06_kv_cache.ipynb").read_text())["cells"]
    line = first["source"][-1]
    assert line.startswith("<!-- badges --> [Open in Colab](https://colab.research.google.com/github/reader/fork/blob/")
    assert f"[Source]({URL}/blob/main/notebooks/06_kv_cache.ipynb)" in line
    assert f"({URL}/blob/main/chapters/06-kv-cache.md)" in line
    assert setup["source"] == [f'%pip install -q "helios @ git+{URL}@v1.2.3"']
    pyproject = checkout / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("1.2.3", "1.3.0.dev0"))
    assert relink(checkout) == ["notebooks/06_kv_cache.ipynb"], "between releases the branch is installed"
    assert f"git+{URL}@main" in (checkout / "notebooks" / "06_kv_cache.ipynb").read_text()


def test_exercises_and_solutions_open_themselves_and_name_each_other_and_the_chapter(checkout: Path) -> None:
    plain = (checkout / "notebooks" / "06_kv_cache.ipynb").read_text()
    for folder in ("exercises", "solutions"):
        (checkout / "notebooks" / folder).mkdir()
        (checkout / "notebooks" / folder / "06_kv_cache.ipynb").write_text(plain)
    assert len(relink(checkout)) == 4 and relink(checkout, check=True) == []
    for folder, other in (("exercises", "Solutions"), ("solutions", "Exercises")):
        line = json.loads((checkout / "notebooks" / folder / "06_kv_cache.ipynb").read_text())["cells"][0]["source"][-1]
        assert (
            f"[Open in Colab](https://colab.research.google.com/github/reader/fork/blob/main/notebooks/{folder}/06"
            in line
        )
        assert f"[Source]({URL}/blob/main/notebooks/{folder}/06_kv_cache.ipynb)" in line
        assert f"[{other}]({URL}/blob/main/notebooks/{other.lower()}/06_kv_cache.ipynb)" in line
        assert line.endswith(f"[Read the chapter]({URL}/blob/main/chapters/06-kv-cache.md)")


def test_the_address_stands_once_and_everything_else_is_written_from_it() -> None:
    """After a move, the tool leaves the old address in no notebook and on no page."""
    old = project_url(ROOT).removeprefix("https://github.com/")
    for path in (ROOT / "notebooks").rglob("*.ipynb"):
        name = path.relative_to(ROOT / "notebooks").as_posix()
        assert old not in relinked_notebook(path.read_text("utf-8"), URL, name), name
    for name in ("README.md", "CONTRIBUTING.md"):
        assert old not in relinked_page((ROOT / name).read_text("utf-8"), URL), name
    others = [
        *(ROOT / "chapters").rglob("*.md"),
        *(ROOT / "helios").rglob("*.py"),
        *(ROOT / "site" / "hooks").glob("*"),
    ]
    assert not [path.name for path in others if path.is_file() and old.encode() in path.read_bytes()]


def test_the_front_page_gets_links_and_clone_line(checkout: Path) -> None:
    relink(checkout)
    text = (checkout / "README.md").read_text()
    assert f"git clone {URL}\n" in text and "old" not in text and text.startswith("<!-- badges --> [Read")


def test_other_packages_from_git_are_left_alone(checkout: Path) -> None:
    (checkout / "README.md").write_text("pip install git+https://github.com/other/package\n")
    assert "README.md" not in relink(checkout)


def test_without_colab_elsewhere_than_on_github(checkout: Path) -> None:
    (checkout / "pyproject.toml").write_text('[project.urls]\nRepository = "https://git.example/h"\n')
    relink(checkout)
    assert "Colab" not in (checkout / "notebooks" / "06_kv_cache.ipynb").read_text()


def test_check_reports_and_leaves_the_files(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout)
    before = (checkout / "README.md").read_text()
    assert links_command(["--check"]) == 1 and (checkout / "README.md").read_text() == before
    assert "run `python -m helios.book.links`" in capsys.readouterr().out
    assert links_command([]) == 0 and links_command(["--check"]) == 0


def test_outside_a_checkout_the_command_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "helios.book.links"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "not in a checkout of Helios" in done.stderr and "Traceback" not in done.stderr
