"""A server that is asked from outside: `helios serve` in a process of its own, or whatever answers at a given URL."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
KEY = "sk-conformance"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
HELIOS = [sys.executable, "-c", "from helios.cli import main; main()"]


@dataclass
class Stream:
    """One streamed answer: its frames as they came, and what they say together."""

    response: httpx.Response
    frames: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        blocks = self.response.text.split("\n\n")
        assert blocks.pop() == "", f"a stream ends with a blank line: {self.response.text[-200:]!r}"
        events = [block for block in blocks if not block.startswith(":")]  # comments are heartbeats
        assert all(event.startswith("data: ") and "\n" not in event for event in events), events[:5]
        self.frames = [event.removeprefix("data: ") for event in events]

    @cached_property
    def chunks(self) -> list[dict[str, Any]]:
        """The JSON of every frame but `[DONE]`, which must come once, at the end."""
        assert self.frames[-1] == "[DONE]" and self.frames.count("[DONE]") == 1
        return [json.loads(each) for each in self.frames[:-1]]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """Every choice of every chunk, in order."""
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    def of(self, index: int) -> list[dict[str, Any]]:
        """The pieces of one choice."""
        return [choice for choice in self.choices if choice["index"] == index]

    def pieces(self, index: int = 0) -> list[str]:
        """The text of each piece of one choice."""
        return [c["text"] if "text" in c else c["delta"].get("content") or "" for c in self.of(index)]

    def text(self, index: int = 0) -> str:
        """The whole text of one choice."""
        return "".join(self.pieces(index))

    def finish(self, index: int = 0) -> str:
        """The one finish reason of a choice."""
        (reason,) = [choice["finish_reason"] for choice in self.of(index) if choice["finish_reason"] is not None]
        return str(reason)

    def calls(self, index: int = 0) -> list[dict[str, Any]]:
        """The tool calls of a choice, put together from their deltas as a client does it."""
        calls: dict[int, dict[str, Any]] = {}
        for choice in self.of(index):
            for delta in choice["delta"].get("tool_calls") or []:
                call = calls.setdefault(delta["index"], {"id": None, "type": None, "name": "", "arguments": ""})
                call["id"], call["type"] = delta.get("id") or call["id"], delta.get("type") or call["type"]
                call["name"] += delta.get("function", {}).get("name") or ""
                call["arguments"] += delta.get("function", {}).get("arguments") or ""
        assert sorted(calls) == list(range(len(calls))), "calls are numbered 0, 1, 2 …"
        return [calls[number] for number in sorted(calls)]


@dataclass
class Target:
    """The server under test. `foreign`: not started by these tests, so perhaps not Helios."""

    client: httpx.Client
    foreign: bool
    key: str | None
    model: str = ""
    owner: str = ""
    context: int = 0

    def __post_init__(self) -> None:
        (card, *_) = self.get("/v1/models").json()["data"]
        self.model = self.model or card["id"]
        self.owner, self.context = card.get("owned_by", ""), card.get("max_model_len") or 4096

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json={"model": self.model, **body})

    def raw(self, path: str, content: bytes, **headers: str) -> httpx.Response:
        return self.client.post(path, content=content, headers={"content-type": "application/json", **headers})

    def ok(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text[:500]
        return dict(json.loads(answer.content, parse_constant=_not_json))

    def chat(self, content: Any = "Say hello.", **extra: Any) -> dict[str, Any]:
        """A whole chat answer, greedy and short unless told otherwise; `content` may also be the messages."""
        messages = content if isinstance(content, list) and "role" in content[0] else [_user(content)]
        return self.ok(CHAT, messages=messages, **{**GREEDY, **extra})

    def complete(self, prompt: Any = "The capital of France is", **extra: Any) -> dict[str, Any]:
        return self.ok(COMPLETE, prompt=prompt, **{**GREEDY, **extra})

    def text(self, prompt: Any = "The capital of France is", **extra: Any) -> str:
        """The text of a completion's first choice."""
        return str(self.complete(prompt, **extra)["choices"][0]["text"])

    def said(self, content: Any = "Say hello.", **extra: Any) -> str:
        """The text of a chat answer's first choice."""
        return str(self.chat(content, **extra)["choices"][0]["message"]["content"])

    def stream(self, path: str = CHAT, **body: Any) -> Stream:
        """A streamed answer, read to its end; a short greedy chat unless told otherwise."""
        default: dict[str, Any] = {"messages": [_user("Say hello.")]} if path == CHAT else {"prompt": "Once upon a"}
        answer = self.post(path, **{**default, **GREEDY, "stream": True, **body})
        assert answer.status_code == 200, answer.text[:500]
        return Stream(answer)

    def tokens(self, text: str, **extra: Any) -> list[int]:
        return list(self.ok("/tokenize", prompt=text, **{"add_special_tokens": False, **extra})["tokens"])

    def refused(self, answer: httpx.Response, status: int = 400, param: str | None = None, code: str = "") -> Any:
        """The error object of a refusal. Which field it names and its code are only demanded of Helios."""
        assert answer.status_code == status, f"{answer.status_code}: {answer.text[:300]}"
        assert answer.headers["content-type"].startswith("application/json")
        error = answer.json()["error"]
        assert isinstance(error, dict) and error["message"] and isinstance(error["message"], str)
        assert {"message", "type", "param", "code"} <= set(error)
        assert "Traceback" not in answer.text and len(answer.text) < 8000
        if not self.foreign:
            assert param in (None, error["param"]), error
            assert code in ("", error["code"]), error
        return error

    @cached_property
    def smollm2(self) -> bool:
        """Whether the model reads text as SmolLM2 does, so that its token ids are known."""
        answer = self.post("/tokenize", prompt="Hello world", add_special_tokens=False)
        return answer.status_code == 200 and answer.json()["tokens"] == [19556, 905]


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _not_json(token: str) -> None:
    raise AssertionError(f"{token} is not JSON")


def connect(url: str, key: str | None, *, foreign: bool, model: str = "") -> Target:
    """A client of the server at `url`."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(keepalive_expiry=2)  # before any server gives up an idle connection
    client = httpx.Client(base_url=url, headers=headers, timeout=120, limits=limits, trust_env=False)
    return Target(client, foreign, key, model)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environment(**settings: str) -> dict[str, str]:
    """This process's variables without Helios's settings, and `settings`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HELIOS_") or k == "HELIOS_HOME"}
    return {**kept, **settings}


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url + "/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} did not become healthy")


@contextmanager
def helios_serve(*flags: str, **settings: str) -> Iterator[str]:
    """`helios serve` with these flags on a free port; it must end cleanly, and have nothing to say against itself."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        command = [*HELIOS, "serve", "--port", str(port), *flags]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment(**settings))
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
            process.send_signal(signal.SIGTERM)
            status = process.wait(30)
        finally:
            process.kill()
            process.wait()
            log.seek(0)
            said = log.read().decode(errors="replace")
            if "Traceback" in said:
                print(said[-5000:])
        assert status == 0 and "Traceback" not in said, f"status {status}: {said[-3000:]}"
