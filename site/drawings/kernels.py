"""Chapters 13 to 15: a float rounded by its bits, the inside of a page, and an operator less between two products."""

from __future__ import annotations

import struct
from math import exp

from canvas import Canvas

__all__ = ["bf16_bits", "float_bits", "fusion", "page_inside", "rounded"]

BIT = 15.0  # width of one bit's cell


def float_bits(value: float) -> int:
    """The 32 bits of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def rounded(bits: int) -> int:
    """The upper 16 bits after rounding to nearest, ties to even."""
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16_bits() -> Canvas:
    values = (1.00390625, 1.01171875)
    down, up = (rounded(float_bits(value)) for value in values)
    sheet = Canvas(
        "drawing-13-bits",
        "Two floats half-way between two bfloat16 numbers",
        f"bfloat16 keeps the upper 16 bits: sign, exponent, 7 of fraction. 0x3f808000 is half-way and ends in an even "
        f"bit, so it is rounded down to {down:#06x}; 0x3f818000 ends in an odd one and is rounded up to {up:#06x}.",
        198,
    )
    left = 40.0
    for first, count, name, kind in ((0, 1, "sign", "pink"), (1, 8, "exponent", "amber"), (9, 7, "fraction", "blue")):
        at = max(left + (first + count / 2) * BIT, 34.0)
        sheet.text(at, 16, name, "quiet", "m")
        for number, value in enumerate(values):
            y = 32 + number * 92.0
            text = f"{float_bits(value):032b}"[first : first + count]
            sheet.cells(left + first * BIT, y, list(text), [kind] * count, BIT, 28)
    sheet.text(left + 24 * BIT, 16, "lower half", "quiet", "m")
    for number, (value, result) in enumerate(zip(values, (down, up), strict=True)):
        y = 32 + number * 92.0
        bits = float_bits(value)
        sheet.cells(left + 16 * BIT, y, list(f"{bits:032b}"[16:]), ["bare"] * 16, BIT, 28)
        odd = bits >> 16 & 1
        sheet.text(left, y + 46, f"last bit {odd}: add {0x7FFF + odd:#06x}", "ink")
        sheet.text(
            left + 32 * BIT, y + 46, f"→ {result:#06x}, {'up' if odd else 'down'}, to even", "ink", "e", bold=True
        )
    return sheet


def page_inside(tokens: int = 6, size: int = 4) -> Canvas:
    sheet = Canvas(
        "drawing-14-page-inside",
        "Keys as they come, and keys as the kernel reads them",
        "On the left each row is a token's key, so one component of many tokens lies scattered. On the right the block "
        "is transposed: one component of all its tokens lies side by side and is loaded at once.",
        268,
    )
    cell, height = 44.0, 28.0
    sheet.text(104, 16, "as they come", "ink", "m", bold=True)
    sheet.text(400, 16, "as the kernel reads", "ink", "m", bold=True)
    for token in range(tokens):
        texts = [f"{'abcdef'[token]}{component}" for component in range(size)]
        kinds = ["amber" if component == 1 else "plain" for component in range(size)]
        sheet.cells(16, 34 + token * height, texts, kinds, cell, height)
    for component in range(size):
        texts = [f"{'abcdef'[token]}{component}" for token in range(tokens)]
        kind = "amber" if component == 1 else "plain"
        sheet.cells(268, 34 + component * height, texts, [kind] * tokens, cell, height)
    sheet.arrow((206, 90), (258, 90))
    sheet.text(16, 228, "one key a row", "quiet")
    sheet.arrow((400, 188), (400, 166), ink="a-amber")
    sheet.text(400, 202, "one load for all tokens", "quiet", "m")
    sheet.key(16, 252, [("amber", "component 1 of the tokens a to f")])
    return sheet


GATE, UP = (1.0, -1.0, 2.0, 0.0), (3.0, 3.0, 0.5, 7.0)


def _spelled(values: list[float] | tuple[float, ...]) -> list[str]:
    return [f"{value:.3f}".rstrip("0").rstrip(".").replace("-", "−") for value in values]


def fusion() -> Canvas:
    middle = [value / (1 + exp(-value)) for value in GATE]
    out = [value * up for value, up in zip(middle, UP, strict=True)]
    size = len(GATE)
    sheet = Canvas(
        "drawing-15-fusion",
        "Two operators, or one loop",
        f"Two operators read gate, write silu of it, read that and up, and write the product: {5 * size} numbers move. "
        f"Fused, gate and up are read and the product is written: {3 * size} numbers.",
        256,
    )
    cell, half = 62.0, 124.0
    for x, title in ((16.0, "two operators"), (296.0, "one loop")):
        sheet.text(x + half, 14, title, "ink", "m", bold=True)
        sheet.cells(x, 30, _spelled(GATE), ["blue"] * size, cell, 28)
        sheet.cells(x, 190, _spelled(out), ["lit"] * size, cell, 28)
    sheet.arrow((16 + half, 58), (16 + half, 92))
    sheet.text(28 + half, 74, "silu", "quiet")
    sheet.cells(16, 92, _spelled(middle), ["orange"] * size, cell, 28)
    sheet.cells(16, 128, _spelled(UP), ["green"] * size, cell, 28)
    sheet.cells(296, 66, _spelled(UP), ["green"] * size, cell, 28)
    sheet.arrow((16 + half, 156), (16 + half, 190))
    sheet.text(28 + half, 172, "×", "quiet")
    sheet.arrow((296 + half, 94), (296 + half, 190))
    sheet.text(308 + half, 142, "silu and ×", "quiet")
    for x, moved in ((16.0, 5 * size), (296.0, 3 * size)):
        sheet.text(x + half, 238, f"{moved} numbers move", "ink", "m")
    return sheet
