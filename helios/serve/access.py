# Generated from notebooks/25_watching.ipynb by `helios export`; edit the notebook.
"""One line of log for each request: who, how long, how many tokens, why it ended. Never what was said."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helios.serve.doorman import clean_path
from helios.serve.metrics import log

__all__ = ["AccessLog", "LONGEST", "LogWriter", "QUIET", "account", "entry", "line"]
LONGEST = 200  # characters kept of what a client chose


def line(fields: dict[str, Any]) -> str:
    """`fields` as one line of JSON: plain ASCII, no control characters, None left out."""
    kept = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(kept, separators=(",", ":")).replace("\x7f", "\\u007f") + "\n"


class LogWriter:
    """Writes lines in a thread of its own. While `room` lines wait, further ones are dropped and counted."""

    def __init__(self, stream: TextIO, room: int = 10_000) -> None:
        self._stream, self._lines = stream, queue.Queue[dict[str, Any] | None](room)
        self._thread = threading.Thread(target=self._run, name="helios-log", daemon=True)
        self.dropped = 0
        self._thread.start()

    def write(self, fields: dict[str, Any]) -> None:
        """Have `fields` written soon. Returns at once."""
        try:
            self._lines.put_nowait(fields)
        except queue.Full:
            self.dropped += 1

    def close(self, wait_s: float = 2.0) -> None:
        """Write what waits, then end; give up on a reader who does not read for `wait_s` seconds."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=wait_s)
            self._thread.join(wait_s)

    def _run(self) -> None:
        while (fields := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # the stream was closed: the server goes on
                self._stream.write(line(fields))
                if self._lines.empty():
                    self._stream.flush()


def account(exchange: Any) -> dict[str, Any]:
    """Tokens, waiting and end of an `Exchange`. Of several prompts, the waiting of the one that was served first."""
    jobs, ends = exchange.jobs, list(exchange.reasons.values())
    if not jobs:
        return {}  # refused before anything was submitted
    if len(ends) < sum(request.params.n for request in exchange.requests):
        ends.append("abort")
    queued = [job.timings.admitted_s - job.timings.queued_s for job in jobs if job.timings.admitted_s is not None]
    first = [job.timings.first_token_s - job.timings.queued_s for job in jobs if job.timings.first_token_s is not None]
    return {
        "prompt_tokens": exchange.usage.prompt,
        "cached_tokens": sum(job.cached_tokens for job in jobs),
        "output_tokens": exchange.usage.completion,
        "queue_s": round(min(queued), 6) if queued else None,
        "ttft_s": round(min(first), 6) if first else None,
        "finish": ",".join(dict.fromkeys(ends)),
    }


QUIET = frozenset({("/health", 200), ("/health", 503), ("/metrics", 200)})  # asked every few seconds, by machines


def entry(scope: Scope, note: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The fields of one request's line. `note` is what the layers inside left: status, id, key, exchange."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    told = account(note["exchange"]) if "exchange" in note else {}
    return {
        "time": now,
        "id": note.get("id"),
        "method": scope["method"][:LONGEST],
        "path": clean_path(scope["path"])[:LONGEST],
        "status": note.get("status", 499),  # nothing was sent: the client left before there was an answer
        "key": note.get("key"),
        **told,
        "e2e_s": round(seconds, 6),
    }


class AccessLog:
    """Outermost layer: notes each answer's status and id, tells `count(path, status)`, has a line written at the end.

    `paths` are those counted by name, all others as "other": what clients make up must not become a label.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: frozenset[str],
        count: Callable[[str, int], None],
        write: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.app, self._paths, self._count, self._write = app, paths, count, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun, note = time.perf_counter(), dict[str, Any]()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _noted(message, note, time.perf_counter() - begun)}
            await send(message)

        try:
            await self.app({**scope, "helios.note": note}, receive, noting)
        finally:
            try:
                self._tell(entry(scope, note, time.perf_counter() - begun))
            except Exception:
                log.exception("a request's line could not be written")

    def _tell(self, told: dict[str, Any]) -> None:
        path, status = told["path"], told["status"]
        self._count(path if path in self._paths else "other", status)
        if self._write is not None and (path, status) not in QUIET:
            self._write(told)


def _noted(message: Message, note: dict[str, Any], seconds: float) -> list[tuple[bytes, bytes]]:
    headers = [*message.get("headers", []), (b"openai-processing-ms", b"%d" % (seconds * 1000))]
    own = next((value for name, value in headers if name == b"x-request-id"), b"")
    if not own:  # an answer from outside the doorman
        own = uuid.uuid4().hex.encode()
        headers.append((b"x-request-id", own))
    note["status"], note["id"] = message["status"], own.decode("latin-1")
    return headers
