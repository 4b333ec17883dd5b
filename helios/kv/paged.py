# Generated from notebooks/08_paged_attention.ipynb by `helios export`; edit the notebook.
"""Attention over pages: the keys and values of many sequences in one pool, read through page tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helios.kv.grouping import Ints, group_by_length
from helios.kv.matmul import causal_by_matmul, decode_by_matmul
from helios.kv.pages import PAGE_SIZE
from helios.model.attention import attend_causal, attend_decode, causal_mask
from helios.model.config import KVSpec

__all__ = [
    "DecodeGroup",
    "GatherPlan",
    "KERNELS",
    "Kernel",
    "Layout",
    "PagedKVCache",
    "PrefillSpan",
    "Rows",
    "Scratch",
    "Span",
    "Upload",
    "VarlenCall",
    "VarlenPlan",
    "decode_group",
    "place",
    "prefill_span",
    "takes_splits",
    "varlen_call",
]


@dataclass(frozen=True)
class Span:
    """One sequence's part of a pass: its newest `query` tokens, of `context` stored once the pass is done, in `pages`.

    A padding row is `Span(1, 1, [SCRATCH_PAGE])`.
    """

    query: int
    context: int
    pages: Sequence[int]


class Layout:
    """The spans of a pass as arrays: where each token of the packed pass is stored, and where its sequence begins."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.query = np.array([span.query for span in spans], dtype=np.int64)
        self.context = np.array([span.context for span in spans], dtype=np.int64)
        held = np.array([len(span.pages) for span in spans], dtype=np.int64)
        wrong = np.flatnonzero((self.query < 1) | (self.context < self.query) | (held * PAGE_SIZE < self.context))
        if wrong.size:
            raise ValueError(f"{spans[wrong[0]]}: needs 1 ≤ query ≤ context ≤ {PAGE_SIZE} · pages")
        self.starts = np.cumsum(self.query) - self.query  # packed row of each span's first token
        self.table = np.zeros((len(spans), held.max(initial=1)), dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(span.pages for span in spans), dtype=np.int64, count=int(held.sum()))
        self.table[np.arange(self.table.shape[1]) < held[:, None]] = flat

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """The slot (page · 256 + offset) of token `positions[…]` of span `rows[…]`; the shapes broadcast."""
        return self.table[rows, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def new_slots(self) -> Ints:
        """The slots `[T]` of this pass's own tokens, in packed order."""
        first = self.starts - (self.context - self.query)  # position = packed row − first
        rows = np.repeat(np.arange(len(self.query)), self.query)
        return self.slots(rows, np.arange(len(rows)) - first[rows])


Upload = Callable[[str, Any], Tensor]
Rows = slice | Tensor


def place(rows: Ints, name: str, upload: Upload) -> Rows:
    """Ascending packed rows, as a slice if they lie side by side: a slice is a view, an index copies."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return upload(name, rows)


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows of similar length: `rows` of the packed pass, `slots [B·L]` to gather, `bias [B, 1, 1, L]`."""

    rows: Rows
    slots: Tensor
    bias: Tensor


@dataclass(frozen=True)
class PrefillSpan:
    """A span of several tokens: its `rows` and, if it has a past, the `slots [S]` to gather and the `mask [T, S]`."""

    rows: slice
    slots: Tensor | None = None
    mask: Tensor | None = None


class Scratch:
    """Where pages are gathered to: one block for all layers. Memory taken anew for each would cost a page fault per 4 KiB."""

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
            past_k, past_v = self._scratch.gather(keys, values, group.slots)
            out[group.rows] = self._kernel.decode(q[group.rows], past_k.view(shape), past_v.view(shape), group.bias)
        for span in self.prefills:
            past_k, past_v = k[span.rows], v[span.rows]
            if span.slots is not None:
                past_k, past_v = self._scratch.gather(keys, values, span.slots)
            shape = (-1, heads, dim)
            out[span.rows] = self._kernel.causal(q[span.rows], past_k.reshape(shape), past_v.reshape(shape), span.mask)
        return out


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


def prefill_span(layout: Layout, span: int, upload: Upload, masked: bool) -> PrefillSpan:
    """The span's rows; a span without a past needs no more, this pass's own keys and values are all it sees."""
    start, query, context = (int(part[span]) for part in (layout.starts, layout.query, layout.context))
    rows = slice(start, start + query)
    if context == query:
        return PrefillSpan(rows)
    slots = upload(f"past{span}", layout.slots(np.array(span), np.arange(context)))
    return PrefillSpan(rows, slots, causal_mask(query, context, slots.device) if masked else None)


@dataclass(frozen=True)
class VarlenCall:
    """The arguments of one `varlen_attn` call but for the tensors: packed `rows`, lengths, and keyword options."""

    rows: Rows
    lengths: tuple[Tensor, Tensor, int, int]
    options: dict[str, Any]


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


class PagedKVCache:
    """Keys and values of many sequences in one pool of pages: `store [layers, 2, pages, 256, K, D]`.

    Call `plan(spans)` once per pass, then `attend` once per layer. `attention` is one of `choose_paged_attention`:
    "sdpa" and "matmul" gather pages and run everywhere; "varlen" lets torch's FlashAttention read them in place (CUDA,
    compute capability 8.0 or newer). Tests pass a function of their own as `varlen`.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        *,
        query_heads: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        attention: str = "sdpa",
        varlen: Callable[..., Any] | None = None,
    ) -> None:
        if query_heads % spec.heads:
            raise ValueError(f"{query_heads} query heads cannot share {spec.heads} KV heads: heads must be a multiple")
        if attention not in (*KERNELS, "varlen"):
            raise ValueError(f"attention={attention!r} is unknown: use {', '.join(KERNELS)} or varlen")
        # Zeros, not empty memory: a NaN in a masked place still reaches the sum, because 0 · NaN is NaN.
        shape = (spec.layers, 2, num_pages, PAGE_SIZE, spec.heads, spec.head_dim)
        self.store = torch.zeros(shape, device=device, dtype=dtype)
        self.attention = attention
        self._layers = self.store.unbind()
        self._slots = [layer.view(2, num_pages * PAGE_SIZE, -1).unbind() for layer in self._layers]
        self._varlen = varlen
        if attention == "varlen" and varlen is None:
            self._varlen = import_module("torch.nn.attention.varlen").varlen_attn
        self._buffers: dict[str, Tensor] = {}
        self._scratch = Scratch()
        self._new_slots: Tensor | None = None
        self._plan: GatherPlan | VarlenPlan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory held by all pages, used or not."""
        return self.store.nbytes

    def plan(self, spans: Sequence[Span]) -> None:
        """Prepare a pass whose packed tokens are those of `spans`, in this order. All its index work is done here."""
        layout = Layout(spans)
        self._new_slots = self._upload("new", layout.new_slots())
        if self._varlen is None:
            self._plan = GatherPlan(layout, self._upload, self.store.dtype, KERNELS[self.attention], self._scratch)
        else:
            self._plan = VarlenPlan(layout, self._upload, self._varlen)

    def _upload(self, name: str, array: Any) -> Tensor:
        """The array on the device, in the last pass's buffer of that name if it has the same shape."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != source.shape:
            buffer = self._buffers[name] = torch.empty_like(source, device=self.store.device)
        return buffer.copy_(source)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v `[T, K, D]` of this pass; return attention `[T, H, D]` of q over all that each token may see."""
        if self._plan is None or self._new_slots is None:
            raise RuntimeError("attend needs to know whose tokens these are: call plan(spans) before the forward pass")
        for slots, new in zip(self._slots[layer], (k, v), strict=True):
            slots.index_copy_(0, self._new_slots, new.reshape(len(new), -1))
        return self._plan.attend(q, k, v, self._layers[layer])

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page in all layers: a sequence that shares a half-filled page needs its own before it writes on."""
        self.store[:, :, target] = self.store[:, :, source]
