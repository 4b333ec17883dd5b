"""Every number of the benchmark against values worked out by hand or by NumPy."""

import json
import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from helios.bench.metrics import (
    RequestRecord,
    Spread,
    Summary,
    concurrency,
    drain_start,
    median_summary,
    percentile,
    summarize,
)


def record(sent: float, times: list[float], **changes: object) -> RequestRecord:
    fields = {"prompt_tokens": 10, "output_tokens": len(times), "max_tokens": len(times)}
    return RequestRecord(sent, times, **(fields | changes))  # type: ignore[arg-type]


def test_one_request_by_hand() -> None:
    seen = record(10.0, [10.4, 10.5, 10.6, 10.9], prompt_tokens=20)
    assert seen.ttft_s == pytest.approx(0.4)
    assert seen.e2e_s == pytest.approx(0.9)
    assert seen.gaps_s == pytest.approx([0.1, 0.1, 0.3])
    assert seen.decode_tok_s == pytest.approx(3 / 0.5)
    assert seen.prefill_tok_s == pytest.approx(20 / 0.4)


def test_a_request_without_tokens_has_no_times() -> None:
    failed = record(1.0, [], error="refused")
    assert not failed.completed
    assert failed.gaps_s == []
    assert all(math.isnan(value) for value in (failed.ttft_s, failed.decode_tok_s, failed.prefill_tok_s))


@pytest.mark.parametrize("times", [[2.0], [2.0, 2.0]])
def test_decode_speed_needs_two_moments(times: list[float]) -> None:
    assert math.isnan(record(1.0, times).decode_tok_s)


@pytest.mark.parametrize("q", [0, 5, 50, 95, 99.9, 100])
def test_percentile_agrees_with_numpy(q: float) -> None:
    rng = random.Random(7)
    for count in (1, 2, 3, 30, 101):
        values = [rng.gauss(0, 1) for _ in range(count)]
        assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)))


def test_percentile_leaves_nan_out() -> None:
    assert percentile([math.nan, 3.0, math.nan, 1.0], 50) == 2.0
    assert math.isnan(percentile([], 50))
    assert math.isnan(percentile([math.nan], 95))


def brute_force(records: list[RequestRecord], moment: float) -> int:
    return sum(r.sent_s <= moment < r.finished_s for r in records)


def test_concurrency_against_counting() -> None:
    rng = random.Random(3)
    records = [record(sent := rng.random() * 5, [sent + 0.01 + rng.random() * 3]) for _ in range(40)]
    steps = concurrency(records)
    for (begin, count), (end, _) in zip(steps, steps[1:], strict=False):
        assert count == brute_force(records, (begin + end) / 2)
    assert steps[-1][1] == 0


def test_an_end_and_a_start_at_one_moment_are_not_two_at_once() -> None:
    back_to_back = [record(0.0, [1.0]), record(1.0, [2.0])]
    assert max(count for _, count in concurrency(back_to_back)) == 1


def test_drain_begins_when_fewer_than_half_stay_for_good() -> None:
    ends = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 4.0, 5.0]
    assert drain_start(concurrency([record(0.0, [end]) for end in ends])) == 1.4
    # It dips below half and comes back: the first dip is no drain.
    dip = [record(0.0, [1.0]), record(0.0, [1.0]), record(0.0, [9.0]), record(0.0, [2.0]), record(0.0, [1.5])]
    late = [record(3.0, [8.0]), record(3.0, [8.5])]
    assert drain_start(concurrency(dip + late)) == 8.0
    assert math.isnan(drain_start([]))


def test_summary_by_hand() -> None:
    records = [
        record(0.0, [1.0, 2.0, 3.0], prompt_tokens=100, cached_tokens=50),
        record(0.0, [2.0, 4.0], prompt_tokens=20, max_tokens=5),
        record(0.5, [], error="queue full", prompt_tokens=7),
    ]
    summary = summarize(records)
    assert (summary.requests, summary.completed, summary.duration_s) == (3, 2, 4.0)
    assert (summary.prompt_tokens, summary.output_tokens, summary.restored_tokens) == (120, 5, 50)
    assert summary.ttft_s == Spread(1.0, 1.5, pytest.approx(1.95), 2.0)
    assert summary.itl_s.max == 2.0
    assert summary.itl_s.p50 == 1.0
    assert summary.decode_tok_s.max == 1.0
    assert summary.decode_tok_s.min == 0.5
    assert summary.prefill_tok_s.max == 100.0
    assert summary.output_tok_s == pytest.approx(5 / 4)
    assert summary.total_tok_s == pytest.approx(125 / 4)
    assert summary.requests_s == pytest.approx(0.5)
    assert (summary.peak_concurrency, summary.mean_concurrency) == (2, pytest.approx(7 / 4))
    assert summary.completion_ratio == pytest.approx(2 / 3)
    assert summary.max_token_rate == 0.5
    assert summary.cache_hit_rate == pytest.approx(50 / 120)


def test_drain_fraction_is_of_the_duration() -> None:
    ends = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 4.0, 5.0]
    summary = summarize([record(0.0, [end]) for end in ends])
    assert summary.drain_s == pytest.approx(3.6)
    assert summary.drain_fraction == pytest.approx(0.72)


@pytest.mark.parametrize("records", [[], [record(0.0, [], error="down")]])
def test_nothing_to_measure_is_not_a_number(records: list[RequestRecord]) -> None:
    summary = summarize(records)
    assert summary.completed == 0
    assert math.isnan(summary.ttft_s.p50)
    assert "NaN" not in json.dumps(summary.to_dict())


def test_json_round_trip() -> None:
    summary = summarize([record(0.0, [1.0])])
    again = Summary.from_dict(json.loads(json.dumps(summary.to_dict())))
    assert again.to_dict() == summary.to_dict()
    assert math.isnan(again.decode_tok_s.p50)
    assert again.value("ttft_s.p95") == 1.0


def test_median_takes_every_number_on_its_own() -> None:
    shape: Callable[[float], Summary] = lambda end: summarize([record(0.0, [1.0, end])])  # noqa: E731
    middle = median_summary([shape(9.0), shape(2.0), shape(3.0)])
    assert middle.duration_s == 3.0
    assert middle.completed == 1
    with pytest.raises(ValueError, match="at least one run"):
        median_summary([])
