"""Writing chapters: new numbers reach every reference and nothing else, and a new chapter passes the book's own tests.

The toy books here count from 61, so that renumbering the real book never touches what these tests expect.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from helios.book.exercises import exercises_command
from helios.book.new import in_words, name_of, new_chapter, new_command, place_for, with_row
from helios.book.references import Rewriting
from helios.book.renumber import (
    PLACES,
    BookError,
    apply_plan,
    chapters_in,
    checked,
    closing,
    insertion,
    moving,
    plan_renumbering,
    read_book,
    renumber_command,
)

ROOT = Path(__file__).parents[2]
NAMES = frozenset({"61_first_steps", "61-first-steps", "62_pages", "62-pages", "61-pool"})
TOY = {
    "notebooks/61_first_steps.ipynb": '{"id": "61-000", "source": ["61 bytes of chapter\\n", "62, \\"61-pool\\""]}',
    "notebooks/62_pages.ipynb": '{"id": "62-000"}',
    "notebooks/exercises/61_first_steps.ipynb": '{"id": "x61-000"}',
    "notebooks/solutions/61_first_steps.ipynb": '{"id": "x61-000"}',
    "chapters/61-first-steps.md": "# 61 · First steps\n\n![61 pages](figures/61-pool.svg) ![](drawing-walk-61.svg)\n",
    "chapters/62-pages.md": "# 62 · Pages\n\nAs chapters 61–62 say, and [61](61-first-steps.md).\n",
    "chapters/glossary.md": "Page\n:   256 tokens, not (62) of them. (61, 62)\n",
    "chapters/figures/61-pool.svg": "",
    "chapters/figures/drawing-walk-61.svg": "",
    "site/drawings/walk.py": 'ALL = 62  # all\nLIT = {\n    61: ("a", "b"),\n}\nWAYS = {61: "one", 62: "two"}\n',
    "README.md": "| 61 | One | [page](chapters/61-first-steps.md) |\n| 62 | Two | [page](chapters/62-pages.md) |\n",
}


def renumbered(files: Mapping[str, str], numbers: Mapping[int, int]) -> dict[str, str]:
    """A book after a renumbering, without a disk."""
    plan = plan_renumbering(files, numbers)
    return {plan.moves.get(path, path): plan.texts.get(path, text) for path, text in files.items()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("chapter 61 has 61 bytes", "chapter 62 has 61 bytes"),
        ("Chapters 61, 62 and 64; chapters 60–62", "Chapters 62, 63 and 64; chapters 60–63"),
        ("chapters 61 to 63", "chapters 62 to 63"),
        ("In chapter 61, 62 requests; chapter 61 or 62", "In chapter 62, 62 requests; chapter 62 or 63"),
        ("chapter 61.5, chapter 610, chapters of 61", "chapter 61.5, chapter 610, chapters of 61"),
        ("ch. 61 and chapter\n# 61's", "ch. 62 and chapter\n# 62's"),
        ('"see chapter\\n",\n    "61, where"', '"see chapter\\n",\n    "62, where"'),
        ("[Chapter 61](61-first-steps.md)", "[Chapter 62](62-first-steps.md)"),
        ("[61](../chapters/61-first-steps.md)", "[62](../chapters/62-first-steps.md)"),
        ("(../notebooks/61_first_steps.ipynb#x) 61_first… ", "(../notebooks/62_first_steps.ipynb#x) 62_first… "),
        ("61-bit 61_other 161_first_steps a61-pool 61-pool-2x", "61-bit 61_other 161_first_steps a61-pool 61-pool-2x"),
        ("drawing-61-pool drawing-walk-61", "drawing-62-pool drawing-walk-62"),
    ],
)  # fmt: skip
def test_references_get_new_numbers_and_other_numbers_stay(before: str, after: str) -> None:
    assert Rewriting({61: 62, 62: 63}, NAMES).rewritten("chapters/some.md", before) == after


def test_a_book_changes_in_all_its_places() -> None:
    new = renumbered(TOY, insertion(chapters_in(TOY), 61))
    assert new["notebooks/62_first_steps.ipynb"] == TOY["notebooks/61_first_steps.ipynb"].replace(
        '"61-000', '"62-000'
    ).replace('"62, \\"61', '"63, \\"62')
    assert new["notebooks/exercises/62_first_steps.ipynb"] == new["notebooks/solutions/62_first_steps.ipynb"]
    assert new["notebooks/exercises/62_first_steps.ipynb"] == '{"id": "x62-000"}'
    assert new["chapters/62-first-steps.md"].startswith("# 62 · First steps\n\n![61 pages](figures/62-pool.svg)")
    assert new["chapters/63-pages.md"] == "# 63 · Pages\n\nAs chapters 62–63 say, and [62](62-first-steps.md).\n"
    assert new["chapters/glossary.md"] == "Page\n:   256 tokens, not (62) of them. (62, 63)\n"
    assert {"chapters/figures/62-pool.svg", "chapters/figures/drawing-walk-62.svg"} <= new.keys()
    assert new["site/drawings/walk.py"].splitlines() == [
        "ALL = 63  # all", "LIT = {", '    62: ("a", "b"),', "}", 'WAYS = {62: "one", 63: "two"}',
    ]  # fmt: skip


def test_the_way_back_leads_home_and_the_table_stays_in_order() -> None:
    assert renumbered(renumbered(TOY, {61: 62, 62: 61}), {61: 62, 62: 61}) == TOY
    swapped = renumbered(TOY, {61: 62, 62: 61})["README.md"]
    assert swapped == "| 61 | Two | [page](chapters/61-pages.md) |\n| 62 | One | [page](chapters/62-first-steps.md) |\n"
    opened = renumbered(TOY, insertion(chapters_in(TOY), 61))
    assert renumbered(opened, closing(chapters_in(opened), 61)) == TOY


def test_the_real_book_comes_back_but_for_zeros() -> None:
    """Every byte, with one exception: a chapter that a sentence calls 09 is 10 for a while, and then 9."""

    def without_zeros(files: Mapping[str, str]) -> dict[str, str]:
        list_of = r"[Cc]hapters?\s(?:\d+(?:, | and | to |–|-| or )?)+"
        return {path: re.sub(list_of, lambda m: re.sub(r"\b0(?=\d)", "", m[0]), text) for path, text in files.items()}

    book = read_book(ROOT)
    opened = renumbered(book, insertion(chapters_in(book), 8))
    home = renumbered(opened, closing(chapters_in(opened), 8))
    assert home.keys() == book.keys()
    book, home = without_zeros(book), without_zeros(home)
    assert [path for path in book if book[path] != home[path]] == []


def test_numbers_that_cannot_be_are_refused_in_sentences() -> None:
    chapters = {61: "a", 62: "b", 64: "d"}
    assert insertion(chapters, 61) == {61: 62, 62: 63} and insertion(chapters, 63) == {}
    assert closing(chapters, 63) == {64: 63} and moving(["61=62", "62=61"]) == {61: 62, 62: 61}
    for numbers, sentence in (({60: 61}, "no chapter 60"), ({61: 62}, "two chapters"), ({64: 100}, "two digits")):
        with pytest.raises(BookError, match=sentence):
            checked(chapters, numbers)
    for pairs in (["61-62"], ["61=62", "61=63"], ["one=two"]):
        with pytest.raises(BookError, match="pair|two new numbers"):
            moving(pairs)
    with pytest.raises(BookError, match="delete its files first"):
        closing(chapters, 62)
    with pytest.raises(BookError, match="both|one name"):
        chapters_in(["notebooks/61_a.ipynb", "chapters/61-b.md"])
    with pytest.raises(BookError, match="exists already"):
        plan_renumbering({**TOY, "notebooks/exercises/63_first_steps.ipynb": ""}, {61: 63})


def test_names_titles_and_words() -> None:
    assert [name_of(title) for title in ("Paged KV", "Où ?", "What's new")] == ["paged_kv", "ou", "whats_new"]
    for title in ("???", "8 bits", "Class", ""):
        with pytest.raises(BookError, match="--name"):
            name_of(title)
    assert [in_words(n) for n in (7, 19, 20, 27, 99)] == ["seven", "nineteen", "twenty", "twenty-seven", "ninety-nine"]
    row = with_row("Two notebooks build.\n\n" + TOY["README.md"], 63, "more", "More")
    assert row.startswith("Three notebooks build") and "| 63 | More | [page](chapters/63-more.md) |" in row
    assert place_for({0: "how", 1: "launch", 2: "authors"}, None, "new") == 1


def command(folder: Path, *line: str) -> "subprocess.CompletedProcess[str]":
    """A command of the project in a copy, with the copy's package."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "NO_MKDOCS_2_WARNING": "1"}
    environment.pop("HELIOS_RECORD", None)
    return subprocess.run([sys.executable, "-m", *line], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real book in a folder of its own, with a chapter inserted at 08."""
    folder = tmp_path_factory.mktemp("book")
    for name in (*PLACES, "pyproject.toml", "constraints.txt"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_*"))
        else:
            shutil.copy(ROOT / name, folder / name)
    done = command(folder, "helios.book.new", "A chapter in between", "--at", "8", "--force")
    assert done.returncode == 0 and "was not run" not in done.stderr, done.stderr
    return folder


def test_a_chapter_inserted_into_a_copy_passes_the_tests_of_the_form(copy: Path) -> None:
    assert chapters_in(read_book(copy))[8] == "a_chapter_in_between"
    for module in ("export", "links", "exercises"):
        done = command(copy, f"helios.book.{module}", "--check")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    # All but one: what a new chapter lights on the drawing of the walk is its author's to say.
    tests = ("tests/book/test_book.py", "tests/book/test_drawings.py", "-k", "not (lit and a-chapter-in-between)")
    done = command(copy, "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert done.returncode == 0, done.stdout[-3000:]


def test_figures_that_a_notebook_records_bear_its_number() -> None:
    figures = {path.stem for path in (ROOT / "chapters" / "figures").glob("*.svg")}
    for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"):
        for number, name in re.findall(r'\\"(\d\d)-([a-z-]+)\\"', path.read_text("utf-8")):
            assert number == path.name[:2] or f"{path.name[:2]}-{name}" not in figures, f"{path.name}: {number}-{name}"


def test_links_that_say_a_number_lead_to_that_chapter(copy: Path) -> None:
    for root in (ROOT, copy):
        for path in [*(root / "chapters").glob("*.md"), *(root / "notebooks").rglob("*.ipynb")]:
            text = path.read_text("utf-8")
            for said, there in re.findall(r"\[[Cc]hapter (\d+)\]\((?:[./]*chapters/)?(\d\d)-", text):
                assert int(said) == int(there), f"{path.name}: chapter {said} leads to {there}"


@pytest.mark.slow
def test_the_copy_builds_strictly(copy: Path, tmp_path: Path) -> None:
    done = command(copy, "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "site" / "08-a-chapter-in-between.html").is_file()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path, text in TOY.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, "utf-8")
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://github.com/reader/toy"\n')
    shutil.copytree(ROOT / "notebooks" / "skeleton", tmp_path / "notebooks" / "skeleton")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plan_is_shown_and_then_carried_out(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_book(toy)
    assert renumber_command(["--insert", "62", "--dry-run"]) == 0 and read_book(toy) == before
    assert "notebooks/62_pages.ipynb → 63_pages.ipynb" in capsys.readouterr().out
    assert renumber_command(["61=62", "62=61", "--force"]) == 0
    assert {path: text for path, text in read_book(toy).items() if path in before} != before
    apply_plan(plan_renumbering(read_book(toy), {61: 62, 62: 61}), toy)
    assert read_book(toy) == before


def test_without_an_undo_nothing_is_done(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_book(toy)
    assert renumber_command(["61=63"]) == 1 and "no git repository" in capsys.readouterr().err
    subprocess.run(["git", "init", "-q"], check=True)
    assert renumber_command(["61=63"]) == 1 and "not committed" in capsys.readouterr().err
    assert new_command(["A title"]) == 1 and "not committed" in capsys.readouterr().err
    assert read_book(toy) == before


def test_mistakes_are_told_in_sentences(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in (
        (["???", "--force"], "--name"),
        (["Pages", "--force"], "called pages already"),
        (["More", "--at", "80", "--force"], "next free number is 63"),
        (["More", "--at", "0", "--force"], "chapter 0 builds the exporter"),
    ):
        assert new_command(arguments) == 1 and sentence in capsys.readouterr().err
    (toy / "helios").mkdir()
    (toy / "helios" / "more.py").write_text("")
    with pytest.raises(BookError, match="helios/more.py exists"):
        new_chapter(toy, "More", run=False)
    assert renumber_command([]) == 1 and "say what to move" in capsys.readouterr().err
    assert exercises_command(["--check"]) == 1 and "61_first_steps.ipynb is no notebook" in capsys.readouterr().err


def test_outside_a_checkout_each_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, arguments in (("new", ["A title"]), ("renumber", ["--insert", "8"]), ("exercises", [])):
        done = subprocess.run(
            [sys.executable, "-m", f"helios.book.{module}", *arguments], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 1 and "not in a checkout of Helios" in done.stderr and "Traceback" not in done.stderr


def test_the_command_line_finds_the_book_s_commands(toy: Path) -> None:
    from typer.testing import CliRunner

    from helios.cli import app

    runner = CliRunner()
    shown = runner.invoke(app, ["book", "renumber", "--insert", "62", "--dry-run"])
    assert shown.exit_code == 0 and "63_pages.ipynb" in shown.output
    for name in ("new", "renumber", "exercises", "links"):
        answer = runner.invoke(app, ["book", name, "--help"])
        assert answer.exit_code == 0 and "usage: " in answer.output and name in answer.output
