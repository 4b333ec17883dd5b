"""Write the book's drawings to chapters/figures/: `python site/drawings/draw.py`.

With `--check` nothing is written; exit status 1 and a list if a file is missing, stale or left over.
"""

from __future__ import annotations

import sys
from pathlib import Path

from answers import bucket, draw_on_a_line, frames, timelines
from attention_parts import head_sharing, online_softmax, rotation
from canvas import Canvas
from closeups import answer_parser, grammar_mask, settings_path, watching_layers
from engine_parts import packed_batch, tick_budget, worker_thread
from kernels import bf16_bits, fusion, page_inside
from kv_growth import kv_growth
from memory import hash_chain, page_tables
from streams import mailroom, triton_grid, who_wrote_what
from walk import walks
from whole import choices, export_path, stations

__all__ = ["FIGURES", "drawings", "main", "stale"]

FIGURES = Path(__file__).resolve().parents[2] / "chapters" / "figures"


def drawings() -> list[Canvas]:
    """Every drawing of the book."""
    ones = (
        export_path, who_wrote_what, head_sharing, rotation, draw_on_a_line, timelines, kv_growth, online_softmax,
        page_tables, hash_chain, packed_batch, tick_budget, choices, worker_thread, bf16_bits, page_inside, fusion,
        triton_grid, bucket, frames, answer_parser, grammar_mask, mailroom, stations, watching_layers,
        settings_path,
    )  # fmt: skip
    return [*walks(), *(draw() for draw in ones)]


def stale(folder: Path) -> list[str]:
    """What in `folder` differs from what the code draws, one sentence each."""
    wanted = {f"{drawing.name}.svg": drawing.svg() for drawing in drawings()}
    there = {path.name: path.read_text("utf-8") for path in folder.glob("drawing-*.svg")}
    found = [f"{name} is missing" for name in sorted(wanted.keys() - there.keys())]
    found += [f"{name} is drawn by nobody" for name in sorted(there.keys() - wanted.keys())]
    return found + [f"{name} is stale" for name in sorted(wanted) if there.get(name, wanted[name]) != wanted[name]]


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` compare them."""
    if arguments == ["--check"]:
        found = stale(FIGURES)
        print("\n".join([*found, "Run `python site/drawings/draw.py`."] if found else ["The drawings are up to date."]))
        return 1 if found else 0
    if arguments:
        print("usage: python site/drawings/draw.py [--check]")
        return 2
    for drawing in drawings():
        (FIGURES / f"{drawing.name}.svg").write_text(drawing.svg(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
