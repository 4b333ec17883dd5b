"""The tick planner against its stated rules and bounds: no model, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helios.engine.tick import PATIENCE_S, SCORED_TOKENS, TickPlan, plan_tick


class View(NamedTuple):
    remaining_prompt: int
    arrival_s: float
    last_progress_s: float
    key: object
    scored: bool = False


def named(plan: TickPlan[View]) -> tuple[tuple[object, int], ...]:
    return tuple((view.key, tokens) for view, tokens in plan.shares)


def prompt(key: str, remaining: int, arrival: float = 0.0, progress: float = 0.0) -> View:
    return View(remaining, arrival, progress, key)


def decoding(key: str, arrival: float = 0.0, progress: float = 0.0) -> View:
    return View(0, arrival, progress, key)


def shares(*views: View, budget: int, now: float = 0.0) -> dict[object, int]:
    return dict(named(plan_tick(views, budget, now)))


def test_nothing_to_do() -> None:
    assert plan_tick([], 256, 0.0) == TickPlan() and TickPlan().tokens == 0


def test_a_prompt_alone_takes_the_budget_or_what_it_needs() -> None:
    assert shares(prompt("a", 1000), budget=256) == {"a": 256}
    assert shares(prompt("a", 256), budget=256) == {"a": 256}
    assert shares(prompt("a", 3), budget=256) == {"a": 3}


def test_every_generating_sequence_goes_first_with_one_token() -> None:
    plan = plan_tick([prompt("p", 1000), decoding("a"), decoding("b")], 256, 0.0)
    assert named(plan) == (("a", 1), ("b", 1), ("p", 254))
    assert plan.tokens == 256


def test_prompts_are_served_in_arrival_order_not_in_list_order() -> None:
    late, early = prompt("late", 100, arrival=2.0), prompt("early", 200, arrival=1.0)
    assert shares(late, early, budget=256, now=2.0) == {"early": 200, "late": 56}


def test_least_recently_served_first_when_the_budget_is_short() -> None:
    views = [decoding("a", progress=3.0), decoding("b", progress=1.0), decoding("c", progress=2.0)]
    assert shares(*views, budget=2, now=3.0) == {"b": 1, "c": 1}


def test_a_starved_prompt_goes_first_with_half_the_budget_rounded_up() -> None:
    many = [decoding(f"d{i}", progress=float(i)) for i in range(9)]
    starved = prompt("p", 1000, progress=0.0)
    assert "p" not in shares(*many, starved, budget=7, now=PATIENCE_S - 0.001)
    served = shares(*many, starved, budget=7, now=PATIENCE_S)
    assert served == {"p": 4, "d0": 1, "d1": 1, "d2": 1}
    assert list(served)[-1] == "p", "decode rows are packed first"


def test_a_starved_prompt_gets_no_more_than_it_needs_and_then_the_rest_of_the_budget() -> None:
    assert shares(prompt("p", 2), decoding("a"), budget=8, now=1.0) == {"a": 1, "p": 2}
    assert shares(prompt("p", 100), decoding("a"), budget=8, now=1.0) == {"a": 1, "p": 7}


def test_only_the_oldest_prompt_can_claim_patience() -> None:
    many = [decoding(f"d{i}") for i in range(8)]
    old, young = prompt("old", 50, arrival=0.0, progress=1.0), prompt("young", 50, arrival=0.5, progress=0.5)
    assert "young" not in shares(*many, old, young, budget=8, now=1.05)


views_strategy = st.lists(
    st.builds(
        lambda remaining, arrival, progress: (remaining, arrival, progress),
        st.integers(0, 600),
        st.floats(0, 5),
        st.floats(0, 5),
    ),
    max_size=24,
)


@given(views_strategy, st.integers(1, 300), st.floats(0, 6))
@settings(max_examples=400, deadline=None)
def test_the_rules_hold_for_any_batch(raw: list[tuple[int, float, float]], budget: int, now: float) -> None:
    views = [View(*fields, key) for key, fields in enumerate(raw)]
    plan = plan_tick(views, budget, now)
    by_key = {view.key: view for view in views}
    keys = [key for key, _ in named(plan)]
    assert len(keys) == len(set(keys)) and set(keys) <= set(by_key)
    assert plan.tokens <= budget
    for key, tokens in named(plan):
        assert 1 <= tokens <= max(by_key[key].remaining_prompt, 1)
    generating = {view.key for view in views if not view.remaining_prompt}
    wanted = sum(max(view.remaining_prompt, 1) for view in views)
    assert plan.tokens == min(budget, wanted), "a tick leaves no budget unused while there is work"
    served = generating & set(keys)
    assert len(served) >= min(len(generating), budget // 2), "half the budget is the generating sequences'"
    got = dict(named(plan))
    prompts = sorted((v for v in views if v.remaining_prompt), key=lambda v: v.arrival_s)
    unfinished = [v for v in prompts if got.get(v.key, 0) < v.remaining_prompt]
    if unfinished:
        later = [v for v in prompts if v.arrival_s > unfinished[0].arrival_s]
        assert not any(v.key in got for v in later), "no later arrival overtakes an unfinished prompt"


@dataclass
class Simulated:
    remaining: int
    arrival: float
    progress: float
    outputs_left: int


def serve(sequences: list[Simulated], budget: int, tick_s: float) -> tuple[list[list[int]], float]:
    """Run the planner to the end; per tick who was served, and the oldest prompt's longest wait."""
    now, ticks, longest = 0.0, [], 0.0
    while any(s.remaining or s.outputs_left for s in sequences):
        alive = [i for i, s in enumerate(sequences) if s.remaining or s.outputs_left]
        views = [View(sequences[i].remaining, sequences[i].arrival, sequences[i].progress, i) for i in alive]
        plan = plan_tick(views, budget, now)
        assert plan.tokens, "the planner stopped while there was work"
        prompts = [i for i in alive if sequences[i].remaining]
        if prompts:
            oldest = sequences[min(prompts, key=lambda i: sequences[i].arrival)]
            longest = max(longest, now - oldest.progress)
        now += tick_s
        for key, tokens in named(plan):
            assert isinstance(key, int)
            s = sequences[key]
            s.remaining, s.progress = max(s.remaining - tokens, 0), now
            if not s.remaining:
                s.outputs_left -= 1
        ticks.append([key for key, _ in named(plan) if isinstance(key, int)])
    return ticks, longest


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(2, 40),
    st.sampled_from([0.01, 0.04, 0.25]),
)
@settings(max_examples=150, deadline=None)
def test_the_stated_bounds_on_waiting_hold(shape: list[tuple[int, int]], budget: int, tick_s: float) -> None:
    sequences = [Simulated(p, arrival=i * 1e-6, progress=0.0, outputs_left=o) for i, (p, o) in enumerate(shape)]
    ticks, _ = serve(sequences, budget, tick_s)
    every = -(-len(shape) // (budget // 2))
    for i, (_, outputs) in enumerate(shape):
        at = [tick for tick, served in enumerate(ticks) if i in served]
        decode = at[-outputs:]  # the last chunk of the prompt gives the first token
        assert all(b - a <= every for a, b in zip(decode, decode[1:], strict=False)), (i, decode, every)


def test_the_oldest_prompt_waits_at_most_its_patience_and_one_tick() -> None:
    crowd = [Simulated(0, 0.0, 0.0, outputs_left=40) for _ in range(16)]
    long = Simulated(200, 1e-6, 0.0, outputs_left=1)
    _, longest = serve([*crowd, long], budget=8, tick_s=0.03)
    assert PATIENCE_S <= longest < PATIENCE_S + 0.03 + 1e-9


@pytest.mark.parametrize("tick_s", [0.02, 0.3])
def test_a_budget_of_one_token_still_ends(tick_s: float) -> None:
    sequences = [Simulated(p, i * 1e-6, 0.0, outputs_left=3) for i, p in enumerate((5, 1, 4))]
    ticks, _ = serve(sequences, budget=1, tick_s=tick_s)
    assert len(ticks) == 5 + 1 + 4 + 3 * 2


def test_a_tick_scores_a_bounded_number_of_tokens() -> None:
    scored = [View(1000, float(i), float(i), f"scored {i}", True) for i in range(3)]
    assert shares(*scored, View(900, 9.0, 9.0, "plain"), budget=1024, now=3.0) == {
        "scored 0": SCORED_TOKENS,
        "plain": 1024 - SCORED_TOKENS,
    }
    patient = shares(View(1000, 0.0, 0.0, "scored", True), decoding("a"), budget=1024, now=3.0)
    assert patient == {"a": 1, "scored": SCORED_TOKENS}
    assert shares(View(1000, 0.0, 3.0, "scored", True), decoding("a"), budget=64, now=3.0) == {"a": 1, "scored": 63}
