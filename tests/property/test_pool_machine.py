"""The page pool under random use, asked beside a model that only remembers who took what."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helios.kv.pages import OutOfPages, PagePool


class PoolMachine(RuleBasedStateMachine):
    """`holders` is the whole model: a list of page lists. Everything the pool says must follow from it."""

    @initialize(pages=st.integers(2, 12))
    def start(self, pages: int) -> None:
        self.pool, self.size = PagePool(pages), pages
        self.holders: list[list[int]] = []
        self.changes: list[tuple[int, int]] = []
        self.pool.on_change = lambda page, holders: self.changes.append((page, holders))

    def count(self, page: int) -> int:
        return sum(pages.count(page) for pages in self.holders)

    def free(self) -> set[int]:
        return {page for page in range(1, self.size) if self.count(page) == 0}

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        free = self.free()
        try:
            pages = self.pool.allocate(count)
        except OutOfPages:
            assert count > len(free)
            return
        assert len(pages) == len(set(pages)) == count <= len(free) and set(pages) <= free
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holders))
        part = pages[: data.draw(st.integers(0, len(pages)))]
        self.changes.clear()
        self.pool.retain(part)
        self.holders.append(list(part))
        assert self.changes == [(page, self.count(page)) for page in part]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.changes.clear()
        self.pool.release(pages)
        assert self.changes == [(page, self.count(page)) for page in pages]

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """A free page, the scratch page or one out of range, beside good ones: refused, and nothing changes."""
        wrong = data.draw(st.sampled_from([0, -1, self.size, *self.free()]))
        good = [page for pages in self.holders[:1] for page in pages]
        self.changes.clear()
        for call in (self.pool.retain, self.pool.release):
            try:
                call([*good, wrong])
            except ValueError:
                continue
            raise AssertionError(f"page {wrong} was accepted")
        assert self.changes == []

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.free_count == len(self.free())
        for page in range(self.size):
            assert self.pool.refcount(page) == self.count(page)
        self.pool.check(self.holders)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
