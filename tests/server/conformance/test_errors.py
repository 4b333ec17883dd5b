"""Errors: their object, their statuses, their headers, and what they must not tell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conformance.marks import helios_only, row, vllm_bug
from tests.server.live import CHAT, COMPLETE, Target

ECHOED = vllm_bug("it echoes what it was sent: vllm#49239")
DETAIL = vllm_bug('the framework answers: {"detail": …}, which the SDK cannot unwrap')
HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("path", [CHAT, COMPLETE, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "raw",
    [
        row("nothing", b""),
        row("a list", b"[]"),
        row("null", b"null"),
        row("a number", b"42"),
        row("text", b'"prompt"'),
        row("half an object", b'{"prompt": "a'),
        row("two objects", b"{} {}"),
        row("not utf-8", b'{"prompt": "\xff\xfe"}', marks=DETAIL),
        row("a form", b"prompt=a"),
        row("deep", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", marks=DETAIL),
        row("a long number", b'{"prompt": ' + b"1" * 10_000 + b"}", marks=DETAIL),
        row("a lone surrogate", b'{"prompt": "\\ud83d", "messages": [{"role": "user", "content": "\\ud83d"}]}'),
        row("a lone surrogate as a key", b'{"\\udc00": 1}'),
    ],
)
def test_bad_bodies(target: Target, path: str, raw: bytes) -> None:
    target.refused(target.raw(path, raw))


def test_unknown_model(target: Target) -> None:
    for path in (CHAT, COMPLETE):
        answer = target.post(path, model="gpt-4", messages=HI, prompt="Hi")
        target.refused(answer, 404, "model", "model_not_found")


@helios_only("others have no limit")
@pytest.mark.parametrize("length", [True, False], ids=["told", "not told"])
def test_a_body_over_the_limit(target: Target, length: bool) -> None:
    def parts() -> Any:
        yield b'{"prompt": "'
        for _ in range(80):
            yield b"a" * 65536

    body = b"a" * 5_300_000 if length else parts()
    answer = target.client.post(COMPLETE, content=body, headers={"content-type": "application/json"})
    target.refused(answer, 413, code="request_too_large")


def test_content_type_of_the_request(target: Target) -> None:
    body = json.dumps({"model": target.model, "prompt": "Hi", "max_tokens": 1}).encode()
    assert target.raw(COMPLETE, body, **{"content-type": "application/json; charset=utf-8"}).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = target.raw(COMPLETE, body, **{"content-type": kind})
        assert answer.status_code in (400, 415)
        target.refused(answer, answer.status_code)


def test_never_422(target: Target) -> None:
    for body in ({}, {"prompt": {}}, {"prompt": "a", "temperature": []}, {"prompt": "a", "stop": {"a": [1]}}):
        target.refused(target.post(COMPLETE, **body))


def test_code_type_and_param(target: Target) -> None:
    error = target.refused(target.post(COMPLETE, prompt="a", temperature=-1), param="temperature", code="invalid_value")
    assert error["type"] and error["code"] is not None


@helios_only("others call it by other names")
@pytest.mark.parametrize(
    ("body", "code"),
    [
        row("context", {"prompt": [1] * 9000}, "context_length_exceeded"),
        row("not supported", {"prompt": "a", "suffix": "b"}, "unsupported_parameter"),
        row("bad value", {"prompt": "a", "top_p": 5}, "invalid_value"),
    ],
)
def test_codes(target: Target, body: dict[str, Any], code: str) -> None:
    assert target.refused(target.post(COMPLETE, **body), code=code)["type"] == "invalid_request_error"


class TestErrorsAreBounded:
    """A few bytes must not be echoed as megabytes: vllm#49239."""

    @pytest.mark.parametrize(
        "extra",
        [
            row("a long value", {"temperature": "x" * 100_000}),
            row("many bad entries", {"stop": [1] * 20_000}),
            row("many bad ids", {"prompt": [["x"] * 100] * 100}),
            row("a long name", {"model": "x" * 100_000}, marks=ECHOED),
            row("a long field", {"logit_bias": {"x" * 100_000: 1}}, marks=ECHOED),
            row("many parts", {"response_format": {"type": "x" * 50_000}}),
        ],
    )
    def test_answer_is_short(self, target: Target, extra: dict[str, Any]) -> None:
        answer = target.post(COMPLETE, **{"prompt": "a", "max_tokens": 1, **extra})
        assert answer.status_code in (400, 404) and len(answer.content) < 4000

    def test_messages(self, target: Target) -> None:
        answer = target.post(CHAT, messages=[{"role": "user", "content": [{"type": "x" * 1000}] * 500}])
        assert answer.status_code == 400 and len(answer.content) < 8000

    @vllm_bug("its messages name classes and pydantic's pages")
    def test_nothing_inner_is_told(self, target: Target) -> None:
        for answer in (
            target.post(COMPLETE, prompt={"a": 1}),
            target.get("/v1/models/..%2F..%2Fetc%2Fpasswd"),
            target.raw(CHAT, b"{"),
            target.post(CHAT, messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        ):
            told = answer.text
            assert not any(word in told for word in ("Traceback", "/site-packages/", "pydantic.dev", ".py", "root:"))


class TestHeaders:
    @helios_only("others do it by option")
    @pytest.mark.parametrize("given", ["mine-1", "a" * 128])
    def test_request_id_is_repeated(self, target: Target, given: str) -> None:
        for path in ("/health", "/v1/nothing", "/v1/models"):
            assert target.get(path, headers={"x-request-id": given}).headers["x-request-id"] == given

    @helios_only("others do it by option")
    @pytest.mark.parametrize("given", ["", "a" * 129, "a b", "\xe9t\xe9"])
    def test_request_id_that_cannot_be_repeated_is_replaced(self, target: Target, given: str) -> None:
        told = target.get("/health", headers={b"x-request-id": given.encode("latin-1")}).headers["x-request-id"]
        assert told != given and 0 < len(told) <= 128

    @helios_only("others do it by option")
    def test_request_id_on_errors_and_streams(self, target: Target) -> None:
        refused = target.post(COMPLETE, prompt="a", temperature=9)
        assert refused.status_code == 400 and refused.headers["x-request-id"]
        assert target.stream(COMPLETE).response.headers["x-request-id"]

    def test_json_answers_say_so(self, target: Target) -> None:
        answer = target.post(COMPLETE, prompt="a", max_tokens=1)
        assert answer.headers["content-type"].startswith("application/json")

    def test_a_preflight_is_never_a_401(self, target: Target) -> None:
        asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        answer = target.client.options(CHAT, headers={**asked, "authorization": ""})
        assert answer.status_code != 401

    @helios_only("closed by default")
    def test_no_origin_is_allowed_by_default(self, target: Target) -> None:
        for answer in (
            target.client.options(CHAT, headers={"origin": "http://evil.example"}),
            target.get("/v1/models", headers={"origin": "http://evil.example"}),
        ):
            assert "access-control-allow-origin" not in answer.headers


class TestKeys:
    @pytest.fixture(autouse=True)
    def _with_a_key(self, target: Target) -> None:
        if target.key is None:
            pytest.skip("this server asks for no key")

    @pytest.mark.parametrize(
        "given", ["", "Bearer", "Bearer wrong", "Basic abc", "Bearer \xe9", "Bearer " + "x" * 5000]
    )
    @vllm_bug('its 401 is {"error": "Unauthorized"}, which the SDK cannot unwrap')
    def test_missing_or_wrong(self, target: Target, given: str) -> None:
        headers = {b"authorization": given.encode("latin-1")}
        for method, path in (("POST", CHAT), ("GET", "/v1/models")):
            answer = target.client.request(method, path, headers=headers)
            target.refused(answer, 401, code="invalid_api_key")
            assert answer.headers["www-authenticate"].lower().startswith("bearer")

    @helios_only("others guard some paths")
    @pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/version", "/openapi.json", "/v1/nothing", "/pause"])
    def test_everything_else_is_guarded_too(self, target: Target, path: str) -> None:
        assert target.client.post(path, headers={"authorization": "Bearer wrong"}).status_code == 401

    @pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
    def test_scheme_in_any_case(self, target: Target, scheme: str) -> None:
        answer = target.get("/v1/models", headers={"authorization": f"{scheme} {target.key}"})
        assert answer.status_code == 200

    def test_health_needs_none(self, target: Target) -> None:
        assert target.get("/health", headers={"authorization": ""}).status_code == 200
