# Generated from notebooks/13_kernels.ipynb by `helios export`; edit the notebook.
"""Times of small functions, measured in turn, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

__all__ = ["median_time"]


def median_time(*functions: Callable[[], Any], repeats: int = 15) -> list[float]:
    """Median seconds of each function, measured A B A B …; the first round does not count."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return [statistics.median(own[1:]) for own in times]
