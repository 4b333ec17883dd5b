# Generated from notebooks/06_kv_cache.ipynb by `helios export`; edit the notebook.
"""The KV cache: prefill and decode.

Keep the keys and values of the tokens already seen, for one sequence in one contiguous piece of
memory, so that a new token costs one token's work instead of the whole sequence's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from helios.model.config import KVSpec
from helios.model.transformer import NoCache, Transformer, naive_attention

__all__ = ["Attend", "ContiguousCache", "generate_greedy"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [T, H, D], k [S, K, D], v [S, K, D] → [T, H, D]


class ContiguousCache:
    """Keys and values of one sequence, in one block of memory made for `capacity` tokens.

    Each forward pass writes its T tokens behind the `length` tokens stored so far, layer by layer; when the pass is
    done `advance(T)` makes them part of the past. `attend` computes attention of q [T, H, D] over k, v [S, K, D].
    """

    def __init__(
        self,
        spec: KVSpec,
        capacity: int,
        *,
        heads: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        attend: Attend = naive_attention,
    ) -> None:
        if capacity < 1:
            raise ValueError(
                f"capacity is the number of tokens the cache can hold and must be at least 1, not {capacity}"
            )
        if heads % spec.heads:
            raise ValueError(f"{heads} query heads cannot share {spec.heads} KV heads evenly: heads must be a multiple")
        # Zeros and not empty memory: what was there before could be NaN, and NaN times a weight of 0 is NaN.
        self.store = torch.zeros(spec.layers, 2, capacity, spec.heads, spec.head_dim, device=device, dtype=dtype)
        self.capacity = capacity
        self.length = 0
        self._attend = attend

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [T, K, D] of `layer` behind the past; return attention [T, H, D] of q over past and present.

        Raises ValueError when the tokens do not fit.
        """
        end = self.length + k.shape[0]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit a cache of {self.capacity}: make it with a larger capacity")
        keys, values = self.store[layer, 0, :end], self.store[layer, 1, :end]
        keys[self.length :] = k
        values[self.length :] = v
        return self._attend(q, keys, values)

    def advance(self, tokens: int) -> None:
        """The last pass is complete in all layers: its tokens now belong to the past."""
        if not 0 <= tokens <= self.capacity - self.length:
            raise ValueError(f"cannot advance by {tokens}: {self.length} of {self.capacity} tokens are stored")
        self.length += tokens

    def reset(self) -> None:
        """Forget the sequence; the memory stays and is written over."""
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, used or not."""
        return self.store.nbytes


def generate_greedy(
    model: Transformer, cache: ContiguousCache | NoCache, prompt_ids: Sequence[int], max_tokens: int
) -> Iterator[int]:
    """Yield exactly `max_tokens` ids, each the most likely one after the prompt and those before it.

    With a `ContiguousCache` (reset first) the prompt is one pass, the prefill, and every further token a pass of
    its own. `NoCache` remembers nothing, so every pass takes the whole sequence again.
    """
    tokens = list(prompt_ids)
    stored = 0
    if isinstance(cache, ContiguousCache):
        cache.reset()
    for _ in range(max_tokens):
        fresh = torch.tensor(tokens[stored:], device=model.device)
        positions = torch.arange(stored, len(tokens), device=model.device)
        with torch.inference_mode():
            logits = model(fresh, positions, cache, rows=torch.tensor([len(fresh) - 1], device=model.device))
        if isinstance(cache, ContiguousCache):
            cache.advance(len(fresh))
            stored = cache.length
        tokens.append(int(logits[0].argmax()))
        yield tokens[-1]
