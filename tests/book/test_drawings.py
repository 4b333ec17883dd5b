"""The book's drawings: up to date, legible in light and in dark, nothing over anything else, and used by a page."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "site" / "drawings"))

import draw  # noqa: E402
from style import PALETTE, SHAPES, STROKE, TEXT_SIZE, TEXTS, WIDTH, text_width  # noqa: E402

NAMES = sorted(path.name for path in draw.FIGURES.glob("drawing-*.svg"))
PAGES = [*(ROOT / "chapters").glob("*.md"), ROOT / "README.md"]
SVG = "{http://www.w3.org/2000/svg}"
PAD = 2.0  # between a text and the sides of its box
CENTRE = 0.35  # of the text size: from the middle of a line down to its base line


@dataclass(frozen=True)
class Area:
    """Where something lies, its class, and when it was painted."""

    x0: float
    y0: float
    x1: float
    y1: float
    kind: str
    when: int
    words: str = ""

    def holds(self, other: "Area", pad: float = 0.0) -> bool:
        inside = self.x0 + pad <= other.x0 and other.x1 <= self.x1 - pad
        return inside and self.y0 <= other.y0 and other.y1 <= self.y1

    def meets(self, other: "Area") -> bool:
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1


@dataclass(frozen=True)
class Sheet:
    root: ElementTree.Element
    rects: list[Area]
    texts: list[Area]
    lines: list[tuple[list[tuple[float, float]], int]]

    def paper_of(self, text: Area) -> Area:
        """The last painted filled rectangle under the middle of a text."""
        x, y = (text.x0 + text.x1) / 2, (text.y0 + text.y1) / 2
        under = [r for r in self.rects if r.when < text.when and r.x0 <= x <= r.x1 and r.y0 <= y <= r.y1]
        return [r for r in under if SHAPES[r.kind][0] != "none"][-1]


def rectangle(element: ElementTree.Element, when: int) -> Area:
    x, y, width, height = (float(element.get(name, "0")) for name in ("x", "y", "width", "height"))
    return Area(x, y, x + width, y + height, str(element.get("class")), when)


def words(element: ElementTree.Element, when: int) -> Area:
    """The estimated bounding box of a line of text."""
    names = str(element.get("class")).split()
    text = str(element.text)
    width = text_width(text, bold="b" in names, code="code" in names)
    x, middle = float(element.get("x", "")), float(element.get("y", "")) - TEXT_SIZE * CENTRE
    x -= width / 2 if "m" in names else width if "e" in names else 0
    half = TEXT_SIZE * 0.55
    return Area(x, middle - half, x + width, middle + half, names[0], when, text)


@cache
def sheet(name: str) -> Sheet:
    root = ElementTree.parse(draw.FIGURES / name).getroot()
    made = Sheet(root, [], [], [])
    for when, element in enumerate(root):
        if element.tag == f"{SVG}rect":
            made.rects.append(rectangle(element, when))
        elif element.tag == f"{SVG}text":
            made.texts.append(words(element, when))
        elif element.tag == f"{SVG}polyline":
            points = [tuple(map(float, pair.split(","))) for pair in element.get("points", "").split()]
            made.lines.append(([(x, y) for x, y in points], when))
    return made


def on_the_way(points: list[tuple[float, float]], step: float = 4.0) -> Iterator[tuple[float, float]]:
    """Points along a line, no more than `step` apart."""
    for (x0, y0), (x1, y1) in pairwise(points):
        count = int(max(abs(x1 - x0), abs(y1 - y0)) / step) + 1
        yield from ((x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(count + 1))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


each = pytest.mark.parametrize("name", NAMES)


def test_the_files_are_what_the_code_draws() -> None:
    assert NAMES and draw.stale(draw.FIGURES) == []


def test_a_stale_a_missing_and_an_orphaned_file_are_found(tmp_path: Path) -> None:
    for drawing in draw.drawings()[1:]:
        (tmp_path / f"{drawing.name}.svg").write_text(drawing.svg(), "utf-8")
    (tmp_path / "drawing-99-old.svg").write_text("", "utf-8")
    (tmp_path / NAMES[-1]).write_text("", "utf-8")
    found = " ".join(draw.stale(tmp_path))
    for sentence in ("is missing", "drawing-99-old.svg is drawn by nobody", f"{NAMES[-1]} is stale"):
        assert sentence in found


@each
def test_a_drawing_says_what_it_shows_and_is_small(name: str) -> None:
    root = sheet(name).root
    title, about = root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")
    assert root.get("role") == "img" and title and about and len(title) >= 15 and len(about) >= 60
    assert root.get("width") == root.get("viewBox", "").split()[2] == f"{WIDTH:.0f}"
    text = (draw.FIGURES / name).read_text("utf-8")
    assert len(text.encode()) < 30_000 and "prefers-color-scheme:dark" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|\bhref=|<script|<image", text)
    assert set(re.findall(r"stroke-width:([\d.]+)", text)) == {str(STROKE)}


@each
def test_no_text_leaves_its_box(name: str) -> None:
    made = sheet(name)
    for text in made.texts:
        paper = made.paper_of(text)
        assert paper.holds(text, PAD), f"{text.words!r} is {text.x1 - text.x0:.0f} wide, in {paper}"
        for rect in made.rects:
            covered = rect.when < paper.when and paper.holds(text)
            assert rect.holds(text) or not rect.meets(text) or covered, f"{text.words!r} crosses {rect}"


@each
def test_no_two_labels_overlap_and_no_line_crosses_one(name: str) -> None:
    made = sheet(name)
    for one, other in combinations(made.texts, 2):
        assert not one.meets(other), f"{one.words!r} overlaps {other.words!r}"
    for points, when in made.lines:
        for text in made.texts:
            hit = any(text.x0 < x < text.x1 and text.y0 < y < text.y1 for x, y in on_the_way(points))
            assert not hit or when < made.paper_of(text).when, f"a line crosses {text.words!r}"


@each
@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_every_text_stands_out_from_its_paper(name: str, mode: int) -> None:
    made = sheet(name)
    for text in made.texts:
        fill = PALETTE[SHAPES[made.paper_of(text).kind][0]][mode]
        found = contrast(PALETTE[TEXTS[text.kind]][mode], fill)
        assert found >= 4.5, f"{text.words!r}: {found:.1f}"


@each
@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_the_file_has_the_colours_of_the_palette(name: str, mode: int) -> None:
    """The contrast above is of the palette; here the file is held to it."""
    made = sheet(name)
    light, _, dark = str(made.root.findtext(f"{SVG}style")).partition("@media(prefers-color-scheme:dark)")
    rules = (light, dark)[mode]
    for kind in {text.kind for text in made.texts}:
        assert f"text.{kind}{{fill:{PALETTE[TEXTS[kind]][mode]}}}" in rules
    for kind in {rect.kind for rect in made.rects}:
        fill = SHAPES[kind][0]
        assert f".{kind}{{fill:{PALETTE[fill][mode] if fill != 'none' else 'none'};" in rules


@each
def test_a_page_shows_it_and_describes_it(name: str) -> None:
    alts = [alt for page in PAGES for alt in re.findall(rf"!\[([^\]]*)\]\([^)]*{name}\)", page.read_text("utf-8"))]
    assert alts and all(len(alt) >= 30 for alt in alts), alts


def number_words(text: str) -> set[str]:
    """The numbers of three digits and more, without separators of thousands; fractions, powers and hexadecimals too."""
    text = re.sub(r"(?<=\d)(,|\{,\})(?=\d{3})", "", text)
    return set(re.findall(r"0x[0-9a-f]+|(?<![\w.])\d+\.\d+|(?<![\w.])\d{3,}(?![\w.]\d)", text))


@each
def test_numbers_of_a_drawing_are_those_of_its_page(name: str) -> None:
    wanted = set().union(*(number_words(text.words) for text in sheet(name).texts))
    for page in PAGES:
        text = page.read_text("utf-8")
        if name in text:
            said = number_words(re.sub(r"!\[[^\]]*\]", "", text))
            missed = {
                word for word in wanted - said if not any(other.startswith("0x") and word in other for other in said)
            }
            assert not missed, f"{page.name} does not say {sorted(missed)}"


@pytest.mark.parametrize("page", sorted((ROOT / "chapters").glob("[0-9][0-9]-*.md")), ids=lambda page: page.stem)
def test_a_chapter_shows_the_walk_with_its_own_part_lit(page: Path) -> None:
    where = page.read_text("utf-8").partition("## Where we are")[2].partition("\n## ")[0]
    assert f"(figures/drawing-walk-{page.name[:2]}.svg)" in where
