"""Requests that would take more than their share of memory or time: refused, and nobody else is held up."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from .conftest import ADAPTERS, PROMPT, Server, StartServer
from .test_bad_requests import HEAD, JSON, connect, wait_for_no_load
from .test_metrics import Page

MIB = 1 << 20
# What a server may take beyond what it has, whatever comes: room for the bodies, and for what is made of them.
SPARE = 400 * MIB


def peak(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def message(answer: httpx.Response) -> str:
    text: str = answer.json()["error"]["message"]
    return text


@contextlib.contextmanager
def asking(server: Server) -> Iterator[list[float]]:
    """Ask for short answers all the time; what comes out is how long each took."""
    took: list[float] = []
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not is_over.is_set():
                start = time.monotonic()
                answer = client.post("/v1/completions", json={"model": "alpha", "prompt": PROMPT, "max_tokens": 2})
                assert answer.status_code == 200, answer.text
                took.append(time.monotonic() - start)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took
    finally:
        is_over.set()
        thread.join()


def at_once(call: Callable[[], Any], count: int) -> list[Any]:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(call())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_text_that_is_too_long_is_refused_before_it_is_encoded(server: Server) -> None:
    before = peak(server)
    body = {"prompt": "word " * 1_200_000, "max_tokens": 1}
    start = time.monotonic()
    answer = server.post("/v1/completions", body)
    assert time.monotonic() - start < 2
    assert answer.status_code == 400
    assert message(answer).startswith("This model's maximum context length is 512 tokens")
    assert "no fewer than" in message(answer)
    messages = [{"role": "user", "content": body["prompt"]}]
    assert server.post("/v1/chat/completions", {"messages": messages}).status_code == 400

    # Nor is it where nobody waits for the answer.
    def leave() -> None:
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)

    at_once(leave, 6)
    wait_for_no_load(server)
    assert peak(server) - before < SPARE
    # As long as it can be.
    longest = server.complete("alpha", prompt="x" * 511, max_tokens=1)
    assert longest.status_code == 200, longest.text
    assert longest.json()["usage"]["prompt_tokens"] <= 511


def test_large_bodies_take_little_and_hold_nobody_up(server: Server) -> None:
    before = peak(server)
    bodies = [b'{"prompt": [' + b"0," * 15_000_000 + b"0]}", b'{"other": [' + b"0," * 15_000_000 + b"0]}"]
    with asking(server) as took:

        def send() -> list[httpx.Response]:
            # More values than a body may have, and ids of which there may be any number.
            return [httpx.post(f"{server.url}/v1/completions", content=it, headers=JSON, timeout=60) for it in bodies]

        answers = [answer for pair in at_once(send, 2) for answer in pair]
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [400, 400, 413, 413], [answer.text for answer in answers]
    for answer in answers:
        assert ("1048576` values" if answer.status_code == 413 else "has 15000001 input tokens") in message(answer)
    assert peak(server) - before < SPARE
    assert len(took) > 10
    assert max(took) < 2, max(took)


def test_large_bodies_have_so_much_room_together(start_server: StartServer) -> None:
    server = start_server()
    body = b'{"prompt": "' + b"x" * (31 << 20) + b'"}'
    head = f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode()
    held = [connect(server) for _ in range(2)]
    for connection in held:
        connection.sendall(head + body[:-1])
    # They have arrived as soon as there is no room left.
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=JSON, timeout=60)
    deadline = time.monotonic() + 20
    while answer.status_code != 503 and time.monotonic() < deadline:
        answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=JSON, timeout=60)
    assert answer.status_code == 503, answer.text
    assert answer.headers["retry-after"] == "1"
    assert Page(server).value("vllm:admission_rejections_total", reason="max_bodies") >= 1
    # Small ones, and those that were first, are as welcome as ever.
    assert server.complete(prompt=[5] * 500, max_tokens=1).status_code == 200
    for connection in held:
        connection.sendall(body[-1:])
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
        connection.close()
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=JSON, timeout=60)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stop": ["xyz"] * 1_000_000}, "1024 strings of 32768 bytes in all, got 1000000 of 3000000"),
        ({"stop": ["x" * 40_000]}, "got 1 of 40000"),
        ({"bad_words": ["xyz"] * 5000}, "4096 strings of 65536 bytes in all, got 5000 of 15000"),
    ],
)
def test_lists_have_bounds(server: Server, fields: dict[str, Any], told: str) -> None:
    answer = server.complete(**fields)
    assert answer.status_code == 400
    assert told in message(answer)


def test_lists_have_bounds_over_all_sequences(server: Server) -> None:
    before = peak(server)
    biases = {str(token): 1 for token in range(3, 288)}
    answer = server.complete(prompt=[PROMPT] * 16_000, logit_bias=biases, allowed_token_ids=[5] * 100_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    assert "`16000` sequences" in message(answer)
    assert peak(server) - before < SPARE


def test_many_stop_strings_and_bad_words_cost_neighbours_nothing(server: Server) -> None:
    source = random.Random(1)
    words = ["".join(source.choices("abcdefghij", k=30)) for _ in range(1000)]
    alone = server.text("alpha", max_tokens=200)
    assert server.text("alpha", max_tokens=200, stop=words) == alone
    assert server.text("alpha", max_tokens=200, bad_words=words) == alone

    def slow() -> None:
        assert server.text("alpha", max_tokens=400, stop=words, bad_words=words) == server.text("alpha", max_tokens=400)

    def took() -> float:
        start = time.monotonic()
        server.text("beta", max_tokens=50)
        return time.monotonic() - start

    usual = min(took() for _ in range(5))
    thread = threading.Thread(target=lambda: at_once(slow, 4))
    thread.start()
    beside = []
    while thread.is_alive():
        beside.append(took())
    thread.join()
    # A step has five rows now; a search through all strings at each token would be hundreds of times the step.
    assert min(beside) < 20 * usual + 0.2, (usual, beside)


def test_texts_to_tokens_and_back_have_bounds(server: Server) -> None:
    before = peak(server)
    answer = server.post("/tokenize", {"prompt": "word " * 1_200_000})
    assert answer.status_code == 400
    assert "the longest prompt has 512" in message(answer)
    # More than any prompt has is counted nevertheless.
    answer = server.post("/tokenize", {"prompt": "word " * 20_000})
    assert answer.status_code == 200
    assert answer.json()["count"] >= 20_000
    answer = server.post("/detokenize", {"tokens": [5] * 200_000})
    assert answer.status_code == 400
    assert "`200000` ids" in message(answer)
    assert server.post("/detokenize", {"tokens": [5] * 100_000}).status_code == 200
    assert peak(server) - before < SPARE


def test_texts_to_tokens_count_as_requests(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: few, key: k-few, requests_per_minute: 2}\n- {name: all, key: k-all}\n")
    server = start_server("--keys-file", str(keys))

    def statuses(path: str, body: dict[str, Any], key: str) -> list[int]:
        return [server.post(path, body, Authorization=f"Bearer {key}").status_code for _ in range(3)]

    assert statuses("/tokenize", {"prompt": "x"}, "k-few") == [200, 200, 429]
    assert statuses("/detokenize", {"tokens": [5]}, "k-few") == [429] * 3
    assert statuses("/tokenize", {"prompt": "x"}, "k-all") == [200] * 3


def test_a_48_an_adapter_that_goes_meanwhile_tells_nothing_of_others(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: one, key: k-one, adapters: [mine], base: false}")
    server = start_server(
        "--keys-file", str(keys), "--admin-api-key", "k-admin", "--lora-modules", f"secret={ADAPTERS / 'beta'}",
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="True",
    )  # fmt: skip
    manager, user = {"Authorization": "Bearer k-admin"}, {"Authorization": "Bearer k-one"}
    # Looked at after the name was, and for long.
    source = random.Random(2)
    words = ["".join(source.choices("abcdefghij", k=15)) for _ in range(4000)]
    body = {"model": "mine", "prompt": PROMPT, "max_tokens": 1, "bad_words": words}
    refused: list[str] = []
    for _ in range(20):
        loaded = server.post("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "alpha"}, **manager)
        assert loaded.status_code == 200, loaded.text

        def ask() -> None:
            answer = server.post("/v1/completions", body, **user)
            if answer.status_code != 200:
                refused.append(answer.text)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.02)
        server.post("/v1/unload_lora_adapter", {"lora_name": "mine"}, **manager)
        thread.join()
        if len(refused) > 2:
            break
    assert refused
    for text in refused:
        assert "The model `mine` does not exist." in text
        assert "secret" not in text
