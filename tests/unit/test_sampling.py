"""Sampling against transformers' processors, against chance, and against what must not happen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from helios.model.chance import choice_seed, uniform
from helios.model.draw import draw, likeliest
from helios.model.params import RequestError, SamplingParams
from helios.model.sampling import SampleRow, TokenLogprob, edit_logits, sample


def row(seed: int = 0, outputs: Any = (), prompt: Any = (), banned: tuple[int, ...] = (), **options: Any) -> SampleRow:
    return SampleRow(SamplingParams(**options), list(prompt), list(outputs), seed, banned)


def logits_like(rows: int, vocab: int, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def reference_probs(logits: torch.Tensor, p: SamplingParams, ids: list[int]) -> torch.Tensor:
    """transformers' processors over one row [1, V], in the order that we promise: float64 probabilities [V]."""
    steps: list[Any] = []
    if p.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.temperature != 1:
        steps.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        steps.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        steps.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        steps.append(MinPLogitsWarper(p.min_p))
    scores = LogitsProcessorList(steps)(torch.tensor([ids or [0]]), logits.clone().double())
    return torch.softmax(scores[0], dim=0)


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"temperature": 1.8},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 64},
    {"top_k": 65},
    {"top_k": 700},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 0.7},
    {"top_p": 0.999, "temperature": 2.0},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 0.6},
    {"top_k": 300, "top_p": 0.95},
    {"repetition_penalty": 1.4, "top_k": 50, "top_p": 0.9},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [50, 2000])
def test_draws_are_the_inverse_of_transformers_distribution(options: dict[str, Any], vocab: int) -> None:
    count, prompt = 300, [1, 2, 3, 3, 5]
    for spread in (0.5, 4.0):
        one = logits_like(1, vocab, spread)
        rows = [row(seed=s, prompt=prompt, **options) for s in range(count)]
        got = torch.tensor(sample(one.repeat(count, 1), rows).ids)
        probs = reference_probs(one, SamplingParams(**options), prompt)
        assert (probs[got] > 0).all(), "a filtered token was drawn"
        ends = probs.cumsum(0)
        u = torch.tensor([uniform(s, 0) for s in range(count)], dtype=torch.float64)
        want = torch.searchsorted(ends, u, right=True)
        # A number within rounding of the border between two tokens may fall on either side.
        near = (ends[None] - u[:, None]).abs().min(1).values < 1e-5
        assert ((got == want) | near).all() and near.float().mean() < 0.1


def test_frequencies_are_the_probabilities() -> None:
    few = torch.tensor([[2.0, 1.5, 1.0, 0.0, -1.0, -2.0, 0.7, 0.3, -0.5, 1.1]])
    draws = 20_000
    for options in ({}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}):
        params = SamplingParams(**options)
        ids: list[int] = []
        for start in range(0, draws, 1000):
            rows = [SampleRow(params, [], [0] * (i % 50), choice_seed(9, start + i)) for i in range(1000)]
            ids += sample(few.repeat(1000, 1), rows).ids
        seen = torch.bincount(torch.tensor(ids), minlength=10).double()
        expected = draws * reference_probs(few, params, [])
        alive = expected > 0
        chi2 = float(((seen - expected) ** 2 / expected)[alive].sum())
        degrees = int(alive.sum()) - 1
        assert seen[~alive].sum() == 0 and chi2 < degrees + 4 * math.sqrt(2 * degrees)


def test_greedy_is_the_first_largest_whatever_else_is_asked() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    for options in ({"temperature": 0}, {"temperature": 9e-6}, {"temperature": 0, "top_k": 2, "top_p": 0.1}):
        assert sample(logits, [row(**options)] * 2).ids == [1, 0]


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 511, 1000])
def test_the_blockwise_maximum_is_the_maximum(vocab: int) -> None:
    x = torch.randint(-3, 3, (40, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    best, ids = likeliest(x)
    assert torch.equal(ids, x.argmax(1)) and torch.equal(best, x.amax(1))


def test_every_column_with_weight_can_be_drawn_and_no_other() -> None:
    weights = torch.zeros(1, 1000)
    weights[0, [0, 127, 128, 640, 999]] = torch.tensor([1.0, 1e-7, 2.0, 1.0, 1.0])
    u = torch.cat([torch.linspace(0, 1, 999, dtype=torch.float64), torch.tensor([1 - 2.0**-53], dtype=torch.float64)])
    found = set(draw(weights.expand(len(u), -1), u).tolist())
    assert found <= {0, 127, 128, 640, 999} and {0, 128, 640, 999} <= found


def test_ties_at_the_border_of_a_filter_are_kept() -> None:
    logits = torch.zeros(400, 900)
    for options in ({"top_k": 3}, {"top_p": 0.1}):
        ids = sample(logits, [row(seed=s, **options) for s in range(400)]).ids
        assert len(set(ids)) > 250, "all 900 are equally likely: none is better than another"


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = logits_like(1, 5000)
    crowd = logits_like(12, 5000, seed=1)
    crowd_rows = [row(seed=s, prompt=[1], outputs=[2], **FILTERS[s % len(FILTERS)]) for s in range(12)]
    for options in FILTERS:
        me = row(seed=77, outputs=range(5), prompt=range(9), **options)
        alone = sample(logits, [me]).ids[0]
        for place in (0, 5, 12):
            batch = torch.cat([crowd[:place], logits, crowd[place:]])
            assert sample(batch, [*crowd_rows[:place], me, *crowd_rows[place:]]).ids[place] == alone
    flat = torch.zeros(1, 5000)
    assert len({sample(flat, [row(seed=1, outputs=[0] * n)]).ids[0] for n in range(20)}) > 15
    assert len({sample(flat, [row(seed=s)]).ids[0] for s in range(20)}) > 15


def test_uniform_numbers_are_stable_and_in_range() -> None:
    assert [uniform(42, 0), uniform(42, 1), uniform(-1, 0)] == [uniform(42, 0), uniform(42, 1), uniform(-1, 0)]
    assert uniform(42, 0) == 0.34329192209867343, "a change would change every seeded answer"
    numbers = [uniform(s, p) for s in (-(2**63), 0, 2**63 - 1) for p in range(500)]
    assert all(0 <= u < 1 for u in numbers) and len(set(numbers)) == 1500
    assert abs(sum(numbers) / 1500 - 0.5) < 0.03
    seeds = [choice_seed(5, i) for i in range(100)]
    assert seeds[0] == 5 and len(set(seeds)) == 100 and all(-(2**63) <= s < 2**63 for s in seeds)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_row_is_reported_and_the_others_are_untouched(broken: float) -> None:
    logits = logits_like(5, 3000)
    logits[2, 1234] = broken
    rows = [
        row(temperature=0),
        row(seed=1),
        row(seed=2, top_p=0.9, logprobs=1, repetition_penalty=1.2, prompt=[1]),
        row(seed=3, top_k=5, logprobs=1),
        row(seed=4, top_p=0.9),
    ]
    result = sample(logits, rows)
    assert result.bad == [2] and result.ids[2] == -1 and result.logprobs[2] is None
    others = [0, 1, 3, 4]
    alone = sample(logits[others], [rows[r] for r in others])
    assert [result.ids[r] for r in others] == alone.ids and result.logprobs[3] == alone.logprobs[2]
    assert sample(torch.full((1, 9), -math.inf), [row()]).bad == [0]


def test_a_row_with_forbidden_tokens_is_not_broken() -> None:
    logits = torch.full((2, 300), -math.inf)
    logits[:, 150] = 1.0
    assert sample(logits, [row(temperature=0), row(seed=3, top_p=0.5)]) == sample(logits, [row(temperature=0)] * 2)


def test_the_logits_are_not_changed() -> None:
    logits = logits_like(3, 500)
    before = logits.clone()
    sample(logits, [row(temperature=0.5, top_p=0.5), row(logit_bias={1: 5}, banned=(2,)), row(frequency_penalty=1)])
    assert torch.equal(logits, before)


def naive_edit(logits: list[float], r: SampleRow) -> list[float]:
    p, out = r.params, list(logits)
    for token, bias in (p.logit_bias or {}).items():
        out[token] += bias
    for token in {*r.prompt_ids, *r.output_ids}:
        out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
    for token in set(r.output_ids):
        out[token] -= p.presence_penalty + p.frequency_penalty * list(r.output_ids).count(token)
    for token in r.banned:
        out[token] = -math.inf
    return out


def test_edits_are_those_of_the_definition() -> None:
    rows = [
        row(prompt=[1, 2, 2], outputs=[3, 3, 4], repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.25),
        row(prompt=[5], outputs=[6], logit_bias={5: 3, 6: -100}, banned=(5,)),
        row(outputs=[0, 0, 0], frequency_penalty=2.0),
        row(prompt=[1], outputs=[2]),
    ]
    logits = logits_like(4, 12)
    want = torch.tensor([naive_edit(logits[i].tolist(), r) for i, r in enumerate(rows)])
    edit_logits(logits, rows)
    assert torch.allclose(logits, want, atol=1e-6)


def test_ids_beyond_the_vocabulary_do_not_reach_the_next_row() -> None:
    logits = torch.zeros(2, 10)
    edit_logits(logits, [row(prompt=[10, 11], repetition_penalty=2.0, banned=(12,), logit_bias={13: 5}), row()])
    assert torch.equal(logits, torch.zeros(2, 10))


def test_bans_and_biases_decide_greedy_and_random_choices() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0, 0.0]] * 3)
    rows = [row(temperature=0, banned=(0,)), row(seed=3, banned=(0, 1, 2)), row(temperature=0, logit_bias={2: 100})]
    assert sample(logits, rows).ids == [1, 3, 2]
    assert 0 not in sample(logits.repeat(50, 1)[:100], [row(seed=s, banned=(0,)) for s in range(100)]).ids


def test_logprobs_are_of_the_raw_distribution_and_finite() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).log().repeat(3, 1)
    options: dict[str, Any] = {"temperature": 0.1, "top_k": 1, "logit_bias": {2: 100}}
    result = sample(logits, [row(logprobs=2, **options), row(logprobs=0, temperature=0), row()])
    assert result.logprobs[0] == TokenLogprob(
        2, pytest.approx(math.log(0.2)), [(0, pytest.approx(math.log(0.5))), (1, pytest.approx(math.log(0.3)))]
    )
    assert result.logprobs[1] == TokenLogprob(0, pytest.approx(math.log(0.5)), [])
    assert result.logprobs[2] is None
    whole = sample(logits[:1], [row(logprobs=20)]).logprobs[0]
    assert whole is not None and len(whole.top) == 4 and whole.top[3] == (3, -9999.0)


def test_an_empty_batch_is_fine() -> None:
    assert sample(torch.zeros(0, 10), []).ids == []


BAD: list[tuple[str, Any]] = [
    *[("temperature", v) for v in (-0.1, 2.1, math.nan, math.inf, True, "1", None)],
    *[("top_p", v) for v in (0, -1, 1.01, math.nan, True)],
    *[("top_k", v) for v in (-2, 1.5, True, "3")],
    *[("min_p", v) for v in (-0.1, 1.1, math.nan)],
    *[("presence_penalty", v) for v in (-2.1, 2.1, math.nan)],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, math.nan)],
    *[("repetition_penalty", v) for v in (0, -1, math.nan, math.inf)],
    *[("n", v) for v in (0, -1, 129, True, 1.0)],
    *[("seed", v) for v in (2**63, -(2**63) - 1, 1.5, "7")],
    *[("stop", v) for v in ("", [""], [1], 5, ["x"] * 65, ["x" * 1025])],
    *[("stop_token_ids", v) for v in ([-1], ["a"], 5, [1.5])],
    *[("max_tokens", v) for v in (0, -1, 1.5, True)],
    *[("min_tokens", v) for v in (-1, 17, 1.5)],
    *[("logprobs", v) for v in (-1, 21, True)],
    *[("logit_bias", v) for v in ([1], {"x": 1}, {-1: 1}, {1: math.nan}, {1: math.inf}, {1: "a"}, {1.5: 1})],
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    *[(name, 1) for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")],
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: str(v)[:30])
def test_bad_values_name_their_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name and f"`{name}`" in caught.value.message and len(caught.value.message) < 200


def test_values_are_brought_into_one_form() -> None:
    p = SamplingParams(top_k=-1, stop="x", logit_bias={"5": 1000, 6: -1000}, temperature=1, stop_token_ids=None)
    assert (p.top_k, p.stop, p.stop_strings, p.logit_bias) == (0, ["x"], ["x"], {5: 100.0, 6: -100.0})
    assert p.stop_token_ids == [] and SamplingParams(logit_bias={}).logit_bias is None
    assert SamplingParams(max_tokens=None, min_tokens=100).max_tokens is None
    assert SamplingParams(temperature=0).greedy and not SamplingParams().greedy


def test_defaults_are_vllms() -> None:
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens, p.min_tokens) == (1, 1.0, 1.0, 0, 0.0, 16, 0)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.0, 0.0, 1.0)


def test_ids_are_checked_against_the_vocabulary() -> None:
    SamplingParams(logit_bias={9: 1}, stop_token_ids=[9]).check_vocab(10)
    for options in ({"logit_bias": {10: 1}}, {"stop_token_ids": [10]}):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**options).check_vocab(10)
        assert caught.value.param in options
