"""What is refused, with which status, and that the refusal names the field."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert "Traceback" not in answer.text and len(answer.text) < 2000
    return error


BAD_CHATS: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", True), ("temperature", "0.5"),
    ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("top_k", 1.5), ("min_p", 1.1), ("n", 0), ("n", 129), ("n", "1"),
    ("seed", 2**63), ("seed", 1.5), ("stop", [""]), ("stop", [1]), ("stop", "x" * 2000), ("stop_token_ids", [10**9]),
    ("max_tokens", 0), ("max_completion_tokens", 0), ("min_tokens", -1), ("presence_penalty", 3),
    ("frequency_penalty", -2.5), ("repetition_penalty", 0), ("logit_bias", {"x": 1}), ("logit_bias", {"99999": 1}),
    ("logit_bias", [1]), ("top_logprobs", 3), ("stream", "yes"), ("stream_options", {"include_usage": True}),
    ("tools", []), ("cache_salt", ""), ("messages", []), ("messages", "hi"), ("messages", [1]),
    ("messages", [{"content": "no role"}]), ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("chat_template_kwargs", {"messages": []}), ("chat_template", "{{ 1 }}"),
    ("response_format", {"type": "xml"}), ("response_format", {"type": "json_schema"}), ("response_format", "json"),
    ("guided_regex", 5), ("guided_choice", []), ("structured_outputs", {"regex": "("}), ("structured_outputs", []),
    ("tools", [{"type": "function"}]), ("tools", {}), ("tool_choice", "auto"), ("tool_choice", "required"),
    ("tool_choice", 5), ("parallel_tool_calls", "yes"), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2),
    ("spaces_between_special_tokens", 1), ("reasoning_effort", "enormous"), ("prompt_logprobs", 1),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD_CHATS)
def test_bad_value_is_a_400_that_names_the_field(served: Running, field: str, value: Any) -> None:
    answer = served.post(CHAT, **{"messages": MESSAGES, "max_tokens": 2, field: value})
    error = error_of(answer, 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field or field == "max_completion_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", v) for v in ("", [], [[]], [-1], [10**6], ["a", 1], {"a": 1}, 5)]
    + [("max_tokens", 0), ("max_tokens", -1), ("logprobs", 21), ("suffix", "x"), ("best_of", 3)],
)
def test_bad_completion(served: Running, field: str, value: Any) -> None:
    error = error_of(served.post(COMPLETE, **{"prompt": "a", "max_tokens": 2, field: value}), 400)
    assert error["param"] == field


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b"42",
        b"{",
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"prompt": "\\ud83d"}',
        b"\xff\xfe",
        b"1" * 9999,
    ],
)
def test_bad_bodies(served: Running, raw: bytes) -> None:
    answer = served.client.post(COMPLETE, content=raw, headers={"content-type": "application/json"})
    error_of(answer, 400)


def test_null_means_absent_and_unknown_fields_are_ignored(served: Running) -> None:
    extra = {"temperature": None, "stop": None, "logprobs": None, "n": None, "store": True, "metadata": {"a": "b"}}
    assert served.post(CHAT, messages=MESSAGES, max_tokens=2, user="me", **extra).status_code == 200


def test_content_null_and_parts(served: Running) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    for content in (None, "Hello", parts):
        assert served.post(CHAT, messages=[{"role": "user", "content": content}], max_tokens=1).status_code == 200


def test_other_statuses(served: Running) -> None:
    assert error_of(served.post(CHAT, model="gpt-4", messages=MESSAGES), 404)["code"] == "model_not_found"
    error_of(served.client.get("/v1/nothing"), 404)
    error_of(served.client.get(CHAT), 405)
    error_of(served.client.post(CHAT, content=b"a=1", headers={"content-type": "text/plain"}), 415)
    error_of(served.client.post(CHAT, content=b" " * 5_000_000, headers={"content-type": "application/json"}), 413)


def test_too_long_for_the_context(served: Running) -> None:
    error = error_of(served.post(COMPLETE, prompt=[65] * 2048, max_tokens=1), 400)
    assert error["code"] == "context_length_exceeded" and "2048" in error["message"]
    assert error_of(served.post(COMPLETE, prompt=[65] * 2000, max_tokens=100), 400)["code"] == "context_length_exceeded"
    assert served.post(COMPLETE, prompt=[65] * 2000, max_tokens=48, ignore_eos=True).status_code == 200


def test_a_request_that_can_never_fit_is_refused_at_once(small: Running) -> None:
    error = error_of(small.post(COMPLETE, prompt=[65] * 700, max_tokens=2), 400)
    assert "pages" in error["message"]
    assert small.post(COMPLETE, prompt=[65] * 300, max_tokens=2).status_code == 200


def test_full_queue_is_429_and_others_are_unaffected(small: Running) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(
            httpx.post(small.url + COMPLETE, json={"prompt": "x", "max_tokens": 400, "ignore_eos": True}, timeout=60)
        )

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) < 8
    for answer in refused:
        error = error_of(answer, 429)
        assert error["code"] == "queue_full" and answer.headers["retry-after"]
    assert all(a.json()["usage"]["completion_tokens"] == 400 for a in answers if a.status_code == 200)
