"""From prompts to requests that run, and defaults for what a call does not say."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manylora import _core
from manylora.engine.adapters import AdapterAdministration
from manylora.engine_args import Settings
from manylora.exceptions import ValidationError
from manylora.lora.request import LoRARequest
from manylora.prompts import ParsedPrompt, priority_of
from manylora.sampling_params import SamplingParams

logger = logging.getLogger("manylora")


@dataclass
class Request:
    """One prompt as the native side reads it; exactly one of `text` and `token_ids` is set."""

    text: str | None
    add_special_tokens: bool
    token_ids: list[int] | None
    params: SamplingParams
    adapters: list[tuple[str, float]]
    priority: int
    cache_salt: str | None
    tenant: str | None = None


def submit(
    engine: AdapterAdministration,
    prompts: Sequence[ParsedPrompt],
    special: bool,
    params: Sequence[Any],
    loras: Sequence[Any],
    priorities: Sequence[Any],
    *,
    stream: bool,
) -> list[_core.Stream]:
    """Check requests, load their adapters unless exactly they are loaded, and start them: all or none.

    Args:
        engine: where they run.
        prompts: one per request.
        special: whether texts get the special tokens of the tokenizer.
        params: sampling parameters, one per request.
        loras: adapters, one per request; None is the base.
        priorities: one per request.
        stream: whether news come as tokens do; else each sample comes as a whole.

    Raises:
        ValidationError: something about a request is wrong.
        AdapterError: an adapter was refused.

    """
    ordered = [priority_of(item) for item in priorities]
    for item in params:
        if not isinstance(item, SamplingParams):
            raise ValidationError(f"sampling_params must be SamplingParams, got {type(item).__name__}")
    for lora in loras:
        if lora is not None and not isinstance(lora, LoRARequest):
            raise ValidationError(f"lora_request must be LoRARequest or None, got {type(lora).__name__}")
    adapters = engine.ensure_all(loras)
    requests = [
        Request(
            prompt.text,
            special,
            prompt.token_ids,
            params[i],
            adapters[i],
            ordered[i],
            prompt.cache_salt,
            prompt.tenant,
        )
        for i, prompt in enumerate(prompts)
    ]
    try:
        return engine.core.submit(requests, stream=stream)
    except (TypeError, OverflowError) as error:
        # A field of a SamplingParams that was changed after its checks.
        raise ValidationError(f"sampling_params: {error.__cause__ or error}") from error


def default_sampling_params(settings: Settings, core: _core.Engine) -> SamplingParams:
    """Return the sampling defaults of the model's generation_config.json."""
    if settings.generation_config != "auto":
        return SamplingParams()
    generation = json.loads(core.info().generation)
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
