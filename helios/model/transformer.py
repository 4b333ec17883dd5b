from __future__ import annotations
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helios.model.config import ModelConfig, ModelError, RopeScaling, load_config
from helios.model.linear import Linear
from helios.model.weights import load_weights

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

    `linear` divides all of them (positions interpolated); `llama3` divides only those whose wavelength exceeds the
    context the model was first trained on, with a smooth passage between.
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

    The T queries are the *last* T of the S positions: query i sees the keys up to S − T + i.
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
        """Store `k`, `v [T, K, D]` of this pass; return attention `[T, H, D]` of `q [T, H, D]` over all each may see."""


class NoCache:
    """Remembers nothing: one sequence, whole in every pass. Slow, and the oracle that every cache is held against."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over this pass's tokens only."""
        return naive_attention(q, k, v)

class Layer(nn.Module):
    """One block: attention and a gated MLP, each reading a normed copy of the residual stream and adding to it."""

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

class Layer(Layer):
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache) -> Tensor:
        """Add both contributions to the residual stream `x [T, E]`, in place."""
        dtype = cos.dtype
        x += self.attention(self.attn_norm(x).to(dtype), cos, sin, cache)
        x += self.mlp(self.mlp_norm(x).to(dtype))
        return x

class Transformer(nn.Module):
    """A decoder-only transformer over packed tokens. Built empty (device "meta"); `from_weights` fills it."""

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
        self.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and of what a cache will be given."""
        return self.embed.weight.dtype

class Transformer(Transformer):
    @classmethod
    def from_weights(cls, config: ModelConfig, weights: Mapping[str, Tensor]) -> "Transformer":
        """Adopt `weights` (names as `helios.model.weights` gives them) without a copy; `ModelError` if one is amiss."""
        model = cls(config)
        try:
            model.load_state_dict(weights, strict=True, assign=True)
        except RuntimeError as error:
            raise ModelError(f"the weights do not fit {config.architecture}: {error}. Is the folder complete?") from error
        model.requires_grad_(False)
        if model.dtype == torch.float16:
            for norm in model.residual_norms():
                norm.float()
        model.cos, model.sin = rope_table(config, model.device, model.dtype)
        return model.eval()

    def residual_norms(self) -> list[RMSNorm]:
        """The norms that read the residual stream, which stays fp32 where the weights are fp16."""
        pairs = [(layer.attn_norm, layer.mlp_norm) for layer in self.layers]
        return [norm for pair in pairs for norm in pair] + [self.norm]

class Transformer(Transformer):
    def hidden(self, token_ids: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """The residual stream `[T, E]` after the last layer, for `token_ids`, `positions` `[T]` int64."""
        x = self.embed(token_ids)
        if self.dtype == torch.float16:
            x = x.float()
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        for layer in self.layers:
            x = layer(x, cos, sin, cache)
        return x

    def forward(self, token_ids: Tensor, positions: Tensor, cache: KVCache, rows: Tensor | None = None) -> Tensor:
        """Logits `[R, V]` float32 of the tokens that `rows [R]` points at (all T if None).

        Raises `IndexError` for a position beyond `config.context`. Call it under `torch.inference_mode()`.
        """
        x = self.hidden(token_ids, positions, cache)
        x = self.norm(x if rows is None else x[rows]).to(self.dtype)
        if self.head is None:
            return F.linear(x, self.embed.weight).float()
        logits: Tensor = self.head(x)
        return logits.float()

class Transformer(Transformer):
    def pack(self) -> "Transformer":
        """Re-lay every linear's weight for oneDNN, where that helps (CPU); returns self. Weights are not kept twice."""
        if self.head is None:
            with torch.device("meta"):
                self.head = Linear(self.config.hidden_size, self.config.vocab_size)
            self.head.pack(self.embed.weight)
            if self.head.packed is None:
                self.head = None
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        return self


def load_transformer(folder: Path, *, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """Config and weights of a model folder, on `device` in `dtype`, packed where the CPU gains by it."""
    config = load_config(folder)
    return Transformer.from_weights(config, load_weights(folder, config, device=device, dtype=dtype)).pack()
