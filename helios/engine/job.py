# Generated from notebooks/12_scheduler.ipynb by `helios export`; edit the notebook.
"""What the two sides of the scheduler hand each other: a `Job` (the caller's end), `JobEvent`s, and a choice's text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

from helios.engine.sequence import Request, TokenEvent
from helios.model.params import SamplingParams
from helios.model.sampling import TokenLogprob
from helios.model.text import TextStream
from helios.model.tokenizer import Tokenizer

__all__ = ["Batch", "Choice", "Job", "JobEvent", "Live", "Timings", "put_all"]


@dataclass
class Timings:
    """When things happened to a job: seconds on the scheduler's clock; None: not yet."""

    queued_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class JobEvent:
    """News of one choice of a request: what became readable since its last event.

    `token_ids` may hold several tokens. Over all events of a choice the texts join to its answer and the ids to all it
    generated, the token that ended it included. The last event of a choice, and no other, has a `finish_reason`:
    "stop", "length", "abort" (cancelled) or "error" (then `error` is a sentence saying what happened).
    `prompt_logprobs`, if asked for, comes once, with the first event of choice 0: an entry per prompt token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def then(self, later: Self) -> Self:
        """This event and the next of the same choice, as one: this one grows, at the cost of what is new."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        return self


class Job:
    """The caller's end of a submitted request. Every method may be called from any thread."""

    def __init__(self, request: Request, cancel: Callable[[str], bool], queued_s: float) -> None:
        self.request = request
        self.id = request.id
        self.prompt_tokens = len(request.prompt_ids)
        self.cached_tokens = 0
        self.timings = Timings(queued_s)
        self._cancel = cancel
        self._changed = threading.Condition()
        self._unread: dict[int, JobEvent] = {}
        self._open = request.params.n

    def cancel(self) -> bool:
        """Ask for the end of this job, waiting or running; False when it has ended already or been asked before."""
        return self._cancel(self.id)

    @property
    def finished(self) -> bool:
        """Whether the job has ended (events may still be unread)."""
        return self.timings.finished_s is not None

    def put(self, event: JobEvent) -> None:
        """Leave an event for the reader; never blocks. An unread event of the same choice grows instead."""
        with self._changed:
            unread = self._unread.get(event.index)
            self._unread[event.index] = event if unread is None else unread.then(event)
            self._open -= event.finish_reason is not None
            self._changed.notify_all()

    def events(self) -> Iterator[JobEvent]:
        """Yield events as they come, blocking in between, until every choice has ended. For one reader."""
        while True:
            with self._changed:
                while not self._unread and self._open > 0:
                    self._changed.wait()
                batch, self._unread = list(self._unread.values()), {}
                ended = self._open <= 0
            yield from batch
            if ended:
                return


class Choice:
    """One choice of a running job, on the worker's side: tokens in, events out.

    A token waits for its text, and goes out with the first piece of it. Without a tokenizer tokens go out as they come.
    """

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.ended = False  # it takes no more tokens
        self.told = False  # and its last event has been taken
        self._params = params
        self._eos_token_ids = frozenset(tokenizer.eos_token_ids if tokenizer else ())
        self._stream = tokenizer and TextStream(
            tokenizer,
            stop=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        self._event = JobEvent(index)

    def take(self) -> JobEvent | None:
        """What became readable since the last call, or None. Ids and logprobs whose text is still held back stay."""
        readable = self._event.text or (self._stream is None and self._event.token_ids)
        if not readable and self._event.finish_reason is None:
            return None
        event, self._event = self._event, JobEvent(self.index, "", [], [])
        self.told = event.finish_reason is not None
        return event

    def push(self, token: TokenEvent) -> bool:
        """Take one token in; True when its text completed a stop string, which the engine does not know about yet."""
        if self.ended:
            return False
        if token.token_id >= 0:
            self._event.token_ids.append(token.token_id)
            self._event.logprobs.append(token.logprob)
        if token.prompt_logprobs is not None:
            self._event.prompt_logprobs = token.prompt_logprobs
        stopped = token.finish_reason == "stop" and not token.complete  # by a stop token, which is not text
        if self._stream and token.token_id >= 0 and (not stopped or self._params.include_stop_str_in_output):
            self._event.text += self._stream.push(token.token_id)
            if self._stream.stop_reason is not None:
                self.end("stop")
                return token.finish_reason is None
        if token.finish_reason is not None:
            asked_for = stopped and token.token_id in (self._params.stop_token_ids or ())
            by_itself = token.token_id in self._eos_token_ids and not self._params.ignore_eos
            self.end(token.finish_reason, token.token_id if asked_for and not by_itself else None)
        return False

    def end(self, reason: str, stop_reason: str | int | None = None, error: str | None = None) -> None:
        """Close the choice: flush the text held back and set the reason. Nothing is taken in afterwards."""
        if not self.ended:
            self.ended = True
            if self._stream:
                self._event.text += self._stream.finish()
                if self._stream.stop_reason is not None and reason in ("stop", "length"):
                    reason, stop_reason = "stop", self._stream.stop_reason
            self._event.finish_reason, self._event.stop_reason, self._event.error = reason, stop_reason, error


Batch = list[tuple[Job, JobEvent]]


def put_all(batch: Batch) -> None:
    """The default delivery: each event into its own job, for `Job.events()`."""
    for job, event in batch:
        job.put(event)


@dataclass
class Live:
    """A job that has not ended: the caller's end and, once it is in the engine, its choices."""

    job: Job
    known_to_fit: bool
    choices: list[Choice] = field(default_factory=list)
    told: int = 0  # choices that have given their last event

    def take(self) -> Batch:
        """What became readable, one event a choice."""
        news = []
        for choice in self.choices:
            if (event := choice.take()) is not None:
                news.append((self.job, event))
                self.told += choice.told
        return news

    def end(self, reason: str, error: str | None = None) -> Batch:
        """End every choice that is still open, with the text that was held back; returns their last events."""
        for choice in self.choices:
            choice.end(reason, error=error)
        return self.take() or self.cut(reason, error)

    def cut(self, reason: str, error: str | None = None) -> Batch:
        """Last events for the choices that have not given theirs, out of nothing: this cannot fail."""
        told = {choice.index for choice in self.choices if choice.told}
        rest = (i for i in range(self.job.request.params.n) if i not in told)
        return [(self.job, JobEvent(i, finish_reason=reason, error=error)) for i in rest]
