# Generated from notebooks/24_server.ipynb by `helios export`; edit the notebook.
"""What every endpoint needs: the engine's facts, the served name, tenants, and answers that keep to a grammar."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from typing import Literal

from fastapi import Request as HTTPRequest

from helios.engine.constraint import Constraint
from helios.engine.engine import Engine
from helios.engine.scheduler import Scheduler
from helios.engine.sequence import Request
from helios.model.params import SamplingParams
from helios.model.tokenizer import Tokenizer
from helios.serve.errors import APIError, unavailable
from helios.serve.exchange import Exchange, Mailroom, unless_gone
from helios.serve.grammar import Grammar
from helios.serve.intake import TextThreads
from helios.serve.protocol import Addressed, Common, StreamOptions
from helios.serve.structured import Compiler

__all__ = ["Service", "prefix_salt", "stream_options"]


class Service:
    """What the endpoints share. `name` is the model's served name; nothing a client sends ever becomes a path."""

    def __init__(self, scheduler: Scheduler, mail: Mailroom, name: str) -> None:
        self.scheduler, self.mail, self.name = scheduler, mail, name
        self.started = int(time.time())
        self.texts = TextThreads()
        self._compiler: Compiler | None = None

    @property
    def engine(self) -> Engine:
        """The engine, for reading what never changes. Raises a 503 until it is ready, `EngineDead` when it is gone."""
        try:
            return self.scheduler.wait_ready(0)
        except TimeoutError:
            raise unavailable("The model is still loading.") from None

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer; a 503 as for `engine`, and for a model that has none."""
        if (tokenizer := self.engine.tokenizer) is None:
            raise unavailable("The served model has no tokenizer.json, so this server can neither read nor write text.")
        return tokenizer

    @property
    def defaults(self) -> dict[str, float]:
        """The sampling values that the model's own files recommend."""
        return self.engine.model.config.sampling_defaults

    def check_model(self, asked: Addressed) -> None:
        """Raises a 404 if the request names a model that is not served here."""
        if asked.model not in (None, self.name):
            raise self.unknown_model(asked.model)

    def unknown_model(self, name: str) -> APIError:
        """The 404 for another model's name."""
        message = f"The model {name[:100]!r} is not served here; this server has {self.name!r}."
        return APIError(404, message, "not_found_error", "model_not_found", "model")

    def exchange(
        self,
        http: HTTPRequest,
        asked: Common,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        constraint: Constraint | None = None,
        *,
        only_scores: bool = False,
    ) -> Exchange:
        """The engine's requests for `prompts`, not submitted yet."""
        salt, now = prefix_salt(http.scope.get("helios.tenant", b""), asked.cache_salt), time.monotonic()
        requests = [Request(uuid.uuid4().hex, ids, params, salt, now, constraint) for ids in prompts]
        exchange = Exchange(self.scheduler, self.mail, requests, only_scores=only_scores)
        http.scope.get("helios.note", {})["exchange"] = exchange
        return exchange

    @property
    def compiler(self) -> Compiler:
        """The compiler of grammars for this model, made when it is first needed."""
        if self._compiler is None:
            config = self.engine.model.config
            self._compiler = Compiler(self.tokenizer, config.vocab_size, eos_token_ids=config.eos_token_ids)
        return self._compiler

    async def constraint(
        self, http: HTTPRequest, grammar: Grammar | None, thoughts: Literal["open", "closed", "neither"] = "closed"
    ) -> Constraint | None:
        """What the answer must keep to. Raises a 400 for a grammar that does not compile, `ClientGone` as it says."""
        if grammar is None:
            return None
        return await unless_gone(http.receive, self.compiler.constraint(grammar, thoughts))

    def close(self) -> None:
        """End what runs beside the engine."""
        if self._compiler is not None:
            self._compiler.close()


def prefix_salt(tenant: bytes, cache_salt: str | None) -> bytes:
    """The salt of a request's cached prefixes [32 bytes]; empty if nothing sets it apart."""
    if not tenant and cache_salt is None:
        return b""
    own = b"" if cache_salt is None else hashlib.sha256(b"helios cache salt\0" + cache_salt.encode()).digest()
    return hashlib.sha256(b"helios prefix\0" + bytes([len(tenant)]) + tenant + own).digest()


def stream_options(asked: Common) -> StreamOptions | None:
    """How to stream, or None for a whole answer."""
    return (asked.stream_options or StreamOptions()) if asked.stream else None
