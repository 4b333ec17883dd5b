"""Exercises: starters are what their solutions say, each check passes the solution and nothing else that was tried."""

import json
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from helios.book.exercises import Hint, check, hint, refuses, starter_of, write_starters

ROOT = Path(__file__).parents[2]
SOLUTIONS = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
TASK = re.compile(r"(?m)^## (\d) · (.+) \*\((easy|medium|hard)\)\*$")

each_solution = pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)


def tasks_of(path: Path) -> list[tuple[str, str, str]]:
    """Number, title and grade of each exercise."""
    cells = nbformat.read(path, as_version=4).cells
    return [found for cell in cells if cell.cell_type == "markdown" for found in TASK.findall(cell.source)]


def run(cell: Any, names: dict[str, Any]) -> None:
    """Run a code cell as a notebook would, without its magics."""
    source = re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", cell.source)
    exec(compile(source, cell.id, "exec"), names)


def test_every_chapter_has_exercises() -> None:
    assert [path.name for path in SOLUTIONS] == [path.name for path in CHAPTERS]


def test_starters_are_up_to_date() -> None:
    assert write_starters(ROOT, check=True) == [], "run `helios book exercises`"
    assert {path.name for path in (ROOT / "notebooks" / "exercises").glob("*")} == {path.name for path in SOLUTIONS}


@each_solution
def test_a_chapter_has_three_to_six_graded_exercises_and_its_page_lists_them(path: Path) -> None:
    tasks = tasks_of(path)
    assert 3 <= len(tasks) <= 6 and [task[0] for task in tasks] == [str(n + 1) for n in range(len(tasks))]
    grades = [("easy", "medium", "hard").index(grade) for _, _, grade in tasks]
    assert grades == sorted(grades) and len(set(grades)) > 1, "from easy to hard"
    page = (ROOT / "chapters" / f"{path.stem.replace('_', '-')}.md").read_text("utf-8")
    section = page.partition("\n## Exercises\n")[2].partition("\n## ")[0]
    for number, title, grade in tasks:
        assert f"{number}. *({grade})* **{title}**" in section, f"the page's exercise {number} differs"
    assert f"(../notebooks/exercises/{path.name})" in section and f"(../notebooks/solutions/{path.name})" in section
    assert '??? tip "Hints"' in section


@each_solution
def test_a_solution_notebook_has_for_each_exercise_an_answer_a_check_and_attempts_that_fail(path: Path) -> None:
    kinds: list[dict[str, int]] = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown" and TASK.search(cell.source):
            kinds.append({"answers": 0, "checks": 0, "wrong": 0})
        if kinds and cell.cell_type == "code":
            kinds[-1]["answers"] += "#| solution" in cell.source
            kinds[-1]["checks"] += "@check\n" in cell.source
            kinds[-1]["wrong"] += cell.source.startswith("#| wrong\n") and "refuses(" in cell.source
    assert all(all(kind.values()) for kind in kinds), kinds


@each_solution
def test_solutions_were_run_and_shown(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in cells]
    assert all(counts) and counts == sorted(set(counts))
    assert "Right." in json.dumps(cells) and '"output_type": "error"' not in json.dumps(cells)


@each_solution
def test_solutions_pass_their_checks_and_starters_get_a_hint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    solutions = nbformat.read(path, as_version=4)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in solutions.cells:
        if cell.cell_type == "code":
            run(cell, names)
    starter, hints = {"__name__": "__main__"}, 0
    for cell in starter_of(solutions).cells:
        if cell.cell_type != "code":
            continue
        try:
            run(cell, starter)
        except Hint as shown:
            hints += 1
            assert len(str(shown)) > 20
    assert hints >= len(tasks_of(path)), "each check must refuse the dots"
    assert Path.cwd() == path.parent and os.getcwd()


def test_a_check_passes_only_what_is_right_and_says_what_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    @check
    def check_double(double: Any) -> None:
        """Twice as much."""
        hint(double(2) == 4, "two and two make four")

    check_double(lambda x: 2 * x)
    assert capsys.readouterr().out == "Right. Twice as much.\n"
    refuses(check_double, lambda x: x, lambda: 4, lambda x: ..., None, ...)
    assert "two and two make four" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="lets wrong attempt 1 through"):
        refuses(check_double, lambda x: 4)


def test_a_starter_has_the_tasks_and_not_the_answers() -> None:
    source = "def f(x):\n    y = 1\n    #| solution\n    return y\n\n    # and more\n    #| end\nz = f(1)  #| solution"
    cells = [
        nbformat.v4.new_markdown_cell("# Solutions: a chapter"),
        nbformat.v4.new_code_cell(source, execution_count=1),
        nbformat.v4.new_code_cell("#| wrong\nrefuses(check_f, 1)"),
        nbformat.v4.new_markdown_cell("<!-- solution -->\nBecause."),
    ]
    made = starter_of(nbformat.v4.new_notebook(cells=cells))
    assert [cell.source for cell in made.cells] == [
        "# Exercises: a chapter",
        "def f(x):\n    y = 1\n    ...\nz = ...",
    ]
    assert made.cells[1].execution_count is None
    nbformat.validate(made)
