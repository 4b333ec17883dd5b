# Generated from notebooks/05_measuring.ipynb by `helios export`; edit the notebook.
"""The compass: measuring inference.

What a client saw of each request (when it was sent, when each token came) and every number a
benchmark reports about it: time to first token, end-to-end time, speed, gaps between tokens,
concurrency and drain.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

__all__ = [
    "RequestRecord",
    "Spread",
    "Summary",
    "concurrency",
    "drain_start",
    "median_summary",
    "percentile",
    "ratio",
    "summarize",
]


@dataclass(frozen=True)
class RequestRecord:
    """What the client saw of one request. Times are seconds on one clock (`time.perf_counter`).

    `sent_s` is the moment the request was due, even if the client was late to send it. `token_times_s` holds one
    entry per output token; tokens that arrived in one chunk share its time. `cached_tokens` counts prompt tokens
    whose keys and values the engine restored from a cache. `error` is None when the request ran to its end.
    """

    sent_s: float
    token_times_s: list[float]
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    kind: str = ""

    @property
    def completed(self) -> bool:
        """Ran to its end without an error and gave at least one token."""
        return self.error is None and bool(self.token_times_s)

    @property
    def finished_s(self) -> float:
        """The moment of the last token (of sending, if none came)."""
        return self.token_times_s[-1] if self.token_times_s else self.sent_s

    @property
    def ttft_s(self) -> float:
        """Time to first token: from sending to the first token, waiting included. NaN without tokens."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else math.nan

    @property
    def e2e_s(self) -> float:
        """End to end: from sending to the last token."""
        return self.finished_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies: n tokens have n − 1 gaps; tokens of one chunk have gaps of zero."""
        times = self.token_times_s
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]

    @property
    def decode_tok_s(self) -> float:
        """(n − 1) / (last token − first token). NaN with fewer than two tokens or when all came at once."""
        n = len(self.token_times_s)
        span = self.token_times_s[-1] - self.token_times_s[0] if n else 0.0
        return (n - 1) / span if n > 1 and span > 0 else math.nan

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens / time to first token; waiting in a queue counts against it."""
        return self.prompt_tokens / self.ttft_s if self.ttft_s > 0 else math.nan


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0–100), interpolated linearly between neighbours; NaNs are left out; NaN if none remain."""
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Spread:
    """How a quantity is spread over requests: its extremes, its median (p50) and its 95th percentile."""

    min: float
    p50: float
    p95: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of `values`; NaNs are left out."""
        return cls(*(percentile(values, q) for q in (0, 50, 95, 100)))


def concurrency(records: Sequence[RequestRecord]) -> list[tuple[float, int]]:
    """Requests in flight (sent, not finished) as steps (time, count from then on); failed ones do not count."""
    answered = [record for record in records if record.token_times_s]
    edges = [(record.sent_s, 1) for record in answered] + [(record.finished_s, -1) for record in answered]
    steps: list[tuple[float, int]] = []
    count = 0
    for time_s, change in sorted(edges):  # at equal times an end (−1) sorts before a start: no false peak
        count += change
        steps.append((time_s, count))
    return steps


def drain_start(steps: Sequence[tuple[float, int]]) -> float:
    """The moment from which fewer than half of the peak number of requests are in flight, for good; NaN if no steps."""
    peak = max((count for _, count in steps), default=0)
    started = math.nan
    busy = False
    for time_s, count in steps:
        if busy and count * 2 < peak:
            started = time_s
        busy = count * 2 >= peak
    return started


@dataclass(frozen=True)
class Summary:
    """All numbers of one benchmark run; times in seconds, speeds in tokens per second.

    Latencies and speeds per request are over completed requests. `duration_s` runs from the first request sent to
    the last token. `peak_concurrency` and `mean_concurrency` count requests in flight as the client sees them.
    `drain_s` is the time from the moment fewer than half of the peak stay in flight (for good) to the end, and
    `drain_fraction` its part of the duration. `max_token_rate` is the share of completed requests that gave exactly
    `max_tokens`; `cache_hit_rate` is restored prompt tokens / prompt tokens.
    """

    requests: int
    completed: int
    duration_s: float
    ttft_s: Spread
    e2e_s: Spread
    itl_s: Spread
    decode_tok_s: Spread
    prefill_tok_s: Spread
    output_tok_s: float
    total_tok_s: float
    requests_s: float
    peak_concurrency: int
    mean_concurrency: float
    drain_s: float
    drain_fraction: float
    prompt_tokens: int
    output_tokens: int
    completion_ratio: float
    max_token_rate: float
    restored_tokens: int
    cache_hit_rate: float

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict for JSON: a spread becomes a dict, NaN becomes None."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return cls(**{name: _rich(value) for name, value in data.items()})

    def value(self, path: str) -> float:
        """One number by its path, such as `"output_tok_s"` or `"ttft_s.p95"`."""
        found: Any = self
        for part in path.split("."):
            found = getattr(found, part)
        return float(found)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        return Spread(**{name: _rich(inner) for name, inner in value.items()})
    return math.nan if value is None else value


def ratio(part: float, whole: float) -> float:
    """part / whole, and NaN where there is nothing to divide by."""
    return part / whole if whole else math.nan


def summarize(records: Sequence[RequestRecord]) -> Summary:
    """Every number of the benchmark from the records of one run (see `Summary` for the definitions)."""
    done = [record for record in records if record.completed]
    steps = concurrency(records)
    end = steps[-1][0] if steps else math.nan
    duration = end - min((record.sent_s for record in records), default=math.nan)
    prompt, output = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    restored, drain = sum(r.cached_tokens for r in done), end - drain_start(steps)
    return Summary(
        requests=len(records),
        completed=len(done),
        duration_s=duration,
        ttft_s=Spread.of([r.ttft_s for r in done]),
        e2e_s=Spread.of([r.e2e_s for r in done]),
        itl_s=Spread.of([gap for r in done for gap in r.gaps_s]),
        decode_tok_s=Spread.of([r.decode_tok_s for r in done]),
        prefill_tok_s=Spread.of([r.prefill_tok_s for r in done]),
        output_tok_s=ratio(output, duration),
        total_tok_s=ratio(prompt + output, duration),
        requests_s=ratio(len(done), duration),
        peak_concurrency=max((count for _, count in steps), default=0),
        mean_concurrency=ratio(sum(r.e2e_s for r in records), duration),
        drain_s=drain,
        drain_fraction=ratio(drain, duration),
        prompt_tokens=prompt,
        output_tokens=output,
        completion_ratio=ratio(len(done), len(records)),
        max_token_rate=ratio(sum(r.output_tokens == r.max_tokens for r in done), len(done)),
        restored_tokens=restored,
        cache_hit_rate=ratio(restored, prompt),
    )


def median_summary(summaries: Sequence[Summary]) -> Summary:
    """The median of every number over repeated runs, each on its own (so the numbers need not be of one same run)."""
    if not summaries:
        raise ValueError("a median needs at least one run: pass the summaries of the repeats")
    return _median(list(summaries), Summary)  # type: ignore[no-any-return]


def _median(values: list[Any], kind: Any) -> Any:
    if dataclasses.is_dataclass(values[0]):
        return kind(
            **{f.name: _median([getattr(v, f.name) for v in values], Spread) for f in dataclasses.fields(values[0])}
        )
    if isinstance(values[0], int):
        return statistics.median_low(values)
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan
