"""Chapters 04, 05, 17 and 20: a draw on a line, two timelines, a bucket of a recorded graph, and an answer's frames."""

from __future__ import annotations

from itertools import accumulate
from math import exp

from canvas import Canvas

__all__ = ["bucket", "draw_on_a_line", "frames", "kept_ends", "timelines"]

KINDS = ("blue", "green", "amber", "pink")


def kept_ends(logits: list[float], top_p: float) -> tuple[list[float], int]:
    """The ends of the tokens' stretches, likeliest first, and how many tokens `top_p` keeps."""
    weights = [exp(logit - max(logits)) for logit in logits]
    ends = list(accumulate(weight / sum(weights) for weight in weights))
    return ends, sum(before < top_p for before in [0.0, *ends[:-1]])


def draw_on_a_line(top_p: float = 0.7, u: float = 0.62) -> Canvas:
    ends, kept = kept_ends([2.0, 1.0, 0.4, -1.0], top_p)
    drawn = u * ends[kept - 1]
    sheet = Canvas(
        "drawing-04-draw",
        "Drawing a token is finding a place on a line",
        f"Tokens a and b are kept; their stretches end at {ends[0]:.3f} and {ends[1]:.3f}. c and d are filtered out. "
        f"u = {u} times {ends[kept - 1]:.3f} is {drawn:.3f}, inside the stretch of a.",
        160,
    )
    left, length, y = 24.0, 512.0, 56.0
    starts = [0.0, *ends[:-1]]
    for number, (name, start, end) in enumerate(zip("abcd", starts, ends, strict=True)):
        kind = KINDS[number] if number < kept else "ghost"
        wide = (end - start) * length
        sheet.box(left + start * length, y, wide, 36, name, kind, bold=number < kept, quiet=number >= kept)
    for place in [0.0, *ends[:kept]]:
        sheet.text(left + place * length, y + 54, f"{place:.3f}".replace("0.000", "0"), "quiet", "m")
    sheet.arrow((left + drawn * length, 28), (left + drawn * length, y), ink="a-orange")
    sheet.text(left + drawn * length, 16, f"u × {ends[kept - 1]:.3f} = {drawn:.3f}", "ink", "m")
    sheet.text(left + (ends[kept - 1] + 1) / 2 * length, 16, "filtered", "quiet", "m")
    sheet.key(left, 142, [("blue", "kept: drawn among these"), ("ghost", "never drawn")])
    return sheet


def timelines() -> Canvas:
    tokens = {"A": [1.0, 2.0, 3.0], "B": [2.0, 4.0]}
    sheet = Canvas(
        "drawing-05-timelines",
        "Two requests on one clock: first tokens, gaps and ends",
        "Both are sent at 0. A's tokens come at 1, 2 and 3 seconds, B's at 2 and 4. Time to first token is 1 and 2; "
        "the gaps are 1, 1 and 2; three tokens have two gaps.",
        190,
    )
    left, second = 64.0, 112.0
    for (name, times), y, kind in zip(tokens.items(), (46.0, 102.0), KINDS, strict=False):
        sheet.text(24, y, name, "ink", "m", bold=True)
        sheet.arrow((left, y), (left + times[0] * second - 14, y), ink="a-orange")
        sheet.text(left + times[0] * second / 2 - 6, y - 14, "TTFT", "quiet", "m")
        for before, after in zip(times, times[1:], strict=False):
            sheet.line((left + before * second + 14, y), (left + after * second - 14, y), ink="a-faint", dash=True)
            sheet.text(left + (before + after) / 2 * second, y - 14, f"gap {after - before:g}", "quiet", "m")
        for number, time in enumerate(times):
            sheet.box(left + time * second - 14, y - 14, 28, 28, str(number + 1), kind, bold=True)
    sheet.line((left, 140), (left + 4 * second + 14, 140), ink="a")
    for tick in range(5):
        sheet.line((left + tick * second, 140), (left + tick * second, 147), ink="a")
        label = "sent 0" if tick == 0 else f"{tick} s" if tick == 4 else str(tick)
        sheet.text(left + tick * second, 164, label, "quiet", "m")
    return sheet


def bucket() -> Canvas:
    rows = [(217, 299, "1, 2", 300), (163, 39, "3, 0", 40), (130, 6, "4, 0", 7), (0, 0, "0, 0", 1)]
    sheet = Canvas(
        "drawing-17-bucket",
        "Three sequences in a recorded bucket of four rows and two pages",
        "The host fills fixed buffers for token, position and table; the fourth row is padding that points at the "
        "scratch page. The recording itself works out slots and what each row sees, and is replayed with one call.",
        262,
    )
    columns = (("token", 64.0), ("position", 84.0), ("table", 72.0))
    sheet.frame(16, 28, 260, 216, "fixed buffers", at=146)
    x = 36.0
    for column, (head, wide) in enumerate(columns):
        sheet.text(x + wide / 2, 56, head, "quiet", "m")
        for number, row in enumerate(rows):
            kind = "ghost" if number == 3 else "blue"
            sheet.box(x, 72 + number * 34, wide, 34, str(row[column]), kind, quiet=number == 3)
        x += wide
    sheet.text(146, 226, "row 3: padding", "quiet", "m")
    sheet.frame(336, 28, 208, 216, "recorded graph", "frame-lit")
    works = [
        ("slots:", [str(_slot(table, position)) for _, position, table, _ in rows]),
        ("keys:", [str(r[3]) for r in rows]),
    ]
    for place, (head, numbers) in enumerate(works):
        at = 352 + place * 92.0
        sheet.text(at + 42, 56, head.removesuffix(":"), "ink", "m")
        for number, text in enumerate(numbers):
            sheet.box(at, 72 + number * 34, 84, 34, text, "ghost" if number == 3 else "green", quiet=number == 3)
    sheet.text(440, 226, "one replay", "ink", "m")
    sheet.arrow((276, 140), (336, 140))
    return sheet


def _slot(table: str, position: int) -> int:
    return int(table.split(", ")[position // 256]) * 256 + position % 256


def frames() -> Canvas:
    sheet = Canvas(
        "drawing-20-frames",
        "Three tokens become four frames and an end mark",
        "The first token sends the role's frame and the first content; the second sends its text; the third, an end "
        "token without text, sends the finish reason in a frame of its own; then DONE.",
        170,
    )
    sheet.text(16, 35, "tokens", "quiet")
    sheet.text(16, 129, "frames", "quiet")
    texts = (("role", "plain"), ("content\nHel", "blue"), ("content\nlo", "green"), ("reason\nstop", "amber"))
    made = [sheet.box(84 + i * 94, 104, 86, 50, text, kind) for i, (text, kind) in enumerate(texts)]
    done = sheet.box(460, 104, 84, 50, "[DONE]", "plain")
    for (text, kind), frame in zip((("Hel", "blue"), ("lo", "green"), ("end", "amber")), made[1:], strict=True):
        token = sheet.box(frame.x, 18, 86, 34, text, kind)
        sheet.arrow(token.bottom, frame.top)
    sheet.arrow((made[1].x + 20, 52), (made[0].middle[0] + 14, 104))
    sheet.arrow((made[3].x + 66, 52), (done.middle[0] - 14, 104))
    return sheet
