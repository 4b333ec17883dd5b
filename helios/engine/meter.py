# Generated from notebooks/12_scheduler.ipynb by `helios export`; edit the notebook.
"""What the scheduler counts: requests by how they ended, tokens, and tokens per second."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from helios.engine.job import Job
from helios.engine.sequence import TokenEvent

__all__ = ["Meter", "RATE_WINDOW_S"]
RATE_WINDOW_S = 5.0


@dataclass
class Meter:
    """Totals since the start: requests by how they ended, ticks, and tokens.

    Prompts count once their first token is there; cached_tokens of them came from the prefix cache.
    """

    submitted: int = 0
    refused: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    ticks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)  # of each tick in the window: when, how many

    def first(self, job: Job, token: TokenEvent, now: float) -> None:
        """Count a job's prompt, when its first token is there."""
        job.timings.first_token_s = now
        job.cached_tokens = token.cached_tokens
        self.prompt_tokens += job.prompt_tokens
        self.cached_tokens += token.cached_tokens

    def generated(self, tokens: int, now: float) -> None:
        """Count the tokens of one tick."""
        self.generated_tokens += tokens
        self._recent.append((now, tokens))
        while now - self._recent[0][0] >= RATE_WINDOW_S:
            self._recent.popleft()

    def end(self, reason: str) -> None:
        """Count a request that ended: "abort", "error", or anything else for one that finished."""
        name = {"abort": "cancelled", "error": "failed"}.get(reason, "finished")
        setattr(self, name, getattr(self, name) + 1)

    def read(self, now: float) -> dict[str, float]:
        """All totals by name, and `tokens_per_s`: generated tokens, mean over the last RATE_WINDOW_S seconds."""
        recent = sum(tokens for at, tokens in tuple(self._recent) if now - at < RATE_WINDOW_S)
        totals = {name: float(value) for name, value in vars(self).items() if not name.startswith("_")}
        return {**totals, "tokens_per_s": recent / RATE_WINDOW_S}
