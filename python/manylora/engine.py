"""The engine behind `LLM`: adapters by `LoRARequest`, and the native object that does the work."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manylora import _core, hub
from manylora.engine_args import Settings
from manylora.exceptions import UnknownAdapterError, ValidationError
from manylora.lora.request import LoRARequest
from manylora.sampling_params import SamplingParams

logger = logging.getLogger("manylora")


@dataclass
class Request:
    """One prompt as the native side reads it; exactly one of `text` and `token_ids` is set."""

    text: str | None
    add_special_tokens: bool
    token_ids: list[int] | None
    params: SamplingParams
    adapters: list[tuple[str, float]]
    priority: int
    cache_salt: str | None


class LLMEngine:
    """Adapter administration with vLLM's names, on top of the native engine."""

    def __init__(self, settings: Settings, core: _core.Engine):
        self.settings = settings
        self.core = core
        # What the caller called it -> where it was found; a hub id is looked up once.
        self._paths: dict[str, str] = {}
        # (adapter, path) -> the version that was found there when it was named under this adapter.
        self._same_content: dict[tuple[str, str], str] = {}

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter now.

        Returns:
            True: it is loaded, by this call or an earlier one with the same content.

        Raises:
            AdapterError: it was refused, or its name or id is in use for other content.

        """
        if not self.settings.enable_lora:
            raise ValidationError(f"Got lora_request {lora_request} but LoRA is not enabled!")
        record = self.core.load_adapter(
            lora_request.lora_name,
            lora_request.lora_int_id,
            self._path(lora_request.lora_path),
            lora_request.load_inplace,
        )
        for warning in json.loads(record.report).get("warnings", []):
            logger.warning("adapter `%s`: %s", record.name, warning)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter with this integer id; requests that run with it finish first.

        Returns:
            Whether there was one.

        """
        records = self._by_id(lora_id)
        removed = False
        for record in records:
            # Another thread may have removed it since.
            with contextlib.suppress(UnknownAdapterError):
                self.core.unload_adapter(record.name, "drain")
                removed = True
            self._same_content = {key: version for key, version in self._same_content.items() if key[0] != record.name}
        return removed

    def list_loras(self) -> set[int]:
        """Return the integer ids of the loaded adapters."""
        return {int_id for record in self.core.list_adapters() for int_id in record.int_ids}

    def pin_lora(self, lora_id: int) -> bool:
        """Keep the adapter with this integer id resident until it is removed.

        Raises:
            ValidationError: there is none.
            AdapterError: no room may be pinned any more; the message has the numbers.

        """
        records = self._by_id(lora_id)
        if not records:
            raise ValidationError(f"no adapter has the id {lora_id}; loaded ids: {sorted(self.list_loras())}")
        for record in records:
            self.core.pin_adapter(record.name, True)
        return True

    def ensure_all(self, lora_requests: Sequence[LoRARequest | None]) -> list[list[tuple[str, float]]]:
        """Load the adapters of requests unless exactly they are loaded.

        Returns:
            Per request the adapters to run it with: (name, strength); none for the base.

        Raises:
            AdapterError: one was refused, or its name or id is in use for other content.

        """
        # Each distinct request once: `load_inplace` means one replacement, not one per prompt or step.
        names: dict[tuple[str, int, str, bool], str] = {}
        adapters: list[list[tuple[str, float]]] = []
        for lora in lora_requests:
            if lora is None:
                adapters.append([])
                continue
            key = (lora.lora_name, lora.lora_int_id, lora.lora_path, lora.load_inplace)
            if key not in names:
                names[key] = self._ensure(lora)
            adapters.append([(names[key], 1.0)])
        return adapters

    def _ensure(self, lora_request: LoRARequest) -> str:
        if not self.settings.enable_lora:
            raise ValidationError(f"Got lora_request {lora_request} but LoRA is not enabled!")
        if not lora_request.load_inplace:
            path = self._path(lora_request.lora_path)
            for record in self.core.list_adapters():
                if record.name != lora_request.lora_name or lora_request.lora_int_id not in record.int_ids:
                    continue
                if record.path == path or self._same_content.get((record.name, path)) == record.version:
                    return record.name
        self.add_lora(lora_request)
        for record in self.core.list_adapters():
            if record.name == lora_request.lora_name:
                # Another path with the same content is read once, not at every call.
                self._same_content[record.name, self._path(lora_request.lora_path)] = record.version
        return lora_request.lora_name

    def stats(self) -> dict[str, Any]:
        """Return counters and levels of the scheduler, the KV cache and the adapter shelf."""
        stats: dict[str, Any] = json.loads(self.core.stats())
        return stats

    def _by_id(self, lora_id: int) -> list[_core.AdapterRecord]:
        # One content may be loaded under several names with one id.
        return [record for record in self.core.list_adapters() if lora_id in record.int_ids]

    def _path(self, path: str) -> str:
        if path not in self._paths:
            local = hub.local_path(path)
            found = local or hub.resolve(path, hub.ADAPTER_FILES, what="adapter", token=self.settings.hf_token)
            if local is not None or not found.exists():
                # Local paths are looked at every time: the working folder and what lies there can change.
                return str(found)
            self._paths[path] = str(found)
        return self._paths[path]
