# Generated from notebooks/17_wire.ipynb by `helios export`; edit the notebook.
"""The wire: asking and answering in OpenAI's protocol.

How answers are written: the JSON of chat and completion answers, their streamed chunks and their
logprobs; and, before that, how requests are read: every field checked before anything runs, every
refusal in the shape that clients unwrap.
"""

from __future__ import annotations

import codecs
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from helios.model.sampling import TokenLogprob
from helios.model.tokenizer import Tokenizer

__all__ = [
    "ChatWire",
    "Choice",
    "CompletionWire",
    "DONE",
    "FLOOR",
    "Offsets",
    "Usage",
    "Wire",
    "chat_logprobs",
    "completion_logprobs",
    "frame",
]


def frame(payload: dict[str, Any]) -> bytes:
    """One server-sent event: a single `data: ` line and a blank one."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """One choice of an answer as it grows."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Usage:
    """Tokens of one answer: every prompt counted once, every generated id counted."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def as_json(self) -> dict[str, Any]:
        """The `usage` object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


FLOOR = -9999.0


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, FLOOR), "bytes": list(raw)}


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> dict[str, Any]:
    """`{"content": [...]}`, one entry per token with its alternatives."""
    content = []
    for entry in entries:
        top = [_entry(tokenizer, token, value) for token, value in entry.top]
        content.append({**_entry(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content}


def _alternatives(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, value in [*entry.top, (entry.token_id, entry.logprob)]:
        found.setdefault(_entry(tokenizer, token, 0.0)["token"], max(value, FLOOR))
    return found


def completion_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprob], offsets: list[int]) -> dict[str, Any]:
    """Four lists of equal length; `offsets` says where each token begins in the answer's text."""
    tokens = [_entry(tokenizer, entry.token_id, entry.logprob)["token"] for entry in entries]
    logprobs = [max(entry.logprob, FLOOR) for entry in entries]
    top = [_alternatives(tokenizer, entry) for entry in entries]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


class Offsets:
    """Where the tokens of one choice begin in its text, piece by piece: the same whole or streamed."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoded, self._released = 0, 0
        self._held: list[tuple[TokenLogprob, int]] = []

    def take(self, piece: Choice) -> tuple[list[TokenLogprob], list[int]]:
        """The tokens whose offset is now certain, and their offsets; all that are left when the choice ends."""
        for entry in piece.logprobs:
            self._held.append((entry, self._decoded))
            if not (self._skip_special and self._tokenizer.is_special(entry.token_id)):
                self._decoded += len(self._utf8.decode(self._tokenizer.token_bytes(entry.token_id)))
        self._released += len(piece.text)
        certain = sum(piece.finish_reason is not None or start <= self._released for _, start in self._held)
        ready, self._held = self._held[:certain], self._held[certain:]
        return [entry for entry, _ in ready], [min(start, self._released) for _, start in ready]


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
        self._offsets: dict[int, Offsets] = {}
        self.head = {"id": self.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice as it stands in a whole answer."""
        raise NotImplementedError

    def piece(self, choice: Choice) -> dict[str, Any]:
        """The next piece of a choice's stream."""
        raise NotImplementedError

    def opening(self, index: int) -> list[dict[str, Any]]:
        """What a choice's stream starts with, before its first text."""
        return []

    def answer(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        """The whole answer of a request that does not stream."""
        shaped = [self.whole_choice(choice) for choice in choices]
        return {**self.head, "object": self.whole, "choices": shaped, "usage": usage.as_json()}

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        """One event of a stream."""
        payload = {**self.head, "object": self.part, "choices": choices}
        return frame(payload if usage is None else {**payload, "usage": usage.as_json()})

    def _ending(self, choice: Choice) -> dict[str, Any]:
        ids = {"token_ids": choice.token_ids} if self.with_ids else {}
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason, **ids}


class CompletionWire(Wire):
    """`/v1/completions`."""

    def piece(self, choice: Choice) -> dict[str, Any]:
        """The next piece of a choice's stream."""
        logprobs = None
        if self.with_logprobs:
            offsets = self._offsets.setdefault(choice.index, Offsets(self.tokenizer, self.skip_special))
            logprobs = completion_logprobs(self.tokenizer, *offsets.take(choice))
        return {"index": choice.index, "text": choice.text, "logprobs": logprobs, **self._ending(choice)}

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice as it stands in a whole answer."""
        return self.piece(choice)


class ChatWire(Wire):
    """`/v1/chat/completions`."""

    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The role, before the first text."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def piece(self, choice: Choice) -> dict[str, Any]:
        """The next piece of a choice's stream."""
        delta = {"content": choice.text} if choice.text else {}
        wanted = self.with_logprobs and choice.logprobs
        logprobs = chat_logprobs(self.tokenizer, choice.logprobs) if wanted else None
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, **self._ending(choice)}

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice as it stands in a whole answer."""
        message = {"role": "assistant", "content": choice.text}
        logprobs = chat_logprobs(self.tokenizer, choice.logprobs) if self.with_logprobs else None
        return {"index": choice.index, "message": message, "logprobs": logprobs, **self._ending(choice)}
