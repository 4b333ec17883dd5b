from __future__ import annotations
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from helios.engine.engine import Engine
from helios.engine.job import Choice, Job, JobEvent, Live
from helios.engine.meter import Meter
from helios.engine.sequence import Request, TokenEvent
from helios.model.sampling import RequestError

log = logging.getLogger("helios")
JOIN_S = 5.0  # how long to wait for a tick to end beyond the drain

class QueueFull(RuntimeError):
    """The wait list is full: come back later (HTTP 429)."""


class EngineDead(RuntimeError):
    """No work is taken: the engine failed, or is shutting down; the message says which (HTTP 503)."""


@dataclass(frozen=True)
class Health:
    """`status`: "loading", "ready", "stalled" (work is pending, nothing moves), "draining" or "dead"; and why."""

    status: str
    reason: str = ""

Batch = list[tuple[Job, JobEvent]]


def put_all(batch: Batch) -> None:
    """The default delivery: each event into its own job, for `Job.events()`."""
    for job, event in batch:
        job.put(event)

class Scheduler:
    """A bounded wait list in front of one worker thread that owns the engine.

    `build` makes the engine; it runs in the worker, and so does every tick: no other thread touches the engine's state.
    `submit`, `cancel`, `health` and `stats` may be called from any thread and never wait for a tick. `deliver` is called
    by the worker once a tick with all that tick's events and must return quickly; by default they go to `Job.events()`.
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
            raise ValueError(f"max_waiting must be at least 1, not {max_waiting}: every request passes through the list")
        self.max_waiting = max_waiting
        self._build, self._deliver, self._clock = build, deliver or put_all, clock
        self._stall_after_s, self._debug_checks = stall_after_s, debug_checks
        # Shared by all threads, read and written only under this lock.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # the worker sleeps here
        self._room = threading.Condition(self._lock)  # submitters that want to wait sleep here
        self._state, self._reason = "loading", "the model is being loaded"
        self._cause: BaseException | None = None
        self._live: dict[str, Live] = {}  # every job that has not ended: waiting and running
        self._waiting: OrderedDict[str, Live] = OrderedDict()  # in order of arrival; leaving from the middle is O(1)
        self._cancelled: set[str] = set()
        self._deadline_s = 0.0
        self._progress_s = clock()
        self._meter = Meter()
        self._engine_stats: dict[str, float] = {}
        self._engine: Engine | None = None
        # The worker's own.
        self._running: dict[str, Live] = {}
        self._thread = threading.Thread(target=self._run, name="helios-engine", daemon=True)

class Scheduler(Scheduler):
    def submit(self, request: Request, wait_s: float = 0.0) -> Job:
        """Put a request at the end of the wait list; `wait_s` is how long to wait for a place in it (0: not at all).

        Raises RequestError (it could never run: too long for the context or the whole pool, or its id is in use),
        QueueFull (no place), EngineDead (no work is taken any more).
        """
        if self._engine is not None:
            self._engine.check_fits(request)
        with self._lock:
            if len(self._waiting) >= self.max_waiting and wait_s > 0:
                self._room.wait_for(lambda: len(self._waiting) < self.max_waiting or self._closed, wait_s)
            if self._closed:
                raise EngineDead(self._reason)
            if request.id in self._live:
                raise RequestError(f"request id {request.id!r} belongs to a request that has not ended", param="request_id")
            if len(self._waiting) >= self.max_waiting:
                self._meter.refused += 1
                raise QueueFull(f"{self.max_waiting} requests are waiting, the most allowed (max_waiting); try again later")
            return self._enqueue(request)

    @property
    def _closed(self) -> bool:
        return self._state in ("draining", "dead")

    def _enqueue(self, request: Request) -> Job:
        now = self._clock()
        if not self._live:
            self._progress_s = now  # the time spent idle is not a stall
        live = Live(Job(request, self.cancel, now))
        self._live[request.id] = self._waiting[request.id] = live
        self._meter.submitted += 1
        self._work.notify()
        return live.job

class Scheduler(Scheduler):
    def cancel(self, job_id: str) -> bool:
        """Ask for the end of a job; its "abort" events come within one tick. False: it had ended, or was asked before."""
        with self._lock:
            if job_id not in self._live or job_id in self._cancelled:
                return False
            self._cancelled.add(job_id)
            if self._waiting.pop(job_id, None) is not None:
                self._room.notify()
            self._work.notify()
            return True

class Scheduler(Scheduler):
    def _run(self) -> None:
        """The worker thread: build the engine, then tick while there is work and sleep while there is none."""
        try:
            engine = self._build()
            with self._lock:
                self._engine = engine
                if self._state == "loading":
                    self._state, self._reason = "ready", ""
                self._progress_s = self._clock()
                self._room.notify_all()
            while self._wait_for_work():
                self._step(engine)
            self._die(self._reason)
        except BaseException as error:
            log.exception("the engine's worker thread failed")
            self._cause = error
            self._die(f"the engine failed and must be restarted ({type(error).__name__}: {error})")

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the thread should end."""
        with self._lock:
            while self._state == "ready" and not self._live:
                self._work.wait()
            if self._state == "draining":
                return bool(self._live) and self._clock() < self._deadline_s
            return self._state == "ready"

class Scheduler(Scheduler):
    def _step(self, engine: Engine) -> None:
        """One turn of the worker: let the cancelled go, admit who fits, tick, deliver."""
        batch = self._drop_cancelled(engine)
        batch += self._admit(engine)
        tokens: list[TokenEvent] = []
        if self._running:
            tokens = engine.tick(self._clock())
            batch += self._collect(engine, tokens)
        with self._lock:
            self._progress_s = self._clock()
            self._meter.ticks += 1
            self._engine_stats = engine.stats()
            abandoned = self._state == "dead"
        if self._debug_checks:
            engine.check()
            self.check()
        if batch and not abandoned:
            self._deliver(batch)

    def _drop_cancelled(self, engine: Engine) -> Batch:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
        batch: Batch = []
        for job_id in cancelled:
            if job_id in self._running:
                engine.cancel(job_id)
            batch += self._end(job_id, "abort")
        return batch

class Scheduler(Scheduler):
    def _admit(self, engine: Engine) -> Batch:
        """Move jobs from the head of the wait list into the engine while it has room; the head is never overtaken."""
        batch: Batch = []
        while (live := self._head()) is not None:
            job = live.job
            try:
                engine.check_fits(job.request)  # again: it may have been queued before there was an engine to ask
                if not engine.can_admit(job.request):
                    if not self._running:
                        raise RuntimeError("the empty engine has no room for a request that fits it: pages were lost")
                    break
                if self._take(job.id):
                    engine.admit(job.request)
                    params = job.request.params
                    live.choices = [Choice(i, params, engine.tokenizer) for i in range(params.n)]
                    self._running[job.id] = live
            except RequestError as error:
                batch += self._end(job.id, "error", str(error))
        return batch

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
            self._room.notify()
            return True

class Scheduler(Scheduler):
    def _collect(self, engine: Engine, tokens: list[TokenEvent]) -> Batch:
        """Turn a tick's tokens into events, one per choice that has news; tell the engine of stop strings."""
        batch: Batch = []
        touched: dict[str, Live] = {}
        for token in tokens:
            live = self._running.get(token.request_id)
            if live is None:
                continue
            touched[token.request_id] = live
            if token.error is not None:
                engine.cancel(token.request_id)
                batch += self._end(token.request_id, "error", token.error)
            elif live.choices[token.index].push(token):
                engine.finish(token.request_id, token.index, "stop")
            self._meter.token(live.job, token, self._clock())
        for job_id, live in touched.items():
            batch += [(live.job, event) for choice in live.choices if (event := choice.take())]
            if all(choice.ended for choice in live.choices):
                self._end(job_id, "finished")
        return batch

class Scheduler(Scheduler):
    def _end(self, job_id: str, reason: str, error: str | None = None) -> Batch:
        """Forget a job and return the last events of its open choices; nothing when it has ended before."""
        with self._lock:
            live = self._live.pop(job_id, None)
            self._waiting.pop(job_id, None)
            self._running.pop(job_id, None)
            if live is None:
                return []
            live.job.timings.finished_s = self._clock()
            self._meter.end(reason)
            self._room.notify()
        return live.end(reason, error)

class Scheduler(Scheduler):
    def _die(self, reason: str) -> None:
        """The end: refuse all later work, and give every job that has not ended an "error" event with the reason."""
        with self._lock:
            if self._state == "dead":
                return
            self._state, self._reason, self._engine = "dead", reason, None
            orphans = list(self._live)
            self._room.notify_all()
            self._work.notify_all()
        batch = [event for job_id in orphans for event in self._end(job_id, "error", reason)]
        if batch:
            with suppress(Exception):  # the receiver may be gone as well; the other jobs must still end
                self._deliver(batch)

    def shutdown(self, drain_s: float = 0.0) -> None:
        """Take no more work, let what is there go on for up to `drain_s` seconds, fail the rest, end the thread."""
        with self._lock:
            deadline_s = self._clock() + drain_s
            if not self._closed:
                self._state, self._reason = "draining", "the engine is shutting down; send the request again later"
                self._deadline_s = deadline_s
            self._deadline_s = min(self._deadline_s, deadline_s)  # asked twice: the more impatient one counts
            self._work.notify_all()
            self._room.notify_all()
        if self._thread.is_alive():
            self._thread.join(drain_s + JOIN_S)
        self._die(self._reason)  # a thread that hangs in a tick is left behind: it is a daemon

class Scheduler(Scheduler):
    def start(self) -> None:
        """Start the worker; returns at once, while the engine is still being built (see `wait_ready`)."""
        self._thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> Engine:
        """Block until the engine is built and return it, to read its facts only; EngineDead when building failed."""
        with self._lock:
            self._room.wait_for(lambda: self._engine is not None or self._state == "dead", timeout_s)
            if self._state == "dead":
                raise EngineDead(self._reason) from self._cause
            if self._engine is None:
                raise TimeoutError(f"the model is still being loaded after {timeout_s} s")
            return self._engine

    def health(self) -> Health:
        """How the worker is; looks at its progress, so a tick that hangs shows."""
        with self._lock:
            quiet_s = self._clock() - self._progress_s
            if self._state == "ready" and self._live and quiet_s > self._stall_after_s:
                return Health("stalled", f"{len(self._live)} requests are pending, no tick ended for {quiet_s:.0f} s")
            return Health(self._state, self._reason)

class Scheduler(Scheduler):
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
