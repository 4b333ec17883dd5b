# Generated from notebooks/01_model_files.ipynb by `helios export`; edit the notebook.
"""The tokenizer inside a GGUF file, written as the tokenizer.json and tokenizer_config.json that all else reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from helios.model.errors import ModelError, damaged
from helios.model.gguf import GGUFFile, write_json

__all__ = [
    "CONTROL",
    "ELSEWHERE",
    "END_OF_TURN",
    "LLAMA3_SPLIT",
    "QWEN_SPLIT",
    "USER_DEFINED",
    "build_tokenizer",
    "write_tokenizer",
]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
ELSEWHERE = "use the model's Hugging Face repository"


def _pre_tokenizer(kind: str) -> Any:
    """How text is cut into words before merging, by GGUF's name of the rule."""
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
    raise ModelError(f"This GGUF's tokenizer cuts words by the rule {kind!r}, Helios knows {known}: {ELSEWHERE}.")


CONTROL, USER_DEFINED = 3, 4  # token types of the GGUF specification


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The byte-level BPE tokenizer described by the file's metadata; ModelError for other kinds."""
    model, kind = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre") or "default"
    if model != "gpt2":
        raise ModelError(f"This GGUF's tokenizer is of kind {model!r}, Helios reads byte-level BPE: {ELSEWHERE}.")
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
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
    bos, wanted = file.get("tokenizer.ggml.bos_token_id"), file.get("tokenizer.ggml.add_bos_token")
    if bos is not None and (kind == "llama-bpe" if wanted is None else wanted):
        begin = tokens[bos]
        template = processors.TemplateProcessing(f"{begin} $A", f"{begin} $A $B", [(begin, bos)])
        tokenizer.post_processor = template
    return tokenizer


END_OF_TURN = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


def _end_ids(file: GGUFFile, tokens: list[str]) -> list[int]:
    """Every token that ends an answer: those the metadata names, and control tokens known by their spelling."""
    named = [file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    types = file.get("tokenizer.ggml.token_type")
    spelled = [number for number, token in enumerate(tokens) if types[number] == CONTROL and token in END_OF_TURN]
    return list(dict.fromkeys(number for number in [*named, *spelled] if number is not None))


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into `folder`."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    with damaged(file.path):
        tokenizer, tokens = build_tokenizer(file), list(file.get("tokenizer.ggml.tokens"))
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            number = file.get(f"tokenizer.ggml.{key}_token_id")
            settings[f"{name}_token"] = None if number is None else tokens[number]
        settings["model_max_length"] = file.hyper("context_length")
        settings["chat_template"] = file.get("tokenizer.chat_template")
        ends = {"bos_token_id": file.get("tokenizer.ggml.bos_token_id"), "eos_token_id": _end_ids(file, tokens)}
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "generation_config.json", ends)
