"""`Settings`: the arguments of `LLM(...)`, checked against the table in `manylora.arguments`."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
import operator
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manylora import hub
from manylora.adapter_cache import adapters_dir
from manylora.arguments import ARGUMENTS, BY_NAME, Argument, Kind, Treatment
from manylora.exceptions import ValidationError

__all__ = ["ARGUMENTS", "Settings"]

logger = logging.getLogger("manylora")

# Honoured arguments that the native engine takes under the same name and as they are.
_NATIVE = (
    "skip_tokenizer_init", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
    "kv_cache_memory_bytes", "gpu_memory_utilization", "enforce_eager", "batch_invariant", "fixed_gemm_algorithm",
    "enable_prefix_caching", "enable_chunked_prefill", "scheduling_policy", "enable_lora",
    "max_lora_rank", "max_loras", "max_cpu_loras", "lora_eviction", "lora_memory_bytes", "strict_base", "max_logprobs",
    "logprobs_mode", "seed", "num_threads", "pin_threads", "loader_threads", "max_deferred_steps",
)  # fmt: skip


class Settings:
    """The honoured arguments as attributes, checked and with defaults filled in.

    Raises:
        ValidationError: an argument is unknown, of the wrong type, out of range, or refused.

    """

    model: str
    enable_lora: bool
    hf_token: str | bool | None
    generation_config: str
    lora_cache_bytes: int
    disable_log_stats: bool
    use_tqdm_on_load: bool

    def __init__(self, **given: Any):
        for name in given:
            if name not in BY_NAME:
                near = difflib.get_close_matches(name, BY_NAME, n=1)
                hint = f"; did you mean `{near[0]}`?" if near else ""
                raise ValidationError(f"LLM() has no argument `{name}`{hint}")
        for argument in ARGUMENTS:
            value = given.get(argument.name)
            is_default = argument.is_default(value)
            if argument.treatment is Treatment.REFUSED and not is_default:
                raise ValidationError(
                    f"{argument.name}={value!r} is not supported: {argument.note}; leave it at {argument.default!r}"
                )
            if argument.treatment is Treatment.HONOURED:
                checked = argument.default if is_default and not _is_number_like_bool(value) else check(argument, value)
                setattr(self, argument.name, checked)
        if self.model is None:
            raise ValidationError("model must be a local path or a hub id, got None")
        # After all errors, so that a call that fails says one thing.
        for argument in ARGUMENTS:
            value = given.get(argument.name)
            if argument.treatment is Treatment.WITHOUT_EFFECT and not argument.is_default(value):
                logger.warning("%s=%r has no effect: %s", argument.name, value, argument.note)

    def native(self) -> dict[str, Any]:
        """Resolve paths and hub ids, and return the dictionary that the native engine reads."""
        given: Any = self
        fetch = {"token": self.hf_token, "cache_dir": given.download_dir}
        model = hub.resolve_model(self.model, revision=given.revision, **fetch)
        tokenizer = given.tokenizer and hub.resolve(
            given.tokenizer, hub.TOKENIZER_FILES, what="tokenizer", revision=given.tokenizer_revision, **fetch
        )
        values = {
            "model": str(model),
            # The repository too, where the id names one file of it.
            "model_names": [
                *dict.fromkeys([self.model.rstrip("/"), hub.repository(self.model.rstrip("/"))]),
                *(given.served_model_name or []),
            ],
            "tokenizer": tokenizer and str(tokenizer),
            "chat_template": _template(given.chat_template),
            "device": given.device,
            "cuda_library_folders": [] if given.device == "cpu" else cuda_library_folders(),
            "dtype": given.dtype,
            "lora_roots": _roots(given.lora_root),
            "lora_target_modules": given.lora_target_modules,
            "record_trace": given.record_trace and str(Path(given.record_trace).expanduser()),
        }
        return values | {name: getattr(self, name) for name in _NATIVE}


def _is_number_like_bool(value: Any) -> bool:
    # True == 1 and False == 0 in Python: a switch given as a number, or a number as a switch, is looked at.
    return isinstance(value, bool)


def check(argument: Argument, value: Any) -> Any:
    """Return the value in the form in which it is kept.

    Raises:
        ValidationError: it is none of its kind or choices.

    """
    checked = _convert(argument.kind, value)
    if checked is None or (argument.choices and checked not in argument.choices):
        expected = " or ".join(argument.choices) or argument.kind.value
        raise ValidationError(f"{argument.name} must be {expected}, got {value!r}")
    return checked


def _convert(kind: Kind, value: Any) -> Any:
    """Return the value in the form in which it is kept; None if it is not of the kind."""
    is_path = isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))
    match kind:
        case Kind.TEXT:
            return value if isinstance(value, str) and value else None
        case Kind.PATH:
            return str(value) if is_path else None
        case Kind.PATHS if is_path:
            return [str(value)]
        case Kind.PATHS | Kind.NAMES:
            listed = [value] if isinstance(value, str) else value
            if not isinstance(listed, Sequence) or not listed:
                return None
            kinds = (str, os.PathLike) if kind is Kind.PATHS else (str,)
            return (
                [str(item) for item in listed]
                if all(isinstance(item, kinds) and str(item) for item in listed)
                else None
            )
        case Kind.SWITCH:
            return value if isinstance(value, bool) else None
        case Kind.COUNT | Kind.WHOLE | Kind.LIMIT:
            return _integer(value, {Kind.COUNT: 1, Kind.WHOLE: 0, Kind.LIMIT: -1}[kind])
        case Kind.PORT:
            port = _integer(value, 0)
            return port if port is not None and port < 1 << 16 else None
        case Kind.SECONDS:
            return float(value) if _is_number(value) and 0 <= value < math.inf else None
        case Kind.TOKEN:
            return value if isinstance(value, (str, bool)) else None
        case Kind.SHARE:
            return float(value) if _is_number(value) and 0 < value <= 1 else None
        case Kind.DEVICE:
            text = str(value)
            return text if _DEVICE.fullmatch(text) else None
        case Kind.DTYPE:
            text = str(value).removeprefix("torch.")
            return text if text in _DTYPES else None


_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,4})?")
_DTYPES = ("auto", "bfloat16", "float32", "float", "float16", "half")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _integer(value: Any, least: int) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if least <= number < 2**63 else None


def cuda_library_folders() -> list[str]:
    """Return the folders in which Python packages keep CUDA's libraries."""
    try:
        found = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        # A module of that name that is no package, or says nothing of where it came from.
        return []
    places = found.submodule_search_locations if found is not None else None
    return sorted(str(folder) for place in places or () for folder in Path(place).glob("*/lib") if folder.is_dir())


def _template(template: str | None) -> str | None:
    if template is None or "{" in template or "\n" in template:
        return template
    path = Path(template).expanduser()
    # What a shell's `<(...)` gives is no regular file.
    if not path.exists() or path.is_dir():
        raise ValidationError(f"chat_template `{template}` is neither a template text nor a file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValidationError(f"chat_template `{template}` cannot be read: {error}") from error


def _roots(roots: list[str] | None) -> list[str] | None:
    if roots is None:
        return None
    return [str(Path(item).expanduser().absolute()) for item in roots] + [str(hub.hub_cache()), str(adapters_dir())]
