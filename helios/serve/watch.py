# Generated from notebooks/25_watching.ipynb by `helios export`; edit the notebook.
"""Everything that watches, put around the application: log line, CORS, keys, `/metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from helios.engine.job import Batch
from helios.serve.access import AccessLog
from helios.serve.errors import APIError, respond
from helios.serve.keys import KeyGuard, Keys
from helios.serve.metrics import Metrics
from helios.serve.scrape import CONTENT_TYPE

__all__ = ["HeaderLimit", "allow_origins", "both", "watch"]


class HeaderLimit:
    """Answers 431 when path, query and headers together exceed `size` bytes, or there are more than `count` headers."""

    def __init__(self, app: ASGIApp, size: int = 32 * 1024, count: int = 256) -> None:
        self.app, self._size, self._count = app, size, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] == "http":
            headers = scope["headers"]
            size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
            size += sum(len(name) + len(value) for name, value in headers)
            if size > self._size or len(headers) > self._count:
                message = f"The headers are too large: at most {self._count} of them, {self._size} bytes with the path."
                refused = APIError(431, message, "invalid_request_error", "headers_too_large")
                return await respond(refused)(scope, receive, send)
        await self.app(scope, receive, send)


def both(*receivers: Callable[[Batch], None]) -> Callable[[Batch], None]:
    """One `deliver` for several receivers, called in this order."""

    def deliver(batch: Batch) -> None:
        for receive in receivers:
            receive(batch)

    return deliver


def allow_origins(app: ASGIApp, origins: Iterable[str]) -> ASGIApp:
    """`app` for pages of these origins ("*": of any), without credentials; `app` itself if there are none."""
    told = ("x-request-id", "retry-after", "openai-processing-ms")
    listed = tuple(origins)
    if not listed:
        return app
    return CORSMiddleware(app, listed, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=told)


def watch(
    app: FastAPI,
    metrics: Metrics,
    scrape: Callable[[], bytes],
    *,
    keys: Keys | None = None,
    public_metrics: bool = False,
    origins: Iterable[str] = (),
    write: Callable[[dict[str, Any]], None] | None = None,
) -> ASGIApp:
    """`app` (from `create_app`, not started yet) with `/metrics`, guarded and logged; serve what this returns.

    `scrape` makes the metrics' text, `write` takes the fields of a log line (None: no log).
    """

    async def exposition() -> PlainTextResponse:
        return PlainTextResponse(scrape(), media_type=CONTENT_TYPE)

    app.add_api_route("/metrics", exposition, response_class=PlainTextResponse)
    open_paths = frozenset({"/health", *(["/metrics"] if public_metrics else [])})
    app.add_middleware(KeyGuard, keys=keys or Keys(), public=open_paths)
    app.add_middleware(HeaderLimit)
    paths = frozenset(path for route in app.routes if "{" not in (path := getattr(route, "path", "{")))
    return AccessLog(allow_origins(app, origins), paths, metrics.answered, write)
