# Generated from notebooks/20_wire.ipynb by `helios export`; edit the notebook.
"""Log-probabilities on the wire: chat's entries, the four lists of completions, and where each token begins."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from helios.model.sampling import TokenLogprob
from helios.model.tokenizer import Tokenizer
from helios.serve.choice import Choice

__all__ = ["FLOOR", "Offsets", "chat_logprobs", "completion_logprobs", "prompt_scores"]
FLOOR = -9999.0


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, FLOOR), "bytes": list(raw)}


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
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


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offsets: list[int]) -> dict[str, Any]:
    """Four lists of equal length; `offsets` says where each token begins in the answer's text."""
    tokens = [_entry(tokenizer, entry.token_id, entry.logprob)["token"] for entry in entries]
    logprobs = [max(entry.logprob, FLOOR) for entry in entries]
    top = [_alternatives(tokenizer, entry) for entry in entries]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


class Offsets:
    """Where the tokens of one choice begin in its text, piece by piece: the same whole or streamed.

    `begin`: characters of the text that stand before the first token, those of an echoed prompt.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, begin: int = 0) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoded = self._released = begin
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


def prompt_scores(
    tokenizer: Tokenizer, ids: Sequence[int], scores: Sequence[TokenLogprob | None], text: str
) -> dict[str, Any]:
    """The four lists for a prompt that was echoed as `text`; `scores` has an entry per id, the first of them None."""
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    places, decoded = [], 0
    for token in ids:
        places.append(decoded)
        decoded += len(utf8.decode(tokenizer.token_bytes(token)))
    surplus = decoded + len(utf8.decode(b"", final=True)) - len(text)
    return {
        "tokens": [_entry(tokenizer, token, 0.0)["token"] for token in ids],
        "token_logprobs": [None if each is None else max(each.logprob, FLOOR) for each in scores],
        "top_logprobs": [None if each is None else _alternatives(tokenizer, each) for each in scores],
        "text_offset": [min(max(place - surplus, 0), len(text)) for place in places],
    }
