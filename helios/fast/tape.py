# Generated from notebooks/17_graphs.ipynb by `helios export`; edit the notebook.
"""A CUDA graph in miniature, for machines without a GPU: operations noted once, done again on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Tape"]


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation inside `with tape:`; `replay` does them again, on the very tensors of the first time.

    As with a CUDA graph, whatever Python decided or read meanwhile is frozen: sizes, numbers, which branch was taken.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Any]]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and note it with its arguments and results."""
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError(
                "a number was read back while recording: in a CUDA graph nothing may wait for the device"
            )
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, tree_leaves(result)))
        return result

    def replay(self) -> None:
        """Do all again. Results go where they went the first time; a view or an in-place result is there already."""
        for func, args, kwargs, places in self._calls:
            for place, value in zip(places, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(value, Tensor) and value.untyped_storage()._cdata != place.untyped_storage()._cdata:
                    place.copy_(value)
