"""Chapter 06: what the KV cache holds after each pass, for a prompt of four tokens and an answer of three."""

from __future__ import annotations

from canvas import Canvas

__all__ = ["kv_growth", "rows_through_the_layers"]

PROMPT, ANSWER = "ABCD", "xyz"
CELL, LEFT = 42.0, 90.0


def rows_through_the_layers(prompt: int, answer: int) -> list[tuple[int, int]]:
    """Token rows per pass: with a cache, and without."""
    return [(prompt if number == 0 else 1, prompt + number) for number in range(answer)]


def kv_growth() -> Canvas:
    sheet = Canvas(
        "drawing-06-kv-growth",
        "The KV cache over one prefill and two decode passes",
        "Pass 1 writes slots 0 to 3 with A B C D, pass 2 writes x into slot 4, pass 3 writes y into slot 5; slot 6 "
        "stays free. With the cache 4, 1 and 1 rows go through the layers, without it 4, 5 and 6.",
        236,
    )
    slots = len(PROMPT) + len(ANSWER)
    sheet.text(16, 18, "slot", "quiet")
    for slot in range(slots):
        sheet.text(LEFT + (slot + 0.5) * CELL, 18, str(slot), "quiet", "m")
    sheet.text(436, 18, "rows", "ink", "m")
    sheet.text(512, 18, "no cache", "quiet", "m")
    rows = rows_through_the_layers(len(PROMPT), len(ANSWER))
    stored = ""
    for number, (with_cache, without) in enumerate(rows):
        y = 36 + number * 44.0
        new = PROMPT if number == 0 else ANSWER[number - 1]
        kinds = ["blue"] * len(stored) + ["lit"] * len(new) + ["ghost"] * (slots - len(stored) - len(new))
        stored += new
        sheet.text(16, y + 15, "prefill" if number == 0 else "decode")
        sheet.cells(LEFT, y, list(stored.ljust(slots)), kinds, CELL)
        sheet.text(436, y + 15, str(with_cache), "ink", "m", bold=True)
        sheet.text(512, y + 15, str(without), "quiet", "m")
    sheet.line((410, 166), (544, 166), ink="a-faint")
    sheet.text(436, 182, str(sum(row[0] for row in rows)), "ink", "m", bold=True)
    sheet.text(512, 182, str(sum(row[1] for row in rows)), "quiet", "m")
    sheet.key(LEFT, 216, [("lit", "written now"), ("blue", "kept"), ("ghost", "free")])
    return sheet
