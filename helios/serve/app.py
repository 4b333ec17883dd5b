# Generated from notebooks/24_server.ipynb by `helios export`; edit the notebook.
"""The server: one request's way through.

An application around the exchange: endpoints for chat, completions and tokens, each a line of
stations that may end it with a sentence, and around all of them a layer that gives every answer an
id.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.responses import Response

from helios.engine.scheduler import Scheduler
from helios.serve.chat import ChatEndpoint
from helios.serve.completions import CompletionEndpoint
from helios.serve.doorman import App
from helios.serve.errors import install_handlers
from helios.serve.exchange import Mailroom
from helios.serve.openapi import answers, body_of
from helios.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from helios.serve.service import Service
from helios.serve.tokenizing import Tokens

__all__ = ["add_answers", "add_health", "add_models", "create_app"]


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
            raise service.unknown_model(model)
        return card()


def add_health(app: FastAPI, service: Service, version: str) -> None:
    """How the worker is (200 only when it serves), and which Helios this is."""

    told = {"description": "Loading, draining, stalled or dead."}

    @app.get("/health", responses={503: told})
    async def health() -> Response:
        now = service.scheduler.health()
        return JSONResponse({"status": now.status, "reason": now.reason}, 200 if now.status == "ready" else 503)

    @app.get("/version")
    async def version_() -> dict[str, str]:
        return {"version": version}


def add_answers(app: FastAPI, service: Service) -> None:
    """The endpoints that take a body."""
    chat, completions, tokens = ChatEndpoint(service), CompletionEndpoint(service), Tokens(service)
    answered = ("id", "object", "created", "model", "choices", "usage")
    for path, post, model, keys, streams in (
        ("/v1/chat/completions", chat.post, ChatRequest, answered, True),
        ("/v1/completions", completions.post, CompletionRequest, answered, True),
        ("/tokenize", tokens.tokenize, TokenizeRequest, ("count", "max_model_len", "tokens"), False),
        ("/detokenize", tokens.detokenize, DetokenizeRequest, ("prompt",), False),
    ):
        told: dict[str, Any] = {"responses": answers(keys, streams=streams), "openapi_extra": body_of(model)}
        app.add_api_route(path, post, methods=["POST"], **told)


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
        service.close()

    options: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None, "redirect_slashes": False}
    app = App(title="Helios", version=version, lifespan=lifespan, **options)
    install_handlers(app)
    add_answers(app, service)
    add_models(app, service)
    add_health(app, service, version)
    return app
