"""Every link and anchor: between the site's pages, in the README and its neighbours, and in the notebooks."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown.extensions.toc import slugify

from helios.book.links import project_url

ROOT = Path(__file__).parents[2]
PAPERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md", "site/theme/vendor/README.md")]
NOTEBOOKS = sorted((ROOT / "notebooks").rglob("[0-9][0-9]_*.ipynb"))
MARKDOWN_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"(?m)^#{1,6} +(.+?) *#*$")


class Links(HTMLParser):
    """The targets of a page's links and pictures, and the anchors that it offers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.targets.add(value)


def has_anchor(page: Links, anchor: str) -> bool:
    """No anchor is always there; those that begin with two lines are the theme's own, for its tabs and palette."""
    return not anchor or anchor.startswith("__") or anchor in page.anchors


def test_every_link_inside_the_site_leads_somewhere(site: Path) -> None:
    pages = {path: Links(path.read_text("utf-8")) for path in site.rglob("*.html")}
    lost = []
    for path, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            there = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if there.is_dir():
                there /= "index.html"
            if not there.is_file():
                lost.append(f"{path.relative_to(site)}: {target}")
            elif there in pages and not has_anchor(pages[there], unquote(parts.fragment)):
                lost.append(f"{path.relative_to(site)}: {target} (no such anchor)")
    assert len(pages) > 80 and not lost, "\n".join(lost[:40])


def test_every_page_is_small(site: Path) -> None:
    large = {path.name: path.stat().st_size for path in site.rglob("*.html") if path.stat().st_size >= 150_000}
    assert not large


def anchors_of(path: Path) -> set[str]:
    """What GitHub can jump to in a Markdown file."""
    headings = HEADING.findall(re.sub(r"(?ms)^```.*?^```", "", path.read_text("utf-8")))
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings}


def lost_links(text: str, folder: Path) -> list[str]:
    """Relative links of a text in `folder` that lead nowhere; links to the project itself are followed, too."""
    url, lost = project_url(ROOT), []
    for target in MARKDOWN_LINK.findall(re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]*`", "", text)):
        own = re.match(rf"{re.escape(url)}/(?:blob|tree|edit)/[\w.]+/([^#]+)(?:#(.+))?$", target)
        parts = urlsplit(target)
        if own:
            there, anchor = ROOT / own[1], own[2]
        elif parts.scheme:
            continue
        else:
            there, anchor = folder / unquote(parts.path), parts.fragment
        if parts.path and not there.exists():
            lost.append(target)
        elif anchor and there.suffix == ".md" and anchor not in anchors_of(there):
            lost.append(f"{target} (no such heading)")
    return lost


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.name)
def test_links_of_readmes_lead_somewhere(path: Path) -> None:
    assert lost_links(path.read_text("utf-8"), path.parent) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_links_of_notebooks_lead_somewhere(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert lost_links(text, path.parent) == []
    colab = re.findall(r"https://colab\.research\.google\.com/github/[^/]+/[^/]+/blob/[^/]+/([^)]+)", text)
    assert all((ROOT / name).is_file() for name in colab)


def test_the_workflow_is_valid() -> None:
    """By the schema of GitHub's workflows; its steps call what `make` and CI call."""
    workflow = ROOT / ".github" / "workflows" / "book.yml"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(workflow)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "run: .ci/run" in workflow.read_text("utf-8")
