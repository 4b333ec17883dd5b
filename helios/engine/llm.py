# Generated from notebooks/12_scheduler.ipynb by `helios export`; edit the notebook.
"""The engine without a server: `LLM(model).generate(prompts)`, with the names and shapes of vLLM's offline API."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from helios.engine.build import build_engine
from helios.engine.job import Job, JobEvent, Timings
from helios.engine.prompts import Prompt, as_list, engine_config, progress, token_list
from helios.engine.scheduler import Scheduler
from helios.engine.sequence import Request
from helios.engine.worker import EngineDead
from helios.model.params import RequestError, SamplingParams
from helios.model.sampling import TokenLogprob
from helios.model.tokenizer import Tokenizer

__all__ = ["CompletionOutput", "LLM", "Logprob", "RequestOutput", "read_choice", "read_logprob"]


@dataclass
class Logprob:
    """Of one token at one position, under the model's raw distribution; `rank` 1 is the likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One choice of an answer. `logprobs`: for each token the sampled one and the likeliest, by token id."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """The answer to one prompt. `prompt_logprobs`, if asked for: per prompt token, None for the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: Timings | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def read_logprob(entry: TokenLogprob, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """One position's logprobs by token id: the likeliest tokens that were asked for, and the sampled one."""

    def text(token_id: int) -> str | None:
        return tokenizer.token_text(token_id) if tokenizer else None

    likeliest = {token_id: Logprob(value, rank, text(token_id)) for rank, (token_id, value) in enumerate(entry.top, 1)}
    return {entry.token_id: Logprob(entry.logprob, None, text(entry.token_id)), **likeliest}


def read_choice(event: JobEvent, tokenizer: Tokenizer | None) -> CompletionOutput:
    """A choice's events, merged into one, as the output of that choice."""
    entries = [entry for entry in event.logprobs if entry is not None]
    return CompletionOutput(
        index=event.index,
        text=event.text,
        token_ids=event.token_ids,
        cumulative_logprob=sum(entry.logprob for entry in entries) if entries else None,
        logprobs=[read_logprob(entry, tokenizer) for entry in entries] if entries else None,
        finish_reason=event.finish_reason,
        stop_reason=event.stop_reason,
    )


class LLM:
    """A model to call from Python: loads at once, answers lists of prompts in one batch. Use `with`, or `close()` it.

    `options` are EngineConfig's fields (dtype, max_batch_size, ...). Raises ModelError when the model cannot be used.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self.config = config = engine_config(model, options)
        self._scheduler = Scheduler(lambda: build_engine(config), max_waiting=config.max_waiting)
        self._finalizer = weakref.finalize(self, self._scheduler.shutdown)
        self._ids = itertools.count()
        self._scheduler.start()
        try:
            engine = self._scheduler.wait_ready()
        except EngineDead as error:
            raise error.__cause__ or error from None
        self._tokenizer, self.report = engine.tokenizer, engine.report
        self._defaults, self._context = engine.model.config.sampling_defaults, engine.context

    def close(self) -> None:
        """End the worker and free the model. Answers in progress end with an error."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; ValueError if its folder has none."""
        if self._tokenizer is None:
            raise ValueError(f"{self.config.model} has no tokenizer.json: give prompts as token ids")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when no parameters are given: the model's own recommendation where it has one."""
        values: dict[str, Any] = {k: int(v) if k == "top_k" else v for k, v in self._defaults.items()}
        return SamplingParams(**values)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer each prompt: a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. Results in their order.

        Raises RequestError for a prompt that cannot be served, before anything runs; EngineDead if the engine fails.
        An interrupt cancels all of it.
        """
        texts_and_ids = [self._encode(prompt) for prompt in as_list(prompts)]
        return self._answer(texts_and_ids, sampling_params, use_tqdm)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: Any = prompt if isinstance(prompt, str) else None
        ids: Any = None if isinstance(prompt, (str, dict)) else prompt
        if isinstance(prompt, dict):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is not None:
            return text, token_list(ids)
        if not isinstance(text, str):
            raise RequestError(
                'a prompt is a text, token ids, or a dict with "prompt" or "prompt_token_ids"', param="prompt"
            )
        return text, self.get_tokenizer().encode(text)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, through the model's chat template."""
        tokenizer = self.get_tokenizer()
        options: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        rendered = [(tokenizer.render_chat(c, **options), tokenizer.encode_chat(c, **options)) for c in conversations]
        return self._answer(rendered, sampling_params, use_tqdm)

    def _answer(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.get_default_sampling_params()] * len(prompts)
        params = list(params)
        if not all(isinstance(each, SamplingParams) for each in params):
            raise TypeError("sampling parameters must be SamplingParams(…), one or a list of them")
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling parameters; give one for each, or one")
        requests = [Request(str(next(self._ids)), ids, p) for (_, ids), p in zip(prompts, params, strict=True)]
        engine = self._scheduler.wait_ready()
        for request in requests:
            engine.check_fits(request)
        jobs: list[Job] = []
        try:
            with progress(len(requests), use_tqdm) as advance:
                for request in requests:  # more than the wait list holds are no error here: wait for a place
                    jobs.append(self._scheduler.submit(request, wait_s=None))
                    advance(jobs)
                outputs = []
                for job, (text, _) in zip(jobs, prompts, strict=True):
                    outputs.append(self._read(job, text))
                    advance(jobs)
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
        return outputs

    def _read(self, job: Job, prompt: str | None) -> RequestOutput:
        choices = [JobEvent(i) for i in range(job.request.params.n)]
        for event in job.events():
            choices[event.index] = choices[event.index].then(event)
        for choice in choices:
            if choice.error and (health := self._scheduler.health()).status == "dead":
                raise EngineDead(health.reason)
            if choice.error:
                warnings.warn(f"request {job.id}: {choice.error}", RuntimeWarning, stacklevel=4)
        outputs = [read_choice(choice, self._tokenizer) for choice in choices]
        answer = RequestOutput(job.id, prompt, job.request.prompt_ids, outputs, True, job.cached_tokens, job.timings)
        if (scores := choices[0].prompt_logprobs) is not None:
            answer.prompt_logprobs = [read_logprob(entry, self._tokenizer) if entry else None for entry in scores]
        return answer

    def stream_chat(
        self, messages: Sequence[Any], *, max_tokens: int = 512, temperature: float | None = None
    ) -> Iterator[str]:
        """Yield the answer to one conversation in pieces of text; leaving the loop ends the request.

        `max_tokens` shrinks to what the context has left. Raises RequestError when that is nothing, RuntimeError with
        the reason when the answer fails.
        """
        prompt_ids = self.get_tokenizer().encode_chat(messages)
        room = max(self._context - len(prompt_ids), 1)
        params = replace(self.get_default_sampling_params(), max_tokens=min(max_tokens, room))
        if temperature is not None:
            params = replace(params, temperature=temperature)
        job = self._scheduler.submit(Request(str(next(self._ids)), prompt_ids, params), wait_s=None)
        try:
            for event in job.events():
                if event.error:
                    raise RuntimeError(event.error)
                yield event.text
        finally:
            job.cancel()
