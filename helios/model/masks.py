# Generated from notebooks/04_sampling.ipynb by `helios export`; edit the notebook.
"""Which tokens may come next, as one bit per token id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Mask", "allows_any", "forbidden", "pack_mask"]
Mask = npt.NDArray[np.int32]


def pack_mask(ids: Iterable[int], vocab_size: int) -> Mask:
    """The mask `[ceil(V / 32)]` that allows these ids and no others: id i is bit i % 32 of word i // 32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def forbidden(masks: Sequence[Mask | None], logits: Tensor) -> Tensor:
    """Where the masks have no bit: bool [S, V], for the rows of logits [S, V]. None forbids nothing.

    What lies beyond a mask is forbidden.
    """
    vocab = logits.shape[1]
    words = np.zeros((len(masks), -(-vocab // 32)), "<i4")
    for row, mask in zip(words, masks, strict=True):
        row[: len(row) if mask is None else len(mask)] = -1 if mask is None else mask[: len(row)]
    bits = np.unpackbits(~words.view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    return torch.from_numpy(bits).view(torch.bool).to(logits.device)


def allows_any(mask: Mask, vocab_size: int) -> bool:
    """Whether the mask allows any id below `vocab_size`."""
    whole, rest = divmod(vocab_size, 32)
    return bool(mask[:whole].any()) or (len(mask) > whole and int(mask[whole]) & ((1 << rest) - 1) != 0)
