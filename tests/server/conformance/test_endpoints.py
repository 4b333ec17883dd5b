"""Endpoints: what is there, what is not, and how paths may be written."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conformance.marks import helios_only, row, vllm_bug
from tests.server.live import CHAT, COMPLETE, Target

HI = [{"role": "user", "content": "Hi"}]


def test_models_lists_the_served_model(target: Target) -> None:
    listed = target.get("/v1/models").json()
    assert listed["object"] == "list"
    card = next(each for each in listed["data"] if each["id"] == target.model)
    assert card["object"] == "model" and isinstance(card["created"], int) and card["owned_by"]


def test_models_card_says_the_context(target: Target) -> None:
    assert target.get("/v1/models").json()["data"][0]["max_model_len"] > 0


@vllm_bug("it has no GET /v1/models/{id}, which the SDK's models.retrieve asks")
def test_models_retrieve(target: Target) -> None:
    answer = target.get(f"/v1/models/{target.model}")
    assert answer.status_code == 200 and answer.json()["id"] == target.model


@pytest.mark.parametrize("name", ["nobody", "some/where", "..%2F..%2Fetc%2Fpasswd", "%00"])
def test_models_retrieve_unknown(target: Target, name: str) -> None:
    answer = target.get(f"/v1/models/{name}")
    assert answer.status_code == 404
    if not target.foreign:
        target.refused(answer, 404, code="model_not_found")


@pytest.mark.parametrize("path", ["/v1//models", "//v1/models", "/v1/models/"])
@vllm_bug("404 for a doubled slash: open-webui#12117")
def test_slashes_do_not_matter(target: Target, path: str) -> None:
    assert target.client.get(target.url + path).json()["data"][0]["id"] == target.model


def test_health(target: Target) -> None:
    assert target.get("/health").status_code == 200


def test_version(target: Target) -> None:
    assert isinstance(target.get("/version").json()["version"], str)


def test_metrics_answers_without_a_redirect(target: Target) -> None:
    answer = target.client.get("/metrics", follow_redirects=False)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    assert "# TYPE " in answer.text and "num_requests_running" in answer.text


@helios_only("others have some of these")
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/rerank", "/score", "/v1/audio/speech"])
def test_what_is_not_offered_is_a_404_with_an_error_object(target: Target, path: str) -> None:
    target.refused(target.post(path, input="a"), 404)


@helios_only("controls are not for clients")
@pytest.mark.parametrize("path", ["/pause", "/sleep", "/reset_prefix_cache", "/shutdown", "/load_lora_adapter"])
def test_no_control_endpoints(target: Target, path: str) -> None:
    assert target.post(path).status_code == 404


@helios_only("these pages are off")
@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_no_docs_pages(target: Target, path: str) -> None:
    assert target.get(path).status_code == 404


class TestTokenize:
    def test_prompt(self, target: Target) -> None:
        body = target.ok("/tokenize", prompt="Hello, world")
        assert body["count"] == len(body["tokens"]) > 0
        assert body["max_model_len"] == target.context and all(isinstance(token, int) for token in body["tokens"])

    def test_messages_are_rendered(self, target: Target) -> None:
        asked = target.chat(HI, max_tokens=1)["usage"]["prompt_tokens"]
        assert target.ok("/tokenize", messages=HI)["count"] == asked

    def test_messages_without_generation_prompt(self, target: Target) -> None:
        bare = target.ok("/tokenize", messages=HI, add_generation_prompt=False)["count"]
        assert bare < target.ok("/tokenize", messages=HI)["count"]

    def test_add_special_tokens(self, target: Target) -> None:
        bare = target.ok("/tokenize", prompt="Hi", add_special_tokens=False)["tokens"]
        assert target.ok("/tokenize", prompt="Hi", add_special_tokens=True)["tokens"][-len(bare) :] == bare

    def test_token_strings(self, target: Target) -> None:
        body = target.ok("/tokenize", prompt="Hello, world", return_token_strs=True)
        assert len(body["token_strs"]) == body["count"]

    @pytest.mark.parametrize("text", ["Hello, world", " leading", "Žluťoučký 😀 猫\n\ttab", "a" * 500])
    def test_detokenize_is_the_way_back(self, target: Target, text: str) -> None:
        assert target.ok("/detokenize", tokens=target.tokens(text))["prompt"] == text

    def test_detokenize_nothing(self, target: Target) -> None:
        assert target.ok("/detokenize", tokens=[])["prompt"] == ""

    @pytest.mark.parametrize(
        ("path", "body", "status"),
        [
            row("neither prompt nor messages", "/tokenize", {}, 400),
            row("prompt is a number", "/tokenize", {"prompt": 5}, 400),
            row("messages are text", "/tokenize", {"messages": "hi"}, 400),
            row("unknown model", "/tokenize", {"model": "nobody", "prompt": "a"}, 404),
            row("no tokens", "/detokenize", {}, 400),
            row("tokens are text", "/detokenize", {"tokens": ["a"]}, 400),
            row("negative id", "/detokenize", {"tokens": [-1]}, 400),
            row("id out of vocabulary", "/detokenize", {"tokens": [10**7]}, 400, marks=helios_only("stricter")),
            row("id beyond 64 bits", "/detokenize", {"tokens": [2**70]}, 400),
            row("unknown model", "/detokenize", {"model": "nobody", "tokens": [1]}, 404),
        ],
    )
    def test_refused(self, target: Target, path: str, body: dict[str, Any], status: int) -> None:
        target.refused(target.post(path, **body), status)


@vllm_bug('the framework answers: {"detail": …}, which the SDK cannot unwrap')
@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        row("get chat", "GET", CHAT, "POST"),
        row("put completions", "PUT", COMPLETE, "POST"),
        row("delete models", "DELETE", "/v1/models", "GET"),
        row("post health", "POST", "/health", "GET"),
        row("get tokenize", "GET", "/tokenize", "POST"),
    ],
)
def test_wrong_method(target: Target, method: str, path: str, allowed: str) -> None:
    answer = target.client.request(method, path)
    assert answer.status_code == 405 and allowed in answer.headers["allow"]
    target.refused(answer, 405)


@vllm_bug('the framework answers: {"detail": …}, which the SDK cannot unwrap')
def test_unknown_route(target: Target) -> None:
    target.refused(target.get("/v1/nothing"), 404)
