"""What a command logs on standard error: how much, and in which shape."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone

from manylora import _core

_LOGGER = logging.getLogger("manylora")


class _JsonLines(logging.Formatter):
    """A line of JSON per message, as the native side writes them."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat().replace("+00:00", "Z")
        line = {"timestamp": time, "level": record.levelname, "message": record.getMessage(), "target": record.name}
        return json.dumps(line)


@contextmanager
def shown_log() -> Iterator[None]:
    """Show the package's own messages while a command runs; a program that imports the package decides for itself."""
    level, handler = _LOGGER.level, logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    shown = not _LOGGER.handlers
    if shown:
        _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        _LOGGER.setLevel(level)
        if shown:
            _LOGGER.removeHandler(handler)


def set_log(level: str, *, json_lines: bool) -> None:
    """Log what is of `level` or worse from now on, as text or as lines of JSON."""
    _LOGGER.setLevel(level.upper())
    if json_lines:
        for handler in _LOGGER.handlers:
            handler.setFormatter(_JsonLines())
    _core.set_log(level, json_lines)
