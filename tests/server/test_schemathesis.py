"""The server against its own OpenAPI document: schemathesis makes requests, good and bad, and checks the answers."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.inprocess import InProcess, in_process

EXAMPLES = int(os.environ.get("HELIOS_SCHEMATHESIS_EXAMPLES", "2000"))
WITH_BODY = {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"}
PLAIN = ["/v1/models", "/v1/models/{model}", "/health", "/version", "/metrics"]
CHECKS: list[Any] = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
told: collections.Counter[tuple[str, int]] = collections.Counter()


@pytest.fixture(scope="module")
def app(tiny_folder: Any) -> Iterator[InProcess]:
    with in_process(tiny_folder("qwen3"), max_context=64, kv_pages=32) as running:
        yield running


@pytest.fixture(scope="module")
def document(app: InProcess) -> Any:
    """The server's OpenAPI document, as schemathesis reads it."""
    return schemathesis.openapi.from_dict(app.openapi())


def send(app: InProcess, case: schemathesis.Case) -> schemathesis.Response:
    """What the application answers to this case, without a socket between."""
    prepared = requests.Request(**case.as_transport_kwargs(base_url="http://127.0.0.1")).prepare()
    address = urlsplit(str(prepared.url))
    body = prepared.body.encode() if isinstance(prepared.body, str) else prepared.body or b""
    headers = [(_raw(name).lower(), _raw(value)) for name, value in prepared.headers.items()]
    method, path = str(prepared.method), unquote(address.path)
    answer = app.ask(method, path, body, headers, address.query.encode())
    got: dict[str, list[str]] = {}
    for name, value in answer.headers:
        got.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    return schemathesis.Response(answer.status, got, answer.body, prepared, 0.0, False)


def _raw(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1", "replace")


OPERATIONS = [*(("POST", path) for path in sorted(WITH_BODY)), *(("GET", path) for path in PLAIN)]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_documented(app: InProcess, document: Any, method: str, path: str) -> None:
    operation = document[path][method]
    modes = GenerationMode if method == "POST" else [GenerationMode.POSITIVE]

    @settings(
        max_examples=EXAMPLES // len(WITH_BODY) + 10,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes]))
    def check(case: schemathesis.Case) -> None:
        answer = send(app, case)
        told[path, answer.status_code] += 1
        streams = answer.headers["content-type"][0].startswith("text/event-stream")
        # schemathesis holds each event against the schema of the whole stream; frames have tests of their own.
        skipped: list[Any] = [response_schema_conformance] if streams else []
        case.validate_response(answer, checks=CHECKS, excluded_checks=skipped)

    check()


def test_there_were_enough_of_them_good_and_bad(app: InProcess) -> None:
    print(dict(told))
    assert told.total() >= EXAMPLES
    for path in WITH_BODY:
        assert told[path, 200] > 0 and told[path, 400] > 0, path
    assert app.ask("POST", "/v1/completions", b'{"prompt": "Hi", "max_tokens": 1}').status == 200


def test_the_document_names_every_endpoint(app: InProcess) -> None:
    paths = app.openapi()["paths"]
    assert set(paths) >= WITH_BODY | set(PLAIN)
    for path in WITH_BODY:
        operation = paths[path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]
        assert {"200", "400", "413", "503"} <= set(operation["responses"])
