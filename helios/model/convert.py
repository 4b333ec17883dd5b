# Generated from notebooks/01_model_files.ipynb by `helios export`; edit the notebook.
"""From a GGUF file to the folder of safetensors, config.json and tokenizer.json that everything else reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from helios.model.config import ModelConfig
from helios.model.errors import ModelError, damaged
from helios.model.gguf import (
    GGUFFile,
    check_factors,
    dequantize,
    hub_name,
    read_gguf_config,
    split_halves,
    stored_dtype,
    write_json,
)
from helios.model.gguf_tokenizer import write_tokenizer
from helios.model.weights import placements

__all__ = ["SHARD_BYTES", "convert_gguf"]


def _converted(file: GGUFFile, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its Hugging Face name, in the row order the rest of Helios expects."""
    places = placements(config)
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}
    for name, tensor in file.tensors.items():
        if name == "rope_freqs.weight":
            continue
        with damaged(file.path):
            ours, values = hub_name(name), dequantize(tensor)
        if ours not in places:
            raise ModelError(f"{file.path} has a tensor {name} that {config.architecture} does not: use another file.")
        if tuple(values.shape) != places[ours].shape:
            raise ModelError(f"{file.path}: {name} has shape {list(values.shape)}, not {list(places[ours].shape)}.")
        module = ours.split(".")[-2]
        if file.architecture == "llama" and module in heads:
            values = split_halves(values, heads[module])
        yield ours, values.to(dtype)


SHARD_BYTES = 2**30


def _write_shards(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write tensors to files of about 1 GiB, with an index when there is more than one."""
    shard: dict[str, Tensor] = {}
    places: dict[str, str] = {}

    def flush(name: str) -> None:
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(part.nbytes for part in shard.values()) + tensor.nbytes > SHARD_BYTES:
            flush(f"model-{len(set(places.values())) + 1:05d}.safetensors")
        shard[name] = tensor
    if not places:
        return flush("model.safetensors")
    flush(f"model-{len(set(places.values())) + 1:05d}.safetensors")
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def convert_gguf(path: Path | str, folder: Path | str) -> None:
    """Write the model in the GGUF file `path` into `folder` (which must exist) as a Hugging Face model folder."""
    file, folder = GGUFFile(Path(path)), Path(folder)
    with damaged(file.path):
        raw = read_gguf_config(file)
        config = ModelConfig.from_dict(raw)
        missing = placements(config).keys() - {hub_name(name) for name in file.tensors}
        if missing:
            raise ModelError(f"{path} lacks {min(missing)}: the file is incomplete, fetch it again.")
        check_factors(file, config)
    write_tokenizer(file, folder)
    _write_shards(_converted(file, config, stored_dtype(file)), folder)
    write_json(folder / "config.json", raw)
