"""`SamplingParams`: names, defaults, positional order and limits of vLLM's class."""

from __future__ import annotations

import copy
import enum
import inspect
import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from json import dumps
from numbers import Integral, Real
from typing import Any

from manylora import _core
from manylora.exceptions import ValidationError

logger = logging.getLogger("manylora")


class RequestOutputKind(enum.Enum):
    """What outputs of `AsyncLLM` and `LLMEngine` have: all so far, what is new, or all at the end, as `LLM` does."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


# Fields that exist in vLLM and change results there: accepted at their default, refused when set.
REFUSED_WHEN_SET: dict[str, tuple[Any, str]] = {
    "watermarking": (None, "watermarking is not supported"),
    "prompt_logprob_token_ids": (None, "use prompt_logprobs"),
    "prompt_logprob_start": (None, "use prompt_logprobs"),
    "logprob_token_ids": (None, "use logprobs"),
    "flat_logprobs": (False, "logprobs are lists of dictionaries"),
    "extra_args": (None, "there are no extensions to pass them to"),
    "thinking_token_budget": (None, "there is no thinking budget"),
    "repetition_detection": (None, "repetition is not detected; use penalties"),
    "routed_experts_prompt_start": (0, "mixture-of-experts models are not supported yet"),
    "trace_decode_token_ids": (None, "tracing of tokens is not supported"),
    "guided_decoding": (None, "give structured_outputs=StructuredOutputsParams(...), which has its fields"),
}
# Fields that only change speed or delivery: accepted whatever they are.
WITHOUT_EFFECT = {"output_kind": RequestOutputKind.CUMULATIVE, "stream_interval": None, "skip_clone": False}


def _list(name: str, value: Any, of: str) -> list[Any]:
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValidationError(f"{name} must be {of}, got {value!r}")
    return list(value)


def _string_list(name: str, value: str | Sequence[str] | None) -> list[str]:
    if value is None or isinstance(value, str):
        return [] if value is None else [value]
    values = _list(name, value, "a string or a list of strings")
    for item in values:
        if not isinstance(item, str):
            raise ValidationError(f"{name} must be a string or a list of strings, got an item {item!r}")
    return values


def _integer_list(name: str, value: Sequence[int] | None) -> list[int]:
    values = [] if value is None else _list(name, value, "a list of token ids")
    for item in values:
        if isinstance(item, bool) or not isinstance(item, Integral) or not 0 <= int(item) < 2**32:
            raise ValidationError(f"{name} must be a list of token ids (integers from 0 up), got an item {item!r}")
    return [operator.index(item) for item in values]


def _optional_text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValidationError(f"{name} must be a string, got {value!r}")
    return value


def _structured(value: Any) -> StructuredOutputsParams | None:
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, Mapping):
        unknown = [name for name in value if name not in inspect.signature(StructuredOutputsParams).parameters]
        if unknown:
            raise ValidationError(f"structured_outputs has no field {unknown[0]!r}")
        return StructuredOutputsParams(**value)
    raise ValidationError(f"structured_outputs must be StructuredOutputsParams, got {value!r}")


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise ValidationError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _count(name: str, value: Any) -> int | None:
    if value is None or value is False:
        return None
    number = 1 if value is True else _integer(name, value)
    if not -1 <= number < 2**31:
        raise ValidationError(f"{name} must be non-negative or -1, got {number}.")
    return number


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValidationError(f"{name} must be an integer, got {value!r}")
    number = operator.index(value)
    if not -(2**63) <= number < 2**63:
        raise ValidationError(f"{name} is out of range, got {value!r}")
    return number


def _size(name: str, value: Any, least: int = 0) -> int:
    number = _integer(name, value)
    if number < least:
        raise ValidationError(f"{name} must be at least {least}, got {number}.")
    return number


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValidationError(f"{name} must be a number, got {value!r}")
    return float(value)


class StructuredOutputsParams:
    """What an output must be: exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`.

    Args:
        json: a JSON Schema, as text or as a dictionary, or a class with a method `model_json_schema`.
        regex: a regular expression that matches the output from end to end.
        choice: the texts of which the output is one.
        grammar: a grammar in Lark's syntax, or in the EBNF of llama.cpp (`root ::= ...`).
        json_object: True for any JSON object.
        disable_any_whitespace: JSON without white space but in its strings.
        disable_additional_properties: objects have only the properties that the schema names.
        whitespace_pattern: a regular expression for white space between the parts of JSON.
        structural_tag: refused when set.

    Raises:
        ValidationError: there is not exactly one constraint, or a value is of the wrong type.

    """

    def __init__(
        self,
        json: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        disable_any_whitespace: bool = False,
        disable_additional_properties: bool = False,
        whitespace_pattern: str | None = None,
        structural_tag: str | None = None,
    ):
        if structural_tag is not None:
            raise ValidationError("structural_tag is not supported: use json or grammar; leave it at None")
        describe = getattr(json, "model_json_schema", None)
        self.json = json if describe is None else describe()
        if not isinstance(self.json, (str, Mapping, type(None))):
            raise ValidationError(f"json must be a JSON Schema as text or dictionary, got {json!r}")
        self.regex = _optional_text("regex", regex)
        self.choice = None if choice is None else _string_list("choice", choice)
        self.grammar = _optional_text("grammar", grammar)
        self.json_object = None if json_object is None else _switch("json_object", json_object)
        self.disable_any_whitespace = _switch("disable_any_whitespace", disable_any_whitespace)
        self.disable_additional_properties = _switch("disable_additional_properties", disable_additional_properties)
        self.whitespace_pattern = _optional_text("whitespace_pattern", whitespace_pattern)
        self.structural_tag = None
        _core.check_structured_outputs(self)

    @property
    def schema(self) -> str | None:
        """`json` as text."""
        if self.json is None or isinstance(self.json, str):
            return self.json
        try:
            return dumps(dict(self.json))
        except (TypeError, ValueError) as error:
            raise ValidationError(f"json cannot be written as JSON: {error}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StructuredOutputsParams) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value)
        return f"StructuredOutputsParams({given})"


class SamplingParams:
    """How tokens are chosen; see vLLM's documentation of the class of the same name.

    Raises:
        ValidationError: a value is of the wrong type or out of range, or two values do not go together.

    """

    def __init__(
        self,
        n: int = 1,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        watermarking: Any = None,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        prompt_logprob_token_ids: Any = None,
        prompt_logprob_start: Any = None,
        logprob_token_ids: Any = None,
        flat_logprobs: bool = False,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        stream_interval: int | None = None,
        skip_clone: bool = False,
        structured_outputs: StructuredOutputsParams | None = None,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        extra_args: Mapping[str, Any] | None = None,
        bad_words: Sequence[str] | None = None,
        skip_reading_prefix_cache: bool | None = None,
        thinking_token_budget: Any = None,
        repetition_detection: Any = None,
        routed_experts_prompt_start: int = 0,
        trace_decode_token_ids: Any = None,
        guided_decoding: Any = None,
    ):
        given = dict(locals())
        for name, (default, advice) in REFUSED_WHEN_SET.items():
            if given[name] is not None and given[name] != default:
                raise ValidationError(f"{name}={given[name]!r} is not supported: {advice}; leave it at {default!r}")
        self.n = _size("n", n, 1)
        self.presence_penalty = _number("presence_penalty", presence_penalty)
        self.frequency_penalty = _number("frequency_penalty", frequency_penalty)
        self.repetition_penalty = _number("repetition_penalty", repetition_penalty)
        self.temperature = _number("temperature", temperature)
        self.top_p = _number("top_p", top_p)
        self.top_k = _integer("top_k", top_k)
        self.min_p = _number("min_p", min_p)
        self.seed = None if seed is None or seed == -1 else _integer("seed", seed)
        self.stop = _string_list("stop", stop)
        self.stop_token_ids = _integer_list("stop_token_ids", stop_token_ids)
        self.ignore_eos = _switch("ignore_eos", ignore_eos)
        self.max_tokens = None if max_tokens is None else _size("max_tokens", max_tokens, 1)
        self.min_tokens = _size("min_tokens", min_tokens)
        self.logprobs = _count("logprobs", logprobs)
        self.prompt_logprobs = _count("prompt_logprobs", prompt_logprobs)
        self.detokenize = _switch("detokenize", detokenize)
        self.skip_special_tokens = _switch("skip_special_tokens", skip_special_tokens)
        self.spaces_between_special_tokens = _switch("spaces_between_special_tokens", spaces_between_special_tokens)
        self.include_stop_str_in_output = _switch("include_stop_str_in_output", include_stop_str_in_output)
        self.output_kind = output_kind
        self.stream_interval = None if stream_interval is None else _size("stream_interval", stream_interval, 1)
        self.skip_clone = skip_clone
        self.logit_bias = self._bias(logit_bias)
        self.allowed_token_ids = (
            None if allowed_token_ids is None else _integer_list("allowed_token_ids", allowed_token_ids)
        )
        self.bad_words = _string_list("bad_words", bad_words)
        self.skip_reading_prefix_cache = (
            None
            if skip_reading_prefix_cache is None
            else _switch("skip_reading_prefix_cache", skip_reading_prefix_cache)
        )
        self.structured_outputs = _structured(structured_outputs)
        for name, (default, _) in REFUSED_WHEN_SET.items():
            setattr(self, name, default)
        # The native side has the one set of rules. What it adjusts is stored, so that it warns once.
        self.temperature, warnings = _core.check_sampling_params(self)
        for warning in warnings:
            logger.warning(warning)

    @staticmethod
    def _bias(bias: Mapping[Any, float] | None) -> dict[int, float] | None:
        if bias is None:
            return None
        if not isinstance(bias, Mapping):
            raise ValidationError(f"logit_bias must be a dictionary from token id to bias, got {bias!r}")
        converted = {}
        for key, value in bias.items():
            try:
                token = int(key)
            except (TypeError, ValueError):
                raise ValidationError(f"logit_bias keys must be token ids, got {key!r}") from None
            if token < 0 or token > 0xFFFF_FFFF:
                raise ValidationError(f"logit_bias keys must be token ids from 0 up, got {key!r}")
            number = _number(f"logit_bias[{token}]", value)
            if number != number:
                raise ValidationError(f"logit_bias of token {token} must be a number, got NaN")
            converted[token] = min(100.0, max(-100.0, number))
        return converted

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Make parameters from values of which None means the default."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> SamplingParams:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name not in REFUSED_WHEN_SET)
        return f"SamplingParams({shown})"
