"""What a request's fields ask of its answer, and what is refused, by name, before anything is compiled or by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helios.model.tokenizer import Tokenizer
from helios.serve.errors import APIError
from helios.serve.grammar import MAX_SOURCE, Grammar, explain, response_grammar, tool_grammar
from helios.serve.structured import Compiler
from tests.unit.structured_cases import as_format, compiled, follow


@pytest.mark.parametrize(
    "body",
    [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"guided_json": None}]
    + [{"structured_outputs": {}}, {"structured_outputs": {"json": None, "json_object": False, "regex": None}}],
)
def test_nothing_asked_is_no_grammar(body: dict[str, Any]) -> None:
    assert response_grammar(body) is None


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (as_format({"type": "string"}), "json_schema"),
        (as_format({}, strict=True), "json_schema"),
        ({"guided_json": {"type": "integer"}}, "json_schema"),
        ({"guided_json": '{"type": "integer"}'}, "json_schema"),
        ({"guided_regex": "a+"}, "regex"),
        ({"guided_choice": ["a", "b"]}, "choice"),
        ({"guided_grammar": 'start: "a"'}, "lark"),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, "regex"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
        ({"structured_outputs": {"choice": ["a"], "grammar": None}}, "choice"),
    ],
)
def test_each_field_means_one_kind(body: dict[str, Any], kind: str) -> None:
    grammar = response_grammar(body)
    assert grammar is not None and grammar.kind == kind
    assert grammar.param in body and hash(grammar) == hash(response_grammar(body)) and grammar == response_grammar(body)


def test_the_clients_own_options_of_the_compiler_do_not_count() -> None:
    grammar = response_grammar(
        as_format({"type": "object", "x-guidance": {"lenient": True, "whitespace_pattern": ".*"}})
    )
    assert grammar is not None
    assert json.loads(grammar.source)["x-guidance"] == {"whitespace_pattern": r" |\n {0,16}", "lenient": False}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format"),
        (as_format({}, strict="yes"), "response_format"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_json": '{"maximum": NaN}'}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_regex": "a" * (MAX_SOURCE + 1)}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": "abc"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": {}}, "guided_grammar"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_what_makes_no_sense_is_a_400_that_names_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(APIError) as caught:
        response_grammar(body)
    assert caught.value.status == 400 and caught.value.param == param and f"`{param}" in caught.value.message
    assert len(caught.value.message) < 300


@pytest.fixture(scope="module")
def tokenizer(embedded: Path) -> Tokenizer:
    return Tokenizer.from_folder(embedded)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[Compiler]:
    made = Compiler(tokenizer, tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, "`not`"),
        ({"type": "array", "uniqueItems": True}, "`uniqueItems`"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "`if`"),
        ({"propertyNames": {"pattern": "a"}}, "`propertyNames`"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "`oneOf`"),
        ({"type": "string", "format": "isbn"}, "`format` does not know 'isbn'"),
        ({"$ref": "http://127.0.0.1:9/x.json"}, "`$ref`"),
        ({"$ref": "file:///etc/passwd"}, "`$ref`"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "\\bword"}, "look-around"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "nothing can satisfy this"),
        ({"enum": []}, "nothing can satisfy this"),
        ({"$ref": "#"}, "refers to itself"),
        ({"type": "tuple"}, "tuple"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(compiler: Compiler, schema: dict[str, Any], named: str) -> None:
    with pytest.raises(APIError) as caught:
        compiled(compiler, response_grammar(as_format(schema, strict=True)))
    assert caught.value.status == 400 and caught.value.param == "response_format"
    assert named in caught.value.message, caught.value.message
    with pytest.raises(APIError) as again:
        compiled(compiler, response_grammar({"guided_json": schema}))
    assert again.value.param == "guided_json", "refusals are kept, fields are not"


def test_who_says_not_strict_gets_what_can_be_enforced(compiler: Compiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    constraint = compiled(compiler, response_grammar(as_format(schema, strict=False)))
    assert follow(constraint, tokenizer.encode("[1, 1]"))


def test_a_property_may_be_called_like_a_keyword(compiler: Compiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"not": {"type": "null"}, "format": {"const": 1}}, "required": ["format"]}
    constraint = compiled(compiler, response_grammar(as_format(schema, strict=True)))
    follow(constraint, tokenizer.encode('{"not": null, "format": 1}'))


def test_explanations_reveal_nothing_of_the_library() -> None:
    panic = "panic: assertion failed\n<backtrace>\n 0: /root/.cargo/registry/src/thing.rs"
    assert explain(panic, "guided_json").message == "`guided_json` cannot be compiled."
    assert len(explain("x" * 10_000, "guided_json").message) < 300


def test_tool_grammars_are_bounded_too() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * MAX_SOURCE]}}}
    with pytest.raises(APIError, match="`tools`"):
        tool_grammar([tool], None, True)
    assert isinstance(tool_grammar([{"type": "function", "function": {"name": "f"}}], "f", False), Grammar)
