"""`LLM`: offline inference with vLLM's names, defaults and errors."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tqdm.auto import tqdm

from manylora.engine.arg_utils import arguments_of
from manylora.engine.llm_engine import LLMEngine
from manylora.engine.loading import load
from manylora.engine.submission import default_sampling_params, submit
from manylora.engine_args import Settings
from manylora.exceptions import RequestError, ValidationError
from manylora.lora.request import LoRARequest
from manylora.outputs import RequestOutput
from manylora.pending import Pending, collect, output
from manylora.prompts import ParsedPrompt, Prompt, add_special_tokens, as_json, as_list, parse, per_prompt
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
        core = load(self.settings)
        self.llm_engine = LLMEngine(self.settings, core)
        self._core = core
        self._ids = itertools.count()
        self._pending: list[Pending] = []
        self._closed = False

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        """Make an `LLM` from an object or mapping that has its arguments."""
        return cls(**arguments_of(engine_args))

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
        return default_sampling_params(self.settings, self._core)

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
        priorities = per_prompt(priority, count, "priority", lambda: 0)
        streams = submit(self.llm_engine, prompts, special, params, loras, priorities, stream=False)
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


def _progress(use_tqdm: bool | Callable[..., Any], count: int) -> Any:
    maker = use_tqdm if callable(use_tqdm) else tqdm
    if use_tqdm is False:
        return tqdm(total=count, disable=True)
    return maker(total=count, desc="Processed prompts", dynamic_ncols=True)
