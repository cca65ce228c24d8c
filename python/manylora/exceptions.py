"""Exceptions of ManyLoRA: every one derives from `ManyLoRAError`.

Each says which status a command ends with: 2 where what was given cannot be used (a flag, a file, a model, an adapter,
a place to write to, a server), 1 where what was asked for began and failed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from manylora.outputs import RequestOutput


class ManyLoRAError(Exception):
    """Base of all errors raised by this package."""

    exit_status: ClassVar[int] = 1


class ValidationError(ManyLoRAError, ValueError):
    """An argument is out of range, of the wrong type, or does not go with another one."""

    exit_status = 2


class UnknownAdapterError(ValidationError):
    """A request names an adapter that is not loaded."""


class AdapterError(ManyLoRAError):
    """An adapter was refused, or an operation on it failed.

    Attributes:
        adapter: name of the adapter.
        keys: the offending tensor or configuration keys (the first few when there are many).
        reason: what is wrong, with the values, and what to do.
        report: the load report as far as it came, or None.
        kind: `invalid`, `not_found`, `forbidden`, `unavailable`, `conflict`, `operation` or `timeout`.

    """

    def __init__(
        self, adapter: str, keys: list[str], reason: str, report: dict[str, Any] | None = None, kind: str = "invalid"
    ):
        text = reason if f"`{adapter}`" in reason else f"adapter `{adapter}`: {reason}"
        if keys and not any(key in text for key in keys):
            text += f" (keys: {', '.join(keys)})"
        super().__init__(text)
        self.adapter = adapter
        self.keys = keys
        self.reason = reason
        self.report = report
        self.kind = kind

    @property
    def exit_status(self) -> int:  # type: ignore[override]
        """2 where the adapter is to blame; 1 where it could not be done just now."""
        return 1 if self.kind in ("unavailable", "operation", "timeout") else 2

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.adapter, self.keys, self.reason, self.report, self.kind))


class AdapterNotFoundError(AdapterError, FileNotFoundError):
    """The adapter's folder or files do not exist."""


class AdapterConflictError(AdapterError, ValueError):
    """The name or integer id is in use for other content."""


class AdapterTimeoutError(AdapterError, TimeoutError):
    """Requests still hold the adapter; it goes on leaving as they end."""


class RequestError(ManyLoRAError):
    """Requests were accepted and could not be finished; the others of the call were.

    Attributes:
        outputs: the outputs of the call in input order, None for those that failed.

    """

    def __init__(self, message: str, outputs: list[RequestOutput | None] | None = None):
        super().__init__(message)
        self.outputs = outputs or []


class ModelError(ManyLoRAError):
    """The base model, its tokenizer or its template could not be used."""

    exit_status = 2


class FetchError(ModelError):
    """A model that a command brings by itself could not be fetched: nothing that was given is wrong."""

    exit_status = 1


class ModelNotFoundError(ModelError, FileNotFoundError):
    """The base model's folder or files do not exist."""


class HubError(ManyLoRAError, OSError):
    """A hub id could not be fetched: offline, gated, or not there."""

    exit_status = 2


class EngineStoppedError(ManyLoRAError, RuntimeError):
    """The engine was closed, or its thread failed."""


def refused(adapter: str, keys: list[str], reason: str, report: str | None, kind: str) -> AdapterError:
    """Make the exception of a refused adapter; called by the native module."""
    classes: dict[str, type[AdapterError]] = {
        "not_found": AdapterNotFoundError,
        "conflict": AdapterConflictError,
        "timeout": AdapterTimeoutError,
    }
    parsed = json.loads(report) if report else None
    return classes.get(kind, AdapterError)(adapter, keys, reason, parsed, kind)
