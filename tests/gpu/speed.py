"""What the machine can do, and which share of it decode steps and prompts reach."""

import torch

from helios.engine.runner import TickInputs
from helios.fast import triton_decode
from helios.kv.pages import PAGE_SIZE
from helios.model.config import ModelConfig
from helios.model.transformer import Transformer
from tests.gpu.budget import Result, Skip
from tests.gpu.machine import Machine, build_model, build_runner, engine_config, same_length_tick, shape

CONTEXT = 1024
DRY_CONTEXT = 256
BATCHES = (1, 8, 64, 256)
PROMPTS = (512, 1024, 2048, 4096, 8192)


class Limits:
    """Measured: bytes per second of a copy (read and written), and FLOP per second of a large matrix product."""

    def __init__(self) -> None:
        self.bandwidth = self.flops = 0.0

    def measure(self, machine: Machine) -> Result:
        """Fill in both."""
        size = 2**20 if machine.dry else min(2**30, machine.free_bytes // 8)
        source = torch.ones(size, dtype=torch.uint8, device=machine.device)
        target = torch.empty_like(source)
        self.bandwidth = 2 * size / machine.seconds(lambda: target.copy_(source))
        side = 128 if machine.dry else 4096 if machine.capability < (8, 0) else 8192
        a = torch.randn(side, side, device=machine.device, dtype=machine.half)
        self.flops = 2 * side**3 / machine.seconds(lambda: a @ a, repeats=5)
        return {"copy_GB_s": self.bandwidth / 1e9, "matrix_TFLOP_s": self.flops / 1e12}

    def bound_s(self, bytes_: float, flops: float) -> float:
        """The least time for so many bytes and FLOP at the measured rates."""
        if not self.bandwidth:
            raise Skip("the machine's limits were not measured")
        return max(bytes_ / self.bandwidth, flops / self.flops)


class Loaded:
    """One model, built when it is first used, so that its cost falls into a part of the report."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name, self.config = machine, name, shape(machine, name)
        self._model: Transformer | None = None

    @property
    def model(self) -> Transformer:
        """The model on the device."""
        if self._model is None:
            self._model = build_model(self.machine, self.config, self.machine.half)
        return self._model

    def drop(self) -> None:
        """Free its memory."""
        self._model = None

    def load(self) -> Result:
        """Build it now."""
        return {"parameters_M": self.model.config.parameter_count / 1e6}


def decode_bound(config: ModelConfig, dtype: torch.dtype, batch: int, context: int, limits: Limits) -> float:
    """Seconds that one decode step must take: all weights once, every cached key and value, and the products."""
    cached = batch * context * config.kv_spec.bytes_per_token(dtype)
    weights = config.parameter_count * dtype.itemsize  # with tied embeddings the table is read by the head
    return limits.bound_s(weights + cached, 2.0 * config.parameter_count * batch)


def prefill_bound(config: ModelConfig, tokens: int, dtype: torch.dtype, limits: Limits) -> float:
    """Seconds for one prompt: products of all layers, causal attention, one row of the head."""
    layers = config.parameter_count - config.vocab_size * config.hidden_size
    attention = 2.0 * tokens**2 * config.heads * config.head_dim * config.layers
    return limits.bound_s(config.parameter_count * dtype.itemsize, 2.0 * layers * tokens + attention)


@torch.inference_mode()
def decode(loaded: Loaded, backend: str, runner_name: str, limits: Limits) -> Result:
    """Milliseconds of a decode step at 1,024 tokens of context, and the bound's share of it, by batch size."""
    context = DRY_CONTEXT if loaded.machine.dry else CONTEXT
    machine, config = loaded.machine, loaded.config
    spec, model, dtype = config.kv_spec, loaded.model, machine.half
    room = machine.free_bytes // (spec.page_bytes(dtype) * (context // PAGE_SIZE)) - 1
    batches = [batch for batch in ((1, 3) if machine.dry else BATCHES) if batch <= room]
    if not batches:
        raise Skip("no memory for even one sequence")
    pages = max(batches) * (context // PAGE_SIZE) + 1
    cache = machine.cache(backend, spec, pages, config.heads, dtype)
    runner = build_runner(runner_name, model, cache, engine_config(backend, max(batches), context))
    found: Result = {}
    for batch in batches:
        inputs = same_length_tick(batch, 1, context, config.vocab_size)
        took = machine.seconds(lambda inputs=inputs: runner.forward(inputs))  # type: ignore[misc]
        found[f"B{batch}_ms"] = took * 1e3
        found[f"B{batch}_share"] = decode_bound(config, dtype, batch, context, limits) / took
    if hasattr(runner, "ticks"):
        found["ticks"] = dict(runner.ticks)
    return found


@torch.inference_mode()
def prefill(loaded: Loaded, backend: str, runner_name: str, limits: Limits) -> Result:
    """Milliseconds of one prompt in one pass, and the bound's share of it, by length."""
    machine, config = loaded.machine, loaded.config
    longest = 64 if machine.dry else max(PROMPTS)
    cache = machine.cache(backend, config.kv_spec, -(-longest // PAGE_SIZE) + 1, config.heads, machine.half)
    runner = build_runner(runner_name, loaded.model, cache, engine_config(backend, 1, longest))
    found: Result = {}
    for tokens in (32, 64) if machine.dry else PROMPTS:
        inputs: TickInputs = same_length_tick(1, tokens, tokens, config.vocab_size)
        took = machine.seconds(lambda inputs=inputs: runner.forward(inputs), repeats=2)  # type: ignore[misc]
        found[f"T{tokens}_ms"] = took * 1e3
        found[f"T{tokens}_share"] = prefill_bound(config, tokens, machine.half, limits) / took
    return found


@torch.inference_mode()
def attention_only(machine: Machine, backend: str, limits: Limits) -> Result:
    """Microseconds of a layer's decode attention at the shape of Qwen3-4B, and the share of the copy bandwidth."""
    config = shape(machine, "Qwen3-4B")
    spec = type(config.kv_spec)(layers=2, heads=config.kv_spec.heads, head_dim=config.kv_spec.head_dim)
    found: Result = {}
    for batch, context in ((2, 256),) if machine.dry else ((1, 8192), (32, 2048), (256, 512)):
        cache = machine.cache(backend, spec, batch * -(-context // PAGE_SIZE) + 1, config.heads, machine.half)
        inputs = same_length_tick(batch, 1, context, 2)
        shapes = (config.heads, spec.heads, spec.heads)
        q, k, v = (torch.randn(batch, n, spec.head_dim, device=machine.device, dtype=machine.half) for n in shapes)
        cache.plan(inputs.spans)
        took = machine.seconds(lambda c=cache, a=(q, k, v): [c.attend(n, *a) for n in range(2)]) / 2  # type: ignore[misc]
        bytes_ = batch * context * spec.bytes_per_token(machine.half) / 2
        found[f"{batch}x{context}_us"] = took * 1e6
        found[f"{batch}x{context}_share"] = limits.bound_s(bytes_, 0.0) / took
    return found


def tiles(machine: Machine, limits: Limits) -> Result:
    """The Triton kernel with smaller and larger blocks, and with fewer and more parts, than it takes by itself."""
    found: Result = {}
    usual = {"TILE": triton_decode.TILE, "PROGRAMS": triton_decode.PROGRAMS}
    for name, value in usual.items():
        for factor in (1,) if machine.dry else (0.5, 1, 2):
            setattr(triton_decode, name, int(value * factor))
            try:
                measured = attention_only(machine, "triton", limits)
            finally:
                setattr(triton_decode, name, value)
            found |= {f"{name}{int(value * factor)} {key}": us for key, us in measured.items() if key.endswith("_us")}
    return found
