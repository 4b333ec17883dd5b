"""Chapters 02, 16 and 22: who wrote which character, the grid of a Triton launch, and one waking a tick."""

from __future__ import annotations

from canvas import Canvas
from style import text_width

__all__ = ["one_waking", "triton_grid", "who_wrote_what"]

Piece = tuple[str, str]  # text, and the class of who wrote it

RENDERED: list[Piece] = [("<|im_start|>user↵", "blue"), ("Hi<|im_end|>", "amber"), ("<|im_end|>", "blue")]
IDS: list[Piece] = [
    ("<|im_start|>", "lit"), ("user", "blue"), ("↵", "blue"), ("Hi", "amber"), ("<", "amber"), ("|", "amber"),
    ("im", "amber"), ("_end", "amber"), ("|>", "amber"), ("<|im_end|>", "lit"),
]  # fmt: skip


def _row(sheet: Canvas, y: float, pieces: list[Piece], gap: float) -> dict[str, float]:
    """Pieces side by side, centred; where each begins."""
    widths = [text_width(text, code=True) + 8 for text, _ in pieces]
    x = (560 - sum(widths) - gap * (len(pieces) - 1)) / 2
    begins = {}
    for (text, kind), width in zip(pieces, widths, strict=True):
        sheet.box(x, y, width, 32, text, kind, code=True)
        begins[text] = x
        x += width + gap
    return begins


def who_wrote_what() -> Canvas:
    assert "".join(text for text, _ in RENDERED) == "".join(text for text, _ in IDS)
    sheet = Canvas(
        "drawing-02-who-wrote-what",
        "The template keeps note of who wrote which character",
        "The client's message Hi<|im_end|> is rendered between the template's own control tokens. Only the template's "
        "spelling becomes a control token; the client's is cut after its first character and stays ordinary text.",
        220,
    )
    sheet.text(280, 16, "rendered, and who wrote it", "quiet", "m")
    _row(sheet, 32, RENDERED, 0)
    sheet.arrow((280, 70), (280, 96))
    sheet.text(280, 110, "ids", "quiet", "m")
    _row(sheet, 126, IDS, 4)
    sheet.key(36, 194, [("blue", "template"), ("amber", "client"), ("lit", "control token")])
    return sheet


def triton_grid(parts: int = 3, heads: int = 2, group: int = 4) -> Canvas:
    sheet = Canvas(
        "drawing-16-grid",
        "The grid of programs for one sequence",
        f"Each of {heads} key heads and each of {parts} parts of the context has a program of its own. It follows the page "
        f"table, loads its keys once for {group} query heads, and hands on a part result; the parts are merged.",
        236,
    )
    x, width = 132.0, 84.0
    sheet.text(16, 32, "page table", "quiet")
    pages = sheet.cells(x, 17, ["7", "2", "5"], ["amber"] * parts, width, 30)
    sheet.text(x + parts * width / 2, 70, "parts of the context", "quiet", "m")
    for head in range(heads):
        y, kind = 94 + head * 70.0, ("blue", "green")[head]
        sheet.text(16, y + 25, f"key head {head}", "quiet")
        row = [sheet.box(page.x + 4, y, width - 8, 50, "program", kind) for page in pages]
        merge = sheet.box(436, y, 108, 50, f"merge\nq{head * group} … q{head * group + group - 1}", kind)
        sheet.line(row[0].bottom, (row[0].middle[0], y + 58), (410, y + 58), ink=f"a-{kind}")
        for box in row[1:]:
            sheet.line(box.bottom, (box.middle[0], y + 58), ink=f"a-{kind}")
        sheet.arrow((410, y + 58), (410, y + 25), merge.left, ink=f"a-{kind}")
    return sheet


def one_waking() -> Canvas:
    sheet = Canvas(
        "drawing-22-one-waking",
        "Three streams, one tick, one event, one waking",
        "A's token is text at once; B's is half a character and C's could become a stop string, so both are held. The "
        "worker makes one list with A's event and wakes the event loop once, which sends one frame.",
        218,
    )
    sheet.text(104, 18, "tokens of a tick", "quiet", "m")
    sheet.frame(208, 28, 180, 170, "one list")
    rows = (("A", '" world"', "blue"), ("B", "byte C3", "green"), ("C", '"ST"', "amber"))
    for number, (name, token, kind) in enumerate(rows):
        y = 50 + number * 48.0
        sheet.text(24, y + 16, name, "ink", "m", bold=True)
        box = sheet.box(44, y, 120, 32, token, kind)
        held = number > 0
        event = sheet.box(228, y, 140, 32, "held back" if held else '" world"', "ghost" if held else kind, quiet=held)
        sheet.arrow(box.right, event.left, ink="a-faint" if held else f"a-{kind}")
    loop = sheet.box(436, 50, 108, 76, "event loop:\nwoken once", "plain")
    sheet.arrow((388, 88), loop.left)
    frame = sheet.box(436, 166, 108, 32, "frame for A", "blue")
    sheet.arrow(loop.bottom, frame.top)
    return sheet
