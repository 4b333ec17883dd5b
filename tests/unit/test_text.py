"""The text stream: characters, stop strings, and what is left at the end."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from helios.model.text import StopMatcher, TextStream


class Bytes:
    """A stand-in for a tokenizer: id → bytes by a list; negative ids are control tokens."""

    def __init__(self, *spellings: bytes) -> None:
        self.spellings = spellings

    def is_special(self, token_id: int) -> bool:
        return token_id < 0

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id < 0 else self.spellings[token_id]


def stream(*spellings: bytes, **options: object) -> TextStream:
    return TextStream(Bytes(*spellings), **options)  # type: ignore[arg-type]


def run(*spellings: bytes, **options: object) -> tuple[list[str], str | None]:
    text = stream(*spellings, **options)
    pieces = [text.push(i) for i in range(len(spellings))] + [text.finish()]
    assert "".join(pieces) == text.text
    return pieces, text.stop_reason


def test_a_character_is_released_when_it_is_complete() -> None:
    assert run(b"a\xf0\x9f", b"\x98", b"\x80b")[0] == ["a", "", "😀b", ""]


def test_an_unfinished_character_comes_out_as_a_replacement_at_the_end() -> None:
    assert run(b"a\xf0\x9f")[0] == ["a", "\ufffd"]


def test_bytes_that_cannot_become_a_character_do_not_block_what_follows() -> None:
    assert run(b"\x98\x80x", b"y")[0] == ["\ufffd\ufffdx", "y", ""]


def test_without_stop_strings_nothing_is_held() -> None:
    assert run(b"a", b"b", b"c")[0] == ["a", "b", "c", ""]


def test_only_what_could_become_a_stop_string_is_held() -> None:
    assert run(b"the E", b"N", b"V", stop=["END"])[0] == ["the ", "", "ENV", ""]
    assert run(b"hello", b" you", stop=["\n\nUser:"])[0] == ["hello", " you", ""]


def test_within_min_tokens_a_stop_string_is_text() -> None:
    assert run(b"xEND", b"yEND", b"z", stop=["END"], min_tokens=1) == (["x" + "END", "y", "", ""], "END")
    assert run(b"xE", b"NDy", b"z", stop=["END"], min_tokens=1)[1] == "END", "it began early and ended late"
    assert run(b"xEN", b"Dy", b"z", stop=["END"], min_tokens=2) == (["x", "ENDy", "z", ""], None)
    assert run(b"abab", b"ab", stop=["abab"], min_tokens=1) == (["ab", "", ""], "abab"), "it overlaps one too early"


@pytest.mark.parametrize("seed", range(300))
def test_min_tokens_against_the_definition(seed: int) -> None:
    """The text ends at the first place behind that of the first `min_tokens` where a stop string is complete."""
    rng = random.Random(seed)
    tokens = [bytes(rng.choices(b"ab", k=rng.randrange(1, 4))) for _ in range(8)]
    stops = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 3))]
    least, include = rng.randrange(9), rng.random() < 0.5
    whole, early = b"".join(tokens).decode(), len(b"".join(tokens[:least]))
    ends = [end for end in range(early + 1, len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    want, reason = whole, None
    if ends:
        reason = max((stop for stop in stops if whole[: ends[0]].endswith(stop)), key=len)
        want = whole[: ends[0] if include else ends[0] - len(reason)]
    pieces, found = run(*tokens, stop=stops, min_tokens=least, include_stop=include)
    assert ("".join(pieces), found) == (want, reason)


def test_a_stop_string_over_several_tokens_never_leaks() -> None:
    assert run(*(bytes([c]) for c in b"abcDEFGHIJklm"), stop=["DEFGHIJ"])[0][:4] == ["a", "b", "c", ""]
    assert run(b"xaD", b"EFGHI", b"Jk", stop=["DEFGHIJ"]) == (["xa", "", "", ""], "DEFGHIJ")


def test_a_stop_string_inside_a_token_cuts_at_the_character() -> None:
    assert run(b"hello wor", b"ld", stop=["o w"]) == (["hell", "", ""], "o w")
    assert run(b"hello wor", b"ld", stop=["o w"], include_stop=True) == (["hello w", "", ""], "o w")


def test_the_stop_string_complete_first_wins_and_of_two_the_longer() -> None:
    for cut in (1, 2, 3, 4):
        text = b"xabcd"
        assert run(text[:cut], text[cut:], stop=["abcd", "bc"])[1] == "bc"
    assert run(b"xabc", stop=["bc", "abc"]) == (["x", ""], "abc")


def test_held_text_is_released_at_the_end() -> None:
    assert run(b"a", b"EN", stop=["END"])[0] == ["a", "", "EN"]


def test_a_stop_string_may_be_completed_by_the_final_flush() -> None:
    assert run(b"a\xf0", stop=["\ufffd"]) == (["a", ""], "\ufffd")


def test_nothing_comes_after_a_stop_or_a_finish() -> None:
    text = stream(b"END", b"more", stop=["END"])
    assert text.push(0) == text.push(1) == text.finish() == text.finish() == ""
    text = stream(b"a", b"b")
    assert (text.push(0), text.finish(), text.push(1), text.finish()) == ("a", "", "", "")


def test_control_tokens_are_skipped_or_shown() -> None:
    assert stream().push(-1) == ""
    assert stream(skip_special_tokens=False).push(-1) == "<end>"
    text = stream(b"\xc3", b"\xa4")
    assert [text.push(0), text.push(-1), text.push(1)] == ["", "", "ä"]


def test_an_empty_stop_string_is_refused_and_a_single_one_accepted() -> None:
    with pytest.raises(ValueError, match="empty"):
        stream(stop=[""])
    assert run(b"abc", stop="b") == (["a", ""], "b")


def test_the_matcher_falls_back_within_itself() -> None:
    matcher = StopMatcher("ababc")
    assert [matcher.step(character) for character in "abababc"] == [False] * 6 + [True]


def test_what_is_held_is_right_for_every_short_pattern() -> None:
    for pattern in map("".join, itertools.product("ab", repeat=8)):
        stop, text = pattern[:7], "aabaaabaaaabbab" + pattern
        matcher = StopMatcher(stop)
        for end in range(1, len(text) + 1):
            if matcher.step(text[end - 1]):
                assert text[:end].endswith(stop)
                break
            assert matcher.matched == max(k for k in range(len(stop)) if text[:end].endswith(stop[:k]))


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    text = stream(b"word ", stop=["\n\nUser:"])

    def seconds(tokens: int) -> float:
        began = time.thread_time()
        for _ in range(tokens):
            text.push(0)
        return time.thread_time() - began

    first = min(seconds(1000) for _ in range(5))
    for _ in range(20):
        seconds(5000)
    assert min(seconds(1000) for _ in range(5)) < 5 * first
