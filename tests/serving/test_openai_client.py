"""The official client against a live server."""

from __future__ import annotations

import asyncio

import openai
import pytest

from .conftest import Server

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_completions_and_chat(client: openai.OpenAI, server: Server) -> None:
    completion = client.completions.create(model="alpha", prompt="hello", max_tokens=8, temperature=0)
    assert completion.model == "alpha"
    assert completion.usage is not None
    chat = client.chat.completions.create(model="alpha", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True)
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content or []) == chat.usage.completion_tokens
    stream = client.chat.completions.create(model="alpha", messages=MESSAGES, max_tokens=8, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == chat.choices[0].message.content


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["base", "alpha", "beta"]
    assert client.models.retrieve("beta").id == "beta"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="x")
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="alpha", prompt="x", temperature=7)


def test_async_clients_with_many_adapters_at_once(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, model: str) -> str:
        stream = await client.completions.create(model=model, prompt="hello", max_tokens=16, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, ("base", "alpha", "beta")[number % 3]) for number in range(24)))

    texts = asyncio.run(all_of_them())
    for number, model in enumerate(("base", "alpha", "beta")):
        solo = server.complete(model, prompt="hello", max_tokens=16, ignore_eos=False).json()["choices"][0]["text"]
        assert set(texts[number::3]) == {solo}
