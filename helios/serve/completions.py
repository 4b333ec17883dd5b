# Generated from notebooks/24_server.ipynb by `helios export`; edit the notebook.
"""The completions endpoint: prompts as text or ids, echoed and scored if that is wanted."""

from __future__ import annotations

from fastapi import Request as HTTPRequest
from starlette.responses import Response

from helios.model.tokenizer import Tokenizer
from helios.serve.answer import answer, echo_only
from helios.serve.checks import sampling_params, validate
from helios.serve.errors import bad_request
from helios.serve.grammar import response_grammar
from helios.serve.intake import hopeless, prompt_ids, read_body, tail, too_long
from helios.serve.protocol import CompletionRequest
from helios.serve.service import Service, stream_options
from helios.serve.wire import CompletionWire, Echo

__all__ = ["CompletionEndpoint", "read_prompts"]


def read_prompts(asked: CompletionRequest, tokenizer: Tokenizer, context: int) -> list[Echo]:
    """Per prompt its ids, and its text if it is to be echoed: the client's own, unless it was cut or sent as ids."""
    cut, prompts = asked.truncate_prompt_tokens, []
    for prompt in asked.prompts():
        if isinstance(prompt, str) and cut is None and hopeless(len(prompt), context, tokenizer):
            raise too_long(len(prompt), context, "prompt")
        whole = prompt_ids(prompt, asked.add_special_tokens, tokenizer)
        ids, text = tail(whole, cut, context - max(asked.max_tokens, 1)), ""
        if asked.echo:
            own = isinstance(prompt, str) and len(ids) == len(whole)
            text = str(prompt) if own else tokenizer.decode(ids, skip_special_tokens=False)
        prompts.append(Echo(text, ids))
    return prompts


class CompletionEndpoint:
    """`POST /v1/completions`."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def post(self, request: HTTPRequest) -> Response:
        """Read, check, tokenise, compile, submit, answer. Raises what becomes an error object."""
        service, body = self.service, await read_body(request)
        asked = validate(CompletionRequest, body)
        service.check_model(asked)
        grammar, tokenizer = response_grammar(body), service.tokenizer
        scored = asked.logprobs if asked.echo else None
        params = sampling_params(asked, service.defaults, max(asked.max_tokens, 1), asked.logprobs, scored)
        if len(asked.prompts()) > (most := service.scheduler.max_waiting):
            raise bad_request(f"Send at most {most} prompts per request: more never fit into the queue.", "prompt")
        prompts = await service.texts.run(read_prompts, asked, tokenizer, service.engine.context)
        constraint = await service.constraint(request, grammar)
        wire = self._wire(asked, prompts)
        ids, alone = [list(prompt.ids) for prompt in prompts], asked.max_tokens == 0
        exchange = service.exchange(request, asked, ids, params, constraint, only_scores=alone)
        if alone and scored is None:
            for each in exchange.requests:
                service.engine.check_fits(each)
            return echo_only(wire, exchange.usage, len(ids) * asked.n, stream_options(asked))
        return await answer(request.receive, exchange, wire, len(ids) * asked.n, stream_options(asked))

    def _wire(self, asked: CompletionRequest, prompts: list[Echo]) -> CompletionWire:
        kind = {"token_ids": asked.return_token_ids, "skip_special": asked.skip_special_tokens}
        scored = asked.logprobs is not None
        echoes = prompts if asked.echo else ()
        return CompletionWire(
            self.service.name, self.service.tokenizer, echoes=echoes, n=asked.n, logprobs=scored, **kind
        )
