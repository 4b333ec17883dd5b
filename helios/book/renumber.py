# Generated from notebooks/27_authors.ipynb by `helios export`; edit the notebook.
"""Chapters get other numbers: files move, and every link, header, cell id and mention follows."""

from __future__ import annotations

import argparse
import builtins
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from helios.book.notebook import NoCheckout, require_checkout
from helios.book.references import PLACED, Rewriting

__all__ = [
    "BookError",
    "CHAPTER",
    "LEFT_ALONE",
    "PLACES",
    "Plan",
    "TEXTS",
    "apply_plan",
    "chapters_in",
    "checked",
    "closing",
    "described",
    "insertion",
    "moving",
    "new_path",
    "plan_renumbering",
    "read_book",
    "renumber_command",
    "require_clean",
]


class BookError(ValueError):
    """The book cannot be changed as asked; the message says what to do instead."""


CHAPTER = re.compile(r"notebooks/(\d\d)_(\w+)\.ipynb|chapters/(\d\d)-([\w-]+)\.md")


def chapters_in(paths: Iterable[str]) -> dict[int, str]:
    """Number and name of each chapter, told from the paths of notebooks and pages."""
    found: dict[int, str] = {}
    for match in filter(None, map(CHAPTER.fullmatch, sorted(paths))):
        number, name = int(match[1] or match[3]), (match[2] or match[4]).replace("-", "_")
        if found.setdefault(number, name) != name:
            raise BookError(f"chapter {number} is both {found[number]} and {name}: give page and notebook one name")
    return dict(sorted(found.items()))


def insertion(chapters: Mapping[int, str], at: int) -> dict[int, int]:
    """Room for a chapter at `at`: whoever is there moves up by one, and so do all that follow without a gap."""
    numbers = {}
    while at in chapters:
        numbers[at] = at + 1
        at += 1
    return numbers


def closing(chapters: Mapping[int, str], gap: int) -> dict[int, int]:
    """No gap at `gap`: all later chapters move down by one."""
    if gap in chapters:
        raise BookError(f"chapter {gap} is there, called {chapters[gap]}: delete its files first, then close the gap")
    return {number: number - 1 for number in chapters if number > gap}


def moving(pairs: Sequence[str]) -> dict[int, int]:
    """The numbers that `OLD=NEW …` asks for."""
    numbers: dict[int, int] = {}
    for pair in pairs:
        match = re.fullmatch(r"(\d\d?)=(\d\d?)", pair)
        if match is None:
            raise BookError(f"{pair!r} is no pair of numbers: write OLD=NEW, both at most two digits")
        if int(match[1]) in numbers:
            raise BookError(f"chapter {int(match[1])} is given two new numbers: give it one")
        numbers[int(match[1])] = int(match[2])
    return numbers


def checked(chapters: Mapping[int, str], numbers: Mapping[int, int]) -> dict[int, int]:
    """The numbers that really change; BookError for a chapter that does not exist and for two in one place."""
    if unknown := sorted(numbers.keys() - chapters.keys()):
        there = ", ".join(map(str, chapters)) or "none"
        raise BookError(f"there is no chapter {unknown[0]}; there are {there}")
    after = Counter(numbers.get(number, number) for number in chapters)
    for number in sorted(after):
        if after[number] > 1:
            raise BookError(
                f"two chapters would be number {number}: move the other one too, or make room with --insert"
            )
        if number > 99:
            raise BookError("names have two digits, so 99 is the last chapter")
    return {old: new for old, new in numbers.items() if old != new}


@dataclass(frozen=True)
class Plan:
    """What a renumbering would do: new path by old, new text by old path, changed phrases by path."""

    moves: dict[str, str]
    texts: dict[str, str]
    changes: dict[str, Counter[tuple[str, str]]]


def new_path(path: str, numbers: Mapping[int, int]) -> str:
    """Where the file goes: chapters' pages, figures, notebooks, solutions and exercises bear the chapter's number."""
    place = PLACED.fullmatch(path)
    return f"{place[1]}{numbers.get(int(place[2]), int(place[2])):02}{place[3]}" if place else path


def plan_renumbering(files: Mapping[str, str], numbers: Mapping[int, int]) -> Plan:
    """The plan for a book given as text by path; pure. BookError as `checked` says, and for a target that exists."""
    chapters = chapters_in(files)
    numbers = checked(chapters, numbers)
    names = {path.rpartition("/")[2].rpartition(".")[0] for path in files if PLACED.fullmatch(path)}
    names |= {f"{number:02}-{name.replace('_', '-')}" for number, name in chapters.items()}
    moves = {path: there for path in files if (there := new_path(path, numbers)) != path}
    if taken := sorted(set(moves.values()) & (files.keys() - moves.keys())):
        raise BookError(f"{taken[0]} exists already, and belongs to no chapter that moves: rename or delete it")
    texts, changes = {}, {}
    for path, text in files.items():
        rewriting = Rewriting(numbers, frozenset(names))
        if (new := rewriting.rewritten(path, text)) != text:
            texts[path], changes[path] = new, rewriting.changes
    return Plan(moves, texts, changes)


PLACES = (
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
    "mkdocs.yml",
    "chapters",
    "notebooks",
    "helios",
    "tests",
    "site",
    "scripts",
)
TEXTS = {".md", ".ipynb", ".py", ".yml", ""}
LEFT_ALONE = {"vendor", "__pycache__", ".ipynb_checkpoints"}


def read_book(root: Path) -> dict[str, str]:
    """The files that may name a chapter, by path below `root`; those that can only move have no text."""
    files = {}
    for place in PLACES:
        top = root / place
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            below = path.relative_to(root)
            if path.is_file() and not LEFT_ALONE.intersection(below.parts):
                is_text = path.suffix in TEXTS or path.name.startswith("drawing-")  # drawn by hand, words in it
                files[below.as_posix()] = path.read_bytes().decode("utf-8") if is_text else ""
    return files


def apply_plan(plan: Plan, root: Path) -> None:
    """Carry out a plan on the files below `root`."""
    for path, text in plan.texts.items():
        (root / path).write_bytes(text.encode("utf-8"))
    aside = {path: f"{path}.moving" for path in plan.moves}
    for old, new in [*aside.items(), *((aside[path], there) for path, there in plan.moves.items())]:
        (root / old).rename(root / new)


def require_clean(root: Path, *, force: bool = False) -> None:
    """BookError when git could not undo what is about to be done to `root`; with `force` never."""
    if force:
        return
    try:
        done = subprocess.run(["git", "status", "--porcelain", "--", "."], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        raise BookError("git is not installed, so nothing could be undone: pass --force to go on") from None
    if done.returncode:
        raise BookError("this folder is in no git repository, so nothing could be undone: pass --force to go on")
    if done.stdout.strip():
        raise BookError(
            "there are changes that are not committed; they would mix with the new ones: commit, or pass --force"
        )


def described(plan: Plan) -> list[str]:
    """Lines that say what a plan does: each move, and for each file the phrases that change."""
    lines = [f"{old} → {new.rpartition('/')[2]}" for old, new in plan.moves.items()]
    for path, changes in plan.changes.items():
        phrases = [f"{old} → {new}" + (f" ({count}×)" if count > 1 else "") for (old, new), count in changes.items()]
        lines.append(f"{path}: {'; '.join(phrases) or 'rows sorted'}")
    return lines or ["nothing to do"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("helios book renumber", description="Give chapters other numbers, everywhere.")
    parser.add_argument("pairs", nargs="*", metavar="OLD=NEW", help="chapters and their new numbers")
    parser.add_argument("--insert", type=int, metavar="NN", help="make room for a chapter at NN")
    parser.add_argument("--close", type=int, metavar="NN", help="close the gap that a deleted chapter NN left")
    parser.add_argument("--dry-run", "--check", action="store_true", help="show what would change; write nothing")
    parser.add_argument("--force", action="store_true", help="even with changes that are not committed")
    return parser


def _asked(options: argparse.Namespace, chapters: Mapping[int, str]) -> dict[int, int]:
    """The numbers that the command line asks for."""
    given = [bool(options.pairs), options.insert is not None, options.close is not None]
    if sum(given) != 1:
        raise BookError("say what to move: OLD=NEW …, or --insert NN, or --close NN; one of them")
    if options.pairs:
        return moving(options.pairs)
    return insertion(chapters, options.insert) if options.insert is not None else closing(chapters, options.close)


def renumber_command(arguments: Sequence[str] | None = None) -> int:
    """`helios book renumber (OLD=NEW … | --insert NN | --close NN) [--dry-run] [--force]`; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        root = require_checkout()
        files = read_book(root)
        plan = plan_renumbering(files, _asked(options, chapters_in(files)))
        if not options.dry_run and plan.moves:
            require_clean(root, force=options.force)
            apply_plan(plan, root)
    except (BookError, NoCheckout, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(*described(plan), sep="\n")
    if plan.moves and not options.dry_run:
        print("Done. Look at `git diff`; `make test ONLY=export,links,exercises,site` says whether all is well.")
    return 0


if __name__ == "__main__" and not hasattr(builtins, "__IPYTHON__"):
    sys.exit(renumber_command())
