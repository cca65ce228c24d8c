"""Adapters that lie elsewhere: `s3://`, `gs://`, `https://` and whatever else fsspec reads, and `hf://owner/name`.

An adapter is fetched into the cache, under the digest of its content: what a registration was made from stays where it
is when the place it came from changes. Files are digested when they arrive and again whenever they are used.

A URL that ends in `#sha256=TENSORS&config=CONFIG`, the digests of `adapter_model.safetensors` and of
`adapter_config.json`, stands for that content only: anything else is refused, and what is in the cache is used without
asking anybody. `#sha256=TENSORS` alone says nothing of the configuration, which decides what the adapter does, too: the
place is asked for the one that it has, and the URL is refused as long as the cache has two.
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
_PIN = re.compile(r"sha256=([0-9a-f]{64})(?:&config=([0-9a-f]{64}))?\Z")
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
        raise HubError(
            f"adapter `{name}`: `{url}` ends in `#{fragment}`; only `#sha256=` and 64 hex digits, with or without "
            "`&config=` and as many, can follow"
        )
    digests = {TENSORS: pin[1], CONFIG: pin[2]} if pin else {}
    expected = {file: value for file, value in digests.items() if value is not None}
    if place.lower().startswith("hf://"):
        return _from_hub(place, name, token, expected)
    kept = Place(place.rstrip("/"))
    with kept.locked():
        if CONFIG in expected and (folder := kept.folder(expected)):
            return folder
        with _errors(url, name):
            import fsspec

            system, path = fsspec.core.url_to_fs(place.rstrip("/"), **_options(place, redirects))
            for _ in range(_ATTEMPTS):
                stamps = {file: _stamp(system.info(f"{path}/{file}")) for file in (CONFIG, TENSORS)}
                # Without a stamp nobody can tell whether it has changed.
                known = None not in stamps.values()
                folder = kept.folder(expected, stamps) if known else None
                if folder := folder or _take(kept, system, path, stamps, expected, name):
                    if TENSORS in expected and CONFIG not in expected:
                        _check_one_configuration(kept, expected[TENSORS], name)
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


def _from_hub(place: str, name: str, token: str | bool | None, expected: dict[str, str]) -> Path:
    repository = place[len("hf://") :].rstrip("/")
    if not _REPOSITORY.match(repository):
        raise HubError(f"adapter `{name}`: `{place}` is not hf://owner/name")
    folder = hub.fetch_adapter(repository, name, token=token)
    for file in expected:
        if (folder / file).exists():
            _check_digest(name, place, file, digest(folder / file), expected)
    return folder


def _check_digest(name: str, place: str, file: str, found: str, expected: dict[str, str]) -> None:
    if found != expected.get(file, found):
        reason = f"`{file}` of `{place}` has the sha256 `{found}`; `{expected[file]}` was asked for"
        raise AdapterError(name, [file], reason)


def _check_one_configuration(place: Place, tensors: str, name: str) -> None:
    """Refuse a URL that has stood for two adapters."""
    known = place.configurations(tensors)
    if len(known) > 1:
        pins = " or ".join(f"`#sha256={tensors}&config={config}`" for config in known)
        reason = f"`{place.url}` has had these tensors with more than one `{CONFIG}`; say which is meant: {pins}"
        raise AdapterError(name, [CONFIG], reason)


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
    place: Place, system: Any, path: str, stamps: dict[str, str | None], expected: dict[str, str], name: str
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
        for file, found in digests.items():
            _check_digest(name, place.url, file, found, expected)
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
        raise HubError(f"adapter `{name}`: `{url}` could not be fetched: {_told(error)}") from error


def _told(error: Exception) -> str:
    """Return what an error of whatever kind says, after its kind, without which many say little, or nothing."""
    said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
