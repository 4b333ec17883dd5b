# Generated from notebooks/00_how_this_book_works.ipynb by `helios export`; edit the notebook.
"""Plots that read on white and on black, and carry their description with them."""

from __future__ import annotations

import base64
import html
import importlib
import io
import os
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

from helios.book.notebook import checkout_root

__all__ = ["COLORS", "INK", "STYLE", "figure", "picture", "show"]

# The colours of Okabe and Ito (2008), told apart under every common colour blindness; black is left out because it
# vanishes on a dark page, yellow comes last because it is faint on a light one.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#F0E442")
INK = "#767676"  # contrast 4.5:1 on white and 4.6:1 on black

STYLE: dict[str, Any] = {
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "font.size": 10,
    "axes.titlesize": 11,
    "lines.linewidth": 2,
    "svg.hashsalt": "helios",  # the same picture has the same bytes
} | dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK)


def figure(
    width: float = 6.0, height: float = 3.2, title: str | None = None, rows: int = 1, cols: int = 1
) -> tuple[Figure, Any]:
    """A figure of `width` × `height` inches in the book's style, and its axes (an array when there are several)."""
    parameters: Any = matplotlib.rcParams  # its type lists every key; ours is a plain dict
    parameters.update(STYLE)
    fig = Figure(figsize=(width, height), layout="constrained")
    axes = fig.subplots(rows, cols)
    if title:
        fig.suptitle(title, fontsize=11)
    return fig, axes


def picture(fig: Figure, kind: str) -> bytes:
    """The figure as a "png" or "svg" file without date or versions, so that equal pictures are equal files."""
    if fig.get_layout_engine() is not None:  # it would move things a little at every drawing
        fig.draw_without_rendering()
        fig.set_layout_engine("none")
    buffer = io.BytesIO()
    nothing = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    fig.savefig(buffer, format=kind, dpi=144, transparent=True, metadata=nothing[kind])
    return buffer.getvalue()


def show(fig: Figure, alt: str, name: str | None = None) -> None:
    """Display a figure with its description.

    With a `name`, and HELIOS_RECORD=1, in a checkout: also keep it as chapters/figures/NAME.svg.
    """
    data = base64.b64encode(picture(fig, "png")).decode()
    image = f'<img alt="{html.escape(alt)}" width="{fig.get_figwidth() * 96:.0f}" src="data:image/png;base64,{data}">'
    display: Any = importlib.import_module("IPython.display").display
    display({"text/html": image, "text/plain": alt}, raw=True)
    root = checkout_root()
    if name and root and os.environ.get("HELIOS_RECORD") == "1":
        (root / "chapters" / "figures").mkdir(parents=True, exist_ok=True)
        (root / "chapters" / "figures" / f"{name}.svg").write_bytes(picture(fig, "svg"))
