"""Models that the tests share: tiny random ones saved by transformers, and the embedded one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TinyFolder = Callable[[str], Path]

# A byte-level tokenizer without merges: 256 bytes, then these.
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 264

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Name of a family → (transformers' config class, what differs from SHAPE).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"rope_theta": 1_000_000.0}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-rope3": ("LlamaConfig", {"rope_scaling": LLAMA3_ROPE}),
    "llama-linear": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
}


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with ChatML markers: any text is one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        clean_up_tokenization_spaces=False,
    )
    saved.chat_template = CHAT_TEMPLATE
    saved.save_pretrained(folder)


def save_tiny_model(family: str, folder: Path) -> None:
    """Random weights in fp32, written as transformers writes any model."""
    import torch
    import transformers

    config_class, differences = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**SHAPE, **differences})
    torch.manual_seed(sum(family.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    # transformers starts norms at 1 and biases at 0, where a weight that is never applied would not show.
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.add_(0.3 * torch.randn_like(parameter))
        elif parameter.dim() == 2:
            parameter.data.normal_(std=0.15)
    model.save_pretrained(folder)
    save_tokenizer(folder)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """`tiny_folder(family)` is the folder of a tiny random model; each family (see FAMILIES) is built once."""
    folders: dict[str, Path] = {}

    def build(family: str = "qwen3") -> Path:
        if family not in folders:
            folder = tmp_path_factory.mktemp(family)
            save_tiny_model(family, folder)
            folders[family] = folder
        return folders[family]

    return build


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The embedded model's folder (fetched and converted once into the user's cache)."""
    from helios.model.files import resolve_model

    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site: the folder that HELIOS_SITE names (`make test` has just built it), else built here, strictly."""
    if built := os.environ.get("HELIOS_SITE"):
        return Path(built)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder
