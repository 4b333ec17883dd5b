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
from helios.serve.wire import ChatWire, Choice, CompletionWire, Wire

__all__ = [
    "Doorman",
    "MAX_BODY_BYTES",
    "Service",
    "add_health",
    "add_models",
    "clean_path",
    "create_app",
    "echo_only",
    "prompt_ids",
    "read_body",
    "request_id",
    "stream_options",
]
MAX_BODY_BYTES = 4 * 1024 * 1024


class Service:
    """What the endpoints share. `name` is the model's served name; nothing a client sends ever becomes a path."""

    def __init__(self, scheduler: Scheduler, mail: Mailroom, name: str) -> None:
        self.scheduler, self.mail, self.name = scheduler, mail, name
        self.started = int(time.time())
        self._texts = ThreadPoolExecutor(1, "helios-text")

    async def in_text_thread(self, work: Any, *args: Any) -> Any:
        """`work(*args)`, off the event loop. Raises a 400 if it takes longer than ten seconds."""
        future = asyncio.get_running_loop().run_in_executor(self._texts, work, *args)
        try:
            return await asyncio.wait_for(future, 10)
        except TimeoutError:
            raise bad_request("Rendering and tokenising this request takes too long.", "messages") from None

    @property
    def engine(self) -> Engine:
        """The engine, for reading what never changes. Raises a 503 until it is ready, `EngineDead` when it is gone."""
        try:
            return self.scheduler.wait_ready(0)
        except TimeoutError:
            raise unavailable("The model is still loading.") from None

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer; a 503 as for `engine`, and for a model that has none."""
        if (tokenizer := self.engine.tokenizer) is None:
            raise unavailable("The served model has no tokenizer.json, so this server can neither read nor write text.")
        return tokenizer

    def check_model(self, asked: Common) -> None:
        """Raises a 404 if the request names a model that is not served here."""
        if asked.model not in (None, self.name):
            message = f"The model {asked.model[:100]!r} is not served here; this server has {self.name!r}."
            raise APIError(404, message, "not_found_error", "model_not_found", "model")

    def wire(self, kind: type[Wire], asked: Common, logprobs: bool) -> Wire:
        """The shapes of this request's answer."""
        return kind(self.name, self.tokenizer, logprobs=logprobs, token_ids=asked.return_token_ids)

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

    async def chat(self, request: HTTPRequest) -> Response:
        """`POST /v1/chat/completions`."""
        asked = validate(ChatRequest, await read_body(request))
        self.check_model(asked)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        params = sampling_params(asked, self.engine.model.config.sampling_defaults, asked.limit, logprobs)
        prompt = await self.in_text_thread(self._render, asked, self.tokenizer)
        exchange = self.exchange(asked, [prompt], params)
        wire = self.wire(ChatWire, asked, asked.logprobs)
        return await answer(request.receive, exchange, wire, [""] * asked.n, stream_options(asked))

    def _render(self, asked: ChatRequest, tokenizer: Tokenizer) -> list[int]:
        tools = None if asked.tool_choice == "none" else asked.tools
        generate = asked.add_generation_prompt and not asked.continue_final_message
        ending = {"add_generation_prompt": generate, "continue_final_message": asked.continue_final_message}
        return tokenizer.encode_chat(asked.messages, tools=tools, **ending, **asked.template_arguments())

    async def complete(self, request: HTTPRequest) -> Response:
        """`POST /v1/completions`."""
        asked = validate(CompletionRequest, await read_body(request))
        self.check_model(asked)
        defaults = self.engine.model.config.sampling_defaults
        params = sampling_params(asked, defaults, max(asked.max_tokens, 1), asked.logprobs)
        prompts, texts = await self.in_text_thread(self._prompts, asked, self.tokenizer)
        echoes = [text for text in texts for _ in range(asked.n)]
        wire = self.wire(CompletionWire, asked, asked.logprobs is not None)
        exchange = self.exchange(asked, prompts, params)
        if asked.max_tokens == 0:
            return echo_only(wire, exchange, echoes)
        return await answer(request.receive, exchange, wire, echoes, stream_options(asked))

    def _prompts(self, asked: CompletionRequest, tokenizer: Tokenizer) -> tuple[list[list[int]], list[str]]:
        """Per prompt its ids, and the text to put before the answer ("" unless `echo`)."""
        prompts = asked.prompts()
        ids = [prompt_ids(prompt, asked.add_special_tokens, tokenizer) for prompt in prompts]
        if not asked.echo:
            return ids, [""] * len(ids)
        return ids, [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in prompts]


async def read_body(request: HTTPRequest, limit: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The body as a JSON object. Raises 413 above `limit` bytes, 415 for another content type, 400 for bad JSON."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        message = f"Send `content-type: application/json`, not {kind[:80]!r}."
        raise APIError(415, message, "invalid_request_error", "unsupported_media_type")
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > limit:
            message = f"The body is larger than {limit} bytes."
            raise APIError(413, message, "invalid_request_error", "request_too_large")
    return parse_json(bytes(raw))


def stream_options(asked: Common) -> StreamOptions | None:
    """How to stream, or None for a whole answer."""
    return (asked.stream_options or StreamOptions()) if asked.stream else None


def prompt_ids(prompt: str | list[int], add_special_tokens: bool, tokenizer: Tokenizer) -> list[int]:
    """A prompt as ids that the model knows. Raises a 400 for others, and for an empty prompt."""
    ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
    if not ids:
        raise bad_request("`prompt` must hold at least one token.", "prompt")
    if bad := [token for token in ids if token >= tokenizer.vocab_size]:
        raise bad_request(f"Token id {bad[0]} is outside the vocabulary of {tokenizer.vocab_size}.", "prompt")
    return ids


def echo_only(wire: Wire, exchange: Exchange, echoes: list[str]) -> Response:
    """The answer to `echo` with `max_tokens: 0`: the prompt, and nothing computed."""
    choices = [Choice(index, text, finish_reason="length") for index, text in enumerate(echoes)]
    return JSONResponse(wire.answer(choices, exchange.usage))


class Doorman:
    """Collapses doubled slashes in the path and puts an `x-request-id` on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        own = request_id(scope)

        async def send_with_id(message: ASGIMessage) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (b"x-request-id", own)]}
            await send(message)

        await self.app({**scope, "path": clean_path(scope["path"])}, receive, send_with_id)


def clean_path(path: str) -> str:
    """`path` with single slashes, and none at its end."""
    return "/" + "/".join(part for part in path.split("/") if part)


def request_id(scope: Scope) -> bytes:
    """The client's own `x-request-id` if it can be repeated safely, otherwise a new one."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    usable = 0 < len(given) <= 128 and all(33 <= byte < 127 for byte in given)
    return given if usable else uuid.uuid4().hex.encode()


def add_models(app: FastAPI, service: Service) -> None:
    """The served model: listed, and by its name."""

    def card() -> dict[str, Any]:
        about = {"id": service.name, "object": "model", "created": service.started, "owned_by": "helios"}
        return {**about, "max_model_len": service.engine.context}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if model != service.name:
            message = f"The model {model[:100]!r} is not served here; this server has {service.name!r}."
            raise APIError(404, message, "not_found_error", "model_not_found", "model")
        return card()


def add_health(app: FastAPI, service: Service, version: str) -> None:
    """How the worker is (200 only when it serves), and which Helios this is."""

    @app.get("/health")
    async def health() -> Response:
        now = service.scheduler.health()
        return JSONResponse({"status": now.status, "reason": now.reason}, 200 if now.status == "ready" else 503)

    @app.get("/version")
    async def version_() -> dict[str, str]:
        return {"version": version}


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
        if scheduler.health().status != "dead":  # else somebody has seen to it, and a hanging thread was waited for
            await asyncio.to_thread(scheduler.shutdown)

    options: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = FastAPI(title="Helios", version=version, lifespan=lifespan, **options)
    install_handlers(app)
    app.add_middleware(Doorman)
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    app.add_api_route("/v1/completions", service.complete, methods=["POST"])
    add_models(app, service)
    add_health(app, service, version)
    return app
