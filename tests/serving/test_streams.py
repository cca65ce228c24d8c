"""What a stream is bound to, how it ends when something goes wrong, and what is left when its reader goes away."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from manylora.bench.measure import EventReader

from .conftest import ADAPTERS, PROMPT, Server, StartServer, events
from .test_metrics import Page

ON = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
MESSAGES = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 480, "temperature": 0, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def opened(server: Server, path: str = "/v1/completions", **fields: Any) -> Iterator[Reading]:
    with server.client.stream("POST", path, json=fields) as answer:
        assert answer.status_code == 200, answer.read()
        yield Reading(answer)


class Reading:
    """A stream, read event by event."""

    def __init__(self, answer: Any):
        self.headers = answer.headers
        reader = EventReader()
        self.data = (data for part in answer.iter_bytes() for data in reader.feed(part))

    def next(self) -> Any:
        """The next event."""
        return json.loads(next(self.data))

    def rest(self) -> list[Any]:
        """The events that are left; the last one of a good stream is None."""
        return [None if data == "[DONE]" else json.loads(data) for data in self.data]


def counted(answer: Any) -> tuple[int, ...]:
    """Its usage, but for what was found in the cache."""
    return tuple(answer["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_57_the_binding_is_fixed_before_the_stream_is_read(start_server: StartServer, path: str) -> None:
    server = start_server(**ON)
    for name in ("x", "alpha"):
        server.load(name, "alpha")
    prompt: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": PROMPT}
    # So much that it still runs when its name changes.
    asked = prompt | {"max_tokens": 400, "temperature": 0.9, "seed": 7, "ignore_eos": True, "n": 32}
    expected = server.post(path, asked | {"model": "alpha"}).json()
    version = server.client.get("/v1/models/x").json()["version"]

    def texts(choices: list[Any]) -> list[str]:
        told = [""] * 32
        for choice in choices:
            part = choice.get("message") or choice.get("delta") or choice
            told[choice["index"]] += part.get("content" if "chat" in path else "text") or ""
        return told

    fields = {"stream": True, "stream_options": {"include_usage": True}}
    with opened(server, path, **asked, **fields, model="x") as unread:
        # Admitted; not read for a second, while its name gets other content.
        assert server.load("x", "beta", load_inplace=True).status_code == 200
        time.sleep(1)
        chunks = unread.rest()
    assert unread.headers["x-manylora-adapter-version"] == version
    assert server.client.get("/v1/models/x").json()["version"] != version
    assert chunks.pop() is None
    assert counted(chunks.pop()) == counted(expected)
    assert texts([choice for chunk in chunks for choice in chunk["choices"]]) == texts(expected["choices"])
    after = server.post(path, asked | {"model": "x"}).json()
    assert texts(after["choices"]) != texts(expected["choices"])


@pytest.mark.parametrize("model", ["base", "alpha"])
@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 0.8, "seed": 5}, {"echo": True}, {"stop": ["\n", "e"]}])
def test_a_57_streams_and_answers_agree(server: Server, model: str, fields: dict[str, Any]) -> None:
    asked = {"prompt": ["hello", "many adapters"], "max_tokens": 20, "logprobs": 1, **fields}
    whole = server.complete(model, **asked).json()
    *chunks, usage, done = events(
        server.complete(model, **asked, stream=True, stream_options={"include_usage": True}).text
    )
    assert done is None
    assert counted(usage) == counted(whole)
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        listed = [one for part in parts for one in (part["logprobs"] or {"token_logprobs": []})["token_logprobs"]]
        assert listed == choice["logprobs"]["token_logprobs"]


def test_a_57_a_failure_in_mid_stream_is_an_error_and_no_end(start_server: StartServer, tmp_path: Path) -> None:
    """Of a request's prompts one streams at a time; its adapter cannot be had any more when the next one's turn is."""
    beta = Path(shutil.copytree(ADAPTERS / "beta", tmp_path / "beta"))
    modules = [f"beta={beta}", f"gamma={ADAPTERS / 'gamma'}"]
    server = start_server(
        "--max-num-seqs", "1", "--max-loras", "1", "--max-cpu-loras", "1", "--lora-modules", *modules
    )  # fmt: skip
    gamma = server.text("gamma", max_tokens=400)
    expected = server.text("beta", max_tokens=480)
    with opened(server, **(LONG | {"model": "beta", "prompt": [PROMPT] * 64})) as stream:
        chunks = [stream.next() for _ in range(3)]
        # Between two prompts the adapter gives its place to another one; its folder is gone by then.
        shutil.rmtree(beta)
        answers: list[str] = []
        other = threading.Thread(target=lambda: answers.append(server.text("gamma", max_tokens=400)))
        other.start()
        chunks += stream.rest()
    other.join()
    assert answers == [gamma]
    error = chunks.pop()["error"]
    assert "beta" in error["message"], error
    assert error["code"] >= 400
    # Those that came before are whole, and what failed did not stop.
    by_prompt: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            by_prompt.setdefault(choice["index"], []).append(choice)
    assert 1 <= len(by_prompt) < 64
    for choices in by_prompt.values():
        assert "".join(choice["text"] for choice in choices) == expected
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert server.text("gamma", max_tokens=400) == gamma
    assert server.client.get("/load").json() == {"server_load": 0}


def test_a_57_an_unload_that_aborts_says_so_in_the_stream(start_server: StartServer) -> None:
    server = start_server("--max-num-seqs", "1", **ON)
    server.load("alpha", "alpha")
    with opened(server, **(LONG | {"model": "alpha", "prompt": [PROMPT] * 32})) as stream:
        chunks = [stream.next() for _ in range(3)]
        assert server.unload("alpha", mode="abort").status_code == 200
        chunks += stream.rest()
    reasons = [choice["finish_reason"] for chunk in chunks if chunk for choice in chunk["choices"]]
    ends = [reason for reason in reasons if reason]
    assert len(ends) == 32
    assert "abort" in ends
    assert set(ends) <= {"abort", "length"}


def test_a_57_a_server_that_stops_for_good_ends_no_stream_as_if_it_were_whole(start_server: StartServer) -> None:
    server = start_server("--shutdown-timeout", "0")
    text = ""
    with server.client.stream("POST", "/v1/completions", json=LONG | {"prompt": [PROMPT] * 64}) as answer:
        parts = answer.iter_text()
        text += next(parts)
        assert server.stop() == 0
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            for part in parts:
                text += part
    assert "[DONE]" not in text
    assert '"finish_reason":"stop"' not in text


@pytest.mark.parametrize("prompts", [1, 6])
def test_a_57_a_client_that_leaves_frees_rows_blocks_and_adapter(start_server: StartServer, prompts: int) -> None:
    server = start_server("--max-num-seqs", "4", **ON)
    server.load("alpha", "alpha")
    idle = Page(server)
    assert idle.value("manylora:kv_blocks_free") == idle.value("manylora:kv_blocks")
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(LONG | {"model": "alpha", "prompt": [PROMPT] * prompts, "max_tokens": 500}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    for _ in range(5):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        received = b""
        while received.count(b"data: ") < 2:
            received += connection.recv(4096)
        connection.close()
        # Its lease is gone: nobody holds the adapter.
        assert server.unload("alpha", timeout=5).status_code == 200
        assert server.load("alpha", "alpha").status_code == 200
    deadline = time.monotonic() + 10
    while (page := Page(server)).value("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert page.value("vllm:num_requests_running") == page.value("vllm:num_requests_waiting") == 0
    assert page.value("manylora:kv_blocks_free") == page.value("manylora:kv_blocks")
    assert page.by_adapter("manylora:adapter_requests_total", finished_reason="stop") == {}
    assert server.text("alpha")
