# Generated from notebooks/19_asking.ipynb by `helios export`; edit the notebook.
"""What a client may ask: the fields of each endpoint's body, their types and their defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from helios.model.chat import RESERVED
from helios.serve.errors import bad_request

__all__ = [
    "Addressed",
    "Body",
    "ChatRequest",
    "Common",
    "CompletionRequest",
    "DetokenizeRequest",
    "MAX_PROMPTS",
    "Stop",
    "StreamOptions",
    "TokenId",
    "TokenizeRequest",
]
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


class Addressed(Body):
    """A request to one of the models served here; without a name, to the one that there is."""

    model: str | None = None


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Common(Addressed):
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
    spaces_between_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None


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
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

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


class TokenizeRequest(Addressed):
    """`POST /tokenize`: a text or a conversation."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeRequest(Addressed):
    """`POST /detokenize`: ids back to text."""

    tokens: list[TokenId]
