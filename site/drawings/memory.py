"""Chapters 08 and 09: pages of one pool behind page tables, and pages found again by the hash of what they hold."""

from __future__ import annotations

from canvas import Box, Canvas

__all__ = ["PAGE", "hash_chain", "page_tables", "slot"]

PAGE = 256  # tokens
TABLES = {"X": ([5, 2], 300), "Y": ([7, 4], 258)}  # page table, and tokens stored after the pass
WRITTEN = {"X": [299], "Y": [255, 256, 257]}  # positions that the pass writes
KINDS = {"X": "blue", "Y": "green"}


def slot(table: list[int], position: int) -> int:
    """Where the token at `position` lies in the pool."""
    return table[position // PAGE] * PAGE + position % PAGE


def _tables(sheet: Canvas, pages: list[Box]) -> None:
    """Both page tables, and an arrow from each entry to its page."""
    for x, (name, (table, _)) in zip((120.0, 400.0), TABLES.items(), strict=True):
        sheet.text(x - 12, 31, f"table of {name}", "ink", "e")
        cells = sheet.cells(x, 16, [str(page) for page in table], [KINDS[name]] * len(table), 40)
        for cell, page in zip(cells, table, strict=True):
            sheet.arrow(cell.bottom, pages[page].top, ink=f"a-{KINDS[name]}")


def page_tables() -> Canvas:
    sheet = Canvas(
        "drawing-08-page-tables",
        "Two page tables and the pool they point into",
        "X has pages 5 and 2, the first full and 44 tokens in the second; Y has pages 7 and 4, the first full and 2 "
        "tokens in the second. The pass writes slots 555, 2047, 1024 and 1025. Page 0 is the scratch page.",
        266,
    )
    holds = {page: (name, min(PAGE, stored - PAGE * i)) for name, (table, stored) in TABLES.items()
             for i, page in enumerate(table)}  # fmt: skip
    pages: list[Box] = []
    for number in range(8):
        x, y, name = 28 + number * 64.0, 112.0, holds.get(number, ("", 0))[0]
        pages.append(sheet.rect(x, y, 56, 60, "ghost" if not name else KINDS[name]))
        inside = str(holds[number][1]) if name else "–" if number == 0 else "free"
        sheet.text(x + 28, y + 30, inside, "ink" if name else "quiet", "m")
        sheet.text(x + 28, y + 76, str(number), "quiet", "m")
    _tables(sheet, pages)
    sheet.text(16, 236, "written now: slot", "quiet")
    slots: dict[int, list[int]] = {}
    for name, positions in WRITTEN.items():
        for position in positions:
            place = slot(TABLES[name][0], position)
            slots.setdefault(place // PAGE, []).append(place)
    for page, places in slots.items():
        x = pages[page].middle[0]
        sheet.arrow((x, 226), (x, 198))
        sheet.text(x, 236, ", ".join(map(str, places)), "ink", "m")
    return sheet


def hash_chain() -> Canvas:
    sheet = Canvas(
        "drawing-09-hash-chain",
        "The chain of hashes, and a page table that shares its first page",
        "The salt is the root; block S has page 1; after it come S A with page 2, idle, and S B with page 3. The "
        "second request's table is pages 1, 3 and 4: the first was found, the others it filled itself.",
        310,
    )
    root = sheet.box(20, 64, 70, 44, "salt")
    s = sheet.box(158, 64, 96, 44, "S\npage 1", "blue")
    a = sheet.box(322, 16, 96, 44, "S, A\npage 2", "amber")
    b = sheet.box(322, 112, 96, 44, "S, B\npage 3", "blue")
    sheet.chain([root, s])
    sheet.arrow(s.right, (288, s.middle[1]), (288, a.middle[1]), a.left)
    sheet.arrow((288, s.middle[1]), (288, b.middle[1]), b.left)
    sheet.text(432, 38, "idle", "quiet")
    sheet.text(432, 134, "in use", "quiet")
    sheet.frame(142, 208, 402, 54, "", at=320)
    for above, page in ((s, "1"), (b, "3"), (None, "4")):
        cell = sheet.box(above.x if above else 432, 224, 96, 28, page, "blue")
        if above:
            sheet.arrow(cell.top, above.bottom, ink="a-blue", dash=True)
    sheet.text(16, 238, "second request", "quiet")
    sheet.text(280, 290, "name of a block = SHA-256(name before it, its 256 ids)", "quiet", "m")
    return sheet
