"""The benchmark of thirty requests in this process: Helios' engine, and the continuous batching of transformers."""

import time
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from helios.bench.metrics import RequestRecord, summarize
from helios.bench.workloads import Work, thirty_requests
from helios.engine.engine import Engine
from helios.engine.sequence import Request
from helios.kv.pages import PAGE_SIZE, PagePool
from helios.kv.prefix import PrefixCache
from helios.model.params import SamplingParams
from tests.gpu.budget import Result, Skip
from tests.gpu.machine import SHAPES, TINY_SHAPE, Machine, build_runner, engine_config
from tests.gpu.speed import Loaded

BATCH, CONTEXT = 32, 1024


def works_for(machine: Machine, vocabulary: int, seed: int) -> list[Work]:
    """The thirty requests; on a dry run three of them, short. A warm-up needs another seed: prompts may be cached."""
    works = thirty_requests(vocabulary, seed)
    return [Work(work.prompt_ids[:20], 4, work.kind) for work in works[:3]] if machine.dry else works


def figures(records: Sequence[RequestRecord]) -> Result:
    """The numbers of a run that are compared."""
    summary = summarize(records)
    return {
        "output_tok_s": summary.output_tok_s,
        "duration_s": summary.duration_s,
        "ttft_p50_ms": summary.ttft_s.p50 * 1e3,
        "itl_p95_ms": summary.itl_s.p95 * 1e3,
        "completed": f"{summary.completed}/{summary.requests}",
    }


def drive(engine: Engine, works: Sequence[Work]) -> list[RequestRecord]:
    """Serve the works, all sent at once, by ticking the engine; what a client in this process would see."""
    started = time.perf_counter()
    times: dict[str, list[float]] = {str(n): [] for n in range(len(works))}
    waiting = deque(
        Request(name, work.prompt_ids, SamplingParams(temperature=0.0, max_tokens=work.max_tokens, ignore_eos=True))
        for name, work in zip(times, works, strict=True)
    )
    errors: dict[str, str] = {}
    while waiting or engine.running_count:
        while waiting and engine.can_admit(waiting[0]):
            engine.admit(waiting.popleft())
        events = engine.tick(time.monotonic())
        now = time.perf_counter()
        for event in events:
            if event.error:
                errors[event.request_id] = event.error
            else:
                times[event.request_id].append(now)
    return [
        RequestRecord(
            started, times[name], len(work.prompt_ids), len(times[name]), work.max_tokens, error=errors.get(name)
        )
        for name, work in zip(times, works, strict=True)
    ]


def thirty(loaded: Loaded, backend: str, runner_name: str) -> Result:
    """The benchmark through the engine that is served with this runner, after one run to warm up."""
    machine, config, model = loaded.machine, loaded.config, loaded.model
    pages = BATCH * (CONTEXT // PAGE_SIZE) + 1
    cache = machine.cache(backend, config.kv_spec, pages, config.heads, machine.half)
    settings = engine_config(backend, BATCH, CONTEXT)
    settings.prefill_chunk_size, settings.attention = 2048, "auto"
    runner = build_runner(runner_name, model, cache, settings)
    pool = PagePool(pages)
    kind: type[Engine] = import_module("helios.fast.late").LateEngine if getattr(runner, "choosing", False) else Engine
    engine = kind(model, cache, pool, PrefixCache(pool), settings, runner=runner)
    for seed in (1, 0):
        records = drive(engine, works_for(machine, config.vocab_size, seed))
    engine.check()
    return figures(records)


def hf_model(machine: Machine, name: str) -> Any:
    """The same shape as transformers builds it, with its own random weights."""
    try:
        from transformers import AutoModelForCausalLM, Qwen3Config
    except ImportError as problem:
        raise Skip(f"transformers cannot be imported: {problem}") from None
    config = Qwen3Config(**{**(TINY_SHAPE if machine.dry else SHAPES[name])})
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(config, dtype=machine.half, attn_implementation="sdpa")
    return model.eval()


def transformers_thirty(machine: Machine, name: str) -> Result:
    """The benchmark through the continuous batching of transformers, all requests sent at once, after a warm-up run."""
    model = hf_model(machine, name)
    if not hasattr(model, "continuous_batching_context_manager"):
        raise Skip("this transformers has no continuous batching manager")
    from transformers import GenerationConfig

    settings = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=128)
    options: dict[str, Any] = {"generation_config": settings, "block": True, "timeout": 5}
    if machine.dry:  # left alone it takes most of the memory
        from transformers import ContinuousBatchingConfig

        options["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    with model.continuous_batching_context_manager(**options) as manager:
        for seed in (1, 0):
            records = hf_run(manager, works_for(machine, model.config.vocab_size, seed))
    return figures(records)


def hf_run(manager: Any, works: Sequence[Work]) -> list[RequestRecord]:
    """Send all, collect all. Token times are those that its own loop notes."""
    started = time.perf_counter()
    names = [
        manager.add_request(work.prompt_ids, max_new_tokens=work.max_tokens, record_timestamps=True, eos_token_id=-1)
        for work in works
    ]
    results: dict[str, Any] = {}
    while len(results) < len(works):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            results[result.request_id] = result
        elif result is None and not manager.is_running():
            raise RuntimeError("its worker ended before all requests were served")
    records = []
    for name, work in zip(names, works, strict=True):
        result = results[name]
        tokens, times = len(result.generated_tokens), list(result.timestamps or [])
        if len(times) != tokens:
            times = [result.lifespan[1]] * tokens
        records.append(RequestRecord(started, times, len(work.prompt_ids), tokens, work.max_tokens, error=result.error))
    return records
