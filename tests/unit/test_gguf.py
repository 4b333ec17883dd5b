"""GGUF files: written here by the gguf package as llama.cpp's converter writes them, read back by ours."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor

from helios.model.config import ModelConfig, ModelError, load_config
from helios.model.convert import convert_gguf
from helios.model.files import check_folder, resolve_model
from helios.model.gguf import GGUFFile
from helios.model.gguf_tokenizer import build_tokenizer
from helios.model.weights import load_weights, placements, random_weights

SIZES = {"layers": 2, "hidden": 64, "inner": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TYPES = [3 if token.startswith("<|") and len(token) > 2 else 1 for token in TOKENS]
IM_START, IM_END, ENDOFTEXT = (TOKENS.index(token) for token in TOKENS[-3:])
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def interleave(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The row order of llama GGUFs, element by element: row 2i is the old row i of a head, row 2i+1 the old i + D/2."""
    result, head_dim = np.empty_like(rows), rows.shape[0] // heads
    for head in range(heads):
        for i in range(head_dim // 2):
            result[head * head_dim + 2 * i] = rows[head * head_dim + i]
            result[head * head_dim + 2 * i + 1] = rows[head * head_dim + i + head_dim // 2]
    return result


def config_for(architecture: str, tied: bool = True) -> ModelConfig:
    name = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[architecture]
    return ModelConfig.from_dict(
        {
            "architectures": [name],
            "vocab_size": len(TOKENS),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000.0,
            "tie_word_embeddings": tied,
        }
    )


def add_metadata(writer: gguf.GGUFWriter, pre: str, model: str, rope_base: float) -> None:
    writer.add_block_count(SIZES["layers"])
    writer.add_context_length(512)
    writer.add_embedding_length(SIZES["hidden"])
    writer.add_feed_forward_length(SIZES["inner"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_key_length(SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(rope_base)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(IM_START)
    writer.add_eos_token_id(IM_END)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    kind: Kind = Kind.F32,
    tied: bool = True,
    pre: str = "smollm",
    model: str = "gpt2",
    rope_base: float = 5000.0,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    drop: str = "",
) -> dict[str, Tensor]:
    """Write a tiny model with random weights; the tensors of its checkpoint, before quantisation."""
    config = config_for(architecture, tied)
    weights = random_weights(config)
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, pre, model, rope_base)
    extra(writer)
    tensors = {}
    for name, place in placements(config).items():
        tensors[name] = weights[place.target][place.start : place.start + place.shape[0]]
        rows = tensors[name].numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            rows = interleave(rows, 4 if "q_proj" in name else 2)
        if drop and drop in name:
            continue
        if rows.ndim > 1 and kind != Kind.F32:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), rows.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def stacked(architecture: str, tensors: dict[str, Tensor], tied: bool = True) -> dict[str, Tensor]:
    config = config_for(architecture, tied)
    result: dict[str, list[Tensor]] = {}
    for name, place in placements(config).items():
        result.setdefault(place.target, []).append(tensors[name])
    return {target: torch.cat(parts) for target, parts in result.items()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_float_file_comes_back_number_for_number(architecture: str, tied: bool, path: Path, folder: Path) -> None:
    tensors = write_gguf(path, architecture, tied=tied)
    convert_gguf(path, folder)
    config = load_config(folder)
    expected = config_for(architecture, tied)
    fields = ("architecture", "layers", "heads", "kv_heads", "head_dim", "tied_embeddings", "rope_theta", "norm_eps")
    assert all(getattr(config, field) == getattr(expected, field) for field in fields)
    assert config.dtype == "float32" and config.context == 512
    loaded = load_weights(folder, config)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stacked(architecture, tensors, tied).items())


def test_transformers_reads_the_converted_folder_and_agrees(path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tensors = write_gguf(path, "llama")
    convert_gguf(path, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(
        model.state_dict()["model.layers.1.self_attn.q_proj.weight"], tensors["model.layers.1.self_attn.q_proj.weight"]
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("hello w12").input_ids == [
        TOKENS.index("hello"),
        TOKENS.index("Ġw"),
        TOKENS.index("1"),
        TOKENS.index("2"),
    ]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


@pytest.mark.parametrize(
    ("kind", "stored", "tolerance"),
    [
        (Kind.F16, "float16", 1e-3),
        (Kind.BF16, "bfloat16", 1e-2),
        (Kind.Q8_0, "bfloat16", 2e-2),
        (Kind.Q4_0, "bfloat16", 0.2),
        (Kind.Q4_1, "bfloat16", 0.2),
    ],
)
def test_every_format_that_can_be_written_is_close_to_its_source(
    kind: Kind, stored: str, tolerance: float, path: Path, folder: Path
) -> None:
    tensors = write_gguf(path, kind=kind)
    convert_gguf(path, folder)
    config = load_config(folder)
    assert config.dtype == stored
    loaded = load_weights(folder, config)
    for name, tensor in stacked("llama", tensors).items():
        assert (loaded[name] - tensor).abs().max() <= tolerance * tensor.abs().max(), name


def test_end_tokens_are_named_or_known_by_spelling(path: Path, folder: Path) -> None:
    write_gguf(path)
    convert_gguf(path, folder)
    assert load_config(folder).eos_token_ids == (IM_END, ENDOFTEXT)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_words_are_cut_by_the_named_rule(pre: str, path: Path) -> None:
    write_gguf(path, "llama", pre=pre)
    tokenizer = build_tokenizer(GGUFFile(path))
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("hello 1234, isn't it\n\n x")]
    numbers = {"smollm": ["Ġ", "1", "2", "3", "4"], "gpt-2": ["Ġ1234"], "qwen2": ["Ġ", "1", "2", "3", "4"]}
    expected = numbers.get(pre, ["Ġ", "123", "4"])
    assert pieces[1 : 1 + len(expected)] == expected and "'t" in pieces
    assert tokenizer.decode(tokenizer.encode("hello 1234 é 你").ids) == "hello 1234 é 你"


def test_control_tokens_are_special_and_bos_is_added_when_asked(path: Path) -> None:
    write_gguf(path, extra=lambda writer: writer.add_add_bos_token(True))
    tokenizer: Tokenizer = build_tokenizer(GGUFFile(path))
    ids = tokenizer.encode("hello<|im_end|>").ids
    assert ids == [IM_START, TOKENS.index("hello"), IM_END]
    assert tokenizer.decode(ids) == "hello"


def with_factors(factors: Tensor) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_tensor("rope_freqs.weight", factors.float().numpy())


def test_llama3_scaling_is_recognised_by_its_factors(path: Path, folder: Path) -> None:
    write_gguf(path, rope_base=5e6, extra=with_factors(slow_factors()))
    convert_gguf(path, folder)
    config = load_config(folder)
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("llama3", 8.0)


def slow_factors() -> Tensor:
    """The factors for base 5e6, computed pair by pair as transformers does."""
    result = []
    for pair in range(8):
        wavelength = 2 * np.pi * 5e6 ** (2 * pair / 16)
        smooth = min(max((8192 / wavelength - 1) / 3, 0.0), 1.0)
        result.append(1 / ((1 - smooth) / 8 + smooth))
    return torch.tensor(result)


def test_other_rope_factors_are_refused(path: Path, folder: Path) -> None:
    write_gguf(path, extra=with_factors(torch.linspace(1, 9, 8)))
    with pytest.raises(ModelError, match="not Llama 3's"):
        convert_gguf(path, folder)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pre": "tekken"}, "'tekken'.*Hugging Face repository"),
    ({"model": "llama"}, "byte-level BPE"),
    ({"drop": "layers.1.mlp.up_proj"}, r"lacks model\.layers\.1\.mlp\.up_proj"),
    ({"extra": lambda writer: writer.add_expert_count(8)}, "dense GGUFs of llama, qwen2, qwen3"),
    ({"extra": lambda writer: writer.add_uint16("split.count", 3)}, "llama-gguf-split --merge"),
    ({"extra": lambda writer: writer.add_string("llama.rope.scaling.type", "yarn")}, "yarn"),
    ({"extra": lambda writer: writer.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32))}, "attn_sinks"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_converted_is_refused(options: dict[str, Any], message: str, path: Path, folder: Path) -> None:
    write_gguf(path, **options)
    with pytest.raises(ModelError, match=message):
        convert_gguf(path, folder)


def test_an_unknown_architecture_is_refused(path: Path, folder: Path) -> None:
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="gemma3"):
        convert_gguf(path, folder)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_truncated_file_is_half_downloaded(share: float, path: Path) -> None:
    write_gguf(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match="half downloaded.*fetch it again"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<html>not found</html>", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 99), "damaged"),
    ],
)
def test_other_files_are_told_apart(content: bytes, message: str, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        GGUFFile(path)


def test_large_models_are_written_in_shards(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helios.model.convert.SHARD_BYTES", 50_000)
    tensors = write_gguf(path)
    convert_gguf(path, folder)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2 and not (folder / "model.safetensors").exists()
    loaded = load_weights(check_folder(folder), load_config(folder))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stacked("llama", tensors).items())


def test_a_file_is_converted_once_and_again_when_it_changes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path / "home"))
    write_gguf(path)
    first = resolve_model(str(path))
    stamp = (first / "config.json").stat().st_mtime_ns
    assert resolve_model(path) == first and (first / "config.json").stat().st_mtime_ns == stamp
    write_gguf(path, tied=False)
    assert load_config(resolve_model(path)).tied_embeddings is False


def test_a_gguf_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no file"):
        resolve_model(tmp_path / "nothing.gguf")


DAMAGE: list[tuple[str, Callable[[gguf.GGUFWriter], None]]] = [
    ("llama.attention.head_count", lambda w: drop_key(w, "llama.attention.head_count")),
    ("llama.embedding_length", lambda w: drop_key(w, "llama.embedding_length")),
    ("llama.context_length", lambda w: drop_key(w, "llama.context_length")),
    ("llama.attention.layer_norm_rms_epsilon", lambda w: drop_key(w, "llama.attention.layer_norm_rms_epsilon")),
    ("tokenizer.ggml.tokens", lambda w: drop_key(w, "tokenizer.ggml.tokens")),
    ("tokenizer.ggml.merges", lambda w: drop_key(w, "tokenizer.ggml.merges")),
    ("llama.attention.head_count", lambda w: w.add_string("llama.attention.head_count", "four")),
    ("llama.embedding_length", lambda w: w.add_string("llama.embedding_length", "wide")),
    ("llama.block_count", lambda w: w.add_array("llama.block_count", [2, 2])),
]


def drop_key(writer: gguf.GGUFWriter, key: str) -> None:
    for part in writer.kv_data:
        part.pop(key, None)


@pytest.mark.parametrize(("key", "damage"), DAMAGE)
def test_missing_or_wrong_metadata_names_the_file(
    key: str, damage: Callable[[gguf.GGUFWriter], None], tmp_path: Path
) -> None:
    def replace_key(writer: gguf.GGUFWriter) -> None:
        drop_key(writer, key)
        damage(writer)

    write_gguf(tmp_path / "broken.gguf", extra=replace_key)
    with pytest.raises(ModelError, match=r"broken\.gguf is damaged"):
        convert_gguf(tmp_path / "broken.gguf", tmp_path)


def test_a_gguf_without_an_embedding_says_so(tmp_path: Path) -> None:
    write_gguf(tmp_path / "broken.gguf", drop="embed_tokens")
    with pytest.raises(ModelError, match=r"broken\.gguf lacks token_embd\.weight"):
        convert_gguf(tmp_path / "broken.gguf", tmp_path)
