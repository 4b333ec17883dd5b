"""What a tick, a submit and a cancel cost in a crowd: operations are counted, not seconds."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helios.bench.overhead import ANSWER, FreeRunner, Load, crowd_of, crowded_engine
from helios.engine.engine import Engine
from helios.engine.job import Batch, Job, JobEvent
from helios.engine.meter import RATE_WINDOW_S, Meter
from helios.engine.scheduler import Scheduler
from helios.engine.sequence import Request
from helios.kv.pages import PAGE_SIZE, PagePool
from helios.kv.prefix import PrefixCache
from helios.model.params import SamplingParams
from helios.serve.bench import overhead_pair, overhead_table

SMALL, LARGE = Load(queued=10, running=32, cached_pages=40), Load(queued=5_000, running=32, cached_pages=8_000)


class Counted(OrderedDict[Any, Any]):
    """A dict that counts what is looked up in it and what is walked over."""

    looked_up = walked = 0

    def _walk(self, items: Any) -> Iterator[Any]:
        for item in items:
            type(self).walked += 1
            yield item

    def __iter__(self) -> Iterator[Any]:
        return self._walk(super().__iter__())

    def keys(self) -> Any:
        return self._walk(super().keys())

    def values(self) -> Any:
        return self._walk(super().values())

    def items(self) -> Any:
        return self._walk(super().items())

    def __contains__(self, key: object) -> bool:
        type(self).looked_up += 1
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        type(self).looked_up += 1
        return super().get(key, default)


def calls(action: Callable[[], object]) -> int:
    """How many functions, Python's and C's, one call of `action` calls."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


class Crowd:
    """A scheduler whose worker is this test, as crowded as `load` says; whoever ends is replaced."""

    def __init__(self, load: Load) -> None:
        self.requests, runner = crowd_of(load), FreeRunner(load.running)
        runner.open.set()
        self.engine = crowded_engine(load, runner)
        places = load.queued + load.running + 1
        self.scheduler = Scheduler(lambda: self.engine, max_waiting=places, deliver=self.renew)
        self.scheduler._set_ready(self.engine)
        for _ in range(load.queued + load.running):
            self.scheduler.submit(next(self.requests))

    def renew(self, batch: Batch) -> None:
        for _, event in batch:
            if event.finish_reason == "length":
                self.scheduler.submit(next(self.requests))

    def turn(self) -> None:
        self.scheduler._turn(self.engine)

    def count_walks(self) -> None:
        """From now on, count what is looked up in and walked over of the queue and the cache."""
        scheduler, prefix = self.scheduler, self.engine.prefix
        assert prefix is not None
        scheduler._waiting, scheduler._live = Counted(scheduler._waiting), Counted(scheduler._live)
        prefix._entries, prefix._by_page = Counted(prefix._entries), Counted(prefix._by_page)
        Counted.looked_up = Counted.walked = 0


def settled(load: Load) -> Crowd:
    """A crowd in which everybody who can run does, and one ends in every few turns."""
    crowd = Crowd(load)
    for _ in range(40):
        crowd.turn()
    assert crowd.engine.running_count == load.running
    return crowd


def cost_of_turns(load: Load) -> int:
    crowd = settled(load)
    return calls(lambda: [crowd.turn() for _ in range(100)])


def test_turns_cost_the_same_however_many_wait_and_however_much_is_cached() -> None:
    assert cost_of_turns(LARGE) <= 1.05 * cost_of_turns(SMALL)


def test_turns_walk_over_no_queue_and_no_cache() -> None:
    crowd = settled(LARGE)
    before = crowd.engine.stats()["prompt_tokens_total"]
    crowd.count_walks()
    for _ in range(100):
        crowd.turn()
    assert crowd.engine.stats()["prompt_tokens_total"] > before, "nobody was admitted"
    assert Counted.walked <= 3 * 100, "the head of the queue is looked at once or twice a turn"


@pytest.mark.parametrize("load", [SMALL, LARGE], ids=["small", "large"])
def test_submit_and_cancel_cost_the_same(load: Load) -> None:
    """Compared with a scheduler in which hardly anybody waits."""
    crowd, nobody = settled(load), settled(Load(1, 32, 1))
    probe = next(crowd.requests)
    assert calls(lambda: crowd.scheduler.submit(probe)) == calls(lambda: nobody.scheduler.submit(probe))
    assert calls(lambda: crowd.scheduler.cancel(probe.id)) == calls(lambda: nobody.scheduler.cancel(probe.id))


def test_a_cancelled_request_leaves_the_middle_of_the_queue_without_a_walk() -> None:
    crowd = settled(LARGE)
    names = list(crowd.scheduler._waiting)
    crowd.count_walks()
    assert crowd.scheduler.cancel(names[len(names) // 2])
    assert Counted.walked == 0 and Counted.looked_up <= 4


def test_letting_many_in_costs_each_the_same() -> None:
    """Nothing is summed over those who run already for each one who comes."""

    def per_head(running: int) -> float:
        crowd = Crowd(Load(0, running, 1))
        return calls(lambda: crowd.scheduler._admit(crowd.engine)) / running

    assert per_head(256) <= 1.05 * per_head(32)


def open_engine(sequences: int) -> Engine:
    runner = FreeRunner(sequences)
    runner.open.set()
    return crowded_engine(Load(0, sequences, 0), runner)


def test_the_head_of_the_queue_is_matched_again_only_when_something_has_changed() -> None:
    engine = open_engine(4)
    pool, prefix = engine.pool, engine.prefix
    assert prefix is not None
    running = Request("long", [1] * (PAGE_SIZE + 1), SamplingParams(max_tokens=ANSWER, ignore_eos=True), arrival_s=0.0)
    engine.admit(running)
    rest = pool.allocate(pool.free_count)
    head = Request("head", [2] * (PAGE_SIZE + 1), SamplingParams(max_tokens=ANSWER), arrival_s=0.0)
    assert not engine.can_admit(head)
    matches, real = [], prefix.match
    prefix.match = lambda hashes: matches.append(1) or real(hashes)  # type: ignore[method-assign,func-returns-value]
    for _ in range(50):
        engine.tick(0.0)
        assert not engine.can_admit(head)
    assert len(matches) <= 1, "only the prompt's published block was news"
    pool.release(rest[:2])
    assert engine.can_admit(head), "free pages are noticed at once"
    rest = rest[2:] + pool.allocate(2)
    assert not engine.can_admit(head)
    prefix.publish([b"one", b"two"], rest[:2])
    assert not engine.can_admit(head), "known, but still held"
    pool.release(rest[:2])
    assert engine.can_admit(head), "pages that only the cache holds are noticed at once"
    assert prefix.evict(2) == 2 and len(rest[2:] + pool.allocate(2)) > 2
    assert not engine.can_admit(head)
    engine.cancel("long")
    assert engine.can_admit(head), "evictable pages are noticed at once"


def test_a_published_block_makes_nobody_look_who_does_not_need_it() -> None:
    engine = open_engine(32)
    for request, _ in zip(crowd_of(Load(0, 1, 0)), range(32), strict=False):
        engine.admit(request)
    assert engine.prefix is not None
    matches, real = [], engine.prefix.match
    engine.prefix.match = lambda hashes: matches.append(1) or real(hashes)  # type: ignore[method-assign,func-returns-value]
    for _ in range(5):
        engine.tick(0.0)
    assert len(engine.prefix) > 8 and not matches


def test_a_long_prompt_is_published_piece_by_piece_at_the_cost_of_the_pieces() -> None:
    pool = PagePool(1001)
    prefix = PrefixCache(pool)
    hashes = [number.to_bytes(32, "little") for number in range(1000)]
    pages = pool.allocate(1000)
    prefix.publish(hashes[:996], pages[:996])
    prefix._entries = Counted(prefix._entries)
    Counted.looked_up = 0
    prefix.publish(hashes, pages)
    assert len(prefix) == 1000 and Counted.looked_up <= 8
    prefix.check()


def test_what_nobody_reads_grows_in_place() -> None:
    job = Job(Request("a", [1], SamplingParams()), lambda name: True, 0.0)
    first = JobEvent(0, "a", [1])
    ids = first.token_ids
    for token in range(100):
        job.put(first if token == 0 else JobEvent(0, "b", [token]))
    assert job._unread[0].token_ids is ids and len(ids) == 100, "copied with every token, it would cost the square"


def test_the_meter_remembers_ticks_not_tokens() -> None:
    meter = Meter()
    for tick in range(1000):
        meter.generated(256, tick * 0.1)
    assert len(meter._recent) == RATE_WINDOW_S / 0.1
    assert meter.read(99.9)["tokens_per_s"] == pytest.approx(2560)


def test_the_benchmark_measures_both() -> None:
    small, large = overhead_pair(Load(2, 8, 4), Load(50, 8, 40), pairs=1)
    assert 0 < small.before_s < 1 and 0 < large.after_s < 1 and 0 < large.submit_s < 1
    assert "cached pages" in overhead_table(small, large)
