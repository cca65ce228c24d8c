"""Adapters of a command line: `--lora-modules` and `--lora-manifest`, and their registration."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence

from manylora.engine import read_manifest
from manylora.engine.llm_engine import LLMEngine
from manylora.exceptions import ManyLoRAError, ValidationError

logger = logging.getLogger("manylora")


def lora_module(text: str) -> tuple[str, str] | None:
    """Read one item of `--lora-modules`; None for an empty one.

    Raises:
        ValueError: it is neither NAME=PATH nor an object with `name` and `path`.

    """
    if not text:
        return None
    if "=" in text and "," not in text and not text.lstrip().startswith("{"):
        name, path = text.split("=", 1)
        if name.strip() and path:
            return name, path
        raise ValueError(f"`{text}` must be NAME=PATH")
    try:
        entry = json.loads(text)
    except ValueError:
        raise ValueError(f"`{text}` is neither NAME=PATH nor JSON") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not isinstance(entry.get("path"), str):
        raise ValueError(f"`{text}` must be an object with `name` and `path`")
    if entry.get("is_3d_lora_weight"):
        raise ValueError("`is_3d_lora_weight` is not supported: there are no mixture-of-experts models")
    return entry["name"], entry["path"]


def modules(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the adapters that a command line names: (name, path or hub id).

    Raises:
        ValidationError: one is given twice, or the manifest is not one.

    """
    found: dict[str, str] = {}
    for text in arguments.lora_modules or ():
        try:
            module = lora_module(text)
        except ValueError as error:
            arguments.parser.error(f"argument --lora-modules: {error}")
        if module is not None:
            if module[0] in found:
                arguments.parser.error(f"argument --lora-modules: `{module[0]}` is given twice")
            found[module[0]] = module[1]
    for name, _, path in read_manifest(arguments.lora_manifest) if arguments.lora_manifest else ():
        if name in found:
            raise ValidationError(f"adapter `{name}` is given twice, by --lora-modules or in the manifest")
        found[name] = path
    return list(found.items())


def register(engine: LLMEngine, adapters: Sequence[tuple[str, int | None, str]], base_names: list[str]) -> None:
    """Let requests name these adapters, (name, integer id, path); none is read.

    Raises:
        ValidationError: one has the base's name, or several cannot be served.
        AdapterError: the one that cannot be served.

    """
    for name, _, _ in adapters:
        if name in base_names:
            raise ValidationError(f"The lora adapter '{name}' conflicts with a served base model.")
    if not adapters:
        return
    begun = time.monotonic()
    registered = engine.register_all(adapters)
    match [result for result in registered if isinstance(result, ManyLoRAError)]:
        case [error]:
            raise error
        case [_, *_] as errors:
            raise ValidationError(f"{len(errors)} adapters cannot be served: {'; '.join(map(str, errors))}")
    seconds = time.monotonic() - begun
    logger.info("%d adapters registered in %.2f s; each is read when a request first names it", len(adapters), seconds)
