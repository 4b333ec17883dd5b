"""Tools: what is offered, what must be called, and how calls are told, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conformance.marks import helios_only, row
from tests.server.live import CHAT, Target


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool whose arguments are all wanted, and can hold nothing else: even a tiny model comes to an end."""
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {
        "type": "function",
        "function": {"name": name, "description": f"The {name}.", "strict": True, "parameters": schema},
    }


WEATHER = tool("get_weather", city={"enum": ["Paris", "Rome"]}, days={"enum": [1, 2, 3]})
TIME = tool("get_time", city={"enum": ["Paris", "Rome"]})
TOOLS = [WEATHER, TIME]
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
NAMED = {"type": "function", "function": {"name": "get_time"}}


def check_call(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a whole call, as its schema wants them."""
    assert call["type"] == "function" and call["id"]
    function = call.get("function", call)
    assert function["name"] in ("get_weather", "get_time") and isinstance(function["arguments"], str)
    arguments = json.loads(function["arguments"])
    assert arguments["city"] in ("Paris", "Rome")
    return dict(arguments)


def whole(target: Target, **extra: Any) -> dict[str, Any]:
    return dict(target.chat(ASK, tools=TOOLS, max_tokens=200, **extra)["choices"][0])


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_an_answer_without_calls_is_text(target: Target, choice: str | None) -> None:
    extra = {} if choice is None else {"tool_choice": choice}
    answer = target.chat("Say only: hello", tools=TOOLS, max_tokens=20, **extra)["choices"][0]
    assert not answer["message"].get("tool_calls") and answer["finish_reason"] in ("stop", "length")
    assert isinstance(answer["message"]["content"], str)


def test_truncation_stays_length(target: Target) -> None:
    assert target.chat(ASK, tools=TOOLS, max_tokens=2)["choices"][0]["finish_reason"] == "length"
    assert target.stream(messages=ASK, tools=TOOLS, max_tokens=2).finish() == "length"


def test_none_never_calls(target: Target) -> None:
    stream = target.stream(messages=ASK, tools=TOOLS, tool_choice="none", max_tokens=20)
    assert stream.calls() == [] and stream.finish() in ("stop", "length")


def test_none_without_tools(target: Target) -> None:
    assert target.chat(tool_choice="none", max_tokens=2)


def test_required_calls(target: Target) -> None:
    answer = whole(target, tool_choice="required", parallel_tool_calls=False)
    calls = answer["message"]["tool_calls"]
    assert len(calls) >= 1 and all(check_call(call) for call in calls)
    assert answer["message"]["content"] in (None, "")


def test_required_finishes_with_tool_calls(target: Target) -> None:
    answer = whole(target, tool_choice="required", parallel_tool_calls=False)
    assert answer["finish_reason"] in ({"tool_calls", "stop"} if target.foreign else {"tool_calls"})


def test_named_calls_that_one(target: Target) -> None:
    (call,) = whole(target, tool_choice=NAMED)["message"]["tool_calls"]
    assert call["function"]["name"] == "get_time" and set(check_call(call)) == {"city"}


@pytest.mark.parametrize("choice", [row("required", "required"), row("named", NAMED)])
def test_streamed_equals_whole(target: Target, choice: Any) -> None:
    extra: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": False}
    (call,) = target.stream(messages=ASK, tools=TOOLS, max_tokens=200, **extra).calls()
    (told,) = whole(target, **extra)["message"]["tool_calls"]
    assert call["name"] == told["function"]["name"]
    assert json.loads(call["arguments"]) == json.loads(told["function"]["arguments"])


@pytest.mark.parametrize("choice", [row("required", "required"), row("named", NAMED)])
def test_deltas(target: Target, choice: Any) -> None:
    stream = target.stream(messages=ASK, tools=TOOLS, max_tokens=200, tool_choice=choice, parallel_tool_calls=False)
    deltas = [delta for piece in stream.choices for delta in piece["delta"].get("tool_calls") or []]
    assert all(delta["index"] == 0 for delta in deltas), "one call"
    first, *rest = deltas
    assert first["id"] and first["type"] == "function" and first["function"]["name"]
    assert not any(delta.get("id") for delta in rest), "the id comes once"
    assert not any(delta["function"].get("name") for delta in rest), "the name comes once"
    assert all(delta["function"].get("arguments") is not None for delta in rest)
    assert stream.finish() in ({"tool_calls", "stop"} if target.foreign else {"tool_calls"})


@helios_only("others tell the arguments in the first delta too")
def test_first_delta_has_empty_arguments(target: Target) -> None:
    stream = target.stream(messages=ASK, tools=TOOLS, max_tokens=200, tool_choice=NAMED)
    deltas = [delta for piece in stream.choices for delta in piece["delta"].get("tool_calls") or []]
    assert deltas[0]["function"]["arguments"] == ""


def test_call_ids_are_unique(target: Target) -> None:
    ids = [whole(target, tool_choice=NAMED)["message"]["tool_calls"][0]["id"] for _ in range(2)]
    assert ids[0] != ids[1]


def test_a_tool_without_parameters(target: Target) -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    answer = target.chat(ASK, tools=[bare], max_tokens=60)["choices"][0]
    assert answer["finish_reason"] in ("stop", "length", "tool_calls")


def test_several_choices_call_each(target: Target) -> None:
    answer = target.chat(ASK, tools=TOOLS, tool_choice=NAMED, n=2, temperature=1.0, seed=3, max_tokens=200)
    calls = [choice["message"]["tool_calls"][0] for choice in answer["choices"]]
    assert all(check_call(call) for call in calls) and calls[0]["id"] != calls[1]["id"]


def test_the_answer_goes_back(target: Target) -> None:
    """A whole round: the model's own call, its answer, and a text about it."""
    call = whole(target, tool_choice=NAMED)["message"]
    talk = [*ASK, call, {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "12:00"}]
    assert target.chat(talk, tools=TOOLS, max_tokens=8)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        row("a tool that is not in the list", {"tool_choice": {**NAMED, "function": {"name": "fly"}}}, "tool_choice"),
        row("a choice without function", {"tool_choice": {"type": "function"}}, "tool_choice"),
        row("an unknown word", {"tool_choice": "perhaps"}, "tool_choice"),
        row("a choice that is a number", {"tool_choice": 5}, "tool_choice"),
        row("text parameters", {"tools": [{"type": "function", "function": {"name": "f", "parameters": ""}}]}, "tools"),
        row("a name that is a number", {"tools": [{"type": "function", "function": {"name": 5}}]}, "tools"),
        row("null among them", {"tools": [None]}, "tools"),
    ],
)  # fmt: skip
def test_refused(target: Target, extra: dict[str, Any], field: str) -> None:
    body: dict[str, Any] = {"messages": ASK, "tools": TOOLS, "max_tokens": 2, **extra}
    target.refused(target.post(CHAT, **body), param=field)
