# Generated from notebooks/17_graphs.ipynb by `helios export`; edit the notebook.
"""CUDA graphs.

Decode ticks recorded once and replayed whole. A GPU that waits for its next small kernel is a GPU
that does nothing; a graph hands it all kernels of a tick in one call. What is recorded is frozen,
addresses and shapes and numbers, so this chapter sorts ticks into buckets, pads them with rows that
harm nobody, stages their inputs with one copy, and lets the device choose tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from helios.engine.config import EngineConfig
from helios.engine.runner import ModelRunner, RunnerUnavailable, TickInputs
from helios.fast.buckets import (
    Bucket,
    CudaLink,
    Draws,
    Link,
    Staging,
    choose_bucket,
    fields,
    is_plain_decode,
    pages_in_use,
)
from helios.fast.choosing import choose_on_device
from helios.fast.static import DecodeAttention, DecodeCache, Recording, recordings
from helios.fast.tape import Tape
from helios.kv.paged import PagedKVCache, Span
from helios.kv.pages import PAGE_SIZE, SCRATCH_PAGE
from helios.model.draw import likeliest
from helios.model.transformer import Transformer

__all__ = [
    "CudaCapture",
    "GraphRunner",
    "Recorder",
    "ReplayByCalling",
    "ReplayByTape",
    "assemble",
    "attempt",
    "build_runner",
    "choose_where_possible",
    "rehearsal",
    "self_test",
]


class Recorder(Protocol):
    """Turns a step that reads and writes fixed memory into something that does it again."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run `step` (at least once) and return its replay."""


class ReplayByCalling:
    """No recording: a replay calls the step again."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        return step


class ReplayByTape:
    """A recording on a CPU: what Python did is frozen, as in a CUDA graph."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        step()  # warm up
        tape = Tape()
        with tape:
            step()
        return tape.replay


class CudaCapture:
    """CUDA graphs, all in one pool of memory: record the largest first, and never run two at once."""

    def __init__(self, device: torch.device) -> None:
        stream: Any = torch.cuda.Stream
        self._stream = stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Warm up on a side stream, then capture there; other threads may go on using CUDA meanwhile."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph is being captured already: one graph mechanism at a time")
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


class GraphRunner:
    """Replays decode ticks that fit a recorded bucket; everything else runs eagerly. One thread only.

    Logits that `forward` returns are overwritten by the next call. `ticks` counts what went where. With `choosing`,
    each step also chooses tokens on the device, and `launch` can begin a step from what the step before chose.
    `padding`: see `choose_bucket`.
    """

    def __init__(
        self,
        model: Transformer,
        cache: PagedKVCache,
        attention: DecodeAttention,
        buckets: Sequence[Bucket],
        *,
        recorder: Recorder,
        link: Link,
        padding: float | None = None,
        choosing: bool = False,
    ) -> None:
        self.model, self.buckets, self.padding, self.choosing = model, list(buckets), padding, choosing
        self.link, self.eager, self.ticks = link, ModelRunner(model, cache), Counter[str]()
        self._cache = DecodeCache(cache, attention)
        self._staging = Staging(link, max(bucket.ints for bucket in buckets), model.device)
        rows = max(bucket.batch for bucket in buckets)
        self._logits = torch.zeros(rows, model.config.vocab_size, device=model.device)
        self._chosen = torch.zeros(rows, dtype=torch.int64, device=model.device)
        with torch.inference_mode():  # the staging buffer is zero: all rows are padding
            self._replays = {bucket: recorder.record(partial(self._step, bucket)) for bucket in self.buckets}

    def _step(self, bucket: Bucket) -> None:
        """What is recorded: from the staging buffer to logits (and chosen tokens). Only fixed memory, nothing read."""
        rows, given = bucket.batch, fields(self._staging.device, bucket)
        ids = given.ids.long()
        if self.choosing:
            earlier = self._chosen[(-1 - ids).clamp(min=0)].clamp(min=0)
            ids = torch.where(ids < 0, earlier, ids)
        self._cache.plan(given.table, given.positions)
        logits = self.model(ids, given.positions.long(), self._cache)
        self._logits[:rows].copy_(logits)
        if self.choosing:
            self._chosen[:rows].copy_(choose_on_device(logits, given.temperatures, given.uniforms))

    def bucket_for(self, inputs: TickInputs) -> Bucket | None:
        """The bucket this tick is replayed in; None if it must run eagerly."""
        if not is_plain_decode(inputs):
            return None
        return choose_bucket(self.buckets, pages_in_use(inputs), self.padding)

    def can_launch(self, contexts: Sequence[int]) -> bool:
        """Whether a decode step of rows with these contexts (tokens, the new one included) can be launched ahead."""
        needs = [-(-context // PAGE_SIZE) for context in contexts]
        return self.choosing and choose_bucket(self.buckets, needs, self.padding) is not None

    def forward(self, inputs: TickInputs) -> Tensor:
        """Logits [R, V] float32 of the rows asked for, valid until the next call."""
        bucket = self.bucket_for(inputs)
        if bucket is None:
            self.ticks["eager"] += 1
            return self.eager.forward(inputs)
        self._run(bucket, inputs)
        return self._logits[: len(inputs.spans)]

    def launch(self, inputs: TickInputs, draws: Draws) -> Tensor:
        """Begin a decode step and return the ids [B] that it will have chosen, on the device, valid until the next.

        Raises ValueError when no bucket holds the step.
        """
        bucket = self.bucket_for(inputs) if self.choosing else None
        if bucket is None:
            raise ValueError("only a decode step that fits a bucket of a choosing runner can be launched ahead")
        self._run(bucket, inputs, draws)
        return self._chosen[: len(inputs.spans)]

    def _run(self, bucket: Bucket, inputs: TickInputs, draws: Draws | None = None) -> None:
        self.ticks["replayed"] += 1
        self.ticks["padding rows"] += bucket.batch - len(inputs.spans)
        self._staging.stage(bucket, inputs, draws)
        self._replays[bucket]()


def rehearsal(start: int, end: int, copies: int = 1) -> TickInputs:
    """Tokens `start` to `end` of a sequence 0, 1, 2, … on the scratch page, and the row of its last; `copies` of it."""
    tokens, count = np.tile(np.arange(start, end, dtype=np.int64), copies), end - start
    return TickInputs(tokens, tokens, [Span(count, end, [SCRATCH_PAGE])] * copies, np.arange(1, copies + 1) * count - 1)


@torch.inference_mode()
def self_test(runner: GraphRunner, store: Tensor, tolerance: float) -> None:
    """Hold every recording against the eager runner; RunnerUnavailable if one differs. Clears the scratch page.

    `tolerance`: largest difference of any logit, as a share of the largest eager one.
    """
    runner.eager.forward(rehearsal(0, 5))
    expected = runner.eager.forward(rehearsal(5, 6))
    for bucket in runner.buckets:
        tick, logits, chosen = (
            rehearsal(5, 6, bucket.batch),
            runner._logits[: bucket.batch],
            runner._chosen[: bucket.batch],
        )
        logits.fill_(float("nan"))
        if runner.choosing:
            chosen.fill_(5)  # the same tick, as "what row j chose"
            tick = replace(tick, token_ids=-1 - np.arange(bucket.batch, dtype=np.int64))
        runner._run(bucket, tick)
        difference = float((logits - expected).abs().max())
        if not difference <= tolerance * float(expected.abs().max()):  # NaN is not
            raise RunnerUnavailable(f"the recording of {bucket} differs from the eager pass by {difference:.3g}")
        if runner.choosing and not torch.equal(chosen, likeliest(logits)[1]):
            raise RunnerUnavailable(f"the recording of {bucket} chooses other tokens than its logits ask for")
    store[:, :, SCRATCH_PAGE].zero_()
    runner.ticks.clear()


def attempt(
    model: Transformer, cache: PagedKVCache, recording: Recording, recorder: Recorder, link: Link, *, choosing: bool
) -> GraphRunner:
    """Record and test; RunnerUnavailable if either fails."""
    how: dict[str, Any] = {"recorder": recorder, "link": link, "padding": recording.padding, "choosing": choosing}
    try:
        runner = GraphRunner(model, cache, recording.attention, recording.buckets, **how)
        self_test(runner, cache.store, 1e-3 if model.dtype == torch.float32 else 0.05)
    except RunnerUnavailable:
        raise
    except Exception as error:  # a kernel that does not compile raises what it likes
        raise RunnerUnavailable(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    return runner


def choose_where_possible(
    model: Transformer, cache: PagedKVCache, recording: Recording, recorder: Recorder, link: Link
) -> tuple[GraphRunner, list[str]]:
    """`attempt` with tokens chosen on the device; else without, and why. RunnerUnavailable if neither works."""
    try:
        return attempt(model, cache, recording, recorder, link, choosing=True), []
    except RunnerUnavailable as problem:
        runner = attempt(model, cache, recording, recorder, link, choosing=False)
        return runner, [f"tokens are chosen by the host: {problem}"]


def assemble(
    model: Transformer, cache: PagedKVCache, config: EngineConfig, recorder: Recorder, link: Link, graphs: int
) -> tuple[GraphRunner, str]:
    """A recorded and tested runner, and a phrase on what it replays. RunnerUnavailable when it cannot be had."""
    context = min(model.config.context, config.max_context or model.config.context)
    pages = min(-(-context // PAGE_SIZE), cache.store.shape[2] - 1)
    failed = []
    for recording in recordings(cache, config.max_batch_size, pages, graphs, config.attention):
        try:
            runner, doubt = choose_where_possible(model, cache, recording, recorder, link)
        except RunnerUnavailable as problem:
            failed.append(f"not where {recording.how}: {problem}")
            continue
        rows = max(bucket.batch for bucket in recording.buckets)
        found = f"{len(recording.buckets)} graphs, up to {rows} sequences; {recording.how}"
        return runner, "; ".join([found, *doubt, *failed])
    raise RunnerUnavailable("; ".join(failed) or "gathering even one page would take more than its workspace")


def build_runner(model: Transformer, cache: PagedKVCache, config: EngineConfig) -> tuple[GraphRunner, str]:
    """The graph runner for this model and cache, recorded and tested, and what to report.

    Call it in the thread that will tick, before serving. Raises RunnerUnavailable where graphs cannot serve.
    """
    if model.device.type != "cuda":
        raise RunnerUnavailable(f"CUDA graphs need a CUDA device, and this model is on {model.device.type}")
    if hasattr(model, "_orig_mod"):
        raise RunnerUnavailable("the model is compiled already, and two graph mechanisms do not mix")
    if model.dtype == torch.float16:  # sums of products beyond 65,504 become infinite
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    graphs = 24 if torch.cuda.get_device_capability(model.device) >= (8, 0) else 12
    pinned = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if cache.attention == "varlen" else nullcontext()
    with torch.cuda.device(model.device), pinned:
        return assemble(model, cache, config, CudaCapture(model.device), CudaLink(), graphs)
