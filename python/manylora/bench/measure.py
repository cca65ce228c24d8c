"""What one streamed answer says of the server: pure arithmetic over what came when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from manylora.bench.client import Answer

# Reasons are told with the server's own words, up to here.
_LONGEST_REASON = 200


@dataclass
class Measurement:
    """One request of a run; times are on the loop's clock.

    Attributes:
        model: what the request named.
        is_base: whether that is the base, and not an adapter.
        due: when the schedule wanted it sent.
        released: when the sender got to it.
        sent: when it was sent; later where it waited for a place under `--max-concurrency`.
        ended: when its answer was complete, or when it failed.
        tokens_at: the time of every event that brought tokens.
        input_len: tokens of the prompt; as the server counts them where it says so.
        output_len: tokens of the answer; the number of events where the server does not count them.
        is_counted: whether the server counted them.
        text: the answer.
        error: why it failed; None if it did not.

    """

    model: str
    is_base: bool
    due: float
    released: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    tokens_at: list[float] = field(default_factory=list)
    input_len: int = 0
    output_len: int = 0
    is_counted: bool = False
    text: str = ""
    error: str | None = None

    @property
    def lateness(self) -> float:
        """Seconds that the sender itself was late."""
        return self.released - self.due

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.tokens_at[0] - self.sent

    @property
    def ttft_since_due(self) -> float:
        """Seconds to the first token from when the request should have been sent."""
        return self.tokens_at[0] - self.due

    @property
    def itls(self) -> list[float]:
        """Every gap between events that brought tokens, in seconds."""
        return [later - earlier for earlier, later in pairwise(self.tokens_at)]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for answers of one token."""
        return (self.tokens_at[-1] - self.tokens_at[0]) / (self.output_len - 1) if self.output_len > 1 else None

    @property
    def e2el(self) -> float:
        """Seconds from sending to the complete answer."""
        return self.ended - self.sent


class EventReader:
    """Server-sent events, however their bytes were cut."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[str]:
        """Take bytes, and return the data of each event that is complete with them."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line and self._data:
                yield b"\n".join(self._data).decode("utf-8", errors="replace")
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))


def measure(answer: Answer, measurement: Measurement) -> None:
    """Fill in what a complete response says; anything but a whole stream of tokens is an error."""
    measurement.sent, measurement.ended = answer.sent, answer.ended
    measurement.error = _refusal(answer) or _read_stream(answer, measurement)


def _refusal(answer: Answer) -> str | None:
    if answer.status != 200:
        return _shortened(f"HTTP {answer.status}: {_message(answer.body)}")
    kind = answer.headers.get("content-type", "nothing")
    if not kind.startswith("text/event-stream"):
        return f"the answer is no stream of events, but `{kind}`"
    return None


def _read_stream(answer: Answer, measurement: Measurement) -> str | None:
    reader, texts, is_done, fallback = EventReader(), [], False, None
    finish_reason = None
    for time, piece in answer.pieces:
        for data in reader.feed(piece):
            if data == "[DONE]":
                is_done = True
                continue
            try:
                event = json.loads(data)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                return _shortened(f"an event of the stream is no JSON object: {data}")
            if event.get("error"):
                return _shortened(f"the stream ended with an error: {_message(data.encode())}")
            if usage := event.get("usage"):
                measurement.input_len = usage.get("prompt_tokens") or measurement.input_len
                measurement.output_len = usage.get("completion_tokens") or 0
                measurement.is_counted = True
            for choice in event.get("choices") or ():
                text, brings_tokens = _news(choice)
                texts.append(text)
                finish_reason = choice.get("finish_reason") or finish_reason
                if brings_tokens:
                    measurement.tokens_at.append(time)
                else:
                    fallback = fallback or time
    measurement.text = "".join(texts)
    if not is_done:
        return "the stream ended without [DONE]"
    if finish_reason in ("abort", "error"):
        return f"the stream ended with the finish reason `{finish_reason}`"
    if not measurement.tokens_at:
        if fallback is None:
            return "the stream brought no tokens"
        # All of it was tokens without text: the end mark of the sequence, say.
        measurement.tokens_at.append(fallback)
    if not measurement.is_counted:
        measurement.output_len = len(measurement.tokens_at)
    return None


def _news(choice: dict[str, Any]) -> tuple[str, bool]:
    """Return the text of a choice's news, and whether it stands for tokens.

    A token whose text is not there yet (the first byte of a letter) comes with an empty text; news of nothing but a
    role or the end stand for none.
    """
    delta = choice.get("delta")
    if delta is None:
        text = choice.get("text") or ""
        return text, bool(text) or not choice.get("finish_reason")
    text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
    is_notice = "role" in delta or bool(choice.get("finish_reason"))
    return text, bool(text) or bool(delta.get("tool_calls")) or not is_notice


def _message(body: bytes) -> str:
    """Return what an error says, in OpenAI's envelope or not."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return text or "no reason given"
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."
