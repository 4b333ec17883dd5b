"""Fields of a chat request: what each one does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conformance.marks import helios_only, row, vllm_bug
from tests.server.live import CHAT, Target


def user(content: Any, **extra: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **extra}


def count(target: Target, messages: list[dict[str, Any]], **extra: Any) -> int:
    """Tokens of the prompt that these messages become."""
    return int(target.chat(messages, max_tokens=1, **extra)["usage"]["prompt_tokens"])


def test_model_absent_is_the_served_one(target: Target) -> None:
    answer = target.client.post(CHAT, json={"messages": [user("Hi")], "max_tokens": 1})
    assert answer.status_code == 200 and answer.json()["model"] == target.model


def test_model_is_echoed(target: Target) -> None:
    assert target.chat()["model"] == target.model


@pytest.mark.parametrize("name", ["gpt-4", "", "../../etc/passwd", "a" * 5000])
def test_model_unknown(target: Target, name: str) -> None:
    answer = target.post(CHAT, model=name, messages=[user("Hi")])
    if name == "" and answer.status_code == 200:
        pytest.skip("an empty name counts as none here")
    target.refused(answer, 404, "model", "model_not_found")


@pytest.mark.parametrize(
    "messages",
    [
        row("system", [{"role": "system", "content": "Be brief."}, user("Hi")]),
        row("developer", [{"role": "developer", "content": "Be brief."}, user("Hi")]),
        row("assistant", [user("Hi"), {"role": "assistant", "content": "Hello"}, user("And?")]),
        row("tool", [user("Hi"), {"role": "tool", "content": "42", "tool_call_id": "call_1"}]),
        row("name", [user("Hi", name="me")]),
        row("name null", [user("Hi", name=None)], marks=vllm_bug("null is no absence here")),
        row("refusal", [user("Hi"), {"role": "assistant", "content": "No", "refusal": None}, user("Why?")]),
        row("reasoning", [user("Hi"), {"role": "assistant", "content": "A", "reasoning_content": "B"}, user("C")]),
    ],
)
def test_messages_of_all_roles_and_with_extra_keys(target: Target, messages: list[dict[str, Any]]) -> None:
    assert target.chat(messages, max_tokens=1)["choices"][0]["message"]["role"] == "assistant"


def test_developer_counts_as_system(target: Target) -> None:
    talks = [[{"role": role, "content": "Be brief."}, user("Hi")] for role in ("system", "developer")]
    assert count(target, talks[0]) == count(target, talks[1])
    assert target.said(talks[0]) == target.said(talks[1])


@pytest.mark.parametrize("content", [None, "", []])
def test_content_null_is_empty(target: Target, content: Any) -> None:
    talk = [user("Hi"), {"role": "assistant", "content": content}, user("And?")]
    empty = [user("Hi"), {"role": "assistant", "content": ""}, user("And?")]
    assert count(target, talk) == count(target, empty)


def test_content_missing_is_empty(target: Target) -> None:
    assert count(target, [user("Hi"), {"role": "assistant"}, user("A")]) > 0


def test_content_of_one_part_is_a_bare_string(target: Target) -> None:
    part = [{"type": "text", "text": "Say hello."}]
    assert target.said([user(part)]) == target.said([user("Say hello.")])


def test_content_parts_are_joined_by_a_line_break(target: Target) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]
    assert count(target, [user(parts)]) == count(target, [user("Say\nhello.")])
    assert target.said([user(parts)]) == target.said([user("Say\nhello.")])


CALL = {"id": "call_1", "type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("arguments", ['{"a": 1}', "{}", "", "not json", '{"a": '])
def test_tool_calls_in_the_history(target: Target, arguments: str) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    assert count(target, [user("Add"), asked, told]) > 0


def test_without_max_tokens_an_answer_may_be_long(target: Target) -> None:
    """Not 16, not any other default: here the stop string ends it."""
    answer = target.ok(CHAT, messages=[user("Count from 1 to 40.")], temperature=0, ignore_eos=True, stop=["7", "."])
    whole = target.ok(CHAT, messages=[user("Count from 1 to 40.")], temperature=0, ignore_eos=True, max_tokens=40)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_cap_the_answer(target: Target, name: str) -> None:
    body = target.ok(CHAT, messages=[user("Count to 40.")], temperature=0, ignore_eos=True, **{name: 5})
    assert body["usage"]["completion_tokens"] == 5 and body["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_wins(target: Target) -> None:
    assert target.chat(ignore_eos=True, max_tokens=9, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_chat_template_kwargs_pass_through(target: Target) -> None:
    assert target.chat(chat_template_kwargs={"enable_thinking": False, "unknown_to_the_template": [1]})


@helios_only("others let some of these through")
@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "add_generation_prompt"])
def test_chat_template_kwargs_reserved(target: Target, name: str) -> None:
    answer = target.post(CHAT, messages=[user("Hi")], max_tokens=1, chat_template_kwargs={name: "x"})
    target.refused(answer, param="chat_template_kwargs")


@pytest.mark.parametrize("effort", ["none", "low", "medium", "high"])
def test_reasoning_effort(target: Target, effort: str) -> None:
    assert target.chat(reasoning_effort=effort, max_tokens=2)


def test_continue_final_message(target: Target) -> None:
    begun = [user("What is the capital of France?"), {"role": "assistant", "content": "The capital of France is"}]
    ending = {"add_generation_prompt": False, "continue_final_message": True}
    assert "Paris" in target.said(begun, **ending) and "Paris" in target.stream(messages=begun, **ending).text()
    assert count(target, begun, **ending) < count(target, begun)


def test_add_generation_prompt_false(target: Target) -> None:
    assert count(target, [user("Hi")], add_generation_prompt=False) < count(target, [user("Hi")])


def test_add_special_tokens_is_off_for_chats(target: Target) -> None:
    plain, off = count(target, [user("Hi")]), count(target, [user("Hi")], add_special_tokens=False)
    assert plain == off


@helios_only("vLLM refuses n > 1 with temperature 0; equal choices are equally fine")
def test_a_greedy_chat_of_two_choices(target: Target) -> None:
    body = target.chat(n=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert len({choice["message"]["content"] for choice in body["choices"]}) == 1


@pytest.mark.parametrize(
    "extra",
    [
        row("openai", {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me"}),
        row("newer openai", {"prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "low"}),
        row("invented", {"no_such_field": {"a": [1, None]}, "x-y": 1}),
        row("nulls", dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "tools", "tool_choice", "logprobs"))),
        row("more nulls", dict.fromkeys(("stream", "stream_options", "response_format", "logit_bias", "user"))),
        row("penalties null", dict.fromkeys(("presence_penalty", "frequency_penalty", "max_completion_tokens"))),
        row("modalities", {"modalities": ["text"]}),
    ],
)
def test_null_is_absent_and_unknown_fields_are_ignored(target: Target, extra: dict[str, Any]) -> None:
    body = {"messages": [user("Hi")], "max_tokens": 1, **extra}
    assert target.post(CHAT, **body).status_code == 200
