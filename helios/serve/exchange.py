# Generated from notebooks/23_exchange.ipynb by `helios export`; edit the notebook.
"""One HTTP request's dealings with the engine: its jobs, their events on the event loop, and leaving early."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Self, TypeVar

from starlette.types import Receive

from helios.engine.job import Job, JobEvent
from helios.engine.scheduler import Scheduler
from helios.engine.sequence import Request
from helios.engine.worker import EngineDead
from helios.serve.choice import Choice, Usage
from helios.serve.errors import APIError, unavailable

__all__ = ["Box", "ClientGone", "Exchange", "Mailroom", "T", "unless_gone"]
Box = asyncio.Queue[tuple[Job, JobEvent]]


class Mailroom:
    """Carries each tick's events from the worker thread to the event loop in one call, and sorts them by request."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._boxes: dict[str, Box] = {}

    def attach(self) -> None:
        """Deliver to the running event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def open(self, job_id: str, box: Box) -> None:
        """Put the events of `job_id` into `box`."""
        self._boxes[job_id] = box

    def close(self, job_id: str) -> None:
        """Drop whatever else comes for `job_id`."""
        self._boxes.pop(job_id, None)

    def deliver(self, batch: list[tuple[Job, JobEvent]]) -> None:
        """Called by the worker once per tick; returns at once, also when the loop is already closed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._sort, batch)

    def _sort(self, batch: list[tuple[Job, JobEvent]]) -> None:
        for job, event in batch:
            if (box := self._boxes.get(job.id)) is not None:
                box.put_nowait((job, event))


class Exchange:
    """The jobs of one HTTP request. Use as a context manager: leaving it cancels what is unfinished.

    `jobs`, `usage` and `reasons` (choice → why it ended) can be read when all is over. `only_scores`: the prompts'
    scores are wanted and not the token that the engine says after them.
    """

    def __init__(
        self, scheduler: Scheduler, mail: Mailroom, requests: list[Request], *, only_scores: bool = False
    ) -> None:
        self._scheduler, self._mail, self.requests = scheduler, mail, requests
        self._only_scores = only_scores
        self._box: Box = asyncio.Queue()
        self._first = {request.id: position * request.params.n for position, request in enumerate(requests)}
        self._open = sum(request.params.n for request in requests)
        self.jobs: list[Job] = []
        self.reasons: dict[int, str] = {}
        self.usage = Usage(prompt=sum(len(request.prompt_ids) for request in requests))

    def __enter__(self) -> Self:
        try:
            for request in self.requests:
                self._mail.open(request.id, self._box)
                self.jobs.append(self._scheduler.submit(request))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs and forget the rest. Safe to call twice."""
        for request in self.requests:
            self._mail.close(request.id)
        if self._open:
            for job in self.jobs:
                job.cancel()

    async def pieces(self) -> AsyncIterator[list[Choice]]:
        """New text per choice, as it comes, until all choices have finished. Raises `APIError` if the engine failed."""
        while self._open:
            events = [await self._box.get()]
            while not self._box.empty():
                events.append(self._box.get_nowait())
            fresh: dict[int, Choice] = {}
            for job, event in events:
                self._add(job, event, fresh)
            yield list(fresh.values())

    def _add(self, job: Job, event: JobEvent, fresh: dict[int, Choice]) -> None:
        index = self._first[job.id] + event.index
        if event.error is not None:
            self.reasons[index] = "error"
            raise self._failure(event.error)
        choice = fresh.get(index)
        if choice is None:
            choice = fresh[index] = Choice(index)
        if event.prompt_logprobs is not None:
            choice.scores = event.prompt_logprobs
        if not self._only_scores:
            choice.text += event.text
            choice.token_ids += event.token_ids
            choice.logprobs += [entry for entry in event.logprobs if entry is not None]
            self.usage.completion += len(event.token_ids)
        if event.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason
            if self._only_scores:
                choice.finish_reason, choice.stop_reason = "length", None
            self.reasons[index] = choice.finish_reason or ""
            self._open -= 1
            self.usage.cached = sum(each.cached_tokens for each in self.jobs)

    def _failure(self, error: str) -> APIError:
        try:
            self._scheduler.wait_ready(0)
        except EngineDead as dead:
            if dead.__cause__ is None:  # nothing broke: the server was asked to stop
                return unavailable(error)
        except TimeoutError:
            pass
        return APIError(500, error, "server_error", "engine_error")


T = TypeVar("T")


class ClientGone(APIError):
    """The client closed the connection before its answer was complete: 499, which nobody reads but the log."""

    def __init__(self) -> None:
        message = "The client left before its answer was complete."
        super().__init__(499, message, "invalid_request_error", "client_closed_request")


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """`work`'s result. Cancels it and raises `ClientGone` as soon as the client disconnects."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
