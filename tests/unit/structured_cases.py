"""An engine of a tiny random model, whose text is garbage unless something keeps it in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from helios.engine.config import EngineConfig
from helios.engine.constraint import Constraint
from helios.engine.engine import Engine
from helios.engine.sequence import Request, TokenEvent
from helios.kv.paged import PagedKVCache
from helios.kv.pages import PagePool
from helios.kv.prefix import PrefixCache
from helios.model.config import tiny_config
from helios.model.params import SamplingParams
from helios.model.tokenizer import Tokenizer
from helios.model.transformer import Transformer
from helios.model.weights import random_weights
from helios.serve.grammar import Grammar
from helios.serve.structured import Compiler

PADDING = 40  # ids of the model behind those of the tokenizer


def save_small_tokenizer(folder: Path, thinks: bool = False) -> None:
    """Some 750 tokens learnt from JSON, many of which straddle its borders; `thinks` adds the tags of thoughts."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, special_tokens=["<|pad|>", "<|im_end|>"])
    values = [{"name": f"é {n}", "tags": [n, {"a": None}], "ok": n % 2 == 0, "x": [[-n / 4]]} for n in range(300)]
    raw.train_from_iterator([json.dumps(v, indent=n % 3 or None) for n, v in enumerate(values)], trainer)
    if thinks:
        raw.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))


def tiny_engine(tokenizer: Tokenizer, *, pages: int = 64, **options: Any) -> Engine:
    """Random weights over the tokenizer's vocabulary and some padding; logits are nearly flat."""
    vocab = tokenizer.vocab_size + PADDING
    config = tiny_config(vocab_size=vocab, context=4096, eos_token_ids=tokenizer.eos_token_ids)
    model = Transformer.from_weights(config, random_weights(config, seed=1))
    pool = PagePool(pages + 1)
    cache = PagedKVCache(config.kv_spec, pages + 1, query_heads=config.heads, device="cpu", dtype=torch.float32)
    settings = EngineConfig(debug_checks=True, prefill_chunk_size=512, **options)
    return Engine(model, cache, pool, PrefixCache(pool), settings, tokenizer=tokenizer)


def compiler_for(engine: Engine, **options: Any) -> Compiler:
    """A compiler of this engine's vocabulary."""
    config = engine.model.config
    assert engine.tokenizer is not None
    return Compiler(engine.tokenizer, config.vocab_size, eos_token_ids=config.eos_token_ids, **options)


def compiled(compiler: Compiler, grammar: Grammar | None, **options: Any) -> Constraint:
    """A constraint, from code that is not asynchronous."""
    assert grammar is not None
    return asyncio.run(compiler.constraint(grammar, **options))


def closing(tokenizer: Tokenizer, strength: float = 8.0) -> dict[int, float]:
    """A bias towards what ends texts, lists and objects, so that random ones stay short."""
    texts = ('"', "}", "]", "</tool_call>", "\n</", "1", "true")
    found = {tokenizer.encode(text, add_special_tokens=False)[0]: strength for text in texts}
    return {**found, **dict.fromkeys(tokenizer.eos_token_ids, strength)}


def make_request(
    name: str, prompt: Sequence[int], constraint: Constraint | None = None, max_tokens: int = 600, **params: Any
) -> Request:
    """A sampled request."""
    return Request(name, list(prompt), SamplingParams(max_tokens=max_tokens, **params), constraint=constraint)


def run(engine: Engine, requests: Sequence[Request]) -> dict[tuple[str, int], tuple[list[int], str, str | None]]:
    """Admit all, tick to the end: ids, finish reason and error of each choice."""
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    for request in requests:
        engine.admit(request)
    while engine.running_count:
        for event in engine.tick(0.0):
            events.setdefault((event.request_id, event.index), []).append(event)
    assert engine.pool.free_count + len(engine.prefix or ()) == engine.pool.capacity, "pages leaked"
    return {
        key: ([e.token_id for e in found if e.token_id >= 0], str(found[-1].finish_reason), found[-1].error)
        for key, found in events.items()
    }


def text_of(engine: Engine, ids: Sequence[int]) -> str:
    """The text of an answer, its end token not among it; strict: half a character is an error."""
    assert engine.tokenizer is not None
    shown = [number for number in ids if not engine.tokenizer.is_special(number)]
    return b"".join(engine.tokenizer.token_bytes(number) for number in shown).decode()


def as_format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The request field that asks for `schema`."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def allowed_ids(constraint: Constraint) -> set[int]:
    """The ids in the next mask."""
    mask = constraint.mask()
    assert mask is not None
    return {32 * word + bit for word, value in enumerate(mask.tolist()) for bit in range(32) if value >> bit & 1}


def follow(constraint: Constraint, ids: Sequence[int]) -> bool:
    """Take all of `ids`, each of which must be allowed; whether the last one completed the text."""
    done = False
    for at, token in enumerate(ids):
        assert not done, f"complete before the end: {list(ids)[at:]} is left"
        assert token in allowed_ids(constraint), f"token {at} ({token}) is not allowed"
        done = constraint.accept(token)
    return done


def dumps(value: Any) -> str:
    """JSON as most models write it."""
    return json.dumps(value, ensure_ascii=False)
