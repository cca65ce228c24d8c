"""Adapters that lie elsewhere: `s3://`, `gs://`, `https://` and whatever else fsspec reads, and `hf://owner/name`.

An adapter is fetched into the cache, under the digest of its content: what a registration was made from stays where it
is when the place it came from changes. Files are digested when they arrive and again whenever they are used. A URL that
ends in `#sha256=` and the digest of `adapter_model.safetensors` stands for that content only: anything else is refused,
and what is in the cache is used without asking anybody.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manylora import hub
from manylora.cache import cache_dir
from manylora.exceptions import AdapterError, AdapterNotFoundError, HubError

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PIN = re.compile(r"sha256=([0-9a-f]{64})\Z")
_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
# What a file system says of a file that changes when the file does, in the names that they have for it.
_STAMPS = (
    "size", "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "LastModified", "last_modified",
    "Last-Modified", "mtime", "mtimeMs", "updated", "created",
)  # fmt: skip
_CHUNK = 1 << 20


def is_url(path: str) -> bool:
    """Whether `path` names a place elsewhere."""
    return bool(_URL.match(path))


def fetch_adapter(url: str, name: str, *, token: str | bool | None = None) -> Path:
    """Return the local folder for an adapter that lies elsewhere.

    Args:
        url: a folder with `adapter_config.json` and `adapter_model.safetensors`; `hf://owner/name` is a hub id.
        name: the adapter's, for errors.
        token: hub token.

    Raises:
        AdapterNotFoundError: it is not there.
        AdapterError: its content is not the one that the URL asks for.
        HubError: it cannot be reached, or what reads such URLs is not installed.

    """
    if url.lower().startswith("hf://"):
        return hub.resolve_adapter(url[len("hf://") :], name, token=token)
    place, _, fragment = url.partition("#")
    pin = _PIN.match(fragment)
    if fragment and not pin:
        raise HubError(f"adapter `{name}`: `{url}` ends in `#{fragment}`; only `#sha256=` and 64 hex digits can follow")
    kept = _Kept(place.rstrip("/"))
    if pin and (folder := kept.folder(pin[1])):
        return folder
    with _errors(url, name):
        import fsspec

        system, path = fsspec.core.url_to_fs(place.rstrip("/"))
        stamps = {file: _stamp(system.info(f"{path}/{file}")) for file in (_CONFIG, _TENSORS)}
        # Without a stamp nobody can tell whether it has changed.
        known = None not in stamps.values()
        if known and (folder := kept.folder(pin[1] if pin else None, stamps)):
            return folder
        return kept.take(system, path, stamps, pin[1] if pin else None, name)


class _Kept:
    """What is in the cache from one place."""

    def __init__(self, place: str):
        self.place = place
        self.root = cache_dir() / "adapters" / hashlib.sha256(place.encode()).hexdigest()[:32]

    def folder(self, tensors: str | None, stamps: dict[str, str | None] | None = None) -> Path | None:
        """Return a folder with this digest of the tensors or these stamps, if there is one and it is whole."""
        for record in sorted(self.root.glob("*/source.json")):
            try:
                told = json.loads(record.read_text())
                digests: dict[str, str] = told["sha256"]
                if tensors is not None and digests[_TENSORS] != tensors:
                    continue
                if stamps is not None and told["stamps"] != stamps:
                    continue
                if all(_digest(record.parent / file) == digest for file, digest in digests.items()):
                    return record.parent
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                pass
            # A record that cannot be read, or files that are not what arrived.
            shutil.rmtree(record.parent, ignore_errors=True)
        return None

    def take(self, system: Any, path: str, stamps: dict[str, str | None], tensors: str | None, name: str) -> Path:
        """Fetch the files into a folder named by what is in them."""
        self.root.mkdir(parents=True, exist_ok=True)
        arriving = Path(tempfile.mkdtemp(prefix=".arriving-", dir=self.root))
        try:
            for file in stamps:
                system.get_file(f"{path}/{file}", str(arriving / file))
            digests = {file: _digest(arriving / file) for file in stamps}
            if tensors is not None and digests[_TENSORS] != tensors:
                raise AdapterError(
                    name,
                    [_TENSORS],
                    f"`{_TENSORS}` of `{self.place}` has the sha256 `{digests[_TENSORS]}`; `{tensors}` was asked for",
                )
            told = {"url": self.place, "stamps": stamps, "sha256": digests}
            (arriving / "source.json").write_text(json.dumps(told, indent=1))
            arriving.chmod(0o755)
            content = hashlib.sha256("".join(digests.values()).encode()).hexdigest()[:32]
            folder = self.root / content
            try:
                os.rename(arriving, folder)
            except OSError:
                # The same content was there, perhaps with other stamps; it is in use, and stays.
                os.replace(arriving / "source.json", folder / "source.json")
            return folder
        finally:
            shutil.rmtree(arriving, ignore_errors=True)


def _stamp(info: dict[str, Any]) -> str | None:
    told = {key: str(info[key]) for key in _STAMPS if info.get(key) is not None}
    # A size alone says too little.
    return json.dumps(told, sort_keys=True) if set(told) - {"size"} else None


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _errors(url: str, name: str) -> Iterator[None]:
    """Say what cannot be fetched, why, and what to do."""
    try:
        yield
    except AdapterError:
        raise
    except ImportError as error:
        raise HubError(f"adapter `{name}`: `{url}` cannot be read: {error}") from error
    except FileNotFoundError as error:
        raise AdapterNotFoundError(name, [], f"No adapter found for {url}: there is no {error}") from error
    except PermissionError as error:
        raise HubError(f"adapter `{name}`: `{url}` may not be read: {error}") from error
    except ValueError as error:
        # No such protocol.
        raise HubError(f"adapter `{name}`: `{url}` cannot be read: {error}") from error
    except Exception as error:
        # Each file system has errors of its own.
        raise HubError(f"adapter `{name}`: `{url}` could not be fetched: {error!r}") from error
