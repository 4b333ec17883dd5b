"""Whatever the text and wherever it is cut: joined deltas are the whole parse, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from helios.serve.jsonscan import ObjectScanner
from helios.serve.parse import AnswerParser, Message
from helios.serve.reasoning import ThinkSplitter
from helios.serve.toolcalls import CallParser

PATIENCE = 12  # short, so that calls often begin to flow before they are complete

# What answers are made of, so that random texts come close to well-formed ones.
parts = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": ',
        '{"arguments": {"x": 1}, "name": "g"}',
        '{"x": "</tool_call>"}',
        '{"x": "a \\" \\u00e9 long enough to flow", "y": [1, 2.5e3, null]}',
        "{}",
        "}",
        '"',
        "\\",
        "[",
        ",",
        "\n",
        " ",
        "true",
        "東😀",
        "<",
        "text",
        '<tool_call>\n{"name": "f", "arguments": {"x": [1, {"y": "z"}]}}\n</tool_call>',
    ]
)
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
spaced = st.lists(st.sampled_from([CALL, "\n", " ", "a", "<think>", "</think>", "\n\n"]), max_size=9).map("".join)
texts = st.one_of(
    spaced, st.lists(parts, max_size=14).map("".join), st.text(alphabet='<tolca_>/{}"\\:, \n', max_size=40)
)


def parse(
    pieces: Iterable[str], begun: bool, *, think: bool = True, calls: bool = True
) -> tuple[Message, AnswerParser]:
    splitter = ThinkSplitter(begun) if think else None
    parser = AnswerParser(splitter, CallParser(patience=PATIENCE) if calls else None)
    message = Message()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.finish())
    return message, parser


def plain(message: Message) -> Any:
    return message.reasoning, message.content, [(call.name, call.arguments) for call in message.calls]


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(texts, st.booleans(), st.booleans(), st.booleans(), st.data())
@settings(max_examples=600, deadline=None)
def test_cuts_do_not_matter(text: str, begun: bool, think: bool, calls: bool, data: st.DataObject) -> None:
    whole, parser = parse([text], begun, think=think, calls=calls)
    for pieces in (pieces_of(text, data), list(text)):
        cut, cut_parser = parse(pieces, begun, think=think, calls=calls)
        assert plain(cut) == plain(whole)
        assert (cut_parser.called, cut_parser.in_reasoning) == (parser.called, parser.in_reasoning)


@given(texts)
@settings(max_examples=400, deadline=None)
@example('<tool_call>{"name": "f", "arguments": {"x": "a long text that flows", oops}</tool_call>')
def test_nothing_is_lost_or_said_twice(text: str) -> None:
    """What is left of the text without content and calls is markup, in the text's order."""
    message, parser = parse([text], False, think=False)
    rest = iter(text)
    assert all(character in rest for character in message.content), "content is in the text, in its order"
    if not message.calls:
        assert message.content == text
    said = sum(map(len, [message.content, *(call.arguments for call in message.calls)]))
    assert said <= len(text) + 6 * text.count("\n"), "only raw control characters may grow, into their escapes"
    for call in message.calls if parser.called and len(message.calls) == 1 else []:
        assert isinstance(json.loads(call.arguments), dict) and call.name


@given(texts)
@settings(max_examples=300, deadline=None)
def test_without_tools_and_thoughts_a_text_is_itself(text: str) -> None:
    message, _ = parse([text], False, think=False, calls=False)
    assert plain(message) == ("", text, [])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=4)


@given(st.lists(st.tuples(st.text(min_size=1, max_size=8), objects), min_size=1, max_size=3), st.booleans(), st.data())
@settings(max_examples=300, deadline=None)
def test_well_formed_calls_come_out_as_they_went_in(
    calls: list[tuple[str, dict[str, Any]]], ascii_only: bool, data: st.DataObject
) -> None:
    spelled = [json.dumps({"name": name, "arguments": fields}, ensure_ascii=ascii_only) for name, fields in calls]
    text = "Well.\n" + "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in spelled)
    message, parser = parse(pieces_of(text, data), False)
    assert message.content == "Well." and parser.finish_reason("stop") == "tool_calls"
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls


@given(st.one_of(objects.map(json.dumps), st.text(alphabet='{}[]",:0-1.e \\ntru', max_size=20)), st.data())
@settings(max_examples=600, deadline=None)
def test_the_scanner_is_json(text: str, data: st.DataObject) -> None:
    if text and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.sampled_from(['"', "{", "}", ",", "", "1", "\\"])) + text[at + 1 :]
    scanner = ObjectScanner()
    taken = 0
    for piece in pieces_of(text, data):
        taken += scanner.feed(piece)
    pairs: list[list[str]] = []

    def note(found: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs.append([key for key, _ in found])
        return dict(found)

    try:
        value = json.loads(text, object_pairs_hook=note)
        fine = isinstance(value, dict) and len(set(pairs[-1])) == len(pairs[-1])
    except ValueError:
        fine = False
    assert fine == (scanner.status == "done" and taken == len(text.rstrip()))
    if fine:
        assert {key: json.loads("".join(parts)) for key, parts in scanner.values.items()} == value
