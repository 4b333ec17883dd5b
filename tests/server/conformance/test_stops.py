"""Stop strings: found in the text, wherever tokens begin and end, and never shown."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conformance.marks import helios_only, vllm_bug
from tests.server.live import CHAT, COMPLETE, Target

PROMPT = "Monday, Tuesday, Wednesday,"
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def whole(target: Target) -> str:
    """What follows when nothing stops it; the slices that tests stop at come only once in it."""
    text = target.text(**LONG)
    assert len(text) > 30
    return text


def cut(text: str, stop: str) -> str:
    return text[: text.index(stop)]


SLICES = [(0, 1), (1, 2), (3, 9), (5, 12), (8, 10), (10, 25), (13, 14), (17, 30)]


@pytest.mark.parametrize(("start", "end"), SLICES)
def test_cut_at_the_character(target: Target, whole: str, start: int, end: int) -> None:
    stop = whole[start:end]
    body = target.complete(stop=stop, **LONG)["choices"][0]
    assert body["text"] == cut(whole, stop)
    assert body["finish_reason"] == "stop" and body["stop_reason"] == stop


@pytest.mark.parametrize(("start", "end"), SLICES)
def test_streamed_nothing_of_it_leaks(target: Target, whole: str, start: int, end: int) -> None:
    stream = target.stream(COMPLETE, stop=[whole[start:end]], **LONG)
    assert stream.text() == cut(whole, whole[start:end]) and stream.finish() == "stop"


def test_stop_reason_is_streamed(target: Target, whole: str) -> None:
    last = target.stream(COMPLETE, stop=[whole[5:9]], **LONG).choices[-1]
    assert last["stop_reason"] == whole[5:9]


@pytest.mark.parametrize("streamed", [False, True])
def test_the_earliest_match_wins(target: Target, whole: str, streamed: bool) -> None:
    stops = [whole[12:16], whole[6:9], "never said"]
    text = target.stream(COMPLETE, stop=stops, **LONG).text() if streamed else target.text(stop=stops, **LONG)
    assert text == min((cut(whole, stop) for stop in stops if stop in whole), key=len)


@pytest.mark.parametrize("streamed", [False, True])
def test_include_stop_str_in_output(target: Target, whole: str, streamed: bool) -> None:
    asked: dict[str, Any] = {"stop": [whole[7:11]], "include_stop_str_in_output": True, **LONG}
    text = target.stream(COMPLETE, **asked).text() if streamed else target.text(**asked)
    assert text == cut(whole, whole[7:11]) + whole[7:11]


@pytest.mark.parametrize("stop", ["never said by anyone", ["猫", "😀"], [], ["x" * 200]])
def test_a_stop_that_never_comes_changes_nothing(target: Target, whole: str, stop: Any) -> None:
    assert target.text(stop=stop, **LONG) == whole
    assert target.stream(COMPLETE, stop=stop, **LONG).text() == whole


def test_what_was_held_back_comes_at_the_end(target: Target, whole: str) -> None:
    """The text ends with a beginning of the stop string: it was no stop, so it is shown."""
    stream = target.stream(COMPLETE, stop=[whole[-4:] + "never"], **LONG)
    assert stream.text() == whole and stream.finish() == "length"


@vllm_bug("vllm#13087: the first pieces are empty")
def test_no_empty_pieces_while_text_is_held_back(target: Target, whole: str) -> None:
    pieces = target.stream(COMPLETE, stop=["never said by anyone", whole[-3:] + "x"], **LONG).pieces()
    assert all(pieces[:-1])


@pytest.mark.parametrize("number", range(4))
def test_two_stops_duplicate_nothing(target: Target, whole: str, number: int) -> None:
    stops = [whole[9 + number : 12 + number], whole[20:24]]
    text = target.stream(COMPLETE, stop=stops, **LONG).text()
    assert text == target.text(stop=stops, **LONG) and whole.startswith(text)


def test_each_choice_stops_for_itself(target: Target, whole: str) -> None:
    stream = target.stream(COMPLETE, n=3, temperature=1.2, seed=11, **{**LONG, "stop": [","]})
    for index in range(3):
        assert "," not in stream.text(index) and stream.finish(index) in ("stop", "length")


def test_chat(target: Target) -> None:
    text = target.said("Count from 1 to 9.", max_tokens=24)
    stop = text[4:7]
    assert target.said("Count from 1 to 9.", max_tokens=24, stop=stop) == cut(text, stop)
    talk = [{"role": "user", "content": "Count from 1 to 9."}]
    assert target.stream(CHAT, messages=talk, max_tokens=24, stop=stop).text() == cut(text, stop)


def test_a_stop_in_the_prompt_is_no_stop(target: Target, whole: str) -> None:
    body = target.complete(stop=["Tuesday, Wed"], echo=True, **LONG)["choices"][0]
    assert body["text"].startswith(PROMPT)


def test_a_stop_of_one_character_in_several_tokens(target: Target) -> None:
    ids = target.tokens("😀")
    body = target.complete(logit_bias={str(ids[0]): 60}, stop=["\ufffd"], max_tokens=4)
    assert body["choices"][0]["finish_reason"] in ("stop", "length")


def test_usage_counts_the_tokens_that_ended_it(target: Target, whole: str) -> None:
    body = target.complete(stop=[whole[5:9]], return_token_ids=True, **LONG)
    assert body["usage"]["completion_tokens"] == len(body["choices"][0]["token_ids"]) > 0


@helios_only("OpenAI allows 4, others any number")
def test_sixteen_stops(target: Target, whole: str) -> None:
    assert target.text(stop=[f"never {number}" for number in range(16)], **LONG) == whole
