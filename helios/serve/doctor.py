# Generated from notebooks/26_launch.ipynb by `helios export`; edit the notebook.
"""What this machine has, what Helios would choose on it, and what to do about what is missing."""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from helios.engine.build import choose_runner
from helios.engine.config import EngineConfig
from helios.fast.compiler import NoKernels, find_compiler
from helios.kv.matmul import choose_paged_attention
from helios.kv.paged import PagedKVCache
from helios.model.config import tiny_config
from helios.model.device import choose_device, choose_dtype
from helios.model.embedded import cache_home, embedded_ready
from helios.model.transformer import Transformer
from helios.model.weights import random_weights

__all__ = ["Finding", "examine"]


@dataclass(frozen=True)
class Finding:
    """One line of the report: a topic, what was found, and advice where there is any."""

    topic: str
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Every finding about this machine, the important ones first. Changes nothing, but a tiny model's kernels may be
    compiled, and stay in the cache."""
    device = choose_device()
    dtype, why = choose_dtype(device)
    return [
        Finding("python", f"{platform.python_version()} on {platform.system()}", _old_python()),
        Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        _gpu(device),
        Finding("dtype", f"{str(dtype).removeprefix('torch.')}: {why}", _slow_cpu(device, dtype)),
        _compiler(device),
        *_runner(device, dtype),
        _memory(),
        _disk(),
        _embedded(),
        _optional(),
    ]


def _old_python() -> str:
    return "" if sys.version_info >= (3, 11) else "Helios needs Python 3.11 or newer."


def _slow_cpu(device: torch.device, dtype: torch.dtype) -> str:
    slow = device.type == "cpu" and dtype == torch.float32
    return "No fast 16-bit arithmetic: expect half the speed of a CPU with AVX512-BF16 or AMX." if slow else ""


def _gpu(device: torch.device) -> Finding:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        free = torch.cuda.mem_get_info(device)[0] / 1e9
        return Finding(
            "device", f"{torch.cuda.get_device_name(device)}, capability {major}.{minor}, {free:.1f} GB free"
        )
    blind = torch.version.cuda is not None
    return Finding("device", "CPU", "This torch could use a GPU but sees none: check with nvidia-smi." if blind else "")


def _compiler(device: torch.device) -> Finding:
    try:
        path, told = find_compiler()
        return Finding("compiler", f"{Path(path).name}: {told}")
    except NoKernels as obstacle:
        needed = device.type == "cpu"
        return Finding("compiler", str(obstacle), "Without it the slower eager runner serves." if needed else "")


def _runner(device: torch.device, dtype: torch.dtype) -> list[Finding]:
    shape = tiny_config("qwen3")
    model = Transformer.from_weights(shape, random_weights(shape, device=device, dtype=dtype)).pack()
    backend, backend_why = choose_paged_attention(device, dtype)
    cache = PagedKVCache(shape.kv_spec, 9, query_heads=shape.heads, device=device, dtype=dtype, attention=backend)
    try:
        name, runner, why = choose_runner(model, cache, EngineConfig(max_batch_size=1))
    except Exception as error:  # whatever it is, it belongs into the report
        return [Finding("runner", f"none: {error}", "Try --runner eager, and report this.")]
    attention = getattr(runner, "attention", f"{backend}: {backend_why}")
    return [Finding("runner", f"{name}: {why}"), Finding("attention", attention)]


def _memory() -> Finding:
    free = psutil.virtual_memory().available / 1e9
    return Finding(
        "memory", f"{free:.1f} GB free", "The embedded model wants 2 GB: close something." if free < 2 else ""
    )


def _disk() -> Finding:
    home = cache_home()
    there = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(there).free / 1e9
    advice = "Less than 2 GB: point HELIOS_HOME at a larger disk." if free < 2 else ""
    return Finding("disk", f"{free:.1f} GB free for models", advice)


def _embedded() -> Finding:
    ready = embedded_ready()
    state, advice = ("ready", "") if ready else ("not fetched yet", "Fetch it once: helios fetch")
    return Finding("model", f"embedded model {state}", advice)


def _optional() -> Finding:
    missing = [name for name in ("jupyter", "transformers", "nbval") if find_spec(name) is None]
    advice = f"Only for notebooks and tests: make setup-dev ({', '.join(missing)})" if missing else ""
    return Finding("extras", "all there" if not missing else "serving needs nothing more", advice)
