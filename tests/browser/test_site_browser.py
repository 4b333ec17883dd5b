"""What a reader does on the site: searches, reads formulas and diagrams, turns the light off, uses the keyboard."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.image
import numpy as np
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

SCHEME = "document.body.dataset.mdColorScheme"
PLOT, DRAWING = "img[src*='08-padding']", "img[src*='drawing-']"
# What the keyboard has to reach: whatever is visible and can be activated, numbered in the order of the page.
NUMBER_TARGETS = """() => {
    const all = document.querySelectorAll("a[href], button, summary, input:not([type=hidden]), [tabindex='0']");
    const seen = [...all].filter(e => e.checkVisibility({visibilityProperty: true, opacityProperty: true})
        && e.getClientRects().length && e.tabIndex >= 0 && !e.closest("[hidden], [aria-hidden=true]"));
    seen.forEach((e, number) => e.dataset.target = number);
    return seen.map(e => e.outerHTML.slice(0, 120));
}"""


def test_formulas_are_drawn(page: "Page") -> None:
    page.goto("06-kv-cache.html", wait_until="networkidle")
    formulas = page.locator(".arithmatex")
    assert formulas.count() > 0 and page.locator(".arithmatex .katex").count() == formulas.count()
    assert page.locator(".katex-error").count() == 0
    assert page.evaluate("document.fonts.check('16px KaTeX_Math')")


def test_diagrams_are_drawn(page: "Page") -> None:
    page.goto("12-scheduler.html", wait_until="networkidle")
    drawn = page.locator("div.mermaid")
    drawn.first.wait_for(timeout=20_000)
    assert page.locator("pre.mermaid").count() == 0
    box = drawn.first.bounding_box()
    assert box and box["width"] > 200 and box["height"] > 60


@pytest.mark.parametrize(("words", "page_found"), [("page table", "08-paged-attention"), ("prefill", "06-kv-cache")])
def test_search_finds(page: "Page", words: str, page_found: str) -> None:
    page.goto("index.html", wait_until="networkidle")
    page.locator("input.md-search__input").fill(words)
    page.locator(".md-search-result__link").first.wait_for(timeout=20_000)
    found = page.locator(".md-search-result__link").evaluate_all("links => links.map(link => link.href)")
    assert any(page_found in url for url in found), found
    assert words.split()[0] in page.locator(".md-search-result__list").inner_text().lower()


def pixels(picture: "Locator") -> "np.ndarray[Any, np.dtype[np.float64]]":
    picture.scroll_into_view_if_needed()
    image = matplotlib.image.imread(io.BytesIO(picture.screenshot()), format="png")
    return np.asarray(image[..., :3], np.float64).mean(-1)


@pytest.mark.parametrize("picture", [PLOT, DRAWING])
def test_dark_mode_switches_plots_and_drawings(page: "Page", picture: str) -> None:
    page.goto("08-paged-attention.html", wait_until="networkidle")
    light = pixels(page.locator(picture).first)
    page.locator("label[title='Dark mode']").click()
    page.wait_for_function(f"{SCHEME} == 'slate'")
    dark = pixels(page.locator(picture).first)
    assert np.median(light) > 0.85 and np.median(dark) < 0.35, "the ground follows the page"
    assert light.min() < 0.5 and dark.max() > 0.6, "and what is drawn stands out from it"


def test_dark_mode_is_chosen_and_kept(page: "Page") -> None:
    page.goto("index.html", wait_until="networkidle")
    assert page.evaluate(SCHEME) == "default"
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("label[title='Dark mode']").click()
    page.wait_for_function(f"{SCHEME} == 'slate'")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.goto("06-kv-cache.html", wait_until="networkidle")
    assert page.evaluate(SCHEME) == "slate"


def test_cells_of_a_notebook_are_coloured(page: "Page") -> None:
    page.goto("notebooks/06_kv_cache.html", wait_until="networkidle")
    assert page.locator(".cell code span.k").count() > 10


@pytest.mark.parametrize("url", ["index.html", "08-paged-attention.html", "notebooks/06_kv_cache.html"])
def test_the_keyboard_reaches_everything(page: "Page", url: str) -> None:
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(url, wait_until="networkidle")
    targets = page.evaluate(NUMBER_TARGETS)
    reached = set()
    for _ in range(2 * len(targets) + 20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement?.dataset.target"))
    missed = [html for number, html in enumerate(targets) if str(number) not in reached]
    assert len(targets) > 10 and not missed, missed


def test_focus_can_be_seen_and_enter_follows_a_link(page: "Page") -> None:
    page.goto("index.html", wait_until="networkidle")
    link = page.locator("a", has_text="Start reading")
    link.focus()
    assert link.evaluate("e => e.matches(':focus')")
    page.keyboard.press("Enter")
    page.wait_for_url("**/00-how-this-book-works.html")


def test_next_leads_through_the_book_and_then_to_the_notebooks(page: "Page", site: Path) -> None:
    page.goto("00-how-this-book-works.html", wait_until="load")
    chapters = sorted(path.name for path in site.glob("[0-9][0-9]-*.html"))
    for name in [*chapters[1:], "00_how_this_book_works.html"]:
        page.locator("a.md-footer__link--next").click()
        page.wait_for_url(f"**/{name}", wait_until="load")
    assert "/notebooks/" in page.url


def test_print_hides_what_is_for_the_screen(page: "Page") -> None:
    page.goto("08-paged-attention.html", wait_until="networkidle")
    assert page.locator("p.links").first.is_visible()
    page.emulate_media(media="print")
    assert not page.locator("p.links").first.is_visible()
    assert not page.locator(".md-footer").first.is_visible()
