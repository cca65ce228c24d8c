"""What is wrong with a request is said with its place, and hurts nobody else."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import Any

import httpx2 as httpx
import pytest

from .conftest import PROMPT, Server, StartServer
from .test_metrics import Page

JSON = {"Content-Type": "application/json"}
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def raw(server: Server, body: bytes, **headers: str) -> Any:
    return server.client.post("/v1/completions", content=body, headers=JSON | headers)


def address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(address(server), 60)


def wait_for_no_load(server: Server) -> None:
    deadline = time.monotonic() + 10
    while server.client.get("/load").json()["server_load"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.client.get("/load").json()["server_load"] == 0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"model": "base", # a comment\n "prompt": "x"}', ["line 1, column 19", "# a comment", "no comments"]),
        (b'{"model": "base",\n  // a comment\n "prompt": "x"}', ["line 2, column 3", "// a comment", "no comments"]),
        (b'{"model": "base",\n "prompt": }', ["line 2, column 12", "near `}`"]),
        (b'{"model": "base"', ["line 1"]),
        (b"", ["line 1"]),
        (b"[1, 2]", ["JSON object"]),
        (b'{"prompt": "\xff"}', ["line 1"]),
        (b"[" * 5000, ["recursion limit"]),
    ],
)
def test_what_is_not_json_is_told_with_its_place(server: Server, body: bytes, told: list[str]) -> None:
    answer = raw(server, body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert all(part in message for part in told), message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 10**14}, "n"),
        ({"n": 10**30}, "n"),
        ({"prompt": [[5]] * 16_385}, "n"),
        ({"prompt": [[5]] * 200, "n": 100}, "n"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"suffix": "end"}, "suffix"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"guided_json": {"type": "object"}, "guided_regex": "a"}, "guided_regex"),
        ({"length_penalty": 1.5}, "length_penalty"),
        ({"length_penalty": "x"}, "length_penalty"),
        ({"model": 3}, "model"),
        ({"lora_scale": "strong"}, "lora_scale"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"prompt": [5] * 600}, "prompt"),
        # Who is served first is not decided by priorities here.
        ({"priority": 1}, "priority"),
    ],
)
def test_wrong_fields_are_named(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = server.complete("alpha", **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"logprobs": 1000}, "logprobs"),
        ({"prompt": [100000]}, "out of vocabulary"),
        (
            {"prompt": [5] * 600},
            "This model's maximum context length is 512 tokens. However, your request has 600 input",
        ),
        ({"prompt": ""}, "empty"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ],
)
def test_wrong_values_are_explained(server: Server, fields: dict[str, Any], told: str) -> None:
    answer = server.complete("base", **fields)
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]


def test_prompts_of_messages_are_too_long_by_their_own_field(server: Server) -> None:
    body = {"model": "alpha", "messages": [{"role": "user", "content": "x y " * 3000}]}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert answer.json()["error"]["message"].startswith("This model's maximum context length is 512 tokens.")


def test_priorities_are_for_servers_that_have_them(start_server: StartServer, server: Server) -> None:
    header = {"X-Vllm-Priority": "3"}
    chat = {"model": "base", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    completion = {"model": "base", "prompt": PROMPT, "max_tokens": 1}
    for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
        for headers, more in ((header, {}), ({}, {"priority": -2}), ({"X-Vllm-Priority": "0"}, {"priority": 4})):
            refused = server.post(path, body | more, **headers)
            assert refused.status_code == 400, (path, headers, more)
            assert refused.json()["error"]["param"] == "priority"
            assert "priority scheduling is not enabled" in refused.json()["error"]["message"]
        # The body's own counts where there are both; 0 is as good as none.
        assert server.post(path, body | {"priority": 0}, **header).status_code == 200
        assert server.post(path, body, **{"X-Vllm-Priority": "soon"}).status_code == 400
    other = start_server("--scheduling-policy", "priority", "--max-num-seqs", "1")
    order: list[int] = []

    def ask(priority: int) -> None:
        # The first has many samples, which run one after the other, so that the others come meanwhile.
        more = {"max_tokens": 400, "ignore_eos": True, "temperature": 1, "n": 1 if priority else 32}
        assert other.post("/v1/completions", completion | more, **{"X-Vllm-Priority": str(priority)}).status_code == 200
        order.append(priority)

    threads = [threading.Thread(target=ask, args=[priority], daemon=True) for priority in (0, 3, 2, 1)]
    for count, thread in enumerate(threads):
        thread.start()
        while other.client.get("/load").json()["server_load"] <= count:
            assert not order, "the first request is over before the others have come"
    for thread in threads:
        thread.join()
    # By priority, and not as they came.
    assert order == [0, 1, 2, 3]


def test_unknown_fields_pass(server: Server) -> None:
    assert server.text(
        "alpha", user="me", something_new={"a": 1}, truncate_prompt_tokens=None, length_penalty=1
    ) == server.text("alpha")


def test_only_json_is_taken(server: Server) -> None:
    answer = server.client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert "Only 'application/json' is allowed" in answer.json()["error"]["message"]


def test_methods_and_paths_that_are_not_there(server: Server) -> None:
    answer = server.client.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == 405
    assert server.client.get("/v1").status_code == 404
    answer = server.client.get("/v1/models/%ff")
    assert answer.status_code == answer.json()["error"]["code"] == 400


@pytest.mark.parametrize("told", [True, False], ids=["its length is told", "in chunks"])
def test_large_bodies_are_refused_and_the_server_lives(server: Server, told: bool) -> None:
    connection = connect(server)
    length, chunk = 100 << 20, b"x" * (1 << 20)
    framing = f"Content-Length: {length}" if told else "Transfer-Encoding: chunked"
    connection.sendall(f"{HEAD}{framing}\r\n\r\n".encode())
    sent = 0
    # The answer comes before the body is whole, and ends the connection.
    with contextlib.suppress(ConnectionError):
        while sent < length:
            connection.sendall(chunk if told else b"100000\r\n" + chunk + b"\r\n")
            sent += len(chunk)
    assert sent < length
    with contextlib.suppress(ConnectionError):
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"33554432" in answer
    connection.close()
    assert server.complete().status_code == 200


def test_a_large_body_is_told_its_limit(server: Server) -> None:
    answer = raw(server, b'{"prompt": "' + b"x" * (33 << 20) + b'"}')
    assert answer.status_code == 413
    assert "33554432" in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"


def test_slow_and_broken_clients_hold_nobody_up(server: Server) -> None:
    beginnings = (
        b"",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
        b"\x00\xff garbage\r\n\r\n",
        # A body of which little comes.
        HEAD.encode() + b'Content-Length: 100000\r\n\r\n{"prompt": ',
        HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        # Whose chunks are none.
        HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        HEAD.encode() + b"Content-Length: -1\r\n\r\n",
        HEAD.encode() + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n{}",
        b"GET /" + b"x" * 10_000,
    )
    stuck = [connect(server) for _ in range(90)]
    for number, connection in enumerate(stuck):
        connection.sendall(beginnings[number % len(beginnings)])
    for _ in range(5):
        # Sooner than the server would have sent them away.
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}, timeout=30)
        assert answer.status_code == 200
    # A drop at a time is no answer either.
    for connection in stuck:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"X")
    assert server.complete().status_code == 200
    for connection in stuck:
        connection.close()
    assert server.complete().status_code == 200


def test_heads_have_bounds(server: Server) -> None:
    for head, status in (
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"414"),
        (b"GET /health HTTP/9.9\r\n\r\n", b"400"),
    ):
        connection = connect(server)
        with contextlib.suppress(ConnectionError):
            connection.sendall(head)
            assert connection.recv(1000).split()[1] == status, head[:60]
            while connection.recv(1000):
                pass
        connection.close()
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("line", "status"),
    [("POST /nowhere", b"404"), ("PUT /v1/completions", b"405"), ("POST /v1/load_lora_adapter", b"404")],
)
def test_a_refused_body_does_not_cost_the_connection(server: Server, line: str, status: bytes) -> None:
    connection = connect(server)
    connection.sendall(
        f"{line} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\n".encode()
    )
    time.sleep(0.2)
    connection.sendall(b"{  }")
    answer = connection.recv(10_000)
    assert answer.split()[1] == status
    assert b"connection: close" not in answer.lower()
    connection.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
    assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
    connection.close()


def test_who_never_reads_a_stream_holds_nobody_up(server: Server) -> None:
    body = {"prompt": [PROMPT] * 4, "n": 4, "max_tokens": 480, "ignore_eos": True, "stream": True, "logprobs": 20}
    text = json.dumps(body).encode()
    deaf = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(address(server))
        connection.sendall(f"{HEAD}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        deaf.append(connection)
    for connection in deaf:
        # It has begun.
        assert connection.recv(100)
    expected = server.text("alpha")
    for _ in range(3):
        assert server.text("alpha") == expected
    for connection in deaf:
        connection.close()
    wait_for_no_load(server)


def test_one_disconnect_frees_its_rows(start_server: StartServer) -> None:
    server = start_server("--lora-modules", "alpha=alpha", VLLM_ALLOW_RUNTIME_LORA_UPDATING="True")

    def held() -> dict[str, float]:
        page = Page(server)
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return {name: page.value(f"vllm:{name}") for name in gauges}

    # It would run for many times as long as anything here takes.
    prompts, most = 2048, 480
    body = {"model": "alpha", "prompt": [PROMPT] * prompts, "max_tokens": most, "ignore_eos": True, "stream": True}
    text = json.dumps(body).encode()
    connection = connect(server)
    connection.sendall(f"{HEAD}Content-Length: {len(text)}\r\n\r\n".encode() + text)
    assert b"200 OK" in connection.recv(1000)
    assert min(held().values()) > 0
    assert Page(server).adapters_in_requests() == ("alpha", "alpha")
    connection.close()
    wait_for_no_load(server)
    # The engine answers between steps: the first one after the server let go has none of its rows, blocks and leases.
    page = Page(server)
    assert set(held().values()) == {0}
    assert page.adapters_in_requests() == ("", "")
    steps = page.value("vllm:iteration_tokens_total_count")
    assert page.value("vllm:generation_tokens_total") < prompts * most / 2
    assert page.value("vllm:request_success_total", finished_reason="abort") > prompts / 2
    assert server.unload("alpha", timeout=20).status_code == 200
    assert Page(server).value("manylora:adapters_resident", tier="host") == 0
    assert Page(server).value("vllm:iteration_tokens_total_count") == steps


def test_too_many_are_sent_away_for_a_moment(start_server: StartServer) -> None:
    server = start_server("--max-pending", "2")
    # More than may wait, but alone it may run: it takes long beside what asking again takes.
    long = {"prompt": [PROMPT] * 48, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=long) as running:
        assert running.status_code == 200, running.read()
        answer = server.complete()
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "max_pending" in answer.json()["error"]["message"]
        running.read()
    assert server.complete().status_code == 200
