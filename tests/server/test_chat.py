"""Chats with tools, thoughts and grammars over a tiny model; tokens counted; tenants apart; the document of it all."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helios.model.params import RequestError, SamplingParams
from helios.serve.chat import ParsedChatWire, chat_grammar
from helios.serve.choice import Choice, Usage
from helios.serve.errors import APIError
from helios.serve.openapi import BOUNDS
from helios.serve.parse import AnswerParser
from helios.serve.reasoning import ThinkSplitter
from helios.serve.service import Service, prefix_salt
from helios.serve.toolcalls import CallParser
from helios.serve.tools import check_tools
from tests.server.conftest import Running, events

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sun", "moon"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "look"}}
COLOURS = {"enum": ["red", "green"]}


def stream(served: Running, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    answer = served.post(path, stream=True, **body)
    assert answer.status_code == 200, answer.text
    *chunks, done = events(answer)
    assert done == "[DONE]"
    return [json.loads(chunk)["choices"][0] for chunk in chunks]


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("n", [1, 3])
def test_a_forced_call_is_called(served: Running, choice: Any, n: int) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "tools": [LOOK], "tool_choice": choice, "n": n, "seed": 1}
    body = served.post(CHAT, **asked, parallel_tool_calls=False, max_tokens=200).json()
    for told in body["choices"]:
        (call,) = told["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["at"] in ("sun", "moon") and call["id"]
        assert told["message"]["content"] is None and told["finish_reason"] == "tool_calls"
    chunks = stream(served, **asked, parallel_tool_calls=False, max_tokens=200)
    for index in range(n):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        calls = [call for chunk in mine for call in chunk["delta"].get("tool_calls", [])]
        assert calls[0]["function"]["name"] == "look" and not any("id" in call for call in calls[1:])
        assert json.loads("".join(call["function"]["arguments"] for call in calls))["at"] in ("sun", "moon")
        assert [chunk["finish_reason"] for chunk in mine if chunk["finish_reason"]] == ["tool_calls"]


def test_a_forced_call_that_is_cut_off_is_length(served: Running) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "tools": [LOOK], "tool_choice": "required", "max_tokens": 4}
    (told,) = served.post(CHAT, **asked).json()["choices"]
    assert told["finish_reason"] == "length" and "tool_calls" not in told["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("n", [1, 4])
def test_an_answer_keeps_to_its_schema(served: Running, path: str, n: int) -> None:
    said: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hello"}
    wanted = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOURS}}
    body = served.post(path, **said, response_format=wanted, n=n, seed=3, max_tokens=40).json()
    for choice in body["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert json.loads(text) in COLOURS["enum"] and choice["finish_reason"] == "stop"


def test_what_is_in_the_strings_of_a_schemas_answer_is_no_call(served: Running) -> None:
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    body = served.post(CHAT, messages=MESSAGES, tools=[LOOK], guided_choice=[text], max_tokens=100).json()
    assert body["choices"][0]["message"]["content"] == text and body["choices"][0]["finish_reason"] == "stop"


def test_a_grammar_and_a_forced_call_do_not_go_together() -> None:
    use = check_tools([LOOK], "required")
    assert chat_grammar({}, use) is not None and chat_grammar({}, check_tools([LOOK])) is None
    with pytest.raises(APIError) as refused:
        chat_grammar({"guided_regex": "a"}, use)
    assert refused.value.param == "tool_choice" and "guided_regex" in refused.value.message


SAID = 'x<think>no</think><tool_call>\n{"name": "a", "arguments": {"b": 1}}\n</tool_call> y'
THOUGHT = '<think>\nhm\n</think>\n\nSo: <tool_call>{"name": "a", "arguments": {}}</tool_call>'


def parsing() -> ParsedChatWire:
    tokenizer: Any = None
    return ParsedChatWire("m", tokenizer, [AnswerParser(ThinkSplitter(), CallParser())])


@given(
    st.sampled_from([SAID, THOUGHT, "", "<tool_call>{"]),
    st.lists(st.integers(0, 80)),
    st.sampled_from(["stop", "length"]),
)
def test_the_stream_joined_is_the_whole(text: str, cuts: list[int], reason: str) -> None:
    whole, wire = parsing().whole_choice(Choice(0, text, finish_reason=reason)), parsing()
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [Choice(0, text[a:b]) for a, b in zip(places, places[1:], strict=False)] + [Choice(0, finish_reason=reason)]
    chunks = [piece for part in parts for piece in wire.pieces(part)]
    joined = {"content": "", "reasoning_content": "", "arguments": ""}
    for delta in (chunk["delta"] for chunk in chunks):
        joined["content"] += delta.get("content", "")
        joined["reasoning_content"] += delta.get("reasoning_content", "")
        joined["arguments"] += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", []))
    message = whole["message"]
    calls = message.get("tool_calls", [])
    assert joined["content"] == (message["content"] or "")
    assert joined["reasoning_content"] == message.get("reasoning_content", "")
    assert joined["arguments"] == "".join(call["function"]["arguments"] for call in calls)
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [whole["finish_reason"]]
    assert (whole["finish_reason"] == "tool_calls") == (bool(calls) and reason == "stop")
    assert wire.usage(Usage(1, 2))["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_tokenize_and_back(served: Running) -> None:
    told = served.post("/tokenize", prompt="Hello", return_token_strs=True).json()
    assert told["count"] == len(told["tokens"]) == 5 and told["max_model_len"] == 2048
    assert told["token_strs"] == list("Hello")
    assert served.post("/detokenize", tokens=told["tokens"]).json() == {"prompt": "Hello"}
    rendered = served.post("/tokenize", messages=MESSAGES).json()
    asked = served.post(CHAT, messages=MESSAGES, max_tokens=1).json()["usage"]["prompt_tokens"]
    assert (
        rendered["count"]
        == asked
        > served.post("/tokenize", messages=MESSAGES, add_generation_prompt=False).json()["count"]
    )


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": [{"role": 5}]}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "tools": []}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ],
)
def test_bad_tokenize(served: Running, path: str, body: dict[str, Any], field: str) -> None:
    answer = served.post(path, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


def test_minus_one_truncates_to_what_the_context_has_room_for(served: Running) -> None:
    body = served.post(COMPLETE, prompt=[65] * 3000, max_tokens=8, ignore_eos=True, truncate_prompt_tokens=-1).json()
    assert body["usage"]["prompt_tokens"] == 2040 and body["usage"]["completion_tokens"] == 8


@given(
    st.binary(max_size=40), st.binary(max_size=40), st.none() | st.text(max_size=40), st.none() | st.text(max_size=40)
)
def test_salts_are_equal_only_for_the_same_tenant_and_salt(a: bytes, b: bytes, x: str | None, y: str | None) -> None:
    assert (prefix_salt(a, x) == prefix_salt(b, y)) == ((a, x) == (b, y))
    assert (prefix_salt(a, x) == b"") == (not a and x is None)


def test_a_client_that_leaves_ends_the_compiling() -> None:
    left = asyncio.Event()

    class Slow:
        ended = False

        async def constraint(self, *_: Any) -> None:
            try:
                await asyncio.sleep(30)
            finally:
                Slow.ended = True

    async def gone() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def leave() -> None:
        nothing: Any = None
        service = Service(nothing, nothing, "m")
        service._compiler = Slow()  # type: ignore[assignment]
        http: Any = SimpleNamespace(receive=gone)
        asking = asyncio.ensure_future(service.constraint(http, chat_grammar({"guided_regex": "a"}, check_tools(None))))
        await asyncio.sleep(0.02)
        left.set()
        with pytest.raises(APIError) as told:
            await asking
        assert told.value.status == 499

    asyncio.run(leave())
    assert Slow.ended


def test_a_grammar_that_does_not_compile_is_a_400_also_streamed(served: Running) -> None:
    for streamed in (False, True):
        answer = served.post(COMPLETE, prompt="a", guided_regex="(", stream=streamed)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "guided_regex"


def test_the_document_is_served_nowhere(served: Running) -> None:
    for path in ("/openapi.json", "/docs", "/redoc"):
        assert served.client.get(path).status_code == 404


LOW = [(name, "minimum", -1) for name in BOUNDS if "minimum" in BOUNDS[name]] + [("top_p", "exclusiveMinimum", 0)]
HIGH = [(name, "maximum", 1) for name in BOUNDS if "maximum" in BOUNDS[name]]


@pytest.mark.parametrize(("name", "end", "beyond"), LOW + HIGH)
def test_documented_bounds_are_those_that_are_checked(name: str, end: str, beyond: int) -> None:
    bound = BOUNDS[name][end]
    whole = name in ("top_k", "n", "seed", "min_tokens")
    if end != "exclusiveMinimum":
        SamplingParams(**{name: bound}, max_tokens=None)
    with pytest.raises(RequestError):
        SamplingParams(**{name: bound + beyond * (1 if whole else 1e-3)}, max_tokens=None)
