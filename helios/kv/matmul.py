# Generated from notebooks/08_paged_attention.ipynb by `helios export`; edit the notebook.
"""Attention written out as matrix products: for CPUs whose bfloat16 units the fused kernel does not use well."""

from __future__ import annotations

import torch
from torch import Tensor

from helios.model.attention import attend_decode, choose_attention

__all__ = ["MANY_KEYS", "QUERY_BLOCK", "causal_by_matmul", "choose_paged_attention", "decode_by_matmul"]
MANY_KEYS = 1536  # fewer keys than this in all of a batch: the fused kernel's one call costs less


def decode_by_matmul(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """As `attend_decode`: one query per sequence, `q [B, H, D]`, `k`, `v [B, L, K, D]`, `bias [B, 1, 1, L]`.

    Each sequence's keys stay one matrix `[L, K·D]`, as they lie in memory. Its H queries become rows `[H, K·D]`, zero
    outside the columns of their own head, so one product gives all scores; in the second product the same blocks count.
    """
    (batch, heads, dim), (_, length, kv_heads, _) = q.shape, k.shape
    if batch * length < MANY_KEYS:
        return attend_decode(q, k, v, bias)
    group = heads // kv_heads
    rows = q.new_zeros(batch, kv_heads, group, kv_heads, dim)
    scaled = (q * dim**-0.5).view(batch, kv_heads, group, dim)
    rows.diagonal(dim1=1, dim2=3).copy_(scaled.permute(0, 2, 3, 1))
    scores = torch.bmm(rows.view(batch, heads, -1), k.view(batch, length, -1).transpose(1, 2))
    weights = scores.add_(bias.view(batch, 1, length)).softmax(-1)
    out = torch.bmm(weights, v.view(batch, length, -1)).view(batch, kv_heads, group, kv_heads, dim)
    return out.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(batch, heads, dim)


QUERY_BLOCK = 128


def causal_by_matmul(q: Tensor, k: Tensor, v: Tensor, mask: None = None) -> Tensor:
    """As `attend_causal`: `q [T, H, D]`, the last T of the positions of `k`, `v [S, K, D]`, to `[T, H, D]`.

    Queries go in blocks of 128, each against the keys up to its own last one: what no query may see is not computed,
    and −∞ is added only where a block meets itself, so there is no mask to give.
    """
    (tokens, heads, dim), (seen, kv_heads, _) = q.shape, k.shape
    rows = (q * dim**-0.5).view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3)  # [K, G, T, D]
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    placed = out.view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3)
    for start in range(0, tokens, QUERY_BLOCK):
        block = rows[:, :, start : start + QUERY_BLOCK]
        group, count = block.shape[1:3]
        end = seen - tokens + start + count
        scores = torch.bmm(block.reshape(kv_heads, group * count, dim), keys[:, :, :end])
        future = torch.full((count, count), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        scores.view(kv_heads, group, count, end)[..., end - count :].add_(future)
        part = torch.bmm(scores.softmax(-1), values[:, :end])
        placed[:, :, start : start + count] = part.view(kv_heads, group, count, dim)
    return out


def choose_paged_attention(device: torch.device, dtype: torch.dtype, name: str = "auto") -> tuple[str, str]:
    """How to attend over pages here, and why: "sdpa", "matmul" or "varlen". `ValueError` if `name` cannot be had."""
    if name == "matmul":
        return name, "asked for"
    if name == "auto" and device.type == "cpu" and dtype == torch.bfloat16:
        # torch's own questions, but not public ones: a version that drops them must not stop us.
        amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
        if not amx and getattr(torch.cpu, "_is_avx512_bf16_supported", bool)():
            return "matmul", "this CPU has AVX512-BF16 but no AMX: plain products beat the fused kernel"
    return choose_attention(device, dtype, name)
