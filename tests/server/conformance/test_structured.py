"""Structured output: the text is what was asked for, or it is cut off and says so."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conformance.marks import helios_only, row, vllm_bug
from tests.server.live import CHAT, COMPLETE, Target

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "born": {"enum": [1815, 1912]}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
ASK = "Who wrote the first program? Answer in JSON."


def schema(of: Any, **extra: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": of, **extra}}


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "born"} and person["name"] in ("Ada", "Alan") and person["born"] in (1815, 1912)


def test_text_is_no_constraint(target: Target) -> None:
    assert target.said(response_format={"type": "text"}) == target.said()


@pytest.mark.parametrize("strict", [None, True, False])
def test_json_schema(target: Target, strict: bool | None) -> None:
    wanted = schema(PERSON) if strict is None else schema(PERSON, strict=strict)
    choice = target.chat(ASK, response_format=wanted, max_tokens=100)["choices"][0]
    assert choice["finish_reason"] == "stop"
    check_person(choice["message"]["content"])


def test_json_schema_streamed_equals_whole(target: Target) -> None:
    talk = [{"role": "user", "content": ASK}]
    stream = target.stream(messages=talk, response_format=schema(PERSON), max_tokens=100)
    check_person(stream.text())
    assert stream.text() == target.said(ASK, response_format=schema(PERSON), max_tokens=100)


def test_json_schema_of_several_choices(target: Target) -> None:
    asked: dict[str, Any] = {"n": 3, "temperature": 1.5, "seed": 2, "max_tokens": 100}
    for choice in target.chat(ASK, response_format=schema(PERSON), **asked)["choices"]:
        check_person(choice["message"]["content"])


def test_json_schema_in_completions(target: Target) -> None:
    check_person(target.text(ASK, response_format=schema(PERSON), max_tokens=100))


def test_json_schema_beside_plain_requests(target: Target) -> None:
    plain = target.text(max_tokens=16, ignore_eos=True)
    with ThreadPoolExecutor(4) as pool:
        bound = [pool.submit(target.said, ASK, response_format=schema(PERSON), max_tokens=100) for _ in range(3)]
        free = pool.submit(target.text, max_tokens=16, ignore_eos=True)
        for each in bound:
            check_person(each.result())
        assert free.result()[:10] == plain[:10]


def test_json_schema_with_a_cached_prompt(target: Target) -> None:
    """The prompt's first pages come from the cache the second time: the grammar starts behind them either way."""
    long = "Facts. " * 300 + ASK
    for _ in range(2):
        check_person(target.said(long, response_format=schema(PERSON), max_tokens=100))


def test_json_schema_cut_off_is_length(target: Target) -> None:
    choice = target.chat(ASK, response_format=schema(PERSON), max_tokens=3)["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("of", "check"),
    [
        row("an integer", {"type": "integer", "minimum": 1, "maximum": 9}, lambda value: 1 <= value <= 9),
        row("a boolean", {"type": "boolean"}, lambda value: isinstance(value, bool)),
        row("a constant", {"const": "yes"}, lambda value: value == "yes"),
        row("a list", {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2}, lambda v: v == [1, 1]),
        row("either", {"anyOf": [{"const": 1}, {"const": "a"}]}, lambda value: value in (1, "a")),
        row("a reference", {"$ref": "#/$defs/d", "$defs": {"d": {"enum": ["x", "y"]}}}, lambda v: v in ("x", "y")),
        row("a string of a pattern", {"type": "string", "pattern": "^[ab]{3}$"}, lambda v: re.fullmatch("[ab]{3}", v)),
    ],
)  # fmt: skip
def test_json_schema_kinds(target: Target, of: Any, check: Any) -> None:
    text = target.said("Answer.", response_format=schema(of), max_tokens=40)
    assert check(json.loads(text)), text


@pytest.mark.parametrize("streamed", [False, True])
def test_json_object(target: Target, streamed: bool) -> None:
    asked: dict[str, Any] = {"response_format": {"type": "json_object"}, "max_tokens": 80}
    if streamed:
        stream = target.stream(messages=[{"role": "user", "content": ASK}], **asked)
        text, reason = stream.text(), stream.finish()
    else:
        choice = target.chat(ASK, **asked)["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert text.lstrip().startswith("{")
    if reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert reason == "length"


CONSTRAINTS: list[Any] = [
    row("json", "json", PERSON, lambda text: check_person(text) is None),
    row("regex", "regex", "[0-9]{3}-[0-9]{2}", lambda text: re.fullmatch(r"\d{3}-\d{2}", text)),
    row("choice", "choice", ["red", "green", "blue"], lambda text: text in ("red", "green", "blue")),
]


@pytest.mark.parametrize(("kind", "value", "check"), CONSTRAINTS)
def test_structured_outputs(target: Target, kind: str, value: Any, check: Any) -> None:
    assert check(target.said("Go.", structured_outputs={kind: value}, max_tokens=60))


@helios_only("the older names")
@pytest.mark.parametrize(("kind", "value", "check"), CONSTRAINTS)
def test_guided(target: Target, kind: str, value: Any, check: Any) -> None:
    assert check(target.said("Go.", **{f"guided_{kind}": value}, max_tokens=60))
    assert check(target.text("Go.", **{f"guided_{kind}": value}, max_tokens=60))


@helios_only("a grammar is written in the syntax of its library")
@pytest.mark.parametrize("extra", ["guided_grammar", "structured_outputs"])
def test_grammar(target: Target, extra: str) -> None:
    lark = 'start: "a" ("b" | "c") "d"\n'
    wanted: Any = lark if extra == "guided_grammar" else {"grammar": lark}
    assert target.said("Go.", **{extra: wanted}, max_tokens=10) in ("abd", "acd")


BAD: list[Any] = [
    row("schema missing", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    row("schema null", {"response_format": {"type": "json_schema", "json_schema": None}}, "response_format"),
    row("schema is text", {"response_format": schema("x")}, "response_format"),
    row("two constraints", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
]
BAD_INSIDE: list[Any] = [
    row("unknown type in it", {"response_format": schema({"type": "smell"})}, "response_format"),
    row("a dangling reference", {"response_format": schema({"$ref": "#/$defs/none"})}, "response_format"),
    row("a bad pattern", {"response_format": schema({"type": "string", "pattern": "("})}, "response_format"),
    row("a bad regex", {"structured_outputs": {"regex": "(["}}, "structured_outputs"),
    row("no choice", {"structured_outputs": {"choice": []}}, "structured_outputs"),
    row("a bad grammar", {"structured_outputs": {"grammar": "start: ((("}}, "structured_outputs"),
    row("not an object", {"structured_outputs": "json"}, "structured_outputs", marks=vllm_bug("500")),
]


def late(each: Any) -> Any:
    """The row, for a stream of vLLM's: it has begun with 200 when a grammar turns out to be none."""
    return pytest.param(*each.values, id=each.id, marks=vllm_bug("errors of a grammar come within the stream"))


@pytest.mark.parametrize(("extra", "field"), BAD + BAD_INSIDE)
def test_refused(target: Target, extra: dict[str, Any], field: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **extra}
    target.refused(target.post(CHAT, **body), param=field)


@pytest.mark.parametrize(("extra", "field"), BAD + [late(each) for each in BAD_INSIDE])
def test_refused_before_the_stream(target: Target, extra: dict[str, Any], field: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **extra}
    target.refused(target.post(CHAT, stream=True, **body), param=field)


HOSTILE = [
    row("nested repetition", {"type": "string", "pattern": "((a{1,300}){1,300}){1,300}b"}),
    row("a long string", {"type": "string", "minLength": 10**6, "maxLength": 10**6}),
    row("a long list", {"type": "array", "items": {"type": "integer"}, "minItems": 10**5}),
    row("endless reference", {"$ref": "#"}),
    row("wide", {"enum": [f"value number {number}" for number in range(20_000)]}),
    row("deep", {"allOf": [{"anyOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(20)]}] * 20}),
]


@helios_only("they would hang others: vllm#14151, #54003")
@pytest.mark.parametrize("of", HOSTILE)
def test_a_hostile_schema_holds_nobody_up(target: Target, of: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        answer = pool.submit(target.post, COMPLETE, prompt="Go.", max_tokens=2, response_format=schema(of))
        while not answer.done():
            assert target.client.get("/health", timeout=5).status_code == 200
            assert target.text(max_tokens=1)
            assert time.monotonic() - started < 40
        assert answer.result().status_code in (200, 400), answer.result().text
