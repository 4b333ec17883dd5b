# Generated from notebooks/12_scheduler.ipynb by `helios export`; edit the notebook.
"""What `LLM` takes: prompts in their several shapes, options under either name, and a bar for many of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from numbers import Integral
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from helios.engine.config import EngineConfig
from helios.engine.job import Job
from helios.model.params import RequestError

__all__ = ["Prompt", "VLLM_NAMES", "as_list", "engine_config", "progress", "token_list"]
Prompt = str | list[int] | dict[str, Any]
VLLM_NAMES = {
    "max_model_len": "max_context",
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "prefill_chunk_size",
    "enable_prefix_caching": "prefix_cache",
    "gpu_memory_utilization": "memory_fraction",
}


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """The settings from keyword arguments, ours or vLLM's names for the same; TypeError names one that is neither."""
    ours = {VLLM_NAMES.get(name, name): value for name, value in options.items()}
    if len(ours) < len(options):
        raise TypeError(f"one LLM option is given under two names: {', '.join(sorted(options))}")
    known = [f.name for f in fields(EngineConfig) if f.name != "model"]
    for name in ours:
        if name not in known:
            raise TypeError(f"LLM has no option {name!r}; the options are {', '.join(known)}")
    return EngineConfig(model=model, **ours)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt as a list of one: a text, a list of token ids, or a dict."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def token_list(ids: Any) -> list[int]:
    """Token ids as plain ints, numpy's included; RequestError for anything else, so that nothing is cut to an id."""
    good = not isinstance(ids, (str, bytes)) and all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids)
    if not good:
        raise RequestError("token ids must be a list of integers", param="prompt")
    return [int(i) for i in ids]


@contextmanager
def progress(total: int, wanted: bool) -> Iterator[Callable[[list[Job]], None]]:
    """A progress bar over prompts, when there are many and somebody watches; yields what moves it along the jobs."""
    console = Console(stderr=True)
    columns = (TextColumn("Prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    watched = wanted and total > 1 and (console.is_terminal or console.is_jupyter)
    with Progress(*columns, console=console, disable=not watched, transient=True) as bar:
        task = bar.add_task("", total=total)
        done = 0

        def advance(jobs: list[Job]) -> None:
            nonlocal done
            while done < len(jobs) and jobs[done].finished:
                done += 1
            bar.update(task, completed=done)

        yield advance
