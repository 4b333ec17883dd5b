"""Calls and thoughts in a model's text, one shape after another; the request's fields; tools for plain templates."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from helios.model.chat import ChatTemplate
from helios.model.tokenizer import Tokenizer
from helios.serve.errors import APIError
from helios.serve.jsonscan import MAX_DEPTH, ObjectScanner
from helios.serve.parse import AnswerParser, Delta, Message, parse_whole, parser_for
from helios.serve.reasoning import ThinkSplitter, prompt_leaves, think_tags
from helios.serve.toolcalls import PATIENCE, CallParser, ToolCallDelta, tail_of
from helios.serve.tools import MAX_TOOLS, check_tools, spell_tools

MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def make(markup: list[str] = MARKUP, special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.add_special_tokens(list(special))
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in markup])
    return Tokenizer(raw, {"eos_token": "<|im_end|>"}, {})


def call(arguments: str = "{}", name: str = '"f"') -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def read(text: str, *, parallel: bool = True) -> tuple[str, list[tuple[str | None, str]]]:
    """Content, and name and arguments of each call; checks that a finish reason agrees with the calls."""
    parser = AnswerParser(None, CallParser(parallel=parallel))
    message = parse_whole(parser, text)
    assert parser.finish_reason("length") == "length"
    assert parser.finish_reason("stop") == ("tool_calls" if parser.called else "stop")
    assert [each.index for each in message.calls] == list(range(len(message.calls)))
    return message.content, [(each.name, each.arguments) for each in message.calls]


F = ("f", "{}")
X = ("f", '{"x": 1}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("plain < text", "plain < text", []),
        ("trailing <tool_", "trailing <tool_", []),
        ("spaces \n ", "spaces \n ", []),
        (call(), "", [F]),
        (f"\n\n{call()}\n\n", "", [F]),
        (f"Let me look.\n{call()}", "Let me look.", [F]),
        (f"before\n{call()}\nafter\n", "before\nafter\n", [F]),
        (f"{call()} after", "after", [F]),
        (f" {call()}\n\n after {call()}", "after", [F, F]),
        (call() + "\n" + call('{"x": 1}'), "", [F, X]),
        ((call() + call('{"x": 1}')).replace("\n", ""), "", [F, X]),
        (f"a {call()} b {call()} c", "a b c", [F, F]),
        (call()[: -len("</tool_call>")], "", [F]),
        (call()[: -len("\n</tool_call>")] + call(), "", [F, F]),
        (call("{}", '"f"')[:-14], "", [F]),
        ("<tool_call>" + call(), "<tool_call>", [F]),
        ("<tool_call>{" + call(), "<tool_call>{", [F]),
        (call('{"x": 1}}'), "", [X]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>!', "!", [X]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [X]),
        ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', "", [X]),
        ('<tool_call>{"id": 7, "name": "f", "arguments": {}, "more": [{}]}</tool_call>', "", [F]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [F]),
        (call("null"), "", [F]),
        (call('"{\\"x\\": 1}"'), "", [X]),
        (call('{"x": "a\nb"}'), "", [("f", '{"x": "a\\nb"}')]),
        (call('{"x": "\\"}</tool_call>"}'), "", [("f", '{"x": "\\"}</tool_call>"}')]),
        (call('{"x": {"y": [{"z": {}}]}}'), "", [("f", '{"x": {"y": [{"z": {}}]}}')]),
        (call('{"ü": "東京 😀"}', '"größer"'), "", [("größer", '{"ü": "東京 😀"}')]),
        (call('{"x": "\\u6771"}', '"\\u0066"'), "", [("f", '{"x": "\\u6771"}')]),
    ],
)
def test_what_models_write(text: str, content: str, calls: list[Any]) -> None:
    assert read(text) == (content, calls)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{}",
        "null",
        "[]",
        "get_weather(city='Paris')",
        "{'name': 'f', 'arguments': {}}",
        '{"name": "f", "arguments": {"x": 1,}}',
        '{"name": "f", "arguments": {"x": True}}',
        '{"name": "f", "arguments": {"x": 01}}',
        '{"name": "f", "arguments": {"x": "\\d"}}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": 5}',
        '{"name": "f", "arguments": ""}',
        '{"name": "f", "arguments": "not json"}',
        '{"name": "f", "arguments": "{} {}"}',
        '{"name": "f", "args": {"x": 1}}',
        '{"name": "", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "name": "g", "arguments": {}}',
        '{"name": "f", "arguments": {"x": "open</tool_call>',
        '{"name": "f", "arguments": {"x": ' + "[" * 100 + "]" * 100 + "}}",
        '{"function": {"name": "f", "arguments": {}}}',
        '{"name": ' + "9" * 5000 + ', "arguments": {}}',
    ],
)
def test_a_malformed_call_stays_text_and_a_later_one_is_found(body: str) -> None:
    text = f"a\n<tool_call>\n{body}\n</tool_call>"
    assert read(text) == (text, [])
    assert read(f"{text}\n{call()}") == (text, [F])


def test_an_answer_that_is_cut_off_in_a_call_loses_nothing() -> None:
    text = "a " + call('{"x": [1, {"y": "\\u00e9"}]}')
    for end in range(len(text) + 1):
        content, calls = read(text[:end])
        if end < text.index("}]}") + 3:
            assert (content, calls) == (text[:end], []), "half a call is text"
        else:
            assert (content, calls) == ("a", [("f", '{"x": [1, {"y": "\\u00e9"}]}')])


def deltas(text: str, size: int = 1) -> list[str | ToolCallDelta]:
    parser = CallParser()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [part for piece in pieces for part in parser.push(piece)] + parser.finish()


def test_a_call_opens_with_id_and_name_and_goes_on_with_arguments() -> None:
    found = [part for part in deltas(call('{"x": 1}') + call(name='"g"')) if isinstance(part, ToolCallDelta)]
    assert [(part.index, part.name, part.arguments) for part in found] == [
        (0, "f", ""),
        (0, None, '{"x": 1}'),
        (1, "g", ""),
        (1, None, "{}"),
    ]
    ids = [part.id for part in found]
    assert ids[1] is ids[3] is None and ids[0] != ids[2] and all(str(i).startswith("call_") for i in ids[::2])
    assert found[0].as_json() == {
        "index": 0,
        "id": ids[0],
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    assert found[1].as_json() == {"index": 0, "function": {"arguments": '{"x": 1}'}}


def test_long_arguments_flow_and_short_ones_wait() -> None:
    parser, sent = CallParser(), 0
    text = call(json.dumps({"text": "x" * 2000}))
    for at, character in enumerate(text):
        sent += sum(len(part.arguments) for part in parser.push(character) if isinstance(part, ToolCallDelta))
        assert at - sent <= PATIENCE + 60, "a client waits for at most PATIENCE characters and the markup"
    assert json.loads(message_of(text).calls[0].arguments) == {"text": "x" * 2000}


def message_of(text: str) -> Message:
    return parse_whole(AnswerParser(None, CallParser()), text)


def test_a_long_call_that_breaks_goes_on_as_written_and_does_not_count() -> None:
    good = '{"text": "' + "x" * PATIENCE + '", '
    text = call(good + "oops}") + " after " + call()
    parser = AnswerParser(None, CallParser())
    message = parse_whole(parser, text)
    assert message.calls[0].arguments == good + "oops}}\n" and message.calls[1].arguments == "{}"
    assert message.content == "after"
    broken = AnswerParser(None, CallParser())
    assert parse_whole(broken, call(good + "oops}")).calls and not broken.called
    assert broken.finish_reason("stop") == "stop"


def test_one_call_at_most() -> None:
    assert read(f"a {call()} b {call()} c", parallel=False) == ("a b c", [F])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        '<tool_call>{"' + "<tool_call>" * 20_000,
        "<tool_call>{" * 20_000,
        '<tool_call>{"name": "' * 10_000,
        " \n" * 100_000,
        "}" * 200_000,
        call() + "}" * 200_000,
        call() + "\n" * 200_000,
        "<" * 200_000,
        call('{"x": ' + "[" * 100_000),
        call('{"x": "' + "\\\\" * 50_000 + '"}'),
    ],
    ids=range(11),
)
@pytest.mark.parametrize("size", [4, 1_000_000])
def test_no_text_takes_long(text: str, size: int) -> None:
    begun = time.process_time()
    parts = deltas(text, size)
    assert time.process_time() - begun < 2.0
    assert sum(len(part) if isinstance(part, str) else len(part.arguments) for part in parts) <= len(text)


def test_the_scanner_knows_depth_and_duplicates() -> None:
    deepest = '{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    for text, status in (
        (deepest, "done"),
        (deepest.replace("[", "[[", 1), "bad"),
        ('{"a":1,"a":2}', "bad"),
        ("{", "open"),
    ):
        scanner = ObjectScanner()
        scanner.feed(text)
        assert scanner.status == status
    assert tail_of("x<tool_call", "<tool_call>") == 10 and tail_of("<tool_call>", "<tool_call>") == 0


def think(text: str, begun: bool = False) -> tuple[str, str]:
    splitter = ThinkSplitter(begun)
    first, last = splitter.push(text), splitter.finish()
    return first[0] + last[0], first[1] + last[1]


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\na\n\nb\n</think>\n\nc\n", False, ("a\n\nb", "c\n")),
        ("\n <think>a</think>b", False, ("a", "b")),
        ("a\n</think>\n\nb", True, ("a", "b")),
        ("<think>\na</think>b", True, ("a", "b")),
        ("<think>\n\n</think>\n\nb", False, ("", "b")),
        ("b <think>a</think>", False, ("", "b <think>a</think>")),
        ("a</think>b", False, ("", "a</think>b")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("<think>never closed </thi", False, ("never closed </thi", "")),
        ("<think>", False, ("", "")),
        ("<thin", False, ("", "<thin")),
        ("<thin", True, ("<thin", "")),
        ("  ", False, ("", "  ")),
        ("", True, ("", "")),
        ("<think>a <b> </think >x</think>y", False, ("a <b> </think >x", "y")),
    ],
)
def test_thoughts_and_answers(text: str, begun: bool, expected: tuple[str, str]) -> None:
    assert think(text, begun) == expected
    for cuts in itertools.combinations(range(len(text) + 1), 2):
        splitter, found = ThinkSplitter(begun), ["", ""]
        parts = [text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]]
        for thoughts, answer in [*map(splitter.push, parts), splitter.finish()]:
            found = [found[0] + thoughts, found[1] + answer]
        assert tuple(found) == expected


def test_thoughts_are_decided_by_the_last_turn_of_the_prompt() -> None:
    tokenizer = make()
    tags = think_tags(tokenizer)
    assert tags is not None and think_tags(make(["<tool_call>"])) is None
    assert think_tags(make([], ("<|im_end|>", "<think>", "</think>"))) is None, "hidden tags never reach the text"

    def leaves(text: str) -> str:
        return prompt_leaves(tokenizer, tokenizer.encode(text, parse_special=True), tags)

    assert (
        leaves("<|im_start|>assistant\n")
        == leaves("")
        == leaves("<think>x<|im_end|>\n<|im_start|>assistant\n")
        == "neither"
    )
    assert leaves("<|im_start|>assistant\n<think>\n") == leaves("<|im_start|>x<think>a</think>b<think>") == "open"
    assert leaves("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "closed"


def test_there_is_a_parser_only_where_there_is_something_to_parse() -> None:
    tokenizer, plain = make(), make([])
    closed = tokenizer.encode("<think></think>", parse_special=True)
    opened = tokenizer.encode("<think>", parse_special=True)
    assert parser_for(plain, [1, 2], tools=False) is None and parser_for(tokenizer, closed, tools=False) is None
    parser = parser_for(tokenizer, closed, tools=True)
    assert parser is not None and not parser.in_reasoning
    text = "<think>a</think>" + call()
    assert parse_whole(parser, text).content == "<think>a</think>", "the prompt has closed the block: all is content"
    parser = parser_for(tokenizer, opened, tools=False)
    assert parser is not None and parser.in_reasoning
    assert parse_whole(parser, "a</think>" + call()).content == call(), "no tools were offered: a call is text"
    parser = parser_for(tokenizer, [], tools=True)
    assert parser is not None and not parser.in_reasoning


def test_a_call_inside_a_thought_is_a_thought() -> None:
    parser = AnswerParser(ThinkSplitter(), CallParser())
    message = parse_whole(parser, f"<think>maybe {call()}</think>\n\n{call()}")
    assert (message.reasoning, message.content, len(message.calls)) == (f"maybe {call()}", "", 1)


def test_deltas_are_of_one_kind_each_and_in_order() -> None:
    parser = AnswerParser(ThinkSplitter(), CallParser())
    found = parser.push(f"<think>a</think>b {call()} c") + parser.finish()
    assert [list(delta.as_json()) for delta in found] == [
        ["reasoning_content"],
        ["content"],
        ["tool_calls"],
        ["tool_calls"],
        ["content"],
    ]
    assert Delta().as_json() == {}


def test_thought_tokens_are_counted_without_their_tags() -> None:
    tokenizer = make()
    for text, opened, expected in (
        ("<think>abc</think>defg", False, 3),
        ("abc</think>defg", True, 3),
        ("<think>abc", False, 3),
        ("abc<think>d", False, 0),
        ("<think></think>abc", False, 0),
        ("<think>a</think>b</think>c<think>d", False, 1),
    ):
        for size in (1, 3, 100):
            prompt = tokenizer.encode("<think>" if opened else "", parse_special=True)
            parser = parser_for(tokenizer, prompt, tools=True)
            assert parser is not None
            ids = tokenizer.encode(text, parse_special=True)
            for at in range(0, len(ids), size):
                part = ids[at : at + size]
                parser.push(tokenizer.decode(part, skip_special_tokens=False), part)
            assert parser.reasoning_tokens == expected, (text, size)


def test_the_message_of_a_whole_answer() -> None:
    assert Message("hi").as_json() == {"role": "assistant", "content": "hi"}
    assert Message().as_json() == {"role": "assistant", "content": ""}
    made = message_of(call('{"x": 1}')).as_json()
    assert made["content"] is None and set(made) == {"role", "content", "tool_calls"}
    assert made["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert set(made["tool_calls"][0]) == {"id", "type", "function"}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "choice", "name", "offered"),
    [
        ((None,), "none", None, False),
        ((None, "none"), "none", None, False),
        (([TOOL],), "auto", None, True),
        (([TOOL], "none"), "none", None, False),
        (([TOOL], "auto"), "auto", None, True),
        (([TOOL], "required"), "required", None, True),
        (([TOOL], named("f")), "named", "f", True),
        (([{"function": {"name": "f", "description": None}}],), "auto", None, True),
    ],
)
def test_what_a_request_may_say(fields: tuple[Any, ...], choice: str, name: str | None, offered: bool) -> None:
    use = check_tools(*fields)
    assert (use.choice, use.name, bool(use.offered), use.parallel) == (choice, name, offered, True)
    assert use.forced == (choice in ("required", "named"))
    assert check_tools(fields[0], None, False).parallel is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (([],), "tools"),
        (({},), "tools"),
        (("f",), "tools"),
        (([1],), "tools"),
        (([None],), "tools"),
        (([{}],), "tools"),
        (([{"type": "function"}],), "tools"),
        (([{"type": "custom", "function": {"name": "f"}}],), "tools"),
        (([{"type": "function", "function": {"name": ""}}],), "tools"),
        (([{"type": "function", "function": {"name": 1}}],), "tools"),
        (([{"type": "function", "function": {"name": "f" * 129}}],), "tools"),
        (([{"type": "function", "function": {"name": "f", "parameters": "x"}}],), "tools"),
        (([{"type": "function", "function": {"name": "f", "description": 1}}],), "tools"),
        (([TOOL] * (MAX_TOOLS + 1),), "tools"),
        ((None, "auto"), "tool_choice"),
        ((None, "required"), "tool_choice"),
        ((None, named("f")), "tool_choice"),
        (([TOOL], "often"), "tool_choice"),
        (([TOOL], 1), "tool_choice"),
        (([TOOL], True), "tool_choice"),
        (([TOOL], []), "tool_choice"),
        (([TOOL], named("g")), "tool_choice"),
        (([TOOL], named(None)), "tool_choice"),
        (([TOOL], {"type": "function"}), "tool_choice"),
        (([TOOL], {"type": "allowed_tools"}), "tool_choice"),
        (([TOOL], None, "yes"), "parallel_tool_calls"),
        (([TOOL], None, 0), "parallel_tool_calls"),
    ],
)
def test_what_is_refused_names_its_field(fields: tuple[Any, ...], param: str) -> None:
    with pytest.raises(APIError) as caught:
        check_tools(*fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 400


PLAIN = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", {})
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": [named("f") | {"id": "1"}, named("f") | {"id": "2"}]},
    {"role": "tool", "tool_call_id": "1", "content": "a"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "b"}]},
    {"role": "user", "content": "r"},
]


def test_tools_are_spelled_out_for_a_template_without_a_place_for_them() -> None:
    messages, tools = spell_tools(PLAIN, TURNS, [TOOL])
    assert tools is None and [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert json.dumps(TOOL) in messages[0]["content"] and "{{" not in messages[0]["content"]
    assert messages[2] == {"role": "assistant", "content": f"{call()}\n{call()}"}
    assert messages[3]["content"] == "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>\nr"
    assert read(messages[2]["content"]) == ("", [F, F]), "our parser reads what we wrote"
    with_system, _ = spell_tools(PLAIN, [{"role": "system", "content": "Be brief."}, *TURNS], [TOOL])
    assert with_system[0]["content"].startswith("Be brief.\n\nYou can call") and len(with_system) == len(messages)
    history, tools = spell_tools(PLAIN, TURNS, None)
    assert (history, tools) == (messages[1:], None), "earlier calls are shown even if none are offered now"


def test_a_template_with_a_place_for_tools_gets_them() -> None:
    able = ChatTemplate("{% if tools %}{{ tools }}{% endif %}{{ messages[0].tool_calls }}", {})
    assert spell_tools(able, TURNS, [TOOL]) == (TURNS, [TOOL])
    assert spell_tools(able, TURNS, None) == (TURNS, None)
    assert spell_tools(PLAIN, TURNS[:1], None) == (TURNS[:1], None)
    comment = ChatTemplate("{# tools #}tools {{ messages[0].content }}", {})
    assert spell_tools(comment, TURNS[:1], [TOOL])[1] is None, "the word in a comment or text shows no tools"
    with pytest.raises(APIError, match="name"):
        spell_tools(PLAIN, [{"role": "assistant", "tool_calls": [{"function": {}}]}], None)
