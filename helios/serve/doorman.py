# Generated from notebooks/24_server.ipynb by `helios export`; edit the notebook.
"""The outermost layer of the server: tidy paths, and an id on every answer."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helios.serve.openapi import finished

__all__ = ["App", "Doorman", "clean_path", "request_id"]


class App(FastAPI):
    """FastAPI with the doorman outside everything, also outside the handler of unexpected errors."""

    def build_middleware_stack(self) -> ASGIApp:
        """The framework's layers, and ours around them."""
        return Doorman(super().build_middleware_stack())

    def openapi(self) -> dict[str, Any]:
        """What may be asked, and what is answered, as an OpenAPI document."""
        return finished(super().openapi())


class Doorman:
    """Collapses doubled slashes in the path and puts an `x-request-id` on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        own = request_id(scope)

        async def send_with_id(message: Message) -> None:
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
