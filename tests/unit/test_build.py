"""From settings to an engine: how large the pool becomes, and engines built from a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.engine.build import build_engine, free_memory, size_pool
from helios.engine.config import EngineConfig
from helios.engine.sequence import Request
from helios.model.config import KVSpec, ModelError
from helios.model.params import SamplingParams

SPEC = KVSpec(layers=2, heads=2, head_dim=16)
PAGE = SPEC.page_bytes(torch.float32)


@pytest.mark.parametrize(
    ("free_pages", "settings", "pages"),
    [
        (1000, {"kv_pages": 7}, 7),
        (10_000, {}, 32 * 8),  # a full batch of full contexts
        (100, {}, 50),  # half of what is free
        (12, {}, 8),  # one full context, beyond the half
        (6, {}, 4),  # not even one context: four fifths
        (10_000, {"max_batch_size": 2}, 16),
        (100, {"memory_fraction": 0.2}, 20),
    ],
)
def test_the_pool_takes_its_share_and_no_more_than_it_can_use(
    free_pages: int, settings: dict[str, Any], pages: int
) -> None:
    found, why = size_pool(SPEC, torch.float32, EngineConfig(**settings), 2048, free_pages * PAGE)
    assert found == pages and why


def test_no_room_for_a_page_is_an_error_that_helps() -> None:
    with pytest.raises(ModelError, match="choose a smaller model"):
        size_pool(SPEC, torch.float32, EngineConfig(), 2048, PAGE)


def test_free_memory_is_something() -> None:
    assert free_memory(torch.device("cpu")) > 2**20


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_batch_size", 0), ("kv_pages", 0), ("memory_fraction", 0.0), ("memory_fraction", float("nan"))],
)
def test_settings_that_cannot_work_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


def answer(engine: Any, prompt: list[int], tokens: int) -> list[int]:
    engine.admit(Request("a", prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)))
    events = []
    while engine.running_count:
        events += engine.tick(0.0)
    return [event.token_id for event in events]


def test_an_engine_from_a_folder(tiny_folder: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(tiny_folder("qwen3")), dtype="float32", kv_pages=12, device="cpu", max_context=512)
    engine = build_engine(config)
    assert set(engine.report) >= {"model", "device", "dtype", "attention", "context", "kv_pages", "ready"}
    assert "12 of 256 tokens" in engine.report["kv_pages"] and engine.context == 512
    assert engine.tokenizer is not None and engine.tokenizer.decode(engine.tokenizer.encode("hello")) == "hello"
    assert engine.stats()["ticks_total"] == 0 and engine.pool.free_count == 12, "the warm-up leaves no trace"
    assert len(answer(engine, [1, 2, 3], 5)) == 5


def test_random_weights_need_only_a_config(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(tiny_folder("llama") / "config.json", tmp_path)
    engine = build_engine(EngineConfig(model=str(tmp_path), load_weights="random", kv_pages=4, device="cpu"))
    assert engine.tokenizer is None and "random weights" in engine.report["model"]
    assert len(answer(engine, [1, 2, 3], 5)) == 5


def test_weights_that_are_not_finite_stop_the_start(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(tiny_folder("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="not finite"):
        build_engine(EngineConfig(model=str(folder), dtype="float32", kv_pages=4, device="cpu"))


def test_a_config_names_what_is_wrong_with_a_missing_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Unheard"]}))
    with pytest.raises(ModelError):
        build_engine(EngineConfig(model=str(tmp_path)))


def test_more_pages_than_there_is_memory_for_are_refused() -> None:
    with pytest.raises(ModelError, match="at most 5 pages"):
        size_pool(SPEC, torch.float32, EngineConfig(kv_pages=10**9), 2048, 5 * PAGE)
