"""Constrained choices in the engine: what they may say, when they end, how they fail, and that nobody else notices."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from helios.engine.constraint import BROKEN, MaskPool
from helios.engine.engine import NOT_FINITE, Engine
from helios.engine.job import Choice
from helios.engine.runner import TickInputs
from helios.engine.scheduler import Scheduler
from helios.engine.sequence import Request, TokenEvent
from helios.model.masks import Mask, pack_mask
from helios.model.params import RequestError, SamplingParams
from helios.model.tokenizer import Tokenizer
from tests.unit.fake_model import (
    EOS,
    VOCAB,
    FakeModel,
    Log,
    all_pages_return,
    expected,
    greedy,
    logits_after,
    make_engine,
    words,
)

CYCLE = (3, 11, 40, 5)


class Cycle:
    """Allows the tokens of a cycle in turn, `width` of them at a time, and is complete after `until` tokens."""

    def __init__(self, until: int = 6, width: int = 1, said: tuple[int, ...] = (), vocab: int = VOCAB) -> None:
        self.until, self.width, self.said, self.vocab = until, width, said, vocab

    def options(self) -> list[int]:
        return [CYCLE[(len(self.said) + i) % len(CYCLE)] for i in range(self.width)]

    def mask(self) -> Mask | None:
        return pack_mask(self.options(), self.vocab)

    def accept(self, token_id: int) -> bool:
        assert token_id in self.options(), "the mask was not heeded"
        self.said += (token_id,)
        return len(self.said) == self.until

    def fork(self) -> Any:
        return type(self)(self.until, self.width, self.said, self.vocab)


class Fragile(Cycle):
    """Breaks in the method and after the number of tokens that `breaks` says."""

    breaks = ("mask", 0)

    def check(self, method: str) -> None:
        if (method, len(self.said)) == self.breaks:
            raise ValueError("/home/secret/grammar.lark, line 3")

    def mask(self) -> Mask | None:
        self.check("mask")
        return super().mask()

    def accept(self, token_id: int) -> bool:
        self.check("accept")
        return super().accept(token_id)

    def fork(self) -> Any:
        self.check("fork")
        return super().fork()


def constrained(name: str, prompt: list[int], constraint: Any, tokens: int = 20, **params: Any) -> Request:
    request = greedy(name, prompt, tokens, **params)
    request.constraint = constraint
    return request


def best_of_cycle(prompt: list[int], tokens: int, width: int) -> list[int]:
    """The greedy answer of the fake model that keeps to the cycle."""
    history = list(prompt)
    for i in range(tokens):
        options = [CYCLE[(i + k) % len(CYCLE)] for k in range(width)]
        history.append(max(options, key=lambda token: float(logits_after(history)[token])))
    return history[len(prompt) :]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("chunk", [7, 256, 1000])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_constrained_answer_is_the_likeliest_that_is_allowed(width: int, chunk: int, prefix: bool) -> None:
    engine = make_engine(prefill_chunk_size=chunk, prefix=prefix)
    log = Log(engine)
    for round_ in ("cold", "warm"):
        for length in (1, 40, 257):
            engine.admit(constrained(f"{round_} {length}", words(length), Cycle(width=width)))
        log.drain()
        for length in (1, 40, 257):
            name = f"{round_} {length}"
            assert log.ids(name) == best_of_cycle(words(length), 6, width)
            assert log.last(name).finish_reason == "stop" and log.last(name).complete
    assert prefix == (log.last("warm 257").cached_tokens == 256)
    all_pages_return(engine)


def answers_in_company(constraint: Any) -> list[Any]:
    """All that is said to ten ordinary requests while four others, constrained or not, are served beside them."""
    engine = make_engine()
    for i in range(4):
        engine.admit(constrained(f"beside {i}", words(30 + i), constraint and constraint(), 9))
    for i in range(10):
        params = SamplingParams(temperature=i / 5, top_p=0.9, max_tokens=12, seed=i, logprobs=3, n=1 + i % 2)
        engine.admit(Request(f"{i}", words(50, seed=i), params, arrival_s=0.0))
    log = Log(engine).drain()
    return [events for (name, _), events in sorted(log.events.items()) if not name.startswith("beside")]


def test_ordinary_requests_do_not_notice_constrained_ones() -> None:
    assert answers_in_company(None) == answers_in_company(Cycle) == answers_in_company(Fragile)


def test_completion_on_the_last_allowed_token_is_a_stop() -> None:
    for tokens, reason in ((6, "stop"), (5, "length"), (7, "stop")):
        engine = make_engine()
        engine.admit(constrained("a", words(10), Cycle(), tokens))
        log = Log(engine).drain()
        assert (len(log.ids("a")), log.last("a").finish_reason) == (min(tokens, 6), reason)
        assert log.last("a").complete == (reason == "stop")


@pytest.mark.parametrize("prompt", [20, 256, 300])
def test_each_choice_goes_its_own_way(prompt: int) -> None:
    prototype = Cycle(until=8, width=4)
    engine = make_engine()
    params = SamplingParams(n=4, seed=3, max_tokens=20)
    engine.admit(Request("a", words(prompt), params, arrival_s=0.0, constraint=prototype))
    log = Log(engine).drain()
    answers = [log.ids("a", i) for i in range(4)]
    assert all(len(ids) == 8 and set(ids) <= set(CYCLE) for ids in answers) and len(set(map(tuple, answers))) == 4
    assert prototype.said == (), "the request's own constraint is a prototype"
    all_pages_return(engine)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("breaks", [("mask", 0), ("mask", 2), ("accept", 0), ("accept", 3)])
def test_what_a_constraint_raises_ends_its_own_request_with_a_sentence(
    breaks: tuple[str, int], n: int, caplog: pytest.LogCaptureFixture
) -> None:
    fragile = type("Fragile", (Fragile,), {"breaks": breaks})
    engine = make_engine()
    engine.admit(constrained("sick", words(300), fragile(), n=n))
    engine.admit(constrained("well", words(200), Cycle(until=9, width=2)))
    engine.admit(greedy("free", words(30), 9))
    log = Log(engine).drain()
    for index in range(n):
        assert log.last("sick", index).finish_reason == "error" and log.last("sick", index).error == BROKEN
        assert log.ids("sick", index)[:-1] == best_of_cycle(words(300), breaks[1], 1)[: len(log.ids("sick", index)) - 1]
    assert log.ids("well") == best_of_cycle(words(200), 9, 2) and log.ids("free") == expected(words(30), 9)
    assert "secret" not in BROKEN and "line 3" in caplog.text, "the cause is for the log"
    assert engine.stats()["failed_total"] == n
    all_pages_return(engine)


def test_a_constraint_that_cannot_be_copied_is_refused_at_the_door() -> None:
    fragile = type("Fragile", (Fragile,), {"breaks": ("fork", 0)})
    engine = make_engine()
    with pytest.raises(RequestError, match="format"):
        engine.admit(constrained("sick", words(300), fragile()))
    engine.check()
    assert engine.running_count == 0 and engine.pool.free_count == engine.pool.capacity


@pytest.mark.parametrize("mask", ["a mask", [2**40], object()])
def test_a_mask_that_is_none_fails_its_request(mask: Any) -> None:
    engine = make_engine()
    engine.admit(constrained("sick", words(5), type("Odd", (Cycle,), {"mask": lambda self: mask})()))
    assert Log(engine).drain().last("sick").error == BROKEN


class Ending(Cycle):
    """The cycle, and then nothing."""

    def options(self) -> list[int]:
        return [] if len(self.said) == self.until else super().options()

    def accept(self, token_id: int) -> bool:
        super().accept(token_id)
        return False


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("until", [0, 3])
def test_a_mask_that_allows_nothing_ends_the_choice(until: int, n: int) -> None:
    engine = make_engine()
    engine.admit(constrained("a", words(260), Ending(until), n=n))
    log = Log(engine).drain()
    for index in range(n):
        assert log.ids("a", index) == [*best_of_cycle(words(260), until, 1), -1]
        assert log.last("a", index).finish_reason == "stop" and log.last("a", index).error is None
    assert engine.stats()["output_tokens_total"] == until * n
    all_pages_return(engine)


class Only(Cycle):
    """Allows some ids after `until` tokens of the cycle; what it is not told of does not count."""

    def __init__(self, *arguments: Any, ids: tuple[int, ...] = (EOS,)) -> None:
        super().__init__(*arguments)
        self.ids = ids

    def options(self) -> list[int]:
        return list(self.ids) if len(self.said) >= self.until else super().options()

    def accept(self, token_id: int) -> bool:
        assert token_id != EOS, "a token that ends the text is the engine's business"
        super().accept(token_id)
        return False

    def fork(self) -> Any:
        return Only(self.until, self.width, self.said, self.vocab, ids=self.ids)


@pytest.mark.parametrize("params", [{}, {"ignore_eos": True}, {"min_tokens": 10}, {"min_tokens": 10, "n": 2}])
def test_where_only_the_end_is_allowed_it_ends(params: dict[str, Any]) -> None:
    engine = make_engine()
    engine.admit(constrained("a", words(10), Only(3), **params))
    log = Log(engine).drain()
    for index in range(params.get("n", 1)):
        assert log.ids("a", index) == [*best_of_cycle(words(10), 3, 1), EOS]
        assert log.last("a", index).finish_reason == "stop" and not log.last("a", index).complete


def test_min_tokens_holds_where_the_constraint_allows_more_than_the_end() -> None:
    engine = make_engine(script=lambda history: EOS)
    engine.admit(constrained("a", words(10), Only(3, ids=(EOS, 9)), min_tokens=6))
    log = Log(engine).drain()
    assert log.ids("a") == [*best_of_cycle(words(10), 3, 1), 9, 9, 9, EOS]


def test_ids_beyond_the_mask_are_never_allowed() -> None:
    engine = make_engine(script=lambda history: VOCAB - 1)
    for name, vocab in (("exact", 41), ("words", 64)):
        engine.admit(constrained(name, words(10), Cycle(width=4, vocab=vocab)))
    log = Log(engine).drain()
    assert log.ids("exact") == log.ids("words") == best_of_cycle(words(10), 6, 4)
    wide = type("Wide", (Cycle,), {"mask": lambda self: pack_mask([VOCAB, VOCAB + 40], 200)})
    engine.admit(constrained("beyond", words(10), wide()))
    assert Log(engine).drain().ids("beyond") == [-1], "only ids are allowed that the model does not have"


def test_a_mask_of_none_allows_everything() -> None:
    engine = make_engine()
    free = type("Free", (Cycle,), {"mask": lambda self: None, "accept": lambda self, token_id: False})
    engine.admit(constrained("a", words(10), free(), 8))
    assert Log(engine).drain().ids("a") == expected(words(10), 8)


def test_penalties_and_biases_work_inside_the_mask_and_logprobs_stay_raw() -> None:
    engine = make_engine()
    engine.admit(constrained("a", words(10), Cycle(until=1, width=4), logit_bias={40: 100.0}, logprobs=VOCAB // 4))
    event = Log(engine).drain().last("a")
    logits = logits_after(words(10)).astype(np.float64)
    assert event.token_id == 40 and event.logprob is not None
    assert event.logprob.logprob == pytest.approx(logits[40] - np.log(np.exp(logits).sum()), abs=1e-4)
    assert event.logprob.top[0][0] == logits.argmax(), "the likeliest of all, allowed or not"


@pytest.mark.parametrize("when", [1, 2, 4])
def test_cancel_and_finish(when: int) -> None:
    engine = make_engine(prefill_chunk_size=256)
    log = Log(engine)
    engine.admit(constrained("a", words(300), Cycle(until=50), 60, n=2))
    engine.admit(constrained("b", words(30), Cycle(until=9), 60))
    log.tick(when)
    assert engine.finish("a", 1, "stop") == (when > 1)
    assert engine.cancel("a")
    log.drain()
    assert log.ids("b") == best_of_cycle(words(30), 9, 1)
    all_pages_return(engine)


def test_broken_logits_of_a_constrained_request_fail_it() -> None:
    def script(history: Any) -> int | None:
        return -1 if history[0] == 1 and len(history) > 300 else None

    engine = make_engine(script=script)
    engine.admit(constrained("sick", [1, *words(298)], Cycle(), n=2))
    engine.admit(constrained("dead end", [1, *words(300)], Ending(0)))
    engine.admit(constrained("well", words(298), Cycle()))
    log = Log(engine).drain()
    assert log.last("sick", 0).error == log.last("sick", 1).error == log.last("dead end").error == NOT_FINITE
    assert log.ids("well") == best_of_cycle(words(298), 6, 1)
    all_pages_return(engine)


def test_masks_are_computed_while_the_forward_runs() -> None:
    begun, finished = threading.Event(), threading.Event()

    class Slow(Cycle):
        def mask(self) -> Mask | None:
            assert begun.wait(5), "the forward begins before this mask is there"
            finished.set()
            return super().mask()

    class Waiting(FakeModel):
        def forward(self, inputs: TickInputs) -> Any:
            begun.set()
            assert finished.wait(5), "the mask is computed before the forward ends"
            finished.clear()
            return super().forward(inputs)

    engine = make_engine()
    engine.runner = Waiting(65)
    engine.runner.store = engine.cache.store  # type: ignore[assignment]
    engine.admit(constrained("a", words(10), Slow(until=3)))
    assert Log(engine).drain().ids("a") == best_of_cycle(words(10), 3, 1)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_the_pool_keeps_the_order(threads: int, count: int) -> None:
    constraints = [Cycle(said=(0,) * i) for i in range(count)]
    masks = MaskPool(threads).begin(constraints)()
    assert len(masks) == count
    for mask, constraint in zip(masks, constraints, strict=True):
        assert isinstance(mask, np.ndarray) and np.array_equal(mask, pack_mask(constraint.options(), VOCAB))


def test_an_unconstrained_engine_starts_no_threads() -> None:
    engine = make_engine()
    engine.admit(greedy("a", words(10), 5))
    Log(engine).drain()
    assert engine._masks._pool is None


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_of_both_kinds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine: Engine = make_engine(pages=30, max_batch_size=8, prefill_chunk_size=int(rng.choice([5, 64, 700])))
    log, asked, queue = Log(engine), {}, []
    for i in range(40):
        prompt = words(int(rng.choice([1, 20, 256, 300])), seed=int(rng.integers(3)))
        kind = [None, Cycle(until=int(rng.integers(1, 12)), width=2), Ending(int(rng.integers(4))), Fragile()][i % 4]
        queue.append(constrained(f"{i}", prompt, kind, 10, n=int(rng.choice([1, 1, 2]))))
    asked = {request.id: request for request in queue}
    while queue or engine.running_count:
        while queue and engine.can_admit(queue[0]):
            engine.admit(queue.pop(0))
        log.tick()
    for name, request in asked.items():
        for index in range(request.params.n):
            ids, constraint = log.ids(name, index), request.constraint
            if constraint is None:
                assert ids == expected(request.prompt_ids, 10)
            elif isinstance(constraint, Fragile):
                assert ids == [-1] and log.last(name, index).error == BROKEN
            elif isinstance(constraint, Ending):
                assert ids == [*best_of_cycle(request.prompt_ids, constraint.until, 1), -1]
            else:
                assert ids == best_of_cycle(request.prompt_ids, min(constraint.until, 10), 2)
    all_pages_return(engine)


def test_a_request_that_breaks_at_the_door_ends_alone() -> None:
    scheduler = Scheduler(make_engine)
    fragile = type("Fragile", (Fragile,), {"breaks": ("fork", 0)})
    jobs = [scheduler.submit(constrained(name, words(9), kind)) for name, kind in (("a", fragile()), ("b", Cycle()))]
    scheduler.start()
    broken, served = [list(job.events()) for job in jobs]
    assert [event.error for event in broken] == [BROKEN]
    assert [token for event in served for token in event.token_ids] == best_of_cycle(words(9), 6, 1)
    scheduler.shutdown()


def test_a_completing_token_is_text_and_an_empty_end_has_none(tiny_folder: Any) -> None:
    tokenizer = Tokenizer.from_folder(tiny_folder("qwen3"))
    (brace,) = tokenizer.encode("}")
    choice = Choice(0, SamplingParams(stop_token_ids=[brace]), tokenizer)
    choice.push(TokenEvent("a", 0, brace, None, "stop", complete=True))
    event = choice.take()
    assert event is not None and (event.text, event.token_ids, event.finish_reason) == ("}", [brace], "stop")
    assert event.stop_reason is None
    choice = Choice(0, SamplingParams(), tokenizer)
    choice.push(TokenEvent("a", 0, brace, None, None))
    choice.push(TokenEvent("a", 0, -1, None, "stop"))
    event = choice.take()
    assert event is not None and (event.text, event.token_ids, event.finish_reason) == ("}", [brace], "stop")
