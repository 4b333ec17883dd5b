# Generated from notebooks/01_model_files.ipynb by `helios export`; edit the notebook.
"""One error for every model that cannot be used, and the two ways in which its files are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["FAULTS", "ModelError", "damaged", "read_json"]


class ModelError(ValueError):
    """This model cannot be used; the message says why and what to do instead."""


FAULTS = (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, RecursionError, OSError)


@contextmanager
def damaged(path: Path | str) -> Iterator[None]:
    """Read what `path` holds: whatever goes wrong within is a ModelError that names the file."""
    try:
        yield
    except ModelError:
        raise
    except FAULTS as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ModelError(f"{path} is damaged ({reason}): fetch the model again.") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ModelError when it is missing, cut short or not an object."""
    if not path.exists():
        raise ModelError(f"{path.parent} has no {path.name}: a model folder needs one; download it again.")
    with damaged(path):
        text = path.read_text(encoding="utf-8")
        try:
            content = json.loads(text)
        except ValueError:
            advice = "perhaps half downloaded: delete it and fetch it again."
            raise ModelError(f"{path} is not valid JSON, {advice}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold one JSON object: fetch it again.")
    return content
