# Generated from notebooks/19_launch.ipynb by `helios export`; edit the notebook.
"""What `helios bench` measures: an engine in this process, a server elsewhere, or the engine's ticks alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from helios.bench.drivers import run_scheduler, run_url
from helios.bench.ledger import machine_facts
from helios.bench.overhead import overhead_pair, overhead_table
from helios.engine.build import build_engine
from helios.engine.scheduler import Scheduler

__all__ = ["measure_ticks", "target"]


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


def measure_ticks(to: Path | None) -> None:
    """Print what a tick, a submit and a cancel cost with few and with many requests and pages; write it to `to`."""
    loads = overhead_pair()
    print(overhead_table(*loads))
    if to is not None:
        to.write_text(
            json.dumps({"machine": machine_facts(), "loads": [asdict(load) for load in loads]}, indent=1) + "\n"
        )
