"""Messages, tools and template arguments made to break the rendering: each ends in a ChatError, or is harmless."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from helios.model.chat import ChatError
from helios.model.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ m | tojson }}{% endfor %}{{ tools | tojson }}{{ x | tojson }}"
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    return Tokenizer(raw, {}, {"default": TEMPLATE.replace("x |", "(x or 0) |")})


def nested(levels: int, leaf: Any = "a") -> Any:
    for _ in range(levels):
        leaf = [leaf]
    return leaf


@pytest.mark.parametrize("levels", [300, 600, 900, 5000])
@pytest.mark.parametrize("place", ["message", "tools", "template_kwargs", "arguments"])
def test_deep_nesting_is_a_chat_error_at_worst(tokenizer: Tokenizer, place: str, levels: int) -> None:
    deep = nested(levels)
    messages: list[dict[str, Any]] = [USER]
    options: dict[str, Any] = {}
    if place == "message":
        messages = [{**USER, "extra": deep}]
    elif place == "arguments":
        messages = [{**USER, "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}]
    else:
        options = {"tools": [{"function": deep}]} if place == "tools" else {"x": deep}
    for call in (tokenizer.encode_chat, tokenizer.render_chat):
        try:
            assert call(messages, **options) is not None
        except ChatError as error:
            assert "nested too deeply" in str(error)
            continue
        assert levels < 5000


def test_arguments_that_only_open_brackets_stay_a_string(tokenizer: Tokenizer) -> None:
    text = "[" * 200_000
    call = {"function": {"name": "f", "arguments": text}}
    rendered = tokenizer.render_chat([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert json.dumps(text) in rendered


@pytest.mark.parametrize("name", ["self", "messages", "chat_template", "tokenize"])
def test_reserved_names_are_refused_as_template_arguments(tokenizer: Tokenizer, name: str) -> None:
    named: dict[str, Any] = {name: 1}
    for call in (tokenizer.encode_chat, tokenizer.render_chat):
        with pytest.raises(ChatError, match=f"`{name}` cannot be set"):
            call([USER], **named)


def test_other_names_reach_the_template(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat([USER], x=7, environment=1, context=2, args=3, kwargs=4).endswith("7")
