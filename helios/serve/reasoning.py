# Generated from notebooks/21_tools.ipynb by `helios export`; edit the notebook.
"""Thoughts before the answer: told apart in the text, counted in the ids, and begun where the prompt says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from helios.model.tokenizer import Tokenizer
from helios.serve.toolcalls import tail_of

__all__ = ["BLANK", "THINK", "THOUGHT", "ThinkSplitter", "ThinkTags", "ThoughtCounter", "prompt_leaves", "think_tags"]
THINK, THOUGHT = "<think>", "</think>"
BLANK = re.compile(r"\s{0,64}")


class ThinkSplitter:
    """Splits a stream into thoughts and answer. `begun`: the prompt has opened the block already.

    An opening tag counts at the beginning of the text alone, a closing one once. Line breaks inside next to the tags,
    and those between block and answer, belong to the tags. What comes out depends on the text only, not on its cuts.
    """

    def __init__(self, begun: bool = False) -> None:
        self.begun = begun
        self.place: Literal["start", "thought", "gap", "answer"] = "start"
        self._text, self._lines, self._spoke = "", "", False

    @property
    def thinking(self) -> bool:
        """Whether the text is inside the block here."""
        return self.place == "thought" or (self.place == "start" and self.begun)

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece; returns what is certain now: more of the thoughts, more of the answer."""
        if self.place == "answer":
            return "", text
        self._text += text
        if self.place == "start" and not self._started():
            return "", ""
        thoughts = self._think() if self.place == "thought" else ""
        return thoughts, self._answer()

    def _started(self) -> bool:
        blank = BLANK.match(self._text)
        begin = blank.end() if blank else 0
        head = self._text[begin : begin + len(THINK)]
        if head != THINK and THINK.startswith(head):
            return False  # still a beginning of the tag
        if head == THINK:
            self._text = self._text[begin + len(THINK) :]
        self.place = "thought" if head == THINK or self.begun else "answer"
        return True

    def _think(self) -> str:
        close = self._text.find(THOUGHT)
        end = close if close >= 0 else len(self._text) - tail_of(self._text, THOUGHT)
        core = self._text[:end].rstrip("\n")
        lines = self._lines + self._text[len(core) : end] if not core else self._text[len(core) : end]
        out = (self._lines + core if self._spoke else core.lstrip("\n")) if core else ""
        self._spoke, self._lines = self._spoke or bool(core), lines
        self._text = self._text[end:]
        if close >= 0:
            self._text, self.place = self._text[len(THOUGHT) :], "gap"
        return out

    def _answer(self) -> str:
        if self.place == "gap":
            self._text = self._text.lstrip("\n")
            self.place = "answer" if self._text else "gap"
        if self.place != "answer":
            return ""
        out, self._text = self._text, ""
        return out

    def finish(self) -> tuple[str, str]:
        """No more text will come: returns the rest."""
        rest, self._text = self._text, ""
        if not self.thinking:
            return "", rest
        lines = self._lines if self._spoke else ""
        return lines + rest, ""


@dataclass(frozen=True)
class ThinkTags:
    """Ids of the tokens `<think>` and `</think>` in one vocabulary."""

    think: int
    thought: int


@lru_cache(maxsize=1)
def think_tags(tokenizer: Tokenizer) -> ThinkTags | None:
    """The model's think tokens; None if its vocabulary has none, or hides them as control tokens."""
    spelled = [tokenizer.encode(tag, add_special_tokens=False, parse_special=True) for tag in (THINK, THOUGHT)]
    if any(len(ids) != 1 or tokenizer.is_special(ids[0]) for ids in spelled):
        return None
    return ThinkTags(spelled[0][0], spelled[1][0])


def prompt_leaves(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], tags: ThinkTags
) -> Literal["open", "closed", "neither"]:
    """How the prompt's last turn leaves the think block. Earlier turns do not count: a control token ends the look."""
    for token in reversed(prompt_ids):
        if token == tags.think:
            return "open"
        if token == tags.thought:
            return "closed"
        if tokenizer.is_special(token):
            return "neither"
    return "neither"


class ThoughtCounter:
    """Counts the ids inside the think block, its tags not among them."""

    def __init__(self, tokenizer: Tokenizer, tags: ThinkTags, begun: bool) -> None:
        self.count, self._tokenizer, self._tags = 0, tokenizer, tags
        self._inside, self._may_begin = begun, True

    def take(self, ids: Sequence[int]) -> None:
        """Take the next ids; an opening tag counts as long as nothing but white space came."""
        for token in ids:
            if token == self._tags.think:
                self._inside = self._inside or self._may_begin
            elif token == self._tags.thought:
                self._inside, self._may_begin = False, False
            else:
                self.count += self._inside
                self._may_begin = self._may_begin and self._tokenizer.token_bytes(token).isspace()
