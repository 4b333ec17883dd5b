# Generated from notebooks/21_tools.ipynb by `helios export`; edit the notebook.
"""What a request says about tools: its fields checked, and tools spelled out for templates without a place for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from helios.model.chat import ChatTemplate, content_text
from helios.serve.errors import bad_request

__all__ = ["MAX_NAME", "MAX_TOOLS", "TOOLS_TEXT", "ToolUse", "call_text", "check_tools", "spell_tools"]
MAX_TOOLS = 128
MAX_NAME = 128


@dataclass(frozen=True)
class ToolUse:
    """What a request allows: `name` is set for a "named" choice. `parallel`: more than one call in an answer."""

    tools: list[dict[str, Any]]
    choice: Literal["none", "auto", "required", "named"]
    name: str | None = None
    parallel: bool = True

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools that the prompt shows; None if no call is wanted: what a model does not know it does not call."""
        return None if self.choice == "none" else self.tools or None

    @property
    def forced(self) -> bool:
        """Whether an answer without a call is not allowed: a grammar must see to it."""
        return self.choice in ("required", "named")


def _function_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    function = value.get("function")
    return function if isinstance(function, Mapping) else {}


def _check_tool(tool: Any, at: int) -> str:
    where = f"`tools[{at}]`"
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise bad_request(f'{where} must be an object with `type` "function": other kinds are not supported.', "tools")
    function = _function_of(tool)
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise bad_request(f"{where} needs a `function` with a `name` of 1 to {MAX_NAME} characters.", "tools")
    if not isinstance(function.get("parameters"), Mapping | None):
        raise bad_request(f"{where}: `function.parameters` must be a JSON schema, an object.", "tools")
    if not isinstance(function.get("description"), str | None):
        raise bad_request(f"{where}: `function.description` must be a string.", "tools")
    return name


def _check_all(tools: Any) -> list[str]:
    if not isinstance(tools, list) or not tools:
        raise bad_request("`tools` must be a list of at least one function; leave it out to offer none.", "tools")
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"At most {MAX_TOOLS} `tools` fit into one request.", "tools")
    return [_check_tool(tool, at) for at, tool in enumerate(tools)]


def _chosen(choice: Any) -> str:
    """The function's name in a `tool_choice` object."""
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        expected = '`tool_choice` must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}.'
        raise bad_request(expected, "tool_choice")
    name = _function_of(choice).get("name")
    if not isinstance(name, str):
        raise bad_request("`tool_choice.function.name` must name one of `tools`.", "tool_choice")
    return name


def check_tools(tools: Any, tool_choice: Any = None, parallel_tool_calls: Any = None) -> ToolUse:
    """What a request's three fields mean (None: absent). Raises a 400 that names the field."""
    names = _check_all(tools) if tools is not None else []
    if not isinstance(parallel_tool_calls, bool | None):
        raise bad_request("`parallel_tool_calls` must be true or false.", "parallel_tool_calls")
    parallel, known = parallel_tool_calls is not False, list(tools or [])
    if tool_choice is None or tool_choice == "none":
        return ToolUse(known, "auto" if tool_choice is None and names else "none", None, parallel)
    name = None if tool_choice in ("auto", "required") else _chosen(tool_choice)
    if not names:
        raise bad_request("`tool_choice` goes with `tools`.", "tool_choice")
    if name is not None and name not in names:
        raise bad_request(f"`tool_choice` names {name[:MAX_NAME]!r}, which is not one of `tools`.", "tool_choice")
    if name is not None:
        return ToolUse(known, "named", name, parallel)
    return ToolUse(known, "auto" if tool_choice == "auto" else "required", None, parallel)


TOOLS_TEXT = (
    "You can call functions. Each line between the tags below describes one of them:\n<tools>\n{tools}\n</tools>\n\n"
    "To call a function, write its name and its arguments as JSON between tags, for each call:\n"
    '<tool_call>\n{{"name": "the function", "arguments": {{"an argument": "its value"}}}}\n</tool_call>\n'
    "The result will come between <tool_response> tags."
)


def call_text(call: Any) -> str:
    """One entry of a message's `tool_calls` in the form that models write it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_request("Each of `tool_calls` needs a `function` with a `name`.", "messages")
    given = function.get("arguments") or "{}"
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _spelled(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without anything that only templates with tools understand."""
    text = content_text(message.get("content"))
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls or not isinstance(calls, list):
        return dict(message)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [text, *map(call_text, calls)]))}


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns of one user in a row as one: results of parallel calls, where a template wants roles to alternate."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if out and message.get("role") == "user" == out[-1].get("role"):
            both = "\n".join(content_text(each.get("content")) for each in (out[-1], message))
            out[-1] = {**out[-1], "content": both}
        else:
            out.append(message)
    return out


def spell_tools(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as this template can show them: untouched if it can, else spelled out in the messages."""
    uses = any(isinstance(m, Mapping) and (m.get("tool_calls") or m.get("role") == "tool") for m in messages)
    shows = template.mentions("tools") if tools else template.mentions("tool_calls")
    if shows or not (tools or uses) or not all(isinstance(m, Mapping) for m in messages):
        return [*messages], tools  # type: ignore[list-item]  # what is no message is refused by the template
    plain = _joined([_spelled(message) for message in messages])
    if not tools:
        return plain, None
    text = TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain[0].get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}, *plain], None
    system = content_text(plain[0].get("content"))
    return [{**plain[0], "content": "\n\n".join(filter(None, [system, text]))}, *plain[1:]], None
