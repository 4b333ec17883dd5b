"""A long notebook as several pages: cut at `##` headings, so that each stays small, and linked to each other."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from markdown.extensions.toc import slugify

# Markdown of a page of under 100 kB: the theme around it takes 25 kB, markup of cells and headings up to 11 kB.
PART_BYTES = 64_000

FENCE = re.compile(r"(`{3,}|~{3,})(.*)")
HEADING = re.compile(r"#{1,6} +(.+?) *#*$")
ANCHOR = re.compile(r'<div id="([^"]+)">')


@dataclass(frozen=True)
class Part:
    """One page of a notebook: its name without suffix, what the contents call it, and its Markdown."""

    name: str
    label: str
    text: str


def parts_of(stem: str, text: str, links: str) -> list[Part]:
    """The pages of a notebook's Markdown, `# title` first; `links` is the line that stands below each page's title."""
    texts = cut(sections(text))
    title = texts[0].partition("\n")[0].removeprefix("# ").strip()
    if len(texts) == 1:
        return [Part(stem, title, texts[0])]
    names = [stem, *(f"{stem}-{number}" for number in range(2, len(texts) + 1))]
    labels = [f"Part {number}: {first_heading(text, title)}" for number, text in enumerate(texts, start=1)]
    texts = relinked(names, texts)
    return [
        Part(name, labels[place], page_text(place, names, labels, texts[place], title, links))
        for place, name in enumerate(names)
    ]


def page_text(place: int, names: list[str], labels: list[str], text: str, title: str, links: str) -> str:
    """A part as a page: titled, with links to chapter, source and the other parts; the next one also at the end."""
    numbered = enumerate(names, start=1)
    others = (f"**Part {n}**" if n == place + 1 else f"[Part {n}]({name}.md)" for n, name in numbered)
    line = links.replace("\n{ .links }", f" · {' · '.join(others)}\n{{ .links }}")
    text = text.replace(links, line, 1) if place == 0 else f"# {title}, part {place + 1}\n\n{line}\n\n{text}"
    if place + 1 < len(names):
        text += f"\n\nThe notebook goes on: [{labels[place + 1]}]({names[place + 1]}.md)\n"
    quoted = f"{title}, part {place + 1}".replace("'", "''")
    return f"---\ntitle: '{quoted}'\n---\n\n{text}"


def lines_of(text: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is prose: outside fenced blocks."""
    fence = ""
    for line in text.splitlines(keepends=True):
        match = FENCE.match(line)
        if match and not fence:
            fence = match[1]
            yield line, False
        elif fence:
            yield line, False
            if match and match[1].startswith(fence) and not match[2].strip():
                fence = ""
        else:
            yield line, True


def sections(text: str) -> list[str]:
    """Cut before every `## ` heading; what comes before the first goes with the first."""
    found: list[list[str]] = [[]]
    for line, prose in lines_of(text):
        if prose and line.startswith("## ") and any(part.startswith("## ") for part in found[-1]):
            found.append([])
        found[-1].append(line)
    return ["".join(lines) for lines in found]


def cut(pieces: list[str]) -> list[str]:
    """As few texts as keep to the size, as even as the headings allow."""
    for count in range(1, len(pieces) + 1):
        options = (
            ["".join(pieces[a:b]) for a, b in pairwise((0, *places, len(pieces)))]
            for places in combinations(range(1, len(pieces)), count - 1)
        )
        best = min(options, key=lambda texts: max(map(size, texts)))
        if max(map(size, best)) <= PART_BYTES:
            return best
    return pieces


def size(text: str) -> int:
    return len(text.encode())


def first_heading(text: str, otherwise: str) -> str:
    found = (line for line, prose in lines_of(text) if prose and line.startswith("## "))
    return next(found, otherwise).removeprefix("## ").replace("`", "").strip()


def anchors_of(text: str) -> list[str]:
    """What can be linked to in a page: export cells by the names they define, and headings."""
    headings = (HEADING.match(line.rstrip("\n")) for line, prose in lines_of(text) if prose)
    return ANCHOR.findall(text) + [slugify(re.sub(r"[`*]", "", match[1]), "-") for match in headings if match]


def relinked(names: list[str], texts: list[str]) -> list[str]:
    """Links within the notebook, pointed at the page that the cut put their target on."""
    home = {anchor: name for name, text in zip(names, texts, strict=True) for anchor in anchors_of(text)}

    def renewed(text: str, own: str) -> str:
        def link(match: re.Match[str]) -> str:
            there = home.get(match[1], own)
            return match[0] if there == own else f"]({there}.md#{match[1]})"

        return "".join(re.sub(r"\]\(#([^)]+)\)", link, line) if prose else line for line, prose in lines_of(text))

    return [renewed(text, name) for name, text in zip(names, texts, strict=True)]
