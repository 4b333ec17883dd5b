# Generated from notebooks/08_paged_attention.ipynb by `helios export`; edit the notebook.
"""Attention over pages read in place, by torch's `varlen_attn` with a block table (CUDA, compute capability 8.0)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helios.kv.layout import Ints, Layout, Rows, Upload, place
from helios.kv.pages import PAGE_SIZE

__all__ = ["VarlenCall", "VarlenPlan", "takes_splits", "varlen_call"]


@dataclass(frozen=True)
class VarlenCall:
    """The arguments of one `varlen_attn` call but for the tensors: packed `rows`, lengths, and keyword options."""

    rows: Rows
    lengths: tuple[Tensor, Tensor, int, int]
    options: dict[str, Any]


def varlen_call(layout: Layout, spans: Ints, kind: str, upload: Upload, options: dict[str, Any]) -> VarlenCall:
    """One call for `spans`. `max_k` is a bound for every length, in whole pages: too small would drop keys silently."""
    query, context = layout.query[spans], layout.context[spans]
    ends = np.concatenate(([0], np.cumsum(query)))
    rows = np.repeat(layout.starts[spans] - ends[:-1], query) + np.arange(ends[-1])
    pages = -(-int(context.max()) // PAGE_SIZE)
    bounds = upload(kind + " ends", ends.astype(np.int32))
    table = {
        "seqused_k": upload(kind + " context", context.astype(np.int32)),
        "block_table": upload(kind + " table", layout.table[spans, :pages].astype(np.int32)),
    }
    lengths = (bounds, bounds, int(query.max()), pages * PAGE_SIZE)
    return VarlenCall(place(rows, kind + " rows", upload), lengths, {"enable_gqa": True, **table, **options})


def takes_splits(varlen: Callable[..., Any]) -> bool:
    """Whether `num_splits` may be passed: torch 2.12 has the parameter, but its FlashAttention 2 not yet."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return "num_splits" in inspect.signature(varlen).parameters and version >= (2, 13)


class VarlenPlan:
    """A pass read in place by `varlen_attn`: decode rows in one call, prefill rows in another.

    They must not share one. FlashAttention 2 packs a group's queries only for `max_q = 1` with an open window; every
    other paged call needs `num_splits = 1`, or rows of later sequences may come back unwritten (pytorch#194167).
    """

    def __init__(self, layout: Layout, upload: Upload, varlen: Callable[..., Any]) -> None:
        self._varlen = varlen
        self.calls = []
        if (decode := np.flatnonzero(layout.query == 1)).size:
            self.calls.append(varlen_call(layout, decode, "decode", upload, {"window_size": (-1, -1)}))
        if (prefill := np.flatnonzero(layout.query > 1)).size:
            one_split = {"num_splits": 1} if takes_splits(varlen) else {}
            self.calls.append(varlen_call(layout, prefill, "prefill", upload, {"window_size": (-1, 0), **one_split}))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pages: Tensor) -> Tensor:
        """Attention `[T, H, D]` of q over one layer's `pages [2, pages, 256, K, D]`; k and v are in there already."""
        out = torch.empty_like(q)
        for call in self.calls:
            out[call.rows] = self._varlen(q[call.rows], pages[0], pages[1], *call.lengths, **call.options)
        return out
