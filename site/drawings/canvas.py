"""A sheet of paper on which boxes, labels and arrows are put, and which becomes an SVG file.

Coordinates are user units (see `style.WIDTH`), x to the right and y down; what is called later lies on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import atan2, cos, sin
from xml.sax.saxutils import escape

from style import ARROWS, HEAD, LINE, SHAPES, TEXT_SIZE, TEXTS, WIDTH, css, text_width

__all__ = ["Box", "Canvas", "Point"]

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A rectangle, and the points where arrows touch it."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2

    @property
    def top(self) -> Point:
        return self.middle[0], self.y

    @property
    def bottom(self) -> Point:
        return self.middle[0], self.y + self.height

    @property
    def left(self) -> Point:
        return self.x, self.middle[1]

    @property
    def right(self) -> Point:
        return self.x + self.width, self.middle[1]


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


@dataclass
class Canvas:
    """One drawing: `name` is its file's, `title` and `about` are read to those who cannot see it."""

    name: str
    title: str
    about: str
    height: float
    _parts: list[str] = field(default_factory=list)
    _classes: set[str] = field(default_factory=set)

    def _use(self, kinds: dict[str, object] | dict[str, str], name: str) -> str:
        if name not in kinds:
            raise ValueError(f"{self.name}: there is no class {name!r} in style.py; choose one of {', '.join(kinds)}")
        self._classes.add(name)
        return name

    def rect(self, x: float, y: float, width: float, height: float, kind: str = "plain", round_: float = 4) -> Box:
        """A rectangle of a class of `style.SHAPES`."""
        kind = self._use(dict(SHAPES), kind)
        corner = f' rx="{_n(round_)}"' if round_ else ""
        size = f'width="{_n(width)}" height="{_n(height)}"'
        self._parts.append(f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" {size}{corner}/>')
        return Box(x, y, width, height)

    def box(
        self, x: float, y: float, width: float, height: float, text: str, kind: str = "plain", bold: bool = False,
        code: bool = False, quiet: bool = False,
    ) -> Box:  # fmt: skip
        """A rectangle with its text in the middle; several lines are split at line breaks."""
        box = self.rect(x, y, width, height, kind)
        ink = "on-lit" if kind == "lit" else "quiet" if quiet else "ink"
        lines = text.split("\n")
        for number, line in enumerate(lines):
            shift = (number - (len(lines) - 1) / 2) * LINE
            self.text(box.middle[0], box.middle[1] + shift, line, ink, anchor="m", bold=bold, code=code)
        return box

    def text(
        self, x: float, y: float, text: str, ink: str = "ink", anchor: str = "", bold: bool = False, code: bool = False
    ) -> None:
        """One line, vertically centred on `y`; `anchor` is "" (begins at x), "m" (middle) or "e" (ends at x)."""
        marks = [self._use(dict(TEXTS), ink), anchor, "b" * bold, "code" * code]
        names = " ".join(mark for mark in marks if mark)
        place = f'x="{_n(x)}" y="{_n(y + TEXT_SIZE * 0.35)}"'
        self._parts.append(f'<text class="{names}" {place}>{escape(text)}</text>')

    def frame(
        self, x: float, y: float, width: float, height: float, label: str = "", kind: str = "frame",
        at: float | None = None, under: str = "paper",
    ) -> Box:  # fmt: skip
        """A rectangle around other things, with a label that interrupts its upper side around `at` (its middle).

        `under` is the class of what the frame lies on.
        """
        box = self.rect(x, y, width, height, kind, round_=8)
        if label:
            pill = {"frame-lit": "lit", "frame-blue": "blue"}.get(kind, under)
            wide = text_width(label, bold=pill == "lit") + 16
            middle = at if at is not None else x + width / 2
            inner = self.rect(middle - wide / 2, y - 10, wide, 20, pill)
            ink = {"frame-lit": "on-lit", "frame-ghost": "quiet"}.get(kind, "ink")
            self.text(*inner.middle, label, ink, anchor="m", bold=pill == "lit")
        return box

    def line(self, *points: Point, ink: str = "a", dash: bool = False) -> None:
        """A line through points."""
        names = self._use(dict(ARROWS), ink) + (" dash" if dash else "")
        self._classes |= {"dash"} if dash else set()
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polyline class="{names}" points="{places}"/>')

    def arrow(self, *points: Point, ink: str = "a", both: bool = False, dash: bool = False) -> None:
        """A line through points with a head at its end, or at both; it stops a little short of what it points at."""
        path = list(points)
        heads = []
        for end in (-1, 0) if both else (-1,):
            before = path[-2] if end == -1 else path[1]
            angle = atan2(path[end][1] - before[1], path[end][0] - before[0])
            tip = (path[end][0] - 2 * cos(angle), path[end][1] - 2 * sin(angle))
            foot = (tip[0] - HEAD * cos(angle), tip[1] - HEAD * sin(angle))
            side = (HEAD * 0.45 * sin(angle), HEAD * 0.45 * cos(angle))
            heads.append([tip, (foot[0] + side[0], foot[1] - side[1]), (foot[0] - side[0], foot[1] + side[1])])
            path[end] = foot
        self.line(*path, ink=ink, dash=dash)
        for head in heads:
            places = " ".join(f"{_n(x)},{_n(y)}" for x, y in head)
            self._parts.append(f'<polygon class="{ink}" points="{places}"/>')

    def chain(self, boxes: Sequence[Box], ink: str = "a", down: bool = False) -> None:
        """Arrows from each box to the next at its right, or below it."""
        for one, other in pairwise(boxes):
            self.arrow(*((one.bottom, other.top) if down else (one.right, other.left)), ink=ink)

    def cells(
        self, x: float, y: float, texts: Sequence[str], kinds: Sequence[str], width: float = 40, height: float = 30,
        code: bool = False,
    ) -> list[Box]:  # fmt: skip
        """A row of boxes side by side, as the slots of an array."""
        return [
            self.box(x + number * width, y, width, height, text, kind, code=code)
            for number, (text, kind) in enumerate(zip(texts, kinds, strict=True))
        ]

    def key(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """A legend on one line: small squares of classes, each followed by its meaning."""
        for kind, meaning in entries:
            self.rect(x, y - 7, 14, 14, kind, round_=3)
            self.text(x + 21, y, meaning, "quiet")
            x += 21 + text_width(meaning) + 20

    def svg(self) -> str:
        """The file's text; equal drawings have equal bytes."""
        size = f'width="{_n(WIDTH)}" height="{_n(self.height)}" viewBox="0 0 {_n(WIDTH)} {_n(self.height)}"'
        names = 'role="img" aria-labelledby="t d"'
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {names}>',
            f'<title id="t">{escape(self.title)}</title>',
            f'<desc id="d">{escape(self.about)}</desc>',
            f"<style>{css(self._classes | {'paper'})}</style>",
            f'<rect class="paper" width="{_n(WIDTH)}" height="{_n(self.height)}"/>',
        ]
        return "\n".join([*head, *self._parts, "</svg>", ""])
