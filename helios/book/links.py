# Generated from notebooks/00_how_this_book_works.ipynb by `helios export`; edit the notebook.
"""Links that say where the project lives. Its address stands once, in pyproject.toml; the rest is written from it."""

from __future__ import annotations

import argparse
import builtins
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helios.book.notebook import NoCheckout, require_checkout

__all__ = [
    "COUNTERPART",
    "badges",
    "chapter_page",
    "colab_url",
    "counterpart",
    "links_command",
    "project_facts",
    "project_url",
    "release_ref",
    "relink",
    "relinked_install",
    "relinked_notebook",
    "relinked_page",
    "renew",
]


def project_facts(root: Path) -> dict[str, Any]:
    """The table `[project]` of pyproject.toml."""
    facts: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text("utf-8")).get("project", {})
    return facts


def release_ref(root: Path) -> str:
    """What the set-up cells install: the tag of this version, `v0.1.0`; between releases (`.dev`) the branch main."""
    version = str(project_facts(root).get("version", "0.dev"))
    return "main" if "dev" in version else f"v{version}"


def project_url(root: Path) -> str:
    """The project's address, as `[project.urls] Repository` in pyproject.toml gives it."""
    urls = project_facts(root).get("urls", {})
    if "Repository" not in urls:
        raise ValueError('pyproject.toml names no address: add `Repository = "https://…"` under [project.urls]')
    return str(urls["Repository"]).rstrip("/").removesuffix(".git")


def chapter_page(notebook: str) -> str:
    """The chapter that goes with a notebook: 06_kv_cache.ipynb → 06-kv-cache.md."""
    return Path(notebook).stem.replace("_", "-") + ".md"


def colab_url(url: str, notebook: str) -> str | None:
    """Where Colab opens the notebook, or None when the project does not live where Colab can read it."""
    there = url.replace("https://github.com/", "https://colab.research.google.com/github/")
    return f"{there}/blob/main/notebooks/{notebook}" if there != url else None


COUNTERPART = {"exercises": "solutions", "solutions": "exercises"}


def counterpart(url: str, notebook: str) -> list[str]:
    """The link from a chapter's exercises to their solutions, or back; none in a chapter's notebook."""
    folder, _, name = notebook.rpartition("/")
    other = COUNTERPART.get(folder)
    return [f"[{other.capitalize()}]({url}/blob/main/notebooks/{other}/{name})"] if other else []


def badges(url: str, notebook: str) -> str:
    """The line of links in a first cell; the marker stays, to write it again. `notebook`: its path below notebooks/."""
    colab = colab_url(url, notebook)
    links = [f"[Open in Colab]({colab})"] if colab else []
    links += [f"[Source]({url}/blob/main/notebooks/{notebook})", *counterpart(url, notebook)]
    links.append(f"[Read the chapter]({url}/blob/main/chapters/{chapter_page(notebook)})")
    return " · ".join(["<!-- badges --> " + links[0], *links[1:]])


def relinked_notebook(text: str, url: str, notebook: str, ref: str = "main") -> str:
    """A notebook file with its links renewed, every other byte as it was; it installs what is at `ref`."""
    text = re.sub(r'<!-- badges -->[^"\\]*', lambda _: badges(url, notebook), text, count=1)
    return relinked_install(text, url, ref)


def relinked_install(text: str, url: str, ref: str) -> str:
    """Renew address and tag in `pip install "helios @ git+…@…"`."""
    return re.sub(r'(helios @ git\+)https?://[^"\'\\\s`#]+', lambda match: f"{match[1]}{url}@{ref}", text)


def relinked_page(text: str, url: str, ref: str = "main") -> str:
    """README or CONTRIBUTING with links renewed: the line that begins with the marker, and the commands."""
    start = colab_url(url, "00_how_this_book_works.ipynb")
    links = ["[Read the book](chapters/index.md)", "[Notebooks](notebooks)"]
    links += [f"[Start in Colab]({start})"] if start else []
    line = "<!-- badges --> " + " · ".join(links)
    text = re.sub(r"(?m)^<!-- badges -->.*$", lambda _: line, text)
    text = re.sub(r"git clone https?://[^\s`]+", lambda _: f"git clone {url}", text)
    return relinked_install(text, url, ref)


def renew(path: Path, text: str, *, check: bool) -> bool:
    """Whether the file differs from `text`; it is then written, or with `check` only told of."""
    if path.is_file() and path.read_text("utf-8") == text:
        return False
    if not check:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8", newline="\n")
    return True


def relink(root: Path, *, check: bool = False) -> list[str]:
    """Renew the links of a checkout's notebooks and front pages; returns the files that changed (or would)."""
    url, ref, changed = project_url(root), release_ref(root), []
    pages = [root / name for name in ("README.md", "CONTRIBUTING.md") if (root / name).is_file()]
    for path in [*sorted((root / "notebooks").rglob("*.ipynb")), *pages]:
        if ".ipynb_checkpoints" in path.parts:
            continue
        old = path.read_text("utf-8")
        name = path.relative_to(root / "notebooks").as_posix() if path.suffix == ".ipynb" else ""
        new = relinked_notebook(old, url, name, ref) if name else relinked_page(old, url, ref)
        if renew(path, new, check=check):
            changed.append(path.relative_to(root).as_posix())
    return changed


def links_command(arguments: Sequence[str] | None = None) -> int:
    """`python -m helios.book.links [--check]`; returns the exit status: 1 when a link is out of date."""
    parser = argparse.ArgumentParser("python -m helios.book.links", description="Renew links to the project.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a link is out of date")
    check = parser.parse_args(arguments).check
    try:
        changed = relink(require_checkout(), check=check)
    except (NoCheckout, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for path in changed:
        print(f"{path}: links are out of date; run `python -m helios.book.links`" if check else f"renewed {path}")
    return 1 if check and changed else 0


if __name__ == "__main__" and not hasattr(builtins, "__IPYTHON__"):
    sys.exit(links_command())
