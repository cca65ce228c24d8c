"""Adapters by `LoRARequest`: which the native engine has, and where their content was found."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from manylora import _core, adapter_cache, hub, sources
from manylora.engine.finding import find_all
from manylora.engine.manifest import read_manifest
from manylora.engine_args import Settings
from manylora.exceptions import (
    AdapterTimeoutError,
    EngineStoppedError,
    ManyLoRAError,
    UnknownAdapterError,
    ValidationError,
)
from manylora.lora.request import LoRARequest

logger = logging.getLogger("manylora")

# Places per adapter whose content is remembered; the oldest is looked at again when it is named again.
_PLACES_KEPT = 64
# Names and ids that a message lists at most.
_LISTED = 20


class AdapterAdministration:
    """Loads, registers, replaces and removes adapters, with vLLM's names, on top of the native engine."""

    def __init__(self, settings: Settings, core: _core.Engine):
        self.settings = settings
        self.core = core
        # What the caller called it -> where it was found; a hub id is looked up once.
        self._paths: dict[str, str] = {}
        # Adapter -> path or tensors -> the version that was found there when it was named under this adapter.
        self._same_content: dict[str, dict[str, str]] = {}
        # Id -> adapter that is being unloaded, where waiting for that was given up.
        self._leaving: dict[int, str] = {}
        adapter_cache.add_user(self)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter now.

        Returns:
            True: it is loaded, by this call or an earlier one with the same content.

        Raises:
            AdapterError: it was refused, or its name or id is in use for other content.

        """
        self._load(lora_request, lora_request.load_inplace, None)
        return True

    def replace_lora(self, lora_request: LoRARequest, expected_version: str | None = None) -> str:
        """Let a name stand for other content from now on.

        Requests that run, or were submitted before this returns, finish on the version that the name stood for then. If
        anything is wrong with the new content, or the name stands for another version than `expected_version` (None =
        whatever it stands for), nothing changes.

        Returns:
            The new version: the digest of its tensors and effective configuration.

        Raises:
            AdapterError: it was refused, or the name stands for another version.

        """
        return self._load(lora_request, True, expected_version).version or ""

    def register_loras(self, lora_requests: Iterable[LoRARequest] | str | os.PathLike[str]) -> dict[str, ManyLoRAError]:
        """Register adapters without reading their tensors: each is read when a request first names it.

        Configurations and headers are read and checked, many at once. What only tensors can tell, such as a value that
        is not finite, fails the requests that name the adapter, and no others.

        Args:
            lora_requests: adapters by path or hub id, or a JSON file with a list of objects with `name`, `path` and,
                where requests name them by number, `id`.

        Returns:
            Those that were refused: name -> why. The others can be named from now on.

        Raises:
            ValidationError: LoRA is not enabled, the manifest cannot be read, or an adapter is given in memory.

        """
        if isinstance(lora_requests, (str, os.PathLike)):
            adapters = read_manifest(lora_requests)
        else:
            requests = list(lora_requests)
            for request in requests:
                if request.lora_tensors is not None:
                    raise ValidationError(f"adapter `{request.lora_name}` is given in memory: load it with add_lora")
            adapters = [(request.lora_name, request.lora_int_id, request.lora_path) for request in requests]
        if adapters and not self.settings.enable_lora:
            raise ValidationError("adapters cannot be registered: LoRA is not enabled; set enable_lora=True")
        refused: dict[str, ManyLoRAError] = {}
        for (name, *_), result in zip(adapters, self.register_all(adapters), strict=True):
            if isinstance(result, ManyLoRAError):
                refused[name] = result
            else:
                _warn(result)
        return refused

    def register_all(
        self, adapters: Sequence[tuple[str, int | None, str]]
    ) -> list[_core.AdapterRecord | ManyLoRAError]:
        """Register adapters, (name, integer id, path or hub id or URL) each; see `register_loras`.

        What lies elsewhere is fetched, some at a time.

        Returns:
            In their order what was registered, or why it was not.

        """
        with adapter_cache.left_alone():
            places = find_all(
                [(name, path) for name, _, path in adapters], self._path, show_progress=self.settings.use_tqdm_on_load
            )
            found = [
                (name, int_id, place, path)
                for (name, int_id, path), place in zip(adapters, places, strict=True)
                if isinstance(place, str)
            ]
            registered = iter(self.core.register_adapters(found))
            results = [place if isinstance(place, ManyLoRAError) else next(registered) for place in places]
        adapter_cache.prune(self.settings.lora_cache_bytes)
        checked: list[_core.AdapterRecord | ManyLoRAError] = []
        for result in results:
            if isinstance(result, BaseException) and (
                isinstance(result, EngineStoppedError) or not isinstance(result, ManyLoRAError)
            ):
                raise result
            checked.append(result)
        return checked

    def adapter_folders(self) -> list[str]:
        """Return where the adapters lie that the engine may read."""
        try:
            self.core.check_health()
        except EngineStoppedError:
            return []
        return [record.path for record in self.core.list_adapters() if record.path is not None]

    def _load(self, lora_request: LoRARequest, replace: bool, expected: str | None) -> _core.AdapterRecord:
        if not self.settings.enable_lora:
            raise ValidationError(f"Got lora_request {lora_request} but LoRA is not enabled!")
        name, int_id = lora_request.lora_name, lora_request.lora_int_id
        if lora_request.lora_tensors is None:
            path = self._path(lora_request.lora_path, name, again=replace)
            record = self.core.load_adapter(name, int_id, path, replace, expected)
        else:
            tensors, config = dict(lora_request.lora_tensors), lora_request.config_json()
            record = self.core.load_adapter_tensors(name, int_id, tensors, config, replace, expected)
        _warn(record)
        return record

    def remove_lora(self, lora_id: int, *, mode: str = "drain", timeout: float | None = None) -> bool:
        """Unload the adapter with this integer id. New requests for it are refused from the start.

        Args:
            lora_id: its integer id.
            mode: `drain` lets requests that run with it finish first, `abort` ends them (`finish_reason` "abort").
            timeout: seconds to wait for them at most; None = for as long as it takes.

        Returns:
            Whether there was one.

        Raises:
            AdapterTimeoutError: requests still hold it. It takes no new ones and is unloaded when they end; calling
                this again waits again, or aborts them.

        """
        record = self._by_id(lora_id)
        name = self._leaving.get(lora_id) if record is None else record.name
        if name is None or (record is None and self.core.adapter(name) is not None):
            # It is gone, and its name may be another adapter's by now.
            self._leaving.pop(lora_id, None)
            return False
        ids = [lora_id] if record is None else record.int_ids
        try:
            self.core.unload_adapter(name, mode, timeout)
        except (AdapterTimeoutError, KeyboardInterrupt):
            self._leaving.update(dict.fromkeys(ids, name))
            raise
        except UnknownAdapterError:
            # Another thread has removed it since.
            return False
        finally:
            self._same_content.pop(name, None)
        for one in ids:
            self._leaving.pop(one, None)
        return True

    def list_loras(self) -> set[int]:
        """Return the integer ids of the adapters that requests can name, read or not."""
        return set(self.core.adapter_ids())

    def pin_lora(self, lora_id: int) -> bool:
        """Keep the adapter with this integer id resident until it is unpinned or removed.

        Raises:
            ValidationError: there is none.
            AdapterError: no room may be pinned any more; the message has the numbers.

        """
        record = self._by_id(lora_id)
        if record is None:
            ids = sorted(self.list_loras())
            listed = ", ".join(map(str, ids[:_LISTED])) + (", ..." if len(ids) > _LISTED else "")
            raise ValidationError(f"no adapter has the id {lora_id}; loaded ids: {listed or 'none'}")
        self.core.pin_adapter(record.name, True)
        return True

    def unpin_lora(self, lora_id: int) -> bool:
        """Allow the adapter with this integer id to be evicted again; whether there was one."""
        record = self._by_id(lora_id)
        if record is not None:
            self.core.pin_adapter(record.name, False)
        return record is not None

    def set_weight(self, weight: float, *, adapter: str | None = None, tenant: str | None = None) -> None:
        """Give requests a larger or smaller share of the service, under `scheduling_policy="fair"`.

        While several tenants, adapters and the base have requests waiting, the tokens they get are in the ratio of
        their weights: prompt tokens count once, generated ones twice. Whoever was given no weight has 1.

        Args:
            weight: positive; 2 is twice the share of those with 1.
            adapter: name of the adapter whose requests it is for. An adapter's weight goes when it is removed.
            tenant: the tenant whose requests it is for, as in the prompt's key `tenant`; it need not be known yet.
                Neither adapter nor tenant: requests for the base.

        Raises:
            UnknownAdapterError: there is no adapter of this name.
            ValidationError: the weight is not positive and finite, or adapter and tenant are both given.

        """
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise ValidationError(f"weight must be a number, got {weight!r}")
        if tenant is not None and (not isinstance(tenant, str) or not tenant):
            raise ValidationError(f"tenant must be a non-empty string, got {tenant!r}")
        self.core.set_weight(adapter, tenant, float(weight))

    def ensure_all(self, lora_requests: Sequence[LoRARequest | None]) -> list[list[tuple[str, float]]]:
        """Load the adapters of requests unless exactly they are loaded.

        Returns:
            Per request the adapters to run it with: (name, strength); none for the base.

        Raises:
            AdapterError: one was refused, or its name or id is in use for other content.

        """
        # Each distinct request once: `load_inplace` means one replacement, not one per prompt or step.
        names: dict[tuple[str, int, str, str, bool], str] = {}
        adapters: list[list[tuple[str, float]]] = []
        for lora in lora_requests:
            if lora is None:
                adapters.append([])
                continue
            key = (lora.lora_name, lora.lora_int_id, lora.lora_path, lora._tensors_id, lora.load_inplace)
            if key not in names:
                names[key] = self._ensure(lora)
            adapters.append([(names[key], lora.scale)])
        return adapters

    def _ensure(self, lora_request: LoRARequest) -> str:
        if not self.settings.enable_lora:
            raise ValidationError(f"Got lora_request {lora_request} but LoRA is not enabled!")
        # Where the content is: nothing is read again while it is the same place.
        place = lora_request._tensors_id or self._path(lora_request.lora_path, lora_request.lora_name)
        name, int_id = lora_request.lora_name, lora_request.lora_int_id
        if not lora_request.load_inplace:
            record = self.core.adapter(name)
            known = self._same_content.get(name, {}).get(place)
            if record is not None and (record.path == place or (known is not None and known == record.version)):
                if int_id in record.int_ids:
                    return name
                if record.path == place:
                    # A further id for what is there; nothing is read for it.
                    (result,) = self.core.register_adapters([(name, int_id, place, lora_request.lora_path)])
                    if isinstance(result, BaseException):
                        raise result
                    return name
        record = self._load(lora_request, lora_request.load_inplace, None)
        # Another place with the same content is read once, not at every call.
        if record.version is not None:
            places = self._same_content.setdefault(name, {})
            places[place] = record.version
            while len(places) > _PLACES_KEPT:
                places.pop(next(iter(places)), None)
        return name

    def is_at_hand(self, lora_request: LoRARequest | None) -> bool:
        """Whether a request can name it without anything being read."""
        if lora_request is None:
            return True
        if not self.settings.enable_lora or lora_request.load_inplace or lora_request.lora_tensors is not None:
            return False
        record = self.core.adapter(lora_request.lora_name)
        place = self._paths.get(lora_request.lora_path) or hub.local_path(lora_request.lora_path)
        return (
            record is not None
            and place is not None
            and record.path == str(place)
            and lora_request.lora_int_id in record.int_ids
        )

    def stats(self) -> dict[str, Any]:
        """Return counters and levels of the scheduler, the KV cache and the adapter shelf."""
        stats: dict[str, Any] = json.loads(self.core.stats())
        return stats

    def _by_id(self, lora_id: int) -> _core.AdapterRecord | None:
        # One id leads to one adapter; what cannot be an id leads to none.
        return self.core.adapter_of_id(lora_id) if 0 < lora_id < 2**63 else None

    def _path(self, path: str, name: str, *, again: bool = False) -> str:
        """Return where an adapter's files are; with `again`, what was fetched before is looked at again."""
        if sources.is_url(path):
            known = self._paths.get(path)
            if again or known is None or not adapter_cache.is_still_there(Path(known)):
                self._paths[path] = str(sources.fetch_adapter(path, name, token=self.settings.hf_token))
                adapter_cache.prune(self.settings.lora_cache_bytes)
            return self._paths[path]
        if path not in self._paths:
            local = hub.local_path(path)
            found = local or hub.resolve_adapter(path, name, token=self.settings.hf_token)
            if local is not None or not found.exists():
                # Local paths are looked at every time: the working folder and what lies there can change.
                return str(found)
            self._paths[path] = str(found)
        return self._paths[path]


def _warn(record: _core.AdapterRecord) -> None:
    for warning in record.warnings:
        logger.warning("adapter `%s`: %s", record.name, warning)
