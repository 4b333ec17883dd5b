# Generated from notebooks/24_server.ipynb by `helios export`; edit the notebook.
"""The chat endpoint: messages to a prompt, an answer to content, thoughts and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import Request as HTTPRequest
from starlette.responses import Response

from helios.model.tokenizer import Tokenizer
from helios.serve.answer import answer
from helios.serve.checks import sampling_params, validate
from helios.serve.choice import Choice, Usage
from helios.serve.errors import bad_request
from helios.serve.grammar import Grammar, response_grammar, tool_grammar
from helios.serve.intake import hopeless, read_body, tail, too_long
from helios.serve.parse import AnswerParser, Delta, Message, parser_for
from helios.serve.protocol import ChatRequest
from helios.serve.reasoning import prompt_leaves, think_tags
from helios.serve.service import Service, stream_options
from helios.serve.tools import ToolUse, check_tools, spell_tools
from helios.serve.wire import ChatWire

__all__ = ["ChatEndpoint", "ParsedChatWire", "chat_grammar", "render", "thoughts_of"]


class ParsedChatWire(ChatWire):
    """`/v1/chat/completions` of a model that thinks, or with tools: one of `parsers` for each choice."""

    def __init__(self, model: str, tokenizer: Tokenizer, parsers: Sequence[AnswerParser], **kind: bool) -> None:
        super().__init__(model, tokenizer, **kind)
        self.parsers = parsers

    def _parse(self, choice: Choice) -> list[Delta]:
        """The deltas of the next piece; at the end, the finish reason that goes with them."""
        parser = self.parsers[choice.index]
        deltas = parser.push(choice.text, choice.token_ids)
        if choice.finish_reason is not None:
            deltas += parser.finish()
            choice.finish_reason = parser.finish_reason(choice.finish_reason)
        return deltas

    def pieces(self, choice: Choice) -> list[dict[str, Any]]:
        """What a choice's stream carries next, after the role."""
        deltas = [delta.as_json() for delta in self._parse(choice)]
        logprobs = self._logprobs(choice)
        if not deltas and not (choice.finish_reason or logprobs or self.with_ids):
            return []
        plain = {"index": choice.index, "logprobs": None, "finish_reason": None}
        *before, last = deltas or [{}]
        chunks = [{**plain, "delta": delta} for delta in before]
        ending = {**plain, "delta": last, "logprobs": logprobs, **self._ending(choice)}
        return [*self._begin(choice.index), *chunks, ending]

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice as it stands in a whole answer."""
        message = Message()
        message.add(self._parse(choice))
        whole = super().whole_choice(choice)
        return {**whole, "message": message.as_json()}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The `usage` object, with the tokens that were thoughts."""
        thoughts = sum(parser.reasoning_tokens for parser in self.parsers)
        return {**usage.as_json(), "completion_tokens_details": {"reasoning_tokens": thoughts}}


def chat_grammar(body: Mapping[str, Any], use: ToolUse) -> Grammar | None:
    """What the answer must look like; None: anything. Raises a 400 for what cannot be."""
    grammar = response_grammar(body)
    if not use.forced:
        return grammar
    if grammar is not None:
        message = f"`tool_choice` asks for a call and `{grammar.param}` for something else: send one of them."
        raise bad_request(message, "tool_choice")
    return tool_grammar(use.tools, use.name, use.parallel)


def render(asked: ChatRequest, use: ToolUse, tokenizer: Tokenizer, context: int) -> list[int]:
    """The prompt's ids. Raises a 400 for messages that the template refuses, and for those that can never fit."""
    template = tokenizer.chat_template(tools=bool(use.offered))
    messages, tools = spell_tools(template, asked.messages, use.offered)
    generate = asked.add_generation_prompt and not asked.continue_final_message
    ending = {"add_generation_prompt": generate, "continue_final_message": asked.continue_final_message}
    options = {"tools": tools, **ending, **asked.template_arguments()}
    # The messages as Python writes them are a cheap upper bound; the template may leave much of them out.
    if asked.truncate_prompt_tokens is None and hopeless(len(str(messages)), context, tokenizer):
        characters = len(tokenizer.render_chat(messages, **options))
        if hopeless(characters, context, tokenizer):
            raise too_long(characters, context, "messages")
    ids, bos = tokenizer.encode_chat(messages, **options), tokenizer.bos_token_id
    if asked.add_special_tokens and bos is not None and ids[:1] != [bos] and tokenizer.encode("a")[0] == bos:
        ids = [bos, *ids]
    return tail(ids, asked.truncate_prompt_tokens, context - (asked.limit or 1))


class ChatEndpoint:
    """`POST /v1/chat/completions`."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def post(self, request: HTTPRequest) -> Response:
        """Read, check, render, compile, submit, answer. Raises what becomes an error object."""
        service, body = self.service, await read_body(request)
        asked = validate(ChatRequest, body)
        service.check_model(asked)
        use = check_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        grammar, tokenizer = chat_grammar(body, use), service.tokenizer
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        params = sampling_params(asked, service.defaults, asked.limit, logprobs)
        prompt = await service.texts.run(render, asked, use, tokenizer, service.engine.context)
        constraint = await service.constraint(request, grammar, thoughts_of(tokenizer, prompt))
        exchange = service.exchange(request, asked, [prompt], params, constraint)
        wire = self._wire(asked, prompt, use, calls=use.forced or (bool(use.offered) and grammar is None))
        return await answer(request.receive, exchange, wire, asked.n, stream_options(asked))

    def _wire(self, asked: ChatRequest, prompt: list[int], use: ToolUse, *, calls: bool) -> ChatWire:
        name, tokenizer = self.service.name, self.service.tokenizer
        kind = {
            "logprobs": asked.logprobs,
            "token_ids": asked.return_token_ids,
            "skip_special": asked.skip_special_tokens,
        }
        parsers = [parser_for(tokenizer, prompt, tools=calls, parallel=use.parallel) for _ in range(asked.n)]
        wanted = [parser for parser in parsers if parser is not None]
        return ParsedChatWire(name, tokenizer, wanted, **kind) if wanted else ChatWire(name, tokenizer, **kind)


def thoughts_of(tokenizer: Tokenizer, prompt: list[int]) -> Literal["open", "closed", "neither"]:
    """How the prompt leaves the think block: a grammar begins behind it."""
    tags = think_tags(tokenizer)
    return prompt_leaves(tokenizer, prompt, tags) if tags else "closed"
