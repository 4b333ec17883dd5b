# Generated from notebooks/07_attention.ipynb by `helios export`; edit the notebook.
"""SDPA and flash attention.

Attention over a cache with PyTorch's fused kernels: scores that never exist as a matrix, causality
counted from the end, query heads that share a key head folded into rows, and a choice of backend
that is made once and said aloud.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["additive", "attend_causal", "attend_decode", "causal_mask", "choose_attention"]


def causal_mask(queries: int, keys: int, device: torch.device | str) -> Tensor:
    """True where a query may look, `[T, S]` bool: the queries are the last T of S positions (bottom-right)."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as numbers to add to the scores: 0 where visible, −inf elsewhere, in `dtype`."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def attend_decode(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """One query per sequence: `q [B, H, D]`, `k`, `v [B, L, K, D]`, `bias [B, 1, 1, L]` in q's dtype, to `[B, H, D]`.

    The H/K query heads that share a key head become rows of one small matrix: a view, nothing is repeated.
    """
    batch, heads, dim = q.shape
    kv_heads = k.shape[2]
    rows = q.view(batch, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias)
    return out.reshape(batch, heads, dim)


def _attend_shared(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """One call; the kernel itself lets query heads share key heads."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1)


def _attend_members(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No past and no sharing: a call for each member of a group, each with the kernel's own causality."""
    tokens, heads, dim = q.shape
    members = q.view(tokens, k.shape[1], -1, dim).permute(2, 1, 0, 3)  # [G, K, T, D]
    k, v = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    parts = [F.scaled_dot_product_attention(member[None], k, v, is_causal=True) for member in members]
    return torch.cat(parts).permute(2, 1, 0, 3).reshape(tokens, heads, dim)


def _attend_folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A past and no sharing: the group's queries become rows under one repeated mask."""
    tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    rows = q.view(tokens, -1, group, dim).permute(1, 2, 0, 3).reshape(1, -1, group * tokens, dim)
    bias = additive(mask, q.dtype) if mask.dtype == torch.bool else mask
    k, v = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=bias.repeat(group, 1))
    return out.view(-1, group, tokens, dim).permute(2, 0, 1, 3).reshape(tokens, heads, dim)


@cache
def _flash_shares_heads(device: torch.device, dtype: torch.dtype) -> bool:
    half = dtype in (torch.float16, torch.bfloat16)
    return half and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Bottom-right causal attention of one sequence: `q [T, H, D]`, `k`, `v [S, K, D]`, S ≥ T, to `[T, H, D]`.

    Query i sees the keys up to S − T + i. `mask [T, S]` (bool, or additive in q's dtype) spares building one per layer.
    """
    tokens, keys = q.shape[0], k.shape[0]
    if tokens == 1 and mask is None:
        return attend_decode(q, k[None], v[None])
    if mask is None and tokens < keys:
        mask = causal_mask(tokens, keys, q.device)
    if q.device.type == "cpu" or (mask is None and _flash_shares_heads(q.device, q.dtype)):
        return _attend_shared(q, k, v, mask)
    return _attend_members(q, k, v) if mask is None else _attend_folded(q, k, v, mask)


def choose_attention(device: torch.device, dtype: torch.dtype, name: str = "auto") -> tuple[str, str]:
    """The attention backend for paged caches and why: `("sdpa" | "varlen", reason)`.

    Raises `ValueError` when `name` asks for what this machine cannot do.
    """
    if name not in ("auto", "sdpa", "varlen"):
        raise ValueError(f"attention={name!r} is unknown: use auto, sdpa or varlen")
    if name == "sdpa":
        return "sdpa", "asked for"
    obstacle = _varlen_obstacle(device, dtype)
    if obstacle is None:
        return "varlen", "asked for" if name == "varlen" else "varlen_attn reads pages in place on this GPU"
    if name == "varlen":
        raise ValueError(f"attention='varlen' is not possible here: {obstacle}. Use attention='auto'.")
    return "sdpa", f"works everywhere; not varlen: {obstacle}"


def _varlen_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return "it needs a CUDA device"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 (Ampere) or newer"
    try:
        varlen = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return "this torch has no varlen_attn; torch 2.12 or newer has"
    if "block_table" not in inspect.signature(varlen).parameters:
        return "this torch's varlen_attn takes no block_table; torch 2.12 or newer does"
    return None
