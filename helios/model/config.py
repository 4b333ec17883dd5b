# Generated from notebooks/01_model_files.ipynb by `helios export`; edit the notebook.
"""A model is a folder of files.

What a checkpoint holds, file by file: `config.json` says how to build the network, safetensors hold
its numbers, and matrices that are always used together are fused while they are read. At the end
one call turns a name into weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from helios.model.errors import ModelError, damaged, read_json
from helios.model.fields import ARCHITECTURES, check_switches, read_positive, read_size, refuse, supported_family


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
        generation = generation or {}
        defaults, dropped = _sampling_defaults(generation)
        with damaged("generation_config.json"):
            ends = [*_ids(generation.get("eos_token_id")), *tokenizer_eos]
        with damaged("config.json"):
            read = cls._read(config)
            ends = [*_ids(config.get("eos_token_id")), *ends]
        notes = (*read.notes, *dropped)
        return replace(read, eos_token_ids=_union(ends), sampling_defaults=defaults, notes=notes)

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> ModelConfig:
        """`config.json` alone; what is not as it should be raises an error of Python's or a ModelError."""
        family = supported_family(config)
        check_switches(config, family)
        hidden, heads = read_size(config, "hidden_size"), read_size(config, "num_attention_heads")
        kv_heads = read_size(config, "num_key_value_heads", default=heads)
        head_dim = read_size(config, "head_dim", default=128 if family == "qwen3" else hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise ModelError(f"config.json: {heads} heads of {head_dim} over {kv_heads} KV heads; fetch it again.")
        theta, scaling = _rope(config)
        context, notes = _context(config, family)
        return cls(
            architecture=next(name for name in config["architectures"] if name in ARCHITECTURES),
            vocab_size=read_size(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=read_size(config, "intermediate_size"),
            layers=read_size(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=read_positive(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            context=context,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            eos_token_ids=(),
            bos_token_id=next(iter(_ids(config.get("bos_token_id"))), None),
            sampling_defaults={},
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


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Base and scaling in both spellings: `rope_theta` beside `rope_scaling`, or all within `rope_parameters`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = read_positive(scaling if scaling.get("rope_theta") else config, "rope_theta", 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, RopeScaling()
    if kind not in ("linear", "llama3"):
        advice = (
            "Implemented are linear and llama3. Without its rope_scaling entry config.json serves the short context."
        )
        raise refuse(f"stretches its context by RoPE scaling of kind {kind}", advice)
    try:
        if kind == "linear":
            return theta, RopeScaling("linear", read_positive(scaling, "factor", scaling["factor"]))
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        original = int(scaling["original_max_position_embeddings"])
        return theta, RopeScaling("llama3", read_positive(scaling, "factor", scaling["factor"]), low, high, original)
    except KeyError as missing:
        raise ModelError(f"config.json: its {kind} RoPE scaling lacks {missing}; fetch the file again.") from None


def _context(config: Mapping[str, Any], family: str) -> tuple[int, tuple[str, ...]]:
    """Longest sequence in tokens, and a note where a sliding window caps it."""
    longest = read_size(config, "max_position_embeddings")
    switch = {"mistral": True, "llama": False}
    in_use = switch.get(family, bool(config.get("use_sliding_window"))) and bool(config.get("sliding_window"))
    window = read_size(config, "sliding_window") if in_use else longest
    if window >= longest:
        return longest, ()
    note = f"Context capped at {window} tokens, this model's sliding window; within it full attention is the same."
    return window, (note,)


def _ids(value: Any) -> list[int]:
    """Token ids of a field that may be absent, one id or a list of ids."""
    if value is None:
        return []
    return [int(token) for token in value] if isinstance(value, list | tuple) else [int(value)]


def _union(*groups: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for group in groups for token in group))


# What a request may ask for too, lowest and highest; chapter 04 checks requests against the same.
SAMPLING_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def _sampling_defaults(generation: Mapping[str, Any]) -> tuple[dict[str, float], tuple[str, ...]]:
    """The suggested settings that a request could ask for as well, and a note about each that is dropped."""
    given = {name: generation[name] for name in SAMPLING_RANGES if generation.get(name) is not None}
    with damaged("generation_config.json"):
        values = {name: float(value) for name, value in given.items()}
    whole = {name for name, value in values.items() if name != "top_k" or value.is_integer()}
    fits = {name for name in whole if SAMPLING_RANGES[name][0] <= values[name] <= SAMPLING_RANGES[name][1]}
    dropped = [
        f"generation_config.json suggests {name} {given[name]}, out of range: ignored."
        for name in values
        if name not in fits
    ]
    return {name: value for name, value in values.items() if name in fits}, tuple(dropped)


def _tokenizer_eos(folder: Path) -> list[int]:
    """Id of the end-of-text token that `tokenizer_config.json` names; [] when it names none."""
    if not (folder / "tokenizer_config.json").exists():
        return []
    settings = read_json(folder / "tokenizer_config.json")
    with damaged(folder / "tokenizer_config.json"):
        eos = settings.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        added = {token["content"]: int(id) for id, token in settings.get("added_tokens_decoder", {}).items()}
        absent = bool(eos) and eos not in added
    if absent and (folder / "tokenizer.json").exists():
        with damaged(folder / "tokenizer.json"):
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


# Readers of a configuration meet its errors too: they may import both from here.
__all__ = ["ARCHITECTURES", "KVSpec", "ModelConfig", "ModelError", "RopeScaling", "SAMPLING_RANGES"]
__all__ += ["load_config", "read_json", "tiny_config"]
