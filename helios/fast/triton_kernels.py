# Generated from notebooks/16_triton.ipynb by `helios export`; edit the notebook.
"""Two Triton kernels: decode attention over a part of each context, read through page tables, and the parts' merge."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_part", "merge_parts"]


@triton.jit(do_not_specialize=["table_row", "splits"])
def attend_part(
    q,
    keys,
    values,
    table,
    lengths,
    part,
    sums,
    scale,
    q_row,
    q_head,
    part_row,
    part_head,
    part_split,
    table_row,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Attention of one group of query heads over one part of one context. Grid: sequences, key heads, `splits`.

    `q [B, H, DIM]`; `keys`, `values [pages, PAGE, KV_HEADS, DIM]`; `table` int32 `[B, ·]`; `lengths` int32 `[B]`.
    Writes the mixture to `part [B, H, splits, DIM]` and, unless DIRECT, log₂ of its sum to `sums [B, H, splits]`.
    `scale` includes log₂ e. ROWS is GROUP rounded up to a power of two; BLOCK divides PAGE.
    """
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    members, dims, slots = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, BLOCK)
    head, real = kv_head * GROUP + members, members < GROUP
    query_at = seq * q_row + head[:, None] * q_head + dims[None, :]
    query = tl.load(q + query_at, mask=real[:, None], other=0.0).to(tl.float32) * scale

    length = tl.load(lengths + seq)
    share = tl.cdiv(tl.cdiv(length, BLOCK), splits) * BLOCK
    start = split * share
    end = tl.minimum(start + share, length)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(start, end, BLOCK):
        page = tl.load(table + seq * table_row + first // PAGE).to(tl.int64)
        slot = page * PAGE + first % PAGE + slots
        at = slot[:, None] * (KV_HEADS * DIM) + kv_head * DIM + dims[None, :]
        seen = first + slots < end
        # Both loads before any use: more bytes are on their way at once.
        key = tl.load(keys + at, mask=seen[:, None], other=0.0).to(tl.float32)
        value = tl.load(values + at, mask=seen[:, None], other=0.0).to(tl.float32)
        score = tl.sum(query[:, None, :] * key[None, :, :], axis=2)
        score = tl.where(seen[None, :], score, float("-inf"))
        peak = tl.maximum(top, tl.max(score, axis=1))
        fade, weight = tl.exp2(top - peak), tl.exp2(score - peak[:, None])
        total = total * fade + tl.sum(weight, axis=1)
        mixed = mixed * fade[:, None] + tl.sum(weight[:, :, None] * value[None, :, :], axis=1)
        top = peak

    total = tl.where(total > 0, total, 1.0)  # an empty part: zeros, which the merge gives the weight 2^-inf = 0
    part_at = seq * part_row + head[:, None] * part_head + split * part_split + dims[None, :]
    tl.store(part + part_at, (mixed / total[:, None]).to(part.dtype.element_ty), mask=real[:, None])
    if not DIRECT:
        tl.store(sums + (seq * KV_HEADS * GROUP + head) * splits + split, top + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=["splits"])
def merge_parts(part, sums, out, out_row, out_head, splits, HEADS: tl.constexpr, DIM: tl.constexpr, MOST: tl.constexpr):
    """Put the `splits` ≤ MOST parts of each context together: `out [B, H, DIM]`. Grid: sequences, query heads."""
    seq, head = tl.program_id(0), tl.program_id(1)
    parts, dims = tl.arange(0, MOST), tl.arange(0, DIM)
    place, there = (seq * HEADS + head) * splits + parts, parts < splits
    s = tl.load(sums + place, mask=there, other=float("-inf"))
    weight = tl.exp2(s - tl.max(s, axis=0))
    o = tl.load(part + place[:, None] * DIM + dims[None, :], mask=there[:, None], other=0.0)
    merged = tl.sum(weight[:, None] * o, axis=0) / tl.sum(weight, axis=0)
    tl.store(out + seq * out_row + head * out_head + dims, merged.to(out.dtype.element_ty))
