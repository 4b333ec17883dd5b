"""Bad values: each is a 400 with an error object; Helios also names the field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conformance.marks import helios_only, row
from tests.server.live import CHAT, COMPLETE, Target

HI = [{"role": "user", "content": "Hi"}]
STRICT = helios_only("booleans, fractions and numeric strings are not taken for numbers")
LAX = helios_only("others take this, or do not look")
IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]
AUDIO = [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]

BOTH: list[Any] = [
    *[row(f"temperature {value}", "temperature", value) for value in (-0.1, -1, [], {}, "hot")],
    *[row(f"temperature {value!r}", "temperature", value, marks=STRICT) for value in (True, "0.5")],
    row("temperature 2.1", "temperature", 2.1, marks=LAX),
    *[row(f"top_p {value}", "top_p", value) for value in (0, -0.5, 1.5, 2, "x")],
    *[row(f"top_k {value}", "top_k", value) for value in (-2, 1.5, "x")],
    *[row(f"min_p {value}", "min_p", value) for value in (-0.1, 1.1)],
    *[row(f"seed {value}", "seed", value) for value in (2**63, -(2**63) - 1, 1.5, "x")],
    row("seed true", "seed", True, marks=STRICT),
    *[row(f"n {value}", "n", value) for value in (0, -1, 1.5, "x", 10**6)],
    row("n 129", "n", 129, marks=LAX),
    row("n '1'", "n", "1", marks=STRICT),
    *[row(f"stop {value!r}", "stop", value) for value in ([1], 5, {"a": 1})],
    row("stop holds an empty string", "stop", [""]),
    row("stop is empty", "stop", "", marks=LAX),
    row("too many stops", "stop", [str(number) for number in range(100)], marks=LAX),
    row("stop too long", "stop", "x" * 5000, marks=LAX),
    *[row(f"stop_token_ids {value}", "stop_token_ids", value) for value in (5, ["x"])],
    row("stop_token_ids out of vocabulary", "stop_token_ids", [10**7], marks=LAX),
    row("stop_token_ids negative", "stop_token_ids", [-1], marks=LAX),
    *[row(f"min_tokens {value}", "min_tokens", value) for value in (-1, 1000, "x")],
    *[row(f"max_tokens {value}", "max_tokens", value) for value in (-1, 1.5, "x", 10**9)],
    row("max_tokens true", "max_tokens", True, marks=STRICT),
    *[row(f"presence_penalty {value}", "presence_penalty", value) for value in (-2.1, 3, "x")],
    *[row(f"frequency_penalty {value}", "frequency_penalty", value) for value in (-2.5, 2.5, [])],
    *[row(f"repetition_penalty {value}", "repetition_penalty", value) for value in (0, -1, "x")],
    *[row(f"logit_bias {value}", "logit_bias", value) for value in ([1], "x", {"x": 1}, {"1": "x"})],
    row("logit_bias out of vocabulary", "logit_bias", {"10000000": 1}),
    row("logit_bias negative id", "logit_bias", {"-1": 1}),
    row("logit_bias of 5000 tokens", "logit_bias", {str(token): 1 for token in range(5000)}, marks=LAX),
    row("stream 'yes'", "stream", "yes", marks=STRICT),
    row("stream 1", "stream", 1, marks=STRICT),
    row("stream 5", "stream", 5),
    row("stream_options without stream", "stream_options", {"include_usage": True}),
    row("stream_options not an object", "stream_options", "usage"),
    row("ignore_eos 'x'", "ignore_eos", "x"),
    row("include_stop_str_in_output 'x'", "include_stop_str_in_output", "x"),
    row("skip_special_tokens 'x'", "skip_special_tokens", "x"),
    row("cache_salt empty", "cache_salt", ""),
    row("cache_salt a number", "cache_salt", 5),
    row("cache_salt long", "cache_salt", "x" * 129, marks=LAX),
    *[row(f"truncate_prompt_tokens {value}", "truncate_prompt_tokens", value) for value in (-2, "x", 1.5)],
    row("response_format of an unknown type", "response_format", {"type": "xml"}),
    row("response_format not an object", "response_format", "json"),
    row("response_format without type", "response_format", {}),
    row("response_format without its schema", "response_format", {"type": "json_schema"}),
    row("model a number", "model", 5),
]

CHATS: list[Any] = [
    *[row(f"messages {value!r}", "messages", value) for value in (None, [], "hi", {}, 5, [1], [None], [[]])],
    row("message without role", "messages", [{"content": "x"}]),
    row("role a number", "messages", [{"role": 5, "content": "x"}]),
    row("role null", "messages", [{"role": None, "content": "x"}]),
    row("content a number", "messages", [{"role": "user", "content": 5}]),
    row("content an object", "messages", [{"role": "user", "content": {"text": "x"}}]),
    row("content of numbers", "messages", [{"role": "user", "content": [5]}]),
    row("part of unknown type", "messages", [{"role": "user", "content": [{"type": "smell"}]}]),
    row("part without text", "messages", [{"role": "user", "content": [{"type": "text"}]}]),
    row("image", "messages", [{"role": "user", "content": IMAGE}]),
    row("audio", "messages", [{"role": "user", "content": AUDIO}]),
    row("max_tokens 0", "max_tokens", 0),
    row("max_completion_tokens 0", "max_completion_tokens", 0),
    row("max_completion_tokens -1", "max_completion_tokens", -1),
    row("logprobs a number", "logprobs", 5),
    row("top_logprobs without logprobs", "top_logprobs", 3),
    row("tools not a list", "tools", {"type": "function"}),
    row("tools empty", "tools", []),
    row("tool without function", "tools", [{"type": "function"}]),
    row("tool without name", "tools", [{"type": "function", "function": {}}]),
    row("tool_choice without tools", "tool_choice", "auto"),
    row("tool_choice required without tools", "tool_choice", "required"),
    row("tool_choice unknown", "tool_choice", "perhaps"),
    row("chat_template", "chat_template", "{{ messages }}"),
    *[row(f"chat_template_kwargs {value!r}", "chat_template_kwargs", value) for value in ("x", [1])],
    row("reasoning_effort unknown", "reasoning_effort", "enormous"),
    row("audio output", "audio", {"voice": "x", "format": "wav"}, marks=LAX),
    row("modalities", "modalities", ["text", "audio"], marks=LAX),
    row("functions", "functions", [{"name": "f"}], marks=LAX),
    row("beam search", "use_beam_search", True, marks=LAX),
]

COMPLETIONS: list[Any] = [
    *[row(f"prompt {value!r}", "prompt", value) for value in (None, [], [[]], {}, 5, ["a", 1], [1, "a"], [["a"]])],
    row("prompt of null", "prompt", [None]),
    row("prompt of true", "prompt", [True], marks=STRICT),
    row("prompt empty", "prompt", ""),
    row("prompt of an empty text", "prompt", [""]),
    row("prompt of an empty text among others", "prompt", ["a", ""]),
    row("prompt of negative ids", "prompt", [-1]),
    row("prompt out of vocabulary", "prompt", [10**7]),
    row("prompt beyond 64 bits", "prompt", [2**70]),
    row("prompt of 5000 texts", "prompt", ["a"] * 5000, marks=LAX),
    row("max_tokens 0 without echo", "max_tokens", 0),
    *[row(f"logprobs {value}", "logprobs", value) for value in (-1, 21, "x", 1.5)],
    row("logprobs true", "logprobs", True, marks=STRICT),
    row("suffix", "suffix", "x"),
    row("best_of", "best_of", 3, marks=LAX),
    row("echo 'x'", "echo", "x"),
]
# What a client meant by its other name for the same thing.
ALIASES = {"tool_choice": {"tool_choice", "tools"}}


def refused(target: Target, path: str, body: dict[str, Any], field: str) -> None:
    error = target.refused(target.post(path, **body))
    if not target.foreign:
        assert error["param"] in ALIASES.get(field, {field}), error
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("field", "value"), BOTH + CHATS)
def test_chat(target: Target, field: str, value: Any) -> None:
    refused(target, CHAT, {"messages": HI, "max_tokens": 2, field: value}, field)


@pytest.mark.parametrize(("field", "value"), BOTH + COMPLETIONS)
def test_completion(target: Target, field: str, value: Any) -> None:
    refused(target, COMPLETE, {"prompt": "Hi", "max_tokens": 2, field: value}, field)


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        row("top_logprobs -1", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        row("top_logprobs 21", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        row("top_logprobs with logprobs false", {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        row(
            "both ways to end a prompt",
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        row(
            "stream_options without stream true",
            {"stream": False, "stream_options": {"include_usage": True}},
            "stream_options",
        ),
        row("include_usage 'x'", {"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options"),
    ],
)
def test_fields_that_do_not_go_together(target: Target, extra: dict[str, Any], field: str) -> None:
    refused(target, CHAT, {"messages": HI, "max_tokens": 2, **extra}, field)


@pytest.mark.parametrize("field", ["messages", "prompt"])
def test_what_must_be_there(target: Target, field: str) -> None:
    refused(target, CHAT if field == "messages" else COMPLETE, {"max_tokens": 2}, field)


def test_a_refusal_comes_before_the_stream(target: Target) -> None:
    refused(target, CHAT, {"messages": HI, "stream": True, "temperature": -1}, "temperature")
    refused(target, COMPLETE, {"prompt": [1000] * target.context, "stream": True, "max_tokens": 1}, "prompt")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_numbers_that_are_none(target: Target, field: str, number: str) -> None:
    body = f'{{"model": "{target.model}", "prompt": "Hi", "max_tokens": 1, "{field}": {number}}}'
    target.refused(target.raw(COMPLETE, body.encode()))
