"""Structured output through the engine: random weights write garbage, so what parses was kept in order by its mask."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex

from helios.engine.engine import Engine
from helios.model.tokenizer import Tokenizer
from helios.serve.errors import APIError
from helios.serve.grammar import response_grammar, tool_grammar
from helios.serve.structured import Compiler
from helios.serve.toolcalls import CallParser
from tests.unit.structured_cases import (
    allowed_ids,
    as_format,
    closing,
    compiled,
    compiler_for,
    dumps,
    follow,
    make_request,
    run,
    text_of,
    tiny_engine,
)

TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["train", "bus", None]},
        "nights": {"type": "integer", "minimum": 1, "maximum": 30},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,5}$"}, "maxItems": 3},
    },
    "required": ["city", "kind", "nights", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(embedded: Path) -> Engine:
    return tiny_engine(Tokenizer.from_folder(embedded))


@pytest.fixture(scope="module")
def compiler(engine: Engine) -> Iterator[Compiler]:
    made = compiler_for(engine)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> Tokenizer:
    assert engine.tokenizer is not None
    return engine.tokenizer


def test_n_choices_beside_free_requests_all_keep_to_their_schema(
    engine: Engine, compiler: Compiler, tokenizer: Tokenizer
) -> None:
    constraint = compiled(compiler, response_grammar(as_format(TRIP)))
    prompt, bias = tokenizer.encode("word " * 300), closing(tokenizer)
    requests = [
        make_request("trip", prompt, constraint, n=3, seed=1, logit_bias=bias),
        make_request("free", prompt, None, 40, n=2, seed=2),
        make_request("again", prompt, constraint, seed=3, logit_bias=bias),
        make_request("greedy", prompt[:7], constraint, temperature=0.0, logit_bias=bias),
    ]
    answers = run(engine, requests)
    texts = {}
    for key, (ids, reason, error) in answers.items():
        assert error is None
        if key[0] == "free":
            assert reason == "length" and len(ids) == 40
            continue
        assert reason == "stop", key
        texts[key] = text_of(engine, ids)
        jsonschema.validate(json.loads(texts[key]), TRIP)
    assert len(texts) == 5 and len({texts["trip", i] for i in range(3)}) == 3, "choices go their own ways"
    alone = run(engine, [requests[0]])
    assert engine.stats()["cached_tokens_total"] > 0
    assert [alone["trip", i] for i in range(3)] == [answers["trip", i] for i in range(3)], "company changed an answer"


def test_free_requests_are_what_they_were(engine: Engine, compiler: Compiler, tokenizer: Tokenizer) -> None:
    constraint = compiled(compiler, response_grammar(as_format(TRIP)))
    free = make_request("free", [5, 6, 7], None, 30, seed=9)
    alone = run(engine, [free])
    beside = run(engine, [make_request("trip", [5, 6, 7], constraint, seed=1, n=3), free])
    assert beside["free", 0] == alone["free", 0]


def test_an_answer_is_cut_by_length_and_says_so(engine: Engine, compiler: Compiler) -> None:
    constraint = compiled(compiler, response_grammar({"guided_regex": "[a-z ]{5000}"}))
    ids, reason, _ = run(engine, [make_request("long", [1, 2], constraint, 20, seed=4)])["long", 0]
    assert reason == "length" and regex.fullmatch("[a-z ]{5000}", text_of(engine, ids), partial=True)


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_choice": ["yes", "no", "don't know", 'né\n"quoted"']}, 'yes|no|don\'t know|né\n"quoted"'),
        ({"guided_regex": r"\d{4}-\d\d-\d\d"}, r"\d{4}-\d\d-\d\d"),
        ({"structured_outputs": {"regex": "(ab|ba){3}"}}, "(ab|ba){3}"),
        ({"guided_grammar": 'start: "a" start "b" | "c"'}, "a(a(a.*b|c)b|c)b|c"),
        ({"guided_grammar": 'root ::= ("x" | "y") root | "z"'}, "[xy]*z"),
    ],
)
def test_texts_that_are_not_json(engine: Engine, compiler: Compiler, body: dict[str, Any], pattern: str) -> None:
    constraint = compiled(compiler, response_grammar(body))
    answers = run(engine, [make_request("x", [1, 2, 3], constraint, seed=5, n=8)])
    for ids, reason, error in answers.values():
        assert reason == "stop" and error is None
        assert regex.fullmatch(pattern, text_of(engine, ids)), text_of(engine, ids)


def test_json_object_means_an_object(engine: Engine, compiler: Compiler, tokenizer: Tokenizer) -> None:
    constraint = compiled(compiler, response_grammar({"response_format": {"type": "json_object"}}))
    opening = {tokenizer.token_text(number) for number in allowed_ids(constraint)}
    assert opening == {"{", '{"', "{}"}, "no blank, no list, no bare value"
    request = make_request("x", [1], constraint, seed=6, n=8, logit_bias=closing(tokenizer))
    finished = [text_of(engine, ids) for ids, reason, _ in run(engine, [request]).values() if reason == "stop"]
    assert finished and all(isinstance(json.loads(text), dict) for text in finished)


def test_ends_are_allowed_exactly_when_the_text_is_complete(compiler: Compiler, tokenizer: Tokenizer) -> None:
    constraint = compiled(compiler, response_grammar({"guided_regex": "(ab){1,2}"}))
    end, (a, b) = set(tokenizer.eos_token_ids), (tokenizer.encode(letter)[0] for letter in "ab")
    seen = []
    for token in (a, b, a):
        seen.append(bool(end & allowed_ids(constraint)))
        assert not constraint.accept(token)
    assert seen == [False, False, True] and not end & allowed_ids(constraint)
    assert constraint.accept(b), "nothing can follow"


def test_control_tokens_and_padding_are_never_allowed(compiler: Compiler, tokenizer: Tokenizer) -> None:
    anything = compiled(compiler, response_grammar({"guided_regex": r"(?s:.*)"}))
    allowed = allowed_ids(anything)
    special = {number for number in range(tokenizer.vocab_size) if tokenizer.is_special(number)}
    assert allowed & special == set(tokenizer.eos_token_ids)
    assert max(allowed) < tokenizer.vocab_size and len(allowed) > 48_000
    for named in ("<|im_end|>", "<|im_start|>", "<[2]>"):
        with pytest.raises(APIError):
            compiled(compiler, response_grammar({"guided_grammar": f"start: {named} /[a-z]+/"}))
    later = compiled(compiler, response_grammar({"guided_grammar": 'start: "a" <[2]> "b"'}))
    later.accept(tokenizer.encode("a")[0])
    with pytest.raises(ValueError, match="leaves no token"):
        later.mask()


@pytest.mark.parametrize("pattern", ["[a-c]+(de|df)*[0-9]?", "(yes|no|yellow)( please| thanks)*!", "x{2,5}[^x]*"])
def test_masks_are_what_trying_every_token_finds(compiler: Compiler, tokenizer: Tokenizer, pattern: str) -> None:
    constraint, text = compiled(compiler, response_grammar({"guided_regex": pattern})), ""
    pieces = {number: tokenizer.token_bytes(number) for number in range(tokenizer.vocab_size)}
    ascii_pieces = {n: piece.decode() for n, piece in pieces.items() if piece.isascii() and not tokenizer.is_special(n)}
    for step in range(4):
        tried = {n for n, piece in ascii_pieces.items() if regex.fullmatch(pattern, text + piece, partial=True)}
        allowed = allowed_ids(constraint)
        assert {n for n in allowed if n in ascii_pieces} == tried
        ends = bool(allowed & set(tokenizer.eos_token_ids))
        assert ends == bool(regex.fullmatch(pattern, text))
        if not tried:
            break
        token = sorted(tried)[(7 * step) % len(tried)]
        constraint.accept(token)
        text += ascii_pieces[token]


def test_a_fork_goes_its_own_way(compiler: Compiler, tokenizer: Tokenizer) -> None:
    first = compiled(compiler, response_grammar({"guided_choice": ["left turn", "right turn"]}))
    second = first.fork()
    assert follow(first, tokenizer.encode("left turn"))
    third = second.fork()
    assert follow(second, tokenizer.encode("right turn"))
    assert follow(third, tokenizer.encode("left turn"))


def test_blanks_between_tokens_are_bounded(compiler: Compiler, tokenizer: Tokenizer) -> None:
    def takes(text: str) -> bool:
        constraint = compiled(compiler, response_grammar(as_format({"type": "object"})))
        try:
            return follow(constraint, tokenizer.encode(text))
        except (AssertionError, ValueError):
            return False

    value = {"a": [1, {"b": None}], "c": "x  y\n"}
    assert takes(json.dumps(value)) and takes(json.dumps(value, indent=4)) and takes(json.dumps(value).replace(" ", ""))
    assert not takes('{  "a": 1}') and not takes('{\n\n"a": 1}') and not takes(' {"a": 1}')


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"days": {"$ref": "#/$defs/days"}, "unit": {"enum": ["C", "F"]}},
                "required": ["days", "unit"],
                "additionalProperties": False,
                "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            },
        },
    },
    {"type": "function", "function": {"name": 'an "odd" name', "parameters": {"properties": {"q": {"not": {}}}}}},
    {"type": "function", "function": {"name": "bare"}},
]


@pytest.mark.parametrize(("name", "parallel"), [(None, True), (None, False), ("weather", True), ("bare", False)])
def test_forced_calls_parse(
    engine: Engine, compiler: Compiler, tokenizer: Tokenizer, name: str | None, parallel: bool
) -> None:
    constraint = compiled(compiler, tool_grammar(TOOLS, name, parallel))
    request = make_request("x", [1, 2], constraint, 400, seed=7, n=6, logit_bias=closing(tokenizer))
    counts = set()
    for ids, reason, error in run(engine, [request]).values():
        assert error is None
        if reason == "length":
            continue
        parser = CallParser(parallel=True)
        parts = parser.push(text_of(engine, ids)) + parser.finish()
        assert not [part for part in parts if isinstance(part, str) and part.strip()], "text beside the calls"
        calls: dict[int, list[str]] = {}
        for part in parts:
            if not isinstance(part, str):
                calls.setdefault(part.index, [part.name or "", ""])[1] += part.arguments
        counts.add(len(calls))
        for called, arguments in calls.values():
            assert called == name or (name is None and called in {tool["function"]["name"] for tool in TOOLS})
            if called == "weather":
                jsonschema.validate(json.loads(arguments), TOOLS[0]["function"]["parameters"])
            assert isinstance(json.loads(arguments), dict)
    assert counts and (counts == {1} or (parallel and name is None))


def test_models_can_write_their_own_form_of_a_call(compiler: Compiler, tokenizer: Tokenizer) -> None:
    constraint = compiled(compiler, tool_grammar(TOOLS, None, True))
    first = dumps({"name": "weather", "arguments": {"days": 3, "unit": "C"}})
    second = dumps({"name": 'an "odd" name', "arguments": {"q": 1}})
    text = f"<tool_call>\n{first}\n</tool_call>\n<tool_call>\n{second}\n</tool_call>"
    assert not follow(constraint, tokenizer.encode(text)), "another call may follow"
    assert set(tokenizer.eos_token_ids) & allowed_ids(constraint)


def test_a_vocabulary_of_single_bytes_and_one_without_an_end(tiny_folder: Callable[[str], Path]) -> None:
    engine = tiny_engine(Tokenizer.from_folder(tiny_folder("qwen3")))
    assert engine.tokenizer is not None
    tokenizer = engine.tokenizer
    for stops in (tokenizer.eos_token_ids, ()):
        compiler = Compiler(tokenizer, engine.model.config.vocab_size, eos_token_ids=stops)
        constraint = compiled(compiler, response_grammar(as_format({"const": {"a": ["ä€😀", True]}})))
        ((ids, reason, _),) = run(engine, [make_request("x", [1], constraint, seed=1)]).values()
        assert reason == "stop" and json.loads(text_of(engine, ids)) == {"a": ["ä€😀", True]}
        number = compiled(compiler, response_grammar({"guided_regex": "[0-9]+"}))
        number.accept(tokenizer.encode("7")[0])
        ends = allowed_ids(number) - {tokenizer.encode(digit)[0] for digit in "0123456789"}
        assert ends == set(stops)
        compiler.close()
