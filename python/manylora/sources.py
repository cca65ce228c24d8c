"""Adapters that lie elsewhere: `s3://`, `gs://`, `https://` and whatever else fsspec reads, and `hf://owner/name`.

An adapter is fetched into the cache, under the digest of its content: what a registration was made from stays where it
is when the place it came from changes. Files are digested when they arrive and again whenever they are used. A URL that
ends in `#sha256=` and the digest of `adapter_model.safetensors` stands for that content only: anything else is refused,
and what is in the cache is used without asking anybody.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from manylora import hub
from manylora.adapter_cache import CONFIG, TENSORS, Place, digest
from manylora.exceptions import AdapterError, AdapterNotFoundError, HubError

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_PIN = re.compile(r"sha256=([0-9a-f]{64})\Z")
# What a file system says of a file that changes when the file does, in the names that they have for it.
_STAMPS = (
    "size", "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "LastModified", "last_modified",
    "Last-Modified", "mtime", "mtimeMs", "updated", "created",
)  # fmt: skip
_ATTEMPTS = 5
# No adapter is larger; whoever sends without an end is not waited for.
_MOST_BYTES = 16 << 30


def is_url(path: str) -> bool:
    """Whether `path` names a place elsewhere."""
    return bool(_URL.match(path))


def fetch_adapter(url: str, name: str, *, token: str | bool | None = None, redirects: bool = True) -> Path:
    """Return the local folder for an adapter that lies elsewhere.

    Args:
        url: a folder with `adapter_config.json` and `adapter_model.safetensors`; `hf://owner/name` is a hub id. It has
            no credentials in it: those are for the file system's own settings and the environment.
        name: the adapter's, for errors.
        token: hub token.
        redirects: whether web servers may send on to another place.

    Raises:
        AdapterNotFoundError: it is not there.
        AdapterError: its content is not the one that the URL asks for.
        HubError: it cannot be reached, or what reads such URLs is not installed.

    """
    place, _, fragment = url.partition("#")
    _check_plain(place, name)
    pin = _PIN.match(fragment)
    if fragment and not pin:
        raise HubError(f"adapter `{name}`: `{url}` ends in `#{fragment}`; only `#sha256=` and 64 hex digits can follow")
    expected = pin[1] if pin else None
    if place.lower().startswith("hf://"):
        return _from_hub(place, name, token, expected)
    kept = Place(place.rstrip("/"))
    with kept.locked():
        if expected and (folder := kept.folder(expected)):
            return folder
        with _errors(url, name):
            import fsspec

            system, path = fsspec.core.url_to_fs(place.rstrip("/"), **_options(place, redirects))
            for _ in range(_ATTEMPTS):
                stamps = {file: _stamp(system.info(f"{path}/{file}")) for file in (CONFIG, TENSORS)}
                # Without a stamp nobody can tell whether it has changed.
                known = None not in stamps.values()
                if known and (folder := kept.folder(expected, stamps)):
                    return folder
                if folder := _take(kept, system, path, stamps, expected, name):
                    return folder
    raise HubError(f"adapter `{name}`: `{url}` changes again and again while it is fetched; try again later")


def _check_plain(place: str, name: str) -> None:
    """Refuse what would be shown to whoever lists adapters."""
    parts = urlsplit(place)
    if parts.username is not None or parts.password is not None or parts.query:
        shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        raise HubError(
            f"adapter `{name}`: the URL of `{shown}` has credentials or a query in it; URLs are shown to users, so "
            "give access by the environment or the file system's own settings"
        )


def _from_hub(place: str, name: str, token: str | bool | None, expected: str | None) -> Path:
    repository = place[len("hf://") :].rstrip("/")
    if not _REPOSITORY.match(repository):
        raise HubError(f"adapter `{name}`: `{place}` is not hf://owner/name")
    folder = hub.fetch_adapter(repository, name, token=token)
    if expected is not None and (folder / TENSORS).exists():
        _check_digest(name, place, digest(folder / TENSORS), expected)
    return folder


def _check_digest(name: str, place: str, found: str, expected: str) -> None:
    if found != expected:
        reason = f"`{TENSORS}` of `{place}` has the sha256 `{found}`; `{expected}` was asked for"
        raise AdapterError(name, [TENSORS], reason)


def _options(place: str, redirects: bool) -> dict[str, Any]:
    if redirects or not place.lower().startswith(("http://", "https://")):
        return {}
    return {"allow_redirects": False, "get_client": _client_that_stays}


async def _client_that_stays(**settings: Any) -> Any:
    """Make a client for which an answer that leads elsewhere is an error."""
    import aiohttp

    async def check(answer: Any) -> None:
        if 300 <= answer.status < 400:
            raise PermissionError(f"{answer.url} leads on to another place, which is not followed")

    return aiohttp.ClientSession(**settings, raise_for_status=check)


def _take(
    place: Place, system: Any, path: str, stamps: dict[str, str | None], tensors: str | None, name: str
) -> Path | None:
    """Fetch the files into the cache; None if they changed meanwhile."""
    from fsspec.callbacks import Callback

    class Bounded(Callback):  # type: ignore[misc]
        """Ends what does not end."""

        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            if self.value > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES} bytes")

    with place.arriving() as arriving:
        for file in stamps:
            system.get_file(f"{path}/{file}", str(arriving / file), callback=Bounded())
        if any(_stamp(system.info(f"{path}/{file}")) != stamp for file, stamp in stamps.items()):
            # A configuration and tensors that do not belong together are worse than none.
            return None
        digests = {file: digest(arriving / file) for file in stamps}
        if tensors is not None:
            _check_digest(name, place.url, digests[TENSORS], tensors)
        return place.keep(arriving, stamps, digests)


def _stamp(info: dict[str, Any]) -> str | None:
    told = {key: str(info[key]) for key in _STAMPS if info.get(key) is not None}
    # A size alone says too little.
    return json.dumps(told, sort_keys=True) if set(told) - {"size"} else None


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
        if isinstance(error.__cause__, PermissionError):
            raise HubError(f"adapter `{name}`: `{url}` may not be read: {error.__cause__}") from error
        raise AdapterNotFoundError(name, [], f"No adapter found for {url}: there is no {error}") from error
    except PermissionError as error:
        raise HubError(f"adapter `{name}`: `{url}` may not be read: {error}") from error
    except ValueError as error:
        # No such protocol, or too much.
        raise HubError(f"adapter `{name}`: `{url}` cannot be read: {error}") from error
    except Exception as error:
        # Each file system has errors of its own.
        raise HubError(f"adapter `{name}`: `{url}` could not be fetched: {error!r}") from error
