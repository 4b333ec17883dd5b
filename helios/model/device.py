# Generated from notebooks/01_model_files.ipynb by `helios export`; edit the notebook.
"""Which device to compute on, and in which number format: chosen by what the hardware really has, with the reason."""

from __future__ import annotations

import torch

from helios.model.errors import ModelError

__all__ = ["DTYPES", "choose_device", "choose_dtype"]


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" takes a CUDA GPU when there is one. ModelError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"There is no device {name!r}: use auto, cpu, cuda or cuda:0.") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"Helios computes on cpu or cuda, not on {device.type}: use cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"Device {name} is not there (torch sees {torch.cuda.device_count()} GPUs): use cpu or auto.")
    return device


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _cpu_bf16_unit() -> str | None:
    """Name of this CPU's instructions for bfloat16 products, or None."""
    for question, name in (("_is_amx_tile_supported", "AMX"), ("_is_avx512_bf16_supported", "AVX512-BF16")):
        # The questions are torch's own but not public: a version that drops one must not stop us.
        if getattr(torch.cpu, question, bool)():
            return name
    return None


def choose_dtype(device: torch.device | str, name: str = "auto") -> tuple[torch.dtype, str]:
    """Number format for weights and cache on `device`, and one phrase that says why."""
    if name != "auto":
        if name not in DTYPES:
            raise ModelError(f"There is no dtype {name!r} here: use auto, {', '.join(DTYPES)}.")
        return DTYPES[name], "asked for"
    if torch.device(device).type == "cpu":
        unit = _cpu_bf16_unit()
        return (torch.bfloat16, f"this CPU has {unit}") if unit else (torch.float32, "this CPU has no bfloat16 units")
    with torch.cuda.device(device):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "this GPU computes bfloat16 natively"
    return torch.float16, "this GPU has no bfloat16 units"
