"""The bytes on the wire: whole answers, streams, usage, logprobs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import NAME, Running, events

MESSAGES = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def chat_stream(served: Running, **extra: Any) -> list[dict[str, Any]]:
    answer = served.post("/v1/chat/completions", messages=MESSAGES, stream=True, **{**GREEDY, **extra})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    data = events(answer)
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1
    return [json.loads(each) for each in data[:-1]]


def test_models(served: Running) -> None:
    listed = served.client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == NAME and listed["data"][0]["max_model_len"] == 2048
    assert served.client.get(f"/v1/models/{NAME}").json()["id"] == NAME
    assert served.client.get("/v1//models/").json()["data"][0]["id"] == NAME
    assert served.client.get("/v1/models/other/thing").json()["error"]["code"] == "model_not_found"


def test_whole_chat_answer(served: Running) -> None:
    body = served.post("/v1/chat/completions", model=NAME, messages=MESSAGES, **GREEDY).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant" and isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    usage = body["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12


def test_whole_completion(served: Running) -> None:
    body = served.post("/v1/completions", prompt="Hello", **GREEDY).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["usage"]["prompt_tokens"] == 5


def test_stream_equals_whole(served: Running) -> None:
    whole = served.post("/v1/chat/completions", messages=MESSAGES, **GREEDY).json()
    chunks = chat_stream(served)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]


def test_stream_frames(served: Running) -> None:
    chunks = chat_stream(served)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "length" and reasons[:-1] == [None] * (len(reasons) - 1)
    assert all(chunk["choices"] for chunk in chunks), "a usage chunk nobody asked for"


def test_usage_chunk_only_when_asked(served: Running) -> None:
    *_, last = chat_stream(served, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12


def test_continuous_usage(served: Running) -> None:
    chunks = chat_stream(served, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 12


def test_several_choices_each_finish_once(served: Running) -> None:
    chunks = chat_stream(served, n=3, temperature=1.0, seed=5)
    ended = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ended) == [0, 1, 2]
    roles = [c["index"] for chunk in chunks for c in chunk["choices"] if "role" in c["delta"]]
    assert sorted(roles) == [0, 1, 2]


def test_prompts_times_choices(served: Running) -> None:
    body = served.post("/v1/completions", prompt=["One", "HI"], n=2, seed=1, max_tokens=3, ignore_eos=True).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] == {**body["usage"], "prompt_tokens": 5, "completion_tokens": 12}


def test_same_seed_same_text_and_unseeded_differ(served: Running) -> None:
    def text(**extra: Any) -> str:
        return served.post("/v1/completions", prompt="Hello", max_tokens=16, ignore_eos=True, **extra).json()[
            "choices"
        ][0]["text"]

    assert text(seed=3) == text(seed=3)
    assert len({text() for _ in range(4)}) > 1


def test_chat_logprobs(served: Running) -> None:
    body = served.post("/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"]), (
            "greedy: the best is the chosen one"
        )
        assert all(0 <= byte < 256 for byte in entry["bytes"])


def test_streamed_logprobs_are_complete(served: Running) -> None:
    chunks = chat_stream(served, logprobs=True, top_logprobs=0)
    entries = [e for chunk in chunks for c in chunk["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert len(entries) == 12 and all(entry["top_logprobs"] == [] for entry in entries)


def test_completion_logprobs_have_equal_lengths(served: Running) -> None:
    logprobs = served.post("/v1/completions", prompt="Hi", logprobs=3, **GREEDY).json()["choices"][0]["logprobs"]
    assert {len(value) for value in logprobs.values()} == {12}
    assert logprobs["text_offset"][0] == 0 and logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_echo(served: Running) -> None:
    plain = served.post("/v1/completions", prompt="Hello", **GREEDY).json()["choices"][0]["text"]
    echoed = served.post("/v1/completions", prompt="Hello", echo=True, **GREEDY).json()["choices"][0]["text"]
    assert echoed == "Hello" + plain
    only = served.post("/v1/completions", prompt="Hello", echo=True, max_tokens=0).json()
    assert only["choices"][0]["text"] == "Hello" and only["usage"]["completion_tokens"] == 0


def test_stop_string_ends_and_is_left_out(served: Running) -> None:
    text = served.post("/v1/completions", prompt="Hello", **GREEDY).json()["choices"][0]["text"]
    stop = text[3:5]
    body = served.post("/v1/completions", prompt="Hello", stop=[stop], **GREEDY).json()["choices"][0]
    assert body["text"] == text[: text.index(stop)]
    assert body["finish_reason"] == "stop" and body["stop_reason"] == stop
    kept = served.post("/v1/completions", prompt="Hello", stop=stop, include_stop_str_in_output=True, **GREEDY).json()
    assert kept["choices"][0]["text"] == text[: text.index(stop)] + stop


def test_token_ids_are_returned_when_asked(served: Running) -> None:
    body = served.post("/v1/completions", prompt="Hello", return_token_ids=True, **GREEDY).json()
    assert len(body["choices"][0]["token_ids"]) == 12


def test_repeated_prompt_reports_cached_tokens(served: Running) -> None:
    prompt = [65 + i % 26 for i in range(600)]
    served.post("/v1/completions", prompt=prompt, max_tokens=2)
    usage = served.post("/v1/completions", prompt=prompt, max_tokens=2).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 512


def test_answers_carry_a_request_id(served: Running) -> None:
    mine = served.client.get("/health", headers={"x-request-id": "mine-1"})
    assert mine.headers["x-request-id"] == "mine-1"
    assert len(served.client.get("/nowhere").headers["x-request-id"]) == 32
