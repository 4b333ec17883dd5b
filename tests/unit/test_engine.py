"""The engine over the fake model of `fake_model.py`, which notices a wrong page, position or copy."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from helios.engine.sequence import Request
from helios.kv.pages import PAGE_SIZE, OutOfPages
from helios.model.params import RequestError, SamplingParams
from tests.unit.fake_model import (
    EOS,
    VOCAB,
    Log,
    Script,
    all_pages_return,
    expected,
    five_take_turns,
    greedy,
    make_engine,
    words,
)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 64, 256, 1000])
def test_answers_do_not_depend_on_chunks_or_company(chunk: int, prefix: bool) -> None:
    lengths = (1, 2, 30) if chunk == 1 else (1, 2, 255, 256, 257, 511, 512, 513, 700)
    engine = make_engine(prefix=prefix, prefill_chunk_size=chunk)
    log = Log(engine)
    for length in lengths:
        engine.admit(greedy(str(length), words(length), 9))
    log.drain()
    for length in lengths:
        assert log.ids(str(length)) == expected(words(length), 9), length
        assert log.last(str(length)).finish_reason == "length"
    assert max(sum(queries) for queries in engine.runner.passes) <= chunk  # type: ignore[attr-defined]
    all_pages_return(engine)


@pytest.mark.parametrize("length", [256, 512, 257, 255, 513])
def test_a_prefix_hit_never_covers_the_whole_prompt(length: int) -> None:
    engine = make_engine()
    log = Log(engine)
    for name in ("cold", "warm"):
        engine.admit(greedy(name, words(length), 5))
        log.drain()
        assert log.ids(name) == expected(words(length), 5)
    assert log.last("cold").cached_tokens == 0
    assert log.last("warm").cached_tokens == (length - 1) // PAGE_SIZE * PAGE_SIZE
    all_pages_return(engine)


@pytest.mark.parametrize("chunk", [64, 256, 300, 1000])
def test_identical_prompts_admitted_together_are_right_and_share_what_is_computed(chunk: int) -> None:
    engine = make_engine(prefill_chunk_size=chunk)
    log = Log(engine)
    for name in "abcd":
        engine.admit(greedy(name, words(600), 6))
    log.drain()
    for name in "abcd":
        assert log.ids(name) == expected(words(600), 6)
    assert log.last("a").cached_tokens == 0
    computed = sum(sum(queries) for queries in engine.runner.passes)  # type: ignore[attr-defined]
    hits = sum(log.last(name).cached_tokens for name in "abcd")
    assert computed == 4 * (600 + 5) - hits, "a hit is exactly a token that was not computed"
    if chunk <= 300:
        assert hits > 0, "the later ones adopt pages that the first has published meanwhile"
    assert engine.stats()["cached_tokens_total"] == hits
    all_pages_return(engine)


def test_other_salts_share_nothing() -> None:
    engine = make_engine()
    log = Log(engine)
    for name, salt in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        request = greedy(name, words(300), 2)
        request.salt = salt
        engine.admit(request)
        log.drain()
    assert [log.last(name).cached_tokens for name in "abc"] == [0, 0, 256]


def test_outputs_are_shared_with_the_next_turn() -> None:
    engine = make_engine()
    log = Log(engine)
    engine.admit(greedy("turn 1", words(200), 100))
    log.drain()
    second = [*words(200), *log.ids("turn 1"), 1, 2, 3]
    engine.admit(greedy("turn 2", second, 5))
    log.drain()
    assert log.last("turn 2").cached_tokens == 256
    assert log.ids("turn 2") == expected(second, 5)


@pytest.mark.parametrize("when", [1, 2, 5])
def test_cancel_frees_at_once_and_keeps_what_was_computed(when: int) -> None:
    engine = make_engine(prefill_chunk_size=256)
    log = Log(engine)
    engine.admit(greedy("a", words(600), 50))
    engine.admit(greedy("b", words(40, seed=1), 12))
    log.tick(when)
    assert engine.cancel("a") and not engine.cancel("a") and not engine.cancel("nobody")
    engine.check()
    heard = len(log.ids("a"))
    log.drain()
    assert len(log.ids("a")) == heard and log.ids("b") == expected(words(40, seed=1), 12)
    engine.admit(greedy("again", words(600), 3))
    log.drain()
    assert log.last("again").cached_tokens == min(when, 2) * 256
    assert log.ids("again") == expected(words(600), 3)
    all_pages_return(engine)


def test_a_choice_ended_from_outside_leaves_alone() -> None:
    engine = make_engine()
    log = Log(engine)
    engine.admit(greedy("a", words(300), 20, n=2))
    assert not engine.finish("a", 0, "stop"), "its prompt is not computed yet"
    log.tick(4)
    assert engine.finish("a", 0, "stop") and not engine.finish("a", 0, "stop")
    log.drain()
    assert len(log.ids("a", 1)) == 20 and len(log.ids("a", 0)) < 20
    all_pages_return(engine)


def ends_after(tokens: int, prompt: int, token: int = EOS) -> Script:
    return lambda history: token if len(history) == prompt + tokens - 1 else None


def test_eos_ends_a_sequence_and_wins_on_the_last_allowed_token() -> None:
    for allowed in (4, 9):
        engine = make_engine(script=ends_after(4, 10))
        engine.admit(greedy("a", words(10), allowed))
        log = Log(engine).drain()
        assert log.ids("a") == [*expected(words(10), 3), EOS] and log.last("a").finish_reason == "stop"


def test_ignore_eos_stop_token_ids_and_min_tokens() -> None:
    engine = make_engine(script=ends_after(4, 10))
    engine.admit(greedy("a", words(10), 6, ignore_eos=True))
    log = Log(engine).drain()
    assert len(log.ids("a")) == 6 and log.last("a").finish_reason == "length"
    engine = make_engine(script=ends_after(4, 10, token=9))
    engine.admit(greedy("a", words(10), 6, stop_token_ids=[9]))
    log = Log(engine).drain()
    assert log.ids("a")[-1] == 9 and log.last("a").finish_reason == "stop"
    engine = make_engine(script=lambda history: EOS)
    engine.admit(greedy("a", words(10), 6, min_tokens=3))
    log = Log(engine).drain()
    assert len(log.ids("a")) == 4 and EOS not in log.ids("a")[:3] and log.last("a").finish_reason == "stop"


def test_without_max_tokens_an_answer_runs_to_the_end_of_the_context() -> None:
    engine = make_engine(max_context=300)
    engine.admit(greedy("a", words(290), None))
    log = Log(engine).drain()
    assert len(log.ids("a")) == 10 and log.last("a").finish_reason == "length"


def test_without_max_tokens_a_small_pool_is_not_given_to_one_request() -> None:
    engine = make_engine(pages=40)
    for i in range(3):
        request = greedy(f"{i}", words(100, seed=i), None, n=i + 1)
        assert engine.can_admit(request)
        engine.admit(request)
        engine.check()
    engine = make_engine(pages=2)
    engine.admit(greedy("all there is", words(100), None))
    log = Log(engine).drain()
    assert len(log.ids("all there is")) == 512 - 100 + 1
    all_pages_return(engine)


@pytest.mark.parametrize(("prompt", "new"), [(300, 40), (256, 40), (512, 1), (20, 5), (255, 2), (257, 300), (1, 1)])
def test_choices_share_the_prompts_full_pages(prompt: int, new: int) -> None:
    engine = make_engine(prefix=False, prefill_chunk_size=1000)
    log = Log(engine)
    engine.admit(greedy("a", words(prompt), new, n=3))
    first = -(-(prompt + new - 1) // PAGE_SIZE)
    held = engine.pool.capacity - engine.pool.free_count
    assert held == first + 2 * (first - prompt // PAGE_SIZE)
    log.drain()
    assert all(log.ids("a", i) == expected(words(prompt), new) for i in range(3))
    assert len(engine.runner.passes) == new, "one prefill serves all choices"  # type: ignore[attr-defined]
    all_pages_return(engine)


def test_choices_of_a_sampled_request_differ_and_repeat_with_the_seed() -> None:
    answers = []
    for company in (0, 5):
        engine = make_engine()
        params = SamplingParams(n=3, seed=11, max_tokens=12, ignore_eos=True)
        engine.admit(Request("a", words(30), params, arrival_s=0.0))
        for i in range(company):
            engine.admit(greedy(f"other {i}", words(40, seed=i), 7))
        log = Log(engine).drain()
        answers.append([log.ids("a", i) for i in range(3)])
    assert answers[0] == answers[1] and len({tuple(ids) for ids in answers[0]}) == 3


@pytest.mark.parametrize("where", [100, 300, 620])
def test_non_finite_logits_fail_one_request_and_are_never_shared(where: int) -> None:
    sick = [1, *words(599)]
    broken = True

    def script(tokens: Sequence[int]) -> int | None:
        return -1 if broken and tokens[0] == 1 and len(tokens) > where else None

    # A chunk a block: what was computed before the sick one is good, and stays shared.
    engine = make_engine(script=script, prefill_chunk_size=256)
    log = Log(engine)
    well = [2, *words(99)]
    engine.admit(greedy("sick", sick, 40, n=2))
    engine.admit(greedy("well", well, 40))
    log.drain()
    assert log.ids("well") == expected(well, 40)
    for index in range(2):
        failed = log.last("sick", index)
        assert failed.finish_reason == "error" and failed.token_id == -1 and "not finite" in (failed.error or "")
    broken = False
    engine.admit(greedy("again", sick, 5))
    log.drain()
    assert log.last("again").cached_tokens == (0 if where < 256 else 256 if where < 512 else 512)
    assert log.ids("again") == expected(sick, 5)
    all_pages_return(engine)


def test_pages_bound_admission_and_are_evicted_under_pressure() -> None:
    engine = make_engine(pages=5)
    log = Log(engine)
    engine.admit(greedy("a", words(300), 100))
    engine.admit(greedy("b", words(300, seed=1), 100))
    third = greedy("c", words(500, seed=2), 100)
    assert not engine.can_admit(third)
    with pytest.raises(OutOfPages):
        engine.admit(third)
    engine.check()
    log.drain()
    assert engine.can_admit(third), "idle cached pages can be evicted"
    engine.admit(third)
    log.drain()
    assert log.ids("c") == expected(words(500, seed=2), 100)
    all_pages_return(engine)


def test_more_sequences_than_budget_take_turns() -> None:
    engine = make_engine(prefill_chunk_size=2)
    five_take_turns(engine)


def test_the_batch_size_counts_choices() -> None:
    engine = make_engine(max_batch_size=4)
    engine.admit(greedy("a", words(5), 9, n=3))
    assert engine.can_admit(greedy("b", words(5), 9)) and not engine.can_admit(greedy("c", words(5), 9, n=2))
    assert engine.running_count == 3
    with pytest.raises(ValueError, match="running already"):
        engine.admit(greedy("a", words(5), 9))


@pytest.mark.parametrize(
    ("request_", "words_of_it"),
    [
        (greedy("a", []), "empty"),
        (greedy("a", [VOCAB]), "vocabulary"),
        (greedy("a", [-1]), "vocabulary"),
        (greedy("a", words(2047), 2), "context is 2048"),
        (greedy("a", words(2048), None), "context is 2048"),
        (greedy("a", words(5), 9, n=40), "max_batch_size"),
        (greedy("a", words(1000), 500), "kv_pages"),
    ],
)
def test_what_can_never_fit_is_refused_with_a_reason(request_: Request, words_of_it: str) -> None:
    with pytest.raises(RequestError, match=words_of_it):
        make_engine(pages=5).check_fits(request_)
    make_engine(pages=8).check_fits(greedy("fits", words(2047), 1))


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(pages=14, max_batch_size=6, prefill_chunk_size=rng.choice([5, 64, 256, 700]), prefix=seed != 5)
    log = Log(engine)
    queue, cancelled = [], set()
    for i in range(40):
        prompt = words(rng.choice([1, 20, 255, 256, 257, 512, 600]), seed=rng.randrange(3))
        queue.append(greedy(f"{i}", prompt, rng.choice([1, 2, 30, 260]), n=rng.choice([1, 1, 1, 2, 3])))
    asked = {request.id: request for request in queue}
    while queue or engine.running_count:
        while queue and engine.can_admit(queue[0]):
            engine.admit(queue.pop(0))
        log.tick()
        running = sorted({name for name, _ in log.events} - cancelled)
        if running and rng.random() < 0.02:
            name = rng.choice(running)
            if engine.cancel(name):
                cancelled.add(name)
    for name, request in asked.items():
        for index in range(request.params.n):
            ids = log.ids(name, index)
            whole = len(ids) == request.params.max_tokens
            assert (whole or name in cancelled) and ids == expected(request.prompt_ids, len(ids)), (name, index)
    all_pages_return(engine)
