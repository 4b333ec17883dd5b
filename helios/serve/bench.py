# Generated from notebooks/26_launch.ipynb by `helios export`; edit the notebook.
"""What `helios bench` measures: an engine in this process, a server elsewhere, or the engine's ticks alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from helios.bench.drivers import run_scheduler, run_url
from helios.bench.ledger import machine_facts
from helios.bench.overhead import LARGE, SMALL, Load, Overhead, measure_overhead
from helios.engine.build import build_engine
from helios.engine.scheduler import Scheduler

__all__ = ["measure_ticks", "overhead_pair", "overhead_table", "target"]


@contextmanager
def target(settings: Any, url: str) -> Iterator[tuple[Callable[..., Any], int, dict[str, Any]]]:
    """What to measure: a function that runs works, the vocabulary (0: unknown), and the facts of the machine."""
    if url:
        yield (lambda works: run_url(url, works)), 0, {"url": url}
        return
    config = settings.engine_config()
    scheduler = Scheduler(lambda: build_engine(config), max_waiting=max(256, config.max_waiting))
    scheduler.start()
    try:
        engine = scheduler.wait_ready()
        facts = {**machine_facts(engine.model.device), **engine.report}
        yield (lambda works: run_scheduler(scheduler, works)), engine.model.config.vocab_size, facts
    finally:
        scheduler.shutdown()


def overhead_pair(small: Load = SMALL, large: Load = LARGE, pairs: int = 3) -> list[Overhead]:
    """Two loads measured in turn, `pairs` times; the medians of each."""
    runs = [(measure_overhead(small), measure_overhead(large)) for _ in range(pairs)]
    numbers = [[astuple(run)[1:] for run in column] for column in zip(*runs, strict=True)]
    medians = [map(statistics.median, zip(*column, strict=True)) for column in numbers]
    return [Overhead(load, *values) for load, values in zip((small, large), medians, strict=True)]


def overhead_table(small: Overhead, large: Overhead) -> str:
    """Both side by side, with their ratio, as plain text."""
    lines = [f"{'':<38}{'small':>10}{'large':>10}{'ratio':>8}"]
    for name in ("queued", "running", "cached_pages"):
        lines.append(f"{name.replace('_', ' '):<38}{getattr(small.load, name):>10,}{getattr(large.load, name):>10,}")
    labels = {
        "before_s": "a tick before the forward, µs",
        "after_s": "a tick after it, µs",
        "sampling_s": "of that sampling, µs",
        "own_s": "a tick without model and sampling, µs",
        "submit_s": "submit, µs",
        "cancel_s": "cancel, µs",
    }
    for name, label in labels.items():
        a, b = getattr(small, name), getattr(large, name)
        lines.append(f"{label:<38}{a * 1e6:>10.1f}{b * 1e6:>10.1f}{b / a:>8.2f}")
    return "\n".join(lines)


def measure_ticks(to: Path | None) -> None:
    """Print what a tick, a submit and a cancel cost with few and with many requests and pages; write it to `to`."""
    loads = overhead_pair()
    print(overhead_table(*loads))
    if to is not None:
        to.write_text(
            json.dumps({"machine": machine_facts(), "loads": [asdict(load) for load in loads]}, indent=1) + "\n"
        )
