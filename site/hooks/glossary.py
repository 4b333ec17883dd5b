"""Terms of the glossary, linked where a chapter's page first uses them."""

import re
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

ENTRY = re.compile(
    r'(?m)^(?P<term>\S.*?) \{ #(?P<anchor>[\w-]+)(?: data-also="(?P<also>[^"]*)")? \}\n:   (?P<text>.+)$'
)
TAG = re.compile(r"(<[^>]+>)")
# Where a link would be wrong or in the way: other links, code, headings, formulas, drawings, what is folded away.
CLOSED = frozenset(["a", "code", "pre", "h1", "h2", "h3", "h4", "th", "summary", "script", "style", "svg", "button"])
VOID = frozenset(["img", "br", "hr", "input", "wbr"])


@dataclass(frozen=True)
class Term:
    """An entry: its anchor, the spellings under which it occurs in prose, and its explanation."""

    anchor: str
    spellings: tuple[str, ...]
    text: str


def read_terms(page: Path) -> tuple[Term, ...]:
    """All entries of the glossary, in its order."""
    return parsed(page.read_text("utf-8"))


@cache
def parsed(text: str) -> tuple[Term, ...]:
    found = []
    for match in ENTRY.finditer(text):
        also = match["also"].split("|") if match["also"] else []
        found.append(Term(match["anchor"], (match["term"].strip("`"), *also), match["text"]))
    return tuple(found)


@cache
def pattern(terms: tuple[Term, ...]) -> tuple[re.Pattern[str], dict[str, Term]]:
    """One expression for all spellings, longest first, and whose each is; capitals do not matter."""
    owners = {spelling.lower(): term for term in terms for spelling in term.spellings}
    longest = sorted(owners, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest))})(?![\w-])", re.IGNORECASE), owners


def with_links(html: str, terms: tuple[Term, ...]) -> str:
    """A page's HTML in which the first use of each term in running text links to its entry."""
    words, owners = pattern(terms)
    used: set[str] = set()
    closed: list[str] = []

    def linked(match: re.Match[str]) -> str:
        term = owners[match[0].lower()]
        if term.anchor in used:
            return match[0]
        used.add(term.anchor)
        title = escape(re.sub(r"[`*]", "", term.text), quote=True)
        return f'<a class="term" href="glossary.html#{term.anchor}" title="{title}">{match[0]}</a>'

    pieces = TAG.split(html)
    for place, piece in enumerate(pieces):
        if place % 2 == 0:
            pieces[place] = piece if closed else words.sub(linked, piece)
            continue
        name = re.match(r"</?\s*([\w-]+)", piece)
        if name is None or name[1] in VOID:
            continue
        if piece.startswith("</"):
            if closed and closed[-1] == name[1]:
                closed.pop()
        elif name[1] in CLOSED or 'class="arithmatex"' in piece or (closed and closed[-1] == name[1]):
            closed.append(name[1])
    return "".join(pieces)
