"""Exercises and their solutions as pages, one each."""

import re
from pathlib import Path

from notebook_pages import notebook_text

from helios.book.links import chapter_page, colab_url, project_url

FOLDERS = ("exercises", "solutions")
LINK = re.compile(r"\]\((?:\.\./)+(?:(chapters)/)?")


def exercise_names(root: Path, folder: str) -> list[str]:
    """The pages of one of FOLDERS, in the order of the chapters."""
    return [f"notebooks/{folder}/{path.stem}.md" for path in sorted((root / "notebooks" / folder).glob("*.ipynb"))]


def exercise_pages(root: Path) -> dict[str, str]:
    """The Markdown of every exercise and solution page, by its place in the site."""
    url = project_url(root)
    return {
        f"notebooks/{folder}/{path.stem}.md": exercise_page(path, url, folder)
        for folder in FOLDERS
        for path in sorted((root / "notebooks" / folder).glob("*.ipynb"))
    }


def exercise_page(path: Path, url: str, folder: str) -> str:
    other = FOLDERS[1 - FOLDERS.index(folder)]
    links = [f"[Read the chapter](../../{chapter_page(path.name)})"]
    if colab := colab_url(url, f"{folder}/{path.name}"):
        links.append(f"[Open in Colab]({colab})")
    links.append(f"[{other.capitalize()}](../{other}/{path.stem}.md)")
    links.append(f"[Source]({url}/blob/main/notebooks/{folder}/{path.name})")
    text, _ = notebook_text(path, " · ".join(links) + "\n{ .links }")
    return text
