"""The compiled runner against the eager one: same logits, same tokens; and nothing is compiled after warm-up."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from helios.engine.config import EngineConfig
from helios.engine.engine import Engine
from helios.engine.runner import ModelRunner, TickInputs
from helios.engine.sequence import Request
from helios.fast.compiled import CompiledRunner, obstacle
from helios.kv.paged import PagedKVCache, Span
from helios.kv.pages import PagePool
from helios.kv.prefix import PrefixCache
from helios.model.config import tiny_config
from helios.model.params import SamplingParams
from helios.model.transformer import Transformer
from helios.model.weights import random_weights

FAMILIES = ("qwen3", "qwen2", "llama", "mistral")
Pair = tuple[Transformer, CompiledRunner]


def cache_for(model: Transformer, pages: int = 40) -> PagedKVCache:
    return PagedKVCache(model.config.kv_spec, pages, query_heads=model.config.heads, dtype=model.dtype)


@pytest.fixture(scope="module")
def compiled() -> Callable[[str, bool], Pair]:
    """`compiled(family, packed)`: the plain model, and a warm runner of its twin in one-layer pieces."""
    built: dict[tuple[str, bool], Pair] = {}

    def build(family: str, packed: bool) -> Pair:
        if (family, packed) not in built:
            config = tiny_config(family, layers=3)
            weights = random_weights(config)
            model = Transformer.from_weights(config, weights)
            twin = Transformer.from_weights(config, {name: part.clone() for name, part in weights.items()})
            runner = CompiledRunner(twin.pack() if packed else twin, cache_for(model), most_layers=1)
            if reason := obstacle(model):
                pytest.skip(reason)
            runner.warm_up()
            built[family, packed] = (model, runner)
        return built[family, packed]

    return build


def tick(*spans: tuple[int, int, list[int]], seed: int = 0) -> TickInputs:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 250, sum(query for query, _, _ in spans))
    positions = np.concatenate([np.arange(context - query, context) for query, context, _ in spans])
    rows = np.cumsum([query for query, _, _ in spans]) - 1
    return TickInputs(ids, positions, [Span(*span) for span in spans], rows)


TICKS = [
    tick((300, 300, [1, 2]), (5, 5, [3])),  # prefill
    tick((1, 301, [1, 2]), (64, 69, [3]), (1, 1, [4]), seed=1),  # mixed
    tick((1, 302, [1, 2]), (1, 70, [3]), (1, 2, [4]), seed=2),  # decode
    tick((1, 303, [1, 2]), seed=3),  # a lone token
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_eager_runner(family: str, packed: bool, compiled: Callable[[str, bool], Pair]) -> None:
    model, runner = compiled(family, packed)
    eager = ModelRunner(model, cache_for(model))
    for step in TICKS:
        with torch.inference_mode():
            wanted = eager.forward(step)
        found = runner.forward(step)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(runner.cache.store[:, :, 1:], eager.cache.store[:, :, 1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_compiled_after_warm_up(packed: bool, compiled: Callable[[str, bool], Pair]) -> None:
    _, runner = compiled("llama", packed)
    rng = random.Random(0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for size in [1, 2, 600, *(rng.randint(1, 600) for _ in range(30))]:
            prompts = [(size, size, [5, 6, 7])]
            decodes = [(1, rng.randint(1, 250), [10 + row]) for row in range(rng.randint(0, 20))]
            step = tick(*prompts, *decodes, seed=size)
            assert runner.forward(step).shape == (1 + len(decodes), 256)
        nobody = TICKS[0]
        no_rows = TickInputs(nobody.token_ids, nobody.positions, nobody.spans, nobody.rows[:0])
        assert runner.forward(no_rows).shape == (0, 256)


def test_a_graph_that_does_not_fit_is_noticed(compiled: Callable[[str, bool], Pair]) -> None:
    _, runner = compiled("llama", False)
    kept = runner.shape
    runner.shape = kept._replace(eps=0.5)
    try:
        with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
            runner.forward(TICKS[0])
    finally:
        runner.shape = kept


def served(engine: Engine) -> dict[str, list[int]]:
    rng = random.Random(1)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for n, length in enumerate((1, 2, 255, 256, 300)):
        engine.admit(Request(f"{n}", rng.choices(range(250), k=length), params, arrival_s=0.0))
    tokens: dict[str, list[int]] = {}
    while engine.running_count:
        for event in engine.tick(0.0):
            tokens.setdefault(event.request_id, []).append(event.token_id)
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_gives_the_same_tokens(family: str, compiled: Callable[[str, bool], Pair]) -> None:
    model, runner = compiled(family, True)
    found = []
    for one in (ModelRunner(model, cache_for(model)), runner):
        pool = PagePool(40)
        config = EngineConfig(prefill_chunk_size=100, debug_checks=True)
        found.append(served(Engine(model, one.cache, pool, PrefixCache(pool), config, runner=one)))
    assert found[0] == found[1] and {len(tokens) for tokens in found[0].values()} == {12}


def test_pieces_of_several_layers_are_equal_too(compiled: Callable[[str, bool], Pair]) -> None:
    model, _ = compiled("qwen3", False)
    runner = CompiledRunner(model, cache_for(model), most_layers=2)
    assert [len(layers) for layers, _ in runner.pieces] == [2, 1]
    runner.warm_up()
    with torch.inference_mode():
        eager = ModelRunner(model, cache_for(model))
        for step in TICKS:
            torch.testing.assert_close(runner.forward(step), eager.forward(step), atol=2e-4, rtol=1e-4)


def test_a_position_beyond_the_context_is_an_error(compiled: Callable[[str, bool], Pair]) -> None:
    model, runner = compiled("llama", False)
    beyond = tick((1, model.config.context + 1, list(range(1, 10))))
    with pytest.raises(IndexError):
        runner.forward(beyond)


def test_a_start_with_another_pool_finds_its_kernels_on_disk(compiled: Callable[[str, bool], Pair]) -> None:
    model, _ = compiled("llama", False)
    before = counters["inductor"]["fxgraph_cache_miss"]
    runner = CompiledRunner(model, cache_for(model, pages=17), most_layers=1)
    runner.warm_up()
    assert counters["inductor"]["fxgraph_cache_miss"] == before
    assert runner.pool.data_ptr() == runner.cache.store.data_ptr()
