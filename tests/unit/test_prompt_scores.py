"""Log-probabilities of a prompt's own tokens, however the prompt is cut, against one full pass of a tiny model."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from helios.engine.config import EngineConfig
from helios.engine.engine import NOT_FINITE, Engine
from helios.engine.job import Job, JobEvent
from helios.engine.runner import ModelRunner, TickInputs
from helios.engine.scheduler import Scheduler
from helios.engine.sequence import Request
from helios.engine.tick import SCORED_TOKENS
from helios.kv.paged import PagedKVCache
from helios.kv.pages import PagePool
from helios.kv.prefix import PrefixCache
from helios.model.config import tiny_config
from helios.model.params import RequestError, SamplingParams
from helios.model.sampling import TokenLogprob
from helios.model.transformer import NoCache, Transformer
from helios.model.weights import random_weights
from tests.answers import drain

CONFIG = tiny_config("qwen3")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.from_weights(CONFIG, random_weights(CONFIG, seed=3))


class Watched(ModelRunner):
    """The eager runner; it notes the most rows of logits it was asked for at once."""

    most_rows = 0

    def forward(self, inputs: TickInputs) -> torch.Tensor:
        self.most_rows = max(self.most_rows, len(inputs.rows))
        return super().forward(inputs)


def engine_over(model: Transformer, prefix: bool = True, **settings: Any) -> Engine:
    pool = PagePool(41)
    cache = PagedKVCache(CONFIG.kv_spec, 41, query_heads=CONFIG.heads)
    config = EngineConfig(debug_checks=True, **settings)
    return Engine(model, cache, pool, PrefixCache(pool) if prefix else None, config, runner=Watched(model, cache))


def words(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 7919 + length).choices(range(250), k=length)


def asking(name: str, prompt: list[int], top: int | None = 2, tokens: int = 3, **params: Any) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, prompt_logprobs=top, ignore_eos=True, **params)
    return Request(name, prompt, sampling, arrival_s=0.0)


@torch.inference_mode()
def distribution(model: Transformer, prompt: list[int]) -> torch.Tensor:
    """ln p [P, V] behind every token of the prompt, in one pass without a cache."""
    return model(torch.tensor(prompt), torch.arange(len(prompt)), NoCache()).log_softmax(-1)


def check_scores(model: Transformer, prompt: list[int], scores: list[TokenLogprob | None] | None, top: int) -> None:
    assert scores is not None and len(scores) == len(prompt) and scores[0] is None
    truth = distribution(model, prompt)
    for i, score in enumerate(scores[1:], 1):
        assert score is not None and score.token_id == prompt[i]
        assert score.logprob == pytest.approx(truth[i - 1, prompt[i]].item(), abs=1e-4)
        assert len(score.top) == top
        best = truth[i - 1].topk(top).values.tolist()
        assert [value for _, value in score.top] == pytest.approx(best, abs=1e-4)
        assert all(truth[i - 1, token].item() == pytest.approx(value, abs=1e-4) for token, value in score.top)


@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize("chunk", [1, 7, 64, 2000])
def test_every_token_of_a_prompt_however_it_is_cut(model: Transformer, chunk: int, top: int) -> None:
    engine = engine_over(model, prefill_chunk_size=chunk)
    for length in (1, 2, 30) if chunk == 1 else (1, 2, 255, 256, 257, 300):
        engine.admit(asking(f"{length}", words(length), top))
        events = drain(engine)[f"{length}", 0]
        check_scores(model, words(length), events[0].prompt_logprobs, top)
        assert all(event.prompt_logprobs is None for event in events[1:]) and len(events) == 3


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("chunk", [50, 300, 2000])
def test_beside_others_and_with_a_warm_cache(model: Transformer, chunk: int, prefix: bool) -> None:
    def requests() -> list[Request]:
        plain = [asking(f"plain {i}", words(200 + 100 * i, seed=i), None, 12, logprobs=1) for i in range(3)]
        scored = [asking(f"scored {i}", words(200 + 100 * i, seed=i), 3, 12, logprobs=1, n=1 + i) for i in range(3)]
        return [request for pair in zip(plain, scored, strict=True) for request in pair]

    engine = engine_over(model, prefix, prefill_chunk_size=chunk)
    alone: dict[str, list[int]] = {}
    for request in requests():
        if request.id.startswith("plain"):
            engine.admit(asking(request.id, request.prompt_ids, None, 12))
            alone[request.id] = [event.token_id for event in drain(engine)[request.id, 0]]
    for request in requests():  # what they are about to share is cached by now
        engine.admit(request)
    seen = drain(engine)
    for i in range(3):
        for index in range(1 + i):
            events = seen[f"scored {i}", index]
            assert [event.token_id for event in events] == alone[f"plain {i}"]
            assert events[-1].cached_tokens == 0, "what is scored must be computed"
            assert (events[0].prompt_logprobs is None) == (index > 0)
        check_scores(model, words(200 + 100 * i, seed=i), seen[f"scored {i}", 0][0].prompt_logprobs, 3)
        assert [event.token_id for event in seen[f"plain {i}", 0]] == alone[f"plain {i}"]
    assert engine.runner.most_rows <= SCORED_TOKENS + 2 * 9  # type: ignore[attr-defined]
    assert engine.pool.free_count + (engine.prefix.evictable_count if engine.prefix else 0) == engine.pool.capacity


def test_a_scored_prompt_is_published_like_any_other(model: Transformer) -> None:
    engine = engine_over(model)
    engine.admit(asking("scored", words(600)))
    first = drain(engine)["scored", 0]
    engine.admit(asking("plain", words(600), None))
    second = drain(engine)["plain", 0]
    assert second[-1].cached_tokens == 512
    assert [event.token_id for event in first] == [event.token_id for event in second]


def test_a_scored_prompt_that_is_not_finite_fails_alone(model: Transformer) -> None:
    class Spoiled(Watched):
        def forward(self, inputs: TickInputs) -> torch.Tensor:
            logits = super().forward(inputs)
            if len(inputs.rows) > 100:
                logits[50] = float("nan")
            return logits

    engine = engine_over(model)
    engine.runner = Spoiled(model, engine.cache)
    engine.admit(asking("well", words(40), None))
    engine.admit(asking("sick", words(300), n=2))
    seen = drain(engine)
    assert [seen["sick", i][-1].error for i in range(2)] == [NOT_FINITE] * 2
    engine.runner = Watched(model, engine.cache)
    engine.admit(asking("again", words(300)))
    check_scores(model, words(300), drain(engine)["again", 0][0].prompt_logprobs, 2)
    engine.admit(asking("well again", words(40), None))
    assert [e.token_id for e in drain(engine)["well again", 0]] == [e.token_id for e in seen["well", 0]]


def test_cancelled_half_way(model: Transformer) -> None:
    engine = engine_over(model, prefill_chunk_size=64)
    engine.admit(asking("gone", words(300)))
    engine.tick(0.0), engine.tick(0.0)
    assert engine.cancel("gone")
    engine.admit(asking("again", words(300)))
    check_scores(model, words(300), drain(engine)["again", 0][0].prompt_logprobs, 2)


@pytest.mark.parametrize("bad", [-1, 21, True, "2", 1.0])
def test_bad_numbers_are_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=bad)


def test_the_scheduler_hands_scores_on_once(model: Transformer) -> None:
    batches: list[list[tuple[Job, JobEvent]]] = []
    scheduler = Scheduler(lambda: engine_over(model), deliver=batches.append)
    scheduler.start()
    scheduler.wait_ready()
    job = scheduler.submit(asking("a", words(300), n=2))
    while not job.finished:
        time.sleep(0.01)
    scheduler.shutdown()
    events = [event for batch in batches for _, event in batch]
    (carrier,) = [event for event in events if event.prompt_logprobs is not None]
    assert carrier.index == 0 and carrier is next(event for event in events if event.index == 0)
    check_scores(model, words(300), carrier.prompt_logprobs, 2)
    merged = JobEvent(0).then(carrier).then(JobEvent(0, "more"))
    assert merged.prompt_logprobs is carrier.prompt_logprobs
