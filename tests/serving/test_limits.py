"""Requests that would take more than their share of memory or time: refused, and nobody else is held up."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from .conftest import PROMPT, Server, StartServer
from .test_bad_requests import HEAD, JSON, connect, wait_for_no_load
from .test_metrics import Page, until

MIB = 1 << 20
SMOLLM2 = os.environ.get("MANYLORA_SMOLLM2", "")
# What a server may take beyond what it has, whatever comes: room for the bodies, and for what is made of them. Two of
# the dearest take 340 MiB, and what one of the allocator's arenas was given back another one does not use; forty would
# take 7 GiB.
SPARE = 600 * MIB


def memory(server: Server, field: str) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{field}:"))


@contextlib.contextmanager
def little_is_taken(server: Server) -> Iterator[None]:
    """Let nothing take more than may be taken. The server must be new: what it has given back it takes again unseen."""
    # The highest of what it has had is what it has now.
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    before = memory(server, "VmRSS")
    yield
    taken = memory(server, "VmHWM") - before
    assert taken < SPARE, f"{taken / MIB:.0f} MiB"


@pytest.fixture
def new_server(start_server: StartServer) -> Server:
    return start_server("--lora-modules", "alpha=alpha", "beta=beta")


def message(answer: httpx.Response) -> str:
    text: str = answer.json()["error"]["message"]
    return text


@contextlib.contextmanager
def asking(server: Server) -> Iterator[list[str]]:
    """Ask for short answers all the time; what comes out is what they were."""
    texts: list[str] = []
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not is_over.is_set():
                answer = client.post("/v1/completions", json={"model": "alpha", "prompt": PROMPT, "max_tokens": 2})
                assert answer.status_code == 200, answer.text
                texts.append(answer.json()["choices"][0]["text"])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield texts
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


def test_a_text_that_is_too_long_is_refused_before_it_is_encoded(new_server: Server) -> None:
    server = new_server
    body = {"prompt": "word " * 1_200_000, "max_tokens": 1}
    with little_is_taken(server):
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 400
        assert message(answer).startswith("This model's maximum context length is 512 tokens")
        # Nobody counted them.
        assert "no fewer than" in message(answer)
        messages = [{"role": "user", "content": body["prompt"]}]
        assert server.post("/v1/chat/completions", {"messages": messages}).status_code == 400
        # Nor does it wait for a grammar, or for one to be refused.
        answer = server.post("/v1/completions", body | {"structured_outputs": {"regex": "("}})
        assert "no fewer than" in message(answer)

        # Nor is it where nobody waits for the answer.
        def leave() -> None:
            with contextlib.suppress(httpx.TimeoutException):
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)

        at_once(leave, 6)
        wait_for_no_load(server)
    # As long as it can be.
    longest = server.complete("alpha", prompt="x" * 511, max_tokens=1)
    assert longest.status_code == 200, longest.text
    assert longest.json()["usage"]["prompt_tokens"] <= 511


def test_large_bodies_take_little_and_hold_nobody_up(new_server: Server) -> None:
    server = new_server
    bodies = [b'{"prompt": [' + b"0," * 15_000_000 + b"0]}", b'{"other": [' + b"0," * 15_000_000 + b"0]}"]

    def send() -> list[httpx.Response]:
        # More values than a body may have, and ids of which there may be any number.
        return [httpx.post(f"{server.url}/v1/completions", content=it, headers=JSON, timeout=60) for it in bodies]

    with little_is_taken(server), asking(server) as texts:
        # Until enough others were answered meanwhile.
        for _ in range(20):
            before = len(texts)
            answers = [answer for pair in at_once(send, 2) for answer in pair]
            statuses = sorted(answer.status_code for answer in answers)
            assert statuses == [400, 400, 413, 413], [answer.text for answer in answers]
            for answer in answers:
                told = "1048576` values" if answer.status_code == 413 else "has 15000001 input tokens"
                assert told in message(answer)
            if len(texts) - before > 10:
                break
        else:
            pytest.fail("nobody else was answered")


def test_bodies_of_many_values_have_so_much_room_together(new_server: Server) -> None:
    server = new_server
    # As many values as a body may have, and the dearest of them.
    most = 1 << 20
    zeros = b"0," * (most - 100) + b"0"
    bodies = [
        b'{"prompt": [5], "max_tokens": 1, "other": [' + zeros + b"]}",
        b'{"prompt": [5], "max_tokens": 1, "other": [' + b'{"":0},' * (most // 6 - 100) + b"0]}",
    ]
    # Where they are looked at, and not only passed over.
    said = b'"messages": [{"role": "user", "content": "x", "name": %s}], "max_tokens": 1'
    chats = [
        b"{" + said % (b"[" + zeros + b"]") + b"}",
        b"{" + said % b"1" + b', "chat_template_kwargs": {"a": [' + zeros + b"]}}",
        b"{" + said % b"1" + b', "tool_choice": "none", ' + tools_with(zeros) + b"}",
    ]
    with little_is_taken(server), asking(server) as texts:
        before = len(texts)
        for path, body in [("completions", body) for body in bodies] + [("chat/completions", body) for body in chats]:
            send = functools.partial(httpx.post, f"{server.url}/v1/{path}", content=body, headers=JSON, timeout=120)
            answers = at_once(send, 40)
            statuses = {answer.status_code for answer in answers}
            assert statuses <= {200, 503}, statuses
            assert 200 in statuses
        until(lambda: len(texts) > before)
    assert httpx.post(f"{server.url}/v1/completions", content=bodies[0], headers=JSON, timeout=60).status_code == 200


def tools_with(values: bytes) -> bytes:
    """Give a tool whose schema has these values."""
    return b'"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [' + values + b"]}}}]"


def test_what_waits_keeps_nothing_of_its_tools(start_server: StartServer) -> None:
    server = start_server("--max-num-seqs", "1")
    values = b"0," * ((1 << 20) - 100) + b"0"
    body = (
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tool_choice": "none", '
        + tools_with(values)
        + b"}"
    )

    def post(path: str, content: bytes) -> int:
        return httpx.post(f"{server.url}/v1/{path}", content=content, headers=JSON, timeout=300).status_code

    def ask(path: str, content: bytes) -> None:
        with contextlib.suppress(httpx.TransportError):
            while post(path, content) == 503:
                pass

    def answering(count: int) -> bool:
        return bool(server.client.get("/load").json()["server_load"] == count)

    # It has minutes to run.
    long = b'{"prompt": [5], "n": 4000, "max_tokens": 500, "ignore_eos": true, "temperature": 1}'
    threads = [threading.Thread(target=ask, args=("completions", long))]
    threads += [threading.Thread(target=ask, args=("chat/completions", body)) for _ in range(16)]
    with little_is_taken(server):
        threads[0].start()
        until(lambda: Page(server).value("vllm:num_requests_waiting") > 3000)
        for thread in threads[1:]:
            thread.start()
        # One more that is as large is read once they have been; who found no room meanwhile comes again.
        one_more = b'{"prompt": {}, "other": [' + values + b"]}"
        until(lambda: post("completions", one_more) == 400 and answering(len(threads)))
    server.process.kill()
    for thread in threads:
        thread.join()


def test_logprobs_of_prompts_have_so_much_room_together(new_server: Server) -> None:
    server = new_server
    prompt = [[5 + (row * 7 + at) % 250 for at in range(500)] for row in range(100)]
    listing = {"max_tokens": 1, "prompt_logprobs": 20}
    with little_is_taken(server), asking(server) as texts:
        before = len(texts)
        for fields in (listing, {"max_tokens": 0, "echo": True, "logprobs": 20}):
            answer = server.complete(prompt=prompt, **fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "prompt_logprobs"
            assert "would list `1050000` tokens" in message(answer)
            assert "may list 1048576" in message(answer)
            # As many as they may be.
            answer = server.complete(prompt=prompt[:99], **fields)
            assert answer.status_code == 200, answer.text
            assert [choice["index"] for choice in answer.json()["choices"]] == list(range(99))
        # Many have more than a few, and some have to wait.
        ask = functools.partial(server.complete, prompt=prompt[:20], **listing)
        answers = at_once(ask, 16)
        assert [answer.status_code for answer in answers] == [200] * 16
        assert len({answer.text.partition("choices")[2] for answer in answers}) == 1
        until(lambda: len(texts) > before)
    choices = answers[0].json()["choices"]
    for choice, ids in zip(choices, prompt, strict=False):
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [next(iter(records)) for records in others] == [str(token) for token in ids[1:]]
        assert {len(records) for records in others} <= {20, 21}


def test_logprobs_of_an_answer_have_a_bound(start_server: StartServer) -> None:
    server = start_server("--max-logprobs", "-1")
    # 288 tokens are all there are.
    answer = server.complete(prompt=[[5] * 500] * 8, prompt_logprobs=-1)
    assert answer.status_code == 400
    assert "would list `1152000` tokens" in message(answer)
    many: dict[str, Any] = {"n": 16, "temperature": 1, "max_tokens": 400, "logprobs": -1}
    with little_is_taken(server):
        answer = server.complete(**many)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "logprobs"
        assert "list more than 1048576 tokens" in message(answer)
        body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "logprobs": True}
        answer = server.post("/v1/chat/completions", body | many | {"top_logprobs": -1})
        assert answer.status_code == 400
    # Of what it listed nothing runs on.
    until(lambda: Page(server).value("vllm:num_requests_running") == 0)
    answer = server.complete(**many | {"n": 8})
    assert answer.status_code == 200
    for choice in answer.json()["choices"]:
        assert len(choice["logprobs"]["tokens"]) == 400
        assert {len(listed) for listed in choice["logprobs"]["top_logprobs"]} == {
            len(choice["logprobs"]["top_logprobs"][0])
        }


def test_names_that_come_again_cost_what_others_do(new_server: Server) -> None:
    # Were those between moved up each time, these would keep the server for minutes.
    names = "".join(f'"{name}":0,' for name in range(17_000))
    small = f"{{{names}{names}"[: 250 << 10].rsplit(",", 1)[0] + ', "prompt": [5], "max_tokens": 1}'
    names = "".join(f'"{name}":0,' for name in range(250_000))
    large = f'{{{names}{names}"prompt": [5], "max_tokens": 1}}'
    for body in (small, large):
        send = functools.partial(httpx.post, f"{new_server.url}/v1/completions", content=body, headers=JSON, timeout=60)
        statuses = {answer.status_code for answer in at_once(send, 4)}
        assert statuses <= {200, 503}
        assert 200 in statuses


def test_samples_share_their_prompt(start_server: StartServer) -> None:
    if not SMOLLM2:
        leave_out = pytest.fail if os.environ.get("MANYLORA_REQUIRE_DATA") else pytest.skip
        leave_out("MANYLORA_SMOLLM2 is not set")
    # Room for one of them, which never comes to its end here.
    server = start_server("--kv-cache-memory-bytes", str(1 << 30), "--max-num-batched-tokens", "64", base=SMOLLM2)
    prompt = [1000 + number for number in range(8000)]
    body = {"prompt": prompt, "max_tokens": 8, "n": 16_384, "temperature": 1, "repetition_penalty": 1.1}

    def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)

    thread = threading.Thread(target=ask)
    with little_is_taken(server):
        thread.start()
        until(lambda: sum(Page(server).value(f"vllm:num_requests_{it}") for it in ("running", "waiting")) >= 16_384)
    server.process.kill()
    thread.join()


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


def test_lists_have_bounds_over_all_sequences(new_server: Server) -> None:
    biases = {str(token): 1 for token in range(3, 288)}
    for fields in (
        {"prompt": [PROMPT] * 16_000, "logit_bias": biases, "allowed_token_ids": [5] * 100_000},
        # What the answers would repeat.
        {"prompt": "x" * 500, "n": 16_384, "temperature": 1, "echo": True, "return_token_ids": True},
        {"prompt": [5] * 500, "n": 16_384, "temperature": 1, "echo": True, "return_token_ids": True},
        {"prompt": [PROMPT] * 16_000, "cache_salt": "x" * 1000, "logit_bias": biases, "bad_words": ["x" * 1000]},
    ):
        with little_is_taken(new_server):
            answer = new_server.complete(**fields)
        assert answer.status_code == 400, fields
        assert answer.json()["error"]["param"] == "n"
        assert f"`{16_384 if 'n' in fields else 16_000}` sequences" in message(answer)
        assert "67108864" in message(answer)
    answer = new_server.complete(cache_salt="x" * 1025)
    assert answer.status_code == 400
    assert "`1025` characters" in message(answer)
    # Before they are made.
    answer = new_server.complete(prompt=["x"] * 500_000)
    assert answer.status_code == 400
    assert "`500000` sequences" in message(answer)


def test_many_stop_strings_and_bad_words_cost_neighbours_nothing(server: Server) -> None:
    source = random.Random(1)
    words = ["".join(source.choices("abcdefghij", k=30)) for _ in range(1000)]
    alone = server.text("alpha", max_tokens=200)
    assert server.text("alpha", max_tokens=200, stop=words) == alone
    assert server.text("alpha", max_tokens=200, bad_words=words) == alone

    def slow() -> None:
        assert server.text("alpha", max_tokens=400, stop=words, bad_words=words) == server.text("alpha", max_tokens=400)

    thread = threading.Thread(target=lambda: at_once(slow, 4))
    thread.start()
    beside = 0
    while thread.is_alive():
        server.text("beta", max_tokens=50)
        beside += 1
    thread.join()
    # An eighth of the steps that one of the others has, and they have two each.
    assert beside > 4


def test_texts_to_tokens_and_back_have_bounds(new_server: Server) -> None:
    server = new_server
    with little_is_taken(server):
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


def test_texts_to_tokens_count_as_requests(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: few, key: k-few, requests_per_minute: 2}\n- {name: all, key: k-all}\n")
    server = start_server("--keys-file", str(keys))

    def statuses(path: str, body: dict[str, Any], key: str) -> list[int]:
        return [server.post(path, body, Authorization=f"Bearer {key}").status_code for _ in range(3)]

    assert statuses("/tokenize", {"prompt": "x"}, "k-few") == [200, 200, 429]
    assert statuses("/detokenize", {"tokens": [5]}, "k-few") == [429] * 3
    assert statuses("/tokenize", {"prompt": "x"}, "k-all") == [200] * 3
