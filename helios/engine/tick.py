# Generated from notebooks/10_batching.ipynb by `helios export`; edit the notebook.
"""Who gets how many tokens of the next forward: a pure function, no tensors, no model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

__all__ = ["PATIENCE_S", "SCORED_TOKENS", "SeqView", "TickPlan", "View", "plan_tick"]
PATIENCE_S = 0.1
SCORED_TOKENS = 256  # a tick's most, of prompts whose every token goes through the output head


class SeqView(Protocol):
    """All the planner may know of a running sequence. `remaining_prompt` 0 means that it is generating.

    `scored`: log-probabilities of its prompt are wanted, so each of its prompt's tokens costs a row of logits.
    """

    @property
    def remaining_prompt(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def last_progress_s(self) -> float: ...
    @property
    def scored(self) -> bool: ...


View = TypeVar("View", bound=SeqView)


@dataclass(frozen=True, slots=True)
class TickPlan(Generic[View]):
    """(view, tokens) of each sequence served in a tick: generating ones first, one token each, then prompts' chunks."""

    shares: tuple[tuple[View, int], ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the whole tick."""
        return sum(tokens for _, tokens in self.shares)


def plan_tick(running: Seq[View], budget: int, now: float) -> TickPlan[View]:
    """Share a budget of tokens among the running sequences. Times are seconds on one clock.

    1. If the oldest unfinished prompt has made no progress for `PATIENCE_S`, it is served first, with up to
       ceil(budget / 2) tokens.
    2. Every generating sequence gets one token; if the budget is short, the least recently served go first.
    3. What is left goes to unfinished prompts in order of arrival; to those that are scored, `SCORED_TOKENS` at most.

    Bounds. A tick never holds more than `budget` tokens. With G generating sequences and a budget of two or more, each
    gets a token at least once in every ceil(G / floor(budget / 2)) ticks: in every tick while G ≤ budget / 2. The
    oldest unfinished prompt is served at the latest by the first tick that starts 0.1 s after its last progress; no
    later arrival overtakes it, but for those that take what it may not have scored. A budget of one goes by turns.
    """
    generating: list[View] = []
    prompts: list[View] = []
    for view in running:
        (prompts if view.remaining_prompt else generating).append(view)
    prompts.sort(key=lambda view: view.arrival_s)
    chunks, left, scorable = [0] * len(prompts), budget, SCORED_TOKENS

    def serve(number: int, most: int) -> None:
        nonlocal left, scorable
        view = prompts[number]
        share = min(view.remaining_prompt - chunks[number], most, scorable if view.scored else most)
        chunks[number] += share
        left -= share
        scorable -= share if view.scored else 0

    if prompts and now - prompts[0].last_progress_s >= PATIENCE_S:
        serve(0, (budget + 1) // 2)
    if len(generating) > left:
        generating = sorted(generating, key=lambda view: (view.last_progress_s, view.arrival_s))[:left]
    left -= len(generating)
    for number in range(len(prompts)):
        serve(number, left)
    served = ((view, chunk) for view, chunk in zip(prompts, chunks, strict=True) if chunk)
    return TickPlan((*[(view, 1) for view in generating], *served))
