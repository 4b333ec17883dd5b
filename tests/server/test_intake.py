"""What comes in: nesting, many prompts, echo, long texts, clients that leave while they send, and ids on failures."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from typing import Any

import pytest
from starlette.requests import Request

from helios.serve.body import MAX_DEPTH, parse_json
from helios.serve.errors import APIError
from helios.serve.intake import TextThreads, hopeless, longest_token, read_body
from tests.server.conftest import Running, events

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("levels", [MAX_DEPTH, 300, 600, 900, 5000])
@pytest.mark.parametrize("field", ["metadata", "tools", "logit_bias", "chat_template_kwargs"])
def test_deep_nesting_is_a_400(served: Running, levels: int, field: str) -> None:
    raw = json.dumps({"messages": MESSAGES, "max_tokens": 1})[:-1] + f', "{field}": {nested(levels)}}}'
    answer = served.client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def test_the_depth_limit_is_exact() -> None:
    assert parse_json(b'{"a": ' + nested(MAX_DEPTH - 1).encode() + b"}")
    with pytest.raises(APIError, match="nested"):
        parse_json(b'{"a": ' + nested(MAX_DEPTH).encode() + b"}")
    assert parse_json(b'{"a": [' + b"[1]," * 1000 + b"[]]}"), "width is not depth"


@pytest.mark.parametrize("levels", [900, 100_000])
def test_deep_nesting_within_a_tool_call_is_no_500(served: Running, levels: int) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": nested(levels)}}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}, *MESSAGES]
    assert served.post(CHAT, messages=messages, max_tokens=1).status_code in (200, 400)


def test_more_prompts_than_places_is_a_400(small: Running) -> None:
    answer = small.post(COMPLETE, prompt=["a", "b"], max_tokens=1)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "prompt" and "at most 1 prompts" in error["message"]
    assert small.post(COMPLETE, prompt=["a"], max_tokens=1).status_code == 200


ECHO: dict[str, Any] = {"echo": True, "max_tokens": 0}


def test_echo_alone_streams(served: Running) -> None:
    options = {"include_usage": True}
    answer = served.post(COMPLETE, prompt=["One", "Two"], **ECHO, stream=True, stream_options=options)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer)
    *texts, usage = [json.loads(chunk) for chunk in chunks]
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["prompt_tokens"] == 6
    choices = [text["choices"][0] for text in texts]
    assert [choice["text"] for choice in choices] == ["One", "Two"]
    assert all(choice["finish_reason"] == "length" for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_keeps_to_the_limits(served: Running, stream: bool) -> None:
    too_long = served.post(COMPLETE, prompt=[65] * 2048, **ECHO, stream=stream)
    assert too_long.status_code == 400 and too_long.json()["error"]["code"] == "context_length_exceeded"
    assert served.post(COMPLETE, prompt=[65] * 2047, **ECHO).status_code == 200
    assert served.post(COMPLETE, prompt="a", **ECHO, n=100, stream=stream).status_code == 400


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_of_a_cut_prompt_is_the_cut_prompt(served: Running, max_tokens: int) -> None:
    body = served.post(COMPLETE, prompt="Hello", echo=True, max_tokens=max_tokens, truncate_prompt_tokens=3).json()
    assert body["choices"][0]["text"].startswith("llo") and body["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_hopeless_text_is_refused_untokenised(served: Running, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    text = "a" * (served.engine.context * longest_token(tokenizer) + 1)

    def tokenised(*_: Any, **__: Any) -> None:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(tokenizer, "encode", tokenised)
    monkeypatch.setattr(tokenizer, "encode_chat", tokenised)
    body: dict[str, Any] = {"prompt": text} if path == COMPLETE else {"messages": [{"role": "user", "content": text}]}
    answer = served.post(path, **body, max_tokens=1)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] in body


def test_a_long_text_that_is_to_be_cut_is_served(served: Running) -> None:
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    text = "a" * (served.engine.context * longest_token(tokenizer) + 1)
    assert not hopeless(2048, 2048, tokenizer)
    body = served.post(COMPLETE, prompt=text, max_tokens=1, truncate_prompt_tokens=10).json()
    assert body["usage"]["prompt_tokens"] == 10


async def both(texts: TextThreads, *work: float) -> list[Any]:
    return await asyncio.gather(*(texts.run(time.sleep, each) for each in work), return_exceptions=True)


def test_who_waits_for_a_text_thread_is_not_to_blame() -> None:
    slow, waited = asyncio.run(both(TextThreads(1, wait_s=0.05, work_s=0.2), 0.6, 0))
    assert slow.status == 400 and "too long" in slow.message
    assert waited.status == 503 and waited.headers["retry-after"]


def test_waiting_does_not_count_as_working() -> None:
    assert asyncio.run(both(TextThreads(1, wait_s=5, work_s=0.5), 0.3, 0.3)) == [None, None]


def test_one_long_text_does_not_hold_up_another() -> None:
    async def second() -> float:
        texts, begun = TextThreads(), threading.Event()
        first = asyncio.ensure_future(texts.run(lambda: (begun.set(), time.sleep(0.5))))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        start = time.perf_counter()
        await texts.run(len, "short")
        took = time.perf_counter() - start
        await first
        return took

    assert asyncio.run(second()) < 0.4


def leaving(*parts: bytes) -> Request:
    """A request whose client sends `parts` and is gone."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    left = iter([*messages, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(left)

    return Request({"type": "http", "method": "POST", "path": COMPLETE, "headers": []}, receive)


def test_leaving_within_the_body_is_a_499() -> None:
    with pytest.raises(APIError) as left:
        asyncio.run(read_body(leaving(b'{"prompt": ')))
    assert left.value.status == 499


def test_leaving_within_the_body_logs_nothing(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    head = f"POST {COMPLETE} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n"
    with caplog.at_level(logging.WARNING):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + b'{"prompt": ')
            time.sleep(0.1)
        time.sleep(0.3)
        assert served.client.get("/health").status_code == 200
    assert not caplog.records


def test_unexpected_errors_carry_an_id_too(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("in /secret/place")

    monkeypatch.setattr("helios.serve.service.Service.check_model", broken)
    answer = served.client.post(COMPLETE, json={"prompt": "a"}, headers={"x-request-id": "mine-2"})
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.headers.get_list("x-request-id") == ["mine-2"]
    assert len(served.post(COMPLETE, prompt="a").headers["x-request-id"]) == 32
