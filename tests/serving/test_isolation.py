"""What goes wrong with one adapter is that adapter's alone; what changes, changes at one moment."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ADAPTERS, ORACLE, PROMPT, StartServer, events
from .test_metrics import Page

ON = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
MALFORMED = ORACLE / "malformed"


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def in_threads(call: Callable[[], None], count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_a_23_a_broken_adapter_and_a_deleted_one_fail_alone(start_server: StartServer, tmp_path: Path) -> None:
    beta = copy(ADAPTERS / "beta", tmp_path / "beta")
    broken = copy(MALFORMED / "nan", tmp_path / "broken")
    places = {"alpha": ADAPTERS / "alpha", "beta": beta, "gamma": ADAPTERS / "gamma", "broken": broken}
    modules = [f"{name}={place}" for name, place in places.items()]
    server = start_server("--max-loras", "2", "--max-cpu-loras", "2", "--lora-modules", *modules)
    # Known, and read by nobody yet: whatever is wrong inside shows at the first request.
    assert server.ids() == ["base", *places]
    expected = {name: server.text(name, max_tokens=400) for name in ("alpha", "beta", "gamma")}
    streams: list[str] = []
    first_tokens = threading.Semaphore(0)

    def stream() -> None:
        body = {
            "model": "alpha", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            text = ""
            for part in answer.iter_text():
                if not text:
                    first_tokens.release()
                text += part
        chunks = events(text)
        assert chunks.pop() is None
        streams.append("".join(chunk["choices"][0]["text"] for chunk in chunks))

    threads = in_threads(stream, 8)
    for _ in threads:
        first_tokens.acquire()
    for _ in range(4):
        refused = server.complete("broken")
        assert 400 <= refused.status_code < 500, refused.text
        message = refused.json()["error"]["message"]
        assert "broken" in message or "NaN" in message, message
    for thread in threads:
        thread.join()
    assert streams == [expected["alpha"]] * 8

    # Two others take beta's place; then its folder goes, and it cannot come back.
    assert [server.text(name, max_tokens=400) for name in ("gamma", "alpha")] == [expected["gamma"], expected["alpha"]]
    shutil.rmtree(beta)
    gone = server.complete("beta")
    assert 400 <= gone.status_code < 600
    assert "beta" in gone.json()["error"]["message"], gone.text
    assert [server.text(name, max_tokens=400) for name in ("gamma", "alpha")] == [expected["gamma"], expected["alpha"]]
    assert server.client.get("/health").status_code == 200
    # And when it is there again, it serves again.
    copy(ADAPTERS / "beta", beta)
    assert server.text("beta", max_tokens=400) == expected["beta"]


def test_a_26_a_replacement_over_http_is_read_once(start_server: StartServer, tmp_path: Path) -> None:
    folder = copy(ADAPTERS / "beta", tmp_path / "beta")
    copy(ADAPTERS / "alpha", tmp_path / "alpha")
    server = start_server(folder=tmp_path, **ON)
    assert server.load("x", "alpha").status_code == 200
    before = Page(server)
    assert server.load("x", "beta", load_inplace=True).status_code == 200
    replaced = server.text("x", max_tokens=220)
    after = Page(server)
    assert after.value("manylora:steps_total") - before.value("manylora:steps_total") >= 200
    reads = [page.value("manylora:adapter_load_seconds_count") for page in (before, after)]
    assert reads[1] - reads[0] == 1
    # There is nothing left that another read could find.
    shutil.rmtree(folder)
    assert server.text("x", max_tokens=220) == replaced


def test_a_27_corrupt_and_slow_replacements_leave_no_gap(start_server: StartServer, tmp_path: Path) -> None:
    copy(ADAPTERS / "alpha", tmp_path / "alpha")
    copy(MALFORMED / "truncated", tmp_path / "corrupt")
    make_slow(copy(ADAPTERS / "beta", tmp_path / "beta"))
    server = start_server(folder=tmp_path, **ON)
    assert server.load("y", "beta").status_code == 200
    assert server.load("x", "alpha").status_code == 200
    texts = {"alpha": server.text("x"), "beta": server.text("y")}
    assert texts["alpha"] != texts["beta"]
    answers: list[tuple[float, float, int, str]] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            sent = time.monotonic()
            answer = server.complete("x")
            text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
            answers.append((sent, time.monotonic(), answer.status_code, text))

    askers = in_threads(ask, 4)
    # What x was from when: (change begun, change told, its text).
    changes = [(0.0, 0.0, texts["alpha"])]
    for name in ("beta", "alpha", "beta"):
        refused = server.load("x", "corrupt", load_inplace=True)
        assert refused.status_code == 400
        assert "truncated" in refused.json()["error"]["message"], refused.text
        began = time.monotonic()
        assert server.load("x", name, load_inplace=True).status_code == 200
        changes.append((began, time.monotonic(), texts[name]))
        assert server.text("x") == texts[name]
    is_over.set()
    for thread in askers:
        thread.join()
    assert {status for _, _, status, _ in answers} == {200}
    for sent, answered, _, text in answers:
        before = [change for change in changes if change[1] <= sent]
        between = [change for change in changes if change[1] > sent and change[0] <= answered]
        assert text in {before[-1][2], *(change[2] for change in between)}
    # The old version did serve while the new one was read.
    assert any(began < sent and answered < told for sent, answered, _, _ in answers for began, told, _ in changes)


def make_slow(folder: Path) -> None:
    """Give an adapter a header that takes about a second to read."""
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = {f"note {number}": "x" for number in range(200_000)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize("broken", ["truncated", "nan", "wrong-arch", "empty-safetensors"])
def test_a_27_a_name_whose_replacement_failed_is_what_it_was(
    start_server: StartServer, tmp_path: Path, broken: str
) -> None:
    copy(ADAPTERS / "alpha", tmp_path / "alpha")
    copy(MALFORMED / broken, tmp_path / broken)
    server = start_server(folder=tmp_path, **ON)
    server.load("x", "alpha")
    version, text = server.client.get("/v1/models/x").json()["version"], server.text("x")
    assert server.load("x", broken, load_inplace=True).status_code == 400
    assert server.client.get("/v1/models/x").json()["version"] == version
    assert (server.ids(), server.text("x")) == (["base", "x"], text)
    assert json.loads(server.client.get("/v1/models/x").text)["root"] == "alpha"
