"""Attention over pages against attention over what the pages mean, and against the caches of earlier chapters."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helios.kv.contiguous import ContiguousCache, generate_greedy
from helios.kv.gather import GROUP_COST, PAD_TO, group_by_length
from helios.kv.layout import Layout
from helios.kv.matmul import MANY_KEYS, causal_by_matmul, choose_paged_attention, decode_by_matmul
from helios.kv.paged import PagedKVCache, Span
from helios.kv.pages import PAGE_SIZE, SCRATCH_PAGE, PagePool
from helios.model.config import KVSpec, tiny_config
from helios.model.transformer import NoCache, Transformer
from helios.model.weights import random_weights

HEADS, KV_HEADS, DIM = 6, 2, 16
SPEC = KVSpec(layers=2, heads=KV_HEADS, head_dim=DIM)
BOUNDARIES = (1, 255, 256, 257, 511, 512, 513)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence, from the definition: q [T, H, D] are the last T of k, v [S, K, D]."""
    group, past = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    out = torch.empty_like(q)
    for t, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        seen = past + t + 1
        scores = k[:seen, h // group] @ q[t, h] / q.shape[2] ** 0.5
        out[t, h] = scores.softmax(0) @ v[:seen, h // group]
    return out


def documented_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """What torch documents of `varlen_attn` with a block table, and the rules that its kernel needs beyond it."""
    window, table, used = options["window_size"], options["block_table"], options["seqused_k"]
    assert options["enable_gqa"] and k.shape[1] == PAGE_SIZE
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (cu_q, cu_k, table, used))
    assert len(cu_q) == len(cu_k) == len(used) + 1 == len(table) + 1
    if window == (-1, -1):
        assert max_q == 1 and options.get("num_splits") is None
    else:
        assert isinstance(window, tuple) and window == (-1, 0) and options["num_splits"] == 1
    assert max_k % PAGE_SIZE == 0 and max_k >= int(used.max()) and table.shape[1] * PAGE_SIZE >= max_k
    out = torch.full_like(q, float("nan"))
    for n, (start, stop) in enumerate(itertools.pairwise(cu_q.tolist())):
        assert 1 <= stop - start <= max_q
        past_k, past_v = (part[table[n].long()].flatten(0, 1)[: int(used[n])] for part in (k, v))
        out[start:stop] = softmax_attention(q[start:stop], past_k, past_v)
    return out


def splits_varlen(*args: Any, num_splits: int | None = None, **options: Any) -> Tensor:
    return documented_varlen(*args, num_splits=num_splits, **options)


def make_cache(backend: str, pages: int = 24, **options: Any) -> PagedKVCache:
    varlen = splits_varlen if backend == "varlen" else None
    return PagedKVCache(SPEC, pages, query_heads=HEADS, attention=backend, varlen=varlen, **options)


class Mirror:
    """The plain truth beside the paged cache: keys and values of each sequence and layer as growing tensors."""

    def __init__(self, sequences: int) -> None:
        empty = torch.empty(0, KV_HEADS, DIM)
        self.kv = {(s, layer): (empty, empty) for s in range(sequences) for layer in range(SPEC.layers)}

    def attend(self, layer: int, parts: list[tuple[int, int]], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, start = [], 0
        for sequence, tokens in parts:
            rows = slice(start, start + tokens)
            keys, values = (torch.cat(pair) for pair in zip(self.kv[sequence, layer], (k[rows], v[rows]), strict=True))
            self.kv[sequence, layer] = keys, values
            out.append(softmax_attention(q[rows], keys, values))
            start += tokens
        return torch.cat(out)


@pytest.mark.parametrize("backend", ["sdpa", "matmul", "varlen"])
@pytest.mark.parametrize("seed", range(4))
def test_random_passes_agree_with_the_definition(backend: str, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cache, mirror = make_cache(backend), Mirror(5)
    pool = PagePool(24)
    rng.shuffle(pool._free)
    tables, lengths = [pool.allocate(4) for _ in range(5)], [0] * 5
    for _ in range(6):
        chosen = rng.sample(range(5), rng.randint(1, 5))
        parts = [(s, rng.choice([1, 1, 2, 30, 130]) if lengths[s] else rng.choice([1, 40, 255, 257])) for s in chosen]
        for s, tokens in parts:
            lengths[s] += tokens
        cache.plan([Span(tokens, lengths[s], tables[s]) for s, tokens in parts])
        total = sum(tokens for _, tokens in parts)
        for layer in range(SPEC.layers):
            q = torch.randn(total, HEADS, DIM)
            k, v = torch.randn(2, total, KV_HEADS, DIM)
            expected = mirror.attend(layer, parts, q, k, v)
            torch.testing.assert_close(cache.attend(layer, q, k, v), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "matmul", "varlen"])
def test_foreign_and_unwritten_slots_are_never_read(backend: str) -> None:
    """All other memory is NaN, as after a failed sequence: one read of it, even masked, would show."""
    cache = make_cache(backend)
    cache.store.fill_(float("nan"))
    tables = [[3, 9], [5, 2], [7]]
    for query, context in (((255, 40, 1), (255, 40, 1)), ((1, 1, 1), (256, 41, 2)), ((1, 3, 1), (257, 44, 3))):
        cache.plan([Span(*parts) for parts in zip(query, context, tables, strict=True)])
        q, (k, v) = torch.randn(sum(query), HEADS, DIM), torch.randn(2, sum(query), KV_HEADS, DIM)
        assert all(cache.attend(layer, q, k, v).isfinite().all() for layer in range(2))


@pytest.mark.parametrize("backend", ["sdpa", "matmul", "varlen"])
def test_padding_rows_write_to_the_scratch_page_only(backend: str) -> None:
    cache = make_cache(backend)
    cache.plan([Span(1, 1, [4]), *[Span(1, 1, [SCRATCH_PAGE])] * 3])
    q, (k, v) = torch.randn(4, HEADS, DIM), torch.randn(2, 4, KV_HEADS, DIM)
    out = cache.attend(0, q, k, v)
    torch.testing.assert_close(out[0], v[0].repeat_interleave(HEADS // KV_HEADS, 0))
    written = cache.store.abs().sum((0, 1, 3, 4, 5)).nonzero().flatten().tolist()
    assert written == [SCRATCH_PAGE, 4]


def test_a_plan_serves_the_shapes_of_the_pass_before_it_again() -> None:
    """Buffers are reused between passes of one shape; the numbers in them must not be."""
    cache, mirror = make_cache("sdpa"), Mirror(3)
    tables = [[2], [1], [3]]
    for step in range(1, 5):
        order = [(step + n) % 3 for n in range(3)]
        cache.plan([Span(1, step, tables[s]) for s in order])
        q, (k, v) = torch.randn(3, HEADS, DIM), torch.randn(2, 3, KV_HEADS, DIM)
        expected = mirror.attend(0, [(s, 1) for s in order], q, k, v)
        torch.testing.assert_close(cache.attend(0, q, k, v), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("query", "context", "pages"), [(0, 5, [1]), (3, 2, [1]), (1, 257, [1]), (1, 1, [])])
def test_a_span_that_cannot_be_is_refused(query: int, context: int, pages: list[int]) -> None:
    with pytest.raises(ValueError, match=f"sequence 1 of the pass has {query} new tokens, {context} in all"):
        make_cache("sdpa").plan([Span(1, 1, [2]), Span(query, context, pages)])


def test_attend_wants_a_plan_and_the_cache_known_names() -> None:
    cache = make_cache("sdpa")
    with pytest.raises(RuntimeError, match="plan"):
        cache.attend(0, torch.zeros(1, HEADS, DIM), *torch.zeros(2, 1, KV_HEADS, DIM))
    with pytest.raises(ValueError, match="flash"):
        make_cache("flash")
    with pytest.raises(ValueError, match="multiple"):
        PagedKVCache(SPEC, 4, query_heads=5)


def test_copy_page_copies_all_layers_keys_and_values() -> None:
    cache = make_cache("sdpa")
    cache.store.normal_()
    before = cache.store.clone()
    cache.copy_page(3, 5)
    assert torch.equal(cache.store[:, :, 5], before[:, :, 3])
    before[:, :, 5] = before[:, :, 3]
    assert torch.equal(cache.store, before)
    assert cache.nbytes == 24 * SPEC.page_bytes(torch.float32)


def paged_tokens(model: Transformer, backend: str, prompt: list[int], count: int, chunk: int) -> list[int]:
    spec = model.config.kv_spec
    varlen = splits_varlen if backend == "varlen" else None
    cache = PagedKVCache(spec, 8, query_heads=model.config.heads, attention=backend, varlen=varlen)
    pool, tokens, stored = PagePool(8), list(prompt), 0
    pool.allocate(1)
    pages = pool.allocate(-(-(len(prompt) + count - 1) // PAGE_SIZE))[::-1]
    for _ in range(count):
        while stored < len(tokens):
            stop = min(stored + chunk, len(tokens))
            cache.plan([Span(stop - stored, stop, pages)])
            rows = torch.tensor([stop - stored - 1])
            with torch.inference_mode():
                logits = model(torch.tensor(tokens[stored:stop]), torch.arange(stored, stop), cache, rows=rows)
            stored = stop
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("length", BOUNDARIES)
def test_token_for_token_as_contiguous_and_uncached(family: str, length: int) -> None:
    config = tiny_config(family)  # type: ignore[arg-type]
    model = Transformer.from_weights(config, random_weights(config, seed=length))
    prompt = [random.Random(length).randrange(256) for _ in range(length)]
    expected = list(generate_greedy(model, NoCache(), prompt, 4))
    contiguous = ContiguousCache(config.kv_spec, 600, heads=config.heads)
    assert list(generate_greedy(model, contiguous, prompt, 4)) == expected
    for backend, chunk in (("sdpa", 1000), ("sdpa", 100), ("matmul", 1000), ("matmul", 300)):
        assert paged_tokens(model, backend, prompt, 4, chunk) == expected, (backend, chunk)


def test_token_for_token_through_the_varlen_plan() -> None:
    config = tiny_config()
    model = Transformer.from_weights(config, random_weights(config))
    prompt = [random.Random(0).randrange(256) for _ in range(257)]
    expected = list(generate_greedy(model, NoCache(), prompt, 3))
    assert paged_tokens(model, "varlen", prompt, 3, 200) == expected


@pytest.mark.parametrize("shape", [(6, 2, 16), (9, 3, 8), (4, 4, 16), (8, 1, 16)])
def test_the_written_out_kernels_are_the_definition(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    for tokens, seen in ((1, 1), (3, 3), (129, 129), (128, 200), (2, 300)):
        q, (k, v) = torch.randn(tokens, heads, dim), torch.randn(2, seen, kv_heads, dim)
        expected = softmax_attention(q, k, v)
        torch.testing.assert_close(causal_by_matmul(q, k, v), expected, rtol=1e-4, atol=1e-5)
    batch, length = 7, 256
    assert batch * length >= MANY_KEYS
    q, (k, v) = torch.randn(batch, heads, dim), torch.randn(2, batch, length, kv_heads, dim)
    lengths = [1, 17, 64, 200, 255, 256, 128]
    bias = torch.zeros(batch, 1, 1, length)
    for n, used in enumerate(lengths):
        bias[n, ..., used:] = float("-inf")
    expected = torch.cat([softmax_attention(q[n][None], k[n, :used], v[n, :used]) for n, used in enumerate(lengths)])
    torch.testing.assert_close(decode_by_matmul(q, k, v, bias), expected, rtol=1e-4, atol=1e-5)


def cost(groups: list[tuple[list[int], int]]) -> int:
    return sum(len(rows) * length + GROUP_COST for rows, length in groups)


def test_groups_cover_every_row_once_and_none_is_cheaper() -> None:
    """Against every way of cutting the sorted lengths."""
    rng = random.Random(3)
    for _ in range(60):
        lengths = [rng.choice([rng.randint(1, 130), rng.randint(1, 3000)]) for _ in range(rng.randint(1, 7))]
        groups = [(rows.tolist(), length) for rows, length in group_by_length(np.array(lengths))]
        assert sorted(row for rows, _ in groups for row in rows) == list(range(len(lengths)))
        for rows, length in groups:
            assert length % PAD_TO == 0 and max(lengths[row] for row in rows) <= length
        ordered = sorted(lengths)
        cheapest = min(
            sum(len(part) * -(-part[-1] // PAD_TO) * PAD_TO + GROUP_COST for part in cut(ordered, marks))
            for size in range(len(ordered))
            for marks in itertools.combinations(range(1, len(ordered)), size)
        )
        assert cost(groups) == cheapest
    assert group_by_length(np.array([], dtype=np.int64)) == []


def cut(items: list[int], marks: tuple[int, ...]) -> list[list[int]]:
    return [items[a:b] for a, b in itertools.pairwise((0, *marks, len(items)))]


def test_thirty_mixed_rows_make_few_groups_with_little_padding() -> None:
    rng = random.Random(0)
    kinds = [(512, 16), (32, 128), (128, 64)]
    for _ in range(20):
        lengths = np.array([prompt + rng.randint(1, out) for prompt, out in kinds * 10])
        groups = group_by_length(lengths)
        assert len(groups) <= 6
        assert sum(len(rows) * length for rows, length in groups) <= 1.3 * lengths.sum()


def test_slots_by_hand() -> None:
    layout = Layout([1, 3], [300, 258], [[5, 2], [7, 4, 1]])
    assert layout.new_slots().tolist() == [2 * 256 + 43, 7 * 256 + 255, 4 * 256, 4 * 256 + 1]
    assert layout.starts.tolist() == [0, 1]


def test_the_choice_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")

    def has(amx: bool, bf16: bool) -> None:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16, raising=False)

    has(amx=False, bf16=True)
    assert choose_paged_attention(cpu, torch.bfloat16)[0] == "matmul"
    assert choose_paged_attention(cpu, torch.float32)[0] == "sdpa"
    assert choose_paged_attention(cpu, torch.bfloat16, "sdpa") == ("sdpa", "asked for")
    has(amx=True, bf16=True)
    assert choose_paged_attention(cpu, torch.bfloat16)[0] == "sdpa"
    assert choose_paged_attention(cpu, torch.bfloat16, "matmul") == ("matmul", "asked for")
    with pytest.raises(ValueError, match="varlen"):
        choose_paged_attention(cpu, torch.float32, "varlen")
    with pytest.raises(ValueError, match="flash"):
        choose_paged_attention(cpu, torch.float32, "flash")


def test_an_unused_pool_costs_no_memory() -> None:
    import psutil

    before = psutil.Process().memory_info().rss
    cache = PagedKVCache(KVSpec(layers=4, heads=4, head_dim=64), 1024, query_heads=8, dtype=torch.bfloat16)
    assert cache.nbytes >= 1 << 30
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert not cache.store[0, 0, 500].any()


def test_the_pool_begins_at_a_cache_line() -> None:
    cache = PagedKVCache(KVSpec(layers=1, heads=1, head_dim=16), 2, query_heads=1, dtype=torch.bfloat16)
    assert cache.store.data_ptr() % 64 == 0 and cache.store.is_contiguous()
