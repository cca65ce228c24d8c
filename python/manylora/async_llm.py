"""`AsyncLLM`: the engine for event loops, with vLLM's names.

No thread stands behind a request. A loop watches one descriptor, which the engine makes readable when any request of
the loop has news.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from manylora import _core
from manylora.engine.arg_utils import arguments_of
from manylora.engine.llm_engine import LLMEngine, is_streamed
from manylora.engine.loading import load
from manylora.engine.submission import default_sampling_params, submit
from manylora.engine_args import Settings
from manylora.exceptions import EngineStoppedError, ValidationError
from manylora.lora.request import LoRARequest
from manylora.outputs import RequestOutput
from manylora.pending import Pending, Samples
from manylora.prompts import Prompt, add_special_tokens, parse
from manylora.sampling_params import SamplingParams
from manylora.tokenizer import Tokenizer

logger = logging.getLogger("manylora")

Result = TypeVar("Result")

# Characters of a prompt that are made tokens of on the loop; more would hold others up.
_SHORT = 4096


class _Waiting:
    """The requests of one event loop that wait for news."""

    def __init__(self) -> None:
        self.bell = _core.Bell()
        self.futures: dict[int, asyncio.Future[None]] = {}

    def ring(self) -> None:
        """Wake those that have some."""
        for key in self.bell.take():
            future = self.futures.pop(key, None)
            if future is not None and not future.done():
                future.set_result(None)

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the loop watch no longer; what was rung before is heard."""
        self.ring()
        loop.remove_reader(self.bell.fileno())


@dataclass
class _Request:
    """A request that runs or is about to."""

    stream: _core.Stream | None = None
    is_aborted: bool = False


class AsyncLLM:
    """A base model and its shelf of adapters, for use from event loops; several may use one at the same time."""

    def __init__(self, settings: Settings, core: _core.Engine):
        self.settings = settings
        self.llm_engine = LLMEngine(settings, core)
        self._core = core
        self._keys = itertools.count()
        self._requests: dict[str, _Request] = {}
        self._waiting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waiting] = weakref.WeakKeyDictionary()
        self._is_stopped = False
        self._failure: EngineStoppedError | None = None

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> AsyncLLM:
        """Make an engine from `AsyncEngineArgs`, or from any object or mapping that has arguments of `LLM`.

        What else vLLM takes here (where usage is reported, loggers of statistics) has no effect. Loading blocks.
        """
        settings = Settings(**arguments_of(engine_args))
        return cls(settings, load(settings))

    @classmethod
    def from_vllm_config(cls, *_: Any, **__: Any) -> NoReturn:
        """Not supported: there is no `VllmConfig`."""
        raise ValidationError("AsyncLLM.from_vllm_config() is not supported: use from_engine_args")

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a prompt and yield its outputs as they come.

        By `sampling_params.output_kind` an output has every sample from its start (CUMULATIVE), what is new since the
        last output (DELTA), or there is one output in all (FINAL_ONLY). A slow reader gets several steps in one.
        When the task is cancelled, or the iterator closed, the request is stopped at once.

        Args:
            prompt: text, token ids, or a dictionary as in `LLM.generate`.
            sampling_params: how tokens are chosen; None is the model's default.
            request_id: what `abort` calls it; no running request may have it.
            prompt_text: echoed as the prompt where it is given as token ids.
            lora_request: the adapter, or None for the base. It is loaded unless exactly it is loaded.
            tokenization_kwargs: `add_special_tokens` is honoured.
            trace_headers: not looked at: traces are not exported.
            priority: lower runs first under `scheduling_policy="priority"`.
            data_parallel_rank: must be None: one device is used.

        Raises:
            ValidationError: something about the request is wrong.
            AdapterError: the adapter was refused.
            RequestError: it was accepted and could not be finished.
            EngineStoppedError: the engine was shut down.

        """
        if data_parallel_rank is not None:
            raise ValidationError("data_parallel_rank is not supported: one process and one device are used")
        if not isinstance(request_id, str):
            raise ValidationError(f"request_id must be a string, got {type(request_id).__name__}")
        if request_id in self._requests:
            raise ValidationError(f"Request id {request_id} already running.")
        params = default_sampling_params(self.settings, self._core) if sampling_params is None else sampling_params
        parsed = parse(prompt)
        special = add_special_tokens(tokenization_kwargs, default=True)
        # A grammar may take long to compile.
        is_quick = (
            len(parsed.text or "") <= _SHORT
            and getattr(params, "structured_outputs", None) is None
            and (not isinstance(lora_request, LoRARequest) or self.llm_engine.is_at_hand(lora_request))
        )
        start = partial(
            submit, self.llm_engine, [parsed], special, [params], [lora_request], [priority], stream=is_streamed(params)
        )
        request = self._requests[request_id] = _Request()
        samples = None
        key = next(self._keys)
        loop = asyncio.get_running_loop()
        waiting = self._watched_by(loop)
        try:
            # Who is cancelled while a thread starts the request drops what it brings, and that stops it.
            (request.stream,) = start() if is_quick else await self._in_thread(start)
            if request.is_aborted:
                request.stream.abort()
            item = Pending(request_id, request.stream, parsed.text or prompt_text, params.n, lora_request)
            samples = Samples(self._core, item, params.output_kind)
            while not samples.is_finished:
                # There before it is asked for: news may come at once.
                future = waiting.futures[key] = loop.create_future()
                samples.read(waiting.bell, key)
                if samples.has_output:
                    yield samples.output()
                else:
                    await future
        except EngineStoppedError as error:
            self._failure = error
            raise
        finally:
            waiting.futures.pop(key, None)
            if self._requests.get(request_id) is request:
                del self._requests[request_id]
            if request.stream is not None and not (samples and samples.is_finished):
                request.stream.abort()

    def _watched_by(self, loop: asyncio.AbstractEventLoop) -> _Waiting:
        waiting = self._waiting.get(loop)
        if waiting is None:
            waiting = self._waiting[loop] = _Waiting()
            loop.add_reader(waiting.bell.fileno(), waiting.ring)
        return waiting

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Stop requests now: their iterators end with what they have, `finish_reason` "abort".

        Ids of none are passed over.
        """
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            request = self._requests.pop(one, None)
            if request is not None:
                request.is_aborted = True
                if request.stream is not None:
                    request.stream.abort()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter now; see `LLMEngine.add_lora`."""
        return await self._in_thread(partial(self.llm_engine.add_lora, lora_request))

    async def replace_lora(self, lora_request: LoRARequest, expected_version: str | None = None) -> str:
        """Let a name stand for other content from now on; see `LLMEngine.replace_lora`."""
        return await self._in_thread(partial(self.llm_engine.replace_lora, lora_request, expected_version))

    async def remove_lora(self, lora_id: int, *, mode: str = "drain", timeout: float | None = None) -> bool:
        """Unload the adapter with this integer id; see `LLMEngine.remove_lora`."""
        return await self._in_thread(partial(self.llm_engine.remove_lora, lora_id, mode=mode, timeout=timeout))

    async def list_loras(self) -> set[int]:
        """Return the integer ids of the adapters that requests can name, read or not."""
        return self.llm_engine.list_loras()

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep the adapter with this integer id resident; see `LLMEngine.pin_lora`."""
        return await self._in_thread(partial(self.llm_engine.pin_lora, lora_id))

    async def unpin_lora(self, lora_id: int) -> bool:
        """Allow the adapter with this integer id to be evicted again; whether there was one."""
        return await self._in_thread(partial(self.llm_engine.unpin_lora, lora_id))

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Tokenizer:
        """Return the model's tokenizer, which is every adapter's."""
        return Tokenizer(self._core)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False if running requests still use some."""
        return await self._in_thread(self._core.reset_prefix_cache)

    async def check_health(self) -> None:
        """Return if requests can be run; waits for nothing, however long a step takes.

        Raises:
            EngineStoppedError: it was shut down, or its thread failed.

        """
        self._core.check_health()

    async def do_log_stats(self) -> None:
        """Log the counters."""
        logger.info("engine counters: %s", await self._in_thread(self.llm_engine.stats))

    async def is_tracing_enabled(self) -> bool:
        """Return False: traces are not exported."""
        return False

    async def is_sleeping(self) -> bool:
        """Return False: weights stay in memory."""
        return False

    @property
    def is_running(self) -> bool:
        """Whether requests can be run."""
        return not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether the engine was shut down or has failed."""
        return self._is_stopped or self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine has failed."""
        return self._failure is not None and not self._is_stopped

    @property
    def dead_error(self) -> BaseException:
        """What ended the engine."""
        return self._failure or EngineStoppedError("the engine was shut down")

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine and free the model; requests that run end with an error.

        Args:
            timeout: for compatibility: only the step in progress is waited for.

        """
        self._is_stopped = True
        self._core.close()
        for loop, waiting in list(self._waiting.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(waiting.leave, loop)

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @staticmethod
    async def _in_thread(work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(None, work)


def _refused(name: str, reason: str) -> Callable[..., NoReturn]:
    def method(*_: Any, **__: Any) -> NoReturn:
        raise ValidationError(f"AsyncLLM.{name}() is not supported: {reason}")

    method.__name__ = name
    method.__qualname__ = f"AsyncLLM.{name}"
    method.__doc__ = f"Not supported: {reason}."
    return method


for _name, _reason in {
    "encode": "this engine generates; it has no pooling models (get_tokenizer() has encode)",
    "sleep": "weights stay in memory; shutdown() frees them",
    "wake_up": "weights stay in memory",
    "collective_rpc": "there are no workers",
    "start_profile": "use the system's profiler",
    "stop_profile": "use the system's profiler",
}.items():
    setattr(AsyncLLM, _name, _refused(_name, _reason))
