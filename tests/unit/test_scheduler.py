"""The scheduler against a fake engine: no model, and ticks that end only when the test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helios.engine.job import Batch, Choice, Job, JobEvent
from helios.engine.scheduler import QueueFull, Scheduler
from helios.engine.sequence import Request, TokenEvent
from helios.engine.worker import EngineDead
from helios.model.params import RequestError, SamplingParams
from helios.model.tokenizer import Tokenizer

WAIT_S = 10.0


class FakeEngine:
    """Gives every running choice one token a tick: 0, 1, 2, … or what `script` says. `gate`: ticks need a permit."""

    def __init__(self, slots: int = 2, context: int = 1000, gated: bool = False, tokenizer: Any = None) -> None:
        self.slots, self.context, self.tokenizer = slots, context, tokenizer
        self.running: dict[str, tuple[Request, dict[int, int]]] = {}
        self.gate = threading.Semaphore(0) if gated else None
        self.script: dict[str, list[int]] = {}
        self.fail: Exception | None = None
        self.bad: set[str] = set()
        self.lost_pages = False
        self.threads: set[int] = set()
        self.admitted: list[str] = []
        self.finished: list[tuple[str, int, str]] = []
        self.cancelled: list[str] = []
        self.ticks = self.checks = 0

    def check_fits(self, request: Request) -> None:
        if len(request.prompt_ids) + (request.params.max_tokens or 1) > self.context:
            raise RequestError("the context is too small for this request", param="prompt")

    def can_admit(self, request: Request) -> bool:
        used = sum(len(choices) for _, choices in self.running.values())
        return not self.lost_pages and used + request.params.n <= self.slots

    def admit(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        assert self.can_admit(request)
        self.admitted.append(request.id)
        self.running[request.id] = (request, dict.fromkeys(range(request.params.n), 0))

    def tick(self, now: float) -> list[TokenEvent]:
        if self.gate is not None:
            assert self.gate.acquire(timeout=WAIT_S), "the test never allowed this tick"
        self.threads.add(threading.get_ident())
        self.ticks += 1
        if self.fail:
            raise self.fail
        events = []
        for request_id, (request, choices) in list(self.running.items()):
            for index, given in list(choices.items()):
                if request_id in self.bad:
                    events.append(TokenEvent(request_id, index, -1, None, "error", "not finite"))
                    self.running.pop(request_id, None)
                    continue
                events.append(self._next(request, index, given))
                choices[index] += 1
                if events[-1].finish_reason:
                    self._leave(request_id, index)
        return events

    def _next(self, request: Request, index: int, given: int) -> TokenEvent:
        script = self.script.get(request.id)
        last = given + 1 == request.params.max_tokens
        token = script[given] if script else given
        stops = token in (request.params.stop_token_ids or ())
        reason = "stop" if stops else "length" if last else None
        return TokenEvent(request.id, index, token, None, reason, cached_tokens=7)

    def _leave(self, request_id: str, index: int) -> None:
        _, choices = self.running[request_id]
        del choices[index]
        if not choices:
            del self.running[request_id]

    def finish(self, request_id: str, index: int, reason: str) -> bool:
        self.finished.append((request_id, index, reason))
        self._leave(request_id, index)
        return True

    def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        return self.running.pop(request_id, None) is not None

    def stats(self) -> dict[str, float]:
        return {"pages_free": self.slots - len(self.running)}

    def check(self) -> None:
        self.checks += 1


def a_request(name: str, max_tokens: int = 3, prompt: int = 4, **params: Any) -> Request:
    return Request(name, list(range(prompt)), SamplingParams(max_tokens=max_tokens, **params))


Start = Callable[..., Scheduler]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a scheduler on a fake engine; shut down, with its ticks let through, when the test ends."""
    started: list[tuple[Scheduler, FakeEngine]] = []

    def make(engine: FakeEngine, **options: Any) -> Scheduler:
        scheduler = Scheduler(lambda: engine, **options)  # type: ignore[arg-type, return-value]
        started.append((scheduler, engine))
        scheduler.start()
        scheduler.wait_ready(WAIT_S)
        return scheduler

    yield make
    for scheduler, engine in started:
        if engine.gate is not None:
            engine.gate.release(100_000)
        scheduler.shutdown()
        assert not scheduler._thread.is_alive()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.001)


def allow(engine: FakeEngine, ticks: int = 1) -> None:
    """Let ticks happen, and wait until they have ended and the next one is at the gate (or the worker sleeps)."""
    assert engine.gate is not None
    goal = engine.ticks + ticks
    engine.gate.release(ticks)
    wait_for(lambda: engine.ticks >= goal, f"tick {goal}")


def read(job: Job) -> dict[int, JobEvent]:
    """All events of a job, merged by choice."""
    merged: dict[int, JobEvent] = {}
    for event in job.events():
        merged[event.index] = merged[event.index].then(event) if event.index in merged else event
    return merged


# The ordinary way through


def test_a_job_gets_all_its_tokens_and_one_reason(start: Start) -> None:
    scheduler = start(FakeEngine())
    job = scheduler.submit(a_request("a", max_tokens=5))
    events = list(job.events())
    assert [token for event in events for token in event.token_ids] == [0, 1, 2, 3, 4]
    assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
    assert events[-1].finish_reason == "length"
    assert job.finished and job.prompt_tokens == 4 and job.cached_tokens == 7


def test_timings_are_in_order(start: Start) -> None:
    scheduler = start(FakeEngine())
    job = scheduler.submit(a_request("a"))
    read(job)
    t = job.timings
    assert t.admitted_s is not None and t.first_token_s is not None and t.finished_s is not None
    assert t.queued_s <= t.admitted_s <= t.first_token_s <= t.finished_s


def test_only_the_worker_touches_the_engine(start: Start) -> None:
    engine = FakeEngine(slots=4)
    built: list[int] = []
    scheduler = Scheduler(lambda: (built.append(threading.get_ident()), engine)[1])  # type: ignore[arg-type, return-value]
    scheduler.start()
    for i in range(8):
        read(scheduler.submit(a_request(str(i))))
    scheduler.shutdown()
    assert engine.threads == set(built) and threading.get_ident() not in engine.threads


def test_first_come_first_served_and_the_head_is_not_overtaken(start: Start) -> None:
    engine = FakeEngine(slots=2, gated=True)
    scheduler = start(engine)
    wide = [scheduler.submit(a_request(name, n=n)) for name, n in (("a", 1), ("wide", 2), ("b", 1), ("c", 1))]
    engine.gate.release(1000)  # type: ignore[union-attr]
    for job in wide:
        read(job)
    assert engine.admitted == ["a", "wide", "b", "c"]


def test_each_choice_ends_once(start: Start) -> None:
    scheduler = start(FakeEngine(slots=3))
    merged = read(scheduler.submit(a_request("a", n=3, max_tokens=4)))
    assert {index: event.token_ids for index, event in merged.items()} == dict.fromkeys(range(3), [0, 1, 2, 3])
    assert all(event.finish_reason == "length" for event in merged.values())


def test_one_delivery_a_tick_and_one_event_a_choice(start: Start) -> None:
    batches: list[Batch] = []
    engine = FakeEngine(slots=4, gated=True)
    scheduler = start(engine, deliver=batches.append)
    for name in "abcd":
        scheduler.submit(a_request(name, max_tokens=3))
    wait_for(lambda: len(engine.admitted) == 4 or engine.ticks > 0 or bool(engine.gate), "admission")
    engine.gate.release(1000)  # type: ignore[union-attr]
    wait_for(lambda: scheduler.stats()["finished"] == 4, "all finished")
    scheduler.shutdown()
    assert len(batches) == engine.ticks
    for batch in batches:
        keys = [(job.id, event.index) for job, event in batch]
        assert len(keys) == len(set(keys))


# Text


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder("qwen3"))


def spoken(start: Start, tokenizer: Tokenizer, text: str, **params: Any) -> tuple[FakeEngine, list[JobEvent]]:
    """The events of a job whose engine says `text`, a byte a tick, and would go on."""
    engine = FakeEngine(tokenizer=tokenizer)
    batches: list[Batch] = []
    engine.script["a"] = tokenizer.encode(text)
    scheduler = start(engine, deliver=batches.append)
    scheduler.submit(a_request("a", max_tokens=len(engine.script["a"]), **params))
    wait_for(lambda: scheduler.stats()["finished"] == 1, "the end")
    scheduler.shutdown()
    return engine, [event for batch in batches for _, event in batch]


def test_a_stop_string_across_tokens_ends_the_sequence_at_once(start: Start, tokenizer: Tokenizer) -> None:
    engine, events = spoken(start, tokenizer, "one two STOP three", stop="STOP")
    assert "".join(event.text for event in events) == "one two "
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "STOP")
    assert engine.finished == [("a", 0, "stop")] and engine.ticks == len("one two STOP")


def test_min_tokens_holds_back_stop_strings_too(start: Start, tokenizer: Tokenizer) -> None:
    text = "STOP and STOP"
    for least, said in ((3, ""), (4, "STOP and "), (12, "STOP and "), (13, text)):
        _, events = spoken(start, tokenizer, text, stop="STOP", min_tokens=least)
        assert "".join(event.text for event in events) == said, least
        assert events[-1].finish_reason == ("length" if said == text else "stop")


def test_tokens_wait_for_their_text(start: Start, tokenizer: Tokenizer) -> None:
    _, events = spoken(start, tokenizer, "aST STx", stop="STOP")
    assert [(event.text, len(event.token_ids)) for event in events] == [("a", 1), ("ST ", 3), ("STx", 3)]
    assert all(len(event.logprobs) == len(event.token_ids) for event in events)


def test_what_is_held_back_is_flushed_at_the_end(start: Start, tokenizer: Tokenizer) -> None:
    _, events = spoken(start, tokenizer, "go STO", stop="STOP")
    assert "".join(event.text for event in events) == "go STO"
    assert events[-1].finish_reason == "length" and sum(len(event.token_ids) for event in events) == 6


def test_no_event_has_half_a_character(start: Start, tokenizer: Tokenizer) -> None:
    _, events = spoken(start, tokenizer, "a🙂é")
    assert [event.text for event in events] == ["a", "🙂", "é"]
    assert [len(event.token_ids) for event in events] == [1, 4, 2]


def test_a_stop_string_on_the_last_token_is_a_stop(start: Start, tokenizer: Tokenizer) -> None:
    engine, events = spoken(start, tokenizer, "x END", stop=["END", "Z"])
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "END")
    assert engine.finished == [], "the engine had ended it by length already"


def test_stop_strings_may_stay_in_the_text(start: Start, tokenizer: Tokenizer) -> None:
    _, events = spoken(start, tokenizer, "x END y", stop="END", include_stop_str_in_output=True)
    assert "".join(event.text for event in events) == "x END"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab!")])
def test_a_stop_token_is_shown_only_on_request(start: Start, tokenizer: Tokenizer, include: bool, text: str) -> None:
    (token,) = tokenizer.encode("!")
    _, events = spoken(start, tokenizer, "ab!cd", stop_token_ids=[token], include_stop_str_in_output=include)
    assert "".join(event.text for event in events) == text
    assert events[-1].stop_reason == token and sum(len(event.token_ids) for event in events) == 3


def test_the_models_own_end_is_no_stop_reason(start: Start, tokenizer: Tokenizer) -> None:
    choice = Choice(0, SamplingParams(stop_token_ids=[258]), tokenizer)
    choice.push(TokenEvent("a", 0, 258, None, "stop"))
    event = choice.take()
    assert event is not None and (event.finish_reason, event.stop_reason, event.text) == ("stop", None, "")
    assert not choice.push(TokenEvent("a", 0, 1, None, None)) and choice.take() is None


def test_a_cancelled_job_keeps_the_text_it_had(start: Start, tokenizer: Tokenizer) -> None:
    engine = FakeEngine(gated=True, tokenizer=tokenizer)
    engine.script["a"] = tokenizer.encode("go STO and on")
    scheduler = start(engine)
    job = scheduler.submit(a_request("a", max_tokens=13, stop="STOP"))
    allow(engine, 6)
    job.cancel()
    engine.gate.release(1)  # type: ignore[union-attr]
    event = read(job)[0]
    assert event.finish_reason == "abort" and event.text == "go STO and on"[: len(event.token_ids)]


# The wait list


def test_the_wait_list_is_bounded(start: Start) -> None:
    engine = FakeEngine(slots=1, gated=True)
    scheduler = start(engine, max_waiting=2)
    scheduler.submit(a_request("running"))
    wait_for(lambda: engine.admitted == ["running"], "admission")
    scheduler.submit(a_request("w1"))
    scheduler.submit(a_request("w2"))
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        scheduler.submit(a_request("w3"))
    assert scheduler.stats()["waiting"] == 2 and scheduler.stats()["refused"] == 1


def test_submit_can_wait_for_a_place(start: Start) -> None:
    engine = FakeEngine(slots=1)
    scheduler = start(engine, max_waiting=1)
    jobs = [scheduler.submit(a_request(str(i)), wait_s=None) for i in range(30)]
    assert all(read(job)[0].token_ids == [0, 1, 2] for job in jobs)
    assert engine.admitted == [str(i) for i in range(30)]


def test_waiting_for_a_place_ends(start: Start) -> None:
    engine = FakeEngine(slots=1, gated=True)
    scheduler = start(engine, max_waiting=1)
    scheduler.submit(a_request("running"))
    wait_for(lambda: engine.admitted == ["running"], "admission")
    scheduler.submit(a_request("waiting"))
    with pytest.raises(QueueFull):
        scheduler.submit(a_request("late"), wait_s=0.05)


def test_a_request_that_can_never_fit_is_refused_at_submit(start: Start) -> None:
    scheduler = start(FakeEngine(context=10))
    with pytest.raises(RequestError):
        scheduler.submit(a_request("big", prompt=11))
    assert scheduler.stats()["submitted"] == 0


def test_queued_while_loading_and_too_big_fails_alone() -> None:
    loaded = threading.Event()
    engine = FakeEngine(context=10)
    scheduler = Scheduler(lambda: (loaded.wait(WAIT_S), engine)[1])  # type: ignore[arg-type, return-value]
    scheduler.start()
    assert scheduler.health().status == "loading"
    big, small = scheduler.submit(a_request("big", prompt=11)), scheduler.submit(a_request("small"))
    loaded.set()
    assert "context" in (read(big)[0].error or "")
    assert read(small)[0].finish_reason == "length"
    scheduler.shutdown()


def test_an_id_in_use_is_refused(start: Start) -> None:
    engine = FakeEngine(gated=True)
    scheduler = start(engine)
    scheduler.submit(a_request("a"))
    with pytest.raises(RequestError, match="'a'"):
        scheduler.submit(a_request("a"))


def test_submit_does_not_wait_for_a_tick(start: Start) -> None:
    engine = FakeEngine(slots=1, gated=True)
    scheduler = start(engine)
    first = scheduler.submit(a_request("a"))
    wait_for(lambda: engine.admitted == ["a"], "admission")  # the worker now hangs in a tick
    began = time.monotonic()
    for i in range(100):
        scheduler.submit(a_request(f"b{i}"))
    scheduler.stats(), scheduler.health(), first.cancel()
    assert time.monotonic() - began < WAIT_S / 2
    assert engine.ticks == 0


# Cancelling


def test_cancel_while_running_takes_effect_within_a_tick(start: Start) -> None:
    engine = FakeEngine(gated=True)
    scheduler = start(engine)
    job = scheduler.submit(a_request("a", max_tokens=100))
    allow(engine, 2)
    assert job.cancel()
    engine.gate.release(1)  # type: ignore[union-attr]
    event = read(job)[0]
    assert event.finish_reason == "abort" and len(event.token_ids) <= 3
    assert engine.cancelled == ["a"] and not engine.running
    wait_for(lambda: scheduler.stats()["pages_free"] == 2, "fresh numbers although the engine is idle")


def test_cancel_while_waiting_frees_the_place_at_once(start: Start) -> None:
    engine = FakeEngine(slots=1, gated=True)
    scheduler = start(engine, max_waiting=1)
    scheduler.submit(a_request("running"))
    wait_for(lambda: engine.admitted == ["running"], "admission")
    waiting = scheduler.submit(a_request("waiting"))
    assert waiting.cancel()
    scheduler.submit(a_request("next"))  # no QueueFull, although no tick has ended
    engine.gate.release(100)  # type: ignore[union-attr]
    assert read(waiting)[0].finish_reason == "abort"
    wait_for(lambda: scheduler.stats()["finished"] == 2, "the others finish")
    assert engine.admitted == ["running", "next"] and "waiting" not in engine.cancelled


def test_cancel_is_idempotent(start: Start) -> None:
    engine = FakeEngine(gated=True)
    scheduler = start(engine)
    job = scheduler.submit(a_request("a", n=2))
    assert [job.cancel(), job.cancel()] == [True, False]
    engine.gate.release(5)  # type: ignore[union-attr]
    assert [event.finish_reason for event in read(job).values()] == ["abort", "abort"]
    assert not job.cancel() and not scheduler.cancel("nobody")
    assert scheduler.stats()["cancelled"] == 1


def test_an_id_is_free_again_after_the_end(start: Start) -> None:
    scheduler = start(FakeEngine())
    for _ in range(3):
        assert read(scheduler.submit(a_request("a")))[0].finish_reason == "length"


# Death, stalls, the end


def test_worker_death_fails_every_job_with_the_reason(start: Start) -> None:
    engine = FakeEngine(slots=1, gated=True)
    scheduler = start(engine)
    jobs = [scheduler.submit(a_request(name)) for name in "abc"]
    engine.fail = RuntimeError("the device fell off the bus")
    engine.gate.release(1)  # type: ignore[union-attr]
    for job in jobs:
        event = read(job)[0]
        assert event.finish_reason == "error" and "fell off the bus" in (event.error or "")
    assert scheduler.health().status == "dead" and "fell off the bus" in scheduler.health().reason
    with pytest.raises(EngineDead, match="fell off the bus"):
        scheduler.submit(a_request("late"))


def test_a_model_that_cannot_be_built() -> None:
    def build() -> Any:
        raise ValueError("no such model")

    scheduler = Scheduler(build)
    early = scheduler.submit(a_request("early"))
    scheduler.start()
    with pytest.raises(EngineDead, match="no such model") as caught:
        scheduler.wait_ready(WAIT_S)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "no such model" in (read(early)[0].error or "")


def test_a_turn_that_fails_halfway_loses_no_last_event(start: Start, tokenizer: Tokenizer) -> None:
    class Broken:
        """Fails on one token: in the turn in which another job ends."""

        eos_token_ids = ()

        def is_special(self, token_id: int) -> bool:
            return False

        def token_bytes(self, token_id: int) -> bytes:
            if token_id == 250:
                raise KeyError("no such token")
            return b"x"

    engine = FakeEngine(slots=3, gated=True, tokenizer=Broken())
    engine.script = {"ends": [1, 2], "breaks": [1, 250], "held": [1, 2, 3]}
    scheduler = start(engine, max_waiting=8)
    jobs = [scheduler.submit(a_request(name, len(engine.script[name]), stop="xxxx")) for name in engine.script]
    jobs.append(scheduler.submit(a_request("waiting")))
    engine.gate.release(2)  # type: ignore[union-attr]
    ended, *last = [list(job.events())[-1] for job in jobs]
    assert ended.finish_reason == "length" and ended.error is None, "its answer was whole before the other one broke"
    assert all("no such token" in (event.error or "") for event in last)
    assert all(job.finished for job in jobs) and scheduler.health().status == "dead"


def test_what_had_ended_before_the_turn_failed_is_delivered(start: Start) -> None:
    class Fragile(FakeEngine):
        def stats(self) -> dict[str, float]:
            if self.ticks == 3:
                raise RuntimeError("after the tick")
            return super().stats()

    scheduler = start(Fragile())
    done, going = scheduler.submit(a_request("done", 3)), scheduler.submit(a_request("going", 9))
    assert read(done)[0].finish_reason in ("length", "error")
    assert "after the tick" in (read(going)[0].error or "")
    assert read(done) == {} and scheduler.health().status == "dead"


def test_a_delivery_that_fails_is_fatal_and_says_so(start: Start) -> None:
    def deliver(batch: Batch) -> None:
        raise RuntimeError("the event loop is closed")

    scheduler = start(FakeEngine(), deliver=deliver)
    scheduler.submit(a_request("a"))
    wait_for(lambda: scheduler.health().status == "dead", "death")
    assert "event loop" in scheduler.health().reason


def test_an_engine_that_lost_its_pages_does_not_hang(start: Start) -> None:
    engine = FakeEngine()
    engine.lost_pages = True
    scheduler = start(engine)
    assert "pages were lost" in (read(scheduler.submit(a_request("a")))[0].error or "")
    assert scheduler.health().status == "dead"


def test_one_bad_request_fails_alone(start: Start) -> None:
    engine = FakeEngine(slots=4)
    engine.bad = {"bad"}
    scheduler = start(engine)
    bad, good = scheduler.submit(a_request("bad", n=2)), scheduler.submit(a_request("good"))
    assert {event.error for event in read(bad).values()} == {"not finite"}
    assert read(good)[0].finish_reason == "length"
    assert scheduler.health().status == "ready" and scheduler.stats()["failed"] == 1


def test_a_hanging_tick_shows_as_stalled_and_recovers(start: Start) -> None:
    now = [0.0]
    engine = FakeEngine(gated=True)
    scheduler = start(engine, stall_after_s=5.0, clock=lambda: now[0])
    now[0] = 100.0
    assert scheduler.health().status == "ready", "an idle worker is not stalled"
    job = scheduler.submit(a_request("a", max_tokens=2))
    now[0] = 104.0
    assert scheduler.health().status == "ready"
    now[0] = 106.0
    assert scheduler.health().status == "stalled" and "1 requests are pending" in scheduler.health().reason
    engine.gate.release(10)  # type: ignore[union-attr]
    read(job)
    assert scheduler.health().status == "ready"


def test_drain_lets_the_running_finish_and_takes_nothing_new(start: Start) -> None:
    engine = FakeEngine(slots=1, gated=True)
    scheduler = start(engine)
    jobs = [scheduler.submit(a_request(name)) for name in "ab"]
    closing = threading.Thread(target=scheduler.shutdown, args=(WAIT_S,))
    closing.start()
    wait_for(lambda: scheduler.health().status == "draining", "draining")
    with pytest.raises(EngineDead, match="shutting down"):
        scheduler.submit(a_request("late"))
    engine.gate.release(100)  # type: ignore[union-attr]
    assert [read(job)[0].finish_reason for job in jobs] == ["length", "length"]
    closing.join(WAIT_S)
    assert not closing.is_alive() and scheduler.health().status == "dead"


def test_what_does_not_finish_in_time_fails_with_a_sentence(start: Start) -> None:
    engine = FakeEngine(slots=1, gated=True)
    scheduler = start(engine)
    jobs = [scheduler.submit(a_request(name, max_tokens=900)) for name in "ab"]
    allow(engine, 1)
    engine.gate.release(1)  # type: ignore[union-attr]
    scheduler.shutdown(drain_s=0.0)
    for job in jobs:
        event = read(job)[0]
        assert event.finish_reason == "error" and "shutting down" in (event.error or "")
    assert not scheduler._thread.is_alive()


def test_shutdown_twice_and_before_start() -> None:
    scheduler = Scheduler(lambda: FakeEngine())  # type: ignore[arg-type, return-value]
    job = scheduler.submit(a_request("a"))
    scheduler.shutdown()
    scheduler.shutdown()
    assert "shutting down" in (read(job)[0].error or "")


def test_a_worker_that_never_returns_is_left_behind(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helios.engine.worker.JOIN_S", 0.05)
    engine = FakeEngine(gated=True)
    scheduler = start(engine)
    job = scheduler.submit(a_request("a"))
    wait_for(lambda: engine.admitted == ["a"], "admission")
    scheduler.shutdown()
    assert [event.finish_reason for event in job.events()] == ["error"]
    engine.gate.release(100)  # type: ignore[union-attr]
    scheduler._thread.join(WAIT_S)
    assert list(job.events()) == [], "the late tick said nothing more"


# Many threads, slow readers


def test_submit_from_many_threads(start: Start) -> None:
    scheduler = start(FakeEngine(slots=4), max_waiting=1000, debug_checks=True)
    jobs: list[Job] = []

    def client(number: int) -> None:
        for i in range(25):
            job = scheduler.submit(a_request(f"{number}-{i}", max_tokens=1 + i % 5))
            if i % 7 == 3:
                job.cancel()
            jobs.append(job)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in jobs:
        event = read(job)[0]
        assert event.finish_reason in ("length", "abort")
        if event.finish_reason == "length":
            assert event.token_ids == list(range(job.request.params.max_tokens or 0))
    stats = scheduler.stats()
    assert stats["submitted"] == 200 == stats["finished"] + stats["cancelled"]
    assert stats["running"] == stats["waiting"] == 0
    scheduler.check()


def test_check_runs_after_every_turn_in_debug(start: Start) -> None:
    engine = FakeEngine()
    scheduler = start(engine, debug_checks=True)
    read(scheduler.submit(a_request("a", max_tokens=6)))
    scheduler.shutdown()
    assert engine.checks >= engine.ticks == 6


def test_check_finds_a_lost_job(start: Start) -> None:
    engine = FakeEngine(slots=1, gated=True)
    scheduler = start(engine)
    scheduler.submit(a_request("a"))
    wait_for(lambda: engine.admitted == ["a"], "admission")
    scheduler.submit(a_request("b"))
    scheduler.check()
    lost = scheduler._waiting.pop("b")
    with pytest.raises(AssertionError, match="neither waiting nor running"):
        scheduler.check()
    scheduler._waiting["b"] = lost


def test_nobody_reads_and_the_worker_goes_on(start: Start) -> None:
    scheduler = start(FakeEngine(slots=2, context=10_000))
    unread = scheduler.submit(a_request("unread", max_tokens=5000, n=2))
    wait_for(lambda: unread.finished, "the unread job finishes")
    assert len(unread._unread) == 2, "one event a choice, however many ticks went by"
    merged = read(unread)
    assert merged[0].token_ids == merged[1].token_ids == list(range(5000))


def test_an_idle_worker_sleeps(start: Start) -> None:
    engine = FakeEngine()
    scheduler = start(engine)
    read(scheduler.submit(a_request("a")))
    wait_for(lambda: scheduler.stats()["ticks"] == engine.ticks, "rest")
    before = scheduler.stats()["ticks"]
    time.sleep(0.05)
    assert scheduler.stats()["ticks"] == before


def test_stats_count(start: Start) -> None:
    scheduler = start(FakeEngine(slots=8))
    for job in [scheduler.submit(a_request(str(i), max_tokens=5)) for i in range(4)]:
        read(job)
    stats = scheduler.stats()
    assert (stats["prompt_tokens"], stats["cached_tokens"], stats["generated_tokens"]) == (16, 28, 20)
    assert stats["tokens_per_s"] == pytest.approx(20 / 5.0)


def test_max_waiting_must_leave_room() -> None:
    with pytest.raises(ValueError, match="max_waiting"):
        Scheduler(lambda: FakeEngine(), max_waiting=0)  # type: ignore[arg-type, return-value]


def test_shutdown_while_loading_returns_at_once(start: Start) -> None:
    loaded = threading.Event()
    scheduler = Scheduler(lambda: (loaded.wait(WAIT_S), FakeEngine())[1])  # type: ignore[arg-type, return-value]
    scheduler.start()
    job = scheduler.submit(a_request("early"))
    began = time.monotonic()
    scheduler.shutdown(drain_s=WAIT_S)
    assert time.monotonic() - began < WAIT_S / 2
    assert "shutting down" in (read(job)[0].error or "") and scheduler.health().status == "dead"
    assert scheduler.alive, "building cannot be interrupted"
    loaded.set()
    wait_for(lambda: not scheduler.alive, "the thread ends by itself")
    with pytest.raises(EngineDead):
        scheduler.wait_ready(WAIT_S)
