"""Constrained answers and prompt scores by every runner, against the model without a cache: fp32, token for token."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.engine.build import choose_runner
from helios.engine.config import EngineConfig
from helios.engine.engine import Engine
from helios.engine.runner import Runner
from helios.engine.sequence import Request, TokenEvent
from helios.fast.buckets import DirectLink, bucket_grid
from helios.fast.graphs import GraphRunner, ReplayByTape
from helios.fast.static import GatheredDecode
from helios.kv.paged import PagedKVCache
from helios.kv.pages import PagePool
from helios.kv.prefix import PrefixCache
from helios.model.attention import attend_decode
from helios.model.masks import Mask, pack_mask
from helios.model.params import SamplingParams
from helios.model.transformer import NoCache, Transformer, load_transformer

PAGES = 40
LENGTHS = (1, 40, 256, 300)


class Rhythm:
    """Even ids and odd ids in turn, ten of each; complete after ten tokens."""

    def __init__(self, said: int = 0) -> None:
        self.said = said

    def options(self) -> list[int]:
        return list(range(20 + self.said % 2, 40, 2))

    def mask(self) -> Mask | None:
        return pack_mask(self.options(), 250)

    def accept(self, token_id: int) -> bool:
        self.said += 1
        return self.said == 10

    def fork(self) -> Rhythm:
        return Rhythm(self.said)


def runner_of(kind: str, model: Transformer, cache: PagedKVCache) -> Runner:
    if kind == "graphs":
        buckets = bucket_grid(8, 3)
        attention = GatheredDecode(attend_decode, cache.store, buckets)
        return GraphRunner(model, cache, attention, buckets, recorder=ReplayByTape(), link=DirectLink())
    try:
        return choose_runner(model, cache, EngineConfig(runner=kind))[1]
    except ValueError as obstacle:
        pytest.skip(str(obstacle))


@torch.inference_mode()
def truth(model: Transformer, prompt: list[int]) -> tuple[list[int], list[int], torch.Tensor]:
    """The greedy answer, the greedy answer that keeps the rhythm, and ln p [P, V] behind the prompt's tokens."""

    def behind(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor(ids), torch.arange(len(ids)), NoCache())

    free, bound = list(prompt), list(prompt)
    for step in range(10):
        free.append(int(behind(free)[-1].argmax()))
        options = Rhythm(step).options()
        bound.append(options[int(behind(bound)[-1][options].argmax())])
    return free[len(prompt) :], bound[len(prompt) :], behind(prompt).log_softmax(-1)


@pytest.fixture(scope="module")
def truths(tiny_folder: Callable[[str], Path]) -> dict[int, tuple[list[int], list[int], list[int], torch.Tensor]]:
    model = load_transformer(tiny_folder("qwen3"), device="cpu", dtype=torch.float32)
    prompts = {length: random.Random(length).choices(range(250), k=length) for length in LENGTHS}
    return {length: (prompt, *truth(model, prompt)) for length, prompt in prompts.items()}


@pytest.mark.parametrize("chunk", [64, 1024])
@pytest.mark.parametrize("kind", ["eager", "native", "graphs"])
def test_constrained_scored_and_plain_requests_together(
    kind: str, chunk: int, truths: Any, tiny_folder: Callable[[str], Path]
) -> None:
    model = load_transformer(tiny_folder("qwen3"), device="cpu", dtype=torch.float32)
    pool, cache = PagePool(PAGES), PagedKVCache(model.config.kv_spec, PAGES, query_heads=model.config.heads)
    config = EngineConfig(max_batch_size=8, prefill_chunk_size=chunk, debug_checks=True)
    engine = Engine(model, cache, pool, PrefixCache(pool), config, runner=runner_of(kind, model, cache))
    for round_ in range(2):  # the second finds its prefixes cached
        seen: dict[tuple[str, int], list[TokenEvent]] = {}
        for length, (prompt, *_) in truths.items():
            greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
            scored = SamplingParams(prompt_logprobs=1, **greedy)
            asked = [
                Request(f"free {length}", prompt, SamplingParams(**greedy), arrival_s=0.0),
                Request(f"bound {length}", prompt, SamplingParams(n=2, **greedy), arrival_s=0.0, constraint=Rhythm()),
                Request(f"scored {length}", prompt, scored, arrival_s=0.0),
            ]
            for request in asked:
                while not engine.can_admit(request):
                    note(engine, seen)
                engine.admit(request)
        while engine.running_count:
            note(engine, seen)
        for length, (prompt, free, bound, scores) in truths.items():
            for name in ("free", "scored"):
                assert [event.token_id for event in seen[f"{name} {length}", 0]] == free, (round_, name, length)
            for index in range(2):
                assert [event.token_id for event in seen[f"bound {length}", index]] == bound, (round_, length)
                assert seen[f"bound {length}", index][-1].finish_reason == "stop"
            found = seen[f"scored {length}", 0][0].prompt_logprobs
            assert found is not None and found[0] is None
            for i, entry in enumerate(found[1:], 1):
                assert entry is not None
                assert entry.logprob == pytest.approx(scores[i - 1, prompt[i]].item(), abs=1e-3)
    if isinstance(engine.runner, GraphRunner):
        assert engine.runner.ticks["replayed"] > 10


def note(engine: Engine, seen: dict[tuple[str, int], list[TokenEvent]]) -> None:
    for event in engine.tick(0.0):
        seen.setdefault((event.request_id, event.index), []).append(event)
