# Generated from notebooks/17_graphs.ipynb by `helios export`; edit the notebook.
"""Which recorded shape a decode tick goes into, how it is padded, and how its numbers get to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from helios.engine.runner import TickInputs
from helios.kv.pages import PAGE_SIZE, SCRATCH_PAGE

__all__ = [
    "Bucket",
    "CudaLink",
    "DirectLink",
    "Draws",
    "Fence",
    "Fields",
    "Link",
    "Passed",
    "Staging",
    "bucket_grid",
    "choose_bucket",
    "fields",
    "fill",
    "is_plain_decode",
    "pages_in_use",
    "powers",
]


@dataclass(frozen=True, order=True)
class Bucket:
    """A shape that is recorded: `batch` rows with page tables of `pages` entries."""

    batch: int
    pages: int

    @property
    def ints(self) -> int:
        """int32 numbers in the bucket's packed inputs: see `fields`."""
        return self.batch * (5 + self.pages)


def powers(most: int, factor: int) -> list[int]:
    """1, factor, factor², … and `most` itself."""
    found = [1]
    while found[-1] * factor < most:
        found.append(found[-1] * factor)
    return [*found, most] if most > 1 else found


def bucket_grid(batch: int, pages: int, *, by_pages: bool = True, graphs: int = 24) -> list[Bucket]:
    """Buckets up to `batch` rows and `pages` pages a row, at most `graphs` of them, largest first.

    Steps double; while that makes too many, the axis with more steps gets coarser. Without `by_pages` the launch does
    not depend on contexts and every bucket has room for the longest.
    """
    if batch < 1 or pages < 1 or graphs < 1:
        raise ValueError(f"a grid needs a row, a page and a graph at least, not {batch}, {pages} and {graphs}")
    factors = [2, 2]
    while True:
        rows, tables = powers(batch, factors[0]), powers(pages, factors[1]) if by_pages else [pages]
        if len(rows) * len(tables) <= graphs:
            return [Bucket(*sizes) for sizes in sorted(product(rows, tables), reverse=True)]
        if len(rows) <= 2 and len(tables) <= 2:  # they cannot get coarser
            return [Bucket(batch, pages)]
        axis = int(len(tables) >= len(rows))
        factors[axis] *= 2


def choose_bucket(buckets: Sequence[Bucket], needs: Sequence[int], padding: float | None = None) -> Bucket | None:
    """The bucket with the fewest padded pages that holds rows of `needs` pages each; None if there is none.

    With `padding` also None if even that has more than `padding` times the pages needed.
    """
    rows, most = len(needs), max(needs)
    held = [bucket for bucket in buckets if bucket.batch >= rows and bucket.pages >= most]
    if not held:
        return None
    best = min(held, key=lambda bucket: (bucket.batch * bucket.pages, bucket.batch))
    return None if padding is not None and best.batch * best.pages > padding * sum(needs) else best


class Fields(NamedTuple):
    """The parts of a packed buffer, as views: what one row of a decode tick consists of."""

    uniforms: Tensor  # [B] float64
    ids: Tensor  # [B] int32; −1 − j: whatever row j of the step before chose
    positions: Tensor  # [B] int32
    temperatures: Tensor  # [B] float32; 0 is greedy
    table: Tensor  # [B, P] int32


def fields(buffer: Tensor, bucket: Bucket) -> Fields:
    """The bucket's view of a packed int32 buffer, on the host or on the device. Uniforms come first: 8-byte aligned."""
    rows = bucket.batch
    sizes = [2 * rows, rows, rows, rows, rows * bucket.pages]
    uniforms, ids, positions, temperatures, table = torch.split(buffer[: bucket.ints], sizes)
    return Fields(
        uniforms.view(torch.float64), ids, positions, temperatures.view(torch.float32), table.view(rows, bucket.pages)
    )


def pages_in_use(inputs: TickInputs) -> list[int]:
    """Pages that hold the context of each row."""
    return [-(-span.context // PAGE_SIZE) for span in inputs.spans]


def is_plain_decode(inputs: TickInputs) -> bool:
    """Whether every sequence brings one token and wants its logits, in order: what can be recorded."""
    rows = len(inputs.spans)
    return len(inputs.token_ids) == rows == len(inputs.rows) and bool((inputs.rows == np.arange(rows)).all())


@dataclass(frozen=True)
class Draws:
    """How each row's token is drawn on the device: temperature (0: greedy) and random number in [0, 1)."""

    temperatures: Sequence[float]
    uniforms: Sequence[float]


def fill(target: Sequence[Any], inputs: TickInputs, draws: Draws | None = None) -> None:
    """Write a decode tick into `fields` seen as numpy arrays; the rest becomes padding rows on the scratch page."""
    uniforms, ids, positions, temperatures, table = target
    rows, needs = len(inputs.spans), pages_in_use(inputs)
    if rows > len(ids) or max(needs) > table.shape[1]:
        raise ValueError(f"{rows} rows of up to {max(needs)} pages do not fit {len(ids)} rows of {table.shape[1]}")
    ids[:rows], ids[rows:] = inputs.token_ids, 0
    positions[:rows], positions[rows:] = inputs.positions, 0
    uniforms[:], temperatures[:], table[:] = 0.0, 0.0, SCRATCH_PAGE
    if draws is not None:
        uniforms[:rows], temperatures[:rows] = draws.uniforms, draws.temperatures
    for row, (need, span) in enumerate(zip(needs, inputs.spans, strict=True)):
        table[row, :need] = span.pages[:need]


class Fence(Protocol):
    """A mark in the stream of work. `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Put the mark behind all work given so far."""

    def synchronize(self) -> None:
        """Wait until the device has passed the mark; at once if it was never recorded."""


class Link(Protocol):
    """The way between host and device."""

    def host(self, count: int, dtype: torch.dtype) -> Tensor:
        """Host memory that copies may use in the background."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy; it is done once a fence recorded after it is passed."""

    def fence(self) -> Fence:
        """A new mark, not recorded yet."""


class Passed:
    """A fence where nothing is ever under way."""

    def record(self) -> None:
        """Nothing to mark."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class DirectLink:
    """Host and device are the same memory: copies are done when they return."""

    def host(self, count: int, dtype: torch.dtype) -> Tensor:
        """Ordinary memory, zeroed."""
        return torch.zeros(count, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def fence(self) -> Fence:
        """Always passed."""
        return Passed()


class CudaLink:
    """Pinned host memory and copies in the background of the current stream."""

    def host(self, count: int, dtype: torch.dtype) -> Tensor:
        """Pinned memory, zeroed: the device reads it by itself."""
        return torch.zeros(count, dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue the copy and return."""
        target.copy_(source, non_blocking=True)

    def fence(self) -> Fence:
        """An event; waiting for one that was never recorded returns at once."""
        event: Any = torch.cuda.Event
        return cast(Fence, event())


class Staging:
    """Gets decode ticks into one device buffer: two host buffers in turn, one copy a tick.

    A host buffer is written only after the copy that last read it is done. The device buffer needs no such care: the
    next copy into it stands behind the replay that reads it, in the same stream.
    """

    def __init__(self, link: Link, ints: int, device: torch.device | str) -> None:
        self.device = torch.zeros(ints, dtype=torch.int32, device=device)
        self._link, self._turn = link, 0
        self._host = [link.host(ints, torch.int32) for _ in range(2)]
        self._fences = [link.fence() for _ in range(2)]
        self._views: dict[tuple[int, Bucket], list[Any]] = {}

    def stage(self, bucket: Bucket, inputs: TickInputs, draws: Draws | None = None) -> None:
        """Begin to bring the tick to the device, packed for `bucket`."""
        turn, self._turn = self._turn, 1 - self._turn
        host, fence = self._host[turn], self._fences[turn]
        fence.synchronize()
        if (turn, bucket) not in self._views:
            self._views[turn, bucket] = [part.numpy() for part in fields(host, bucket)]
        fill(self._views[turn, bucket], inputs, draws)
        self._link.copy(self.device[: bucket.ints], host[: bucket.ints])
        fence.record()
