"""Chapters 03 and 07: heads that share keys, positions as angles, and a softmax that never sees its whole row."""

from __future__ import annotations

from math import cos, exp, log, sin, sqrt

from canvas import Canvas

__all__ = ["head_sharing", "online_softmax", "rope_weights", "rotation", "softmax_in_blocks"]

GROUPS = ("blue", "green", "amber")


def head_sharing(heads: int = 9, size: int = 64) -> Canvas:
    """The embedded model's: nine query heads, three key and value heads of 64."""
    shared = len(GROUPS)
    group = heads // shared
    sheet = Canvas(
        "drawing-03-head-sharing",
        "Grouped-query attention: nine query heads share three key and value heads",
        "Query heads 0 to 2 read key and value head 0, heads 3 to 5 read head 1, heads 6 to 8 read head 2. So a token "
        f"keeps {2 * shared * size} numbers in a layer instead of {2 * heads * size:,}.",
        226,
    )
    width = 52.0
    sheet.text(280, 16, "queries: one head each, made anew in every pass", "quiet", "m")
    for number, kind in enumerate(GROUPS):
        x = 28 + number * (group * width + 18)
        top = [sheet.box(x + i * width, 32, width - 6, 30, f"q{number * group + i}", kind) for i in range(group)]
        kept = sheet.box(x, 110, group * width - 6, 34, f"key, value {number}", kind, bold=True)
        for box in top:
            sheet.arrow(box.bottom, (box.middle[0] + (kept.middle[0] - box.middle[0]) * 0.6, kept.y), ink=f"a-{kind}")
    sheet.text(
        280, 168, f"kept for a token in a layer: 2 × {shared} × {size} = {2 * shared * size} numbers", "ink", "m"
    )
    sheet.text(
        280, 194, f"with a key head for each query head: 2 × {heads} × {size} = {2 * heads * size:,}", "quiet", "m"
    )
    return sheet


def rope_weights(positions: int) -> list[float]:
    """What the last of `positions` equal vectors of size 2 gives each: softmax of cos(distance) / √2."""
    powers = [exp(cos(positions - 1 - place) / sqrt(2)) for place in range(positions)]
    return [power / sum(powers) for power in powers]


def rotation() -> Canvas:
    weights = rope_weights(3)
    sheet = Canvas(
        "drawing-03-rotation",
        "RoPE: position becomes an angle, distance becomes a weight",
        "Three equal vectors, turned by 0, 1 and 2 radians for their positions. The query at position 2 lies nearest "
        f"to its own key; the weights are {', '.join(f'{weight:.3f}' for weight in weights)}.",
        210,
    )
    centre, radius = (140.0, 150.0), 104.0
    arc = [(centre[0] + radius * cos(step / 20), centre[1] - radius * sin(step / 20)) for step in range(63)]
    sheet.line(*arc, ink="a-faint")
    sheet.line((centre[0] - radius - 12, centre[1]), (centre[0] + radius + 12, centre[1]), ink="a-faint")
    for place, kind in enumerate(GROUPS):
        tip = (centre[0] + radius * cos(place), centre[1] - radius * sin(place))
        sheet.arrow(centre, tip, ink=f"a-{kind}")
        label = (centre[0] + (radius + 20) * cos(place), centre[1] - (radius + 20) * sin(place))
        sheet.text(label[0], label[1] - (10 if place == 0 else 0), str(place), "ink", "m", bold=True)
    sheet.text(centre[0], 180, "one radian a position", "quiet", "m")
    sheet.text(320, 18, "weights for position 2", "quiet")
    for place, (weight, kind) in enumerate(zip(weights, GROUPS, strict=True)):
        y = 38 + place * 44.0
        sheet.text(320, y + 14, str(place), bold=True)
        bar = sheet.rect(344, y, 280 * weight, 28, kind)
        sheet.text(bar.right[0] + 10, y + 14, f"{weight:.3f}")
    sheet.text(320, 180, "all moved alike: the same", "quiet")
    return sheet


Score = tuple[str, float]  # how a score is written, and what it is


def softmax_in_blocks(blocks: list[list[tuple[Score, float]]]) -> list[tuple[str, float, float, float]]:
    """After each block of (score, value): the largest score so far, the factor for the old, the sum and the mix."""
    states: list[tuple[str, float, float, float]] = []
    top, total, mixed = ("−∞", -float("inf")), 0.0, 0.0
    for block in blocks:
        new = max([top, *(score for score, _ in block)], key=lambda score: score[1])
        factor = exp(top[1] - new[1])
        total = total * factor + sum(exp(score[1] - new[1]) for score, _ in block)
        mixed = mixed * factor + sum(value * exp(score[1] - new[1]) for score, value in block)
        top = new
        states.append((top[0], factor, total, mixed))
    return states


def online_softmax() -> Canvas:
    blocks = [[(("0", 0.0), 7.0), (("ln 2", log(2)), 14.0)], [(("ln 4", log(4)), 21.0)]]
    first, second = softmax_in_blocks(blocks)
    answer = second[3] / second[2]
    sheet = Canvas(
        "drawing-07-online-softmax",
        "The online softmax over two blocks of keys",
        f"After block 1 the maximum is {first[0]}, the sum {first[2]:g}, the mix {first[3]:g}. Block 2 has a larger "
        f"score, so both are halved before it is added: {second[2]:g} and {second[3]:g}. Their quotient is {answer:g}.",
        232,
    )
    sheet.text(16, 51, "score s", "quiet")
    sheet.text(16, 81, "value", "quiet")
    x = 92.0
    for number, (block, kind) in enumerate(zip(blocks, ("blue", "green"), strict=True)):
        sheet.text(x + len(block) * 31, 18, f"block {number + 1}", "ink", "m", bold=True)
        sheet.cells(x, 36, [score[0] for score, _ in block], [kind] * len(block), 62)
        sheet.cells(x, 66, [f"{value:g}" for _, value in block], [kind] * len(block), 62)
        x += 230
    states = [
        sheet.box(x, 136, 124, 76, f"m = {top}\nl = {total:g}\na = {mixed:g}", "plain")
        for x, (top, _, total, mixed) in zip((92.0, 291.0), (first, second), strict=True)
    ]
    end = sheet.box(468, 150, 76, 48, f"a / l\n= {answer:g}", "lit", bold=True)
    sheet.arrow((154, 96), states[0].top, ink="a-blue")
    sheet.arrow((353, 96), states[1].top, ink="a-green")
    sheet.chain([*states, end])
    sheet.text(253, 160, f"× {'½' if second[1] == 0.5 else round(second[1], 3)}", "ink", "m", bold=True)
    return sheet
