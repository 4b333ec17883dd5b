# Generated from notebooks/19_asking.ipynb by `helios export`; edit the notebook.
"""What types cannot say: fields that are refused by name, fields that need each other, and who decides a value."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from helios.model.params import SamplingParams
from helios.serve.errors import APIError, bad_request
from helios.serve.protocol import Addressed, ChatRequest, Common, CompletionRequest, TokenizeRequest

__all__ = ["Asked", "FROM_MODEL", "FROM_REQUEST", "UNSUPPORTED", "refuse_unsupported", "sampling_params", "validate"]

UNSUPPORTED = {
    "suffix": "this model has no fill-in-the-middle",
    "prompt_logprobs": "score a prompt with `echo` and `logprobs` at /v1/completions",
    "audio": "the models are text only",
    "use_beam_search": "beam search is not built",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "chat_template": "only the model's own template is used",
    "guided_whitespace_pattern": "white space in JSON is fixed",
    "logits_processors": "constrain answers with `structured_outputs`",
}


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raises a 400 naming the first field that is known, set, and not supported."""
    reasons = {name: why for name, why in UNSUPPORTED.items() if body.get(name) not in (None, False)}
    if body.get("best_of") not in (None, body.get("n") or 1):
        reasons["best_of"] = "it must be equal to `n`"
    if body.get("modalities") not in (None, ["text"]):
        reasons["modalities"] = 'only ["text"] is'
    for name, why in reasons.items():
        raise bad_request(f"`{name}` is not supported: {why}.", name, "unsupported_parameter")


def _check_chat(asked: ChatRequest, body: dict[str, Any]) -> None:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise bad_request("`top_logprobs` goes with `logprobs: true`.", "top_logprobs")
    if asked.add_generation_prompt and asked.continue_final_message and "add_generation_prompt" in body:
        raise bad_request(
            "Set `continue_final_message` or `add_generation_prompt`, not both.", "continue_final_message"
        )


def _check_common(asked: Common) -> None:
    if asked.stream_options is not None and not asked.stream:
        raise bad_request("`stream_options` goes with `stream: true`.", "stream_options")
    if asked.truncate_prompt_tokens == 0:
        message = "`truncate_prompt_tokens` must be at least 1, or -1 for what the context has room for."
        raise bad_request(message, "truncate_prompt_tokens")
    if isinstance(asked, CompletionRequest) and asked.max_tokens == 0 and not asked.echo:
        raise bad_request("`max_tokens` must be at least 1 (0 is for `echo`).", "max_tokens")


def _check_tokenize(asked: TokenizeRequest) -> None:
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("Send either `prompt` or `messages`.", "prompt")


def _first_finding(error: ValidationError) -> APIError:
    findings = error.errors(include_input=False, include_url=False, include_context=False)
    field = findings[0]["loc"][:1]
    # A union reports one finding per member; the member that got deepest into the value is the one that was meant.
    meant = max((each for each in findings if each["loc"][:1] == field), key=lambda each: len(each["loc"]))
    name = str(field[0]) if field else None
    return bad_request(f"`{name or 'body'}`: {meant['msg'][:200]}", name, "invalid_value")


Asked = TypeVar("Asked", bound=Addressed)


def validate(kind: type[Asked], body: dict[str, Any]) -> Asked:
    """`body` as a checked request. Raises a 400 that names the field."""
    refuse_unsupported(body)
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        raise _first_finding(error) from None
    if isinstance(asked, Common):
        _check_common(asked)
    if isinstance(asked, ChatRequest):
        _check_chat(asked, body)
    if isinstance(asked, TokenizeRequest):
        _check_tokenize(asked)
    return asked


FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
FROM_REQUEST = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "skip_special_tokens",
)


def sampling_params(
    asked: Common, defaults: dict[str, float], max_tokens: int | None, logprobs: int | None, scored: int | None = None
) -> SamplingParams:
    """The engine's parameters; raises `RequestError` for values out of range. `max_tokens` None: all of the context.

    `scored`: alternatives per prompt token, None: the prompt is not scored.
    """
    chosen: dict[str, Any] = dict(defaults)
    chosen |= {name: value for name in FROM_MODEL if (value := getattr(asked, name)) is not None}
    chosen |= {name: getattr(asked, name) for name in FROM_REQUEST}
    if "top_k" in chosen:
        chosen["top_k"] = int(chosen["top_k"])
    return SamplingParams(**chosen, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=scored)
