# Generated from notebooks/19_asking.ipynb by `helios export`; edit the notebook.
"""A request's bytes as a JSON object, and a 400 for what only looks like one."""

from __future__ import annotations

import json
from typing import Any

from helios.serve.errors import bad_request

__all__ = ["MAX_DEPTH", "parse_json"]

MAX_DEPTH = 64


def _check_depth(body: Any) -> None:
    level = [body]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise RecursionError


def _refuse_constant(token: str) -> float:
    raise ValueError(f"{token} is not JSON")


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as an object. Raises a 400 for anything else, also for NaN, lone surrogates and bottomless nesting."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
        _check_depth(body)
        json.dumps(body, ensure_ascii=False).encode()
    except RecursionError:
        raise bad_request(f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json") from None
    except UnicodeError:
        raise bad_request("The body holds text that is not valid Unicode.", code="invalid_json") from None
    except ValueError as error:
        raise bad_request(f"The body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request(f"The body must be a JSON object, not {type(body).__name__}.", code="invalid_json")
    return body
