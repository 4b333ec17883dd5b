"""Real clients against a live server: the official SDK, LiteLLM and LangChain."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.server.live import Target

MESSAGES: list[Any] = [{"role": "user", "content": "Say hello."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


class Person(BaseModel):
    """What a structured answer must hold; no field can be long."""

    name: Literal["Ada", "Alan"]
    born: Literal[1815, 1912]


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS},
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def client(target: Target) -> openai.OpenAI:
    http = httpx.Client(trust_env=False)
    return openai.OpenAI(base_url=target.url + "/v1", api_key=target.key or "none", max_retries=0, http_client=http)


class TestOpenAI:
    def test_models(self, client: openai.OpenAI, target: Target) -> None:
        assert target.model in [model.id for model in client.models.list()]
        assert client.models.retrieve(target.model).id == target.model

    def test_chat_whole_and_streamed(self, client: openai.OpenAI, target: Target) -> None:
        whole = client.chat.completions.create(model=target.model, messages=MESSAGES, **GREEDY)
        parts = list(
            client.chat.completions.create(
                model=target.model, messages=MESSAGES, **GREEDY, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert text == whole.choices[0].message.content != ""
        assert whole.usage is not None and parts[-1].usage is not None
        assert parts[-1].usage.total_tokens == whole.usage.total_tokens
        assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == whole.choices[0].finish_reason

    def test_chat_stream_helper(self, client: openai.OpenAI, target: Target) -> None:
        whole: dict[str, Any] = {"temperature": 0, "max_tokens": 200}  # an answer that is cut off it takes for an error
        with client.chat.completions.stream(model=target.model, messages=MESSAGES, **whole) as stream:
            kinds = [event.type for event in stream]
        final = stream.get_final_completion()
        assert "content.delta" in kinds and final.choices[0].message.content

    def test_completions_and_streams_with_stops(self, client: openai.OpenAI, target: Target) -> None:
        """llama.cpp#13780: the SDK's stream, cut at a stop string."""
        asked: dict[str, Any] = {
            "model": target.model,
            "prompt": "Monday, Tuesday,",
            "max_tokens": 16,
            "temperature": 0,
        }
        text = client.completions.create(**asked).choices[0].text
        stop = text[5:8]
        parts = client.completions.create(**asked, stop=[stop], stream=True)
        assert "".join(part.choices[0].text for part in parts) == text[: text.index(stop)]

    def test_logprobs(self, client: openai.OpenAI, target: Target) -> None:
        done = client.chat.completions.create(
            model=target.model, messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=3, temperature=0
        )
        assert done.choices[0].logprobs is not None and done.choices[0].logprobs.content is not None
        assert len(done.choices[0].logprobs.content[0].top_logprobs) == 2
        scored = client.completions.create(model=target.model, prompt="Hi", logprobs=1, max_tokens=2, temperature=0)
        assert scored.choices[0].logprobs is not None and scored.choices[0].logprobs.token_logprobs

    def test_structured_output_with_a_pydantic_model(self, client: openai.OpenAI, target: Target) -> None:
        asked: dict[str, Any] = {"model": target.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 80}
        done = client.chat.completions.parse(**asked, response_format=Person)
        assert isinstance(done.choices[0].message.parsed, Person)
        with client.chat.completions.stream(**asked, response_format=Person) as stream:
            stream.until_done()
        assert stream.get_final_completion().choices[0].message.parsed == done.choices[0].message.parsed

    def test_tool_calls_whole_and_streamed(self, client: openai.OpenAI, target: Target) -> None:
        asked: dict[str, Any] = {"model": target.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 80}
        done = client.chat.completions.create(**asked, tools=[TOOL], tool_choice=NAMED)
        (call,) = done.choices[0].message.tool_calls or []
        assert call.type == "function" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        with client.chat.completions.stream(**asked, tools=[TOOL], tool_choice=NAMED) as stream:
            kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
        assert streamed.function.name == "get_weather" and streamed.function.arguments == call.function.arguments
        assert "tool_calls.function.arguments.delta" in kinds

    def test_a_round_with_a_tool(self, client: openai.OpenAI, target: Target) -> None:
        asked: dict[str, Any] = {"model": target.model, "tools": [TOOL], "temperature": 0, "max_tokens": 60}
        done = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **asked).choices[0].message
        (call, *_) = done.tool_calls or []
        talk = [*MESSAGES, done, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}]
        assert client.chat.completions.create(messages=talk, **asked).choices[0].finish_reason

    def test_errors(self, client: openai.OpenAI, target: Target) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=target.model, messages=MESSAGES, temperature=9)
        assert refused.value.param == "temperature" and refused.value.request_id
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-4", prompt="Hi")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model=target.model, input="Hi")
        if target.key:
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="wrong").models.list()

    def test_async(self, target: Target) -> None:
        async def ask() -> tuple[str, str]:
            async with openai.AsyncOpenAI(base_url=target.url + "/v1", api_key=target.key or "none") as client:
                asked: dict[str, Any] = {"model": target.model, "messages": MESSAGES, **GREEDY}
                whole, stream = await asyncio.gather(
                    client.chat.completions.create(**asked), client.chat.completions.create(**asked, stream=True)
                )
                text = "".join([part.choices[0].delta.content or "" async for part in stream])
                return whole.choices[0].message.content or "", text

        whole, text = asyncio.run(ask())
        assert whole == text != ""

    def test_leaving_a_stream_early(self, client: openai.OpenAI, target: Target) -> None:
        with client.completions.create(model=target.model, prompt="Hi", max_tokens=500, stream=True) as stream:
            next(iter(stream))
        assert client.completions.create(model=target.model, prompt="Hi", max_tokens=1).choices


class TestLiteLLM:
    @pytest.fixture
    def asked(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches a list of prices
        pytest.importorskip("litellm")
        return {"api_base": target.url + "/v1", "api_key": target.key or "none", "num_retries": 0}

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    def test_chat_whole_and_streamed(self, asked: dict[str, Any], target: Target, provider: str) -> None:
        import litellm

        asked = {**asked, "model": f"{provider}/{target.model}", "messages": MESSAGES, **GREEDY}
        whole = litellm.completion(**asked)
        parts = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert text == whole.choices[0].message.content
        assert whole.usage.total_tokens > 0

    def test_tool_call(self, asked: dict[str, Any], target: Target) -> None:
        import litellm

        asked = {**asked, "model": f"openai/{target.model}", "messages": MESSAGES, "max_tokens": 80, "temperature": 0}
        done = litellm.completion(**asked, tools=[TOOL], tool_choice=NAMED)
        (call,) = done.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

    def test_an_error_has_its_class(self, asked: dict[str, Any], target: Target) -> None:
        import litellm

        with pytest.raises(litellm.BadRequestError):
            litellm.completion(**asked, model=f"openai/{target.model}", messages=MESSAGES, temperature=9)

    def test_as_aider_asks(self, asked: dict[str, Any], target: Target) -> None:
        """A long system prompt, a talk, `stream`, no `max_tokens`, a stop, and text that comes in pieces."""
        import litellm

        talk = [
            {"role": "system", "content": "Act as an expert software developer. " * 30},
            {"role": "user", "content": "I am not sharing any files that you can edit yet."},
            {"role": "assistant", "content": "Ok."},
            {"role": "user", "content": "Print hello in Python."},
        ]
        options: dict[str, Any] = {"stream": True, "temperature": 0, "stop": ["\n", "."]}
        parts = list(litellm.completion(**asked, **options, model=f"openai/{target.model}", messages=talk))
        assert parts[-1].choices[0].finish_reason == "stop"


class TestLangChain:
    def chat(self, target: Target, **extra: Any) -> Any:
        langchain = pytest.importorskip("langchain_openai")
        where = {"base_url": target.url + "/v1", "api_key": target.key or "none", "model": target.model}
        return langchain.ChatOpenAI(**where, temperature=0, max_retries=0, **{"max_tokens": 8, **extra})

    def test_invoke_and_stream(self, target: Target) -> None:
        chat = self.chat(target, stream_usage=True)
        whole = chat.invoke("Say hello.")
        parts = list(chat.stream("Say hello."))
        assert "".join(str(part.content) for part in parts) == whole.content != ""
        assert whole.usage_metadata["output_tokens"] > 0
        assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) > 0

    def test_batch(self, target: Target) -> None:
        assert len(self.chat(target).batch(["Hi", "Ho", "Ha"])) == 3

    def test_structured_output(self, target: Target) -> None:
        bound = self.chat(target, max_tokens=80).with_structured_output(Person, method="json_schema")
        assert isinstance(bound.invoke("Who?"), Person)

    def test_tools(self, target: Target) -> None:
        bound = self.chat(target, max_tokens=80).bind_tools([TOOL], tool_choice="get_weather")
        (call,) = bound.invoke("Weather?").tool_calls
        assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome")

    def test_completions(self, target: Target) -> None:
        langchain = pytest.importorskip("langchain_openai")
        where = {"base_url": target.url + "/v1", "api_key": target.key or "none", "model": target.model}
        assert langchain.OpenAI(**where, temperature=0, max_tokens=4, max_retries=0).invoke("The capital of France is")
