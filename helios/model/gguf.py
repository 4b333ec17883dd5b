# Generated from notebooks/01_model_files.ipynb by `helios export`; edit the notebook.
"""GGUF: one file with metadata, tokenizer and block-quantised weights, read by Hugging Face's names and row order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from helios.model.config import ModelConfig
from helios.model.errors import ModelError
from helios.model.weights import is_lfs_pointer

__all__ = [
    "GGUFFile",
    "GGUF_ARCHITECTURES",
    "GGUF_OUTER",
    "GGUF_PARTS",
    "check_factors",
    "dequantize",
    "hub_name",
    "llama3_factors",
    "read_gguf_config",
    "split_halves",
    "stored_dtype",
    "write_json",
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
        if self.get("split.count") not in (None, 0, 1):
            raise ModelError(f"{path} is one part of a split GGUF: join the parts with `llama-gguf-split --merge`.")

    def get(self, key: str) -> Any:
        """The value of metadata `key`, None when the file has no such key."""
        field = self._fields.get(key)
        return None if field is None else field.contents()

    @property
    def architecture(self) -> str:
        """The architecture's name in GGUF: llama (which Mistral uses too), qwen2 or qwen3."""
        name = str(self.get("general.architecture"))
        if name not in GGUF_ARCHITECTURES or self.get(f"{name}.expert_count"):
            known = ", ".join(GGUF_ARCHITECTURES)
            raise ModelError(f"{self.path} holds the architecture {name}: Helios reads dense GGUFs of {known}.")
        return name

    def hyper(self, key: str) -> Any:
        """A hyperparameter: metadata `key` under the architecture's prefix."""
        return self.get(f"{self.architecture}.{key}")

    def number(self, key: str) -> Any:
        """A hyperparameter that must be there: a positive number; ModelError names it and the file."""
        value = self.hyper(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            what = f"{self.architecture}.{key} = {value!r}, not a positive number"
            raise ModelError(f"{self.path} is damaged ({what}): fetch the model again.")
        return value


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


def hub_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown name comes back as it is, for the check to report."""
    if name in GGUF_OUTER:
        return GGUF_OUTER[name]
    block, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.rpartition(".")
    return f"model.layers.{layer}.{GGUF_PARTS[part]}.{kind}" if block == "blk" and part in GGUF_PARTS else name


def llama3_factors(config: ModelConfig) -> Tensor:
    """What llama3 scaling divides each rotary frequency by, [D/2]: 1 for fast ones, `factor` for slow ones."""
    scaling, even = config.rope_scaling, torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    wavelengths = 2 * torch.pi * config.rope_theta ** (even / config.head_dim)
    turns = scaling.original_context / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return 1 / ((1 - smooth.clamp(0, 1)) / scaling.factor + smooth.clamp(0, 1))


def _gguf_rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
    """The `rope_scaling` entry of config.json; llama3's is recognised by its tensor of factors."""
    kind = file.hyper("rope.scaling.type")
    if kind not in (None, "none"):
        return {"rope_type": kind, "factor": file.hyper("rope.scaling.factor") or 1.0}
    if "rope_freqs.weight" not in file.tensors:
        return None
    factor = float(dequantize(file.tensors["rope_freqs.weight"]).max())
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": factor, **fixed}


def check_factors(file: GGUFFile, config: ModelConfig) -> None:
    """ModelError when the file's rotary factors are not those of `config`."""
    if "rope_freqs.weight" in file.tensors:
        stored = dequantize(file.tensors["rope_freqs.weight"]).double()
        if not torch.allclose(stored, llama3_factors(config), rtol=1e-3):
            raise ModelError(
                f"{file.path} scales RoPE in a way that is not Llama 3's: use its Hugging Face repository."
            )


def stored_dtype(file: GGUFFile) -> torch.dtype:
    """The format to keep: a float file's own; bfloat16 for quantised ones, whose few bits it exceeds."""
    kinds = {tensor.tensor_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F16"}:
        return torch.float16
    return torch.float32 if kinds & {"F32", "F16"} else torch.bfloat16


def read_gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The contents of a config.json for this file; ModelError names what it lacks."""
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks token_embd.weight: the file is incomplete, fetch it again.")
    heads = file.number("attention.head_count")
    return {
        "architectures": [GGUF_ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": file.number("embedding_length"),
        "intermediate_size": file.number("feed_forward_length"),
        "num_hidden_layers": file.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.hyper("attention.head_count_kv") or heads,
        "head_dim": file.hyper("attention.key_length") or file.number("embedding_length") // heads,
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{file.number('attention.layer_norm_rms_epsilon'):.6g}"),  # 1e-05 as float32 prints long
        "rope_theta": file.hyper("rope.freq_base") or 10_000.0,
        "rope_scaling": _gguf_rope_scaling(file),
        "max_position_embeddings": file.number("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": str(stored_dtype(file)).removeprefix("torch."),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` without its empty (None) entries."""
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
