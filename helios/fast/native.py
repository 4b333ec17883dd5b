# Generated from notebooks/14_native.ipynb by `helios export`; edit the notebook.
"""The native runner: a transformer's pass in kernels of our own, called from Python."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from helios.engine.config import EngineConfig
from helios.engine.runner import RunnerUnavailable, TickInputs
from helios.fast.attention import ATTENTION, ATTENTION_FUNCTIONS, AttentionPlan
from helios.fast.basics import COMMON, EXPONENTIAL, GATE, NORM, ROPE, VECTOR
from helios.fast.compiler import NoKernels, compile_kernels
from helios.fast.linear import (
    FLOAT,
    GATED,
    LINEAR,
    LINEAR_FUNCTIONS,
    PACK,
    PLAIN,
    STORE,
    TILE,
    PanelLinear,
    plain_weight,
)
from helios.kv.layout import Layout
from helios.kv.paged import PagedKVCache
from helios.model.config import ModelConfig
from helios.model.linear import Linear
from helios.model.transformer import Layer, RMSNorm, Transformer

__all__ = [
    "FUNCTIONS",
    "NativeLayer",
    "NativeRunner",
    "Pass",
    "Product",
    "SOURCE",
    "WIDE_ROWS",
    "build_runner",
    "model_kernels",
    "norm_weight",
]

SOURCE = COMMON + EXPONENTIAL + VECTOR + NORM + GATE + ROPE + PACK + TILE + STORE + LINEAR + ATTENTION
FUNCTIONS = {
    "add_norm": "ppp" + "llf",
    "silu_mul": "ppll",
    **LINEAR_FUNCTIONS,
    **ATTENTION_FUNCTIONS,
}


def model_kernels(config: ModelConfig, dtype: torch.dtype) -> SimpleNamespace:
    """All kernels, compiled for this model's shape and this dtype. Raises NoKernels."""
    number = "-DBF16" if dtype == torch.bfloat16 else "-DFP32"
    shape = [f"-DH={config.heads}", f"-DK={config.kv_heads}", f"-DD={config.head_dim}"]
    return compile_kernels(SOURCE, FUNCTIONS, [number, *shape])


WIDE_ROWS = 16  # up to here a CPU with a matrix unit is limited by reading the weights, and panels read faster


class Product:
    """One matrix product of the model: by panels or, where the CPU has a matrix unit, by oneDNN for many rows.

    `scale [in]` is the weight of the norm before it, to be folded in. `inputs` is the width of x where it is padded.
    """

    def __init__(
        self, kernels: SimpleNamespace, linear: Linear, scale: Tensor | None = None, kind: int = PLAIN, inputs: int = 0
    ) -> None:
        self.kernels, self.kind = kernels, kind
        weight = plain_weight(linear)
        if scale is not None:
            weight = (weight.float() * scale).to(weight.dtype)
        self.panels = PanelLinear(kernels, weight, linear.bias, kind, inputs)
        matrix_unit = getattr(torch.cpu, "_is_amx_tile_supported", bool)() and weight.dtype == torch.bfloat16
        self.wide = linear if matrix_unit and linear.packed is not None else None
        if self.wide is None:
            linear.packed = linear.weight = None  # the panels hold it now

    def __call__(self, x: Tensor) -> Tensor:
        """`x [T, in]` to `[T, out]`, the gate applied if this is one."""
        if self.wide is None or len(x) <= WIDE_ROWS:
            return self.panels(x)
        y: Tensor = self.wide(x)
        if self.kind == FLOAT:
            return y.float()
        if self.kind == GATED:
            both, y = y, x.new_zeros(len(x), self.panels.outputs)
            self.kernels.silu_mul(both.data_ptr(), y.data_ptr(), len(x), both.shape[1] // 2)
        return y


@dataclass(frozen=True)
class Pass:
    """What all layers of one pass share: the kernels' arguments, as addresses, and the arrays behind them."""

    plan: AttentionPlan
    positions: Tensor
    slots: Tensor
    rotation: tuple[int, int, int]  # cosines, sines, positions
    decode: tuple[int, ...]
    prefill: tuple[int, ...]


class NativeLayer:
    """One block of the transformer, in eight or nine kernel calls."""

    def __init__(self, kernels: SimpleNamespace, block: Layer, config: ModelConfig, keys: int, values: int) -> None:
        self.kernels, self.config, self.keys, self.values = kernels, config, keys, values
        self.qkv = Product(kernels, block.qkv, norm_weight(block.attn_norm))
        self.o = Product(kernels, block.o)
        self.gate_up = Product(kernels, block.gate_up, norm_weight(block.mlp_norm), GATED)
        self.down = Product(kernels, block.down, inputs=self.gate_up.panels.outputs)
        self.qk_norm = [norm.weight.data_ptr() if norm is not None else None for norm in (block.q_norm, block.k_norm)]

    def add_norm(self, x: Tensor, y: Tensor | None) -> Tensor:
        """Add y to the stream x `[T, E]` in place; return the stream, each vector over its length."""
        out = torch.empty_like(x)
        part = None if y is None else y.data_ptr()
        self.kernels.add_norm(x.data_ptr(), part, out.data_ptr(), *x.shape, x.shape[1] * self.config.norm_eps)
        return out

    def attention(self, normed: Tensor, now: Pass) -> Tensor:
        """`[T, E]` to the attention's contribution; keys and values go to their pages on the way."""
        qkv = self.qkv(normed)
        mixed = normed.new_empty(len(normed), self.config.heads * self.config.head_dim)
        out, pages = (qkv.data_ptr(), mixed.data_ptr()), (self.keys, self.values)
        store = (now.slots.data_ptr(), *pages, len(qkv))
        self.kernels.rope_store(out[0], *now.rotation, *self.qk_norm, self.config.norm_eps, *store)
        if now.decode:
            self.kernels.attend_decode(*out, *pages, *now.decode)
        if now.prefill:
            self.kernels.attend_prefill(*out, *pages, *now.prefill)
        return self.o(mixed)

    def __call__(self, x: Tensor, y: Tensor | None, now: Pass, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream and what is still to be added to it; with `rows [R]` only those go on after the attention."""
        y = self.attention(self.add_norm(x, y), now)
        if rows is not None:
            x, y = x[rows], y[rows]
        return x, self.down(self.gate_up(self.add_norm(x, y)))


def norm_weight(norm: nn.Module) -> Tensor | None:
    """What is still to be folded into the linear after a norm: weight and √size. Of folded norms, nothing."""
    return norm.weight.float() * len(norm.weight) ** 0.5 if isinstance(norm, RMSNorm) else None


class NativeRunner:
    """Runs ticks in C kernels. It takes the model's weights over: the model itself cannot be called any more."""

    attention = "native (pages are read in place)"

    def __init__(self, model: Transformer, cache: PagedKVCache, kernels: SimpleNamespace) -> None:
        config = model.config
        self.model, self.cache, self.kernels = model, cache, kernels
        store = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in cache.store]
        self.layers = [NativeLayer(kernels, block, config, *at) for block, at in zip(model.blocks, store, strict=True)]
        head = model.head or Linear(0, 0)
        if model.head is None:  # tied and not packed: the embedding is the head's weight
            head.weight = nn.Parameter(model.embed.weight, requires_grad=False)
        self.head = Product(kernels, head, norm_weight(model.norm), FLOAT)
        self.scratch = torch.empty(0)

    def plan(self, inputs: TickInputs) -> Pass:
        """All index work of a pass."""
        layout = Layout(*zip(*((span.query, span.context, span.pages) for span in inputs.spans), strict=True))
        plan = AttentionPlan(layout, self.kernels.queries)
        if self.scratch.numel() < plan.parts * self.kernels.part_floats:
            self.scratch = torch.empty(2 * plan.parts * self.kernels.part_floats)
        positions, slots = torch.from_numpy(inputs.positions), torch.from_numpy(layout.new_slots())
        rotation = (self.model.cos.data_ptr(), self.model.sin.data_ptr(), positions.data_ptr())
        decode = plan.decode_arguments(self.scratch.data_ptr()) if plan.parts else ()
        return Pass(plan, positions, slots, rotation, decode, plan.prefill_arguments() if len(plan.tasks) else ())

    def forward(self, inputs: TickInputs) -> Tensor:
        """Logits `[R, V]` float32 of the rows asked for."""
        now, rows = self.plan(inputs), torch.from_numpy(inputs.rows)
        if inputs.positions.max() >= self.model.config.context:
            raise IndexError(f"position {inputs.positions.max()} is beyond the context of {self.model.config.context}")
        x, y = self.model.embed(torch.from_numpy(inputs.token_ids)), None
        for layer in self.layers:
            x, y = layer(x, y, now, rows if layer is self.layers[-1] else None)
        return self.head(layer.add_norm(x, y))


def build_runner(model: Transformer, cache: PagedKVCache, config: EngineConfig) -> tuple[NativeRunner, str]:
    """The native runner and why it was chosen. Raises RunnerUnavailable."""
    shape = model.config
    if model.device.type != "cpu":
        raise RunnerUnavailable("its kernels are for CPUs")
    if model.dtype not in (torch.bfloat16, torch.float32):
        raise RunnerUnavailable(f"it computes in bfloat16 or float32, not {str(model.dtype).removeprefix('torch.')}")
    if config.attention != "auto":
        raise RunnerUnavailable(f"it has its own attention, and attention={config.attention!r} was asked for")
    if shape.head_dim % 16 or shape.hidden_size % 2:
        raise RunnerUnavailable(f"heads of {shape.head_dim} values do not fill its vectors of 16")
    try:
        kernels = model_kernels(shape, model.dtype)
    except NoKernels as obstacle:
        raise RunnerUnavailable(str(obstacle)) from obstacle
    return NativeRunner(model, cache, kernels), "C kernels, compiled for this CPU"
