"""Lists of adapters in files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml

from manylora.exceptions import ValidationError


def read_manifest(path: str | os.PathLike[str]) -> list[tuple[str, int | None, str]]:
    """Read a list of adapters, JSON or YAML: objects with `name`, `path` and perhaps `id`.

    Relative paths are beside the file.

    Raises:
        ValidationError: the file cannot be read, or an entry has no name or path, or an id that is none.

    """
    is_yaml = Path(path).suffix.lower() in (".yaml", ".yml")
    try:
        text = Path(path).read_text(encoding="utf-8")
        # Thousands of entries take the parser in Python a second.
        entries = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if is_yaml else json.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValidationError(f"the manifest `{path}` cannot be read: {error}") from error
    if not isinstance(entries, list):
        raise ValidationError(f"the manifest `{path}` must hold a list of objects with `name` and `path`")
    adapters = []
    for number, entry in enumerate(entries):
        name, place, int_id = (entry.get(key) if isinstance(entry, dict) else None for key in ("name", "path", "id"))
        is_id = int_id is None or (type(int_id) is int and 0 < int_id < 2**63)
        if not isinstance(name, str) or not isinstance(place, str) or not place or not is_id:
            raise ValidationError(
                f"entry {number} of the manifest `{path}` must have a `name`, a `path` and, if anything, a positive "
                f"integer as `id`: {entry!r:.200}"
            )
        beside = Path(path).parent / place
        adapters.append((name, int_id, str(beside) if beside.exists() else place))
    return adapters
