"""Who may ask: keys, tenants, origins, and limits that hold on every route."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from helios.serve.keys import Keys, read_keys
from helios.serve.launch import LaunchError, accepted_keys, is_loopback
from helios.serve.settings import ServeSettings
from tests.server.test_refusals import error_of
from tests.server.watched import Watched, launched

ORIGIN = "http://ui.example:3000"
ALICE, BOB = "sk-alice", "sk-bøb"
COMPLETE = "/v1/completions"
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST"}
ASKS = {"access-control-request-headers": "authorization,content-type,x-stainless-os"}


@pytest.fixture(scope="module")
def guarded(tiny_folder: Any) -> Iterator[Watched]:
    with launched(tiny_folder("qwen3"), keys=[ALICE, BOB], cors_origin=[ORIGIN]) as running:
        yield running


@pytest.fixture
def nobody(guarded: Watched) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=30) as client:
        yield client


def routes(running: Watched, method: str) -> list[str]:
    """Every path that the server's own description lists for `method`, `/metrics` among them."""
    app: Any = running.server.config.app
    while not isinstance(app, FastAPI):  # what is put around it
        app = app.app
    paths = app.openapi()["paths"]
    return [path.replace("{model}", "a/b") for path, methods in paths.items() if method in methods]


def test_every_route_but_health_is_closed(guarded: Watched, nobody: httpx.Client) -> None:
    everything = {(method, path) for method in ("get", "post") for path in routes(guarded, method)}
    assert {("get", "/metrics"), ("post", COMPLETE), ("get", "/version")} <= everything
    made_up = {
        ("get", path) for path in ("/openapi.json", "/nowhere", "/", "/health/x", "/health/../version", "/HEALTH")
    }
    for method, path in (everything | made_up) - {("get", "/health")}:
        answer = nobody.request(method, path)
        error = error_of(answer, 401)
        assert error["code"] == "invalid_api_key" and error["type"] == "authentication_error", path
        assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
    assert nobody.get("/health").status_code == nobody.get(guarded.url + "//health/").status_code == 200


def bearer(header: str | bytes) -> dict[bytes, bytes]:
    return {b"authorization": header if isinstance(header, bytes) else header.encode()}


@pytest.mark.parametrize("header", [f"Bearer {ALICE}", f"bearer {ALICE}", f"BEARER  {ALICE}", f"Bearer {BOB}"])
def test_either_key_opens(nobody: httpx.Client, header: str) -> None:
    assert nobody.get("/v1/models", headers=bearer(header)).status_code == 200


WRONG: list[str | bytes] = ["Bearer", ALICE, f"Basic {ALICE}", f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}"]
WRONG += [f"Bearer {ALICE} {BOB}", "Bearer " + "k" * 5000, b"Bearer \xff\xfe", b"", f"Bearer{ALICE}", "Bearer *"]


@pytest.mark.parametrize("header", WRONG)
def test_anything_else_does_not_and_is_not_repeated(nobody: httpx.Client, header: str | bytes) -> None:
    answer = nobody.get("/v1/models", headers=bearer(header))
    error_of(answer, 401)
    assert ALICE not in answer.text and "kkk" not in answer.text
    assert nobody.get("/v1/models", params={"api_key": ALICE}).status_code == 401


def test_metrics_can_be_opened_on_purpose(tiny_folder: Any) -> None:
    with launched(tiny_folder("qwen3"), keys=[ALICE], public_metrics=True) as running:
        assert httpx.get(running.url + "/metrics").status_code == 200
        assert httpx.get(running.url + "/v1/models").status_code == 401


def cached(running: Watched, key: str, prompt: list[int], **body: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, **body}
    answer = running.client.post(COMPLETE, json=body, headers=bearer(f"Bearer {key}")).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_key_sees_nothing_of_what_another_has_sent(guarded: Watched) -> None:
    prompt = [9] * 300
    assert [cached(guarded, ALICE, prompt) for _ in range(2)] == [0, 256]
    assert [cached(guarded, BOB, prompt) for _ in range(2)] == [0, 256]
    # A salt that a client chooses divides its own share further; it never leads into another's.
    assert [cached(guarded, key, prompt, cache_salt="s") for key in (ALICE, BOB, ALICE)] == [0, 0, 256]


def test_tenants_differ_and_are_not_the_digests() -> None:
    keys = Keys([ALICE, BOB, ALICE])
    assert len(keys) == 2 and len({keys.tenant(1), keys.tenant(2), *keys._digests}) == 4
    assert ALICE not in repr(vars(keys))


def test_a_preflight_needs_no_key_and_a_401_can_be_read(nobody: httpx.Client) -> None:
    answer = nobody.options(COMPLETE, headers={**PREFLIGHT, **ASKS})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ORIGIN
    allowed = answer.headers["access-control-allow-headers"]
    assert all(name in allowed for name in ("authorization", "content-type", "x-stainless-os"))
    refused = nobody.post(COMPLETE, headers={"origin": ORIGIN}, json={})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


def test_streams_and_errors_carry_the_origin_too(guarded: Watched) -> None:
    for body, status in (({"prompt": "x", "stream": True, "max_tokens": 2}, 200), ({"prompt": 5}, 400)):
        answer = guarded.client.post(COMPLETE, json=body, headers={"origin": ORIGIN})
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == ORIGIN


def test_other_origins_get_no_header(nobody: httpx.Client) -> None:
    for origin in ("http://evil.example", "null", ORIGIN + ".evil.example", ORIGIN.upper()):
        answer = nobody.options(COMPLETE, headers={**PREFLIGHT, "origin": origin})
        assert "access-control-allow-origin" not in answer.headers
        assert "access-control-allow-origin" not in nobody.get("/health", headers={"origin": origin}).headers


def test_cors_is_off_unless_asked_for_and_never_with_credentials(tiny_folder: Any) -> None:
    with launched(tiny_folder("qwen3")) as closed:
        answer = closed.client.options(COMPLETE, headers=PREFLIGHT)
        assert answer.status_code == 405 and not any(name.startswith("access-control") for name in answer.headers)
    with launched(tiny_folder("qwen3"), cors_origin=["*"]) as wide:
        for answer in (wide.client.options(COMPLETE, headers=PREFLIGHT), wide.client.get("/health", headers=PREFLIGHT)):
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in answer.headers


def test_a_body_is_limited_on_every_route_that_takes_one(guarded: Watched) -> None:
    big = b'{"prompt": "' + b"x" * (5 * 1024 * 1024)
    kind = {"content-type": "application/json"}

    def pieces() -> Iterator[bytes]:  # no content-length to go by
        for start in range(0, len(big), 65536):
            yield big[start : start + 65536]

    for path in routes(guarded, "post"):
        for content in (big, pieces()):
            answer = guarded.client.post(path, content=content, headers=kind)
            assert answer.status_code == 413 and error_of(answer, 413)["code"] == "request_too_large", path
    assert guarded.client.request("GET", "/v1/models", content=big).status_code == 200, "nobody reads that body"
    assert guarded.client.get("/health").status_code == 200


def test_headers_are_limited(guarded: Watched) -> None:
    for headers in (
        {"x": "a" * 33_000},
        {f"x-{i}": "a" for i in range(300)},
        {"authorization": "Bearer " + "a" * 60_000},
    ):
        answer = guarded.client.get("/v1/models", headers=headers)
        assert answer.status_code == 431 and error_of(answer, 431)["code"] == "headers_too_large"
        assert answer.headers["x-request-id"]
    assert guarded.client.get("/v1/models?" + "q" * 40_000).status_code == 431
    assert guarded.client.get("/v1/models", headers={"x": "a" * 8_000}).status_code == 200


@pytest.mark.parametrize("raw", [b"GET / HTTP/1.1\r\nx: " + b"a" * 2_000_000, b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n"])
def test_what_is_not_http_is_a_400_and_costs_nothing(guarded: Watched, raw: bytes) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as wire:
        try:
            wire.sendall(raw + b"\r\n\r\n")
            answer = wire.recv(1000)
        except ConnectionError:  # closed in our face while we were still sending
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert guarded.client.get("/health").status_code == 200


def test_keys_come_from_flags_variable_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HELIOS_API_KEY", "sk-a, sk-b")
    assert ServeSettings().api_key == ["sk-a", "sk-b"] and ServeSettings(api_key=["sk-c"]).api_key == ["sk-c"]
    assert "sk-a" not in repr(ServeSettings())
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-file  # Bob's\n\n")
    assert read_keys(["sk-a"], file) == ["sk-a", "sk-file"]
    assert len(accepted_keys(ServeSettings(api_key_file=file))) == 3


def test_a_key_that_cannot_be_meant_stops_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# none yet\n")
    for settings in ({"api_key": [""]}, {"api_key": ["sk-secret two"]}, {"api_key_file": tmp_path / "no"}):
        with pytest.raises(LaunchError, match="key") as refused:
            accepted_keys(ServeSettings(**settings))  # type: ignore[arg-type]
        assert "secret" not in str(refused.value) and str(tmp_path) not in str(refused.value)
    with pytest.raises(LaunchError, match="holds none"):
        accepted_keys(ServeSettings(api_key_file=tmp_path / "empty"))
    monkeypatch.setenv("HELIOS_API_KEY", "")  # a secret that was not filled in must not open the server
    with pytest.raises(LaunchError, match="empty"):
        accepted_keys(ServeSettings())


def test_an_open_address_without_a_key_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert is_loopback(host) and not accepted_keys(ServeSettings(host=host))
    accepted_keys(ServeSettings(host="0.0.0.0", api_key=["sk-a"]))
    assert capsys.readouterr().err == ""
    for host in ("0.0.0.0", "::", "192.168.0.4", "fe80::1", "box.example"):
        accepted_keys(ServeSettings(host=host))
        told = capsys.readouterr().err
        assert "Warning" in told and host in told and "HELIOS_API_KEY" in told


def test_an_origin_that_no_browser_sends_is_refused() -> None:
    assert ServeSettings(cors_origin=[]).cors_origin == []
    fine = ["http://a", "https://a.b:1", "*", "tauri://localhost"]
    assert ServeSettings(cors_origin=fine).cors_origin == fine
    for origin in ("a.example", "https://a/", "https://a/chat", "http://"):
        with pytest.raises(ValidationError, match="origin"):
            ServeSettings(cors_origin=[origin])
