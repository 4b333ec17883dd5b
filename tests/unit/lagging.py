"""Devices that are behind the host: work is queued, and done when a fence is waited for, or a little earlier."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from helios.engine.runner import TickInputs
from helios.fast.buckets import DirectLink, Draws
from helios.fast.choosing import choose_on_device
from helios.kv.pages import PAGE_SIZE, PagePool
from tests.unit.fake_model import FakeModel, Script


class LateLink(DirectLink):
    """Copies run when a fence after them is waited for, or when `run_until` says so."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.done = 0

    def add(self, work: Callable[[], Any]) -> None:
        self.queue.append(work)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.add(lambda: target.copy_(source))

    def run_until(self, mark: int) -> None:
        while self.done < mark:
            self.queue[self.done]()
            self.done += 1

    def fence(self) -> Any:
        marks = [0]
        return SimpleNamespace(
            record=lambda: marks.append(len(self.queue)), synchronize=lambda: self.run_until(marks[-1])
        )


class NoFences(LateLink):
    def fence(self) -> Any:
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None)


class LaggingModel(FakeModel):
    """`FakeModel` on a device that is as far behind as `lag()` says, in pieces of work; it can launch steps ahead."""

    def __init__(
        self, pages: int, script: Script | None = None, *, lag: Callable[[], int] = lambda: 10**9, rows: int = 10**9
    ) -> None:
        super().__init__(pages, script)
        self.link, self.lag, self.rows = LateLink(), lag, rows
        self.chosen = torch.zeros(64, dtype=torch.int64)
        self.writing: dict[int, set[int]] = {}  # pages that a launched step writes to, by its place in the queue
        self.launches: list[list[int]] = []

    def pages_written(self) -> set[int]:
        """Pages that work which is not done yet will write to."""
        return set().union(*(pages for place, pages in self.writing.items() if place >= self.link.done))

    def can_launch(self, contexts: list[int]) -> bool:
        return len(contexts) <= self.rows

    def launch(self, inputs: TickInputs, draws: Draws) -> Tensor:
        count = len(inputs.spans)
        tables = [list(span.pages) for span in inputs.spans]
        self.writing[len(self.link.queue)] = {
            pages[position // PAGE_SIZE] for pages, position in zip(tables, inputs.positions.tolist(), strict=True)
        }
        self.launches.append(inputs.token_ids.tolist())
        self.link.add(lambda: self._step(inputs, draws))
        self.link.run_until(len(self.link.queue) - self.lag())
        return self.chosen[:count]

    def _step(self, inputs: TickInputs, draws: Draws) -> None:
        ids = torch.from_numpy(inputs.token_ids)
        ids = torch.where(ids < 0, self.chosen[(-1 - ids).clamp(min=0)].clamp(min=0), ids)
        logits = super().forward(TickInputs(ids.numpy(), inputs.positions, inputs.spans, inputs.rows))
        numbers = torch.tensor(draws.uniforms, dtype=torch.float64)
        self.chosen[: len(ids)] = choose_on_device(logits, torch.tensor(draws.temperatures), numbers)

    def forward(self, inputs: TickInputs) -> Tensor:
        self.link.run_until(len(self.link.queue))
        return super().forward(inputs)

    def copy_page(self, source: int, target: int) -> None:
        self.link.add(lambda: super(LaggingModel, self).copy_page(source, target))


class GuardedPool(PagePool):
    """Fails when a page is handed out while a launched step may still write to it."""

    def __init__(self, pages: int, model: LaggingModel) -> None:
        super().__init__(pages)
        self._model = model

    def allocate(self, count: int) -> list[int]:
        pages = super().allocate(count)
        assert not set(pages) & self._model.pages_written(), "a page was handed out that is still written to"
        return pages


def random_lag(seed: int) -> Callable[[], int]:
    """Sometimes up to date, sometimes some pieces of work behind, sometimes as far as fences allow."""
    rng = random.Random(seed)
    return lambda: rng.choice([0, 1, 2, 3, 10**9])
