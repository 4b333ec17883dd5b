# Generated from notebooks/21_tools.ipynb by `helios export`; edit the notebook.
"""One JSON object, read in pieces: where it ends, whether it can still be one, and its values as they grow."""

from __future__ import annotations

import json
import re
from typing import Literal

__all__ = ["ATOM", "HEX", "MAX_DEPTH", "ObjectScanner", "PLAIN", "VALUE", "WHOLE_ATOM"]
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
ATOM = re.compile(r"[-+.0-9A-Za-z]+")
WHOLE_ATOM = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
VALUE = '"{[-0123456789tfn'
HEX = frozenset("0123456789abcdefABCDEF")
MAX_DEPTH = 64


class ObjectScanner:
    """Reads one JSON object (RFC 8259), cut anywhere.

    `status` turns from "open" to "done" behind the last bracket, or to "bad" before a character that cannot follow.
    `values[key]` holds the JSON text of the object's own values in fragments, `closed` the keys of complete ones.
    One leniency: a raw control character inside a string, which models write in code, is kept as its escape.
    """

    def __init__(self) -> None:
        self.status: Literal["open", "done", "bad"] = "open"
        self.values: dict[str, list[str]] = {}
        self.closed: set[str] = set()
        self._want, self._owed = "{", ""  # first characters that may follow; brackets still to be closed
        self._key = ""  # the last key of the object itself
        self._inside: str | None = None  # the key whose value is being read
        self._token: list[str] = []
        self._lex = self._between

    def feed(self, text: str, at: int = 0) -> int:
        """Read `text` from `at`; returns the position behind the last character that belongs to the object."""
        while at < len(text) and self.status == "open":
            at = self._lex(text, at)
        return at

    def _keep(self, fragment: str) -> None:
        self._token.append(fragment)
        if self._inside is not None:
            self.values[self._inside].append(fragment)

    def _between(self, text: str, at: int) -> int:
        c = text[at]
        if c not in " \t\r\n" and (c not in self._want or (c in "{[" and len(self._owed) == MAX_DEPTH)):
            self.status = "bad"
            return at
        if self._want == VALUE and self._owed == "}" and c in VALUE:
            self._inside = self._key
            self.values[self._key] = []
        if c not in "{[}],: \t\r\n":
            self._token = []
            self._names = self._want in ('"', '"}')
            self._lex = self._string if c == '"' else self._atom
        self._keep(c)
        self._turn(c)
        return at + 1

    def _turn(self, c: str) -> None:
        if c in "{[":
            self._owed += "}" if c == "{" else "]"
            self._want = '"}' if c == "{" else VALUE + "]"
        elif c in "}]":
            self._owed = self._owed[:-1]
            self._end()
        elif c == ":":
            self._want = VALUE
        elif c == ",":
            self._want = '"' if self._owed[-1] == "}" else VALUE

    def _end(self) -> None:
        """A value is complete."""
        if self._owed == "}" and self._inside is not None:
            self.closed.add(self._inside)
            self._inside = None
        self._want = "," + self._owed[-1:]
        if not self._owed:
            self.status = "done"

    def _string(self, text: str, at: int) -> int:
        if plain := PLAIN.match(text, at):
            self._keep(plain.group())
            return plain.end()
        c = text[at]
        self._keep(json.dumps(c)[1:-1] if c < " " else c)
        if c == "\\":
            self._lex = self._escape
        elif c == '"':
            self._lex = self._between
            self._end_string()
        return at + 1

    def _end_string(self) -> None:
        if not self._names:
            return self._end()
        self._want = ":"
        if self._owed == "}":
            self._key = json.loads("".join(self._token))
            if self._key in self.values:
                self.status = "bad"

    def _escape(self, text: str, at: int) -> int:
        c = text[at]
        if c not in '"\\/bfnrtu':
            self.status = "bad"
            return at
        self._keep(c)
        self._digits = 4 if c == "u" else 0
        self._lex = self._hex if c == "u" else self._string
        return at + 1

    def _hex(self, text: str, at: int) -> int:
        if text[at] not in HEX:
            self.status = "bad"
            return at
        self._keep(text[at])
        self._digits -= 1
        if not self._digits:
            self._lex = self._string
        return at + 1

    def _atom(self, text: str, at: int) -> int:
        if more := ATOM.match(text, at):
            self._keep(more.group())
            return more.end()
        if WHOLE_ATOM.fullmatch("".join(self._token)):
            self._lex = self._between
            self._end()
        else:
            self.status = "bad"
        return at
