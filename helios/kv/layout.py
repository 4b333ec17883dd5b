# Generated from notebooks/08_paged_attention.ipynb by `helios export`; edit the notebook.
"""Where the tokens of a pass lie in the pages: index arithmetic for all sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from helios.kv.pages import PAGE_SIZE

__all__ = ["Ints", "Layout", "Rows", "Upload", "place"]
Ints = np.ndarray[Any, np.dtype[np.int64]]


class Layout:
    """The sequences of a pass as arrays: `query` new tokens, `context` stored after it, page tables, first rows."""

    def __init__(self, query: Sequence[int], context: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        self.query, self.context = np.array(query, dtype=np.int64), np.array(context, dtype=np.int64)
        held = np.array([len(table) for table in pages], dtype=np.int64)
        wrong = np.flatnonzero((self.query < 1) | (self.context < self.query) | (held * PAGE_SIZE < self.context))
        if wrong.size:
            n = wrong[0]
            raise ValueError(
                f"sequence {n} of the pass has {query[n]} new tokens, {context[n]} in all, in {held[n]} pages of "
                f"{PAGE_SIZE}: it needs at least one new token and room for all of them"
            )
        self.starts = np.cumsum(self.query) - self.query  # packed row of each sequence's first token
        self.table = np.zeros((len(held), held.max(initial=1)), dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(pages), dtype=np.int64, count=int(held.sum()))
        self.table[np.arange(self.table.shape[1]) < held[:, None]] = flat

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """The slots of tokens `positions` of sequences `rows`; the two broadcast."""
        return self.table[rows, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def new_slots(self) -> Ints:
        """The slots `[T]` of this pass's own tokens, in packed order."""
        rows = np.repeat(np.arange(len(self.query)), self.query)
        first = self.starts - (self.context - self.query)  # position = packed row − first
        return self.slots(rows, np.arange(len(rows)) - first[rows])


Upload = Callable[[str, Any], Tensor]
Rows = slice | Tensor


def place(rows: Ints, name: str, upload: Upload) -> Rows:
    """Ascending packed rows, as a slice if they lie side by side: a slice is a view, an index copies."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return upload(name, rows)
