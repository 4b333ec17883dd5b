# Generated from notebooks/20_server.ipynb by `helios export`; edit the notebook.
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
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse
from starlette.responses import Response

from helios.engine.engine import Engine
from helios.engine.scheduler import Scheduler
from helios.engine.sequence import Request
from helios.model.params import SamplingParams
from helios.model.tokenizer import Tokenizer
from helios.serve.answer import answer, echo_only
from helios.serve.doorman import App
from helios.serve.errors import APIError, bad_request, install_handlers, unavailable
from helios.serve.exchange import Exchange, Mailroom
from helios.serve.intake import TextThreads, hopeless, prompt_ids, read_body, tail, too_long
from helios.serve.protocol import (
    ChatRequest,
    Common,
    CompletionRequest,
    StreamOptions,
    sampling_params,
    validate,
)
from helios.serve.wire import ChatWire, CompletionWire, Wire

__all__ = ["Service", "add_health", "add_models", "create_app", "stream_options"]


class Service:
    """What the endpoints share. `name` is the model's served name; nothing a client sends ever becomes a path."""

    def __init__(self, scheduler: Scheduler, mail: Mailroom, name: str) -> None:
        self.scheduler, self.mail, self.name = scheduler, mail, name
        self.started = int(time.time())
        self.texts = TextThreads()

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
        return kind(
            self.name,
            self.tokenizer,
            logprobs=logprobs,
            token_ids=asked.return_token_ids,
            skip_special=asked.skip_special_tokens,
        )

    def exchange(self, asked: Common, prompts: list[list[int]], params: SamplingParams) -> Exchange:
        """The engine's requests for `prompts`, not submitted yet."""
        salt = hashlib.sha256(asked.cache_salt.encode()).digest() if asked.cache_salt else b""
        now = time.monotonic()
        requests = [
            Request(id=uuid.uuid4().hex, prompt_ids=ids, params=params, salt=salt, arrival_s=now) for ids in prompts
        ]
        return Exchange(self.scheduler, self.mail, requests)

    async def chat(self, request: HTTPRequest) -> Response:
        """`POST /v1/chat/completions`."""
        asked = validate(ChatRequest, await read_body(request))
        self.check_model(asked)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        params = sampling_params(asked, self.engine.model.config.sampling_defaults, asked.limit, logprobs)
        prompt = await self.texts.run(self._render, asked, self.tokenizer)
        exchange = self.exchange(asked, [prompt], params)
        wire = self.wire(ChatWire, asked, asked.logprobs)
        return await answer(request.receive, exchange, wire, [""] * asked.n, stream_options(asked))

    def _render(self, asked: ChatRequest, tokenizer: Tokenizer) -> list[int]:
        tools = None if asked.tool_choice == "none" else asked.tools
        generate = asked.add_generation_prompt and not asked.continue_final_message
        ending = {"add_generation_prompt": generate, "continue_final_message": asked.continue_final_message}
        options = {"tools": tools, **ending, **asked.template_arguments()}
        context = self.engine.context
        # The messages as Python writes them are a cheap upper bound; the template may leave much of them out.
        if asked.truncate_prompt_tokens is None and hopeless(len(str(asked.messages)), context, tokenizer):
            characters = len(tokenizer.render_chat(asked.messages, **options))
            if hopeless(characters, context, tokenizer):
                raise too_long(characters, context, "messages")
        return tail(tokenizer.encode_chat(asked.messages, **options), asked.truncate_prompt_tokens)

    async def complete(self, request: HTTPRequest) -> Response:
        """`POST /v1/completions`."""
        asked = validate(CompletionRequest, await read_body(request))
        self.check_model(asked)
        defaults = self.engine.model.config.sampling_defaults
        params = sampling_params(asked, defaults, max(asked.max_tokens, 1), asked.logprobs)
        if len(asked.prompts()) > (most := self.scheduler.max_waiting):
            raise bad_request(f"Send at most {most} prompts per request: more never fit into the queue.", "prompt")
        prompts, texts = await self.texts.run(self._prompts, asked, self.tokenizer)
        echoes = [text for text in texts for _ in range(asked.n)]
        wire = self.wire(CompletionWire, asked, asked.logprobs is not None)
        exchange = self.exchange(asked, prompts, params)
        if asked.max_tokens == 0:
            for each in exchange.requests:
                self.engine.check_fits(each)
            return echo_only(wire, exchange.usage, echoes, stream_options(asked))
        return await answer(request.receive, exchange, wire, echoes, stream_options(asked))

    def _prompts(self, asked: CompletionRequest, tokenizer: Tokenizer) -> tuple[list[list[int]], list[str]]:
        """Per prompt its ids, and the text to put before the answer ("" unless `echo`)."""
        cut, context = asked.truncate_prompt_tokens, self.engine.context
        ids: list[list[int]] = []
        echoes: list[str] = []
        for prompt in asked.prompts():
            if isinstance(prompt, str) and cut is None and hopeless(len(prompt), context, tokenizer):
                raise too_long(len(prompt), context, "prompt")
            whole = prompt_ids(prompt, asked.add_special_tokens, tokenizer)
            ids.append(tail(whole, cut))
            if not asked.echo:
                echoes.append("")
            elif isinstance(prompt, str) and len(ids[-1]) == len(whole):
                echoes.append(prompt)
            else:
                echoes.append(tokenizer.decode(ids[-1], skip_special_tokens=False))
        return ids, echoes


def stream_options(asked: Common) -> StreamOptions | None:
    """How to stream, or None for a whole answer."""
    return (asked.stream_options or StreamOptions()) if asked.stream else None


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
    app = App(title="Helios", version=version, lifespan=lifespan, **options)
    install_handlers(app)
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    app.add_api_route("/v1/completions", service.complete, methods=["POST"])
    add_models(app, service)
    add_health(app, service, version)
    return app
