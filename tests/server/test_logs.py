"""One line for each request: true, safe to read, and never in anybody's way."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helios.serve.access import LONGEST, LogWriter, line
from tests.server.watched import Watched, launched, slow_down

COMPLETE = "/v1/completions"
SECRET = "sk-very-secret"


@pytest.fixture
def logged(tiny_folder: Any) -> Iterator[Watched]:
    with launched(tiny_folder("qwen3"), keys=["sk-other", SECRET], max_batch_size=1, max_waiting=1) as running:
        running.client.headers["authorization"] = f"Bearer {SECRET}"
        yield running


def test_a_finished_request_tells_its_tokens_and_times(logged: Watched) -> None:
    body = {"prompt": "wonderful weather", "max_tokens": 6, "ignore_eos": True}
    answer = logged.client.post(COMPLETE, json=body, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and int(answer.headers["openai-processing-ms"]) >= 0
    (told,) = logged.lines(1)
    assert told.pop("time").endswith("+00:00")
    times = [told.pop(name) for name in ("queue_s", "ttft_s", "e2e_s")]
    assert 0 <= times[0] <= times[1] <= times[2] < 60
    assert told == {
        "id": "mine-1",
        "method": "POST",
        "path": COMPLETE,
        "status": 200,
        "key": 2,
        "prompt_tokens": 17,
        "cached_tokens": 0,
        "output_tokens": 6,
        "finish": "length",
    }
    assert "wonderful" not in logged.written.getvalue() and SECRET not in logged.written.getvalue()


def test_streams_and_several_prompts_are_one_line_each(logged: Watched) -> None:
    body: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}
    logged.client.post(COMPLETE, json={**body, "prompt": [7] * 300, "stream": True})
    logged.client.post(COMPLETE, json={**body, "prompt": [7] * 300})
    logged.client.post(COMPLETE, json={**body, "prompt": "a"})
    streamed, again, _ = logged.lines(3)
    assert (streamed["status"], streamed["output_tokens"], streamed["cached_tokens"]) == (200, 3, 0)
    assert again["cached_tokens"] == 256 and again["finish"] == "length"


def test_refusals_are_told_with_their_status(logged: Watched) -> None:
    logged.client.post(COMPLETE, json={"prompt": "x", "temperature": 9})
    logged.client.get("/v1/models", headers={"authorization": "Bearer sk-wrong-guess"})
    logged.client.get("/nowhere")
    told = logged.lines(3)
    assert [each["status"] for each in told] == [400, 401, 404]
    assert [each.get("key") for each in told] == [2, None, 2] and all(each["id"] for each in told)
    assert "sk-wrong" not in logged.written.getvalue() and "finish" not in told[0]


def test_who_left_is_an_abort_and_who_found_it_full_a_429(logged: Watched) -> None:
    slow_down(logged, 0.01)
    long = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True}

    def leave(stream: bool) -> None:
        with pytest.raises(httpx.ReadTimeout):
            logged.client.post(COMPLETE, json=long, timeout=1.5)

    first = threading.Thread(target=leave, args=(False,))
    first.start()
    logged.until(lambda: logged.scheduler.stats()["running"] == 1)
    second = threading.Thread(target=leave, args=(False,))
    second.start()
    logged.until(lambda: logged.scheduler.stats()["waiting"] == 1)
    assert logged.client.post(COMPLETE, json=long).status_code == 429
    first.join()
    second.join()
    told = {each["status"]: each for each in logged.lines(3)}
    assert "finish" not in told[429]
    assert told[499]["finish"] == "abort"


def test_a_stream_that_is_left_is_an_abort(logged: Watched) -> None:
    long = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with logged.client.stream("POST", COMPLETE, json=long) as answer:
        next(answer.iter_bytes())
    (told,) = logged.lines(1)
    assert told["status"] == 200 and told["finish"] == "abort" and 1 <= told["output_tokens"] < 1500


def test_a_failed_engine_is_an_error(logged: Watched) -> None:
    def broken(inputs: Any) -> None:
        raise RuntimeError("the disk is on fire")

    logged.engine.runner.forward = broken  # type: ignore[method-assign,assignment]
    logged.client.post(COMPLETE, json={"prompt": "x"})
    logged.until(lambda: '"status":500' in logged.written.getvalue())
    told = [json.loads(text) for text in logged.written.getvalue().splitlines() if text.startswith("{")]
    assert told[0]["status"] == 500 and told[0]["finish"] == "error"


def test_probes_are_quiet_but_a_scrape_without_a_key_is_not(logged: Watched) -> None:
    logged.client.get("/health")
    logged.client.get("/metrics")
    logged.scheduler.shutdown()
    assert logged.client.get("/health").status_code == 503
    httpx.get(logged.url + "/metrics")
    assert [(each["path"], each["status"]) for each in logged.lines(1)] == [("/metrics", 401)]


def test_the_log_can_be_off(tiny_folder: Any) -> None:
    with launched(tiny_folder("qwen3"), log_requests=False) as silent:
        silent.client.get("/nowhere")
    assert silent.written.getvalue() == ""


def test_nothing_that_a_client_sends_can_forge_a_line(logged: Watched) -> None:
    path = "/a%0A%7B%22status%22%3A200%7D%1B[31m%7F%E2%80%A8" + "x" * 900
    host, port = logged.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as wire:
        wire.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nx-request-id: \x1b[31m\r\nconnection: close\r\n\r\n".encode())
        while wire.recv(65536):
            pass
    (told,) = logged.lines(1)
    text = logged.written.getvalue()
    assert text.count("\n") == 1 and text.isascii() and all(c.isprintable() for c in text[:-1])
    assert len(told["path"]) == LONGEST and told["path"].startswith('/a\n{"status":200}') and told["status"] == 401


def test_an_id_is_echoed_only_if_it_is_harmless(logged: Watched) -> None:
    def echoed(given: bytes) -> bool:
        answer = logged.client.get("/version", headers={b"x-request-id": given})
        assert len(answer.headers.get_list("x-request-id")) == 1
        return answer.headers["x-request-id"].encode("latin-1") == given

    assert all(echoed(fine) for fine in (b"a", b"x" * 128, b'{"a":1}'))
    assert not any(echoed(bad) for bad in (b"", b"x" * 129, b"two words", b"caf\xc3\xa9", b"a\tb"))
    with httpx.Client(base_url=logged.url) as client:  # one id also where the innermost layers never see it
        assert client.get("/version", headers={"x-request-id": "no-key"}).headers["x-request-id"] == "no-key"


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.text())))
def test_a_line_is_one_line_of_json(fields: dict[str, Any]) -> None:
    text = line(fields)
    assert text.isascii() and text.endswith("\n") and all(c.isprintable() for c in text[:-1])
    assert json.loads(text) == {name: value for name, value in fields.items() if value is not None}


class Stuck(io.StringIO):
    """A pipe whose reader has stopped reading."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.go.wait(20)
        return super().write(text)


def test_a_reader_that_stopped_reading_holds_up_nobody() -> None:
    pipe = Stuck()
    writer = LogWriter(pipe, room=10)
    for number in range(50):
        writer.write({"n": number})
    assert writer.dropped >= 39
    writer.close(0.01)  # does not wait for it either
    pipe.go.set()
    writer.close()
    numbers = [json.loads(text)["n"] for text in pipe.getvalue().splitlines()]
    assert numbers == list(range(len(numbers))) and len(numbers) + writer.dropped == 50


def test_a_closed_stream_does_not_end_the_writer() -> None:
    pipe = io.StringIO()
    writer = LogWriter(pipe)
    pipe.close()
    writer.write({})
    writer.close()
    assert not writer._thread.is_alive()
