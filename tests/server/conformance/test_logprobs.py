"""Logprobs in both shapes, streamed and whole, of answers and of prompts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.server.conformance.marks import helios_only, vllm_bug
from tests.server.live import COMPLETE, Target

PROMPT = "The capital of France is"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def chat_entries(target: Target, **extra: Any) -> list[dict[str, Any]]:
    return list(target.chat(logprobs=True, ignore_eos=True, **extra)["choices"][0]["logprobs"]["content"])


def scored(target: Target, prompt: Any = PROMPT, **extra: Any) -> dict[str, Any]:
    return dict(target.complete(prompt, ignore_eos=True, **extra)["choices"][0]["logprobs"])


@pytest.mark.parametrize("top", [None, 0, 1, 5, 20])
def test_chat_top_logprobs(target: Target, top: int | None) -> None:
    entries = chat_entries(target, **({} if top is None else {"top_logprobs": top}))
    assert len(entries) == 8
    for entry in entries:
        assert len(entry["top_logprobs"]) == (top or 0)
        assert all(-9999 <= each["logprob"] <= 0 for each in [entry, *entry["top_logprobs"]])


def test_chat_tokens_join_to_the_text(target: Target) -> None:
    choice = target.chat("Write: 猫 😀 ď", logprobs=True, max_tokens=24)["choices"][0]
    raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert raw.decode(errors="replace").startswith(choice["message"]["content"])


def test_chat_of_a_greedy_answer_the_first_alternative_was_taken(target: Target) -> None:
    for entry in chat_entries(target, top_logprobs=2):
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"], abs=1e-4)
        assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]


@pytest.mark.parametrize("top", [0, 2])
def test_chat_streamed_equals_whole(target: Target, top: int) -> None:
    stream = target.stream(logprobs=True, top_logprobs=top, ignore_eos=True)
    streamed = [entry for choice in stream.choices if choice.get("logprobs") for entry in choice["logprobs"]["content"]]
    whole = chat_entries(target, top_logprobs=top)
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in whole]


@pytest.mark.parametrize("top", [0, 1, 5])
def test_completion_lists_have_equal_lengths(target: Target, top: int) -> None:
    told = scored(target, logprobs=top)
    assert [len(told[name]) for name in LISTS] == [8] * 4
    assert all(top <= len(each) <= top + 1 for each in told["top_logprobs"]) or top == 0


def test_completion_sampled_token_is_among_its_alternatives(target: Target) -> None:
    told = scored(target, logprobs=2, temperature=2.0, seed=4)
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert top[token] == pytest.approx(logprob, abs=1e-4)


def test_completion_offsets_count_characters_from_0(target: Target) -> None:
    choice = target.complete("Once upon a", logprobs=1, ignore_eos=True)["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(choice["text"])
    for token, start in zip(choice["logprobs"]["tokens"], offsets, strict=True):
        assert choice["text"].startswith(token, start) or "\ufffd" in token


def test_completion_streamed_equals_whole(target: Target) -> None:
    stream = target.stream(COMPLETE, prompt=PROMPT, logprobs=2, ignore_eos=True)
    whole = scored(target, logprobs=2)
    for name in ("tokens", "text_offset"):
        assert [each for c in stream.choices if c.get("logprobs") for each in c["logprobs"][name]] == whole[name]


def test_completion_offsets_are_not_shifted_by_stop_strings(target: Target) -> None:
    plain = target.stream(COMPLETE, prompt=PROMPT, logprobs=1, ignore_eos=True)
    held = target.stream(COMPLETE, prompt=PROMPT, logprobs=1, ignore_eos=True, stop=["never said by anyone"])

    def offsets(stream: Any) -> list[int]:
        return [each for c in stream.choices if c.get("logprobs") for each in c["logprobs"]["text_offset"]]

    assert offsets(plain) == offsets(held) and len(offsets(plain)) == 8


class TestEchoed:
    """The prompt is scored too: its first token has no score, the others have."""

    @pytest.mark.parametrize("top", [0, 1, 5])
    def test_lists(self, target: Target, top: int) -> None:
        told, count = scored(target, echo=True, logprobs=top), len(target.tokens(PROMPT))
        assert [len(told[name]) for name in LISTS] == [count + 8] * 4
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        assert all(value is not None and value <= 0 for value in told["token_logprobs"][1:])

    def test_tokens_are_the_text(self, target: Target) -> None:
        choice = target.complete(echo=True, logprobs=1, ignore_eos=True)["choices"][0]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"] and choice["text"].startswith(PROMPT)
        assert choice["logprobs"]["tokens"][0] and choice["logprobs"]["text_offset"][0] == 0

    @vllm_bug("it counts a token that it does not show")
    def test_scoring_alone(self, target: Target) -> None:
        body = target.complete(echo=True, logprobs=1, max_tokens=0)
        told = body["choices"][0]["logprobs"]
        assert len(told["tokens"]) == len(target.tokens(PROMPT)) == body["usage"]["prompt_tokens"]
        assert body["choices"][0]["text"] == PROMPT and body["usage"]["completion_tokens"] == 0

    def test_ids_as_lm_eval_sends_them(self, target: Target) -> None:
        ids = target.tokens(PROMPT + " Paris")
        asked: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234, "temperature": 0}
        told = target.complete([ids], **asked)["choices"][0]["logprobs"]
        assert len(told["tokens"]) == len(ids) + 1
        likeliest = max(told["top_logprobs"][len(ids) - 1].values())
        assert told["token_logprobs"][len(ids) - 1] == pytest.approx(likeliest, abs=1e-3), "Paris is the likeliest"

    def test_a_prompts_score_is_what_generating_it_scored(self, target: Target) -> None:
        made = target.complete(logprobs=0, ignore_eos=True, max_tokens=6, return_token_ids=True)["choices"][0]
        ids = target.tokens(PROMPT) + made["token_ids"]
        told = target.complete(ids, echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]
        assert told["token_logprobs"][-6:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=0.15)

    def test_several_prompts(self, target: Target) -> None:
        body = target.complete(["One two", "Red green blue"], echo=True, logprobs=1, max_tokens=1)
        for choice in body["choices"]:
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]

    def test_streamed(self, target: Target) -> None:
        stream = target.stream(COMPLETE, prompt=PROMPT, echo=True, logprobs=1, ignore_eos=True)
        tokens = [token for c in stream.choices if c.get("logprobs") for token in c["logprobs"]["tokens"]]
        assert "".join(tokens) == stream.text() and stream.text().startswith(PROMPT)


class TestOfTheRawDistribution:
    @pytest.mark.parametrize(
        "extra", [{"top_p": 0.1}, {"top_k": 1}, {"temperature": 0.3, "top_p": 0.5}, {"min_p": 0.9}]
    )
    def test_filters_change_no_logprobs(self, target: Target, extra: dict[str, Any]) -> None:
        plain = scored(target, logprobs=3, max_tokens=1, temperature=1.0, seed=1)["top_logprobs"][0]
        cut = scored(target, logprobs=3, max_tokens=1, seed=1, **{"temperature": 1.0, **extra})["top_logprobs"][0]
        shared = set(plain) & set(cut)
        assert len(shared) >= 3
        assert all(plain[token] == pytest.approx(cut[token], abs=1e-3) for token in shared)

    def test_they_are_finite(self, target: Target) -> None:
        asked: dict[str, Any] = {"temperature": 0.7, "top_p": 0.01, "top_k": 2, "logit_bias": {"1000": -100}}
        for top in scored(target, logprobs=5, **asked)["top_logprobs"]:
            assert all(math.isfinite(value) for value in top.values())

    @helios_only("how a tie of a byte with another is told is a matter of taste")
    def test_bytes_of_half_a_character_are_the_true_ones(self, target: Target) -> None:
        half = target.tokens("😀")[0]
        entries = chat_entries(target, logit_bias={str(half): 100}, max_tokens=1)
        told = bytes(entries[0]["bytes"])
        assert told and "😀".encode().startswith(told)
