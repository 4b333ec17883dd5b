"""Model folders whose files do not hold what they should: always a ModelError, and it names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from safetensors.torch import save_file

from helios.model.chat import ChatError
from helios.model.config import ModelError, load_config, tiny_config
from helios.model.files import check_folder
from helios.model.tokenizer import Tokenizer
from helios.model.weights import load_weights, placements, random_weights

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def read(folder: Path) -> Tokenizer:
    """All that starting an engine reads of a folder."""
    check_folder(folder)
    load_weights(folder, load_config(folder))
    return Tokenizer.from_folder(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder."""
    weights = random_weights(tiny_config())
    places = placements(tiny_config())
    parts = {n: weights[p.target][p.start : p.start + p.shape[0]].clone() for n, p in places.items()}
    save_file(parts, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    assert read(tmp_path).vocab_size == 1
    return tmp_path


BAD_FIELDS: list[dict[str, Any]] = [
    {"architectures": 5},
    {"architectures": [1]},
    {"architectures": [[1]]},
    {"eos_token_id": {"a": 1}},
    {"eos_token_id": "abc"},
    {"bos_token_id": [None]},
    {"rope_parameters": "abc"},
    {"rope_theta": -1},
    {"rope_theta": [1]},
    {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": "x"}},
    {"quantization_config": "abc"},
    {"rms_norm_eps": -3},
    {"rms_norm_eps": float("nan")},
    {"max_position_embeddings": 10**12},
    {"max_position_embeddings": 1},
    {"num_hidden_layers": 10**9},
    {"hidden_size": True},
    {"use_sliding_window": True, "sliding_window": -5},
    {"use_sliding_window": True, "sliding_window": "abc"},
]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=str)
def test_a_wrong_field_of_config_json(fields: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    with pytest.raises(ModelError, match=r"config\.json"):
        read(folder)


BAD_FILES: list[tuple[str, str | bytes]] = [
    ("config.json", "[" * 100_000),
    ("config.json", b"\xff\xfe{}"),
    ("generation_config.json", '{"temperature": [1]}'),
    ("generation_config.json", '{"top_p": "high"}'),
    ("generation_config.json", '{"eos_token_id": "abc"}'),
    ("model.safetensors.index.json", '{"weight_map": []}'),
    ("model.safetensors.index.json", '{"weight_map": {"a": 5}}'),
    ("model.safetensors.index.json", "{}"),
    ("tokenizer_config.json", '{"eos_token": [1]}'),
    ("tokenizer_config.json", '{"added_tokens_decoder": 5}'),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
    ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}'),
    ("tokenizer_config.json", '{"chat_template": [5]}'),
    ("tokenizer_config.json", '{"chat_template": 5}'),
    ("chat_template.json", '{"chat_template": 5}'),
    ("chat_template.jinja", b"\xff\xfe"),
    ("tokenizer.json", '{"added_tokens": 5}'),
]


@pytest.mark.parametrize(("name", "content"), BAD_FILES, ids=lambda value: str(value)[:40])
def test_a_wrong_file_is_named(name: str, content: str | bytes, folder: Path) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        read(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
def test_a_folder_where_a_file_should_be(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        read(folder)


def test_a_template_with_a_syntax_error_refuses_chat_and_leaves_completions(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    tokenizer = read(folder)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ChatError, match=r"not valid Jinja \(line 2.*chat_template\.jinja.*completions endpoint"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])


def test_suggested_settings_out_of_range_are_dropped_with_a_note(folder: Path) -> None:
    wrong = {"temperature": 2.5, "top_p": 0, "top_k": 1.5, "min_p": -1, "repetition_penalty": 1e300}
    (folder / "generation_config.json").write_text(json.dumps(wrong))
    config = load_config(folder)
    assert config.sampling_defaults == {} and len(config.notes) == 5
    assert config.notes[0] == "generation_config.json suggests temperature 2.5, out of range: ignored."
    good = {"temperature": 2, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(good | {"top_k": float("nan")}))
    assert load_config(folder).sampling_defaults == {k: float(v) for k, v in good.items() if k != "top_k"}
    (folder / "generation_config.json").write_text(json.dumps(good))
    config = load_config(folder)
    assert config.sampling_defaults == good and config.notes == ()
