"""Closer views of one room of the walk: chapters 21, 22, 25 and 26, where the map alone says too little."""

from __future__ import annotations

from canvas import Canvas

__all__ = ["answer_parser", "grammar_mask", "settings_path", "watching_layers"]


def answer_parser() -> Canvas:
    sheet = Canvas(
        "drawing-21-parser",
        "Tools on the way in, the parser on the way out",
        "Tools are checked and spelled into the prompt. The prompt's ids choose the parser's first state. Pieces of "
        "text from the engine go through AnswerParser and come out as reasoning_content, content and tool_calls.",
        218,
    )
    row = [
        sheet.box(16, 16, 138, 34, "messages, tools"),
        sheet.box(174, 16, 106, 34, "spell tools", "lit", bold=True),
        sheet.box(300, 16, 84, 34, "template"),
        sheet.box(404, 16, 48, 34, "ids"),
    ]
    engine = sheet.box(472, 16, 72, 180, "engine")
    sheet.chain(row)
    sheet.arrow(row[3].right, (engine.x, row[3].middle[1]))
    chosen = sheet.box(328, 80, 124, 34, "parser_for", "lit", code=True)
    parser = sheet.box(280, 144, 136, 34, "AnswerParser", "lit", code=True)
    sheet.arrow(row[3].bottom, (428, 80))
    sheet.arrow((348, chosen.bottom[1]), (348, parser.y))
    sheet.arrow((engine.x, 161), parser.right)
    sheet.text(444, 146, "pieces", "quiet", "m")
    for number, name in enumerate(("reasoning_content", "content", "tool_calls")):
        field = sheet.box(16, 84 + number * 40, 184, 30, name, "green", code=True)
        sheet.arrow(parser.left, (240, 161), (240, field.middle[1]), field.right)
    return sheet


def grammar_mask() -> Canvas:
    sheet = Canvas(
        "drawing-22-mask",
        "A grammar becomes a mask beside the forward",
        "The request's format is put into one grammar, compiled, after a process has tried it, into a constraint. "
        "While the forward computes logits the constraint makes a mask; both meet before sampling, and accept tells it "
        "the token.",
        206,
    )
    width, step = 92.0, 109.0
    grammar = sheet.box(16, 24, width, 34, "Grammar", "lit", bold=True)
    compiler = sheet.box(16 + step, 24, width, 34, "Compiler", "lit", bold=True)
    constraint = sheet.box(16 + 2 * step, 24, 2 * step + width, 34, "constraint", "lit", bold=True)
    sheet.text(117, 82, "tried in a process first", "quiet", "m")
    texts = ("forward", "logits", "and mask", "sample", "accept")
    kinds = ("plain", "plain", "lit", "plain", "lit")
    row = [
        sheet.box(16 + i * step, 150, width, 34, text, kind, bold=kind == "lit")
        for i, (text, kind) in enumerate(zip(texts, kinds, strict=True))
    ]
    sheet.chain([grammar, compiler, constraint])
    sheet.chain(row)
    sheet.arrow((row[2].middle[0], 58), row[2].top)
    sheet.arrow(row[4].top, (row[4].middle[0], 58))
    sheet.text(row[2].middle[0] + 12, 104, "one bit a token", "quiet")
    sheet.text(row[4].middle[0] - 12, 124, "token", "quiet", "e")
    return sheet


def watching_layers() -> Canvas:
    sheet = Canvas(
        "drawing-25-layers",
        "Layers on the way in, and a listener beside the worker's events",
        "A request passes log line, CORS, doorman, header limit and key check before its endpoint. After each tick the "
        "worker hands events to the mailroom and to observe, which adds to integers; a collector reads them for "
        "/metrics.",
        226,
    )
    layers = (("log line", 72), ("CORS", 60), ("doorman", 84), ("header limit", 108), ("key?", 54), ("endpoint", 84))
    lit = ("log line", "header limit", "key?")
    x, row = 16.0, []
    for name, width in layers:
        kind = "lit" if name in lit else "plain"
        row.append(sheet.box(x, 22, width, 34, name, kind, bold=kind == "lit"))
        x += width + 13
    sheet.chain(row)
    worker = sheet.box(460, 106, 84, 90, "worker:\ntick")
    sheet.arrow((502, 56), worker.top)
    mail = sheet.box(338, 106, 96, 34, "mailroom")
    answers = sheet.box(214, 106, 98, 34, "answers")
    observe = sheet.box(338, 162, 96, 34, "observe", "lit", bold=True)
    counts = sheet.box(228, 162, 84, 34, "integers", "lit", bold=True)
    collector = sheet.box(118, 162, 90, 34, "collector", "lit", bold=True)
    metrics = sheet.box(16, 162, 82, 34, "/metrics", "lit", bold=True)
    sheet.arrow((460, mail.middle[1]), mail.right)
    sheet.arrow((460, observe.middle[1]), observe.right)
    for right, left in ((mail, answers), (observe, counts), (counts, collector), (collector, metrics)):
        sheet.arrow(right.left, left.right)
    sheet.arrow(answers.left, (52, answers.middle[1]), (52, 56))
    sheet.text(66, 84, "status, tokens, times", "quiet")
    return sheet


def settings_path() -> Canvas:
    sheet = Canvas(
        "drawing-26-settings",
        "From flags, variables and defaults to a running server",
        "A flag beats a HELIOS variable, which beats the default. The settings become the engine's configuration, from "
        "which scheduler and engine are built, and the app with its log, origins and keys, which waits behind the "
        "port.",
        226,
    )
    sheet.text(81, 16, "first found wins", "quiet", "m")
    sources = [
        sheet.box(16, 32, 130, 34, "flag"),
        sheet.box(16, 82, 130, 34, "HELIOS_…", code=True),
        sheet.box(16, 132, 130, 34, "default"),
    ]
    for upper, lower in zip(sources, sources[1:], strict=False):
        sheet.arrow(upper.bottom, lower.top)
    settings = sheet.box(196, 82, 90, 34, "settings", "lit", bold=True)
    for source in sources:
        sheet.arrow(source.right, (170, source.middle[1]), (170, 99), settings.left)
    config = sheet.box(336, 32, 208, 34, "EngineConfig → engine", "plain")
    app = sheet.box(336, 132, 208, 34, "app: log, origins, keys", "plain")
    sheet.arrow((241, 82), (241, 49), config.left)
    sheet.arrow((241, 116), (241, 149), app.left)
    sheet.arrow((440, 132), (440, 66), both=True)
    sheet.text(452, 99, "scheduler", "quiet")
    port = sheet.box(336, 184, 208, 30, "port 8000, clients", "plain")
    sheet.arrow(port.top, app.bottom, both=True)
    return sheet
