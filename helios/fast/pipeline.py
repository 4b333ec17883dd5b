# Generated from notebooks/18_late.ipynb by `helios export`; edit the notebook.
"""Decode steps launched before the results of the step before are read, and those results on their way to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from helios.engine.runner import TickInputs
from helios.fast.buckets import Draws, Link
from helios.kv.paged import Span

__all__ = ["Ask", "LateResults", "Pipeline"]


class LateResults:
    """Token ids on their way to the host: at most two steps are under way, read in order."""

    def __init__(self, link: Link, rows: int) -> None:
        self._link, self._turn = link, 0
        self._places = [(link.host(rows, torch.int64), link.fence()) for _ in range(2)]
        self._under_way: deque[tuple[int, list[Hashable | None]]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def send(self, ids: Tensor, owners: Sequence[Hashable]) -> None:
        """Begin to bring `ids [B]` of the rows of `owners` to the host. RuntimeError if two steps are unread."""
        if len(self) == 2:
            raise RuntimeError("two steps are under way already: receive one before sending the next")
        host, fence = self._places[self._turn]
        self._link.copy(host[: len(owners)], ids)
        fence.record()
        self._under_way.append((self._turn, list(owners)))
        self._turn = 1 - self._turn

    def receive(self) -> list[tuple[Hashable, int]]:
        """Wait for the oldest step: (owner, token id) of each row that is still wanted."""
        turn, owners = self._under_way.popleft()
        host, fence = self._places[turn]
        fence.synchronize()
        return [(owner, token) for owner, token in zip(owners, host.tolist(), strict=False) if owner is not None]

    def forget(self, owner: Hashable) -> int:
        """Throw away what is under way for this owner; how many tokens that was."""
        thrown = 0
        for _, owners in self._under_way:
            for row, other in enumerate(owners):
                if other == owner:
                    owners[row], thrown = None, thrown + 1
        return thrown


@dataclass(frozen=True)
class Ask:
    """One sequence's place in a step. Without a `token_id` its input is what its row of the step before chose."""

    owner: Hashable
    position: int
    pages: Sequence[int]
    token_id: int | None = None
    temperature: float = 0.0
    uniform: float = 0.0


class Pipeline:
    """Decode steps launched before the results of the step before are read."""

    def __init__(self, launch: Callable[[TickInputs, Draws], Tensor], results: LateResults) -> None:
        self._launch, self._results = launch, results
        self._rows: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Steps that are launched and not read."""
        return len(self._results)

    def __contains__(self, owner: Hashable) -> bool:
        """Whether a token is under way for this owner."""
        return owner in self._rows

    def step(self, asks: Sequence[Ask]) -> list[tuple[Hashable, int]]:
        """Launch a step; then the results of the one before: (owner, token id), nothing the first time."""
        ids = [-1 - self._rows[ask.owner] if ask.token_id is None else ask.token_id for ask in asks]
        positions = np.array([ask.position for ask in asks], np.int64)
        spans = [Span(1, ask.position + 1, ask.pages) for ask in asks]
        inputs = TickInputs(np.array(ids, np.int64), positions, spans, np.arange(len(asks), dtype=np.int64))
        chosen = self._launch(inputs, Draws([ask.temperature for ask in asks], [ask.uniform for ask in asks]))
        self._results.send(chosen, [ask.owner for ask in asks])
        self._rows = {ask.owner: row for row, ask in enumerate(asks)}
        return self._results.receive() if len(self._results) > 1 else []

    def drop(self, owner: Hashable) -> int:
        """The owner ended: forget its row, throw away what is under way for it; how many tokens that was."""
        self._rows.pop(owner, None)
        return self._results.forget(owner)

    def drain(self) -> list[tuple[Hashable, int]]:
        """Wait for all that is under way, oldest first: before a tick that is no plain decode, and at the end."""
        found = [pair for _ in range(len(self._results)) for pair in self._results.receive()]
        self._rows = {}
        return found
