"""Many adapters without many flags: a manifest, and a folder that is looked into at first use."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from manylora.engine import read_manifest

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
    (root / "latest").symlink_to(root / "alpha")
    (root / "circle").symlink_to(root)
    (root / "team" / "up").symlink_to(root)
    return root


def test_a_28_adapters_are_found_at_first_use(start_server: StartServer, root: Path) -> None:
    server = start_server("--lora-resolve-root", str(root))
    assert server.ids() == ["base"]
    alpha = server.text("alpha")
    assert alpha != server.text("base")
    assert server.text("team/beta") not in (alpha, server.text("base"))
    assert server.text("no-base") == alpha
    assert server.text("latest") == alpha
    known = ["base", "alpha", "team/beta", "no-base", "latest"]
    assert server.ids() == known
    for name in (
        "empty", "missing", "../outside", "/etc", ".", "..", "alpha/..", "link", str(root / "alpha"),
        # Further ways to write a name that is one already, without end.
        "team//beta", "team/./beta", "./alpha", "alpha/", "alpha//", "alpha/.", "team/beta/", "circle/alpha",
        "circle/circle/alpha", "team/up/alpha",
    ):  # fmt: skip
        answer = server.complete(name)
        assert answer.status_code == 404, (name, answer.text)
        assert f"The model `{name}` does not exist" in answer.json()["error"]["message"]
    assert server.ids() == known
    for name, told in (("untyped", "peft_type"), ("written", "written")):
        answer = server.complete(name)
        assert answer.status_code == 400, (name, answer.text)
        message = answer.json()["error"]["message"]
        assert f"LoRA adapter '{name}' was found but could not be loaded." in message
        assert told in message
        assert str(root) not in message
    # Whole by now: found without a restart.
    shutil.copy(ADAPTERS / "beta" / "adapter_model.safetensors", root / "written")
    deadline = time.monotonic() + 20
    while server.complete("written").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.text("written") == server.text("team/beta")


def test_all_ways_to_name_an_adapter_find_it(start_server: StartServer, root: Path) -> None:
    reference = start_server("--lora-modules", f"alpha={root / 'alpha'}", f"beta={root / 'team' / 'beta'}")
    both = [{"id": "alpha"}, {"id": "beta", "scale": 0.5}]
    alpha, beta, mixed = reference.text("alpha"), reference.text("beta"), reference.text("base", lora=both)
    assert len({alpha, beta, mixed, reference.text("base")}) == 4
    reference.close()
    server = start_server("--lora-resolve-root", str(root))
    assert server.text("base:alpha") == alpha
    assert server.text("base", lora=[{"id": "alpha"}, {"id": "team/beta", "scale": 0.5}]) == mixed
    assert server.text("base:team/beta") == beta
    # Each is found under its own name, and no other.
    assert server.ids() == ["base", "alpha", "team/beta"]
    for model, more in (("base:nobody", {}), ("base", {"lora": [{"id": "nobody"}]}), ("base:alpha/", {})):
        assert server.complete(model, **more).status_code == 404
    many = server.complete("base", lora=[{"id": f"a{number}"} for number in range(65)])
    assert many.status_code == 400
    assert "`65`" in many.json()["error"]["message"]


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
    begun = time.monotonic()
    assert len(read_manifest(manifest)) == 2000
    seconds = time.monotonic() - begun
    registered = re.search(r"2000 adapters registered in ([0-9.]+) s", server.log)
    assert registered, server.log
    # Both together may take a second; a machine that does much else at the time has twenty.
    assert seconds + float(registered[1]) < 20
    assert len(server.ids()) == 2001
    # Nothing of their tensors is known yet, and nothing is resident.
    models = server.client.get("/v1/models").json()["data"][1:]
    assert all(model["version"] is None for model in models)
    reads = [
        line for line in server.client.get("/metrics").text.splitlines() if "lora_adapter_load_seconds_count" in line
    ]
    assert [float(line.rsplit(" ", 1)[1]) for line in reads] == [0]
    assert server.text("tenant-1999") == server.text("tenant-1") != server.text("tenant-0")


def test_a_23_what_cannot_be_read_any_more_is_told_as_at_a_load(start_server: StartServer, tmp_path: Path) -> None:
    """Registered without a look at the tensors; at the first use something is wrong with them."""
    names = ("gone", "locked", "cut", "good")
    for name in names:
        shutil.copytree(ADAPTERS / "alpha", tmp_path / name)
    manifest = tmp_path / "adapters.json"
    manifest.write_text(json.dumps([{"name": name, "path": name} for name in names]))
    server = start_server("--lora-manifest", str(manifest), folder=tmp_path, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    shutil.rmtree(tmp_path / "gone")
    (tmp_path / "locked" / "adapter_model.safetensors").chmod(0)
    tensors = tmp_path / "cut" / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-8])
    for name, status, kind in (
        ("gone", 404, "NotFoundError"), ("locked", 403, "PermissionDeniedError"), ("cut", 400, "BadRequestError"),
    ):  # fmt: skip
        for stream in (False, True):
            answer = server.complete(name, stream=stream)
            assert answer.status_code == status, (name, answer.text)
            error = answer.json()["error"]
            assert (error["type"], error["param"]) == (kind, "model")
            # Users learn which adapter it is, and not where it lies.
            assert name in error["message"]
            assert str(tmp_path) not in error["message"]
        assert server.load(f"{name}-again", name).status_code == status
    assert server.text("good") != server.text("base")


def test_a_wrong_manifest_aborts_the_start(start_server: StartServer, tmp_path: Path) -> None:
    manifest = tmp_path / "adapters.yaml"
    manifest.write_text("- {name: a}")
    server = start_server("--lora-manifest", str(manifest))
    assert server.process.wait(30) == 2
    assert "must have a `name`, a `path`" in server.log
