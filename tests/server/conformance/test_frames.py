"""Wire formats: whole answers, and streams frame by frame."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conformance.marks import helios_only, vllm_bug
from tests.server.live import CHAT, COMPLETE, Stream, Target

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETE], ids=["chat", "completions"])
OBJECTS = {CHAT: ("chat.completion", "chatcmpl-"), COMPLETE: ("text_completion", "cmpl-")}
USAGE = {"include_usage": True}
REASONS = {"stop", "length", "tool_calls", "content_filter", "function_call"}


def test_whole_chat(target: Target) -> None:
    body = target.chat()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert isinstance(body["created"], int) and body["model"] == target.model
    (choice,) = body["choices"]
    assert choice["index"] == 0 and choice["logprobs"] is None and choice["finish_reason"] in REASONS
    assert choice["message"]["role"] == "assistant" and isinstance(choice["message"]["content"], str)


def test_whole_chat_has_no_tool_calls_key(target: Target) -> None:
    assert not target.chat()["choices"][0]["message"].get("tool_calls")
    if not target.foreign:
        assert "tool_calls" not in target.chat()["choices"][0]["message"]


def test_whole_completion(target: Target) -> None:
    body = target.complete()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert choice["index"] == 0 and choice["logprobs"] is None and choice["finish_reason"] in REASONS
    assert isinstance(choice["text"], str) and "message" not in choice


@BOTH
def test_ids_are_unique(target: Target, path: str) -> None:
    asked: dict[str, Any] = {"prompt": "Hi"} if path == COMPLETE else {"messages": [{"role": "user", "content": "Hi"}]}
    assert len({target.ok(path, max_tokens=1, **asked)["id"] for _ in range(3)}) == 3


@BOTH
def test_usage_counts(target: Target, path: str) -> None:
    body = target.complete(ignore_eos=True) if path == COMPLETE else target.chat(ignore_eos=True)
    usage = body["usage"]
    assert usage["prompt_tokens"] > 0 and usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


def test_finish_length_and_stop(target: Target) -> None:
    assert target.chat(max_tokens=2)["choices"][0]["finish_reason"] == "length"
    assert target.chat("Say only: yes", max_tokens=100)["choices"][0]["finish_reason"] == "stop"


@BOTH
class TestFrames:
    def test_headers(self, target: Target, path: str) -> None:
        headers = target.stream(path).response.headers
        assert headers["content-type"] == "text/event-stream; charset=utf-8" and "content-length" not in headers

    @helios_only("others leave it to the proxy's settings")
    def test_headers_against_buffering(self, target: Target, path: str) -> None:
        headers = target.stream(path).response.headers
        assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"

    def test_bytes(self, target: Target, path: str) -> None:
        raw = target.stream(path).response.content
        assert raw.startswith(b"data: {") and raw.endswith(b"\n\ndata: [DONE]\n\n")
        assert b"\r" not in raw and b"\n\n\n" not in raw and raw.count(b"[DONE]") == 1

    def test_each_frame_is_one_line_of_plain_json(self, target: Target, path: str) -> None:
        for frame in target.stream(path).frames[:-1]:
            assert json.loads(frame) and "\n" not in frame and "NaN" not in frame and "Infinity" not in frame

    def test_same_head_in_all_chunks(self, target: Target, path: str) -> None:
        chunks = target.stream(path, stream_options=USAGE).chunks
        assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
        whole, prefix = OBJECTS[path]
        assert chunks[0]["object"] == (whole + ".chunk" if path == CHAT else whole)
        assert chunks[0]["id"].startswith(prefix) and chunks[0]["model"] == target.model

    def test_stream_equals_whole(self, target: Target, path: str) -> None:
        streamed = target.stream(path, max_tokens=16)
        whole = target.said(max_tokens=16) if path == CHAT else target.text("Once upon a", max_tokens=16)
        assert streamed.text() == whole and len(streamed.pieces()) > 2

    def test_finish_reason_once_per_choice_and_nothing_after(self, target: Target, path: str) -> None:
        stream = target.stream(path, n=3, temperature=1.0, seed=5, ignore_eos=True)
        for index in range(3):
            reasons = [choice["finish_reason"] for choice in stream.of(index)]
            assert reasons[-1] == "length" and set(reasons[:-1]) == {None}

    def test_every_choice_has_the_key(self, target: Target, path: str) -> None:
        assert all("finish_reason" in choice for choice in target.stream(path).choices)

    def test_index_is_the_choice(self, target: Target, path: str) -> None:
        assert {choice["index"] for choice in target.stream(path, n=2, temperature=1).choices} == {0, 1}

    def test_no_empty_pieces(self, target: Target, path: str) -> None:
        pieces = [c for c in target.stream(path, max_tokens=16).choices if c["finish_reason"] is None]
        texts = [c.get("text") or c.get("delta", {}).get("content") for c in pieces if "role" not in c.get("delta", {})]
        assert all(texts)

    def test_usage_only_when_asked(self, target: Target, path: str) -> None:
        chunks = target.stream(path).chunks
        assert all(chunk["choices"] for chunk in chunks)
        assert all(chunk.get("usage") is None for chunk in chunks)
        off = target.stream(path, stream_options={"include_usage": False}).chunks
        assert all(chunk["choices"] for chunk in off)

    def test_usage_chunk(self, target: Target, path: str) -> None:
        *rest, last = target.stream(path, stream_options=USAGE, ignore_eos=True).chunks
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 8
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert all(chunk.get("usage") is None for chunk in rest)

    def test_usage_equals_the_whole_answers(self, target: Target, path: str) -> None:
        two: dict[str, Any] = {"n": 2, "temperature": 1, "top_k": 1}
        last = target.stream(path, stream_options=USAGE, **two).chunks[-1]["usage"]
        whole = target.chat(**two) if path == CHAT else target.complete("Once upon a", **two)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last[name] == whole["usage"][name]

    def test_continuous_usage(self, target: Target, path: str) -> None:
        options = {**USAGE, "continuous_usage_stats": True}
        chunks = target.stream(path, stream_options=options, ignore_eos=True).chunks
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 8
        assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1

    def test_stream_false_is_a_whole_answer(self, target: Target, path: str) -> None:
        body = target.chat(stream=False) if path == CHAT else target.complete(stream=False)
        assert body["object"] == OBJECTS[path][0]


def test_chat_opens_with_the_role_and_says_it_once(target: Target) -> None:
    stream = target.stream(n=2, temperature=1.0, seed=1)
    for index in range(2):
        first, *rest = stream.of(index)
        assert first["delta"]["role"] == "assistant" and first["delta"].get("content", "") == ""
        assert all(choice["delta"].get("role") is None for choice in rest)
        if not target.foreign:
            assert first["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in choice["delta"] for choice in rest)


def test_chat_pieces_have_deltas_and_completions_have_text(target: Target) -> None:
    assert all("delta" in choice and "message" not in choice for choice in target.stream().choices)
    assert all("text" in choice and "delta" not in choice for choice in target.stream(COMPLETE).choices)


def test_completions_stream_of_several_prompts(target: Target) -> None:
    prompts = ["One two three", "Red green blue"]
    stream = target.stream(COMPLETE, prompt=prompts, n=2, temperature=1, top_k=1, stream_options=USAGE)
    assert {choice["index"] for choice in stream.choices} == {0, 1, 2, 3}
    for index in range(4):
        assert stream.finish(index) in ("stop", "length")
        assert stream.text(index) == stream.text(index // 2 * 2)


def test_streams_beside_each_other_lose_nothing(target: Target) -> None:
    def ask(number: int) -> Stream:
        options: dict[str, Any] = {"stream_options": USAGE, "ignore_eos": True, "return_token_ids": True}
        return target.stream(COMPLETE, prompt=f"Number {number}", max_tokens=10 + number, **options)

    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(ask, range(8)))
    for number, stream in enumerate(streams):
        assert stream.chunks[-1]["usage"]["completion_tokens"] == 10 + number
        assert sum(len(choice.get("token_ids") or []) for choice in stream.choices) == 10 + number
    assert len({stream.chunks[0]["id"] for stream in streams}) == 8


@vllm_bug("its first chunk tells the role before a token is there, so a client's TTFT is of an empty chunk")
def test_the_first_chunk_comes_with_the_first_token(target: Target) -> None:
    body = {"model": target.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
    with target.client.stream("POST", CHAT, json=body) as answer:
        first = next(answer.iter_raw())
    assert first.count(b"data: ") > 1
