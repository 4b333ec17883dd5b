# Generated from notebooks/00_how_this_book_works.ipynb by `helios export`; edit the notebook.
"""What every notebook starts with: the machine it runs on, and the checkout it lies in."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

__all__ = ["NoCheckout", "checkout_root", "describe_machine", "require_checkout"]


class NoCheckout(RuntimeError):
    """The command needs the book's own files, and the working folder is not in a checkout of them."""


def checkout_root(start: Path | None = None) -> Path | None:
    """The checkout that holds `start` (default: the working folder), or None when there is none around it.

    A checkout is known by two things that the installed package does not have: `pyproject.toml` and `notebooks/`.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return folder
    return None


def require_checkout(start: Path | None = None) -> Path:
    """Like `checkout_root`, for commands that cannot work without one; raises `NoCheckout`."""
    root = checkout_root(start)
    if root is None:
        raise NoCheckout(
            "This command works on the book's own files, and the working folder is not in a checkout of Helios "
            "(a folder with pyproject.toml and notebooks/): clone the repository and run it from there."
        )
    return root


def describe_machine() -> None:
    """Print the versions, the device and the dtype that this notebook's numbers belong to."""
    import torch

    version = importlib.metadata.version("helios") if _installed("helios") else "not installed"
    print(f"Helios {version} · Python {platform.python_version()} · torch {torch.__version__}")
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        print(f"device cuda ({torch.cuda.get_device_name()}) · dtype {'bfloat16' if native else 'float16'}")
        return
    fast_bf16 = any(
        getattr(torch.cpu, name, bool)() for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    dtype = "bfloat16" if fast_bf16 else "float32"
    print(f"device cpu ({os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}) · dtype {dtype}")


def _installed(package: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=package))
