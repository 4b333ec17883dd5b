"""Tiny models of each family in fp32, loaded once for each file of tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helios.model.transformer import Transformer, load_transformer


@pytest.fixture(scope="module")
def models(tiny_folder: Callable[[str], Path]) -> Callable[[str], Transformer]:
    loaded: dict[str, Transformer] = {}

    def load(family: str) -> Transformer:
        if family not in loaded:
            loaded[family] = load_transformer(tiny_folder(family), device="cpu", dtype=torch.float32)
        return loaded[family]

    return load
