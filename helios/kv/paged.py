# Generated from notebooks/08_paged_attention.ipynb by `helios export`; edit the notebook.
"""The KV cache of many sequences: one pool of pages, planned once per pass, read through page tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helios.kv.gather import KERNELS, GatherPlan, Scratch
from helios.kv.layout import Layout
from helios.kv.pages import PAGE_SIZE
from helios.kv.varlen import VarlenPlan
from helios.model.config import KVSpec

__all__ = ["ALIGNMENT", "PagedKVCache", "Span", "zeroed"]


@dataclass(slots=True)  # not frozen: hundreds are made in every pass, and freezing makes each five times as dear
class Span:
    """One sequence's part of a pass: its newest `query` tokens, of `context` stored once the pass is done, in `pages`.

    A padding row is `Span(1, 1, [SCRATCH_PAGE])`.
    """

    query: int
    context: int
    pages: Sequence[int]


ALIGNMENT = 64  # bytes: a cache line


def zeroed(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros. On a CPU from `calloc`: memory is committed where it is first written, so an unused page costs nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT  # a row that straddles cache lines is slower to gather
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


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
        self.store = zeroed(shape, torch.device(device), dtype)
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

    def plan(self, spans: Sequence[Span]) -> None:
        """Prepare a pass whose packed tokens are those of `spans`, in this order. All its index work is done here."""
        layout = Layout(*zip(*((span.query, span.context, span.pages) for span in spans), strict=True))
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

    @property
    def nbytes(self) -> int:
        """Bytes of memory held by all pages, used or not."""
        return self.store.nbytes
