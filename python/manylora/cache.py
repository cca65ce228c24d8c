"""Where files that were fetched are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return this package's folder for them: $MANYLORA_CACHE, or `manylora` in the user's cache."""
    if own := os.environ.get("MANYLORA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "manylora"
