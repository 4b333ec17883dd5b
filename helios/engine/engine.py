# Generated from notebooks/10_continuous_batching.ipynb by `helios export`; edit the notebook.
"""Continuous batching.

One packed forward per tick: sequences join and leave between two passes of the model, a long prompt
is fed in pieces beside the others' next tokens, and nobody waits for the slowest of a batch. The
part exported here is `Engine`: it admits requests by the pages they will need, plans each tick,
runs one forward, samples and commits.
"""

from __future__ import annotations

from collections import Counter
from typing import cast

import torch
from torch import Tensor

from helios.engine.admission import Limits, check_request, max_new_tokens, reservation
from helios.engine.config import EngineConfig
from helios.engine.runner import Batch, ModelRunner, Runner, pack
from helios.engine.sequence import Request, Sequence, TokenEvent, make_choices, pages_needed
from helios.engine.tick import SeqView, TickPlan, plan_tick
from helios.kv.paged import PagedKVCache
from helios.kv.pages import PAGE_SIZE, SCRATCH_PAGE, PagePool
from helios.kv.prefix import PrefixCache, block_hashes
from helios.model.config import ModelError
from helios.model.params import SamplingParams
from helios.model.sampling import sample
from helios.model.tokenizer import Tokenizer
from helios.model.transformer import Transformer

__all__ = ["Engine", "NOT_FINITE", "TOTALS"]
NOT_FINITE = (
    "the model's output for this request was not finite (NaN or infinity), so it was stopped; "
    "if this repeats, check the model's files or start with dtype=float32"
)
TOTALS = ("ticks", "tick_tokens", "prompt_tokens", "cached_tokens", "output_tokens", "failed")


class Engine:
    """Continuous batching over one model: admit requests, tick, take the events. One thread only.

    `tick` plans, packs, runs one forward, samples and commits. A sequence joins in the tick after its admission and
    leaves in the tick of its last token; its pages were reserved whole, so a running sequence never runs out of room.
    """

    def __init__(
        self,
        model: Transformer,
        cache: PagedKVCache,
        pool: PagePool,
        prefix: PrefixCache | None,
        config: EngineConfig,
        *,
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
        report: dict[str, str] | None = None,
    ) -> None:
        self.model, self.cache, self.pool, self.prefix, self.config = model, cache, pool, prefix, config
        self.runner: Runner = runner or ModelRunner(model, cache)
        self.tokenizer = tokenizer
        self.report = report or {}
        self.context = min(model.config.context, config.max_context or model.config.context)
        self.limits = Limits(self.context, model.config.vocab_size, pool.capacity, config.max_batch_size)
        self.last_plan = TickPlan()
        self._choices: dict[str, list[Sequence]] = {}
        self.running_count = 0  # live sequences: every choice counts, those waiting for their prompt too
        self._served: list[Sequence] = []
        self._published = False  # since the last tick began
        self._refused: tuple[str, int, int] | None = None  # whom `can_admit` sent back, and how things stood then
        self._totals: Counter[str] = Counter()

    def check_fits(self, request: Request) -> None:
        """Raise RequestError if this engine could never serve the request, however empty it was. Any thread may ask."""
        check_request(request, self.limits)

    def can_admit(self, request: Request) -> bool:
        """Whether there is a place in the batch, and enough free or evictable pages, right now."""
        if self.running_count + request.params.n > self.limits.sequences:
            return False
        needed = reservation(request, self.limits)
        if self.prefix is None or needed <= self.pool.free_count:
            return needed <= self.pool.free_count
        if self._refused == (request.id, self.pool.free_count, self.prefix.changes):
            return False
        shared = self._match(request)
        room = self.pool.free_count + self.prefix.evictable_count
        self.pool.release(shared)
        if needed - len(shared) <= room:
            return True
        self._refused = (request.id, self.pool.free_count, self.prefix.changes)
        return False

    def _match(self, request: Request) -> list[int]:
        return self.prefix.match(request.shareable_hashes) if self.prefix is not None else []

    def _take(self, pages: int) -> list[int]:
        if self.prefix is not None:
            self.prefix.evict(pages - self.pool.free_count)
        return self.pool.allocate(pages)

    def admit(self, request: Request) -> None:
        """Reserve every page the request can need, less what the prefix cache shares; it joins the next tick.

        Raises RequestError if it can never fit, OutOfPages if it cannot now (ask `can_admit` first).
        """
        if request.id in self._choices:
            raise ValueError(f"request {request.id!r} is running already; give every request its own id")
        self.check_fits(request)
        max_tokens = max_new_tokens(request, self.limits)
        _, further = pages_needed(len(request.prompt_ids), max_tokens)
        shared = self._match(request)
        try:
            fresh = self._take(reservation(request, self.limits) - len(shared))
        except Exception:
            self.pool.release(shared)
            raise
        choices = make_choices(request, max_tokens, self.model.config.eos_token_ids)
        for seq in reversed(choices[1:]):
            seq.pages = [fresh.pop() for _ in range(further)]
        choices[0].pages = shared + fresh
        choices[0].computed = choices[0].cached_tokens = len(shared) * PAGE_SIZE
        self._choices[request.id] = choices
        self.running_count += len(choices)
        self._totals["prompt_tokens"] += len(request.prompt_ids)
        self._totals["cached_tokens"] += choices[0].cached_tokens

    def check(self) -> None:
        """Recount every page reference from all sequences and the prefix cache; AssertionError on any difference."""
        live = [seq for choices in self._choices.values() for seq in choices]
        holders = [seq.pages for seq in live]
        if self.prefix is not None:
            self.prefix.check()
            holders.append(self.prefix.cached_pages)
        self.pool.check(holders)
        assert len(live) == self.running_count, f"{len(live)} sequences found, {self.running_count} counted"
        assert len(live) <= self.limits.sequences, "more sequences run than max_batch_size allows"
        for seq in live:
            seq.check()

    def _publish(self, seq: Sequence) -> None:
        """Offer the complete, computed, finite blocks of a sequence to later requests."""
        blocks = seq.computed // PAGE_SIZE
        if self.prefix is None or blocks <= len(seq.hashes):
            return
        hashes = max(seq.hashes, seq.request.shareable_hashes, key=len)
        if blocks > len(hashes):
            hashes = block_hashes(seq.tokens[: blocks * PAGE_SIZE], seq.request.salt, known=hashes)
        seq.hashes = hashes[:blocks]
        self.prefix.publish(seq.hashes, seq.pages[:blocks])
        self._published = True

    def _leave(self, seq: Sequence) -> None:
        self._publish(seq)
        self._drop(seq)

    def _drop(self, seq: Sequence) -> None:
        self.pool.release(seq.pages)
        seq.pages = []
        choices = self._choices[seq.request.id]
        choices.remove(seq)
        self.running_count -= 1
        if not choices:
            del self._choices[seq.request.id]

    def _fail(self, seq: Sequence) -> TokenEvent:
        """End a sequence whose values are not finite. Its own pages are wiped: NaN leaks through attention masks."""
        for page in seq.pages:
            if self.pool.refcount(page) == 1:
                self.cache.copy_page(SCRATCH_PAGE, page)
        seq.finish_reason = "error"
        self._totals["failed"] += 1
        self._drop(seq)
        return seq.event(-1, error=NOT_FINITE)

    def _fork(self, first: Sequence) -> None:
        """Start the parked choices: they share the prompt's full pages and get a copy of the partly filled one."""
        full, partial = divmod(first.prompt_tokens, PAGE_SIZE)
        for child in [choice for choice in self._choices[first.request.id] if choice.parked]:
            self.pool.retain(first.pages[:full])
            if partial:
                self.cache.copy_page(first.pages[full], child.pages[0])
            child.pages = first.pages[:full] + child.pages
            child.computed, child.cached_tokens = first.computed, first.cached_tokens
            child.hashes, child.parked = list(first.hashes), False

    def _adopt(self, prefix: PrefixCache, seq: Sequence) -> None:
        """Skip what another request has published since: its pages replace ours, and `computed` jumps ahead."""
        hashes, own = seq.request.shareable_hashes, seq.computed // PAGE_SIZE
        if own >= len(hashes) or hashes[own] not in prefix:
            return
        matched = prefix.match(hashes)
        blocks = len(matched)
        self.pool.release(seq.pages[own:blocks] + matched[:own])
        seq.pages[own:blocks] = matched[own:]
        skipped = blocks * PAGE_SIZE - seq.computed
        seq.computed += skipped
        seq.cached_tokens += skipped
        self._totals["cached_tokens"] += skipped

    def _commit(self, batch: Batch, logits: Tensor) -> list[TokenEvent]:
        """Turn a pass's logits into events: publish what was computed, append what was sampled, let the done leave."""
        events: list[TokenEvent] = []
        if batch.unfinished:
            finite = torch.isfinite(logits[len(batch.sampled) :]).all(dim=-1).tolist()
            for seq, good in zip(batch.unfinished, finite, strict=True):
                if good:
                    self._publish(seq)
                else:
                    events += [self._fail(choice) for choice in list(self._choices[seq.request.id])]
        drawn = sample(logits[: len(batch.sampled)], [seq.row for seq in batch.sampled])
        for seq, token, logprob in zip(batch.sampled, drawn.ids, drawn.logprobs, strict=True):
            if token < 0:  # its logits were not finite
                events.append(self._fail(seq))
                continue
            if not seq.output_ids and not seq.index:
                self._publish(seq)
                self._fork(seq)
            seq.append(token)
            events.append(seq.event(token, logprob))
            if seq.finish_reason:
                self._leave(seq)
        self._totals["output_tokens"] += len(batch.sampled) - len(drawn.bad)
        return events

    @torch.inference_mode()
    def tick(self, now: float) -> list[TokenEvent]:
        """Run one forward for the sequences planned at `now` (seconds, the clock of `Request.arrival_s`)."""
        for seq in self._served:
            seq.last_progress_s = now  # what the last tick did was done by the time this one starts
        running = [seq for choices in self._choices.values() for seq in choices if not seq.parked]
        if self.prefix is not None:
            self.prefix.expire()
            if self._published:
                self._published = False
                for seq in running:
                    if seq.computed < seq.prompt_tokens:
                        self._adopt(self.prefix, seq)
        views = [SeqView(s.remaining_prompt, s.request.arrival_s, s.last_progress_s, s) for s in running]
        self.last_plan = plan_tick(views, self.config.prefill_chunk_size, now)
        work = cast("tuple[tuple[Sequence, int], ...]", self.last_plan.shares)
        self._served = [seq for seq, _ in work]
        if not work:
            return []
        batch = pack(work, self._choices)
        logits = self.runner.forward(batch.inputs)
        for seq, tokens in work:
            seq.computed += tokens
        self._totals.update(ticks=1, tick_tokens=self.last_plan.tokens)
        events = self._commit(batch, logits)
        if self.config.debug_checks:
            self.check()
        return events

    def finish(self, request_id: str, index: int, reason: str) -> bool:
        """End one choice now, for a reason found outside (a stop string). False if it is not running any more."""
        for seq in self._choices.get(request_id, []):
            if seq.index == index and not seq.parked and not seq.remaining_prompt:
                seq.finish_reason = reason
                self._leave(seq)
                return True
        return False

    def cancel(self, request_id: str) -> bool:
        """Drop a whole request, wherever it is; what it computed stays shareable. False if it is not running."""
        choices = list(self._choices.get(request_id, []))
        for seq in choices:
            seq.finish_reason = "cancelled"
            self._leave(seq)
        return bool(choices)

    def warm_up(self) -> None:
        """Serve one tiny request, so that no user's first token pays for what is set up lazily. Leaves no trace.

        Raises ModelError if the model cannot produce finite numbers even for that.
        """
        params = SamplingParams(seed=0, max_tokens=min(2, self.context - 1), ignore_eos=True)
        self.admit(Request("warm-up", [0], params, arrival_s=0.0))
        while self.running_count:
            for event in self.tick(0.0):
                if event.error:
                    raise ModelError(f"a first try failed: {event.error}")
        self._totals.clear()

    def stats(self) -> dict[str, float]:
        """Gauges of now and totals since the start, for logs and metrics.

        Free pages lie idle; evictable ones hold cached prefixes that nobody is using; used ones cannot be handed out.
        """
        free, evictable = self.pool.free_count, self.prefix.evictable_count if self.prefix is not None else 0
        return {
            "running_sequences": self.running_count,
            "running_requests": len(self._choices),
            "pages_total": self.pool.capacity,
            "pages_free": free,
            "pages_evictable": evictable,
            "pages_used": self.pool.capacity - free - evictable,
            **{f"{name}_total": self._totals[name] for name in TOTALS},
        }
