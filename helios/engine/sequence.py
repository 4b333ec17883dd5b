# Generated from notebooks/10_batching.ipynb by `helios export`; edit the notebook.
"""A request and its choices: what the engine knows of each sequence that it is generating."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from helios.engine.constraint import Constraint, ask
from helios.kv.pages import PAGE_SIZE, SCRATCH_PAGE
from helios.kv.prefix import block_hashes
from helios.model.chance import choice_seed
from helios.model.params import SamplingParams
from helios.model.sampling import SampleRow, TokenLogprob

__all__ = ["Request", "Sequence", "TokenEvent", "make_choices", "pages_needed"]


@dataclass
class Request:
    """What a client asked for, in token ids. `salt` keeps tenants' cached prefixes apart; `arrival_s` is monotonic.

    `constraint` is what each choice has to keep to: every one of them gets a copy.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    salt: bytes = b""
    arrival_s: float = field(default_factory=time.monotonic)
    constraint: Constraint | None = None

    @cached_property
    def shareable_hashes(self) -> list[bytes]:
        """Block hashes a cached prefix may cover: complete blocks, and never the prompt's last token."""
        return block_hashes(self.prompt_ids, self.salt)[: (len(self.prompt_ids) - 1) // PAGE_SIZE]


def pages_needed(prompt_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Pages to reserve for a request's first choice, and for each further one.

    The last sampled token is never fed back, so it needs no room. Further choices share the prompt's full pages.
    """
    first = -(-(prompt_tokens + max_tokens - 1) // PAGE_SIZE)
    return first, first - prompt_tokens // PAGE_SIZE


@dataclass(slots=True)
class TokenEvent:
    """One choice's next token. `token_id` is -1 where there is none: with the `finish_reason` "error", of which `error`
    says what happened, and with "stop" where a constraint allows nothing more.

    `complete`: the constraint says that this token completes the text (it belongs to it, unlike a stop token).
    `prompt_logprobs`, on the first event of choice 0 if asked for: one entry per prompt token, the first of them None.
    """

    request_id: str
    index: int
    token_id: int
    logprob: TokenLogprob | None
    finish_reason: str | None
    error: str | None = None
    cached_tokens: int = 0
    complete: bool = False
    prompt_logprobs: list[TokenLogprob | None] | None = None


class Sequence:
    """One choice of one request while it runs.

    `computed` counts the tokens whose keys and values are stored; `cached_tokens` those that came from the prefix
    cache. `pages` is the page table, reserved whole at admission. A `parked` choice (index above 0) holds only its own
    pages and waits for the first choice to compute the prompt. `scores` grows with the prompt, where they are wanted.
    Raises ConstraintError if the request's constraint cannot be copied.
    """

    def __init__(self, request: Request, index: int, *, max_tokens: int, seed: int, stop_ids: frozenset[int]) -> None:
        self.request, self.index, self.max_tokens, self.stop_ids = request, index, max_tokens, stop_ids
        self.request_id, self.arrival_s = request.id, request.arrival_s
        self.prompt = np.asarray(request.prompt_ids, dtype=np.int64)
        self.prompt_tokens = len(request.prompt_ids)
        self.output_ids: list[int] = []
        self.pages: list[int] = []
        self.hashes: list[bytes] = []  # of the blocks that were published
        self.computed = self.cached_tokens = 0
        self.parked = index > 0
        self.finish_reason: str | None = None
        self.last_progress_s = request.arrival_s
        self.constraint = ask(request.constraint.fork) if request.constraint is not None else None
        self.complete = False  # in the constraint's eyes
        self.scored = index == 0 and request.params.prompt_logprobs is not None
        self.scores: list[TokenLogprob | None] | None = [None] if self.scored else None
        banned = sorted(stop_ids) if request.params.min_tokens else []
        self.row = SampleRow(request.params, request.prompt_ids, self.output_ids, seed, banned)

    @property
    def remaining_prompt(self) -> int:
        """Prompt tokens still to be computed; 0 once the sequence is generating."""
        left = self.prompt_tokens - self.computed
        return left if left > 0 else 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return self.request.prompt_ids + self.output_ids

    def append(self, token_id: int) -> None:
        """Take a sampled token, and decide whether it was the last: "stop" wins over "length" on the last one.

        Raises ConstraintError if the constraint cannot take it.
        """
        self.output_ids.append(token_id)
        tokens = len(self.output_ids)
        if self.row.banned and tokens >= self.request.params.min_tokens:
            self.row.banned = []
        if token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif self.constraint is not None and ask(self.constraint.accept, token_id):
            self.finish_reason, self.complete = "stop", True
        elif tokens >= self.max_tokens:
            self.finish_reason = "length"

    def event(self, token_id: int, logprob: TokenLogprob | None = None, error: str | None = None) -> TokenEvent:
        """What to tell about this sequence's newest token, or its failure."""
        return TokenEvent(
            self.request_id,
            self.index,
            token_id,
            logprob,
            self.finish_reason,
            error,
            self.cached_tokens,
            self.complete,
        )

    def check(self) -> None:
        """Assert what must hold between ticks of a sequence that still runs."""
        name = f"choice {self.index} of request {self.request.id!r}"
        prompt, outputs = self.prompt_tokens, len(self.output_ids)
        assert self.finish_reason is None, f"{name} is done and still here"
        assert SCRATCH_PAGE not in self.pages and len(set(self.pages)) == len(self.pages), f"{name}: bad page table"
        first, further = pages_needed(prompt, self.max_tokens)
        assert len(self.pages) == (further if self.parked else first), f"{name} holds {len(self.pages)} pages"
        assert outputs < self.max_tokens, f"{name} has more tokens than it asked for"
        assert self.computed == prompt + outputs - 1 if outputs else self.computed < prompt, f"{name} lost count"


def make_choices(request: Request, max_tokens: int, eos_ids: Iterable[int]) -> list[Sequence]:
    """A request's n sequences, each with a seed derived from the request's (a fresh one if it has none).

    Under a constraint an end token ends the answer even where `ignore_eos` is set: nothing else may follow it.
    """
    params = request.params
    seed = secrets.randbits(63) if params.seed is None else params.seed
    ignored = params.ignore_eos and request.constraint is None
    ends = frozenset(params.stop_token_ids or ()) | (frozenset() if ignored else frozenset(eos_ids))
    seeds = [choice_seed(seed, i) for i in range(params.n)]
    return [Sequence(request, i, max_tokens=max_tokens, seed=s, stop_ids=ends) for i, s in enumerate(seeds)]
