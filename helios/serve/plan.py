# Generated from notebooks/26_launch.ipynb by `helios export`; edit the notebook.
"""Arithmetic before a download: does a model fit a device, how many requests, and how fast at the very best."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
import torch

from helios.kv.pages import PAGE_SIZE
from helios.model.config import ModelConfig

__all__ = ["GB", "Hardware", "KNOWN", "Plan", "describe", "measure_bandwidth", "plan", "this_machine"]


@dataclass(frozen=True)
class Hardware:
    """A device: usable memory in bytes, memory bandwidth in bytes per second, and where that figure comes from."""

    name: str
    memory: float
    bandwidth: float
    source: str


GB = 1e9
KNOWN = {
    "t4": Hardware("NVIDIA T4", 15.8 * GB, 320 * GB, "datasheet"),
    "l4": Hardware("NVIDIA L4", 24.2 * GB, 300 * GB, "datasheet"),
    "a100": Hardware("NVIDIA A100 80GB", 85.0 * GB, 2039 * GB, "datasheet"),
    "h100": Hardware("NVIDIA H100 SXM", 85.0 * GB, 3350 * GB, "datasheet"),
    "h200": Hardware("NVIDIA H200", 150.0 * GB, 4800 * GB, "datasheet"),
}


@dataclass(frozen=True)
class Plan:
    """What `plan` computed: bytes, counts, and bounds in tokens per second."""

    weight_bytes: int
    kv_token_bytes: int
    kv_page_bytes: int
    pages: int
    requests: int
    context: int
    decode_bound: float
    batch_bound: float


def plan(
    config: ModelConfig, hardware: Hardware, dtype: torch.dtype, *, context: int = 2048, fraction: float = 0.9
) -> Plan:
    """The plan for `config` on `hardware`; one request has `context` tokens, prompt and output. One GB is left free."""
    weights = config.parameter_count * dtype.itemsize
    token, page = config.kv_spec.bytes_per_token(dtype), config.kv_spec.page_bytes(dtype, PAGE_SIZE)
    pages = max(0, int((hardware.memory * fraction - weights - GB) // page))
    requests = pages // -(-context // PAGE_SIZE)

    def bound(batch: int) -> float:
        return batch * hardware.bandwidth / (weights + batch * context * token)

    return Plan(weights, token, page, pages, requests, context, bound(1), bound(max(1, requests)))


def measure_bandwidth(device: torch.device, megabytes: int = 256) -> float:
    """Bytes per second read and written while copying, the best of five."""
    source = torch.ones(megabytes * 2**20 // 4, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


def this_machine(device: torch.device) -> Hardware:
    """The device at hand: free memory, measured bandwidth."""
    if device.type == "cuda":
        free, name = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    else:
        free, name = psutil.virtual_memory().available, "this CPU"
    return Hardware(name, free, measure_bandwidth(device), "measured by copying")


def describe(config: ModelConfig, hardware: Hardware, dtype: torch.dtype, made: Plan) -> str:
    """The plan as text, with its bounds labelled as bounds."""
    fits = f"{made.pages:,} pages of {PAGE_SIZE} tokens: {made.requests:,} requests of {made.context:,} at once"
    if made.pages == 0:
        fits = "nothing: the weights do not fit. Choose a smaller model, a smaller dtype, or a larger device."
    speed = hardware.bandwidth / GB
    size = f"{config.parameter_count / 1e9:.3f} billion parameters, {str(dtype).removeprefix('torch.')}"
    return "\n".join(
        [
            f"{config.architecture}, {size}",
            f"on {hardware.name}: {hardware.memory / GB:.1f} GB, {speed:.0f} GB/s ({hardware.source})",
            f"  weights          {made.weight_bytes / GB:.2f} GB",
            f"  KV per token     {made.kv_token_bytes / 2**10:.1f} KiB",
            f"  KV per page      {made.kv_page_bytes / 2**20:.2f} MiB",
            f"  fits             {fits}",
            f"  decode, alone    at most {made.decode_bound:,.0f} tokens/s (computed bound: bandwidth / bytes read)",
            f"  decode, full     at most {made.batch_bound:,.0f} tokens/s (computed bound)",
        ]
    )
