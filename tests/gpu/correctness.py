"""Logits of every backend, format and runner against the same tiny model in float32 without a cache."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from helios.engine.runner import Runner, TickInputs
from helios.kv.paged import Span
from helios.kv.pages import PAGE_SIZE
from helios.model.config import ModelConfig
from helios.model.transformer import NoCache, Transformer
from helios.model.weights import random_weights
from tests.gpu.budget import Result
from tests.gpu.machine import Machine, build_runner, engine_config, small_config

BACKENDS = ("sdpa", "varlen", "triton")
STEPS = 3  # decode steps
# Largest difference of any logit, as a share of the largest logit.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}


@dataclass(frozen=True)
class Traffic:
    """Sequences of token ids, their prompts' lengths, and page tables in which they fit."""

    ids: list[np.ndarray]
    prompts: tuple[int, ...]
    tables: list[list[int]]

    @property
    def pages(self) -> int:
        """Pages of a pool that holds them and the scratch page."""
        return 1 + sum(len(table) for table in self.tables)


def make_traffic(machine: Machine, config: ModelConfig) -> Traffic:
    """Prompts on both sides of page borders; their pages interleave."""
    prompts = (1, 256, 300) if machine.dry else (1, 255, 256, 257, 700)
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, config.vocab_size, length + STEPS) for length in prompts]
    needs = [-(-len(tokens) // PAGE_SIZE) for tokens in ids]
    order = iter((rng.permutation(sum(needs)) + 1).tolist())
    return Traffic(ids, prompts, [[next(order) for _ in range(need)] for need in needs])


@cache
def truth(machine: Machine, dtype: torch.dtype) -> list[Tensor]:
    """Logits `[tokens, V]` of each sequence: weights rounded to `dtype`, everything else float32, on the CPU."""
    config = small_config(machine)
    traffic = make_traffic(machine, config)
    weights = {name: w.to(dtype).float() for name, w in random_weights(config).items()}
    model = Transformer.from_weights(config, weights)
    return [model(torch.from_numpy(ids), torch.arange(len(ids)), NoCache()) for ids in traffic.ids]


def tick(traffic: Traffic, starts: list[int], ends: list[int]) -> tuple[TickInputs, list[int]]:
    """A pass over tokens `starts` to `ends` of each sequence that has any; also which sequences those are."""
    who = [n for n in range(len(starts)) if ends[n] > starts[n]]
    ids = np.concatenate([traffic.ids[n][starts[n] : ends[n]] for n in who])
    positions = np.concatenate([np.arange(starts[n], ends[n], dtype=np.int64) for n in who])
    spans = [Span(ends[n] - starts[n], ends[n], traffic.tables[n]) for n in who]
    rows = np.cumsum([span.query for span in spans]).astype(np.int64) - 1
    return TickInputs(ids, positions, spans, rows), who


def worst(runner: Runner, traffic: Traffic, expected: list[Tensor]) -> dict[str, float]:
    """Largest difference from `expected` after two chunks of every prompt, and after decode steps."""
    limits = [[length // 2 for length in traffic.prompts], list(traffic.prompts)]
    limits += [[length + step for length in traffic.prompts] for step in range(1, STEPS + 1)]
    starts, found = [0] * len(traffic.prompts), {"prefill": 0.0, "decode": 0.0}
    for number, ends in enumerate(limits):
        inputs, who = tick(traffic, starts, ends)
        logits = runner.forward(inputs).float().cpu()
        for row, n in enumerate(who):
            right = expected[n][ends[n] - 1]
            error = float((logits[row] - right).abs().max() / right.abs().max())
            kind = "prefill" if number < 2 else "decode"
            found[kind] = max(found[kind], error if error == error else float("inf"))
        starts = ends
    return found


@torch.inference_mode()
def check(machine: Machine, backend: str, dtype: torch.dtype, runner_name: str) -> Result:
    """One combination: errors of prefill and decode, and whether both are within tolerance."""
    config = small_config(machine)
    traffic = make_traffic(machine, config)
    weights = {name: w.to(machine.device, dtype) for name, w in random_weights(config).items()}
    model = Transformer.from_weights(config, weights)
    paged = machine.cache(backend, config.kv_spec, traffic.pages, config.heads, dtype)
    runner = build_runner(runner_name, model, paged, engine_config(backend, 8, 1024))
    if runner_name == "graphs":
        runner.padding = None  # type: ignore[attr-defined]  # replay these few rows, however much padding that takes
    errors = worst(runner, traffic, truth(machine, dtype))
    passed = max(errors.values()) <= TOLERANCE[dtype]
    if runner_name != "graphs":
        return {**errors, "passed": passed}
    replayed = getattr(runner, "ticks", {}).get("replayed", 0)
    return {**errors, "replayed": replayed, "passed": passed and replayed > 0}
