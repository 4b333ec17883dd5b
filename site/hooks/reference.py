"""The API reference, from signatures and docstrings; every symbol links to the notebook cell that builds it."""

import ast
import inspect
import re
from pathlib import Path

from notebook_pages import notebook_title, page_of

from helios.book.export import Module, build, read_modules
from helios.book.links import chapter_page

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_pages: dict[Path, dict[str, str]] = {}


def reference_pages(root: Path) -> dict[str, str]:
    """Markdown pages by name: one a module, and an index. Built once per run."""
    if root not in _pages:
        _pages[root] = make_pages(root)
    return _pages[root]


def make_pages(root: Path) -> dict[str, str]:
    index = ["# Reference", "", "Every module of `helios`, and the chapter that builds it.", ""]
    pages = {"index": ""}
    for notebook in sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        texts = build([notebook], root)
        modules = read_modules(notebook)
        if modules:
            index += [
                "",
                f"**{notebook.stem[:2]} · [{notebook_title(notebook)}](../{chapter_page(notebook.name)})**",
                "",
            ]
        for module in modules:
            tree = ast.parse(texts[module.path])
            name = module.name.replace("__init__", "helios")
            summary = (ast.get_docstring(tree) or "").split("\n")[0]
            index.append(f"- [`{dotted(module)}`]({name}.md): {plain(summary)}")
            pages[name] = module_page(module, tree, notebook)
    return pages | {"index": "\n".join(index) + "\n"}


def dotted(module: Module) -> str:
    return f"helios.{module.name}".removesuffix(".__init__")


def module_page(module: Module, tree: ast.Module, notebook: Path) -> str:
    links = f"Built in [chapter {notebook.stem[:2]}](../{chapter_page(notebook.name)})"
    links += f" · [notebook](../notebooks/{notebook.stem}.md)\n{{ .links }}"
    parts = [f"# `{dotted(module)}`", links, plain(ast.get_docstring(tree) or "")]
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            parts += symbol(node, dotted(module), notebook)
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith("_"):
                        parts += method(member, node.name)
    return "\n\n".join(parts) + "\n"


def symbol(node: Definition, module: str, notebook: Path) -> list[str]:
    anchor = f"{module.replace('helios', 'helios.__init__', module == 'helios')}.{node.name}"
    there = f"../notebooks/{page_of(notebook, anchor)}.md#{anchor}"
    heading = f"## `{node.name}` {{ #{node.name} }}"
    where = f"[where chapter {notebook.stem[:2]} builds it]({there})\n{{ .links }}"
    return [heading, where, signature(node), plain(ast.get_docstring(node) or "")]


def method(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> list[str]:
    heading = f"### `{owner}.{node.name}` {{ #{owner}.{node.name} }}"
    return [heading, signature(node), plain(ast.get_docstring(node) or "")]


def signature(node: Definition) -> str:
    """The definition without its body; of a class its fields and how it is made."""
    lines = [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list]
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in [*node.bases, *(k.value for k in node.keywords)])
        lines.append(f"class {node.name}({bases}):" if bases else f"class {node.name}:")
        fields = (member for member in node.body if isinstance(member, ast.AnnAssign))
        lines += [f"    {ast.unparse(member)}" for member in fields if not ast.unparse(member).startswith("_")]
        makers = (m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__")
        lines += [f"    def __init__{head(maker)}" for maker in makers]
    else:
        keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        lines.append(f"{keyword} {node.name}{head(node)}")
    return "```python\n" + "\n".join(lines) + "\n```"


def head(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Parameters and result; a long list has one parameter a line."""
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    text = ast.unparse(node.args)
    if len(text) + len(result) > 90:
        text = "\n" + ",\n".join(f"        {part}" for part in split_parameters(text)) + ",\n    "
    return f"({text}){result}"


def split_parameters(text: str) -> list[str]:
    """Cut at the commas outside brackets and strings."""
    parts, depth, start, quoted = [], 0, 0, ""
    for place, letter in enumerate(text):
        if quoted or letter in "'\"":
            quoted = "" if letter == quoted else quoted or letter
        elif letter == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
        else:
            depth += (letter in "([{") - (letter in ")]}")
    return [*parts, text[start:].strip()]


def plain(docstring: str) -> str:
    """A docstring as Markdown: outside backticks nothing is markup, so that shapes and products read as written."""
    pieces = re.split(r"(`[^`]+`)", inspect.cleandoc(docstring))
    for place in range(0, len(pieces), 2):
        pieces[place] = pieces[place].replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")
    return "".join(pieces)
