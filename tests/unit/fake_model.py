"""An engine over a fake model whose answer depends on every stored token: a wrong page, position or copy shows."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from helios.engine.config import EngineConfig
from helios.engine.engine import Engine
from helios.engine.runner import TickInputs
from helios.engine.sequence import Request, TokenEvent
from helios.kv.pages import PAGE_SIZE, PagePool
from helios.kv.prefix import PrefixCache
from helios.model.config import tiny_config
from helios.model.params import SamplingParams

VOCAB = 64
EOS = 7
Script = Callable[[Sequence[int]], int | None]


def logits_after(history: Sequence[int]) -> np.ndarray[Any, Any]:
    """Logits [V] that depend on the whole history; EOS is never likely, so that answers end where a test says."""
    rng = np.random.default_rng(zlib.crc32(np.asarray(history, np.int64).tobytes()))
    logits = rng.standard_normal(VOCAB).astype(np.float32)
    logits[EOS] = -50.0
    return logits


def expected(prompt: Sequence[int], tokens: int) -> list[int]:
    """The greedy answer of the fake model."""
    history = list(prompt)
    for _ in range(tokens):
        history.append(int(logits_after(history).argmax()))
    return history[len(prompt) :]


class FakeModel:
    """Cache and runner in one: pages hold token ids; a row's logits are those of the tokens its page table reaches."""

    def __init__(self, pages: int, script: Script | None = None) -> None:
        self.store: list[list[int | None]] = [[None] * PAGE_SIZE for _ in range(pages)]
        self.script = script or (lambda history: None)
        self.passes: list[list[int]] = []

    def copy_page(self, source: int, target: int) -> None:
        self.store[target] = list(self.store[source])

    def forward(self, inputs: TickInputs) -> torch.Tensor:
        histories: list[list[int]] = []
        at = 0
        for span in inputs.spans:
            first = span.context - span.query
            positions = inputs.positions[at : at + span.query].tolist()
            assert positions == list(range(first, span.context)), "positions continue where the cache ends"
            for position, token in zip(positions, inputs.token_ids[at : at + span.query].tolist(), strict=True):
                self.store[span.pages[position // PAGE_SIZE]][position % PAGE_SIZE] = token
            kept = [t for page in span.pages for t in self.store[page]][: span.context]
            assert None not in kept, "the page table reaches a slot that was never written"
            histories += [kept[: position + 1] for position in positions]  # type: ignore[misc]
            at += span.query
        assert at == len(inputs.token_ids) == len(inputs.positions)
        self.passes.append([span.query for span in inputs.spans])
        return torch.tensor(np.stack([self._row(histories[row]) for row in inputs.rows.tolist()]))

    def _row(self, history: Sequence[int]) -> np.ndarray[Any, Any]:
        logits = logits_after(history)
        wanted = self.script(history)
        if wanted is not None:
            logits = np.full(VOCAB, np.nan, np.float32) if wanted < 0 else logits
            logits[wanted] += 200.0
        return logits


def make_engine(pages: int = 64, script: Script | None = None, prefix: bool = True, **settings: Any) -> Engine:
    config = EngineConfig(debug_checks=True, **settings)
    pool = PagePool(pages + 1)
    fake: Any = FakeModel(pages + 1, script)
    model: Any = SimpleNamespace(config=tiny_config(vocab_size=VOCAB, context=2048, eos_token_ids=(EOS,)))
    return Engine(model, fake, pool, PrefixCache(pool) if prefix else None, config, runner=fake)


def greedy(name: str, prompt: Sequence[int], max_tokens: int | None = 8, **params: Any) -> Request:
    return Request(name, list(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens, **params), arrival_s=0.0)


def words(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 7919 + length).choices([t for t in range(VOCAB) if t != EOS], k=length)


class Log:
    """Ticks an engine and sorts its events by choice."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.now = engine, 0.0
        self.events: dict[tuple[str, int], list[TokenEvent]] = {}

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            for event in self.engine.tick(self.now):
                self.events.setdefault((event.request_id, event.index), []).append(event)
            self.engine.check()
            self.now += 0.01

    def drain(self) -> Log:
        for _ in range(5000):
            if not self.engine.running_count:
                return self
            self.tick()
        raise AssertionError("the engine does not come to an end")

    def ids(self, name: str, index: int = 0) -> list[int]:
        return [event.token_id for event in self.events.get((name, index), [])]

    def last(self, name: str, index: int = 0) -> TokenEvent:
        return self.events[name, index][-1]


def all_pages_return(engine: Engine) -> None:
    free = engine.pool.free_count + (engine.prefix.evictable_count if engine.prefix is not None else 0)
    assert free == engine.pool.capacity, "pages were lost"


def five_take_turns(engine: Engine) -> Log:
    """Five sequences on a budget of two tokens a tick: each gains a token in every five ticks, at the least."""
    log = Log(engine)
    for i in range(5):
        engine.admit(greedy(f"{i}", words(1, seed=i), 99))
    log.tick(45)
    before = [len(log.ids(f"{i}")) for i in range(5)]
    log.tick(20)
    gained = [len(log.ids(f"{i}")) - had for i, had in enumerate(before)]
    assert sum(gained) == 40 and min(gained) >= 20 // 5, gained
    return log
