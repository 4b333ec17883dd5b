"""What tests ask of an engine: everything it says until it is empty."""

from __future__ import annotations

from helios.engine.engine import Engine
from helios.engine.sequence import TokenEvent


def drain(engine: Engine) -> dict[tuple[str, int], list[TokenEvent]]:
    """Tick every 10 ms of a clock of its own until nobody runs; the events by request and choice."""
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    now = 0.0
    while engine.running_count:
        for event in engine.tick(now):
            events.setdefault((event.request_id, event.index), []).append(event)
        now += 0.01
    return events
