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
from helios.serve.choice import Choice
from helios.serve.logprobs import Offsets, completion_logprobs, prompt_scores
from helios.serve.wire import CompletionWire, Echo
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
    told = CompletionWire("m", TOKENIZER, logprobs=True).whole_choice(whole)["logprobs"]
    wire = CompletionWire("m", TOKENIZER, logprobs=True)
    joined: dict[str, list[Any]] = {name: [] for name in told}
    for piece in streamed:
        for each in wire.pieces(piece):
            for name, values in each["logprobs"].items():
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


@given(st.text(min_size=1, max_size=12), st.sampled_from([[], [SPECIAL], [32]]))
def test_of_a_scored_prompt_the_lists_agree_and_places_are_those_of_the_text(text: str, before: list[int]) -> None:
    ids = [*before, *text.encode("utf-8", "replace")]
    shown = text.encode("utf-8", "replace").decode()
    told = prompt_scores(TOKENIZER, ids, [None, *said(*ids[1:])], shown)
    assert {len(values) for values in told.values()} == {len(ids)}
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert told["text_offset"] == sorted(told["text_offset"]) and told["text_offset"][0] == 0
    for token, place in zip(told["tokens"][len(before) :], told["text_offset"][len(before) :], strict=True):
        assert "\ufffd" in token or shown.startswith(token, place)


@given(st.permutations([(0, "a"), (0, "b"), (1, "c"), (1, "d"), (2, "e"), (3, "f"), (3, "g")]))
def test_of_a_scored_prompt_every_choice_waits_for_the_scores(order: list[tuple[int, str]]) -> None:
    """Two prompts of two choices each, their pieces in any order: choice 0 and 2 bring the scores with their first."""
    echoes = [Echo("Oh", b"Oh"), Echo("Ah", b"Ah")]
    wire, left = CompletionWire("m", TOKENIZER, echoes=echoes, n=2, logprobs=True), [index for index, _ in order]
    texts, scores, begun = ["", "", "", ""], [[], [], [], []], set()
    for index, text in order:
        left.remove(index)
        piece = Choice(index, text, [ord(text)], said(ord(text)), None if index in left else "stop")
        if index % 2 == 0 and index not in begun:
            piece.scores = [None, *said(ord("h"))]
        begun.add(index)
        for told in wire.pieces(piece):
            texts[told["index"]] += told["text"]
            scores[told["index"]] += told["logprobs"]["token_logprobs"]
    joined = ["", "", "", ""]
    for index, text in order:
        joined[index] += text
    assert texts == [("Oh" if index < 2 else "Ah") + text for index, text in enumerate(joined)]
    assert scores == [[None] + [-0.5] * (1 + len(text)) for text in joined]


SCORED: dict[str, Any] = {"echo": True, "logprobs": 2, "temperature": 0, "ignore_eos": True}


def scores_of(served: Running, **asked: Any) -> dict[str, Any]:
    return dict(served.post("/v1/completions", **{**SCORED, **asked}).json()["choices"][0]["logprobs"])


def test_a_prompts_score_is_what_generating_it_scored(served: Running) -> None:
    made = served.post(
        "/v1/completions", prompt="Hello", max_tokens=6, logprobs=2, temperature=0, ignore_eos=True,
        return_token_ids=True,
    ).json()["choices"][0]  # fmt: skip
    ids = served.post("/tokenize", prompt="Hello").json()["tokens"]
    told = scores_of(served, prompt=[*ids, *made["token_ids"]], max_tokens=0)
    assert told["token_logprobs"][-6:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 3])
def test_scored_prompts_streamed_equal_whole(served: Running, max_tokens: int, n: int) -> None:
    asked: dict[str, Any] = {**SCORED, "prompt": ["Hello", "Hi"], "max_tokens": max_tokens, "n": n}
    whole = served.post("/v1/completions", **asked).json()
    assert whole["usage"]["completion_tokens"] == 2 * n * max_tokens and whole["usage"]["prompt_tokens"] == 7
    blocks = served.post("/v1/completions", **asked, stream=True).text.split("\n\n")[:-2]
    chunks = [json.loads(block.removeprefix("data: "))["choices"][0] for block in blocks]
    for choice in whole["choices"]:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        assert [chunk["finish_reason"] for chunk in mine if chunk["finish_reason"]] == [choice["finish_reason"]]
        for name, values in choice["logprobs"].items():
            joined = sum((chunk["logprobs"][name] for chunk in mine), [])
            assert joined == (pytest.approx(values, abs=1e-4) if name == "token_logprobs" else joined)
            assert len(joined) == len(values) == (5 if choice["index"] < n else 2) + max_tokens
        assert choice["logprobs"]["text_offset"][:2] == [0, 1] and choice["finish_reason"] == "length"


def test_scoring_alone_keeps_to_the_limits(served: Running) -> None:
    too_long = served.post("/v1/completions", **SCORED, prompt=[65] * 2048, max_tokens=0)
    assert too_long.status_code == 400 and too_long.json()["error"]["code"] == "context_length_exceeded"
