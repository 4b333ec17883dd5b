"""The build hook: notebooks, API reference and ledger become pages, and every page gets the links that belong to it."""

import re
from pathlib import Path
from typing import Any

from ledger import drawn_ledger
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook_pages import notebook_page, notebook_title
from reference import reference_pages

from helios.book.links import chapter_page, colab_url, project_url

# Marks of something that only the browser can draw; only pages that have it load the script for it.
MATHS = 'class="arithmatex"'


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
        {"Build": [f"notebooks/{path.stem}.md" for path in notebooks_of(config)]},
        {
            "Reference": [
                "api/index.md",
                *(f"api/{name}.md" for name in reference_pages(root_of(config)) if name != "index"),
            ]
        },
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and the pictures of the notebooks."""
    url = project_url(root_of(config))
    for path in notebooks_of(config):
        text, images = notebook_page(path, notebook_links(url, path.name))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, data in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=data))
    for name, text in reference_pages(root_of(config)).items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files


def notebook_links(url: str, notebook: str) -> str:
    """The line of links below a notebook page's title."""
    links = [f"[Read the chapter](../{chapter_page(notebook)})"]
    if colab := colab_url(url, notebook):
        links.append(f"[Open in Colab]({colab})")
    links.append(f"[Source]({url}/blob/main/notebooks/{notebook})")
    return " · ".join(links) + "\n{ .links }"


def chapter_links(url: str, notebook: str) -> str:
    """The line of links below a chapter page's title."""
    links = [f"[Build it in the notebook](notebooks/{Path(notebook).stem}.md)"]
    if colab := colab_url(url, notebook):
        links.append(f"[Open in Colab]({colab})")
    links.append(f"[Source]({url}/blob/main/notebooks/{notebook})")
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
    """Draw the ledger, point links to notebooks at their pages, and link each chapter to its notebook."""
    if page.file.generated_by:
        return markdown
    results = Path(config.docs_dir) / "results" / "ledger.json"
    markdown = re.sub(r"<!-- ledger: (.+?) -->", lambda match: drawn_ledger(results, match[1]), markdown)
    markdown = markdown.replace("<!-- chapters -->", chapter_table(config))
    markdown = re.sub(r"\]\(\.\./notebooks/(\d\d_\w+)\.ipynb\)", r"](notebooks/\1.md)", markdown)
    notebook = page.file.src_uri.removesuffix(".md").replace("-", "_") + ".ipynb"
    if (root_of(config) / "notebooks" / notebook).is_file():
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\n{chapter_links(project_url(root_of(config)), notebook)}\n{rest}"
    return markdown


def on_page_content(html: str, page: Page, **_: Any) -> str:
    page.meta["maths"] = MATHS in html
    return html


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Keep pages small: no blank runs outside `<pre>`, and no token spans in notebooks, which colours.js adds again."""
    parts = re.split(r"(<pre.*?</pre>)", output, flags=re.DOTALL)
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(r"\s*\n\s*", "\n", parts[place])
    if page.file.src_uri.startswith("notebooks/"):
        for place in range(1, len(parts), 2):
            parts[place] = re.sub(r"</?span[^>]*>", "", parts[place])
    return "".join(parts)
