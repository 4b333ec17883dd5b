# Generated from notebooks/11_continuous_batching.ipynb by `helios export`; edit the notebook.
"""From settings to a warm engine: resolve the model, load it, size the page pool, run one tiny request."""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from helios.engine.config import EngineConfig
from helios.engine.engine import Engine
from helios.engine.runner import ModelRunner, Runner, RunnerUnavailable
from helios.kv.matmul import choose_paged_attention
from helios.kv.paged import PagedKVCache
from helios.kv.pages import PAGE_SIZE, PagePool
from helios.kv.prefix import PrefixCache
from helios.model.config import KVSpec, ModelError, load_config
from helios.model.device import choose_device, choose_dtype
from helios.model.files import resolve_config, resolve_model
from helios.model.tokenizer import Tokenizer
from helios.model.transformer import Transformer, load_transformer
from helios.model.weights import random_weights

__all__ = [
    "AUTO",
    "FASTER",
    "GIB",
    "LATE",
    "TRITON",
    "build_engine",
    "choose_cache",
    "choose_engine",
    "choose_runner",
    "default_model",
    "free_memory",
    "load_model",
    "size_pool",
]
GIB = 2**30


def free_memory(device: torch.device) -> int:
    """Bytes this process may still use on the device: the GPU's own count, else RAM within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil  # here, because a machine with a GPU can do without it

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        return free if limit == "max" else min(free, int(limit) - used + int(kept))
    except (OSError, ValueError, KeyError):
        return free


def size_pool(spec: KVSpec, dtype: torch.dtype, config: EngineConfig, context: int, free: int) -> tuple[int, str]:
    """Usable pages and the reason: as many as were asked for, else a share of the `free` bytes.

    Never more than a full batch of full contexts could use. One full context is granted even beyond the share, if it
    fits in four fifths of what is free. Raises ModelError if not even one page fits, or not the pages asked for.
    """
    page = spec.page_bytes(dtype)
    if config.kv_pages is not None:
        if config.kv_pages * page > free:
            raise ModelError(
                f"kv_pages={config.kv_pages} needs {config.kv_pages * page / GIB:,.1f} GiB, but {free / GIB:.1f} GiB "
                f"are free; ask for at most {free // page} pages"
            )
        return config.kv_pages, "kv_pages asks for it"
    one = -(-context // PAGE_SIZE)
    share = int(free * config.memory_fraction) // page
    most = config.max_batch_size * one
    if share >= most:
        return most, f"{config.max_batch_size} sequences of {context} tokens can use no more"
    if share >= one:
        return share, f"{config.memory_fraction:g} of the {free / GIB:.1f} GiB free after loading"
    pages = min(one, int(free * 0.8) // page)
    if pages < 1:
        raise ModelError(
            f"no memory is left for the KV cache: one page needs {page / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are "
            "free; choose a smaller model, or free memory on this device"
        )
    return pages, "room for one full context" if pages == one else f"all that fits: {pages * PAGE_SIZE} tokens in all"


def default_model(device: torch.device) -> str:
    """Qwen3-4B on a GPU with room for it and its cache; otherwise the embedded model, which needs no account."""
    return "Qwen/Qwen3-4B" if device.type == "cuda" and free_memory(device) >= 11 * GIB else "smollm2"


def load_model(
    config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> tuple[Transformer, Tokenizer | None, str]:
    """The model on its device, its tokenizer, and the name it goes by. Random weights do without a tokenizer."""
    name = default_model(device) if config.model == "auto" else config.model
    if config.load_weights == "real":
        folder = resolve_model(name)
        return load_transformer(folder, device=device, dtype=dtype), Tokenizer.from_folder(folder), name
    folder = Path(name) if Path(name, "config.json").is_file() else resolve_config(name)
    shape = load_config(folder)
    model = Transformer.from_weights(shape, random_weights(shape, device=device, dtype=dtype)).pack()
    return model, Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None, name


FASTER = {"graphs": "helios.fast.graphs", "native": "helios.fast.native", "compiled": "helios.fast.compiled"}
AUTO = ("graphs", "native")  # in this order, where they can serve
TRITON = "helios.fast.triton_decode"


def choose_cache(device: torch.device, dtype: torch.dtype, name: str) -> tuple[str, str]:
    """How to attend over pages, and why: as `choose_paged_attention`, or "triton" where asked for and possible."""
    if name != "triton":
        return choose_paged_attention(device, dtype, name)
    found = find_spec("helios.fast") and find_spec(TRITON)
    obstacle = import_module(TRITON).obstacle(device, dtype) if found else "its chapter is not built yet"
    if obstacle:
        raise ValueError(f"attention='triton' is not possible here: {obstacle}. Use attention='auto'.")
    return "triton", "asked for"


def choose_runner(model: Transformer, cache: PagedKVCache, config: EngineConfig) -> tuple[str, Runner, str]:
    """The name, the runner and the reason. "auto" takes the first that can serve this model here; eager always can.

    Raises ValueError when `config.runner` names one that cannot.
    """
    if config.runner not in ("auto", "eager", *FASTER):
        raise ValueError(f"runner={config.runner!r} is unknown: use auto, eager, {', '.join(FASTER)}")
    reasons = ["asked for"] if config.runner == "eager" else []
    for name in AUTO if config.runner == "auto" else FASTER.keys() & {config.runner}:
        try:
            if not find_spec(FASTER[name].rpartition(".")[0]) or not find_spec(FASTER[name]):
                raise RunnerUnavailable("its chapter is not built yet")
            runner, reason = import_module(FASTER[name]).build_runner(model, cache, config)
            return name, runner, reason
        except RunnerUnavailable as obstacle:
            reasons.append(f"not {name}: {obstacle}")
    if config.runner not in ("auto", "eager"):
        raise ValueError(f"runner={config.runner!r} is not possible here: {reasons[-1]}. Use runner='auto'.")
    return "eager", ModelRunner(model, cache), "; ".join(reasons)


LATE = "helios.fast.late"


def choose_engine(runner: Runner) -> type[Engine]:
    """`Engine`; for a runner that chooses tokens on the device the one that reads them late, once that is built."""
    if not getattr(runner, "choosing", False) or not find_spec(LATE):
        return Engine
    late: type[Engine] = import_module(LATE).LateEngine
    return late


def build_engine(config: EngineConfig) -> Engine:
    """Load, size, warm up: an engine ready to tick, with `.tokenizer` and `.report` (what was chosen, and why).

    Call it in the thread that will tick: on CPUs a second thread that runs parallel torch work costs a third of the
    speed. Raises ModelError with what to do when the model cannot be used.
    """
    started = time.perf_counter()
    if config.threads:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    dtype, dtype_why = choose_dtype(device, config.dtype)
    attention, attention_why = choose_cache(device, dtype, config.attention)
    model, tokenizer, name = load_model(config, device, dtype)
    spec, heads = model.config.kv_spec, model.config.heads
    context = min(model.config.context, config.max_context or model.config.context)
    pages, pages_why = size_pool(spec, dtype, config, context, free_memory(device))
    pool = PagePool(pages + 1)  # page 0 is scratch
    cache_of: dict[str, Any] = {"query_heads": heads, "device": device, "dtype": dtype}
    if attention == "triton":
        cache = import_module(TRITON).TritonPagedKVCache(spec, pages + 1, **cache_of)
    else:
        cache = PagedKVCache(spec, pages + 1, attention=attention, **cache_of)
    prefix = PrefixCache(pool, ttl_s=config.prefix_ttl_s) if config.prefix_cache else None
    runner_name, runner, runner_why = choose_runner(model, cache, config)
    report = {
        "model": f"{name} ({model.config.parameter_count / 1e6:,.0f} M parameters, {config.load_weights} weights)",
        "device": f"{device} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device),
        "dtype": f"{str(dtype).removeprefix('torch.')} ({dtype_why})",
        "runner": f"{runner_name} ({runner_why})",
        "attention": getattr(runner, "attention", f"{attention} ({attention_why})"),
        "context": f"{context} tokens",
        "kv_pages": f"{pages} of {PAGE_SIZE} tokens, {pages * spec.page_bytes(dtype) / GIB:.2f} GiB ({pages_why})",
        "batch": f"{config.max_batch_size} sequences, {config.prefill_chunk_size} tokens a tick",
        "prefix_cache": f"on, idle pages kept {config.prefix_ttl_s:g} s" if prefix is not None else "off",
    }
    kind = choose_engine(runner)
    if kind is not Engine:
        report["results"] = "read one step late, while the next step is under way"
    engine = kind(model, cache, pool, prefix, config, runner=runner, tokenizer=tokenizer, report=report)
    engine.warm_up()
    report["ready"] = f"after {time.perf_counter() - started:.1f} s"
    return engine
