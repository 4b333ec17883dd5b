# Generated from notebooks/10_continuous_batching.ipynb by `helios export`; edit the notebook.
"""What a request will need, and whether it could ever be served: decided before it runs, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from helios.engine.sequence import Request, pages_needed
from helios.kv.pages import PAGE_SIZE
from helios.model.sampling import RequestError

__all__ = ["Limits", "check_request", "max_new_tokens", "reservation"]


@dataclass(frozen=True)
class Limits:
    """What bounds one request: tokens of prompt and answer together, token ids, KV pages, sequences at once."""

    context: int
    vocab_size: int
    pages: int
    sequences: int


def max_new_tokens(request: Request, context: int) -> int:
    """New tokens that each choice may have; without a limit of its own, to the end of the context."""
    asked = request.params.max_tokens
    return asked if asked is not None else context - len(request.prompt_ids)


def reservation(request: Request, context: int) -> int:
    """Pages for the whole request, all choices, before any are shared."""
    first, further = pages_needed(len(request.prompt_ids), max_new_tokens(request, context))
    return first + (request.params.n - 1) * further


def check_request(request: Request, limits: Limits) -> None:
    """Raise RequestError, naming the field, if an engine with these limits could never serve the request."""
    prompt, params = len(request.prompt_ids), request.params
    if prompt == 0:
        raise RequestError("the prompt is empty; send at least one token", param="prompt")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= limits.vocab_size:
        raise RequestError(
            f"a prompt token id is not in 0…{limits.vocab_size - 1}, this model's vocabulary", param="prompt"
        )
    params.check_vocab(limits.vocab_size)
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if prompt + wanted > limits.context:
        raise RequestError(
            f"this model's context is {limits.context} tokens, but the prompt has {prompt} and at least {wanted} more "
            "were asked for; shorten the prompt or lower max_tokens",
            param="max_tokens" if prompt < limits.context else "prompt",
            code="context_length_exceeded",
        )
    if params.n > limits.sequences:
        raise RequestError(
            f"n is {params.n}, but at most {limits.sequences} sequences run at once (max_batch_size); lower n",
            param="n",
        )
    pages = reservation(request, limits.context)
    if pages > limits.pages:
        raise RequestError(
            f"this request could need {pages} KV pages of {PAGE_SIZE} tokens, but the pool has {limits.pages}; "
            "lower max_tokens or n, or start the engine with more kv_pages",
            param="max_tokens",
            code="context_length_exceeded",
        )
