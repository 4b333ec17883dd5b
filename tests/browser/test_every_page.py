"""Every page of the site: loads quietly, fits a phone, and has no serious fault that axe-core knows of."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

BROKEN = "images => images.filter(image => !image.naturalWidth).map(image => image.src)"
PHONE, DESK = {"width": 390, "height": 800}, {"width": 1280, "height": 900}
SECTIONS = {
    "chapters": "*.html",
    "notebooks 0": "notebooks/0*.html",
    "notebooks 1": "notebooks/1*.html",
    "notebooks 2": "notebooks/2*.html",
    "exercises": "notebooks/exercises/*.html",
    "solutions": "notebooks/solutions/*.html",
    "reference": "api/*.html",
}


# The colours of code are the same everywhere: looked at on one page, for they make axe-core twice as slow.
COLOURED = "notebooks/06_kv_cache.html"
PLAIN_CODE = "() => document.querySelectorAll('pre code').forEach(code => code.textContent = code.textContent)"


def faults(page: "Page", url: str) -> list[str]:
    """What axe-core calls serious or critical: rule, and the first elements concerned."""
    if url != COLOURED:
        page.evaluate(PLAIN_CODE)
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: make setup-dev")
    options = {"resultTypes": ["violations"], "preload": False, "elementRef": False, "iframes": False}
    found = axe.Axe().run(page, options=options).response["violations"]
    return [
        f"{fault['id']} ({fault['impact']}): {[node['html'][:160] for node in fault['nodes'][:3]]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
    ]


def complaints(page: "Page", url: str) -> list[str]:
    """All that is wrong with one page, on a phone and at a desk."""
    found = []
    page.set_viewport_size(PHONE)
    page.goto(url, wait_until="load")
    if not page.locator("article h1").first.is_visible():
        found.append("no heading to be seen")
    found += [f"broken picture {source}" for source in page.locator("article img").evaluate_all(BROKEN)]
    for size in (PHONE, DESK):
        page.set_viewport_size(size)
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > size["width"]:
            found.append(f"{width} pixels wide on a screen of {size['width']}")
    return found + faults(page, url)


def test_the_sections_are_the_whole_site(site: Path) -> None:
    found = {path for pattern in SECTIONS.values() for path in site.glob(pattern)}
    assert found == set(site.rglob("*.html"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("section", SECTIONS)
def test_pages_load_fit_and_can_be_read_by_everybody(page: "Page", site: Path, section: str) -> None:
    urls = sorted(path.relative_to(site).as_posix() for path in site.glob(SECTIONS[section]))
    assert urls
    wrong = {url: found for url in urls if (found := complaints(page, url))}
    assert not wrong, "\n".join(f"{url}: {found}" for url, found in wrong.items())
