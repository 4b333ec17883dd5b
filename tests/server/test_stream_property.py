"""Whatever is asked of whatever model: the pieces of a stream, joined, are the answer that comes whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.inprocess import InProcess, in_process

TEXTS = st.text("abc é日😀\n<|im_end|>", max_size=12)
STOPS = st.lists(st.text("ab é日😀\x00�", min_size=1, max_size=3), max_size=3)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def served(tiny_folder: Any, request: pytest.FixtureRequest) -> Iterator[InProcess]:
    """A random model over bytes: most of what it says is no character, or half of one."""
    with in_process(tiny_folder(request.param), runner="eager") as running:
        yield running


def streamed(body: bytes) -> list[dict[str, Any]]:
    frames = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert frames[-1] == "[DONE]"
    return [choice for frame in frames[:-1] for choice in json.loads(frame)["choices"]]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    prompt=TEXTS.filter(bool) | st.lists(st.integers(0, 255), min_size=1, max_size=9),
    stop=STOPS,
    seed=st.integers(0, 2**31),
    include=st.booleans(),
    n=st.integers(1, 3),
)
def test_a_stream_joined_is_the_whole(
    served: InProcess, prompt: str | list[int], stop: list[str], seed: int, include: bool, n: int
) -> None:
    asked = {"prompt": prompt, "max_tokens": 24, "seed": seed, "n": n, "temperature": 1.5, "ignore_eos": True}
    asked |= {"stop": stop or None, "include_stop_str_in_output": include}
    whole = served.ask("POST", "/v1/completions", json.dumps(asked).encode())
    assert whole.status == 200, whole.body
    pieces = streamed(served.ask("POST", "/v1/completions", json.dumps({**asked, "stream": True}).encode()).body)
    for choice in whole.json()["choices"]:
        mine = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        ends = [piece["finish_reason"] for piece in mine if piece["finish_reason"]]
        assert ends == [choice["finish_reason"]] and mine[-1]["stop_reason"] == choice["stop_reason"]
        if "�" not in choice["text"]:
            assert not any("�" in piece["text"] for piece in mine)
