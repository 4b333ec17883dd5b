"""The drivers: in process with a clock of our own, and over HTTP against a small fake OpenAI server."""

import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from helios.bench.chunks import Chunk, chunks_of, read_events, record_of
from helios.bench.drivers import (
    BenchmarkError,
    check_lengths,
    request_class,
    run_scheduler,
    run_sequential,
    run_streams,
    run_url,
)
from helios.bench.metrics import summarize
from helios.bench.workloads import Work
from helios.engine.scheduler import Scheduler
from helios.engine.sequence import Request
from helios.model.sampling import SamplingParams


def work(output: int = 4, prompt: int = 3, arrival: float = 0.0) -> Work:
    return Work(list(range(40, 40 + prompt)), output, "decode", arrival)


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def engine(self, asked: Work) -> Iterator[int]:
        for number in range(asked.max_tokens):
            self.sleep(0.5 if number == 0 else 0.1)
            yield number


def test_sequential_waiting_counts() -> None:
    clock = Clock()
    records = run_sequential(clock.engine, [work(3), work(3), work(3)], clock=clock, sleep=clock.sleep)
    assert [record.ttft_s for record in records] == pytest.approx([0.5, 1.2, 1.9])
    assert [record.decode_tok_s for record in records] == pytest.approx([10.0] * 3)
    assert {record.finish_reason for record in records} == {"length"}
    assert summarize(records).peak_concurrency == 3


def test_sequential_arrivals_are_waited_for_and_never_hidden() -> None:
    clock = Clock()
    works = [work(3), work(3, arrival=0.2), work(3, arrival=5.0)]
    records = run_sequential(clock.engine, works, clock=clock, sleep=clock.sleep)
    assert [record.sent_s for record in records] == pytest.approx([100.0, 100.2, 105.0])
    # The second was due while the first ran: 0.5 s of that wait belong to it. The third met an idle engine.
    assert [record.ttft_s for record in records] == pytest.approx([0.5, 1.0, 0.5])


def test_sequential_restored_tokens_and_early_ends() -> None:
    counts = iter([0, 2])
    records = run_sequential(lambda asked: [1, 2], [work(2), work(9)], cached_tokens=lambda: next(counts))
    assert [record.cached_tokens for record in records] == [0, 2]
    assert [record.finish_reason for record in records] == ["length", "stop"]
    with pytest.raises(BenchmarkError, match="request 1 asked for 3/9 prompt/output tokens and got 3/2"):
        check_lengths([work(2), work(9)], records)


def test_streams_run_side_by_side_and_one_failure_stays_alone() -> None:
    barrier = threading.Barrier(2, timeout=10)

    def submit(asked: Work) -> Iterator[Chunk]:
        if asked.max_tokens == 1:
            raise RuntimeError("the queue is full")
        barrier.wait()  # passes only if both other requests are running
        yield Chunk(asked.max_tokens, "length", cached_tokens=1)

    records = run_streams(submit, [work(2), work(1), work(3)])
    assert [record.output_tokens for record in records] == [2, 0, 3]
    assert records[1].error == "RuntimeError: the queue is full"
    assert summarize(records).completion_ratio == pytest.approx(2 / 3)
    assert [record.cached_tokens for record in records] == [1, 0, 1]


def test_scheduler_gets_greedy_requests_of_exact_length() -> None:
    seen: list[Any] = []

    class Scheduler:
        def submit(self, request: Any, /) -> Any:
            seen.append(request)
            events = [SimpleNamespace(token_ids=[i], finish_reason=None, error=None) for i in range(3)]
            events.append(SimpleNamespace(token_ids=[3], finish_reason="length", error=None))
            return SimpleNamespace(events=lambda: iter(events), cached_tokens=2)

    works = [work(4), work(4)]
    records = run_scheduler(Scheduler(), works)
    check_lengths(works, records)
    assert {request.id for request in seen} == {"bench-0", "bench-1"}
    assert all(r.params.ignore_eos and r.params.temperature == 0 and r.params.max_tokens == 4 for r in seen)
    assert [(r.cached_tokens, r.finish_reason) for r in records] == [(2, "length")] * 2


@dataclass
class OwnRequest:
    id: str
    prompt_ids: list[int]
    params: Any
    arrival_s: float


def test_scheduler_gets_requests_of_the_class_it_names() -> None:
    class Scheduler:
        def submit(self, request: OwnRequest, /) -> Any:
            assert type(request) is OwnRequest
            event = SimpleNamespace(token_ids=[1, 2], finish_reason="length", error=None)
            return SimpleNamespace(events=lambda: iter([event]), cached_tokens=0)

    works = [work(2)]
    check_lengths(works, run_scheduler(Scheduler(), works))


def test_the_schedulers_own_request_can_be_made() -> None:
    request_type = request_class(Scheduler.submit)
    assert request_type is Request
    asked = request_type(id="a", prompt_ids=[1], params=SamplingParams(), arrival_s=1.0)
    assert asked.prompt_ids == [1]


def test_events_count_when_their_last_byte_is_there() -> None:
    whole = b': ping\n\ndata: {"n": 1}\r\n\r\ndata:{"n": 2}\n\ndata: [DONE]\n\n'
    for cut in range(len(whole)):
        events = list(read_events([(1.0, whole[:cut]), (2.0, whole[cut:])]))
        assert [event["n"] for _, event in events] == [1, 2]
        first_newline = whole.index(b"1}") + 3
        assert events[0][0] == (1.0 if cut > first_newline else 2.0)


def event(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": reason} | more]}


def counts(events: list[dict[str, Any]]) -> list[int]:
    return [chunk.tokens for _, chunk in chunks_of((float(i), e) for i, e in enumerate(events))]


def usage(total: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": total}}


def test_tokens_of_a_chunk() -> None:
    assert counts([event("a"), event("b"), event("c", "length"), usage(3)]) == [1, 1, 1, 0]
    assert counts([event("a"), event(""), event("c", "length"), usage(3)]) == [1, 1, 1, 0]  # half a character
    assert counts([event("a b"), event(" c d", "length"), usage(4)]) == [2, 2, 0]
    assert counts([event("a"), event("b"), event("", "length"), usage(2)]) == [1, 1, 0, 0]  # closing event
    assert counts([event("a"), event("b"), event("c"), usage(7)]) == [2, 2, 3, 0]
    assert counts([event("x", token_ids=[1]), event("", token_ids=[2, 3]), usage(3)]) == [1, 2, 0]
    assert counts([event("a"), event(""), event("c")]) == [1, 0, 1]  # no usage: texts are all there is


def test_a_record_without_tokens_is_an_error() -> None:
    assert record_of(work(), 0.0, [(1.0, Chunk(0, "stop"))]).error == "no tokens came back"
    assert record_of(work(), 0.0, [(1.0, Chunk(1)), (2.0, Chunk(0, error="lost"))]).error == "lost"


class FakeServer:
    """Answers completions the way `style` says; keeps the bodies it was sent."""

    def __init__(self) -> None:
        self.style = "plain"
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, [json.dumps({"data": [{"id": "fake-model"}]}).encode()])

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.bodies.append(body)
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                if outer.style == "refuse":
                    self.reply(400, [b'{"error": {"message": "too long"}}'])
                else:
                    self.reply(200, outer.events(len(body["prompt"]), body["max_tokens"]))

            def reply(self, status: int, pieces: Any) -> None:
                self.send_response(status)
                self.end_headers()
                for piece in pieces:
                    self.wfile.write(piece)
                    self.wfile.flush()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def events(self, prompt: int, output: int) -> Iterator[bytes]:
        step = 2 if self.style == "pairs" else 1
        for begin in range(0, output - (self.style == "short"), step):
            time.sleep(0.02)
            if self.style == "error" and begin == 2:
                yield b'data: {"error": {"message": "out of memory"}}\n\n'
                break
            yield b"data: " + json.dumps(event("x" * step)).encode() + b"\n\n"
        details = {"prompt_tokens_details": {"cached_tokens": 2}}
        total = {"prompt_tokens": prompt, "completion_tokens": output - (self.style == "short")}
        if self.style != "error":
            yield b"data: " + json.dumps({"choices": [], "usage": total | details}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.server.shutdown()


@pytest.mark.parametrize("style", ["plain", "pairs"])
def test_http_records_what_was_asked(server: FakeServer, style: str) -> None:
    server.style = style
    works = [work(4), work(6, prompt=5)]
    records = run_url(server.url, works)
    check_lengths(works, records)
    assert [(r.prompt_tokens, r.output_tokens, r.cached_tokens) for r in records] == [(3, 4, 2), (5, 6, 2)]
    for record in records:
        assert 0.015 < record.ttft_s < 5
        assert record.token_times_s == sorted(record.token_times_s)
        assert record.e2e_s > 0.035
    zeros = [gap for record in records for gap in record.gaps_s if gap == 0]
    assert bool(zeros) == (style == "pairs")
    assert summarize(records).peak_concurrency == 2


def test_http_body_and_headers(server: FakeServer) -> None:
    run_url(server.url + "/v1/", [work(2)], model="mine", token_ids=True, api_key="secret")
    body = server.bodies[0]
    assert body == {
        "model": "mine",
        "prompt": [40, 41, 42],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    assert server.headers[0]["authorization"] == "Bearer secret"
    run_url(server.url, [work(2)])
    assert server.bodies[1]["model"] == "fake-model"
    assert "return_token_ids" not in server.bodies[1]


def test_http_arrivals(server: FakeServer) -> None:
    first, second = run_url(server.url, [work(2), work(2, arrival=0.3)])
    assert second.sent_s - first.sent_s == pytest.approx(0.3)
    assert second.token_times_s[0] > first.sent_s + 0.3


@pytest.mark.parametrize(
    ("style", "message"),
    [
        ("refuse", "the server answered 400: .*too long"),
        ("error", "out of memory"),
        ("short", "asked for 3/4 .* got 3/3"),
    ],
)
def test_http_what_goes_wrong_is_said(server: FakeServer, style: str, message: str) -> None:
    server.style = style
    works = [work(4)]
    with pytest.raises(BenchmarkError, match=message):
        check_lengths(works, run_url(server.url, works))


def test_http_without_a_server() -> None:
    with pytest.raises(BenchmarkError, match="start the server"):
        run_url("http://127.0.0.1:9", [work()])
    records = run_url("http://127.0.0.1:9", [work()], model="x")
    assert records[0].error is not None
    assert records[0].error.startswith("the connection failed")
    assert math.isnan(summarize(records).ttft_s.p50)
