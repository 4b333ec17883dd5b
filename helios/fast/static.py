# Generated from notebooks/17_graphs.ipynb by `helios export`; edit the notebook.
"""Attention of decode rows in a fixed shape: all index arithmetic on the device, nothing read back, nothing resized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from helios.fast.buckets import Bucket, bucket_grid
from helios.kv.gather import KERNELS, Scratch
from helios.kv.paged import PagedKVCache
from helios.kv.pages import PAGE_SIZE

__all__ = [
    "DecodeAttention",
    "DecodeCache",
    "GatheredDecode",
    "InPlaceDecode",
    "MOST_PADDING",
    "Recording",
    "TritonDecode",
    "WORKSPACE",
    "recordings",
    "slots_of",
    "triton_kernels",
]


def slots_of(table: Tensor, positions: Tensor) -> Tensor:
    """Slots of the tokens at `positions [B, L]` of sequences with page tables `table [B, P]`; all int64."""
    return table.gather(1, positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE


class DecodeAttention(Protocol):
    """Attention of one token per row, in the shape of a bucket."""

    def prepare(self, table: Tensor, positions: Tensor) -> None:
        """Once per tick: page tables `[B, P]` and positions `[B]`, int32, of this tick's tokens."""

    def attend(self, q: Tensor, pages: Tensor) -> Tensor:
        """Once per layer: `q [B, H, D]` over one layer's `pages [2, pages, 256, K, D]`, to `[B, H, D]`."""


class GatheredDecode:
    """Gathers the whole table of every row: works everywhere, costs the bucket's size and not the contexts'."""

    def __init__(self, decode: Callable[..., Tensor], store: Tensor, buckets: Sequence[Bucket]) -> None:
        self._decode, self._dtype, self._heads = decode, store.dtype, store.shape[-2]
        self._steps = torch.arange(max(bucket.pages for bucket in buckets) * PAGE_SIZE, device=store.device)
        self._scratch = Scratch()  # never the eager runner's: it grows, and a recording keeps the old address
        most = max(bucket.batch * bucket.pages for bucket in buckets) * PAGE_SIZE
        keys, values = store[0].view(2, -1, store.shape[-2] * store.shape[-1])
        self._scratch.gather(
            keys, values, torch.zeros(most, dtype=torch.int64, device=store.device)
        )  # full size at once

    def prepare(self, table: Tensor, positions: Tensor) -> None:
        """Slots to gather, and a bias that hides what lies beyond each row's context."""
        steps, last = self._steps[: table.shape[1] * PAGE_SIZE], positions.long()[:, None]
        self._slots = slots_of(table.long(), torch.minimum(steps, last)).flatten()
        bias = torch.zeros(len(table), len(steps), dtype=self._dtype, device=steps.device)
        self._bias = bias.masked_fill_(steps > last, float("-inf"))[:, None, None]

    def attend(self, q: Tensor, pages: Tensor) -> Tensor:
        """Gather, then attend, in the shape that `prepare` was given."""
        keys, values = pages.view(2, -1, pages.shape[-2] * pages.shape[-1])
        shape = (len(q), -1, self._heads, q.shape[-1])
        past_k, past_v = (part.view(shape) for part in self._scratch.gather(keys, values, self._slots))
        return self._decode(q, past_k, past_v, self._bias)


class InPlaceDecode:
    """`varlen_attn` with a block table: pages are read where they lie."""

    def __init__(self, varlen: Callable[..., Any], batch: int, device: torch.device | str) -> None:
        self._varlen = varlen
        self._ends = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def prepare(self, table: Tensor, positions: Tensor) -> None:
        """Lengths and table of every row; `max_k` is the bucket's, because it is frozen."""
        ends, most = self._ends[: len(table) + 1], table.shape[1] * PAGE_SIZE
        self._lengths = (ends, ends, 1, most)
        self._options = {"seqused_k": positions + 1, "block_table": table}

    def attend(self, q: Tensor, pages: Tensor) -> Tensor:
        """One call, decode rows only."""
        window = (-1, -1)  # with one query a row, closing it changes nothing but speed
        out: Tensor = self._varlen(
            q, pages[0], pages[1], *self._lengths, window_size=window, enable_gqa=True, **self._options
        )
        return out


class TritonDecode:
    """The paged decode kernel of `helios.fast.triton_decode` (given as `kernels`): pages are read where they lie."""

    def __init__(self, kernels: Any, kv_heads: int, longest: int, processors: int) -> None:
        self._kernels, self._kv_heads, self._longest, self._processors = kernels, kv_heads, longest, processors

    def prepare(self, table: Tensor, positions: Tensor) -> None:
        """Lengths and table of every row; the number of parts that contexts are cut into is the bucket's: frozen."""
        self._table, self._lengths = table, positions + 1
        self._splits = self._kernels.choose_splits(len(table) * self._kv_heads, self._longest, self._processors)

    def attend(self, q: Tensor, pages: Tensor) -> Tensor:
        """One kernel, or two when contexts are cut into parts."""
        keys, values = pages
        out: Tensor = self._kernels.decode_paged(q, keys, values, self._table, self._lengths, splits=self._splits)
        return out


class DecodeCache:
    """The paged cache's memory, seen by a recorded tick: plans on the device, writes new tokens, attends."""

    def __init__(self, cache: PagedKVCache, attention: DecodeAttention) -> None:
        self._attention = attention
        self._layers = cache.store.unbind()
        self._slots = [layer.view(2, -1, layer.shape[-2] * layer.shape[-1]).unbind() for layer in self._layers]

    def plan(self, table: Tensor, positions: Tensor) -> None:
        """Once per tick, inside the recording: `table [B, P]` and `positions [B]`, int32."""
        self._new = slots_of(table.long(), positions.long()[:, None]).flatten()
        self._attention.prepare(table, positions)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v `[B, K, D]` of this tick's tokens; attention `[B, H, D]` of q over each row's context."""
        for slots, new in zip(self._slots[layer], (k, v), strict=True):
            slots.index_copy_(0, self._new, new.reshape(len(new), -1))
        return self._attention.attend(q, self._layers[layer])


WORKSPACE = 2**28  # bytes that one layer's gathered keys and values may take
MOST_PADDING = 2.0  # padded pages per page needed that a gather may copy


@dataclass(frozen=True)
class Recording:
    """What to record: the attention and the buckets, how much padding is worth it, and how pages are read."""

    attention: DecodeAttention
    buckets: list[Bucket]
    padding: float | None
    how: str


def triton_kernels(store: Tensor) -> Any | None:
    """Chapter 16's module if it is there and can serve this pool of pages."""
    if not find_spec("helios.fast.triton_decode"):
        return None
    kernels: Any = import_module("helios.fast.triton_decode")
    return kernels if kernels.obstacle(store.device, store.dtype, store.shape[-1]) is None else None


def recordings(cache: PagedKVCache, batch: int, pages: int, graphs: int, asked: str = "auto") -> Iterator[Recording]:
    """How decode ticks of up to `batch` rows and `pages` pages can be recorded over this cache, the best first.

    `asked` is the attention that was asked for: unless "auto", no other takes its place.
    """
    store, grid = cache.store, bucket_grid(batch, pages, graphs=graphs)
    if cache.attention == "varlen" and cache._varlen is not None:
        yield Recording(
            InPlaceDecode(cache._varlen, batch, store.device), grid, None, "varlen_attn reads pages in place"
        )
        return
    if asked == "auto" and (kernels := triton_kernels(store)) is not None:
        processors = torch.cuda.get_device_properties(store.device).multi_processor_count
        attention = TritonDecode(kernels, store.shape[-2], pages * PAGE_SIZE, processors)
        by_batch = bucket_grid(batch, pages, by_pages=False, graphs=graphs)
        yield Recording(attention, by_batch, None, "Triton reads pages in place")
    room = WORKSPACE // (2 * store[0, 0, 0].nbytes)
    grid = [bucket for bucket in grid if bucket.batch * bucket.pages <= room]
    if grid:
        gathered = GatheredDecode(KERNELS[cache.attention].decode, store, grid)
        yield Recording(gathered, grid, MOST_PADDING, "pages are gathered")
