# Generated from notebooks/01_model_files.ipynb by `helios export`; edit the notebook.
"""A model is a folder of files.

What a checkpoint holds, file by file: `config.json` says how to build the network, safetensors hold
its numbers, and matrices that are always used together are fused while they are read. At the end
one call turns a name into weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "ARCHITECTURES",
    "KVSpec",
    "ModelConfig",
    "ModelError",
    "RopeScaling",
    "SAMPLING_FIELDS",
    "load_config",
    "read_json",
    "tiny_config",
]


class ModelError(ValueError):
    """This model cannot be used; the message says why and what to do instead."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ModelError when it is missing, cut short or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: a model folder needs one; download it again.") from None
    except ValueError:
        raise ModelError(f"{path} is not valid JSON, perhaps half downloaded: delete it and fetch it again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold one JSON object: fetch it again.")
    return content


@dataclass(frozen=True)
class KVSpec:
    """What attention keeps of every token: keys and values of `heads` KV heads of `head_dim` numbers, per layer."""

    layers: int
    heads: int
    head_dim: int

    @property
    def values_per_token(self) -> int:
        """Numbers kept per token: K and V, all layers."""
        return 2 * self.layers * self.heads * self.head_dim

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes kept per token when the cache is stored in `dtype`."""
        return self.values_per_token * dtype.itemsize

    def page_bytes(self, dtype: torch.dtype, page_size: int = 256) -> int:
        """Bytes of one cache page of `page_size` tokens."""
        return self.bytes_per_token(dtype) * page_size


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length the model was first trained on.

    `kind` is "none", "linear" (all frequencies divided by `factor`) or "llama3" (only the slow ones, with a smooth
    passage between wavelengths of `original_context / high_freq_factor` and `original_context / low_freq_factor`).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """All that the transformer must know, read from `config.json` once and checked; sizes count numbers or tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    context: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    sampling_defaults: dict[str, float]
    dtype: str
    notes: tuple[str, ...] = ()

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        tokenizer_eos: Iterable[int] = (),
    ) -> ModelConfig:
        """Read the contents of `config.json`, and of `generation_config.json` where there is one.

        `tokenizer_eos` are end-of-text ids that only the tokenizer knows. ModelError for what Helios cannot compute.
        """
        family, generation = _supported_family(config), generation or {}
        _check_switches(config, family)
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        kv_heads = _size(config, "num_key_value_heads", default=heads)
        head_dim = _size(config, "head_dim", default=128 if family == "qwen3" else hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise ModelError(f"config.json: {heads} heads of {head_dim} over {kv_heads} KV heads; fetch it again.")
        theta, scaling = _rope(config)
        context, notes = _context(config, family)
        return cls(
            architecture=next(name for name in config["architectures"] if name in ARCHITECTURES),
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size"),
            layers=_size(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            context=context,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            eos_token_ids=_union(_ids(config.get("eos_token_id")), _ids(generation.get("eos_token_id")), tokenizer_eos),
            bos_token_id=next(iter(_ids(config.get("bos_token_id"))), None),
            sampling_defaults={k: float(generation[k]) for k in SAMPLING_FIELDS if generation.get(k) is not None},
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
            notes=notes,
        )

    @property
    def kv_spec(self) -> KVSpec:
        """What the KV cache stores per token."""
        return KVSpec(self.layers, self.kv_heads, self.head_dim)

    @property
    def parameter_count(self) -> int:
        """Stored numbers of the whole model; tied embeddings count once."""
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size) + self.qkv_bias * (q_size + 2 * kv_size)
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        layer = attention + norms + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return embeddings + self.layers * layer + self.hidden_size


ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def _refuse(reason: str, advice: str) -> ModelError:
    return ModelError(f"This model {reason}. {advice}")


def _supported_family(config: Mapping[str, Any]) -> str:
    """The family of the first architecture named in `config`; ModelError for all that Helios cannot build."""
    names = config.get("architectures") or []
    family = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if family is not None:
        return family
    if config.get("auto_map"):
        reason = "brings its own Python code (auto_map), which Helios never runs"
    else:
        reason = f"has the architecture {', '.join(names) or config.get('model_type') or 'unknown'}"
    raise _refuse(reason, f"Choose one of the architectures Helios builds: {', '.join(sorted(ARCHITECTURES))}.")


def _check_switches(config: Mapping[str, Any], family: str) -> None:
    """Refuse the variants within a supported family that the transformer does not compute."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise _refuse(f"is stored quantised ({method})", "Use the unquantised repository, or a GGUF file of it.")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _refuse(f"uses the activation {config['hidden_act']}", "Only SiLU is implemented: choose another model.")
    if family != "qwen2" and (config.get("attention_bias") or config.get("mlp_bias")):
        raise _refuse("has biases in its attention or MLP", "Of these only Qwen2's are implemented: choose another.")
    partial = (config.get("rope_parameters") or config).get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise _refuse("rotates only a part of each head", "Only full rotary heads are implemented: choose another.")


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json has {key} = {value!r}, not a positive whole number: fetch the file again.")
    return value


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Base and scaling in both spellings: `rope_theta` beside `rope_scaling`, or all within `rope_parameters`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, RopeScaling()
    if kind not in ("linear", "llama3"):
        advice = (
            "Implemented are linear and llama3. Without its rope_scaling entry config.json serves the short context."
        )
        raise _refuse(f"stretches its context by RoPE scaling of kind {kind}", advice)
    try:
        if kind == "linear":
            return theta, RopeScaling("linear", float(scaling["factor"]))
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        original = int(scaling["original_max_position_embeddings"])
        return theta, RopeScaling("llama3", float(scaling["factor"]), low, high, original)
    except KeyError as missing:
        raise ModelError(f"config.json: its {kind} RoPE scaling lacks {missing}; fetch the file again.") from None


def _context(config: Mapping[str, Any], family: str) -> tuple[int, tuple[str, ...]]:
    """Longest sequence in tokens, and a note where a sliding window caps it."""
    longest = _size(config, "max_position_embeddings")
    window = config.get("sliding_window")
    switch = {"mistral": True, "llama": False}
    in_use = switch.get(family, bool(config.get("use_sliding_window")))
    if not in_use or not window or window >= longest:
        return longest, ()
    note = f"Context capped at {window} tokens, this model's sliding window; within it full attention is the same."
    return int(window), (note,)


def _ids(value: Any) -> list[int]:
    """Token ids of a field that may be absent, one id or a list of ids."""
    if value is None:
        return []
    return [int(token) for token in value] if isinstance(value, list | tuple) else [int(value)]


def _union(*groups: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for group in groups for token in group))


SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _tokenizer_eos(folder: Path) -> list[int]:
    """Id of the end-of-text token that `tokenizer_config.json` names; [] when it names none."""
    if not (folder / "tokenizer_config.json").exists():
        return []
    settings = read_json(folder / "tokenizer_config.json")
    eos = settings.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    added = {token["content"]: int(id) for id, token in settings.get("added_tokens_decoder", {}).items()}
    if eos and eos not in added and (folder / "tokenizer.json").exists():
        tokens = read_json(folder / "tokenizer.json").get("added_tokens", [])
        added.update({token["content"]: int(token["id"]) for token in tokens})
    return [added[eos]] if eos in added else []


def load_config(folder: Path | str) -> ModelConfig:
    """Read and check the configuration of the model in `folder`; ModelError says what is wrong with it."""
    folder = Path(folder)
    config = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    return ModelConfig.from_dict(config, generation, _tokenizer_eos(folder))


def tiny_config(family: str = "qwen3", **overrides: Any) -> ModelConfig:
    """A model small enough for tests: two layers, hidden 64, 4 heads over 2 KV heads of 16, a vocabulary of 256."""
    names = {short: name for name, short in ARCHITECTURES.items()}
    if family not in names:
        raise ModelError(f"There is no family {family!r}: choose one of {', '.join(names)}.")
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048}
    raw = {"architectures": [names[family]], "tie_word_embeddings": family == "qwen3", **sizes, **heads}
    return replace(ModelConfig.from_dict(raw), **overrides)
