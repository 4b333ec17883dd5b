"""Reading late on recorded steps of a real model against the ordinary engine on the eager runner: fp32."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from helios.engine.config import EngineConfig
from helios.engine.engine import Engine
from helios.engine.runner import ModelRunner, Runner
from helios.engine.sequence import Request, TokenEvent
from helios.fast.late import LateEngine
from helios.kv.paged import PagedKVCache
from helios.kv.pages import PagePool
from helios.kv.prefix import PrefixCache
from helios.model.params import SamplingParams
from helios.model.transformer import Transformer
from tests.parity.recorded import MARGIN, PAGES, RECORDERS, graph_runner


def some_requests(seed: int, logprobs: int | None) -> list[Request]:
    """Greedy ones (the margin of each choice is known with `logprobs`), and seeded draws."""
    rng, requests = random.Random(seed), []
    for i in range(12):
        prompt = rng.choices(range(250), k=rng.choice([1, 2, 40, 250, 255, 256, 257, 500, 740]))
        drawn = rng.random() < 0.4
        params = SamplingParams(
            temperature=0.8 if drawn else 0.0,
            seed=i,
            max_tokens=rng.randint(2, 40),
            n=rng.choice([1, 1, 2]),
            stop_token_ids=rng.choices(range(250), k=5),
            logprobs=None if drawn else logprobs,
        )
        requests.append(Request(str(i), prompt, params, arrival_s=0.0))
    return requests


Told = dict[tuple[str, int], list[TokenEvent]]


def serve(
    model: Transformer,
    kind: type[Engine],
    make: Callable[[PagedKVCache], Runner],
    requests: list[Request],
    seed: int,
    prefix: bool,
) -> tuple[Any, Told]:
    rng = random.Random(seed)
    pool, cache = PagePool(PAGES), PagedKVCache(model.config.kv_spec, PAGES, query_heads=model.config.heads)
    config = EngineConfig(max_batch_size=7, prefill_chunk_size=128, debug_checks=True)
    engine = kind(model, cache, pool, PrefixCache(pool) if prefix else None, config, runner=make(cache))
    told: Told = {}
    waiting, tick = list(requests), 0
    while waiting or engine.running_count:
        if waiting and rng.random() < 0.15 and engine.can_admit(waiting[0]):
            engine.admit(waiting.pop(0))
        for event in engine.tick(0.01 * tick):
            told.setdefault((event.request_id, event.index), []).append(event)
        tick += 1
    engine.check()
    free = pool.free_count + (engine.prefix.evictable_count if engine.prefix is not None else 0)
    assert free == pool.capacity
    return engine, told


def clear_until(events: list[TokenEvent]) -> int:
    """How many tokens come before one that was nearly a tie."""
    for n, event in enumerate(events):
        if event.logprob is not None and event.logprob.top[0][1] - event.logprob.top[1][1] <= MARGIN:
            return n
    return len(events)


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_reading_late_tells_the_same_tokens(family: str, recorder: str, models: Any) -> None:
    model, seed, prefix = models(family), len(family), recorder == "called"
    asked, compared = some_requests(seed, logprobs=2), 0
    _, expected = serve(model, Engine, lambda cache: ModelRunner(model, cache), asked, seed, prefix)
    late, found = serve(
        model,
        LateEngine,
        lambda cache: graph_runner(model, cache, recorder, choosing=True),
        some_requests(seed, None),
        seed + 1,
        prefix,
    )
    assert found.keys() == expected.keys()
    for key, events in expected.items():
        upto = clear_until(events)
        mine = [(event.token_id, event.finish_reason) for event in found[key]]
        theirs = [(event.token_id, event.finish_reason) for event in events]
        assert mine[:upto] == theirs[:upto] and (upto < len(theirs) or mine == theirs), key
        compared += upto
    assert compared > 100 and late.runner.ticks["replayed"] > 40 and late.runner.ticks["eager"] > 5
    early = sum(events[-1].finish_reason == "stop" for events in found.values())
    assert late.surplus <= early
