"""What callers pass to `generate` and `chat`, brought into one form and checked."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from manylora.exceptions import ValidationError

# Keys of a prompt dictionary.
KEYS = ("prompt", "prompt_token_ids", "cache_salt", "tenant")

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass
class ParsedPrompt:
    """A prompt as text or as token ids (which win if there are both), what keeps its KV blocks apart, and who asks."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None
    tenant: str | None = None


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Return the prompts as a list; a bare list of token ids is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise ValidationError(
            f"prompts must be text, token ids, a dictionary or a list of these, got {type(prompts).__name__}"
        )
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(isinstance(item, Integral) for item in listed) else listed


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValidationError(f"the prompt is not valid text: {error.reason} at character {error.start}") from None
    return text


def parse(prompt: Any) -> ParsedPrompt:
    """Return a prompt of any form in the one form."""
    if isinstance(prompt, str):
        return ParsedPrompt(_text(prompt))
    if isinstance(prompt, Mapping):
        for key, value in prompt.items():
            # Empty values of keys that other kinds of models need are usual.
            if key not in KEYS and value is not None and value != {}:
                raise ValidationError(
                    f"prompts with `{key}` are not supported: models are text-only; the keys are {', '.join(KEYS)}"
                )
        salt, tenant = (_label(prompt, key) for key in ("cache_salt", "tenant"))
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise ValidationError(f"`prompt` of a prompt dictionary must be text, got {type(text).__name__}")
        if text is None and token_ids is None:
            raise ValidationError(
                f"a prompt dictionary needs `prompt` or `prompt_token_ids`, got keys {sorted(prompt)}"
            )
        return ParsedPrompt(text, None if token_ids is None else _tokens(token_ids), salt, tenant)
    if isinstance(prompt, Iterable) and not isinstance(prompt, bytes):
        return ParsedPrompt(token_ids=_tokens(prompt))
    raise ValidationError(f"a prompt must be text, token ids or a dictionary, got {type(prompt).__name__}")


def _label(prompt: Mapping[str, Any], key: str) -> str | None:
    value = prompt.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise ValidationError(f"{key} must be a non-empty string, got {value!r}")
    return value


def _tokens(values: Any) -> list[int]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ValidationError(f"token ids must be a list of integers, got {type(values).__name__}")
    return [_token(value) for value in values]


def _token(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValidationError(f"token ids must be integers, got {value!r}")
    token = operator.index(value)
    if not 0 <= token < 2**32:
        raise ValidationError(f"Token id {token} is out of vocabulary")
    return token


def per_prompt(value: Any, count: int, name: str, default: Callable[[], Any]) -> list[Any]:
    """Return one value per prompt: a single one is given to all, None stands for the default."""
    if value is None:
        return [default() for _ in range(count)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise ValidationError(f"The lengths of prompts ({count}) and {name} ({len(value)}) must be the same.")
        return [default() if item is None else item for item in value]
    return [value] * count


def priority_of(value: Any) -> int:
    """Return a priority."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not -(2**63) <= operator.index(value) < 2**63:
        raise ValidationError(f"priority must be an integer of 64 bits, got {value!r}")
    return operator.index(value)


def add_special_tokens(kwargs: Mapping[str, Any] | None, default: bool) -> bool:
    """Return the one tokenization argument that is honoured."""
    given = dict(kwargs or {})
    value = bool(given.pop("add_special_tokens", default))
    if given:
        raise ValidationError(f"tokenization_kwargs {sorted(given)} are not supported; only add_special_tokens is")
    return value


def as_json(name: str, value: Any) -> str:
    """Return a value as JSON, for the template engine."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValidationError(f"{name} must be plain data (text, numbers, lists, dictionaries): {error}") from error
