# Generated from notebooks/23_exchange.ipynb by `helios export`; edit the notebook.
"""Taking a request in: its body as JSON, its text as token ids, neither at the event loop's expense."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from fastapi import Request as HTTPRequest
from starlette.requests import ClientDisconnect

from helios.model.tokenizer import Tokenizer
from helios.serve.body import parse_json
from helios.serve.errors import APIError, bad_request, unavailable
from helios.serve.exchange import ClientGone

__all__ = [
    "MAX_BODY_BYTES",
    "TextThreads",
    "hopeless",
    "known_ids",
    "longest_token",
    "prompt_ids",
    "read_body",
    "tail",
    "too_long",
]
MAX_BODY_BYTES = 4 * 1024 * 1024


async def read_body(request: HTTPRequest, limit: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The body as a JSON object. Raises 413 above `limit` bytes, 415 for another content type, 400 for bad JSON."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        message = f"Send `content-type: application/json`, not {kind[:80]!r}."
        raise APIError(415, message, "invalid_request_error", "unsupported_media_type")
    raw = bytearray()
    try:
        async for part in request.stream():
            raw += part
            if len(raw) > limit:
                message = f"The body is larger than {limit} bytes."
                raise APIError(413, message, "invalid_request_error", "request_too_large")
    except ClientDisconnect:
        raise ClientGone from None
    return parse_json(bytes(raw))


class TextThreads:
    """Threads that render and tokenise. `wait_s` bounds the wait for a free one, `work_s` the work itself (seconds)."""

    def __init__(self, threads: int = 2, wait_s: float = 10.0, work_s: float = 10.0) -> None:
        self._pool = ThreadPoolExecutor(threads, "helios-text")
        self._wait_s, self._work_s = wait_s, work_s

    async def run(self, work: Any, *args: Any) -> Any:
        """`work(*args)`. Raises a 503 if no thread came free in time, a 400 if the work takes too long."""
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def begin() -> Any:
            loop.call_soon_threadsafe(begun.set)
            return work(*args)

        future = loop.run_in_executor(self._pool, begin)
        try:
            await asyncio.wait_for(begun.wait(), self._wait_s)
        except TimeoutError:
            future.cancel()
            raise unavailable("The long texts of other requests are still being read; try again later.") from None
        try:
            return await asyncio.wait_for(future, self._work_s)
        except TimeoutError:
            raise bad_request("Rendering and tokenising this request takes too long; send less text.") from None
        except RecursionError:  # the arguments of a tool call are JSON within a string, which nobody has looked into
            raise bad_request("Something in this request is nested too deeply.") from None


@lru_cache(maxsize=1)
def longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token. Asks for every token, once."""
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))


def hopeless(characters: int, context: int, tokenizer: Tokenizer) -> bool:
    """Whether a text of so many characters cannot fit into `context` tokens, whatever it says."""
    return characters > context and characters > context * longest_token(tokenizer)


def too_long(characters: int, context: int, param: str) -> APIError:
    """The 400 for a hopeless text."""
    message = f"A text of {characters} characters is longer than this model's context of {context} tokens can hold."
    return bad_request(message, param, "context_length_exceeded")


def prompt_ids(prompt: str | list[int], add_special_tokens: bool, tokenizer: Tokenizer) -> list[int]:
    """A prompt as ids that the model knows. Raises a 400 for others, and for an empty prompt."""
    ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
    if not ids:
        raise bad_request("`prompt` must hold at least one token.", "prompt")
    known_ids(ids, tokenizer, "prompt")
    return ids


def known_ids(ids: list[int], tokenizer: Tokenizer, param: str) -> None:
    """Raises a 400 for an id that no token has."""
    if bad := [token for token in ids if token >= tokenizer.vocab_size]:
        raise bad_request(f"Token id {bad[0]} is outside the vocabulary of {tokenizer.vocab_size}.", param)


def tail(ids: list[int], count: int | None, room: int) -> list[int]:
    """The last `count` ids: all of them for None, and for -1 as many as there is `room` for."""
    return ids if count is None else ids[-max(room, 1) if count == -1 else -count :]
