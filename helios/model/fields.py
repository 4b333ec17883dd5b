# Generated from notebooks/01_model_files.ipynb by `helios export`; edit the notebook.
"""Fields of config.json one at a time: refused when Helios cannot compute them, or when they cannot be true."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from helios.model.errors import ModelError

__all__ = ["ARCHITECTURES", "LARGEST", "check_switches", "read_positive", "read_size", "refuse", "supported_family"]
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def refuse(reason: str, advice: str) -> ModelError:
    """The error for a model that Helios does not compute."""
    return ModelError(f"This model {reason}. {advice}")


def supported_family(config: Mapping[str, Any]) -> str:
    """The family of the first architecture named in `config`; ModelError for all that Helios cannot build."""
    names = list(config.get("architectures") or [])
    family = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if family is not None:
        return family
    if config.get("auto_map"):
        reason = "brings its own Python code (auto_map), which Helios never runs"
    else:
        reason = f"has the architecture {', '.join(names) or config.get('model_type') or 'unknown'}"
    raise refuse(reason, f"Choose one of the architectures Helios builds: {', '.join(sorted(ARCHITECTURES))}.")


def check_switches(config: Mapping[str, Any], family: str) -> None:
    """Refuse the variants within a supported family that the transformer does not compute."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise refuse(f"is stored quantised ({method})", "Use the unquantised repository, or a GGUF file of it.")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise refuse(f"uses the activation {config['hidden_act']}", "Only SiLU is implemented: choose another model.")
    if family != "qwen2" and (config.get("attention_bias") or config.get("mlp_bias")):
        raise refuse("has biases in its attention or MLP", "Of these only Qwen2's are implemented: choose another.")
    partial = (config.get("rope_parameters") or config).get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise refuse("rotates only a part of each head", "Only full rotary heads are implemented: choose another.")


LARGEST = {"num_hidden_layers": 4096}  # sizes that loops run over; all others are below 16 million


def read_size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size: a whole number above 0, and no larger than any model has."""
    value = config.get(key)
    value = default if value is None else value
    most = LARGEST.get(key, 2**24)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json has {key} = {value!r}, not a positive whole number: fetch the file again.")
    if value > most or value < 2 and key == "max_position_embeddings":
        raise ModelError(f"config.json has {key} = {value}, which no model has: fetch the file again.")
    return value


def read_positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """A finite number above 0."""
    value = float(config.get(key) or default)
    if not 0 < value < math.inf:
        raise ModelError(f"config.json has {key} = {value!r}, not a positive number: fetch the file again.")
    return value
