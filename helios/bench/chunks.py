# Generated from notebooks/05_measuring.ipynb by `helios export`; edit the notebook.
"""What arrives of a streamed answer, piece by piece, and how the pieces become the record of a request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from helios.bench.metrics import RequestRecord
from helios.bench.workloads import Work

__all__ = ["Chunk", "chunks_of", "read_events", "record_of"]


@dataclass(frozen=True)
class Chunk:
    """What arrived at one moment: a number of tokens, and on the last chunk why the request ended.

    `cached_tokens` and `prompt_tokens` are None where the chunk does not say.
    """

    tokens: int
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


def record_of(work: Work, sent_s: float, arrivals: Sequence[tuple[float, Chunk]]) -> RequestRecord:
    """The record of one request from its timed chunks; the tokens of a chunk all get its time."""
    times = [time_s for time_s, chunk in arrivals for _ in range(chunk.tokens)]
    last: dict[str, Any] = {}
    for _, chunk in arrivals:
        last.update({name: value for name, value in vars(chunk).items() if value is not None})
    return RequestRecord(
        sent_s=sent_s,
        token_times_s=times,
        prompt_tokens=last.get("prompt_tokens", len(work.prompt_ids)),
        output_tokens=len(times),
        max_tokens=work.max_tokens,
        cached_tokens=last.get("cached_tokens", 0),
        finish_reason=last.get("finish_reason"),
        error=last.get("error") if times or last.get("error") else "no tokens came back",
        kind=work.kind,
    )


def read_events(arrivals: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The JSON events of a server-sent-event stream, each with the time it was complete; `[DONE]` is left out."""
    pending = b""
    for time_s, received in arrivals:
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            text = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and text != b"[DONE]":
                yield time_s, json.loads(text)


def chunks_of(events: Iterable[tuple[float, dict[str, Any]]]) -> list[tuple[float, Chunk]]:
    """Timed chunks from the events of one streamed completion.

    An event with choices brings tokens. How many, in order of trust: the length of its `token_ids` where the server
    sends them; else the tokens of the final `usage` spread evenly over the events (one each from most servers; the
    first event has the first token, the last one the last). A closing event without text, one too many, has none.
    """
    answers, rest = [], []
    usage: dict[str, Any] = {}
    for time_s, event in events:
        if event.get("error"):
            rest.append((time_s, Chunk(0, error=f"the server answered within the stream: {event['error']}")))
        usage = event.get("usage") or usage
        answers += [(time_s, choice) for choice in event.get("choices") or []]
    counts = _token_counts([choice for _, choice in answers], usage.get("completion_tokens"))
    arrivals = [(t, Chunk(n, choice.get("finish_reason"))) for (t, choice), n in zip(answers, counts, strict=True)]
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        rest.append((answers[-1][0] if answers else 0.0, Chunk(0, None, None, cached, usage.get("prompt_tokens"))))
    return arrivals + rest


def _token_counts(choices: Sequence[dict[str, Any]], total: int | None) -> list[int]:
    if any(choice.get("token_ids") for choice in choices):
        return [len(choice.get("token_ids") or []) for choice in choices]
    if total is None:
        return [1 if choice.get("text") else 0 for choice in choices]
    events = len(choices)
    if events > total and not choices[-1].get("text"):
        events -= 1  # a closing event that only says why
    share = [total * (i + 1) // events - total * i // events for i in range(events)]
    return share + [0] * (len(choices) - events)
