"""Who answers a conversation: an engine in this process, or a server of OpenAI's kind."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from manylora.cli.local import BASE, Asked
from manylora.engine.submission import submit
from manylora.exceptions import RequestError, ValidationError
from manylora.llm import LLM
from manylora.pending import PATIENCE
from manylora.prompts import ParsedPrompt, as_json
from manylora.sampling_params import SamplingParams

Messages = list[dict[str, str]]


class Speaker(Protocol):
    """Somebody who answers."""

    def adapters(self) -> list[str]:
        """Return what may be named, the base first."""

    def answer(self, messages: Messages, adapter: str, params: Mapping[str, Any]) -> Iterator[str]:
        """Yield the answer as it comes; closing the iterator stops it.

        Raises:
            ManyLoRAError: there is none.

        """


class Local:
    """An engine in this process."""

    def __init__(self, llm: LLM, engine: Asked):
        self._llm = llm
        self._engine = engine

    def adapters(self) -> list[str]:
        """Return the names on the command line."""
        return [BASE, *self._engine.adapters]

    def answer(self, messages: Messages, adapter: str, params: Mapping[str, Any]) -> Iterator[str]:
        """See `Speaker`."""
        engine = self._llm.llm_engine
        lora = self._engine.chosen(adapter, "/adapter")
        prompt = ParsedPrompt(engine.core.render_chat(as_json("messages", messages)))
        chosen = self._llm.get_default_sampling_params().clone()
        for name, value in params.items():
            setattr(chosen, name, value)
        (stream,) = submit(engine, [prompt], False, [SamplingParams(**_fields(chosen))], [lora], [0], stream=True)
        try:
            while True:
                try:
                    delta = stream.next(PATIENCE)
                except TimeoutError:
                    continue
                if delta is None:
                    return
                yield delta.text
        finally:
            stream.abort()


def _fields(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed")
    return {name: getattr(params, name) for name in names}


class Remote:
    """A server."""

    def __init__(self, url: str, key: str | None):
        self._url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        if not self._url.startswith(("http://", "https://")):
            raise ValidationError(f"--url must be http:// or https://, got `{url}`")
        try:
            models = self._json("/v1/models")
        except RequestError as error:
            # So far nothing was asked but whether this is a server.
            raise ValidationError(str(error)) from error
        self._names = [
            str(model["id"]) for model in models.get("data", []) if isinstance(model, dict) and "id" in model
        ]
        if not self._names:
            raise ValidationError(f"`{url}` serves no model")

    def _open(self, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            raise RequestError(f"`{self._url}` says {error.code}: {_said(error.read())}") from None
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"`{self._url}` cannot be reached: {getattr(error, 'reason', error)}") from None

    def _json(self, path: str) -> dict[str, Any]:
        with self._open(path) as response:
            try:
                answer = json.load(response)
            except ValueError:
                answer = None
        if not isinstance(answer, dict):
            raise ValidationError(f"`{self._url}{path}` is not what OpenAI's servers say: is it one?")
        return answer

    def adapters(self) -> list[str]:
        """Return what the server lists, its base first."""
        return self._names

    def answer(self, messages: Messages, adapter: str, params: Mapping[str, Any]) -> Iterator[str]:
        """See `Speaker`."""
        body = {"model": adapter, "messages": messages, "stream": True, **params}
        try:
            with self._open("/v1/chat/completions", body) as response:
                for line in response:
                    data = line.decode(errors="replace").strip().removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if data.startswith("{"):
                        yield _news(json.loads(data))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestError(f"the answer of `{self._url}` broke off: {error}") from error


def _said(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip()


def _news(event: dict[str, Any]) -> str:
    if "error" in event:
        raise RequestError(_said(json.dumps(event).encode()))
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")
