# Generated from notebooks/00_how_this_book_works.ipynb by `helios export`; edit the notebook.
"""How this book works: notebooks that become a package.

The package `helios` is written nowhere but in this book: each notebook explains its code piece by
piece, and a small exporter collects the finished pieces into modules. This notebook builds that
exporter, and the helpers that every later notebook uses: they describe the machine, draw plots, and
keep the links true.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import difflib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from helios.book.cells import ExportError, Piece, bound_names, fold, pieces_of, read_notebook
from helios.book.notebook import NoCheckout, require_checkout

__all__ = [
    "Module",
    "Outcome",
    "build",
    "check_cycles",
    "check_names",
    "export_all",
    "export_command",
    "public_names",
    "read_modules",
    "render",
    "ruff",
    "tidy",
    "undefined_name",
]


@dataclass
class Module:
    """One module of the package, in the making."""

    name: str
    notebook: str
    docstring: str
    imports: list[Piece] = field(default_factory=list)
    body: list[Piece] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"helios/{self.name.replace('.', '/')}.py"

    def owned(self) -> list[tuple[str, Piece]]:
        """The names defined here that siblings may use: everything but `_` and dunders, which are per module."""
        names = [(name, piece) for piece in self.body for name in bound_names(piece.nodes[0])]
        return [(name, piece) for name, piece in names if name.strip("_") and not name.startswith("__")]

    def mentions(self) -> set[str]:
        """Every name that occurs in the body: more than it needs from outside, never less."""
        nodes = (inner for piece in self.body for node in piece.nodes for inner in ast.walk(node))
        return {node.id for node in nodes if isinstance(node, ast.Name)}


def read_modules(path: Path) -> list[Module]:
    """The modules that one notebook exports, in the order in which they begin."""
    docstring, cells = read_notebook(path)
    modules: dict[str, Module] = {}
    for cell in cells:
        module = modules.setdefault(cell.module, Module(cell.module, path.name, docstring))
        for piece in pieces_of(cell):
            match piece.nodes[0]:
                case ast.ImportFrom(module="__future__"):
                    pass  # every module gets the same one
                case ast.Import() | ast.ImportFrom():
                    module.imports.append(piece)
                case ast.Expr(value=ast.Constant(value=str())) if not module.body:
                    module.docstring = piece.text.strip()
                case _:
                    module.body.append(piece)
    for module in modules.values():
        module.body = fold(module.body)
    check_names(modules.values())
    return list(modules.values())


def check_names(modules: Iterable[Module]) -> None:
    """Refuse a name with two definitions: cells of a notebook share one namespace, so its modules must too."""
    first: dict[str, Piece] = {}
    for module in modules:
        for name, piece in module.owned():
            node, other = piece.nodes[0], first.setdefault(name, piece)
            if other is not piece and not getattr(node, "decorator_list", []):
                where = f"{name} is exported already from cell {other.cell.number}"
                raise piece.cell.error(node.lineno, f"{where}; a name has one definition in a notebook")


def render(module: Module, siblings: Iterable[Module]) -> str:
    """A module's text before tidying: all imports it may need on top, then its pieces in order."""
    own = {name for piece in module.body + module.imports for name in bound_names(piece.nodes[0])}
    wanted = module.mentions() - own
    imports = [piece.text.strip() for piece in module.imports]
    for other in siblings:
        if other.name != module.name:
            imports += [p.text.strip() for p in other.imports if wanted & set(bound_names(p.nodes[0]))]
            names = sorted({name for name, _ in other.owned()} & wanted)
            imports += [f"from helios.{other.name} import {name}" for name in names]
    header = f"# Generated from notebooks/{module.notebook} by `helios export`; edit the notebook."
    top = [header, module.docstring, "from __future__ import annotations", *imports, public_names(module)]
    return "\n".join(top + [piece.text for piece in module.body]) + "\n"


def public_names(module: Module) -> str:
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
    names = {n for p in module.body if isinstance(p.nodes[0], definitions) for n in bound_names(p.nodes[0])}
    return "" if "__all__" in names else f"__all__ = {sorted(name for name in names if not name.startswith('_'))!r}"


def tidy(texts: dict[str, str], root: Path) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Sort and prune imports and format, with one ruff run for all files.

    Returns the tidied texts, and (path, name) of every name that is still defined nowhere.
    """
    config = ["--config", str(root / "pyproject.toml")] if (root / "pyproject.toml").is_file() else ["--isolated"]
    config += ["--config", 'lint.isort.known-first-party = ["helios"]']
    with tempfile.TemporaryDirectory() as folder:
        for path, text in texts.items():
            (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / path).write_text(text, "utf-8", newline="\n")
        ruff(folder, "check", *config, "--select", "F401,I", "--fix-only", "--quiet")
        ruff(folder, "format", *config, "--quiet")
        found = json.loads(ruff(folder, "check", *config, "--select", "F821", "--output-format", "json"))
        undefined = [(Path(f["filename"]).relative_to(Path(folder).resolve()), f["message"]) for f in found]
        tidied = {path: (Path(folder) / path).read_text("utf-8") for path in texts}
    return tidied, [(path.as_posix(), message.split("`")[1]) for path, message in undefined]


def ruff(folder: str, command: str, *options: str) -> str:
    """Run `ruff command` over a folder and return what it prints; exit status 1 only says that it found something."""
    line = [sys.executable, "-m", "ruff", command, "--no-cache", *options, "."]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, encoding="utf-8")
    if done.returncode > 1 or "No module named ruff" in done.stderr:
        raise ExportError(f"ruff {command} failed (is it installed? `pip install ruff`): {done.stderr.strip()}")
    return done.stdout


def undefined_name(module: Module, name: str) -> ExportError:
    for piece in module.body:
        for node in (inner for part in piece.nodes for inner in ast.walk(part)):
            if isinstance(node, ast.Name) and node.id == name:
                return piece.cell.error(node.lineno, f"`{name}` is neither defined nor imported in an export cell")
    return ExportError(f"{module.notebook}: `{name}` in {module.path} is neither defined nor imported")


def check_cycles(texts: dict[str, str]) -> None:
    """Refuse modules that import each other while they load."""
    graph = {}
    for path, text in texts.items():
        imports = [node.module for node in ast.parse(text).body if isinstance(node, ast.ImportFrom) and node.module]
        graph[path] = {f"{name.replace('.', '/')}.py" for name in imports} & texts.keys()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise ExportError(
            f"these modules import each other: {' → '.join(error.args[1])}; move what they share"
        ) from None


def build(notebooks: Iterable[Path], root: Path) -> dict[str, str]:
    """The final text of every module that the notebooks export, by path; raises before anything is written."""
    modules: dict[str, Module] = {}
    texts: dict[str, str] = {}
    for notebook in notebooks:
        siblings = read_modules(notebook)
        for module in siblings:
            if other := modules.get(module.path):
                raise ExportError(f"{module.notebook} and {other.notebook} both export {module.path}; rename one")
            modules[module.path], texts[module.path] = module, render(module, siblings)
    texts, undefined = tidy(texts, root)
    for path, name in undefined:
        raise undefined_name(modules[path], name)
    check_cycles(texts)
    return texts


@dataclass
class Outcome:
    """What an export changed (or, checking, would change), and modules that no notebook exports."""

    diffs: dict[str, str]
    orphans: list[str]


def export_all(root: Path, *, check: bool = False, only: Sequence[Path] = ()) -> Outcome:
    """Write `helios/` from the notebooks of a checkout, or with `check` only compare.

    `only` limits the export to those notebooks; orphans are then not looked for.
    """
    notebooks = list(only) or sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    texts = build(notebooks, root)
    for folder in sorted({parent.as_posix() for path in texts for parent in Path(path).parents} - {"."}):
        if not only or not (root / folder / "__init__.py").exists():
            texts.setdefault(f"{folder}/__init__.py", "# Generated by `helios export`; edit the notebooks.\n")
    diffs = {}
    for path, text in sorted(texts.items()):
        old = (root / path).read_text("utf-8") if (root / path).exists() else ""
        if old != text or not (root / path).exists():
            diffs[path] = "".join(difflib.unified_diff(old.splitlines(True), text.splitlines(True), path, "notebooks"))
            if not check:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text, "utf-8", newline="\n")
    there = {path.relative_to(root).as_posix() for path in (root / "helios").rglob("*.py")}
    return Outcome(diffs, [] if only else sorted(there - texts.keys()))


def export_command(arguments: Sequence[str] | None = None) -> int:
    """`helios export [--check] [NOTEBOOK…]`; returns the exit status: 1 on drift, orphans or an error."""
    parser = argparse.ArgumentParser("helios export", description="Write helios/ from the notebooks.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="only these (default: all of notebooks/)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and show a diff on drift")
    options = parser.parse_args(arguments)
    try:
        outcome = export_all(require_checkout(), check=options.check, only=options.notebooks)
    except (ExportError, NoCheckout, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for path, diff in outcome.diffs.items():
        print(diff if options.check else f"wrote {path}")
    for path in outcome.orphans:
        print(f"{path}: no notebook exports it; delete it, or write it in a notebook", file=sys.stderr)
    if not outcome.diffs and not outcome.orphans:
        print("helios/ is what the notebooks export")
    return 1 if outcome.orphans or (options.check and outcome.diffs) else 0


# In a notebook, too, `__name__` is "__main__"; IPython marks itself in `builtins`.
if __name__ == "__main__" and not hasattr(builtins, "__IPYTHON__"):
    sys.exit(export_command())
