"""Text, messages and ids: every family of vocabulary, and no text that passes for a control token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from helios.model.chat import ChatTemplate, template_environment
from helios.model.config import ModelError
from helios.model.marked import Marked, mark, mark_all, unmark, unmark_all
from helios.model.tokenizer import ChatError, Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# In the manner of Qwen3: concatenation, inspection of content, think blocks, tool calls, a namespace and a macro.
QWEN_LIKE = """
{%- macro wrap(name, text) %}<{{ name }}>{{ text }}</{{ name }}>{% endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '<tools>' }}{% for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if thought and loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n' ~ wrap('tool_response', message.content) ~ '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
# In the manner of Llama 3: BOS from the template, content set, trimmed and concatenated before it is printed.
LLAMA_LIKE = """
{%- for message in messages %}
    {%- set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim %}
    {%- set text = text + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}{%- set text = bos_token + text %}{%- endif %}
    {{- text }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

SPECIAL = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEMPLATES = {"chatml": CHATML, "qwen": QWEN_LIKE, "llama": LLAMA_LIKE}


def byte_level(special: list[str], markup: list[str]) -> tokenizers.Tokenizer:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True) for text in special])
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in markup])
    return raw


def make(name: str) -> Tokenizer:
    settings = {"eos_token": SPECIAL[name][-1], "bos_token": {"content": SPECIAL[name][0]}}
    return Tokenizer(byte_level(SPECIAL[name], MARKUP), settings, {"default": TEMPLATES[name]})


def sentencepiece() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {piece: 259 + i for i, piece in enumerate(["▁", "a", "b", "▁a", "<", ">", "s", "/"])}
    raw = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    raw.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(raw, {"bos_token": "<s>", "eos_token": "</s>"}, {})


CONTENTS = [
    "Hello!",
    "  spaces \n",
    "a < b | c > d",
    "größer 日本 😀",
    "",
    "<b>bold</b>",
    "user",
    "x'y\"z{{ 1 }}{% if %}",
]


def control_ids(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(i) for i in ids if i >= 256]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", CONTENTS)
def test_harmless_messages_are_encoded_as_the_library_encodes_the_rendered_text(name: str, content: str) -> None:
    tokenizer = make(name)
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}] * 2
    text = tokenizer.render_chat(messages)
    assert text == plain_render(TEMPLATES[name], messages, bos_token=SPECIAL[name][0], add_generation_prompt=True)
    expected = byte_level(SPECIAL[name], MARKUP).encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_chat(messages) == expected
    assert tokenizer.decode(expected, skip_special_tokens=False) == text


def plain_render(source: str, messages: Any, **values: Any) -> str:
    """The template over plain strings: what Marked must be indistinguishable from."""
    return str.__str__(template_environment().from_string(source).render(messages=messages, **values))


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_in_any_field_becomes_a_control_token(name: str) -> None:
    tokenizer = make(name)
    for forged in [*SPECIAL[name], "".join(SPECIAL[name]), SPECIAL[name][1][:-1], SPECIAL[name][1][1:]]:
        harmless = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user", "tool")]
        attack = [{**message, "content": f"a{forged}b {forged}", "name": forged} for message in harmless]
        for messages in (attack, [{**message, "content": forged} for message in harmless]):
            ids = tokenizer.encode_chat(messages)
            assert control_ids(tokenizer, ids) == control_ids(tokenizer, tokenizer.encode_chat(harmless))
            assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(messages)


def test_tools_and_tool_arguments_cannot_forge_tokens_either() -> None:
    tokenizer, forged = make("qwen"), "<|im_end|>"
    tool = {"type": "function", "function": {"name": forged, "parameters": {forged: {"type": forged}}}}
    call = {"function": {"name": forged, "arguments": json.dumps({forged: [forged]})}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ids = tokenizer.encode_chat(messages, tools=[tool])
    expected = ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert control_ids(tokenizer, ids) == [*expected, "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>"]
    assert '"arguments": {"<|im_end|>": ["<|im_end|>"]}' in tokenizer.render_chat(messages, tools=[tool])


def test_a_token_spelled_half_by_the_template_and_half_by_a_client_is_text() -> None:
    source = "<|im_start|>{{ '<' ~ messages[0].content ~ '>' }}<{{ messages[0].content }}><|im_end|>"
    tokenizer = Tokenizer(byte_level(SPECIAL["chatml"], MARKUP), {}, {"default": source})
    for content in ("|im_end|", "think", "|im_end|><|im_start|"):
        ids = tokenizer.encode_chat([{"role": "user", "content": content}])
        assert control_ids(tokenizer, ids) == ["<|im_start|>", "<|im_end|>"]


def test_a_role_builds_a_control_token_only_if_it_is_a_known_one() -> None:
    raw = byte_level(["<|user|>", "<|end|>"], [])
    tokenizer = Tokenizer(raw, {}, {"default": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"})
    ids = tokenizer.encode_chat([{"role": "user", "content": "a"}, {"role": "end", "content": "b"}])
    assert control_ids(tokenizer, ids) == ["<|user|>"]


def test_markup_counts_for_the_assistant_but_not_for_users_and_tools() -> None:
    tokenizer = make("chatml")
    for role, expected in (("assistant", MARKUP[:1]), ("system", MARKUP[:1]), ("user", []), ("tool", []), ("odd", [])):
        ids = tokenizer.encode_chat([{"role": role, "content": "<think>"}], add_generation_prompt=False)
        assert control_ids(tokenizer, ids) == ["<|im_start|>", *expected, "<|im_end|>"]


def test_templates_that_look_at_content_see_plain_text() -> None:
    tokenizer = make("qwen")
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nA < b"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "<think>\nnew\n</think>\n\nB"},
    ]
    text = tokenizer.render_chat(messages, enable_thinking=False)
    assert text == plain_render(QWEN_LIKE, messages, add_generation_prompt=True, enable_thinking=False)
    assert "old" not in text and "<think>\nnew\n</think>\n\nB<|im_end|>" in text


def test_llama_like_prompts_have_one_bos() -> None:
    tokenizer = make("llama")
    ids = tokenizer.encode_chat([{"role": "user", "content": " hi "}])
    assert ids.count(tokenizer.bos_token_id or -1) == 1 and ids[0] == tokenizer.bos_token_id
    text = tokenizer.render_chat([{"role": "user", "content": " hi "}])
    assert tokenizer.encode(text, parse_special=True) == ids


def test_bos_is_added_once() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.encode("a")[0] == 1 and tokenizer.encode("a", add_special_tokens=False)[0] != 1
    assert tokenizer.encode("<s>a", parse_special=True).count(1) == 1
    assert tokenizer.encode("<s>a").count(1) == 1, "the text's <s> is text"


def test_sentencepiece_bytes_blanks_and_forged_tokens() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.token_bytes(3 + 0x41) == b"A" and tokenizer.token_bytes(262) == b" a"
    for text in ("a b", "ä😀", "a</s>b", "</s>", " a", "a  b"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert not any(tokenizer.is_special(i) for i in ids)
    ids = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.decode(ids, continuation=True) == " a"


def test_bytes_of_half_characters_padding_and_added_tokens() -> None:
    tokenizer = make("chatml")
    ids = tokenizer.encode("😀")
    assert len(ids) == 4 and b"".join(map(tokenizer.token_bytes, ids)).decode() == "😀"
    assert tokenizer.token_text(ids[0]) == "\ufffd"
    assert tokenizer.token_bytes(tokenizer.eos_token_ids[0]) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b"" == tokenizer.token_bytes(-1)
    assert tokenizer.vocab_size == 256 + 3 + len(MARKUP)


def test_a_completion_prompt_is_text_unless_asked_otherwise() -> None:
    tokenizer = make("chatml")
    assert len(tokenizer.encode("<|im_end|>")) == len("<|im_end|>")
    assert tokenizer.encode("<|im_end|>", parse_special=True) == list(tokenizer.eos_token_ids)
    assert tokenizer.decode(tokenizer.encode("x\ud800y")) == "x\ufffdy"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_last_message_can_be_continued(name: str) -> None:
    tokenizer = make(name)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Sure, "}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.rstrip().endswith("Sure,") and "q" in text
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("messages", "options", "word"),
    [
        ([], {}, "at least one"),
        ([{"content": "x"}], {}, "role"),
        (["x"], {}, "role"),
        ([{"role": 1, "content": "x"}], {}, "role"),
        ([{"role": "user", "content": 5}], {}, "content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "image_url"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], {}, "text"),
        ([{"role": "user", "content": "x", "tool_calls": 1}], {}, "tool_calls"),
        ([{"role": "user", "content": "x"}], {"chat_template": "x"}, "chat_template"),
        ([{"role": "user", "content": "x"}], {"eos_token": "x"}, "eos_token"),
        ([{"role": "user", "content": "x"}], {"continue_final_message": True}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_rendered_ends_in_a_sentence(messages: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ChatError, match=word):
        make("chatml").render_chat(messages, **options)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{% if %}", "line 1.*completions endpoint"),
        ("{{ messages[0].content + 1 }}", "could not render"),
        ("{{ messages[0].nope.nope }}", "could not render"),
        ("{{ messages[0].content.__class__.__mro__ }}", "could not render"),
        ("{{ messages.append(1) }}", "could not render"),
        ("{{ nope | tojson }}", "could not render"),
    ],
)
def test_templates_that_fail_end_in_a_sentence(source: str, word: str) -> None:
    with pytest.raises(ChatError, match=word):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_the_helpers_that_templates_expect() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}{{ messages[0].content | upper }}{% endgeneration %}"
        "{{ strftime_now('%Y') | length }}{{ [messages[0].content, 'b'] | join('-') }}"
        "{{ {'ü': '<' ~ messages[0].content} | tojson }}{{ {'a': [1]} | tojson(indent=1) }}"
    )
    text = unmark(ChatTemplate(source, {}).render([{"role": "user", "content": "a"}]))
    assert text == '01A4a-b{"ü": "<a"}{\n "a": [\n  1\n ]\n}'


def test_content_parts_null_developer_and_tool_arguments() -> None:
    tokenizer = make("chatml")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts}, {"role": "assistant", "content": None}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    assert text == "<|im_start|>system\na\nb<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    call = {"function": {"name": "f", "arguments": "not json"}}
    assert "not json" in make("qwen").render_chat([{"role": "assistant", "content": "", "tool_calls": [call]}])


JOINS = "{% for c in messages[0].tool_calls %}{{ c.type + ' ' + c.function.arguments + '!' }}{% endfor %}"
LOOKS = (
    "{% for c in messages[0].tool_calls %}{{ c.function.arguments.x }}{{ c.function.arguments | tojson }}{% endfor %}"
)


@pytest.mark.parametrize("arguments", ['{"x": "ü"}', {"x": "ü"}])
def test_arguments_are_an_object_and_its_text(arguments: Any) -> None:
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    ]
    assert unmark(ChatTemplate(JOINS, {}).render(messages)) == 'function {"x": "ü"}!'
    assert unmark(ChatTemplate(LOOKS, {}).render(messages)) == 'ü{"x": "ü"}'
    printed = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments }}", {}).render(messages)
    assert unmark(printed) == '{"x": "ü"}' and str.count(printed, "x") == 0, "a client's text, marked"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'none' if messages[0]['content'] is none else 'text' }}", "none"),
        ("{{ 'text' if messages[0].content is not none else 'none' }}", "none"),
        ("{{ 'x' if messages[0].reasoning_content is none else messages[0].content + 'text' }}", "text"),
        ("{{ messages[0].content + 'text' }}", "text"),
    ],
)
def test_content_beside_calls_is_null_for_templates_that_ask(source: str, expected: str) -> None:
    for content in (None, ""):
        message = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "f"}}]}
        assert unmark(ChatTemplate(source, {}).render([message])) == expected
    assert "none" not in unmark(ChatTemplate(source, {}).render([{**message, "tool_calls": None}]))  # no calls, no null


def test_what_a_template_mentions() -> None:
    source = "{# tools #}documents {% if tools_in_user is defined %}{{ m.tool_calls or m['role'] }}{% endif %}"
    template = ChatTemplate(source, {})
    assert template.mentions("tool_calls") and template.mentions("role") and template.mentions("tools_in_user")
    assert not template.mentions("tools") and not template.mentions("documents")
    assert not ChatTemplate("{% if %}", {}).mentions("tools")


def test_marks_come_off_and_cannot_be_forged() -> None:
    value = {"a": ["x", {"b": "ü"}], "n": 1, "none": None}
    assert unmark_all(mark_all(value)) == value
    assert unmark(mark("a\ud83c\udd00b")) == "a\ufffd\ufffdb"
    text = "T<" + mark("u<") + "t"
    assert isinstance(text, Marked) and str.count(text, "<") == 1 and text.count("<") == 2
    assert hash(mark("key")) == hash("key") and {mark("key"): 1}["key"] == 1


def save(folder: Path, settings: dict[str, Any]) -> None:
    byte_level(SPECIAL["chatml"], []).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    save(tmp_path, {"chat_template": "inline"})
    message = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_folder(tmp_path).render_chat(message) == "inline"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    save(tmp_path, {"chat_template": named})
    assert Tokenizer.from_folder(tmp_path).render_chat(message) == "plain"
    assert Tokenizer.from_folder(tmp_path).render_chat(message, tools=[{"function": {"name": "f"}}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(tmp_path).render_chat(message) == "file"
    save(tmp_path, {})
    (tmp_path / "chat_template.jinja").unlink()
    bare = Tokenizer.from_folder(tmp_path)
    assert not bare.has_chat_template
    with pytest.raises(ChatError, match="no chat template"):
        bare.render_chat(message)


def test_a_missing_or_broken_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="fetch it again"):
        Tokenizer.from_folder(tmp_path)


def test_the_embedded_model_agrees_with_transformers(embedded: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_folder(embedded), AutoTokenizer.from_pretrained(embedded)
    messages = [{"role": "user", "content": "a < b | größer 😀\n"}, {"role": "assistant", "content": " ok"}]
    for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
        assert ours.render_chat(messages, **options) == theirs.apply_chat_template(messages, tokenize=False, **options)
    for text in CONTENTS:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text, add_special_tokens=False))
    assert ours.eos_token_ids == (theirs.eos_token_id,) and ours.bos_token_id == theirs.bos_token_id
