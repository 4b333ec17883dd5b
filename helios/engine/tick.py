# Generated from notebooks/10_continuous_batching.ipynb by `helios export`; edit the notebook.
"""Who gets how many tokens of the next forward: a pure function, no tensors, no model."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["PATIENCE_S", "SCORED_TOKENS", "SeqView", "TickPlan", "plan_tick"]
PATIENCE_S = 0.1
SCORED_TOKENS = 256  # a tick's most, of prompts whose every token goes through the output head


class SeqView(NamedTuple):
    """All the planner may know of a running sequence. `remaining_prompt` 0 means that it is generating."""

    remaining_prompt: int
    arrival_s: float
    last_progress_s: float
    key: Hashable
    scored: bool = False  # log-probabilities of its prompt are wanted: a row of logits for every token


@dataclass(frozen=True, slots=True)
class TickPlan:
    """(key, tokens) for each sequence served in a tick: generating ones first, one token each, then prompts' chunks."""

    shares: tuple[tuple[Hashable, int], ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the whole tick."""
        return sum(tokens for _, tokens in self.shares)


def plan_tick(running: Seq[SeqView], budget: int, now: float) -> TickPlan:
    """Share a budget of tokens among the running sequences. Times are seconds on one clock.

    1. If the oldest unfinished prompt has made no progress for `PATIENCE_S`, it is served first, with up to
       ceil(budget / 2) tokens.
    2. Every generating sequence gets one token; if the budget is short, the least recently served go first.
    3. What is left goes to unfinished prompts in order of arrival; to those that are scored, `SCORED_TOKENS` at most.

    Bounds. A tick never holds more than `budget` tokens. With G generating sequences and a budget of two or more, each
    gets a token at least once in every ceil(G / floor(budget / 2)) ticks: in every tick while G ≤ budget / 2. The
    oldest unfinished prompt is served at the latest by the first tick that starts 0.1 s after its last progress; no
    later arrival overtakes it. A budget of one goes by turns.
    """
    prompts = sorted((view for view in running if view.remaining_prompt > 0), key=lambda view: view.arrival_s)
    generating = [view for view in running if view.remaining_prompt == 0]
    chunks: dict[Hashable, int] = {}
    left, scorable = budget, SCORED_TOKENS
    if prompts and now - prompts[0].last_progress_s >= PATIENCE_S:
        first = prompts[0]
        chunks[first.key] = min(first.remaining_prompt, (budget + 1) // 2, scorable if first.scored else budget)
        left -= chunks[first.key]
        scorable -= chunks[first.key] if first.scored else 0
    if len(generating) > left:
        generating = sorted(generating, key=lambda view: (view.last_progress_s, view.arrival_s))[:left]
    left -= len(generating)
    for view in prompts:
        had = chunks.get(view.key, 0)
        more = min(view.remaining_prompt - had, left, scorable if view.scored else left)
        chunks[view.key] = had + more
        left -= more
        scorable -= more if view.scored else 0
    return TickPlan((*((view.key, 1) for view in generating), *((key, n) for key, n in chunks.items() if n)))
