"""The built site, served on a free port, in Chromium."""

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup-dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a browser these tests are skipped with the reason; with REQUIRE_BROWSER set they fail instead."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)
            if CHROMIUM is None and not os.environ.get("REQUIRE_BROWSER"):
                reason = "no Chromium: install it, or name its program in CHROMIUM"
                item.add_marker(pytest.mark.skip(reason=reason))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def chromium() -> Iterator["sync_api.Browser"]:
    assert CHROMIUM, "no Chromium: install it, or name its program in CHROMIUM"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: "sync_api.Browser", address: str) -> Iterator["sync_api.Page"]:
    """A page in a fresh profile; afterwards nothing may have been complained of, or asked of another host."""
    context = chromium.new_context(base_url=address, color_scheme="light", reduced_motion="reduce")
    page, complaints = context.new_page(), []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("response", lambda answer: complaints.append(answer.url) if answer.status >= 400 else None)
    own = (address, "data:", "blob:")
    page.on("request", lambda asked: None if asked.url.startswith(own) else complaints.append(asked.url))
    yield page
    context.close()
    assert not complaints
