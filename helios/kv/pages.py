# Generated from notebooks/08_paged_attention.ipynb by `helios export`; edit the notebook.
"""Paged attention.

Who holds which page of the KV memory. Keys and values of every sequence live in one pool of pages
of 256 tokens; a page table per sequence says where its tokens are, and attention reads through the
table. Pages are counted, shared and given back, so memory is spent on tokens that exist and not on
those that might come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

__all__ = ["OutOfPages", "PAGE_SIZE", "PagePool", "SCRATCH_PAGE"]
PAGE_SIZE = 256  # tokens; what the paged kernels of torch require (a multiple of 256)
SCRATCH_PAGE = 0  # belongs to nobody: padding rows write here


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than were asked for; nothing was taken."""


class PagePool:
    """Who holds which page. A page is free when nobody holds it; page 0, the scratch page, is never handed out.

    The pool knows numbers only; the memory behind them belongs to `PagedKVCache`. Every operation costs as much as
    the pages it is given, whatever the size of the pool. `on_change(page, holders)`, if set, is called whenever
    `retain` or `release` has changed the number of holders of a page: a cache learns so when it holds a page alone.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs the scratch page and at least one more, not {num_pages} pages")
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))  # a stack, page 1 on top
        self.on_change: Callable[[int, int], None] | None = None

    @property
    def capacity(self) -> int:
        """Pages that can be handed out: all but the scratch page."""
        return len(self._holders) - 1

    @property
    def free_count(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free)

    def refcount(self, page: int) -> int:
        """How many holders the page has; 0 when it is free."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, each with the caller as its one holder; `OutOfPages` if there are fewer, taking none."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > len(self._free):
            raise OutOfPages(
                f"{count} pages asked for, {len(self._free)} of {self.capacity} free: "
                "wait for a sequence to finish, or start with more pages"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one holder to each page. The pages must be held already: a free page has no content to share."""
        pages = list(pages)
        for page in pages:
            if not 0 < page < len(self._holders) or self._holders[page] == 0:
                raise ValueError(f"page {page} is not held by anyone, so it cannot be shared: allocate it instead")
        for page in pages:
            self._change(page, +1)

    def release(self, pages: Iterable[int]) -> None:
        """Drop one holder of each page; a page without holders is free again. Releasing more than is held raises."""
        pages = list(pages)
        for page, drops in Counter(pages).items():
            if not 0 < page < len(self._holders) or self._holders[page] < drops:
                raise ValueError(f"page {page} is released more often than it is held: some holder released it twice")
        for page in pages:
            self._change(page, -1)

    def _change(self, page: int, by: int) -> None:
        self._holders[page] += by
        if self._holders[page] == 0:
            self._free.append(page)
        if self.on_change is not None:
            self.on_change(page, self._holders[page])

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raise `AssertionError` unless the books balance.

        With `holders`, the page lists of all who hold pages (sequences, caches), every page is recounted.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert SCRATCH_PAGE not in free and self._holders[SCRATCH_PAGE] == 0, "the scratch page was handed out"
        for page in range(1, len(self._holders)):
            assert (page in free) == (self._holders[page] == 0), f"page {page}: free list and count disagree"
        if holders is not None:
            counted = Counter(page for pages in holders for page in pages)
            for page, count in enumerate(self._holders):
                assert counted[page] == count, f"page {page}: {counted[page]} holders found, {count} counted"
