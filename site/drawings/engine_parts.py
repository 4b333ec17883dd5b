"""Chapters 10 to 12: sequences packed into one pass, a tick's budget of tokens, and the one thread that runs ticks."""

from __future__ import annotations

from itertools import accumulate

from canvas import Box, Canvas

__all__ = ["packed_batch", "share_budget", "tick_budget", "worker_thread"]

# Name, class and tokens of each sequence in the packed pass, and the position of its first one.
PACKED = (("A", "blue", 1, 41), ("B", "green", 1, 306), ("prompt", "amber", 254, 0))
SHOWN = 4  # cells for a chunk that is too long to draw: the second last one stands for what is left out


def _positions(count: int, first: int) -> list[str]:
    """The positions of a run of tokens as they are drawn."""
    if count <= SHOWN:
        return [str(first + i) for i in range(count)]
    return [*(str(first + i) for i in range(SHOWN - 2)), "…", str(first + count - 1)]


def packed_batch() -> Canvas:
    bounds = [0, *accumulate(count for _, _, count, _ in PACKED)]
    rows = [end - 1 for end in bounds[1:]]
    sheet = Canvas(
        "drawing-10-packed-batch",
        "Three sequences packed into one row of tokens",
        "A and B bring one token each, the prompt a chunk of 254. They lie side by side without padding, each token "
        f"with its position in its own sequence. cu_seqlens is {bounds}; the output head sees rows {rows}.",
        198,
    )
    x, cell, at = 126.0, 68.0, 126.0
    for label, middle in (("sequence", 18.0), ("positions", 51.0), ("cu_seqlens", 104.0), ("logits rows", 171.0)):
        sheet.text(16, middle, label, "quiet", code=label == "cu_seqlens")
    sheet.text(at, 104, "0", "ink", "m", code=True)
    sheet.line((at, 76), (at, 92))
    for (name, kind, count, first), bound in zip(PACKED, bounds[1:], strict=True):
        texts = _positions(count, first)
        sheet.text(at + len(texts) * cell / 2, 18, name, "ink", "m", bold=True)
        sheet.cells(at, 36, texts, [kind] * len(texts), cell)
        at += len(texts) * cell
        sheet.line((at, 76), (at, 92))
        sheet.text(at, 104, str(bound), "ink", "m", code=True)
        sheet.arrow((at - cell / 2, 72), (at - cell / 2, 156))
        sheet.box(at - cell / 2 - 24, 156, 48, 30, str(bound - 1), "lit", bold=True)
    sheet.line((x, 84), (at, 84))
    return sheet


def share_budget(budget: int, generating: int, prompts: list[int]) -> list[int]:
    """Tokens of one tick: one for each generating sequence, then the prompts in order of arrival get the rest."""
    left = budget - generating
    given = []
    for rest in prompts:
        given.append(min(rest, left))
        left -= given[-1]
    return [1] * generating + given


def tick_budget(budget: int = 256) -> Canvas:
    ticks, prompts = [], [300, 40]
    for _ in range(2):
        ticks.append(share_budget(budget, 2, prompts))
        prompts = [rest - given for rest, given in zip(prompts, ticks[-1][2:], strict=True)]
    first, second = ticks
    sheet = Canvas(
        "drawing-10-tick-budget",
        "A budget of 256 tokens in two ticks",
        f"Tick 1: one token each for A and B, {first[2]} of the prompt of 300, none of the prompt of 40. Tick 2: one "
        f"each, the remaining {second[2]}, all {second[3]} of the other; {budget - sum(second)} are not needed.",
        176,
    )
    x, unit = 76.0, (544 - 76 - 2 * 28) / (budget - 2)
    for number, tick in enumerate(ticks):
        y, at = 34 + number * 52.0, x
        sheet.text(16, y + 17, f"tick {number + 1}", "ink", bold=True)
        for tokens, kind, name in zip(tick, ("blue", "green", "amber", "pink"), "ABCD", strict=True):
            wide = 28.0 if name in "AB" else tokens * unit
            if tokens:
                text = str(tokens)
                sheet.box(at, y, wide, 34, text, kind)
                at += wide
        if at < 540:
            sheet.box(at, y, 544 - at, 34, f"{budget - sum(tick)} left over", "ghost", quiet=True)
    sheet.line((x, 24), (x, 18), (544, 18), (544, 24), ink="a-faint")
    sheet.rect(256, 8, 106, 20, "paper")
    sheet.text(309, 18, f"{budget} tokens", "quiet", "m")
    keys = [("blue", "A"), ("green", "B"), ("amber", "prompt of 300"), ("pink", "prompt of 40")]
    sheet.key(x, 154, keys)
    return sheet


def _callers(sheet: Canvas) -> list[Box]:
    sheet.frame(16, 20, 130, 236, "any thread")
    return [
        sheet.box(32, 44, 98, 34, "submit D", "plain"),
        sheet.box(32, 92, 98, 34, "submit E", "plain"),
        sheet.box(32, 140, 98, 34, "cancel B", "plain"),
        sheet.box(32, 204, 98, 34, "read A, C", "plain"),
    ]


def worker_thread() -> Canvas:
    sheet = Canvas(
        "drawing-12-worker-thread",
        "Any thread submits, cancels and reads; one worker thread owns the engine",
        "The wait list has two places: D waits. E found it full and got QueueFull at once. B's cancellation is a note "
        "that the worker reads before a tick; C took its place beside A. One batch of events goes back after each "
        "tick.",
        272,
    )
    submit, refused, cancel, read = _callers(sheet)
    sheet.text(246, 32, "wait list", "quiet", "m")
    sheet.cells(206, 46, ["D", "–"], ["amber", "ghost"], 40)
    notes = sheet.box(206, 140, 80, 34, "notes")
    full = sheet.box(182, 96, 104, 26, "QueueFull", "orange")
    sheet.frame(338, 20, 206, 236, "one worker thread", "frame-lit")
    sheet.box(362, 48, 158, 30, "admit what fits")
    sheet.text(362, 105, "running", "quiet")
    batch = sheet.cells(440, 90, ["A", "C"], ["blue", "green"], 40)
    tick = sheet.box(362, 140, 158, 34, "engine.tick()", code=True)
    events = sheet.box(362, 204, 158, 34, "one list of events")
    sheet.arrow(submit.right, (206, 61))
    sheet.arrow(refused.right, full.left, ink="a-orange")
    sheet.arrow(cancel.right, notes.left)
    sheet.arrow((286, 61), (362, 61))
    sheet.arrow(notes.right, tick.left)
    sheet.arrow((480, 78), (480, 90))
    sheet.arrow((480, batch[0].bottom[1]), (480, tick.y))
    sheet.arrow((441, tick.y + 34), events.top)
    sheet.arrow(events.left, read.right)
    return sheet
