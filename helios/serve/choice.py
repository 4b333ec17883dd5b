# Generated from notebooks/20_wire.ipynb by `helios export`; edit the notebook.
"""What both wires speak of: a choice as it grows, the prompt in front of it, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helios.model.sampling import TokenLogprob

__all__ = ["Choice", "Usage"]


@dataclass(slots=True)
class Choice:
    """One choice of an answer as it grows. `scores`: of the prompt's tokens, once, where they were asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    scores: list[TokenLogprob | None] | None = None

    def then(self, later: Choice) -> None:
        """Grow by the next piece of the same choice."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.scores = self.scores or later.scores


@dataclass
class Usage:
    """Tokens of one answer: every prompt counted once, every generated id counted."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def as_json(self) -> dict[str, Any]:
        """The `usage` object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
