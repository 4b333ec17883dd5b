"""The book's words: one spelling, every term in the glossary, a source for every claim about another engine."""

import importlib.util
import json
import re
import sys
from importlib.metadata import files
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "chapters").glob("*.md"))
CHAPTERS = [page for page in PAGES if re.match(r"\d\d-", page.name)]
NOTEBOOKS = sorted((ROOT / "notebooks").rglob("[0-9][0-9]_*.ipynb"))
ENGINES = re.compile(r"\b(vLLM|SGLang|TensorRT-LLM|llama\.cpp|llama-server|FlashInfer|Ollama|LMDeploy|TGI)\b")
LINK = re.compile(r"\]\((?:https?://|comparison\.md)")  # the comparison is our own measurement
# Spelt the American way on purpose: names in code, and words that differ in sense.
AMERICAN = {
    "routing",
    "normalization",
    "program",
    "programs",
    "check",
    "checks",
    "license",
    "meter",
    "meters",
    "mold",
    "story",
    "curb",
    "draft",
    "tire",
}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
each_chapter = pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}-{path.stem}")


def prose(markdown: str) -> str:
    """Markdown without code, links' targets, formulas and HTML."""
    markdown = re.sub(r"(?ms)^\s*(`{3,}|~{3,}).*?^\s*\1", "", markdown)
    markdown = re.sub(r"`[^`\n]+`|<[^>]+>|\\\(.*?\\\)|\$\$.*?\$\$|\]\([^)]*\)", " ", markdown, flags=re.S)
    return re.sub(r"(?m)^( {4,}|\t).*$", "", markdown)


def american() -> dict[str, str]:
    """American spellings, and how they are spelt here."""
    found = next(path for path in files("codespell") or () if path.name == "dictionary_en-GB_to_en-US.txt")
    pairs = (line.split("->") for line in found.read_text("utf-8").splitlines() if "->" in line)
    return {
        theirs.split(",")[0].strip(): ours for ours, theirs in pairs if theirs.split(",")[0].strip() not in AMERICAN
    }


SPELT_OTHERWISE = american()


def misspelt(text: str) -> set[str]:
    words = set(re.findall(r"[a-z]+", prose(text).lower()))
    return {f"{word}: here it is spelt {SPELT_OTHERWISE[word]}" for word in words if word in SPELT_OTHERWISE}


@each_page
def test_pages_have_one_spelling(page: Path) -> None:
    assert not misspelt(page.read_text("utf-8"))


@each_notebook
def test_notebooks_have_one_spelling(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    assert not misspelt("\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"))


@each_chapter
def test_a_chapter_has_the_length_and_the_parts_of_a_chapter(page: Path) -> None:
    text = page.read_text("utf-8")
    assert 1_000 <= len(prose(text).split()) <= 2_200
    for part in ("**The question:**", "## Where we are", "## Common errors", "## What we are not building yet"):
        assert part in text
    for part in ("## Exercises", "## Self-check", "## Further reading", "**Next:**"):
        assert part in text or (part == "**Next:**" and page == CHAPTERS[-1])
    assert re.search(r"(?m)^## .*arithmetic", text, re.I) and "worked example" in text.lower()
    assert text.count('??? question "') >= 3 and len(LINK.findall(text)) >= 3


@each_chapter
def test_a_claim_about_another_engine_has_a_source(page: Path) -> None:
    """In the same paragraph, list item or table as the name, or before in the same section for the same engine."""
    for section in re.split(r"(?m)^## ", page.read_text("utf-8")):
        if re.match(r"(Exercises|Self-check)", section):
            continue
        sourced: set[str] = set()
        for block in re.split(r"\n\s*\n", section):
            names = set(ENGINES.findall(block))
            if LINK.search(block):
                sourced |= names
            assert names <= sourced, f"no source for what is said of {names - sourced}: {block[:200]}"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "site" / "hooks" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_glossary_is_sorted_explained_and_used() -> None:
    glossary = load("glossary")
    text = (ROOT / "chapters" / "glossary.md").read_text("utf-8")
    terms = glossary.parsed(text)
    assert len(terms) == len(re.findall(r"(?m)^:   ", text)) > 80
    names = [term.spellings[0].lower() for term in terms]
    assert names == sorted(names, key=lambda name: re.sub(r"[^a-z0-9]", "", name))
    assert len({term.anchor for term in terms}) == len(terms)
    book = " ".join(prose(page.read_text("utf-8")) + page.read_text("utf-8") for page in CHAPTERS).lower()
    for term in terms:
        assert any(spelling.lower() in book for spelling in term.spellings), f"nobody uses {term.spellings[0]}"
        assert 1 <= len(re.findall(r"[.:;](?:\s|$)", term.text)) <= 5, term.text


def test_the_first_use_of_a_term_is_linked_and_no_other() -> None:
    glossary = load("glossary")
    terms = glossary.parsed('KV cache { #kv data-also="caches" }\n:   Kept keys.\n\nPage { #page }\n:   A block.\n')
    html = '<h2>Page</h2><p><a href="#">page</a>, <code>page</code>; a KV cache has a page, caches too: homepage.</p>'
    linked = glossary.with_links(html, terms)
    assert linked.count('class="term"') == 2
    assert '>KV cache</a> has a <a class="term" href="glossary.html#page" title="A block.">page</a>' in linked


def test_the_notation_follows_from_the_shapes() -> None:
    text = (ROOT / "chapters" / "notation.md").read_text("utf-8")
    rows = re.findall(r"(?m)^\| \\\(([A-Z])(?: = [^)]*)?\\\) \|.*?\| ([\d,]+)(?: M)? \| ([\d,]+)(?: M)? \|$", text)
    for column in (1, 2):
        n = {row[0]: int(row[column].replace(",", "")) for row in rows}
        layer = (n["H"] + 2 * n["K"]) * n["D"] * n["E"] + n["H"] * n["D"] * n["E"] + 3 * n["E"] * n["F"]
        assert round((n["L"] * layer + n["V"] * n["E"]) / 1e6) == n["W"]
        assert n["G"] * n["K"] == n["H"]


def test_the_errors_of_all_chapters_are_in_the_index() -> None:
    page = load("errors_index").errors_page(ROOT / "chapters")
    for chapter in CHAPTERS:
        assert f"({chapter.name})" in page, f"{chapter.name} has no table of common errors"
    assert len(re.findall(r"(?m)^\| ", page)) > 150
