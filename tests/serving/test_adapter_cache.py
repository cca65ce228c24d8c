"""The cache of fetched adapters has a bound: what nobody uses goes first, and what somebody uses does not go at all."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from manylora import LLM, AdapterError, LoRARequest, adapter_cache, sources

from .conftest import ADAPTERS, read_as_others_do
from .test_sources import CONFIG, TENSORS

FETCH = "import sys; from manylora import sources; print(sources.fetch_adapter(sys.argv[1], 'a'), flush=True); input()"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYLORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "adapters"


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str], str]:
    """Where an adapter lies elsewhere, by its name."""

    def put(adapter: str) -> str:
        shutil.copytree(ADAPTERS / adapter, tmp_path / "elsewhere" / adapter, dirs_exist_ok=True)
        return f"file://{tmp_path}/elsewhere/{adapter}"

    return put


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process fetched is in use only while an engine has it."""
    monkeypatch.setattr(adapter_cache, "_LINGERS", 0.0)


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def fetched(place: Callable[[str], str], *adapters: str) -> list[Path]:
    return [sources.fetch_adapter(place(adapter), adapter) for adapter in adapters]


@pytest.mark.usefixtures("hasty")
def test_what_was_not_used_for_longest_goes_first(
    place: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    alpha, beta, gamma = fetched(place, "alpha", "beta", "gamma")
    # It is the oldest one, and used again.
    assert fetched(place, "alpha") == [alpha]
    with caplog.at_level(logging.INFO, "manylora"):
        adapter_cache.prune(size(alpha) + size(beta) + size(gamma))
        assert caplog.messages == []
        adapter_cache.prune(size(alpha) + size(gamma))
    assert [alpha.exists(), beta.exists(), gamma.exists()] == [True, False, True]
    (message,) = caplog.messages
    assert message.startswith(f"removed `{beta}`, ")
    adapter_cache.prune(0)
    assert alpha.exists()
    adapter_cache.prune(1)
    assert not alpha.exists()
    assert not gamma.exists()
    assert fetched(place, "beta") == [beta]
    assert size(beta) > size(ADAPTERS / "beta")


def test_what_was_just_fetched_stays(place: Callable[[str], str], caplog: pytest.LogCaptureFixture) -> None:
    folders = fetched(place, "alpha", "beta")
    adapter_cache.prune(1)
    assert all(folder.exists() for folder in folders)
    assert "what is left is in use" in caplog.text


@pytest.mark.usefixtures("hasty")
def test_what_another_process_uses_stays(place: Callable[[str], str], cache: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", FETCH, place("alpha")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    (ours,) = fetched(place, "beta")
    # Ours to fetch and theirs to keep.
    assert fetched(place, "alpha") == [theirs]
    adapter_cache.prune(1)
    assert (theirs.exists(), ours.exists()) == (True, False)
    other.communicate("\n")
    assert other.returncode == 0
    assert len(list((cache / ".users").iterdir())) == 2
    adapter_cache.prune(1)
    assert not theirs.exists()
    # Of those who have ended nothing is left.
    assert len(list((cache / ".users").iterdir())) == 1


@pytest.mark.usefixtures("hasty")
def test_nothing_is_taken_away_while_it_is_looked_for(place: Callable[[str], str], cache: Path) -> None:
    (folder,) = fetched(place, "alpha")
    left = folder.with_name(".arriving-cut-off")
    left.mkdir()
    (left / TENSORS).write_bytes(b"half")
    with adapter_cache._locked(folder.parent / ".lock"):
        adapter_cache.prune(1)
        assert folder.exists()
        assert left.exists()
    with adapter_cache.left_alone():
        adapter_cache.prune(1)
        assert folder.exists()
    adapter_cache.prune(1)
    assert list(folder.parent.iterdir()) == [folder.parent / ".lock"]
    assert cache in folder.parents


@pytest.mark.usefixtures("hasty")
def test_what_an_engine_may_read_stays(place: Callable[[str], str], make_engine: Callable[..., LLM]) -> None:
    llm = make_engine(lora_cache_bytes=1)
    url = place("alpha")
    assert llm.llm_engine.register_loras([LoRARequest("a", 1, url)]) == {}
    (alpha,) = [Path(record.path or "") for record in llm._core.list_adapters()]
    fetched(place, "beta")
    adapter_cache.prune(1)
    assert [path for path in alpha.parent.parent.glob("*/*") if path.is_dir()] == [alpha]
    assert llm.llm_engine.remove_lora(1)
    # Requests may still run on what is let go: only the next time it is unused.
    adapter_cache.prune(1)
    assert alpha.exists()
    adapter_cache.prune(1)
    assert not alpha.exists()
    # Where it was found is remembered, and that it is there no more is seen.
    assert llm.llm_engine.register_loras([LoRARequest("a", 1, url)]) == {}
    assert alpha.exists()
    llm.close()
    adapter_cache.prune(1)
    adapter_cache.prune(1)
    assert not alpha.exists()


@pytest.mark.usefixtures("hasty")
def test_a_cache_that_cannot_be_changed_fails_nobody(
    place: Callable[[str], str], cache: Path, make_engine: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    (folder,) = fetched(place, "alpha")
    # As where the cache is another user's, or read-only.
    (cache / ".pruning").mkdir()
    with caplog.at_level(logging.WARNING, "manylora"):
        adapter_cache.prune(1)
    (message,) = caplog.messages
    assert message.startswith(f"the cache of fetched adapters `{cache}` could not be brought down to ")
    assert folder.exists()
    # Nothing was fetched for it, nor need anything go.
    llm = make_engine(lora_cache_bytes=1)
    assert llm.llm_engine.register_loras([LoRARequest("a", 1, str(ADAPTERS / "alpha"))]) == {}
    assert llm.llm_engine.add_lora(LoRARequest("b", 2, place("beta")))


@pytest.mark.usefixtures("hasty")
def test_another_users_list_is_looked_at(place: Callable[[str], str], cache: Path) -> None:
    alpha, beta = fetched(place, "alpha", "beta")
    theirs = cache / ".users" / "theirs"
    theirs.write_text(f"{alpha.parent.name}/{alpha.name}\n")
    theirs.chmod(0o444)
    prune = [sys.executable, "-c", "from manylora import adapter_cache; adapter_cache.prune(1)"]

    def pruned() -> None:
        adapter_cache.prune(0)
        done = subprocess.run(prune, stderr=subprocess.PIPE, text=True, preexec_fn=read_as_others_do, check=True)
        assert "could not be brought down" not in done.stderr

    with theirs.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        adapter_cache._lists.clear()
        pruned()
        assert (alpha.exists(), beta.exists()) == (True, False)
    pruned()
    assert not alpha.exists()


def test_a_list_that_cannot_be_made_again_is_no_error(place: Callable[[str], str], cache: Path) -> None:
    (alpha,) = fetched(place, "alpha")
    assert adapter_cache.is_still_there(alpha)
    shutil.rmtree(cache / ".users")
    (cache / ".users").write_text("no folder")
    # Whoever fetches it says what is wrong.
    assert not adapter_cache.is_still_there(alpha)
    with pytest.raises(OSError, match=r"\.users"):
        fetched(place, "alpha")
    (cache / ".users").unlink()
    assert adapter_cache.is_still_there(alpha)


def test_what_somebody_removed_by_hand_is_fetched_again(
    place: Callable[[str], str], cache: Path, make_engine: Callable[..., LLM]
) -> None:
    llm, url = make_engine(), place("alpha")
    assert llm.llm_engine.register_loras([LoRARequest("a", 1, url)]) == {}
    (alpha,) = [Path(record.path or "") for record in llm._core.list_adapters()]
    shutil.rmtree(cache)
    assert not adapter_cache.is_still_there(alpha)
    assert llm.llm_engine.remove_lora(1)
    assert llm.llm_engine.register_loras([LoRARequest("a", 1, url)]) == {}
    assert alpha.exists()
    # What is in use is told to others again, too.
    (users,) = (cache / ".users").iterdir()
    assert users.read_text().split() == [f"{alpha.parent.name}/{alpha.name}"]


def test_an_adapter_that_was_fetched_lies_where_adapters_may(
    place: Callable[[str], str], make_engine: Callable[..., LLM]
) -> None:
    llm = make_engine(lora_root=str(ADAPTERS))
    assert llm.llm_engine.add_lora(LoRARequest("a", 1, place("alpha")))
    with pytest.raises(AdapterError, match="lies outside"):
        llm.llm_engine.add_lora(LoRARequest("b", 2, place("beta").removeprefix("file://")))


@pytest.mark.usefixtures("hasty")
def test_fetching_and_removing_at_once(place: Callable[[str], str]) -> None:
    """Each fetch finds or makes a whole folder, whatever is removed before and after."""
    urls = [place(adapter) for adapter in ("alpha", "beta", "gamma")]
    broken: list[Path] = []
    is_over = threading.Event()

    def fetch(url: str) -> None:
        while not is_over.is_set():
            with adapter_cache.left_alone():
                folder = sources.fetch_adapter(url, "a")
                whole = all(
                    (folder / file).stat().st_size == os.path.getsize(url[7:] + f"/{file}")
                    for file in (CONFIG, TENSORS)
                )
                if not whole:
                    broken.append(folder)

    threads = [threading.Thread(target=fetch, args=[url]) for url in urls]
    for thread in threads:
        thread.start()
    for _ in range(200):
        adapter_cache.prune(1)
    is_over.set()
    for thread in threads:
        thread.join()
    assert broken == []
