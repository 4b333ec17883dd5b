# Generated from notebooks/12_scheduler.ipynb by `helios export`; edit the notebook.
"""What a tick costs beside the model: a crowded scheduler over a model that costs nothing."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from helios.engine.config import EngineConfig
from helios.engine.engine import Engine
from helios.engine.job import Batch
from helios.engine.runner import TickInputs
from helios.engine.scheduler import Scheduler
from helios.engine.sequence import Request
from helios.kv.pages import PAGE_SIZE, PagePool
from helios.kv.prefix import PrefixCache
from helios.model.config import tiny_config
from helios.model.params import SamplingParams
from helios.model.sampling import SampleRow, sample

__all__ = [
    "ANSWER",
    "FreeRunner",
    "LARGE",
    "Load",
    "Overhead",
    "PROBES",
    "PROMPT",
    "SMALL",
    "VOCAB",
    "crowd_of",
    "crowded_engine",
    "measure_overhead",
    "sampling_time",
    "timed",
]
VOCAB, PROMPT, ANSWER, PROBES = 64, PAGE_SIZE + 1, PAGE_SIZE, 200


@dataclass(frozen=True)
class Load:
    """A crowd: requests that wait, sequences that run, and idle pages in the prefix cache."""

    queued: int
    running: int
    cached_pages: int


SMALL, LARGE = Load(10, 256, 100), Load(10_000, 256, 20_000)


class FreeRunner:
    """A forward that costs nothing: logits of zero for every row. It waits while it is not `open`.

    `before_s`, `after_s`: seconds of each turn up to the forward and from it to the delivery, once all sequences run.
    """

    def __init__(self, sequences: int) -> None:
        self.open = threading.Event()
        self.before_s: list[float] = []
        self.after_s: list[float] = []
        self._logits, self._full = torch.zeros(sequences, VOCAB), False
        self.mark_s = time.perf_counter()  # when the turn began, or the forward ended

    def forward(self, inputs: TickInputs) -> Tensor:
        """Logits [R, VOCAB] float32, R at most `sequences`."""
        self._full = len(inputs.rows) == len(self._logits)
        if self._full:
            self.before_s.append(time.perf_counter() - self.mark_s)
        self.open.wait()
        self.mark_s = time.perf_counter()
        return self._logits[: len(inputs.rows)]

    def delivered(self) -> None:
        """The turn's events are out."""
        if self._full:
            self.after_s.append(time.perf_counter() - self.mark_s)


def crowded_engine(load: Load, runner: FreeRunner) -> Engine:
    """An engine whose pages, beyond those its sequences will hold, are all in the prefix cache."""
    pool = PagePool(load.cached_pages + 2 * load.running + 1)
    prefix = PrefixCache(pool)
    for number in range(load.cached_pages):
        page = pool.allocate(1)
        prefix.publish([number.to_bytes(32, "little")], page)
        pool.release(page)
    model: Any = SimpleNamespace(config=tiny_config(vocab_size=VOCAB, context=PROMPT + ANSWER))
    nothing: Any = None  # no keys and values are stored
    return Engine(model, nothing, pool, prefix, EngineConfig(max_batch_size=load.running), runner=runner)


def crowd_of(load: Load) -> Iterator[Request]:
    """Requests without end, each prompt its own. The first ones are cut short: later, one ends in every tick."""
    for number in itertools.count():
        tokens = 1 + number * ANSWER // load.running if number < load.running else ANSWER
        start = [number // VOCAB**digit % VOCAB for digit in range(4)]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        yield Request(f"crowd-{number}", start + [0] * (PROMPT - len(start)), params)


@dataclass(frozen=True)
class Overhead:
    """Medians, in seconds. `before_s`: admission, prefix cache, plan, packing. `after_s`: sampling, pages, events."""

    load: Load
    before_s: float
    after_s: float
    sampling_s: float
    submit_s: float
    cancel_s: float

    @property
    def own_s(self) -> float:
        """A turn of the worker without its forward and without sampling."""
        return self.before_s + self.after_s - self.sampling_s


def timed(action: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def sampling_time(rows: int) -> float:
    """Seconds that one greedy choice for all rows takes, the median of fifty."""
    asked = [SampleRow(SamplingParams(temperature=0.0), [], [0], seed) for seed in range(rows)]
    return statistics.median(timed(lambda: sample(torch.zeros(rows, VOCAB), asked)) for _ in range(50))


def measure_overhead(load: Load, turns: int = 300) -> Overhead:
    """Keep a scheduler as crowded as `load` says for a number of turns of its worker, and time all but the forward."""
    requests, runner, done = crowd_of(load), FreeRunner(load.running), threading.Event()

    def renew(batch: Batch) -> None:
        runner.delivered()
        if len(runner.after_s) >= turns:
            return done.set()
        for _, event in batch:
            if event.finish_reason == "length":
                scheduler.submit(next(requests))
        runner.mark_s = time.perf_counter()

    places = load.queued + load.running + 1
    scheduler = Scheduler(lambda: crowded_engine(load, runner), max_waiting=places, deliver=renew)
    scheduler.start()
    scheduler.wait_ready()
    for _ in range(load.queued + load.running):
        scheduler.submit(next(requests))
    submits, cancels = [], []
    for probe in itertools.islice(requests, PROBES):
        submits.append(timed(lambda: scheduler.submit(probe)))  # noqa: B023
        cancels.append(timed(lambda: scheduler.cancel(probe.id)))  # noqa: B023
    runner.open.set()
    done.wait()
    scheduler.shutdown()
    before_s, after_s, submit_s, cancel_s = map(statistics.median, (runner.before_s, runner.after_s, submits, cancels))
    return Overhead(load, before_s, after_s, sampling_time(load.running), submit_s, cancel_s)
