# Generated from notebooks/20_wire.ipynb by `helios export`; edit the notebook.
"""The wire: the shapes of an answer.

How answers are written: a choice that grows piece by piece, its log-probabilities, and the JSON of
chat and completion answers, whole or as the frames of a stream.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from helios.model.tokenizer import Tokenizer
from helios.serve.choice import Choice, Usage
from helios.serve.logprobs import Offsets, chat_logprobs, completion_logprobs, prompt_scores

__all__ = ["ChatWire", "CompletionWire", "DONE", "Echo", "Wire", "encode", "frame"]

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def frame(payload: dict[str, Any]) -> bytes:
    """One server-sent event: a single `data: ` line and a blank one."""
    return f"data: {encode(payload)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


class Wire:
    """The shapes of one endpoint's answer to one request: a fixed id, time and model name in every part of it."""

    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        logprobs: bool = False,
        token_ids: bool = False,
        skip_special: bool = True,
    ) -> None:
        self.tokenizer, self.with_logprobs, self.with_ids, self.skip_special = (
            tokenizer,
            logprobs,
            token_ids,
            skip_special,
        )
        self.head = {"id": self.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    @cached_property
    def _frame_head(self) -> str:
        return "data: " + encode({**self.head, "object": self.part})[:-1] + ',"choices":'

    def pieces(self, choice: Choice) -> list[dict[str, Any]]:
        """What a choice's stream carries next, each for a frame of its own."""
        raise NotImplementedError

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice as it stands in a whole answer."""
        raise NotImplementedError

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The `usage` object."""
        return usage.as_json()

    def answer(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        """The whole answer of a request that does not stream."""
        shaped = [self.whole_choice(choice) for choice in choices]
        return {**self.head, "object": self.whole, "choices": shaped, "usage": self.usage(usage)}

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        """One event of a stream."""
        counted = "" if usage is None else f',"usage":{encode(self.usage(usage))}'
        return f"{self._frame_head}{encode(choices)}{counted}}}\n\n".encode()

    def _ending(self, choice: Choice) -> dict[str, Any]:
        ending: dict[str, Any] = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        if self.with_ids:
            ending["token_ids"] = choice.token_ids
        return ending

    def _worth_telling(self, choice: Choice) -> bool:
        return bool(choice.text or choice.finish_reason or self.with_ids or (self.with_logprobs and choice.logprobs))


@dataclass(frozen=True)
class Echo:
    """A prompt that comes back before the answer: its text, and its ids where they are to be scored."""

    text: str
    ids: Sequence[int] = ()


class CompletionWire(Wire):
    """`/v1/completions`. `echoes`: one per prompt, each for `n` choices in a row; none without `echo`."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, echoes: Sequence[Echo] = (), n: int = 1, **kind: bool
    ) -> None:
        super().__init__(model, tokenizer, **kind)
        self.echoes, self.n = echoes, n
        self._offsets: dict[int, Offsets] = {}
        self._scored: dict[int, dict[str, Any]] = {}
        self._waiting: dict[int, Choice] = {}
        self._begun: set[int] = set()

    def pieces(self, choice: Choice) -> list[dict[str, Any]]:
        """What a choice's stream carries next, after the prompt if that is to be echoed."""
        if not self.echoes:
            return [self._piece(choice)] if self._worth_telling(choice) else []
        if self.with_logprobs and not self._have_scores(choice):
            return []
        ready = [choice, *self._released(choice)] if choice.scores else [choice]
        return [piece for each in ready if (piece := self._echoed(each)) is not None]

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice as it stands in a whole answer."""
        (piece, *_) = self.pieces(choice)
        return piece

    def _have_scores(self, choice: Choice) -> bool:
        prompt = choice.index // self.n
        if choice.scores is not None:
            echo = self.echoes[prompt]
            self._scored[prompt] = prompt_scores(self.tokenizer, echo.ids, choice.scores, echo.text)
        elif prompt not in self._scored:
            waiting = self._waiting.setdefault(choice.index, choice)
            if waiting is not choice:
                waiting.then(choice)
        return prompt in self._scored

    def _released(self, choice: Choice) -> list[Choice]:
        first = choice.index - choice.index % self.n
        return [self._waiting.pop(index) for index in range(first, first + self.n) if index in self._waiting]

    def _echoed(self, choice: Choice) -> dict[str, Any] | None:
        if choice.index in self._begun:
            return self._piece(choice) if self._worth_telling(choice) else None
        if not (self._worth_telling(choice) or choice.index // self.n in self._scored):
            return None
        self._begun.add(choice.index)
        prompt = choice.index // self.n
        text = self.echoes[prompt].text
        self._offsets[choice.index] = Offsets(self.tokenizer, self.skip_special, len(text))
        piece = self._piece(choice)
        piece["text"] = text + piece["text"]
        if (told := self._scored.get(prompt)) is not None:
            piece["logprobs"] = {name: told[name] + piece["logprobs"][name] for name in told}
        return piece

    def _piece(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self.with_logprobs:
            offsets = self._offsets.get(choice.index)
            if offsets is None:
                offsets = self._offsets[choice.index] = Offsets(self.tokenizer, self.skip_special)
            logprobs = completion_logprobs(self.tokenizer, *offsets.take(choice))
        return {"index": choice.index, "text": choice.text, "logprobs": logprobs, **self._ending(choice)}


class ChatWire(Wire):
    """`/v1/chat/completions`."""

    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: Tokenizer, **kind: bool) -> None:
        super().__init__(model, tokenizer, **kind)
        self._begun: set[int] = set()

    def _begin(self, index: int) -> list[dict[str, Any]]:
        """The role, before a choice's first text; nothing the second time."""
        if index in self._begun:
            return []
        self._begun.add(index)
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        return chat_logprobs(self.tokenizer, choice.logprobs) if self.with_logprobs and choice.logprobs else None

    def pieces(self, choice: Choice) -> list[dict[str, Any]]:
        """What a choice's stream carries next, after the role."""
        if not self._worth_telling(choice):
            return []
        delta = {"content": choice.text} if choice.text else {}
        logprobs = self._logprobs(choice) if self.with_logprobs else None
        piece = {"index": choice.index, "delta": delta, "logprobs": logprobs, **self._ending(choice)}
        return [piece] if choice.index in self._begun else [*self._begin(choice.index), piece]

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice as it stands in a whole answer."""
        message = {"role": "assistant", "content": choice.text}
        logprobs = chat_logprobs(self.tokenizer, choice.logprobs) if self.with_logprobs else None
        return {"index": choice.index, "message": message, "logprobs": logprobs, **self._ending(choice)}
