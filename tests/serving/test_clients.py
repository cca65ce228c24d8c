"""Libraries that people put between their programs and an endpoint: LiteLLM and LangChain, an adapter by its name."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

# Else LiteLLM fetches its list of prices when it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("LANGSMITH_TRACING", "false")

import litellm
import openai
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_openai import ChatOpenAI, OpenAI

from .conftest import Server

# LiteLLM's own types, as pydantic sees them.
pytestmark = pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning")
MESSAGES = [{"role": "user", "content": "hello"}]
MODELS = ("base", "alpha", "beta")
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def chats(server: Server) -> dict[str, str]:
    """What each model answers, by plain HTTP."""
    bodies = {model: {"model": model, "messages": MESSAGES, **GREEDY} for model in MODELS}
    answers = {model: server.post("/v1/chat/completions", body).json() for model, body in bodies.items()}
    texts = {model: answer["choices"][0]["message"]["content"] for model, answer in answers.items()}
    assert len(set(texts.values())) == len(MODELS)
    return texts


@pytest.fixture(scope="module")
def completions(server: Server) -> dict[str, str]:
    return {model: server.text(model, prompt="hello", ignore_eos=False, **GREEDY) for model in MODELS}


def lite(server: Server, model: str, provider: str = "hosted_vllm") -> dict[str, Any]:
    return {
        "model": f"{provider}/{model}",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "num_retries": 0,
        **GREEDY,
    }


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_litellm_knows_a_prompt_that_is_too_long(server: Server, provider: str) -> None:
    """It is what its fallbacks to models with more room go by."""
    long = [{"role": "user", "content": "x y " * 3000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=long, **lite(server, "alpha", provider))


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_litellm_chats_whole_and_streamed(server: Server, chats: dict[str, str], provider: str) -> None:
    for model in MODELS:
        whole = litellm.completion(messages=MESSAGES, **lite(server, model, provider))
        assert whole.choices[0].message.content == chats[model]
        assert whole.model.endswith(model)
        assert whole.usage.completion_tokens > 0
        stream = litellm.completion(messages=MESSAGES, stream=True, **lite(server, model, provider))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == chats[model]


def test_litellm_completes_text(server: Server, completions: dict[str, str]) -> None:
    for model in MODELS:
        asked = lite(server, model, "text-completion-openai")
        assert litellm.text_completion(prompt="hello", **asked).choices[0].text == completions[model]
        stream = litellm.text_completion(prompt="hello", stream=True, **asked)
        assert "".join(chunk.choices[0].text or "" for chunk in stream) == completions[model]


def test_litellm_asks_for_many_adapters_at_once(server: Server, chats: dict[str, str]) -> None:
    async def ask(model: str) -> str:
        stream = await litellm.acompletion(messages=MESSAGES, stream=True, **lite(server, model))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(ask(model) for model in MODELS * 4))

    assert asyncio.run(all_of_them()) == [chats[model] for model in MODELS * 4]


def test_litellm_knows_what_was_wrong(server: Server) -> None:
    with pytest.raises(litellm.NotFoundError, match="`nope` does not exist"):
        litellm.completion(messages=MESSAGES, **lite(server, "nope"))
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=MESSAGES, **(lite(server, "alpha") | {"temperature": 9}))


def chain(server: Server, model: str) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=f"{server.url}/v1", api_key="none", max_retries=0, **GREEDY)  # type: ignore[arg-type]


def test_langchain_chats_whole_and_streamed(server: Server, chats: dict[str, str]) -> None:
    for model in MODELS:
        whole = chain(server, model).invoke("hello")
        assert isinstance(whole, AIMessage)
        assert whole.content == chats[model]
        assert whole.response_metadata["model_name"] == model
        assert whole.usage_metadata is not None
        assert whole.usage_metadata["output_tokens"] > 0
        chunks = list(chain(server, model).stream("hello", stream_usage=True))
        assert all(isinstance(chunk, AIMessageChunk) for chunk in chunks)
        assert "".join(str(chunk.content) for chunk in chunks) == chats[model]
        assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata] == [whole.usage_metadata]


def test_langchain_completes_text(server: Server, completions: dict[str, str]) -> None:
    for model in MODELS:
        llm = OpenAI(model=model, base_url=f"{server.url}/v1", api_key="none", max_retries=0, **GREEDY)  # type: ignore[arg-type]
        assert llm.invoke("hello") == completions[model]
        assert "".join(llm.stream("hello")) == completions[model]


def test_langchain_asks_for_many_adapters_at_once(server: Server, chats: dict[str, str]) -> None:
    async def ask(model: str) -> str:
        return "".join([str(chunk.content) async for chunk in chain(server, model).astream("hello")])

    async def all_of_them() -> list[str]:
        whole = chain(server, "beta").abatch(["hello"] * 3)
        texts = await asyncio.gather(*(ask(model) for model in MODELS * 4))
        return [*texts, *(str(message.content) for message in await whole)]

    assert asyncio.run(all_of_them()) == [chats[model] for model in MODELS * 4] + [chats["beta"]] * 3


def test_langchain_knows_what_was_wrong(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="`nope` does not exist"):
        chain(server, "nope").invoke("hello")
