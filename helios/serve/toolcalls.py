# Generated from notebooks/21_tools.ipynb by `helios export`; edit the notebook.
"""Tool calls in a stream of text: content goes on at once, a call becomes an id, a name and growing arguments."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from helios.model.marked import LONE_SURROGATES
from helios.serve.jsonscan import ObjectScanner

__all__ = [
    "CLOSE",
    "CallParser",
    "OPEN",
    "PATIENCE",
    "SLACK",
    "ToolCallDelta",
    "arguments_key",
    "called_name",
    "decoded",
    "finished_call",
    "tail_of",
]
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def tail_of(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    at = text.rfind("<", max(0, len(text) - len(tag) + 1))
    return len(text) - at if at >= 0 and tag.startswith(text[at:]) else 0


@dataclass
class ToolCallDelta:
    """The next part of call number `index` of a choice. `id` and `name` come once, in the call's first part."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def as_json(self) -> dict[str, Any]:
        """The entry of `delta.tool_calls`."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


def decoded(raw: str) -> str | None:
    """The text that a JSON string stands for; None if it is another value, empty, or not text."""
    text = json.loads(raw) if raw.startswith('"') else ""
    return text if text and not LONE_SURROGATES.search(text) else None


def called_name(scan: ObjectScanner) -> str | None:
    """The called function's name, once it is complete."""
    return decoded("".join(scan.values["name"])) if "name" in scan.closed else None


def arguments_key(scan: ObjectScanner) -> str | None:
    """Under which key the object holds its arguments, if it does."""
    return next((key for key in scan.values if key in ("arguments", "parameters")), None)


def finished_call(scan: ObjectScanner) -> tuple[str, str] | None:
    """Name and arguments (a JSON object's text) of a call of which no more will come; None if it is none."""
    name, key = called_name(scan), arguments_key(scan)
    if name is None or (key is not None and key not in scan.closed):
        return None
    if key is None:  # a call without arguments is an object of a name, perhaps an id, and nothing that we do not know
        return (name, "{}") if scan.status == "done" and scan.values.keys() <= {"name", "id", "type"} else None
    raw = "".join(scan.values[key])
    text = "{}" if raw == "null" else decoded(raw) or raw
    inner = ObjectScanner()
    return (name, text) if inner.feed(text) == len(text) and inner.status == "done" else None


PATIENCE = 256
SLACK = 64  # white space and surplus braces that may stand between a call and its closing tag


class CallParser:
    """Takes calls out of a stream of text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them.

    What comes out depends on the text only, not on how it was cut. Every character comes out as content or in a call,
    except a call's own markup: the tags, the object around its arguments, and the white space that touches it.
    Malformed calls are content. With `parallel` False only the first call comes out. Linear in the length of the text.
    """

    def __init__(self, *, parallel: bool = True, patience: int = PATIENCE) -> None:
        self.completed = 0  # calls that were read to their end
        self._parallel, self._patience = parallel, patience
        self._text, self._at, self._from = "", 0, 0  # what is looked at, how far it is read, where the held call began
        self._gap: list[str] = []  # white space that belongs to a call if one follows
        self._spoke, self._bare = False, False  # whether content came out; whether a call came since
        self._index = -1
        self._opened = False
        self._mode: Callable[[], bool] = self._reading
        self._out: list[str | ToolCallDelta] = []

    def push(self, text: str) -> list[str | ToolCallDelta]:
        """Take the next piece; returns what is certain now, content and parts of calls in their order."""
        cut = self._from if self._mode == self._calling and not self._opened else self._at
        self._text, self._at, self._from = self._text[cut:] + text, self._at - cut, 0
        while self._mode():
            pass
        out, self._out = self._out, []
        return out

    def _say(self, text: str) -> None:
        core = text.rstrip()
        if core:
            first = self._bare and not self._spoke  # an answer that begins with a call goes on without its line break
            self._out += [core.lstrip()] if first else [*self._gap, core]
            self._gap, self._spoke, self._bare = [], True, False
        if len(core) < len(text):
            self._gap.append(text[len(core) :])

    def _reading(self) -> bool:
        start = self._text.find(OPEN, self._at)
        end = start if start >= 0 else len(self._text) - tail_of(self._text[self._at :], OPEN)
        self._say(self._text[self._at : end])
        self._at = end
        if start < 0:
            return False
        self._at = self._from = start + len(OPEN)
        self._scan, self._opened, self._mode = ObjectScanner(), False, self._calling
        return True

    def _calling(self) -> bool:
        self._at = self._scan.feed(self._text, self._at)
        if not self._opened and self._long_enough():
            self._open(called_name(self._scan))
        if self._opened:
            self._flow()
        return self._scan.status != "open" and self._settle()

    def _long_enough(self) -> bool:
        if called_name(self._scan) is None:
            return False
        parts = self._scan.values.get(arguments_key(self._scan) or "", [])
        return bool(parts) and parts[0].startswith("{") and sum(map(len, parts)) >= self._patience

    def _settle(self) -> bool:
        """The object has ended, well or badly."""
        if self._opened:
            whole = arguments_key(self._scan) in self._scan.closed
        elif (call := finished_call(self._scan)) is not None:
            whole = True
            self._open(call[0])
            self._emit(ToolCallDelta(self._index, arguments=call[1]))
        else:
            self._mode, self._at = self._reading, self._from
            self._say(OPEN)
            return True
        self.completed += whole
        self._mode = self._closing if whole else self._spilling
        return True

    def _emit(self, delta: ToolCallDelta) -> None:
        if self._index == 0 or self._parallel:
            self._out.append(delta)

    def _open(self, name: str | None) -> None:
        self._index += 1
        self._opened, self._bare, self._gap = True, True, []
        self._emit(ToolCallDelta(self._index, f"call_{uuid.uuid4().hex[:24]}", name))

    def _flow(self) -> None:
        parts = self._scan.values[arguments_key(self._scan) or ""]
        if parts:
            self._emit(ToolCallDelta(self._index, arguments="".join(parts)))
            parts.clear()

    def _closing(self) -> bool:
        slack = self._text[self._at : self._at + SLACK]
        at = self._at + len(slack) - len(slack.lstrip(" \t\r\n}"))
        rest = self._text[at : at + len(CLOSE)]
        if rest != CLOSE and CLOSE.startswith(rest):
            return False  # not to be decided yet
        self._at = at + len(CLOSE) if rest == CLOSE else self._at
        self._mode = self._reading
        return True

    def _spilling(self) -> bool:
        close = self._text.find(CLOSE, self._at)
        end = close if close >= 0 else len(self._text) - tail_of(self._text[self._at :], CLOSE)
        if end > self._at:
            self._emit(ToolCallDelta(self._index, arguments=self._text[self._at : end]))
        self._at = end
        if close >= 0:
            self._at, self._mode = close + len(CLOSE), self._reading
        return close >= 0

    def finish(self) -> list[str | ToolCallDelta]:
        """No more text will come: returns the rest."""
        while self._mode == self._calling:
            self._settle()
            while self._mode():
                pass
        rest = self._text[self._at :]
        if self._mode == self._reading:
            self._say(rest)
            self._out += [] if self._bare else self._gap
        elif self._mode == self._spilling and rest:
            self._emit(ToolCallDelta(self._index, arguments=rest))
        out, self._out = self._out, []
        return out
