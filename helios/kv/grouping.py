# Generated from notebooks/08_paged_attention.ipynb by `helios export`; edit the notebook.
"""Which decode rows share a gather: padding to the longest of all is what makes naive batches slow."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["GROUP_COST", "Ints", "PAD_TO", "group_by_length"]
Ints = np.ndarray[Any, np.dtype[np.int64]]
PAD_TO = 64  # lengths in a group are rounded up to this
GROUP_COST = 384  # what one more group costs, in padded slots: measured in the notebook


def group_by_length(lengths: Ints) -> list[tuple[Ints, int]]:
    """Split decode rows into groups `(rows, padded length)` so that padding plus `GROUP_COST` per group is least.

    Rows that are neighbours in length share a group; exact, by dynamic programming over the distinct padded lengths.
    """
    padded = -(-lengths // PAD_TO) * PAD_TO
    values, counts = np.unique(padded, return_counts=True)
    upto = np.concatenate(([0], np.cumsum(counts)))
    best, cut = [0], [0]
    for end in range(1, len(values) + 1):
        costs = [best[i] + int(upto[end] - upto[i]) * int(values[end - 1]) + GROUP_COST for i in range(end)]
        cut.append(min(range(end), key=costs.__getitem__))
        best.append(costs[cut[-1]])
    groups, end = [], len(values)
    while end:
        low, high = values[cut[end]], values[end - 1]
        groups.append((np.flatnonzero((padded >= low) & (padded <= high)), int(high)))
        end = cut[end]
    return groups[::-1]
