# Generated from notebooks/05_measuring.ipynb by `helios export`; edit the notebook.
"""The requests a benchmark sends: token-id prompts of fixed lengths from a seed, arriving at once or at a rate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = [
    "KINDS",
    "WORKLOADS",
    "Work",
    "describe_lengths",
    "ledger_workload",
    "make_workload",
    "random_prompt",
    "thirty_requests",
    "with_arrivals",
    "works_of",
]


@dataclass(frozen=True)
class Work:
    """One request of a workload: prompt, tokens to generate, kind, and when it arrives (seconds after the start)."""

    prompt_ids: list[int]
    max_tokens: int
    kind: str
    arrival_s: float = 0.0


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """`length` ids drawn evenly from the second to fourth eighth of the vocabulary.

    Special tokens lie at the start or the end of a vocabulary, and some vocabularies end in rows that no text can
    reach: the range keeps clear of both, so every server accepts the prompt.
    """
    return [rng.randrange(vocab_size // 8, vocab_size // 2) for _ in range(length)]


KINDS: dict[str, tuple[int, int]] = {"prefill": (512, 16), "decode": (32, 128), "balanced": (128, 64)}


def works_of(kind: str, count: int, vocab_size: int, rng: random.Random) -> list[Work]:
    """`count` requests of one kind: "prefill" 512/16, "decode" 32/128 or "balanced" 128/64 prompt/output tokens."""
    prompt, output = KINDS[kind]
    return [Work(random_prompt(rng, prompt, vocab_size), output, kind) for _ in range(count)]


def with_arrivals(works: Sequence[Work], rate: float | None, rng: random.Random) -> list[Work]:
    """The same works arriving at once (`rate` None) or as a Poisson process of `rate` requests per second."""
    if rate is None:
        return list(works)
    if rate <= 0:
        raise ValueError(
            f"rate is requests per second and must be above 0, not {rate}; leave it out to send all at once"
        )
    arrival, timed = 0.0, []
    for work in works:
        timed.append(replace(work, arrival_s=arrival))
        arrival += rng.expovariate(rate)
    return timed


def thirty_requests(vocab_size: int, seed: int = 0, rate: float | None = None) -> list[Work]:
    """The 30-request benchmark: ten of each kind, shuffled by the seed, at once or at `rate` requests per second."""
    rng = random.Random(seed)
    works = [work for kind in KINDS for work in works_of(kind, 10, vocab_size, rng)]
    rng.shuffle(works)
    return with_arrivals(works, rate, rng)


WORKLOADS = ("mixed", *KINDS, "single")


def make_workload(name: str, vocab_size: int, seed: int = 0, rate: float | None = None) -> list[Work]:
    """A workload by name: "mixed" (the 30 requests), ten of one kind, or "single" (one balanced stream).

    The kinds are "prefill", "decode" and "balanced"; ValueError for any other name.
    """
    if name not in WORKLOADS:
        raise ValueError(f"there is no workload {name!r}; choose one of {', '.join(WORKLOADS)}")
    if name == "mixed":
        return thirty_requests(vocab_size, seed, rate)
    rng = random.Random(seed)
    works = works_of("balanced", 1, vocab_size, rng) if name == "single" else works_of(name, 10, vocab_size, rng)
    return with_arrivals(works, rate, rng)


def ledger_workload(vocab_size: int, seed: int = 0) -> list[Work]:
    """Six requests to measure every chapter with: 3 × 288/8 that share their first 256 tokens, 2 × 32/32, 1 × 96/16."""
    rng = random.Random(seed)
    prefix = random_prompt(rng, 256, vocab_size)
    shared = [Work(prefix + random_prompt(rng, 32, vocab_size), 8, "shared prefix") for _ in range(3)]
    short = [Work(random_prompt(rng, 32, vocab_size), 32, "decode") for _ in range(2)]
    middle = Work(random_prompt(rng, 96, vocab_size), 16, "balanced")
    return [shared[0], short[0], shared[1], middle, short[1], shared[2]]


def describe_lengths(works: Sequence[Work]) -> str:
    """Prompt/output lengths in one line, such as `3×288/8 + 2×32/32 + 1×96/16`, in order of first appearance."""
    counts: dict[tuple[int, int], int] = {}
    for work in works:
        lengths = (len(work.prompt_ids), work.max_tokens)
        counts[lengths] = counts.get(lengths, 0) + 1
    return " + ".join(f"{count}×{prompt}/{output}" for (prompt, output), count in counts.items())
