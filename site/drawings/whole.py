"""Chapters 00, 11 and 24: from notebooks to a server, the pages of two choices, and who does what for a request."""

from __future__ import annotations

from canvas import Box, Canvas

__all__ = ["choices", "export_path", "pages_of", "stations"]

PAGE = 256


def export_path() -> Canvas:
    sheet = Canvas(
        "drawing-00-export",
        "Notebooks are exported as a package, and the package serves",
        "Cells of the notebooks go through helios export into the package helios; helios serve runs it, and any client "
        "that speaks the OpenAI protocol may ask.",
        178,
    )
    names = ("01_model_files", "08_paged_attention", "26_launch")
    notebooks = [sheet.box(16, 16 + i * 56, 184, 34, name, "blue", code=True) for i, name in enumerate(names)]
    export = sheet.box(238, 72, 132, 34, "helios export", "lit", code=True)
    for notebook in notebooks:
        sheet.arrow(notebook.right, (219, notebook.middle[1]), (219, export.middle[1]), export.left)
    steps = [
        sheet.box(404, 16, 140, 34, "helios/", "green", code=True),
        sheet.box(404, 72, 140, 34, "helios serve", code=True),
        sheet.box(404, 128, 140, 34, "any client"),
    ]
    sheet.arrow(export.right, (387, 89), (387, 33), steps[0].left)
    sheet.arrow(steps[0].bottom, steps[1].top)
    sheet.arrow(steps[1].bottom, steps[2].top, both=True)
    return sheet


def pages_of(tokens: int) -> list[int]:
    """How many of `tokens` lie in each page."""
    return [min(PAGE, tokens - start) for start in range(0, tokens, PAGE)]


def choices() -> Canvas:
    a, b = pages_of(300), pages_of(600)
    sheet = Canvas(
        "drawing-11-choices",
        "Two choices of one prompt share its full pages",
        f"a holds two pages. b's choices both point at the two full pages of their prompt; the third page holds {b[2]} "
        "tokens and is copied for the second choice, because each writes its own tokens behind them. Two pages are "
        "free.",
        260,
    )
    holds = [*(str(n) for n in a), *(str(n) for n in b), str(b[2]), "free", "free"]
    kinds = ["amber"] * len(a) + ["blue"] * (len(b) - 1) + ["green", "pink", "ghost", "ghost"]
    pool = []
    for number, (text, kind) in enumerate(zip(holds, kinds, strict=True)):
        pool.append(sheet.box(28 + number * 64.0, 104, 56, 48, text, kind, quiet=kind == "ghost"))
    sheet.text((pool[0].x + pool[1].right[0]) / 2, 90, "a", "ink", "m", bold=True)
    for y, name, own, kind in (
        (16.0, "b, first choice", pool[4], "green"),
        (212.0, "b, second choice", pool[5], "pink"),
    ):
        sheet.text(16, y + 15, name)
        pages = [pool[2], pool[3], own]
        for page, entry in zip(pages, ("blue", "blue", kind), strict=True):
            cell = sheet.box(page.x, y, 56, 30, "page", entry)
            ends = (cell.bottom, page.top) if y < page.y else (cell.top, page.bottom)
            sheet.arrow(*ends, ink=f"a-{entry}")
    sheet.arrow(
        (pool[4].middle[0] + 14, 104), (pool[4].middle[0] + 14, 78), (pool[5].middle[0], 78), pool[5].top, dash=True
    )
    sheet.text(pool[5].middle[0] + 12, 78, "copied", "quiet")
    return sheet


LANES = ("event loop", "text thread", "process", "worker")


def stations() -> Canvas:
    sheet = Canvas(
        "drawing-24-stations",
        "The eight stations of a chat request, and who does each",
        "The event loop reads fields, chooses tools and grammar; a text thread makes ids; a process compiles the "
        "grammar; the event loop submits; the worker ticks; the event loop writes frames.",
        230,
    )
    middles = [32 + number * 56.0 for number in range(len(LANES))]
    for name, y in zip(LANES, middles, strict=True):
        sheet.text(12, y, name, "quiet")
    for upper, lower in zip(middles, middles[1:], strict=False):
        sheet.line((12, (upper + lower) / 2), (548, (upper + lower) / 2), ink="a-faint", dash=True)

    def station(lane: int, x: float, width: float, text: str, kind: str) -> Box:
        return sheet.box(x, middles[lane] - 16, width, 32, text, kind)

    fields, tools = station(0, 108, 56, "fields", "blue"), station(0, 178, 52, "tools", "blue")
    grammar = station(0, 244, 80, "grammar", "blue")
    ids, compiled = station(1, 300, 48, "ids", "amber"), station(2, 344, 80, "compile", "pink")
    submit, ticks = station(0, 350, 68, "submit", "blue"), station(3, 440, 56, "ticks", "green")
    frames = station(0, 480, 68, "frames", "blue")
    sheet.chain([fields, tools, grammar])
    sheet.arrow((272, grammar.bottom[1]), (272, middles[1]), ids.left)
    sheet.arrow(ids.bottom, (ids.middle[0], middles[2]), compiled.left)
    sheet.arrow(compiled.top, submit.bottom)
    sheet.arrow(submit.right, (456, middles[0]), (456, ticks.y))
    sheet.arrow(ticks.right, (frames.middle[0], middles[3]), frames.bottom)
    return sheet
