# Generated from notebooks/26_launch.ipynb by `helios export`; edit the notebook.
"""Helios: an LLM inference engine built by a book of notebooks.

`from helios import LLM, SamplingParams` is the offline API; `helios serve` is the server.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

__all__ = []
_HOME = {"LLM": "helios.engine.llm", "SamplingParams": "helios.model.params"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("helios")
    if name not in _HOME:
        raise AttributeError(f"helios has no {name!r}; it offers {', '.join(_HOME)}")
    return getattr(import_module(_HOME[name]), name)
