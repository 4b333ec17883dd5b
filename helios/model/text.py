# Generated from notebooks/02_tokens.ipynb by `helios export`; edit the notebook.
"""Token ids to text, one at a time: no split character, no leaked stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from helios.model.tokenizer import Tokenizer

__all__ = ["StopMatcher", "TextStream"]


class StopMatcher:
    """Looks for one stop string in a stream of characters: Knuth, Morris and Pratt's automaton (1977).

    `matched` is the length of the longest suffix of the stream that begins the stop string: what must be held back.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0] * len(stop)  # [i]: longest proper prefix of stop that ends stop[:i + 1]
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[i] == stop[length]
            self._fallback[i] = length

    def step(self, character: str) -> bool:
        """Take one character; whether the stop string is now complete."""
        while self.matched and character != self.stop[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += character == self.stop[self.matched]
        return self.matched == len(self.stop)

    def pass_over(self) -> None:
        """Forget a stop string that was just completed; what of it may begin the next one stays."""
        self.matched = self._fallback[-1]


class TextStream:
    """Text of one choice, released as its token ids arrive.

    `push` returns what can no longer change: whole characters, less the longest tail that may still become a stop
    string. The stop string that is complete first ends the text (of two that end together, the longer); within the
    first `min_tokens` ids none does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        if isinstance(stop, str):
            stop = [stop]
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._include_stop = include_stop
        # Longest first: of two stop strings that end together the first found is the longer.
        self._matchers = [StopMatcher(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._early = min_tokens  # ids still to come before a stop string counts
        self._held = ""
        self._released: list[str] = []
        self._finished = False
        self.stop_reason: str | None = None

    def push(self, token_id: int) -> str:
        """Take the next token id; return the text that is now safe to show, perhaps ""."""
        if self._finished or self.stop_reason is not None:
            return ""
        self._early -= 1
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._accept(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """No more ids will come: return the rest, with U+FFFD for a character that was never completed."""
        if self._finished or self.stop_reason is not None:
            self._finished = True
            return ""
        self._finished = True
        last = self._accept(self._utf8.decode(b"", final=True))
        if self.stop_reason is not None:
            return last
        rest, self._held = self._held, ""
        return last + self._release(rest)

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def _release(self, text: str) -> str:
        if text:
            self._released.append(text)
        return text

    def _accept(self, new: str) -> str:
        if not self._matchers:
            return self._release(new)
        text = self._held + new
        for end in range(len(self._held) + 1, len(text) + 1):
            done = [matcher for matcher in self._matchers if matcher.step(text[end - 1])]
            if done and self._early < 0:
                self.stop_reason, self._held = done[0].stop, ""
                return self._release(text[: end if self._include_stop else end - len(done[0].stop)])
            for matcher in done:
                matcher.pass_over()
        held = max(matcher.matched for matcher in self._matchers)
        self._held = text[len(text) - held :]
        return self._release(text[: len(text) - held])
