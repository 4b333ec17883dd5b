"""A small book in a temporary folder, for the exporter to export."""

import json
from pathlib import Path

import pytest

from helios.book.cells import ExportError
from helios.book.export import export_all

TITLE = "# A small part\n\nKeeps a thing, in one sentence.\n\n<!-- badges -->"


class Book:
    """A checkout in a temporary folder, with notebooks of the cells a test gives."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "notebooks").mkdir()
        (root / "pyproject.toml").write_text("[tool.ruff]\nline-length = 120\n")

    def write(self, *cells: str, name: str = "01_part.ipynb", title: str = TITLE) -> Path:
        """Cells that begin with `:` are prose."""
        made = [{"cell_type": "markdown", "source": title, "metadata": {}}]
        for cell in cells:
            kind = "markdown" if cell.startswith(":") else "code"
            made.append({"cell_type": kind, "source": cell.splitlines(keepends=True), "metadata": {}})
        path = self.root / "notebooks" / name
        path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
        return path

    def export(self, *cells: str, module: str = "part") -> str:
        """Export one notebook whose main module is `part`; the text of `module`."""
        self.write("#| default_exp part", *cells)
        export_all(self.root)
        return self.read(module)

    def read(self, module: str) -> str:
        return (self.root / "helios" / f"{module.replace('.', '/')}.py").read_text()

    def refuse(self, *cells: str) -> str:
        """The message with which the cells are refused; nothing may have been written."""
        self.write("#| default_exp part", *cells)
        with pytest.raises(ExportError) as caught:
            export_all(self.root)
        assert not (self.root / "helios").exists()
        return str(caught.value)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)
