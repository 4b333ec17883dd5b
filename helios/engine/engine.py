# Generated from notebooks/11_continuous_batching.ipynb by `helios export`; edit the notebook.
"""Continuous batching.

One packed forward per tick: sequences join and leave between two passes of the model, a long prompt
is fed in pieces beside the others' next tokens, and nobody waits for the slowest of a batch. The
part exported here is `Engine`: it admits requests by the pages they will need, plans each tick,
runs one forward, samples and commits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from helios.engine.admission import Limits
from helios.engine.config import EngineConfig
from helios.engine.constraint import ConstraintError, MaskPool
from helios.engine.residents import Residents
from helios.engine.runner import Batch, ModelRunner, Runner, pack
from helios.engine.sequence import Request, Sequence, TokenEvent
from helios.engine.tick import TickPlan, plan_tick
from helios.kv.paged import PagedKVCache
from helios.kv.pages import PagePool
from helios.kv.prefix import PrefixCache
from helios.model.config import ModelError
from helios.model.masks import Mask, allows_any
from helios.model.params import SamplingParams
from helios.model.sampling import TokenLogprob, raw_logprobs, sample
from helios.model.tokenizer import Tokenizer
from helios.model.transformer import Transformer

__all__ = ["Engine", "NOT_FINITE", "TOTALS"]
NOT_FINITE = (
    "the model's output for this request was not finite (NaN or infinity), so it was stopped; "
    "if this repeats, check the model's files or start with dtype=float32"
)
TOTALS = ("ticks", "tick_tokens", "prompt_tokens", "cached_tokens", "output_tokens", "failed")


class Engine(Residents):
    """Continuous batching over one model: admit requests, tick, take the events. One thread only.

    `tick` plans, packs, runs one forward, samples and commits. A sequence joins in the tick after its admission and
    leaves in the tick of its last token.
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
        self.context = min(model.config.context, config.max_context or model.config.context)
        limits = Limits(self.context, model.config.vocab_size, pool.capacity, config.max_batch_size)
        super().__init__(cache, pool, prefix, limits, model.config.eos_token_ids)
        self.model, self.config = model, config
        self.runner: Runner = runner or ModelRunner(model, cache)
        self.tokenizer = tokenizer
        self.report = report or {}
        self.last_plan: TickPlan[Sequence] = TickPlan()
        self._served: tuple[tuple[Sequence, int], ...] = ()
        self._masks = MaskPool()

    def _inspect(self, batch: Batch, logits: Tensor) -> list[TokenEvent]:
        """What a pass says of prompts: keep scores if asked for; publish the chunks that are fine, fail the others."""
        events: list[TokenEvent] = []
        first = at = len(batch.sampled) + len(batch.unfinished)
        for seq, rows in batch.scored:
            if not self._score(seq, logits[at : at + rows]):
                events += self._fail(seq, NOT_FINITE)
            at += rows
        finite = torch.isfinite(logits[len(batch.sampled) : first]).all(dim=-1).tolist()
        for seq, good in zip(batch.unfinished, finite, strict=True):
            if good and seq.finish_reason is None:
                self._publish(seq)
            elif seq.finish_reason is None:
                events += self._fail(seq, NOT_FINITE)
        return events

    def _score(self, seq: Sequence, logits: Tensor) -> bool:
        """Note what these rows [R, V] say of the prompt's next R tokens. False if they are not finite."""
        known, wanted = seq.scores or [], seq.request.params.prompt_logprobs or 0
        ids = torch.from_numpy(seq.prompt[len(known) : len(known) + len(logits)]).to(logits.device)
        known += raw_logprobs(logits, ids, [wanted] * len(logits))
        return bool(torch.isfinite(logits).all())

    def _guide(self, guided: list[Sequence], masks: list[Mask | None | ConstraintError]) -> list[TokenEvent]:
        """Give each constrained sequence its mask. A broken one fails; one whose mask allows nothing is to stop."""
        events: list[TokenEvent] = []
        for seq, mask in zip(guided, masks, strict=True):
            if seq.finish_reason is not None:
                continue  # it failed a moment ago
            if isinstance(mask, ConstraintError):
                events += self._fail(seq, str(mask))
                continue
            seq.row.allowed = mask
            if mask is not None and not allows_any(mask, self.limits.vocab_size):
                seq.finish_reason, seq.row.allowed = "stop", None
        return events

    def _commit(self, batch: Batch, logits: Tensor) -> list[TokenEvent]:
        """Sample a token for each row [R, V] of those who are due, and take them in."""
        drawn = sample(logits, [seq.row for seq in batch.sampled])
        return self._accept(batch.sampled, drawn.ids, drawn.logprobs)

    def _accept(self, due: list[Sequence], ids: list[int], logprobs: Iterable[TokenLogprob | None]) -> list[TokenEvent]:
        """Append each sequence's token (-1: none, not finite), tell of it, let the done leave."""
        events: list[TokenEvent] = []
        endings: list[TokenEvent] = []  # without a token
        for seq, token, logprob in zip(due, ids, logprobs, strict=True):
            if token < 0 or seq.finish_reason is not None:
                endings += self._end_without_token(seq, token)
                continue
            first = not seq.output_ids
            if first and not seq.index:
                self._begin(seq)
            try:
                seq.append(token)
            except ConstraintError as error:
                endings += self._fail(seq, str(error))
                continue
            event = seq.event(token, logprob)
            events.append(event)
            if first:
                event.prompt_logprobs, seq.scores = seq.scores, None
            if seq.finish_reason is not None:
                self._leave(seq)
        self._totals["output_tokens"] += len(events)
        return events + endings

    def _begin(self, seq: Sequence) -> None:
        """A first choice has its whole prompt computed: offer it to others, and let the other choices start."""
        self._publish(seq)
        self._fork(seq)

    def _end_without_token(self, seq: Sequence, token: int) -> list[TokenEvent]:
        """Its request failed a moment ago (and was told so), or fails now; or its constraint allows nothing more."""
        if seq.finish_reason == "error":
            return []
        if token < 0:
            return self._fail(seq, NOT_FINITE)
        if not seq.output_ids and not seq.index:
            self._begin(seq)
        event = seq.event(-1)
        event.prompt_logprobs = seq.scores
        self._leave(seq)
        return [event]

    @torch.inference_mode()
    def tick(self, now: float) -> list[TokenEvent]:
        """Run one forward for the sequences planned at `now` (seconds, the clock of `Request.arrival_s`)."""
        for seq, _ in self._served:
            seq.last_progress_s = now  # what the last tick did was done by the time this one starts
        events = self._serve(self._plan(now))
        if self.config.debug_checks:
            self.check()
        return events

    def _serve(self, work: tuple[tuple[Sequence, int], ...]) -> list[TokenEvent]:
        """One forward for (sequence, tokens) pairs as planned, and what became of it."""
        self._served = work
        if not work:
            return []
        batch = pack(work, self._choices)
        guided = [(seq, seq.constraint) for seq in batch.sampled if seq.constraint is not None]
        masks = self._masks.begin([constraint for _, constraint in guided])
        logits = self.runner.forward(batch.inputs)
        for seq, tokens in work:
            seq.computed += tokens
        events = self._inspect(batch, logits) if batch.unfinished or batch.scored else []
        events += self._guide([seq for seq, _ in guided], masks())
        events += self._commit(batch, logits[: len(batch.sampled)])
        self._totals["ticks"] += 1
        self._totals["tick_tokens"] += len(batch.inputs.token_ids)
        return events

    def _runnable(self) -> list[Sequence]:
        """Who can be given tokens in the next pass; parked choices wait for their prompt."""
        return [seq for choices in self._choices.values() for seq in choices if not seq.parked]

    def _plan(self, now: float) -> tuple[tuple[Sequence, int], ...]:
        """Whom this tick serves, with how many tokens; unfinished prompts first skip what others have published."""
        running = self._runnable()
        if self.prefix is not None:
            self.prefix.expire()
            if self._published:
                self._published = False
                for seq in running:
                    if seq.computed < seq.prompt_tokens:
                        self._adopt(self.prefix, seq)
        self.last_plan = plan_tick(running, self.config.prefill_chunk_size, now)
        return self.last_plan.shares

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
