"""The prefix cache by named cases: hashes, sharing, order of eviction, TTL, and the bugs other engines had here."""

import hashlib
import random

import pytest
import torch

from helios.kv.contiguous import generate_greedy
from helios.kv.paged import PagedKVCache, Span
from helios.kv.pages import OutOfPages, PagePool
from helios.kv.prefix import PrefixCache, block_hashes, make_salt
from helios.model.config import tiny_config
from helios.model.transformer import NoCache, Transformer
from helios.model.weights import random_weights


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(pages: int = 17, ttl_s: float = 60.0) -> tuple[PagePool, PrefixCache, Clock]:
    clock, pool = Clock(), PagePool(pages)
    return pool, PrefixCache(pool, ttl_s=ttl_s, clock=clock), clock


def chain(*blocks: int, salt: bytes = b"") -> list[bytes]:
    return block_hashes([token for block in blocks for token in [block] * 256], salt)


def run(pool: PagePool, prefix: PrefixCache, hashes: list[bytes]) -> list[int]:
    """A sequence as the engine runs it: match, allocate the rest, publish; the pages are still held."""
    pages = prefix.match(hashes)
    pages += pool.allocate(len(hashes) - len(pages))
    prefix.publish(hashes, pages)
    prefix.check()
    return pages


# --- hashes ---------------------------------------------------------------------------------------------------------


def test_hashes_are_the_chain_as_documented() -> None:
    tokens, salt = list(range(513)), make_salt("tenant")
    parent, expected = hashlib.sha256(b"helios prefix root" + salt).digest(), []
    for start in (0, 256):
        block = b"".join(token.to_bytes(8, "little", signed=True) for token in tokens[start : start + 256])
        parent = hashlib.sha256(b"helios prefix block" + parent + block).digest()
        expected.append(parent)
    assert block_hashes(tokens, salt) == expected


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (255, 0), (256, 1), (257, 1), (511, 1), (512, 2), (513, 2)])
def test_only_complete_blocks_have_hashes(length: int, blocks: int) -> None:
    assert len(block_hashes(list(range(length)))) == blocks


def test_a_hash_stands_for_the_whole_past() -> None:
    one, other = chain(1, 2, 3), chain(9, 2, 3)
    assert not set(one) & set(other)
    assert chain(1, 2, 4)[:2] == one[:2] and chain(1, 2, 4)[2] != one[2]
    assert len(set(chain(5, 5, 5))) == 3, "equal blocks at different places are different prefixes"


@pytest.mark.parametrize("change", [0, 255, 256, 511])
def test_one_token_changes_its_block_and_all_later_ones(change: int) -> None:
    tokens = list(range(768))
    altered = [*tokens[:change], 10**6, *tokens[change + 1 :]]
    same = [a == b for a, b in zip(block_hashes(tokens), block_hashes(altered), strict=True)]
    assert same == [n < change // 256 for n in range(3)]


def test_known_hashes_are_continued_not_computed() -> None:
    tokens = list(range(1000))
    assert block_hashes(tokens, known=block_hashes(tokens[:512])) == block_hashes(tokens)
    assert block_hashes(tokens[:300], known=block_hashes(tokens)) == block_hashes(tokens[:300])
    assert block_hashes(tokens, known=[b"k"])[0] == b"k"


def test_salts_are_separated_by_field_and_length() -> None:
    triples = [("a", "bc", ""), ("ab", "c", ""), ("abc", "", ""), ("", "abc", ""), ("", "", "abc"), ("a", "b", "c")]
    triples += [("a\x01", "", ""), ("a", "\x01", "")]
    salts = [make_salt(*triple) for triple in triples]
    assert len(set(salts)) == len(triples)
    assert len({chain(1, salt=salt)[0] for salt in [b"", *salts]}) == len(triples) + 1
    assert chain(1, salt=make_salt("t", "m", "f")) == chain(1, salt=make_salt(tenant="t", model="m", format="f"))


# --- match and publish ----------------------------------------------------------------------------------------------


def test_a_hit_shares_pages_and_holds_them() -> None:
    pool, prefix, _ = make()
    first = run(pool, prefix, chain(1, 2, 3))
    found = prefix.match(chain(1, 2, 9))
    assert found == first[:2]
    assert [pool.refcount(page) for page in first] == [3, 3, 2]
    pool.check([first, found, prefix.cached_pages])
    assert prefix.match(chain(7)) == [] and prefix.match([]) == []


def test_nothing_is_found_before_it_is_published() -> None:
    pool, prefix, _ = make()
    pool.allocate(2)
    assert prefix.match(chain(1, 2)) == []


def test_publishing_again_keeps_the_live_page() -> None:
    """Two sequences computed the same block: neither may lose a page that its table names."""
    pool, prefix, _ = make()
    a, b = pool.allocate(2), pool.allocate(3)
    prefix.publish(chain(1, 2), a)
    prefix.publish(chain(1, 2, 3), b)
    prefix.check()
    assert prefix.cached_pages == [*a, b[2]]
    assert [pool.refcount(page) for page in (*a, *b)] == [2, 2, 1, 1, 2]
    pool.check([a, b, prefix.cached_pages])
    pool.release(b)
    assert pool.refcount(b[0]) == 0 and pool.refcount(b[2]) == 1


def test_an_idle_parent_of_a_running_child_stays() -> None:
    """B's block hangs under A's. A has ended, B runs: A's block is idle, but without it B's could not be found."""
    pool, prefix, clock = make()
    a, b = pool.allocate(1), pool.allocate(2)
    prefix.publish(chain(1), a)
    prefix.publish(chain(1, 2), b)
    pool.release(a)
    clock.now = 1e6
    assert (prefix.evictable_count, prefix.evict(9), prefix.expire()) == (0, 0, 0)
    pool.release(b)
    prefix.check()
    assert (prefix.evictable_count, prefix.evict(9), pool.free_count) == (2, 2, pool.capacity)


def test_what_cannot_be_published() -> None:
    pool, prefix, _ = make()
    pages = run(pool, prefix, chain(1, 2))
    with pytest.raises(ValueError, match="published as another block"):
        prefix.publish(chain(9), pages[:1])
    with pytest.raises(ValueError, match="held by nobody"):
        prefix.publish(chain(8), [pool.capacity])
    with pytest.raises(ValueError, match="2 hashes but 1 pages"):
        prefix.publish(chain(8, 9), pages[:1])
    prefix.check()
    pool.check([pages, prefix.cached_pages])
    prefix.publish(chain(1, 2), [*pages, 99])  # a page table may be longer than the chain
    with pytest.raises(ValueError, match="one cache per pool"):
        PrefixCache(pool)


def test_a_page_that_is_handed_out_has_no_name() -> None:
    """The cache holds what it knows, so a page can be allocated only after its entry is gone."""
    pool, prefix, _ = make(pages=4)
    pool.release(run(pool, prefix, chain(1, 2, 3)))
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    prefix.evict(1)
    (page,) = pool.allocate(1)
    assert page not in prefix.cached_pages
    assert len(prefix.match(chain(1, 2, 3))) == 2


# --- eviction -------------------------------------------------------------------------------------------------------


def test_eviction_is_leaf_first_then_least_recently_used() -> None:
    pool, prefix, clock = make()
    for now, blocks in enumerate([(1, 2), (3, 4), (5,)]):
        clock.now = now
        pool.release(run(pool, prefix, chain(*blocks)))
    clock.now = 10
    pool.release(prefix.match(chain(1)))
    order = []
    while prefix.evict(1):
        prefix.check()
        order.append({blocks for blocks in [(1,), (1, 2), (3,), (3, 4), (5,)] if not known(prefix, *blocks)})
    gone = [after - before for before, after in zip([set(), *order], order, strict=False)]
    assert gone == [{(1, 2)}, {(3, 4)}, {(3,)}, {(5,)}, {(1,)}]


def known(prefix: PrefixCache, *blocks: int) -> bool:
    return chain(*blocks)[-1] in prefix._entries


def test_a_held_page_is_never_evicted_and_becomes_evictable_at_once() -> None:
    pool, prefix, clock = make()
    pages = run(pool, prefix, chain(1, 2))
    clock.now = 1e9
    assert (prefix.evict(5), prefix.expire(), prefix.evictable_count) == (0, 0, 0)
    pool.release(pages[1:])
    assert prefix.evictable_count == 1
    pool.release(pages[:1])
    assert prefix.evictable_count == 2


def test_a_matched_page_survives_the_eviction_that_makes_room_for_the_rest() -> None:
    pool, prefix, _ = make(pages=5)
    pool.release(run(pool, prefix, chain(1, 2)))
    pool.release(run(pool, prefix, chain(7, 8)))
    pages = prefix.match(chain(1, 2))
    assert prefix.evict(10) == 2
    assert prefix.match(chain(7)) == [] and [pool.refcount(page) for page in pages] == [2, 2]


def test_evict_frees_what_it_says_and_no_more() -> None:
    pool, prefix, _ = make()
    pool.release(run(pool, prefix, chain(1, 2, 3)))
    before = pool.free_count
    assert (prefix.evict(0), prefix.evict(-2), pool.free_count) == (0, 0, before)
    assert (prefix.evict(2), pool.free_count, len(prefix)) == (2, before + 2, 1)
    assert (prefix.evict(5), pool.free_count, len(prefix)) == (1, before + 3, 0)


def test_the_ttl_slides_with_each_use_and_shields_without_locking() -> None:
    pool, prefix, clock = make(ttl_s=60)
    pool.release(run(pool, prefix, chain(1, 2)))
    clock.now = 59.9
    assert prefix.expire() == 0
    pool.release(prefix.match(chain(1)))
    clock.now = 60
    assert (prefix.expire(), known(prefix, 1), known(prefix, 1, 2)) == (1, True, False)
    clock.now = 119.8
    assert prefix.expire() == 0
    assert prefix.evict(1) == 1, "a young page is shielded from expire, not from need"


def test_a_page_is_used_until_it_is_released() -> None:
    pool, prefix, clock = make(ttl_s=60)
    pages = run(pool, prefix, chain(1))
    clock.now = 1000
    pool.release(pages)
    clock.now = 1059
    assert prefix.expire() == 0
    clock.now = 1060
    assert prefix.expire() == 1


def test_publishing_a_known_block_is_a_use() -> None:
    pool, prefix, clock = make(ttl_s=60)
    pool.release(run(pool, prefix, chain(1)))
    clock.now = 50
    own = pool.allocate(1)
    prefix.publish(chain(1), own)
    prefix.check()
    clock.now = 100
    assert prefix.expire() == 0
    clock.now = 110
    assert prefix.expire() == 1


def test_a_use_without_a_match_moves_the_block_back_in_the_queue() -> None:
    pool, prefix, clock = make()
    for clock.now, block in ((1.0, 1), (2.0, 2)):
        pool.release(run(pool, prefix, chain(block)))
    clock.now = 3.0
    prefix.publish(chain(1), pool.allocate(1))
    assert prefix.evict(1) == 1
    assert known(prefix, 1) and not known(prefix, 2)


def test_clear_forgets_all_and_takes_no_page_from_a_sequence() -> None:
    pool, prefix, _ = make()
    held = run(pool, prefix, chain(1, 2))
    pool.release(run(pool, prefix, chain(3)))
    prefix.clear()
    prefix.check()
    assert (len(prefix), prefix.evictable_count, prefix.match(chain(1))) == (0, 0, [])
    pool.check([held])
    prefix.publish(chain(1, 2), held)
    prefix.check()


def test_the_eviction_queue_does_not_grow_with_use() -> None:
    """A hot prefix is matched and released for ever without an eviction."""
    pool, prefix, clock = make()
    pool.release(run(pool, prefix, chain(1, 2, 3)))
    for now in range(2000):
        clock.now = now
        pool.release(prefix.match(chain(1, 2, 3)))
    assert len(prefix._queue) <= 2 * 3 + 65
    prefix.check()


def test_check_finds_what_is_wrong() -> None:
    for spoil in ("_evictable", "children", "blockers", "held", "ticket", "parent"):
        pool, prefix, _ = make()
        pool.release(run(pool, prefix, chain(1, 2)))
        entry = prefix._entries[chain(1, 2)[1]]
        if spoil == "_evictable":
            prefix._evictable += 1
        elif spoil == "parent":
            del prefix._entries[chain(1)[0]], prefix._by_page[entry.parent.page]  # type: ignore[union-attr]
        else:
            setattr(entry, spoil, getattr(entry, spoil) + 1)
        with pytest.raises(AssertionError):
            prefix.check()


# --- the same tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [255, 256, 257, 511, 512, 513])
def test_found_or_computed_the_tokens_are_the_same(length: int) -> None:
    config = tiny_config()
    model = Transformer.from_weights(config, random_weights(config, seed=length))
    prompt = [random.Random(length).randrange(256) for _ in range(length)]
    expected = list(generate_greedy(model, NoCache(), prompt, 4))
    cache = PagedKVCache(config.kv_spec, 8, query_heads=config.heads)
    pool, prefix, _ = make(pages=8)
    for found in (0, (length - 1) // 256):
        hashes = block_hashes(prompt)
        pages = prefix.match(hashes[: (length - 1) // 256])
        assert len(pages) == found
        tokens, stored = list(prompt), 256 * found
        pages += pool.allocate(-(-(length + 3) // 256) - found)
        for _ in range(4):
            cache.plan([Span(len(tokens) - stored, len(tokens), pages)])
            positions = torch.arange(stored, len(tokens))
            with torch.inference_mode():
                logits = model(torch.tensor(tokens[stored:]), positions, cache, rows=positions[-1:] - stored)
            stored = len(tokens)
            tokens.append(int(logits[0].argmax()))
        assert tokens[length:] == expected
        prefix.publish(hashes, pages)
        pool.release(pages)
        prefix.check()
        pool.check([prefix.cached_pages])
