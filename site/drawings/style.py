"""The house style of the book's drawings: one width, one size of text, one stroke, and colours for light and dark.

A drawing is loaded through `<img>`, so nothing of the page's styles reaches it. Two things make it readable everywhere:
it brings its own paper, so that no text ever stands on an unknown colour; and both its palettes lie in one
`prefers-color-scheme` rule, which browsers answer inside an image by the `color-scheme` of the page around it. The site
sets that with its toggle. Where a browser asks the system instead, paper and ink still change together.
"""

from __future__ import annotations

__all__ = ["CODE_EM", "FONT", "HEAD", "LINE", "PALETTE", "SHAPES", "STROKE", "TEXTS", "TEXT_SIZE", "WIDTH"]
__all__ += ["css", "text_width"]

WIDTH = 560.0  # user units of every drawing, one CSS pixel each where there is room
TEXT_SIZE = 15.0  # the only size: 9.6 px where a phone shows a drawing 360 px wide
LINE = 19.0  # from one line of text to the next
STROKE = 1.5  # the only stroke width
HEAD = 7.0  # length of an arrowhead

FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif'
CODE_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
CODE_EM = 0.62  # width of a character of a fixed-width font, in em; widest of the usual ones

# A colour by name: on the light paper, on the dark one. Strokes are the colours of Okabe and Ito, as in the plots
# (helios/book/plots.py), told apart under every common colour blindness; a tint is its stroke mixed with the paper.
PALETTE = {
    "paper": ("#ffffff", "#1e2129"),
    "plain": ("#f4f5f7", "#292d38"),
    "ink": ("#1f2328", "#e8eaf0"),
    "quiet": ("#5d636c", "#aab0bd"),
    "line": ("#868c96", "#7f8696"),
    "faint": ("#b4b9c1", "#565c6b"),
    "blue": ("#0072b2", "#56b4e9"),
    "orange": ("#d55e00", "#ef8a3c"),
    "green": ("#009e73", "#2bbf95"),
    "amber": ("#c28400", "#e69f00"),
    "pink": ("#b8619a", "#cc79a7"),
    "blue-tint": ("#d9eaf5", "#1d4059"),
    "orange-tint": ("#fae2d2", "#57351c"),
    "green-tint": ("#d4eee5", "#17483b"),
    "amber-tint": ("#fbeccb", "#4f3d14"),
    "pink-tint": ("#f5e3ee", "#4d3145"),
    "on-blue": ("#ffffff", "#10202c"),
}
SERIES = ("blue", "orange", "green", "amber", "pink")

# A class of shapes: its fill and its stroke by name, either may be "none"; and whether the stroke is dashed.
SHAPES: dict[str, tuple[str, str, bool]] = {
    "paper": ("paper", "none", False),
    "plain": ("plain", "line", False),
    "ghost": ("paper", "faint", True),
    "frame": ("none", "line", False),
    "frame-ghost": ("none", "faint", True),
    "frame-lit": ("blue-tint", "blue", False),
    "frame-blue": ("none", "blue", False),
    "lit": ("blue", "blue", False),
    "bare": ("plain", "none", False),
}
SHAPES |= {name: (f"{name}-tint", name, False) for name in SERIES}
SHAPES |= {f"{name}-bare": (f"{name}-tint", "none", False) for name in SERIES}

# A class of text or of arrows: the name of its colour.
TEXTS = {"ink": "ink", "quiet": "quiet", "on-lit": "on-blue", "t-blue": "blue"}
ARROWS = {"a": "quiet", "a-faint": "faint"} | {f"a-{name}": name for name in SERIES}

# Widths of characters in em, rounded up from DejaVu Sans, the widest of the fonts that `system-ui` may be.
WIDTHS = {
    0.30: "'IJijl",
    0.35: " ,./:;\\|·",
    0.40: "()-[]ft⌈⌉",
    0.45: "!r²",
    0.50: '"*_`–',
    0.55: "?csz",
    0.60: "FLkvxy",
    0.65: "$0123456789EPSTYabdeghnopqu{}√",
    0.70: "ABCKRVXZ",
    0.75: "NU",
    0.80: "&DGHOQ",
    0.85: "#+<=>^w~×−→←↑↓≤≥",
}
EM = {character: width for width, characters in WIDTHS.items() for character in characters}


def text_width(text: str, bold: bool = False, code: bool = False) -> float:
    """An upper estimate of a line's width in user units; an unknown character counts one em."""
    if code:
        return len(text) * CODE_EM * TEXT_SIZE
    return sum(EM.get(character, 1.0) for character in text) * TEXT_SIZE * (1.08 if bold else 1.0)


def _rules(mode: int, classes: set[str]) -> str:
    """The colours of one mode (0 light, 1 dark) for the classes that a drawing uses."""
    rules = []
    for name in sorted(classes):
        if name in SHAPES:
            fill, stroke, _ = SHAPES[name]
            colours = [PALETTE[part][mode] if part != "none" else "none" for part in (fill, stroke)]
            rules.append(f".{name}{{fill:{colours[0]};stroke:{colours[1]}}}")
        elif name in TEXTS:
            rules.append(f"text.{name}{{fill:{PALETTE[TEXTS[name]][mode]}}}")
        elif name in ARROWS:
            colour = PALETTE[ARROWS[name]][mode]
            rules.append(f"polyline.{name}{{stroke:{colour}}}polygon.{name}{{fill:{colour}}}")
    return "".join(rules)


def css(classes: set[str]) -> str:
    """The style sheet of a drawing that uses these classes."""
    dashed = [f".{name}" for name in sorted(classes) if name in SHAPES and SHAPES[name][2]]
    fixed = f"text{{font:{TEXT_SIZE:.0f}px {FONT}}}.m{{text-anchor:middle}}.e{{text-anchor:end}}"
    fixed += f".b{{font-weight:600}}.code{{font-family:{CODE_FONT}}}"
    fixed += f"rect,circle,polyline{{stroke-width:{STROKE}}}polyline{{fill:none;stroke-linejoin:round}}"
    if dashed or "dash" in classes:
        fixed += f"{','.join([*dashed, '.dash'])}{{stroke-dasharray:4 4}}"
    dark = f"@media(prefers-color-scheme:dark){{{_rules(1, classes)}}}"
    return "\n".join([fixed, _rules(0, classes), dark])
