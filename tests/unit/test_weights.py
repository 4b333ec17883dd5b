"""Loading weights: the right rows in the right place, and a sentence for every way a folder can be wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from helios.model.config import ARCHITECTURES, ModelConfig, ModelError, load_config, tiny_config
from helios.model.device import choose_device, choose_dtype
from helios.model.weights import load_weights, placements, random_weights, weight_shapes

FAMILIES = list(ARCHITECTURES.values())


def parts_of(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, cut out of fused ones."""
    parts = {}
    for name, place in placements(config).items():
        parts[name] = weights[place.target][place.start : place.start + place.shape[0]].clone()
    return parts


def save(folder: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors"
        save_file({name: tensors[name] for name in names[shard::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[shard::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def config() -> ModelConfig:
    return tiny_config("qwen3")


@pytest.fixture
def parts(config: ModelConfig) -> dict[str, Tensor]:
    return parts_of(config, random_weights(config))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_what_was_cut_apart_comes_back(family: str, tied: bool, shards: int, tmp_path: Path) -> None:
    config = tiny_config(family, tied_embeddings=tied)
    weights = random_weights(config)
    save(tmp_path, parts_of(config, weights), shards)
    loaded = load_weights(tmp_path, config)
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == weight_shapes(config)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_names_shapes_and_rows_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(
            vocab_size=40,
            hidden_size=24,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=4,
            tie_word_embeddings=False,
        )
    )
    theirs.save_pretrained(tmp_path)
    config, state = load_config(tmp_path), theirs.state_dict()
    assert {name: place.shape for name, place in placements(config).items()} == {
        k: tuple(v.shape) for k, v in state.items()
    }
    loaded = load_weights(tmp_path, config)
    prefix = "model.layers.1.self_attn"
    expected = torch.cat([state[f"{prefix}.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(loaded["layers.1.qkv.weight"], expected)
    gate_up = torch.cat([state[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(loaded["layers.0.gate_up.weight"], gate_up)
    if family == "Qwen2":
        bias = torch.cat([state[f"{prefix}.{part}_proj.bias"] for part in "qkv"])
        assert torch.equal(loaded["layers.1.qkv.bias"], bias)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_converted_to_the_dtype_asked_for(
    stored: torch.dtype, config: ModelConfig, parts: dict[str, Tensor], tmp_path: Path
) -> None:
    save(tmp_path, {name: tensor.to(stored) for name, tensor in parts.items()})
    loaded = load_weights(tmp_path, config, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    assert torch.equal(loaded["norm.weight"], parts["model.norm.weight"].to(stored).bfloat16())


def test_harmless_extra_tensors_are_ignored(config: ModelConfig, parts: dict[str, Tensor], tmp_path: Path) -> None:
    extra = {"lm_head.weight": torch.zeros(256, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save(tmp_path, parts | extra)
    assert "head.weight" not in load_weights(tmp_path, config)


def test_missing_tensors_are_named(config: ModelConfig, parts: dict[str, Tensor], tmp_path: Path) -> None:
    del parts["model.layers.1.self_attn.k_proj.weight"]
    save(tmp_path, parts)
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.k_proj\.weight is missing.*fetch the model again"):
        load_weights(tmp_path, config)


def test_a_missing_head_of_an_untied_model_is_named(
    config: ModelConfig, parts: dict[str, Tensor], tmp_path: Path
) -> None:
    save(tmp_path, parts)
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        load_weights(tmp_path, replace(config, tied_embeddings=False))


def test_unexpected_tensors_are_named(config: ModelConfig, parts: dict[str, Tensor], tmp_path: Path) -> None:
    save(tmp_path, parts | {"model.layers.0.mlp.experts.0.weight": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"experts\.0\.weight is not part of this architecture"):
        load_weights(tmp_path, config)


def test_misshapen_tensors_are_named_with_both_shapes(
    config: ModelConfig, parts: dict[str, Tensor], tmp_path: Path
) -> None:
    save(tmp_path, parts)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight has shape \[256, 64\].*asks for \[300, 64\]"):
        load_weights(tmp_path, replace(config, vocab_size=300))


def test_quantised_tensors_are_refused(config: ModelConfig, parts: dict[str, Tensor], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    save(tmp_path, parts | {name: parts[name].to(torch.int8)})
    with pytest.raises(ModelError, match="stored as I8"):
        load_weights(tmp_path, config)


def test_many_problems_are_summed_up(config: ModelConfig, parts: dict[str, Tensor], tmp_path: Path) -> None:
    save(tmp_path, parts)
    with pytest.raises(ModelError, match=r"and \d+ more"):
        load_weights(tmp_path, replace(config, layers=4))


@pytest.mark.parametrize("keep", [4, 100, -10])
def test_a_truncated_file_is_half_downloaded(
    keep: int, config: ModelConfig, parts: dict[str, Tensor], tmp_path: Path
) -> None:
    save(tmp_path, parts)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="half downloaded.*delete it and fetch it again"):
        load_weights(tmp_path, config)


def test_a_git_lfs_pointer_is_recognised(config: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        load_weights(tmp_path, config)


def test_a_missing_shard_is_named(config: ModelConfig, parts: dict[str, Tensor], tmp_path: Path) -> None:
    save(tmp_path, parts, shards=3)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1\.safetensors is missing"):
        load_weights(tmp_path, config)


def test_the_index_decides_which_files_are_read(config: ModelConfig, parts: dict[str, Tensor], tmp_path: Path) -> None:
    save(tmp_path, parts, shards=2)
    save_file({"another.copy": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    assert load_weights(tmp_path, config)


def test_a_folder_of_pickles_is_refused(config: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match="only pickle files"):
        load_weights(tmp_path, config)


def test_a_folder_without_weights_is_refused(config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        load_weights(tmp_path, config)


def test_random_weights_depend_on_the_seed_alone(config: ModelConfig) -> None:
    first, again, other = random_weights(config), random_weights(config), random_weights(config, seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    rounded = random_weights(config, dtype=torch.bfloat16)
    assert all(torch.equal(first[name].bfloat16(), rounded[name]) for name in first)


@pytest.mark.parametrize(
    ("flags", "expected", "why"),
    [
        (("_is_amx_tile_supported",), torch.bfloat16, "AMX"),
        (("_is_avx512_bf16_supported",), torch.bfloat16, "AVX512-BF16"),
        ((), torch.float32, "no bfloat16 units"),
    ],
)
def test_cpu_dtype_follows_the_instructions(
    flags: tuple[str, ...], expected: torch.dtype, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for question in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, question, lambda answer=question in flags: answer)
    dtype, reason = choose_dtype("cpu")
    assert dtype == expected and why in reason


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_gpu_dtype_ignores_emulated_bfloat16(
    native: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    assert choose_dtype("cuda")[0] == expected


def test_dtype_and_device_can_be_asked_for() -> None:
    assert choose_dtype("cpu", "float16") == (torch.float16, "asked for")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["tpu", "mps", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="use"):
        choose_device(name)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ModelError, match="int3.*bfloat16"):
        choose_dtype("cpu", "int3")
