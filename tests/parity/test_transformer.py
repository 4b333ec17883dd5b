"""Logits against transformers: the same folder, the same tokens, fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helios.model.config import ModelError, load_config
from helios.model.linear import can_pack
from helios.model.transformer import NoCache, Transformer, load_transformer
from helios.model.weights import load_weights, random_weights

FAMILIES = ["qwen3", "qwen2", "llama", "llama-tied", "llama-rope3", "llama-linear", "mistral"]
TinyFolder = Callable[[str], Path]


@cache
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@cache
def ours(folder: Path) -> Transformer:
    return load_transformer(folder, device="cpu", dtype=torch.float32)


def logits(model: Transformer, ids: Tensor, rows: Tensor | None = None) -> Tensor:
    with torch.inference_mode():
        return model(ids, torch.arange(len(ids)), NoCache(), rows)


def random_ids(model: Transformer, length: int) -> Tensor:
    return torch.randint(model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", [1, 7, 130])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_model_gives_the_reference_logits(tiny_folder: TinyFolder, family: str, length: int) -> None:
    folder = tiny_folder(family)
    ids = random_ids(ours(folder), length)
    with torch.no_grad():
        expected = reference(folder)(ids[None]).logits[0]
    got = logits(ours(folder), ids)
    assert got.dtype == torch.float32 and got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-4
    assert expected.std() > 0.1, "logits this flat would hide a difference"


@pytest.mark.parametrize("length", [1, 40])
def test_embedded_model_gives_the_reference_logits(embedded: Path, length: int) -> None:
    ids = random_ids(ours(embedded), length)
    with torch.no_grad():
        expected = reference(embedded)(ids[None]).logits[0]
    assert (logits(ours(embedded), ids) - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("family", ["qwen3", "llama-tied"])
def test_rows_choose_which_tokens_get_logits(tiny_folder: TinyFolder, family: str) -> None:
    model = ours(tiny_folder(family))
    ids = random_ids(model, 9)
    everything = logits(model, ids)
    some = logits(model, ids, torch.tensor([8, 2]))
    torch.testing.assert_close(some, everything[[8, 2]], rtol=1e-5, atol=1e-5)
    assert logits(model, ids, torch.tensor([], dtype=torch.long)).shape == (0, model.config.vocab_size)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama-tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(tiny_folder: TinyFolder, family: str, dtype: torch.dtype) -> None:
    folder = tiny_folder(family)
    half = load_transformer(folder, device="cpu", dtype=dtype)
    ids = random_ids(half, 20)
    expected = logits(ours(folder), ids)
    error = (logits(half, ids) - expected).abs().max() / expected.abs().max()
    assert error < (0.06 if dtype == torch.bfloat16 else 0.01)


def test_fp16_keeps_the_residual_stream_in_fp32(tiny_folder: TinyFolder) -> None:
    model = load_transformer(tiny_folder("qwen3"), device="cpu", dtype=torch.float16)
    with torch.inference_mode():
        hidden = model.hidden(torch.arange(5), torch.arange(5), NoCache())
    assert hidden.dtype == torch.float32
    assert model.norm.weight.dtype == model.blocks[0].attn_norm.weight.dtype == torch.float32
    assert model.blocks[0].qkv.weight.dtype == torch.float16


@pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.bfloat16), reason="oneDNN has no bfloat16 on this CPU")
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama-tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_compute_what_plain_ones_do(tiny_folder: TinyFolder, family: str, dtype: torch.dtype) -> None:
    folder = tiny_folder(family)
    config = load_config(folder)
    plain = Transformer.from_weights(config, load_weights(folder, config, dtype=dtype))
    packed = Transformer.from_weights(config, load_weights(folder, config, dtype=dtype)).pack()
    for length in (1, 10, 33):
        ids = random_ids(plain, length)
        expected = logits(plain, ids)
        scale = float(expected.abs().max())
        assert (logits(packed, ids) - expected).abs().max() < scale * (1e-5 if dtype == torch.float32 else 0.05)
        assert packed.pack() is packed, "packing twice must change nothing"


def test_packing_drops_the_plain_weights(tiny_folder: TinyFolder) -> None:
    model = load_transformer(tiny_folder("qwen2"), device="cpu", dtype=torch.float32)
    assert all(linear.weight is None for linear in (model.blocks[0].qkv, model.blocks[0].down, model.head))
    assert model.embed.weight.shape == (model.config.vocab_size, model.config.hidden_size)


def test_wrong_weights_are_refused_in_a_sentence(tiny_folder: TinyFolder) -> None:
    config = load_config(tiny_folder("qwen3"))
    weights = random_weights(config)
    del weights["layers.0.o.weight"]
    with pytest.raises(ModelError, match=r"layers\.0\.o\.weight.*Fetch"):
        Transformer.from_weights(config, weights)


def test_a_position_beyond_the_context_is_an_error(tiny_folder: TinyFolder) -> None:
    model = ours(tiny_folder("llama"))
    with torch.inference_mode(), pytest.raises(IndexError):
        model(torch.tensor([1]), torch.tensor([model.config.context]), NoCache())
