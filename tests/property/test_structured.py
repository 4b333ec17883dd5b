"""Random schemas, garbage models: what is complete satisfies its schema, and what satisfies it can be written."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from helios.engine.engine import Engine
from helios.model.tokenizer import Tokenizer
from helios.serve.errors import APIError
from helios.serve.grammar import response_grammar
from helios.serve.structured import Compiler
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
    save_small_tokenizer,
    text_of,
    tiny_engine,
)

QUIET = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
Pair = tuple[dict[str, Any], Any]
names = st.text('abcä😀 _"\\', min_size=1, max_size=4)
words = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from('"\\/\n\t'), max_size=8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_small_tokenizer(folder)
    return tiny_engine(Tokenizer.from_folder(folder), prefix_cache=True)


@pytest.fixture(scope="module")
def compiler(engine: Engine) -> Any:
    made = compiler_for(engine)
    yield made
    made.close()


def leaves() -> st.SearchStrategy[Pair]:
    """A schema, and a value that satisfies it."""
    text = words.map(lambda w: ({"type": "string"}, w))
    bounded = words.map(lambda w: ({"type": "string", "minLength": len(w) // 2, "maxLength": len(w)}, w))
    number = st.integers(-999, 999).map(lambda n: ({"type": "integer", "minimum": n - 5, "maximum": n + 3}, n))
    real = st.integers(-99, 99).map(lambda n: ({"type": "number", "exclusiveMinimum": n - 1}, n / 4 if n < 0 else n))
    choice = st.lists(words | st.none() | st.booleans(), min_size=1, max_size=4).map(lambda v: ({"enum": v}, v[-1]))
    constant = st.dictionaries(names, st.integers(0, 9), max_size=2).map(lambda v: ({"const": v}, v))
    pattern = st.sampled_from([("^[a-c]{2,4}$", "abc"), ("^\\d+(-\\d+)?$", "12-3"), ("x|yy", "yy"), ("^é+$", "éé")])
    patterned = pattern.map(lambda p: ({"type": "string", "pattern": p[0]}, p[1]))
    formatted = st.sampled_from([("date", "2024-02-29"), ("uuid", "123e4567-e89b-12d3-a456-426614174000")])
    dated = formatted.map(lambda p: ({"type": "string", "format": p[0]}, p[1]))
    simple = st.sampled_from(
        [({"type": "boolean"}, True), ({"type": "null"}, None), ({"type": ["null", "integer"]}, 7)]
    )
    return st.one_of(text, bounded, number, real, choice, constant, patterned, dated, simple)


@st.composite
def objects(draw: Any, inner: st.SearchStrategy[Pair]) -> Pair:
    fields = draw(st.dictionaries(names, inner, max_size=4))
    required = [name for name in fields if draw(st.booleans())]
    value = {name: pair[1] for name, pair in fields.items() if name in required or draw(st.booleans())}
    schema = {"type": "object", "properties": {name: pair[0] for name, pair in fields.items()}, "required": required}
    if draw(st.booleans()) or not fields:
        schema["additionalProperties"] = False
    return schema, value


@st.composite
def lists(draw: Any, inner: st.SearchStrategy[Pair]) -> Pair:
    schema, value = draw(inner)
    count = draw(st.integers(0, 3))
    return {"type": "array", "items": schema, "minItems": count // 2, "maxItems": count + 1}, [value] * count


@st.composite
def either(draw: Any, inner: st.SearchStrategy[Pair]) -> Pair:
    pairs = draw(st.lists(inner, min_size=1, max_size=3))
    return {"anyOf": [pair[0] for pair in pairs]}, draw(st.sampled_from(pairs))[1]


pairs = st.recursive(leaves(), lambda inner: objects(inner) | lists(inner) | either(inner), max_leaves=5)


def taken(compiler: Compiler, schema: dict[str, Any]) -> Any:
    """A constraint; schemas that the compiler refuses say so in a 400 and are no examples."""
    try:
        return compiled(compiler, response_grammar(as_format(schema)))
    except APIError as error:
        assert error.status == 400 and error.param == "response_format"
        assume(False)


@QUIET
@given(pairs, st.integers(0, 2**31))
def test_complete_answers_satisfy_their_schema(engine: Engine, compiler: Compiler, pair: Pair, seed: int) -> None:
    schema, _ = pair
    assert engine.tokenizer is not None
    constraint, bias = taken(compiler, schema), closing(engine.tokenizer)
    prompt = [(seed + i) % 700 for i in range(300)]
    requests = [
        make_request("some", prompt, constraint, 400, seed=seed, n=3, logit_bias=bias),
        make_request("free", prompt, None, 8, seed=seed),
        make_request("hot", prompt[:5], constraint, 400, seed=seed, temperature=2.0, logit_bias=bias),
    ]
    for key, (ids, reason, error) in run(engine, requests).items():
        assert error is None
        if key[0] == "free" or reason == "length":
            continue
        text = text_of(engine, ids)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@QUIET
@given(pairs)
def test_satisfying_values_can_be_written_and_then_ended(engine: Engine, compiler: Compiler, pair: Pair) -> None:
    schema, value = pair
    jsonschema.Draft202012Validator(schema).validate(value)
    assert engine.tokenizer is not None
    ends = set(engine.tokenizer.eos_token_ids)
    constraint = taken(compiler, schema)
    copy = constraint.fork()
    assert follow(constraint, engine.tokenizer.encode(dumps(value))) or ends & allowed_ids(constraint)
    if isinstance(value, dict | list):
        pretty = json.dumps(value, ensure_ascii=False, indent=2)
        assert follow(copy, engine.tokenizer.encode(pretty)), "nothing can follow a closed bracket"
