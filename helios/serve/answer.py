# Generated from notebooks/23_exchange.ipynb by `helios export`; edit the notebook.
"""Two ways to answer: whole, and as a stream of server-sent events."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from helios.serve.choice import Choice, Usage
from helios.serve.errors import translate
from helios.serve.exchange import ClientGone, Exchange, unless_gone
from helios.serve.protocol import StreamOptions
from helios.serve.wire import DONE, Wire, frame

__all__ = ["EventStream", "Framer", "STREAM_HEADERS", "answer", "echo_only", "frames", "log", "whole_answer"]
log = logging.getLogger("helios.serve")


async def whole_answer(exchange: Exchange, wire: Wire, count: int) -> JSONResponse:
    """Wait for all of `count` choices and answer once."""
    choices = [Choice(index) for index in range(count)]
    async for fresh in exchange.pieces():
        for piece in fresh:
            choices[piece.index].then(piece)
    return JSONResponse(wire.answer(choices, exchange.usage))


class Framer:
    """Turns pieces into frames. `begun`: whether there has been one."""

    def __init__(self, wire: Wire, options: StreamOptions) -> None:
        self.wire, self.options, self.begun = wire, options, False

    def write(self, fresh: list[Choice], usage: Usage) -> bytes:
        """The frames of the pieces that came together, b"" if none is worth one."""
        running = usage if self.options.continuous_usage_stats else None
        chunk, pieces = self.wire.chunk, self.wire.pieces
        out = b"".join([chunk([piece], running) for choice in fresh for piece in pieces(choice)])
        self.begun = self.begun or bool(out)
        return out

    def end(self, usage: Usage) -> bytes:
        """The frame behind all text: the usage, if it was asked for."""
        return self.wire.chunk([], usage) if self.options.include_usage else b""


async def frames(exchange: Exchange, framer: Framer) -> AsyncIterator[bytes]:
    """The events of a stream, those that came together in one write; ends with `[DONE]`, also after an error."""
    try:
        async for fresh in exchange.pieces():
            if out := framer.write(fresh, exchange.usage):
                yield out
        if out := framer.end(exchange.usage):
            yield out
    except Exception as error:
        if not framer.begun:
            raise
        known = translate(error)
        if known.code == "internal_error":
            log.exception("a stream failed")
        yield frame({"error": {**known.body()["error"], "code": known.status}})
    yield DONE


STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """Sends frames until they end or the client leaves; closes `exchange` either way."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, first: bytes, rest: AsyncIterator[bytes]) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._exchange, self._first, self._rest = exchange, first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry: status and headers, then one write per batch of frames."""
        try:
            with contextlib.suppress(ClientGone):
                await unless_gone(receive, self._pump(send))
        finally:
            self._exchange.close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for data in self._rest:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answer(
    receive: Receive, exchange: Exchange, wire: Wire, count: int, stream: StreamOptions | None
) -> Response:
    """Submit the exchange's jobs and answer, streamed if `stream` is given. Raises what submitting raises."""
    try:
        exchange.__enter__()
        if stream is None:
            return await unless_gone(receive, whole_answer(exchange, wire, count))
        rest = frames(exchange, Framer(wire, stream))
        first = await unless_gone(receive, anext(rest))
        return EventStream(exchange, first, rest)
    except BaseException:
        exchange.close()
        raise


def echo_only(wire: Wire, usage: Usage, count: int, stream: StreamOptions | None) -> Response:
    """The answer to `echo` with `max_tokens: 0`: the prompts and nothing computed, streamed if `stream` is given."""
    choices = [Choice(index, finish_reason="length") for index in range(count)]
    if stream is None:
        return JSONResponse(wire.answer(choices, usage))
    framer = Framer(wire, stream)
    body = framer.write(choices, usage) + framer.end(usage) + DONE
    return Response(body, headers=STREAM_HEADERS, media_type=EventStream.media_type)
