# Generated from notebooks/27_authors.ipynb by `helios export`; edit the notebook.
"""What is a reference to a chapter, and how a text reads with new numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = [
    "DRAWING",
    "EXPLAINED",
    "GAP",
    "LINKED",
    "MENTION",
    "NAME",
    "NUMBER",
    "PLACED",
    "ROW",
    "Rewriting",
    "WALK_KEY",
    "in_order",
]
LINKED = re.compile(r"\[(\d\d?)\](?=\((?:\.\./chapters/)?(\d\d)-[\w-]+\.md)")
EXPLAINED = re.compile(r"(?m)\(\d\d?(?:, \d\d?)*\)$")
ROW = re.compile(r"(?m)^\| (\d\d) \|(?=.*\(chapters/(\d\d)-)")
DRAWING = re.compile(r"\bdrawing-(?:walk-)?\d\d\b")
WALK_KEY = re.compile(r'(?m)(?<=[ {])\d\d?(?=: [("])|(?<=^ALL = )\d\d?')
PLACED = re.compile(
    r"(chapters/(?:figures/(?:drawing-)?(?:walk-)?)?|notebooks/(?:exercises/|solutions/)?)(\d\d)([_.-].+)"
)
NAME = re.compile(r"(?<![\w-])(\d\d)([_-])([a-z][a-z0-9_-]*)(…?)")
GAP = r'(?:[ \u00a0]|\n[ \t]*(?:[#>] ?)?|\\n",\s*"(?:[#>] ?)?)'
NUMBER = r"\d\d?(?!\d|\.\d)"
MENTION = re.compile(
    rf"\b[Cc]hapters{GAP}{NUMBER}(?:(?:,{GAP}{NUMBER})*,?(?:{GAP}(?:and|or|to){GAP}|[–-]){NUMBER})?"
    rf"|\b[Cc]h(?:apter|\.){GAP}{NUMBER}(?:(?:{GAP}or{GAP}|–){NUMBER})?"
)


@dataclass
class Rewriting:
    """New numbers, the names that bear one, and the phrases that were changed so far."""

    numbers: Mapping[int, int]
    names: frozenset[str]
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def number(self, digits: str) -> str:
        """The new number, in the old one's style: 08 stays of two digits, 8 does not become 08."""
        new = self.numbers.get(int(digits), int(digits))
        return f"{new:02}" if len(digits) == 2 and digits[0] == "0" else str(new)

    def every(self, pattern: str | re.Pattern[str], new: Callable[[re.Match[str]], str], text: str) -> str:
        """The text with `new` for each match; what changed is remembered."""

        def replaced(match: re.Match[str]) -> str:
            if (made := new(match)) != match[0]:
                self.changes[" ".join(match[0].split()), " ".join(made.split())] += 1
            return made

        return re.sub(pattern, replaced, text)

    def numbered(self, match: re.Match[str]) -> str:
        """A mention with each number in it renewed."""
        return re.sub(r"\d+", lambda digits: self.number(digits[0]), match[0])

    def padded(self, match: re.Match[str]) -> str:
        """The same where a number always has two digits: names, titles, ids, rows."""
        return re.sub(r"\d\d", lambda digits: f"{int(self.number(digits[0])):02}", match[0])

    def named(self, match: re.Match[str]) -> str:
        """The name of a file with its new number, if there is such a file; `61_first…` stands for what it begins."""
        number, kind, rest, cut = match.groups()
        name = f"{number}{kind}{rest}"
        part = re.sub(r"-\d+$", "", name)  # a long notebook's second page on the site ends in -2
        if name in self.names or part in self.names or (cut and any(known.startswith(name) for known in self.names)):
            return f"{int(self.number(number)):02}{kind}{rest}{cut}"
        return match[0]

    def rewritten(self, path: str, text: str) -> str:
        """The text of the file at `path` with every reference to a chapter renewed."""
        place = PLACED.fullmatch(path)
        if place and path.endswith(".md"):
            text = self.every(rf"\A# {place[2]}(?= · )", self.padded, text)
        if place and path.endswith(".ipynb"):
            text = self.every(rf'"id": "x?{place[2]}(?=-\d)', self.padded, text)
        if path == "chapters/glossary.md":
            text = self.every(EXPLAINED, self.numbered, text)
        text = self.every(
            LINKED, lambda match: self.numbered(match) if int(match[1]) == int(match[2]) else match[0], text
        )
        if path == "README.md":
            text = self.every(ROW, lambda row: self.padded(row) if row[1] == row[2] else row[0], text)
        if path == "site/drawings/walk.py":
            text = self.every(WALK_KEY, self.numbered, text)
        text = self.every(NAME, self.named, self.every(DRAWING, self.padded, text))
        text = self.every(MENTION, self.numbered, text)
        return in_order(text) if path == "README.md" else text


def in_order(text: str) -> str:
    """README with the rows of its table of chapters sorted by number."""
    lines = text.split("\n")
    places = [place for place, line in enumerate(lines) if ROW.match(line)]
    for place, line in zip(places, sorted(lines[place] for place in places), strict=True):
        lines[place] = line
    return "\n".join(lines)
