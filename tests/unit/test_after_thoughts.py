"""A grammar that begins behind the thoughts, and one choice's way through the scheduler to its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from helios.engine.scheduler import Scheduler
from helios.model.tokenizer import Tokenizer
from helios.serve.grammar import response_grammar
from helios.serve.parse import parse_whole, parser_for
from helios.serve.reasoning import think_tags
from helios.serve.structured import Compiler
from tests.unit.structured_cases import (
    allowed_ids,
    as_format,
    closing,
    compiled,
    compiler_for,
    make_request,
    save_small_tokenizer,
    tiny_engine,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("thinking")
    save_small_tokenizer(folder, thinks=True)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def scheduler(tokenizer: Tokenizer) -> Iterator[Scheduler]:
    made = Scheduler(lambda: tiny_engine(tokenizer), max_waiting=8)
    made.start()
    made.wait_ready()
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[Compiler]:
    made = compiler_for(tiny_engine(tokenizer))
    yield made
    made.close()


def test_places_of_a_thought(compiler: Compiler, tokenizer: Tokenizer) -> None:
    tags, grammar = think_tags(tokenizer), response_grammar(as_format(SCHEMA))
    assert tags is not None
    (brace, word) = (tokenizer.encode(text)[0] for text in ("{", "x"))
    closed = compiled(compiler, grammar)
    neither, opened = (compiled(compiler, grammar, thoughts=state) for state in ("neither", "open"))
    assert allowed_ids(neither) == allowed_ids(closed) | {tags.think}
    straight, ends = neither.fork(), set(tokenizer.eos_token_ids)
    assert not straight.accept(brace) and tags.think not in allowed_ids(straight)
    assert not neither.accept(tags.think)
    for thinking in (neither, opened):
        free = allowed_ids(thinking)
        assert {word, brace, tags.thought} <= free and not free & ends, "no end inside the block"
        thinking.accept(word)
        copy = thinking.fork()
        thinking.accept(tags.thought)
        assert allowed_ids(thinking) == allowed_ids(closed)
        assert allowed_ids(copy) == free, "a fork stays where it was"


def test_a_model_without_tags_has_no_thoughts(tmp_path: Path) -> None:
    save_small_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    compiler = compiler_for(tiny_engine(tokenizer))
    grammar = response_grammar(as_format(SCHEMA))
    assert allowed_ids(compiled(compiler, grammar, thoughts="open")) == allowed_ids(compiled(compiler, grammar))
    compiler.close()


@pytest.mark.parametrize("state", ["closed", "open", "neither"])
def test_the_answer_behind_the_thoughts_parses(
    scheduler: Scheduler, compiler: Compiler, tokenizer: Tokenizer, state: str
) -> None:
    tags = think_tags(tokenizer)
    assert tags is not None
    prompt = [1, 5, 6, *{"open": [tags.think], "closed": [tags.think, tags.thought], "neither": []}[state]]
    constraint = compiled(compiler, response_grammar(as_format(SCHEMA)), thoughts=state)
    bias = {**closing(tokenizer), tags.think: 9.0, tags.thought: 9.0}
    bias = {**bias, **dict.fromkeys(tokenizer.eos_token_ids, -50.0)} if state == "closed" else bias
    job = scheduler.submit(make_request(f"job-{state}", prompt, constraint, 900, seed=3, n=3, logit_bias=bias))
    found = [("", "")] * 3
    for event in job.events():
        found[event.index] = found[event.index][0] + event.text, event.finish_reason or ""
    thoughts = []
    for text, reason in found:
        parser = parser_for(tokenizer, prompt, tools=False)
        message = parse_whole(parser, text).as_json() if parser else {"content": text}
        assert reason == "stop"
        jsonschema.validate(json.loads(message["content"]), SCHEMA)
        thoughts.append(message.get("reasoning_content"))
    assert any(thoughts) == (state != "closed")
