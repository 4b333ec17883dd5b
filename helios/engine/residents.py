# Generated from notebooks/11_continuous_batching.ipynb by `helios export`; edit the notebook.
"""The sequences in the engine and the pages they hold: who may come in, what is shared, what is given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from helios.engine.admission import Limits, check_request, max_new_tokens, reservation
from helios.engine.sequence import Request, Sequence, TokenEvent, make_choices, pages_needed
from helios.kv.paged import PagedKVCache
from helios.kv.pages import PAGE_SIZE, SCRATCH_PAGE, PagePool
from helios.kv.prefix import PrefixCache, block_hashes

__all__ = ["Residents"]


class Residents:
    """The books of the engine: sequences by request, and the pages they share. One thread only.

    A sequence's pages are reserved whole when it is admitted, so that it never runs out of room while it runs.
    """

    def __init__(
        self, cache: PagedKVCache, pool: PagePool, prefix: PrefixCache | None, limits: Limits, eos_ids: Iterable[int]
    ) -> None:
        self.cache, self.pool, self.prefix, self.limits = cache, pool, prefix, limits
        self._eos_ids = frozenset(eos_ids)
        self._choices: dict[str, list[Sequence]] = {}
        self.running_count = 0  # live sequences: every choice counts, those waiting for their prompt too
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
        """The cached pages of the prompt's beginning; a prompt to be scored must be computed, whatever is cached."""
        if self.prefix is None or request.params.prompt_logprobs is not None:
            return []
        return self.prefix.match(request.shareable_hashes)

    def _take(self, pages: int) -> list[int]:
        if self.prefix is not None:
            self.prefix.evict(pages - self.pool.free_count)
        return self.pool.allocate(pages)

    def admit(self, request: Request) -> None:
        """Reserve every page the request can need, less what the prefix cache shares; it joins the next tick.

        Raises RequestError if it can never fit or its constraint is broken, OutOfPages if it cannot now (ask
        `can_admit` first).
        """
        if request.id in self._choices:
            raise ValueError(f"request {request.id!r} is running already; give every request its own id")
        self.check_fits(request)
        max_tokens = max_new_tokens(request, self.limits)
        choices = make_choices(request, max_tokens, self._eos_ids)
        _, further = pages_needed(len(request.prompt_ids), max_tokens)
        shared = self._match(request)
        try:
            fresh = self._take(reservation(request, self.limits) - len(shared))
        except Exception:
            self.pool.release(shared)
            raise
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
        if self.prefix is not None:
            self.prefix.check()
        self.pool.check(self._holders())
        assert len(live) == self.running_count, f"{len(live)} sequences found, {self.running_count} counted"
        assert len(live) <= self.limits.sequences, "more sequences run than max_batch_size allows"
        for seq in live:
            seq.check()

    def _holders(self) -> list[list[int]]:
        """The page lists of all who hold pages."""
        holders = [seq.pages for choices in self._choices.values() for seq in choices]
        return holders if self.prefix is None else [*holders, self.prefix.cached_pages]

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

    def _release(self, seq: Sequence) -> None:
        """Give back the pages of one who has ended. A failed one's own are wiped: NaN leaks through attention masks."""
        if seq.finish_reason == "error":
            for page in seq.pages:
                if self.pool.refcount(page) == 1:
                    self.cache.copy_page(SCRATCH_PAGE, page)
        self.pool.release(seq.pages)
        seq.pages = []

    def _drop(self, seq: Sequence) -> None:
        self._release(seq)
        choices = self._choices[seq.request.id]
        choices.remove(seq)
        self.running_count -= 1
        if not choices:
            del self._choices[seq.request.id]

    def _fail(self, failed: Sequence, error: str) -> list[TokenEvent]:
        """End the whole request of a sequence."""
        events = []
        for seq in list(self._choices[failed.request.id]):
            seq.finish_reason = "error"
            self._totals["failed"] += 1
            self._drop(seq)
            events.append(seq.event(-1, error=error))
        return events

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
        if seq.request.params.prompt_logprobs is not None:
            return
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
