"""Many adapters without many flags: a manifest, and a folder that is looked into at first use."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from .conftest import ADAPTERS, StartServer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with good adapters, and with what is none."""
    root = tmp_path / "root"
    shutil.copytree(ADAPTERS / "alpha", root / "alpha")
    shutil.copytree(ADAPTERS / "beta", root / "team" / "beta")
    (root / "empty").mkdir()
    for name, change in (("untyped", {"peft_type": None}), ("no-base", {"base_model_name_or_path": None})):
        shutil.copytree(ADAPTERS / "alpha", root / name)
        file = root / name / "adapter_config.json"
        config = json.loads(file.read_text()) | change
        file.write_text(json.dumps({key: value for key, value in config.items() if key != "peft_type" or value}))
    (root / "written").mkdir()
    shutil.copy(ADAPTERS / "beta" / "adapter_config.json", root / "written")
    shutil.copytree(ADAPTERS / "gamma", tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    return root


def test_a_28_adapters_are_found_at_first_use(start_server: StartServer, root: Path) -> None:
    server = start_server("--lora-resolve-root", str(root))
    assert server.ids() == ["base"]
    alpha = server.text("alpha")
    assert alpha != server.text("base")
    assert server.text("team/beta") not in (alpha, server.text("base"))
    assert server.text("no-base") == alpha
    assert server.ids() == ["base", "alpha", "team/beta", "no-base"]
    for name in ("empty", "missing", "../outside", "/etc", ".", "..", "alpha/..", "link", str(root / "alpha")):
        answer = server.complete(name)
        assert answer.status_code == 404, (name, answer.text)
        assert f"The model `{name}` does not exist" in answer.json()["error"]["message"]
    for name, told in (("untyped", "peft_type"), ("written", "written")):
        answer = server.complete(name)
        assert answer.status_code == 400, (name, answer.text)
        message = answer.json()["error"]["message"]
        assert f"LoRA adapter '{name}' was found but could not be loaded." in message
        assert told in message
    # Whole by now: found without a restart.
    shutil.copy(ADAPTERS / "beta" / "adapter_model.safetensors", root / "written")
    deadline = time.monotonic() + 20
    while server.complete("written").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.text("written") == server.text("team/beta")


def test_a_24_first_uses_at_once_are_one_adapter(start_server: StartServer, root: Path) -> None:
    server = start_server(MANYLORA_LORA_RESOLVER_CACHE_DIR=str(root))
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(server.text("alpha"))) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 40
    assert len(set(texts)) == 1
    assert server.ids() == ["base", "alpha"]


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_manifest_names_thousands(start_server: StartServer, tmp_path: Path, kind: str) -> None:
    shutil.copytree(ADAPTERS / "alpha", tmp_path / "alpha")
    shutil.copytree(ADAPTERS / "beta", tmp_path / "beta")
    entries = [{"name": f"tenant-{number}", "path": ("alpha", "beta")[number % 2]} for number in range(2000)]
    manifest = tmp_path / f"adapters.{kind}"
    lines = [f"- {{name: {entry['name']}, path: {entry['path']}}}" for entry in entries]
    manifest.write_text("\n".join(lines) if kind == "yaml" else json.dumps(entries))
    server = start_server("--lora-manifest", str(manifest))
    assert len(server.ids()) == 2001
    assert server.text("tenant-1999") == server.text("tenant-1") != server.text("tenant-0")


def test_a_wrong_manifest_aborts_the_start(start_server: StartServer, tmp_path: Path) -> None:
    manifest = tmp_path / "adapters.yaml"
    manifest.write_text("- {name: a}")
    server = start_server("--lora-manifest", str(manifest))
    assert server.process.wait(30) == 1
    assert "must have a `name`, a `path`" in server.log
