# Generated from notebooks/18_late.ipynb by `helios export`; edit the notebook.
"""Late.

A chapter to write over: it keeps the mean of the last numbers, in the form that every chapter has.
This paragraph says what the chapter builds, and becomes the docstring of its module.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Window"]


class Window:
    """The mean of the last `size` numbers; `append` and `mean` take the same time for every size."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a window needs room for at least one number, not {size}")
        self.size = size
        self._kept: deque[float] = deque()
        self._sum = 0.0

    def append(self, number: float) -> None:
        """Take a number in; the oldest leaves when the window is full."""
        self._kept.append(number)
        self._sum += number
        if len(self._kept) > self.size:
            self._sum -= self._kept.popleft()

    def mean(self) -> float:
        """The mean of what is kept; ValueError while nothing is."""
        if not self._kept:
            raise ValueError("the window is empty: append a number first")
        return self._sum / len(self._kept)
