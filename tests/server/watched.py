"""A server as the launcher makes it, in a thread of this process, with what it writes to its log at hand."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from helios.serve.keys import Keys
from helios.serve.launch import Server, bind, make_server
from helios.serve.settings import ServeSettings
from tests.server.conftest import Running

NAME = "tiny"


@dataclass
class Watched(Running):
    """The running server, and its log."""

    server: Server
    written: io.StringIO

    def lines(self, count: int) -> list[dict[str, Any]]:
        """Every line of log, once there are at least `count`."""
        self.until(lambda: self.written.getvalue().count("\n") >= count)
        return [json.loads(line) for line in self.written.getvalue().splitlines()]

    def samples(self) -> dict[str, float]:
        """`/metrics`, as Prometheus's own parser reads it: `name{label="value",…}` (labels sorted) to its value."""
        return samples_of(self.client.get("/metrics").text)


def samples_of(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series = spelled(sample.name, sample.labels)
            assert series not in found, f"{series} is there twice"
            found[series] = sample.value
    return found


def spelled(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{inside}}}"


def of(name: str, **labels: str) -> str:
    """A series of Helios's own with the model's label, as `samples` spells it."""
    return spelled(f"helios:{name}", {"model_name": NAME, **labels})


@contextlib.contextmanager
def launched(folder: Path, keys: Iterable[str] = (), **options: Any) -> Iterator[Watched]:
    """Serve the model in `folder`; options are those of ServeSettings. The client sends the first key."""
    written, keys = io.StringIO(), list(keys)
    small: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_pages": 64, "debug_checks": True}
    settings = ServeSettings(model=str(folder), served_model_name=NAME, **{**small, **options})
    with contextlib.redirect_stderr(written):  # the log's writer takes what is standard error now
        server, _ = make_server(settings, Keys(keys))
    listener = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    server.scheduler.wait_ready(60)
    while not server.started:
        time.sleep(0.005)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
        yield Watched(url, server.scheduler, client, server, written)
    server.should_exit = True
    thread.join(20)
    if server.log is not None:
        server.log.close()


def slow_down(running: Running, seconds: float) -> None:
    """Make every tick take at least so long, however fast the machine."""
    forward = running.engine.runner.forward

    def slow(inputs: Any) -> Any:
        time.sleep(seconds)
        return forward(inputs)

    running.engine.runner.forward = slow  # type: ignore[method-assign]
