"""Batches of rows of every kind: no row depends on another, and none gets a token that its filters forbid."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helios.model.draw import draw
from helios.model.params import SamplingParams
from helios.model.sampling import SampleRow, sample

VOCAB = 700


@st.composite
def sample_rows(draw_value: Any) -> SampleRow:
    pick = draw_value
    tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)
    params = SamplingParams(
        temperature=pick(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_k=pick(st.sampled_from([0, 1, 2, 50, 64, 65, 600, VOCAB, 9999])),
        top_p=pick(st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01])),
        min_p=pick(st.sampled_from([0.0, 0.02, 0.5, 1.0])),
        repetition_penalty=pick(st.sampled_from([1.0, 0.5, 1.3])),
        presence_penalty=pick(st.sampled_from([0.0, 1.0])),
        frequency_penalty=pick(st.sampled_from([0.0, -0.5])),
        logit_bias=pick(st.sampled_from([None, {3: 50}, {3: -100, 4: 2}])),
        logprobs=pick(st.sampled_from([None, 0, 3])),
    )
    return SampleRow(params, pick(tokens), pick(tokens), pick(st.integers(-(2**63), 2**63 - 1)), pick(tokens))


def allowed(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """By the definition, with sorts and loops: which tokens [V] may come, with a little room for rounding."""
    p, x = row.params, logits.double().clone()
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in {*row.prompt_ids, *row.output_ids}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(row.output_ids):
        x[token] -= p.presence_penalty + p.frequency_penalty * list(row.output_ids).count(token)
    x[list(row.banned)] = -torch.inf
    if p.greedy:
        return x >= x.max() - 1e-5
    probs = torch.softmax(x / p.temperature, 0)
    least = torch.tensor(0.0)
    if 0 < p.top_k < VOCAB:
        least = probs.sort(descending=True).values[p.top_k - 1]
    kept = torch.where(probs >= least, probs, 0)
    ordered = kept.sort(descending=True).values / kept.sum()
    before = ordered.cumsum(0) - ordered
    if p.top_p < 1:
        least = torch.maximum(least, ordered[before < p.top_p + 1e-5][-1] * kept.sum())
    least = torch.maximum(least, p.min_p * probs.max())
    return (probs >= least * (1 - 1e-4)) & (probs > 0)


@given(st.lists(sample_rows(), min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from([0.1, 1.0, 5.0]))
@settings(max_examples=120, deadline=None)
def test_rows_are_independent_and_within_their_filters(rows: list[SampleRow], seed: int, spread: float) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    together = sample(logits, rows)
    assert together.bad == []
    for r, row in enumerate(rows):
        alone = sample(logits[r : r + 1], [row])
        assert alone.ids == together.ids[r : r + 1]
        assert allowed(logits[r], row)[together.ids[r]]
        found = together.logprobs[r]
        assert (found is None) == (row.params.logprobs is None)
        if found is not None:
            raw = torch.log_softmax(logits[r], 0)
            assert found.token_id == together.ids[r] and abs(found.logprob - float(raw[found.token_id])) < 1e-4
            assert len(found.top) == row.params.logprobs


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-6, 0.5, 1.0]), min_size=1, max_size=300).filter(any),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, deadline=None)
def test_a_weight_of_zero_is_never_drawn(weights: list[float], u: float) -> None:
    index = int(draw(torch.tensor([weights]), torch.tensor([u], dtype=torch.float64))[0])
    assert weights[index] > 0
