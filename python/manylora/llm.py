"""`LLM`: offline inference with vLLM's names, defaults and errors."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from tqdm.auto import tqdm

from manylora import _core
from manylora.engine import LLMEngine, Request
from manylora.engine_args import Settings
from manylora.exceptions import ValidationError
from manylora.lora.request import LoRARequest
from manylora.outputs import CompletionOutput, Logprob, RequestOutput
from manylora.sampling_params import SamplingParams

logger = logging.getLogger("manylora")

Prompt = str | Sequence[int] | Mapping[str, Any]
Position = list[tuple[int, float, int]]

# How long a wait inside native code may delay Ctrl-C, in seconds.
PATIENCE = 0.1


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
        info = core.info()
        lines = [
            f"{info.backend}, {info.dtype}: weights {_bytes(info.weight_bytes)}, {info.kv_blocks} KV blocks of "
            f"{info.block_size} tokens and the adapter shelf share {_bytes(info.ledger_bytes)}; "
            f"max_model_len {info.max_model_len}",
            *info.notes,
        ]
        for line in lines:
            logger.info(line)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        """Make an `LLM` from an object or mapping that has its arguments."""
        arguments = dict(engine_args) if isinstance(engine_args, Mapping) else dict(vars(engine_args))
        return cls(**arguments)

    def close(self) -> None:
        """Stop the engine and free the model; requests that run end with an error."""
        if not self.settings.disable_log_stats:
            logger.warning("engine counters: %s", self.llm_engine.stats())
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Sequence[LoRARequest | None] | LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts in one continuous batch, each with its own adapter or with none.

        Args:
            prompts: text, token ids, or a dictionary with `prompt` or `prompt_token_ids` (and `cache_salt`); or a list.
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
        if mm_processor_kwargs:
            raise ValidationError("mm_processor_kwargs is not supported: models are text-only")
        parsed = [_parse(prompt) for prompt in _as_list(prompts)]
        add_special_tokens = _add_special_tokens(tokenization_kwargs, default=True)
        return self._run(parsed, add_special_tokens, sampling_params, use_tqdm, lora_request, priority)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
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
            chat_template_content_format: only `auto`, `string` and `openai` are known; the template decides.
            add_generation_prompt: whether the prompt ends with the start of the assistant's turn.
            continue_final_message: whether the last message is to be continued.
            tools: function definitions, passed to the template.
            chat_template_kwargs: further variables of the template.
            tokenization_kwargs: as in `generate`, with `add_special_tokens` False by default.
            mm_processor_kwargs: must be empty.

        Returns:
            One output per conversation, in input order.
        """
        if mm_processor_kwargs:
            raise ValidationError("mm_processor_kwargs is not supported: models are text-only")
        if chat_template_content_format not in ("auto", "string", "openai"):
            raise ValidationError(
                f"chat_template_content_format must be auto, string or openai, got {chat_template_content_format!r}"
            )
        if add_generation_prompt and continue_final_message:
            # vLLM's and transformers' rule; its defaults make this the caller's explicit wish to continue.
            raise ValidationError("continue_final_message needs add_generation_prompt=False")
        conversations = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        parsed = [
            (
                self._core.render_chat(
                    json.dumps(conversation),
                    tools=None if tools is None else json.dumps(tools),
                    template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    kwargs=json.dumps(dict(chat_template_kwargs or {})),
                ),
                None,
                None,
            )
            for conversation in conversations
        ]
        add_special_tokens = _add_special_tokens(tokenization_kwargs, default=False)
        return self._run(parsed, add_special_tokens, sampling_params, use_tqdm, lora_request, priority)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling defaults of the model's generation_config.json."""
        if self.settings.generation_config != "auto":
            return SamplingParams()
        generation = json.loads(self._core.info().generation)
        names = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
        values = {name: generation[name] for name in names if generation.get(name) is not None}
        if generation.get("do_sample") is False:
            values = {"temperature": 0.0}
        if generation.get("max_new_tokens") is not None:
            values["max_tokens"] = generation["max_new_tokens"]
        return SamplingParams(**values)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return Tokenizer(self._core)

    def load_report(self, name: str) -> dict[str, Any]:
        """Return the load report of an adapter.

        Args:
            name: the adapter's name.

        Returns:
            version, rank, scale and effect per module, matched keys, ignored and refused keys with reasons, bytes.
        """
        for record in self._core.list_adapters():
            if record.name == name:
                report: dict[str, Any] = json.loads(record.report)
                return report
        names = [record.name for record in self._core.list_adapters()]
        raise ValidationError(f"adapter `{name}` is not loaded; loaded: {', '.join(names) or 'none'}")

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False if running requests still use some."""
        return self._core.reset_prefix_cache()

    def _run(
        self,
        prompts: list[tuple[str | None, list[int] | None, str | None]],
        add_special_tokens: bool,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        lora_request: Sequence[LoRARequest | None] | LoRARequest | None,
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        count = len(prompts)
        params = _per_prompt(sampling_params, count, "params", self.get_default_sampling_params)
        loras = _per_prompt(lora_request, count, "lora_request", lambda: None)
        priorities = _per_prompt(priority, count, "priority", lambda: 0)
        for item in params:
            if not isinstance(item, SamplingParams):
                raise ValidationError(f"sampling_params must be SamplingParams, got {type(item).__name__}")
        for lora in loras:
            if lora is not None and not isinstance(lora, LoRARequest):
                raise ValidationError(f"lora_request must be LoRARequest or None, got {type(lora).__name__}")
            if lora is not None and not self.settings.enable_lora:
                raise ValidationError(f"Got lora_request {lora} but LoRA is not enabled!")
        # Each distinct request once: `load_inplace` means one replacement, not one per prompt or step.
        names: dict[tuple[str, int, str, bool], str] = {}
        adapters = []
        for lora in loras:
            if lora is None:
                adapters.append([])
                continue
            key = (lora.lora_name, lora.lora_int_id, lora.lora_path, lora.load_inplace)
            if key not in names:
                names[key] = self.llm_engine.ensure(lora)
            adapters.append([(names[key], 1.0)])
        requests = [
            Request(text, add_special_tokens, tokens, params[i], adapters[i], _priority(priorities[i]), salt)
            for i, (text, tokens, salt) in enumerate(prompts)
        ]
        streams = self._core.submit(requests, stream=False)
        outputs: list[RequestOutput | None] = [None] * count
        with _progress(use_tqdm, count) as bar:
            # Dropping a stream aborts its request: Ctrl-C leaves nothing running.
            for index, samples in _collect(streams, [item.n for item in params]):
                outputs[index] = self._output(prompts[index][0], streams[index], samples, loras[index])
                bar.update(1)
        return cast("list[RequestOutput]", outputs)

    def _output(
        self, text: str | None, stream: _core.Stream, samples: list[_core.Delta], lora: LoRARequest | None
    ) -> RequestOutput:
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        completions = []
        for sample in sorted(samples, key=lambda sample: sample.index):
            if sample.prompt_logprobs is not None:
                prompt_logprobs = [None, *self._logprobs(sample.prompt_logprobs)]
            logprobs = self._logprobs(sample.logprobs) if sample.logprobs else None
            completions.append(
                CompletionOutput(
                    index=sample.index,
                    text=sample.text,
                    token_ids=sample.token_ids,
                    cumulative_logprob=sum(position[0][1] for position in sample.logprobs) if logprobs else None,
                    logprobs=logprobs,
                    finish_reason=sample.finish_reason,
                    stop_reason=sample.stop_reason,
                    lora_request=lora,
                )
            )
        return RequestOutput(
            request_id=str(next(self._ids)),
            prompt=text,
            prompt_token_ids=stream.prompt_token_ids(),
            prompt_logprobs=prompt_logprobs,
            outputs=completions,
            finished=True,
            lora_request=lora,
            num_cached_tokens=samples[0].cached_tokens if samples else 0,
        )

    def _logprobs(self, positions: list[Position]) -> list[dict[int, Logprob]]:
        ids = sorted({token for position in positions for token, _, _ in position})
        texts = dict(zip(ids, self._core.token_texts(ids) or [None] * len(ids), strict=True))
        return [
            {token: Logprob(logprob, rank, texts[token]) for token, logprob, rank in position} for position in positions
        ]


class Tokenizer:
    """The model's tokenizer: `encode`, `decode`, `eos_token_id`, `vocab_size`, and calling it as transformers' do."""

    def __init__(self, core: _core.Engine):
        self._core = core

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return self._core.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self._core.decode(list(token_ids), skip_special_tokens)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return `{"input_ids": [...]}`."""
        return {"input_ids": self.encode(text, add_special_tokens)}

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tokenize: bool = True, add_generation_prompt: bool = False, **kwargs: Any
    ) -> str | list[int]:
        """Render a conversation; with `tokenize` as ids."""
        text = self._core.render_chat(
            json.dumps(messages), add_generation_prompt=add_generation_prompt, kwargs=json.dumps(kwargs)
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def eos_token_id(self) -> int | None:
        """The end token."""
        return self._core.eos_token_id()

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._core.tokenizer_size() or 0


class _LoadBar:
    """Progress of loading, in bytes of packed weights."""

    def __init__(self, disable: bool):
        self._bar = tqdm(desc="Loading model", unit="B", unit_scale=True, unit_divisor=1024, disable=disable, leave=False)

    def __enter__(self) -> _LoadBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update_to(self, done_bytes: int, total_bytes: int) -> None:
        """Called by the native side."""
        self._bar.total = total_bytes
        self._bar.update(done_bytes - self._bar.n)


def _progress(use_tqdm: bool | Callable[..., Any], count: int) -> Any:
    maker = use_tqdm if callable(use_tqdm) else tqdm
    if use_tqdm is False:
        return tqdm(total=count, disable=True)
    return maker(total=count, desc="Processed prompts", dynamic_ncols=True)


def _collect(streams: list[_core.Stream], samples: list[int]) -> Iterator[tuple[int, list[_core.Delta]]]:
    """Yield (index, samples) of each request as it finishes."""
    open_streams = dict(enumerate(streams))
    done: dict[int, list[_core.Delta]] = {index: [] for index in open_streams}
    while open_streams:
        patience = PATIENCE
        for index, stream in list(open_streams.items()):
            while len(done[index]) < samples[index]:
                try:
                    delta = stream.next(patience)
                except TimeoutError:
                    break
                if delta is None:
                    break
                done[index].append(delta)
            # Only the first open stream is worth waiting for; the others are looked at.
            patience = 0.0
            if len(done[index]) == samples[index]:
                del open_streams[index]
                yield index, done[index]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
        return [listed]
    return listed


def _parse(prompt: Any) -> tuple[str | None, list[int] | None, str | None]:
    """Return (text, token ids, cache salt) of a prompt in any of its forms."""
    if isinstance(prompt, str):
        return prompt, None, None
    if isinstance(prompt, Mapping):
        for key in ("prompt_embeds", "multi_modal_data"):
            if prompt.get(key):
                raise ValidationError(f"prompts with `{key}` are not supported: models are text-only")
        salt = prompt.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ValidationError(f"cache_salt must be a non-empty string, got {salt!r}")
        if prompt.get("prompt_token_ids") is not None:
            return prompt.get("prompt"), _tokens(prompt["prompt_token_ids"]), salt
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], None, salt
        raise ValidationError(f"a prompt dictionary needs `prompt` or `prompt_token_ids`, got keys {sorted(prompt)}")
    if isinstance(prompt, Sequence):
        return None, _tokens(prompt), None
    raise ValidationError(f"a prompt must be text, token ids or a dictionary, got {type(prompt).__name__}")


def _tokens(values: Any) -> list[int]:
    tokens = list(values)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValidationError(f"token ids must be integers, got {token!r}")
        if token < 0 or token > 0xFFFF_FFFF:
            raise ValidationError(f"Token id {token} is out of vocabulary")
    return tokens


def _per_prompt(value: Any, count: int, name: str, default: Callable[[], Any]) -> list[Any]:
    if value is None:
        return [default() for _ in range(count)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise ValidationError(f"The lengths of prompts ({count}) and {name} ({len(value)}) must be the same.")
        return [default() if item is None else item for item in value]
    return [value] * count


def _priority(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValidationError(f"priority must be an integer, got {value!r}")
    return value


def _add_special_tokens(kwargs: Mapping[str, Any] | None, default: bool) -> bool:
    given = dict(kwargs or {})
    value = bool(given.pop("add_special_tokens", default))
    if given:
        raise ValidationError(f"tokenization_kwargs {sorted(given)} are not supported; only add_special_tokens is")
    return value


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit} ({count} bytes)"
    return f"{count} bytes"
