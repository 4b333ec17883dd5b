"""Request bodies as no client should send them: mutations of good ones, and things that never were JSON."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

CHAT, COMPLETE, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SHORT: dict[str, Any] = {"model": "tiny", "max_tokens": 1}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 1, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"65": 1.0}, "min_tokens": 0,
}  # fmt: skip
ENDING: dict[str, Any] = {
    "stop": ["x", "yz"], "stop_token_ids": [3], "ignore_eos": True, "include_stop_str_in_output": False,
    "skip_special_tokens": True, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    "cache_salt": "s", "truncate_prompt_tokens": 9, "user": "me", "metadata": {"a": "b"},
}  # fmt: skip
CHOICE = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}}
ANSWER = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}

GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**SHORT, "messages": [USER]}),
    (
        CHAT,
        {
            **SHORT,
            **SAMPLING,
            "messages": [{"role": "system", "content": "s"}, USER],
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    (CHAT, {**SHORT, **ENDING, "messages": [{**USER, "content": [{"type": "text", "text": "Hi"}], "name": "me"}]}),
    (
        CHAT,
        {
            **SHORT,
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "1"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
        },
    ),
    (
        CHAT,
        {
            **SHORT,
            "messages": [USER, {"role": "assistant", "content": "A"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
        },
    ),
    (COMPLETE, {**SHORT, "prompt": "Hi"}),
    (COMPLETE, {**SHORT, **SAMPLING, "prompt": ["Hi", "Ho"], "logprobs": 2, "echo": True, "add_special_tokens": False}),
    (COMPLETE, {**SHORT, **ENDING, "prompt": [72, 105]}),
    (COMPLETE, {**SHORT, "prompt": [[72], [105]], "suffix": None, "best_of": 1}),
    (TOKENIZE, {"model": "tiny", "prompt": "Hi", "add_special_tokens": True, "return_token_strs": True}),
    (TOKENIZE, {"model": "tiny", "messages": [USER], "add_generation_prompt": True, "tools": [TOOL]}),
    (DETOKENIZE, {"model": "tiny", "tokens": [72, 105]}),
]
# These cost a grammar's compilation: fewer of them.
GRAMMARS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**SHORT, "messages": [USER], "response_format": ANSWER}),
    (CHAT, {**SHORT, "messages": [USER], "tools": [TOOL], "tool_choice": CHOICE}),
    (COMPLETE, {**SHORT, "prompt": "Hi", "structured_outputs": {"regex": "a+", "choice": None}}),
    (COMPLETE, {**SHORT, "prompt": "Hi", "guided_choice": ["a", "b"], "guided_regex": None}),
]

FIELDS = sorted({name for _, body in GOOD + GRAMMARS for name in body})
NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 0.5, -0.0, 1e-30, 1e308, -1e308, 5e-324, 128, 129, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1,
    2**64, 10**30, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
TEXTS: list[Any] = [
    "", " ", "a", "0", "1", "true", "null", "NaN", "auto", "none", "required", "\x00", "\ud83d", "\udc00x", "\ufffd",
    "é" * 50, "😀", "\u202e", "<|im_end|>", "<|im_start|>system\n", "{{ 7 * 7 }}", "{% for x in y %}", "a" * 3000,
    "%s%n", "../../etc/passwd", "(" * 50, "[a-z", "a{1,9999}", '{"a": ', "\r\n\r\n", "x" * 130,
]  # fmt: skip
ODD: list[Any] = [
    None, True, False, [], {}, [[]], [{}], [None], {"": None}, {"a": {"b": {"c": []}}}, ["a", 1, None], [1, "a"],
    [[1], "a"], [0] * 500, ["a"] * 300, {"type": "text"}, {"type": "object"}, {"$ref": "#"}, {"role": "user"},
    [USER, None], {"function": 5},
]  # fmt: skip


def nasty(rng: random.Random) -> Any:
    """A value that some field will not like."""
    return copy.deepcopy(rng.choice(rng.choice((NUMBERS, TEXTS, ODD))))


def places(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Every place in a body that can be written to: container and key."""
    found = [] if found is None else found
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(inner, dict | list):
            places(inner, found)
    return found


def mutate(rng: random.Random, body: dict[str, Any]) -> None:
    """One change, anywhere in it."""
    container, key = rng.choice(places(body) or [(body, "x")])
    kind = rng.randrange(8)
    if kind < 4:
        container[key] = nasty(rng)
    elif kind == 4 and key != "max_tokens":
        del container[key]
    elif kind == 5:
        body[rng.choice([*FIELDS, "unknown", "", "__class__"])] = nasty(rng)
    elif kind == 6:
        container[key] = [container.get(key)] if isinstance(container, dict) else {"a": container[key]}
    else:
        other, place = rng.choice(places(body) or [(body, "x")])
        container[key] = copy.deepcopy(other[place]) if isinstance(other, list) or place in other else nasty(rng)


def text_of(body: Any) -> bytes:
    """As JSON, also what JSON does not know."""
    return json.dumps(body, ensure_ascii=True).encode()


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A good body with one to three changes."""
    path, good = rng.choice(GRAMMARS if rng.random() < 0.08 else GOOD)
    body = copy.deepcopy(good)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutate(rng, body)
    return path, text_of(body)


def truncated(rng: random.Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw))]


def flipped(rng: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randrange(1, 6)):
        changed[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(changed)


def spliced(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw))
    return (
        raw[:at]
        + rng.choice((b'"', b"{", b"[", b"}", b",", b"NaN", b"-Infinity", b"1e999", b"\\u", b"\x00"))
        + raw[at:]
    )


def noise(rng: random.Random, raw: bytes) -> bytes:
    return rng.randbytes(rng.randrange(200))


def deep(rng: random.Random, raw: bytes) -> bytes:
    levels = rng.choice((60, 70, 500, 3000, 50_000))
    opened, closed = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return b'{"' + rng.choice(FIELDS).encode() + b'": ' + opened * levels + b"1" + closed * levels + b"}"


def huge(rng: random.Random, raw: bytes) -> bytes:
    size = rng.choice((5_000, 60_000, 300_000))
    what = rng.choice((b'"' + b"a" * size + b'"', b"9" * size, b"[" + b"1," * (size // 8) + b"1]", b"1." + b"3" * size))
    return b'{"model": "tiny", "max_tokens": 1, "' + rng.choice(FIELDS).encode() + b'": ' + what + b"}"


def other_json(rng: random.Random, raw: bytes) -> bytes:
    return rng.choice(
        (text_of(nasty(rng)), raw + raw, b"[" + raw + b"]", raw.decode().encode("utf-16"), b"\xef\xbb\xbf" + raw)
    )


# How often each comes; the rest are mutated bodies.
KINDS: list[tuple[float, Callable[[random.Random, bytes], bytes]]] = [
    (0.06, truncated), (0.08, flipped), (0.06, spliced), (0.03, noise), (0.01, deep), (0.01, huge), (0.05, other_json),
]  # fmt: skip


def bodies(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` paths and bodies, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        path, raw = mutated(rng)
        draw = rng.random()
        for share, kind in KINDS:
            draw -= share
            if draw < 0:
                raw = kind(rng, raw)
                break
        yield path, raw
