# Generated from notebooks/12_scheduler.ipynb by `helios export`; edit the notebook.
"""The scheduler: a bounded queue and one worker thread.

A server has many threads that want answers and one engine that must not be touched by two of them
at once. The scheduler stands between: a bounded first-come-first-served wait list, and one worker
thread that does all the work.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from helios.engine.engine import Engine
from helios.engine.job import Batch, Choice, Job, Live, put_all
from helios.engine.meter import Meter
from helios.engine.sequence import Request, TokenEvent
from helios.engine.worker import EngineDead, Worker
from helios.model.params import RequestError

__all__ = ["QueueFull", "Scheduler"]


class QueueFull(RuntimeError):
    """The wait list is full: come back later (HTTP 429)."""


class Scheduler(Worker):
    """A bounded wait list, first come first served, in front of the one worker thread that owns the engine.

    `build` makes the engine; it runs in the worker, and so does every tick. `submit`, `cancel`, `health` and `stats`
    may be called from any thread and never wait for a tick. `deliver` is called by the worker once a tick with all
    its events and must return quickly; by default they go to `Job.events()`. `clock` is in seconds.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        *,
        max_waiting: int = 256,
        deliver: Callable[[Batch], None] | None = None,
        stall_after_s: float = 60.0,
        debug_checks: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, not {max_waiting}: every request passes by there")
        super().__init__(build, stall_after_s=stall_after_s, clock=clock)
        self.max_waiting, self._deliver, self._debug_checks = max_waiting, deliver or put_all, debug_checks
        self._live: dict[str, Live] = {}  # every job that has not ended, waiting and running
        self._waiting: OrderedDict[str, Live] = OrderedDict()  # in order of arrival; leaving from the middle is O(1)
        self._running: dict[str, Live] = {}  # in the engine
        self._cancelled: set[str] = set()  # asked for; the worker sees to it
        self._outbox: Batch = []  # this turn's events; kept here so that a turn that fails does not lose them
        self._meter, self._engine_stats = Meter(), dict[str, float]()

    def _pending(self) -> int:
        return len(self._live)

    def submit(self, request: Request, wait_s: float | None = 0.0) -> Job:
        """Put a request at the end of the wait list. `wait_s`: how long to wait for a place in it (None: for ever).

        Raises RequestError (it could never run: too long for the context or the whole pool, or its id is in use),
        QueueFull (no place), EngineDead (no work is taken any more).
        """
        engine = self._engine
        if engine is not None:
            engine.check_fits(request)
        with self._lock:
            if wait_s != 0:
                self._changed.wait_for(lambda: len(self._waiting) < self.max_waiting or self._closed, wait_s)
            if self._closed:
                raise EngineDead(self._reason)
            if request.id in self._live:
                raise RequestError(f"request id {request.id!r} is that of a request still alive", param="request_id")
            if len(self._waiting) >= self.max_waiting:
                self._meter.refused += 1
                raise QueueFull(f"{self.max_waiting} requests are waiting, the most allowed; try again later")
            return self._enqueue(request, known_to_fit=engine is not None)

    def _enqueue(self, request: Request, known_to_fit: bool) -> Job:
        now = self._clock()
        if not self._live:
            self._progress_s = now  # the time spent idle is no stall
        live = Live(Job(request, self.cancel, now), known_to_fit)
        self._live[request.id] = self._waiting[request.id] = live
        self._meter.submitted += 1
        self._work.notify()
        return live.job

    def cancel(self, job_id: str) -> bool:
        """Ask for the end of a job: "abort" events come within one tick. False: it had ended, or was asked before."""
        with self._lock:
            if job_id not in self._live or job_id in self._cancelled:
                return False
            self._cancelled.add(job_id)
            if self._waiting.pop(job_id, None) is not None:
                self._changed.notify_all()
            self._work.notify()
            return True

    def _turn(self, engine: Engine) -> None:
        """One turn: let the cancelled go, admit who fits, tick, deliver."""
        self._drop_cancelled(engine)
        self._admit(engine)
        if self._running:
            self._collect(engine, engine.tick(self._clock()))
        with self._lock:
            self._meter.ticks += 1
            self._engine_stats = dict(engine.stats())
        if self._debug_checks:
            engine.check()
            self.check()
        self._send()

    def _send(self) -> None:
        batch, self._outbox = self._outbox, []
        if batch:
            self._deliver(batch)

    def _drop_cancelled(self, engine: Engine) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
        for job_id in cancelled:
            if job_id in self._running:
                engine.cancel(job_id)
            self._end(job_id, "abort")

    def _admit(self, engine: Engine) -> None:
        """Move jobs from the head of the wait list into the engine while it has room; nobody overtakes the head."""
        while (live := self._head()) is not None:
            request = live.job.request
            try:
                if not live.known_to_fit:  # queued before there was an engine to ask
                    engine.check_fits(request)
                    live.known_to_fit = True
                if not engine.can_admit(request):
                    if not self._running:
                        raise RuntimeError("the empty engine has no room for a request that fits it: pages were lost")
                    break
                if self._take(request.id):
                    engine.admit(request)
                    live.choices = [Choice(i, request.params, engine.tokenizer) for i in range(request.params.n)]
                    self._running[request.id] = live
            except RequestError as error:
                self._end(request.id, "error", str(error))

    def _head(self) -> Live | None:
        with self._lock:
            return next(iter(self._waiting.values()), None)

    def _take(self, job_id: str) -> bool:
        """Take a job off the wait list; False when it was cancelled in the meantime."""
        with self._lock:
            live = self._waiting.pop(job_id, None)
            if live is None:
                return False
            live.job.timings.admitted_s = self._clock()
            self._changed.notify_all()
            return True

    def _collect(self, engine: Engine, tokens: list[TokenEvent]) -> None:
        """Turn a tick's tokens into events, one for each choice with news; tell the engine of stop strings."""
        now, generated = self._clock(), 0
        running, outbox = self._running, self._outbox
        for token in tokens:
            live = running.get(token.request_id)
            if live is None:
                continue  # it failed earlier in this tick
            job, choice = live.job, live.choices[token.index]
            if job.timings.first_token_s is None:
                self._meter.first(job, token, now)
            if token.error is not None:
                engine.cancel(token.request_id)
                self._end(token.request_id, "error", token.error)
                continue
            generated += token.token_id >= 0
            if choice.push(token):
                engine.finish(token.request_id, token.index, "stop")
            if (event := choice.take()) is not None:
                outbox.append((job, event))
                live.told += choice.told
                if live.told == len(live.choices):
                    self._forget(token.request_id, "finished")
        self._meter.generated(generated, now)

    def _end(self, job_id: str, reason: str, error: str | None = None) -> None:
        """Forget a job, and send the last events of its open choices; nothing happens when it has ended before."""
        if live := self._forget(job_id, reason):
            self._outbox += live.end(reason, error)

    def _forget(self, job_id: str, reason: str) -> Live | None:
        with self._lock:
            live = self._live.pop(job_id, None)
            self._waiting.pop(job_id, None)
            self._running.pop(job_id, None)
            if live is not None:
                live.job.timings.finished_s = self._clock()
                self._meter.end(reason)
                self._changed.notify_all()
            return live

    def _abandon(self, reason: str) -> None:
        """Send what the last turn left behind, and an "error" to every job that has not ended."""
        with self._lock:
            orphans = list(self._live)
        for job_id in orphans:
            if live := self._forget(job_id, "error"):
                self._outbox += live.cut("error", reason)
        with suppress(Exception):  # the receiver may be gone as well
            self._send()

    def stats(self) -> dict[str, float]:
        """Requests running and waiting now, the meter's totals, and the engine's stats as of its last tick."""
        with self._lock:
            return {
                **self._engine_stats,
                **self._meter.read(self._clock()),
                "running": len(self._running),
                "waiting": len(self._waiting),
                "max_waiting": self.max_waiting,
            }

    def check(self) -> None:
        """Assert that every job is in exactly one place. For the worker between ticks, or a test while it is idle."""
        with self._lock:
            waiting, running, live = set(self._waiting), set(self._running), set(self._live)
            assert not waiting & running, "a job both waits and runs"
            assert waiting | running <= live, "a job that has ended still waits or runs"
            assert live - waiting - running <= self._cancelled, "a job is neither waiting nor running"
            assert len(waiting) <= self.max_waiting, "the wait list is longer than its bound"
