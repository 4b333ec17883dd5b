"""Reading config.json: every supported spelling, and a sentence for everything that is not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helios.model.config import ARCHITECTURES, KVSpec, ModelConfig, ModelError, RopeScaling, load_config, tiny_config
from helios.model.weights import weight_shapes

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": None,
}


def changed(**fields: Any) -> dict[str, Any]:
    return QWEN3_4B | fields


def test_qwen3_4b_is_read_field_by_field() -> None:
    config = ModelConfig.from_dict(QWEN3_4B)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (36, 32, 8, 128)
    assert config.qk_norm and config.tied_embeddings and not config.qkv_bias
    assert (config.rope_theta, config.norm_eps, config.context) == (1e6, 1e-6, 40960)
    assert config.eos_token_ids == (151645,) and config.bos_token_id == 151643
    assert config.parameter_count == 4_022_468_096
    assert config.kv_spec.bytes_per_token(torch.bfloat16) == 147_456
    assert config.notes == () and config.sampling_defaults == {}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_stored_dtype_has_two_names(key: str) -> None:
    raw = {k: v for k, v in QWEN3_4B.items() if k != "torch_dtype"} | {key: "torch.float16"}
    assert ModelConfig.from_dict(raw).dtype == "float16"


LINEAR = RopeScaling("linear", 4.0)
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
LLAMA3_FIELDS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_theta": 5e5}, RopeScaling()),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}, LINEAR),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4}}, LINEAR),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_FIELDS}}, LLAMA3),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, RopeScaling()),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeScaling()),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}}, LINEAR),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_FIELDS}}, LLAMA3),
    ],
)
def test_rope_in_every_spelling(fields: dict[str, Any], expected: RopeScaling) -> None:
    raw = {k: v for k, v in QWEN3_4B.items() if not k.startswith("rope")} | fields
    config = ModelConfig.from_dict(raw)
    assert (config.rope_theta, config.rope_scaling) == (5e5, expected)


@pytest.mark.parametrize("family", ["LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config"])
def test_what_transformers_writes_is_read(family: str, tmp_path: Path) -> None:
    theirs = getattr(transformers, family)(
        num_hidden_layers=3, num_key_value_heads=8, hidden_size=1024, intermediate_size=512, head_dim=32
    )
    theirs.architectures = [family.replace("Config", "ForCausalLM")]
    theirs.save_pretrained(tmp_path)
    ours = load_config(tmp_path)
    assert (ours.layers, ours.kv_heads, ours.hidden_size, ours.head_dim) == (3, 8, 1024, 32)
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


def test_end_tokens_are_the_union_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643], "top_k": 20}))
    tokenizer = {"eos_token": {"content": "<end>"}, "added_tokens_decoder": {"7": {"content": "<end>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    config = load_config(tmp_path)
    assert config.eos_token_ids == (151645, 151643, 7)
    assert config.sampling_defaults == {"top_k": 20.0}


def test_an_end_token_is_looked_up_in_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(eos_token_id=None)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 9, "content": "<end>"}]}))
    assert load_config(tmp_path).eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 4096),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 40960),
        ({"use_sliding_window": True, "sliding_window": 1024}, 1024),
        ({"use_sliding_window": False, "sliding_window": 1024}, 40960),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 1024}, 40960),
    ],
)
def test_an_active_sliding_window_caps_the_context_and_says_so(fields: dict[str, Any], context: int) -> None:
    config = ModelConfig.from_dict(changed(**fields))
    assert config.context == context
    assert bool(config.notes) == (context < 40960)


REFUSED = [
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"),
    ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
    ({"architectures": ["Mine"], "auto_map": {"AutoModel": "mine.Mine"}}, "own Python code"),
    ({"quantization_config": {"quant_method": "awq"}}, "awq.*unquantised"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"attention_bias": True}, "biases"),
    ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, "biases"),
    ({"partial_rotary_factor": 0.5}, "part of each head"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn.*linear and llama3"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
    ({"hidden_size": None}, "hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"vocab_size": "many"}, "vocab_size"),
    ({"num_key_value_heads": 5}, "KV heads"),
    ({"head_dim": 127}, "127"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_cannot_be_computed_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict(changed(**fields))


@pytest.mark.parametrize("content", ["{", "[]", "version https://git-lfs.github.com/spec/v1\n"])
def test_a_damaged_config_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json.*fetch it again"):
        load_config(tmp_path)


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize("family", ARCHITECTURES.values())
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_as_the_tensors_are(family: str, tied: bool) -> None:
    config = tiny_config(family, tied_embeddings=tied)
    assert config.parameter_count == sum(torch.Size(shape).numel() for shape in weight_shapes(config).values())


def test_tiny_config_takes_overrides_and_refuses_unknown_families() -> None:
    assert tiny_config("llama", layers=5).layers == 5
    with pytest.raises(ModelError, match="gpt"):
        tiny_config("gpt")


def test_kv_spec_counts_keys_and_values() -> None:
    spec = KVSpec(layers=30, heads=3, head_dim=64)
    assert spec.values_per_token == 11_520
    assert spec.bytes_per_token(torch.float32) == 46_080
    assert spec.page_bytes(torch.bfloat16) == 256 * 23_040
