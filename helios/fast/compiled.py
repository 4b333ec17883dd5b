# Generated from notebooks/15_compile.ipynb by `helios export`; edit the notebook.
"""torch.compile.

A compiler that reads the model and writes fewer, fused kernels. The runner built here gives
torch.compile pieces of several layers at a time, hides from it what it cannot hold (packed weights,
the paged cache) behind two operators with declared effects, and compiles each piece once, for any
number of tokens. After warm-up nothing is compiled again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils._triton import has_triton

from helios.engine.config import EngineConfig
from helios.engine.runner import RunnerUnavailable, TickInputs
from helios.fast.compiler import cpu_flags
from helios.fast.operators import Entry, attend, linear, register
from helios.kv.paged import PagedKVCache, Span
from helios.kv.pages import SCRATCH_PAGE
from helios.model.embedded import cache_home
from helios.model.linear import Linear
from helios.model.transformer import Layer, RMSNorm, Transformer

__all__ = [
    "CompiledRunner",
    "MOST_LAYERS",
    "Place",
    "Shape",
    "Weights",
    "attention",
    "body",
    "build_runner",
    "check",
    "compile_apart",
    "keep_compiled",
    "layer_weights",
    "mlp",
    "norm",
    "obstacle",
    "piece_length",
    "project",
    "tail",
    "turn",
    "weights_of",
]


def keep_compiled() -> str:
    """Let inductor keep its results in Helios' cache, unless TORCHINDUCTOR_CACHE_DIR says otherwise. Returns where."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if chosen not in (None, default_cache_dir()):  # inductor writes its default there when it is first asked
        return str(chosen)
    machine = hashlib.sha256(cpu_flags().encode()).hexdigest()[:8]  # a home folder may be shared between machines
    folder = cache_home() / "inductor" / f"{torch.__version__}-{machine}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return str(folder)


class Shape(NamedTuple):
    """What all layers share, compiled in as constants."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    dtype: torch.dtype


class Weights(NamedTuple):
    """A layer's tensors. None: folded away, or packed and reached through the operator; `widths` are their outputs."""

    norms: tuple[Tensor | None, ...]  # before attention, before the MLP, of queries, of keys
    linears: tuple[Tensor | None, ...]
    biases: tuple[Tensor | None, ...]
    widths: tuple[int, ...]


class Place(NamedTuple):
    """Where a piece works: this pass's rotations `[T, D]`, `[T, D/2]`, the cache's store, the first layer's number."""

    cos: Tensor
    sin: Tensor
    pool: Tensor
    start: Tensor


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension; without `weight`, what is left of one that was folded: x over its length."""
    if weight is not None:
        return F.rms_norm(x, weight.shape, weight, eps)
    y = x.float()
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + x.shape[-1] * eps)).to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As chapter 3's `rotate`, without writing in place: `x [T, heads, D]`, `cos [T, 1, D]`, `sin [T, 1, D/2]`."""
    a, b = x.chunk(2, -1)
    cos = cos[..., : sin.shape[-1]]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def project(x: Tensor, weights: Weights, which: int, place: Place, offset: int) -> Tensor:
    """A linear: in the graph where its weight is a plain tensor, else through the operator."""
    weight = weights.linears[which]
    if weight is not None:
        return F.linear(x, weight, weights.biases[which])
    packed: Tensor = linear(x, place.start, offset, which, weights.widths[which])
    return packed


def attention(shape: Shape, weights: Weights, x: Tensor, place: Place, offset: int) -> Tensor:
    """The stream `x [T, E]` to the attention's contribution `[T, E]`."""
    before, _, for_q, for_k = weights.norms
    heads = project(norm(x, before, shape.eps).to(shape.dtype), weights, 0, place, offset)
    heads = heads.view(x.shape[0], -1, shape.head_dim)
    qk, v = heads[:, : -shape.kv_heads], heads[:, -shape.kv_heads :]
    if for_q is not None:
        q, k = qk[:, : shape.heads], qk[:, shape.heads :]
        qk = torch.cat((norm(q, for_q, shape.eps), norm(k, for_k, shape.eps)), 1)
    qk = turn(qk, place.cos.unsqueeze(1), place.sin.unsqueeze(1))
    mixed = attend(qk[:, : shape.heads], qk[:, shape.heads :], v, place.pool, place.start, offset)
    return project(mixed.view(x.shape[0], -1), weights, 1, place, offset)


def mlp(shape: Shape, weights: Weights, x: Tensor, place: Place, offset: int) -> Tensor:
    """The stream `x [T, E]` to the MLP's contribution `[T, E]`."""
    gate_up = project(norm(x, weights.norms[1], shape.eps).to(shape.dtype), weights, 2, place, offset)
    gate, up = gate_up.chunk(2, -1)
    return project(F.silu(gate) * up, weights, 3, place, offset)


check: Any = torch._check


def body(shape: Shape, layers: tuple[Weights, ...], x: Tensor, place: Place) -> Tensor:
    """The stream `[T, E]` through `layers`."""
    check(place.cos.shape[0] == x.shape[0])
    check(place.sin.shape[0] == x.shape[0])
    for offset, weights in enumerate(layers):
        x = x + attention(shape, weights, x, place, offset)
        x = x + mlp(shape, weights, x, place, offset)
    return x


def tail(shape: Shape, layers: tuple[Weights, ...], x: Tensor, place: Place, rows: Tensor, end: Weights) -> Tensor:
    """The stream through the last layers, norm and head: logits `[R, V]` float32 of `rows [R]`."""
    x, last = body(shape, layers[:-1], x, place), len(layers) - 1
    x = (x + attention(shape, layers[last], x, place, last))[rows]
    x = x + mlp(shape, layers[last], x, place, last)
    return project(norm(x, end.norms[0], shape.eps).to(shape.dtype), end, 0, place, last + 1).float()


MOST_LAYERS = 10


def piece_length(layers: int, most: int = MOST_LAYERS) -> int:
    """Layers per piece: as few pieces as `most` allows, as equal as can be, so that only the last may be shorter."""
    pieces = -(-layers // most)
    return -(-layers // pieces)


def compile_apart(function: Callable[..., Tensor], options: dict[str, Any] | None = None) -> Callable[..., Tensor]:
    """Compile a copy of `function` that shares nothing with other copies; sizes are constants unless marked."""
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    compiled: Callable[..., Tensor] = torch.compile(own, fullgraph=True, dynamic=False, options=options)
    return compiled


def weights_of(linears: tuple[Linear, ...], *norms: Any) -> Weights:
    """What a graph can hold of these linears and norms."""
    plain = tuple(part.weight if isinstance(part, RMSNorm) else None for part in norms)
    held = tuple(part.packed if part.weight is None else part.weight for part in linears)
    widths = tuple(int(weight.shape[0]) for weight in held)
    return Weights(plain, tuple(part.weight for part in linears), tuple(part.bias for part in linears), widths)


def layer_weights(block: Layer) -> Weights:
    """Those of one layer."""
    linears = (block.qkv, block.o, block.gate_up, block.down)
    return weights_of(linears, block.attn_norm, block.mlp_norm, block.q_norm, block.k_norm)


class CompiledRunner:
    """Runs ticks through compiled pieces of several layers. Call `warm_up` before the first: it compiles.

    `most_layers` bounds a piece; `options` are inductor's. The pieces find packed weights and the cache by number.
    """

    def __init__(
        self,
        model: Transformer,
        cache: PagedKVCache,
        most_layers: int = MOST_LAYERS,
        options: dict[str, Any] | None = None,
    ) -> None:
        config, blocks = model.config, model.blocks
        self.model, self.cache = model, cache
        # The same memory, but not a view: of a view's base every size would be guarded.
        self.pool = torch.empty(0, dtype=cache.store.dtype, device=cache.store.device)
        self.pool.set_(cast("Any", cache.store))
        self.shape = Shape(config.heads, config.kv_heads, config.head_dim, config.norm_eps, model.dtype)
        head = model.head or Linear(0, 0)
        if model.head is None:
            head.weight = nn.Parameter(model.embed.weight, requires_grad=False)
        self._entries = [Entry(cache, i, (b.qkv, b.o, b.gate_up, b.down)) for i, b in enumerate(blocks)]
        self._entries.append(Entry(cache, len(blocks), (head,)))
        numbers = register(self._entries)
        layers, length = [layer_weights(block) for block in blocks], piece_length(len(blocks), most_layers)
        starts = range(0, len(layers), length)
        self.pieces = [(tuple(layers[at : at + length]), torch.tensor(numbers[at])) for at in starts]
        self.end = weights_of((head,), model.norm)
        self._body, self._tail = compile_apart(body, options), compile_apart(tail, options)

    @torch.inference_mode()
    def forward(self, inputs: TickInputs) -> Tensor:
        """Logits `[R, V]` float32 of the rows asked for, on the model's device."""
        arrays = (inputs.token_ids, inputs.positions, inputs.rows)
        token_ids, positions, rows = (torch.from_numpy(a).to(self.model.device, non_blocking=True) for a in arrays)
        self.cache.plan(inputs.spans)
        x, cos, sin = self.enter(token_ids, positions)
        for layers, start in self.pieces[:-1]:
            x = self._body(self.shape, layers, x, Place(cos, sin, self.pool, start))
        layers, start = self.pieces[-1]
        return self._tail(self.shape, layers, x, Place(cos, sin, self.pool, start), rows, self.end)

    def enter(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The stream `[T, E]` before the first layer (fp32 for fp16), and the rotations of these positions."""
        x = self.model.embed(token_ids)
        stream = x.float() if self.model.dtype == torch.float16 else x
        return stream, self.model.cos[positions], self.model.sin[positions]

    @torch.inference_mode()
    def warm_up(self, tokens: int = 8) -> None:
        """Compile both graphs, for any number of tokens and rows. Seconds; with a warm cache on disk, fewer."""
        self.cache.plan([Span(tokens, tokens, [SCRATCH_PAGE])])
        count = torch.arange(tokens, device=self.model.device)
        x, cos, sin = self.enter(torch.zeros_like(count), count)
        rows = count[:2].clone()
        for tensor in (x, cos, sin, rows):
            mark_unbacked(tensor, 0)
        mark_unbacked(self.pool, 2)  # pages: another machine, another start, another number
        if len(self.pieces) > 1:
            layers, start = self.pieces[0]
            self._body(self.shape, layers, x, Place(cos, sin, self.pool, start))
        layers, start = self.pieces[-1]
        self._tail(self.shape, layers, x, Place(cos, sin, self.pool, start), rows, self.end)


def obstacle(model: Transformer) -> str | None:
    """Why this model cannot be compiled here, or None."""
    if any(type(block) is not Layer for block in model.blocks):
        return "it knows the layers of chapter 3 only"
    linears = [part for b in model.blocks for part in (b.qkv, b.o, b.gate_up, b.down)]
    if any(part.weight is None and part.packed is None for part in linears):
        return "another runner has taken the model's weights over"
    if model.device.type == "cpu":
        return "float16 on a CPU is not compiled" if model.dtype == torch.float16 else None
    if model.device.type != "cuda":
        return f"it compiles for CPUs and CUDA, not for {model.device.type}"
    if not has_triton():
        return "Triton is missing or cannot use this GPU"
    if model.dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "Triton has no bfloat16 for this GPU"
    return None


def build_runner(model: Transformer, cache: PagedKVCache, config: EngineConfig) -> tuple[CompiledRunner, str]:
    """The compiled runner, warmed up, and what it is made of. Raises RunnerUnavailable."""
    reason = obstacle(model)
    if reason is not None:
        raise RunnerUnavailable(reason)
    keep_compiled()
    runner = CompiledRunner(model, cache)
    try:
        runner.warm_up()
    except Exception as error:  # of Dynamo, of Inductor, of the compiler it calls: they share no base
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RunnerUnavailable(f"torch.compile failed here ({first.strip()[:200]})") from error
    pieces = [len(layers) for layers, _ in runner.pieces]
    return runner, f"torch.compile, pieces of {pieces[0]} layers" if len(pieces) > 1 else "torch.compile, one piece"
