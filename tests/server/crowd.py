"""Two hundred clients that stream, compare what they get with what they should, and now and then just leave."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
LEAVES = 0.25  # of all requests, how many are left before their end
SHARED = [65 + i % 26 for i in range(520)]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def works(count: int = 30, seed: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """Requests of many kinds, each with one right answer."""
    rng = random.Random(seed)
    made: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        length = rng.choice((4, 8, 16, 24, 40))
        short = {"max_tokens": length, **GREEDY}
        words = "".join(rng.choice("abcdefgh žď猫😀 ") for _ in range(rng.randrange(3, 60)))
        asked: tuple[str, dict[str, Any]] = [
            (COMPLETE, {"prompt": words, **short}),
            (COMPLETE, {"prompt": SHARED + [rng.randrange(256) for _ in range(20)], **short}),
            (COMPLETE, {"prompt": words, **short, "temperature": 1.0, "seed": number}),
            (CHAT, {"messages": [{"role": "user", "content": words}], **short}),
            (COMPLETE, {"prompt": words, **short, "n": 2, "temperature": 0.8, "seed": number}),
            (COMPLETE, {"prompt": words, **short, "stop": ["e", "\n\n", "qu", words[:1]], "echo": True}),
        ][number % 6]  # fmt: skip
        made.append(asked)
    return made


def texts(frames: list[bytes]) -> dict[int, str]:
    """The text of each choice in these frames."""
    found: dict[int, str] = {}
    for frame in frames:
        chunk = json.loads(frame.removeprefix(b"data: "))
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + new
    return found


@dataclass
class Crowd:
    """What the clients have seen together."""

    port: int
    right: dict[int, dict[int, str]] = field(default_factory=dict)
    complete: int = 0
    left: int = 0
    complaints: list[str] = field(default_factory=list)
    health: list[tuple[int, float]] = field(default_factory=list)

    async def _open(self, method: str, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer

    async def ask(self, work: tuple[str, dict[str, Any]], leave_after: int | None = None) -> list[bytes]:
        """The frames of a stream; only about `leave_after` of them if that is given: then the client is gone."""
        path, body = work
        reader, writer = await self._open("POST", path, json.dumps({**body, "stream": True}).encode())
        try:
            await writer.drain()
            if leave_after == 0:
                return []
            status = await reader.readline()
            head = await reader.readuntil(b"\r\n\r\n")
            assert status.split()[1] == b"200", (status, head, await reader.read())
            got = b""
            while size := int((await reader.readline()).strip() or b"0", 16):
                got += await reader.readexactly(size)
                await reader.readexactly(2)
                if leave_after is not None and got.count(b"\n\n") >= leave_after:
                    return got.split(b"\n\n")[:-1]
            *frames, done, nothing = got.split(b"\n\n")
            assert done == b"data: [DONE]" and nothing == b"", got[-200:]
            return frames
        finally:
            writer.close()

    async def learn(self, asked: list[tuple[str, dict[str, Any]]]) -> None:
        """Ask for each answer alone: that is the right one."""
        for number, work in enumerate(asked):
            self.right[number] = texts(await self.ask(work))

    async def _client(self, asked: list[tuple[str, dict[str, Any]]], rng: random.Random, until: float) -> None:
        while time.monotonic() < until:
            number = rng.randrange(len(asked))
            leave = rng.randrange(8) if rng.random() < LEAVES else None
            if leave == 0:
                await asyncio.sleep(rng.random() * 0.05)
            try:
                frames = await asyncio.wait_for(self.ask(asked[number], leave), 60)
                self._compare(number, frames, leave is not None)
            except Exception as error:
                self.complaints.append(f"{number}: {type(error).__name__} {error}"[:400])

    def _compare(self, number: int, frames: list[bytes], left: bool) -> None:
        frames = [frame for frame in frames if frame != b"data: [DONE]"]
        got, right = texts(frames), self.right[number]
        if left:
            self.left += 1
            good = all(right[index].startswith(text) for index, text in got.items())
        else:
            self.complete += 1
            good = got == right
        if not good:
            self.complaints.append(f"{number}: {got} is not {right}"[:400])

    async def _look_after_health(self, until: float) -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            reader, writer = await self._open("GET", "/health", b"")
            status = await reader.read()
            writer.close()
            self.health.append((int(status.split()[1]), time.monotonic() - began))
            await asyncio.sleep(0.25)

    async def run(self, asked: list[tuple[str, dict[str, Any]]], clients: int, seconds: float) -> None:
        """Everybody at once, for so long."""
        until = time.monotonic() + seconds
        crowd = [self._client(asked, random.Random(number), until) for number in range(clients)]
        await asyncio.gather(self._look_after_health(until), *crowd)
