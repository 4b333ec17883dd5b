# Generated from notebooks/11_continuous_batching.ipynb by `helios export`; edit the notebook.
"""What a request will need, and whether it could ever be served: decided before it runs, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from helios.engine.sequence import Request, pages_needed
from helios.kv.pages import PAGE_SIZE
from helios.model.params import RequestError

__all__ = ["Limits", "UNASKED", "check_request", "max_new_tokens", "reservation", "total_pages"]
UNASKED = 1024  # new tokens that an answer without a limit may have, however small the pool


@dataclass(frozen=True)
class Limits:
    """What bounds one request: tokens of prompt and answer together, token ids, KV pages, sequences at once."""

    context: int
    vocab_size: int
    pages: int
    sequences: int


def total_pages(prompt_tokens: int, max_tokens: int, n: int) -> int:
    """Pages for all n choices of a request, before any are shared with others."""
    first, further = pages_needed(prompt_tokens, max_tokens)
    return first + (n - 1) * further


def max_new_tokens(request: Request, limits: Limits) -> int:
    """New tokens that each choice may have: `max_tokens`, or without it all that the context has room for.

    Without it, though, a request takes at most a quarter of the pool (or, if that is more, what 1,024 tokens need), so
    that on a small pool one open-ended request does not keep all others out.
    """
    if request.params.max_tokens is not None:
        return request.params.max_tokens
    prompt, n = len(request.prompt_ids), request.params.n
    share = min(limits.pages, max(limits.pages // 4, total_pages(prompt, UNASKED, n)))
    first = (share + (n - 1) * (prompt // PAGE_SIZE)) // n
    return max(1, min(limits.context - prompt, first * PAGE_SIZE - prompt + 1))


def reservation(request: Request, limits: Limits) -> int:
    """Pages for the whole request, all choices, before any are shared."""
    return total_pages(len(request.prompt_ids), max_new_tokens(request, limits), request.params.n)


def check_request(request: Request, limits: Limits) -> None:
    """Raise RequestError, naming the field, if an engine with these limits could never serve the request."""
    prompt, params = len(request.prompt_ids), request.params
    if prompt == 0:
        raise RequestError("the prompt is empty; send at least one token", "prompt")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= limits.vocab_size:
        raise RequestError(f"a prompt token id is not in 0…{limits.vocab_size - 1}, this model's vocabulary", "prompt")
    params.check_vocab(limits.vocab_size)
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if prompt + wanted > limits.context:
        raise RequestError(
            f"this model's context is {limits.context} tokens, but the prompt has {prompt} and at least {wanted} more "
            "were asked for; shorten the prompt or lower max_tokens",
            "max_tokens" if prompt < limits.context else "prompt",
            "context_length_exceeded",
        )
    if params.n > limits.sequences:
        raise RequestError(f"n is {params.n}, but only {limits.sequences} sequences run at once (max_batch_size)", "n")
    pages = reservation(request, limits)
    if pages > limits.pages:
        raise RequestError(
            f"this request could need {pages} KV pages of {PAGE_SIZE} tokens, but the pool has {limits.pages}; "
            "lower max_tokens or n, or start the engine with more kv_pages",
            "max_tokens",
            "context_length_exceeded",
        )
