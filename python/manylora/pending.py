"""Requests that run: waiting for them, and making outputs of what they bring."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from manylora import _core
from manylora.exceptions import RequestError
from manylora.lora.request import LoRARequest
from manylora.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from manylora.sampling_params import RequestOutputKind

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


def output(core: _core.Engine, item: Pending, deltas: list[_core.Delta]) -> RequestOutput:
    """Return the output of a request that has finished."""
    samples = Samples(core, item)
    for delta in deltas:
        samples.add(delta)
    samples.is_finished = True
    return samples.output()


class Samples:
    """What has come of a request, and the outputs that it makes.

    `CUMULATIVE` outputs have every sample that has begun, from its start; `DELTA` outputs have what is new since the
    last one; with `FINAL_ONLY` there is one output, the last.
    """

    def __init__(self, core: _core.Engine, item: Pending, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY):
        self._core = core
        self._item = item
        self._kind = kind
        self._samples: dict[int, CompletionOutput] = {}
        self._new: set[int] = set()
        self._prompt_token_ids: list[int] | None = None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._cached_tokens = 0
        self.is_finished = False

    @property
    def has_output(self) -> bool:
        """Whether there is something to tell."""
        return self.is_finished or (bool(self._new) and self._kind is not RequestOutputKind.FINAL_ONLY)

    def read(self, bell: _core.Bell, key: int) -> None:
        """Take what has come; `bell` rings `key` once there is more.

        Raises:
            RequestError: the request could not be finished.
            EngineStoppedError: the engine was closed.

        """
        while not self.is_finished:
            try:
                delta = self._item.stream.poll(bell, key)
            except BlockingIOError:
                return
            if delta is None:
                self.is_finished = True
            else:
                self.add(delta)

    def add(self, delta: _core.Delta) -> None:
        """Take news of one sample."""
        sample = self._samples.setdefault(
            delta.index, CompletionOutput(delta.index, "", [], lora_request=self._item.lora_request)
        )
        sample.text += delta.text
        sample.token_ids += delta.token_ids
        if delta.logprobs:
            if sample.logprobs is None:
                sample.logprobs = []
            sample.logprobs += _logprobs(self._core, delta.logprobs)
            total = sum(position[0][1] for position in delta.logprobs)
            sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + total
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *_logprobs(self._core, delta.prompt_logprobs)]
        if delta.finish_reason is not None:
            sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
        self._cached_tokens = max(self._cached_tokens, delta.cached_tokens)
        self._new.add(delta.index)

    def fail(self) -> None:
        """End the samples that were not finished with the reason `error`."""
        self.is_finished = True
        for index in range(self._item.samples):
            sample = self._samples.setdefault(
                index, CompletionOutput(index, "", [], lora_request=self._item.lora_request)
            )
            if sample.finish_reason is None:
                sample.finish_reason = "error"
                self._new.add(index)

    def output(self) -> RequestOutput:
        """Return the next output."""
        if self._prompt_token_ids is None:
            self._prompt_token_ids = self._item.stream.prompt_token_ids()
        is_delta = self._kind is RequestOutputKind.DELTA
        shown = sorted(self._new if is_delta else self._samples)
        completions = [_copied(self._samples[index]) for index in shown]
        result = RequestOutput(
            request_id=self._item.request_id,
            prompt=self._item.text,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=completions,
            finished=self.is_finished,
            metrics=RequestMetrics(self._item.arrival_time, time.time()),
            lora_request=self._item.lora_request,
            num_cached_tokens=self._cached_tokens,
        )
        if is_delta:
            self._prompt_logprobs = None
            for index in shown:
                sample = self._samples[index]
                sample.text, sample.token_ids = "", []
                sample.logprobs = None if sample.logprobs is None else []
        self._new.clear()
        return result


def _copied(sample: CompletionOutput) -> CompletionOutput:
    """Return it as it is now: what was handed out does not change."""
    return CompletionOutput(
        index=sample.index,
        text=sample.text,
        token_ids=list(sample.token_ids),
        cumulative_logprob=sample.cumulative_logprob,
        logprobs=None if sample.logprobs is None else list(sample.logprobs),
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        lora_request=sample.lora_request,
    )


def _logprobs(core: _core.Engine, positions: list[Position]) -> list[dict[int, Logprob]]:
    ids = sorted({token for position in positions for token, _, _ in position})
    known: Sequence[str | None] = core.token_texts(ids) or [None] * len(ids)
    texts = dict(zip(ids, known, strict=True))
    return [
        {token: Logprob(logprob, rank, texts[token]) for token, logprob, rank in position} for position in positions
    ]
