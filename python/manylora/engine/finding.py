"""Where adapters lie: many are looked for at once, where most of the time goes by waiting for other machines."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from tqdm.auto import tqdm

from manylora import hub, sources
from manylora.exceptions import ManyLoRAError

# Fetches that run at the same time.
_AT_ONCE = 8


def is_elsewhere(path: str) -> bool:
    """Whether `path` may have to be fetched: a URL or a hub id."""
    return sources.is_url(path) or not (hub.local_path(path) or hub.looks_local(path))


def find_all(
    adapters: Sequence[tuple[str, str]], find: Callable[[str, str], str], *, show_progress: bool
) -> list[str | ManyLoRAError]:
    """Find adapters, (name, path) each: what lies elsewhere some at a time, with a bar where there is more than one.

    Args:
        adapters: what to look for.
        find: returns the folder of a path and a name; it may take long, and is called once for each path.
        show_progress: whether there may be a bar.

    Returns:
        In their order the folders, or why one was not found.

    """
    names: dict[str, str] = {}
    for name, path in adapters:
        names.setdefault(path, name)
    elsewhere = [path for path in names if is_elsewhere(path)]
    found: dict[str, str | BaseException] = {}

    def look(path: str) -> str | BaseException:
        try:
            return find(path, names[path])
        except BaseException as error:
            return error

    if len(elsewhere) > 1:
        found = _at_once(elsewhere, look, show_progress)
    for path in names:
        if path not in found:
            found[path] = look(path)
    results: list[str | ManyLoRAError] = []
    for _, path in adapters:
        result = found[path]
        if isinstance(result, BaseException) and not isinstance(result, ManyLoRAError):
            raise result
        results.append(result)
    return results


def _at_once(
    paths: list[str], look: Callable[[str], str | BaseException], show_progress: bool
) -> dict[str, str | BaseException]:
    """Look for all, some at a time. Ctrl-C ends it without waiting for those under way."""
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, str | BaseException]] = queue.SimpleQueue()
    for path in paths:
        left.put(path)
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            try:
                path = left.get_nowait()
            except queue.Empty:
                return
            done.put((path, look(path)))

    found: dict[str, str | BaseException] = {}
    for _ in range(min(_AT_ONCE, len(paths))):
        threading.Thread(target=work, name="manylora-fetch", daemon=True).start()
    try:
        with tqdm(
            total=len(paths), desc="Fetching adapters", unit="adapter", disable=not show_progress, leave=False
        ) as bar:
            while len(found) < len(paths):
                path, result = done.get()
                found[path] = result
                bar.update()
    finally:
        is_over.set()
    return found
