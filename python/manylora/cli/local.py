"""Commands that compute in their own process: the base, its adapters and the engine's settings as flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from manylora.arguments import Treatment
from manylora.cli.modules import modules, register
from manylora.engine.llm_engine import LLMEngine
from manylora.engine_args import Settings
from manylora.exceptions import ValidationError
from manylora.flags import add_flag
from manylora.lora.request import LoRARequest
from manylora.serve_arguments import BY_NAME, FLAGS

# What adapters are called that are not there: the base's rows.
BASE = "base"


def add_engine_flags(parser: argparse.ArgumentParser, *, model_is_needed: bool = True) -> None:
    """Add the base, its adapters, and every flag of the engine."""
    parser.add_argument(
        "model_tag",
        nargs=None if model_is_needed else "?",
        metavar="MODEL",
        help="local folder, GGUF file or hub id of the base",
    )
    adapters = parser.add_argument_group("adapters")
    for name in ("lora_modules", "lora_manifest"):
        add_flag(adapters, BY_NAME[name])
    engine = parser.add_argument_group("engine")
    for flag in FLAGS:
        if flag.is_engine and flag.argument.treatment is Treatment.HONOURED:
            add_flag(engine, flag)
    parser.set_defaults(parser=parser)


@dataclass
class Asked:
    """What a command line says of the engine.

    Attributes:
        settings: of the engine.
        adapters: those that rows may name.

    """

    settings: dict[str, Any]
    adapters: dict[str, LoRARequest]

    @property
    def at_once(self) -> int:
        """Rows in the engine at a time: enough that steps are full and prompts are read ahead."""
        settings: Any = Settings(**self.settings)
        return 2 * int(settings.max_num_seqs)

    def register(self, engine: LLMEngine) -> None:
        """Let rows name the adapters.

        Raises:
            ValidationError, AdapterError: one cannot be served.

        """
        adapters = [(name, lora.lora_int_id, lora.lora_path) for name, lora in self.adapters.items()]
        register(engine, adapters, [BASE])

    def chosen(self, name: str | None, where: str) -> LoRARequest | None:
        """Return the adapter of a name; None and `base` are the base.

        Raises:
            ValidationError: there is none of this name.

        """
        if name is None or name == BASE:
            return None
        if name not in self.adapters:
            known = ", ".join([BASE, *self.adapters])
            raise ValidationError(f"{where}: there is no adapter `{name}`; there are {known}")
        return self.adapters[name]


def asked(arguments: argparse.Namespace) -> Asked:
    """Return what a command line says, defaults left out.

    Raises:
        ValidationError: something is wrong with it.

    """
    given = {flag.name: getattr(arguments, flag.name, None) for flag in FLAGS if flag.is_engine}
    settings = {name: value for name, value in given.items() if value is not None}
    named = modules(arguments)
    settings |= {"model": arguments.model_tag, "enable_lora": bool(named)}
    # Wrong settings are told before anything is read.
    Settings(**settings)
    adapters = {name: LoRARequest(name, number, path) for number, (name, path) in enumerate(named, start=1)}
    return Asked(settings, adapters)
