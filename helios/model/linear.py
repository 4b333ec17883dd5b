# Generated from notebooks/03_transformer.ipynb by `helios export`; edit the notebook.
"""A linear layer whose weight can be re-packed for the CPU it runs on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Linear", "can_pack"]


class Linear(nn.Module):
    """`y = x Wᵀ + b` with W `[out, in]`; `pack()` swaps the plain weight for oneDNN's blocked copy."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
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

    def pack(self) -> None:
        """Replace the weight by its packed form; the plain copy is dropped. Only where `can_pack` says yes."""
        if self.weight is not None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().contiguous(), None)
            self.weight = None


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN can hold weights of this dtype in its own blocked layout on this device."""
    ops = torch.ops.mkldnn
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not hasattr(ops, "_linear_pointwise") or not hasattr(ops, "_reorder_linear_weight"):
        return False  # they are torch's own, not its public interface: a version may do without
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(ops._is_mkldnn_bf16_supported()))
