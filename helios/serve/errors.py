# Generated from notebooks/19_asking.ipynb by `helios export`; edit the notebook.
"""What went wrong, in the shape that OpenAI's clients unwrap: one exception class, one body, one table of statuses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from helios.engine.scheduler import QueueFull
from helios.engine.worker import EngineDead
from helios.model.params import RequestError
from helios.model.tokenizer import ChatError

__all__ = ["APIError", "bad_request", "install_handlers", "respond", "translate", "translate_http", "unavailable"]


class APIError(Exception):
    """An answer that is not 200: `status`, and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        code: str | int | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON body: `{"error": {"message", "type", "param", "code"}}`."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> APIError:
    """A 400: the request itself is wrong."""
    return APIError(400, message, "invalid_request_error", code, param)


def unavailable(message: str) -> APIError:
    """A 503: the server cannot take this now; somebody else may, or it may later."""
    return APIError(503, message, "service_unavailable", "service_unavailable", headers={"retry-after": "5"})


def translate(error: Exception) -> APIError:
    """The answer for an exception of the layers below; anything unknown is a 500 that reveals nothing."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError):
        return bad_request(str(error), error.param, error.code or "invalid_value")
    if isinstance(error, ChatError):
        return bad_request(str(error), "messages")
    if isinstance(error, QueueFull):
        return APIError(429, str(error), "rate_limit_error", "queue_full", headers={"retry-after": "1"})
    if isinstance(error, EngineDead):
        return unavailable(str(error))
    # uvicorn closes the connection after an error that nobody expected; a client that was not told would use it again.
    closing = {"connection": "close"}
    message = "The server failed on this request. Its log says why."
    return APIError(500, message, "server_error", "internal_error", headers=closing)


def respond(error: Exception) -> JSONResponse:
    """The HTTP response for `error`."""
    known = translate(error)
    return JSONResponse(known.body(), known.status, headers=known.headers)


def translate_http(request: Request, error: HTTPException) -> APIError:
    """The framework's own refusals (404, 405, …) in our shape."""
    missing = error.status_code == 404
    message = f"{request.method} {request.url.path} does not exist here." if missing else str(error.detail)
    kind = "not_found_error" if missing else "invalid_request_error"
    return APIError(error.status_code, message, kind, headers=dict(error.headers or {}))


def install_handlers(app: FastAPI) -> None:
    """Make `app` answer every failure with OpenAI's error object."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return respond(translate_http(request, error) if isinstance(error, HTTPException) else error)

    for known in (APIError, RequestError, ChatError, QueueFull, EngineDead, HTTPException, Exception):
        app.add_exception_handler(known, on_error)
