"""Numbers at the ends of their ranges: no parameters and no finite logits may lead out of the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helios.model.draw import draw, likeliest
from helios.model.params import RequestError, SamplingParams
from helios.model.sampling import SampleRow, sample

ENDS = [0.0, 1.0, -1.0, 1e-40, 88.0, 1e30, -1e30, 3.4e38, -3.4e38]


def row(banned: Any = (), prompt: Any = (), outputs: Any = (), **options: Any) -> SampleRow:
    return SampleRow(SamplingParams(**options), prompt, outputs, 7, banned)


@pytest.mark.parametrize("penalty", [1e-40, 1e-9, 0.0099, 100.1, 1e300])
def test_a_repetition_penalty_that_would_overflow_is_refused(penalty: float) -> None:
    with pytest.raises(RequestError, match=r"at least 0\.01 and at most 100") as refused:
        SamplingParams(repetition_penalty=penalty)
    assert refused.value.param == "repetition_penalty"


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}])
@pytest.mark.parametrize("vocab", [1, 127, 128, 300])
def test_a_ban_of_everything_is_lifted(options: dict[str, Any], vocab: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    every = range(vocab)
    biased = row(every, logit_bias={0: 100.0}, **options)
    result = sample(logits, [row(every, **options), row(**options), biased])
    free = sample(logits, [row(**options), row(**options), row(logit_bias={0: 100.0}, **options)])
    assert result.ids == free.ids and result.ids[2] == 0 and not result.bad


def test_a_row_that_temperature_would_overflow_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3e38, 1e38, -3e38], [-3e38, -2e38, -3.4e38, -3e38]])
    for options in ({}, {"top_k": 2}, {"top_p": 0.9}):
        assert sample(logits, [row(temperature=2e-5, **options)] * 2).ids == [1, 1]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 5, 299])
@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {}, {"top_p": 0.9}, {"repetition_penalty": 1.3, "logprobs": 1}]
)
def test_a_broken_row_never_becomes_an_id(poison: float, place: int, options: dict[str, Any]) -> None:
    logits = torch.zeros(2, 300)
    logits[0, place] = poison
    for banned in ((), (place,), range(300)):
        result = sample(logits, [row(banned, [place], **options), row(**options)])
        assert result.bad == [0] and result.ids[0] == -1 and result.logprobs[0] is None
        assert 0 <= result.ids[1] < 300


@pytest.mark.parametrize("width", [3, 128, 129, 1000])
def test_weights_without_a_distribution_draw_nothing(width: int) -> None:
    weights = torch.ones(5, width)
    weights[0, 0], weights[1, -1], weights[2, 1], weights[3] = math.nan, math.nan, math.inf, 0.0
    ids = draw(weights, torch.full((5,), 1 - 2.0**-24, dtype=torch.float64)).tolist()
    assert ids == [-1, -1, -1, -1, width - 1]
    assert int(likeliest(torch.full((1, width), math.nan))[1]) < width


@st.composite
def extreme_rows(pick: Any) -> SampleRow:
    def one(*values: Any) -> Any:
        return pick(st.sampled_from(values))

    tokens = st.lists(st.integers(0, 129), max_size=8)
    params = SamplingParams(
        temperature=one(0.0, 1e-5, 2e-5, 1.0, 2.0),
        top_k=one(0, 1, 3, 2**31 - 1),
        top_p=one(1.0, 0.5, 1e-300),
        min_p=one(0.0, 0.5, 1.0),
        repetition_penalty=one(0.01, 1.0, 100.0),
        presence_penalty=one(-2.0, 0.0, 2.0),
        frequency_penalty=one(-2.0, 0.0, 2.0),
        logit_bias=one(None, {0: -1e300, 129: 100.0}),
        logprobs=one(None, 2),
    )
    banned = pick(st.one_of(tokens, st.just(range(130)), st.just(range(1, 130))))
    return SampleRow(params, pick(tokens), pick(tokens), pick(st.integers(-(2**63), 2**63 - 1)), banned)


@given(st.lists(extreme_rows(), min_size=1, max_size=4), st.sampled_from([1, 100, 128, 130]), st.data())
@settings(max_examples=150, deadline=None)
def test_ids_are_in_the_vocabulary_and_not_banned(rows: list[SampleRow], vocab: int, data: st.DataObject) -> None:
    finite = st.one_of(st.sampled_from(ENDS), st.floats(width=32, allow_nan=False, allow_infinity=False))
    few = data.draw(st.lists(finite, min_size=1, max_size=6))
    logits = torch.tensor((few * vocab)[: vocab * len(rows)] * len(rows)).float()[: vocab * len(rows)]
    result = sample(logits.view(len(rows), vocab), rows)
    assert result.bad == []
    for token, one in zip(result.ids, rows, strict=True):
        assert 0 <= token < vocab
        assert token not in one.banned or set(range(vocab)) <= set(one.banned)
