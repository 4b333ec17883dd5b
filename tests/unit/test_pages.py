"""The page pool: who holds what, and that an error changes nothing."""

import pytest

from helios.kv.pages import SCRATCH_PAGE, OutOfPages, PagePool


def snapshot(pool: PagePool) -> tuple[int, list[int]]:
    return pool.free_count, [pool.refcount(page) for page in range(pool.capacity + 1)]


def test_every_page_but_the_scratch_page_is_handed_out_once() -> None:
    pool = PagePool(9)
    pages = pool.allocate(pool.capacity)
    assert sorted(pages) == list(range(1, 9))
    assert SCRATCH_PAGE not in pages and pool.free_count == 0
    pool.check([pages])


def test_a_page_is_free_when_its_last_holder_drops_it() -> None:
    pool = PagePool(4)
    (page,) = pool.allocate(1)
    pool.retain([page])
    pool.release([page])
    assert (pool.refcount(page), pool.free_count) == (1, 2)
    pool.release([page])
    assert (pool.refcount(page), pool.free_count) == (0, 3)


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(4)
    pool.allocate(1)
    before = snapshot(pool)
    with pytest.raises(OutOfPages, match="3 pages asked for, 2 of 3 free"):
        pool.allocate(3)
    assert snapshot(pool) == before
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="-1"):
        pool.allocate(-1)


@pytest.mark.parametrize("wrong", [0, 3, 7, -1])
def test_a_failed_release_or_retain_changes_nothing(wrong: int) -> None:
    """Page 0 is nobody's, 3 is free, 7 and −1 do not exist; the good page beside it must stay as it was."""
    pool = PagePool(4)
    good, _ = pool.allocate(2)
    before = snapshot(pool)
    for call in (pool.release, pool.retain):
        with pytest.raises(ValueError, match=f"page {wrong} "):
            call([good, wrong])
        assert snapshot(pool) == before


def test_one_release_may_not_drop_more_than_is_held() -> None:
    pool = PagePool(4)
    (page,) = pool.allocate(1)
    pool.retain([page])
    before = snapshot(pool)
    with pytest.raises(ValueError, match="more often than it is held"):
        pool.release([page, page, page])
    assert snapshot(pool) == before
    pool.release([page, page])
    assert pool.refcount(page) == 0


def test_on_change_tells_of_every_retain_and_release_but_not_of_allocation() -> None:
    pool, heard = PagePool(4), []
    pool.on_change = lambda page, holders: heard.append((page, holders))
    a, b = pool.allocate(2)
    assert heard == []
    pool.retain([a])
    pool.release([a, b, a])
    assert heard == [(a, 2), (a, 1), (b, 0), (a, 0)]


def test_check_finds_leaks_and_double_frees() -> None:
    pool = PagePool(5)
    pages = pool.allocate(2)
    pool.check([pages])
    with pytest.raises(AssertionError, match="1 holders found|0 holders found"):
        pool.check([pages[:1]])
    with pytest.raises(AssertionError, match="2 holders found, 1 counted"):
        pool.check([pages, pages[1:]])
    pool._free.append(pages[0])
    with pytest.raises(AssertionError, match="disagree"):
        pool.check()
    pool._free[-1] = pool._free[0]
    with pytest.raises(AssertionError, match="twice"):
        pool.check()


def test_a_pool_needs_a_page_to_hand_out() -> None:
    with pytest.raises(ValueError, match="not 1 pages"):
        PagePool(1)
