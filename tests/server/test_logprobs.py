"""Logprobs of completions: no alternative lost, and offsets that agree, streamed or whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helios.engine import job
from helios.engine.sequence import TokenEvent
from helios.model.params import SamplingParams
from helios.model.sampling import TokenLogprob
from helios.serve.wire import Choice, CompletionWire, Offsets, completion_logprobs
from tests.server.conftest import Running

SPECIAL = 256


class Bytes:
    """One token per byte, and a special one."""

    eos_token_ids = ()

    def token_bytes(self, token: int) -> bytes:
        return b"<|special|>" if token == SPECIAL else bytes([token])

    def is_special(self, token: int) -> bool:
        return token == SPECIAL


TOKENIZER: Any = Bytes()


def said(*tokens: int) -> list[TokenLogprob]:
    return [TokenLogprob(token, -0.5, []) for token in tokens]


def test_of_alternatives_that_read_alike_the_likeliest_stays() -> None:
    entry = TokenLogprob(ord("x"), -3.0, [(0xC3, -0.1), (0xE2, -2.0), (ord("a"), -2.5)])
    (top,) = completion_logprobs(TOKENIZER, [entry], [0])["top_logprobs"]
    assert top == {"\ufffd": -0.1, "a": -2.5, "x": -3.0}
    assert list(top)[0] == "\ufffd", "the likeliest comes first"


def test_the_sampled_token_is_among_its_alternatives(served: Running) -> None:
    asked: dict[str, Any] = {"prompt": "Hi", "max_tokens": 24, "ignore_eos": True, "seed": 3, "temperature": 2.0}
    for k in (0, 1, 3):
        logprobs = served.post("/v1/completions", **asked, logprobs=k).json()["choices"][0]["logprobs"]
        rows = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))
        for token, logprob, top in rows:
            assert token in top and len(top) <= k + 1 and top[token] >= logprob - 1e-6
        if k == 0:
            assert all(top == {token: logprob} for token, logprob, top in rows)


@pytest.mark.parametrize(
    ("tokens", "text", "offsets"),
    [
        ("ï!".encode(), "ï!", [0, 0, 1]),
        ("€€".encode(), "€€", [0, 0, 0, 1, 1, 1]),
        ([65, SPECIAL, 66], "AB", [0, 1, 1]),
        (b"\xe2A", "\ufffdA", [0, 0]),
        (b"A\xe2", "A\ufffd", [0, 1]),
        (b"Hello", "He", [0, 1, 2, 2, 2]),  # a stop string took the end
    ],
)
def test_offsets_count_characters_of_the_text(tokens: Any, text: str, offsets: list[int]) -> None:
    piece = Choice(0, text, logprobs=said(*tokens), finish_reason="stop")
    assert Offsets(TOKENIZER, skip_special=True).take(piece)[1] == offsets


def test_special_tokens_count_when_they_are_shown() -> None:
    piece = Choice(0, "A<|special|>B", logprobs=said(65, SPECIAL, 66), finish_reason="stop")
    assert Offsets(TOKENIZER, skip_special=False).take(piece)[1] == [0, 1, 12]


def pieces(tokens: list[int], params: SamplingParams) -> list[Choice]:
    """What the worker releases for these tokens, one tick each."""
    choice, out = job.Choice(0, params, TOKENIZER), []
    for position, token in enumerate(tokens):
        reason = "length" if position == len(tokens) - 1 else None
        choice.push(TokenEvent("a", 0, token, said(token)[0], reason))
        if (event := choice.take()) is not None:
            entries = [entry for entry in event.logprobs if entry is not None]
            out.append(Choice(0, event.text, event.token_ids, entries, event.finish_reason, event.stop_reason))
    return out


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from([*b"aab", *"ï€".encode(), SPECIAL]), min_size=1, max_size=16),
    st.sampled_from([None, ["aab"], ["aaab", "ba"], ["ï"]]),
    st.booleans(),
)
def test_offsets_agree_streamed_and_whole(tokens: list[int], stop: list[str] | None, include: bool) -> None:
    streamed = pieces(tokens, SamplingParams(stop=stop, include_stop_str_in_output=include))
    whole = Choice(0)
    for piece in streamed:
        whole.text += piece.text
        whole.logprobs += piece.logprobs
        whole.finish_reason = piece.finish_reason
    told = CompletionWire("m", TOKENIZER, logprobs=True).piece(whole)["logprobs"]
    wire = CompletionWire("m", TOKENIZER, logprobs=True)
    joined: dict[str, list[Any]] = {name: [] for name in told}
    for piece in streamed:
        for name, values in wire.piece(piece)["logprobs"].items():
            joined[name] += values
    assert joined == told
    assert len(told["tokens"]) == len(whole.logprobs)
    assert told["text_offset"] == sorted(told["text_offset"]) and told["text_offset"][-1] <= len(whole.text)


def test_streamed_offsets_over_http(served: Running) -> None:
    asked: dict[str, Any] = {"prompt": "Hi", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "logprobs": 1}
    whole = served.post("/v1/completions", **asked).json()["choices"][0]
    blocks = served.post("/v1/completions", **asked, stream=True).text.split("\n\n")[:-2]
    chunks = [json.loads(block.removeprefix("data: "))["choices"][0] for block in blocks]
    for name in ("tokens", "text_offset"):
        assert sum((chunk["logprobs"][name] for chunk in chunks), []) == whole["logprobs"][name]
    assert max(whole["logprobs"]["text_offset"]) <= len(whole["text"])
