# Generated from notebooks/10_batching.ipynb by `helios export`; edit the notebook.
"""What an answer must keep to, as the engine sees it: a mask before each choice, and a word about each chosen token."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, Self, TypeVar

import numpy as np

from helios.model.masks import Mask
from helios.model.params import RequestError

__all__ = ["BROKEN", "Constraint", "ConstraintError", "MaskPool", "Reply", "ask", "log", "mask_of", "masks_of"]


class Constraint(Protocol):
    """What one choice of a request may say. The engine asks for a mask, then tells which token it took, and so on."""

    def mask(self) -> Mask | None:
        """The ids that may come next: bits [ceil(V / 32)] as of `pack_mask`; None: all. Asked in another thread."""
        ...

    def accept(self, token_id: int) -> bool:
        """Take in the token that was chosen (never one that ends the text). True: complete, nothing can follow."""
        ...

    def fork(self) -> Self:
        """A copy in the same state, which goes its own way from here."""
        ...


log = logging.getLogger("helios")
BROKEN = (
    "the format that this answer must keep to (a schema, a grammar or a list of choices) could not be followed any "
    "further, so it was stopped; simplify the format, or send the request without it"
)
Reply = TypeVar("Reply")


class ConstraintError(RequestError):
    """A constraint broke: a sentence for whoever sent it."""


def ask(question: Callable[..., Reply], *arguments: object) -> Reply:
    """Call a constraint's method; whatever it raises becomes a ConstraintError."""
    try:
        return question(*arguments)
    except Exception as error:
        log.warning("a constraint failed: %r", error)
        raise ConstraintError(BROKEN) from error


def mask_of(constraint: Constraint) -> Mask | None | ConstraintError:
    """The constraint's mask, or what went wrong: a value, because it travels between threads."""

    def question() -> Mask | None:
        mask = constraint.mask()
        return None if mask is None else np.asarray(mask, np.int32).reshape(-1)

    try:
        return ask(question)
    except ConstraintError as error:
        return error


def masks_of(constraints: Seq[Constraint]) -> list[Mask | None | ConstraintError]:
    return [mask_of(constraint) for constraint in constraints]


class MaskPool:
    """A few threads that compute masks while the engine's own thread runs the forward. They start when first needed."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(4, os.cpu_count() or 1)
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, constraints: Seq[Constraint]) -> Callable[[], list[Mask | None | ConstraintError]]:
        """Begin with the masks of these constraints; the function returned waits for them, in the same order."""
        if not constraints:
            return list
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "helios-masks")
        # A share for each thread, not a job for each mask: handing over costs more than a small mask.
        shares = [constraints[i :: self.threads] for i in range(min(self.threads, len(constraints)))]
        jobs = [self._pool.submit(masks_of, share) for share in shares]

        def collect() -> list[Mask | None | ConstraintError]:
            masks: list[Mask | None | ConstraintError] = [None] * len(constraints)
            for i, job in enumerate(jobs):
                masks[i :: self.threads] = job.result()
            return masks

        return collect
