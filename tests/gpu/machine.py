"""The machine under check, models of two real shapes with random weights, and the parts they are run with."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helios.engine.config import EngineConfig
from helios.engine.runner import ModelRunner, Runner, RunnerUnavailable, TickInputs
from helios.fast.triton_decode import TritonPagedKVCache, interpreted, obstacle
from helios.kv.paged import PagedKVCache, Span
from helios.kv.pages import PAGE_SIZE
from helios.model.attention import attend_causal, choose_attention
from helios.model.config import KVSpec, ModelConfig, tiny_config
from helios.model.transformer import Transformer
from helios.model.weights import random_weights
from tests.gpu.budget import Skip

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "Qwen3-4B": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
TINY_SHAPE = {
    **QWEN3,
    "vocab_size": 256,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
RUNNERS = ("eager", "graphs", "compiled")


def documented_varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, *_: Any, **options: Any) -> Tensor:
    """What torch documents of `varlen_attn` with a block table, for machines without that kernel."""
    out, ends = torch.empty_like(q), cu_q.tolist()
    for n, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
        table, used = options["block_table"][n].long(), int(options["seqused_k"][n])
        keys, values = (part[table].flatten(0, 1)[:used] for part in (k, v))
        out[start:stop] = attend_causal(q[start:stop], keys, values)
    return out


@dataclass(frozen=True)
class Machine:
    """Where the check runs. `dry`: on a CPU with tiny sizes, to see that the check itself works."""

    device: torch.device
    dry: bool

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability; (0, 0) on a CPU."""
        return (0, 0) if self.dry else torch.cuda.get_device_capability(self.device)

    @property
    def half(self) -> torch.dtype:
        """The 16-bit format to serve in; float32 on a dry run."""
        if self.dry:
            return torch.float32
        return torch.bfloat16 if self.capability >= (8, 0) else torch.float16

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Formats to check."""
        if self.dry:
            return [torch.float32]
        return [torch.float16, torch.float32, *([torch.bfloat16] if self.capability >= (8, 0) else [])]

    @property
    def free_bytes(self) -> int:
        """Memory of the device that may be used."""
        if self.dry:
            return 2**28
        torch.cuda.empty_cache()  # what torch keeps for later is free, too
        return int(torch.cuda.mem_get_info(self.device)[0] * 0.85)

    def sync(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], repeats: int = 10, rounds: int = 3) -> float:
        """Median over `rounds` of the mean time of `repeats` calls, waiting included; two calls to warm up."""
        repeats, rounds = (1, 1) if self.dry else (repeats, rounds)
        for _ in range(1 if self.dry else 2):
            run()
        found = []
        for _ in range(rounds):
            self.sync()
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            self.sync()
            found.append((time.perf_counter() - started) / repeats)
        return statistics.median(found)

    def varlen(self, dtype: torch.dtype) -> Callable[..., Any]:
        """torch's paged kernel; Skip where it cannot serve. On a dry run a function that does what is documented."""
        if self.dry:
            return documented_varlen
        try:
            choose_attention(self.device, dtype, "varlen")
        except ValueError as reason:
            raise Skip(str(reason)) from None
        kernel: Callable[..., Any] = import_module("torch.nn.attention.varlen").varlen_attn
        return kernel

    def cache(self, backend: str, spec: KVSpec, pages: int, heads: int, dtype: torch.dtype) -> PagedKVCache:
        """An empty cache with the backend "sdpa", "varlen" or "triton"; Skip where that cannot serve."""
        places: dict[str, Any] = {"query_heads": heads, "device": self.device, "dtype": dtype}
        if spec.page_bytes(dtype) * pages > self.free_bytes:
            raise Skip(f"{pages} pages need {spec.page_bytes(dtype) * pages / 2**30:.1f} GiB")
        if backend == "varlen":
            return PagedKVCache(spec, pages, attention="varlen", varlen=self.varlen(dtype), **places)
        if backend == "triton":
            why = None if self.dry and interpreted() else obstacle(self.device, dtype, spec.head_dim)
            if why is not None:
                raise Skip(why)
            return TritonPagedKVCache(spec, pages, **places)
        return PagedKVCache(spec, pages, attention=backend, **places)

    def best_backend(self) -> str:
        """What the engine would choose by itself."""
        return choose_attention(self.device, self.half)[0]


def shape(machine: Machine, name: str) -> ModelConfig:
    """The configuration of a named shape; tiny on a dry run."""
    return ModelConfig.from_dict(TINY_SHAPE if machine.dry else SHAPES[name])


def small_config(machine: Machine) -> ModelConfig:
    """A model for equality checks: two layers, groups of four heads."""
    sizes = {"heads": 8, "kv_heads": 2} | ({} if machine.dry else {"head_dim": 64, "hidden_size": 256})
    return tiny_config("qwen3", **sizes)


def build_model(machine: Machine, config: ModelConfig, dtype: torch.dtype) -> Transformer:
    """The transformer with random weights on the device."""
    if config.parameter_count * dtype.itemsize > machine.free_bytes:
        raise Skip(f"its weights need {config.parameter_count * dtype.itemsize / 2**30:.1f} GiB")
    return Transformer.from_weights(config, random_weights(config, device=machine.device, dtype=dtype))


def build_runner(name: str, model: Transformer, cache: PagedKVCache, config: EngineConfig) -> Runner:
    """The runner of that name; Skip with the reason where it cannot serve."""
    if name == "eager":
        return ModelRunner(model, cache)
    if find_spec(f"helios.fast.{name}") is None:
        raise Skip(f"helios.fast.{name} is not built yet")
    module = import_module(f"helios.fast.{name}")
    try:
        if name == "graphs" and model.device.type == "cpu":  # a dry run: everything but the recording
            link = import_module("helios.fast.buckets").DirectLink()
            recorded: Runner = module.assemble(model, cache, config, module.ReplayByCalling(), link, 4)[0]
            return recorded
        runner: Runner = module.build_runner(model, cache, config)[0]
    except RunnerUnavailable as reason:
        raise Skip(str(reason)) from None
    return runner


def engine_config(backend: str, batch: int, context: int) -> EngineConfig:
    """Settings of a runner for ticks of up to `batch` sequences of `context` tokens."""
    asked = "auto" if backend == "triton" else backend  # only "auto" lets the graphs record the Triton kernel
    return EngineConfig(attention=asked, max_batch_size=batch, max_context=context, prefill_chunk_size=8192)


def same_length_tick(batch: int, new: int, context: int, vocabulary: int) -> TickInputs:
    """`new` tokens for each of `batch` sequences that hold `context` after the pass; a logits row for each."""
    need = -(-context // PAGE_SIZE)
    tables = (np.arange(batch * need).reshape(batch, need) + 1).tolist()
    positions = np.tile(np.arange(context - new, context, dtype=np.int64), batch)
    ids = np.random.default_rng(0).integers(0, vocabulary, batch * new)
    rows = np.arange(1, batch + 1, dtype=np.int64) * new - 1
    return TickInputs(ids, positions, [Span(new, context, table) for table in tables], rows)


def facts(machine: Machine) -> dict[str, Any]:
    """What the numbers belong to."""
    versions = {
        name: getattr(import_module(name), "__version__", "?") for name in ("torch", "triton") if find_spec(name)
    }
    device = "CPU, dry run: no number means anything"
    if not machine.dry:
        properties = torch.cuda.get_device_properties(machine.device)
        device = f"{properties.name}, {properties.multi_processor_count} processors"
    return {
        "device": device,
        "capability": machine.capability,
        "cuda": torch.version.cuda,
        "versions": versions,
        "dtype": str(machine.half).removeprefix("torch."),
    }
