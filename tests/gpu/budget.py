"""Parts of a check under one time budget: each is run, skipped with a reason, or stopped; everything is kept."""

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

Result = dict[str, Any]


class Skip(Exception):
    """This part has no answer on this machine; the message says why."""


class TimeLimit(Exception):
    """A part took longer than it was given."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimit in the main thread after `seconds` (at the next Python instruction: a kernel is not stopped)."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Report:
    """What was found so far, by part. Written to `path` after every part, so that nothing is lost."""

    def __init__(self, facts: Result, budget_s: float, path: Path | None) -> None:
        self.facts, self.budget_s, self.path = facts, budget_s, path
        self.parts: dict[str, Result] = {}
        self.running = ""
        self._started = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that remain."""
        return self.budget_s - (time.monotonic() - self._started)

    def part(self, name: str, run: Callable[[], Result], *, needs_s: float = 1.0, limit_s: float = 30.0) -> Result:
        """Run one part if at least `needs_s` are left, for at most `limit_s`, and keep what came of it."""
        started, self.running = time.monotonic(), name
        if self.left_s < needs_s:
            found = {"skipped": f"it needs about {needs_s:.0f} s and {max(self.left_s, 0):.0f} s are left"}
        else:
            found = attempt(run, min(limit_s, self.left_s))
        gc.collect()
        with suppress(
            RuntimeError
        ):  # after an illegal access CUDA refuses everything; the report must still be written
            torch.cuda.empty_cache()
        self.parts[name] = {**found, "seconds": round(time.monotonic() - started, 2)}
        self.running = ""
        self.save()
        print(line(name, self.parts[name]), flush=True)
        return found

    def save(self) -> None:
        """Write the JSON file, if there is to be one."""
        if self.path is not None:
            whole = {**self.facts, "spent_s": round(self.budget_s - self.left_s, 1), "parts": self.parts}
            self.path.write_text(json.dumps(whole, indent=1, default=str) + "\n", "utf-8")

    def guard(self, grace_s: float = 15.0) -> None:
        """End the process when the budget is over by `grace_s`: a kernel that hangs cannot be interrupted."""

        def end() -> None:
            self.parts[self.running or "end"] = {"failed": "still running when the time was over"}
            self.save()
            print(f"stopped in {self.running!r}: the time was over", flush=True)
            os._exit(2)

        timer = threading.Timer(self.budget_s + grace_s, end)
        timer.daemon = True
        timer.start()


def attempt(run: Callable[[], Result], limit_s: float) -> Result:
    """The part's result, or why there is none."""
    try:
        with time_limit(limit_s):
            return run()
    except Skip as reason:
        return {"skipped": str(reason)}
    except TimeLimit:
        return {"failed": f"took longer than {limit_s:.0f} s"}
    except Exception as problem:  # one broken part must not hide the others
        return {"failed": f"{type(problem).__name__}: {str(problem).strip().splitlines()[:1]}"}


def number(value: Any) -> str:
    """A number in few digits; anything else as it is."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def line(name: str, found: Result) -> str:
    """One row of the table."""
    for word in ("skipped", "failed"):
        if word in found:
            return f"{name:<34} {word}: {found[word]}"
    values = "  ".join(f"{key} {number(value)}" for key, value in found.items() if key != "seconds")
    return f"{name:<34} {values}"


def summary(parts: dict[str, Result]) -> str:
    """How many parts ran, were skipped, failed, or found something wrong."""
    failed = [name for name, found in parts.items() if "failed" in found or found.get("passed") is False]
    skipped = sum("skipped" in found for found in parts.values())
    text = f"{len(parts)} parts: {len(parts) - skipped - len(failed)} ran, {skipped} skipped, {len(failed)} failed"
    return text + (": " + ", ".join(failed) if failed else "")
