"""Marks of this suite, and how its tables are written."""

from __future__ import annotations

from typing import Any

import pytest


def helios_only(reason: str) -> pytest.MarkDecorator:
    """Helios is stricter here than it need be, or offers more: another server is not asked."""
    return pytest.mark.helios_only(reason)


def vllm_bug(reason: str) -> pytest.MarkDecorator:
    """vLLM is known to fail this, for a reason of its own: an expected failure when vLLM answers."""
    return pytest.mark.vllm_bug(reason)


def row(name: str, *values: Any, marks: pytest.MarkDecorator | tuple[pytest.MarkDecorator, ...] = ()) -> Any:
    """A row of a table of tests, with a name that can be read in the list of failures."""
    return pytest.param(*values, id=name, marks=marks)
