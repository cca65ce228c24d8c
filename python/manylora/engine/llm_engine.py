"""`LLMEngine`: requests added one by one and taken forward by `step`, with vLLM's names."""

from __future__ import annotations

import itertools
import logging
import select
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from manylora import _core
from manylora.engine.adapters import AdapterAdministration
from manylora.engine.arg_utils import arguments_of
from manylora.engine.loading import load
from manylora.engine.submission import submit
from manylora.engine_args import Settings
from manylora.exceptions import RequestError, ValidationError
from manylora.lora.request import LoRARequest
from manylora.outputs import RequestOutput
from manylora.pending import Pending, Samples
from manylora.prompts import Prompt, add_special_tokens, parse
from manylora.sampling_params import RequestOutputKind, SamplingParams
from manylora.tokenizer import Tokenizer

logger = logging.getLogger("manylora")


class LLMEngine(AdapterAdministration):
    """A base model, its shelf of adapters, and the requests that were added to it.

    The native engine computes on its own, between calls of `step` too; `step` waits for news and returns them. One
    thread at a time may call `add_request`, `step` and `abort_request`.
    """

    def __init__(self, settings: Settings, core: _core.Engine):
        super().__init__(settings, core)
        self._running: dict[str, tuple[int, Pending, Samples]] = {}
        self._keys = itertools.count()
        self._ids: dict[int, str] = {}
        # Requests that were not looked at yet.
        self._fresh: list[int] = []
        self._bell: _core.Bell | None = None

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> LLMEngine:
        """Make an engine from `EngineArgs`, or from any object or mapping that has arguments of `LLM`.

        What else vLLM takes here (where usage is reported, loggers of statistics, processes) has no effect.
        """
        settings = Settings(**arguments_of(engine_args))
        return cls(settings, load(settings))

    @classmethod
    def from_vllm_config(cls, *_: Any, **__: Any) -> NoReturn:
        """Not supported: there is no `VllmConfig`."""
        raise ValidationError("LLMEngine.from_vllm_config() is not supported: use from_engine_args")

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> str:
        """Start a request. Its outputs come from `step`, of the kind that `params.output_kind` says.

        Args:
            request_id: what its outputs are called; no running request may have it.
            prompt: text, token ids, or a dictionary as in `LLM.generate`.
            params: how tokens are chosen.
            arrival_time: when it arrived, as `time.time()`; None is now. It is only echoed.
            lora_request: the adapter, or None for the base.
            tokenization_kwargs: `add_special_tokens` is honoured.
            trace_headers: not looked at: traces are not exported.
            priority: lower runs first under `scheduling_policy="priority"`.
            prompt_text: echoed as the prompt where it is given as token ids.

        Returns:
            The request id.

        Raises:
            ValidationError: something about the request is wrong.
            AdapterError: the adapter was refused.

        """
        if not isinstance(request_id, str):
            raise ValidationError(f"request_id must be a string, got {type(request_id).__name__}")
        if request_id in self._running:
            raise ValidationError(f"Request id {request_id} already running.")
        parsed = parse(prompt)
        special = add_special_tokens(tokenization_kwargs, default=True)
        stream = submit(self, [parsed], special, [params], [lora_request], [priority], stream=is_streamed(params))[0]
        item = Pending(request_id, stream, parsed.text or prompt_text, params.n, lora_request)
        if arrival_time is not None:
            item.arrival_time = arrival_time
        key = next(self._keys)
        self._running[request_id] = (key, item, Samples(self.core, item, params.output_kind))
        self._ids[key] = request_id
        self._fresh.append(key)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Return what is new since the last call; where nothing is, wait for it. Without requests there is nothing.

        A request that could not be finished comes with `finish_reason` "error", and the log says why.

        Raises:
            EngineStoppedError: the engine was closed.

        """
        outputs: list[RequestOutput] = []
        if self._bell is None:
            self._bell = _core.Bell()
        while self._running and not outputs:
            rung, self._fresh = self._fresh or self._bell.take(), []
            if not rung:
                waiting = select.poll()
                waiting.register(self._bell, select.POLLIN)
                waiting.poll()
                continue
            for key in dict.fromkeys(rung):
                request_id = self._ids.get(key)
                if request_id is not None:
                    outputs += self._read(request_id, self._bell)
        return outputs

    def _read(self, request_id: str, bell: _core.Bell) -> list[RequestOutput]:
        key, _, samples = self._running[request_id]
        try:
            samples.read(bell, key)
        except RequestError as error:
            logger.warning("request `%s` failed: %s", request_id, error)
            samples.fail()
        if samples.is_finished:
            self._forget(request_id)
        return [samples.output()] if samples.has_output else []

    def _forget(self, request_id: str) -> Pending | None:
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        key, item, _ = running
        del self._ids[key]
        return item

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Stop requests now; no further outputs come of them. Ids of none are passed over."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            item = self._forget(request_id)
            if item is not None:
                item.stream.abort()

    def has_unfinished_requests(self) -> bool:
        """Whether there are requests whose last output has not come from `step`."""
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests there are whose last output has not come from `step`."""
        return len(self._running)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return Tokenizer(self.core)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False if running requests still use some."""
        return self.core.reset_prefix_cache()

    def do_log_stats(self) -> None:
        """Log the counters."""
        logger.info("engine counters: %s", self.stats())

    def shutdown(self) -> None:
        """Stop the engine and free the model; requests that run end with an error."""
        self.core.close()


def is_streamed(params: Any) -> bool:
    """Whether outputs are wanted before the last one."""
    kind = getattr(params, "output_kind", RequestOutputKind.FINAL_ONLY)
    if not isinstance(kind, RequestOutputKind):
        raise ValidationError(f"output_kind must be a RequestOutputKind, got {kind!r}")
    return kind is not RequestOutputKind.FINAL_ONLY
