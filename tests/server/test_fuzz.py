"""Twenty thousand malformed bodies: each gets its refusal, none harms the server."""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.server.inprocess import Answer, InProcess, ask, in_process
from tests.server.malformed import CHAT, COMPLETE, bodies

COUNT = int(os.environ.get("HELIOS_FUZZ_BODIES", "20000"))
SEED = int(os.environ.get("HELIOS_FUZZ_SEED", "1"))
AT_ONCE = 16
PATIENCE_S = 20.0
EXPECTED = {200, 400, 404, 413, 429}
GROWTH_BYTES = 40 * 1024 * 1024


@pytest.fixture(scope="module")
def app(tiny_folder: Any) -> Iterator[InProcess]:
    with in_process(tiny_folder("qwen3"), max_context=96, kv_pages=32) as running:
        yield running


def resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def complaint(path: str, raw: bytes, answer: Answer) -> str | None:
    """What is wrong with an answer to a malformed body, if anything is."""
    if answer.status not in EXPECTED:
        return f"status {answer.status}"
    if len(answer.body) > 200_000:
        return f"{len(answer.body)} bytes"
    if answer.status != 200:
        error = answer.json()["error"]
        return None if error["message"] and len(answer.body) < 4000 else "a strange error"
    if not answer.body.startswith(b"data: "):
        return None if isinstance(answer.json(), dict) else "not an object"
    if not answer.body.endswith(b"data: [DONE]\n\n") or b'data: {"error"' in answer.body:
        return "a stream that failed"
    return None


class Campaign:
    """Some clients that send what an iterator yields, and keep book."""

    def __init__(self, app: Any) -> None:
        self.app, self.statuses = app, collections.Counter[int]()
        self.complaints: list[str] = []
        self.slowest = (0.0, "", b"")

    async def client(self, work: Iterator[tuple[str, bytes]]) -> None:
        for path, raw in work:
            started = time.monotonic()
            try:
                answer = await asyncio.wait_for(ask(self.app, "POST", path, raw), PATIENCE_S)
                self.statuses[answer.status] += 1
                found = complaint(path, raw, answer)
            except Exception as error:  # a server lets none out
                found = f"{type(error).__name__}: {error}"
            if found:
                self.complaints.append(f"{path} {raw[:300]!r}: {found}")
            self.slowest = max(self.slowest, (time.monotonic() - started, path, raw[:300]))

    async def run(self, work: Iterator[tuple[str, bytes]]) -> None:
        await asyncio.gather(*(self.client(work) for _ in range(AT_ONCE)))


def says_hello(app: InProcess) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True}
    answer = app.ask("POST", CHAT, json.dumps(body).encode())
    assert answer.status == 200 and answer.json()["usage"]["completion_tokens"] == 4
    streamed = app.ask("POST", COMPLETE, json.dumps({"prompt": "Hi", "max_tokens": 2, "stream": True}).encode())
    assert streamed.status == 200 and streamed.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
def test_malformed_bodies(app: InProcess) -> None:
    says_hello(app)
    campaign = Campaign(app.app)
    app.run(campaign.run(bodies(COUNT // 4, seed=SEED)), 300)
    before = resident()
    app.run(campaign.run(bodies(COUNT - COUNT // 4, seed=SEED + 1)), 300)
    grown = resident() - before
    print(f"{dict(campaign.statuses)}, slowest {campaign.slowest}, grown {grown / 2**20:.1f} MiB")
    assert not campaign.complaints, "\n".join([str(len(campaign.complaints)), *campaign.complaints[:10]])
    assert campaign.statuses.total() == COUNT
    assert campaign.statuses[400] > COUNT * 0.5, "most of them are refused"
    assert campaign.statuses[200] > COUNT * 0.05, "some are good after all, and run"
    assert grown < GROWTH_BYTES, f"memory grew by {grown} bytes"
    says_hello(app)
    stats = app.scheduler.stats()
    assert stats["running"] == stats["waiting"] == 0
    engine = app.scheduler.wait_ready(0)
    engine.check()
    assert engine.stats()["pages_free"] + engine.stats()["pages_evictable"] == engine.pool.capacity


def test_bodies_over_the_limit(app: InProcess) -> None:
    for raw in (b"a" * 5_000_000, b'{"prompt": "' + b"a" * 4_300_000 + b'"}', b"[" * 4_300_000):
        for path in (CHAT, COMPLETE, "/tokenize", "/detokenize"):
            assert app.ask("POST", path, raw).status == 413
    says_hello(app)
