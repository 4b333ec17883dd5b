"""The engine on recorded decode ticks against the engine on the eager runner: fp32, token for token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from helios.engine.config import EngineConfig
from helios.engine.engine import Engine
from helios.engine.runner import ModelRunner, Runner, TickInputs
from helios.engine.sequence import Request
from helios.fast.buckets import DirectLink
from helios.fast.graphs import GraphRunner, ReplayByTape, assemble
from helios.fast.pipeline import Ask, LateResults, Pipeline
from helios.kv.contiguous import ContiguousCache, generate_greedy
from helios.kv.paged import PagedKVCache, Span
from helios.kv.pages import PAGE_SIZE, SCRATCH_PAGE, PagePool
from helios.kv.prefix import PrefixCache
from helios.model.params import SamplingParams
from helios.model.sampling import uniform
from helios.model.transformer import Transformer
from tests.parity.recorded import MARGIN, PAGES, RECORDERS, graph_runner

FAMILIES = ("qwen3", "qwen2", "llama", "mistral")
NEW = 16  # tokens of an answer that is read late


@dataclass
class Told:
    """What a client of one choice was told: tokens, and how clear each choice was."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    reason: str | None = None


def serve(
    model: Transformer, make: Callable[[PagedKVCache], Runner], seed: int, prefix: bool
) -> tuple[Engine, dict[tuple[str, int], Told]]:
    """A fixed story of arrivals, endings and cancellations; it follows ticks, so two engines live through the same."""
    rng = random.Random(seed)
    pool, cache = PagePool(PAGES), PagedKVCache(model.config.kv_spec, PAGES, query_heads=model.config.heads)
    config = EngineConfig(max_batch_size=7, prefill_chunk_size=rng.choice([128, 512]), debug_checks=True)
    engine = Engine(model, cache, pool, PrefixCache(pool) if prefix else None, config, runner=make(cache))
    told: dict[tuple[str, int], Told] = {}
    waiting, tick = list(range(11)), 0
    while waiting or engine.running_count:
        if waiting and rng.random() < 0.15:
            length = rng.choice([1, 2, 40, 250, 255, 256, 257, 500, 760])
            params = SamplingParams(
                temperature=0.0, max_tokens=rng.randint(12, 48), ignore_eos=True, logprobs=2, n=rng.choice([1, 1, 2])
            )
            request = Request(str(waiting[0]), rng.choices(range(250), k=length), params, arrival_s=0.0)
            if engine.can_admit(request):
                engine.admit(request)
                waiting.pop(0)
        for event in engine.tick(0.01 * tick):
            mine = told.setdefault((event.request_id, event.index), Told())
            assert event.logprob is not None
            (_, best), (_, second) = event.logprob.top
            mine.tokens.append(event.token_id)
            mine.margins.append(best - second)
            mine.reason = event.finish_reason
        if rng.random() < 0.01 and told:
            engine.cancel(rng.choice(sorted(told))[0])
        tick += 1
    engine.check()
    return engine, told


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_says_the_same_on_recorded_ticks(family: str, recorder: str, models: Any) -> None:
    model, seed = models(family), FAMILIES.index(family)
    eager, expected = serve(model, lambda cache: ModelRunner(model, cache), seed, prefix=recorder == "called")
    recorded, found = serve(
        model, lambda cache: graph_runner(model, cache, recorder), seed, prefix=recorder == "called"
    )
    clear = all(margin > MARGIN for told in expected.values() for margin in told.margins)
    assert found.keys() == expected.keys() and len(found) >= 11
    for key, told in expected.items():
        if clear:
            assert (found[key].tokens, found[key].reason) == (told.tokens, told.reason), key
        upto = next((n for n, margin in enumerate(told.margins) if margin <= MARGIN), len(told.tokens))
        assert found[key].tokens[:upto] == told.tokens[:upto], key
    ticks = recorded.runner.ticks
    assert ticks["replayed"] > 40 and ticks["eager"] > 5 and ticks["padding rows"] > 10, ticks
    if clear:  # the same sequences lay in the same pages: the pools may differ by rounding, and on the scratch page
        torch.testing.assert_close(recorded.cache.store[:, :, 1:], eager.cache.store[:, :, 1:], rtol=1e-3, atol=1e-3)
    assert recorded.cache.store[:, :, SCRATCH_PAGE].isfinite().all()
    assert not recorded.cache.store[:, :, SCRATCH_PAGE, 1:].any(), "padding rows write one slot"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_start_up_assembles_serves_sampled_requests_alike(family: str, models: Any) -> None:
    model, answers = models(family), []
    for recorded in (False, True):
        cache = PagedKVCache(model.config.kv_spec, PAGES, query_heads=model.config.heads)
        config = EngineConfig(max_batch_size=4, max_context=700, debug_checks=True)
        runner: Any = ModelRunner(model, cache)
        if recorded:
            runner, why = assemble(model, cache, config, ReplayByTape(), DirectLink(), 12)
            assert why.startswith(f"{len(runner.buckets)} graphs, up to 4 sequences")
        engine = Engine(model, cache, PagePool(PAGES), None, config, runner=runner)
        for n, length in enumerate((3, 255, 256, 300)):
            params = SamplingParams(temperature=0.7, top_p=0.9, seed=n, max_tokens=20, ignore_eos=True)
            engine.admit(Request(str(n), [(7 * i + n) % 250 for i in range(length)], params, arrival_s=0.0))
        told: dict[str, list[int]] = {}
        while engine.running_count:
            for event in engine.tick(0.0):
                told.setdefault(event.request_id, []).append(event.token_id)
        answers.append(told)
    assert answers[0] == answers[1] and runner.ticks["replayed"] >= 15


class Late:
    """Sequences decoded through a pipeline: what each has, and how many steps were launched for it."""

    def __init__(self, prompt: list[int], pages: list[int], temperature: float, seed: int) -> None:
        self.prompt, self.pages, self.temperature, self.seed = prompt, pages, temperature, seed
        self.out: list[int] = []
        self.launched = 0

    def ask(self, name: int) -> Ask:
        self.launched += 1
        given = self.out[0] if self.launched == 1 else None
        position = len(self.prompt) + self.launched - 1
        return Ask(name, position, self.pages, given, self.temperature, uniform(self.seed, self.launched))


def decode_late(runner: GraphRunner, sequences: list[Late], tokens: int, stop: int | None) -> int:
    """Prompts eagerly, then the pipeline; how many tokens were computed past an end and thrown away."""
    for late in sequences:
        n = len(late.prompt)
        prompt = TickInputs(np.array(late.prompt), np.arange(n), [Span(n, n, late.pages)], np.array([n - 1]))
        late.out.append(int(runner.forward(prompt).argmax()))
    pipeline, live, thrown = Pipeline(runner.launch, LateResults(DirectLink(), 8)), dict(enumerate(sequences)), 0
    while live:
        asks = [late.ask(name) for name, late in live.items() if late.launched < tokens - 1]
        for name, token in pipeline.step(asks) if asks else pipeline.drain():
            late = sequences[int(str(name))]
            late.out.append(token)
            if token == stop:
                thrown += pipeline.drop(name)
            if token == stop or len(late.out) == tokens:
                live.pop(int(str(name)))
    return thrown


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_reading_late_changes_no_token_and_costs_one_past_an_early_end(family: str, recorder: str, models: Any) -> None:
    model = models(family)
    cache = PagedKVCache(model.config.kv_spec, PAGES, query_heads=model.config.heads)
    runner = graph_runner(model, cache, recorder, choosing=True)
    prompts = [random.Random(n).choices(range(250), k=length) for n, length in enumerate((4, 90, 254, 300, 2))]

    def sequences() -> list[Late]:
        return [Late(prompt, [1 + 2 * n, 2 + 2 * n], 0.0, n) for n, prompt in enumerate(prompts)]

    with torch.inference_mode():
        alone = [greedy(model, prompt, NEW) for prompt in prompts]
        whole = sequences()
        assert decode_late(runner, whole, NEW, None) == 0
        assert [late.out for late in whole] == alone
        stop = alone[0][6]
        cut = sequences()
        thrown = decode_late(runner, cut, NEW, stop)
    ends = [out.index(stop, 1) if stop in out[1:] else NEW - 1 for out in alone]
    assert [late.out for late in cut] == [out[: end + 1] for out, end in zip(alone, ends, strict=True)]
    assert thrown == sum(end < NEW - 1 for end in ends) > 0


def greedy(model: Transformer, prompt: list[int], tokens: int) -> list[int]:
    shape = model.config
    cache = ContiguousCache(shape.kv_spec, 2 * PAGE_SIZE, heads=shape.heads, device="cpu", dtype=torch.float32)
    return list(generate_greedy(model, cache, prompt, tokens))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_draws_on_the_device_are_the_engines(family: str, models: Any) -> None:
    """Seeded temperature sampling: the engine draws on the host, the pipeline on the device, one step ahead."""
    model, prompts = models(family), [[5, 6, 7], list(range(100))]
    cache = PagedKVCache(model.config.kv_spec, PAGES, query_heads=model.config.heads)
    engine = Engine(model, cache, PagePool(PAGES), None, EngineConfig())
    told: dict[str, list[int]] = {}
    for n, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.9, seed=n, max_tokens=24, ignore_eos=True)
        engine.admit(Request(str(n), prompt, params, arrival_s=0.0))
    while engine.running_count:
        for event in engine.tick(0.0):
            told.setdefault(event.request_id, []).append(event.token_id)
    runner = graph_runner(model, PagedKVCache(model.config.kv_spec, PAGES, query_heads=4), "taped", choosing=True)
    late = [Late(prompt, [1 + n], 0.9, n) for n, prompt in enumerate(prompts)]
    with torch.inference_mode():
        pipeline = Pipeline(runner.launch, LateResults(DirectLink(), 8))
        for n, one in enumerate(late):
            length = len(one.prompt)
            spans = [Span(length, length, one.pages)]
            runner.forward(TickInputs(np.array(one.prompt), np.arange(length), spans, np.array([length - 1])))
            one.out.append(told[str(n)][0])
        arrived = [pair for _ in range(23) for pair in pipeline.step([one.ask(n) for n, one in enumerate(late)])]
        for name, token in [*arrived, *pipeline.drain()]:
            late[int(str(name))].out.append(token)
    assert [one.out for one in late] == [told["0"], told["1"]]
