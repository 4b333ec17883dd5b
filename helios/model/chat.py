# Generated from notebooks/02_tokens.ipynb by `helios export`; edit the notebook.
"""Chat templates: messages in, one marked prompt out, errors as sentences."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from helios.model.errors import damaged, read_json
from helios.model.marked import END, Marked, mark, mark_all, unmark, unmark_all

__all__ = [
    "ASKS_FOR_NONE",
    "ChatError",
    "ChatTemplate",
    "RESERVED",
    "ROLES",
    "TRUSTED",
    "content_text",
    "marked_call",
    "read_templates",
    "template_environment",
]


class ChatError(ValueError):
    """These messages cannot become a prompt; the message says why and what to change."""


def _concat(parts: Iterable[Any]) -> Marked:
    return Marked("".join(str(part) for part in parts))


class _MarkedCode(CodeGenerator):
    """Jinja's compiler, with `a ~ b` joined by `_concat` too."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _MarkedCode
    concat = staticmethod(_concat)


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks what to train on; to render is to pass the body through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise ChatError(unmark(str(message))[:300])


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(unmark(format))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> Marked:
    # Dumped from plain text, so that a client's quotes are escaped, and marked whole: JSON spells no control token.
    plain = unmark_all(value)
    text = json.dumps(plain, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return mark(text)


def _join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Marked:
    parts = (item if attribute is None else item[attribute] for item in value)
    return Marked(str.join(d, (str(part) for part in parts)))


def template_environment() -> jinja2.Environment:
    """The sandbox that chat templates are written for: trimmed blocks, loop controls, the usual helpers."""
    extensions: list[str | type[Extension]] = ["jinja2.ext.loopcontrols", _GenerationBlocks]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters.update(tojson=_tojson, join=_join)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model")
TRUSTED = (
    "system",
    "developer",
    "assistant",
)  # may use the model's markup (<think>, <tool_call>), never control tokens
RESERVED = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
ASKS_FOR_NONE = re.compile(r"(?<!\w)content['\"\]]*\s+is\s+(?:not\s+)?none", re.IGNORECASE)


def content_text(content: Any) -> str:
    """A message's content as one string: None is empty, a list of text parts is joined by line breaks."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError("`content` must be a string, null or a list of parts.")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text", "refusal"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatError(f"this model reads text only; remove the content part of type {str(kind)[:40]!r}.")
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ChatError('a text part is {"type": "text", "text": "…"}: its `text` must be a string.')
        texts.append(text)
    return "\n".join(texts)


class _Arguments(dict[str, Any]):
    """A call's arguments: an object for templates that look into it, its JSON text for those that join it to text."""

    def __init__(self, fields: Mapping[str, Any], text: Marked) -> None:
        super().__init__(fields)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> Marked:
        return self._text + other

    def __radd__(self, other: str) -> Marked:
        return Marked(other + self._text)


def marked_call(call: Any) -> Any:
    """A tool call with every string marked and its JSON `arguments` parsed; what is no object stays a string."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return mark_all(call)
    given = call["function"].get("arguments")
    function = mark_all(call["function"])
    with contextlib.suppress(ValueError, RecursionError):  # "[[[[…" is a string like any other
        fields = json.loads(given) if isinstance(given, str) else given
        if isinstance(fields, Mapping):
            text = given if isinstance(given, str) else json.dumps(fields, ensure_ascii=False)
            function["arguments"] = _Arguments(mark_all(fields), mark(text))
    return {"type": "function", **mark_all(call), "function": function}


class ChatTemplate:
    """A model's own chat template. `control` matches its special tokens, `markup` its other structural tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], markup: re.Pattern[str] | None = None) -> None:
        self.source = source
        self._variables = dict(special_tokens)
        self._markup = markup
        self._template: jinja2.Template | None = None

    def _message(self, message: Any) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError('each message must be an object with a `role`, like {"role": "user", "content": "…"}.')
        role: str = message["role"]
        keep = self._markup if role in TRUSTED else None
        marked: dict[str, Any] = mark_all({key: value for key, value in message.items() if key != "content"}, keep)
        if message.get("tool_calls") is not None:
            if not isinstance(message["tool_calls"], list):
                raise ChatError("`tool_calls` must be a list.")
            marked["tool_calls"] = [marked_call(call) for call in message["tool_calls"]]
        text = content_text(message.get("content"))
        calls_only = not text and message.get("tool_calls") and ASKS_FOR_NONE.search(self.source)
        marked["content"] = None if calls_only else mark(text, keep)
        if role == "developer" and "developer" not in self.source:
            role = "system"
        # Some templates build the control token from the role: a known role is the template's word.
        marked["role"] = role if role in ROLES else mark(role)
        return marked

    def mentions(self, word: str) -> bool:
        """Whether the template's program uses a variable, field or string that is just `word`; text does not count."""
        try:
            tree = template_environment().parse(self.source)
        except jinja2.TemplateSyntaxError:
            return False
        found = {getattr(node, "name", None) for node in tree.find_all(nodes.Name)}
        found |= {node.attr for node in tree.find_all(nodes.Getattr)}
        return word in found | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # a client's template_kwargs may have any name, `self` too
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> Marked:
        """The prompt, with a client's characters marked (see `Marked`); ChatError when the template refuses."""
        if isinstance(messages, str) or not messages:
            raise ChatError("`messages` must be a list with at least one message.")
        for name in template_kwargs:
            if name in RESERVED or name in self._variables:
                raise ChatError(f"`{name[:40]}` cannot be set through chat_template_kwargs.")
        if add_generation_prompt and continue_final_message:
            raise ChatError("`continue_final_message` continues a turn: set `add_generation_prompt` to false with it.")
        try:
            values = {**self._variables, **{name: mark_all(value) for name, value in template_kwargs.items()}}
            values |= {"messages": self._messages(messages, continue_final_message)}
            values |= {"tools": mark_all(list(tools)) if tools else None}
            text = self._run({**values, "add_generation_prompt": add_generation_prompt})
        except RecursionError:
            raise ChatError("these messages or tools are nested too deeply: send flatter JSON.") from None
        if not continue_final_message:
            return text
        head, end, _ = str.rpartition(text, END)
        if not end:
            raise ChatError("this model's template does not show the final message, so it cannot be continued.")
        return Marked(head.replace(END, ""))

    def _messages(self, messages: Sequence[Mapping[str, Any]], unfinished: bool) -> list[dict[str, Any]]:
        marked = [self._message(message) for message in messages]
        if unfinished:
            marked[-1]["content"] = Marked((marked[-1]["content"] or "") + END)
        return marked

    def _run(self, values: dict[str, Any]) -> Marked:
        try:
            if self._template is None:
                self._template = template_environment().from_string(self.source)
            return Marked(self._template.render(values))
        except (ChatError, RecursionError):
            raise
        except jinja2.TemplateSyntaxError as error:
            # The model still completes plain prompts: only chat is refused.
            reason = f"line {error.lineno}: {error.message}"[:200]
            advice = "correct chat_template.jinja, or send a plain prompt to the completions endpoint"
            raise ChatError(f"the model's chat template is not valid Jinja ({reason}): {advice}.") from error
        except Exception as error:  # a template is a program: anything can go wrong in it
            reason = unmark(f"{type(error).__name__}: {error}")[:200]
            raise ChatError(f"the model's chat template could not render these messages ({reason}).") from error


def read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: chat_template.jinja wins over tokenizer_config.json, which may hold one or several.

    ModelError names a file that does not hold what it should. Whether a template is valid shows when it is used.
    """
    found: dict[str, str] = {}
    with damaged(folder / "tokenizer_config.json"):
        inline = settings.get("chat_template") or []
        named = inline if isinstance(inline, list) else [{"name": "default", "template": inline}]
        found = {_text(entry["name"]): _text(entry["template"]) for entry in named}
    if (path := folder / "chat_template.json").is_file():
        with damaged(path):
            found["default"] = _text(read_json(path)["chat_template"])
    if (path := folder / "chat_template.jinja").is_file():
        with damaged(path):
            found["default"] = path.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        with damaged(path):
            found[path.stem] = path.read_text(encoding="utf-8")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a chat template must be text, not {type(value).__name__}")
    return value
