"""A notebook as a page: nbconvert's Markdown, its pictures as files, its export cells titled and anchored."""

import ast
import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import DictLoader
from nbconvert.exporters import MarkdownExporter
from nbconvert.filters import strip_ansi
from parts import Part, anchors_of, parts_of

from helios.book.export import read_modules
from helios.book.links import chapter_page, colab_url, project_url

TEMPLATE = """{% extends 'markdown/index.md.j2' %}
{% block input %}{{ cell | shown_code }}{% endblock input %}
{% block stream %}{{ output.text | shown_text }}{% endblock stream %}
{% block data_text scoped %}{{ output.data['text/plain'] | shown_text }}{% endblock data_text %}
"""
DIRECTIVE = re.compile(r"(?m)^[ \t]*(#\|.*|# NBVAL_\w+)\n?")


def notebook_pages(path: Path) -> tuple[list[Part], dict[str, bytes]]:
    """The pages that a notebook becomes, and its pictures by file name."""
    return made_pages(path, path.stat().st_mtime_ns)


@cache
def made_pages(path: Path, _: int) -> tuple[list[Part], dict[str, bytes]]:
    links = notebook_links(project_url(path.parent.parent), path.name)
    text, images = notebook_text(path, links)
    return parts_of(path.stem, text, links), images


def page_of(path: Path, anchor: str) -> str:
    """The page of a notebook, without suffix, that has the anchor; its first page when none has."""
    return next((part.name for part in notebook_pages(path)[0] if anchor in anchors_of(part.text)), path.stem)


def notebook_links(url: str, notebook: str) -> str:
    """The line of links below a notebook page's title."""
    links = [f"[Read the chapter](../{chapter_page(notebook)})"]
    if colab := colab_url(url, notebook):
        links.append(f"[Open in Colab]({colab})")
    links.append(f"[Source]({url}/blob/main/notebooks/{notebook})")
    return " · ".join(links) + "\n{ .links }"


def notebook_text(path: Path, links: str) -> tuple[str, dict[str, bytes]]:
    """A notebook's Markdown and its pictures by file name; `links` take the place of the first cell's marker."""
    notebook = nbformat.read(path, as_version=4)
    titles = exported_cells(path) if path.parent.name == "notebooks" else {}
    for number, cell in enumerate(notebook.cells, start=1):
        if number in titles:
            cell.metadata["module"], cell.metadata["names"] = titles[number]
    exporter = MarkdownExporter(extra_loaders=[DictLoader({"page.md.j2": TEMPLATE})], template_file="page.md.j2")
    exporter.register_filter("shown_code", shown_code)
    exporter.register_filter("shown_text", shown_text)
    text = str(exporter.from_notebook_node(notebook)[0])
    text = re.sub(r"(?m)^<!-- badges -->.*$", lambda _: links, text, count=1)
    text = re.sub(r"\]\((?:\.\./)?(?:notebooks/)?(\d\d_\w+)\.ipynb\)", r"](\1.md)", text)
    text = re.sub(r"\]\(\.\./chapters/", "](../", text)
    return with_picture_files(text, path.stem)


def notebook_title(path: Path) -> str:
    """The heading of a notebook's first cell."""
    return str(nbformat.read(path, as_version=4).cells[0].source).partition("\n")[0].removeprefix("# ")


def exported_cells(path: Path) -> dict[int, tuple[str, list[str]]]:
    """For each export cell, by number: the module's path, and the classes and functions that it defines."""
    found: dict[int, tuple[str, list[str]]] = {}
    for module in read_modules(path):
        for piece in module.imports + module.body:
            _, names = found.setdefault(piece.cell.number, (module.path, []))
            node = piece.nodes[0]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign):
                names += [f"helios.{module.name}.{name}" for name in names_of(node)]
    return found


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def shown_code(cell: Any) -> str:
    """A code cell without its directives; an export cell names its module and can be linked to."""
    source = DIRECTIVE.sub("", cell.source).strip("\n")
    if not source:
        return ""
    anchors = "".join(f'<div id="{name}"></div>\n' for name in cell.metadata.get("names", []))
    module = cell.metadata.get("module")
    title = f' title="{module}"' if module else ""
    return f"\n{anchors}\n{fenced(source, f'{{ .python .cell{title} }}')}\n"


def shown_text(text: str) -> str:
    return "\n" + fenced(strip_ansi(text).rstrip("\n"), "{ .text .output }") + "\n"


def fenced(text: str, info: str) -> str:
    """A fenced block whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence} {info}\n{text}\n{fence}"


def with_picture_files(text: str, stem: str) -> tuple[str, dict[str, bytes]]:
    """Pictures out of the page into files named by their content, so that an unchanged picture keeps its name."""
    images: dict[str, bytes] = {}

    def name(match: re.Match[str]) -> str:
        kind, data = match[1].replace("svg+xml", "svg"), base64.b64decode(match[2])
        images.setdefault(f"{stem}-{hashlib.sha256(data).hexdigest()[:10]}.{kind}", data)
        return f'src="{next(key for key, value in images.items() if value == data)}"'

    return re.sub(r'src="data:image/(png|jpeg|svg\+xml);base64,([\w+/=\s]+)"', name, text), images
