# Generated from notebooks/10_batching.ipynb by `helios export`; edit the notebook.
"""The engine's settings: one plain dataclass, filled by hand, by `LLM(...)` or by the launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["EngineConfig"]


@dataclass
class EngineConfig:
    """What an engine is built from. The defaults serve the embedded model on a laptop.

    `model`: "auto", "smollm2", a hub id, a local folder or a `.gguf` file. `device`, `dtype`, `attention`, `runner`:
    "auto" lets the engine choose by capability and say why. `max_batch_size`: sequences in one tick (each of a
    request's `n` choices is one). `prefill_chunk_size`: the token budget of a tick. `max_waiting`: requests that may
    queue. `kv_pages`: usable pages of 256 tokens; None sizes the pool as `memory_fraction` of the memory that is free
    after loading. `max_context`: tokens of prompt and answer together, at most the model's own. `threads`: torch's CPU
    threads. `debug_checks`: recount every page after every tick. `load_weights`: "random" needs only a config.json.

    Raises ValueError, naming the field, for a value that cannot work.
    """

    model: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    runner: str = "auto"
    max_batch_size: int = 32
    prefill_chunk_size: int = 1024
    max_waiting: int = 256
    kv_pages: int | None = None
    memory_fraction: float = 0.5
    max_context: int | None = None
    prefix_cache: bool = True
    prefix_ttl_s: float = 600.0
    threads: int | None = None
    debug_checks: bool = False
    load_weights: Literal["real", "random"] = "real"

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "prefill_chunk_size", "max_waiting", "kv_pages", "max_context", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0.0 < self.memory_fraction <= 0.95:
            raise ValueError(f"memory_fraction must be above 0 and at most 0.95, not {self.memory_fraction}")
        if not self.prefix_ttl_s >= 0.0:
            raise ValueError(f"prefix_ttl_s must be 0 or more seconds, not {self.prefix_ttl_s}")
        if self.load_weights not in ("real", "random"):
            raise ValueError(f'load_weights must be "real" or "random", not {self.load_weights!r}')
