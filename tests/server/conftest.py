"""A real server on a real port, over a tiny random model."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from helios.engine.build import build_engine
from helios.engine.config import EngineConfig
from helios.engine.engine import Engine
from helios.engine.scheduler import Scheduler
from helios.serve.app import create_app
from helios.serve.exchange import Mailroom
from tests.server.live import KEY, Target, connect, helios_serve

NAME = "tiny"


@dataclass
class Running:
    """A server in a thread of this process: its address, and what is behind it."""

    url: str
    scheduler: Scheduler
    client: httpx.Client

    @property
    def engine(self) -> Engine:
        return self.scheduler.wait_ready(30)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def until(self, condition: Any, seconds: float = 10.0) -> None:
        """Wait for something that the worker does soon; fail after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)

    def idle(self) -> bool:
        return self.scheduler.stats()["running"] == 0 and self.scheduler.stats()["waiting"] == 0


def start(folder: Path, **options: Any) -> tuple[Running, uvicorn.Server, threading.Thread]:
    """Serve the model in `folder` on a free port; options are those of EngineConfig."""
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", debug_checks=True, **{"kv_pages": 64, **options}
    )
    mail = Mailroom()
    scheduler = Scheduler(lambda: build_engine(config), max_waiting=config.max_waiting, deliver=mail.deliver)
    app = create_app(scheduler, mail, name=NAME, version="test")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    scheduler.wait_ready(60)
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    return Running(url, scheduler, httpx.Client(base_url=url, timeout=60)), server, thread


@pytest.fixture(scope="module")
def served(tiny_folder: Any) -> Iterator[Running]:
    running, server, thread = start(tiny_folder("qwen3"))
    yield running
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def small(tiny_folder: Any) -> Iterator[Running]:
    """One sequence at a time, one place in the queue, two pages."""
    running, server, thread = start(tiny_folder("qwen3"), max_batch_size=1, max_waiting=1, kv_pages=2)
    yield running
    server.should_exit = True
    thread.join(20)


def events(response: httpx.Response) -> list[str]:
    """The data of each server-sent event, and nothing else between them."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == "", "the stream must end with a blank line"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    """The server at HELIOS_CONFORMANCE_URL (see conformance/), else Helios with the embedded model."""
    if url := os.environ.get("HELIOS_CONFORMANCE_URL"):
        key, model = os.environ.get("HELIOS_CONFORMANCE_API_KEY"), os.environ.get("HELIOS_CONFORMANCE_MODEL", "")
        yield connect(url.rstrip("/").removesuffix("/v1"), key, foreign=True, model=model)
        return
    with helios_serve("--model", "smollm2", "--kv-pages", "96", "--max-context", "2048", HELIOS_API_KEY=KEY) as url:
        yield connect(url, KEY, foreign=False)
