# Generated from notebooks/18_late.ipynb by `helios export`; edit the notebook.
"""Reading late.

A decode step is launched before the tokens of the step before have been read. While the device
computes, the host commits, streams and plans; nobody waits for the other longer than needed. The
part exported here is `LateEngine`: the engine of chapter 11 with one step under way, and the care
for sequences that end meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol, cast

from torch import Tensor

from helios.engine.engine import Engine
from helios.engine.runner import Runner, TickInputs
from helios.engine.sequence import Sequence, TokenEvent
from helios.engine.tick import TickPlan
from helios.fast.buckets import Draws, Link
from helios.fast.choosing import can_choose
from helios.fast.pipeline import Ask, LateResults, Pipeline
from helios.model.chance import uniform

__all__ = ["LateEngine", "Launcher"]


class Launcher(Runner, Protocol):
    """A runner that can also begin a decode step whose input tokens only the device knows."""

    link: Link

    def can_launch(self, contexts: Seq[int]) -> bool:
        """Whether a decode step of rows with these contexts (tokens, the new one included) can be launched."""
        ...

    def launch(self, inputs: TickInputs, draws: Draws) -> Tensor:
        """Begin it, and return the ids [B] that it will have chosen. An id of -1 - j: what row j chose just before."""
        ...


class LateEngine(Engine):
    """An engine that launches a plain decode step first, and then commits the tokens of the step before.

    What is committed is always in the state of `Engine` between two ticks; what is under way is one more token for
    each of some sequences. Any other tick waits until nothing is under way. One who ends with a token under way keeps
    its pages until that step has been read. `surplus` counts the tokens that were computed past an end.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """As for `Engine`. Raises ValueError if the runner cannot launch steps ahead."""
        super().__init__(*args, **options)
        if not hasattr(self.runner, "launch"):
            raise ValueError("reading late needs a runner that can launch a step ahead: use Engine with this one")
        self._launcher = cast(Launcher, self.runner)
        results = LateResults(self._launcher.link, self.config.max_batch_size)
        self._pipeline = Pipeline(self._launcher.launch, results)
        self._leaving: list[Sequence] = []  # they have ended, and the step under way writes to their pages
        self.surplus = 0

    def _ahead(self, seq: Sequence) -> int:
        """Tokens under way for a sequence: 0 or 1."""
        return int(seq in self._pipeline)

    def _runnable(self) -> list[Sequence]:
        """Those whose last token is under way are given no more."""
        return [seq for seq in super()._runnable() if len(seq.output_ids) + self._ahead(seq) < seq.max_tokens]

    def _can_launch(self, seqs: list[Sequence]) -> bool:
        """Whether this is a plain decode: everyone is past its prompt, and the device can choose for all of them."""
        plain = all(not seq.remaining_prompt and seq.constraint is None and can_choose(seq.row) for seq in seqs)
        contexts = [seq.computed + self._ahead(seq) + 1 for seq in seqs]
        return bool(seqs) and plain and self._launcher.can_launch(contexts)

    def _ask(self, seq: Sequence) -> Ask:
        """A sequence's row of the step: what the step before chose, unless that is known; drawn as `sample` would."""
        ahead, params = self._ahead(seq), seq.request.params
        known = None if ahead else seq.output_ids[-1]
        if params.greedy:
            return Ask(seq, seq.computed + ahead, seq.pages, known)
        number = uniform(seq.row.seed, len(seq.output_ids) + ahead)
        return Ask(seq, seq.computed + ahead, seq.pages, known, params.temperature, number)

    def _launch(self, seqs: list[Sequence]) -> list[TokenEvent]:
        self._totals["ticks"] += 1
        self._totals["tick_tokens"] += len(seqs)
        left, self._leaving = self._leaving, []
        return self._receive(self._pipeline.step([self._ask(seq) for seq in seqs]), left)

    def _drain(self) -> list[TokenEvent]:
        """Wait for all that is under way."""
        left, self._leaving = self._leaving, []
        return self._receive(self._pipeline.drain(), left)

    def _receive(self, found: list[tuple[Any, int]], left: list[Sequence]) -> list[TokenEvent]:
        """Commit a step that has been read; the pages of those who `left` while it was under way are free now."""
        for seq in left:
            super()._release(seq)
        for seq, _ in found:
            seq.computed += 1
        return self._accept([seq for seq, _ in found], [token for _, token in found], [None] * len(found))

    def _release(self, seq: Sequence) -> None:
        """Now, or once the step that still writes to these pages has been read; its token is thrown away."""
        if seq not in self._pipeline:
            super()._release(seq)
            return
        self.surplus += self._pipeline.drop(seq)
        self._leaving.append(seq)

    def _holders(self) -> list[list[int]]:
        """Those who are leaving hold pages, too."""
        return [*super()._holders(), *(seq.pages for seq in self._leaving)]

    def _drop(self, seq: Sequence) -> None:
        """When the last one goes, nobody will ask for another tick: what is under way is waited for at once."""
        super()._drop(seq)
        if not self.running_count:
            self._drain()

    def _serve(self, work: tuple[tuple[Sequence, int], ...]) -> list[TokenEvent]:
        """Launch what can be launched, and tell of the step before; else wait for what is under way; else as ever."""
        seqs = [seq for seq, _ in work]
        if self._can_launch(seqs):
            self._served = work
            return self._launch(seqs)
        if len(self._pipeline):  # the work planned has to wait for the next tick: it may depend on what comes now
            self._served, self.last_plan = (), TickPlan()
            return self._drain()
        return super()._serve(work)
