# Generated from notebooks/27_authors.ipynb by `helios export`; edit the notebook.
"""Appendix: writing a chapter of your own.

Exercises that check themselves, and starters that cannot drift from their solutions. A solution
notebook is the one source: the starter is the same notebook with the answers cut out. Checks answer
a wrong attempt with a hint, and each solution notebook shows the attempts that its checks must
refuse.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from helios.book.links import project_url, release_ref, relinked_notebook, renew
from helios.book.notebook import NoCheckout, require_checkout

__all__ = [
    "FROM_EXERCISES",
    "FROM_SOLUTIONS",
    "Hint",
    "SHORT_SOLUTION",
    "SOLUTION",
    "check",
    "exercises_command",
    "hint",
    "is_only_for_solutions",
    "lonely_starters",
    "read_solutions",
    "refuses",
    "starter_of",
    "without_answers",
    "write_starters",
]


class Hint(AssertionError):
    """What is wrong with an attempt, and where to look; a notebook shows the sentence and no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"Not yet: {self}"]


def hint(right: object, sentence: str) -> None:
    """Raise `Hint` unless `right`."""
    if not right:
        raise Hint(sentence)


def check(body: Callable[..., None]) -> Callable[..., None]:
    """A check from a function of the attempt that calls `hint`; with the docstring's first line it says that it passed.

    Errors of the attempt itself become hints: nothing but a right answer passes, and nobody has to read a traceback.
    """

    @functools.wraps(body)
    def checked(*attempt: Any) -> None:
        if any(part is ... or part is None for part in attempt):
            raise Hint("write your answer where the dots are, run that cell, then this one")
        try:
            body(*attempt)
        except Hint:
            raise
        except Exception as error:
            raise Hint(_own_error(error)) from error
        print(f"Right. {(inspect.getdoc(body) or '').partition(chr(10))[0]}".rstrip())

    return checked


def _own_error(error: Exception) -> str:
    """The error of an attempt, in a sentence, with the line of the attempt that raised it where it can be told."""
    said = f"your answer raised {type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, TypeError) and ("NoneType" in str(error) or "ellipsis" in str(error)):
        return f"{said}. Does it return something? `...` returns None"
    return f"{said}; try it in a cell of its own"


def refuses(checked: Callable[..., None], *attempts: Any) -> None:
    """Show what a check says to wrong attempts; AssertionError if it lets one through. For solution notebooks.

    An attempt that is a tuple is given as several arguments.
    """
    for number, attempt in enumerate(attempts, start=1):
        try:
            checked(*(attempt if isinstance(attempt, tuple) else (attempt,)))
        except Hint as shown:
            print(f"Attempt {number}: {shown}")
        else:
            raise AssertionError(f"{getattr(checked, '__name__', 'the check')} lets wrong attempt {number} through")


SOLUTION = re.compile(r"(?m)^([ \t]*)#\| solution\n(?:.*\n)*?[ \t]*#\| end$")
SHORT_SOLUTION = re.compile(r"(?m)= .*[^ ] +#\| solution$")
FROM_SOLUTIONS, FROM_EXERCISES = "# Solutions: ", "# Exercises: "


def is_only_for_solutions(source: str) -> bool:
    """Whether a cell is left out of the starter: wrong attempts, and what explains a solution."""
    return source.startswith(("#| wrong", "<!-- solution -->"))


def without_answers(source: str) -> str:
    """A cell's source with dots where the answers are."""
    return SHORT_SOLUTION.sub("= ...", SOLUTION.sub(r"\1...", source))


def starter_of(solutions: NotebookNode) -> NotebookNode:
    """The exercise notebook of a solution notebook: answers replaced by dots, no outputs, the solution's badges."""
    cells = []
    for cell in solutions.cells:
        if is_only_for_solutions(cell.source):
            continue
        source = cell.source.replace(FROM_SOLUTIONS, FROM_EXERCISES, 1)
        kept = NotebookNode(cell_type=cell.cell_type, id=cell.id, metadata=NotebookNode(), source=source)
        if cell.cell_type == "code":
            kept.source = without_answers(source)
            kept.update(outputs=[], execution_count=None)
        cells.append(kept)
    metadata = {key: value for key, value in solutions.metadata.items() if key != "widgets"}
    return NotebookNode(cells=cells, metadata=NotebookNode(metadata), nbformat=4, nbformat_minor=5)


def read_solutions(path: Path) -> NotebookNode:
    """A solution notebook; ValueError with its name if it cannot be read."""
    try:
        notebook: NotebookNode = nbformat.read(path, as_version=4)
    except (ValueError, nbformat.ValidationError) as error:
        raise ValueError(f"solutions/{path.name} is no notebook that can be read: {error}") from error
    return notebook


def write_starters(root: Path, *, check: bool = False) -> list[str]:
    """Write `notebooks/exercises/` from `notebooks/solutions/`; the names of those that changed, or would."""
    url, ref, changed = project_url(root), release_ref(root), []
    for path in sorted((root / "notebooks" / "solutions").glob("*.ipynb")):
        text = nbformat.writes(starter_of(read_solutions(path))) + "\n"
        text = relinked_notebook(text, url, f"exercises/{path.name}", ref)
        target = root / "notebooks" / "exercises" / path.name
        if renew(target, text, check=check):
            changed.append(path.name)
    return changed


def exercises_command(arguments: Sequence[str] | None = None) -> int:
    """`helios book exercises [--check]`; returns the exit status: 1 when a starter is not what its solution says."""
    parser = argparse.ArgumentParser("helios book exercises", description="Write the exercises from their solutions.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when an exercise is out of date")
    check = parser.parse_args(arguments).check
    try:
        root = require_checkout()
        changed = write_starters(root, check=check)
    except (NoCheckout, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for name in changed:
        print(f"exercises/{name} is out of date; run `helios book exercises`" if check else f"wrote exercises/{name}")
    return 1 if lonely_starters(root) or (check and changed) else 0


def lonely_starters(root: Path) -> list[str]:
    """Report exercise notebooks without a solution, which nothing writes."""
    folders = (root / "notebooks" / "exercises", root / "notebooks" / "solutions")
    starters, solutions = ({path.name for path in folder.glob("*.ipynb")} for folder in folders)
    for name in sorted(starters - solutions):
        print(f"exercises/{name} has no solution: write solutions/{name}, or delete it", file=sys.stderr)
    return sorted(starters - solutions)


if __name__ == "__main__" and not hasattr(builtins, "__IPYTHON__"):
    sys.exit(exercises_command())
