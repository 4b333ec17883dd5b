# Generated from notebooks/12_scheduler.ipynb by `helios export`; edit the notebook.
"""One thread that owns the engine from building it to its end: what callers can rely on while it lives and dies."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from helios.engine.engine import Engine

__all__ = ["EngineDead", "Health", "JOIN_S", "Worker", "log"]
log = logging.getLogger("helios")
JOIN_S = 5.0  # how long shutdown waits for a last tick beyond the drain


class EngineDead(RuntimeError):
    """No work is taken: the engine failed, or is shutting down; the message says which (HTTP 503)."""


@dataclass(frozen=True)
class Health:
    """`status`: "loading", "ready", "stalled" (work is pending, nothing moves), "draining" or "dead"; and why."""

    status: str
    reason: str = ""


class Worker:
    """A thread that builds an engine and takes turns with it while there is work, and sleeps while there is none.

    Nothing but this thread touches the engine's state. A subclass says what there is to do: `_pending` (how many jobs;
    asked under the lock), `_turn` (one step of the work), `_abandon` (the end: fail what is left, with this reason).
    """

    def __init__(
        self, build: Callable[[], Engine], *, stall_after_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._build, self._stall_after_s, self._clock = build, stall_after_s, clock
        self._lock = threading.Lock()  # guards all below, and a subclass's shared state
        self._work = threading.Condition(self._lock)  # the worker sleeps here
        self._changed = threading.Condition(self._lock)  # callers who wait for it sleep here
        self._state, self._reason = "loading", "the model is being loaded"
        self._cause: BaseException | None = None
        self._engine: Engine | None = None
        self._deadline_s, self._progress_s = 0.0, clock()
        self._thread = threading.Thread(target=self._run, name="helios-engine", daemon=True)

    def _pending(self) -> int:
        raise NotImplementedError

    def _turn(self, engine: Engine) -> None:
        raise NotImplementedError

    def _abandon(self, reason: str) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        try:
            engine = self._build()
            gc.collect()
            gc.freeze()  # what was loaded stays: the garbage collector need not walk over all of it again and again
            self._set_ready(engine)
            while self._wait_for_work():
                self._turn(engine)
            self._die(self._reason)
        except BaseException as error:
            log.exception("the engine's worker thread failed")
            self._cause = error
            self._die(f"the engine failed and must be restarted ({type(error).__name__}: {error})")

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the thread should end."""
        with self._lock:
            self._progress_s = self._clock()
            while self._state == "ready" and not self._pending():
                self._work.wait()
            if self._state == "draining":
                return self._pending() > 0 and self._clock() < self._deadline_s
            return self._state == "ready"

    def _set_ready(self, engine: Engine) -> None:
        with self._lock:
            if self._state == "loading":
                self._state, self._reason, self._engine = "ready", "", engine
            self._changed.notify_all()

    def _die(self, reason: str) -> None:
        with self._lock:
            if self._state == "dead":
                return
            self._state, self._reason, self._engine = "dead", reason, None
            self._changed.notify_all()
            self._work.notify_all()
        gc.unfreeze()
        self._abandon(reason)

    def shutdown(self, drain_s: float = 0.0) -> None:
        """Take no more work, let what is there go on for up to `drain_s` seconds, fail the rest, end the thread.

        While the engine is still being built this returns at once: building cannot be interrupted, and ends by itself.
        """
        with self._lock:
            building = self._state == "loading"
            deadline_s = self._clock() + drain_s
            if not self._closed:
                self._state, self._reason = "draining", "the engine is shutting down; send the request again later"
                self._deadline_s = deadline_s
            self._deadline_s = min(self._deadline_s, deadline_s)  # asked twice: the more impatient one counts
            self._work.notify_all()
            self._changed.notify_all()
        if self.alive and not building:
            self._thread.join(drain_s + JOIN_S)
        self._die(self._reason)  # a thread that hangs in a tick is left behind: it is a daemon

    @property
    def alive(self) -> bool:
        """Whether the thread is still running, be it in a build or a tick that was left behind."""
        return self._thread.is_alive()

    @property
    def _closed(self) -> bool:
        return self._state in ("draining", "dead")

    def start(self) -> None:
        """Start the thread; returns at once, while the engine is still being built (see `wait_ready`)."""
        self._thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> Engine:
        """Block until the engine is built and return it, to read its facts only.

        Raises EngineDead, from the cause, when it could not be built or is gone; TimeoutError while it is being built.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._engine is not None or self._state == "dead", timeout_s)
            if self._state == "dead":
                raise EngineDead(self._reason) from self._cause
            if self._engine is None:
                raise TimeoutError(f"the model is still being loaded after {timeout_s} s")
            return self._engine

    def health(self) -> Health:
        """How the worker is. It looks at progress, so a tick that hangs shows. Never waits for a tick."""
        with self._lock:
            quiet_s, pending = self._clock() - self._progress_s, self._pending()
            if self._state == "ready" and pending and quiet_s > self._stall_after_s:
                return Health("stalled", f"{pending} requests are pending and no tick ended for {quiet_s:.0f} s")
            return Health(self._state, self._reason)
