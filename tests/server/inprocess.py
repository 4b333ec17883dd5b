"""The whole server without a socket: `helios serve`'s application on an event loop of its own, asked through ASGI."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from helios.engine.scheduler import Scheduler
from helios.serve.launch import make_server
from helios.serve.settings import ServeSettings

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]
JSON: Headers = [(b"content-type", b"application/json")]


@dataclass
class Answer:
    """What the application sent."""

    status: int
    headers: Headers
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: Any, method: str, path: str, body: bytes = b"", headers: Headers = JSON, query: bytes = b""
) -> Answer:
    """One request of a client that sends all at once, and waits."""
    sent, forever = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event()
    got: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await forever.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        got.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        "method": method, "path": path, "raw_path": path.encode(), "query_string": query, "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    start, *rest = got
    return Answer(start["status"], list(start.get("headers", [])), b"".join(part.get("body", b"") for part in rest))


class InProcess:
    """The application, its scheduler, and the loop they run on."""

    def __init__(self, app: Any, scheduler: Scheduler) -> None:
        self.app, self.scheduler = app, scheduler
        self.loop = asyncio.new_event_loop()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._started, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 60) -> T:
        """`work`'s result, from any thread but the loop's."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def ask(self, method: str, path: str, body: bytes = b"", headers: Headers = JSON, query: bytes = b"") -> Answer:
        return self.run(ask(self.app, method, path, body, headers, query))

    def openapi(self) -> dict[str, Any]:
        """The application's own description of itself."""
        inner = self.app
        while not hasattr(inner, "openapi"):
            inner = inner.app
        return dict(inner.openapi())

    async def _send(self, message: dict[str, Any]) -> None:
        assert message["type"].endswith(".complete"), message
        (self._started if message["type"].startswith("lifespan.startup") else self._ended).set()

    def start(self) -> None:
        self._thread.start()
        self.loop.call_soon_threadsafe(self._inbox.put_nowait, {"type": "lifespan.startup"})
        asyncio.run_coroutine_threadsafe(
            self.app({"type": "lifespan", "state": {}}, self._inbox.get, self._send), self.loop
        )
        assert self._started.wait(30)
        self.scheduler.wait_ready(60)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._inbox.put_nowait, {"type": "lifespan.shutdown"})
        assert self._ended.wait(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


@contextmanager
def in_process(folder: Path, **options: Any) -> Iterator[InProcess]:
    """The model in `folder` behind everything that `helios serve` puts around it; options are its settings."""
    plain = {"device": "cpu", "dtype": "float32", "kv_pages": 64, "log_requests": False, "served_model_name": "tiny"}
    server, _ = make_server(ServeSettings(model=str(folder), **{**plain, **options}))
    running = InProcess(server.config.app, server.scheduler)
    running.start()
    try:
        yield running
    finally:
        running.stop()
