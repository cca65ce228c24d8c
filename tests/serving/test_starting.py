"""Starting and stopping: flags, refusals, an orderly end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2 as httpx
import pytest

from .conftest import ADAPTERS, ORACLE, StartServer

BASE = str(ORACLE / "llama" / "base")


def serve(*flags: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manylora", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)


@pytest.mark.parametrize(
    ("flags", "status", "told"),
    [
        ((), 2, "give the base"),
        ((BASE, "--lora-modules", "alpha"), 2, "neither NAME=PATH nor JSON"),
        ((BASE, "--lora-modules", "=x"), 2, "must be NAME=PATH"),
        ((BASE, "--lora-modules", '{"name": "x"}'), 2, "`name` and `path`"),
        ((BASE, "--lora-modules", "a=x", "a=y"), 2, "given twice"),
        ((BASE, "--port", "99999"), 2, "0 to 65535"),
        ((BASE, "--no-such-flag"), 2, "--no-such-flag"),
        ((BASE, "--lora-modules", "a=/nowhere"), 2, "/nowhere"),
        ((BASE, "--tensor-parallel-size", "2"), 2, "tensor_parallel_size"),
        ((BASE, "--admin-api-key", "k", "--api-key", "k"), 2, "two keys"),
        ((BASE, "--host", "256.1.1.1"), 2, "could not listen on"),
        (("/nowhere/at-all",), 2, "/nowhere/at-all"),
    ],
)
def test_what_cannot_start_says_why(flags: tuple[str, ...], status: int, told: str) -> None:
    done = serve(*flags)
    assert done.returncode == status, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_static_module_aborts_the_start(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}))
    done = serve(BASE, "--device", "cpu", "--lora-modules", f"empty={tmp_path}")
    assert done.returncode == 2
    assert "`empty`" in done.stderr
    assert "Traceback" not in done.stderr


def test_c_24_modules_as_pairs_and_json(start_server: StartServer) -> None:
    module = json.dumps({"name": "b=eta", "path": str(ADAPTERS / "beta"), "base_model_name": "base"})
    server = start_server("--lora-modules", f"alpha={ADAPTERS / 'alpha'}", module, "")
    assert server.ids() == ["base", "alpha", "b=eta"]
    assert server.complete("b=eta").status_code == 200


def test_served_names_are_aliases(start_server: StartServer) -> None:
    server = start_server("--served-model-name", "one", "two")
    assert server.ids() == ["one", "two"]
    assert server.text("one") == server.text("two")
    assert server.complete("two").json()["model"] == "two"
    assert server.complete("base").json()["error"]["message"].endswith("Valid aliases: one, two.")


def test_a_taken_port_is_named(start_server: StartServer) -> None:
    server = start_server()
    port = server.url.rsplit(":", 1)[1]
    done = serve(BASE, "--device", "cpu", "--port", port)
    assert done.returncode == 2
    assert f"could not listen on 127.0.0.1:{port}" in done.stderr


def test_who_comes_while_the_model_loads_is_told_to_come_back(start_server: StartServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    template = tmp_path / "template.jinja"
    # The start waits for what is in it.
    os.mkfifo(template)
    told: list[httpx.Response] = []

    def ask_and_let_go_on() -> None:
        while not told:
            try:
                told.append(httpx.get(f"http://127.0.0.1:{port}/health"))
            except httpx.ConnectError:
                time.sleep(0.02)
        template.write_text("{{ messages[0]['content'] }}")

    thread = threading.Thread(target=ask_and_let_go_on)
    thread.start()
    server = start_server("--port", str(port), "--chat-template", str(template))
    thread.join()
    assert (told[0].status_code, told[0].headers["retry-after"]) == (503, "5")
    assert told[0].json()["error"]["message"] == "the model is being loaded; try again in a moment"
    assert server.client.get("/health").status_code == 200
