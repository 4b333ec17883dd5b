# Generated from notebooks/17_wire.ipynb by `helios export`; edit the notebook.
"""What a client may ask: the request bodies of the chat and completions endpoints, checked field by field."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from helios.model.chat import RESERVED
from helios.model.params import SamplingParams
from helios.serve.errors import APIError, bad_request

__all__ = [
    "Asked",
    "Body",
    "ChatRequest",
    "Common",
    "CompletionRequest",
    "FROM_MODEL",
    "FROM_REQUEST",
    "MAX_DEPTH",
    "MAX_PROMPTS",
    "NO_GRAMMAR",
    "Stop",
    "StreamOptions",
    "TokenId",
    "UNSUPPORTED",
    "parse_json",
    "refuse_unsupported",
    "sampling_params",
    "validate",
]

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


Stop = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
MAX_PROMPTS = 256


class Body(BaseModel):
    """A JSON object in which `null` means absent and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Common(Body):
    """Fields that chat and completions share; `SamplingParams` checks the ranges of those that sample."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    logit_bias: dict[str, float] | None = None

    stop: str | list[Stop] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None


class CompletionRequest(Common):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=0)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt. Raises a 400 for an empty list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise bad_request("`prompt` must not be empty.", "prompt")
        if isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt]]
        if len(self.prompt) > MAX_PROMPTS:
            raise bad_request(f"At most {MAX_PROMPTS} prompts fit into one request.", "prompt")
        return list(self.prompt)


class ChatRequest(Common):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tool_choice: Literal["none", "auto"] | None = None

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens to generate; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    def template_arguments(self) -> dict[str, Any]:
        """Extra names for the chat template; what OpenAI calls reasoning effort, templates call thinking."""
        if clash := sorted(set(RESERVED) & set(self.chat_template_kwargs)):
            raise bad_request(f"`chat_template_kwargs` must not set `{clash[0]}`.", "chat_template_kwargs")
        thinking = {} if self.reasoning_effort is None else {"enable_thinking": self.reasoning_effort != "none"}
        return {**thinking, **self.chat_template_kwargs}


NO_GRAMMAR = "constrained decoding is not built yet"
UNSUPPORTED = {
    "suffix": "this model has no fill-in-the-middle",
    "prompt_logprobs": "scoring prompts is not built yet",
    "audio": "the models are text only",
    "use_beam_search": "beam search is not built",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "chat_template": "only the model's own template is used",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), NO_GRAMMAR
    ),
}


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raises a 400 naming the first field that is known, set, and not supported."""
    reasons = {name: why for name, why in UNSUPPORTED.items() if body.get(name) not in (None, False)}
    if body.get("best_of") not in (None, body.get("n") or 1):
        reasons["best_of"] = "it must be equal to `n`"
    if body.get("modalities") not in (None, ["text"]):
        reasons["modalities"] = 'only ["text"] is'
    wanted = body.get("response_format")
    if wanted is not None and not (isinstance(wanted, dict) and wanted.get("type") == "text"):
        reasons["response_format"] = NO_GRAMMAR
    for name, why in reasons.items():
        raise bad_request(f"`{name}` is not supported: {why}.", name, "unsupported_parameter")


def _check_chat(asked: ChatRequest, body: dict[str, Any]) -> None:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise bad_request("`top_logprobs` goes with `logprobs: true`.", "top_logprobs")
    if asked.add_generation_prompt and asked.continue_final_message and "add_generation_prompt" in body:
        raise bad_request(
            "Set `continue_final_message` or `add_generation_prompt`, not both.", "continue_final_message"
        )
    if asked.tool_choice == "auto" and not asked.tools:
        raise bad_request("`tool_choice` goes with `tools`.", "tool_choice")


def _check_completion(asked: CompletionRequest) -> None:
    if asked.max_tokens == 0 and not asked.echo:
        raise bad_request("`max_tokens` must be at least 1 (0 is for `echo`).", "max_tokens")
    if asked.echo and asked.logprobs is not None:
        message = "`echo` with `logprobs` is not supported: scoring prompts is not built yet."
        raise bad_request(message, "echo", "unsupported_parameter")


def _first_finding(error: ValidationError) -> APIError:
    findings = error.errors(include_input=False, include_url=False, include_context=False)
    field = findings[0]["loc"][:1]
    # A union reports one finding per member; the member that got deepest into the value is the one that was meant.
    meant = max((each for each in findings if each["loc"][:1] == field), key=lambda each: len(each["loc"]))
    name = str(field[0]) if field else None
    return bad_request(f"`{name or 'body'}`: {meant['msg'][:200]}", name, "invalid_value")


Asked = TypeVar("Asked", bound=Common)


def validate(kind: type[Asked], body: dict[str, Any]) -> Asked:
    """`body` as a checked request. Raises a 400 that names the field."""
    refuse_unsupported(body)
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        raise _first_finding(error) from None
    if asked.stream_options is not None and not asked.stream:
        raise bad_request("`stream_options` goes with `stream: true`.", "stream_options")
    if isinstance(asked, ChatRequest):
        _check_chat(asked, body)
    elif isinstance(asked, CompletionRequest):
        _check_completion(asked)
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
    asked: Common, defaults: dict[str, float], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The engine's parameters; raises `RequestError` for values out of range. `max_tokens` None: all of the context."""
    chosen: dict[str, Any] = dict(defaults)
    chosen |= {name: value for name in FROM_MODEL if (value := getattr(asked, name)) is not None}
    chosen |= {name: getattr(asked, name) for name in FROM_REQUEST}
    if "top_k" in chosen:
        chosen["top_k"] = int(chosen["top_k"])
    return SamplingParams(**chosen, max_tokens=max_tokens, logprobs=logprobs)
