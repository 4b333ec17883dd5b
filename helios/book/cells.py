# Generated from notebooks/00_how_this_book_works.ipynb by `helios export`; edit the notebook.
"""Notebook cells as pieces of a module: read, cut into statements, and continued classes folded."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Cell",
    "DIRECTIVE",
    "ExportError",
    "Piece",
    "bound_names",
    "check_methods",
    "continued_body",
    "first_line",
    "fold",
    "is_continued",
    "parse",
    "pieces_of",
    "read_notebook",
    "split_directives",
    "title_docstring",
]


class ExportError(ValueError):
    """A notebook cannot be exported; the message names notebook, cell and line, and says what to change."""


@dataclass(frozen=True)
class Cell:
    """One export cell: where it stands, and where it goes."""

    notebook: str  # file name
    number: int  # from 1, prose cells counted too
    module: str  # below helios: "kv.pages"
    text: str  # directive lines are blanked, not removed: line numbers stay those of the cell

    def error(self, line: int, problem: str) -> ExportError:
        return ExportError(f"{self.notebook}, cell {self.number}, line {line}: {problem}")


DIRECTIVE = re.compile(r"#\|\s*(default_exp|export)(?:\s+([a-z_]\w*(?:\.[a-z_]\w*)*))?\s*")


def split_directives(cell: Cell) -> tuple[dict[str, str], str]:
    """The directives among a cell's leading comment lines, and the text with those lines blanked."""
    found: dict[str, str] = {}
    lines = cell.text.split("\n")
    for index, line in enumerate(lines):
        if not line.startswith("#"):
            break
        if not line.startswith("#|"):
            continue
        match = DIRECTIVE.fullmatch(line)
        if match is None:
            raise cell.error(index + 1, f"`{line}` is no directive; write `#| default_exp NAME` or `#| export [NAME]`")
        found[match[1]] = match[2] or ""
        lines[index] = ""
    return found, "\n".join(lines)


def title_docstring(notebook: str, markdown: str) -> str:
    """A module docstring from a notebook's first cell: its title, and the paragraph below it."""
    title, _, rest = markdown.strip().partition("\n")
    paragraph = re.split(r"\n\s*\n|<!--", rest.strip())[0].strip()
    if not title.startswith("# ") or not paragraph:
        raise ExportError(f"{notebook}, cell 1, line 1: begin with `# Title` and a one-paragraph summary")
    headline = title.removeprefix("# ").strip()
    headline += "" if headline.endswith((".", "?", "!")) else "."
    text = f"{headline}\n\n{textwrap.fill(paragraph, 100)}\n".replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{text}"""'


def read_notebook(path: Path) -> tuple[str, list[Cell]]:
    """The docstring that a notebook's main module gets, and the notebook's export cells in order."""
    try:
        raw = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text("utf-8"))["cells"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(f"{path.name} is not a notebook that can be read: {error}") from error
    default, marked = "", []
    for number, (kind, source) in enumerate(raw, start=1):
        cell = Cell(path.name, number, "", source)
        directives, text = split_directives(cell) if kind == "code" else ({}, "")
        default = directives.get("default_exp", "") or default
        if "export" in directives:
            marked.append((number, directives["export"], text))
    cells = [Cell(path.name, number, name or default, text) for number, name, text in marked]
    for cell in cells:
        if not cell.module:
            raise cell.error(1, "`#| export` names no module, and no cell says `#| default_exp NAME`")
    return (title_docstring(path.name, raw[0][1]) if cells else ""), cells


@dataclass
class Piece:
    """A top-level statement with the comments above it; a folded class has one node per part."""

    cell: Cell
    nodes: list[ast.stmt]
    start: int  # lines of the cell above `text`
    text: str


def parse(cell: Cell) -> list[ast.stmt]:
    try:
        return ast.parse(cell.text).body
    except SyntaxError as error:
        line = error.lineno or 1
        for number, text in enumerate(cell.text.split("\n"), start=1):
            if text.lstrip().startswith(("%", "!")):
                raise cell.error(
                    number, f"`{text.strip()}` is a notebook command; an export cell is plain Python"
                ) from None
        raise cell.error(line, f"{error.msg}; an export cell must be valid Python by itself") from None


def pieces_of(cell: Cell) -> list[Piece]:
    """Cut a cell into its top-level statements without losing a line: comments go with what follows them."""
    lines, body, done = cell.text.split("\n"), parse(cell), 0
    pieces = []
    for index, node in enumerate(body):
        end = len(lines)
        if index + 1 < len(body):
            end, following = node.end_lineno or 0, first_line(body[index + 1])
            if following <= end:
                raise cell.error(following, "two statements on one line; give each its own")
            while end + 1 < following and not lines[end][:1].strip():
                end += 1  # an indented comment below a block still belongs to the block
        pieces.append(Piece(cell, [node], done, "\n".join(lines[done:end])))
        done = end
    return pieces


def first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def is_continued(node: ast.stmt) -> bool:
    """Whether this is `class X(X):`, a class taken up again."""
    return isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == node.name for b in node.bases)


def fold(pieces: Iterable[Piece]) -> list[Piece]:
    """Append the body of every `class X(X):` to the X before it, which keeps its decorators, bases and docstring."""
    folded: list[Piece] = []
    classes: dict[str, Piece] = {}
    for piece in pieces:
        node = piece.nodes[0]
        if isinstance(node, ast.ClassDef) and is_continued(node):
            whole = classes.get(node.name)
            if whole is None:
                raise piece.cell.error(node.lineno, f"no earlier export cell begins class {node.name} in this module")
            whole.text += "\n\n" + continued_body(piece, node)
            whole.nodes.append(node)
            check_methods(piece.cell, whole.nodes)
            continue
        if isinstance(node, ast.ClassDef):
            classes[node.name] = piece
        folded.append(piece)
    return folded


def continued_body(piece: Piece, node: ast.ClassDef) -> str:
    """The lines below `class X(X):` less its docstring; comments above it come along, indented."""
    if len(node.bases) > 1 or node.keywords or node.decorator_list or node.body[0].lineno == node.lineno:
        raise piece.cell.error(node.lineno, f"continue a class as `class {node.name}({node.name}):`, its body below")
    lines = piece.text.split("\n")
    header = node.lineno - 1 - piece.start
    below = header + 1
    if ast.get_docstring(node) is not None:
        below = (node.body[0].end_lineno or node.lineno) - piece.start
    return "\n".join([f"    {line}" for line in lines[:header] if line.strip()] + lines[below:])


def check_methods(cell: Cell, parts: Sequence[ast.stmt]) -> None:
    """Refuse a method that two parts of one class define (decorated ones, such as property setters, may repeat)."""
    seen: set[str] = set()
    for node in (member for part in parts if isinstance(part, ast.ClassDef) for member in part.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
            if node.name in seen:
                raise cell.error(node.lineno, f"method {node.name} exists already in an earlier part of the class")
            seen.add(node.name)


def bound_names(node: ast.AST) -> list[str]:
    """The names that a statement gives to its module."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
        case ast.Assign() | ast.AnnAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
            return [name.id for name in names if isinstance(name.ctx, ast.Store)]
    inner = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler))
    return [name for child in inner for name in bound_names(child)]
