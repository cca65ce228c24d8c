"""`EngineArgs` and `AsyncEngineArgs`: the arguments of `LLM(...)` as objects and as flags."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from manylora.arguments import ARGUMENTS
from manylora.exceptions import ValidationError
from manylora.flags import add_flag
from manylora.serve_arguments import engine_flag

logger = logging.getLogger("manylora")

_Self = TypeVar("_Self", bound="_FromFlags")
# Of `AsyncEngineArgs` only.
_LOG_REQUESTS = "enable_log_requests"


class _FromFlags:
    """What both have beside their fields."""

    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        """Add a flag for every argument to a parser of argparse, and return the parser."""
        group = parser.add_argument_group("engine")
        for argument in ARGUMENTS:
            add_flag(group, engine_flag(argument))
        return parser

    @classmethod
    def from_cli_args(cls: type[_Self], args: argparse.Namespace) -> _Self:
        """Make the arguments from what was parsed; what was not given has its default."""
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        given = {name: value for name, value in vars(args).items() if name in names and value is not None}
        return cls(**given)

    def create_engine_config(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported: there is no `VllmConfig`."""
        kind = type(self).__name__
        raise ValidationError(f"{kind}.create_engine_config() is not supported: give the arguments to an engine")


if TYPE_CHECKING:

    class EngineArgs(_FromFlags):
        """The arguments of `LLM(...)`, of which `manylora.arguments` has the table."""

        def __init__(self, model: str | None = None, **arguments: Any): ...
        def __getattr__(self, name: str) -> Any: ...

    class AsyncEngineArgs(EngineArgs):
        """The same for `AsyncLLM`."""

else:
    _FIELDS = [(argument.name, Any, dataclasses.field(default=argument.default)) for argument in ARGUMENTS]
    EngineArgs = dataclasses.make_dataclass(
        "EngineArgs",
        _FIELDS,
        bases=(_FromFlags,),
        namespace={
            "__doc__": "The arguments of `LLM(...)`, of which `manylora.arguments` has the table.",
            "__module__": __name__,
        },
    )
    AsyncEngineArgs = dataclasses.make_dataclass(
        "AsyncEngineArgs",
        [(_LOG_REQUESTS, bool, dataclasses.field(default=False))],
        bases=(EngineArgs,),
        namespace={"__doc__": "The same for `AsyncLLM`.", "__module__": __name__},
    )


def arguments_of(engine_args: Any) -> dict[str, Any]:
    """Return the arguments of `LLM(...)` that an object or mapping has."""
    given = dict(engine_args) if isinstance(engine_args, Mapping) else dict(vars(engine_args))
    if given.pop(_LOG_REQUESTS, None):
        logger.warning("%s has no effect: prompts and outputs are never logged", _LOG_REQUESTS)
    return given
