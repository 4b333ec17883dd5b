from __future__ import annotations
"""A linear layer whose weight can be re-packed for the CPU it runs on."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN can hold weights of this dtype in its own blocked layout on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    if not hasattr(ops, "_linear_pointwise") or not hasattr(ops, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return dtype == torch.float32

class Linear(nn.Module):
    """`y = x Wᵀ + b` with W `[out, in]`; `pack()` swaps the plain weight for oneDNN's blocked copy."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        self.packed: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., in]` to `[..., out]`."""
        if self.packed is None:
            assert self.weight is not None
            return F.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y

    def pack(self, source: Tensor | None = None) -> None:
        """Replace the weight (or use `source`, which somebody else keeps) by its packed form; the plain copy is dropped."""
        weight = self.weight if source is None else source
        if self.packed is None and weight is not None and can_pack(weight.device, weight.dtype):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
            self.weight = None
