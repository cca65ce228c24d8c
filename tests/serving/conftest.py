"""A server in a process of its own, as a user starts it, on the oracle's tiny models."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ORACLE = Path(__file__).parent.parent / "oracle"
ADAPTERS = ORACLE / "llama" / "adapters"
PROMPT = [5, 40, 99, 7, 130]
# Adapters of the fleet that the page is shown.
MANY = 2000


# The numbers of Linux for giving up a capability, and for those of root to read what it may not.
PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2


def read_as_others_do() -> None:
    """Let the program that is run next read only what the files' modes allow, as root, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        if os.geteuid() == 0 and libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


class Server:
    """A running `manylora serve`."""

    def __init__(self, flags: list[str], folder: Path, environment: dict[str, str]):
        command = [sys.executable, "-m", "manylora", "serve", *flags]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "MANYLORA_A"))}
        self.process = subprocess.Popen(
            command, cwd=folder, env=inherited | environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            preexec_fn=read_as_others_do,
        )  # fmt: skip
        self.lines: list[str] = []
        listening = threading.Event()
        self.url = ""

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.lines.append(line)
                found = re.search(r"listening on (https?://[^\s\"]+)", line)
                if found:
                    self.url = found[1]
                    listening.set()
            listening.set()

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        listening.wait(60)
        self.client = httpx.Client(base_url=self.url or "http://127.0.0.1:1", timeout=60)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def complete(self, model: str | None = "base", /, **fields: Any) -> httpx.Response:
        defaults: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return self.post("/v1/completions", defaults | ({} if model is None else {"model": model}) | fields)

    def text(self, model: str = "base", /, **fields: Any) -> str:
        answer = self.complete(model, **fields)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def load(self, name: str, path: str | Path, **fields: Any) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **fields})

    def unload(self, name: str, **fields: Any) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name, **fields})

    def ids(self) -> list[str]:
        return [model["id"] for model in self.client.get("/v1/models").json()["data"]]

    def stop(self, patience: float = 20) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience)

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join(5)


def events(text: str) -> list[Any]:
    """The events of a stream; the last one of a good stream is None."""
    parsed = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            parsed.append(None if data == "[DONE]" else json.loads(data))
    return parsed


StartServer = Callable[..., Server]


def server_flags(*flags: str, base: str = "llama") -> list[str]:
    return [
        base if os.sep in base else str(ORACLE / base / "base"), "--device", "cpu", "--dtype", "float32", "--port", "0",
        "--served-model-name", "base", "--max-lora-rank", "64", "--kv-cache-memory-bytes", str(32 << 20), *flags,
    ]  # fmt: skip


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start servers; they are stopped after the test."""
    servers: list[Server] = []

    def start(*flags: str, base: str = "llama", folder: Path = ADAPTERS, **environment: str) -> Server:
        server = Server(server_flags(*flags, base=base), folder, environment)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for tests that change nothing: the adapters alpha and beta, nothing to manage."""
    modules = ["--lora-modules", f"alpha={ADAPTERS / 'alpha'}", f"beta={ADAPTERS / 'beta'}"]
    server = Server(server_flags(*modules), ADAPTERS, {})
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium, for the tests of the page; only they need what drives it."""
    from playwright.sync_api import sync_playwright

    from .browser import launch

    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of alpha, beta and 2,000 adapters more, which can be managed from this machine."""
    manifest = tmp_path_factory.mktemp("fleet") / "fleet.json"
    names = [f"tenant-{number:04d}" for number in range(MANY)]
    manifest.write_text(json.dumps([{"name": name, "path": str(ADAPTERS / "gamma")} for name in names]))
    modules = ("--lora-modules", f"alpha={ADAPTERS / 'alpha'}", f"beta={ADAPTERS / 'beta'}")
    flags = server_flags(*modules, "--lora-manifest", str(manifest), "--max-num-seqs", "32")
    server = Server(flags, ADAPTERS, {"MANYLORA_ALLOW_RUNTIME_LORA_UPDATING": "1"})
    server.text("alpha")
    server.text("beta")
    yield server
    server.close()
