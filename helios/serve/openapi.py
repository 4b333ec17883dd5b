# Generated from notebooks/24_server.ipynb by `helios export`; edit the notebook.
"""What the framework cannot know of our endpoints: their bodies, the shapes of answers, and how they refuse."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

__all__ = [
    "ALWAYS",
    "BOUNDS",
    "ERROR",
    "MESSAGE",
    "NULLABLE_TEXT",
    "TOOL",
    "WITH_BODY",
    "answers",
    "body_of",
    "finished",
    "inlined",
    "refusals",
]
NULLABLE_TEXT = {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": NULLABLE_TEXT,
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}

ALWAYS = {
    401: "The API key is missing or unknown.",
    404: "There is nothing here, or no such model.",
    405: "Another method is meant.",
    431: "The headers are too large.",
    500: "The server failed.",
    503: "Loading, shutting down, or broken.",
}
WITH_BODY = {
    400: "The request itself is wrong; `param` names the field.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; `retry-after` says when to come back.",
}


def refusals(statuses: dict[int, str]) -> dict[str, Any]:
    """Documented answers with an error object."""
    body = {"application/json": {"schema": ERROR}}
    return {str(status): {"description": why, "content": body} for status, why in statuses.items()}


MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "null"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
    },
}
TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 128},
                "parameters": {"type": "object"},
                "description": {"type": "string"},
            },
        },
    },
}

BOUNDS: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "n": {"minimum": 1, "maximum": 128},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "min_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "stop": {"maxItems": 64, "minLength": 1, "maxLength": 1024},
    "prompt": {"minItems": 1, "minLength": 1},
    "messages": {"items": MESSAGE},
    "tools": {"minItems": 1, "maxItems": 128, "items": TOOL},
    "logit_bias": {"propertyNames": {"pattern": "^[0-9]{1,10}$"}, "maxProperties": 1024},
    "response_format": {"required": ["type"], "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}}},
}


def inlined(schema: Any, parts: dict[str, Any]) -> Any:
    """`schema` with each reference replaced by what it refers to, and without titles."""
    if isinstance(schema, list):
        return [inlined(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
    said = {key: value for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
    return {key: inlined(value, parts) for key, value in said.items() if key != "$defs"}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The documented request body of an endpoint that reads it itself."""
    whole = model.model_json_schema()
    schema = inlined(whole, whole.get("$defs", {}))
    for name, field in schema["properties"].items():
        for kind in field.get("anyOf", [field]):
            if kind.get("type") != "null":
                kind.update(BOUNDS.get(name, {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(required: tuple[str, ...], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The documented 200 of an endpoint: an object with these keys, or a stream of server-sent events."""
    schema = {"type": "object", "required": list(required)}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {200: {"description": "The answer.", "content": content}}


def finished(document: dict[str, Any]) -> dict[str, Any]:
    """The framework's document with the refusals that every endpoint shares, and without its own 422."""
    for path in document["paths"].values():
        for operation in path.values():
            told = operation["responses"]
            told.pop("422", None)
            shared = {**ALWAYS, **(WITH_BODY if "requestBody" in operation else {})}
            for status, refusal in refusals(shared).items():
                told.setdefault(status, refusal)
    for schema in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(schema, None)
    return document
