# Generated from notebooks/27_authors.ipynb by `helios export`; edit the notebook.
"""A new chapter: page, notebook, solution and starter, in the form that the tests ask for."""

from __future__ import annotations

import argparse
import builtins
import keyword
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from helios.book.exercises import write_starters
from helios.book.export import export_all
from helios.book.links import project_url, release_ref, relink
from helios.book.notebook import NoCheckout, require_checkout
from helios.book.references import in_order
from helios.book.renumber import (
    BookError,
    apply_plan,
    chapters_in,
    insertion,
    plan_renumbering,
    read_book,
    require_clean,
)

__all__ = [
    "META",
    "ONES",
    "SETUP",
    "TENS",
    "filled",
    "finish",
    "in_words",
    "name_of",
    "new_chapter",
    "new_command",
    "notebook_of",
    "place_for",
    "run_notebook",
    "template_of",
    "usable",
    "with_row",
]


def name_of(title: str) -> str:
    """A title as a name for files and module; BookError when nothing usable is left of it."""
    plain = unicodedata.normalize("NFKD", title.replace("'", "").replace("’", "")).encode("ascii", "ignore").decode()
    return usable("_".join(re.findall(r"[a-z0-9]+", plain.lower())), title)


def usable(name: str, given: str) -> str:
    """The name, if a module may be called so."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise BookError(f"{given!r} gives no name for files and module: add one, such as --name speculation")
    return name


ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number from 0 to 99 in words: twenty-seven."""
    if number < len(ONES):
        return ONES[number]
    ten, one = divmod(number, 10)
    return TENS[ten - 2] + (f"-{ONES[one]}" if one else "")


def with_row(readme: str, number: int, name: str, title: str) -> str:
    """README with the chapter in its table, and the number of notebooks in words raised by one."""
    page, stem = f"{number:02}-{name.replace('_', '-')}", f"{number:02}_{name}"
    row = f"| {number:02} | {title} | [page](chapters/{page}.md) | [notebook](notebooks/{stem}.ipynb) | `{name}.py` |"
    rows = re.findall(r"(?m)^\| \d\d \|.*\(chapters/\d\d-.*$", readme)
    if rows:
        readme = in_order(readme.replace(rows[-1], f"{rows[-1]}\n{row}"))
    word = in_words(len(rows)).capitalize()
    return readme.replace(f"{word} notebooks build", f"{in_words(len(rows) + 1).capitalize()} notebooks build")


META = {
    "accelerator": "GPU",
    "colab": {"provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SETUP = """# Setup: on Colab this installs Helios beside the torch that is there; elsewhere it is installed already.
import importlib.metadata, importlib.util
if importlib.util.find_spec("helios") is None:
    keep = " ".join(f'"{{name}}=={{importlib.metadata.version(name)}}"' for name in ("torch", "numpy"))
    {percent}pip install -q "helios @ git+{url}@{ref}" {{keep}}"""


def template_of(root: Path, name: str) -> str:
    """One of the texts that new chapters are made from."""
    path = root / "notebooks" / "skeleton" / f"{name}.txt"
    if not path.is_file():
        raise BookError(f"notebooks/skeleton/{name}.txt is missing, and new chapters are made from it: restore it")
    return path.read_text("utf-8")


def filled(template: str, words: Mapping[str, str]) -> str:
    """The template with each @WORD@ replaced."""
    return re.sub(r"@([A-Z]+)@", lambda match: words[match[1]], template)


def notebook_of(template: str, words: Mapping[str, str], ids: str) -> NotebookNode:
    """A notebook that was not run yet from a template of cells."""
    parts = re.split(r"(?m)^--- (md|code)\n", filled(template, words))[1:]
    cells = []
    for place, (kind, source) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        cell = NotebookNode(cell_type="markdown" if kind == "md" else "code", id=f"{ids}-{place:03}")
        cell.update(metadata=NotebookNode(), source=source.rstrip("\n"))
        if kind == "code":
            cell.update(outputs=[], execution_count=None)
        cells.append(cell)
    return NotebookNode(cells=cells, metadata=NotebookNode(META), nbformat=4, nbformat_minor=5)


def run_notebook(path: Path) -> bool:
    """Run a notebook from top to bottom and save it with its outputs; False, and a sentence on stderr, if it failed."""
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--log-level=ERROR", "--to", "notebook", "--execute"]
    environment = {**os.environ, "HELIOS_RECORD": "1"}
    done = subprocess.run(
        [*command, "--inplace", path.name], cwd=path.parent, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        why = re.sub(r"\x1b\[[\d;]*m", "", done.stderr.strip().rpartition("\n")[2])
        print(f"{path.parent.name}/{path.name} was not run ({why}): run it top to bottom and save it", file=sys.stderr)
        return False
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = NotebookNode(META)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    nbformat.write(notebook, path)
    return True


def place_for(chapters: Mapping[int, str], at: int | None, name: str) -> int:
    """The number of a new chapter: as asked, else before the launch chapter; BookError if it cannot be."""
    after = max(chapters, default=-1) + 1
    if at is None:
        at = next((number for number, other in chapters.items() if other == "launch"), after)
    if name in chapters.values():
        raise BookError(f"a chapter is called {name} already: choose another title, or add --name")
    if at == 0:
        raise BookError("chapter 0 builds the exporter, which all others need: choose --at 1 or a later number")
    if not 0 < at <= min(after, 99):
        raise BookError(f"--at {at} would leave a gap: the next free number is {after}")
    return at


def new_chapter(root: Path, title: str, *, at: int | None = None, name: str = "", run: bool = True) -> list[str]:
    """Make a chapter's page, notebook, solution and starter, and room for them; the paths of the files it made."""
    name = usable(name, name) if name else name_of(title)
    files = read_book(root)
    chapters = chapters_in(files)
    number = place_for(chapters, at, name)
    page, stem = f"chapters/{number:02}-{name.replace('_', '-')}.md", f"{number:02}_{name}"
    texts = [template_of(root, kind) for kind in ("page", "notebook", "solutions")]
    made = [page, *(f"notebooks/{folder}{stem}.ipynb" for folder in ("", "solutions/"))]
    for path in (f"helios/{name}.py", f"helios/{name}"):
        if (root / path).exists():
            raise BookError(f"{path} exists already: choose another title, or add --name")
    apply_plan(plan_renumbering(files, insertion(chapters, number)), root)
    setup = SETUP.format(percent="%", url=project_url(root), ref=release_ref(root))
    words = {"TITLE": title, "NAME": name, "NN": f"{number:02}", "STEM": stem, "SETUP": setup}
    (root / page).write_text(filled(texts[0], words), "utf-8", newline="\n")
    for path, template, ids in zip(made[1:], texts[1:], (f"{number:02}", f"x{number:02}"), strict=True):
        (root / path).parent.mkdir(exist_ok=True)
        nbformat.write(notebook_of(template, words, ids), root / path)
    readme = root / "README.md"
    readme.write_text(with_row(readme.read_text("utf-8"), number, name, title), "utf-8", newline="\n")
    return finish(root, made, run)


def finish(root: Path, made: list[str], run: bool) -> list[str]:
    """Write what is generated: links, starters, the module; and run the new notebooks. All paths that were made."""
    if run:
        with ThreadPoolExecutor() as workers:
            list(workers.map(run_notebook, [root / path for path in made[1:]]))
    relink(root)
    starters = [f"notebooks/exercises/{name}" for name in write_starters(root)]
    modules = list(export_all(root).diffs)
    return [*made, *starters, *modules]


def new_command(arguments: Sequence[str] | None = None) -> int:
    """`helios book new TITLE [--at NN] [--name NAME] [--no-run] [--force]`; returns the exit status."""
    parser = argparse.ArgumentParser("helios book new", description="Begin a chapter that already has the book's form.")
    parser.add_argument("title", help="the chapter's title; file names are made from it")
    parser.add_argument("--at", type=int, metavar="NN", help="its number; default: before the launch chapter")
    parser.add_argument("--name", default="", help="what files and module are called; default: from the title")
    parser.add_argument("--no-run", action="store_true", help="do not run the new notebooks")
    parser.add_argument("--force", action="store_true", help="even with changes that are not committed")
    options = parser.parse_args(arguments)
    try:
        root = require_checkout()
        require_clean(root, force=options.force)
        made = new_chapter(root, options.title, at=options.at, name=options.name, run=not options.no_run)
    except (ValueError, NoCheckout, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(*(f"wrote {path}" for path in made), sep="\n")
    print("Write over the page and the notebook, add two exercises, then `make export` and `make test`.")
    return 0


if __name__ == "__main__" and not hasattr(builtins, "__IPYTHON__"):
    sys.exit(new_command())
