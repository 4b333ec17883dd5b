# Generated from notebooks/10_batching.ipynb by `helios export`; edit the notebook.
"""From sequences to one packed forward: the pass's token ids, positions, page spans and the rows to be sampled."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from helios.engine.sequence import Sequence
from helios.kv.paged import PagedKVCache, Span
from helios.model.transformer import Transformer

__all__ = ["Batch", "ModelRunner", "Runner", "RunnerUnavailable", "TickInputs", "pack"]


@dataclass(frozen=True, slots=True)
class TickInputs:
    """One forward's inputs: token_ids, positions int64 [T]; spans in packed order; rows int64 [R], indices into T."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    spans: Seq[Span]
    rows: npt.NDArray[np.int64]


class RunnerUnavailable(Exception):
    """This runner cannot serve this model on this machine; the message says why."""


class Runner(Protocol):
    """Anything that turns a tick's inputs into logits [R, V] float32: eager, compiled, captured or parallel."""

    def forward(self, inputs: TickInputs) -> Tensor:
        """Run one packed pass and store its keys and values."""
        ...


class ModelRunner:
    """The eager runner: plan the cache once, run the transformer once."""

    def __init__(self, model: Transformer, cache: PagedKVCache) -> None:
        self.model = model
        self.cache = cache

    def forward(self, inputs: TickInputs) -> Tensor:
        """Logits [R, V] float32 of the rows asked for, on the model's device."""
        device = self.model.device
        self.cache.plan(inputs.spans)
        token_ids = torch.from_numpy(inputs.token_ids).to(device, non_blocking=True)
        positions = torch.from_numpy(inputs.positions).to(device, non_blocking=True)
        rows = torch.from_numpy(inputs.rows).to(device, non_blocking=True)
        logits: Tensor = self.model(token_ids, positions, self.cache, rows)
        return logits


@dataclass(frozen=True, slots=True)
class Batch:
    """A tick's work, packed. `sampled` owns the first rows, one each; `unfinished` the rows after them; then `scored`.

    A prompt whose last chunk this is owns one row for each of its choices. The last token of an unfinished chunk is
    computed through the head too, so that a chunk with non-finite values is found before anyone can share its pages.
    `scored` are the prompts whose log-probabilities are wanted, each with its number of rows.
    """

    inputs: TickInputs
    sampled: list[Sequence]
    unfinished: list[Sequence]
    scored: list[tuple[Sequence, int]]


def pack(work: Seq[tuple[Sequence, int]], choices: dict[str, list[Sequence]]) -> Batch:
    """Pack (sequence, tokens) pairs into one pass, generating sequences first (as `plan_tick` has them).

    `choices` are the live sequences by request id.
    """
    # Hundreds generate and few are prompts: hence whole columns for those, and a loop for these.
    sampled = [seq for seq, _ in work if seq.computed >= seq.prompt_tokens]
    prompts, at = work[len(sampled) :], len(sampled)
    total = at + sum(tokens for _, tokens in prompts)
    token_ids, positions = np.empty(total, np.int64), np.empty(total, np.int64)
    token_ids[:at] = [seq.output_ids[-1] for seq in sampled]
    positions[:at] = [seq.computed for seq in sampled]
    spans = [Span(1, seq.computed + 1, seq.pages) for seq in sampled]
    rows = list(range(at))
    unfinished: list[Sequence] = []
    scored: list[tuple[Sequence, int]] = []
    chunk_rows: list[int] = []
    score_rows: list[int] = []
    for seq, tokens in prompts:
        start, end = seq.computed, seq.computed + tokens
        spans.append(Span(tokens, end, seq.pages))
        token_ids[at : at + tokens] = seq.prompt[start:end]
        positions[at : at + tokens] = np.arange(start, end)
        if seq.scores is not None:  # each token but the prompt's last foretells one of the prompt's
            foretelling = range(at, at + min(end, seq.prompt_tokens - 1) - start)
            if foretelling:
                scored.append((seq, len(foretelling)))
                score_rows += foretelling
        at += tokens
        if end < seq.prompt_tokens:
            unfinished.append(seq)
            chunk_rows.append(at - 1)
        else:
            owners = choices[seq.request_id]
            sampled += owners
            rows += [at - 1] * len(owners)
    wanted = np.asarray(rows + chunk_rows + score_rows, np.int64)
    return Batch(TickInputs(token_ids, positions, spans, wanted), sampled, unfinished, scored)
