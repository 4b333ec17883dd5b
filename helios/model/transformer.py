# Generated from notebooks/03_transformer.ipynb by `helios export`; edit the notebook.
"""The transformer, by hand.

Token ids and positions in, logits out: one decoder-only transformer, written small enough to read
in one sitting and switched by the config between Qwen3, Qwen2, Llama and Mistral. It knows nothing
of caches: every layer hands its queries, keys and values to whatever cache it was given, in one
call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helios.model.config import ModelConfig, ModelError, RopeScaling, load_config
from helios.model.linear import Linear, can_pack
from helios.model.weights import load_weights

__all__ = [
    "KVCache",
    "Layer",
    "NoCache",
    "RMSNorm",
    "Transformer",
    "UnitNorm",
    "fold_norm",
    "load_transformer",
    "naive_attention",
    "rope_frequencies",
    "rope_table",
    "rotate",
]


class RMSNorm(nn.Module):
    """Divide each vector by its root mean square (statistics in fp32), then scale each component."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., size]`, same shape and dtype out."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Radians per position of each pair of components, `[D/2]` float32 (RoFormer, arXiv:2104.09864).

    `linear` divides all of them (positions interpolated); `llama3` divides only those that turn less than
    `high_freq_factor` times within the context first trained on, with a smooth passage between.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / theta ** (pairs / head_dim)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_context * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * (keep + (1 - keep) / scaling.factor)
    return frequencies


def rope_table(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines `[context, D]` and sines `[context, D/2]` of every position: computed in fp32, stored in `dtype`."""
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(device, dtype), sin.to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair `(x[i], x[i + D/2])` of `x [T, heads, D]` by its angle; `cos [T, 1, D]`, `sin [T, 1, D/2]`."""
    half = sin.shape[-1]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by the formula: `q [T, H, D]`, `k`, `v [S, K, D]` to `[T, H, D]`, with S ≥ T.

    The T queries are the *last* T of the S positions: query i sees the keys up to S − T + i. Softmax in fp32.
    """
    tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q.float(), k.float()) / math.sqrt(dim)
    visible = torch.ones(tokens, k.shape[0], dtype=torch.bool, device=q.device).tril(k.shape[0] - tokens)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights, v.float()).to(q.dtype)


class KVCache(Protocol):
    """What a layer asks of a cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store `k`, `v [T, K, D]` of this pass; return attention `[T, H, D]` of `q [T, H, D]` over all seen."""


class NoCache:
    """Remembers nothing: one sequence, whole in every pass. Slow, and the oracle that every cache is held against."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over this pass's tokens only."""
        return naive_attention(q, k, v)


class Layer(nn.Module):
    """One block: attention and a gated MLP, each reading a normed copy of the residual stream and adding to it."""

    attn_norm: nn.Module
    mlp_norm: nn.Module

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index, self.heads, self.kv_heads, self.head_dim = index, config.heads, config.kv_heads, config.head_dim
        width, inner = config.hidden_size, config.heads * config.head_dim
        self.attn_norm = RMSNorm(width, config.norm_eps)
        self.qkv = Linear(width, inner + 2 * config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.o = Linear(inner, width)
        self.mlp_norm = RMSNorm(width, config.norm_eps)
        self.gate_up = Linear(width, 2 * config.intermediate_size)
        self.down = Linear(config.intermediate_size, width)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache) -> Tensor:
        """`x [T, E]` (normed) to the attention's contribution `[T, E]`."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        qk, v = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : self.heads]), self.k_norm(qk[:, self.heads :])), dim=1)
        qk = rotate(qk, cos, sin)
        mixed = cache.attend(self.index, qk[:, : self.heads], qk[:, self.heads :], v)
        out: Tensor = self.o(mixed.reshape(x.shape[0], -1))
        return out

    def mlp(self, x: Tensor) -> Tensor:
        """`x [T, E]` (normed) to the MLP's contribution `[T, E]`: down(silu(gate) · up)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate).mul_(up))
        return out

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, rows: Tensor | None = None) -> Tensor:
        """Add both contributions to the residual stream `x [T, E]`, in place; with `rows [R]` only those go on."""
        x += self.attention(self.attn_norm(x).to(cos.dtype), cos, sin, cache)
        if rows is not None:
            x = x[rows]
        x += self.mlp(self.mlp_norm(x).to(cos.dtype))
        return x


class Transformer(nn.Module):
    """A decoder-only transformer over packed tokens. Built empty (device "meta"); `from_weights` fills it."""

    norm: nn.Module
    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.head = None if config.tied_embeddings else Linear(config.hidden_size, config.vocab_size)
            self.register_buffer("cos", torch.empty(0), persistent=False)
            self.register_buffer("sin", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and of what a cache will be given."""
        return self.embed.weight.dtype

    @property
    def blocks(self) -> list[Layer]:
        """The layers, with their type."""
        return cast("list[Layer]", list(self.layers))

    @classmethod
    def from_weights(cls, config: ModelConfig, weights: Mapping[str, Tensor]) -> Transformer:
        """Adopt `weights` (names as `helios.model.weights` gives them) without a copy; `ModelError` if one is amiss."""
        model = cls(config)
        try:
            model.load_state_dict(weights, strict=True, assign=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ModelError(
                f"The weights do not fit {config.architecture}: {reason} Fetch the model again."
            ) from error
        model.requires_grad_(False)
        if model.dtype == torch.float16:
            for norm in [model.norm, *(n for block in model.blocks for n in (block.attn_norm, block.mlp_norm))]:
                norm.float()
        model.cos, model.sin = rope_table(config, model.device, model.dtype)
        return model.eval()

    def hidden(self, token_ids: Tensor, positions: Tensor, cache: KVCache, rows: Tensor | None = None) -> Tensor:
        """The residual stream after the last layer, `[T, E]` (of `rows [R]` only: `[R, E]`), before the final norm.

        `token_ids`, `positions`: `[T]` int64. In fp16 the stream is fp32.
        """
        x = self.embed(token_ids)
        if self.dtype == torch.float16:
            x = x.float()
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        last = self.config.layers - 1
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, cache, rows if i == last else None)
        return cast("Tensor", x)

    def forward(self, token_ids: Tensor, positions: Tensor, cache: KVCache, rows: Tensor | None = None) -> Tensor:
        """Logits `[R, V]` float32 of the tokens that `rows [R]` points at (all T if None).

        Raises `IndexError` for a position beyond `config.context`. Call it under `torch.inference_mode()`.
        """
        x = self.norm(self.hidden(token_ids, positions, cache, rows)).to(self.dtype)
        logits = F.linear(x, self.embed.weight) if self.head is None else self.head(x)
        return cast("Tensor", logits.float())

    def pack(self) -> Transformer:
        """On a CPU: fold the norms and re-lay every linear's weight for oneDNN; elsewhere nothing. Returns self.

        Plain weights are dropped as their packed form is made; only a tied embedding is kept beside its packed head.
        Packed models have no state dict to speak of and cannot be moved.
        """
        if not can_pack(self.device, self.dtype) or isinstance(self.norm, UnitNorm):
            return self
        if self.head is None:
            with torch.device("meta"):
                self.head = Linear(self.config.hidden_size, self.config.vocab_size)
            self.head.weight = nn.Parameter(self.embed.weight, requires_grad=False)
        for block in self.blocks:
            block.attn_norm = fold_norm(cast("RMSNorm", block.attn_norm), block.qkv)
            block.mlp_norm = fold_norm(cast("RMSNorm", block.mlp_norm), block.gate_up)
            for linear in (block.qkv, block.o, block.gate_up, block.down):
                linear.pack()
        self.norm = fold_norm(cast("RMSNorm", self.norm), self.head)
        self.head.pack()
        return self


class UnitNorm(nn.Module):
    """An RMSNorm whose weight and √size were folded into the linear after it: what is left divides by the length."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        softening = math.sqrt(norm.weight.numel() * norm.eps)
        self.softening = torch.tensor(softening, dtype=norm.weight.dtype, device=norm.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., size]` over its length; squares are summed in fp32, the sum's root is rounded to x's dtype."""
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.softening)


def fold_norm(norm: RMSNorm, linear: Linear) -> UnitNorm:
    """Move the scale of `norm` into the columns of `linear`, which reads its output; returns the rest of the norm."""
    assert linear.weight is not None
    scale = norm.weight.float() * math.sqrt(norm.weight.numel())
    folded = torch.mul(linear.weight, scale, out=torch.empty_like(linear.weight))
    linear.weight = nn.Parameter(folded, requires_grad=False)
    return UnitNorm(norm)


def load_transformer(folder: Path, *, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """Config and weights of a model folder, on `device` in `dtype`, packed where the CPU gains by it."""
    config = load_config(folder)
    return Transformer.from_weights(config, load_weights(folder, config, device=device, dtype=dtype)).pack()
