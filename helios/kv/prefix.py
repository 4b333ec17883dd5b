# Generated from notebooks/09_prefix_caching.ipynb by `helios export`; edit the notebook.
"""Prefix caching.

Finds the pages of prompts that were computed before. A chain of hashes names every full block of
256 tokens together with all that precedes it; blocks with one name share one page. Pages that
nobody uses stay until their memory is needed, and go leaf first, least recently used first.
"""

from __future__ import annotations

import hashlib
import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from helios.kv.pages import PAGE_SIZE, PagePool

__all__ = ["Entry", "PrefixCache", "block_hashes", "make_salt"]


def make_salt(tenant: str = "", model: str = "", format: str = "") -> bytes:
    """Names the circle a prefix may be shared in; length-prefixed fields, so different triples give different bytes."""
    fields = [field.encode() for field in (tenant, model, format)]
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def block_hashes(token_ids: Sequence[int], salt: bytes = b"", known: Sequence[bytes] = ()) -> list[bytes]:
    """One SHA-256 per complete block of 256 tokens, each over the hash before it and the block's tokens.

    Equal hashes mean equal salt and equal tokens from the very start. `known` hashes of the first blocks are not
    computed again.
    """
    blocks = len(token_ids) // PAGE_SIZE
    hashes = list(known[:blocks])
    ids = np.asarray(token_ids[len(hashes) * PAGE_SIZE : blocks * PAGE_SIZE], dtype="<i8").reshape(-1, PAGE_SIZE)
    parent = hashes[-1] if hashes else hashlib.sha256(b"helios prefix root" + salt).digest()
    for block in ids:
        parent = hashlib.sha256(b"helios prefix block" + parent + block.tobytes()).digest()
        hashes.append(parent)
    return hashes


@dataclass(eq=False)
class Entry:
    """A cached block: its page, its place in the tree, and what keeps it from being evicted.

    `blockers` is 1 if someone besides the cache holds the page, plus 1 for every child that is itself blocked. Without
    blockers the entry can be evicted, and its whole subtree with it.
    """

    key: bytes
    page: int
    parent: Entry | None
    last_used: float
    children: int = 0
    blockers: int = 0
    held: bool = False
    ticket: int = 0  # number of its valid place in the eviction queue; 0 when it has none


class PrefixCache:
    """Finds pages by the hashes of the tokens in them. Holds one reference to each page it knows.

    Entries form a tree, and an entry is evicted only after its children; a page that a sequence holds never is. An
    entry unused for `ttl_s` seconds goes at the next `expire`. The TTL is a shield, no lock: `evict` may take every
    idle page, those beyond the TTL first.
    """

    def __init__(self, pool: PagePool, *, ttl_s: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        if pool.on_change is not None:
            raise ValueError("this pool has a prefix cache already: make one cache per pool")
        self._pool, self._ttl_s, self._clock = pool, ttl_s, clock
        self._entries: dict[bytes, Entry] = {}
        self._by_page: dict[int, Entry] = {}
        self._queue: list[tuple[float, int, Entry]] = []
        self._tickets = 0
        self._evictable = 0
        self._changes = 0
        pool.on_change = self._holders_changed

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def cached_pages(self) -> list[int]:
        """The pages the cache holds a reference to, for `PagePool.check`."""
        return list(self._by_page)

    @property
    def evictable_count(self) -> int:
        """How many pages `evict` could free now; O(1)."""
        return self._evictable

    @property
    def changes(self) -> int:
        """Grows whenever what is known or what is evictable changes: while it stands still, answers stay true."""
        return self._changes

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the longest known chain at the start of `hashes`, retained for the caller, who releases them."""
        pages = []
        for key in hashes:
            entry = self._entries.get(key)
            if entry is None:
                break
            pages.append(entry.page)
        self._pool.retain(pages)
        return pages

    def publish(self, hashes: Sequence[bytes], pages: Sequence[int]) -> None:
        """Make the chain known: block i of `hashes` is stored in `pages[i]`, which the caller holds and has filled.

        A block that is known already keeps the page it has: others may be reading it. The caller keeps its own pages.
        """
        if len(pages) < len(hashes):
            raise ValueError(f"{len(hashes)} hashes but {len(pages)} pages: pass one page per hash")
        now, known = self._clock(), len(hashes)
        while known and hashes[known - 1] not in self._entries:
            known -= 1
        parent = self._entries[hashes[known - 1]] if known else None
        if parent is not None and now != parent.last_used:
            parent.last_used = now
            self._enqueue(parent)
        for key, page in zip(hashes[known:], pages[known:], strict=False):
            parent = self._add(key, page, parent, now)

    def _add(self, key: bytes, page: int, parent: Entry | None, now: float) -> Entry:
        if page in self._by_page:
            raise ValueError(f"page {page} is published as another block already: a page holds one block")
        if self._pool.refcount(page) == 0:
            raise ValueError(f"page {page} is held by nobody: publish pages before releasing them")
        entry = Entry(key, page, parent, now)
        self._entries[key] = self._by_page[page] = entry
        self._evictable += 1
        self._changes += 1
        if parent is not None:
            parent.children += 1
        self._pool.retain([page])  # tells _holders_changed that the caller holds it too
        return entry

    def _holders_changed(self, page: int, holders: int) -> None:
        """The pool's call: someone took or dropped a page."""
        entry = self._by_page.get(page)
        if entry is None:
            return
        held = holders > 1
        if held != entry.held:
            entry.held = held
            if not held:
                entry.last_used = self._clock()
            self._block(entry, +1 if held else -1)

    def _block(self, entry: Entry | None, by: int) -> None:
        """Count a blocker more or less; when that turns the entry from free to blocked or back, its parent is told."""
        while entry is not None:
            was_free = entry.blockers == 0
            entry.blockers += by
            if was_free == (entry.blockers == 0):
                return
            self._evictable -= by
            self._changes += 1
            self._enqueue(entry)
            entry = entry.parent

    def _enqueue(self, entry: Entry) -> None:
        """Give the entry its place in the eviction queue if it is a free leaf; if not, it has none."""
        entry.ticket = 0
        if entry.blockers or entry.children:
            return
        self._tickets += 1
        entry.ticket = self._tickets
        heapq.heappush(self._queue, (entry.last_used, entry.ticket, entry))
        if len(self._queue) > 2 * len(self._entries) + 64:  # lost places stay in the heap until there are too many
            self._queue = [place for place in self._queue if place[1] == place[2].ticket]
            heapq.heapify(self._queue)

    def _next(self) -> Entry | None:
        while self._queue and self._queue[0][1] != self._queue[0][2].ticket:
            heapq.heappop(self._queue)
        return self._queue[0][2] if self._queue else None

    def evict(self, count: int) -> int:
        """Free up to `count` pages that nobody else holds, least recently used leaf first; returns how many were freed.

        Those idle beyond the TTL are the least recently used ones, so they go first.
        """
        freed = 0
        while freed < count and (entry := self._next()) is not None:
            self._drop(entry)
            freed += 1
        return freed

    def expire(self) -> int:
        """Free the pages that have been idle for the TTL; returns how many."""
        freed, limit = 0, self._clock() - self._ttl_s
        while (entry := self._next()) is not None and entry.last_used <= limit:
            self._drop(entry)
            freed += 1
        return freed

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.key], self._by_page[entry.page]
        entry.ticket = 0
        self._evictable -= 1
        self._changes += 1
        if entry.parent is not None:
            entry.parent.children -= 1
            entry.parent.last_used = max(entry.parent.last_used, entry.last_used)  # whoever used the child used it too
            self._enqueue(entry.parent)
        self._pool.release([entry.page])

    def clear(self) -> None:
        """Forget everything, as when the weights change. Pages that sequences hold stay theirs."""
        pages = self.cached_pages
        self._entries, self._by_page, self._queue, self._evictable = {}, {}, [], 0
        self._changes += 1
        self._pool.release(pages)

    def check(self) -> None:
        """Raise `AssertionError` unless tree, counts and eviction queue agree with the pool, recounted from scratch."""
        assert len(self._by_page) == len(self._entries), "two entries share a page"
        children = Counter(id(entry.parent) for entry in self._entries.values())
        blocked = Counter(id(entry.parent) for entry in self._entries.values() if entry.blockers)
        places = {place[1] for place in self._queue if place[1] == place[2].ticket}
        for key, entry in self._entries.items():
            holders = self._pool.refcount(entry.page)
            assert entry.key == key and self._by_page[entry.page] is entry, f"page {entry.page} is filed wrongly"
            assert holders >= 1 and entry.held == (holders > 1), f"page {entry.page}: {holders} holders not noticed"
            assert entry.children == children[id(entry)], f"page {entry.page}: children miscounted"
            assert entry.blockers == entry.held + blocked[id(entry)], f"page {entry.page}: blockers miscounted"
            leaf = entry.blockers == 0 and entry.children == 0
            assert leaf == (entry.ticket in places), f"page {entry.page}: eviction queue and tree disagree"
            parent = entry.parent
            assert parent is None or self._entries.get(parent.key) is parent, f"page {entry.page}: parent was evicted"
        free = sum(entry.blockers == 0 for entry in self._entries.values())
        assert free == self._evictable, f"{free} pages could be evicted, {self._evictable} counted"
