"""The request's walk: one map for the whole book, with the part that a chapter builds lit.

What earlier chapters built has a full outline, what later ones will build a dashed one.
"""

from __future__ import annotations

from dataclasses import dataclass

from canvas import Box, Canvas

__all__ = ["ALL", "LIT", "walk", "walks"]

ALL = 26  # the chapter in which every room is lit
LEFT, RIGHT, COLUMN, STEP = 32.0, 528.0, 80.0, 104.0  # five columns of boxes

# Which parts a chapter lights. A part is *built* by the first chapter that lights it.
LIT: dict[int, tuple[str, ...]] = {
    0: ("book",),
    1: ("files",),
    2: ("ids", "text"),
    3: ("forward",),
    4: ("sample",),
    5: ("clock",),
    6: ("kv",),
    7: ("attention",),
    8: ("pages",),
    9: ("prefixes",),
    10: ("plan", "pack", "runner"),
    11: ("tick", "commit"),
    12: ("worker", "waiting"),
    13: ("runner", "forward"),
    14: ("runner", "forward", "attention"),
    15: ("runner", "forward"),
    16: ("runner", "attention"),
    17: ("runner", "forward"),
    18: ("runner", "commit"),
    19: ("checks",),
    20: ("frames",),
    21: ("tools",),
    22: ("mask",),
    23: ("exchange",),
    24: ("server",),
    25: ("watch",),
    27: ("book",),
}
RUNNERS = {13: "C kernels", 14: "native", 15: "compiled", 16: "Triton", 17: "graphs", 18: "graphs"}
BORN = {part: chapter for chapter in sorted(LIT, reverse=True) for part in LIT[chapter]} | {"book": 0}
LIT[ALL] = tuple(part for part in BORN if part not in ("book", "clock"))  # the program, not what stands beside it

TITLES = {
    0: "the book that writes all of it",
    1: "the model's files",
    2: "text to ids, and ids to text",
    3: "the forward pass",
    4: "sampling",
    5: "the clock beside the client",
    6: "the KV cache",
    7: "attention",
    8: "pages",
    9: "shared prefixes",
    10: "plan, pack and the runner",
    11: "the tick",
    12: "the wait list and the worker thread",
    13: "a forward with kernels in C",
    14: "a forward in native code",
    15: "a compiled forward",
    16: "attention by a Triton kernel",
    17: "a forward recorded as a graph",
    18: "a pass that begins before the last one is committed",
    19: "checking the request",
    20: "the answer's frames",
    21: "tools and thoughts",
    22: "the mask beside the forward",
    23: "the exchange",
    24: "the server",
    25: "keys, log and metrics",
    26: "everything",
    27: "the book beside the program",
}


PARENTS = {"kv": ("tick", "worker"), "tick": ("worker",)}  # frames around frames, inner ones first


@dataclass(frozen=True)
class Map:
    """The walk as one chapter sees it."""

    sheet: Canvas
    chapter: int

    def state(self, part: str) -> str:
        """lit, plain (built before) or ghost (to come); blue where all is lit."""
        if part in LIT[self.chapter]:
            return "blue" if self.chapter == ALL else "lit"
        return "plain" if BORN[part] < self.chapter else "ghost"

    def box(self, part: str, text: str, x: float, y: float, width: float = COLUMN) -> Box:
        state = self.state(part)
        return self.sheet.box(x, y, width, 30, text, state, bold=state == "lit", quiet=state == "ghost")

    def frame(self, part: str, text: str, x: float, y: float, width: float, height: float, at: float) -> None:
        kinds = {"lit": "frame-lit", "blue": "frame-blue", "plain": "frame", "ghost": "frame-ghost"}
        dyed = any(self.state(parent) == "lit" for parent in PARENTS.get(part, ()))
        self.sheet.frame(x, y, width, height, text, kinds[self.state(part)], at, "blue-bare" if dyed else "paper")


def _column(number: int) -> float:
    return LEFT + number * STEP


def _outside(m: Map) -> None:
    """Client, server and exchange: the event loop's side."""
    sheet = m.sheet
    asks = sheet.box(LEFT, 10, 136, 30, "client asks")
    reads = sheet.box(RIGHT - 136, 10, 136, 30, "client reads")
    clock = m.box("clock", "clock", 216, 10, 128)
    sheet.line(asks.right, clock.left, ink="a-faint", dash=True)
    sheet.line(clock.right, reads.left, ink="a-faint", dash=True)
    m.frame("server", "server", 8, 64, 544, 106, 280)
    checks = m.box("checks", "read, check", LEFT, 80, 136)
    ids = m.box("ids", "text → ids", LEFT, 128, 136)
    m.box("watch", "log, metrics", 216, 80, 128)
    frames = m.box("frames", "frames", RIGHT - 136, 80, 136)
    tools = m.box("tools", "tools, thoughts", 216, 128, RIGHT - 216)
    exchange = m.box("exchange", "exchange", LEFT, 188, RIGHT - LEFT)
    up = frames.middle[0]
    sheet.chain([asks, checks, ids], down=True)
    sheet.arrow(tools.left, ids.right)
    sheet.arrow(ids.bottom, (ids.middle[0], exchange.y))
    sheet.arrow((up, exchange.y), (up, tools.bottom[1]))
    sheet.arrow((up, tools.y), frames.bottom)
    sheet.arrow(frames.top, reads.bottom)


def _inside(m: Map) -> None:
    """The worker thread: wait list, one tick of the engine, and text."""
    sheet = m.sheet
    m.frame("worker", "one worker thread", 8, 242, 544, 208, 280)
    waiting = m.box("waiting", "wait list", LEFT, 260)
    files = m.box("files", "files", _column(1), 260)
    runner = m.box("runner", RUNNERS.get(m.chapter, "runner"), _column(2) - 4, 260, 88)
    text = m.box("text", "ids → text", _column(4) - 8, 260, 88)
    m.frame("tick", "a tick", 16, 312, 528, 130, 384)
    names = ("plan", "pack", "forward", "sample", "commit")
    steps = [m.box(name, name, _column(number), 330) for number, name in enumerate(names)]
    m.frame("kv", "KV cache", 24, 384, 200, 50, 164)
    prefixes = m.box("prefixes", "prefixes", LEFT, 398)
    pages = m.box("pages", "pages", _column(1), 398)
    attention = m.box("attention", "attention", _column(2) - 4, 398, 88)
    mask = m.box("mask", "mask", _column(3), 398)
    down, up = waiting.middle[0], steps[4].middle[0]
    sheet.arrow((down, 218), waiting.top)
    sheet.arrow(waiting.bottom, steps[0].top)
    sheet.chain([files, runner])
    sheet.chain(steps)
    sheet.arrow(runner.bottom, steps[2].top)
    sheet.arrow(mask.top, steps[3].bottom)
    sheet.arrow(steps[4].top, (up, text.bottom[1]))
    sheet.arrow((up, text.y), (up, 218))
    sheet.arrow(prefixes.top, steps[0].bottom)
    sheet.arrow(steps[2].bottom, attention.top, both=True)
    sheet.arrow(pages.right, attention.left, both=True)


def walk(chapter: int, name: str = "") -> Canvas:
    """The walk with the part of `chapter` lit."""
    about = (
        "A request goes from the client through the server (read and check, text to ids), over the exchange, into the "
        "worker thread's wait list, through the tick's plan, pack, forward, sample and commit, and back as text. "
    )
    about += "Filled: this chapter's part. Full outline: built before. Dashed: still to come."
    sheet = Canvas(name or f"drawing-walk-{chapter:02}", f"The request's walk: {TITLES[chapter]}", about, 510)
    m = Map(sheet, chapter)
    _outside(m)
    _inside(m)
    m.box("book", "the book: notebooks, exported as all of the above", LEFT, 468, RIGHT - LEFT)
    return sheet


def walks() -> list[Canvas]:
    """One map for each chapter, and one for the home page."""
    return [*(walk(chapter) for chapter in sorted(LIT)), walk(ALL, "drawing-walk")]
