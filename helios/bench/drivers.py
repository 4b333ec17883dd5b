# Generated from notebooks/05_measuring.ipynb by `helios export`; edit the notebook.
"""Send a workload and record what comes back: from a function, a scheduler in this process, or a server over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, get_type_hints

import httpx

from helios.bench.chunks import Chunk, chunks_of, read_events, record_of
from helios.bench.metrics import RequestRecord
from helios.bench.workloads import Work
from helios.model.sampling import SamplingParams

__all__ = [
    "BenchRequest",
    "BenchmarkError",
    "SchedulerLike",
    "check_lengths",
    "request_class",
    "run_scheduler",
    "run_sequential",
    "run_streams",
    "run_url",
]


class BenchmarkError(RuntimeError):
    """The benchmark cannot be run, or its answers are not what was asked for."""


def run_sequential(
    generate: Callable[[Work], Iterable[int]],
    works: Sequence[Work],
    *,
    cached_tokens: Callable[[], int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[RequestRecord]:
    """Serve the works one after another, in the order given, with an engine that knows one request at a time.

    Each work counts as sent at the start plus its `arrival_s`, so the time it waits for those before it is part of
    its time to first token. `cached_tokens`, if given, says after each request how many prompt tokens a cache restored.
    """
    start, records = clock(), []
    for work in works:
        sent = start + work.arrival_s
        if (early := sent - clock()) > 0:
            sleep(early)
        arrivals = [(clock(), Chunk(1)) for _ in generate(work)]
        restored = cached_tokens() if cached_tokens else 0
        end = Chunk(0, finish_reason="length" if len(arrivals) == work.max_tokens else "stop", cached_tokens=restored)
        records.append(record_of(work, sent, [*arrivals, (clock(), end)]))
    return records


def run_streams(submit: Callable[[Work], Iterable[Chunk]], works: Sequence[Work]) -> list[RequestRecord]:
    """Send every work at its arrival time, each from a thread of its own, and record the chunks `submit` gives.

    An exception of one request becomes that record's error; the others go on.
    """
    arrivals: list[list[tuple[float, Chunk]]] = [[] for _ in works]
    start = time.perf_counter()

    def client(work: Work, mine: list[tuple[float, Chunk]]) -> None:
        time.sleep(max(0.0, start + work.arrival_s - time.perf_counter()))
        try:
            for chunk in submit(work):
                mine.append((time.perf_counter(), chunk))
        except Exception as problem:  # the record carries it: one failed request must not end the run
            mine.append((time.perf_counter(), Chunk(0, error=f"{type(problem).__name__}: {problem}")))

    threads = [threading.Thread(target=client, args=pair, daemon=True) for pair in zip(works, arrivals, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [record_of(w, start + w.arrival_s, mine) for w, mine in zip(works, arrivals, strict=True)]


class SchedulerLike(Protocol):
    """What `run_scheduler` needs of a scheduler.

    `submit(request)` returns a job with `cached_tokens` and `events()`; an event has `token_ids`, `finish_reason` and
    `error`.
    """

    def submit(self, request: Any, /) -> Any: ...


@dataclass
class BenchRequest:
    """The fields of a request that the benchmark fills in; for schedulers that name no class of their own."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    salt: bytes = b""
    arrival_s: float = 0.0


def request_class(submit: Callable[..., Any]) -> Callable[..., Any]:
    """The class that `submit` says its `request` has; `BenchRequest` where it does not say."""
    said = get_type_hints(submit).get("request", Any)
    return BenchRequest if said is Any else said


def run_scheduler(scheduler: SchedulerLike, works: Sequence[Work]) -> list[RequestRecord]:
    """Send the works to a scheduler in this process, as requests of the class that its `submit` names."""
    numbers = {id(work): number for number, work in enumerate(works)}
    request = request_class(scheduler.submit)

    def submit(work: Work) -> Iterator[Chunk]:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=work.max_tokens)
        name = f"bench-{numbers[id(work)]}"
        job = scheduler.submit(request(id=name, prompt_ids=work.prompt_ids, params=params, arrival_s=time.monotonic()))
        for event in job.events():
            yield Chunk(len(event.token_ids), event.finish_reason, event.error)
        yield Chunk(0, cached_tokens=job.cached_tokens)

    return run_streams(submit, works)


async def _post(
    client: httpx.AsyncClient, url: str, body: bytes, delay: float
) -> tuple[list[tuple[float, bytes]], str | None]:
    """The raw pieces of one answer with their times, and an error sentence if there is one. Nothing is parsed here."""
    pieces: list[tuple[float, bytes]] = []
    await asyncio.sleep(max(0.0, delay))
    try:
        async with client.stream("POST", url, content=body) as response:
            async for piece in response.aiter_raw():
                pieces.append((time.perf_counter(), piece))
            if response.status_code != 200:
                text = b"".join(piece for _, piece in pieces).decode(errors="replace")
                return [], f"the server answered {response.status_code}: {text[:300]}"
    except httpx.HTTPError as problem:
        return pieces, f"the connection failed: {type(problem).__name__} {problem}"
    return pieces, None


async def _first_model(client: httpx.AsyncClient, base: str) -> str:
    try:
        response = await client.get(f"{base}/models")
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as problem:
        raise BenchmarkError(
            f"no model list from {base}/models ({type(problem).__name__}): "
            "start the server and wait until it is ready, or name the model"
        ) from problem


def _body(work: Work, model: str, token_ids: bool) -> bytes:
    body: dict[str, Any] = {"model": model, "prompt": work.prompt_ids, "max_tokens": work.max_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body | {"return_token_ids": True} if token_ids else body).encode()


async def _run_url(
    base: str, works: Sequence[Work], model: str | None, token_ids: bool, headers: dict[str, str], timeout_s: float
) -> list[RequestRecord]:
    limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(timeout_s)
    async with httpx.AsyncClient(limits=limits, timeout=timeout, headers=headers, trust_env=False) as client:
        name = model or await _first_model(client, base)
        bodies = [_body(work, name, token_ids) for work in works]  # before the clock starts
        start = time.perf_counter()
        posts = [_post(client, f"{base}/completions", b, w.arrival_s) for w, b in zip(works, bodies, strict=True)]
        answers = await asyncio.gather(*posts)
    records = []
    for work, (pieces, error) in zip(works, answers, strict=True):  # parsing waits until the clock has stopped
        arrivals = chunks_of(read_events(pieces)) + ([(0.0, Chunk(0, error=error))] if error else [])
        records.append(record_of(work, start + work.arrival_s, arrivals))
    return records


def run_url(
    url: str,
    works: Sequence[Work],
    model: str | None = None,
    *,
    token_ids: bool = False,
    api_key: str | None = None,
    timeout_s: float = 600.0,
) -> list[RequestRecord]:
    """Send the works to `/v1/completions` of any OpenAI-compatible server and record the streamed answers.

    Args:
        url: the server's address, with or without `/v1`.
        works: token-id prompts; each is sent at its arrival time, greedy, with `ignore_eos`.
        model: the served name; None asks the server for its first.
        token_ids: ask for `return_token_ids`, so that tokens are counted exactly even where a chunk carries several.
        api_key: sent as a bearer token.
        timeout_s: the longest wait for the next piece of an answer.

    The client shares the machine with the server, so while the clock runs it only stores bytes with their times. A
    request's error becomes its record's `error`. Proxy settings are not used: a proxy would be measured too.
    """
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return _in_thread(lambda: asyncio.run(_run_url(base, works, model, token_ids, headers, timeout_s)))


def _in_thread(work: Callable[[], list[RequestRecord]]) -> list[RequestRecord]:
    """Run in a thread of its own: a notebook already has an event loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def check_lengths(works: Sequence[Work], records: Sequence[RequestRecord]) -> None:
    """Raise `BenchmarkError` unless every request ended well with exactly the prompt and output lengths asked for."""
    problems = []
    for number, (work, record) in enumerate(zip(works, records, strict=True)):
        asked, got = (len(work.prompt_ids), work.max_tokens), (record.prompt_tokens, record.output_tokens)
        if record.error is not None:
            problems.append(f"request {number} failed: {record.error}")
        elif asked != got:
            problems.append(
                f"request {number} asked for {asked[0]}/{asked[1]} prompt/output tokens and got {got[0]}/{got[1]}"
            )
    if problems:
        raise BenchmarkError(f"{len(problems)} of {len(works)} requests are not comparable; first: {problems[0]}")
