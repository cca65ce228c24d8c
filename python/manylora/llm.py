"""`LLM`: offline inference with vLLM's names, defaults and errors."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tqdm.auto import tqdm

from manylora import _core
from manylora.engine import LLMEngine, Request
from manylora.engine_args import Settings
from manylora.exceptions import RequestError, ValidationError
from manylora.lora.request import LoRARequest
from manylora.outputs import RequestOutput
from manylora.pending import Pending, collect, output
from manylora.prompts import ParsedPrompt, Prompt, add_special_tokens, as_json, as_list, parse, per_prompt, priority_of
from manylora.sampling_params import SamplingParams
from manylora.tokenizer import Tokenizer

logger = logging.getLogger("manylora")


def _refused(name: str, reason: str) -> Callable[..., NoReturn]:
    def method(*_: Any, **__: Any) -> NoReturn:
        raise ValidationError(f"LLM.{name}() is not supported: {reason}")

    method.__name__ = name
    method.__qualname__ = f"LLM.{name}"
    method.__doc__ = f"Not supported: {reason}."
    return method


class LLM:
    """A base model and its shelf of adapters.

    Args:
        model: local folder, GGUF file or hub id.
        **arguments: the arguments of vLLM's `LLM`; `manylora.engine_args.ARGUMENTS` says what each does here.

    Raises:
        ValidationError: an argument is unknown, out of range or not supported.
        ModelNotFoundError, ModelError, HubError: the model could not be loaded.

    """

    def __init__(self, model: str, **arguments: Any):
        self.settings = Settings(model=model, **arguments)
        config = self.settings.native()
        with _LoadBar(disable=not self.settings.use_tqdm_on_load) as bar:
            core = _core.Engine(config, bar.update_to)
        self.llm_engine = LLMEngine(self.settings, core)
        self._core = core
        self._ids = itertools.count()
        self._pending: list[Pending] = []
        self._closed = False
        info = core.info()
        blocks = f"{info.kv_blocks} KV blocks of {info.block_size} tokens"
        working = f"{_bytes(info.working_bytes)} of working memory"
        if info.device_reason is not None:
            # Where there is a card that is not used, this is worth seeing without asking.
            logger.log(logging.WARNING if info.device_reason in info.notes else logging.INFO, info.device_reason)
        shared = f"{_bytes(info.ledger_bytes)} for {blocks} and for adapters"
        logger.info("%s; %s; %s; max_model_len %s", info.backend, working, shared, info.max_model_len)
        # A lowered context, what dequantizing takes: seen without asking.
        for note in info.notes:
            if note != info.device_reason:
                logger.warning(note)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        """Make an `LLM` from an object or mapping that has its arguments."""
        arguments = dict(engine_args) if isinstance(engine_args, Mapping) else dict(vars(engine_args))
        return cls(**arguments)

    def close(self) -> None:
        """Stop the engine and free the model; requests that run end with an error."""
        if not self._closed and not self.settings.disable_log_stats:
            logger.info("engine counters: %s", self.llm_engine.stats())
        self._closed = True
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Sequence[LoRARequest | None] | LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts in one continuous batch, each with its own adapter or with none.

        Args:
            prompts: text, token ids, or a dictionary with `prompt` or `prompt_token_ids`; or a list of these. Further
                keys of a dictionary: `cache_salt` keeps its KV blocks apart from others', and `tenant` says whose share
                of a fair service it takes (otherwise its adapter's, or the base's).
            sampling_params: one for all, or one per prompt; None is the model's default.
            use_tqdm: whether (or by which class) progress is shown.
            lora_request: one adapter for all, a list with one (or None = base) per prompt, or None.
            priority: one for all or one per prompt; lower runs first under `scheduling_policy="priority"`.
            tokenization_kwargs: `add_special_tokens` is honoured.
            mm_processor_kwargs: must be empty: models are text-only.

        Returns:
            One output per prompt, in input order.

        Raises:
            ValidationError: something about the call is wrong; nothing was run.
            AdapterError: an adapter was refused; nothing was run.

        """
        pending = self._enqueue_prompts(
            prompts, sampling_params, lora_request, priority, tokenization_kwargs, mm_processor_kwargs
        )
        return self._finish(pending, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Sequence[LoRARequest | None] | LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Run conversations through the chat template, then as `generate`.

        Args:
            messages: one conversation (a list of `{"role": ..., "content": ...}`) or a list of conversations.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            lora_request: as in `generate`.
            priority: as in `generate`.
            chat_template: template text that replaces the model's for this call.
            chat_template_content_format: `string` gives templates text, `openai` lists of parts, `auto` what they take.
            add_generation_prompt: whether the prompt ends with the start of the assistant's turn.
            continue_final_message: whether the last message is to be continued.
            tools: function definitions, passed to the template.
            chat_template_kwargs: further variables of the template.
            tokenization_kwargs: as in `generate`, with `add_special_tokens` False by default.
            mm_processor_kwargs: must be empty.

        Returns:
            One output per conversation, in input order.

        """
        pending = self._enqueue_chats(
            messages,
            sampling_params,
            lora_request,
            priority,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._finish(pending, use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        lora_request: Sequence[LoRARequest | None] | LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Start prompts as `generate` would, and return at once; `wait_for_completion` brings the outputs.

        Args:
            prompts: as in `generate`.
            sampling_params: as in `generate`.
            lora_request: as in `generate`.
            priority: as in `generate`.
            use_tqdm: for compatibility: `wait_for_completion` shows the progress.
            tokenization_kwargs: as in `generate`.
            mm_processor_kwargs: must be empty.

        Returns:
            The request ids, in input order.

        """
        pending = self._enqueue_prompts(
            prompts, sampling_params, lora_request, priority, tokenization_kwargs, mm_processor_kwargs
        )
        self._pending += pending
        return [item.request_id for item in pending]

    def enqueue_chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        lora_request: Sequence[LoRARequest | None] | LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **chat_arguments: Any,
    ) -> list[str]:
        """Start conversations as `chat` would, and return at once.

        Args:
            messages: as in `chat`.
            sampling_params: as in `chat`.
            lora_request: as in `chat`.
            priority: as in `chat`.
            use_tqdm: for compatibility: `wait_for_completion` shows the progress.
            **chat_arguments: the other arguments of `chat`.

        Returns:
            The request ids, in input order.

        """
        pending = self._enqueue_chats(messages, sampling_params, lora_request, priority, **chat_arguments)
        self._pending += pending
        return [item.request_id for item in pending]

    def wait_for_completion(
        self, output_type: type[RequestOutput] | None = None, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Return the outputs of everything enqueued since the last call, in the order it was enqueued.

        Args:
            output_type: RequestOutput or None.
            use_tqdm: as in `generate`.

        """
        if output_type not in (None, RequestOutput):
            raise ValidationError(f"output_type must be RequestOutput, got {output_type!r}")
        pending, self._pending = self._pending, []
        return self._finish(pending, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling defaults of the model's generation_config.json."""
        if self.settings.generation_config != "auto":
            return SamplingParams()
        generation = json.loads(self._core.info().generation)
        names = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
        values = {name: generation[name] for name in names if generation.get(name) is not None}
        if generation.get("do_sample") is False:
            penalty = values.get("repetition_penalty", 1.0)
            values = {"temperature": 0.0, "repetition_penalty": penalty}
        if generation.get("max_new_tokens") is not None:
            values["max_tokens"] = generation["max_new_tokens"]
        try:
            return SamplingParams(**values)
        except ValidationError as error:
            logger.warning("generation_config.json is ignored for sampling defaults: %s", error)
            return SamplingParams()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return Tokenizer(self._core)

    def load_report(self, name: str) -> dict[str, Any]:
        """Return the load report of an adapter.

        Args:
            name: the adapter's name.

        Returns:
            version, rank, scale and effect per module, matched keys, ignored and refused keys with reasons, bytes.
            Version and effects are None while an adapter that is registered to be read on demand was not read yet.

        Raises:
            UnknownAdapterError: there is none of this name.

        """
        report: dict[str, Any] = json.loads(self._core.load_report(name))
        return report

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False if running requests still use some."""
        return self._core.reset_prefix_cache()

    beam_search = _refused("beam_search", "use generate with n > 1 and a temperature")
    encode = _refused("encode", "this engine generates; it has no pooling models (get_tokenizer() has encode)")
    embed = _refused("embed", "this engine generates; it has no pooling models")
    classify = _refused("classify", "this engine generates; it has no pooling models")
    score = _refused("score", "this engine generates; it has no pooling models")
    reward = _refused("reward", "this engine generates; it has no pooling models")
    sleep = _refused("sleep", "weights stay in memory; close() frees them")
    wake_up = _refused("wake_up", "weights stay in memory")
    collective_rpc = _refused("collective_rpc", "there are no workers")
    apply_model = _refused("apply_model", "the model is not a Python object")
    start_profile = _refused("start_profile", "use the system's profiler")
    stop_profile = _refused("stop_profile", "use the system's profiler")
    get_metrics = _refused("get_metrics", "llm_engine.stats() has the counters")

    def _enqueue_prompts(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None,
        lora_request: Sequence[LoRARequest | None] | LoRARequest | None,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        mm_processor_kwargs: Mapping[str, Any] | None,
    ) -> list[Pending]:
        if mm_processor_kwargs:
            raise ValidationError("mm_processor_kwargs is not supported: models are text-only")
        parsed = [parse(prompt) for prompt in as_list(prompts)]
        special = add_special_tokens(tokenization_kwargs, default=True)
        return self._submit(parsed, special, sampling_params, lora_request, priority)

    def _enqueue_chats(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None,
        lora_request: Sequence[LoRARequest | None] | LoRARequest | None,
        priority: int | Sequence[int] | None,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Pending]:
        if mm_processor_kwargs:
            raise ValidationError("mm_processor_kwargs is not supported: models are text-only")
        if chat_template_content_format not in ("auto", "string", "openai"):
            raise ValidationError(
                f"chat_template_content_format must be auto, string or openai, got {chat_template_content_format!r}"
            )
        if add_generation_prompt and continue_final_message:
            raise ValidationError("continue_final_message needs add_generation_prompt=False")
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            raise ValidationError(
                "messages must be a list of {'role': ..., 'content': ...} or a list of such lists, "
                f"got {type(messages).__name__}"
            )
        conversations = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        parsed = [
            ParsedPrompt(
                self._core.render_chat(
                    as_json("messages", conversation),
                    tools=None if tools is None else as_json("tools", tools),
                    template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    kwargs=as_json("chat_template_kwargs", dict(chat_template_kwargs or {})),
                    content_format=chat_template_content_format,
                )
            )
            for conversation in conversations
        ]
        special = add_special_tokens(tokenization_kwargs, default=False)
        return self._submit(parsed, special, sampling_params, lora_request, priority)

    def _submit(
        self,
        prompts: list[ParsedPrompt],
        special: bool,
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None,
        lora_request: Sequence[LoRARequest | None] | LoRARequest | None,
        priority: int | Sequence[int] | None,
    ) -> list[Pending]:
        count = len(prompts)
        params = per_prompt(sampling_params, count, "params", self.get_default_sampling_params)
        loras = per_prompt(lora_request, count, "lora_request", lambda: None)
        priorities = [priority_of(item) for item in per_prompt(priority, count, "priority", lambda: 0)]
        if any(priorities) and not self.settings.has_priorities:
            raise ValidationError(
                f"Got priority {next(filter(None, priorities))} but priority scheduling is not enabled: "
                "give LLM() scheduling_policy='priority'"
            )
        for item in params:
            if not isinstance(item, SamplingParams):
                raise ValidationError(f"sampling_params must be SamplingParams, got {type(item).__name__}")
        for lora in loras:
            if lora is not None and not isinstance(lora, LoRARequest):
                raise ValidationError(f"lora_request must be LoRARequest or None, got {type(lora).__name__}")
        adapters = self.llm_engine.ensure_all(loras)
        requests = [
            Request(
                prompt.text,
                special,
                prompt.token_ids,
                params[i],
                adapters[i],
                priorities[i],
                prompt.cache_salt,
                prompt.tenant,
            )
            for i, prompt in enumerate(prompts)
        ]
        try:
            streams = self._core.submit(requests, stream=False)
        except (TypeError, OverflowError) as error:
            # A field of a SamplingParams that was changed after its checks.
            raise ValidationError(f"sampling_params: {error.__cause__ or error}") from error
        return [
            Pending(str(next(self._ids)), stream, prompt.text, item.n, lora)
            for stream, prompt, item, lora in zip(streams, prompts, params, loras, strict=True)
        ]

    def _finish(self, pending: list[Pending], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        try:
            with _progress(use_tqdm, len(pending)) as bar:
                for item, samples in collect(pending):
                    if item.error is None:
                        outputs[item.request_id] = output(self._core, item, samples)
                    bar.update(1)
        except BaseException:
            # Ctrl-C, or the engine stopped: the requests of the call must not run on unseen.
            for item in pending:
                item.stream.abort()
            raise
        failed = [item for item in pending if item.error is not None]
        if failed:
            raise RequestError(
                f"{len(failed)} of {len(pending)} requests failed; the first: {failed[0].error}",
                [outputs.get(item.request_id) for item in pending],
            )
        return [outputs[item.request_id] for item in pending]


class _LoadBar:
    """Progress of loading, in bytes of packed weights."""

    def __init__(self, disable: bool):
        self._disable = disable
        self._bar: tqdm[NoReturn] | None = None

    def __enter__(self) -> _LoadBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update_to(self, done_bytes: int, total_bytes: int) -> None:
        """Show how far loading has come; called by the native side."""
        if self._bar is None:
            self._bar = tqdm(
                desc="Loading model",
                total=total_bytes,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                disable=self._disable,
                leave=False,
            )
        self._bar.update(done_bytes - self._bar.n)


def _progress(use_tqdm: bool | Callable[..., Any], count: int) -> Any:
    maker = use_tqdm if callable(use_tqdm) else tqdm
    if use_tqdm is False:
        return tqdm(total=count, disable=True)
    return maker(total=count, desc="Processed prompts", dynamic_ncols=True)


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
