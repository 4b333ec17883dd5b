"""The workloads have the lengths they promise, come from their seed alone, and arrive as asked."""

from collections import Counter

import pytest

from helios.bench.workloads import (
    WORKLOADS,
    Work,
    describe_lengths,
    ledger_workload,
    make_workload,
    thirty_requests,
)

VOCAB = 1000


def lengths(works: list[Work]) -> Counter[tuple[int, int]]:
    return Counter((len(work.prompt_ids), work.max_tokens) for work in works)


def test_thirty_requests_are_ten_of_each() -> None:
    works = thirty_requests(VOCAB)
    assert lengths(works) == {(512, 16): 10, (32, 128): 10, (128, 64): 10}
    assert Counter(work.kind for work in works) == {"prefill": 10, "decode": 10, "balanced": 10}
    assert all(work.arrival_s == 0 for work in works)


def test_the_kinds_are_interleaved() -> None:
    kinds = [work.kind for work in thirty_requests(VOCAB)]
    assert kinds != sorted(kinds)
    assert set(kinds[:15]) == {"prefill", "decode", "balanced"}


def test_the_seed_decides_everything() -> None:
    assert thirty_requests(VOCAB, seed=4, rate=2.0) == thirty_requests(VOCAB, seed=4, rate=2.0)
    assert thirty_requests(VOCAB, seed=4) != thirty_requests(VOCAB, seed=5)


@pytest.mark.parametrize("vocab", [256, 49152, 151936])
def test_prompts_keep_clear_of_special_tokens(vocab: int) -> None:
    for work in thirty_requests(vocab):
        assert all(vocab // 8 <= token < vocab // 2 for token in work.prompt_ids)


def test_no_two_prompts_share_a_beginning() -> None:
    starts = {tuple(work.prompt_ids[:16]) for work in thirty_requests(VOCAB)}
    assert len(starts) == 30


def test_poisson_arrivals() -> None:
    works = thirty_requests(VOCAB, rate=5.0)
    arrivals = [work.arrival_s for work in works]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    spans = [thirty_requests(VOCAB, seed=seed, rate=5.0)[-1].arrival_s for seed in range(100)]
    assert sum(spans) / 100 == pytest.approx(29 / 5, rel=0.1)
    assert [w.prompt_ids for w in works] == [w.prompt_ids for w in thirty_requests(VOCAB)]


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="requests per second"):
        thirty_requests(VOCAB, rate=rate)


def test_workloads_by_name() -> None:
    assert [len(make_workload(name, VOCAB)) for name in WORKLOADS] == [30, 10, 10, 10, 1]
    assert lengths(make_workload("prefill", VOCAB)) == {(512, 16): 10}
    assert lengths(make_workload("single", VOCAB)) == {(128, 64): 1}
    with pytest.raises(ValueError, match="choose one of mixed, prefill"):
        make_workload("chat", VOCAB)


def test_the_ledger_workload_shares_one_prefix() -> None:
    works = ledger_workload(VOCAB, seed=2)
    assert lengths(works) == {(288, 8): 3, (32, 32): 2, (96, 16): 1}
    shared = [work.prompt_ids for work in works if len(work.prompt_ids) == 288]
    assert shared[0][:256] == shared[1][:256] == shared[2][:256]
    assert len({tuple(prompt[256:]) for prompt in shared}) == 3
    assert describe_lengths(works) == "3×288/8 + 2×32/32 + 1×96/16"
