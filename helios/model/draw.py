# Generated from notebooks/04_sampling.ipynb by `helios export`; edit the notebook.
"""One column per row: the largest, or one drawn by weight; both in two steps, the block and then the place in it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BLOCK", "blocks", "draw", "invert", "likeliest", "wide_dtype"]
BLOCK = 128


def blocks(x: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """`torch.amax` or `torch.sum` of every 128 columns of x [R, V]: [R, ceil(V / 128)]; the last block may be short."""
    rows, even = len(x), x.shape[1] // BLOCK
    found = reduce(x[:, : even * BLOCK].view(rows, even, BLOCK), 2)
    tail = x[:, even * BLOCK :]
    return torch.cat([found, reduce(tail, 1)[:, None]], dim=1) if tail.shape[1] else found


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Value and id of each row's largest logit [R], [R]; the lowest id of equals. NaN anywhere gives the value NaN."""
    maxima = blocks(logits, torch.amax)
    block = maxima.argmax(1, keepdim=True)
    inside = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    # Beyond a short last block the last column is looked at again: it can never come first.
    place = logits.gather(1, inside.clamp(max=logits.shape[1] - 1)).argmax(1, keepdim=True)
    return maxima.gather(1, block)[:, 0], (block * BLOCK + place)[:, 0].clamp(max=logits.shape[1] - 1)


def invert(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """In which column the `share` [S, 1] of each row's total falls, and which share of that column lies before it."""
    ends = weights.cumsum(1)
    # Below the total even after rounding: the first end above it then belongs to a column with weight.
    nearly = 1 - 4 * torch.finfo(weights.dtype).eps
    goal = torch.minimum(share, torch.full_like(share, nearly)) * ends[:, -1:]
    column = torch.searchsorted(ends, goal, right=True).clamp(max=weights.shape[1] - 1)
    weight = weights.gather(1, column)
    return column, ((goal - (ends.gather(1, column) - weight)) / weight).clamp(0.0, 1.0)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One column of each row of weights [S, W] with a chance in proportion to its weight: the inverse CDF at [S].

    -1 for a row without a distribution: a NaN or an infinity among its weights, or nothing but zeros.
    """
    exact, width = wide_dtype(weights), weights.shape[1]
    sums = blocks(weights, torch.sum).to(exact)
    block, share = invert(sums, uniforms.to(exact)[:, None])
    inside = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    within = weights.gather(1, inside.clamp(max=width - 1)).to(exact).masked_fill_(inside >= width, 0.0)
    column = (block * BLOCK + invert(within, share)[0])[:, 0].clamp(max=width - 1)
    total = sums.sum(1)  # NaN is not above zero either
    return torch.where((total > 0) & total.isfinite(), column, -1)


def wide_dtype(x: Tensor) -> torch.dtype:
    """float64 for running sums, where the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64
