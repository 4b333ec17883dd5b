# Generated from notebooks/01_model_files.ipynb by `helios export`; edit the notebook.
"""GGUF files, converted once into the folder of safetensors, config.json and tokenizer.json that all else reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from helios.model.config import ModelConfig, ModelError
from helios.model.weights import is_lfs_pointer, placements

__all__ = [
    "CONTROL",
    "END_OF_TURN",
    "GGUFFile",
    "GGUF_ARCHITECTURES",
    "GGUF_OUTER",
    "GGUF_PARTS",
    "LLAMA3_SPLIT",
    "QWEN_SPLIT",
    "SHARD_BYTES",
    "USER_DEFINED",
    "build_tokenizer",
    "convert_gguf",
    "dequantize",
    "llama3_factors",
    "read_gguf_config",
    "split_halves",
]


class GGUFFile:
    """One GGUF file, memory-mapped: its metadata by key and its tensors by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if is_lfs_pointer(path):
            raise ModelError(f"{path} is a Git LFS pointer, not the model: run `git lfs pull` in its folder.")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file: it does not begin with the letters GGUF.")
        try:
            reader = gguf.GGUFReader(path)
        except Exception as error:  # the reader fails in many ways on a file that ends too early
            raise ModelError(f"{path} is damaged or half downloaded ({error}): fetch it again.") from None
        self._fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        if (self.get("split.count") or 1) > 1:
            raise ModelError(f"{path} is one part of a split GGUF: join the parts with `llama-gguf-split --merge`.")

    def get(self, key: str) -> Any:
        """The value of metadata `key`, None when the file has no such key."""
        field = self._fields.get(key)
        return None if field is None else field.contents()

    @property
    def architecture(self) -> str:
        """The architecture's name in GGUF: llama, qwen2 or qwen3."""
        name = str(self.get("general.architecture"))
        if name not in GGUF_ARCHITECTURES or self.get(f"{name}.expert_count"):
            known = ", ".join(GGUF_ARCHITECTURES)
            raise ModelError(f"{self.path} holds the architecture {name}: Helios reads dense GGUFs of {known}.")
        return name

    def hyper(self, key: str) -> Any:
        """A hyperparameter: metadata `key` under the architecture's prefix."""
        return self.get(f"{self.architecture}.{key}")


GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def dequantize(tensor: Any) -> Tensor:
    """Numbers of a GGUF tensor, whatever its block format, as float32 in PyTorch's order of dimensions."""
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise ModelError(
            f"Tensor {tensor.name} is quantised as {kind}: take the Q8_0 or Q4_K_M file instead."
        ) from None
    # GGUF lists the fastest dimension first. The copy is for F32, which stays a view of the read-only file.
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(shape)


def split_halves(rows: Tensor, heads: int) -> Tensor:
    """Undo the row order of llama GGUFs: within each head from pairs (0, D/2, 1, D/2+1 …) back to halves.

    `rows` is [heads · D, …]. llama.cpp rotates neighbours for this architecture, Hugging Face the two halves.
    """
    head_dim = rows.shape[0] // heads
    pairs = rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _hub_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown name comes back as it is, for the check to report."""
    if name in GGUF_OUTER:
        return GGUF_OUTER[name]
    block, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.rpartition(".")
    return f"model.layers.{layer}.{GGUF_PARTS[part]}.{kind}" if block == "blk" and part in GGUF_PARTS else name


def llama3_factors(config: ModelConfig) -> Tensor:
    """What llama3 scaling divides each rotary frequency by, [D/2]: 1 for fast ones, `factor` for slow ones."""
    scaling, half = config.rope_scaling, torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    wavelengths = 2 * torch.pi * config.rope_theta ** (half / config.head_dim)
    turns = scaling.original_context / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return 1 / ((1 - smooth.clamp(0, 1)) / scaling.factor + smooth.clamp(0, 1))


def _rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
    """The `rope_scaling` entry of config.json. GGUF keeps llama3's as the tensor of its factors, so we recognise it."""
    kind = file.hyper("rope.scaling.type")
    if kind not in (None, "none"):
        return {"rope_type": kind, "factor": file.hyper("rope.scaling.factor") or 1.0}
    if "rope_freqs.weight" not in file.tensors:
        return None
    factor = float(dequantize(file.tensors["rope_freqs.weight"]).max())
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": factor, **fixed}


def _check_factors(file: GGUFFile, config: ModelConfig) -> None:
    if "rope_freqs.weight" in file.tensors:
        stored = dequantize(file.tensors["rope_freqs.weight"]).double()
        if not torch.allclose(stored, llama3_factors(config), rtol=1e-3):
            raise ModelError(
                f"{file.path} scales RoPE in a way that is not Llama 3's: use its Hugging Face repository."
            )


def _stored_dtype(file: GGUFFile) -> torch.dtype:
    """The format to keep: a float file's own; bfloat16 for quantised ones, whose 4 to 8 bits it exceeds."""
    kinds = {tensor.tensor_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F16"}:
        return torch.float16
    return torch.float32 if "F32" in kinds or "F16" in kinds else torch.bfloat16


def read_gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The contents of a config.json for this file."""
    heads = file.hyper("attention.head_count")
    config = {
        "architectures": [GGUF_ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": file.hyper("embedding_length"),
        "intermediate_size": file.hyper("feed_forward_length"),
        "num_hidden_layers": file.hyper("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.hyper("attention.head_count_kv") or heads,
        "head_dim": file.hyper("attention.key_length") or file.hyper("embedding_length") // heads,
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{file.hyper('attention.layer_norm_rms_epsilon'):.6g}"),  # 1e-05 as float32 prints long
        "rope_theta": file.hyper("rope.freq_base") or 10_000.0,
        "rope_scaling": _rope_scaling(file),
        "max_position_embeddings": file.hyper("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": str(_stored_dtype(file)).removeprefix("torch."),
    }
    return config


def _converted(file: GGUFFile, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its Hugging Face name, in the row order the rest of Helios expects."""
    places = placements(config)
    for name, tensor in file.tensors.items():
        hub_name = _hub_name(name)
        if name == "rope_freqs.weight":
            continue
        if hub_name not in places:
            raise ModelError(f"{file.path} has a tensor {name} that {config.architecture} does not: use another file.")
        values = dequantize(tensor)
        if tuple(values.shape) != places[hub_name].shape:
            raise ModelError(f"{file.path}: {name} has shape {list(values.shape)}, not {list(places[hub_name].shape)}.")
        if file.architecture == "llama" and ".self_attn.q_proj." in hub_name:
            values = split_halves(values, config.heads)
        if file.architecture == "llama" and ".self_attn.k_proj." in hub_name:
            values = split_halves(values, config.kv_heads)
        yield hub_name, values.to(dtype)


SHARD_BYTES = 2**30


def _write_shards(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write tensors to files of about 1 GiB, so that a model larger than memory can be converted."""
    shard: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    size = 0

    def flush(name: str) -> None:
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        if size + tensor.nbytes > SHARD_BYTES and shard:
            flush(f"model-{len(set(places.values())) + 1:05d}.safetensors")
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
    if not places:
        return flush("model.safetensors")
    flush(f"model-{len(set(places.values())) + 1:05d}.safetensors")
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _pre_tokenizer(kind: str) -> Any:
    """How text is cut into words before merging; GGUF names the rule and leaves its definition to the reader."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = {"qwen2": QWEN_SPLIT, "llama-bpe": LLAMA3_SPLIT}
    if kind in cut:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(cut[kind]), "isolated"), plain])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if kind in ("gpt-2", "default"):
        return words
    known = "gpt-2, smollm, qwen2 and llama-bpe"
    raise ModelError(
        f"This GGUF's tokenizer cuts words by the rule {kind!r}; Helios knows {known}: use the model's Hugging Face repository."
    )


CONTROL, USER_DEFINED = 3, 4  # token types of the GGUF specification


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The byte-level BPE tokenizer described by the file's metadata."""
    model = file.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(
            f"This GGUF's tokenizer is of kind {model!r}, Helios converts byte-level BPE ('gpt2'): use the model's Hugging Face repository."
        )
    kind = file.get("tokenizer.ggml.pre") or "default"
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind == "llama-bpe"))
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, file.get("tokenizer.ggml.token_type"), strict=True):
        if type_ == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif type_ == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    bos = file.get("tokenizer.ggml.bos_token_id")
    if bos is not None and (file.get("tokenizer.ggml.add_bos_token") or (kind == "llama-bpe")):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


END_OF_TURN = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


def _end_ids(file: GGUFFile, tokens: Sequence[str]) -> list[int]:
    """Every token that ends an answer: those the metadata names, and control tokens known by their spelling."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [file.get(f"tokenizer.ggml.{key}") for key in keys]
    types = file.get("tokenizer.ggml.token_type")
    spelled = [id for id, token in enumerate(tokens) if types[id] == CONTROL and token in END_OF_TURN]
    return list(dict.fromkeys(id for id in [*named, *spelled] if id is not None))


def _write_tokenizer(file: GGUFFile, folder: Path) -> None:
    build_tokenizer(file).save(str(folder / "tokenizer.json"))
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        id = file.get(f"tokenizer.ggml.{key}_token_id")
        settings[f"{name}_token"] = None if id is None else tokens[id]
    settings["model_max_length"] = file.hyper("context_length")
    settings["chat_template"] = file.get("tokenizer.chat_template")
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in settings.items() if value is not None})
    generation = {"bos_token_id": file.get("tokenizer.ggml.bos_token_id"), "eos_token_id": _end_ids(file, tokens)}
    _write_json(
        folder / "generation_config.json", {key: value for key, value in generation.items() if value is not None}
    )


def convert_gguf(path: Path | str, folder: Path | str) -> None:
    """Write the model in the GGUF file `path` into `folder` (which must exist) as a Hugging Face model folder."""
    file, folder = GGUFFile(Path(path)), Path(folder)
    raw = read_gguf_config(file)
    config = ModelConfig.from_dict(raw)
    _check_factors(file, config)
    _write_tokenizer(file, folder)
    _write_shards(_converted(file, config, _stored_dtype(file)), folder)
    _write_json(folder / "config.json", raw)
    missing = placements(config).keys() - {_hub_name(name) for name in file.tensors}
    if missing:
        raise ModelError(f"{path} lacks {sorted(missing)[0]}: the file is incomplete, fetch it again.")
