"""The site in Chromium: quiet, alone with its own host, with drawn formulas, a search that finds, and a dark mode."""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
)
PAGES = ("index.html", "06-kv-cache.html", "notebooks/06_kv_cache.html", "api/index.html", "api/book.links.html")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install it, or name its program in CHROMIUM"),
]
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup-dev")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The built site on a free port."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def chromium(address: str) -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: "sync_api.Browser", address: str) -> Iterator["sync_api.Page"]:
    """A page in a fresh profile; afterwards nothing may have been complained of, or asked of another host."""
    context = chromium.new_context(base_url=address, color_scheme="light")
    page, complaints = context.new_page(), []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("response", lambda answer: complaints.append(answer.url) if answer.status >= 400 else None)
    own = (address, "data:", "blob:")
    page.on("request", lambda asked: None if asked.url.startswith(own) else complaints.append(asked.url))
    yield page
    context.close()
    assert not complaints


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("url", PAGES)
def test_a_page_loads_and_fits(page: "sync_api.Page", url: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(url, wait_until="networkidle")
    assert page.locator("article h1").is_visible()
    broken = "images => images.filter(image => !image.naturalWidth).map(image => image.src)"
    assert page.locator("article img").evaluate_all(broken) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_formulas_are_drawn(page: "sync_api.Page") -> None:
    page.goto("06-kv-cache.html", wait_until="networkidle")
    formulas = page.locator(".arithmatex")
    assert formulas.count() > 0 and page.locator(".arithmatex .katex").count() == formulas.count()
    assert page.locator(".katex-error").count() == 0
    assert page.evaluate("document.fonts.check('16px KaTeX_Math')")


def test_search_finds_a_word(page: "sync_api.Page") -> None:
    page.goto("index.html", wait_until="networkidle")
    page.locator("input.md-search__input").fill("prefill")
    found = page.locator(".md-search-result__link").first
    found.wait_for(timeout=20_000)
    assert "prefill" in page.locator(".md-search-result__list").inner_text().lower()


def test_dark_mode_is_chosen_and_kept(page: "sync_api.Page") -> None:
    scheme = "document.body.dataset.mdColorScheme"
    page.goto("index.html", wait_until="networkidle")
    assert page.evaluate(scheme) == "default"
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("label[title='Dark mode']").click()
    page.wait_for_function(f"{scheme} == 'slate'")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.goto("06-kv-cache.html", wait_until="networkidle")
    assert page.evaluate(scheme) == "slate"


def test_cells_of_a_notebook_are_coloured(page: "sync_api.Page") -> None:
    page.goto("notebooks/06_kv_cache.html", wait_until="networkidle")
    assert page.locator(".cell code span.k").count() > 10
