"""The keys file of `manylora serve`: read at the start, and again on SIGHUP."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import yaml

from manylora.exceptions import ValidationError

logger = logging.getLogger("manylora")


def read_keys(path: str) -> str:
    """Read a keys file: a list of entries, or an object with such a list as `keys`. What they hold is checked natively.

    Returns:
        The list as JSON.

    Raises:
        ValidationError: the file cannot be read, or holds something else.

    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        # JSON is YAML too. Thousands of entries take the parser in Python many seconds.
        content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        # Its own text quotes the line, in which there may be a key.
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it is not YAML"
        raise ValidationError(f"the keys file `{path}` cannot be read: {problem}{place}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValidationError(f"the keys file `{path}` cannot be read: {error}") from error
    entries = content.get("keys") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise ValidationError(f"the keys file `{path}` must hold a list of keys, or an object with one as `keys`")
    for number, entry in enumerate(entries, start=1):
        for field in ("name", "key") if isinstance(entry, dict) else ():
            # The native side would quote it.
            if field in entry and not isinstance(entry[field], str):
                kind = type(entry[field]).__name__
                raise ValidationError(
                    f"the keys file `{path}`: `{field}` of entry {number} is no text ({kind}); put it in quotes"
                )
    return json.dumps(entries)


def reloader(path: str | None) -> Callable[..., str | None]:
    """Return what a server calls on SIGHUP.

    It asks for the keys (None: there are none to read), or gives the error where they were not taken.
    """

    def reload(error: str | None = None) -> str | None:
        if error is not None:
            logger.error("the keys file was read again and not taken, the keys stay as they were: %s", error)
            return None
        if path is None:
            logger.info("SIGHUP: there is no keys file to read again (--keys-file), all stays as it is")
            return None
        keys = read_keys(path)
        logger.info("reading the keys file `%s` again", path)
        return keys

    return reload


def has_terminal() -> bool:
    """Whether the process has a terminal: its end is told by the signal that asks a service to read files again."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
