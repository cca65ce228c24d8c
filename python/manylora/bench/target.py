"""The server under load: what it serves, and how a prompt becomes a request to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manylora.bench.client import Answer, Client
from manylora.bench.measure import Measurement, measure
from manylora.bench.prompts import WORDS, Prompt
from manylora.bench.response import TransferError
from manylora.exceptions import ValidationError

# Bytes of answers that are kept until after the run.
_MOST_UNREAD = 256 << 20


class ServerError(ValidationError):
    """The server is not there, or is none of OpenAI's kind."""


@dataclass
class Target:
    """Where requests go, and what they all have in common.

    Attributes:
        client: the way there.
        endpoint: the path of completions, or of chat completions.
        sampling: fields of every request: the temperature, `ignore_eos` and whatever else is wanted.
        request_timeout: seconds after which an answer counts as failed.

    """

    client: Client
    endpoint: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    request_timeout: float = 600.0
    _unread: list[tuple[Answer, Measurement]] = field(default_factory=list)
    _unread_bytes: int = 0

    @property
    def is_chat(self) -> bool:
        """Whether requests are chats."""
        return self.endpoint.rstrip("/").endswith("chat/completions")

    async def models(self, patience: float) -> tuple[str, list[str]]:
        """Return the base and the adapters that the server lists, waiting `patience` seconds for it to come up.

        Raises:
            ServerError: it does not answer, or not with a list of models.

        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while True:
            try:
                answer = await self.client.send("GET", self._beside("models"), seconds=max(patience, 10))
                break
            except TransferError as error:
                if loop.time() >= deadline:
                    raise ServerError(f"{error}; is the server running?") from error
                await asyncio.sleep(0.5)
        if answer.status != 200:
            raise ServerError(_said(answer, f"{self.client.url} lists no models"))
        try:
            listed = [(model["id"], model.get("parent")) for model in json.loads(answer.body)["data"]]
            base = next(name for name, parent in listed if parent is None)
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
            raise ServerError(
                f"{self.client.url}{self._beside('models')} is no list of models as OpenAI has it"
            ) from None
        return base, [name for name, parent in listed if parent is not None]

    async def tokens(self, model: str) -> list[int] | None:
        """Return tokens that prompts can be made of, if the server tells any: those of common words."""
        if self.is_chat:
            return None
        body = {"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False}
        try:
            answer = await self.client.send("POST", "/tokenize", json.dumps(body).encode(), 30)
            tokens = json.loads(answer.body)["tokens"] if answer.status == 200 else None
        except (TransferError, ValueError, KeyError, TypeError):
            return None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            return None
        return sorted(set(tokens)) or None

    def body(self, prompt: Prompt, model: str) -> bytes:
        """Return the request for a prompt.

        Raises:
            ValidationError: the prompt does not go with the endpoint.

        """
        content = prompt.content
        is_messages = isinstance(content, list) and isinstance(content[0], dict)
        if self.is_chat:
            if isinstance(content, str):
                content = [{"role": "user", "content": content}]
            elif not is_messages:
                raise ValidationError("chat completions take text or messages, not token ids")
        elif is_messages:
            raise ValidationError("completions take text or token ids, not messages; use --backend openai-chat")
        request = {
            "model": model,
            "messages" if self.is_chat else "prompt": content,
            "max_tokens": prompt.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(request | dict(self.sampling)).encode()

    async def send(self, body: bytes, measurement: Measurement) -> None:
        """Send a request, and keep what comes back for `read_answers`: reading one now would hold up all others."""
        try:
            answer = await self.client.send("POST", self.endpoint, body, self.request_timeout)
        except TransferError as error:
            measurement.error = str(error)
            measurement.ended = asyncio.get_running_loop().time()
            return
        self._unread.append((answer, measurement))
        self._unread_bytes += sum(len(piece) for _, piece in answer.pieces)
        if self._unread_bytes > _MOST_UNREAD:
            self.read_answers()

    def read_answers(self) -> None:
        """Fill in the measurements of all answers that came."""
        for answer, measurement in self._unread:
            measure(answer, measurement)
        self._unread.clear()
        self._unread_bytes = 0

    def _beside(self, name: str) -> str:
        """Return the path of another of the API's resources, next to the completions."""
        for end in ("/chat/completions", "/completions"):
            if self.endpoint.rstrip("/").endswith(end):
                return f"{self.endpoint.rstrip('/').removesuffix(end)}/{name}"
        return f"/v1/{name}"


def _said(answer: Answer, what: str) -> str:
    text = answer.body.decode("utf-8", errors="replace").strip()
    return f"{what}: HTTP {answer.status} {text[:200]}".strip()
