"""Clients that leave, workers that die, health, and the official client package."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import NAME, Running
from tests.server.watched import launched, slow_down

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True}


def test_health(served: Running) -> None:
    answer = served.client.get("/health")
    assert answer.status_code == 200 and answer.json()["status"] == "ready"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled(served: Running, stream: bool) -> None:
    free = served.engine.stats()["pages_free"] + served.engine.stats()["pages_evictable"]
    with httpx.Client(base_url=served.url, timeout=60 if stream else 0.3) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                next(answer.iter_bytes())
                assert served.scheduler.stats()["running"] == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=LONG)
    generated = served.scheduler.stats()["generated_tokens"]
    served.until(served.idle, 5)
    # Within a tick or two, not after all 1500 tokens.
    assert served.scheduler.stats()["generated_tokens"] - generated < 200
    served.engine.check()
    stats = served.engine.stats()
    assert stats["pages_free"] + stats["pages_evictable"] == free


def ask_in_background(small: Running, **options: Any) -> tuple[threading.Thread, list[httpx.Response | Exception]]:
    """A long request that is running when this returns, its thread, and where its answer or error will lie."""
    answers: list[httpx.Response | Exception] = []

    def ask() -> None:
        try:
            answers.append(httpx.post(small.url + "/v1/completions", json={**LONG, "max_tokens": 500}, **options))
        except httpx.HTTPError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    small.until(lambda: small.scheduler.stats()["running"] == 1)
    return thread, answers


def test_a_waiting_client_that_leaves_frees_its_place(small: Running) -> None:
    forward = small.engine.runner.forward

    def slow(inputs: Any) -> Any:  # however fast the machine: the first request outlives both clients' patience
        time.sleep(0.01)
        return forward(inputs)

    small.engine.runner.forward = slow  # type: ignore[method-assign]
    first, answers = ask_in_background(small, timeout=1.5)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(small.url + "/v1/completions", json={**LONG, "max_tokens": 500}, timeout=0.3)
    small.until(lambda: small.scheduler.stats()["waiting"] == 0, 2)
    first.join()
    assert isinstance(answers[0], httpx.ReadTimeout)
    small.until(small.idle, 5)


def test_a_dead_worker_fails_every_request_and_turns_health_red(small: Running) -> None:
    thread, answers = ask_in_background(small, timeout=60)

    def broken(inputs: Any) -> None:
        raise RuntimeError("the disk is on fire")

    small.engine.runner.forward = broken  # type: ignore[method-assign,assignment]
    thread.join(10)
    (answer,) = answers
    assert isinstance(answer, httpx.Response)
    assert answer.status_code == 500 and "fire" in answer.json()["error"]["message"]
    assert small.client.get("/health").status_code == 503
    assert small.post("/v1/completions", prompt="a").status_code == 503


def test_what_a_shutdown_cuts_off_may_be_sent_again(small: Running) -> None:
    thread, answers = ask_in_background(small, timeout=60)
    small.scheduler.shutdown()
    thread.join(10)
    (answer,) = answers
    assert isinstance(answer, httpx.Response)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "service_unavailable"
    assert small.post("/v1/completions", prompt="a").status_code == 503


def test_an_error_within_a_stream_is_an_event_and_then_done(small: Running) -> None:
    with small.client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 500, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)

        def broken(inputs: Any) -> None:
            raise RuntimeError("out of luck")

        small.engine.runner.forward = broken  # type: ignore[method-assign,assignment]
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"error"' in rest[-2] and "out of luck" in rest[-2]


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_is_gone_within_a_tick_or_two(small: Running, stream: bool) -> None:
    slow_down(small, 0.05)
    if stream:
        with small.client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 500, "stream": True}) as answer:
            next(answer.iter_bytes())
    else:
        ask_in_background(small, timeout=0.4)[0].join()
    ticks = small.scheduler.stats()["ticks"]
    small.until(small.idle, 5)
    assert small.scheduler.stats()["ticks"] - ticks <= 3, "the tick under way, the one that drops it, and one for luck"
    assert small.engine.stats()["pages_used"] == 0


def test_a_stalled_worker_turns_health_red_until_it_moves(tiny_folder: Any) -> None:
    """No tick for `stall_after` seconds, work pending: an idle server is not stalled, however long it has been idle."""
    with launched(tiny_folder("qwen3"), stall_after=0.3) as running:
        go = threading.Event()
        forward = running.engine.runner.forward

        def hang(inputs: Any) -> Any:
            go.wait(30)
            return forward(inputs)

        time.sleep(0.5)
        assert running.client.get("/health").status_code == 200
        running.engine.runner.forward = hang  # type: ignore[method-assign]
        thread, answers = ask_in_background(running, timeout=60)
        running.until(lambda: running.client.get("/health").status_code == 503)
        told = running.client.get("/health").json()
        assert told["status"] == "stalled" and "1 requests" in told["reason"]
        assert running.samples()['helios:healthy{model_name="tiny"}'] == 0
        go.set()
        thread.join()
        assert isinstance(answers[0], httpx.Response) and answers[0].status_code == 200
        assert running.client.get("/health").status_code == 200


def test_a_draining_server_refuses_new_work_and_finishes_the_old(small: Running) -> None:
    slow_down(small, 0.01)
    thread, answers = ask_in_background(small, timeout=60)
    ending = threading.Thread(target=small.scheduler.shutdown, kwargs={"drain_s": 30})
    ending.start()
    small.until(lambda: small.client.get("/health").status_code == 503)
    assert small.client.get("/health").json()["status"] == "draining"
    refused = small.post("/v1/completions", prompt="a")
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "service_unavailable"
    assert not answers, "it was drained before we looked; make it slower"
    thread.join()
    ending.join()
    assert isinstance(answers[0], httpx.Response) and answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 500


def test_a_dead_worker_ends_streams_and_waiting_requests_too(small: Running) -> None:
    slow_down(small, 0.01)
    first, answers = ask_in_background(small, timeout=60)
    waiting: list[httpx.Response] = []
    second = threading.Thread(target=lambda: waiting.append(small.post("/v1/completions", **LONG | {"max_tokens": 9})))
    second.start()
    small.until(lambda: small.scheduler.stats()["waiting"] == 1)

    def broken(inputs: Any) -> None:
        raise RuntimeError("the disk is on fire")

    small.engine.runner.forward = broken  # type: ignore[method-assign,assignment]
    first.join(10)
    second.join(10)
    for answer in (answers[0], waiting[0]):
        assert isinstance(answer, httpx.Response) and answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error" and "fire" in answer.json()["error"]["message"]


def test_shutdown_ends_streams_with_a_sentence(small: Running) -> None:
    with small.client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 500, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        threading.Thread(target=small.scheduler.shutdown).start()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and "shutting down" in rest[-2]
    assert small.client.get("/health").status_code == 503


@pytest.fixture
def client(served: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="unused", max_retries=0)


def test_openai_chat_and_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "max_tokens": 8,
    }
    whole = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert parts[-1].usage is not None and whole.usage is not None
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_completions_models_and_errors(client: openai.OpenAI) -> None:
    assert client.models.list().data[0].id == NAME
    assert client.models.retrieve(NAME).id == NAME
    done = client.completions.create(model=NAME, prompt="Hi", max_tokens=4, logprobs=1, extra_body={"ignore_eos": True})
    assert done.choices[0].logprobs is not None and len(done.choices[0].logprobs.tokens or []) == 4
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=NAME, prompt="Hi", temperature=5)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="Hi")


async def _async_text(url: str) -> str:
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused")
    stream = await client.completions.create(model=NAME, prompt="Hi", max_tokens=8, temperature=0, stream=True)
    return "".join([part.choices[0].text async for part in stream])


def test_openai_async(served: Running, client: openai.OpenAI) -> None:
    import asyncio

    whole = client.completions.create(model=NAME, prompt="Hi", max_tokens=8, temperature=0)
    assert asyncio.run(_async_text(served.url)) == whole.choices[0].text
