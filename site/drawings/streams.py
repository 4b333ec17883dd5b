"""Chapters 02, 16 and 23: who wrote which character, the grid of a Triton launch, and what a slow reader takes."""

from __future__ import annotations

from canvas import Canvas
from style import text_width

__all__ = ["mailroom", "taken", "triton_grid", "who_wrote_what"]

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
        f"Each of {heads} key heads and each of {parts} parts of the context has a program of its own. It follows the "
        f"page table, loads its keys once for {group} query heads, and hands on a part result; the parts are merged.",
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


# Per tick what the worker delivers, (choice, text, whether it ends); and what the reader then takes, if it does.
DELIVERED = (
    ((0, "Hel", False), (3, "Bye", True)),
    ((0, "lo", False), (1, "Hi", False)),
    ((0, "!", True), (2, "No", True)),
)
BUSY = (False, True, False)
CHOICES = ("blue", "green", "amber", "pink")

Event = tuple[int, str, bool]


def taken(delivered: tuple[tuple[Event, ...], ...], busy: tuple[bool, ...]) -> list[list[Event]]:
    """What a reader takes after each tick: all that lies there, joined by choice; nothing while it is busy."""
    waiting: dict[int, tuple[str, bool]] = {}
    taken = []
    for events, occupied in zip(delivered, busy, strict=True):
        for choice, text, ends in events:
            waiting[choice] = (waiting.get(choice, ("", False))[0] + text, ends)
        taken.append([] if occupied else [(choice, *waiting[choice]) for choice in sorted(waiting)])
        waiting = waiting if occupied else {}
    return taken


def mailroom() -> Canvas:
    sheet = Canvas(
        "drawing-23-mailroom",
        "One list a tick into the mailroom, and a reader who takes all that lies there",
        "Ticks 1 to 3 each deliver one list of two events. The reader takes two after tick 1, nothing after tick 2 "
        "because it is still writing, and after tick 3 what has grown: lo and ! as one piece, Hi, and No.",
        284,
    )
    for label, y in (("worker", 58), ("mailroom", 128), ("reader", 176)):
        sheet.text(16, y, label, "quiet")
    room = sheet.rect(108, 112, 436, 32, "plain")
    for number, (events, mine) in enumerate(zip(DELIVERED, taken(DELIVERED, BUSY), strict=True)):
        x = 108 + number * 152.0
        sheet.text(x + 66, 14, f"tick {number + 1}", "ink", "m", bold=True)
        for place, event in enumerate(events):
            _event(sheet, x, 28 + place * 30, event)
        sheet.arrow((x + 66, 88), (x + 66, room.y))
        for place, event in enumerate(mine):
            _event(sheet, x, 176 + place * 30, event)
        if mine:
            sheet.arrow((x + 66, 144), (x + 66, 176))
        else:
            sheet.box(x, 176, 132, 30, "still writing", "ghost", quiet=True)
    return sheet


def _event(sheet: Canvas, x: float, y: float, event: Event) -> None:
    choice, text, ends = event
    sheet.box(x, y, 132, 30, f"{choice}: {text}{', stop' if ends else ''}", CHOICES[choice])
