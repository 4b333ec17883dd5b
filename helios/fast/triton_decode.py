# Generated from notebooks/16_triton.ipynb by `helios export`; edit the notebook.
"""A Triton kernel.

Decode attention that reads pages in place, as a kernel of our own. One query per sequence goes
through the page table, the query heads of a group share what is loaded, long contexts are split and
merged, and sums are kept in float32. It needs no tensor cores, so it serves GPUs that torch's paged
kernel refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helios.kv.gather import KERNELS, GatherPlan
from helios.kv.layout import Ints, Layout, Rows, Upload, place
from helios.kv.paged import PagedKVCache, Span
from helios.kv.pages import PAGE_SIZE, SCRATCH_PAGE
from helios.kv.varlen import VarlenPlan

__all__ = [
    "DecodeCall",
    "LOG2_E",
    "MOST_SPLITS",
    "PROGRAMS",
    "SHORTEST",
    "TILE",
    "TritonPagedKVCache",
    "choose_splits",
    "decode_call",
    "decode_paged",
    "interpreted",
    "obstacle",
    "only",
]
LOG2_E = 1.4426950408889634
TILE = 4096  # numbers of a block [group, keys, size]: 128 for each thread of a warp
PROGRAMS = 8  # wanted for each processor
SHORTEST = 64  # tokens of a part
MOST_SPLITS = 64


def choose_splits(groups: int, longest: int, processors: int) -> int:
    """Parts to cut each context into: for `groups` = sequences · key heads, enough programs for all `processors`."""
    wanted = -(-PROGRAMS * processors // groups)
    return max(1, min(wanted, -(-longest // SHORTEST), MOST_SPLITS))


def decode_paged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    splits: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Attention `[B, H, D]` of one query per sequence over pages read in place; written to `out` if given.

    `q [B, H, D]`; `keys`, `values [pages, 256, K, D]`, contiguous; `table` int32 `[B, W]`: page numbers; `lengths`
    int32 `[B]`: tokens seen, at least 1. `splits` changes the speed, not the meaning. D must be a power of two.
    Flash-decoding: Dao et al. 2023.
    """
    kernels: Any = import_module("helios.fast.triton_kernels")
    (batch, heads, dim), kv_heads = q.shape, keys.shape[2]
    group = heads // kv_heads
    rows = 1 << (group - 1).bit_length()
    block = max(4, min(TILE // (rows * dim), SHORTEST))
    out = torch.empty_like(q) if out is None else out
    part, sums, strides = out, out, [out.stride(0), out.stride(1), 0]
    if splits > 1:
        part = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=q.device)
        sums, strides = part.new_empty(batch, heads, splits), list(part.stride()[:3])
    kernels.attend_part[batch, kv_heads, splits](
        *(q, keys, values, table, lengths, part, sums, dim**-0.5 * LOG2_E),
        *(q.stride(0), q.stride(1), *strides, table.stride(0), splits),
        *(kv_heads, group, rows, dim, PAGE_SIZE, block, splits == 1),
        num_warps=max(1, rows * block * dim // TILE),
    )
    if splits > 1:
        arguments = (part, sums, out, out.stride(0), out.stride(1), splits)
        kernels.merge_parts[batch, heads](*arguments, heads, dim, MOST_SPLITS, num_warps=4)
    return out


def only(layout: Layout, spans: Ints) -> Layout:
    """The same pass seen through some of its sequences: their packed rows stay where they are."""
    part = copy(layout)
    part.query, part.context, part.starts, part.table = (
        values[spans] for values in (layout.query, layout.context, layout.starts, layout.table)
    )
    return part


@dataclass(frozen=True)
class DecodeCall:
    """The decode rows of a pass for `decode_paged`: packed `rows`, `table [B, W]`, `lengths [B]`, parts."""

    rows: Rows
    table: Tensor
    lengths: Tensor
    splits: int

    def attend(self, q: Tensor, pages: Tensor, out: Tensor) -> None:
        """Attention of q's decode rows over one layer's `pages [2, pages, 256, K, D]`, into the same rows of `out`."""
        target = out[self.rows] if isinstance(self.rows, slice) else None  # a view can be written to, a copy cannot
        keys, values = pages
        found = decode_paged(q[self.rows], keys, values, self.table, self.lengths, splits=self.splits, out=target)
        if target is None:
            out[self.rows] = found


def decode_call(layout: Layout, kv_heads: int, processors: int, upload: Upload) -> DecodeCall | None:
    """The call for the layout's decode rows, or None if there are none."""
    spans = np.flatnonzero(layout.query == 1)
    if not spans.size:
        return None
    context = layout.context[spans]
    splits = choose_splits(len(spans) * kv_heads, int(context.max()), processors)
    table = upload("triton table", layout.table[spans].astype(np.int32))
    lengths = upload("triton lengths", context.astype(np.int32))
    return DecodeCall(place(layout.starts[spans], "triton rows", upload), table, lengths, splits)


def obstacle(device: torch.device, dtype: torch.dtype, head_dim: int = 128) -> str | None:
    """Why the Triton decode kernel cannot serve here, or None when it can."""
    if find_spec("triton") is None:
        return "it needs the package triton"
    if device.type != "cuda" or torch.version.cuda is None:
        return "it needs a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < (7, 0):
        return "it needs compute capability 7.0 (Volta) or newer"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it takes float16, bfloat16 or float32, not {str(dtype).removeprefix('torch.')}"
    if dtype == torch.bfloat16 and capability < (8, 0):
        return "bfloat16 needs compute capability 8.0 (Ampere) or newer"
    return _shape_obstacle(head_dim)


def _shape_obstacle(head_dim: int) -> str | None:
    if not 8 <= head_dim <= 256 or head_dim & (head_dim - 1):
        return f"the head size must be a power of two from 8 to 256, not {head_dim}"
    return None


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter on the CPU (TRITON_INTERPRET=1): for tests, and very slow."""
    return find_spec("triton") is not None and bool(import_module("triton").knobs.runtime.interpret)


class TritonPagedKVCache(PagedKVCache):
    """A `PagedKVCache` whose decode rows are read in place by `decode_paged`; prompts go the way `attention` says.

    Raises ValueError where the kernel cannot serve. On a CPU it runs in Triton's interpreter only.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        device, self._kv_heads, self._dim = self.store.device, *self.store.shape[-2:]
        why = _shape_obstacle(self._dim) if interpreted() else obstacle(device, self.store.dtype, self._dim)
        if why is not None:
            raise ValueError(f"the Triton decode kernel cannot serve here: {why}. Use the plain PagedKVCache.")
        self._decode: DecodeCall | None = None
        self._processors = 1
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._compile(options["query_heads"])

    def _compile(self, heads: int) -> None:
        q = self.store.new_zeros(1, heads, self._dim)
        table, length = (
            torch.full(shape, SCRATCH_PAGE, dtype=torch.int32, device=q.device) for shape in ((1, 1), (1,))
        )
        for splits in (1, 2):
            decode_paged(q, self.store[0, 0], self.store[0, 1], table, length + 1, splits=splits)

    def plan(self, spans: Sequence[Span]) -> None:
        """As the base class's: prepare a pass whose packed tokens are those of `spans`, in this order."""
        layout = Layout(*zip(*((span.query, span.context, span.pages) for span in spans), strict=True))
        self._new_slots = self._upload("new", layout.new_slots())
        self._decode = decode_call(layout, self._kv_heads, self._processors, self._upload)
        prompts = only(layout, np.flatnonzero(layout.query > 1))
        if self._varlen is None:
            kernel = KERNELS[self.attention]
            self._plan = GatherPlan(prompts, self._upload, self.store.dtype, kernel, self._scratch)
        else:
            self._plan = VarlenPlan(prompts, self._upload, self._varlen)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v `[T, K, D]` of this pass; return attention `[T, H, D]` of q over all that each token may see."""
        out = super().attend(layer, q, k, v)
        if self._decode is not None:
            self._decode.attend(q, self._layers[layer], out)
        return out
