# Generated from notebooks/22_structured.ipynb by `helios export`; edit the notebook.
"""What a request asks its answer to look like: its fields become one grammar, and a compiler's complaint a 400."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from helios.serve.errors import APIError, bad_request

__all__ = [
    "BLANKS",
    "COMPLAINTS",
    "GUIDED",
    "Grammar",
    "Kind",
    "MAX_CALLS",
    "MAX_SOURCE",
    "checked",
    "choice_grammar",
    "explain",
    "from_format",
    "guided",
    "response_grammar",
    "schema_grammar",
    "text_grammar",
    "tool_grammar",
]
Kind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True)
class Grammar:
    """The texts that an answer may be: hashable, the key of the compiler's cache.

    `source` is a JSON schema (json_object, json_schema), a regular expression, a JSON list of texts (choice), or a
    grammar in Lark's or llama.cpp's notation. `param` is the field of the request that errors name.
    """

    kind: Kind
    source: str
    param: str = field(default="response_format", compare=False)


MAX_SOURCE = 256 * 1024


def checked(kind: Kind, source: str, param: str) -> Grammar:
    """The grammar, unless it is larger than anybody needs: a 400."""
    if len(source) > MAX_SOURCE:
        raise bad_request(f"`{param}`: at most {MAX_SOURCE} characters are compiled, not {len(source)}.", param)
    return Grammar(kind, source, param)


BLANKS = r" |\n {0,16}"


def schema_grammar(schema: Any, param: str, *, lenient: bool = False, kind: Kind = "json_schema") -> Grammar:
    """JSON that satisfies `schema`. `lenient`: ignore keywords that cannot be enforced, instead of refusing them."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema, parse_constant=_no_number)
        except (ValueError, RecursionError):
            raise bad_request(f"`{param}`: the schema is not valid JSON.", param) from None
    if not isinstance(schema, Mapping):
        raise bad_request(f"`{param}`: a JSON schema must be an object, not {type(schema).__name__}.", param)
    ours = {"whitespace_pattern": BLANKS, "lenient": lenient}
    return checked(kind, json.dumps({**schema, "x-guidance": ours}), param)


def _no_number(token: str) -> float:
    raise ValueError(token)


def text_grammar(kind: Kind, text: Any, param: str) -> Grammar:
    """A regular expression or a grammar given as text."""
    if not isinstance(text, str) or not text:
        raise bad_request(f"`{param}` must be a text that is not empty.", param)
    return checked(kind, text, param)


def choice_grammar(choices: Any, param: str) -> Grammar:
    """One of a list of texts, and nothing else."""
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise bad_request(f"`{param}` must be a list of texts, none of them empty.", param)
    return checked("choice", json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False), param)


def from_format(wanted: Any) -> Grammar | None:
    """The grammar of OpenAI's `response_format`; None for plain text."""
    param = "response_format"
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return schema_grammar({"type": "object"}, param, kind="json_object")
    if kind != "json_schema":
        expected = '"text", "json_object" or "json_schema"'
        raise bad_request(f"`{param}` must be an object whose `type` is {expected}.", param)
    asked = wanted.get("json_schema")
    if not isinstance(asked, Mapping) or not isinstance(asked.get("schema"), Mapping):
        raise bad_request(f"`{param}.json_schema` must be an object with a `schema`, which is an object.", param)
    if not isinstance(asked.get("strict"), bool | None):
        raise bad_request(f"`{param}.json_schema.strict` must be true or false.", param)
    return schema_grammar(asked["schema"], param, lenient=asked.get("strict") is False)


def guided(name: str, value: Any, param: str) -> Grammar:
    """The grammar of one of vLLM's constraints: `json`, `json_object`, `regex`, `choice` or `grammar`."""
    if name == "json":
        return schema_grammar(value, param)
    if name == "choice":
        return choice_grammar(value, param)
    if name in ("regex", "grammar"):
        return text_grammar("regex" if name == "regex" else "lark", value, param)
    if name == "json_object" and value is True:
        return schema_grammar({"type": "object"}, param, kind="json_object")
    message = f"`{param}`: `{name}` is not supported; json, json_object, regex, choice and grammar are."
    raise bad_request(message, param, "unsupported_parameter")


GUIDED = ("json", "regex", "choice", "grammar", "json_object")


def response_grammar(body: Mapping[str, Any]) -> Grammar | None:
    """What the answer to this request body must look like; None: anything. Raises a 400 that names the field.

    Reads OpenAI's `response_format` and vLLM's `guided_*` and `structured_outputs`; at most one of them may say
    something.
    """
    found: list[Grammar] = []
    if body.get("response_format") is not None:
        plan = from_format(body["response_format"])
        found += [plan] if plan else []
    for name in GUIDED:
        if body.get(f"guided_{name}") not in (None, False):
            found.append(guided(name, body[f"guided_{name}"], f"guided_{name}"))
    nested = body.get("structured_outputs")
    if not isinstance(nested, Mapping | None):
        raise bad_request("`structured_outputs` must be an object.", "structured_outputs")
    for name, value in (nested or {}).items():
        if value not in (None, False):
            found.append(guided(name, value, "structured_outputs"))
    if len(found) > 1:
        names = " and ".join(f"`{each.param}`" for each in found[:2])
        raise bad_request(f"{names} cannot both decide what the answer looks like: send one.", found[1].param)
    return found[0] if found else None


MAX_CALLS = 16


def _call_rules(number: int, function: Mapping[str, Any]) -> str:
    """Lark rules for one call of one function, in the form that models are trained to write."""
    name = json.dumps(function["name"], ensure_ascii=False)
    head = json.dumps(f'<tool_call>\n{{"name": {name}, "arguments": ', ensure_ascii=False)
    tail = json.dumps("}\n</tool_call>")
    # Arguments are an object, whatever the schema leaves open. Only who asks for `strict` is refused for a keyword.
    ours = {"whitespace_pattern": BLANKS, "lenient": function.get("strict") is not True}
    schema = json.dumps({**(function.get("parameters") or {}), "type": "object", "x-guidance": ours})
    return f"call{number}: {head} arguments{number} {tail}\narguments{number}: %json {schema}\n"


def tool_grammar(tools: Sequence[Mapping[str, Any]], name: str | None, parallel: bool) -> Grammar:
    """Calls of these `tools` and nothing else (checked ones: see `check_tools`): one call of the function `name`.

    With `name` None at least one call of any of them; with `parallel` up to 16, each on lines of its own.
    """
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    more = f'("\\n" call){{0,{MAX_CALLS - 1}}}' if parallel and name is None else ""
    any_call = " | ".join(f"call{number}" for number in range(len(functions)))
    rules = "".join(_call_rules(number, function) for number, function in enumerate(functions))
    return checked("lark", f"start: call {more}\ncall: {any_call}\n{rules}", "tools")


COMPLAINTS = [
    (r'Unimplemented keys: \["(\w+)"', "the JSON schema keyword `{0}` is not supported"),
    (r"oneOf constraints", "`oneOf` is supported only where its branches exclude each other; use `anyOf`"),
    (r"Unknown format: (\S+)", "the JSON schema keyword `format` does not know {0!r}"),
    (r"Resource '([^']*)'", "`$ref` is followed only inside the schema (#/…), not to {0!r}"),
    (r"Unsatisfiable schema: ([^\n]*)", "nothing can satisfy this: {0}"),
    (r"leaves no token", "nothing can satisfy this: no text of this model can begin it"),
    (r"NoExtension", "nothing can satisfy this: it refers to itself without an end"),
    (r"look-?arounds?|look-ahead", "look-around (also `\\b`) is not supported in regular expressions"),
    (r"(?i)too (?:big|large|many|deep)|fuel|limit|determine if regex", "it is too complex: make it smaller"),
]


def explain(error: str, param: str) -> APIError:
    """The 400 for what a compiler said about a client's grammar; never its whole text, which may hold a trace."""
    for pattern, sentence in COMPLAINTS:
        if match := re.search(pattern, error):
            return bad_request(f"`{param}`: {sentence.format(*(found[:80] for found in match.groups()))}.", param)
    first = "" if error.startswith("panic") else " ".join(error.split())[:160]
    return bad_request(f"`{param}` cannot be compiled{': ' + first if first else ''}.", param)
