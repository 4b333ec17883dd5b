"""Fields of a completion request, and the extras that both endpoints take."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conformance.marks import helios_only, row, vllm_bug
from tests.server.live import COMPLETE, Target

PROMPT = "The capital of France is"


def test_max_tokens_default_is_16(target: Target) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
    assert target.ok(COMPLETE, **asked)["usage"]["completion_tokens"] == 16


def test_max_tokens_null_is_16(target: Target) -> None:
    assert target.complete(max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 16


@vllm_bug("it counts a token that it does not show")
def test_max_tokens_0_with_echo_only_scores(target: Target) -> None:
    body = target.complete(echo=True, max_tokens=0)
    assert body["choices"][0]["text"] == PROMPT and body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("prompt", "indices"),
    [
        row("text", "Hi", [0]),
        row("list of text", ["Hi", "Ho", "Ha"], [0, 1, 2]),
        row("one text in a list", ["Hi"], [0]),
        row("ids", [1000, 1001], [0]),
        row("list of ids", [[1000, 1001], [1002]], [0, 1]),
    ],
)
def test_prompt_forms(target: Target, prompt: Any, indices: list[int]) -> None:
    body = target.complete(prompt, max_tokens=2, ignore_eos=True)
    assert [choice["index"] for choice in body["choices"]] == indices
    assert body["usage"]["completion_tokens"] == 2 * len(indices)


def test_prompts_times_n_are_numbered_by_prompt(target: Target) -> None:
    body = target.complete(["One", "The capital of France is"], n=2, temperature=1, top_k=1)
    texts = [choice["text"] for choice in sorted(body["choices"], key=lambda choice: choice["index"])]
    assert len(texts) == 4 and texts[0] == texts[1] and texts[2] == texts[3] != texts[0]


def test_prompt_ids_are_used_as_given(target: Target) -> None:
    ids = target.tokens(PROMPT)
    body = target.complete(ids)
    assert body["usage"]["prompt_tokens"] == len(ids)
    assert body["choices"][0]["text"] == target.text(PROMPT, add_special_tokens=False)


@pytest.mark.parametrize("add", [True, False])
def test_add_special_tokens(target: Target, add: bool) -> None:
    told = target.ok("/tokenize", prompt=PROMPT, add_special_tokens=add)["count"]
    assert target.complete(add_special_tokens=add)["usage"]["prompt_tokens"] == told


def test_best_of_equal_to_n(target: Target) -> None:
    assert target.complete(n=1, best_of=1)


class TestEcho:
    @pytest.mark.parametrize("prompt", [PROMPT, "  two spaces\n", "Žluťoučký 😀 猫", "<|im_end|> as text"])
    def test_text_starts_with_the_prompt_byte_for_byte(self, target: Target, prompt: str) -> None:
        assert target.text(prompt, echo=True) == prompt + target.text(prompt)

    def test_ids(self, target: Target) -> None:
        assert target.text(target.tokens(PROMPT), echo=True).startswith(PROMPT)

    def test_several(self, target: Target) -> None:
        body = target.complete(["One two", "Red blue"], echo=True)
        assert [choice["text"][:7] for choice in body["choices"]] == ["One two", "Red blu"]

    def test_streamed_once_at_the_start(self, target: Target) -> None:
        stream = target.stream(COMPLETE, prompt=PROMPT, echo=True)
        assert stream.text() == target.text(PROMPT, echo=True)
        assert stream.text().count(PROMPT) == 1


class TestExtras:
    def test_return_token_ids(self, target: Target) -> None:
        body = target.complete(return_token_ids=True, ignore_eos=True)["choices"][0]
        assert len(body["token_ids"]) == 8
        assert target.ok("/detokenize", tokens=body["token_ids"])["prompt"] == body["text"]

    def test_return_token_ids_streamed(self, target: Target) -> None:
        stream = target.stream(COMPLETE, prompt=PROMPT, return_token_ids=True, ignore_eos=True)
        ids = [token for choice in stream.choices for token in choice.get("token_ids") or []]
        assert ids == target.complete(return_token_ids=True, ignore_eos=True)["choices"][0]["token_ids"]

    @pytest.mark.parametrize("keep", [1, 3])
    def test_truncate_prompt_tokens_keeps_the_end(self, target: Target, keep: int) -> None:
        cut, ids = target.complete(truncate_prompt_tokens=keep), target.tokens(PROMPT)
        assert cut["usage"]["prompt_tokens"] == keep
        assert cut["choices"][0]["text"] == target.text(ids[-keep:])

    def test_truncate_prompt_tokens_beyond_the_prompt(self, target: Target) -> None:
        assert target.text(truncate_prompt_tokens=200) == target.text()

    def test_truncate_prompt_tokens_minus_1_is_the_context(self, target: Target) -> None:
        assert target.text(truncate_prompt_tokens=-1) == target.text()

    @pytest.mark.parametrize("salt", ["a", "x" * 128])
    def test_cache_salt(self, target: Target, salt: str) -> None:
        assert target.text(cache_salt=salt) == target.text()

    def test_cache_salt_separates(self, target: Target) -> None:
        prompt = list(range(1000, 1700))

        def cached(salt: str) -> int:
            details = target.complete(prompt, max_tokens=1, cache_salt=salt)["usage"].get("prompt_tokens_details")
            if details is None:
                pytest.skip("the server does not tell how much was cached")
            return int(details["cached_tokens"] or 0)

        assert [cached(salt) for salt in ("one", "one", "two")] == [0, pytest.approx(600, abs=100), 0]

    def test_spaces_between_special_tokens(self, target: Target) -> None:
        assert target.text(spaces_between_special_tokens=True) == target.text()

    def test_user(self, target: Target) -> None:
        assert target.text(user="me", store=False, metadata=None) == target.text()


class TestContext:
    @vllm_bug("its message is about max_tokens, without the context")
    def test_prompt_that_fills_the_context(self, target: Target) -> None:
        error = target.refused(target.post(COMPLETE, prompt=[1000] * target.context, max_tokens=1))
        assert str(target.context) in error["message"]
        if not target.foreign:
            assert error["code"] == "context_length_exceeded"

    def test_prompt_beyond_the_context(self, target: Target) -> None:
        error = target.refused(target.post(COMPLETE, prompt=[1000] * (target.context + 77), max_tokens=1))
        assert str(target.context) in error["message"] and "-" not in error["message"].replace("max-", "")

    @vllm_bug("max_tokens is cut to what fits, in silence")
    def test_prompt_and_answer_beyond_the_context(self, target: Target) -> None:
        stop = list("aeiou 0123456789")  # who takes the request is soon done with it
        answer = target.post(COMPLETE, prompt=[1000] * 100, max_tokens=target.context - 99, stop=stop)
        assert str(target.context) in target.refused(answer)["message"]

    @helios_only("a long prompt takes others long")
    def test_prompt_and_answer_that_fill_it(self, target: Target) -> None:
        prompt, most = [1000] * (target.context - 2), 2
        body = target.complete(prompt, max_tokens=most, ignore_eos=True)
        assert body["usage"]["total_tokens"] == target.context
