"""Recorded decode ticks: buckets, padding, staging, attention in a fixed shape, recordings, and results read late."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helios.engine.build import choose_runner
from helios.engine.config import EngineConfig
from helios.engine.runner import ModelRunner, RunnerUnavailable, TickInputs
from helios.fast import graphs as graphs_module
from helios.fast.buckets import (
    Bucket,
    CudaLink,
    DirectLink,
    Draws,
    Staging,
    bucket_grid,
    choose_bucket,
    fields,
    fill,
    is_plain_decode,
)
from helios.fast.choosing import can_choose, choose_on_device
from helios.fast.graphs import (
    CudaCapture,
    GraphRunner,
    ReplayByCalling,
    ReplayByTape,
    assemble,
    build_runner,
    rehearsal,
    self_test,
)
from helios.fast.static import (
    WORKSPACE,
    DecodeCache,
    GatheredDecode,
    InPlaceDecode,
    Recording,
    TritonDecode,
    recordings,
    slots_of,
)
from helios.fast.tape import Tape
from helios.kv.layout import Layout
from helios.kv.paged import PagedKVCache, Span
from helios.kv.pages import PAGE_SIZE, SCRATCH_PAGE
from helios.model.attention import attend_decode
from helios.model.config import KVSpec, tiny_config
from helios.model.params import SamplingParams
from helios.model.sampling import SampleRow, sample, uniform
from helios.model.transformer import Transformer
from helios.model.weights import random_weights
from tests.unit.lagging import LateLink, NoFences

HEADS, KV_HEADS, DIM = 6, 2, 16
SPEC = KVSpec(layers=2, heads=KV_HEADS, head_dim=DIM)


def decode_tick(lengths: list[int], seed: int = 0, reserved: int = 0) -> TickInputs:
    """One token for each sequence; contexts after it are `lengths`; tables hold `reserved` pages more than needed."""
    rng, next_page, spans = random.Random(seed), 1, []
    for length in lengths:
        pages = -(-length // PAGE_SIZE) + reserved
        spans.append(Span(1, length, list(range(next_page, next_page + pages))))
        next_page += pages
    ids = np.array([rng.randrange(1, 250) for _ in lengths], np.int64)
    return TickInputs(ids, np.array(lengths, np.int64) - 1, spans, np.arange(len(lengths), dtype=np.int64))


def numpy_fields(buffer: Tensor, bucket: Bucket) -> list[Any]:
    return [part.numpy() for part in fields(buffer, bucket)]


def tiny(family: str = "llama") -> Transformer:
    config = tiny_config(family)
    return Transformer.from_weights(config, random_weights(config))


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny()


def cache_for(model: Transformer, pages: int = 24) -> PagedKVCache:
    return PagedKVCache(model.config.kv_spec, pages, query_heads=model.config.heads)


def runner_for(model: Transformer, cache: PagedKVCache, *, recorder: Any = None, **options: Any) -> GraphRunner:
    buckets = bucket_grid(4, 3)
    attention = GatheredDecode(attend_decode, cache.store, buckets)
    return GraphRunner(
        model, cache, attention, buckets, recorder=recorder or ReplayByTape(), link=DirectLink(), **options
    )


# Buckets


sizes = st.integers(1, 200)


@given(sizes, sizes, st.booleans(), st.integers(1, 40))
def test_a_grid_is_bounded_and_begins_with_the_largest(batch: int, pages: int, by_pages: bool, most: int) -> None:
    grid = bucket_grid(batch, pages, by_pages=by_pages, graphs=most)
    assert grid[0] == Bucket(batch, pages) and 1 <= len(grid) <= most
    assert len(set(grid)) == len(grid) and grid == sorted(grid, reverse=True)
    assert all(1 <= bucket.batch <= batch and 1 <= bucket.pages <= pages for bucket in grid)
    assert by_pages or {bucket.pages for bucket in grid} == {pages}


@given(sizes, sizes, st.integers(1, 40), st.lists(sizes, min_size=1, max_size=220), st.floats(1.0, 4.0))
def test_a_chosen_bucket_holds_the_tick_and_none_smaller_does(
    batch: int, pages: int, most: int, needs: list[int], padding: float
) -> None:
    grid = bucket_grid(batch, pages, graphs=most)
    chosen = choose_bucket(grid, needs)
    holding = [b for b in grid if b.batch >= len(needs) and b.pages >= max(needs)]
    assert (chosen is None) == (not holding)
    if chosen is not None:
        assert chosen in holding
        assert not any(b.batch <= chosen.batch and b.pages <= chosen.pages and b != chosen for b in holding)
    thrifty = choose_bucket(grid, needs, padding)
    if thrifty is not None:
        assert thrifty == chosen and thrifty.batch * thrifty.pages <= padding * sum(needs)
    elif chosen is not None:
        assert chosen.batch * chosen.pages > padding * sum(needs)


@given(st.integers(1, 32), st.integers(1, 16))
def test_doubling_steps_pad_less_than_twofold(rows: int, pages: int) -> None:
    chosen = choose_bucket(bucket_grid(32, 16, graphs=100), [pages] * rows)
    assert chosen is not None and chosen.batch < 2 * rows and chosen.pages < 2 * pages


def test_a_grid_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a row, a page and a graph"):
        bucket_grid(0, 4)


# Packing


@settings(max_examples=60)
@given(st.lists(st.integers(1, 3 * PAGE_SIZE), min_size=1, max_size=6), st.integers(0, 2), st.integers(0, 2))
def test_a_packed_tick_is_its_rows_and_padding_on_the_scratch_page(
    lengths: list[int], reserved: int, spare: int
) -> None:
    bucket = Bucket(len(lengths) + spare, 3)
    buffer = torch.full((bucket.ints,), -7, dtype=torch.int32)
    inputs, rows = decode_tick(lengths, reserved=reserved), len(lengths)
    draws = Draws([0.25 * n for n in range(rows)], [uniform(n, 3) for n in range(rows)])
    fill(numpy_fields(buffer, bucket), inputs, draws)
    parts = fields(buffer, bucket)
    assert parts.ids.tolist() == [*inputs.token_ids, *[0] * spare]
    assert parts.positions.tolist() == [*inputs.positions, *[0] * spare]
    assert parts.uniforms.tolist() == [*draws.uniforms, *[0.0] * spare], "float64 keeps every bit"
    assert parts.temperatures.tolist() == [*draws.temperatures, *[0.0] * spare]
    for row, span in enumerate([*inputs.spans, *[Span(1, 1, [SCRATCH_PAGE])] * spare]):
        used = -(-span.context // PAGE_SIZE)
        assert parts.table[row].tolist() == [*span.pages[:used], *[SCRATCH_PAGE] * (3 - used)]


def test_fields_cover_the_buffer_once() -> None:
    for bucket in (Bucket(1, 1), Bucket(3, 5), Bucket(32, 8)):
        parts = fields(torch.zeros(bucket.ints, dtype=torch.int32), bucket)
        assert sum(part.nbytes for part in parts) == 4 * bucket.ints
        assert all(part.is_contiguous() for part in parts)


@pytest.mark.parametrize("lengths", [[5, 5, 5], [2 * PAGE_SIZE + 1]])
def test_a_tick_that_does_not_fit_is_an_error_and_no_shorter_context(lengths: list[int]) -> None:
    bucket = Bucket(2, 2)
    with pytest.raises(ValueError, match="do not fit"):
        fill(numpy_fields(torch.zeros(bucket.ints, dtype=torch.int32), bucket), decode_tick(lengths))


def test_what_is_plain_decode() -> None:
    inputs = decode_tick([5, 6])
    ids = np.zeros(4, np.int64)
    assert is_plain_decode(inputs)
    assert not is_plain_decode(TickInputs(inputs.token_ids, inputs.positions, inputs.spans, np.array([1, 0])))
    assert not is_plain_decode(TickInputs(inputs.token_ids, inputs.positions, inputs.spans, np.array([0, 0])))
    assert not is_plain_decode(TickInputs(inputs.token_ids, inputs.positions, inputs.spans, np.array([0])))
    assert not is_plain_decode(TickInputs(ids, ids, [Span(3, 3, [1]), Span(1, 1, [2])], np.array([2, 3])))


# Staging


def arrivals(link: LateLink, lags: list[int]) -> list[bool]:
    """Stage ticks on a device that is `lag` copies behind after each; whether each tick arrived whole."""
    buckets = [Bucket(4, 2), Bucket(2, 1), Bucket(4, 1)]
    staging, ticks, whole = Staging(link, max(b.ints for b in buckets), "cpu"), [], []

    def check(number: int) -> None:  # the device reads right after each copy
        bucket, inputs = ticks[number]
        expected = torch.zeros(bucket.ints, dtype=torch.int32)
        fill(numpy_fields(expected, bucket), inputs)
        whole.append(bool(torch.equal(staging.device[: bucket.ints], expected)))

    original = link.run_until

    def run_until(mark: int) -> None:
        while link.done < mark:
            original(link.done + 1)
            check(link.done - 1)

    link.run_until = run_until  # type: ignore[method-assign]
    for number, lag in enumerate(lags):
        bucket = buckets[number % 3]
        inputs = decode_tick([1 + 7 * number % 200] * (1 + number % bucket.batch), seed=number)
        ticks.append((bucket, inputs))
        staging.stage(bucket, inputs)
        link.run_until(len(link.queue) - lag)
    link.run_until(len(link.queue))
    assert len(whole) == len(lags)
    return whole


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_a_host_buffer_is_never_written_while_its_copy_is_under_way(lags: list[int]) -> None:
    assert all(arrivals(LateLink(), lags))


def test_without_fences_it_would_be() -> None:
    assert not all(arrivals(NoFences(), [9] * 6))


def test_two_copies_may_be_under_way_without_waiting() -> None:
    link = LateLink()
    staging = Staging(link, Bucket(2, 1).ints, "cpu")
    for _ in range(2):
        staging.stage(Bucket(2, 1), decode_tick([5, 6]))
    assert (len(link.queue), link.done) == (2, 0)
    staging.stage(Bucket(2, 1), decode_tick([5, 6]))
    assert link.done == 1, "the third waits for the first, and for no other"


def test_a_tick_is_one_copy_of_its_bucket() -> None:
    link = LateLink()
    Staging(link, 1000, "cpu").stage(Bucket(4, 2), decode_tick([300, 5]))
    assert len(link.queue) == 1


# Attention in a fixed shape


def test_slots_are_those_of_the_layout() -> None:
    tables, positions = [[5, 2, 9], [7, 4, 1]], [[0, 255, 256, 700], [3, 511, 512, 767]]
    layout = Layout([1, 1], [768, 768], tables)
    assert slots_of(torch.tensor(tables), torch.tensor(positions)).tolist() == (
        layout.slots(np.arange(2)[:, None], np.array(positions)).tolist()
    )


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query `[H, D]` over keys and values `[S, K, D]`."""
    k, v = (part.repeat_interleave(q.shape[0] // part.shape[1], 1) for part in (k, v))
    weights = torch.softmax(torch.einsum("hd,shd->hs", q, k) / q.shape[1] ** 0.5, -1)
    return torch.einsum("hs,shd->hd", weights, v)


def documented_varlen(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **options: Any) -> Tensor:
    """`varlen_attn` for decode rows, and the rules that its kernel needs."""
    ends, keys_end, most_queries, most_keys = lengths
    table, used = options["block_table"], options["seqused_k"]
    assert options["window_size"] == (-1, -1) and options["enable_gqa"] and "num_splits" not in options
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (ends, keys_end, table, used))
    assert ends.tolist() == list(range(len(q) + 1)) and most_queries == 1
    assert most_keys == table.shape[1] * PAGE_SIZE >= int(used.max())
    return by_table(q, k, v, table, used)


def by_table(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor) -> Tensor:
    rows = []
    for n, length in enumerate(used.tolist()):
        past_k, past_v = (part[table[n].long()].flatten(0, 1)[:length] for part in (k, v))
        rows.append(softmax_attention(q[n], past_k, past_v))
    return torch.stack(rows)


class FakeKernels:
    """The part of `helios.fast.triton_decode` that recordings use."""

    def __init__(self) -> None:
        self.splits: list[int] = []

    def choose_splits(self, groups: int, longest: int, processors: int) -> int:
        assert longest == 3 * PAGE_SIZE
        return processors // groups

    def decode_paged(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, *, splits: int) -> Tensor:
        assert table.dtype == lengths.dtype == torch.int32
        self.splits.append(splits)
        return by_table(q, k, v, table, lengths)


def attention_of(kind: str, store: Tensor, buckets: list[Bucket]) -> Any:
    if kind == "gathered":
        return GatheredDecode(attend_decode, store, buckets)
    if kind == "in place":
        return InPlaceDecode(documented_varlen, max(b.batch for b in buckets), store.device)
    return TritonDecode(FakeKernels(), KV_HEADS, 3 * PAGE_SIZE, 24)


@pytest.mark.parametrize("kind", ["gathered", "in place", "triton"])
@pytest.mark.parametrize("lengths", [[1], [5, 256, 257], [700, 1, 512], [255, 256, 257, 768]])
def test_attention_reads_its_own_context_and_nothing_else(kind: str, lengths: list[int]) -> None:
    """All other memory is NaN, the rest of each row's last page too: one read of it would show."""
    torch.manual_seed(0)
    bucket, inputs = Bucket(len(lengths) + 2, 3), decode_tick(lengths)
    cache = PagedKVCache(SPEC, 16, query_heads=HEADS)
    cache.store[:, :, 1:].fill_(float("nan"))
    slots = cache.store.view(2, 2, -1, KV_HEADS, DIM)
    past = {}
    for n, span in enumerate(inputs.spans):
        places = [span.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(span.context - 1)]
        slots[:, :, places] = past[n] = torch.randn(2, 2, len(places), KV_HEADS, DIM)
    buffer = torch.zeros(bucket.ints, dtype=torch.int32)
    fill(numpy_fields(buffer, bucket), inputs)
    static = DecodeCache(cache, attention_of(kind, cache.store, [bucket]))
    before = cache.store.clone()
    static.plan(fields(buffer, bucket).table, fields(buffer, bucket).positions)
    q = torch.randn(bucket.batch, HEADS, DIM)
    k, v = torch.randn(2, bucket.batch, KV_HEADS, DIM)
    for layer in range(2):
        out = static.attend(layer, q, k, v)
        for n in range(len(lengths)):
            keys, values = (torch.cat((past[n][layer, i], new[n : n + 1])) for i, new in enumerate((k, v)))
            torch.testing.assert_close(out[n], softmax_attention(q[n], keys, values), rtol=1e-4, atol=1e-5)
        assert out.isfinite().all(), "padding rows see one key"
    changed = (before.nan_to_num() != cache.store.nan_to_num()).flatten(-2).any(-1).nonzero()
    written = {(int(page), int(slot)) for _, _, page, slot in changed}
    own = {(span.pages[(span.context - 1) // PAGE_SIZE], (span.context - 1) % PAGE_SIZE) for span in inputs.spans}
    assert written <= own | {(SCRATCH_PAGE, 0)} and own <= written


INTERPRETED = """
import torch
from helios.engine.config import EngineConfig
from helios.fast import graphs, static, triton_decode
from helios.fast.buckets import Bucket, DirectLink
from helios.kv.paged import PagedKVCache
from helios.model.config import tiny_config
from helios.model.transformer import Transformer
from helios.model.weights import random_weights

config = tiny_config("qwen3")
model = Transformer.from_weights(config, random_weights(config))
cache = PagedKVCache(config.kv_spec, 3, query_heads=config.heads)
for processors in (1, 8):  # one part, two parts
    attention = static.TritonDecode(triton_decode, config.kv_heads, 512, processors)
    runner = graphs.GraphRunner(
        model, cache, attention, [Bucket(2, 2)], recorder=graphs.ReplayByCalling(), link=DirectLink()
    )
    graphs.self_test(runner, cache.store, 1e-4)
    print(attention._splits)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernel_passes_the_self_test_when_interpreted() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    script = [sys.executable, "-c", INTERPRETED]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [int(line) for line in done.stdout.split()]
    assert parts[0] >= 1 and parts[1] > parts[0]


def test_a_gathers_memory_keeps_its_address_whatever_is_replayed() -> None:
    cache, buckets = PagedKVCache(SPEC, 16, query_heads=HEADS), [Bucket(2, 3), Bucket(4, 2), Bucket(8, 1)]
    attention = GatheredDecode(attend_decode, cache.store, buckets)
    address = attention._scratch._block.data_ptr()
    for bucket in buckets:
        table = torch.zeros(bucket.batch, bucket.pages, dtype=torch.int32)
        attention.prepare(table, torch.zeros(bucket.batch, dtype=torch.int32))
        attention.attend(torch.randn(bucket.batch, HEADS, DIM), cache.store[0])
        assert attention._scratch._block.data_ptr() == address


def test_triton_is_launched_for_the_bucket_and_not_for_the_contexts() -> None:
    kernels = FakeKernels()
    attention = TritonDecode(kernels, KV_HEADS, 3 * PAGE_SIZE, 24)
    store = PagedKVCache(SPEC, 16, query_heads=HEADS).store
    for context in (1, 700):
        attention.prepare(torch.ones(3, 3, dtype=torch.int32), torch.full((3,), context - 1, dtype=torch.int32))
        attention.attend(torch.randn(3, HEADS, DIM), store[0])
    assert kernels.splits == [4, 4]


# The tape


def test_a_tape_freezes_numbers_and_addresses_and_follows_memory() -> None:
    x, y, n = torch.arange(4.0), torch.zeros(4), 3
    tape = Tape()
    with tape:
        y.copy_((x * n).view(2, 2).t().reshape(-1))
        y[1:3].add_(100)
    n, x[:] = 5, torch.tensor([4.0, 3.0, 2.0, 1.0])
    tape.replay()
    assert y.tolist() == [12.0, 106.0, 109.0, 3.0]


def test_a_tape_refuses_to_read_back() -> None:
    with pytest.raises(RuntimeError, match="read back"), Tape():
        bool(torch.ones(1).sum() > 0)


# Choosing on the device


class Watch(TorchDispatchMode):
    """Fails on any operation whose result's size, or whose number, must be known to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "tolist"), name
        if name == "index":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a bool index asks for a size"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("vocab", [50, 128, 5000])
def test_the_device_chooses_what_the_host_would(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(48, vocab) * 4
    logits[7, 3], logits[11] = float("nan"), float("-inf")
    params = [SamplingParams(temperature=t) for t in (0.0, 0.3, 1.0, 1.9)] * 12
    rows = [SampleRow(p, [], [], seed) for seed, p in enumerate(params)]
    temperatures = torch.tensor([p.temperature for p in params])
    uniforms = torch.tensor([uniform(row.seed, 0) for row in rows], dtype=torch.float64)
    with Watch():
        chosen = choose_on_device(logits, temperatures, uniforms)
    assert chosen.tolist() == sample(logits, rows).ids
    assert chosen[7] == chosen[11] == -1


@pytest.mark.parametrize(
    ("settings_", "banned", "possible"),
    [
        ({}, [], True),
        ({"temperature": 0.0, "top_p": 0.5}, [], True),  # greedy ignores filters
        ({"temperature": 0.0, "logprobs": 2}, [], False),
        ({"top_p": 0.9}, [], False),
        ({"top_k": 5}, [], False),
        ({"min_p": 0.1}, [], False),
        ({"repetition_penalty": 1.2}, [], False),
        ({"logit_bias": {3: 1.0}}, [], False),
        ({}, [258], False),
    ],
)
def test_which_rows_the_device_may_choose_for(settings_: dict[str, Any], banned: list[int], possible: bool) -> None:
    assert can_choose(SampleRow(SamplingParams(**settings_), [], [], 0, banned)) is possible


# The runner


@pytest.mark.parametrize("recorder", [ReplayByCalling(), ReplayByTape()])
def test_ticks_are_replayed_where_they_fit_and_run_eagerly_elsewhere(model: Transformer, recorder: Any) -> None:
    cache = cache_for(model)
    runner = runner_for(model, cache, recorder=recorder)
    eager = ModelRunner(model, cache)
    ticks = [[5], [256, 257, 9], [6, 7], [700], [769], [1] * 5, [300] * 4]
    with torch.inference_mode():
        for seed, lengths in enumerate(ticks):
            inputs = decode_tick(lengths, seed)
            expected = eager.forward(inputs).clone()
            torch.testing.assert_close(runner.forward(inputs), expected, rtol=1e-4, atol=1e-4)
    assert runner.ticks == {"replayed": 5, "eager": 2, "padding rows": 1}


def test_a_recording_reads_nothing_back(model: Transformer) -> None:
    runner = runner_for(model, cache_for(model), recorder=ReplayByCalling(), choosing=True)
    with torch.inference_mode(), Watch():
        for bucket in runner.buckets:
            runner._step(bucket)


def test_prompts_and_repeated_rows_run_eagerly(model: Transformer) -> None:
    runner = runner_for(model, cache_for(model))
    ids = np.arange(3, dtype=np.int64)
    with torch.inference_mode():
        assert runner.forward(TickInputs(ids, ids, [Span(3, 3, [1])], np.array([2]))).shape == (1, 256)
        one = decode_tick([5])
        twice = TickInputs(one.token_ids, one.positions, one.spans, np.array([0, 0]))
        assert runner.forward(twice).shape == (2, 256)
    assert runner.ticks == {"eager": 2}


def test_a_broken_row_fails_alone(model: Transformer) -> None:
    """What the engine's guard needs: a row's NaN reaches its own logits, and no other's."""
    cache = cache_for(model)
    runner = runner_for(model, cache)
    inputs = decode_tick([40, 300, 7])
    cache.store[:, :, inputs.spans[1].pages[0], :5] = float("nan")
    with torch.inference_mode():
        finite = runner.forward(inputs).isfinite().all(1)
    assert finite.tolist() == [True, False, True]
    assert cache.store[:, :, SCRATCH_PAGE].isfinite().all(), "pages are wiped from there"


def test_a_step_can_begin_from_what_the_last_one_chose(model: Transformer) -> None:
    cache, one = cache_for(model), decode_tick([6, 300])
    runner = runner_for(model, cache, choosing=True)
    with torch.inference_mode():
        chosen = runner.launch(one, Draws([0.0, 0.0], [0.0, 0.0])).tolist()
        assert chosen == runner._logits[:2].argmax(1).tolist()
        spans = [Span(1, span.context + 1, span.pages) for span in reversed(one.spans)]
        rows = np.arange(2, dtype=np.int64)
        ahead = TickInputs(np.array([-2, -1]), one.positions[::-1] + 1, spans, rows)
        found = runner.launch(ahead, Draws([0.0, 0.0], [0.0, 0.0])).tolist()
        known = TickInputs(np.array(chosen[::-1]), ahead.positions, spans, rows)
        assert runner.forward(known).argmax(1).tolist() == found


def test_a_broken_row_goes_on_with_some_token_until_it_is_thrown_away(model: Transformer) -> None:
    cache, one = cache_for(model), decode_tick([6, 40])
    runner = runner_for(model, cache, choosing=True)
    cache.store[:, :, one.spans[0].pages[0], :3] = float("nan")
    nothing = Draws([0.0, 0.0], [0.0, 0.0])
    with torch.inference_mode():
        first, second = runner.launch(one, nothing).tolist()
        assert first == -1 and second >= 0
        spans = [Span(1, span.context + 1, span.pages) for span in one.spans]
        ahead = TickInputs(np.array([-1, -2]), one.positions + 1, spans, one.rows)
        assert runner.launch(ahead, nothing).tolist()[0] == -1
        assert runner._logits[1].isfinite().all()


def test_only_a_choosing_runner_can_launch(model: Transformer) -> None:
    with pytest.raises(ValueError, match="choosing"):
        runner_for(model, cache_for(model)).launch(decode_tick([5]), Draws([0.0], [0.0]))


# Start-up


class Broken:
    """Recorders that go wrong in ways that would show only as wrong numbers, or as an error of the driver's."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        if self.kind == "raises":
            raise RuntimeError("operation not permitted when stream is capturing\nand a long trace")
        step()
        return lambda: None


def test_a_self_test_passes_and_leaves_no_trace(model: Transformer) -> None:
    cache = cache_for(model)
    runner = runner_for(model, cache)
    self_test(runner, cache.store, 1e-4)
    assert not cache.store.any() and not runner.ticks


def test_a_recording_that_does_nothing_is_found_out(model: Transformer) -> None:
    cache = cache_for(model)
    with pytest.raises(RunnerUnavailable, match=r"Bucket\(batch=4, pages=3\) differs"):
        self_test(runner_for(model, cache, recorder=Broken("stale")), cache.store, 1e-4)


def test_every_row_of_a_recording_is_tested(model: Transformer) -> None:
    """A kernel that leaves the rows of later sequences unwritten is known to exist."""
    cache = cache_for(model)

    def first_row_only(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return torch.cat((attend_decode(q, k, v, bias)[:1], torch.zeros_like(q[1:])))

    attention = GatheredDecode(first_row_only, cache.store, [Bucket(4, 3)])
    runner = GraphRunner(model, cache, attention, [Bucket(4, 3)], recorder=ReplayByCalling(), link=DirectLink())
    with pytest.raises(RunnerUnavailable, match="differs"):
        self_test(runner, cache.store, 1e-3)


def test_a_choosing_recording_is_tested_for_what_it_chooses_and_reads(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_for(model)
    runner = runner_for(model, cache, recorder=ReplayByCalling(), choosing=True)
    self_test(runner, cache.store, 1e-4)
    assert not cache.store.any() and not runner.ticks

    def second_best(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
        return logits.topk(2, dim=1).indices[:, 1]

    monkeypatch.setattr(graphs_module, "choose_on_device", second_best)
    with pytest.raises(RunnerUnavailable, match="chooses other tokens"):
        self_test(runner, cache.store, 1e-4)


def test_where_tokens_cannot_be_chosen_on_the_device_the_host_chooses(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(max_batch_size=2, max_context=256)
    runner, why = assemble(model, cache_for(model), config, ReplayByTape(), DirectLink(), 8)
    assert runner.choosing and runner.can_launch([5, 256]) and not runner.can_launch([1] * 3)

    def cannot(*_: Tensor) -> Tensor:
        raise NotImplementedError("no double precision on this device")

    monkeypatch.setattr(graphs_module, "choose_on_device", cannot)
    runner, doubtful = assemble(model, cache_for(model), config, ReplayByTape(), DirectLink(), 8)
    assert not runner.choosing and not runner.can_launch([5])
    assert doubtful == f"{why}; tokens are chosen by the host: NotImplementedError: no double precision on this device"


def test_the_rehearsal_is_a_sequence_on_the_scratch_page() -> None:
    tick = rehearsal(5, 6, 3)
    assert is_plain_decode(tick) and tick.token_ids.tolist() == tick.positions.tolist() == [5, 5, 5]
    assert list(tick.spans) == [Span(1, 6, [SCRATCH_PAGE])] * 3


def test_what_is_recorded_follows_from_the_cache(model: Transformer) -> None:
    (gathered,) = recordings(cache_for(model), 8, 4, graphs=24)
    assert isinstance(gathered.attention, GatheredDecode) and gathered.padding == 2.0
    spec = model.config.kv_spec
    in_place = PagedKVCache(spec, 24, query_heads=4, attention="varlen", varlen=documented_varlen)
    (only,) = recordings(in_place, 8, 4, graphs=24)
    assert isinstance(only.attention, InPlaceDecode) and only.padding is None


def test_a_gather_stays_within_its_workspace(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_for(model)
    page = 2 * cache.store[0, 0, 0].nbytes
    monkeypatch.setattr("helios.fast.static.WORKSPACE", 6 * page)
    (some,) = recordings(cache, 8, 4, graphs=24)
    assert max(bucket.batch * bucket.pages for bucket in some.buckets) <= 6
    monkeypatch.setattr("helios.fast.static.WORKSPACE", page // 2)
    assert list(recordings(cache, 8, 4, graphs=24)) == []
    with pytest.raises(RunnerUnavailable, match="workspace"):
        assemble(model, cache, EngineConfig(), ReplayByCalling(), DirectLink(), 24)
    assert WORKSPACE == 2**28


def test_a_recorded_runner_says_what_it_replays(model: Transformer) -> None:
    config = EngineConfig(max_batch_size=4, max_context=600)
    runner, why = assemble(model, cache_for(model), config, ReplayByTape(), DirectLink(), 8)
    assert why == "6 graphs, up to 4 sequences; pages are gathered"
    assert max(bucket.pages for bucket in runner.buckets) == 3 and runner.padding == 2.0


def test_the_varlen_backend_is_recorded_as_well(model: Transformer) -> None:
    cache = PagedKVCache(model.config.kv_spec, 24, query_heads=4, attention="varlen", varlen=mixed_varlen)
    config = EngineConfig(max_batch_size=2, max_context=300)
    runner, why = assemble(model, cache, config, ReplayByCalling(), DirectLink(), 24)
    assert why.endswith("varlen_attn reads pages in place") and len(runner.buckets) == 4


def mixed_varlen(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **options: Any) -> Tensor:
    """The reference for decode rows; for the rehearsal's prompt, causal from the end."""
    if options["window_size"] == (-1, -1):
        return documented_varlen(q, k, v, *lengths, **options)
    (length,), table = options["seqused_k"].tolist(), options["block_table"]
    ends = range(length - len(q) + 1, length + 1)
    return torch.cat([by_table(q[n : n + 1], k, v, table, torch.tensor([end])) for n, end in enumerate(ends)])


def test_what_fails_gives_way_to_the_next_and_is_not_forgotten(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(cache: PagedKVCache, batch: int, pages: int, graphs: int, asked: str) -> Any:
        class Unfit:
            def prepare(self, table: Tensor, positions: Tensor) -> None:
                raise ValueError("out of resources: shared memory\nmore")

        yield Recording(Unfit(), [Bucket(1, 1)], None, "a kernel reads pages")  # type: ignore[arg-type]
        yield from recordings(cache, batch, pages, graphs, asked)

    monkeypatch.setattr(graphs_module, "recordings", two)
    config = EngineConfig(max_batch_size=2, max_context=256)
    _, why = assemble(model, cache_for(model), config, ReplayByTape(), DirectLink(), 8)
    assert why == (
        "2 graphs, up to 2 sequences; pages are gathered; "
        "not where a kernel reads pages: ValueError: out of resources: shared memory"
    )


@pytest.mark.parametrize(("kind", "reason"), [("stale", "differs from the eager pass"), ("raises", "not permitted")])
def test_when_nothing_can_be_recorded_the_reason_is_a_sentence(model: Transformer, kind: str, reason: str) -> None:
    with pytest.raises(RunnerUnavailable, match=reason) as caught:
        assemble(model, cache_for(model), EngineConfig(max_context=300), Broken(kind), DirectLink(), 8)
    assert "\n" not in str(caught.value)


def test_without_cuda_there_are_no_graphs(model: Transformer) -> None:
    with pytest.raises(RunnerUnavailable, match="CUDA graphs need a CUDA device, and this model is on cpu"):
        build_runner(model, cache_for(model), EngineConfig())
    with pytest.raises(ValueError, match="runner='graphs' is not possible here: .*CUDA"):
        choose_runner(model, cache_for(model), EngineConfig(runner="graphs"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_graphs_serve_as_the_eager_runner_does() -> None:
    config = tiny_config("qwen3")
    model = Transformer.from_weights(config, random_weights(config, device="cuda"))
    cache = PagedKVCache(config.kv_spec, 24, query_heads=config.heads, device="cuda")
    runner, _ = build_runner(model, cache, EngineConfig(max_batch_size=4))
    assert isinstance(CudaLink().host(3, torch.int32), Tensor) and CudaCapture is not None
    with torch.inference_mode():
        for seed, lengths in enumerate([[5], [256, 257, 9], [6, 7], [300] * 4]):
            inputs = decode_tick(lengths, seed)
            expected = runner.eager.forward(inputs).clone()
            torch.testing.assert_close(runner.forward(inputs), expected, rtol=1e-3, atol=1e-3)
    assert runner.ticks["replayed"] == 4
