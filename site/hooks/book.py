"""The build hook: notebooks, API reference and ledger become pages, and every page gets the links that belong to it."""

import re
from pathlib import Path
from typing import Any

from comparison import drawn_comparison
from errors_index import errors_page
from exercise_pages import exercise_names, exercise_pages
from glossary import read_terms, with_links
from ledger import drawn_ledger
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook_pages import notebook_pages, notebook_title, page_of
from reference import reference_pages

from helios.book.links import chapter_page, colab_url, project_url

# Marks of something that only the browser can draw; only pages that have it load the script for it.
MATHS, MERMAID = 'class="arithmatex"', 'class="mermaid"'
EXERCISE_LINK = re.compile(r"\]\(\.\./(notebooks/(?:exercises|solutions)/\d\d_\w+)\.ipynb\)")
NOTEBOOK_LINK = re.compile(r"\]\(\.\./notebooks/(\d\d_\w+)\.ipynb(#[^)]+)?\)")


def root_of(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


def notebooks_of(config: MkDocsConfig) -> list[Path]:
    return sorted((root_of(config) / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in what depends on the project's address and on which chapters there are."""
    url = project_url(root_of(config))
    config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": url, "name": "Source"}]
    chapters = sorted(path.name for path in Path(config.docs_dir).glob("[0-9][0-9]-*.md"))
    config.nav = [
        {"Home": "index.md"},
        {"Read": chapters},
        {"Build": [contents_entry(path) for path in notebooks_of(config)]},
        {"Exercises": exercise_names(root_of(config), "exercises")},
        {"Measured": ["comparison.md"]},
        {
            "Reference": [
                "glossary.md",
                "notation.md",
                "errors.md",
                "api/index.md",
                *(f"api/{name}.md" for name in reference_pages(root_of(config)) if name != "index"),
            ]
        },
    ]
    return config


def contents_entry(path: Path) -> str | dict[str, Any]:
    """A notebook in the contents: its page, or under its title the pages of its parts."""
    parts = notebook_pages(path)[0]
    if len(parts) == 1:
        return f"notebooks/{path.stem}.md"
    return {notebook_title(path): [{part.label: f"notebooks/{part.name}.md"} for part in parts]}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and the pictures of the notebooks."""
    for path in notebooks_of(config):
        parts, images = notebook_pages(path)
        for part in parts:
            files.append(File.generated(config, f"notebooks/{part.name}.md", content=part.text))
        for name, data in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=data))
    files.append(File.generated(config, "errors.md", content=errors_page(Path(config.docs_dir))))
    for name, text in exercise_pages(root_of(config)).items():
        files.append(File.generated(config, name, content=text))
    for name, text in reference_pages(root_of(config)).items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files


def chapter_links(url: str, notebook: str, exercises: bool) -> str:
    """The line of links below a chapter page's title."""
    links = [f"[Build it in the notebook](notebooks/{Path(notebook).stem}.md)"]
    if exercises:
        links.append(f"[Exercises](notebooks/exercises/{Path(notebook).stem}.md)")
    if colab := colab_url(url, notebook):
        links.append(f"[Open in Colab]({colab})")
    links.append(f"[Source]({url}/blob/main/notebooks/{notebook})")
    links.append(f"[Edit this page]({url}/edit/main/chapters/{chapter_page(notebook)})")
    return " · ".join(links) + "\n{ .links }"


def chapter_table(config: MkDocsConfig) -> str:
    """The way through the book: every chapter with its title, and that of its notebook."""
    rows = []
    for path in notebooks_of(config):
        page = Path(config.docs_dir) / chapter_page(path.name)
        if page.is_file():
            title = page.read_text("utf-8").partition("\n")[0].removeprefix("# ").split(" · ", 1)[-1]
            built = f"[{notebook_title(path)}](notebooks/{path.stem}.md)"
            rows.append(f"| {path.name[:2]} | [{title}]({page.name}) | {built} |")
    head = "| | Read | Build |\n|---|---|---|\n"
    return '<div class="way" markdown>\n\n' + head + "\n".join(rows) + "\n\n</div>"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw ledger and comparison, point links to notebooks at their pages, and link each chapter to its notebook."""
    if page.file.generated_by:
        return markdown
    results = Path(config.docs_dir) / "results"
    ledger, others = results / "ledger.json", results / "compare.json"
    markdown = re.sub(r"<!-- ledger: (.+?) -->", lambda match: drawn_ledger(ledger, match[1]), markdown)
    markdown = re.sub(r"<!-- comparison: (\w+) -->", lambda match: drawn_comparison(others, match[1]), markdown)
    markdown = markdown.replace("<!-- chapters -->", chapter_table(config))
    markdown = EXERCISE_LINK.sub(r"](\1.md)", markdown)
    markdown = NOTEBOOK_LINK.sub(lambda match: notebook_page_link(root_of(config), match), markdown)
    notebook = page.file.src_uri.removesuffix(".md").replace("-", "_") + ".ipynb"
    root = root_of(config)
    if (root / "notebooks" / notebook).is_file():
        exercises = (root / "notebooks" / "exercises" / notebook).is_file()
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\n{chapter_links(project_url(root), notebook, exercises)}\n{rest}"
    return markdown


def notebook_page_link(root: Path, match: re.Match[str]) -> str:
    stem, anchor = match[1], match[2] or ""
    path = root / "notebooks" / f"{stem}.ipynb"
    return f"](notebooks/{page_of(path, anchor[1:]) if anchor and path.is_file() else stem}.md{anchor})"


def on_page_content(html: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    page.meta["maths"], page.meta["mermaid"] = MATHS in html, MERMAID in html
    if re.match(r"\d\d-", page.file.src_uri):
        html = with_links(html, read_terms(Path(config.docs_dir) / "glossary.md"))
    return html


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Keep pages small: no blank runs or comments, and in notebooks no token spans, which colours.js adds again."""
    parts = re.split(r"(<pre.*?</pre>)", output, flags=re.DOTALL)
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(r"\s*\n\s*", "\n", re.sub(r"<!--.*?-->", "", parts[place], flags=re.DOTALL))
    if page.file.src_uri.startswith("notebooks/"):
        for place in range(1, len(parts), 2):
            parts[place] = re.sub(r"</?span[^>]*>", "", parts[place])
    return "".join(parts)
