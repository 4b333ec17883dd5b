"""`helios serve` with a window: `/probe` tells, from inside, how late the event loop is and whether pages add up.

Run as `python -m tests.server.load_server FOLDER PORT`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import psutil

from helios.engine.scheduler import Scheduler
from helios.serve.launch import bind, make_server
from helios.serve.settings import ServeSettings

EVERY_S = 0.005


class Probe:
    """An ASGI layer that answers `/probe` and measures how much later than asked the loop wakes a sleeper."""

    def __init__(self, app: Any, scheduler: Scheduler) -> None:
        self.app, self.scheduler = app, scheduler
        self.late_s: list[float] = []

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(EVERY_S)
            self.late_s.append(time.perf_counter() - before - EVERY_S)

    def facts(self) -> dict[str, Any]:
        """Everything a test wants to know; starts the measurement of lateness anew."""
        late, self.late_s = sorted(self.late_s), []
        engine = self.scheduler.wait_ready(0)
        stats = self.scheduler.stats()
        check = "busy"
        if not stats["running"] and not stats["waiting"]:
            try:
                engine.check()
                check = "clean"
            except AssertionError as error:
                check = str(error)
        return {
            "late_p50_s": late[len(late) // 2] if late else 0.0,
            "late_p99_s": late[len(late) * 99 // 100] if late else 0.0,
            "late_max_s": late[-1] if late else 0.0,
            "resident": psutil.Process().memory_info().rss,
            "capacity": engine.pool.capacity,
            "check": check,
            "stats": stats,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            self._task = asyncio.ensure_future(self._watch())
        if scope["type"] != "http" or scope["path"] != "/probe":
            return await self.app(scope, receive, send)
        body = json.dumps(self.facts()).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})


def main(folder: str, port: str) -> None:
    plain: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "log_requests": False}
    small: dict[str, Any] = {"kv_pages": 200, "prefill_chunk_size": 128}  # what ticks need in passing is soon all there
    server, _ = make_server(ServeSettings(model=folder, served_model_name="tiny", **plain, **small))
    server.config.app = Probe(server.config.app, server.scheduler)
    server.run(sockets=[bind("127.0.0.1", int(port))])


if __name__ == "__main__":
    main(*sys.argv[1:])
