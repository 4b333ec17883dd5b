"""Reading late: the mailbox and the pipeline, and the engine that uses them against the engine that does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helios.engine.build import build_engine, choose_engine
from helios.engine.config import EngineConfig
from helios.engine.engine import Engine
from helios.engine.runner import TickInputs
from helios.engine.scheduler import Scheduler
from helios.engine.sequence import Request, TokenEvent
from helios.fast.buckets import DirectLink, Draws
from helios.fast.graphs import ReplayByCalling, assemble
from helios.fast.late import LateEngine
from helios.fast.pipeline import Ask, LateResults, Pipeline
from helios.kv.prefix import PrefixCache
from helios.model.config import tiny_config
from helios.model.params import SamplingParams
from helios.model.tokenizer import Tokenizer
from tests.unit.fake_model import (
    EOS,
    VOCAB,
    FakeModel,
    Log,
    Script,
    all_pages_return,
    expected,
    five_take_turns,
    greedy,
    words,
)
from tests.unit.lagging import GuardedPool, LaggingModel, LateLink, random_lag

# The mailbox and the pipeline


def test_results_come_in_order_and_only_once_their_copy_is_done() -> None:
    link = LateLink()
    late = LateResults(link, 3)
    late.send(torch.tensor([11, 12, 13]), "abc")
    late.send(torch.tensor([21, 22]), "ab")
    assert link.done == 0, "sending waits for nothing"
    assert late.receive() == [("a", 11), ("b", 12), ("c", 13)] and link.done == 1
    late.send(torch.tensor([31]), "a")
    assert late.receive() == [("a", 21), ("b", 22)]
    assert late.receive() == [("a", 31)] and len(late) == 0


def test_a_third_step_is_refused_before_it_overwrites_the_first() -> None:
    late = LateResults(LateLink(), 1)
    late.send(torch.tensor([1]), "a")
    late.send(torch.tensor([2]), "a")
    with pytest.raises(RuntimeError, match="receive one"):
        late.send(torch.tensor([3]), "a")
    assert late.receive() == [("a", 1)]


def test_what_was_computed_past_an_end_is_thrown_away() -> None:
    late = LateResults(DirectLink(), 2)
    late.send(torch.tensor([1, 2]), "ab")
    assert late.receive() == [("a", 1), ("b", 2)]
    late.send(torch.tensor([3, 4]), "ab")
    assert late.forget("a") == 1 and late.forget("nobody") == 0
    assert late.receive() == [("b", 4)]


class Launched:
    """A launch that chooses 100 · step + row, and notes what it was given."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []

    def __call__(self, inputs: TickInputs, draws: Draws) -> Tensor:
        self.ids.append(inputs.token_ids.tolist())
        return 100 * len(self.ids) + torch.arange(len(inputs.spans))


def ask(owner: str, position: int, token_id: int | None = None) -> Ask:
    return Ask(owner, position, [1], token_id)


def test_a_pipeline_refers_to_rows_and_is_one_step_behind() -> None:
    launched = Launched()
    pipeline = Pipeline(launched, LateResults(DirectLink(), 4))
    assert pipeline.step([ask("a", 0, 7), ask("b", 0, 8), ask("c", 0, 9)]) == []
    assert pipeline.step([ask("c", 1), ask("a", 1), ask("d", 4, 5)]) == [("a", 100), ("b", 101), ("c", 102)]
    assert len(pipeline) == 1 and "a" in pipeline and "b" not in pipeline
    assert pipeline.drop("a") == 1 and "a" not in pipeline
    assert pipeline.step([ask("d", 5)]) == [("c", 200), ("d", 202)]
    assert pipeline.drain() == [("d", 300)] and pipeline.drain() == [] and len(pipeline) == 0
    assert launched.ids == [[7, 8, 9], [-3, -1, 5], [-3]]
    with pytest.raises(KeyError):  # after a drain the host knows all tokens and must give them
        pipeline.step([ask("d", 6)])


# The engine


def make(late: bool, pages: int = 64, script: Script | None = None, prefix: bool = True, **settings: Any) -> Engine:
    """An engine over a lagging device; `lag` and `rows` are the device's, other settings the engine's."""
    device = {name: settings.pop(name) for name in ("lag", "rows") if name in settings}
    model: Any = SimpleNamespace(config=tiny_config(vocab_size=VOCAB, context=2048, eos_token_ids=(EOS,)))
    fake: Any = LaggingModel(pages + 1, script, **device)
    pool = GuardedPool(pages + 1, fake)
    kind = LateEngine if late else Engine
    config = EngineConfig(debug_checks=True, **settings)
    return kind(model, fake, pool, PrefixCache(pool) if prefix else None, config, runner=fake)


def late_engine(**settings: Any) -> Any:
    return make(True, **settings)


def ends_after(tokens: int, prompt: int, token: int = EOS) -> Script:
    return lambda history: token if len(history) == prompt + tokens - 1 else None


def test_tokens_come_one_tick_later_and_an_end_by_length_costs_nothing() -> None:
    engine = late_engine()
    log = Log(engine)
    engine.admit(greedy("a", words(10), 5))
    heard = []
    while engine.running_count:
        log.tick()
        heard.append(len(log.ids("a")))
    assert heard == [1, 1, 2, 3, 4, 5], "the prompt's token at once; then a step is launched first, and read a tick on"
    assert log.ids("a") == expected(words(10), 5) and log.last("a").finish_reason == "length"
    assert engine.runner.launches == [[log.ids("a")[0]], [-1], [-1], [-1]], "the last token is not fed back"
    assert engine.surplus == 0 and len(engine._pipeline) == 0
    assert engine.stats()["ticks_total"] == 5 and engine.stats()["output_tokens_total"] == 5
    all_pages_return(engine)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_stop_token_costs_one_token_and_holds_pages_for_one_step(prefix: bool) -> None:
    engine = late_engine(script=ends_after(4, 10), prefix=prefix)
    log = Log(engine)
    engine.admit(greedy("other", words(20), 30))
    engine.admit(greedy("a", words(10), 9))
    while ("a", 0) not in log.events or log.last("a").finish_reason is None:
        log.tick()
    assert log.ids("a") == [*expected(words(10), 3), EOS] and log.last("a").finish_reason == "stop"
    assert engine.surplus == 1 and engine.running_count == 1
    held = engine.pool.capacity - engine.pool.free_count
    log.tick()
    assert engine.pool.capacity - engine.pool.free_count == held - 1, "now the surplus step is read"
    log.drain()
    assert log.ids("other") == expected(words(20), 30) and engine.surplus == 1
    all_pages_return(engine)


@pytest.mark.parametrize("how", ["finish", "cancel"])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_an_end_from_outside_throws_away_what_is_under_way(how: str, after: int) -> None:
    engine = late_engine(prefill_chunk_size=1000)
    log = Log(engine)
    engine.admit(greedy("a", words(300), 20))
    engine.admit(greedy("b", words(40, seed=1), 12))
    while len(log.ids("a")) < after:
        log.tick()
    assert engine.finish("a", 0, "stop") if how == "finish" else engine.cancel("a")
    engine.check()
    assert engine.surplus == (after > 1), "a token was under way, except right after the prompt"
    log.drain()
    assert log.ids("a") == expected(words(300), after) and log.ids("b") == expected(words(40, seed=1), 12)
    all_pages_return(engine)
    engine.admit(greedy("again", [*words(300), 1], 3))
    assert log.drain().last("again").cached_tokens == 256, "what was computed stays shareable"


@pytest.mark.parametrize("how", ["finish", "cancel"])
def test_when_the_last_one_goes_nothing_stays_under_way(how: str) -> None:
    """The scheduler asks for no tick when nobody runs."""
    engine = late_engine()
    log = Log(engine)
    engine.admit(greedy("a", words(300), 20))
    log.tick(4)
    assert len(engine._pipeline) == 1
    assert engine.finish("a", 0, "stop") if how == "finish" else engine.cancel("a")
    assert engine.running_count == 0 and len(engine._pipeline) == 0 and not engine._leaving
    assert engine.tick(1.0) == [] and engine.surplus == 1
    all_pages_return(engine)


def test_a_page_waits_for_the_step_that_writes_to_it() -> None:
    engine = late_engine(pages=2, prefix=False)
    log = Log(engine)
    engine.admit(greedy("a", words(5), 20))
    engine.admit(greedy("b", words(6), 20))
    log.tick(4)
    assert not engine.can_admit(greedy("c", words(7), 5))
    engine.cancel("a")
    assert engine.runner.pages_written() and not engine.can_admit(greedy("c", words(7), 5))
    log.tick()
    assert engine.can_admit(greedy("c", words(7), 5))
    engine.admit(greedy("c", words(7), 5))
    log.drain()
    assert log.ids("b") == expected(words(6), 20) and log.ids("c") == expected(words(7), 5)
    all_pages_return(engine)


def test_without_the_wait_a_page_is_handed_out_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of these tests does see the mistake."""
    monkeypatch.setattr(LateEngine, "_release", Engine._release)
    engine = make(True, pages=2, prefix=False)
    engine.admit(greedy("a", words(5), 20))
    engine.admit(greedy("b", words(6), 20))
    log = Log(engine)
    log.tick(4)
    engine.cancel("a")
    with pytest.raises(AssertionError, match="still written to"):
        engine.admit(greedy("c", words(7), 5))


@pytest.mark.parametrize("n", [1, 2])
def test_a_row_that_is_not_finite_fails_its_request_alone(n: int) -> None:
    sick = [1, *words(9)]
    engine = late_engine(script=lambda history: -1 if history[0] == 1 and len(history) > 14 else None)
    log = Log(engine)
    engine.admit(greedy("sick", sick, 30, n=n))
    engine.admit(greedy("well", [2, *words(9)], 30))
    log.drain()
    assert log.ids("well") == expected([2, *words(9)], 30)
    for index in range(n):
        assert log.ids("sick", index)[-1] == -1 and "not finite" in (log.last("sick", index).error or "")
        assert log.ids("sick", index)[:4] == expected(sick, 4)
    assert engine.stats()["failed_total"] == n and engine.surplus == n
    all_pages_return(engine)
    assert not any(engine.runner.store[0]), "wiped pages are copies of a clean one"


def test_a_tick_that_is_no_plain_decode_waits_for_what_is_under_way() -> None:
    engine = late_engine(prefill_chunk_size=64)
    log = Log(engine)
    engine.admit(greedy("a", words(10), 30))
    log.tick(5)
    assert len(engine._pipeline) == 1
    engine.admit(greedy("long", words(200), 3))
    had = len(log.ids("a"))
    log.tick()
    assert len(log.ids("a")) == had + 1 and len(engine._pipeline) == 0 and not engine.last_plan.shares
    log.tick()
    assert len(log.ids("a")) == had + 2 and engine.last_plan.tokens == 64, "an ordinary tick: prompt and decode"
    log.drain()
    assert log.ids("a") == expected(words(10), 30) and log.ids("long") == expected(words(200), 3)


PICKY: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"repetition_penalty": 1.3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 5},
    {"logit_bias": {3: 4.0}},
    {"min_tokens": 8},
]


@pytest.mark.parametrize("params", PICKY)
def test_rows_that_only_the_host_can_choose_keep_ticks_ordinary(params: dict[str, Any]) -> None:
    engine = late_engine()
    engine.admit(Request("a", words(5), SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "seed": 1} | params)))
    engine.admit(greedy("plain", words(6), 20))
    log = Log(engine)
    log.tick(7)
    assert not engine.runner.launches, "with one such row nothing is launched ahead"
    log.drain()
    assert engine.runner.launches, "and once it has gone, everything is"
    assert log.ids("plain") == expected(words(6), 20)


def test_a_constraint_keeps_ticks_ordinary() -> None:
    class Anything:
        def fork(self) -> Anything:
            return self

        def mask(self) -> None:
            return None

        def accept(self, token_id: int) -> bool:
            return False

    engine = late_engine()
    request = greedy("a", words(5), 6)
    request.constraint = Anything()  # type: ignore[assignment]
    engine.admit(request)
    assert Log(engine).drain().ids("a") == expected(words(5), 6) and not engine.runner.launches


def test_steps_too_wide_for_the_runner_are_ordinary() -> None:
    engine = late_engine(rows=2)
    log = Log(engine)
    for name, tokens in (("a", 30), ("b", 20), ("c", 6)):
        engine.admit(greedy(name, words(5), tokens))
    log.drain()
    assert all(log.ids(name) == expected(words(5), tokens) for name, tokens in (("a", 30), ("b", 20), ("c", 6)))
    assert {len(launch) for launch in engine.runner.launches} == {1, 2}


def test_more_sequences_than_budget_take_turns() -> None:
    engine = late_engine(prefill_chunk_size=2)
    log = five_take_turns(engine)
    log.drain()
    assert all(log.ids(f"{i}") == expected(words(1, seed=i), 99) for i in range(5))
    mixed = [launch for launch in engine.runner.launches if len({token < 0 for token in launch}) == 2]
    assert mixed, "who was not in the step before gives a token that the host knows"


def test_an_answer_to_the_end_of_the_context() -> None:
    engine = late_engine(max_context=300)
    engine.admit(greedy("a", words(290), None))
    log = Log(engine).drain()
    assert log.ids("a") == expected(words(290), 10) and log.last("a").finish_reason == "length"
    assert engine.surplus == 0


def test_the_warm_up_leaves_no_trace() -> None:
    engine = late_engine()
    engine.warm_up()
    assert engine.stats()["ticks_total"] == 0 and engine.running_count == 0 and len(engine._pipeline) == 0
    all_pages_return(engine)


def test_a_runner_that_cannot_launch_is_refused() -> None:
    assert not hasattr(FakeModel(2), "launch")
    model: Any = SimpleNamespace(config=tiny_config(vocab_size=VOCAB, context=2048))
    fake: Any = FakeModel(9)
    with pytest.raises(ValueError, match="use Engine"):
        LateEngine(model, fake, GuardedPool(9, fake), None, EngineConfig(), runner=fake)


def test_the_engine_follows_from_the_runner() -> None:
    assert choose_engine(SimpleNamespace(choosing=True)) is LateEngine  # type: ignore[arg-type]
    assert choose_engine(SimpleNamespace(choosing=False)) is Engine  # type: ignore[arg-type]
    assert choose_engine(FakeModel(2)) is Engine


def test_a_runner_that_launches_is_given_this_engine(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded(model: Any, cache: Any, config: EngineConfig) -> tuple[str, Any, str]:
        return "graphs", *assemble(model, cache, config, ReplayByCalling(), DirectLink(), 6)

    monkeypatch.setattr("helios.engine.build.choose_runner", recorded)
    config = EngineConfig(
        model=str(tiny_folder("qwen3")), dtype="float32", kv_pages=8, device="cpu", max_context=512, max_batch_size=4
    )
    engine: Any = build_engine(config)
    assert type(engine) is LateEngine and engine.report["results"].startswith("read one step late")
    assert engine.pool.free_count == 8 and engine.stats()["ticks_total"] == 0 and not engine.runner.ticks["eager"]
    told = Log(engine)
    engine.admit(greedy("a", [1, 2, 3], 6, ignore_eos=True))
    assert len(told.drain().ids("a")) == 6
    monkeypatch.undo()
    assert type(build_engine(config)) is Engine


# Under the scheduler


def served(late: bool, tokenizer: Tokenizer, stop: list[str]) -> tuple[Any, list[tuple[str, str, str | None]]]:
    """What clients are told over a real scheduler, and the engine, which the scheduler has left idle."""
    engine: Any = make(late, script=lambda history: 5 if len(history) % 11 == 0 else None)
    engine.tokenizer = tokenizer
    scheduler = Scheduler(lambda: engine, debug_checks=True)
    scheduler.start()
    jobs = [
        scheduler.submit(Request(f"{i}", words(4 + i), SamplingParams(temperature=0.0, max_tokens=40, stop=stop)))
        for i in range(6)
    ]
    told = []
    for job in jobs:
        events = list(job.events())
        told.append((job.id, "".join(event.text for event in events), events[-1].finish_reason))
    scheduler.shutdown(5.0)
    assert not scheduler.alive
    return engine, told


def test_a_stop_string_ends_an_answer_as_in_the_ordinary_engine(tiny_folder: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.from_folder(tiny_folder("qwen3"))
    stop = [tokenizer.decode([5])]
    ordinary, late = served(False, tokenizer, stop), served(True, tokenizer, stop)
    assert late[1] == ordinary[1] and {reason for _, _, reason in late[1]} == {"stop"}
    engine = late[0]
    assert engine.surplus > 0 and len(engine._pipeline) == 0 and engine.running_count == 0
    all_pages_return(engine)


def test_an_engine_that_is_shut_down_with_a_step_under_way_fails_its_jobs() -> None:
    engine = late_engine()
    scheduler = Scheduler(lambda: engine)
    scheduler.start()
    job = scheduler.submit(greedy("a", words(5), 2000))
    next(iter(job.events()))
    scheduler.shutdown()
    assert list(job.events())[-1].finish_reason == "error" and not scheduler.alive


# Against the ordinary engine


@dataclass
class Story:
    """Requests in order of arrival, each with what its client does when choice 0 has so many tokens."""

    requests: list[Request]
    acts: dict[str, tuple[int, str]]
    arrivals: list[int]  # in ticks
    script: Script
    settings: dict[str, Any]


def some_params(rng: random.Random) -> SamplingParams:
    plain = [{"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.5}, {"temperature": 0.7}, {"temperature": 1.3}]
    picky = rng.choice(PICKY) if rng.random() < 0.12 else {}
    return SamplingParams(
        **{
            **rng.choice(plain),
            "seed": rng.randrange(1000),
            "max_tokens": rng.choice([9, 30] if "min_tokens" in picky else [1, 2, 3, 9, 30, 30, 90]),
            "n": rng.choice([1, 1, 1, 2, 3]),
            "ignore_eos": rng.random() < 0.3,
            "stop_token_ids": rng.choice([None, None, [9], [9, 11]]),
            **picky,
        }
    )


def tell_story(seed: int) -> Story:
    rng = random.Random(seed)
    requests, acts, salts = [], {}, [b"", b"", b"one"]
    for i in range(rng.randint(3, 12)):
        prompt = words(rng.choice([1, 2, 20, 230, 255, 256, 257, 300]), seed=rng.randrange(3))
        if rng.random() < 0.1:
            prompt[0] = 1  # it will fall ill
        requests.append(Request(f"{i}", prompt, some_params(rng), salt=rng.choice(salts), arrival_s=0.0))
        if rng.random() < 0.3:
            acts[f"{i}"] = rng.randint(1, 12), rng.choice(["finish", "cancel"])

    ill = rng.randint(3, 300)

    def script(history: Any) -> int | None:
        length = len(history)
        if history[0] == 1 and length > ill:
            return -1
        return EOS if (length * 31 + history[-1] * 17 + history[0]) % 97 == 5 else None

    settings = {
        "pages": rng.choice([10, 14, 40]),
        "prefix": rng.random() < 0.7,
        "max_batch_size": rng.choice([3, 4, 8]),
        "prefill_chunk_size": rng.choice([7, 64, 256, 700]),
        "rows": rng.choice([2, 100, 100, 100]),
    }
    busy = rng.choice([0, 3, 40])
    return Story(requests, acts, sorted(rng.randint(0, busy * len(requests)) for _ in requests), script, settings)


Answers = dict[tuple[str, int], list[TokenEvent]]


def live(story: Story, late: bool, lag: Callable[[], int]) -> tuple[Any, Answers]:
    engine: Any = make(late, script=story.script, lag=lag, **story.settings)
    told: Answers = {}
    waiting, arrivals, acts, tick = list(story.requests), list(story.arrivals), dict(story.acts), 0
    while waiting or engine.running_count:
        while waiting and arrivals[0] <= tick and engine.can_admit(waiting[0]):
            engine.admit(waiting.pop(0))
            arrivals.pop(0)
        events = engine.tick(0.01 * tick)
        assert len({(e.request_id, e.index) for e in events}) == len(events), "one event a choice and tick"
        for event in events:
            told.setdefault((event.request_id, event.index), []).append(event)
        for name, (tokens, how) in list(acts.items()):
            if len(told.get((name, 0), [])) >= tokens:
                del acts[name]
                engine.cancel(name) if how == "cancel" else engine.finish(name, 0, "stop")
                engine.check()
        tick += 1
        assert tick < 30_000, "it does not come to an end"
    assert len(getattr(engine, "_pipeline", ())) == 0
    engine.check()
    all_pages_return(engine)
    return engine, told


def told_of(event: TokenEvent) -> tuple[Any, ...]:
    return event.token_id, event.logprob, event.finish_reason, event.error, event.complete


@pytest.mark.parametrize("seed", range(200))
def test_the_same_is_told_as_by_the_ordinary_engine(seed: int) -> None:
    story = tell_story(seed)
    ordinary, expected_events = live(story, False, lambda: 0)
    late, events = live(story, True, random_lag(seed))
    ended_together = {name for name, (_, how) in story.acts.items() if how == "cancel"} | {
        name for (name, _), told in expected_events.items() if told[-1].error
    }
    assert events.keys() == expected_events.keys()
    for key, told in expected_events.items():
        mine, theirs = [told_of(event) for event in events[key]], [told_of(event) for event in told]
        if key[1] == 0 or key[0] not in ended_together:
            assert mine == theirs, key
        else:  # its end came with that of another choice, which may have been given turns at other times
            common = min(len(mine), len(theirs)) - 1
            assert mine[:common] == theirs[:common], key
    for total in ("prompt_tokens_total", "failed_total"):
        assert late.stats()[total] == ordinary.stats()[total]
    asked = {request.id: request.params.max_tokens for request in story.requests}
    early = [key for key, told in events.items() if len(told) < (asked[key[0]] or 0)]
    assert late.surplus <= len(early), "one token for an end before the last allowed, none for the others"
