"""Fields that choose tokens: both endpoints share them, so completions stand for both."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conformance.marks import row, vllm_bug
from tests.server.live import COMPLETE, Target

PROMPT = "The capital of France is"
WILD: dict[str, Any] = {"temperature": 2.0, "top_p": 1.0, "max_tokens": 12, "ignore_eos": True}


def wild(target: Target, **extra: Any) -> str:
    return target.text(PROMPT, **{**WILD, **extra})


def a_token(target: Target, text: str) -> str:
    """The id of a text's last token, as a key of `logit_bias`."""
    return str(target.tokens(text)[-1])


def test_temperature_0_is_greedy(target: Target) -> None:
    assert target.text() == target.text()


@pytest.mark.parametrize("extra", [{"top_p": 0.1}, {"top_k": 3}, {"min_p": 0.5}, {"seed": 5}])
def test_temperature_0_ignores_filters(target: Target, extra: dict[str, Any]) -> None:
    assert target.text(**extra) == target.text()


def test_temperature_tiny_is_greedy(target: Target) -> None:
    assert target.text(temperature=1e-6) == target.text()


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 1e-4, 1e-2, 1, 2, 2.0])
def test_temperature_range(target: Target, temperature: float) -> None:
    assert target.text(temperature=temperature, ignore_eos=True)


def test_temperature_default_comes_from_the_model_or_is_1(target: Target) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "model": target.model}
    assert target.client.post(COMPLETE, json=body).status_code == 200


@pytest.mark.parametrize("extra", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}])
def test_the_strongest_filter_leaves_the_likeliest_token(target: Target, extra: dict[str, Any]) -> None:
    assert target.text(temperature=1.5, **extra) == target.text()


@pytest.mark.parametrize("extra", [{"top_k": 0}, {"top_k": -1}, {"top_p": 1}, {"min_p": 0}, {"top_k": 10**6}])
def test_filters_off(target: Target, extra: dict[str, Any]) -> None:
    assert wild(target, **extra)


@pytest.mark.parametrize("seed", [0, 1, row("-1", -1, marks=vllm_bug("-1 stands for no seed")), 2**63 - 1, -(2**63)])
def test_seed_same_text(target: Target, seed: int) -> None:
    assert wild(target, seed=seed) == wild(target, seed=seed)


def test_seed_other_text(target: Target) -> None:
    assert len({wild(target, seed=seed) for seed in range(4)}) > 1


def test_seed_whatever_else_runs(target: Target) -> None:
    alone = wild(target, seed=7)
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(wild, target) for _ in range(3)]
        assert pool.submit(wild, target, seed=7, max_tokens=12).result()[:4] == alone[:4]
    assert all(other.result() for other in others)


def test_seed_of_choices_differ(target: Target) -> None:
    asked: dict[str, Any] = {**WILD, "seed": 3, "n": 3}
    texts = [choice["text"] for choice in target.complete(PROMPT, **asked)["choices"]]
    assert len(set(texts)) > 1
    assert texts == [choice["text"] for choice in target.complete(PROMPT, **asked)["choices"]]


def test_without_seed_texts_differ(target: Target) -> None:
    assert len({wild(target) for _ in range(4)}) > 1


def test_n_choices_and_one_prompt_in_usage(target: Target) -> None:
    one, three = target.complete(PROMPT, **WILD), target.complete(PROMPT, n=3, **WILD)
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 3 * 12


def test_logit_bias_chooses(target: Target) -> None:
    text = target.text(logit_bias={a_token(target, " banana"): 100}, max_tokens=3)
    assert text.strip() != "" and target.text(max_tokens=3) != text


def test_logit_bias_bans(target: Target) -> None:
    first = target.text(max_tokens=1)
    banned = target.text(max_tokens=1, logit_bias={a_token(target, first): -100})
    assert banned != first


@pytest.mark.parametrize(
    "extra",
    [
        row("frequency", {"frequency_penalty": 2.0}),
        row("presence", {"presence_penalty": 2.0}),
        row("repetition", {"repetition_penalty": 2.0}),
    ],
)
def test_penalties_change_what_repeats(target: Target, extra: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"prompt": "ha ha ha ha ha ha ha ha", "max_tokens": 16, "ignore_eos": True}
    assert target.text(**asked) != target.text(**asked, **extra)


@pytest.mark.parametrize(
    "extra",
    [
        {"presence_penalty": -2, "frequency_penalty": -2.0},
        {"presence_penalty": 0},
        {"repetition_penalty": 1.0},
        {"repetition_penalty": 0.5},
        {"logit_bias": {}},
    ],
)
def test_penalties_within_range(target: Target, extra: dict[str, Any]) -> None:
    assert target.text(ignore_eos=True, **extra)


def test_max_tokens_is_a_cap(target: Target) -> None:
    for most in (1, 2, 7):
        body = target.complete(max_tokens=most, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == most and body["choices"][0]["finish_reason"] == "length"


class TestEndOfText:
    """Token 2 is SmolLM2's `<|im_end|>`, token 0 its `<|endoftext|>`; a bias brings either on at once."""

    @pytest.mark.parametrize("eos", ["2", "0"])
    def test_eos_ends(self, known_model: Target, eos: str) -> None:
        body = known_model.complete(logit_bias={eos: 100}, max_tokens=5)
        assert body["choices"][0]["finish_reason"] == "stop" and body["choices"][0]["text"] == ""
        assert body["usage"]["completion_tokens"] == 1, "the token that ended the text counts"

    def test_eos_as_the_last_allowed_token_is_stop(self, known_model: Target) -> None:
        body = known_model.complete(logit_bias={"2": 100}, max_tokens=1)
        assert body["choices"][0]["finish_reason"] == "stop"

    def test_ignore_eos(self, known_model: Target) -> None:
        body = known_model.complete(logit_bias={"2": 100}, max_tokens=5, ignore_eos=True)
        assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 5

    def test_min_tokens(self, known_model: Target) -> None:
        body = known_model.complete(logit_bias={"2": 100}, max_tokens=9, min_tokens=4)
        assert body["usage"]["completion_tokens"] == 5, "four others, then the end"
        assert body["choices"][0]["finish_reason"] == "stop"

    def test_stop_token_ids(self, known_model: Target) -> None:
        paris = known_model.tokens(" Paris")
        body = known_model.complete(stop_token_ids=paris, max_tokens=8)["choices"][0]
        assert body["finish_reason"] == "stop" and body["stop_reason"] == paris[0]

    def test_skip_special_tokens(self, known_model: Target) -> None:
        asked: dict[str, Any] = {"logit_bias": {"2": 100}, "max_tokens": 2, "ignore_eos": True}
        assert known_model.text(**asked) == ""
        shown = known_model.text(**asked, skip_special_tokens=False, spaces_between_special_tokens=False)
        assert shown == "<|im_end|>" * 2

    def test_min_tokens_holds_back_stop_strings(self, known_model: Target) -> None:
        whole = known_model.text(max_tokens=8, ignore_eos=True)
        body = known_model.complete(stop=[whole[:3]], min_tokens=4, max_tokens=8, ignore_eos=True)
        assert body["usage"]["completion_tokens"] >= 4
