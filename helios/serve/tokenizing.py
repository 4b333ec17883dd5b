# Generated from notebooks/24_server.ipynb by `helios export`; edit the notebook.
"""The endpoints that count: text or messages to ids, and ids to text."""

from __future__ import annotations

from typing import Any

from fastapi import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from helios.model.tokenizer import Tokenizer
from helios.serve.chat import render
from helios.serve.checks import validate
from helios.serve.intake import known_ids, read_body
from helios.serve.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from helios.serve.service import Service
from helios.serve.tools import check_tools

__all__ = ["Tokens", "tokens_of"]


def tokens_of(asked: TokenizeRequest, tokenizer: Tokenizer, context: int) -> list[int]:
    """The ids of the text or the messages."""
    if asked.prompt is not None:
        return tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
    chat = ChatRequest.model_validate(asked.model_dump(include=set(ChatRequest.model_fields), exclude_none=True))
    return render(chat, check_tools(asked.tools), tokenizer, context)


class Tokens:
    """`POST /tokenize` and `POST /detokenize`."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def tokenize(self, request: HTTPRequest) -> Response:
        """`{count, max_model_len, tokens}`, and the tokens' own texts if they are asked for."""
        service, asked = self.service, validate(TokenizeRequest, await read_body(request))
        service.check_model(asked)
        tokenizer, context = service.tokenizer, service.engine.context
        ids = await service.texts.run(tokens_of, asked, tokenizer, context)
        told: dict[str, Any] = {"count": len(ids), "max_model_len": context, "tokens": ids}
        if asked.return_token_strs:
            told["token_strs"] = [tokenizer.token_text(token) for token in ids]
        return JSONResponse(told)

    async def detokenize(self, request: HTTPRequest) -> Response:
        """`{prompt}`: the text of these ids, control tokens spelled out."""
        service, asked = self.service, validate(DetokenizeRequest, await read_body(request))
        service.check_model(asked)
        known_ids(asked.tokens, service.tokenizer, "tokens")
        text = await service.texts.run(service.tokenizer.decode, asked.tokens, False)
        return JSONResponse({"prompt": text})
