"""The compiled runner's parts: its operators, its pieces, when it refuses. Nothing is compiled here."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from helios.engine.config import EngineConfig
from helios.engine.runner import RunnerUnavailable
from helios.fast import compiled
from helios.fast.compiled import (
    MOST_LAYERS,
    CompiledRunner,
    build_runner,
    keep_compiled,
    layer_weights,
    norm,
    piece_length,
    turn,
)
from helios.fast.operators import ENTRIES, Entry, attend, linear, register
from helios.kv.paged import PagedKVCache, Span
from helios.model.config import tiny_config
from helios.model.embedded import cache_home
from helios.model.linear import Linear
from helios.model.transformer import Transformer, UnitNorm, rotate
from helios.model.weights import random_weights


def model_of(family: str = "qwen3", dtype: torch.dtype = torch.float32, **shape: Any) -> Transformer:
    config = tiny_config(family, **shape)
    return Transformer.from_weights(config, random_weights(config, dtype=dtype))


def cache_for(model: Transformer, pages: int = 4) -> PagedKVCache:
    return PagedKVCache(model.config.kv_spec, pages, query_heads=model.config.heads, dtype=model.dtype)


@pytest.fixture
def entry() -> tuple[Entry, Tensor]:
    model = model_of()
    block = model.blocks[1]
    made = Entry(cache_for(model), 1, (block.qkv, block.o, block.gate_up, block.down))
    return made, torch.tensor(register([made])[0])


@pytest.mark.parametrize("layers", range(1, 100))
def test_pieces_are_few_and_only_the_last_may_be_shorter(layers: int) -> None:
    length = piece_length(layers)
    assert 1 <= length <= MOST_LAYERS
    pieces = [min(length, layers - first) for first in range(0, layers, length)]
    assert sum(pieces) == layers and len(pieces) == -(-layers // MOST_LAYERS)


def test_the_linear_operator_finds_its_linear(entry: tuple[Entry, Tensor]) -> None:
    made, start = entry
    for which, part in enumerate(made.linears):
        assert part.weight is not None
        x = torch.randn(3, part.weight.shape[1])
        with torch.inference_mode():
            assert torch.equal(linear(x, start, 0, which, len(part.weight)), part(x))
            assert torch.equal(linear(x, start - 5, 5, which, len(part.weight)), part(x))


def test_the_attention_operator_stores_and_attends_in_its_own_layer(entry: tuple[Entry, Tensor]) -> None:
    made, start = entry
    other = PagedKVCache(model_of().config.kv_spec, 4, query_heads=4)
    q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    for cache in (made.cache, other):
        cache.plan([Span(5, 5, [2])])
    with torch.inference_mode():
        assert torch.equal(attend(q, k, v, made.cache.store, start, 0), other.attend(1, q, k, v))
    assert torch.equal(made.cache.store, other.store)
    assert made.cache.store[0].abs().max() == 0 and made.cache.store[1].abs().max() > 0


@pytest.mark.parametrize("heads", ["whole", "part"])
def test_operators_announce_what_they_return(entry: tuple[Entry, Tensor], heads: str) -> None:
    made, start = entry
    qk = torch.randn(5, 6, 16)
    q, k, v = (qk[:, :4], qk[:, 4:], qk[:, 4:]) if heads == "part" else (qk[:, :4].clone(), *torch.randn(2, 5, 2, 16))
    made.cache.plan([Span(5, 5, [2])])
    real = [attend(q, k, v, made.cache.store, start, 0), linear(torch.randn(5, 64), start, 0, 0, 128)]
    q, k, v, pool, x = (part.to("meta") for part in (q, k, v, made.cache.store, torch.randn(5, 64)))
    told = [attend(q, k, v, pool, start.to("meta"), 0), linear(x, start.to("meta"), 0, 0, 128)]
    for one, other in zip(real, told, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_the_schema_declares_that_the_pool_changes() -> None:
    changed = {part.name: part.alias_info is not None and part.alias_info.is_write for part in attend._schema.arguments}
    assert changed == {"q": False, "k": False, "v": False, "pool": True, "start": False, "offset": False}


def test_the_table_lets_go_of_a_runner_that_is_dropped() -> None:
    model = model_of()
    runner = CompiledRunner(model, cache_for(model))
    numbers = [number for number, held in ENTRIES.items() if held.cache is runner.cache]
    assert len(numbers) == model.config.layers + 1
    del runner
    gc.collect()
    assert not set(numbers) & set(ENTRIES)


def test_norm_and_turn_are_those_of_the_transformer() -> None:
    block, x = model_of().blocks[0], torch.randn(7, 64)
    assert torch.allclose(norm(x, block.attn_norm.weight, 1e-6), block.attn_norm(x), atol=1e-5)  # type: ignore[arg-type]
    unit = UnitNorm(block.attn_norm)  # type: ignore[arg-type]
    assert torch.allclose(norm(x, None, block.attn_norm.eps), unit(x), atol=1e-6)  # type: ignore[arg-type]
    heads, angle = torch.randn(7, 3, 16), torch.randn(7, 1, 8)
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    assert torch.allclose(turn(heads, cos, angle.sin()), rotate(heads, cos, angle.sin()), atol=1e-6)


def test_packed_weights_stay_out_of_the_graph_and_keep_their_widths() -> None:
    plain, packed = model_of("qwen2"), model_of("qwen2").pack()
    assert layer_weights(plain.blocks[0]).widths == layer_weights(packed.blocks[0]).widths == (128, 64, 256, 64)
    if packed.blocks[0].qkv.packed is not None:
        assert layer_weights(packed.blocks[0]).linears == (None,) * 4
        assert layer_weights(packed.blocks[0]).norms == (None,) * 4


def refusal(model: Transformer) -> str:
    with pytest.raises(RunnerUnavailable) as refused:
        build_runner(model, cache_for(model), EngineConfig())
    return str(refused.value)


def test_half_precision_on_a_cpu_is_refused() -> None:
    assert "float16 on a CPU" in refusal(model_of(dtype=torch.float16))


def test_a_model_without_weights_is_refused() -> None:
    model = model_of()
    model.blocks[1].down.weight = None
    assert "taken the model's weights" in refusal(model)


def test_unknown_layers_are_refused() -> None:
    model = model_of()
    model.layers[1] = Linear(4, 4)
    assert "layers of chapter 3" in refusal(model)


def test_what_fails_while_compiling_becomes_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: CompiledRunner, tokens: int = 8) -> None:
        raise RuntimeError("\nNo working C++ compiler found\nand a long story")

    monkeypatch.setattr(CompiledRunner, "warm_up", fails)
    assert refusal(model_of()) == "torch.compile failed here (No working C++ compiler found)"


def test_results_are_kept_in_the_cache_of_helios_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    kept = keep_compiled()
    assert kept.startswith(str(cache_home() / "inductor"))
    assert torch.__version__ in kept and compiled.os.environ["TORCHINDUCTOR_CACHE_DIR"] == kept
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    assert keep_compiled() == "elsewhere"
