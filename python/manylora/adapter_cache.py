"""Adapters that were fetched: kept by the digest of their content, shared by processes, and bounded.

`adapters/<place>/<content>` has an adapter's files and `source.json`: where they came from, what the place said of
them, their digests. Its time is when the entry was last used. Whoever fetches from a place, or removes what came from
it, holds the place's `.lock`. `adapters/.users` has a file for each process that uses entries: their names, one a line.
The process holds it locked for as long as it lives; one that nobody holds is of a process that has ended. Entries get
onto such a list, and are removed, while their place is locked: none is taken away from who has just found it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from manylora.cache import cache_dir

logger = logging.getLogger("manylora")

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_SOURCE = "source.json"
_ARRIVING = ".arriving-"
_LOCK = ".lock"
_USERS = ".users"
_CHUNK = 1 << 20
# Seconds that an entry is in use after it was fetched, or after no engine reads it any more, when requests may still
# run on it.
_LINGERS = 900.0
_MIB = 1 << 20


class User(Protocol):
    """Who uses adapters in this process: an engine."""

    def adapter_folders(self) -> Iterable[str]:
        """Return where the adapters that it may read lie."""


def adapters_dir() -> Path:
    """Return the folder of all entries."""
    return cache_dir() / "adapters"


class Place:
    """What is in the cache from one place."""

    def __init__(self, url: str):
        self.url = url
        self.root = adapters_dir() / hashlib.sha256(url.encode()).hexdigest()[:32]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other threads and processes out: what one fetches the next one finds, and nobody removes it."""
        self.root.mkdir(parents=True, exist_ok=True)
        with _locked(self.root / _LOCK):
            yield

    def folder(self, expected: dict[str, str], stamps: dict[str, str | None] | None = None) -> Path | None:
        """Return a folder whose files have these digests, and these stamps, if there is one and it is whole.

        It is in use from now on.
        """
        for folder, digests, found in self._entries():
            if expected.items() <= digests.items() and stamps in (None, found):
                if _is_whole(folder, digests):
                    _use(folder)
                    return folder
                shutil.rmtree(folder)
        return None

    def configurations(self, tensors: str) -> list[str]:
        """Return the digests of the configurations that tensors of this digest have come with."""
        return sorted({digests[CONFIG] for _, digests, _ in self._entries() if digests[TENSORS] == tensors})

    def _entries(self) -> Iterator[tuple[Path, dict[str, str], dict[str, str | None]]]:
        """Give the entries, with the digests of their files and what the place said of them."""
        for record in sorted(self.root.glob(f"[!.]*/{_SOURCE}")):
            try:
                told = json.loads(record.read_text())
                digests = {file: str(told["sha256"][file]) for file in (CONFIG, TENSORS)}
                stamps: dict[str, str | None] = told["stamps"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            yield record.parent, digests, stamps

    @contextlib.contextmanager
    def arriving(self) -> Iterator[Path]:
        """Give a folder to fetch into; what is left of it at the end is removed."""
        folder = self.root / f"{_ARRIVING}{uuid.uuid4().hex}"
        folder.mkdir(mode=0o755)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, arrived: Path, stamps: dict[str, str | None], digests: dict[str, str]) -> Path:
        """Make an entry of what has arrived, named by what is in it; it is in use from now on."""
        told = {"url": self.url, "stamps": stamps, "sha256": digests}
        (arrived / _SOURCE).write_text(json.dumps(told, indent=1))
        folder = self.root / hashlib.sha256("".join(digests.values()).encode()).hexdigest()[:32]
        if folder.exists() and _is_whole(folder, digests):
            # The same content, with other stamps; it is in use, and stays.
            os.replace(arrived / _SOURCE, folder / _SOURCE)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(arrived, folder)
        _use(folder)
        return folder


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock file; with `wait` False, a BlockingIOError where somebody else holds it."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def digest(file: Path) -> str:
    """Return the sha256 of a file."""
    sha256 = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            sha256.update(chunk)
    return sha256.hexdigest()


def _is_whole(folder: Path, digests: dict[str, str]) -> bool:
    return all((folder / file).is_file() and digest(folder / file) == known for file, known in digests.items())


class _OwnList:
    """The entries that this process uses, by name, in a file for the others."""

    def __init__(self, root: Path):
        self.process = os.getpid()
        # None: an engine reads it. Else when it was fetched, or found to be used no more.
        self.since: dict[str, float | None] = {}
        self.users = root / _USERS
        self.path, self.file = self._open()

    def _open(self) -> tuple[Path, IO[str]]:
        self.users.mkdir(parents=True, exist_ok=True)
        while True:
            path = self.users / uuid.uuid4().hex
            file = path.open("a")
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists():
                return path, file
            # Before it was locked, it looked like that of a process which has ended.
            file.close()

    def restore(self) -> None:
        """Make the file again where somebody has removed it."""
        if not self.path.exists():
            self.file.close()
            self.path, self.file = self._open()
            self._write()

    def add(self, name: str) -> None:
        self.since[name] = time.monotonic()
        self.file.write(f"{name}\n")
        self.file.flush()

    def narrow(self, read: set[str]) -> None:
        """Forget entries that no engine reads any more, and has not read for a while.

        No other process may be pruning meanwhile.
        """
        now = time.monotonic()
        for name, since in list(self.since.items()):
            if since is None and name not in read:
                self.since[name] = now
            elif since is not None and now - since >= _LINGERS:
                del self.since[name]
        self.since |= dict.fromkeys(read)
        self._write()

    def _write(self) -> None:
        self.file.truncate(0)
        self.file.write("".join(f"{name}\n" for name in self.since))
        self.file.flush()


# Engines of this process.
_users: weakref.WeakSet[User] = weakref.WeakSet()
_users_lock = threading.Lock()
_lists: dict[Path, _OwnList] = {}
_lists_lock = threading.Lock()
# How many do not want anything to be removed.
_fetching = 0


def _own_list(root: Path) -> _OwnList:
    own = _lists.get(root)
    if own is None or own.process != os.getpid():
        # A child has a list of its own.
        own = _lists[root] = _OwnList(root)
    own.restore()
    return own


def add_user(user: User) -> None:
    """Let nothing be removed that an engine of this process may read, for as long as there is the engine."""
    with _users_lock:
        _users.add(user)


def _use(folder: Path) -> None:
    """Take note that an entry is in use. The place must be locked."""
    os.utime(folder / _SOURCE)
    with _lists_lock:
        _own_list(adapters_dir()).add(f"{folder.parent.name}/{folder.name}")


def is_still_there(folder: Path) -> bool:
    """Whether an entry that was fetched before can be used without looking for it again; it is in use from now on."""
    root = adapters_dir()
    if root not in folder.parents:
        return folder.exists()
    try:
        return _can_be_used(root, folder)
    except OSError:
        # It went meanwhile, and its place with it; or the cache cannot be changed, which whoever fetches it is told.
        return False


def _can_be_used(root: Path, folder: Path) -> bool:
    if not (folder / _SOURCE).exists():
        return False
    name = f"{folder.parent.name}/{folder.name}"
    with _lists_lock:
        since = _own_list(root).since.get(name, -math.inf)
        if since is None or time.monotonic() - since < _LINGERS / 2:
            return True
    with _locked(folder.parent / _LOCK):
        if (folder / _SOURCE).exists():
            _use(folder)
            return True
    return False


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Let this process remove nothing meanwhile: what was fetched is about to be used."""
    global _fetching
    with _lists_lock:
        _fetching += 1
    try:
        yield
    finally:
        with _lists_lock:
            _fetching -= 1


def _read_by_engines(root: Path) -> set[str]:
    root = root.resolve()
    with _users_lock:
        users = list(_users)
    folders = (Path(folder).resolve() for user in users for folder in user.adapter_folders())
    return {folder.relative_to(root).as_posix() for folder in folders if folder.is_relative_to(root)}


def _in_use(root: Path) -> set[str]:
    """Entries that processes use; what is left of those that have ended is removed."""
    used: set[str] = set()
    for path in (root / _USERS).glob("*"):
        with contextlib.suppress(FileNotFoundError), _opened(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # Somebody holds it; or nobody can tell, and then somebody may.
                used.update(file.read().split())
            else:
                # Another user's may stay.
                with contextlib.suppress(PermissionError):
                    path.unlink()
    return used


def _opened(path: Path) -> IO[str]:
    """Open a process's list to see whether it is locked: for writing, which takes emulated locks as over NFS."""
    try:
        return path.open("r+")
    except PermissionError:
        # Another user's.
        return path.open()


@dataclass(frozen=True, order=True)
class _Entry:
    used_at: int
    folder: Path
    size: int

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"


def _entries(root: Path) -> list[_Entry]:
    """All entries, and what is left of fetches that were cut off; those that were not used for longest first."""
    entries = []
    for folder in root.glob("[!.]*/*"):
        # Others fetch and remove meanwhile.
        with contextlib.suppress(OSError):
            if folder.is_dir():
                source = folder / _SOURCE
                is_whole = source.exists() and not folder.name.startswith(".")
                used_at = source.stat().st_mtime_ns if is_whole else 0
                entries.append(_Entry(used_at, folder, sum(file.stat().st_size for file in folder.iterdir())))
    return sorted(entries)


def prune(limit: int) -> None:
    """Remove entries that nobody uses until there are no more than `limit` bytes, those first that are longest unused.

    An entry is in use while an engine of some process may read it, and some minutes before and after. 0 = no limit.
    What was fetched is good whether or not there is room for it: a cache that cannot be changed is warned of.
    """
    root = adapters_dir()
    if not limit or not root.exists():
        return
    try:
        _prune(root, limit)
    except OSError as error:
        logger.warning(
            "the cache of fetched adapters `%s` could not be brought down to %.1f MiB (lora_cache_bytes): %s",
            root, limit / _MIB, error,
        )  # fmt: skip


def _prune(root: Path, limit: int) -> None:
    # Where another process does it, that is enough.
    with contextlib.suppress(BlockingIOError), _locked(root / ".pruning", wait=False):
        read = _read_by_engines(root)
        with _lists_lock:
            if _fetching:
                return
            _own_list(root).narrow(read)
        entries = _entries(root)
        total = sum(entry.size for entry in entries)
        for entry in entries if total > limit else ():
            if total > limit and _remove(root, entry):
                total -= entry.size
                logger.info(
                    "removed `%s`, %.1f MiB, from the cache of fetched adapters, which has room for %.1f MiB "
                    "(lora_cache_bytes): nobody uses it",
                    entry.folder, entry.size / _MIB, limit / _MIB,
                )  # fmt: skip
        if total > limit:
            logger.warning(
                "the cache of fetched adapters has %.1f MiB and room for %.1f MiB (lora_cache_bytes): what is left is "
                "in use",
                total / _MIB, limit / _MIB,
            )  # fmt: skip


def _remove(root: Path, entry: _Entry) -> bool:
    """Remove an entry, unless it is in use or somebody fetches from its place."""
    if entry.name in _in_use(root):
        return False
    with contextlib.suppress(BlockingIOError), _locked(entry.folder.parent / _LOCK, wait=False):
        # From here on nobody begins to use it.
        if entry.name in _in_use(root) or not entry.folder.exists():
            return False
        # At once: a folder that is half removed would look like one that is broken.
        removed = entry.folder.with_name(f"{_ARRIVING}{uuid.uuid4().hex}")
        os.rename(entry.folder, removed)
        shutil.rmtree(removed, ignore_errors=True)
        return True
    return False
