"""The built site: strict, small, complete in its links, and asking no other host for anything."""

import re
from pathlib import Path

import pytest

from helios.book.links import chapter_page

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|object|embed|link)\b[^>]*(?:src|href|data)=\"(?:https?:)?//"
)

pytestmark = pytest.mark.slow
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def pages(site: Path, path: Path) -> dict[str, str]:
    """The pages of a notebook by name: one, or one a part."""
    found = [site / "notebooks" / f"{path.stem}.html", *sorted((site / "notebooks").glob(f"{path.stem}-*.html"))]
    return {page.name: page.read_text("utf-8") for page in found}


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        found = LOADED.search(path.read_text("utf-8"))
        assert not found, f"{path.relative_to(site)}: {found.group(0)}"
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text("utf-8")), path.name


@each_notebook
def test_the_pages_of_a_notebook_are_small_and_linked(site: Path, path: Path) -> None:
    found = pages(site, path)
    for name, text in found.items():
        assert len(text.encode()) < 100_000, name
        links = (f"blob/main/notebooks/{path.name}", "colab.research.google.com/github/", chapter_page(path.name)[:-3])
        for link in (*links, *(other for other in found if other != name)):
            assert re.search(rf'<article.*href="[^"]*{re.escape(link)}', text, re.DOTALL), f"{name}: {link}"
        assert "<!-- badges" not in text and not re.search(r'<img [^>]*src="data:', text)


@each_notebook
def test_a_chapter_links_to_its_notebook(site: Path, path: Path) -> None:
    text = (site / chapter_page(path.name).replace(".md", ".html")).read_text("utf-8")
    assert f'href="notebooks/{path.stem}.html"' in text
    assert "<!-- ledger" not in text


def test_every_public_symbol_of_the_reference_leads_to_its_cell(site: Path) -> None:
    links = set()
    for path in (site / "api").glob("*.html"):
        links |= set(re.findall(r'href="\.\./notebooks/([^"#]+)#([^"]+)"', path.read_text("utf-8")))
    assert ("00_how_this_book_works.html", "helios.book.links.project_url") in links
    for name, anchor in links:
        assert f'id="{anchor}"' in (site / "notebooks" / name).read_text("utf-8"), f"{name}#{anchor}"


def test_search_works_without_another_host(site: Path) -> None:
    assert (site / "search" / "search_index.json").stat().st_size > 10_000
