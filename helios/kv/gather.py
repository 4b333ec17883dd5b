# Generated from notebooks/08_paged_attention.ipynb by `helios export`; edit the notebook.
"""Attention over pages by gathering them: decode rows in groups of similar length, prefill spans one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from helios.kv.layout import Ints, Layout, Rows, Upload, place
from helios.kv.matmul import causal_by_matmul, decode_by_matmul
from helios.model.attention import attend_causal, attend_decode, causal_mask

__all__ = [
    "DecodeGroup",
    "GROUP_COST",
    "GatherPlan",
    "KERNELS",
    "Kernel",
    "PAD_TO",
    "PrefillSpan",
    "Scratch",
    "decode_group",
    "group_by_length",
    "prefill_span",
]


class Scratch:
    """Where pages are gathered to: one block, kept for all layers, so that no layer waits for fresh memory."""

    def __init__(self) -> None:
        self._block = torch.empty(0)

    def gather(self, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Rows `slots [S]` of `keys` and `values` `[slots, K·D]`, valid until the next call."""
        count, width = len(slots), keys.shape[1]
        if self._block.numel() < 2 * count * width:
            self._block = keys.new_empty(2 * count * width)
        block = self._block[: 2 * count * width].view(2, count, width)
        torch.index_select(keys, 0, slots, out=block[0])
        torch.index_select(values, 0, slots, out=block[1])
        return block[0], block[1]


PAD_TO = 64  # lengths in a group are rounded up to this, so that few different shapes occur
GROUP_COST = 384  # what one more group costs, in padded slots


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


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows of similar length: `rows` of the packed pass, `slots [B·L]` to gather, `bias [B, 1, 1, L]`."""

    rows: Rows
    slots: Tensor
    bias: Tensor


def decode_group(
    layout: Layout, spans: Ints, length: int, name: str, upload: Upload, dtype: torch.dtype
) -> DecodeGroup:
    """The group of the decode rows `spans`, gathered at `length` tokens each."""
    context = layout.context[spans][:, None]
    positions = np.arange(length)
    # Padding repeats the sequence's own last token: finite whatever other pages hold, and near in memory.
    slots = upload("slots" + name, layout.slots(spans[:, None], np.minimum(positions, context - 1)).reshape(-1))
    hidden = upload("hidden" + name, positions >= context)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return DecodeGroup(place(layout.starts[spans], "rows" + name, upload), slots, bias[:, None, None])


@dataclass(frozen=True)
class PrefillSpan:
    """A span of several tokens: its `rows` and, if it has a past, the `slots [S]` to gather and the `mask [T, S]`."""

    rows: slice
    slots: Tensor | None = None
    mask: Tensor | None = None


def prefill_span(layout: Layout, span: int, upload: Upload, masked: bool) -> PrefillSpan:
    """The span's rows and what it needs of its past; `masked` if the kernel wants a mask."""
    start, query, context = (int(part[span]) for part in (layout.starts, layout.query, layout.context))
    rows = slice(start, start + query)
    if context == query:
        return PrefillSpan(rows)
    slots = upload(f"past{span}", layout.slots(np.array(span), np.arange(context)))
    return PrefillSpan(rows, slots, causal_mask(query, context, slots.device) if masked else None)


@dataclass(frozen=True)
class Kernel:
    """What computes attention once the pages are gathered, and whether its prefill wants a mask built."""

    decode: Callable[..., Tensor]
    causal: Callable[..., Tensor]
    masked: bool


KERNELS = {
    "sdpa": Kernel(attend_decode, attend_causal, masked=True),
    "matmul": Kernel(decode_by_matmul, causal_by_matmul, masked=False),
}


class GatherPlan:
    """A pass over gathered pages: decode rows in groups of similar length, prefill spans one by one."""

    def __init__(self, layout: Layout, upload: Upload, dtype: torch.dtype, kernel: Kernel, scratch: Scratch) -> None:
        self._kernel, self._scratch = kernel, scratch
        decode = np.flatnonzero(layout.query == 1)
        groups = enumerate(group_by_length(layout.context[decode]))
        self.groups = [
            decode_group(layout, decode[rows], length, f"{n}", upload, dtype) for n, (rows, length) in groups
        ]
        prefill = np.flatnonzero(layout.query > 1)
        self.prefills = [prefill_span(layout, int(span), upload, kernel.masked) for span in prefill]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pages: Tensor) -> Tensor:
        """Attention `[T, H, D]` of q over one layer's `pages [2, pages, 256, K, D]`; k, v are this pass's own."""
        heads, dim = k.shape[1:]
        keys, values = pages.view(2, -1, heads * dim)
        out = torch.empty_like(q)
        for group in self.groups:
            shape = (group.bias.shape[0], -1, heads, dim)
            past_k, past_v = (x.view(shape) for x in self._scratch.gather(keys, values, group.slots))
            out[group.rows] = self._kernel.decode(q[group.rows], past_k, past_v, group.bias)
        for span in self.prefills:
            past_k, past_v = k[span.rows], v[span.rows]
            if span.slots is not None:
                past_k, past_v = (x.view(-1, heads, dim) for x in self._scratch.gather(keys, values, span.slots))
            out[span.rows] = self._kernel.causal(q[span.rows], past_k, past_v, span.mask)
        return out
