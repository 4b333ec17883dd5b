# Generated from notebooks/13_server.ipynb by `helios export`; edit the notebook.
"""The server: one request's way through.

An HTTP face for the engine: the worker's events cross to the event loop once per tick, answers
leave whole or as a stream from one source of pieces, and a client that leaves stops costing
anything within one tick.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

from helios.engine.engine import Engine
from helios.engine.scheduler import Scheduler
from helios.engine.sequence import Request
from helios.model.params import SamplingParams
from helios.model.tokenizer import Tokenizer
from helios.serve.answer import answer
from helios.serve.errors import APIError, bad_request, install_handlers, unavailable
from helios.serve.exchange import Exchange, Mailroom
from helios.serve.protocol import (
    ChatRequest,
    Common,
    CompletionRequest,
    StreamOptions,
    parse_json,
    sampling_params,
    validate,
)
from helios.serve.wire import ChatWire, CompletionWire, Wire

__all__ = [
    "Doorman",
    "MAX_BODY_BYTES",
    "Service",
    "add_facts",
    "create_app",
    "echo_only",
    "read_body",
    "stream_options",
]
MAX_BODY_BYTES = 4 * 1024 * 1024


class Service:
    """What the endpoints share. `name` is the model's served name; nothing a client sends ever becomes a path."""

    def __init__(self, scheduler: Scheduler, mail: Mailroom, name: str) -> None:
        self.scheduler, self.mail, self.name = scheduler, mail, name
        self.started = int(time.time())
        # Templates and long prompts are turned into ids here, so that they never hold up the event loop.
        self._texts = ThreadPoolExecutor(1, "helios-text")

    @property
    def engine(self) -> Engine:
        """The engine, for reading what never changes. Raises a 503 until it is ready, `EngineDead` when it is gone."""
        try:
            return self.scheduler.wait_ready(0)
        except TimeoutError:
            raise unavailable("The model is still loading.") from None

    async def in_text_thread(self, work: Any, *args: Any) -> Any:
        """`work(*args)`, off the event loop. Raises a 400 if it takes longer than ten seconds."""
        future = asyncio.get_running_loop().run_in_executor(self._texts, work, *args)
        try:
            return await asyncio.wait_for(future, 10)
        except TimeoutError:
            raise bad_request("Rendering and tokenising this request takes too long.", "messages") from None

    def check_model(self, asked: Common) -> None:
        """Raises a 404 if the request names a model that is not served here."""
        if asked.model not in (None, self.name):
            message = f"The model {asked.model[:100]!r} is not served here; this server has {self.name!r}."
            raise APIError(404, message, "not_found_error", "model_not_found", "model")

    def wire(self, kind: type[Wire], asked: Common, logprobs: bool) -> Wire:
        """The shapes of this request's answer."""
        return kind(self.name, self.engine.tokenizer, logprobs=logprobs, token_ids=asked.return_token_ids)

    def exchange(self, asked: Common, prompts: list[list[int]], params: SamplingParams) -> Exchange:
        """The engine's requests for `prompts`, not submitted yet."""
        salt = hashlib.sha256(asked.cache_salt.encode()).digest() if asked.cache_salt else b""
        cut = asked.truncate_prompt_tokens
        now = time.monotonic()
        requests = [
            Request(id=uuid.uuid4().hex, prompt_ids=ids[-cut:] if cut else ids, params=params, salt=salt, arrival_s=now)
            for ids in prompts
        ]
        return Exchange(self.scheduler, self.mail, requests)

    async def complete(self, request: HTTPRequest) -> Response:
        """`POST /v1/completions`."""
        asked = validate(CompletionRequest, await read_body(request))
        self.check_model(asked)
        tokenizer: Tokenizer = self.engine.tokenizer
        params = sampling_params(
            asked, self.engine.model.config.sampling_defaults, max(asked.max_tokens, 1), asked.logprobs
        )
        prompts, texts = await self.in_text_thread(self._prompts, asked, tokenizer)
        echoes = [text if asked.echo else "" for text in texts for _ in range(asked.n)]
        wire = self.wire(CompletionWire, asked, asked.logprobs is not None)
        exchange = self.exchange(asked, prompts, params)
        if asked.max_tokens == 0:
            return echo_only(wire, exchange, prompts, echoes)
        return await answer(request.receive, exchange, wire, echoes, stream_options(asked))

    def _prompts(self, asked: CompletionRequest, tokenizer: Tokenizer) -> tuple[list[list[int]], list[str]]:
        prompts, texts = [], []
        for prompt in asked.prompts():
            ids = (
                tokenizer.encode(prompt, add_special_tokens=asked.add_special_tokens)
                if isinstance(prompt, str)
                else prompt
            )
            if not ids:
                raise bad_request("`prompt` must hold at least one token.", "prompt")
            if bad := [token for token in ids if token >= tokenizer.vocab_size]:
                raise bad_request(f"Token id {bad[0]} is outside the vocabulary of {tokenizer.vocab_size}.", "prompt")
            prompts.append(ids)
            if asked.echo:
                texts.append(prompt if isinstance(prompt, str) else tokenizer.decode(ids, skip_special_tokens=False))
        return prompts, texts or [""] * len(prompts)

    async def chat(self, request: HTTPRequest) -> Response:
        """`POST /v1/chat/completions`."""
        asked = validate(ChatRequest, await read_body(request))
        self.check_model(asked)
        engine = self.engine
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        params = sampling_params(asked, engine.model.config.sampling_defaults, asked.limit, logprobs)
        prompt = await self.in_text_thread(self._render, asked, engine.tokenizer)
        exchange = self.exchange(asked, [prompt], params)
        wire = self.wire(ChatWire, asked, asked.logprobs)
        return await answer(request.receive, exchange, wire, [""] * asked.n, stream_options(asked))

    def _render(self, asked: ChatRequest, tokenizer: Tokenizer) -> list[int]:
        tools = None if asked.tool_choice == "none" else asked.tools
        generate = asked.add_generation_prompt and not asked.continue_final_message
        return tokenizer.encode_chat(
            asked.messages,
            tools=tools,
            add_generation_prompt=generate,
            continue_final_message=asked.continue_final_message,
            **asked.template_arguments(),
        )


async def read_body(request: HTTPRequest, limit: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The body as a JSON object. Raises 413 above `limit` bytes, 415 for another content type, 400 for bad JSON."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(
            415,
            f"Send `content-type: application/json`, not {kind[:80]!r}.",
            "invalid_request_error",
            "unsupported_media_type",
        )
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > limit:
            raise APIError(413, f"The body is larger than {limit} bytes.", "invalid_request_error", "request_too_large")
    return parse_json(bytes(raw))


def stream_options(asked: Common) -> StreamOptions | None:
    """How to stream, or None for a whole answer."""
    return (asked.stream_options or StreamOptions()) if asked.stream else None


def echo_only(wire: Wire, exchange: Exchange, prompts: list[list[int]], echoes: list[str]) -> Response:
    """The answer to `echo` with `max_tokens: 0`: the prompt, and nothing computed."""
    from helios.serve.wire import Choice

    choices = [Choice(index, text, finish_reason="length") for index, text in enumerate(echoes)]
    exchange.usage.prompt = sum(map(len, prompts))
    return JSONResponse(wire.answer(choices, exchange.usage))


class Doorman:
    """Collapses doubled slashes in the path and puts an `x-request-id` on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = scope["path"]
        while "//" in path:
            path = path.replace("//", "/")
        scope = {**scope, "path": path if path == "/" else path.rstrip("/")}
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        usable = 0 < len(given) <= 128 and all(33 <= byte < 127 for byte in given)
        own = given if usable else uuid.uuid4().hex.encode()

        async def send_with_id(message: ASGIMessage) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (b"x-request-id", own)]}
            await send(message)

        await self.app(scope, receive, send_with_id)


def create_app(scheduler: Scheduler, mail: Mailroom, *, name: str, version: str = "") -> FastAPI:
    """The server as an ASGI application. It starts `scheduler` with the event loop and shuts it down with it.

    `mail.deliver` must be the scheduler's `deliver`. Until the model is loaded every endpoint answers 503.
    """
    service = Service(scheduler, mail, name)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        mail.attach()
        scheduler.start()
        yield
        await asyncio.to_thread(scheduler.shutdown)

    app = FastAPI(
        title="Helios", version=version, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    install_handlers(app)
    app.add_middleware(Doorman)
    app.state.service = service
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    app.add_api_route("/v1/completions", service.complete, methods=["POST"])
    add_facts(app, service, version)
    return app


def add_facts(app: FastAPI, service: Service, version: str) -> None:
    """The endpoints that only tell: models, health, version."""

    def card() -> dict[str, Any]:
        return {
            "id": service.name,
            "object": "model",
            "created": service.started,
            "owned_by": "helios",
            "max_model_len": service.engine.context,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if model != service.name:
            raise APIError(
                404, f"The model {model[:100]!r} is not served here.", "not_found_error", "model_not_found", "model"
            )
        return card()

    @app.get("/health")
    async def health() -> Response:
        now = service.scheduler.health()
        alive = now.status == "ready"
        return JSONResponse({"status": now.status, "reason": now.reason}, 200 if alive else 503)

    @app.get("/version")
    async def version_() -> dict[str, str]:
        return {"version": version}
