"""What an engine would say of an adapter, without an engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from manylora import _core, hub, sources
from manylora.exceptions import AdapterNotFoundError

# The largest rank that is computed.
MAX_RANK = 512


def inspect_adapter(
    adapter: str | os.PathLike[str],
    base: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    max_lora_rank: int = MAX_RANK,
    hf_token: str | bool | None = None,
    revision: str | None = None,
) -> dict[str, Any]:
    """Return what of an adapter would be applied to a base, and what not and why. No weight of the base is read.

    Args:
        adapter: folder, hub id or URL.
        base: folder, GGUF file or hub id.
        dtype: number format of the engine, which decides how many bytes the adapter takes.
        max_lora_rank: the limit that it is held to, up to 512.
        hf_token: token of the hub; None uses the one that is logged in.
        revision: of the base on the hub.

    Returns:
        `accepted` and `reason`; `modules` by their path, each with `rank`, `alpha`, `scale`, `effect`,
        `singular_values` of B A (the scale left out), `numerical_rank` and `entropy_rank`; `bytes` as a processor's
        engine charges them, `card_bytes` as one on a card does; `report`, the load report, with `matched`, `ignored`
        and `refused` keys.

    Raises:
        ModelError, HubError: the base cannot be opened, or not be fetched.
        AdapterError: there is no adapter, or it may not be read. One that is refused is an answer.

    """
    name = os.fspath(adapter)
    look = {
        "model": str(hub.resolve_model(os.fspath(base), revision=revision, token=hf_token)),
        "model_names": [os.fspath(base).rstrip("/"), hub.repository(os.fspath(base).rstrip("/"))],
        "adapter": str(adapter_folder(name, hf_token)),
        "name": Path(name).name or name,
        "dtype": dtype,
        "max_lora_rank": max_lora_rank,
    }
    answer: dict[str, Any] = json.loads(_core.inspect(look))
    return answer


def adapter_folder(path: str, token: str | bool | None) -> Path:
    """Return the folder of an adapter by its path, hub id or URL.

    Raises:
        HubError, AdapterError: it cannot be fetched.

    """
    name = Path(path).name or path
    if sources.is_url(path):
        return sources.fetch_adapter(path, name, token=token)
    found = hub.local_path(path) or hub.resolve_adapter(path, name, token=token)
    if found.is_file():
        raise AdapterNotFoundError(name, [], f"`{path}` is a file; an adapter is a folder with `adapter_config.json`")
    return found
