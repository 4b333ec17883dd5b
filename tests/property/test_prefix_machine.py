"""The prefix cache under random use, asked beside a slow model of what it promises.

The model knows no hashes, counters or queues. It keys entries by the blocks themselves, keeps the time of each one's
last use, and works out everything else from who holds which page.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helios.kv.pages import PagePool
from helios.kv.prefix import PrefixCache, block_hashes

TTL = 25.0
Path = tuple[int, ...]
HASHES: dict[Path, list[bytes]] = {}


def hashes_of(path: Path) -> list[bytes]:
    if path not in HASHES:
        HASHES[path] = block_hashes([token for block in path for token in [block] * 256])
    return HASHES[path]


@dataclass
class Known:
    page: int
    used: float


class Model:
    def __init__(self) -> None:
        self.entries: dict[Path, Known] = {}
        self.sequences: list[tuple[Path, list[int]]] = []
        self.now = 0.0

    def held(self, page: int) -> bool:
        return any(page in pages for _, pages in self.sequences)

    def evictable(self) -> list[Path]:
        blocked = {path for path, known in self.entries.items() if self.held(known.page)}
        return [path for path in self.entries if not any(other[: len(path)] == path for other in blocked)]

    def next_victim(self) -> Path | None:
        parents = {path[:-1] for path in self.entries}
        leaves = [path for path in self.evictable() if path not in parents]
        return min(leaves, key=lambda path: self.entries[path].used, default=None)

    def longest(self, path: Path) -> Path:
        return max((path[:n] for n in range(len(path) + 1) if n == 0 or path[:n] in self.entries), key=len)

    def publish(self, path: Path, pages: list[int]) -> None:
        for n in range(1, len(path) + 1):
            self.entries.setdefault(path[:n], Known(pages[n - 1], self.now)).used = self.now

    def release(self, index: int) -> list[int]:
        _, pages = self.sequences.pop(index)
        for known in self.entries.values():
            if known.page in pages and not self.held(known.page):
                known.used = self.now
        return pages


paths = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


class PrefixMachine(RuleBasedStateMachine):
    @initialize(pages=st.integers(3, 14))
    def start(self, pages: int) -> None:
        self.model = Model()
        self.pool = PagePool(pages)
        self.prefix = PrefixCache(self.pool, ttl_s=TTL, clock=lambda: self.model.now)

    def tick(self) -> None:
        self.model.now += 1.0

    @rule(path=paths, publish=st.booleans())
    def begin(self, path: Path, publish: bool) -> None:
        """Admission as the engine does it; without room nothing may stay behind."""
        self.tick()
        known = self.model.longest(path)
        pages = self.prefix.match(hashes_of(path))
        assert pages == [self.model.entries[known[:n]].page for n in range(1, len(known) + 1)]
        for n in range(1, len(known) + 1):
            self.model.entries[known[:n]].used = self.model.now
        self.model.sequences.append((path, pages))
        missing = len(path) - len(pages)
        self.evict_both(missing - self.pool.free_count)
        if missing > self.pool.free_count:
            self.pool.release(self.model.release(-1))
            return
        pages.extend(self.pool.allocate(missing))
        if publish:
            self.prefix.publish(hashes_of(path), pages)
            self.model.publish(path, pages)

    @rule(path=paths)
    def compute_alone(self, path: Path) -> None:
        """Without asking the cache first, as two sequences that begin in the same tick: duplicates arise."""
        self.tick()
        if self.pool.free_count >= len(path):
            self.model.sequences.append((path, self.pool.allocate(len(path))))

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.tick()
        path, pages = data.draw(st.sampled_from(self.model.sequences))
        count = data.draw(st.integers(0, len(path)))
        self.prefix.publish(hashes_of(path)[:count], pages)
        self.model.publish(path[:count], pages)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.tick()
        self.pool.release(self.model.release(data.draw(st.integers(0, len(self.model.sequences) - 1))))

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A second answer to a prompt shares all its pages."""
        self.tick()
        path, pages = data.draw(st.sampled_from(self.model.sequences))
        self.pool.retain(pages)
        self.model.sequences.append((path, list(pages)))

    @rule(count=st.integers(-1, 6))
    def evict(self, count: int) -> None:
        self.tick()
        self.evict_both(count)

    def evict_both(self, count: int) -> None:
        promised, before = self.prefix.evictable_count, self.pool.free_count
        freed = self.prefix.evict(count)
        assert freed == min(max(count, 0), promised) == self.pool.free_count - before
        for _ in range(freed):
            victim = self.model.next_victim()
            assert victim is not None
            del self.model.entries[victim]

    @rule(wait=st.sampled_from([0.0, 1.0, TTL / 2, TTL]))
    def expire(self, wait: float) -> None:
        self.model.now += wait
        freed = 0
        while (path := self.model.next_victim()) and self.model.entries[path].used <= self.model.now - TTL:
            del self.model.entries[path]
            freed += 1
        assert self.prefix.expire() == freed

    @rule()
    def clear(self) -> None:
        self.prefix.clear()
        self.model.entries.clear()

    @invariant()
    def both_tell_the_same(self) -> None:
        if not hasattr(self, "model"):
            return
        entries = self.model.entries
        assert sorted(self.prefix.cached_pages) == sorted(known.page for known in entries.values())
        assert {hashes_of(path)[-1] for path in entries} == set(self.prefix._entries)
        assert all(path[:-1] in entries for path in entries if len(path) > 1)
        assert self.prefix.evictable_count == len(self.model.evictable())
        self.prefix.check()
        self.pool.check([*(pages for _, pages in self.model.sequences), self.prefix.cached_pages])


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
