"""The index of common errors, from the tables in the chapters."""

import re
from pathlib import Path

HEADING = "## Common errors"
ROW = re.compile(r"(?m)^\|(?P<cells>.+)\|$")


def error_rows(page: str) -> list[list[str]]:
    """The rows of a chapter's table of common errors: symptom, cause, fix."""
    section = page.partition(f"\n{HEADING}\n")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", match["cells"]) for match in ROW.finditer(section)]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def errors_page(chapters: Path) -> str:
    """Markdown: every chapter's common errors under its title."""
    text = [
        "# Common errors",
        "",
        "What readers of this book, and writers of engines, have run into: symptom, cause, fix.",
    ]
    for path in sorted(chapters.glob("[0-9][0-9]-*.md")):
        page = path.read_text("utf-8")
        if rows := error_rows(page):
            title = page.partition("\n")[0].removeprefix("# ")
            text += ["", f"## [{title}]({path.name})", "", "| symptom | cause | fix |", "|---|---|---|"]
            text += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(text) + "\n"
