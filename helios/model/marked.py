# Generated from notebooks/02_tokens.ipynb by `helios export`; edit the notebook.
"""Text in which every character remembers who wrote it: the chat template, or a client."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsIndex

__all__ = [
    "END",
    "LONE_SURROGATES",
    "MARK",
    "Marked",
    "QUESTIONS",
    "SHADOWS",
    "UNMARK",
    "mark",
    "mark_all",
    "unmark",
    "unmark_all",
]

SHADOWS = 0xD800  # the first of the 2,048 surrogates: no valid text holds one
END = chr(SHADOWS)  # the shadow of NUL, kept free: it marks where the last message's content ends
MARK = {c: chr(SHADOWS + c) for c in range(1, 0x800) if not chr(c).isspace()}
UNMARK = {SHADOWS + c: chr(c) for c in MARK}
LONE_SURROGATES = re.compile("[\ud800-\udfff]")


def unmark(text: str) -> str:
    """The text as people read it, shadows replaced by their characters; as long as `text`, character for character."""
    return str.__str__(text) if str.isascii(text) else str.translate(text, UNMARK)


class Marked(str):
    """Text in which every character remembers who wrote it.

    Characters that a client wrote are stored as shadows (`MARK`: a surrogate for each one below U+0800 that is not
    white space), those that the template wrote as themselves. Templates see plain text: comparisons and searches look
    through the marks, cuts keep them. Whatever this class does not define (a format, say) works on the stored text: the
    template may then see shadows, but a client's text never loses its marks.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(unmark(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and unmark(self) == unmark(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        return unmark(self) < unmark(other)

    def __contains__(self, part: object) -> bool:
        return isinstance(part, str) and unmark(part) in unmark(self)

    def __str__(self) -> Marked:
        return self

    def __add__(self, other: str) -> Marked:
        if not isinstance(other, str):
            return NotImplemented  # it may know how to join a text
        return Marked(str.__add__(self, other))

    def __radd__(self, other: str) -> Marked:
        return Marked(str.__add__(other, self))

    def __getitem__(self, key: SupportsIndex | slice) -> Marked:
        return Marked(str.__getitem__(self, key))

    def __iter__(self) -> Iterator[Marked]:
        return (Marked(character) for character in str.__iter__(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> Marked:
        if not old:
            return mark(unmark(self).replace("", unmark(new), count))
        return Marked(str.join(new, self.split(old, count)))


def mark(text: str, keep: re.Pattern[str] | None = None) -> Marked:
    """A client's text, marked; stretches that match `keep` are left as if the template had written them.

    Lone surrogates, which are not text, become U+FFFD first: nobody can forge a mark.
    """
    text = LONE_SURROGATES.sub("\ufffd", text)
    if keep is None:
        return Marked(text.translate(MARK))
    parts, cursor = [], 0
    for match in keep.finditer(text):
        parts += [text[cursor : match.start()].translate(MARK), match.group()]
        cursor = match.end()
    return Marked("".join(parts) + text[cursor:].translate(MARK))


def mark_all(value: Any, keep: re.Pattern[str] | None = None) -> Any:
    """`value` with every string in it marked, keys too; numbers, None and booleans as they are."""
    if isinstance(value, str):
        return mark(value, keep)
    if isinstance(value, Mapping):
        return {mark_all(key, keep): mark_all(item, keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mark_all(item, keep) for item in value]
    return value


def unmark_all(value: Any) -> Any:
    """`mark_all` undone."""
    if isinstance(value, str):
        return unmark(value)
    if isinstance(value, Mapping):
        return {unmark_all(key): unmark_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(unmark_all(item) for item in value)
    return value


def _asks(name: str) -> Callable[..., Any]:
    """A method that answers a question (find, startswith, isdigit …): ask the plain text."""

    def method(self: Marked, *args: Any) -> Any:
        return getattr(unmark(self), name)(*map(unmark_all, args))

    return method


def _trims(name: str) -> Callable[..., Marked]:
    """A method that returns a part of the text: cut the plain text, then cut the same part out of the marked one."""

    def method(self: Marked, chars: str | None = None) -> Marked:
        args = () if chars is None else (unmark(chars),)
        plain = unmark(self)
        kept: str = getattr(plain, name)(*args)
        ends_only = name in ("rstrip", "removesuffix")
        start = 0 if ends_only else len(plain) - len(plain.lstrip(*args) if name == "strip" else kept)
        return self[start : start + len(kept)]

    return method


def _cases(name: str) -> Callable[[Marked], Marked]:
    """A method that changes letters: the new text, with the old marks where lengths allow, else marked throughout."""

    def method(self: Marked) -> Marked:
        changed: str = getattr(unmark(self), name)()
        if len(changed) != len(self):
            return mark(changed)
        pairs = zip(changed, str.__iter__(self), strict=True)
        return Marked("".join(new.translate(MARK) if ord(old) in UNMARK else new for new, old in pairs))

    return method


def _splits(name: str) -> Callable[..., Any]:
    """A method that returns several parts, in order: find each in the plain text, cut it out of the marked one."""

    def method(self: Marked, sep: str | None = None, maxsplit: SupportsIndex = -1) -> Any:
        plain, gap, cursor, parts = unmark(self), 0, 0, []
        if name in ("partition", "rpartition"):
            pieces = list(getattr(plain, name)(unmark(sep or "")))
        else:
            pieces = getattr(plain, name)(None if sep is None else unmark(sep), maxsplit)
            gap = len(sep or "")
        for piece in pieces:
            start = plain.find(piece, cursor) if gap == 0 and sep is None else cursor
            parts.append(self[start : start + len(piece)])
            cursor = start + len(piece) + gap
        return tuple(parts) if "partition" in name else parts

    return method


def _splitlines(self: Marked, keepends: bool = False) -> list[Marked]:
    cursor, lines = 0, []
    plain = unmark(self)
    for whole, line in zip(plain.splitlines(True), plain.splitlines(keepends), strict=True):
        lines.append(self[cursor : cursor + len(line)])
        cursor += len(whole)
    return lines


QUESTIONS = [name for name in dir(str) if name.startswith("is")]  # isdigit, isspace …
for _method in ("startswith", "endswith", "find", "rfind", "index", "rindex", "count", *QUESTIONS):
    setattr(Marked, _method, _asks(_method))
for _method in ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"):
    setattr(Marked, _method, _trims(_method))
for _method in ("lower", "upper", "title", "capitalize", "swapcase", "casefold"):
    setattr(Marked, _method, _cases(_method))
for _method in ("split", "rsplit", "partition", "rpartition"):
    setattr(Marked, _method, _splits(_method))
setattr(Marked, "splitlines", _splitlines)  # noqa: B010  # one way to attach them all
