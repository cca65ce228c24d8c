"""Requests that run: waiting for them, and making outputs of what they bring."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from manylora import _core
from manylora.exceptions import RequestError
from manylora.lora.request import LoRARequest
from manylora.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

# (token id, logprob, rank): the chosen token first, then the most likely ones.
Position = list[tuple[int, float, int]]

# How long a wait inside native code may delay Ctrl-C, in seconds.
PATIENCE = 0.05


@dataclass
class Pending:
    """A request that was submitted."""

    request_id: str
    stream: _core.Stream
    text: str | None
    samples: int
    lora_request: LoRARequest | None
    arrival_time: float = field(default_factory=time.time)
    error: RequestError | None = None


def collect(pending: list[Pending]) -> Iterator[tuple[Pending, list[_core.Delta]]]:
    """Yield each request with its samples when it has finished, or with its `error` set when it could not be.

    Raises:
        EngineStoppedError: the engine was closed.

    """
    waiting = list(pending)
    done: dict[str, list[_core.Delta]] = {item.request_id: [] for item in pending}
    while waiting:
        patience = PATIENCE
        still_waiting = []
        for item in waiting:
            if _read(item, done[item.request_id], patience):
                yield item, done[item.request_id]
            else:
                still_waiting.append(item)
                # One wait per round: the others are only looked at.
                patience = 0.0
        waiting = still_waiting


def _read(item: Pending, samples: list[_core.Delta], patience: float) -> bool:
    """Add the samples that have finished; return whether all have."""
    while len(samples) < item.samples:
        try:
            delta = item.stream.next(patience)
        except TimeoutError:
            return False
        except RequestError as error:
            # It fails alone: the other requests of the call go on.
            item.error = error
            return True
        if delta is None:
            return True
        samples.append(delta)
    return True


def output(core: _core.Engine, item: Pending, samples: list[_core.Delta]) -> RequestOutput:
    """Return the output of a request that has finished."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    completions = []
    for sample in sorted(samples, key=lambda sample: sample.index):
        if sample.prompt_logprobs is not None:
            prompt_logprobs = [None, *_logprobs(core, sample.prompt_logprobs)]
        has_logprobs = bool(sample.logprobs)
        completions.append(
            CompletionOutput(
                index=sample.index,
                text=sample.text,
                token_ids=sample.token_ids,
                cumulative_logprob=sum(position[0][1] for position in sample.logprobs) if has_logprobs else None,
                logprobs=_logprobs(core, sample.logprobs) if has_logprobs else None,
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
                lora_request=item.lora_request,
            )
        )
    return RequestOutput(
        request_id=item.request_id,
        prompt=item.text,
        prompt_token_ids=item.stream.prompt_token_ids(),
        prompt_logprobs=prompt_logprobs,
        outputs=completions,
        finished=True,
        metrics=RequestMetrics(item.arrival_time, time.time()),
        lora_request=item.lora_request,
        num_cached_tokens=max((sample.cached_tokens for sample in samples), default=0),
    )


def _logprobs(core: _core.Engine, positions: list[Position]) -> list[dict[int, Logprob]]:
    ids = sorted({token for position in positions for token, _, _ in position})
    known: Sequence[str | None] = core.token_texts(ids) or [None] * len(ids)
    texts = dict(zip(ids, known, strict=True))
    return [
        {token: Logprob(logprob, rank, texts[token]) for token, logprob, rank in position} for position in positions
    ]
