# Generated from notebooks/01_model_files.ipynb by `helios export`; edit the notebook.
"""Weights: from safetensors files straight into the fused tensors that the transformer uses, on their device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from helios.model.config import ModelConfig
from helios.model.errors import ModelError, damaged, read_json

__all__ = [
    "OUTER_NAMES",
    "PLAIN_NAMES",
    "Place",
    "indexed_files",
    "is_lfs_pointer",
    "load_weights",
    "placements",
    "random_weights",
    "weight_files",
    "weight_shapes",
]


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the transformer, in its order of use."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, qkv_size = config.heads * head, (config.heads + 2 * config.kv_heads) * head
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}
    for layer in range(config.layers):
        parts: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,), "qkv.weight": (qkv_size, hidden)}
        if config.qkv_bias:
            parts["qkv.bias"] = (qkv_size,)
        if config.qk_norm:
            parts |= {"q_norm.weight": (head,), "k_norm.weight": (head,)}
        parts |= {"o.weight": (hidden, q_size), "mlp_norm.weight": (hidden,)}
        parts |= {"gate_up.weight": (2 * inner, hidden), "down.weight": (hidden, inner)}
        shapes |= {f"layers.{layer}.{part}": shape for part, shape in parts.items()}
    shapes["norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["head.weight"] = (config.vocab_size, hidden)
    return shapes


@dataclass(frozen=True)
class Place:
    """Where a tensor of the checkpoint goes: into `target`, from row `start`; `shape` is the shape it must have."""

    target: str
    start: int
    shape: tuple[int, ...]


PLAIN_NAMES = {
    "attn_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "down": "mlp.down_proj",
}
OUTER_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def _fused(config: ModelConfig) -> dict[str, list[tuple[str, int]]]:
    """For each fused matrix its parts, top to bottom: name in the checkpoint and number of rows."""
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = [("self_attn.q_proj", q_rows), ("self_attn.k_proj", kv_rows), ("self_attn.v_proj", kv_rows)]
    gate_up = [("mlp.gate_proj", config.intermediate_size), ("mlp.up_proj", config.intermediate_size)]
    return {"qkv": qkv, "gate_up": gate_up}


def placements(config: ModelConfig) -> dict[str, Place]:
    """For every tensor a checkpoint of this model must hold, by its Hugging Face name: where it goes."""
    places: dict[str, Place] = {}
    fused = _fused(config)
    for target, shape in weight_shapes(config).items():
        if target in OUTER_NAMES:
            places[OUTER_NAMES[target]] = Place(target, 0, shape)
            continue
        _, layer, part, kind = target.split(".")
        start = 0
        for source, rows in fused.get(part, [(PLAIN_NAMES.get(part, part), shape[0])]):
            places[f"model.layers.{layer}.{source}.{kind}"] = Place(target, start, (rows, *shape[1:]))
            start += rows
    return places


def random_weights(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Weights of the right names and shapes and a sane scale, the same for a seed and kind of device in every dtype."""
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator, device=device)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * noise
        elif name.endswith("bias") or name == "embed.weight":
            values = 0.1 * noise
        else:
            values = noise * shape[-1] ** -0.5
        weights[name] = values.to(dtype)
    return weights


def indexed_files(index: Path) -> list[str]:
    """Names of the files that model.safetensors.index.json lists; ModelError when it lists none."""
    with damaged(index):
        return sorted({name for name in read_json(index)["weight_map"].values() if Path(name).name})


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model in `folder`: those its index names, or the only one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in indexed_files(index)]
    single = folder / "model.safetensors"
    found = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not found:
        pickles = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
        held = "only pickle files, which can run code when opened" if pickles else "no weights"
        raise ModelError(f"{folder} holds {held}: Helios reads *.safetensors; choose a repository that has them.")
    return found


def _contents(files: list[Path]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and stored dtype of every tensor in `files`, from their headers alone."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in files:
        with _open(path) as reader:
            for name in reader.keys():  # noqa: SIM118
                part = reader.get_slice(name)
                found[name] = (tuple(part.get_shape()), str(part.get_dtype()))
    return found


def is_lfs_pointer(path: Path) -> bool:
    """Is this file the note that Git leaves in place of a large file it did not fetch?"""
    with path.open("rb") as file:
        return file.read(24) == b"version https://git-lfs."


def _open(path: Path) -> Any:
    """Open a safetensors file for reading (memory-mapped); ModelError when it is missing or not whole."""
    if not path.is_file():
        raise ModelError(f"{path.name} is missing in {path.parent}: the download is incomplete, fetch the model again.")
    if is_lfs_pointer(path):
        raise ModelError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder.")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged or half downloaded ({error}): delete it and fetch it again.") from None


def _tensors(files: list[Path], wanted: dict[str, Place]) -> Iterator[tuple[str, Tensor]]:
    """The wanted tensors, one at a time, as views of the mapped file: nothing is read before it is copied."""
    for path in files:
        with _open(path) as reader:
            for name in reader.keys():  # noqa: SIM118
                if name in wanted:
                    yield name, reader.get_tensor(name)


def _check_contents(places: dict[str, Place], found: dict[str, tuple[tuple[int, ...], str]], tied: bool) -> None:
    """Compare what the files hold (name → shape, dtype) with what the model needs; ModelError names the first few."""
    unexpected = {name for name in found if name not in places and not name.endswith("rotary_emb.inv_freq")}
    if tied:
        unexpected.discard("lm_head.weight")
    problems = [f"{name} is missing" for name in places if name not in found]
    problems += [f"{name} is not part of this architecture" for name in sorted(unexpected)]
    for name, (shape, dtype) in found.items():
        if name in places and shape != places[name].shape:
            problems.append(f"{name} has shape {list(shape)}, the configuration asks for {list(places[name].shape)}")
        elif name in places and dtype not in ("F32", "F16", "BF16", "F64"):
            problems.append(f"{name} is stored as {dtype}, which is quantised or not a weight")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        advice = "config.json and the weights do not belong together or are incomplete: fetch the model again."
        raise ModelError(f"The weights do not fit: {'; '.join(problems[:3])}{more}. {advice}")


def load_weights(
    folder: Path | str,
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Read the model in `folder` into fused tensors (names and shapes of `weight_shapes`) on `device`.

    Every tensor goes from the mapped file to its rows of the fused one by itself, so the host never holds more than
    one. ModelError when tensors are missing, unexpected or misshapen, or a file is not whole.
    """
    files, places = weight_files(Path(folder)), placements(config)
    _check_contents(places, _contents(files), config.tied_embeddings)
    weights = {name: torch.empty(shape, device=device, dtype=dtype) for name, shape in weight_shapes(config).items()}
    for name, tensor in _tensors(files, places):
        place = places[name]
        rows = weights[place.target][place.start : place.start + place.shape[0]]
        # Moved first and converted there: a GPU converts faster, and 2 bytes cross the bus instead of 4.
        rows.copy_(tensor.to(device))
    return weights
