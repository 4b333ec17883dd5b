# Generated from notebooks/15_compile.ipynb by `helios export`; edit the notebook.
"""Two operators that a compiler cannot look into: linears and attention, found by number, with declared effects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count as counting
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from helios.kv.paged import PagedKVCache
from helios.model.linear import Linear

__all__ = [
    "ENTRIES",
    "Entry",
    "LIBRARY",
    "NUMBERS",
    "attend",
    "compute_attend",
    "compute_linear",
    "define",
    "describe_attend",
    "describe_linear",
    "library",
    "linear",
    "register",
]
library: Any = torch.library
LIBRARY = library.Library("helios", "FRAGMENT")


def define(schema: str, compute: Callable[..., Tensor], describe: Callable[..., Tensor]) -> Any:
    """Define operator `helios::schema`: `compute` runs it, `describe` gives an empty tensor of its result's shape."""
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.helios, name):
        LIBRARY.define(schema)
        LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
        LIBRARY.impl(name, describe, "Meta")  # what the compiler calls instead, on tensors without memory
    return getattr(torch.ops.helios, name).default


@dataclass(eq=False)
class Entry:
    """What the operators find under a layer's number: the cache, the layer's index in it, and its linears."""

    cache: PagedKVCache
    index: int
    linears: tuple[Linear, ...]


ENTRIES: WeakValueDictionary[int, Entry] = WeakValueDictionary()
NUMBERS = counting()


def register(entries: list[Entry]) -> list[int]:
    """Give entries consecutive numbers; they stay in the table while somebody holds them."""
    numbers = [next(NUMBERS) for _ in entries]
    ENTRIES.update(zip(numbers, entries, strict=True))
    return numbers


def compute_linear(x: Tensor, start: Tensor, offset: int, which: int, width: int) -> Tensor:
    """Linear number `which` of layer `start + offset`: `x [T, in]` to `[T, width]`."""
    return ENTRIES[int(start) + offset].linears[which].forward(x)


def describe_linear(x: Tensor, start: Tensor, offset: int, which: int, width: int) -> Tensor:
    """An empty tensor shaped as `compute_linear` would give it."""
    return x.new_empty(x.shape[0], width)


def compute_attend(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, start: Tensor, offset: int) -> Tensor:
    """`cache.attend` of layer `start + offset`: changes `pool`, the cache's store; returns `[T, H, D]`, contiguous."""
    entry = ENTRIES[int(start) + offset]
    return entry.cache.attend(entry.index, q, k, v).contiguous()


def describe_attend(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, start: Tensor, offset: int) -> Tensor:
    """An empty tensor shaped as `compute_attend` would give it."""
    return q.new_empty(q.shape)


linear = define(
    "linear(Tensor x, Tensor start, int offset, int which, SymInt width) -> Tensor", compute_linear, describe_linear
)
attend = define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) pool, Tensor start, int offset) -> Tensor",
    compute_attend,
    describe_attend,
)
