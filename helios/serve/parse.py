# Generated from notebooks/21_tools.ipynb by `helios export`; edit the notebook.
"""Tools and thoughts: what a model says besides its answer.

A model's text can hold calls of functions and blocks of thought. This notebook takes them out of a
stream, whatever the cuts between its pieces, and gives each its field on the wire: `content`,
`reasoning_content`, `tool_calls`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from helios.model.tokenizer import Tokenizer
from helios.serve.reasoning import ThinkSplitter, ThoughtCounter, prompt_leaves, think_tags
from helios.serve.toolcalls import CallParser, ToolCallDelta

__all__ = ["AnswerParser", "Delta", "Message", "parse_whole", "parser_for"]


@dataclass
class Delta:
    """More of an answer: content, or thoughts, or a part of a call."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The `delta` of a chunk, without the fields that it does not change."""
        calls = [call.as_json() for call in self.tool_calls]
        fields = {"reasoning_content": self.reasoning, "content": self.content, "tool_calls": calls}
        return {name: value for name, value in fields.items() if value}


class AnswerParser:
    """Sorts one choice's text into deltas. `splitter` and `calls` do the work; either may be missing.

    The deltas depend on the text only, not on how it was cut into pieces.
    """

    def __init__(
        self, splitter: ThinkSplitter | None, calls: CallParser | None, counter: ThoughtCounter | None = None
    ) -> None:
        self._splitter, self._calls, self._counter = splitter, calls, counter

    @property
    def in_reasoning(self) -> bool:
        """Whether the text is inside a think block here."""
        return self._splitter is not None and self._splitter.thinking

    @property
    def called(self) -> bool:
        """Whether a call was read to its end."""
        return self._calls is not None and self._calls.completed > 0

    @property
    def reasoning_tokens(self) -> int:
        """How many of the ids given to `push` were thoughts."""
        return self._counter.count if self._counter else 0

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        """Take the next piece, and its ids if thoughts are to be counted; returns what is certain now."""
        if self._splitter is None:
            return self._sort("", text)
        if self._counter:
            self._counter.take(token_ids)
        return self._sort(*self._splitter.push(text))

    def finish(self) -> list[Delta]:
        """No more text will come: returns the rest."""
        deltas = self._sort(*self._splitter.finish()) if self._splitter else []
        return deltas + self._shape(self._calls.finish() if self._calls else [])

    def _sort(self, reasoning: str, text: str) -> list[Delta]:
        deltas = [Delta(reasoning=reasoning)] if reasoning else []
        if self._calls is None:
            return [*deltas, Delta(text)] if text else deltas
        return deltas + self._shape(self._calls.push(text)) if text else deltas

    @staticmethod
    def _shape(parts: list[str | ToolCallDelta]) -> list[Delta]:
        return [Delta(part) if isinstance(part, str) else Delta(tool_calls=[part]) for part in parts]

    def finish_reason(self, reason: str | None) -> str | None:
        """The wire's reason for the engine's, after `finish`: "tool_calls" for a "stop" behind at least one call."""
        return "tool_calls" if reason == "stop" and self.called else reason


def parser_for(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], *, tools: bool, parallel: bool = True
) -> AnswerParser | None:
    """The parser for one choice of an answer to this prompt; None if there is nothing to look for.

    `tools`: whether calls may come out. `parallel`: whether more than one may. Thoughts are looked for if the model
    has tokens for them and the prompt's last turn has not closed the block.
    """
    calls = CallParser(parallel=parallel) if tools else None
    tags = think_tags(tokenizer)
    state = prompt_leaves(tokenizer, prompt_ids, tags) if tags else "closed"
    if tags is None or state == "closed":
        return AnswerParser(None, calls) if calls else None
    begun = state == "open"
    return AnswerParser(ThinkSplitter(begun), calls, ThoughtCounter(tokenizer, tags, begun))


@dataclass
class Message:
    """A whole answer: its deltas joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    def add(self, deltas: Sequence[Delta]) -> None:
        """Join more deltas, in their order."""
        for delta in deltas:
            self.content += delta.content
            self.reasoning += delta.reasoning
            for part in delta.tool_calls:
                if part.id is not None:
                    self.calls.append(ToolCallDelta(part.index, part.id, part.name))
                self.calls[part.index].arguments += part.arguments

    def as_json(self) -> dict[str, Any]:
        """The `message` of a whole answer, without fields that say nothing; content may be null beside calls."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            shaped = [call.as_json() for call in self.calls]
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in shaped]
        return message


def parse_whole(parser: AnswerParser, text: str, token_ids: Sequence[int] = ()) -> Message:
    """All of an answer's text at once."""
    message = Message()
    message.add(parser.push(text, token_ids) + parser.finish())
    return message
