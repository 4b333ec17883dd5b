# Generated from notebooks/25_watching.ipynb by `helios export`; edit the notebook.
"""Watching.

What a server must tell the people who run it, and whom it must not listen to: metrics counted in
the worker at the price of a list access, keys, an origin list for browsers, and one line of log for
each request.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from helios.engine.engine import Engine
from helios.engine.job import Batch, Job
from helios.engine.runner import Runner, TickInputs

__all__ = [
    "BETWEEN_TOKENS_S",
    "CHOICES",
    "CountingRunner",
    "FIRST_TOKEN_S",
    "HISTOGRAMS",
    "Histogram",
    "Metrics",
    "PHASE_S",
    "Progress",
    "REASONS",
    "REQUEST_TOKENS",
    "SECONDS",
    "TICK_TOKENS",
    "log",
]
log = logging.getLogger("helios.serve")

# Upper bounds of the buckets, in seconds and tokens: vLLM's, so that its dashboards fit, and finer ones below.
SECONDS = (1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, *SECONDS, 160, 640, 2560)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, *SECONDS)
PHASE_S = (.005, .01, .025, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
           1920, 7680)  # fmt: skip
TICK_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5) if step * 10**power <= 200_000)
CHOICES = (1, 2, 5, 10, 20)


class Histogram:
    """How often values fell between `bounds` (one equal to a bound lies below it), and their sum. For one writer."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus's form: for each bound how many values were at most that, and all of them for "+Inf"."""
        below, out = 0, []
        for bound, count in zip([*map(float, self.bounds), "+Inf"], list(self.counts), strict=True):
            below += count
            out.append((str(bound), float(below)))
        return out


HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From submission to the first token.", FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Between two tokens of one choice.", BETWEEN_TOKENS_S),
    "request_time_per_output_token_seconds": ("A request's mean time per token after its first.", BETWEEN_TOKENS_S),
    "e2e_request_latency_seconds": ("From submission to the end.", PHASE_S),
    "request_queue_time_seconds": ("Waiting for admission.", PHASE_S),
    "request_inference_time_seconds": ("From admission to the end.", PHASE_S),
    "request_prefill_time_seconds": ("From admission to the first token.", PHASE_S),
    "request_decode_time_seconds": ("From the first token to the end.", PHASE_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", REQUEST_TOKENS),
    "request_generation_tokens": ("Tokens generated for a request, all choices together.", REQUEST_TOKENS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest choice.", REQUEST_TOKENS),
    "request_params_n": ("Choices asked for.", CHOICES),
    "request_params_max_tokens": ("The max_tokens asked for.", REQUEST_TOKENS),
    "iteration_tokens_total": ("Tokens computed in one tick, prompts and answers together.", TICK_TOKENS),
}
REASONS = ("stop", "length", "abort", "error")


class Progress:
    """What is remembered of a job between two of its events: per choice its tokens and when the last one came."""

    __slots__ = ("last_s", "open", "tokens")

    def __init__(self, choices: int, first_token_s: float) -> None:
        self.open, self.tokens, self.last_s = choices, [0] * choices, [first_token_s] * choices


class Metrics:
    """Counts what the worker delivers. `observe` is for the worker's thread alone; others only read, without a lock.

    `clock` is the scheduler's, in seconds. `reasons` counts requests by how their last choice ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: dict[str, Progress] = {}
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.reasons = dict.fromkeys(REASONS, 0)
        self.answers: dict[tuple[str, int], int] = {}  # HTTP answers by path and status; the event loop's own

    def _count(self, batch: Batch) -> None:
        now, gaps = self._clock(), dict[float, int]()
        for job, event in batch:
            live = self._live.get(job.id) or self._begin(job)
            index, fresh = event.index, len(event.token_ids)
            if fresh:
                steps = fresh if live.tokens[index] else fresh - 1  # before the first token of all there is no gap
                if steps:
                    gap = (now - live.last_s[index]) / steps
                    gaps[gap] = gaps.get(gap, 0) + steps
                live.tokens[index] += fresh
                live.last_s[index] = now
            if event.finish_reason is not None:
                live.open -= 1
                if not live.open:
                    self._end(job, live, event.finish_reason, now)
        for gap, times in gaps.items():
            self.histograms["inter_token_latency_seconds"].add(gap, times)

    def _begin(self, job: Job) -> Progress:
        """A job's first event: its first token is there, or it ended without one."""
        first_s = job.timings.first_token_s
        if first_s is not None:
            self.histograms["time_to_first_token_seconds"].add(first_s - job.timings.queued_s)
        live = self._live[job.id] = Progress(job.request.params.n, job.timings.queued_s if first_s is None else first_s)
        return live

    def _end(self, job: Job, live: Progress, reason: str, now: float) -> None:
        del self._live[job.id]
        self.reasons[reason] += 1
        at, params, add = job.timings, job.request.params, self._add
        end = now if at.finished_s is None else at.finished_s
        add("e2e_request_latency_seconds", end - at.queued_s)
        add("request_queue_time_seconds", (end if at.admitted_s is None else at.admitted_s) - at.queued_s)
        if at.admitted_s is not None:
            add("request_inference_time_seconds", end - at.admitted_s)
            add("request_prefill_time_seconds", (end if at.first_token_s is None else at.first_token_s) - at.admitted_s)
        if at.first_token_s is not None:
            add("request_decode_time_seconds", end - at.first_token_s)
            if (steps := max(live.tokens) - 1) > 0:
                add("request_time_per_output_token_seconds", (end - at.first_token_s) / steps)
        add("request_prompt_tokens", job.prompt_tokens)
        add("request_generation_tokens", sum(live.tokens))
        add("request_max_num_generation_tokens", max(live.tokens))
        add("request_params_n", params.n)
        if params.max_tokens is not None:
            add("request_params_max_tokens", params.max_tokens)

    def _add(self, name: str, value: float) -> None:
        self.histograms[name].add(value)

    def observe(self, batch: Batch) -> None:
        """Count one tick's events. Called by the worker; never raises."""
        try:
            self._count(batch)
        except Exception:
            log.exception("a tick could not be counted; the metrics are incomplete from here on")

    def meter(self, engine: Engine) -> Engine:
        """The same engine, its passes counted from now on. For the thread that ticks it, before the first tick."""
        engine.runner = CountingRunner(engine.runner, self.histograms["iteration_tokens_total"])
        return engine

    def answered(self, path: str, status: int) -> None:
        """Count one HTTP answer. For the event loop's thread; `path` must come from a fixed list, not from clients."""
        self.answers[path, status] = self.answers.get((path, status), 0) + 1


class CountingRunner:
    """Stands in for `runner` and counts the tokens of each of its passes."""

    def __init__(self, runner: Runner, tokens: Histogram) -> None:
        self._runner, self._tokens = runner, tokens

    def forward(self, inputs: TickInputs) -> Tensor:
        """As the runner's own."""
        self._tokens.add(len(inputs.token_ids))
        return self._runner.forward(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)
