"""Adapters that lie elsewhere: fetched where that is allowed, into a cache that is checked."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest

from manylora import sources
from manylora.exceptions import AdapterError, AdapterNotFoundError, HubError

from .conftest import ADAPTERS, Server, StartServer
from .test_logs import lines_with

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
ON = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYLORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def place() -> Iterator[str]:
    """A folder of fsspec's file system in memory, with one of the oracle's adapters."""
    memory = fsspec.filesystem("memory")
    put(memory, "alpha")
    yield "memory://bucket/adapter"
    memory.rm("/bucket", recursive=True)


def put(memory: fsspec.AbstractFileSystem, adapter: str) -> None:
    for file in (CONFIG, TENSORS):
        memory.pipe_file(f"/bucket/adapter/{file}", (ADAPTERS / adapter / file).read_bytes())


def same(folder: Path, adapter: str) -> bool:
    return all((folder / file).read_bytes() == (ADAPTERS / adapter / file).read_bytes() for file in (CONFIG, TENSORS))


def digest(adapter: str, file: str = TENSORS) -> str:
    return hashlib.sha256((ADAPTERS / adapter / file).read_bytes()).hexdigest()


def test_what_was_fetched_is_kept_and_checked(place: str, cache: Path) -> None:
    folder = sources.fetch_adapter(place, "a")
    assert same(folder, "alpha")
    assert cache in folder.parents
    assert sources.fetch_adapter(place + "/", "a") == folder
    # A file in the cache that is not what arrived is not used.
    (folder / TENSORS).write_bytes(b"something else")
    again = sources.fetch_adapter(place, "a")
    assert same(again, "alpha")
    # Nothing half is left.
    assert not list(cache.rglob(".arriving-*"))


def test_other_content_gets_a_folder_of_its_own(place: str) -> None:
    before = sources.fetch_adapter(place, "a")
    put(fsspec.filesystem("memory"), "beta")
    after = sources.fetch_adapter(place, "a")
    assert before != after
    assert same(before, "alpha")
    assert same(after, "beta")


def test_digests_of_both_files_stand_for_one_content(place: str) -> None:
    pinned = f"{place}#sha256={digest('alpha')}&config={digest('alpha', CONFIG)}"
    folder = sources.fetch_adapter(pinned, "a")
    for wrong in (f"{digest('beta')}&config={digest('alpha', CONFIG)}", f"{digest('alpha')}&config={'0' * 64}"):
        with pytest.raises(AdapterError, match="was asked for"):
            sources.fetch_adapter(f"{place}#sha256={wrong}", "a")
    # Nobody is asked for what is there.
    put(fsspec.filesystem("memory"), "beta")
    assert sources.fetch_adapter(pinned, "a") == folder
    (folder / TENSORS).write_bytes(b"something else")
    with pytest.raises(AdapterError, match=digest("beta", CONFIG)):
        sources.fetch_adapter(pinned, "a")
    for wrong in ("sha256=12", "sha1=" + "0" * 40, "main", f"config={'0' * 64}", f"sha256={'0' * 64}&config=1"):
        with pytest.raises(HubError, match=f"#{wrong}"):
            sources.fetch_adapter(f"{place}#{wrong}", "a")


def test_a_digest_of_the_tensors_never_stands_for_two_adapters(place: str) -> None:
    memory = fsspec.filesystem("memory")
    pinned = f"{place}#sha256={digest('alpha')}"
    folder = sources.fetch_adapter(pinned, "a")
    assert same(folder, "alpha")
    assert sources.fetch_adapter(pinned, "a") == folder
    with pytest.raises(AdapterError, match=digest("alpha")):
        sources.fetch_adapter(f"{place}#sha256={digest('beta')}", "a")
    # The same tensors, twice as strong: what the URL stood for is not what it would stand for now.
    config = json.loads((ADAPTERS / "alpha" / CONFIG).read_text())
    memory.pipe_file(
        f"/bucket/adapter/{CONFIG}", json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}).encode()
    )
    for _ in range(2):
        with pytest.raises(AdapterError, match="with more than one") as refused:
            sources.fetch_adapter(pinned, "a")
    # It is told how to say which.
    before = f"#sha256={digest('alpha')}&config={digest('alpha', CONFIG)}"
    assert before in str(refused.value)
    assert sources.fetch_adapter(place + before, "a") == folder
    # Not even where the place has the first again.
    put(memory, "alpha")
    with pytest.raises(AdapterError, match="more than one"):
        sources.fetch_adapter(pinned, "a")


def test_what_cannot_be_fetched_says_why(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").rm(f"/bucket/adapter/{TENSORS}")
    with pytest.raises(AdapterNotFoundError, match=TENSORS):
        sources.fetch_adapter(place, "a")
    with pytest.raises(HubError, match="nosuch"):
        sources.fetch_adapter("nosuch://bucket/a", "a")

    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(HubError, match="Install s3fs to access S3"):
        sources.fetch_adapter("s3://bucket/a", "a")


class Quiet(http.server.SimpleHTTPRequestHandler):
    waiting: ClassVar[list[str]] = []
    together = threading.Event()

    def do_GET(self) -> None:
        if self.path.startswith("/together/") and not self.together.is_set():
            # The first ones are not answered before a few wait at the same time.
            self.waiting.append(self.path)
            if len(self.waiting) == 4:
                self.together.set()
            self.together.wait(20)
        if self.path.startswith("/adapters/moved/"):
            self.send_response(302)
            self.send_header("Location", self.path.replace("adapters/moved", "private/beta"))
            self.end_headers()
        else:
            super().do_GET()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server, and the folder that it shows."""
    folder = tmp_path / "site"
    shutil.copytree(ADAPTERS / "alpha", folder / "adapters" / "alpha")
    shutil.copytree(ADAPTERS / "beta", folder / "private" / "beta")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", folder
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def served(start_server: StartServer, site: tuple[str, Path], tmp_path: Path, cache: Path) -> Server:
    place = f"{site[0]}/adapters"
    return start_server("--lora-sources", place, folder=tmp_path, MANYLORA_CACHE=str(cache), **ON)


def test_a_48_only_what_lies_below_a_source_is_fetched(served: Server, site: tuple[str, Path]) -> None:
    url = site[0]
    done = served.load("alpha", f"{url}/adapters/alpha")
    assert done.status_code == 200, done.text
    assert [model["root"] for model in served.client.get("/v1/models").json()["data"]][1:] == [f"{url}/adapters/alpha"]
    assert served.text("alpha") != served.text()
    for wrong in (
        f"{url}/private/beta", f"{url}/adapters/../private/beta", f"{url}/adapters/%2e%2e/private/beta", "s3://b/a",
        "hf://owner/name", f"file://{ADAPTERS}/beta", f"simplecache::{url}/adapters/alpha",
        f"{url}/adapters/alpha?x",
    ):  # fmt: skip
        refused = served.load("beta", wrong)
        assert refused.status_code == 403, (wrong, refused.text)
        assert "lora_path" in refused.json()["error"]["message"]
    # One that leads elsewhere is not followed.
    moved = served.load("beta", f"{url}/adapters/moved")
    assert moved.status_code == 400
    assert "leads on to another place" in moved.json()["error"]["message"]
    # A hub id is no path below the root, and the hub is no source.
    assert served.load("beta", "owner/name").status_code == 404
    missing = served.load("beta", f"{url}/adapters/nobody")
    assert missing.status_code == 404
    assert f"{url}/adapters/nobody" in missing.json()["error"]["message"]
    pinned = served.load("beta", f"{url}/adapters/alpha#sha256={digest('beta')}")
    assert pinned.status_code == 400
    assert served.ids() == ["base", "alpha"]
    assert served.load("beta", f"{url}/adapters/alpha#sha256={digest('alpha')}").status_code == 200


def test_what_has_changed_is_fetched_again_and_replaces(served: Server, site: tuple[str, Path]) -> None:
    url, folder = site
    assert served.load("one", f"{url}/adapters/alpha").status_code == 200
    alpha = served.text("one")
    shutil.rmtree(folder / "adapters" / "alpha")
    shutil.copytree(ADAPTERS / "beta", folder / "adapters" / "alpha")
    for file in (CONFIG, TENSORS):
        # Web servers tell times in seconds.
        os.utime(folder / "adapters" / "alpha" / file, (1e9, 1e9))
    # Nothing changes unasked.
    assert served.text("one") == alpha
    assert served.load("one", f"{url}/adapters/alpha", load_inplace=True).status_code == 200
    assert served.text("one") != alpha


def test_the_hub_is_not_this_machine(start_server: StartServer, tmp_path: Path, cache: Path) -> None:
    """Names that are hub ids and folders of this machine, too, stand for the hub."""
    root, home = tmp_path / "root", tmp_path / "home"
    root.mkdir()
    for place in ("secret/alpha", "beta"):
        shutil.copytree(ADAPTERS / "alpha", home / place)
    flags = ("--lora-root", str(root), "--lora-sources", "hf://")
    server = start_server(*flags, folder=home, HOME=str(home), HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(cache), **ON)
    for given, status in (
        ("hf://~/beta", 403), ("hf://secret", 403), ("hf://secret/alpha/x", 403), ("~/beta", 404), ("beta", 404),
        ("hf://secret/alpha", 400), ("secret/alpha", 400),
    ):  # fmt: skip
        refused = server.load("x", given)
        assert refused.status_code == status, (given, refused.text)
    assert "the hub cannot be reached" in server.load("x", "secret/alpha").json()["error"]["message"]


def test_urls_with_secrets_are_refused(place: str) -> None:
    for url in ("https://user:hush@host/a", "s3://bucket/a?signature=hush", "https://hush@host/a"):
        with pytest.raises(HubError, match="credentials or a query") as refused:
            sources.fetch_adapter(url, "a")
        assert "hush" not in str(refused.value)
    for url in ("hf://~/a", "hf://one", "hf://a/b/c", "hf://../a"):
        with pytest.raises(HubError, match="not hf://owner/name"):
            sources.fetch_adapter(url, "a")


def test_many_may_fetch_one_adapter_at_once(place: str, cache: Path) -> None:
    memory = fsspec.filesystem("memory")
    found: list[bool] = []

    def fetch() -> None:
        for _ in range(20):
            folder = sources.fetch_adapter(place, "a")
            found.append(not folder.name.startswith(".") and same(folder, "alpha"))

    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        # The same content, newer.
        put(memory, "alpha")
    for thread in threads:
        thread.join()
    assert found == [True] * 120


def test_nothing_is_fetched_unless_that_is_allowed(start_server: StartServer, site: tuple[str, Path]) -> None:
    server = start_server(folder=ADAPTERS, **ON)
    refused = server.load("alpha", f"{site[0]}/adapters/alpha")
    assert refused.status_code == 403
    assert "--lora-sources" in refused.json()["error"]["message"]


def test_the_operators_own_adapters_may_lie_anywhere(
    start_server: StartServer, site: tuple[str, Path], tmp_path: Path, cache: Path
) -> None:
    manifest = tmp_path / "adapters.json"
    manifest.write_text(json.dumps([{"name": "beta", "path": f"{site[0]}/private/beta"}]))
    flags = ("--lora-modules", f"alpha={site[0]}/adapters/alpha", "--lora-manifest", str(manifest))
    server = start_server(*flags, folder=tmp_path, MANYLORA_CACHE=str(cache))
    assert server.ids() == ["base", "alpha", "beta"]
    assert len({server.text(name) for name in ("base", "alpha", "beta")}) == 3


def test_what_a_manifest_names_is_fetched_some_at_a_time(
    start_server: StartServer, site: tuple[str, Path], tmp_path: Path, cache: Path
) -> None:
    url, folder = site
    names = [f"a{number:02}" for number in range(13)]
    for name in names:
        shutil.copytree(ADAPTERS / "alpha", folder / "together" / name)
    manifest = tmp_path / "adapters.json"
    entries = [{"name": name, "path": f"{url}/together/{name}"} for name in names]
    # Nearby ones among them.
    entries[3]["path"] = str(ADAPTERS / "beta")
    manifest.write_text(json.dumps(entries))
    flags = ("--lora-manifest", str(manifest))
    server = start_server(*flags, folder=tmp_path, MANYLORA_CACHE=str(cache))
    assert server.ids() == ["base", *names], server.log
    assert len(set(Quiet.waiting[:4])) == 4
    assert server.text("a03") != server.text("a04") == server.text("a12")
    assert "13 adapters registered" in server.log
    server.close()
    # All that is wrong is told at once, in the order of the manifest.
    entries[7]["path"] = f"{url}/nowhere"
    entries[2]["path"] = f"{url}/adapters/alpha#sha256={digest('beta')}"
    manifest.write_text(json.dumps(entries))
    server = start_server(*flags, folder=tmp_path, MANYLORA_CACHE=str(cache))
    assert server.process.wait(30) == 2
    told = server.log
    assert "2 adapters cannot be served:" in told
    assert told.index("a02") < told.index(digest("beta")) < told.index(f"{url}/nowhere")
    assert "`a03`" not in told


def test_a_server_keeps_the_cache_to_its_bound(
    start_server: StartServer, site: tuple[str, Path], tmp_path: Path, cache: Path
) -> None:
    alpha, beta = f"{site[0]}/adapters/alpha", f"{site[0]}/private/beta"
    flags = ("--lora-sources", site[0] + "/adapters", site[0] + "/private", "--lora-cache-bytes", "1")
    more: dict[str, Any] = {"folder": tmp_path, "MANYLORA_CACHE": str(cache), **ON}
    first = start_server(*flags, **more)
    assert first.load("alpha", alpha).status_code == 200
    second = start_server(*flags, **more)
    assert second.load("beta", beta).status_code == 200
    # Each has its own.
    lines_with(second, "what is left is in use")
    assert "removed `" not in first.log + second.log
    expected = first.text("alpha"), second.text("beta")
    assert first.stop() == 0
    third = start_server(*flags, "--lora-modules", f"beta={beta}", **more)
    assert third.ids() == ["base", "beta"]
    lines_with(third, "removed `")
    assert third.log.count("removed `") == 1
    assert third.load("alpha", alpha).status_code == 200
    assert (third.text("alpha"), third.text("beta")) == expected
    assert second.text("beta") == expected[1]


@pytest.mark.parametrize("given", ["bucket/x", "https://", "s3://b/../c"])
def test_a_source_that_says_too_little_ends_the_start(start_server: StartServer, tmp_path: Path, given: str) -> None:
    server = start_server("--lora-sources", given, folder=tmp_path, **ON)
    assert server.process.wait(20) == 2
    assert f"lora_sources: `{given}`" in server.log
