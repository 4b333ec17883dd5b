"""Benchmark tools and front ends replayed: what they send, and how they read what comes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.live import CHAT, COMPLETE, Target

MESSAGES: list[Any] = [{"role": "user", "content": "Say hello."}]


def lines(answer: httpx.Response) -> list[str]:
    return [line for line in answer.text.split("\n") if line]


def test_guidellm(target: Target) -> None:
    assert target.get("/health").is_success
    assert target.get("/v1/models").json()["data"][0]["id"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    shared: dict[str, Any] = {"stream": True, "stream_options": options, "ignore_eos": True}
    parts = [{"type": "text", "text": "Say hello."}]
    talk = [{"role": "user", "content": parts}]
    for path, body in (
        (COMPLETE, {"prompt": "Hi", "max_tokens": 5}),
        (CHAT, {"messages": talk, "max_completion_tokens": 5, "tool_calls": None}),
    ):
        answer = target.post(path, **shared, **body)
        *data, done = lines(answer)
        assert done == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in data]
        assert not any("error" in chunk for chunk in chunks)
        assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_vllm_bench_serve(target: Target) -> None:
    headers = {"x-request-id": "benchmark-0", "content-type": "application/json"}
    common = {
        "model": target.model, "temperature": 0.0, "repetition_penalty": 1.0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True}, "logprobs": None,
    }  # fmt: skip
    parts = [{"type": "text", "text": "Say hello."}]
    for path, body in (
        (COMPLETE, {"prompt": [1000, 1001, 1002], "max_tokens": 6}),
        (COMPLETE, {"prompt": "Hi", "max_tokens": 6}),
        (CHAT, {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 6, "logprobs": False}),
    ):
        answer = target.client.post(path, json={**common, **body}, headers=headers)
        assert answer.status_code == 200, answer.text
        events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event.startswith("data: ")]
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
        with_choices = [chunk for chunk in chunks if chunk["choices"]]
        first = with_choices[0]["choices"][0]
        assert "text" in first or "delta" in first, "its TTFT is the first chunk with choices"
        (usage,) = [chunk["usage"] for chunk in chunks if not chunk["choices"]]
        assert usage["completion_tokens"] == 6


def test_aiperf(target: Target) -> None:
    ready = target.post(CHAT, messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=1)
    assert ready.status_code == 200
    talk = [{"role": "user", "content": "Hi", "name": None}]
    extra = {"min_tokens": 9, "ignore_eos": True, "max_completion_tokens": 9, "stream": True}
    for line in lines(target.post(CHAT, messages=talk, **extra))[:-1]:
        chunk = json.loads(line.removeprefix("data: "))
        assert chunk["object"] == "chat.completion.chunk" and chunk["choices"][0]["index"] == 0


def test_lm_eval_scores_a_continuation(target: Target) -> None:
    context, whole = target.tokens("The capital of France is"), target.tokens("The capital of France is Paris")
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    told = target.complete([whole, whole], **asked)["choices"]
    for choice in sorted(told, key=lambda choice: choice["index"]):
        scores, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert sum(scores[len(context) : -1]) < 0
        assert all(score == max(top.values()) for score, top in zip(scores[5:-1], tops[5:-1], strict=True))


def test_lm_eval_generates(target: Target) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "seed": 1234, "stop": ["\n\n", "Question:"]}
    assert target.complete([target.tokens("The capital of France is")], **asked)["choices"][0]["text"]


@pytest.mark.parametrize("base", ["/v1", "/v1/"])
def test_open_webui(target: Target, base: str) -> None:
    listed = target.client.get(target.url + f"{base}/models").json()["data"]
    assert listed[0]["id"] == target.model
    body = {
        "model": target.model,
        "stream": True,
        "messages": MESSAGES,
        "max_tokens": 4,
        "stream_options": {"include_usage": True},
    }
    answer = target.client.post(target.url + f"{base}/chat/completions", json=body)
    assert lines(answer)[-1] == "data: [DONE]"


def test_continue_completes_code(target: Target) -> None:
    stop = ["<fim_prefix>", "<fim_suffix>", "<|endoftext|>", "\n\n", "/src/", "```"]
    stream = target.stream(COMPLETE, prompt="def add(a, b):\n    return", max_tokens=16, temperature=0.01, stop=stop)
    assert stream.finish() in ("stop", "length")
