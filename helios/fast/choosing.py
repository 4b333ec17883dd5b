# Generated from notebooks/17_graphs.ipynb by `helios export`; edit the notebook.
"""Tokens chosen on the device, where nothing but a temperature shapes the choice."""

from __future__ import annotations

import torch
from torch import Tensor

from helios.model.draw import draw, likeliest
from helios.model.params import SamplingParams
from helios.model.sampling import HUGE, SampleRow, needs_editing

__all__ = ["can_choose", "choose_on_device"]


def choose_on_device(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids [B] for logits [B, V]: `sample`'s choice where only temperatures [B] (0: greedy) differ.

    Nothing is read back. A row that is not finite gets −1. `uniforms [B]` are float64 in [0, 1).
    """
    best, ids = likeliest(logits)
    scaled = logits / temperatures.masked_fill(temperatures <= 0, 1.0)[:, None]
    drawn = draw(torch.softmax(scaled, 1), uniforms)
    ids = torch.where(best.abs() < HUGE * temperatures, drawn, ids)
    return ids.masked_fill(~best.isfinite(), -1)


def can_choose(row: SampleRow) -> bool:
    """Whether this row's token can be chosen on the device: no filters, edits or logprobs."""
    p: SamplingParams = row.params
    plain = p.top_k <= 0 and p.top_p >= 1.0 and p.min_p <= 0.0 and p.logprobs is None
    return (plain or (p.greedy and p.logprobs is None)) and not needs_editing(row)
