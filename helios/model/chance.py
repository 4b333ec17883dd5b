# Generated from notebooks/04_sampling.ipynb by `helios export`; edit the notebook.
"""Random numbers that depend on a seed and a position, and on nothing else."""

from __future__ import annotations

__all__ = ["GOLDEN", "MASK64", "choice_seed", "mix64", "uniform"]
MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): every output bit depends on every input bit."""
    value &= MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK64
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of this seed at this position: 53 bits, the same on every machine."""
    return (mix64(mix64(seed + GOLDEN) + GOLDEN * (position + 1)) >> 11) * 2.0**-53


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request's `n`; the first choice keeps the request's own."""
    return seed if index == 0 else mix64(mix64(seed) ^ (GOLDEN * index & MASK64)) - 2**63
