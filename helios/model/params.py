# Generated from notebooks/04_sampling.ipynb by `helios export`; edit the notebook.
"""What a request may ask of sampling: vLLM's names and defaults, checked one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "GREEDY_BELOW",
    "MAX_BIASES",
    "MAX_CHOICES",
    "MAX_LOGPROBS",
    "MAX_REPETITION",
    "MAX_STOPS",
    "MAX_STOP_LENGTH",
    "MIN_REPETITION",
    "RequestError",
    "SamplingParams",
    "check_bias",
    "check_ids",
    "check_integer",
    "check_number",
    "check_stops",
]


class RequestError(ValueError):
    """A request that cannot be served as it is; the sentence says what to change.

    `param` names the field, `code` is the wire's error code. The server answers 400.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0  # beyond, a few tokens decide everything and numbers overflow
GREEDY_BELOW = 1e-5  # a temperature that small is greedy: dividing by it would overflow


def check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """`value` as a float within [low, high] (or (low, high]); RequestError otherwise, for NaN and booleans too."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Written so that NaN, which compares false with everything, fails.
    if not number or not (low < value <= high if open_low else low <= value <= high):
        bounds = f"above {low:g}" if open_low else f"at least {low:g}"
        bounds += f" and at most {high:g}" if math.isfinite(high) else " and finite"
        raise RequestError(f"`{name}` must be a number {bounds}, not {str(value)[:40]!r}.", name)
    if math.isinf(value):
        raise RequestError(f"`{name}` must be finite.", name)
    return float(value)


def check_integer(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an integer within [low, high]; RequestError otherwise, for booleans and fractions too."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"`{name}` must be an integer from {low} to {high}, not {str(value)[:40]!r}.", name)
    return value


def check_stops(value: Any) -> list[str]:
    """`stop` as a list: None is none, one string is one."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) and text for text in stops):
        raise RequestError("`stop` must be a non-empty string or a list of them.", "stop")
    if len(stops) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in stops):
        limit = f"at most {MAX_STOPS} stop strings of at most {MAX_STOP_LENGTH} characters"
        raise RequestError(f"`stop` may hold {limit}.", "stop")
    return list(stops)


def check_ids(name: str, value: Any) -> list[int]:
    """A list of token ids, none negative; None is none."""
    ids = [] if value is None else value
    if not isinstance(ids, list | tuple | set | frozenset):
        raise RequestError(f"`{name}` must be a list of token ids.", name)
    return [check_integer(name, token, 0, 2**31 - 1) for token in ids]


def check_bias(value: Any) -> dict[int, float] | None:
    """`logit_bias` with integer keys (JSON only has text keys) and values cut to [-100, 100]; None when empty."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError('`logit_bias` must be an object like {"42": -100}.', "logit_bias")
    if len(value) > MAX_BIASES:
        raise RequestError(f"`logit_bias` may hold at most {MAX_BIASES} entries.", "logit_bias")
    biases = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() and key.isascii() and len(key) < 11 else key
        token = check_integer("logit_bias", token, 0, 2**31 - 1)
        biases[token] = max(-100.0, min(100.0, check_number("logit_bias", bias, -math.inf, math.inf)))
    return biases or None


@dataclass
class SamplingParams:
    """How to choose tokens and when to stop: vLLM's names and defaults. RequestError names a field that cannot be."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self.n = check_integer("n", self.n, 1, MAX_CHOICES)
        self.temperature = check_number("temperature", self.temperature, 0, 2)
        self.top_p = check_number("top_p", self.top_p, 0, 1, open_low=True)
        self.top_k = max(0, check_integer("top_k", self.top_k, -1, 2**31 - 1))
        self.min_p = check_number("min_p", self.min_p, 0, 1)
        self.presence_penalty = check_number("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        penalty = check_number("repetition_penalty", self.repetition_penalty, MIN_REPETITION, MAX_REPETITION)
        self.repetition_penalty = penalty
        if self.seed is not None:
            self.seed = check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        self.stop = check_stops(self.stop)
        self.stop_token_ids = check_ids("stop_token_ids", self.stop_token_ids)
        if self.max_tokens is not None:
            self.max_tokens = check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        self.min_tokens = check_integer("min_tokens", self.min_tokens, 0, self.max_tokens or 2**31 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                setattr(self, name, check_integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        self.logit_bias = check_bias(self.logit_bias)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"`{name}` must be true or false.", name)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken; top-k, top-p and min-p are then without effect."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as the list that it was normalised to."""
        return self.stop if isinstance(self.stop, list) else []

    def check_vocab(self, vocab_size: int) -> None:
        """RequestError when a field names a token id that the model does not have."""
        named: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias or (),
            "stop_token_ids": self.stop_token_ids or (),
        }
        for name, ids in named.items():
            for token in ids:
                if token >= vocab_size:
                    raise RequestError(
                        f"token id {token} in `{name}` is not below the vocabulary's {vocab_size}.", name
                    )
