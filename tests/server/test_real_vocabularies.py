"""Grammars over the vocabularies of Qwen3, Llama 3, DeepSeek-V3 and Gemma 3, each with a tiny random model."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from helios.model.tokenizer import Tokenizer
from helios.serve.grammar import response_grammar, tool_grammar
from helios.serve.reasoning import think_tags
from helios.serve.structured import Compiler
from tests.server.test_real_templates import NAMES, load, pytestmark  # noqa: F401
from tests.unit.structured_cases import allowed_ids, as_format, closing, compiled, follow, make_request, run, text_of
from tests.unit.structured_cases import tiny_engine as engine_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ä": {"type": "string", "maxLength": 12}, "n": {"type": "array", "items": {"enum": [1, "漢😀"]}}},
    "required": ["ä", "n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"q": {}}}}}


@pytest.mark.parametrize("name", NAMES)
def test_a_real_vocabulary(name: str) -> None:
    tokenizer: Tokenizer = load(name)
    engine = engine_of(tokenizer)
    vocab = engine.model.config.vocab_size
    compiler = Compiler(tokenizer, vocab, eos_token_ids=tokenizer.eos_token_ids)
    constraint = compiled(compiler, response_grammar(as_format(SCHEMA)))
    assert follow(constraint.fork(), tokenizer.encode('{"ä": "x é", "n": [1, "漢😀"]}', add_special_tokens=False))
    request = make_request("x", [1, 2, 3], constraint, 300, n=2, seed=1, logit_bias=closing(tokenizer))
    for ids, reason, error in run(engine, [request]).values():
        assert error is None and reason == "stop"
        jsonschema.validate(json.loads(text_of(engine, ids)), SCHEMA)
    anything = allowed_ids(compiled(compiler, response_grammar({"guided_regex": "(?s:.*)"})))
    special = {number for number in range(tokenizer.vocab_size) if tokenizer.is_special(number)}
    assert anything & special == set(tokenizer.eos_token_ids) and max(anything) < tokenizer.vocab_size
    compiler.close()


@pytest.mark.parametrize("name", NAMES)
def test_indentation_in_a_real_vocabulary(name: str) -> None:
    tokenizer = load(name)
    compiler = Compiler(tokenizer, tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    constraint = compiled(compiler, response_grammar(as_format(SCHEMA)))
    assert follow(constraint, tokenizer.encode('{\n  "ä": "",\n  "n": []\n}', add_special_tokens=False))
    compiler.close()


def test_qwen3_may_open_a_call_with_its_own_token_and_think_first() -> None:
    tokenizer = load("qwen3")
    compiler = Compiler(tokenizer, tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    (call,) = tokenizer.encode("<tool_call>", add_special_tokens=False, parse_special=True)
    tags = think_tags(tokenizer)
    assert tags is not None
    forced = tool_grammar([TOOL], None, True)
    assert call in allowed_ids(compiled(compiler, forced))
    thinking = compiled(compiler, forced, thoughts="neither")
    assert {call, tags.think} <= allowed_ids(thinking)
    text = '<think>\nHm.\n</think><tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'
    assert not follow(thinking, tokenizer.encode(text, add_special_tokens=False, parse_special=True))
    assert set(tokenizer.eos_token_ids) <= allowed_ids(thinking), "complete, another call may follow"
    compiler.close()
